"""Measures a sparse section on CPUs together with a dense section.

    python scripts/bench_recommender.py [--kills N] [--anew] [--auc]

Two processes have the tables, each under a CPU quota on the first core; the dense
section computes under a quota as large as both on the last core. Measured in turn are
each section alone, the messages, the pipeline of both, and the full step in one process
under either quota. ``recommender_kills.json`` beside this script stores kills of random
processes at random moments, in cases of ten, so that a run continues where the last one
stopped; ``--anew`` forgets them. Three cases kill the process with the dense part,
which is started again and continues from its snapshot of every ten steps.
The last line is one JSON object:

    of_sections          steps a second over 1 / max(t_sparse / n, t_wire, t_dense)
    over_single          steps a second over those of the better process alone
    staleness_over_bound lookups of 10,000 steps whose rows lacked more than s updates
    synchronous_equal    1 if losses and rows with s = 0 are one device's to the bit
    kills                kills of a process; hangs, lost and doubled are the cases that
                         did not end, and the row updates that were lost or applied
                         twice in them; wrong the cases with other losses
    dense_kills          kills of the process with the dense part
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final


os.environ["JAX_PLATFORMS"] = "cpu"
CORES: Final = sorted(os.sched_getaffinity(0))
if __name__ == "__main__":
    os.sched_setaffinity(0, CORES[-1:])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import whalejax as wh  # noqa: E402
from whalejax.adapters.base import adapt  # noqa: E402
from whalejax.distributed.cgroup_quota import Quota  # noqa: E402
from whalejax.models import dlrm  # noqa: E402
from whalejax.models.click_data import area_under_curve, flights  # noqa: E402
from whalejax.planner.tables.sections import SectionTimes  # noqa: E402
from whalejax.runtime.sections_step import SectionsStep  # noqa: E402


CURVE: Final = Path(__file__).with_name("recommender_auc.json")
FILE: Final = Path(__file__).with_name("recommender_kills.json")
PERCENT: Final = 35.0
"""Percent of a core of each process of the sparse section; the dense one has twice."""

STALENESS: Final = 4
LATE_STEPS: Final = 10_000
CASE_KILLS: Final = 10
STORED_CASES: Final = 10
CASE_SECONDS: Final = 180.0
DENSE_CASES: Final = 3
DENSE_STEPS: Final = 300
KEEP_EVERY: Final = 10
EVEN: Final = SectionTimes(sparse_seconds=2.0, wire_seconds=0.1, dense_seconds=1.0)
BUSY: Final = SectionTimes(sparse_seconds=1.0, wire_seconds=0.01, dense_seconds=0.01)


# A recommender whose sections take equally long.

TABLES, ROWS, WIDTH, BAG, SAMPLES = 8, 20_000, 32, 32, 512


def loss(net: Any, batch: Any) -> jax.Array:
    bags = [net[f"t{i}"][batch["ids"][:, i]].sum(1) for i in range(TABLES)]
    x = jnp.concatenate(bags, axis=1)
    for layer in net["layers"]:
        x = x + 0.1 * jnp.tanh(x @ layer)
    return jnp.mean((x.mean(1) - batch["label"]) ** 2)


def make_net(layers: int) -> dict[str, Any]:
    random_ = np.random.default_rng(0)
    width = TABLES * WIDTH

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random_.standard_normal(shape) / shape[-1], jnp.float32)

    tables = {f"t{i}": normal(ROWS, WIDTH) for i in range(TABLES)}
    return {**tables, "layers": [normal(width, width) for _ in range(layers)]}


def make_batch(step: int) -> dict[str, np.ndarray]:
    random_ = np.random.default_rng(step % 16)
    return {
        "ids": random_.integers(0, ROWS, (SAMPLES, TABLES, BAG)).astype(np.int32),
        "label": random_.standard_normal(SAMPLES).astype(np.float32),
    }


OPTIMIZER: Final = optax.sgd(0.01)


def plan_of(loss_fn: Any, net: Any, batch: Any, cluster: str, **options: Any) -> Any:
    rows = options.pop("rows", wh.sparse_optimizer("adagrad", 0.01))
    arguments = loss_fn, net, batch
    options["optimizer"] = OPTIMIZER
    return wh.plan_tables(*arguments, rows=rows, cluster=cluster, **options)


def sections_step(
    net: Any, staleness: int, kind: type[SectionsStep] = SectionsStep
) -> SectionsStep:
    pins = {f"t{i}": i % 2 for i in range(TABLES)}
    plan = plan_of(
        *(loss, net, make_batch(0), "cpu:2+cpu:1"),
        staleness=staleness,
        times=EVEN,
        pins=pins,
        in_processes=list(pins),
    )
    adapter = adapt(net, loss).without_values()
    return kind(plan, adapter, OPTIMIZER, "error", jax.devices()[:1])


class IdleDense(SectionsStep):
    """A sparse section alone: the dense one returns the same gradients at once."""

    gradients: np.ndarray | None = None

    def _run_dense(self, work: Any, vectors: Any) -> Any:  # pyright: ignore
        if self.gradients is None:
            packed, _ = super()._run_dense(work, vectors)
            self.gradients = packed
        return self.gradients, {"loss": 0.0}


@contextlib.contextmanager
def limit(percent: float, cores: list[int], pids: list[int]) -> Iterator[None]:
    """Puts processes under one quota on some cores."""
    with Quota(percent) as quota:
        quota.weigh(30.0)  # Other programs may run on this machine.
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), cores)
            quota.add(pid)
        yield


@contextlib.contextmanager
def limits(step: SectionsStep) -> Iterator[None]:
    """Puts each process of the sparse section under its quota on the first core."""
    with contextlib.ExitStack() as stack:
        for pid in step.pipeline.section.pids.values():
            stack.enter_context(limit(PERCENT, CORES[:1], [pid]))
        yield


def seconds_of(
    run: Callable[[int], Any], settle: Callable[[], Any], least: float
) -> float:
    """Returns the seconds of a call, over at least ``least`` seconds of calls."""
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < least:
        run(count)
        count += 1
    settle()
    return (time.perf_counter() - start) / count


class Runs:
    """Compiled steps that are measured in turn."""

    def __init__(self, layers: int) -> None:
        self.net = make_net(layers)
        self.whole = sections_step(self.net, STALENESS)
        self.alone = sections_step(self.net, STALENESS, IdleDense)
        plan = plan_of(loss, self.net, make_batch(0), "cpu:1")
        self.single = wh.compile_tables(
            plan, loss, self.net, optimizer=OPTIMIZER, devices=jax.devices()[:1]
        )
        self.states = {
            id(step): step.init_from(self.net)
            for step in (self.whole, self.alone, self.single)
        }
        self.batches = [make_batch(n) for n in range(16)]
        for step in (self.whole, self.alone, self.single):
            for number in range(12):
                self.advance(step, number)
            self.settle(step)

    def advance(self, step: Any, number: int) -> None:
        state, self.metrics = step(self.states[id(step)], self.batches[number % 16])
        self.states[id(step)] = state

    def settle(self, step: Any) -> None:
        float(self.metrics["loss"])

    def seconds(self, step: Any, least: float) -> float:
        return seconds_of(
            lambda n: self.advance(step, n), lambda: self.settle(step), least
        )

    def dense_seconds(self, least: float) -> float:
        """Returns the seconds of the dense section alone, on present vectors."""
        step, batch = self.whole, self.batches[0]
        self.settle(step)
        settled = step.settled(self.states[id(step)])
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
        requests = step._requests_for(step._host_ids(leaves)[0])
        answers = step.pipeline.look_up(requests)
        state = jax.tree.map(jnp.copy, settled)

        def run(_: int) -> None:
            nonlocal state
            placed = step._on_devices(leaves), step._received(requests, answers)
            state, _, packed = step._train_dense(state, *placed, False)
            for request, own in zip(requests, np.asarray(packed), strict=True):
                step._requests.gradients(request, own)

        return seconds_of(run, lambda: None, least)

    def wire_seconds(self, least: float) -> float:
        """Returns the seconds of a step's messages to idle processes."""
        step = self.alone
        layout, pipeline = step.programs.layout, step.pipeline
        width = next(iter(layout.widths)).width
        rows = SAMPLES * layout.vector_elements // width

        def ask(rank: int) -> None:
            ids = SAMPLES * layout.id_columns // width
            rows_to_write = np.zeros((rows + ids, width), np.float32)
            pipeline.put_rows(rank, width, "sum_of_squares", 0, rows_to_write)
            pipeline.get_rows(rank, width, "sum_of_squares", rows, 4 * width)

        def ask_both(_: int) -> None:
            threads = [threading.Thread(target=ask, args=(r,)) for r in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        step.settled(self.states[id(step)])
        return seconds_of(ask_both, lambda: None, least)

    def round(self, least: float) -> dict[str, float]:
        """Measures every run once under the quotas."""
        pids, seconds = [os.getpid()], {}
        with limit(2 * PERCENT, CORES[-1:], pids):
            with limits(self.alone):
                seconds["sparse"] = self.seconds(self.alone, least)
                seconds["wire"] = self.wire_seconds(least / 2)
            seconds["dense"] = self.dense_seconds(least)
            with limits(self.whole):
                seconds["both"] = self.seconds(self.whole, least)
            seconds["single"] = self.seconds(self.single, least)
        with limit(2 * PERCENT, CORES[:1], pids):
            seconds["single_sparse"] = self.seconds(self.single, least)
        os.sched_setaffinity(0, CORES[-1:])
        return seconds

    def close(self) -> None:
        self.whole.close()
        self.alone.close()


def even_runs() -> Runs:
    """Returns runs whose network takes as long as the tables, under the quotas."""
    layers = 8
    for _ in range(3):
        runs = Runs(layers)
        first = runs.round(2.0)
        ratio = first["sparse"] / first["dense"]
        print(f"{layers} layers: dense {1 / ratio:.2f} of the sparse section")
        if 0.85 < ratio < 1.2:
            return runs
        runs.close()
        layers = max(1, round(layers * ratio))
    return Runs(layers)


def sections(rounds: int) -> dict[str, float]:
    runs, of_sections, over_single = even_runs(), [], []
    for _ in range(rounds):
        seconds = runs.round(4.0)
        bound = max(seconds["sparse"], seconds["wire"], seconds["dense"])
        of_sections.append(bound / seconds["both"])
        single = min(seconds["single"], seconds["single_sparse"])
        over_single.append(single / seconds["both"])
        print(", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in seconds.items()))
    runs.close()
    return {
        "of_sections": round(statistics.median(of_sections), 3),
        "over_single": round(statistics.median(over_single), 3),
    }


# Exact counts: each lookup of a row takes 1 from it.

COUNTED: Final = {"a": 501, "b": 97}
COUNT_SAMPLES: Final = 64


def counted_loss(net: Any, batch: Any) -> jax.Array:
    """Returns a loss in which every looked-up row has the gradient 1 / samples."""
    rows = [net[name][batch[name]].sum((1, 2)) for name in COUNTED]
    return jnp.mean(sum(rows)) + jnp.mean((batch["x"] @ net["w"] - 1) ** 2)


def counted_net() -> dict[str, Any]:
    tables = {n: jnp.zeros((rows, 16), jnp.float32) for n, rows in COUNTED.items()}
    return {**tables, "w": jnp.zeros((8,), jnp.float32)}


def counted_batch(step: int) -> dict[str, np.ndarray]:
    random_ = np.random.default_rng(step)
    ids = {
        name: random_.integers(0, rows, (COUNT_SAMPLES, 4)).astype(np.int32)
        for name, rows in COUNTED.items()
    }
    return {**ids, "x": random_.standard_normal((COUNT_SAMPLES, 8)).astype(np.float32)}


def counted_step(staleness: int, **settings: Any) -> SectionsStep:
    net = counted_net()
    plan = plan_of(
        *(counted_loss, net, counted_batch(0), "cpu:2+cpu:1"),
        rows=wh.sparse_optimizer("sgd", float(COUNT_SAMPLES)),
        staleness=staleness,
        times=BUSY,
        pins={"a": "rows", "b": 1},
        in_processes=list(COUNTED),
    )
    adapter = adapt(net, counted_loss).without_values()
    arguments = plan, adapter, OPTIMIZER, "error", jax.devices()[:1]
    return SectionsStep(*arguments, **settings)


def kill_case(number: int) -> dict[str, int]:
    """Kills processes of a run ten times; every third run is synchronous."""
    rng = random.Random(number)
    staleness = (0, 1, STALENESS)[number % 3]
    losses: list[Any] = []
    killed_pids: set[int] = set()
    with counted_step(staleness, log_bytes=100_000) as step:
        section, state, killed, steps = step.pipeline.section, None, 0, 0
        state = step.init_from(counted_net())
        next_kill, pause = rng.randrange(3, 20), 0.0
        while killed < CASE_KILLS or section.replaced < killed or steps < next_kill:
            state, metrics = step(state, counted_batch(steps))
            losses.append(metrics)
            steps += 1
            live_pids = [pid for pid in section.pids.values() if pid not in killed_pids]
            if killed < CASE_KILLS and steps >= next_kill and len(live_pids) == 2:
                time.sleep(pause)
                victim = live_pids[rng.randrange(2)]
                killed_pids.add(victim)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
                next_kill = steps + rng.randrange(1, 30)
                pause = rng.random() * 0.05
        rows, report = step.table_values(state), step.report()
        losses_read = [float(metrics["loss"]) for metrics in losses]
    lost, doubled = lost_and_doubled(rows, steps)
    with counted_step(staleness) as step:
        state, expected = step.init_from(counted_net()), []
        for n in range(steps):
            state, metrics = step(state, counted_batch(n))
            expected.append(metrics)
        is_wrong = losses_read != [float(metrics["loss"]) for metrics in expected]
    return {
        "kills": killed,
        "lost": lost,
        "doubled": doubled,
        "over_bound": report.over_bound,
        "wrong": int(is_wrong),
        "steps": steps,
    }


def dense_process(folder: Path, staleness: int) -> None:
    """Runs the process with the dense part, which continues after a kill."""
    run = wh.SectionRun(folder=folder / "kept", keep_every=KEEP_EVERY)
    with (
        counted_step(staleness, run=run, log_bytes=100_000) as step,
        (folder / "losses").open("a") as file,
    ):
        state = step.resume() or step.init_from(counted_net())
        pending: list[tuple[int, Any]] = []
        for number in range(int(state.step), DENSE_STEPS):
            state, metrics = step(state, counted_batch(number))
            pending.append((number, metrics))
            if len(pending) > staleness or number + 1 == DENSE_STEPS:
                for step_number, metrics_then in pending:
                    file.write(f"{step_number} {float(metrics_then['loss'])!r}\n")
                file.flush()
                pending = []
        over_bound = step.report().over_bound
        np.savez(folder / "rows.npz", over=over_bound, **step.table_values(state))


def dense_case(number: int) -> dict[str, int]:
    """Kills the process with the dense part ten times, at random moments."""
    rng, staleness = random.Random(number), (0, 1, STALENESS)[number % 3]
    with tempfile.TemporaryDirectory() as folder:
        killed, quiet = Path(folder) / "killed", Path(folder) / "alone"
        kills_done = 0
        while not (killed / "rows.npz").exists():
            process = start_dense(killed, staleness)
            if kills_done < CASE_KILLS:
                start = last_step(killed)
                kill_step = start + rng.randrange(1, DENSE_STEPS // CASE_KILLS)
                while process.poll() is None and last_step(killed) < kill_step:
                    time.sleep(0.01)
                time.sleep(rng.random() * 0.05)
                if process.poll() is None:
                    process.kill()
                    kills_done += 1
            process.wait()
        start_dense(quiet, staleness).wait()
        with np.load(killed / "rows.npz") as rows, np.load(quiet / "rows.npz") as other:
            equal = all(np.array_equal(rows[name], other[name]) for name in COUNTED)
            tables, over_bound = (
                {name: rows[name] for name in COUNTED},
                int(rows["over"]),
            )
        lost, doubled = lost_and_doubled(tables, DENSE_STEPS)
        # The last loss before a kill may be missing, and its step not repeated.
        losses, expected = losses_of(killed), losses_of(quiet)
        is_wrong = not equal or any(
            set(values) != set(expected[n]) for n, values in losses.items()
        )
    return {
        "kills": kills_done,
        "lost": lost,
        "doubled": doubled,
        "over_bound": over_bound,
        "wrong": int(is_wrong),
        "steps": DENSE_STEPS,
    }


def start_dense(folder: Path, staleness: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    options = ["--dense-process", str(folder), "--staleness", str(staleness)]
    return subprocess.Popen([sys.executable, __file__, *options])


def losses_of(folder: Path) -> dict[int, list[str]]:
    """Returns the losses of each step, as often as it was done, without half lines."""
    losses: dict[int, list[str]] = {}
    path = folder / "losses"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        words = line.split()
        if line.endswith("\n") and len(words) == 2:
            losses.setdefault(int(words[0]), []).append(words[1])
    return losses


def last_step(folder: Path) -> int:
    return max(losses_of(folder), default=-1)


def lost_and_doubled(rows: Any, steps: int) -> tuple[int, int]:
    """Returns the numbers of missing and of repeated updates of rows."""
    lost = doubled = 0
    for name, size in COUNTED.items():
        ids = np.concatenate([counted_batch(n)[name].ravel() for n in range(steps)])
        missing = np.bincount(ids, minlength=size)[:, None] + rows[name]
        lost += int(np.maximum(missing, 0).max(1).sum())
        doubled += int(np.maximum(-missing, 0).max(1).sum())
    return lost, doubled


def run_case(number: int, name: str = "--case") -> dict[str, int]:
    """Runs a case in a process of its own, which may hang."""
    command = [sys.executable, __file__, name, str(number)]
    limit = CASE_SECONDS * (1 if name == "--case" else 4)
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"hangs": 1}
    if process.returncode:
        print(process.stderr[-2000:])
        return {"failed": 1}
    return {"hangs": 0, **json.loads(process.stdout.splitlines()[-1])}


def kills(count: int, *, anew: bool) -> dict[str, int]:
    """Runs the missing cases and returns the totals of all."""
    records = {} if anew or not FILE.exists() else json.loads(FILE.read_text())
    for number in range(-(-count // CASE_KILLS)):
        if str(number) not in records:
            records[str(number)] = run_case(number)
            print(f"case {number}: {records[str(number)]}")
            FILE.write_text(json.dumps(records, indent=1) + "\n")
    for number in range(DENSE_CASES):
        if (key := f"dense-{number}") not in records:
            records[key] = run_case(number, "--dense-case")
            print(f"case {key}: {records[key]}")
            FILE.write_text(json.dumps(records, indent=1) + "\n")
    fresh = run_case(1000 + int(time.time()) % 1000)
    print(f"fresh case: {fresh}")
    cases = [*records.values(), fresh]
    keys = "kills", "hangs", "failed", "lost", "doubled", "wrong", "over_bound"
    dense = [record for key, record in records.items() if key.startswith("dense-")]
    total = {key: sum(record.get(key, 0) for record in cases) for key in keys}
    return total | {"dense_kills": sum(record.get("kills", 0) for record in dense)}


def count_late_lookups() -> int:
    """Returns the lookups that lacked more updates than allowed, in many steps."""
    with counted_step(STALENESS) as step:
        state, metrics = step.init_from(counted_net()), {"loss": 0.0}
        batches, start = [counted_batch(n) for n in range(64)], time.perf_counter()
        for number in range(LATE_STEPS):
            state, metrics = step(state, batches[number % 64])
        float(metrics["loss"])
        report = step.report()
        print(f"{LATE_STEPS} steps in {time.perf_counter() - start:.0f} s: {report}")
        return report.over_bound


def synchronous_equal() -> int:
    net = make_net(2)
    plan = plan_of(loss, net, make_batch(0), "cpu:1")
    single = wh.compile_tables(
        plan, loss, net, optimizer=OPTIMIZER, devices=jax.devices()[:1]
    )
    results = []
    with sections_step(net, 0) as step:
        for trained in (single, step):
            state, losses = trained.init_from(net), []
            for number in range(30):
                state, metrics = trained(state, make_batch(number))
                losses.append(float(metrics["loss"]))
            results.append((losses, trained.table_values(state)))
    (losses, rows), (others, other_rows) = results
    are_equal = all(np.array_equal(rows[name], other_rows[name]) for name in rows)
    return int(losses == others and are_equal)


def flights_auc(staleness: int) -> float:
    """Returns the AUC on the last flights of a year after one pass over the others."""
    data = flights()
    count = len(data.rows)
    config = dlrm.DLRMConfig(
        rows=data.rows, bags=(1,) * count, dense=5, bottom=(64,), top=(64, 32)
    )
    model, size, last = dlrm.DLRM(config, rngs=nnx.Rngs(0)), 512, 300_000
    optimizer = optax.adagrad(0.1)
    options: dict[str, Any] = {"optimizer": optimizer}
    plan = wh.plan(
        *(dlrm.loss_fn, model, data.batch(0, size)),
        tables=wh.sparse_optimizer("adagrad", 0.1),
        cluster="cpu:1+cpu:1",
        staleness=staleness,
        in_processes=[f"tables.c{n}.embedding" for n in range(count)],
        **options,
    )
    step: Any = wh.compile(
        plan, dlrm.loss_fn, model, devices=jax.devices()[:1], **options
    )
    with step:
        state = step.init_from(model)
        for number in range(last // size):
            state, _ = step(state, data.batch(number, size))
        window = data.window(last, data.size)
        scores = np.asarray(step.model(state)(window))
        lags = step.report().lags
    print(f"staleness {staleness}: {lags}")
    return area_under_curve(window["label"], scores)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=CASE_KILLS * STORED_CASES)
    parser.add_argument("--anew", action="store_true", help="forget the stored cases")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--dense-case", type=int, help="this dense case alone")
    parser.add_argument("--dense-process", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--staleness", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--auc", action="store_true", help="for s = 0, 1, 4, 16")
    options = parser.parse_args()
    if options.auc:
        os.sched_setaffinity(0, CORES)
        curve = {s: round(flights_auc(s), 4) for s in (0, 1, 4, 16)}
        CURVE.write_text(json.dumps(curve, indent=1) + "\n")
        print(json.dumps(curve))
        return
    if options.dense_process is not None:
        os.sched_setaffinity(0, CORES)
        dense_process(options.dense_process, options.staleness)
        return
    if options.dense_case is not None:
        os.sched_setaffinity(0, CORES)
        print(json.dumps(dense_case(options.dense_case)))
        return
    if options.case is not None:
        os.sched_setaffinity(0, CORES)
        print(json.dumps(kill_case(options.case)))
        return
    report: dict[str, Any] = sections(options.rounds)
    os.sched_setaffinity(0, CORES)
    report["synchronous_equal"] = synchronous_equal()
    report["staleness_over_bound"] = count_late_lookups()
    report |= kills(options.kills, anew=options.anew)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
