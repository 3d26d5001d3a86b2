"""Chooses peers that change stage: the paper's rule, the best counts, and when a move
pays.

A pipeline is as fast as its slowest stage, whose speed is the sum of its peers'. The
rule of SWARM (section 3.2): the stage with most load gets the peer with the shortest
queue of the stage with least load. The optimum beside it makes the smallest sum of
speeds as large as it can be: exactly for peers that are alike, by moves and exchanges
for others. ``Rebalancer`` decides which of them is worth what it costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from whalejax.meshes.errors import WhaleError


UNPROVOKED: Final = 5.0  # times the threshold, where nobody has come or gone
HORIZON_SECONDS: Final = 600.0
"""Within which what is lost by moving, or waiting for a peer, must be won again."""
ROUNDING: Final = 1e-9  # sums of speeds that differ by less are equal


class Rule(StrEnum):
    """Rules of moves: the paper's rule, towards the optimum, or none."""

    NONE = "none"
    PAPER = "paper"
    OPTIMUM = "optimum"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLoad:
    """A peer, as it is published.

    Attributes:
        peer: Its name.
        stage: Number of the stage that it serves.
        queue_length: Calls that wait at it, averaged since the last look.
        speeds: Micro-batches a second that it computes, in each stage; forward and
            backward, its links included.
        held: Micro-batches of the step under way whose gradients it has: others
            compute them again where it moves.
    """

    peer: str
    stage: int
    queue_length: float
    speeds: tuple[float, ...]
    held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMove:
    """A peer that is to change stage.

    Attributes:
        peer: Its name.
        source: Stage that it leaves.
        target: Stage that it is to serve.
        speed_before: Speed of the pipeline before the move, in micro-batches a second.
        speed_after: The same, once it and those who are to follow it have moved.
        moves: Moves of this peer and of those that are to follow it.
    """

    peer: str
    source: int
    target: int
    speed_before: float
    speed_after: float
    moves: int = 1


def stage_speeds(peers: Sequence[PeerLoad], stages: int) -> list[float]:
    """Micro-batches a second of each stage: the sum over its peers."""
    speeds = [0.0] * stages
    for peer in peers:
        speeds[peer.stage] += peer.speeds[peer.stage]
    return speeds


def newcomer_stage(peers: Sequence[PeerLoad], stages: int) -> int:
    """The stage that somebody who comes is to serve: the slowest, the first of equals.

    Args:
        peers: Peers of the swarm, those on their way to a stage counted there.
        stages: Number of stages of the model.
    """
    speeds = stage_speeds(peers, stages)
    counts = _counts(peers, stages)
    return min(range(stages), key=lambda s: (counts[s] > 0, speeds[s], s))


def pays_to_wait(lost: Sequence[float], serving: int, seconds: float) -> bool:
    """Whether a step is to wait for peers that take its state.

    Those that serve wait too; those that come would have to begin again with the next
    step's state otherwise. A newcomer is worth what it wins within ``HORIZON_SECONDS``,
    and what it has lost so far, so that it is waited for at some time.

    Args:
        lost: Seconds since each of them could have begun to serve.
        serving: Peers that have the state.
        seconds: Until the last of those that come should have it.

    Example:
        >>> pays_to_wait([0.0], 5, 30.0), pays_to_wait([0.0], 400, 30.0)
        (True, False)
    """
    return serving * seconds <= sum(HORIZON_SECONDS + one for one in lost)


def paper_move(peers: Sequence[PeerLoad], stages: int) -> PeerMove | None:
    """The move of the paper's rule, by queues; none where it would empty a stage.

    A stage's load is the calls that wait in it. One without peers has the most.

    Args:
        peers: All of them.
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
    """The first move on the way to the fastest pipeline; none where none is faster.

    Where several stages are slowest at once, each needs a move before anything is won:
    the moves that follow are counted, and the speed is the one after all of them.

    Args:
        peers: All of them.
        stages: Number of stages of the model.
    """
    sums = stage_speeds(peers, stages)
    counts = _counts(peers, stages)
    placed = {peer.peer: peer.stage for peer in peers}
    before = best = min(sums)
    first: tuple[PeerLoad, int] | None = None
    result: PeerMove | None = None
    # One move a stage is enough to raise all stages that are slowest at once; a faster
    # pipeline further away is found by the looks that follow.
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


def best_counts(
    peers: int, seconds: Sequence[float], at_least: int = 1
) -> tuple[int, ...]:
    """Peers of each stage, for peers that are alike: the slowest stage is fastest.

    Each next peer goes to the slowest stage, which is exact: a stage that has a peer
    more than in another split needed it when it was given to it.

    Args:
        peers: Number of peers.
        seconds: Seconds of a peer for a micro-batch in each stage.
        at_least: Peers that each stage must have.

    Raises:
        WhaleError: There are too few.

    Example:
        >>> best_counts(8, [1.0, 2.0, 1.0])
        (2, 4, 2)
    """
    if peers < at_least * len(seconds) or not seconds or min(seconds) <= 0:
        raise WhaleError(
            f"peers of stages: {peers} peers for {len(seconds)} stages of "
            f"{list(seconds)} seconds; there must be at least {at_least} a stage, and "
            "each must take more than 0 seconds. Have more peers, or fewer stages"
        )
    counts = [at_least] * len(seconds)
    for _ in range(peers - sum(counts)):
        slowest = min(
            range(len(seconds)), key=lambda s: (counts[s] / seconds[s], -seconds[s], s)
        )
        counts[slowest] += 1
    return tuple(counts)


def best_stages(speeds: Mapping[str, Sequence[float]], stages: int) -> dict[str, int]:
    """A stage for each peer, so that the slowest stage is as fast as can be found.

    Exact where all peers are alike. Others are placed fastest first, and then moved and
    exchanged while that helps: the exact problem is NP-hard.

    Args:
        speeds: Micro-batches a second of each peer, in each stage.
        stages: Number of stages of the model.

    Raises:
        WhaleError: There are fewer peers than stages.
    """
    if len(speeds) < stages:
        raise WhaleError(
            f"peers of stages: {len(speeds)} peers for {stages} stages; each stage "
            "needs one. Have more peers, or fewer stages"
        )
    placed: dict[str, int] = {}
    sums, counts = [0.0] * stages, [0] * stages
    # A peer's speed relative to others in the same stage, so that thick stages, which
    # all peers serve slowly, do not hide who is fast.
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
    """Micro-batches a second of the slowest stage: the maximum flow through all."""
    return min(_sums(speeds, placed, stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCost:
    """Costs of a move, during which the moving peer computes nothing.

    Attributes:
        state_bytes: Parameters and optimizer state of the stage it goes to.
        bytes_per_second: Rate of its link.
        compile_seconds: Until its programs of the new stage are compiled.
    """

    state_bytes: int
    bytes_per_second: float
    compile_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Returns the seconds from leaving to serving."""
        return self.download_seconds + self.compile_seconds

    @property
    def download_seconds(self) -> float:
        """Returns the seconds of downloading the state."""
        return self.state_bytes / self.bytes_per_second


