"""Decides which peer serves which stage: at the start, at a join, and by moves.

A pipeline is as fast as its slowest stage. The speed of a stage is the sum of its
peers' speeds. By SWARM's rule (section 3.2), the stage with least load gives its peer
with the shortest queue to the stage with most load. The rule ``OPTIMUM`` instead
moves peers so that the slowest stage gets as fast as possible. It never exchanges two
peers; ``best_stages`` does at the start. ``Rebalancer`` decides whether a move is worth
its cost.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text


UNPROVOKED: Final = 5.0  # factor of the threshold for moves without joins and leaves
HORIZON_SECONDS: Final = 600.0
"""Seconds within which a move, or a wait for a peer, must regain its cost."""
ROUNDING: Final = 1e-9  # smaller relative differences of speeds count as equal


class Rule(StrEnum):
    """Rules of moves: the paper's rule, moves towards the optimum, or no moves."""

    NONE = "none"
    PAPER = "paper"
    OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """A peer with its published load.

    Attributes:
        peer: Name of the peer.
        stage: Number of the stage that it serves.
        queue_length: Number of its waiting and running calls, as last announced. In
            simulations, the mean number since the last check.
        speeds: Micro-batches per second that it would compute in each stage, forward
            and backward, with the time on its links.
        held: Number of micro-batches of the current step whose gradients it has. Others
            recompute these if it moves.
    """

    peer: str
    stage: int
    queue_length: float
    speeds: tuple[float, ...]
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMove:
    """Move of a peer to another stage.

    Attributes:
        peer: Name of the peer.
        source: Stage that it leaves.
        target: Stage that it will serve.
        speed_before: Micro-batches per second of the pipeline before the move.
        speed_after: Micro-batches per second after this move and all that follow it.
        moves: Number of moves, including all that follow.
    """

    peer: str
    source: int
    target: int
    speed_before: float
    speed_after: float
    moves: int = 1


def stage_speeds(peers: Sequence[PeerLoad], stages: int) -> list[float]:
    """Returns the micro-batches per second of each stage, summed over its peers."""
    speeds = [0.0] * stages
    for peer in peers:
        speeds[peer.stage] += peer.speeds[peer.stage]
    return speeds


def newcomer_stage(peers: Sequence[PeerLoad], stages: int) -> int:
    """Returns the stage of a joining peer: the first of the slowest stages.

    Args:
        peers: Peers of the swarm; moving ones count at their target.
        stages: Number of stages of the model.
    """
    speeds = stage_speeds(peers, stages)
    counts = _counts(peers, stages)
    return min(range(stages), key=lambda s: (counts[s] > 0, speeds[s], s))


def pays_to_wait(lost: Sequence[float], serving: int, seconds: float) -> bool:
    """Returns whether a step should wait for peers that download its state.

    A wait costs each serving peer ``seconds``. Without it, joining peers must download
    the next step's state instead. A wait pays if it costs no more peer-seconds than the
    joining peers offer: for each, ``HORIZON_SECONDS`` plus the time it has lost. So at
    some time a step waits for each joining peer.

    Args:
        lost: For each joining peer, seconds since it could have begun to serve.
        serving: Peers that have the state.
        seconds: Seconds until the last joining peer should have the state.

    Example:
        >>> pays_to_wait([0.0], 5, 30.0), pays_to_wait([0.0], 400, 30.0)
        (True, False)
    """
    return serving * seconds <= sum(HORIZON_SECONDS + one for one in lost)


def paper_move(peers: Sequence[PeerLoad], stages: int) -> PeerMove | None:
    """Returns the move of the paper's rule, by queues, or None.

    A stage's load is the number of its waiting and running calls. A stage without peers
    has the largest load. There is no move if all stages with less load have only one
    peer.

    Args:
        peers: All peers.
        stages: Number of stages of the model.
    """
    counts = _counts(peers, stages)
    loads = [0.0] * stages
    for peer in peers:
        loads[peer.stage] += peer.queue_length
    target = max(range(stages), key=lambda s: (counts[s] == 0, loads[s], -s))
    sources = [s for s in range(stages) if s != target and counts[s] > 1]
    if not sources:
        return None
    source = min(sources, key=lambda s: (loads[s], -counts[s], s))
    if counts[target] and loads[source] >= loads[target]:
        return None
    mover = min(
        (peer for peer in peers if peer.stage == source),
        key=lambda peer: (peer.queue_length, peer.peer),
    )
    return _move(peers, stages, mover, target)


