"""Compares even and adaptive shares on two processes of different speed.

A small GPT is trained by two processes, each bound to a core of its own, the second
under a CPU quota. A run first measures and adapts its shares; then steps with even
shares and with these are timed in turn.

    python scripts/bench_mixed.py [--quotas 50,33,25] [--rounds 9]
    python scripts/bench_mixed.py --disturb [--seconds 120]
    python scripts/bench_mixed.py --several 70,50,30,20
    python scripts/bench_mixed.py --pipeline [--rounds 9]

The last line is one JSON object, for each quota N in percent:

    speedup_N                even step over the one with adaptive shares (median of
                             pairs)
    speedup_N_low, _high     quartiles of the pairs
    of_integer_ideal_N       shortest step that whole micro-batches allow, from their
                             measured seconds and a step without any, over the
                             adaptive one's
    shares_N                 adaptive shares
    curve_f32, curve_f64     largest distance of 20 steps' losses from one device's
    compilations             compilations of the program of a micro-batch, in all

With ``--disturb`` an outside load comes and goes by a seeded plan and the quota changes
sides in the middle, once with adaptive shares and once with even ones:

    windows_worst            steps of a window of 30 s over even's, the worst window
    recovered_steps          after the change of sides, steps until the mean of five
                             reaches 0.93 of the speed to which the run settles
    followed_steps           the same against the speed that whole micro-batches allow
                             with the measurements of these five, so that loads count
    of_ideal                 shortest time that whole micro-batches allow, step by step,
                             over the time of all steps

With ``--several 70,50,30,20`` as many processes share the cores under these quotas and
adapt their shares of 256 micro-batches in 20 steps:

    shares, proportions      adaptive shares, and each process's part of the speeds,
                             measured between the last steps while all compute alike
    shares_off               largest relative distance between them
    shares_off_of_believed   the same from the speeds that the run itself measured
    shares_off_of_whole      the same of the whole micro-batches of the shortest step

With ``--pipeline`` the two processes are the stages of a pipeline, the second under a
quota of 50 percent. Each times a micro-batch of the model; the planner chooses stages,
micro-batches and schedule from that, and runs in turn with stages that are cut for
equal devices. For gpt and bert:

    pipeline_NAME            equal layers' step over the chosen one's (median of pairs)
    pipeline_NAME_low, _high quartiles of the pairs
    pipeline_NAME_ratio      ratio of the two speeds, as timed
    pipeline_NAME_count      micro-batches that the planner chose
    pipeline_NAME_compilations
                             compilations after the first step: none
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import time
from typing import Any

from mixed_stages import median, piped, together


SIZES = {
    "layers": 2,
    "embed": 256,
    "heads": 4,
    "mlp": 1024,
    "sequence": 128,
    "vocab": 512,
}
SHORT = {**SIZES, "embed": 128, "mlp": 512}
"""Sizes for --disturb, whose window has many steps."""

SMALL = {"layers": 2, "embed": 32, "heads": 2, "mlp": 64, "sequence": 16, "vocab": 64}
COUNT = 32
"""Micro-batches of a step."""

SAMPLES = 2
"""Samples of a micro-batch."""

SETTLING_STEPS = 24
"""Steps in which a run adapts its shares."""

MANY = 256
"""Micro-batches of a step of --several, which lasts many periods of a quota."""

SEVERAL_STEPS = 20

WINDOW = 30.0
CURVE = 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quotas", default="50,33,25", help="quotas in percent")
    parser.add_argument("--rounds", type=int, default=9, help="timed pairs")
    parser.add_argument("--disturb", action="store_true", help="with outside load")
    parser.add_argument("--several", default="", help="quotas of as many processes")
    parser.add_argument("--pipeline", action="store_true", help="stages, not replicas")
    parser.add_argument("--seconds", type=float, default=120.0, help="for --disturb")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        _work(arguments)
        return
    from whalejax.distributed.cgroup_quota import why_no_quota
    from whalejax.distributed.reserved_port import reserve_port

    if problem := why_no_quota():
        sys.exit(problem)
    command = [
        sys.executable,
        *sys.argv,
        "--port",
        str(reserve_port("127.0.0.1")),
        "--process",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_PLATFORMS"] = "cpu"
    running = [
        subprocess.Popen([*command, str(index)], env=environment)
        for index in range(len(_quotas(arguments)))
    ]
    sys.exit(max(process.wait() for process in running))


def _work(arguments: argparse.Namespace) -> None:
    """Runs one of the processes."""
    core = _core(arguments)
    os.sched_setaffinity(0, {core})
    import jax

    from whalejax.distributed.cgroup_quota import Quota

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"127.0.0.1:{arguments.port}",
        len(_quotas(arguments)),
        arguments.process,
        initialization_timeout=120,
    )
    results: dict[str, Any] = {}
    with Quota(100) as quota:
        quota.add(os.getpid())
        if arguments.disturb:
            results.update(_disturb(arguments, quota, core))
        elif arguments.several:
            quota.set(_quotas(arguments)[arguments.process])
            results.update(_several())
        elif arguments.pipeline:
            deep = {**SHORT, "layers": 4}
            for name in ("gpt", "bert"):
                results.update(piped(name, deep, arguments, quota))
        else:
            run = _Run(SIZES)
            for percent in map(int, arguments.quotas.split(",")):
                quota.set(percent if arguments.process else 100)
                results.update(_compare(run, percent, arguments.rounds))
            quota.set(100)
            results["compilations"] = run.compilations
            results["curve_f32"] = _curve("float32")
            jax.config.update("jax_enable_x64", True)
            results["curve_f64"] = _curve("float64")
        if arguments.process == 0:
            print(json.dumps(results), flush=True)
        together("end")
    jax.distributed.shutdown()


def _quotas(arguments: argparse.Namespace) -> list[float]:
    """Returns the quota of each process at its start."""
    return [float(q) for q in (arguments.several or "100,100").split(",")]


def _core(arguments: argparse.Namespace) -> int:
    """Returns the core of this process: each in turn gets the least loaded one."""
    loads = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    cores = []
    for quota in _quotas(arguments):
        core = min(loads, key=lambda c: loads[c])
        loads[core] += quota
        cores.append(core)
    return cores[arguments.process]


def _several() -> dict[str, Any]:
    """Adapts many processes' shares, and measures their speeds at the end."""
    import numpy as np
    from jax.experimental import multihost_utils

    from whalejax.planner.balance.measured_shares import WINDOW
    from whalejax.planner.balance.shares import shares

    run = _Run(SHORT, count=MANY)
    run.trained.rebalances = False
    run.step()
    run.trained.rebalances = True
    singles = []
    for _ in range(SEVERAL_STEPS):
        run.step()
        together("alone")
        singles.append(run.alone(run.trained.shares[run.runner._mine[0]]))
    # The run's own estimate is as old; the machine's speed changes within a minute.
    singles = singles[-WINDOW:]
    adapted, believed = np.array(run.trained.shares), np.array(run.runner.seconds)
    median_seconds = np.array([statistics.median(singles)], np.float32)
    speeds = 1.0 / multihost_utils.process_allgather(median_seconds).ravel()
    parts = speeds / speeds.sum()
    believed_part = 1.0 / believed / (1.0 / believed).sum()
    return {
        "shares": adapted.tolist(),
        "proportions": [round(float(p), 4) for p in parts],
        "shares_off": _error(adapted / MANY, parts),
        "shares_off_of_believed": _error(adapted / MANY, believed_part),
        "shares_off_of_whole": _error(
            np.array(shares(MANY, 1.0 / speeds)) / MANY, parts
        ),
    }


