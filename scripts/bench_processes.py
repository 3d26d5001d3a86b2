"""Compares measured and simulated steps of pipeline schedules on two processes.

A small GPT is trained in two stages with programs of their own, each in a process of
its own that is bound to one core. Both measure their parts, all at once and in the
order of the schedule, and a transfer: the processor's time of each side, which a core
that also computes spends between its rows, and the rest of the time from side to side.
The simulator makes a step of these. The schedules' steps are timed in turn.

    python scripts/bench_processes.py [--rounds 7] [--micro-batches 4]

The last line is one JSON object:

    1f1b_over_simulated         measured step over the simulated one: at most 1.10
    interleaved_over_1f1b       ratio of measured steps, and of simulated ones; the
    interleaved_over_1f1b_simulated   first is at most 1.05 times the second
    zb_h1_over_1f1b, zb_h1_over_1f1b_simulated    the same for zb-h1

The C library keeps freed memory (``paired.KEPT_MEMORY``) unless ``--default-malloc``:
parts that are repeated for measurement have other page faults than in a step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from paired import keep_memory


SCHEDULES = ("1f1b", "interleaved", "zb-h1")
SIZES = {
    "layers": 8,
    "embed": 192,
    "heads": 4,
    "mlp": 768,
    "sequence": 128,
    "vocab": 512,
}
SAMPLES = 8
"""Samples of a micro-batch."""

REPEATS = 3
"""Measured repetitions of a stage's rows."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step")
    parser.add_argument("--default-malloc", action="store_true", help="see above")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        _work(arguments)
        return
    if not arguments.default_malloc:
        keep_memory()
    from whalejax.distributed.reserved_port import reserve_port

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
        subprocess.Popen([*command, str(index)], env=environment) for index in range(2)
    ]
    sys.exit(max(process.wait() for process in running))