def optimum_move(peers: Sequence[PeerLoad], stages: int) -> PeerMove | None:
    """Returns the first move towards the fastest pipeline; None if none is faster.

    If several stages are equally slow, each needs a move before the pipeline gets
    faster. So ``speed_after`` is the speed after ``moves`` moves, at most one per
    stage.

    Args:
        peers: All peers.
        stages: Number of stages of the model.
    """
    sums = stage_speeds(peers, stages)
    counts = _counts(peers, stages)
    placed = {peer.peer: peer.stage for peer in peers}
    before = best = min(sums)
    first: tuple[PeerLoad, int] | None = None
    result: PeerMove | None = None
    # One move per stage can speed up all equally slow stages. Later checks find more
    # moves.
    for moves in range(1, stages + 1):
        step = _best_step(peers, placed, sums, counts)
        if step is None:
            break
        mover, target = step
        source = placed[mover.peer]
        sums[source] -= mover.speeds[source]
        sums[target] += mover.speeds[target]
        counts[source] -= 1
        counts[target] += 1
        placed[mover.peer] = target
        first = first or step
        if min(sums) > best * (1 + ROUNDING):
            best = min(sums)
            result = PeerMove(
                peer=first[0].peer,
                source=first[0].stage,
                target=first[1],
                speed_before=before,
                speed_after=best,
                moves=moves,
            )
    return result


