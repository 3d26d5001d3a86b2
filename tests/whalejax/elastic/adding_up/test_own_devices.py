"""What a process finds out of its devices without starting them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.whalejax.elastic.runs import ROOT
from whalejax.elastic.adding_up import own_devices
from whalejax.meshes import Cluster


LOOKS = """
import glob, jax
from whalejax import _compat_processes
from whalejax.elastic.adding_up import own_devices
own_devices._DEVICE_FILES = ("/dev/null",)  # As if there were accelerators.
found = own_devices.own_devices()
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


def test_what_another_process_prints_is_a_cluster(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert own_devices.main() == 0
    said = json.loads(capsys.readouterr().out)
    assert Cluster.from_json(said).platform == "cpu"


def test_speed_of_the_network_card(tmp_path: Path) -> None:
    assert own_devices.network_bytes_per_second(tmp_path) is None
    for name, speed in (("lo", None), ("eth0", "25000\n"), ("eth1", "-1\n")):
        (tmp_path / name).mkdir()
        if speed is not None:
            (tmp_path / name / "speed").write_text(speed)
    assert own_devices.network_bytes_per_second(tmp_path) == 3.125e9


def test_a_fabric_beside_the_cards(tmp_path: Path) -> None:
    assert not own_devices.has_fabric(tmp_path / "infiniband")
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert own_devices.has_fabric(tmp_path / "infiniband")
