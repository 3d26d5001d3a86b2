"""Real jobs that trade the devices of two hosts, of which one fails for a while.

Both hosts are this machine: the remote shell runs a command here, whatever the host.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live_jobs import Serving, audit_faults

from whalejax.cli.main import main
from whalejax.meshes import cluster
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.job_devices import job_devices
from whalejax.scheduler.live.run_reader import RunReader


pytestmark = pytest.mark.relaxed_promotion

STEPS = {"first": 700, "second": 60}

TWO_HOSTS = """
[[nodes]]
kind = "cpu"
count = 2
repeat = 2

[[levels]]
name = "memory"
size = 2
bandwidth_bytes_per_second = 8e9
latency_seconds = 1e-5

[[levels]]
name = "ethernet"
size = 2
bandwidth_bytes_per_second = 1e9
latency_seconds = 5e-5
"""

HERE = '#!/bin/sh\nshift\nexec sh -c "$*"\n'


@pytest.fixture
def hosts(tmp_path: Path) -> list[str]:
    """Options of ``jobs serve`` for two hosts."""
    (tmp_path / "two.toml").write_text(TWO_HOSTS)
    shell = tmp_path / "shell"
    shell.write_text(HERE)
    shell.chmod(0o700)
    return ["--hosts", "a,b", "--remote-shell", str(shell), "--host", "127.0.0.1"]


def agent_pids(home: Path, name: str) -> list[int]:
    """Processes that are the agent of a host for the job in a folder."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            told = {b"agent", b"--name", name.encode(), str(home.absolute()).encode()}
            if told <= {*words} and b"sh" != words[0]:
                found.append(int(folder.name))
    return found


@pytest.mark.full
def test_jobs_trade_the_devices_of_two_hosts(tmp_path: Path, hosts: list[str]) -> None:
    serving = Serving(
        tmp_path, "--every", "3", "--resize", "2", *hosts, cluster="two.toml"
    )

    def step(name: str) -> int:
        return max((said["step"] for said in serving.commits(name)), default=0)

    def places(name: str) -> set[str]:
        """Hosts of the members of a job that ever were."""
        return {e["agent"] for e in serving.events(name) if e["event"] == "started"}

    def add(name: str) -> None:
        serving.add(name, "--set", "seconds=0.03", "--no-wait", steps=STEPS[name])

    def are_complete() -> bool:
        there = serving.shown()
        return bool(there) and all(there[name].status == "complete" for name in STEPS)

    try:
        add("first")
        assert serving.until(lambda: step("first") > 5 and len(places("first")) == 2)
        add("second")
        assert serving.until(lambda: step("second") > 2)
        # What keeps the agents is killed, and another takes them over.
        front = serving.front("first")
        assert front is not None
        agents = {host: agent_pids(serving.save / "first", host) for host in "ab"}
        os.kill(front, signal.SIGKILL)
        assert serving.until(lambda: serving.front("first") not in (None, front))
        assert {h: agent_pids(serving.save / "first", h) for h in "ab"} == agents
        (agent,) = agents["b"] or agents["a"]
        os.kill(agent, signal.SIGKILL)
        assert serving.until(are_complete)
        given = [e for e in serving.book() if e["event"] == "devices"]
        names = {f"{host}/cpu{number}" for host in "ab" for number in range(2)}
        assert {one for said in given for one in said["devices"]} == names
        assert not audit_faults(serving, tmp_path / "alone", STEPS)
        assert serving.until(lambda: not serving.leftovers([*STEPS]), 60.0)
    finally:
        serving.end([*STEPS])


KINDS = """
[kinds.fast]
base = "cpu"

[kinds.slow]
base = "cpu"
flops_per_second = { f32 = 4e9, bf16 = 4e9 }

[[nodes]]
kind = "fast"
count = 2

[[nodes]]
kind = "slow"
count = 1

[[levels]]
name = "ethernet"
size = 3
bandwidth_bytes_per_second = 1e9
latency_seconds = 5e-5
"""