def best_counts(peers: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Returns each stage's number of equal peers for the fastest pipeline.

    Each peer in turn goes to the slowest stage. This is exact: if a stage has more
    peers than in another split, it was the slowest when it got the last one. So the
    other split's slowest stage is no faster.

    Args:
        peers: Number of peers.
        seconds: Seconds of a peer for a micro-batch in each stage.

    Raises:
        WhaleError: There are too few peers, or a value of ``seconds`` is not above 0.

    Example:
        >>> best_counts(8, [1.0, 2.0, 1.0])
        (2, 4, 2)
    """
    if not seconds or not min(seconds) > 0:
        raise WhaleError(
            f"peers of stages: stages take {list(seconds)} seconds; expected one "
            "number above 0 for each stage"
        )
    if peers < len(seconds):
        raise WhaleError(_too_few_peers(peers, len(seconds)))
    counts = [1] * len(seconds)
    for _ in range(peers - sum(counts)):
        slowest = min(
            range(len(seconds)), key=lambda s: (counts[s] / seconds[s], -seconds[s], s)
        )
        counts[slowest] += 1
    return tuple(counts)


def _too_few_peers(peers: int, stages: int) -> str:
    return (
        f"peers of stages: {count_text(peers, 'peer')} for "
        f"{count_text(stages, 'stage')}; each stage needs one. Have more peers, or "
        "fewer stages"
    )


def best_stages(speeds: Mapping[str, Sequence[float]], stages: int) -> dict[str, int]:
    """Returns a stage for each peer, so that the slowest stage is as fast as possible.

    The result is exact for equal peers. The problem for unequal peers is NP-hard: they
    are placed fastest first, then moved and exchanged while that helps.

    Args:
        speeds: Micro-batches per second of each peer, in each stage.
        stages: Number of stages of the model.

    Raises:
        WhaleError: There are fewer peers than stages, or a speed is not above 0.
    """
    if len(speeds) < stages:
        raise WhaleError(_too_few_peers(len(speeds), stages))
    for peer, each in speeds.items():
        if not min(each) > 0:
            raise WhaleError(
                f"peers of stages: {peer} has the speeds {list(each)}; expected "
                "numbers above 0"
            )
    placed: dict[str, int] = {}
    sums, counts = [0.0] * stages, [0] * stages
    # A stage's cost scales the speeds of all peers alike, and drops out of the order by
    # their products over stages.
    order = sorted(speeds, key=lambda p: (-math.fsum(map(math.log, speeds[p])), p))
    for left, peer in zip(range(len(order), 0, -1), order, strict=True):
        empty = [s for s in range(stages) if not counts[s]]
        open_stages = empty if len(empty) >= left else list(range(stages))
        stage = min(open_stages, key=lambda s: (sums[s], _relative(speeds, peer, s), s))
        placed[peer] = stage
        sums[stage] += speeds[peer][stage]
        counts[stage] += 1
    while _improve(speeds, placed, stages):
        pass
    return placed


def pipeline_speed(
    speeds: Mapping[str, Sequence[float]], placed: Mapping[str, int], stages: int
) -> float:
    """Returns the micro-batches per second of the slowest stage."""
    return min(_sums(speeds, placed, stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """Costs of a move, during which the moving peer computes nothing.

    Attributes:
        state_bytes: Bytes of parameters and optimizer state of the target stage.
        bytes_per_second: Rate of the peer's link.
        compile_seconds: Seconds to compile the programs of the target stage.
    """

    state_bytes: int
    bytes_per_second: float
    compile_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds from leaving to serving."""
        return self.download_seconds + self.compile_seconds

    @property
    def download_seconds(self) -> float:
        """Seconds of downloading the state."""
        return self.state_bytes / self.bytes_per_second


class Rebalancer:
    """Checks the peers periodically and chooses at most one move at a time.

    A move to a stage without peers is always worth it. Another move must raise the
    speed of the pipeline by a threshold. Within a horizon, it must also gain more than
    the peer's absence and its lost gradients cost. Only one peer moves at a time. A
    moved peer does not move back until peers have joined or left, so noisy measurements
    cannot make it oscillate. Each join or leave allows one move at this threshold.
    Other moves need five times as much.
    """

    def __init__(
        self,
        *,
        stages: int,
        rule: Rule = Rule.OPTIMUM,
        period: float = 60.0,
        threshold: float = 0.02,
        horizon: float = HORIZON_SECONDS,
    ) -> None:
        """Starts without moves.

        Args:
            stages: Number of stages of the model.
            rule: Rule of moves.
            period: Seconds between checks.
            threshold: Minimum gain of a move, as a fraction of the speed before it.
            horizon: Seconds within which a move must regain its cost.

        Raises:
            WhaleError: A number is out of its range.
        """
        if stages < 1 or not period > 0 or threshold < 0 or not horizon > 0:
            raise WhaleError(
                f"rebalancing: {count_text(stages, 'stage')}, period {period} s, "
                f"threshold {threshold}, horizon {horizon} s; there must be a stage, "
                "seconds above 0, and a threshold of at least 0"
            )
        self.stages, self.rule, self.period = stages, rule, period
        self.threshold, self.horizon = threshold, horizon
        self._looked = -math.inf
        self._moving: tuple[str, int, float] | None = None
        self._left: dict[str, set[int]] = {}
        self._present: frozenset[str] = frozenset()
        self._changes = 0

    def is_due(self, now: float) -> bool:
        """Whether a check is due and no peer is moving.

        Args:
            now: Current time in seconds.
        """
        is_moving = self._moving is not None and now < self._moving[2]
        return now >= self._looked + self.period and not is_moving

    def decide(
        self,
        peers: Sequence[PeerLoad],
        now: float,
        costs: Sequence[MoveCost],
        present: Collection[str] = (),
    ) -> PeerMove | None:
        """Returns the move to make now, or None; the peer then counts as moving.

        Args:
            peers: Serving peers, without a moving peer.
            now: Current time in seconds.
            costs: Costs of a move to each stage.
            present: Names of all present peers, including those that temporarily serve
                no stage; default: those of ``peers``.
        """
        if self.rule is Rule.NONE or not peers:
            return None
        # If a stage has no peer, nothing runs, so do not wait for the next check.
        is_whole = 0 not in _counts(peers, self.stages)
        if is_whole and not self.is_due(now):
            return None
        if self._moving is not None and now < self._moving[2]:
            return None
        self._looked, self._moving = now, None
        here = frozenset(present) or frozenset(peer.peer for peer in peers)
        if here != self._present:
            # The peers at the first check do not count as joins.
            self._changes += len(here ^ self._present) if self._present else 0
            self._present = here
            self._left.clear()
        choose = paper_move if self.rule is Rule.PAPER else optimum_move
        move = choose(peers, self.stages)
        if move is None or not self._pays(move, peers, costs[move.target]):
            return None
        # A move that takes much too long has failed, so another peer may move.
        until = now + 2 * costs[move.target].seconds + self.period
        self._moving = move.peer, move.target, until
        self._left.setdefault(move.peer, set()).add(move.source)
        self._changes = max(0, self._changes - 1)
        # The absence of a moving peer is not a leave.
        self._present -= {move.peer}
        return move

    def arrived(self, peer: str, *, is_gone: bool = False) -> None:
        """Ends a move: the peer serves its new stage or is gone.

        Args:
            peer: Name of the peer.
            is_gone: Whether it died or left during the move.
        """
        if self._moving is not None and self._moving[0] == peer:
            self._moving = None
            if not is_gone:
                self._present |= {peer}

    @property
    def moving(self) -> str | None:
        """Name of the peer whose move has not ended by ``arrived``, or None."""
        return self._moving[0] if self._moving else None

    def _pays(self, move: PeerMove, peers: Sequence[PeerLoad], cost: MoveCost) -> bool:
        if move.target in self._left.get(move.peer, ()):
            return False
        if move.speed_before <= 0:  # A stage has no peer, so nothing runs.
            return True
        gain = move.speed_after - move.speed_before
        # Each join or leave allows one move; more moves need a large gain.
        least = self.threshold if self._changes else UNPROVOKED * self.threshold
        if gain <= least * move.speed_before:
            return False
        rest = [peer for peer in peers if peer.peer != move.peer]
        without = min(stage_speeds(rest, self.stages))
        lost = (move.speed_before - without) * cost.seconds * move.moves
        lost += next(peer.held for peer in peers if peer.peer == move.peer)
        return gain * (self.horizon - cost.seconds * move.moves) > lost


def _counts(peers: Sequence[PeerLoad], stages: int) -> list[int]:
    counts = [0] * stages
    for peer in peers:
        counts[peer.stage] += 1
    return counts


def _best_step(
    peers: Sequence[PeerLoad],
    placed: Mapping[str, int],
    sums: Sequence[float],
    counts: Sequence[int],
) -> tuple[PeerLoad, int] | None:
    """Returns the best move to the slowest stage, as (peer, stage), or None.

    Stages' speeds are compared in ascending order: first the slowest stages, then the
    next ones.
    """
    best, step = _measure(sums), None
    slowest = min(range(len(sums)), key=lambda s: (sums[s], s))
    for peer in peers:
        source = placed[peer.peer]
        if source == slowest or counts[source] < 2:
            continue
        after = list(sums)
        after[source] -= peer.speeds[source]
        after[slowest] += peer.speeds[slowest]
        if _is_better(measured := _measure(after), best):
            best, step = measured, (peer, slowest)
    return step


def _move(
    peers: Sequence[PeerLoad], stages: int, mover: PeerLoad, target: int
) -> PeerMove:
    after = stage_speeds(peers, stages)
    before = min(after)
    after[mover.stage] -= mover.speeds[mover.stage]
    after[target] += mover.speeds[target]
    return PeerMove(
        peer=mover.peer,
        source=mover.stage,
        target=target,
        speed_before=before,
        speed_after=min(after),
    )


def _measure(speeds: Sequence[float]) -> tuple[float, ...]:
    return tuple(sorted(speeds))


def _is_better(new: Sequence[float], old: Sequence[float]) -> bool:
    for after, before in zip(new, old, strict=True):
        if abs(after - before) > ROUNDING * max(abs(after), abs(before), 1e-300):
            return after > before
    return False


def _relative(speeds: Mapping[str, Sequence[float]], peer: str, stage: int) -> float:
    return -speeds[peer][stage] / max(speeds[peer])


def _sums(
    speeds: Mapping[str, Sequence[float]], placed: Mapping[str, int], stages: int
) -> list[float]:
    sums = [0.0] * stages
    for peer, stage in placed.items():
        sums[stage] += speeds[peer][stage]
    return sums


def _improve(
    speeds: Mapping[str, Sequence[float]], placed: dict[str, int], stages: int
) -> bool:
    """Makes the first move or exchange that helps the slowest stage, if one does."""
    sums = _sums(speeds, placed, stages)
    counts = [0] * stages
    for stage in placed.values():
        counts[stage] += 1
    slowest = min(range(stages), key=lambda s: (sums[s], s))
    old = _measure(sums)
    here = [peer for peer in placed if placed[peer] == slowest]
    for peer, stage in placed.items():
        if stage == slowest:
            continue
        if counts[stage] > 1:
            moved = list(sums)
            moved[stage] -= speeds[peer][stage]
            moved[slowest] += speeds[peer][slowest]
            if _is_better(_measure(moved), old):
                placed[peer] = slowest
                return True
        for mate in here:
            moved = list(sums)
            moved[stage] += speeds[mate][stage] - speeds[peer][stage]
            moved[slowest] += speeds[peer][slowest] - speeds[mate][slowest]
            if _is_better(_measure(moved), old):
                placed[peer], placed[mate] = slowest, stage
                return True
    return _rotate(speeds, placed, sums, slowest)


def _rotate(
    speeds: Mapping[str, Sequence[float]],
    placed: dict[str, int],
    sums: Sequence[float],
    slowest: int,
) -> bool:
    """Exchanges three peers cyclically, if that helps the slowest stage."""
    old = _measure(sums)
    here = [peer for peer in placed if placed[peer] == slowest]
    others = [peer for peer in placed if placed[peer] != slowest]
    for mate, peer, third in itertools.product(here, others, others):
        stage, last = placed[peer], placed[third]
        if stage == last:
            continue
        moved = list(sums)
        moved[slowest] += speeds[third][slowest] - speeds[mate][slowest]
        moved[stage] += speeds[mate][stage] - speeds[peer][stage]
        moved[last] += speeds[peer][last] - speeds[third][last]
        if _is_better(_measure(moved), old):
            placed[mate], placed[peer], placed[third] = stage, last, slowest
            return True
    return False