class Rebalancer:
    """Looks at the peers every so often and names at most one move at a time.

    A move must raise the speed of the pipeline by a threshold, and win more within a
    horizon than the mover's absence loses. While somebody moves, nobody else does. A
    peer that has moved does not go back to where it came from until peers have come or
    gone, so noise in what is measured cannot make it swing. Where there were as many
    moves as peers that came or went, the threshold is five times as high.
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
            period: Seconds from one look to the next.
            threshold: Gain that a move must bring, as a part of the speed before.
            horizon: Seconds within which a move must win what it costs.
        """
        if stages < 1 or not period > 0 or threshold < 0 or not horizon > 0:
            raise WhaleError(
                f"rebalancing: {stages} stages, period {period} s, threshold "
                f"{threshold}, horizon {horizon} s; there must be a stage, seconds "
                "above 0, and a threshold of at least 0"
            )
        self.stages, self.rule, self.period = stages, rule, period
        self.threshold, self.horizon = threshold, horizon
        self._looked = -math.inf
        self._moving: tuple[str, int, float] | None = None
        self._left: dict[str, set[int]] = {}
        self._present: frozenset[str] = frozenset()
        self._changes = 0

    def is_due(self, now: float) -> bool:
        """Whether it is time to look again, and nobody is on the way.

        Args:
            now: Seconds.
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
        """The move to make now, which is held to be under way from here on.

        Args:
            peers: Peers that serve a stage, without the one on its way.
            now: Seconds.
            costs: Costs of a move to each stage.
            present: Names of all that have not gone, with those that serve no stage for
                a while; of ``peers`` if left out.
        """
        if self.rule is Rule.NONE or not peers:
            return None
        # Nothing runs while a stage has nobody: that does not wait for the next look.
        is_whole = 0 not in _counts(peers, self.stages)
        if is_whole and not self.is_due(now):
            return None
        if self._moving is not None and now < self._moving[2]:
            return None
        self._looked, self._moving = now, None
        here = frozenset(present) or frozenset(peer.peer for peer in peers)
        if here != self._present:
            # Those who are there at the first look have not come in answer to anything.
            self._changes += len(here ^ self._present) if self._present else 0
            self._present = here
            self._left.clear()
        choose = paper_move if self.rule is Rule.PAPER else optimum_move
        move = choose(peers, self.stages)
        if move is None or not self._pays(move, peers, costs[move.target]):
            return None
        # What takes much longer than it should has failed: somebody else may move.
        until = now + 2 * costs[move.target].seconds + self.period
        self._moving = move.peer, move.target, until
        self._left.setdefault(move.peer, set()).add(move.source)
        self._changes = max(0, self._changes - 1)
        # Its absence is not a change that others must answer.
        self._present -= {move.peer}
        return move

    def arrived(self, peer: str, *, is_gone: bool = False) -> None:
        """A peer serves its new stage, or is gone: the next may move.

        Args:
            peer: Its name.
            is_gone: Whether it has died or left on its way.
        """
        if self._moving is not None and self._moving[0] == peer:
            self._moving = None
            if not is_gone:
                self._present |= {peer}

    @property
    def moving(self) -> str | None:
        """Returns the peer that is on its way, or None."""
        return self._moving[0] if self._moving else None

    def _pays(self, move: PeerMove, peers: Sequence[PeerLoad], cost: MoveCost) -> bool:
        if move.target in self._left.get(move.peer, ()):
            return False
        if move.speed_before <= 0:  # a stage without peers: nothing runs at all
            return True
        gain = move.speed_after - move.speed_before
        # One move answers one change; more than that must be for something large.
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
    """The peer and the stage that improve the speeds of all stages most."""
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
    """Speeds of stages, slowest first: of two splits, the larger one is better."""
    return tuple(sorted(speeds))


def _is_better(new: Sequence[float], old: Sequence[float]) -> bool:
    for after, before in zip(new, old, strict=True):
        if abs(after - before) > ROUNDING * max(abs(after), abs(before), 1e-300):
            return after > before
    return False


def _relative(speeds: Mapping[str, Sequence[float]], peer: str, stage: int) -> float:
    """Returns how much slower a peer is in a stage than in its best one."""
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
    """Makes the first move or exchange that helps the slowest; whether there is one."""
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
    """Exchanges three peers in a ring where that helps; whether there are such."""
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
