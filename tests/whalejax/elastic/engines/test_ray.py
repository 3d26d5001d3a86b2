"""A run over a Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.whalejax.elastic.engines.launched import SCRIPT, Launched, environment
from tests.whalejax.elastic.runs import ROOT
from whalejax.distributed.reserved_port import release_port, reserve_port


CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=0)
nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
print(json.dumps(cluster.address), flush=True)
for line in sys.stdin:
    if line.strip() == "kill":
        cluster.remove_node(nodes.pop(), allow_graceful=False)
    elif line.strip() == "add":
        nodes.append(cluster.add_node(num_cpus=1))
    print(json.dumps(line.strip()), flush=True)
cluster.shutdown()
"""


@contextlib.contextmanager
def ray_cluster(
    folder: Path, given: Mapping[str, str]
) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Address of a cluster of two nodes, and a function to add or kill a node."""
    with (folder / "ray.log").open("wb") as log:
        cluster = subprocess.Popen(
            [sys.executable, "-c", CLUSTER],
            env=given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert cluster.stdin is not None and cluster.stdout is not None

    def tell(word: str) -> None:
        assert cluster.stdin is not None and cluster.stdout is not None
        cluster.stdin.write(f"{word}\n")
        cluster.stdin.flush()
        assert json.loads(cluster.stdout.readline()) == word

    try:
        yield json.loads(cluster.stdout.readline()), tell
    finally:
        cluster.stdin.close()
        cluster.wait(60)
        cluster.stdout.close()


@pytest.mark.full
def test_a_raylet_killed_and_another_added(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="there is no Ray here; it is an extra")
    given = environment(RAY_USAGE_STATS_ENABLED="0")
    script, logs = tmp_path / "train.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    with ray_cluster(tmp_path, given) as (address, tell):
        launch = None
        try:
            port = reserve_port("127.0.0.1")
            release_port(port)
            words = [
                *(sys.executable, "-m", "whalejax", "launch", "--processes", "1:2"),
                *("--ray", address, "--host", "127.0.0.1", "--port", str(port)),
                *("--logs", str(logs), str(script), "600", str(tmp_path / "save")),
            ]
            with (tmp_path / "out.txt").open("wb") as out:
                launch = subprocess.Popen(
                    words, env=given, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT
                )
            run = Launched(logs, lambda: (tmp_path / "out.txt").read_text())
            run.until(lambda: len(run.events("agent_joined")) == 2)
            run.until(lambda: len(run.events("ready")) == 2)
            run.further()
            tell("kill")
            run.until(lambda: len(run.events("agent_lost")) == 1)
            run.further()
            tell("add")
            run.until(lambda: len(run.events("agent_joined")) == 3)
            run.until(lambda: len(run.events("begun")[-1]["members"]) == 2)
            assert launch.wait(300) == 0, run.told()
            run.losses_agree()
            assert len({e["agent"] for e in run.events("agent_joined")}) == 3
            assert run.step() == 600
        finally:
            if launch is not None and launch.poll() is None:
                launch.terminate()
                launch.wait(60)
    assert not [p for p in Path("/proc").glob("[0-9]*") if _is_ours(p, str(script))]


def _is_ours(place: Path, script: str) -> bool:
    try:
        return script in (place / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False


def test_ray_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from whalejax.cli.main import main

    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["launch", "--processes", "1:2", "--ray", "auto", "--logs", str(tmp_path)]
    assert main([*words, str(script)]) == 2
    assert "--ray needs Ray, which is not installed here. Install whalejax[ray]" in (
        capsys.readouterr().err
    )