@pytest.mark.full
def test_jobs_change_the_kind_of_their_devices(
    tmp_path: Path, hosts: list[str]
) -> None:
    (tmp_path / "kinds.toml").write_text(KINDS)
    serving = Serving(
        tmp_path, "--every", "5", "--resize", "2", *hosts, cluster="kinds.toml"
    )

    def step(name: str) -> int:
        return max((said["step"] for said in serving.commits(name)), default=0)

    def kinds(name: str) -> list[str]:
        """Kinds of the launches of a job, in order."""
        book = serving.book()
        return [
            said["kind"]
            for said in book
            if said["event"] == "launched" and said["name"] == name
        ]

    def are_complete() -> bool:
        there = serving.shown()
        return bool(there) and all(there[name].status == "complete" for name in STEPS)

    try:
        words = "--set", "seconds=0.03", "--no-wait"
        serving.add("first", *words, steps=STEPS["first"])
        assert serving.until(lambda: step("first") > 5)
        assert kinds("first") == ["fast"]
        # Only the fast kind has two devices.
        words = *words, "--priority", "9"
        serving.add("second", *words, steps=STEPS["second"], devices="2")
        assert serving.until(are_complete)
        assert kinds("first")[1] == "slow" and kinds("second")[0] == "fast"
        assert not audit_faults(serving, tmp_path / "alone", STEPS)
        assert serving.until(lambda: not serving.leftovers([*STEPS]), 60.0)
    finally:
        serving.end([*STEPS])


def test_devices_of_several_hosts_have_their_host_s_name(tmp_path: Path) -> None:
    gpus = job_devices(cluster("h100:2x2"), ("a", "b"))
    assert gpus.names == ["a/0", "a/1", "b/0", "b/1"]
    assert gpus.masks(["b/1"]) == ["b/1"]
    (tmp_path / "two.toml").write_text(TWO_HOSTS)
    cpus = job_devices(cluster(str(tmp_path / "two.toml")), ("a", "b"))
    assert cpus.names == ["a/cpu0", "a/cpu1", "b/cpu0", "b/cpu1"]
    assert cpus.masks(["b/cpu1"]) == ["b/"]
    with pytest.raises(JobError, match=r"--hosts has 3 names, and .* has 2 nodes"):
        job_devices(cluster("h100:2x2"), ("a", "b", "c"))


def test_a_host_without_an_agent_is_away_after_a_while(tmp_path: Path) -> None:
    reader = RunReader(tmp_path)

    def say(event: str, at: float, **fields: Any) -> None:
        reader._event({"event": event, "time": at, **fields})

    say("opened", 100.0)
    assert reader.away_hosts({"a": 0.0, "b": 0.0}, 120.0) == []
    say("agent_joined", 121.0, agent="a")
    say("started", 122.0, name="m1", slot=0, pid=1, began="", agent="a")
    assert reader.away_hosts({"a": 0.0, "b": 0.0}, 170.0) == ["b"]
    assert reader.away_hosts({"b": 165.0}, 170.0) == []  # It was not needed before.
    assert reader.held_slots == {0}
    say("agent_lost", 200.0, agent="a")
    assert not reader.held_slots
    assert reader.away_hosts({"a": 0.0}, 250.0) == []
    assert reader.away_hosts({"a": 0.0}, 261.0) == ["a"]
    say("agent_joined", 262.0, agent="a")
    assert reader.away_hosts({"a": 0.0}, 400.0) == []
    say("restarted", 500.0)  # It may have been lost with the supervisor.
    assert reader.away_hosts({"a": 0.0}, 550.0) == []
    assert reader.away_hosts({"a": 0.0}, 561.0) == ["a"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "a,a"], "--hosts a,a has a host twice"),
        (["--hosts", "a", "--remote-shell", "no-such-program"], "there is no program"),
        (["--host", "1.2.3.4"], "--host was given without --hosts"),
        (
            ["--hosts", "a", "--ray", "auto"],
            "--hosts 'a' and --ray 'auto' were given",
        ),
        (["--slurm", ""], "--slurm: there is no srun here"),
    ],
)
def test_hosts_that_cannot_be_used(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    save = ["--save", str(tmp_path / "jobs")]
    assert main(["jobs", "serve", "--cluster", "cpu:4", *save, *words]) == 2
    assert message in capsys.readouterr().err
