"""Predicts goodput, the useful time over the wall time, under failures.

Each node fails at random (a Poisson process). Three recovery policies are compared:

- All processes restart from the last snapshot.
- The other nodes continue without the failed node until it returns.
- A spare replaces the failed node at once.

The first policy has a closed form (J. T. Daly, "A higher order estimate of the optimum
checkpoint interval for restart dumps", FGCS 2006, equation 13; compared with J. W.
Young's first-order formula, CACM 1974). For the other two, nodes fail independently, so
the number of failed nodes is binomial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.plan.fault_traces import (
    Policy,
    nodes_of,
    read_trace,
    simulated,
)
from whalejax.planner.plan.report.pictures import GoodputDisplay


if TYPE_CHECKING:
    from whalejax.planner.plan.plan import Plan


MOST_NODES: Final = 1_000_000
"""Largest number of nodes of a run, and largest number of spares."""

_LEAST_SECONDS: Final = 1e-9
_MOST_SECONDS: Final = 1e15
_MOST_SNAPSHOT_STEPS: Final = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReplay:
    """Goodput of each recovery policy over a failure trace.

    Attributes:
        seconds: Duration of the trace.
        failures: Number of failures in it.
        restart, elastic, spares: Goodput of each policy, as in ``Goodput``.
    """

    seconds: float
    failures: int
    restart: float
    elastic: float
    spares: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput(GoodputDisplay):
    """Useful time over wall time, by recovery policy.

    Attributes:
        restart: Goodput if all processes restart from the last snapshot.
        elastic: Goodput if the others continue until the failed node joins again.
        spares: Goodput if a spare replaces the failed node at once.
        num_spares: Number of spare nodes.
        nodes: Number of nodes of the run; each fails on its own.
        step_seconds: Duration of an undisturbed step.
        failure_seconds: Mean time between failures of any node of the run.
        snapshot_every: Steps between snapshots of ``restart``: as given, else the best.
        best_snapshot_seconds: Best time between snapshots by Daly's formula, in
            seconds.
        young_seconds: Best time by Young's: √(2 · snapshot · mean time between
            failures).
        lost_restart, lost_elastic: Mean seconds that one failure costs with each
            policy.
        trace: Goodput over a given failure trace, or None.

    >>> from whalejax.planner.plan.goodput import goodput_of
    >>> found = goodput_of(1.0, nodes=8, mtbf=80_000, restart=300, snapshot=10)
    >>> round(found.failure_seconds), round(found.young_seconds)
    (10000, 447)
    >>> found.restart < found.elastic
    True
    """

    restart: float
    elastic: float
    spares: float
    num_spares: int
    nodes: int
    step_seconds: float
    failure_seconds: float
    snapshot_every: int
    best_snapshot_seconds: float
    young_seconds: float
    lost_restart: float
    lost_elastic: float
    trace: TraceReplay | None = None

    def ways(self) -> list[tuple[str, float]]:
        """Returns (policy, goodput) pairs, for the failure trace too if it is given."""
        spares = count_text(self.num_spares, "spare")
        names = ("restart the world", "elastic", f"elastic, {spares}")
        ways = zip(names, (self.restart, self.elastic, self.spares), strict=True)
        if self.trace is None:
            return [*ways]
        of_trace = (self.trace.restart, self.trace.elastic, self.trace.spares)
        traced = (f"trace: {name}" for name in names)
        return [*ways, *zip(traced, of_trace, strict=True)]

    def __str__(self) -> str:
        lines = [
            f"{count_text(self.nodes, 'node')}, a failure every "
            f"{self.failure_seconds:,.0f} s, steps of {self.step_seconds:.3g} s",
            f"snapshots every {self.snapshot_every:,} steps; best for a restart every "
            f"{self.best_snapshot_seconds:,.0f} s (Daly; Young "
            f"{self.young_seconds:,.0f} s)",
        ]
        lines += [f"goodput  {value:.4f}  {name}" for name, value in self.ways()[:3]]
        if self.trace is not None:
            t = self.trace
            lines.append(
                f"trace    {t.failures} failures in {t.seconds:,.0f} s: "
                f"{t.restart:.4f}, {t.elastic:.4f}, {t.spares:.4f}"
            )
        return "\n".join(lines)


@names_arguments("wh.goodput")
def goodput(
    plan: Plan,
    *,
    mtbf: float,
    restart: float,
    snapshot_every: int | None = None,
    spares: int = 0,
    snapshot: float = 1.0,
    recovery: float = 1.0,
    repair: float = 0.0,
    nodes: int | None = None,
    trace: str | Path | None = None,
) -> Goodput:
    """Predicts the goodput of a plan under failures: its useful time over wall time.

    All times are seconds.

    Args:
        plan: Plan whose predicted step time is used.
        mtbf: Mean time between failures of one node.
        restart: Seconds from the start of a process to its first step: imports,
            compilation, reading a snapshot.
        snapshot_every: Steps between snapshots if all processes restart; default: the
            best.
        spares: Number of spare nodes.
        snapshot: Seconds that a step waits for a snapshot.
        recovery: Seconds that the other nodes lose when a node of an elastic run fails
            or joins.
        repair: Seconds until a lost node restarts; 0 for a crashed process.
        nodes: Number of nodes, each of which fails on its own; default: the plan's.
        trace: Path of a CSV file with columns ``time,node,event``, where an event is
            ``down`` or ``up``. The first nodes, in natural order of their names, run;
            the others are spares.

    Raises:
        WhaleError: Arguments or the trace cannot be used; lists all problems.
    """
    problems = Arguments("wh.goodput")
    if not hasattr(plan, "cluster"):
        problems.refuse("plan", plan, "what wh.plan gives, or wh.Plan.load of a file")
        problems.raise_if_any()
    return goodput_of(
        plan.time.step_seconds,
        mtbf=mtbf,
        restart=restart,
        snapshot_every=snapshot_every,
        spares=spares,
        snapshot=snapshot,
        recovery=recovery,
        repair=repair,
        nodes=len(plan.cluster.nodes) if nodes is None else nodes,
        micro_batches=plan.num_micro_batches,
        trace=trace,
    )


def goodput_of(
    step_seconds: float,
    *,
    nodes: int,
    mtbf: float,
    restart: float,
    snapshot_every: int | None = None,
    spares: int = 0,
    snapshot: float = 1.0,
    recovery: float = 1.0,
    repair: float = 0.0,
    micro_batches: int | None = None,
    trace: str | Path | None = None,
) -> Goodput:
    """Predicts the goodput of a run whose step time is known.

    Args:
        step_seconds: Duration of an undisturbed step.
        micro_batches: Number of micro-batches of a step. A node takes whole
            micro-batches, so fewer nodes may be slower than in proportion; None divides
            the work evenly.
        nodes, mtbf, restart, snapshot_every, spares, snapshot: Arguments of
            ``goodput``, unchanged.
        recovery, repair, trace: Arguments of ``goodput``, unchanged.

    Raises:
        WhaleError: Arguments or the trace cannot be used; lists all problems.
    """
    problems = Arguments("wh.goodput")
    _check_seconds(problems, "step_seconds", step_seconds, least=_LEAST_SECONDS)
    problems.whole("nodes", nodes, least=1, most=MOST_NODES)
    _check_seconds(problems, "mtbf", mtbf, least=_LEAST_SECONDS)
    _check_seconds(problems, "restart", restart)
    most = _MOST_SNAPSHOT_STEPS
    problems.whole("snapshot_every", snapshot_every, least=1, most=most, none=True)
    problems.whole("spares", spares, most=MOST_NODES)
    _check_seconds(problems, "snapshot", snapshot)
    _check_seconds(problems, "recovery", recovery)
    _check_seconds(problems, "repair", repair)
    problems.whole("micro_batches", micro_batches, least=1, none=True)
    if trace is not None:
        problems.path("trace", trace, "the path of a CSV file of failures, or None")
    problems.raise_if_any()
    between = mtbf / nodes
    best = daly_seconds(snapshot, between)
    every = snapshot_every or max(1, round(best / step_seconds))
    away = repair + restart
    speeds = [speed(k, nodes, micro_batches) for k in range(nodes + 1)]
    policy = Policy(
        nodes=nodes,
        step_seconds=step_seconds,
        interval=every * step_seconds,
        snapshot=snapshot,
        restart=restart,
        recovery=recovery,
        speeds=tuple(speeds),
    )
    useful = restart_goodput(every * step_seconds, snapshot, away, between)
    elastic = elastic_goodput(speeds, 0, mtbf, away, recovery)
    return Goodput(
        restart=useful,
        elastic=elastic,
        spares=elastic_goodput(speeds, spares, mtbf, away, recovery),
        num_spares=spares,
        nodes=nodes,
        step_seconds=step_seconds,
        failure_seconds=between,
        snapshot_every=every,
        best_snapshot_seconds=best,
        young_seconds=math.sqrt(2 * snapshot) * math.sqrt(between),
        lost_restart=away + every * step_seconds / 2,
        lost_elastic=2 * recovery + away / nodes,
        trace=None if trace is None else _replay_trace(policy, spares, Path(trace)),
    )


def _check_seconds(
    problems: Arguments, name: str, value: object, *, least: float = 0.0
) -> None:
    known: Any = value
    if not is_number(value) or not least <= known <= _MOST_SECONDS:
        limits = f"{least:g} to {_MOST_SECONDS:g}"
        problems.refuse(name, value, f"a number of seconds, {limits}")


def daly_seconds(cost: float, between: float) -> float:
    """Returns the best time between two snapshots, in seconds (Daly 2006, equation 37).

    Args:
        cost: Seconds of a snapshot.
        between: Mean time between failures.

    >>> round(daly_seconds(10.0, 10_000.0))
    441
    """
    if cost <= 0:
        return 0.0
    if cost >= 2 * between:
        return between
    half = cost / (2 * between)
    return math.sqrt(2 * cost * between) * (1 + math.sqrt(half) / 3 + half / 9) - cost


def restart_goodput(interval: float, cost: float, away: float, between: float) -> float:
    """Returns the goodput if all processes restart (Daly 2006, equation 13).

    Args:
        interval: Seconds of work between two snapshots.
        cost: Seconds of a snapshot.
        away: Seconds from a failure until all run again; a failure may interrupt them.
        between: Mean time between failures.
    """
    exponent = (interval + cost) / between
    if exponent + away / between > 700:  # Practically never reaches a snapshot.
        return 0.0
    wall = between * math.exp(away / between) * math.expm1(exponent)
    return interval / wall


def elastic_goodput(
    speeds: Sequence[float], spares: int, mtbf: float, away: float, recovery: float
) -> float:
    """Returns the goodput if the other nodes continue.

    Args:
        speeds: Relative step speed by number of running nodes, from 0; 1 if all run.
        spares: Number of spare nodes.
        mtbf: Mean time between failures of one node.
        away: Seconds until a lost node returns.
        recovery: Seconds that all nodes lose when one fails, and again when one joins.

    >>> elastic_goodput([0.0, 0.5, 1.0], 0, 99.0, 1.0, 0.0)
    0.99
    """
    nodes = len(speeds) - 1
    total = 0.0
    for alive, part in enumerate(alive_parts(nodes + spares, mtbf, away)):
        takes_part = min(alive, nodes)
        # A node that returns as a spare does not stall the run.
        times = 1 if alive > nodes else 2
        stalls = times * recovery * takes_part / mtbf
        total += part * speeds[takes_part] * max(1.0 - stalls, 0.0)
    return min(total, 1.0)


def alive_parts(nodes: int, mtbf: float, away: float) -> Iterator[float]:
    """Yields the fractions of the time in which 0, 1, … nodes run; their sum is 1.

    The number of running nodes is binomial, as each node runs for mtbf / (mtbf + away)
    of the time. Logarithms keep coefficients and powers in the range of 64-bit floats:
    ln C(n, k) = lnΓ(n + 1) - lnΓ(k + 1) - lnΓ(n - k + 1) (Abramowitz and Stegun,
    Handbook of Mathematical Functions, 1964, 6.1.5 and 6.1.21).

    Args:
        nodes: Total number of nodes.
        mtbf: Mean time between failures of one node.
        away: Seconds until a lost node returns.

    >>> [round(part, 4) for part in alive_parts(2, 90.0, 10.0)]
    [0.01, 0.18, 0.81]
    """
    if away <= 0:
        yield from (float(alive == nodes) for alive in range(nodes + 1))
        return
    there, gone = -math.log1p(away / mtbf), -math.log1p(mtbf / away)
    whole = math.lgamma(nodes + 1)
    for alive in range(nodes + 1):
        ways = whole - math.lgamma(alive + 1) - math.lgamma(nodes - alive + 1)
        yield math.exp(min(ways + alive * there + (nodes - alive) * gone, 0.0))


def speed(alive: int, nodes: int, micro_batches: int | None) -> float:
    """Returns the step speed of some nodes, relative to the speed of all.

    Args:
        alive: Number of nodes that take part.
        nodes: Number of nodes of the run.
        micro_batches: Number of micro-batches of a step, each on one node; None divides
            the work evenly.

    >>> speed(3, 4, None), speed(3, 4, 8), speed(0, 4, 8)
    (0.75, 0.6666666666666666, 0.0)
    """
    if not alive:
        return 0.0
    if micro_batches is None or micro_batches < nodes:
        return alive / nodes
    return math.ceil(micro_batches / nodes) / math.ceil(micro_batches / alive)


def _replay_trace(policy: Policy, spares: int, path: Path) -> TraceReplay:
    events = read_trace(path)
    names = nodes_of(events)
    if len(names) > policy.nodes + spares:
        raise WhaleError(
            f"{path} names {count_text(len(names), 'node')}; the run has "
            f"{policy.nodes} and {spares} spares. Give nodes= and spares= as in the "
            "trace"
        )
    seconds = events[-1].time
    own = [event for event in events if event.node in names[: policy.nodes]]
    return TraceReplay(
        seconds=seconds,
        failures=sum(event.is_down for event in events),
        restart=simulated(policy, own, seconds, how="restart", spares=0),
        elastic=simulated(policy, own, seconds, how="elastic", spares=0),
        spares=simulated(policy, events, seconds, how="elastic", spares=spares),
    )
