"""Tables over the processes of an elastic run, placed again for those that are left."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.whalejax.elastic.table_script import make_job
from tests.whalejax.elastic.test_spread import SpreadRun, in_order
from whalejax.cli.main import main
from whalejax.elastic.table_programs import TableSpreadPrograms, _first_plan
from whalejax.journals.status import status_of
from whalejax.planner.plan_errors import PlanError
from whalejax.runtime.table_copies import CopiedTableStates, _CopiedRows
from whalejax.state import checkpoint_files
from whalejax.state.shard_copies import (
    BadCopies,
    CopiedPart,
    Copies,
    CopyFile,
    ShardCopySet,
    _read_header,
    copy_file,
    read_copies,
)
from whalejax.tables import store
from whalejax.tables.row_ranges import common_rows


pytestmark = pytest.mark.relaxed_promotion

ROWS = wh.sparse_optimizer("adagrad", 0.01)


class TableRun(SpreadRun):
    """A run of ``table_script``."""

    module = "tests.whalejax.elastic.table_script"


def make_step(ranks: int, **options: Any) -> Any:
    job = make_job()
    model = jax.eval_shape(job.make_model, jax.random.key(0))
    plan = wh.plan(
        *(job.loss_fn, model, job.batch_at(0)),
        tables=ROWS,
        optimizer=job.optimizer,
        cluster=f"{options.pop('kind', 'cpu')}:{ranks}",
        **options,
    )
    given = plan, job.loss_fn, model
    devices = jax.devices()[:ranks]
    return wh.compile(*given, optimizer=job.optimizer, devices=devices)


@functools.cache
def undisturbed(steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and final tables of one device."""
    job, step = make_job(), make_step(1)
    state, losses = step.init(job.make_model, rng=jax.random.key(0)), []
    for number in range(steps):
        state, metrics = step(state, job.batch_at(number))
        losses.append(float(metrics["loss"]))
    return losses, values(step, state)


def values(step: Any, state: Any) -> dict[str, np.ndarray]:
    found = {name: np.asarray(x) for name, x in step.model(state).items()}
    for name, kinds in step.row_states(state).items():
        found |= {f"{name}.{kind}": x for kind, x in kinds.items()}
    return found


def disturbed(
    folder: Path, work: Callable[[TableRun], None], steps: int, **options: Any
) -> TableRun:
    """Runs to the end; losses, tables and their state are those of one device."""
    run = TableRun(folder, "", steps=steps, micro_batches=None, **options)
    try:
        work(run)
        assert run.wait() == 0, run.told()
    finally:
        run.end()
    known, tables = undisturbed(steps)
    found: dict[int, set[float]] = {}
    for line in run.samples():
        found.setdefault(line["step"], set()).add(line["loss"])
    assert sorted(found) == list(range(1, steps + 1))
    for step, losses in found.items():
        for loss in losses:
            assert loss == pytest.approx(known[step - 1], rel=1e-5)
    one = make_step(1)
    state = one.restore(folder / "save" / f"step_{steps:06d}")
    for name, value in values(one, state).items():
        np.testing.assert_allclose(value, tables[name], rtol=1e-4, atol=1e-6)
    return run


def placed_ranks(run: TableRun) -> list[int]:
    """Numbers of ranks that the journal names, in order."""
    texts = [event["why"] for event in run.events("tables_placed")]
    return [int(re.findall(r"on (\d+) ranks?,", text)[0]) for text in texts]


@pytest.mark.full
def test_tables_go_from_four_ranks_to_two_and_back(tmp_path: Path) -> None:
    def work(run: TableRun) -> None:
        run.until_steps_of(2)
        run.shrink(1, 1)
        run.seats(2)
        run.until_steps_of(2)

    run = disturbed(
        *(tmp_path, work, 60),
        **{"seats": 2, "devices": 2, "copy_every": 1, "save_every": 1000},
        replace_every=7,
    )
    assert in_order([2, 1, 2], [len(e["members"]) for e in run.events("begun")])
    assert in_order([4, 2, 4], placed_ranks(run))
    # What the lost process held was read from the copies of the step before.
    sources = [event["source"] for event in run.events("recovered")]
    assert "copies in memory" in sources[1]
    (status,) = status_of(tmp_path)
    assert status.tables_placed and "4 tables in" in status.tables_placed


@pytest.mark.full
def test_tables_go_from_eight_ranks_to_six_and_back(tmp_path: Path) -> None:
    """Four processes of two devices each, of which one is lost and later replaced."""

    def work(run: TableRun) -> None:
        run.until_steps_of(4)
        run.shrink(3, 3)
        run.seats(4)
        run.until_steps_of(4)

    given = {"seats": 4, "devices": 2, "copy_every": 1, "save_every": 1000}
    run = disturbed(tmp_path, work, 200, **given)
    assert in_order([4, 3, 4], [len(e["members"]) for e in run.events("begun")])
    assert in_order([8, 6, 8], placed_ranks(run))


