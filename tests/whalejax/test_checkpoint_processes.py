"""Several processes share a checkpoint's hashes, and fail together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import finish, start


PROGRAM = """
import json, os
from pathlib import Path
import numpy as np, optax
import whalejax as wh
from whalejax.state import checkpoint_files, resume
from whalejax.state.resume import hold_folder as held
from whalejax.state.resume import restore_newest as resumed

x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
model = {"w": np.full((8, 4), 0.1, np.float32)}
folder = Path(sys.argv[5])

def loss(m, b):
    return ((b["x"] @ m["w"]) ** 2).mean()

def compiled(tx):
    plan = wh.plan(loss, model, {"x": x}, optimizer=tx, cluster="h100:2",
                   mesh={"fsdp": 2})
    return wh.compile(plan, loss, model, optimizer=tx, devices=jax.devices())

def refused(what):
    try:
        what()
    except wh.WhaleError as error:
        return str(error)

step, found = compiled(optax.adam(0.1)), {}
state = step.init_from(model)
with held(folder):
    found["held"] = refused(lambda: held(folder).__enter__())
    for number in (1, 2, 3):
        state, _ = step(state, {"x": x})
        step.save(folder / f"step_00000{number}", state)

# Each process hashed what it wrote.
record = json.loads((folder / "step_000003" / "whalejax.json").read_text())
found["writers"] = sorted({n.split("/")[1] for n in record["file_sha256"]
                           if "ocdbt.process" in n})

# One that cannot read again what it wrote stops all.
if index == 1:
    whole = checkpoint_files._hashes
    def fail(*_):
        raise OSError(5, "Input/output error")
    checkpoint_files._hashes = fail
found["failed"] = refused(lambda: step.save(folder / "failed", state))
if index == 1:
    checkpoint_files._hashes = whole

# A bit of the latest: all refuse it, and go on from the same.
if index == 0:
    files = [p for p in (folder / "step_000003").rglob("*") if p.parent.name == "d"]
    biggest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(biggest.read_bytes())
    content[-1] ^= 1
    biggest.write_bytes(content)
checkpoint_files.told_by_all("", "changed")
found["damaged"] = refused(lambda: step.restore(folder / "step_000003"))

# One that sees a folder as it was before, such as over NFS, takes what the first does.
if index == 1:
    seen = resume.checkpoints
    resume.checkpoints = lambda _: []
again = resumed(step, resume.agreed_checkpoints(folder))
state = step.restore_or_init(folder, lambda _: model, rng=jax.random.key(0))
found["restored"] = int(state.step)
if index == 1:
    resume.checkpoints = seen
found["resumed"] = [again.checkpoint.name, int(again.state.step), again.state.samples]
other = compiled(optax.sgd(optax.constant_schedule(0.1)))
taken = other.restore(again.checkpoint, only="model")
taken, metrics = other(taken, {"x": x})
found["taken"] = [int(taken.step), taken.samples, float(metrics["loss"])]
checkpoint_files.told_by_all("", "done")
found["left"] = sorted(path.name for path in folder.iterdir())
print(json.dumps(found), flush=True)
"""


@pytest.mark.full
def test_two_processes_check_and_fail_alike(tmp_path: Path) -> None:
    outputs = finish(start(PROGRAM, tmp_path / "run"))
    first, second = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert first == second
    assert f"{tmp_path / 'run'} is in use by process " in first["held"]
    assert first["writers"] == ["ocdbt.process_0", "ocdbt.process_1"]
    assert first["failed"].startswith(
        f"{tmp_path / 'run' / 'failed'}: this checkpoint could not be written (what was"
        " written cannot be read again: Input/output error); its files are removed."
    )
    assert (
        "step_000003 is damaged; restore another checkpoint: 1 pr" in first["damaged"]
    )
    assert first["restored"] == 2
    assert first["resumed"] == ["step_000002", 2, 16]
    assert first["taken"][:2] == [3, 24]
    assert first["left"] == ["step_000001", "step_000002", "step_000003.damaged"]
