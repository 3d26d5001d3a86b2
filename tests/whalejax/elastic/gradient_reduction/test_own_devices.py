"""What a process finds out of its devices without starting them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.whalejax.elastic.runs import ROOT
from whalejax.elastic.gradient_reduction import local_devices
from whalejax.meshes import Cluster
from whalejax.meshes.errors import WhaleError


LOOKS = """
import glob, jax
from whalejax import _compat_processes
from whalejax.elastic.gradient_reduction import local_devices
local_devices._DEVICE_FILES = ("/dev/null",)  # As if there were accelerators.
found = local_devices.own_devices()
print(found.platform, found.num_devices, _compat_processes.backends_are_there())
"""


@pytest.mark.parametrize("named", ["cpu", ""])
def test_they_are_found_and_not_started(named: str) -> None:
    """Where there may be accelerators, in another process."""
    found = subprocess.run(
        [sys.executable, "-c", LOOKS],
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": named, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.stdout.split() == ["cpu", "1", "False"], found.stderr


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(600)", "no answer within 0.5 s"),
        ("", "'' was printed"),
        ("print('{')", "was printed"),
        ("print('{}')", "was printed"),
        ("raise SystemExit('no driver')", "no driver"),
        ("import os; print(os.environ['JAX_PLATFORMS'])", "'tpu.n' was printed"),
    ],
)
def test_devices_that_cannot_be_seen(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    there = local_devices._compat_processes
    monkeypatch.setattr(there, "backends_are_there", lambda: False)
    monkeypatch.setattr(
        local_devices.jax, "config", SimpleNamespace(jax_platforms="tpu")
    )
    monkeypatch.setattr(local_devices, "_LOOK", (sys.executable, "-c", program))
    if "sleep" in program:
        monkeypatch.setattr(local_devices, "_LOOK_SECONDS", 0.5)
    match = f"(?s)cannot be detected: .*{said}.*mesh='auto'"
    with pytest.raises(WhaleError, match=match):
        local_devices.own_devices()


def test_what_another_process_prints_is_a_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert local_devices.main() == 0
    said = json.loads(capsys.readouterr().out)
    assert Cluster.from_json(said).platform == "cpu"


def test_speed_of_the_network_card(tmp_path: Path) -> None:
    assert local_devices.network_bytes_per_second(tmp_path) is None
    cards = {"lo": None, "eth0": "25000\n", "eth1": "-1\n", "docker0": "100000\n"}
    for name, speed in cards.items():
        (tmp_path / name).mkdir()
        if name.startswith("eth"):  # The others are virtual.
            (tmp_path / name / "device").mkdir()
        if speed is not None:
            (tmp_path / name / "speed").write_text(speed)
    assert local_devices.network_bytes_per_second(tmp_path) == 3.125e9


def test_a_fabric_beside_the_cards(tmp_path: Path) -> None:
    assert not local_devices.has_fabric(tmp_path / "infiniband")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert local_devices.has_fabric(tmp_path / "infiniband")