@pytest.mark.full
def test_a_notice_loses_no_step_of_tables(tmp_path: Path) -> None:
    """Copies are off: the state goes on from a checkpoint at the step of the notice."""

    def work(run: TableRun) -> None:
        run.until_steps_of(2)
        run.seats(1)
        run.kill(1, signal.SIGTERM)
        run.until_steps_of(1)

    run = disturbed(tmp_path, work, 60, seats=2, devices=1, copy_every=0)
    assert not run.events("lost")
    saved = {event["step"] for event in run.events("saved")}
    assert run.events("recovered")[1]["step"] in saved
    losses = [(line["step"], line["count"]) for line in run.samples()]
    assert len({step for step, _ in losses}) == len(set(losses))  # None is repeated.


PLACEMENTS: list[dict[str, Any]] = [
    {"pins": {"user": "rows", "item": "columns", "word": "whole", "tag": "replicate"}},
    {
        "kind": "h100",  # It has a host memory.
        "pins": {"user": "cached:0.25", "word": "host", "item": "rows"},
    },
    {"pins": {"user": "whole", "item": "rows", "word": "rows"}},
]


@pytest.mark.parametrize("ranks", [2, 6])
def test_tables_are_made_on_their_devices(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 2 rows of every device are sent at a time."""
    job, key = make_job(), jax.random.key(3)
    step = make_step(ranks, **PLACEMENTS[0])
    known = jax.jit(job.make_model)(key)
    monkeypatch.setattr(store, "_PIECE_BYTES", 2 * 32 * 4 * ranks)
    pinned = {name for name, pin in PLACEMENTS[0]["pins"].items() if pin != "replicate"}
    for name in known.keys() & set(step.plan.tables):
        assert step.store.makes_on_devices(name) == (name in pinned)
    found = step.table_values(step.init(job.make_model, rng=key))
    for name, value in found.items():
        np.testing.assert_array_equal(value, known[name])


@pytest.mark.parametrize("before", range(3))
def test_any_placement_reads_copies_to_the_bit(tmp_path: Path, before: int) -> None:
    job, given = make_job(), make_step(4, **PLACEMENTS[before])
    state = given.init(job.make_model, rng=jax.random.key(0))
    for number in range(2):
        state, _ = given(state, job.batch_at(number))
    known = values(given, state)
    copied = ShardCopySet(step=2, generation=1, count=1)
    there = Copies(tmp_path / "c")
    there.begin(CopiedTableStates(given).parts(state), None, copied, 0)
    there.wait()
    assert not there.problem()

    def opened(name: str) -> CopyFile:
        return copy_file(tmp_path / "c" / name)

    for number, ranks in enumerate((3, 2, 6)):
        other = make_step(ranks, **PLACEMENTS[number])
        back = read_copies(opened, copied, CopiedTableStates(other))
        for name, value in values(other, back).items():
            np.testing.assert_array_equal(value, known[name])
        assert int(back.step) == 2
        dense = jax.tree.leaves((state.opt_state, jax.random.key_data(state.rng)))
        read = jax.tree.leaves((back.opt_state, jax.random.key_data(back.rng)))
        for x, y in zip(dense, read, strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        other(back, job.batch_at(2))
    path = tmp_path / "c" / copied.names[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadCopies, match="of word was changed since"):
        read_copies(opened, copied, CopiedTableStates(given))


def test_copies_have_numbers_of_types_without_a_buffer(tmp_path: Path) -> None:
    """NumPy gives no buffer of bfloat16."""
    values = np.arange(8).astype(jax.numpy.bfloat16).reshape(4, 2)
    there = Copies(tmp_path / "copies")
    copied = ShardCopySet(step=2, generation=1, count=1)
    about = {"leaf": ["tables", "rows", "user"]}
    there.begin([(about, values)], None, copied, 0)
    there.wait()
    assert there.problem() == ""
    (name,) = copied.names
    header, end, file = _read_header(copy_file(tmp_path / "copies" / name), name)
    (found,) = header["pieces"]
    part = CopiedPart(found, found["place"] + end, file, "user")
    np.testing.assert_array_equal(part.values((4, 2), values.dtype), values)


def test_copies_without_all_rows_are_not_used() -> None:
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    file = rows[::2].copy().view(np.uint8).reshape(-1)
    sha = hashlib.sha256(rows[::2].copy().data).hexdigest()
    about = {"columns": [0, 2], "rows": [0, 6, 2], "sha256": sha}
    held: Any = file
    found = _CopiedRows([CopiedPart(about, 0, held, "user")], {}, np.float32)
    np.testing.assert_array_equal(found.values(slice(2, 6, 2), slice(1, 2)), [[5], [9]])
    with pytest.raises(BadCopies, match="of user, 3 numbers were not copied"):
        found.values(slice(0, 6), slice(0, 1))
    with pytest.raises(BadCopies, match="of a table, 2 numbers were not copied"):
        _CopiedRows([], {}, np.float32).values(np.array([1]), slice(0, 2))


def test_rows_of_two_kinds_have_the_common_ones() -> None:
    random = np.random.default_rng(0)
    numbers = np.arange(60)
    for _ in range(400):
        starts, ends, steps = random.integers([[0], [0], [1]], [[9], [60], [8]], (3, 2))
        first, second = (
            slice(int(a), int(b), int(c))
            for a, b, c in zip(starts, ends, steps, strict=True)
        )
        wanted = np.intersect1d(numbers[first], numbers[second])
        for one, other in (
            (first, second),
            (numbers[first], second),
            (first, numbers[second]),
        ):
            here, there = common_rows(one, other)
            np.testing.assert_array_equal(numbers[first][here], wanted)
            np.testing.assert_array_equal(numbers[second][there], wanted)


def test_what_tables_exclude_is_refused() -> None:
    job, tables = make_job(), ROWS

    def refused(**options: Any) -> str:
        with pytest.raises(wh.WhaleError) as error:
            wh.train_elastic(job, steps=1, **options)
        return str(error.value)

    assert "mesh is 'replicas' with tables" in refused(tables=tables, mesh="replicas")
    assert "one micro-batch" in refused(tables=tables, num_micro_batches=4)
    assert "only replicas measure it" in refused(tables=tables, noise_scale=True)
    assert "replace_every is 3 without tables" in refused(replace_every=3)
    assert 'wh.sparse_optimizer("adagrad"' in refused(tables=job.optimizer)
    steps = wh.train_elastic(job, steps=1, tables=tables, batch=48, mesh={"tensor": 3})
    with pytest.raises(wh.WhaleError, match="no multiple|whose sizes make 3"):
        next(steps)


def test_a_number_of_processes_that_does_not_divide_a_batch_has_no_plan() -> None:
    job = make_job()
    made = TableSpreadPrograms(
        job, tables=ROWS, mesh="auto", batch=None, precision="f32", seed=0
    )
    assert made.plan_for(2).cluster.num_devices == 16
    with pytest.raises(PlanError, match="48 samples; expected a multiple of 40, "):
        made.plan_for(5)


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (PlanError("nothing fits"), PlanError, "nothing fits"),
        (wh.WhaleError("batch_size is 0"), wh.WhaleError, "batch_size is 0"),
        (KeyError("x"), wh.WhaleError, "of this run: process 0 failed with KeyError"),
    ],
)
def test_an_error_of_the_first_plan_is_raised_in_all_processes(
    monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type, text: str
) -> None:
    sent: list[str] = []

    def exchange(mine: str, what: str) -> list[str]:
        del what
        sent.extend([mine] * bool(not sent))
        return sent

    def make() -> Any:
        raise error

    monkeypatch.setattr(checkpoint_files, "told_by_all", exchange)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    with pytest.raises(type(error)) as first:
        _first_plan(make)
    assert first.value is error
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(kind, match=text) as other:
        _first_plan(make)
    assert type(other.value) is kind


def test_one_process_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    known, _ = undisturbed(4)
    found = {}
    for steps in (2, 4):
        for state, metrics in wh.train_elastic(
            make_job(), steps=steps, save=tmp_path, save_every=1, tables=ROWS
        ):
            found[int(state.step)] = float(metrics["loss"])
    np.testing.assert_allclose([found[n] for n in (1, 2, 3, 4)], known, rtol=1e-5)


@pytest.mark.full
def test_the_command_line_trains_tables_in_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train dlrm-test --tables adagrad:0.02 --processes 2:2 --steps 6 --quiet"
    words += f" --json --replace-every 2 --save {tmp_path}"
    assert main(words.split()) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 6 and report["state"] == "complete"
    assert "5 tables in" in report["tables_placed"]
    assert main(["status", str(tmp_path)]) == 0
    assert "ranks, the most loaded with" in capsys.readouterr().out
    # One process goes on from it.
    alone = words.replace("--processes 2:2", "--resume --cluster cpu:8")
    assert main(alone.replace("--steps 6", "--steps 8").split()) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 2
