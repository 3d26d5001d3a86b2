"""Two processes, a core each: schedules of a pipeline, measured and simulated.

A small GPT is trained in two stages with programs of their own, each in a process of
its own that is bound to one core. Both measure what their parts take, all at once and
in the order of the schedule, and what a hand-over takes: the processor's time of each
side, which a core that computes as well spends between its rows, and what is left of
the time from side to side. The simulator makes a step of it. The schedules' steps are
timed in turn. The last line is one JSON object:

    1f1b_over_simulated         measured step over the simulated one: at most 1.10
    interleaved_over_1f1b       measured steps, and the same of the simulator; the
    interleaved_over_1f1b_simulated   first is at most 1.05 times the second
    zb_h1_over_1f1b, zb_h1_over_1f1b_simulated    the same

The C library keeps what they free (``paired.KEPT_MEMORY``) unless ``--default-malloc``:
parts that are run again to be measured have other page faults than in a step.

    python scripts/bench_processes.py [--rounds 7] [--micro-batches 4]
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
"""Of a micro-batch."""

REPEATS = 3
"""Times that a stage's rows are run to be measured."""


def main() -> None:
    """Start both processes, or be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step")
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
    """One of the processes."""
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
            seconds, predicted = run.step(), run.simulated()
            if index:
                measured[name].append(seconds)
                simulated[name].append(predicted)
    if arguments.process == 0:
        for name in runs:
            step, said = map(statistics.median, (measured[name], simulated[name]))
            print(f"{name}: {step * 1e3:.1f} ms, simulated {said * 1e3:.1f} ms")
        print(json.dumps(_report(measured, simulated)), flush=True)
    jax.distributed.shutdown()


def _report(
    measured: dict[str, list[float]], simulated: dict[str, list[float]]
) -> dict[str, float]:
    first = "1f1b"
    found = {"1f1b_over_simulated": _ratio(measured[first], simulated[first])}
    for name in SCHEDULES[1:]:
        key = f"{name.replace('-', '_')}_over_1f1b"
        found[key] = _ratio(measured[name], measured[first])
        found[f"{key}_simulated"] = _ratio(simulated[name], simulated[first])
    return {key: round(value, 4) for key, value in found.items()}


def _ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


class _Run:
    """A schedule at work, and what its parts take."""

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
        self.given = self._recorded()

    def step(self) -> float:
        """Seconds of one step, which both begin together."""
        self.state, seconds = self._advanced(self.state)
        return seconds

    def _advanced(self, state: Any) -> tuple[Any, float]:
        import jax
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("step")
        start = time.perf_counter()
        state, metrics = self.trained(state, self.batch)
        own = [x for x in jax.tree.leaves(state.params) if x.addressable_shards]
        jax.block_until_ready((own, metrics))
        return state, time.perf_counter() - start

    def _recorded(self) -> dict[tuple[int, str], list[Any]]:
        """What each program of this process is given in a step, of a micro-batch."""
        import jax

        found: dict[tuple[int, str], list[Any]] = {}
        sites = list(self.runner.sites)

        def recording(site: Any, action: str) -> Any:
            piece = getattr(site, action)
            if piece is None:
                return None

            def run(values: Any, added: Any) -> Any:
                # The end of the step reuses the memory of the parameters.
                found[site.number, action] = [jax.numpy.copy(x) for x in values]
                return piece.run(values, added)

            return SimpleNamespace(reads=piece.reads, gives=piece.gives, run=run)

        self.runner.sites[:] = [
            dataclasses.replace(
                site,
                **{a: recording(site, a) for a in ("forward", "backward", "weight")},
            )
            for site in sites
        ]
        self.step()
        self.runner.sites[:] = sites
        return found

    def simulated(self) -> float:
        """A step out of what its parts take, measured in both processes at once."""
        import numpy as np
        from jax.experimental import multihost_utils

        from whalejax.planner.pipeline.simulate import simulate

        table = self.runner.table
        actions = table.actions
        own = np.zeros((len(actions), table.num_places))
        multihost_utils.sync_global_devices("parts")
        for (place, action), seconds in self._parts().items():
            own[actions.index(action), place] = seconds
        local = np.array([*self._handing(), self._once()], np.float32)
        every = multihost_utils.process_allgather(own.astype(np.float32)).sum(axis=0)
        both = multihost_utils.process_allgather(local).mean(axis=0)
        handing, busy, once = map(float, both)
        every += busy * np.array([self._handings(action) for action in actions])
        by_action = dict(zip(actions, every.tolist(), strict=True))
        line = simulate(
            table,
            by_action["forward"],
            by_action["backward"],
            max(0.0, handing - 2 * busy),
            weight_seconds=by_action.get("weight"),
        )
        return line.step_seconds + once

    def _handings(self, action: str) -> list[int]:
        """For each place, the hand-overs of a micro-batch that its stage takes part in.

        Those that it makes count with what it makes, and those that it is handed with
        what reads them.
        """
        table = self.runner.table
        found = [0] * table.num_places
        targets = self.runner.moves.targets.get(action, [])
        for source, several in enumerate(targets):
            for target in several:
                if (target - source) % table.num_stages:
                    found[source] += 1
                    found[target] += 1
        return found

    def _parts(self) -> dict[tuple[int, str], float]:
        """Seconds of each program here, in the order of the schedule and by itself."""
        own = [s.stage for s in self.runner.sites if self.runner.here[s.stage]][0]
        rows = self.runner.table.of_stage(own)
        stages = self.runner.table.num_stages
        keys = [(row.chunk * stages + row.stage, row.action) for row in rows]
        alone = {
            key: self._timed([k for k in keys if k == key]) / keys.count(key)
            for key in dict.fromkeys(keys)
        }
        together = self._timed(keys)
        share = together / sum(alone[key] for key in keys)
        return {key: seconds * share for key, seconds in alone.items()}

    def _timed(self, keys: Sequence[tuple[int, str]]) -> float:
        """Seconds of programs, issued one after the other."""
        import jax

        runs: list[float] = []
        for _ in range(REPEATS):
            held = [(sums(), more()) for sums, more in self.runner.zeros]
            sums = {n: list(pair) for n, pair in enumerate(held)}
            jax.block_until_ready(held)
            last: dict[int, Any] = {}
            start = time.perf_counter()
            for place, action in keys:
                piece = getattr(self.runner.sites[place], action)
                split = action == "backward" and self.runner.table.splits_backward
                which = 0 if action == "forward" else 1
                added = [] if split else sums[place][which]
                last[place], added = piece.run(self.given[place, action], added)
                if not split:
                    sums[place][which] = added
            jax.block_until_ready((last, sums))
            runs.append(time.perf_counter() - start)
        return statistics.median(runs)

    def _handing(self) -> tuple[float, float]:
        """Seconds of a hand-over from stage to stage, and of this side's processor."""
        import jax

        from whalejax.planner.pipeline.transfer_order import ScheduledTransfer

        moves = self.runner.moves
        there = ScheduledTransfer(micro_batch=0, source=0, target=1, action="forward")
        back = ScheduledTransfer(micro_batch=0, source=1, target=0, action="backward")
        aval = [self.runner.avals[v] for v in moves.values_of(there)]
        first = self.runner.here[0]
        arrays = [jax.numpy.zeros(a.shape, a.dtype) for a in aval] if first else None
        rounds = 10
        start = busy = 0.0
        for index in range(rounds + 1):
            if index == 1:
                start, busy = time.perf_counter(), time.process_time()
            found = moves.transfer(there, arrays if first else None)()
            arrays = moves.transfer(back, None if first else found)()
            if first:
                jax.block_until_ready(arrays)
        seconds = time.perf_counter() - start, time.process_time() - busy
        return seconds[0] / rounds / 2, seconds[1] / rounds / 2

    def _once(self) -> float:
        """Seconds of what is done once in a step, beside the rows."""
        order, self.runner.moves.order = self.runner.moves.order, ()
        seconds = []
        for _ in range(REPEATS):
            self.spare, once = self._advanced(self.spare)
            seconds.append(once)
        self.runner.moves.order = order
        return statistics.median(seconds)


if __name__ == "__main__":
    main()