def _error(actual: Any, target: Any) -> float:
    return round(float((abs(actual - target) / target).max()), 4)


class _Run:
    """A training run over both processes, or on this process's device alone."""

    def __init__(
        self, sizes: dict[str, Any], *, alone: bool = False, count: int = COUNT
    ) -> None:
        import jax
        import optax

        import whalejax as wh
        from whalejax import jobs, models

        job = models.job("gpt-test", annotated=False, **sizes)
        self.batch_at = lambda index: job.batch_at(index, count * SAMPLES)
        model = jobs.abstract_model(job)
        optimizer = optax.sgd(0.01, momentum=0.9)
        devices = jax.local_devices() if alone else jax.devices()
        plan = wh.plan(
            job.loss_fn,
            model,
            self.batch_at(0),
            optimizer=optimizer,
            cluster=f"cpu:{len(devices)}",
            num_micro_batches=count,
            shares="even" if alone else [count // len(devices)] * len(devices),
        )
        step = wh.compile(
            plan, job.loss_fn, model, optimizer=optimizer, devices=devices
        )
        self.trained: Any = step
        self.runner: Any = step._runner
        self.state = step.init(job.make_model, rng=jax.random.key(0))
        self.losses: list[float] = []

    @property
    def compilations(self) -> int:
        (replica,) = self.runner._replicas.values()
        count: int = replica.add._cache_size()
        return count

    def step(self, index: int = 0) -> float:
        """Returns the seconds of one step, until its metrics are ready."""
        start = time.perf_counter()
        self.state, metrics = self.trained(self.state, self.batch_at(index))
        self.losses.append(float(metrics["loss"].addressable_shards[0].data))
        return time.perf_counter() - start

    def nothing(self) -> float:
        """Returns the seconds of a step without any micro-batch."""
        import jax

        from whalejax.planner.balance.measured_shares import Rebalance

        balance, self.runner._balance = self.runner._balance, Rebalance([0, 0])
        spare = jax.tree.map(lambda x: x.copy(), self.state)
        start = time.perf_counter()
        _, metrics = self.runner.advance(spare, {})
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start
        self.runner._balance, self.runner._told = balance, None
        return seconds

    def alone(self, count: int) -> float:
        """Returns the seconds of a micro-batch of this process, without the other."""
        import jax

        from whalejax.planner.balance.measured_shares import Rebalance

        shares = [count] * len(self.runner.shares)
        balance, self.runner._balance = self.runner._balance, Rebalance(shares)
        batch = self.trained._layout.place(self.batch_at(0))
        mine = self.runner._mine
        views = {r: self.runner._local_view(self.state, r) for r in mine}
        start = time.perf_counter()
        jax.block_until_ready(self.runner._ran(views, batch))
        seconds = time.perf_counter() - start
        self.runner._balance = balance
        return seconds / count


def _compare(run: _Run, percent: int, rounds: int) -> dict[str, Any]:
    """Compares even with adaptive shares under one quota."""
    import numpy as np
    from jax.experimental import multihost_utils

    from whalejax.planner.balance.shares import shares

    run.trained.rebalances = True
    run.trained.shares = [COUNT // 2] * 2
    for _ in range(SETTLING_STEPS):
        run.step()
    run.trained.rebalances = False
    adapted: tuple[int, ...] = tuple(run.trained.shares)
    even = (COUNT // 2,) * 2
    seconds: dict[tuple[int, ...], list[float]] = {adapted: [], even: []}
    empties, singles = [], []
    for _ in range(rounds):
        for tried in (even, adapted):
            run.trained.shares = tried
            together("step")
            seconds[tried].append(run.step())
        together("nothing")
        empties.append(run.nothing())
        singles.append(run.alone(COUNT // 2))
    medians = np.array(
        [statistics.median(singles), statistics.median(empties)], np.float32
    )
    rows = multihost_utils.process_allgather(medians)
    speeds = [float(s) for s in rows[:, 0]]
    best = shares(COUNT, speeds)
    ideal = max(k * s for k, s in zip(best, speeds, strict=True)) + float(rows[0, 1])
    ratios = [a / b for a, b in zip(seconds[even], seconds[adapted], strict=True)]
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    if run.runner._mine == [0]:
        print(
            f"{percent} %: micro-batch {speeds[0] * 1e3:.1f} and {speeds[1] * 1e3:.1f} "
            f"ms, shares {adapted} (best {best}), step {median(seconds[even])} even, "
            f"{median(seconds[adapted])} adapted, {ideal * 1e3:.0f} ms ideal",
            flush=True,
        )
    step = statistics.median(seconds[adapted])
    return {
        f"speedup_{percent}": round(float(middle), 4),
        f"speedup_{percent}_low": round(float(low), 4),
        f"speedup_{percent}_high": round(float(high), 4),
        f"of_integer_ideal_{percent}": round(ideal / step, 4),
        f"shares_{percent}": list(adapted),
    }


def _curve(dtype: str) -> float:
    """Returns the distance of losses of uneven steps from those of one device."""
    import jax

    sizes = {**SMALL, "param_dtype": dtype}
    both, single = _Run(sizes), _Run(sizes, alone=True)
    both.trained.shares = [21, 11]
    for index in range(CURVE):
        if index == CURVE // 2:
            both.trained.rebalances = False
            both.trained.shares = [5, 27]
        both.step(index)
        single.step(index)
    jax.block_until_ready(both.state)
    return max(abs(a - b) for a, b in zip(both.losses, single.losses, strict=True))


def _disturb(arguments: argparse.Namespace, quota: Any, core: int) -> dict[str, Any]:
    """Runs the same disturbances with adaptive shares, and with even ones."""
    run = _Run(SHORT)
    run.step()
    traces = {}
    for follows in (True, False):
        run.trained.rebalances = follows
        run.trained.shares = [COUNT // 2] * 2
        traces[follows] = _steps(run, arguments, quota, core)
    counts = {
        follows: [
            sum(1 for t in trace.ends if start <= t < start + WINDOW)
            for start in range(0, int(arguments.seconds), int(WINDOW))
        ]
        for follows, trace in traces.items()
    }
    worst = min(a / b for a, b in zip(counts[True], counts[False], strict=True))
    spans, ideal = traces[True].times()
    settled = statistics.median(spans[-len(spans) // 4 :])
    change = next(
        i for i, end in enumerate(traces[True].ends[1:]) if end > arguments.seconds / 2
    )
    if arguments.process == 0:
        print(f"steps in windows: follows {counts[True]}, even {counts[False]}")
    return {
        "windows_worst": round(worst, 4),
        "recovered_steps": _recovery_steps(
            spans[change:], [settled] * len(spans[change:])
        ),
        "followed_steps": _recovery_steps(spans[change:], ideal[change:]),
        "of_ideal": round(sum(ideal) / sum(spans), 4),
    }


@dataclasses.dataclass
class _Trace:
    """End time, shares and measured micro-batch seconds of each step."""

    ends: list[float] = dataclasses.field(default_factory=list)
    shares: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    seconds: list[list[float]] = dataclasses.field(default_factory=list)

    def times(self) -> tuple[list[float], list[float]]:
        """Returns the seconds of steps after the first, and the least ones."""
        from whalejax.planner.balance.shares import makespan, shares

        spans = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        rows = list(zip(spans, self.shares[1:], self.seconds[1:], strict=True))
        rest = statistics.median(s - makespan(k, t) for s, k, t in rows)
        best = [makespan(shares(COUNT, t), t) for _, _, t in rows]
        return spans, [seconds + rest for seconds in best]


def _steps(run: _Run, arguments: argparse.Namespace, quota: Any, core: int) -> _Trace:
    """Runs steps while load comes and goes and the quota changes sides."""
    import numpy as np
    from jax.experimental import multihost_utils

    rng = random.Random(7 + arguments.process)
    loads: list[tuple[float, float]] = []
    moment = 0.0
    while moment < arguments.seconds:
        moment += rng.uniform(15, 30)
        loads.append((moment, moment + rng.uniform(2, 8)))
        moment = loads[-1][1]
    busy: subprocess.Popen[bytes] | None = None
    trace = _Trace()
    (stopwatch,) = run.runner._stopwatches.values()
    together("steps")
    start = time.perf_counter()
    while True:
        now = time.perf_counter() - start
        is_first_half = now < arguments.seconds / 2
        is_slow = arguments.process == (1 if is_first_half else 0)
        quota.set(33 if is_slow else 100)
        is_loaded = any(begin <= now < end for begin, end in loads)
        if is_loaded and busy is None:
            busy = subprocess.Popen(["taskset", "-c", str(core), "yes"], stdout=-3)
        if not is_loaded and busy is not None:
            busy.kill()
            busy = None
        trace.shares.append(tuple(run.trained.shares))
        run.step()
        trace.ends.append(time.perf_counter() - start)
        done = float(trace.ends[-1] > arguments.seconds)
        report = np.array([done, stopwatch.seconds], np.float32)
        by_process = multihost_utils.process_allgather(report)
        trace.seconds.append(by_process[:, 1].tolist())
        if by_process[:, 0].any():
            break
    if busy is not None:
        busy.kill()
    quota.set(100)
    return trace


def _recovery_steps(spans: list[float], ideal: list[float]) -> int:
    """Returns the steps until five take at most the ideal time over 0.93."""
    for number in range(len(spans) - 5):
        five = slice(number, number + 5)
        if sum(spans[five]) <= sum(ideal[five]) / 0.93:
            return number
    return len(spans)


if __name__ == "__main__":
    main()