def _work(arguments: argparse.Namespace) -> None:
    """Runs one of the processes."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[arguments.process % len(cores)]})
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(
        f"127.0.0.1:{arguments.port}", 2, arguments.process, initialization_timeout=120
    )
    runs = {name: _Run(name, arguments.micro_batches) for name in SCHEDULES}
    measured: dict[str, list[float]] = {name: [] for name in runs}
    simulated: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(arguments.rounds + 1):
        for name, run in runs.items():
            seconds, predicted = run.step(), run.simulated_seconds()
            if index:
                measured[name].append(seconds)
                simulated[name].append(predicted)
    if arguments.process == 0:
        for name in runs:
            step, model = map(statistics.median, (measured[name], simulated[name]))
            print(f"{name}: {step * 1e3:.1f} ms, simulated {model * 1e3:.1f} ms")
        print(json.dumps(_report(measured, simulated)), flush=True)
    jax.distributed.shutdown()


def _report(
    measured: dict[str, list[float]], simulated: dict[str, list[float]]
) -> dict[str, float]:
    base = "1f1b"
    ratios = {"1f1b_over_simulated": _ratio(measured[base], simulated[base])}
    for name in SCHEDULES[1:]:
        key = f"{name.replace('-', '_')}_over_1f1b"
        ratios[key] = _ratio(measured[name], measured[base])
        ratios[f"{key}_simulated"] = _ratio(simulated[name], simulated[base])
    return {key: round(value, 4) for key, value in ratios.items()}


def _ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


class _Run:
    """A training run with one schedule."""

    def __init__(self, schedule: str, count: int) -> None:
        import jax
        import optax

        import whalejax as wh
        from whalejax import jobs, models

        job = models.job("gpt-test", annotated=False, **SIZES)
        mark = wh.pipeline(num_stages=2, schedule=schedule)

        def loss(model: Any, batch: Any) -> Any:
            with mark:
                return job.loss_fn(model, batch)

        self.batch, optimizer = job.batch_at(0, count * SAMPLES), optax.sgd(0.01)
        model = jobs.abstract_model(job)
        plan = wh.plan(
            loss,
            model,
            self.batch,
            optimizer=optimizer,
            cluster="cpu:2",
            num_micro_batches=count,
            remat="none",
        )
        if jax.process_index() == 0:
            print(str(plan).splitlines()[0], flush=True)
        trained = wh.compile(
            plan, loss, model, optimizer=optimizer, devices=jax.devices()
        )
        self.trained: Any = trained
        self.runner: Any = trained._runner
        self.state, self.spare = (
            trained.init(job.make_model, rng=jax.random.key(0)) for _ in range(2)
        )
        self.step()
        self.inputs = self._record_inputs()

    def step(self) -> float:
        """Returns the seconds of one step, which both processes begin together."""
        self.state, seconds = self._timed_step(self.state)
        return seconds

    def _timed_step(self, state: Any) -> tuple[Any, float]:
        import jax
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("step")
        start = time.perf_counter()
        state, metrics = self.trained(state, self.batch)
        own = [x for x in jax.tree.leaves(state.params) if x.addressable_shards]
        jax.block_until_ready((own, metrics))
        return state, time.perf_counter() - start

    def _record_inputs(self) -> dict[tuple[int, str], list[Any]]:
        """Returns the inputs of each program of this process for one micro-batch."""
        import jax

        inputs: dict[tuple[int, str], list[Any]] = {}
        sites = list(self.runner.sites)

        def recording(site: Any, action: str) -> Any:
            part = getattr(site, action)
            if part is None:
                return None

            def run(values: Any, added: Any) -> Any:
                # The end of the step reuses the memory of the parameters.
                inputs[site.number, action] = [jax.numpy.copy(x) for x in values]
                return part.run(values, added)

            return SimpleNamespace(reads=part.reads, gives=part.gives, run=run)

        self.runner.sites[:] = [
            dataclasses.replace(
                site,
                **{a: recording(site, a) for a in ("forward", "backward", "weight")},
            )
            for site in sites
        ]
        self.step()
        self.runner.sites[:] = sites
        return inputs

    def simulated_seconds(self) -> float:
        """Returns a step's seconds, simulated from parts of both processes."""
        import numpy as np
        from jax.experimental import multihost_utils

        from whalejax.planner.pipeline.simulate import simulate

        table = self.runner.table
        actions = table.actions
        own = np.zeros((len(actions), table.num_places))
        multihost_utils.sync_global_devices("parts")
        for (place, action), seconds in self._part_seconds().items():
            own[actions.index(action), place] = seconds
        local = np.array([*self._transfer_seconds(), self._fixed_seconds()], np.float32)
        total = multihost_utils.process_allgather(own.astype(np.float32)).sum(axis=0)
        means = multihost_utils.process_allgather(local).mean(axis=0)
        transfer, busy, once = map(float, means)
        total += busy * np.array([self._transfer_counts(action) for action in actions])
        by_action = dict(zip(actions, total.tolist(), strict=True))
        line = simulate(
            table,
            by_action["forward"],
            by_action["backward"],
            max(0.0, transfer - 2 * busy),
            weight_seconds=by_action.get("weight"),
        )
        return line.step_seconds + once

    def _transfer_counts(self, action: str) -> list[int]:
        """Returns for each virtual stage the transfers of a micro-batch with its stage.

        Transfers count with the action that makes the values, and with the one that
        reads them.
        """
        table = self.runner.table
        counts = [0] * table.num_places
        targets = self.runner.moves.targets.get(action, [])
        for source, target_stages in enumerate(targets):
            for target in target_stages:
                if (target - source) % table.num_stages:
                    counts[source] += 1
                    counts[target] += 1
        return counts

    def _part_seconds(self) -> dict[tuple[int, str], float]:
        """Returns each program's seconds, scaled to the schedule's order."""
        stage = [s.stage for s in self.runner.sites if self.runner.here[s.stage]][0]
        rows = self.runner.table.of_stage(stage)
        stages = self.runner.table.num_stages
        keys = [(row.chunk * stages + row.stage, row.action) for row in rows]
        alone_seconds = {
            key: self._median_seconds([k for k in keys if k == key]) / keys.count(key)
            for key in dict.fromkeys(keys)
        }
        total = self._median_seconds(keys)
        share = total / sum(alone_seconds[key] for key in keys)
        return {key: seconds * share for key, seconds in alone_seconds.items()}

    def _median_seconds(self, keys: Sequence[tuple[int, str]]) -> float:
        """Returns the seconds of programs, issued one after the other."""
        import jax

        runs: list[float] = []
        for _ in range(REPEATS):
            buffers = [(sums(), more()) for sums, more in self.runner.zeros]
            sums = {n: list(pair) for n, pair in enumerate(buffers)}
            jax.block_until_ready(buffers)
            last: dict[int, Any] = {}
            start = time.perf_counter()
            for place, action in keys:
                part = getattr(self.runner.sites[place], action)
                is_split = action == "backward" and self.runner.table.splits_backward
                index = 0 if action == "forward" else 1
                added = [] if is_split else sums[place][index]
                last[place], added = part.run(self.inputs[place, action], added)
                if not is_split:
                    sums[place][index] = added
            jax.block_until_ready((last, sums))
            runs.append(time.perf_counter() - start)
        return statistics.median(runs)

    def _transfer_seconds(self) -> tuple[float, float]:
        """Returns the seconds of a transfer, and of this side's processor."""
        import jax

        from whalejax.planner.pipeline.transfer_order import ScheduledTransfer

        moves = self.runner.moves
        forth = ScheduledTransfer(micro_batch=0, source=0, target=1, action="forward")
        back = ScheduledTransfer(micro_batch=0, source=1, target=0, action="backward")
        aval = [self.runner.avals[v] for v in moves.values_of(forth)]
        is_first = self.runner.here[0]
        arrays = [jax.numpy.zeros(a.shape, a.dtype) for a in aval] if is_first else None
        rounds = 10
        start = busy = 0.0
        for index in range(rounds + 1):
            if index == 1:
                start, busy = time.perf_counter(), time.process_time()
            received = moves.transfer(forth, arrays if is_first else None)()
            arrays = moves.transfer(back, None if is_first else received)()
            if is_first:
                jax.block_until_ready(arrays)
        seconds = time.perf_counter() - start, time.process_time() - busy
        return seconds[0] / rounds / 2, seconds[1] / rounds / 2

    def _fixed_seconds(self) -> float:
        """Returns the seconds of a step without its rows."""
        order, self.runner.moves.order = self.runner.moves.order, ()
        seconds = []
        for _ in range(REPEATS):
            self.spare, once = self._timed_step(self.spare)
            seconds.append(once)
        self.runner.moves.order = order
        return statistics.median(seconds)


if __name__ == "__main__":
    main()
