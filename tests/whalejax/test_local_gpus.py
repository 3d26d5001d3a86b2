"""GPUs of a machine, divided among its processes: a list of them is enough."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from whalejax.cli.main import main
from whalejax.meshes.errors import WhaleError
from whalejax.processes import local_gpus
from whalejax.processes.launch_spec import Launch
from whalejax.processes.local_gpus import (
    VISIBLE,
    SlotGpus,
    gpu_division_text,
    own_gpus,
    refusal,
    visible_gpus,
)


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia5", "nvidiactl", "nvidia-uvm", "null"):
        (folder / name).write_text("")
    return folder


def test_gpus_are_those_of_the_system_or_of_the_variable(devices: Path) -> None:
    """CUDA numbers those that it sees, whatever their files are called."""
    found = {
        None: ("0", "1", "2"),
        "": (),
        "-1": (),
        "3": ("3",),
        "3, 1": ("3", "1"),
        "3,-1,1": ("3",),
        "GPU-ab,GPU-cd": ("GPU-ab", "GPU-cd"),
        "MIG-ab,MIG-cd": ("MIG-ab", "MIG-cd"),
        "NoDevFiles": (),
        "1,none,2": ("1",),
    }
    for given, wanted in found.items():
        environment = {} if given is None else {VISIBLE: given}
        assert visible_gpus(environment, devices, has_plugin=True) == wanted
    assert visible_gpus({}, devices / "none", has_plugin=True) == ()


@pytest.mark.parametrize(
    ("platforms", "counts"),
    [("", True), ("cuda", True), ("gpu,cpu", True), ("cpu", False), ("tpu", False)],
)
def test_runs_on_other_platforms_are_untouched(
    devices: Path, platforms: str, counts: bool
) -> None:
    environment = {"JAX_PLATFORMS": platforms}
    assert bool(visible_gpus(environment, devices, has_plugin=True)) == counts
    assert visible_gpus(environment, devices, has_plugin=False) == ()


def test_each_process_gets_as_many_of_its_own() -> None:
    gpus = ["0", "2", "3", "5", "7"]
    given = [own_gpus(gpus, 2, place)[VISIBLE] for place in range(2)]
    assert given == ["0,2", "3,5"]
    assert [own_gpus(gpus, 5, n)[VISIBLE] for n in range(5)] == gpus
    assert own_gpus([], 9, 8) == {} == own_gpus(gpus, 1, 0)
    assert gpu_division_text(gpus, 1) == "" == gpu_division_text([], 3)
    # CUDA shows a process one part of a GPU, however many are named.
    parts = [f"MIG-{n}" for n in range(4)]
    assert [own_gpus(parts, 2, n)[VISIBLE] for n in range(2)] == parts[:2]
    assert "gets 1 of the 4 GPUs" in gpu_division_text(parts, 2)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_place_that_is_not_there_gets_none(processes: int) -> None:
    said = f"process 3 .* all 4 .*divided among {processes} processes.*again for 3"
    with pytest.raises(WhaleError, match=said):
        own_gpus(["0", "1", "2", "3"], processes, 2)
    assert own_gpus([], processes, 2) == {}


def test_more_processes_than_gpus_are_refused() -> None:
    said = (
        "6 processes on this machine, which has 2 GPUs (4, 6): each needs one of its "
        "own. Start at most 2, spares included, or set JAX_PLATFORMS=cpu"
    )
    assert refusal(["4", "6"], 6) == said
    with pytest.raises(WhaleError) as error:
        own_gpus(["4", "6"], 6, 0)
    assert str(error.value) == said


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_gpus, "_has_plugin", lambda: True)
    monkeypatch.setenv(VISIBLE, "4,6")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")


@pytest.mark.usefixtures("two_gpus")
def test_ranks_of_a_launch_get_gpus_of_their_own() -> None:
    launch = Launch(command=("true",), processes=2)
    given = [launch.environment_of(rank, "127.0.0.1:1")[VISIBLE] for rank in range(2)]
    assert given == ["4", "6"]
    with pytest.raises(WhaleError, match="3 processes on this machine.* 2 GPUs"):
        Launch(command=("true",), processes=3)
    # Those of other hosts see what is there.
    away = Launch(
        command=("true",),
        processes=4,
        hosts=("node-a", "node-b"),
        remote_shell=("true",),
    )
    assert VISIBLE not in away.environment_of(0, "node-a:1")
    assert away.gpus_shared().startswith("several ranks run on node-a, node-b, and")
    assert "set CUDA_VISIBLE_DEVICES there" in away.gpus_shared()
    assert launch.gpus_shared() == ""
    assert dataclasses.replace(away, processes=2).gpus_shared() == ""


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "words", [["--processes", "1:3"], ["--spares", "1", "--processes", "2:2"]]
)
def test_elastic_commands_refuse_more_processes_than_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    commands = (
        ["launch", *words, "--logs", str(tmp_path / "logs"), str(script)],
        ["train", "mlp-test", *words, "--save", str(tmp_path / "save")],
    )
    for command in commands:
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "3 processes on this machine, which has 2 GPUs (4, 6)" in said
        assert "JAX_PLATFORMS=cpu" in said and "Traceback" not in said
    assert [x.name for x in tmp_path.iterdir()] == ["script.py"]


def test_slots_have_the_gpus_that_others_have_shared_out() -> None:
    gpus = SlotGpus({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4)
    assert gpus.of(1, ("3", "GPU-7")) == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
    with pytest.raises(WhaleError, match="slot 2 has no device of 2"):
        gpus.of(2, ("3", "GPU-7"))
