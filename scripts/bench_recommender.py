"""A sparse section on CPUs beside a dense section: what both reach together.

    python scripts/bench_recommender.py [--kills N] [--anew] [--auc]

Two processes hold tables, each under a CPU quota on the first core; the dense section
computes under a quota as large as both on the last core. What each section takes alone,
what messages take, the pipeline of both, and the whole step in one process under either
quota are measured by turns. Kills of drawn processes at drawn moments are kept in
``recommender_kills.json`` beside this script, a case of ten each, so that a run goes on
where the last one stopped; ``--anew`` forgets them. Three cases kill the process with
the dense part, which is started again and goes on from what is kept every ten steps.
The last line is one JSON object:

    of_sections          steps a second over 1 / max(t_sparse / n, t_wire, t_dense)
    over_single          steps a second over those of the better process alone
    staleness_over_bound lookups of 10,000 steps whose rows lacked more than s updates
    synchronous_equal    1 where losses and rows with s = 0 are one device's to the bit
    kills                kills of a process; hangs, lost and doubled are the cases that
                         did not end, and updates of rows that were lost and applied
                         twice in them; wrong the cases whose losses were other ones
    dense_kills          those of them that were of the process with the dense part
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
"""Quota of each process of the sparse section, of a core; the dense one's is twice."""

STALENESS: Final = 4
LATE_STEPS: Final = 10_000
CASE_KILLS: Final = 10
KEPT_CASES: Final = 10
CASE_SECONDS: Final = 180.0
DENSE_CASES: Final = 3
DENSE_STEPS: Final = 300
KEEP_EVERY: Final = 10
ALIKE: Final = SectionTimes(sparse_seconds=2.0, wire_seconds=0.1, dense_seconds=1.0)
BUSY: Final = SectionTimes(sparse_seconds=1.0, wire_seconds=0.01, dense_seconds=0.01)


# A recommender whose sections weigh alike.

TABLES, ROWS, WIDTH, BAG, SAMPLES = 8, 20_000, 32, 32, 512


def loss(net: Any, batch: Any) -> jax.Array:
    """Bags of all tables through a network of some layers."""
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
    given = loss_fn, net, batch
    options["optimizer"] = OPTIMIZER
    return wh.plan_tables(*given, rows=rows, cluster=cluster, **options)


def sections_step(
    net: Any, staleness: int, kind: type[SectionsStep] = SectionsStep
) -> SectionsStep:
    pins = {f"t{i}": i % 2 for i in range(TABLES)}
    plan = plan_of(
        *(loss, net, make_batch(0), "cpu:2+cpu:1"),
        staleness=staleness,
        times=ALIKE,
        pins=pins,
        in_processes=list(pins),
    )
    adapter = adapt(net, loss).without_values()
    return kind(plan, adapter, OPTIMIZER, "error", jax.devices()[:1])


class IdleDense(SectionsStep):
    """The sparse section alone: the dense one gives the same gradients at once."""

    gradients: np.ndarray | None = None

    def _run_dense(self, work: Any, vectors: Any) -> Any:
        if self.gradients is None:
            packed, _ = super()._run_dense(work, vectors)
            self.gradients = packed
        return self.gradients, {"loss": 0.0}


@contextlib.contextmanager
def under(percent: float, cores: list[int], pids: list[int]) -> Iterator[None]:
    """Processes under one quota on some cores."""
    with Quota(percent) as quota:
        quota.weigh(30.0)  # Whatever else runs on this machine.
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), cores)
            quota.add(pid)
        yield


@contextlib.contextmanager
def apart(step: SectionsStep) -> Iterator[None]:
    """Each process of the sparse section under its quota on the first core."""
    with contextlib.ExitStack() as stack:
        for pid in step.pipeline.section.pids.values():
            stack.enter_context(under(PERCENT, CORES[:1], [pid]))
        yield


def seconds_of(
    run: Callable[[int], Any], settle: Callable[[], Any], least: float
) -> float:
    """Seconds of a call, over so many that they take a while."""
    count, begun = 0, time.perf_counter()
    while time.perf_counter() - begun < least:
        run(count)
        count += 1
    settle()
    return (time.perf_counter() - begun) / count


