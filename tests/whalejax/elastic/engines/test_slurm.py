"""A run under a real Slurm of two nodes on this machine, by the recipe in the docs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.whalejax.elastic.engines.launched import (
    SCRIPT,
    Launched,
    agent_of,
    environment,
    kill,
)
from tests.whalejax.elastic.runs import ROOT


UP = ROOT / "scripts" / "cluster_up"


def missing() -> str:
    """Why no Slurm can be started here, or nothing."""
    paths = f"{os.environ['PATH']}:/usr/sbin"
    for name in ("slurmctld", "slurmd", "sbatch", "munged"):
        if shutil.which(name, path=paths) is None:
            return f"there is no {name} here"
    return "" if os.geteuid() == 0 else "starting Slurm takes root"


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    """The folder of a cluster."""
    if why := missing():
        pytest.skip(why)
    folder = tmp_path / "slurm"
    words = [str(UP), "slurm", "--folder", str(folder)]
    up = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert up.returncode == 0, up.stderr
    assert f"export SLURM_CONF={folder}/slurm.conf" in up.stdout
    try:
        yield folder
    finally:
        subprocess.run([*words, "--down"], timeout=120, check=True)
        assert not folder.exists()


def recipe(python: str, script: Path, folder: Path) -> str:
    """The batch file of the docs, for these paths."""
    text = (ROOT / "docs" / "survive" / "machines.md").read_text()
    (block,) = re.findall(r"```text\n(#!/bin/bash\n#SBATCH .*?)```", text, re.DOTALL)
    assert block.count(".venv/bin/whalejax") == 2 and block.count("runs/mine") == 2
    block = block.replace(".venv/bin/whalejax", f"{python} -m whalejax")
    block = block.replace("runs/mine", str(folder / "run"))
    found, count = re.subn(
        r"train\.py", f"{script} 100000 {folder / 'save'}", block, count=1
    )
    assert count == 1
    return found


@pytest.mark.full
def test_a_node_lost_a_requeue_and_a_notice(tmp_path: Path, slurm: Path) -> None:
    given = environment(SLURM_CONF=str(slurm / "slurm.conf"))

    def call(*words: str) -> str:
        done = subprocess.run(
            words, env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    batch = tmp_path / "job.sh"
    batch.write_text(recipe(sys.executable, script, tmp_path))
    job = call("sbatch", "--parsable", "--output=out.txt", str(batch)).strip()
    out = tmp_path / "out.txt"
    run = Launched(
        tmp_path / "run", lambda: out.read_text() if out.exists() else "no output"
    )
    run.until(lambda: bool(run.events("opened")))
    name = subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip()
    address = f"{name}:{20000 + int(job) % 20000}"
    run.until(lambda: len(run.events("ready")) == 2)
    run.further()
    # A node is lost: its daemon and all of the step on it.
    kill(int((slurm / "slurmd-n1.pid").read_text()))
    kill(agent_of(address, {"SLURMD_NODENAME": "n1"}))
    run.until(lambda: [e["agent"] for e in run.events("agent_lost")] == ["n1"])
    run.further()
    # It is repaired, and the job queued again: it goes on where it was.
    (slurm / "slurmd-n1.pid").unlink()
    conf = str(slurm / "slurm.conf")
    subprocess.run(["/usr/sbin/slurmd", "-f", conf, "-N", "n1"], env=given, check=True)
    call("scontrol", "requeue", job)
    run.until(lambda: any(e["event"] == "ending" for e in run.events()))
    at = run.step()
    assert run.events("ending")[-1]["how"] == "drained"
    # Slurm would wait for two minutes.
    run.until(lambda: call("squeue", "-h", "-j", job, "-o", "%t").strip() == "PD")
    call("scontrol", "update", f"jobid={job}", "StartTime=now")
    run.until(lambda: len(run.events("opened")) == 2)
    run.until(lambda: run.step() > at + 5)
    again = run.events().index(run.events("opened")[-1])
    found = [e["step"] for e in run.events()[again:] if e["event"] == "recovered"]
    steps = [said["step"] for said in run.commits()]
    assert found == [at] and steps[steps.index(at) + 1] == at + 1, (found, at)
    # A notice: the run ends after a step, and none is lost.
    call("scancel", "--signal=TERM", job)
    run.until(lambda: len(run.events("ending")) == 2)
    assert run.events("ending")[-1]["how"] == "drained", run.told()
    run.until(lambda: run.events("saved")[-1]["step"] == run.step())
    run.until(lambda: not call("squeue", "-h", "-j", job, "-t", "R,CG").strip())
    run.losses_agree()


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    def call(*words: str, **more: str) -> str:
        given = {**os.environ, **more}
        done = subprocess.run(
            [str(UP), *words], env=given, capture_output=True, text=True
        )
        assert done.returncode == 2
        return done.stderr

    assert "expected slurm or ray" in call()
    assert "the cluster is 'k8s'; expected slurm or ray" in call("k8s")
    assert "'--up' is no option" in call("slurm", "--up")
    folder = ("--folder", str(tmp_path / "none"))
    assert "there is no cluster in" in call("slurm", "--down", *folder)
    if not Path("/usr/sbin/slurmctld").exists():
        told = call("slurm", *folder)
        assert "apt-get install --no-install-recommends slurmctld" in told
    told = call("ray", *folder, PYTHON="/bin/false")
    assert "/bin/false has no Ray. Install whalejax[ray] into it" in told
