"""A step with tables whose devices belong to two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import whalejax as wh
from tests.processes import finish, start
from tests.whalejax.test_table_replacing import OPTIMIZER, ROWS, check_same, make_batch
from tests.whalejax.test_table_step import loss, make_net


pytestmark = pytest.mark.relaxed_promotion

PROGRAM = """
import dataclasses, json
from pathlib import Path
import numpy as np
import whalejax as wh
from tests.whalejax.test_table_replacing import OPTIMIZER, ROWS, make_batch
from tests.whalejax.test_table_step import loss, make_net
from whalejax.runtime.table_step import TableStep
from whalejax.state.checkpoint_files import told_by_all

folder = Path(sys.argv[5])
net = make_net(np.float32)

def compiled(optimizer=OPTIMIZER, pins=None, **options):
    given = {"tables": ROWS, "optimizer": optimizer, "pins": pins}
    plan = wh.plan(loss, net, make_batch(0), cluster="cpu:4", **given)
    return wh.compile(plan, loss, net, optimizer=optimizer, **options)

def refused(what, *given):
    try:
        what(*given)
    except wh.WhaleError as error:
        return str(error)

step, found = compiled(replace_every=2, pins={"user": "rows"}), {"losses": []}
state = step.restore_or_init(folder, lambda key: net, rng=jax.random.key(0))
mine = step.batch_rows()
found["rows"] = [int(mine[0]), int(mine[-1])]
columns = compiled(pins={"item": "columns", "word": "rows"})
for number in range(4):
    batch = {name: leaf[mine] for name, leaf in make_batch(number).items()}
    if number == 3:
        state = step.place(state, columns.plan.placement)
        batch = make_batch(number)  # A whole batch gives the same.
        found["eval"] = float(step.eval(state, batch)["loss"])
    state, metrics = step(state, batch)
    found["losses"].append(float(metrics["loss"]))
step.save(folder / "step_000004", state)
model = step.model(state)
np.savez(folder / f"model{index}.npz", **{k: np.asarray(x) for k, x in model.items()})
again = step.restore_or_init(folder, lambda key: net, rng=jax.random.key(0))
found["again"] = [int(again.step), float(step.eval(again, batch)["loss"])]
bad = {**batch, "user": np.full_like(batch["user"], 99)}
found["bad"] = refused(step, state, bad)
found["shape"] = refused(step, state, {**batch, "user": batch["user"][:7]})
found["adopt"] = refused(step.adopt, state, step)
try:
    given = {"tables": ROWS, "optimizer": OPTIMIZER, "in_processes": ["user"]}
    late = wh.plan(loss, net, make_batch(0), cluster="cpu:1+cpu:4", **given)
    compile_late = lambda: wh.compile(late, loss, net, optimizer=OPTIMIZER)
    found["sections"] = refused(compile_late)
except wh.WhaleError as error:
    found["sections"] = str(error)
# The second one has another placement, and would wait for what the first does not send.
other = compiled(pins={"user": "whole" if index else "rows"})
found["other"] = refused(other, other.init_from(net), batch)
told_by_all("", "done")
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("processes") / "run"
    folder.mkdir()
    outputs = finish(start(PROGRAM, folder, devices=2))
    return folder, [json.loads(output.splitlines()[-1]) for output in outputs]


def one_device() -> tuple[Any, Any, list[float]]:
    net = make_net(np.float32)
    given: Any = {"tables": ROWS, "optimizer": OPTIMIZER, "cluster": "cpu:1"}
    plan = wh.plan(loss, net, make_batch(0), **given)
    devices = jax.devices()[:1]
    step = wh.compile(plan, loss, net, optimizer=OPTIMIZER, devices=devices)
    state, losses = step.init_from(net), []
    for number in range(4):
        state, metrics = step(state, make_batch(number))
        losses.append(float(metrics["loss"]))
    return step, state, losses


def test_two_processes_are_one_device(answers: tuple[Path, list[Any]]) -> None:
    folder, (first, second) = answers
    step, state, losses = one_device()
    assert [first["rows"], second["rows"]] == [[0, 23], [24, 47]]
    assert first["losses"] == second["losses"]
    np.testing.assert_allclose(first["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(first["eval"], losses[3], rtol=1e-5)
    models = [np.load(folder / f"model{n}.npz") for n in range(2)]
    for name, value in step.model(state).items():
        np.testing.assert_array_equal(models[0][name], models[1][name])
        np.testing.assert_allclose(models[0][name], value, rtol=1e-4, atol=1e-6)
    # A checkpoint that both wrote is read by one, and by both, to the bit.
    read = step.restore(folder / "step_000004")
    for name, value in step.model(read).items():
        np.testing.assert_array_equal(models[0][name], value)
    after = float(step.eval(read, make_batch(3))["loss"])
    assert first["again"][0] == second["again"][0] == 4
    np.testing.assert_allclose(first["again"][1], after, rtol=1e-5)
    check_same(step, step.restore(folder / "step_000004"), step, read)


def test_mistakes_end_all_processes_alike(answers: tuple[Path, list[Any]]) -> None:
    _, (first, second) = answers
    for name in ("bad", "shape", "adopt", "sections", "other"):
        assert first[name] and second[name], name
    assert first["bad"] == second["bad"]
    assert "user has the id 99, and user has 37 rows" in first["bad"]
    assert "adopt copies states within one process" in first["adopt"]
    assert "one process with all devices of the dense part" in first["sections"]
    assert "processes 1 have another plan than process 0" in first["other"]
    assert first["other"] == second["other"]