class Runs:
    """What is measured by turns, each compiled already."""

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
        """The dense section alone, on vectors that are there."""
        step, batch = self.whole, self.batches[0]
        self.settle(step)
        held = step.settled(self.states[id(step)])
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]
        layout = step.programs.layout
        shape = SAMPLES, layout.vector_elements
        vectors = [np.zeros(shape, np.float32)] * layout.ranks
        state = jax.tree.map(jnp.copy, held)

        def run(_: int) -> None:
            nonlocal state
            placed = step._on_devices(leaves), step._received(vectors)
            state, _, packed = step._train_dense(state, *placed, False)
            np.asarray(packed)

        return seconds_of(run, lambda: None, least)

    def wire_seconds(self, least: float) -> float:
        """Messages of a step's size to both processes, which compute nothing."""
        step = self.alone
        layout, pipeline = step.programs.layout, step.pipeline
        width = next(iter(layout.widths)).width
        rows = SAMPLES * layout.vector_elements // width

        def ask(rank: int) -> None:
            ids = SAMPLES * layout.id_columns // width
            there = np.zeros((rows + ids, width), np.float32)
            pipeline.put_rows(rank, width, "sum_of_squares", 0, there)
            pipeline.get_rows(rank, width, "sum_of_squares", rows, 4 * width)

        def both(_: int) -> None:
            threads = [threading.Thread(target=ask, args=(r,)) for r in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        step.settled(self.states[id(step)])
        return seconds_of(both, lambda: None, least)

    def round(self, least: float) -> dict[str, float]:
        """Every run once under the quotas."""
        here, found = [os.getpid()], {}
        with under(2 * PERCENT, CORES[-1:], here):
            with apart(self.alone):
                found["sparse"] = self.seconds(self.alone, least)
                found["wire"] = self.wire_seconds(least / 2)
            found["dense"] = self.dense_seconds(least)
            with apart(self.whole):
                found["both"] = self.seconds(self.whole, least)
            found["single"] = self.seconds(self.single, least)
        with under(2 * PERCENT, CORES[:1], here):
            found["single_sparse"] = self.seconds(self.single, least)
        os.sched_setaffinity(0, CORES[-1:])
        return found

    def close(self) -> None:
        self.whole.close()
        self.alone.close()


def balanced() -> Runs:
    """A network as heavy as the tables, under the quotas."""
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
    runs, of_sections, over_single = balanced(), [], []
    for _ in range(rounds):
        found = runs.round(4.0)
        bound = max(found["sparse"], found["wire"], found["dense"])
        of_sections.append(bound / found["both"])
        single = min(found["single"], found["single_sparse"])
        over_single.append(single / found["both"])
        print(", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in found.items()))
    runs.close()
    return {
        "of_sections": round(statistics.median(of_sections), 3),
        "over_single": round(statistics.median(over_single), 3),
    }


# Exact counts: each lookup of a row takes 1 from it.

COUNTED: Final = {"a": 501, "b": 97}
COUNT_SAMPLES: Final = 64


def counted_loss(net: Any, batch: Any) -> jax.Array:
    """Of which every row that is looked up has the gradient 1 / samples."""
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
    given = plan, adapter, OPTIMIZER, "error", jax.devices()[:1]
    return SectionsStep(*given, **settings)


def case(number: int) -> dict[str, int]:
    """Ten kills at drawn moments of one run; every third run is synchronous."""
    drawn = random.Random(number)
    staleness = (0, 1, STALENESS)[number % 3]
    losses: list[Any] = []
    dead: set[int] = set()
    with counted_step(staleness, log_bytes=100_000) as step:
        section, state, killed, steps = step.pipeline.section, None, 0, 0
        state = step.init_from(counted_net())
        next_kill, pause = drawn.randrange(3, 20), 0.0
        while killed < CASE_KILLS or section.replaced < killed or steps < next_kill:
            state, metrics = step(state, counted_batch(steps))
            losses.append(metrics)
            steps += 1
            alive = [pid for pid in section.pids.values() if pid not in dead]
            if killed < CASE_KILLS and steps >= next_kill and len(alive) == 2:
                time.sleep(pause)
                victim = alive[drawn.randrange(2)]
                dead.add(victim)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                    killed += 1
                next_kill = steps + drawn.randrange(1, 30)
                pause = drawn.random() * 0.05
        rows, report = step.table_values(state), step.report()
        found = [float(metrics["loss"]) for metrics in losses]
    lost, doubled = lost_and_doubled(rows, steps)
    with counted_step(staleness) as step:
        state, expected = step.init_from(counted_net()), []
        for n in range(steps):
            state, metrics = step(state, counted_batch(n))
            expected.append(metrics)
        wrong = found != [float(metrics["loss"]) for metrics in expected]
    return {
        "kills": killed,
        "lost": lost,
        "doubled": doubled,
        "over_bound": report.over_bound,
        "wrong": int(wrong),
        "steps": steps,
    }


def dense_process(folder: Path, staleness: int) -> None:
    """The process with the dense part, which goes on where the last one was killed."""
    run = wh.SectionRun(folder=folder / "kept", keep_every=KEEP_EVERY)
    with (
        counted_step(staleness, run=run, log_bytes=100_000) as step,
        (folder / "losses").open("a") as file,
    ):
        state = step.resume() or step.init_from(counted_net())
        waiting: list[tuple[int, Any]] = []
        for number in range(int(state.step), DENSE_STEPS):
            state, metrics = step(state, counted_batch(number))
            waiting.append((number, metrics))
            if len(waiting) > staleness or number + 1 == DENSE_STEPS:
                for done, found in waiting:
                    file.write(f"{done} {float(found['loss'])!r}\n")
                file.flush()
                waiting = []
        over = step.report().over_bound
        np.savez(folder / "rows.npz", over=over, **step.table_values(state))


def dense_case(number: int) -> dict[str, int]:
    """Ten kills of the process with the dense part, at drawn moments."""
    drawn, staleness = random.Random(number), (0, 1, STALENESS)[number % 3]
    with tempfile.TemporaryDirectory() as made:
        killed, alone = Path(made) / "killed", Path(made) / "alone"
        kills_done = 0
        while not (killed / "rows.npz").exists():
            process = start_dense(killed, staleness)
            if kills_done < CASE_KILLS:
                begun = done_of(killed)
                wanted = begun + drawn.randrange(1, DENSE_STEPS // CASE_KILLS)
                while process.poll() is None and done_of(killed) < wanted:
                    time.sleep(0.01)
                time.sleep(drawn.random() * 0.05)
                if process.poll() is None:
                    process.kill()
                    kills_done += 1
            process.wait()
        start_dense(alone, staleness).wait()
        with np.load(killed / "rows.npz") as rows, np.load(alone / "rows.npz") as one:
            same = all(np.array_equal(rows[name], one[name]) for name in COUNTED)
            missing, over = {name: rows[name] for name in COUNTED}, int(rows["over"])
        lost, doubled = lost_and_doubled(missing, DENSE_STEPS)
        # The last loss before a kill may not be written, and its step not done again.
        found, expected = losses_of(killed), losses_of(alone)
        wrong = not same or any(
            set(each) != set(expected[n]) for n, each in found.items()
        )
    return {
        "kills": kills_done,
        "lost": lost,
        "doubled": doubled,
        "over_bound": over,
        "wrong": int(wrong),
        "steps": DENSE_STEPS,
    }


def start_dense(folder: Path, staleness: int) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    words = ["--dense-process", str(folder), "--staleness", str(staleness)]
    return subprocess.Popen([sys.executable, __file__, *words])


def losses_of(folder: Path) -> dict[int, list[str]]:
    """Losses of each step, as often as it was done; a half line counts for none."""
    found: dict[int, list[str]] = {}
    path = folder / "losses"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        words = line.split()
        if line.endswith("\n") and len(words) == 2:
            found.setdefault(int(words[0]), []).append(words[1])
    return found


def done_of(folder: Path) -> int:
    return max(losses_of(folder), default=-1)


def lost_and_doubled(rows: Any, steps: int) -> tuple[int, int]:
    """Updates of rows that are missing, and that were applied twice."""
    lost = doubled = 0
    for name, size in COUNTED.items():
        ids = np.concatenate([counted_batch(n)[name].ravel() for n in range(steps)])
        missing = np.bincount(ids, minlength=size)[:, None] + rows[name]
        lost += int(np.maximum(missing, 0).max(1).sum())
        doubled += int(np.maximum(-missing, 0).max(1).sum())
    return lost, doubled


def case_apart(number: int, name: str = "--case") -> dict[str, int]:
    """A case in a process of its own, which may hang."""
    command = [sys.executable, __file__, name, str(number)]
    limit = CASE_SECONDS * (1 if name == "--case" else 4)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return {"hangs": 1}
    if done.returncode:
        print(done.stderr[-2000:])
        return {"failed": 1}
    return {"hangs": 0, **json.loads(done.stdout.splitlines()[-1])}


def kills(wanted: int, *, anew: bool) -> dict[str, int]:
    """Kept cases, and those that are missing."""
    known = {} if anew or not FILE.exists() else json.loads(FILE.read_text())
    for number in range(-(-wanted // CASE_KILLS)):
        if str(number) not in known:
            known[str(number)] = case_apart(number)
            print(f"case {number}: {known[str(number)]}")
            FILE.write_text(json.dumps(known, indent=1) + "\n")
    for number in range(DENSE_CASES):
        if (key := f"dense-{number}") not in known:
            known[key] = case_apart(number, "--dense-case")
            print(f"case {key}: {known[key]}")
            FILE.write_text(json.dumps(known, indent=1) + "\n")
    fresh = case_apart(1000 + int(time.time()) % 1000)
    print(f"one more: {fresh}")
    cases = [*known.values(), fresh]
    keys = "kills", "hangs", "failed", "lost", "doubled", "wrong", "over_bound"
    dense = [each for key, each in known.items() if key.startswith("dense-")]
    total = {key: sum(each.get(key, 0) for each in cases) for key in keys}
    return total | {"dense_kills": sum(each.get("kills", 0) for each in dense)}


def late_steps() -> int:
    """Lookups that lacked more updates than they may, in many steps."""
    with counted_step(STALENESS) as step:
        state, metrics = step.init_from(counted_net()), {"loss": 0.0}
        batches, begun = [counted_batch(n) for n in range(64)], time.perf_counter()
        for number in range(LATE_STEPS):
            state, metrics = step(state, batches[number % 64])
        float(metrics["loss"])
        report = step.report()
        print(f"{LATE_STEPS} steps in {time.perf_counter() - begun:.0f} s: {report}")
        return report.over_bound


def synchronous_equal() -> int:
    net = make_net(2)
    plan = plan_of(loss, net, make_batch(0), "cpu:1")
    one = wh.compile_tables(
        plan, loss, net, optimizer=OPTIMIZER, devices=jax.devices()[:1]
    )
    found = []
    with sections_step(net, 0) as step:
        for each in (one, step):
            state, losses = each.init_from(net), []
            for number in range(30):
                state, metrics = each(state, make_batch(number))
                losses.append(float(metrics["loss"]))
            found.append((losses, each.table_values(state)))
    (losses, rows), (others, other_rows) = found
    same = all(np.array_equal(rows[name], other_rows[name]) for name in rows)
    return int(losses == others and same)


def late_flights(staleness: int) -> float:
    """AUC on the last flights of a year after one pass over those before."""
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
        later = data.window(last, data.size)
        scores = np.asarray(step.model(state)(later))
        late = step.report().lags
    print(f"staleness {staleness}: {late}")
    return area_under_curve(later["label"], scores)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=CASE_KILLS * KEPT_CASES)
    parser.add_argument("--anew", action="store_true", help="forget the kept cases")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", type=int, help="one case of kills, and nothing else")
    parser.add_argument("--dense-case", type=int, help="the same of the dense part's")
    parser.add_argument("--dense-process", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--staleness", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--auc", action="store_true", help="of s = 0, 1, 4, 16 alone")
    options = parser.parse_args()
    if options.auc:
        os.sched_setaffinity(0, CORES)
        curve = {s: round(late_flights(s), 4) for s in (0, 1, 4, 16)}
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
        print(json.dumps(case(options.case)))
        return
    found: dict[str, Any] = sections(options.rounds)
    os.sched_setaffinity(0, CORES)
    found["synchronous_equal"] = synchronous_equal()
    found["staleness_over_bound"] = late_steps()
    found |= kills(options.kills, anew=options.anew)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
