"""Hosts of jobs that Slurm or Ray gives, each as long as a job holds it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import pytest
from live_jobs import Serving, audit_faults

from tests.processes import ROOT
from tests.whalejax.elastic.engines.launched import environment
from tests.whalejax.elastic.engines.test_slurm import slurm as slurm
from tests.whalejax.scheduler.test_live_hosts import TWO_HOSTS
from tests.whalejax.scheduler.test_run_reader import Host
from whalejax.elastic.agents.on_hosts import HostAgents
from whalejax.membership import events as ev
from whalejax.membership.exit_status import Ending
from whalejax.meshes import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.scheduler.job_table import JobError
from whalejax.scheduler.live.device_assignment import MOST_LAUNCHES
from whalejax.scheduler.live.job_book import JobBook
from whalejax.scheduler.live.job_devices import JobDevices, job_devices
from whalejax.scheduler.live.job_hosts import (
    JobHosts,
    ray_hosts,
    slurm_hosts,
    slurm_refusal,
)
from whalejax.scheduler.live.job_run import JobRun, write_refusals
from whalejax.scheduler.live.job_service import JobService, ServeSettings
from whalejax.scheduler.live.requests import Add, RequestRefused
from whalejax.state.folder_lock import FolderLock


pytestmark = pytest.mark.relaxed_promotion

STEPS = {"first": 1200, "second": 60}


def trade(serving: Serving, folder: Path, nodes: Callable[[str], int]) -> None:
    """Two jobs trade the nodes of an engine.

    Args:
        serving: Scheduler of two nodes of two devices.
        folder: Folder of the job that nothing disturbs.
        nodes: Number of nodes that a job has by the engine's own account.
    """

    def step(name: str) -> int:
        return max((said["step"] for said in serving.commits(name)), default=0)

    def started(name: str) -> list[str]:
        return [e["name"] for e in serving.events(name) if e["event"] == "started"]

    def add(name: str) -> None:
        words = "--set", "device_seconds=0.01", "--no-wait"
        serving.add(name, *words, steps=STEPS[name])

    def are_complete() -> bool:
        there = serving.shown()
        return bool(there) and all(there[name].status == "complete" for name in STEPS)

    def has_grown() -> bool:
        given = [
            len(said["devices"])
            for said in serving.book()
            if said["event"] == "devices" and said["name"] == "first"
        ]
        return given[:1] == [4] and given[-1] == 4 and 2 in given

    try:
        add("first")
        assert serving.until(lambda: step("first") > 5 and nodes("first") == 2)
        # What keeps its agents is killed; another takes them over, and ends them.
        front = serving.front("first")
        assert front is not None
        os.kill(front, signal.SIGKILL)
        assert serving.until(lambda: serving.front("first") not in (None, front))
        # So is that with the supervisor; the members go on under another.
        front, at = serving.front("first"), step("first")
        assert serving.kill_all_above("first")
        assert serving.until(lambda: serving.front("first") not in (None, front))
        assert serving.until(lambda: step("first") > at + 5 and nodes("first") == 2)
        assert len(started("first")) == 4  # None of them was lost.
        add("second")
        assert serving.until(lambda: nodes("second") == 1 and nodes("first") == 1)
        assert serving.until(has_grown)
        assert serving.until(are_complete)
        assert serving.until(lambda: not nodes("first") and not nodes("second"), 60.0)
        assert not audit_faults(serving, folder, STEPS, device_seconds=1e-9)
        assert serving.until(lambda: not serving.leftovers([*STEPS]), 60.0)
    finally:
        serving.end([*STEPS])


def call_slurm(*words: str) -> str:
    """Returns what a command of Slurm prints."""
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def allocations(job: str, state: str = "", shown: str = "%i") -> list[str]:
    """What Slurm shows of each allocation of a job, such as those in a state."""
    words = ["squeue", "-h", "-o", f"%j {shown}", *(["-t", state] if state else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    return [value for name, value in lines if name.startswith(f"{job}-")]


@pytest.mark.full
def test_jobs_are_allocations_that_grow_and_shrink(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    (tmp_path / "two.toml").write_text(TWO_HOSTS)

    def nodes(name: str) -> int:
        return len(allocations(name, "R"))

    words = "--slurm=--mem=100M", "--host", "127.0.0.1", "--every", "3"
    serving = Serving(tmp_path, *words, "--resize", "2", cluster="two.toml")
    trade(serving, tmp_path / "alone", nodes)


@pytest.mark.full
def test_a_job_goes_on_while_slurm_queues_its_other_nodes(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    (tmp_path / "two.toml").write_text(TWO_HOSTS)

    def block() -> str:
        words = "--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 3600"
        return call_slurm("sbatch", *words)

    blocks = [block(), block()]
    words = "--slurm=--mem=100M", "--host", "127.0.0.1", "--every", "3"
    serving = Serving(tmp_path, *words, "--resize", "2", cluster="two.toml")

    def step() -> int:
        return max((said["step"] for said in serving.commits("first")), default=0)

    def members() -> int:
        began = [e for e in serving.events("first") if e["event"] == "begun"]
        return len(began[-1]["members"]) if began else 0

    try:
        words = "--set", "device_seconds=0.01", "--no-wait"
        serving.add("first", *words, steps=1500)
        assert serving.until(lambda: len(allocations("first", "PD")) == 2)
        call_slurm("scancel", blocks.pop())
        assert serving.until(lambda: members() == 2 and step() > 5)
        assert len(allocations("first", "PD")) == 1  # It keeps its place.
        call_slurm("scancel", blocks.pop())
        assert serving.until(lambda: members() == 4)
        assert serving.until(lambda: serving.shown()["first"].status == "complete")
        alone, steps = tmp_path / "alone", {"first": 1500}
        assert not audit_faults(serving, alone, steps, device_seconds=1e-9)
        started = [e for e in serving.book() if e["event"] == "launched"]
        assert len(started) == 1
        assert not allocations("first")
    finally:
        serving.end(["first"])


@pytest.mark.full
def test_an_allocation_whose_srun_is_killed_is_ended(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    (tmp_path / "two.toml").write_text(TWO_HOSTS)
    words = "--slurm=--mem=100M", "--host", "127.0.0.1", "--every", "3"
    serving = Serving(tmp_path, *words, "--resize", "2", cluster="two.toml")
    try:
        serving.add("first", "--set", "device_seconds=0.01", "--no-wait", steps=1500)
        assert serving.until(lambda: len(allocations("first", "R")) == 2)
        told = json.loads(next(tmp_path.rglob("agents.json")).read_text())
        pid, _ = told["agents"]["slurm-0"]
        (killed,) = (
            number
            for number in allocations("first", "R")
            if call_slurm("squeue", "-h", "-j", number, "-o", "%j").endswith("slurm-0")
        )
        os.kill(pid, signal.SIGKILL)

        def is_replaced() -> bool:
            there = allocations("first", "R")
            return len(there) == 2 and killed not in there

        assert serving.until(is_replaced)
        assert serving.until(lambda: serving.shown()["first"].status == "complete")
        assert serving.until(lambda: not allocations("first"), 60.0)
    finally:
        serving.end(["first"])


@pytest.mark.full
def test_jobs_are_paused_when_slurm_refuses_the_options(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    (tmp_path / "two.toml").write_text(TWO_HOSTS)
    words = "--host", "127.0.0.1", "--resize", "2", "--slurm=--partition=none"
    serving = Serving(tmp_path, *words, cluster="two.toml")
    names = ["first", "second"]

    def are(status: str) -> bool:
        there = serving.shown()
        return bool(there) and all(there[name].status == status for name in names)

    try:
        for name in names:
            serving.add(name, "--no-wait", steps=20)
        assert serving.until(lambda: are("paused"))
        reports = serving.shown()
        line = "Unable to allocate resources: Invalid partition name specified"
        assert all(line in reports[name].why for name in names)
        assert line in reports[""].notes[0]
        assert serving.process is not None
        serving.process.kill()
        serving.process.wait()
        serving._words[-1] = "--slurm=--mem=100M"
        serving.start()
        for name in names:
            assert serving.ask("resume", name).returncode == 0
        assert serving.until(lambda: are("complete"))
    finally:
        serving.end(names)


@pytest.mark.full
def test_jobs_that_share_too_few_nodes_run_one_after_the_other(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has half of the nodes, and gives one to each of two jobs that need two."""
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    four = TWO_HOSTS.replace("repeat = 2", "repeat = 4").replace(
        'name = "ethernet"\nsize = 2', 'name = "ethernet"\nsize = 4'
    )
    (tmp_path / "four.toml").write_text(four)
    words = "--slurm=--mem=100M", "--host", "127.0.0.1", "--resize", "2"
    serving = Serving(tmp_path, *words, cluster="four.toml")
    names = ["first", "second"]

    try:
        block = ["--parsable", "--exclusive", "--output=/dev/null", "--wrap=sleep 3600"]
        blocks = [call_slurm("sbatch", *block) for _ in range(2)]
        for name in names:
            serving.add(name, "--no-wait", steps=20, devices="4")
            assert serving.until(lambda name=name: len(allocations(name, "PD")) == 2)
        held = [allocations(name, "PD")[0] for name in names]
        for request in held:
            call_slurm("scontrol", "hold", request)
        call_slurm("scancel", *blocks)
        for name in names:
            assert serving.until(lambda name=name: len(allocations(name, "R")) == 1)
        for request in held:
            call_slurm("scontrol", "release", request)

        def are_complete() -> bool:
            there = serving.shown()
            return bool(there) and all(
                there[name].status == "complete" for name in names
            )

        assert serving.until(are_complete)
        given = [e["name"] for e in serving.book() if e["event"] == "gave_back"]
        assert given == ["second"]
    finally:
        serving.end(names)


RAY = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=0)
for _ in range(2):
    cluster.add_node(num_cpus=2)
print(json.dumps(cluster.address), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[str]:
    """The address of a cluster of two nodes with two CPUs each."""
    pytest.importorskip("ray", reason="there is no Ray here; it is an extra")
    with (tmp_path / "ray.log").open("wb") as log:
        started = subprocess.Popen(
            [sys.executable, "-c", RAY],
            env=environment(RAY_USAGE_STATS_ENABLED="0"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert started.stdin is not None and started.stdout is not None
    try:
        yield json.loads(started.stdout.readline())
    finally:
        started.stdin.close()
        started.wait(60)
        started.stdout.close()


@pytest.mark.full
def test_jobs_are_actors_that_come_and_go(tmp_path: Path, ray: str) -> None:
    (tmp_path / "two.toml").write_text(TWO_HOSTS)
    words = "--ray", ray, "--host", "127.0.0.1", "--every", "3", "--resize", "2"
    serving = Serving(tmp_path, *words, cluster="two.toml")

    def nodes(name: str) -> int:
        there: set[str] = set()
        for said in serving.events(name):
            if said["event"] == "agent_joined":
                there.add(said["agent"])
            elif said["event"] in ("agent_left", "agent_lost"):
                there.discard(said["agent"])
            elif said["event"] in ("opened", "ending"):
                there.clear()
        return len(there)

    trade(serving, tmp_path / "alone", nodes)


# Without an engine.


def test_words_of_an_allocation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "srun").touch(mode=0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = slurm_hosts(cluster("h100:2x8+a100-80:4"), "--constraint={kind} -t 60")
    first, *_, last = hosts.shells.values()
    assert [*hosts.shells] == ["slurm-0", "slurm-1", "slurm-2"] and hosts.room == 8
    assert first[:4] == ["srun", "--nodes=1", "--ntasks=1", "--gpus-per-task=8"]
    assert first[4:7] == ["--constraint=h100", "-t", "60"]
    assert "--gpus-per-task=4" in last and "--constraint=a100-80" in last
    with pytest.raises(WhaleError, match="No closing quotation"):
        slurm_hosts(cluster("h100:8"), "--comment='a")
    shell = ray_hosts(cluster("h100:2x8"), "auto").shells["ray-1"]
    assert shell[-3:] == ["auto", "1", "8"]


def test_the_shell_of_an_allocation_runs_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\nshift 3\nexec "$@"\n')
    (tmp_path / "srun").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (shell,) = slurm_hosts(cluster("h100:8"), "").shells.values()
    command = [*shell, "slurm-0", "cd / && exec echo 'a b' \"$PWD\""]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "a b /\n"


def test_jobs_get_whole_nodes_of_an_engine(tmp_path: Path) -> None:
    devices = job_devices(cluster("h100:2x4+a100-80:2"), ("s-0", "s-1", "s-2"), "slurm")
    assert devices.units == {"h100": 4, "a100-80": 2}
    assert job_devices(cluster("h100:2x4"), ("a", "b")).units == {"": 1}
    with pytest.raises(JobError, match="nodes of h100 have 2 and 4 devices"):
        job_devices(cluster("h100:4+h100:2"), ("s-0", "s-1"), "slurm")
    nodes = cluster("h100:2x4")
    settings = ServeSettings(
        folder=tmp_path / "jobs", cluster="h100:2x4", hosts=ray_hosts(nodes, "auto")
    )
    service = JobService(settings)
    service.open()
    try:
        add = Add(name="a", model="mlp", steps=9, devices=(5, 7), folder=str(tmp_path))
        answer = service.answer(add)
        assert isinstance(answer, RequestRefused)
        assert "--devices is 5:7, and jobs get whole nodes of 4 devices" in answer.why
    finally:
        service._held.close()


def test_a_job_waits_in_the_queue_and_grows_later(tmp_path: Path) -> None:
    host = Host(tmp_path, "a")
    names = [f"s-{node}/{number}" for node in range(2) for number in range(2)]
    devices = JobDevices(dict.fromkeys(names, ""), {"": "gpu"}, True, "slurm")
    host.placing._devices = devices
    run = host.runs["a"]
    host.place(a=4)
    assert run.started == [(4, names)] and [*run.wanted_hosts] == ["s-0", "s-1"]
    run.has(4, slots=0)
    run.away = ["s-0", "s-1"]
    host.turn()
    assert not host.placing.lost_devices() and not run.resized  # It goes on waiting.
    run.agents, run.away = {"s-1"}, ["s-0"]
    assert [*host.placing.lost_devices()] == ["s-0/0", "s-0/1"]
    host.place(a=2)
    assert host.devices()["a"][:2] == ["s-1/0", "s-1/1"] and run.resized == [2]
    run.has(2)
    host.turn()
    assert host.devices()["a"] == ["s-1/0", "s-1/1"]
    assert {*run.wanted_hosts} == {"s-0", "s-1"}  # It keeps its place in the queue.
    run.agents, run.away = {"s-0", "s-1"}, []
    host.place(a=4)
    assert run.resized == [2, 4]
    assert host.devices()["a"] == ["s-1/0", "s-1/1", "s-0/0", "s-0/1"]
    host.placing.failed["s-1/0"] = "it broke"
    assert [*host.placing.lost_devices()] == ["s-1/0", "s-1/1"]
    # Fewer than its fewest devices are of no use to it.
    host.placing.failed.clear()
    run.agents, run.away = set(), ["s-0", "s-1"]
    assert not host.placing.lost_devices()


def test_a_job_keeps_its_members_if_its_second_node_comes_first(
    tmp_path: Path,
) -> None:
    host = Host(tmp_path, "a")
    names = [f"s-{node}/{number}" for node in range(2) for number in range(2)]
    devices = JobDevices(dict.fromkeys(names, ""), {"": "gpu"}, True, "slurm")
    host.placing._devices = devices
    run = host.runs["a"]
    host.place(a=4)
    run.has(4)
    run.held_slots, run.agents, run.away = {2, 3}, {"s-1"}, ["s-0"]
    host.turn()
    host.place(a=2)
    assert not run.resized and host.devices()["a"] == names
    run.has(4)
    run.agents, run.away = {"s-0", "s-1"}, []
    host.place(a=4)
    assert not run.resized and host.devices()["a"] == names
    # The later node is given back, as before.
    run.agents, run.away = {"s-0"}, ["s-1"]
    host.place(a=2)
    assert run.resized == [2]
    # A node whose device has failed is none that waits.
    run.agents, run.away = {"s-0", "s-1"}, []
    host.placing.failed["s-0/1"] = "it broke"
    host.place(a=2)
    assert run.resized[-1] == 0


def engine_host(folder: Path, *names: str) -> Host:
    """Two nodes of two devices that Slurm gives, and jobs that need both."""
    host = Host(folder, *names)
    there = [f"s-{node}/{number}" for node in range(2) for number in range(2)]
    devices = JobDevices(dict.fromkeys(there, ""), {"": "cpu"}, True, "slurm")
    host.placing._devices = devices
    for job in host.book.jobs.values():
        job.request = msgspec.structs.replace(job.request, devices=(2, 2))
        (option,) = job.options.values()
        place = "", 2
        job.options = {place: dataclasses.replace(option, place=place)}
    return host


def test_jobs_do_not_wait_for_each_other_s_nodes(tmp_path: Path) -> None:
    """Each has one of the two nodes that it needs, and Slurm has no third one."""
    host = engine_host(tmp_path, "a", "b")
    names = [f"s-{node}/{number}" for node in range(4) for number in range(1)]
    devices = JobDevices(dict.fromkeys(names, ""), {"": "cpu"}, True, "slurm")
    host.placing._devices = devices
    a, b = host.runs["a"], host.runs["b"]
    host.place(a=2, b=2)
    a.has(2, slots=0)
    b.has(2, slots=0)
    a.agents, b.agents = {"s-0"}, {"s-2"}
    host.turn()
    assert not a.resized and not b.resized  # Neither has waited for long.
    a.away, b.away = ["s-1"], ["s-3"]
    host.turn()
    assert not a.resized and b.resized == [0]
    b.gone(Ending.INTERRUPTED)
    for _ in range(MOST_LAUNCHES):
        host.turn()
    assert len(b.started) == 1 and not host.book.jobs["b"].how  # It waits for a.
    assert JobBook(tmp_path).jobs["b"].behind == "a"
    a.agents, a.away = {"s-0", "s-1"}, []
    host.turn()
    assert len(b.started) == 2 and host.book.jobs["b"].behind == ""


def test_options_that_slurm_refuses_are_not_asked_for_again(tmp_path: Path) -> None:
    host = engine_host(tmp_path, "a", "b")
    a = host.runs["a"]
    host.place(a=2)
    a.has(2, slots=0)
    a.refused = {"s-0": "srun: error: Invalid partition"}
    host.turn()
    assert {*host.placing.refused} == {"s-0", "s-1"}  # By the same command.
    assert a.resized == [0]
    a.gone(Ending.INTERRUPTED)
    host.turn()
    for job in host.book.jobs.values():
        assert job.paused and not job.how
        assert "slurm refuses its nodes (srun: error: Invalid partition)" in job.why
        assert "other options of --slurm, and resume the job" in job.why
    host.book.record("resumed", name="a")
    assert host.book.jobs["a"].why == ""


def test_a_node_that_slurm_refuses_leaves_those_that_it_gave(tmp_path: Path) -> None:
    host = engine_host(tmp_path, "a")
    a = host.runs["a"]
    host.place(a=2)
    a.has(2)
    a.agents, a.refused = {"s-0"}, {"s-1": "srun: error: Too many nodes"}
    host.turn()
    assert [*host.placing.refused] == ["s-1"] and not a.resized
    assert host.placing.usable() == ["s-0/0", "s-0/1"]


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "srun: error: invalid partition specified: x\nsrun: error: Unable to "
            "allocate resources: Invalid partition name specified\n",
            "srun: error: Unable to allocate resources: Invalid partition name "
            "specified",
        ),
        (
            "srun: unrecognized option '--foo'\nTry \"srun --help\" for more "
            "information\n",
            "srun: unrecognized option '--foo'",
        ),
        (
            "srun: error: Unable to allocate resources: Unable to contact slurm "
            "controller (connect failure)\n",
            "",
        ),
        (
            "srun: job 6 queued and waiting for resources\nsrun: Job allocation 6 has "
            "been revoked\n",
            "",
        ),
        (
            "srun: error: Unable to allocate resources: Job violates accounting/QOS "
            "policy (job submit limit, user's size and/or time limits)\n",
            "",
        ),
        ("srun: error: n0: task 0: Exited with exit code 1\n", ""),
        ("Traceback\nsrun: error: Invalid --mem specification\n", ""),
        ("", ""),
    ],
)
def test_what_srun_says_when_it_refuses(output: str, line: str) -> None:
    assert slurm_refusal(output) == line


def test_a_command_that_is_refused_is_not_started_for_ever(tmp_path: Path) -> None:
    log, shell = tmp_path / "log", tmp_path / "shell"
    shell.write_text(
        f"#!/bin/sh\necho x >> {log}\necho 'srun: error: no' >&2\nexit 1\n"
    )
    shell.chmod(0o700)
    with HostAgents(
        {"a": [str(shell)]}, "x:1", tmp_path, processes=1, refusal=slurm_refusal
    ) as agents:
        end = time.monotonic() + 60
        while not agents.refused:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert agents.refused == {"a": "srun: error: no"}
        assert len(log.read_text().split()) == 3
        agents.set_hosts([])
        agents.set_hosts(["a"])
        assert not [*agents.react(time.monotonic(), ev.Tick())]
        write_refusals(tmp_path, agents.refused)
    add = Add(name="a", model="mlp", steps=9, devices=(1, 2), folder=str(tmp_path))
    shells = {"a": ["srun"], "b": ["srun"], "c": ["srun", "-p", "other"]}
    hosts = JobHosts(shells=shells, room=1, address="x", engine="slurm")
    run = JobRun(tmp_path, add, ThreadPoolExecutor(1), hosts)
    assert run.alike_hosts("a") == ["a", "b"] and run.refused_hosts() == {}
    with FolderLock(tmp_path / "front"):
        assert run.refused_hosts() == {"a": "srun: error: no"}


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[str, Callable[..., None]]]:
    """A remote shell that tells of its starts and ends, and a wait for these lines."""
    log = tmp_path / "log"
    text = (
        f"#!/bin/sh\ntrap 'echo end $1 >> {log}; exit 0' TERM\n"
        f"echo start $1 >> {log}\nwhile true; do sleep 0.05; done\n"
    )
    shell = tmp_path / "shell"
    shell.write_text(text)
    shell.chmod(0o700)

    def until(*lines: str) -> None:
        end = time.monotonic() + 60
        while not log.exists() or sorted(log.read_text().splitlines()) != sorted(lines):
            assert time.monotonic() < end, log.read_text() if log.exists() else ""
            time.sleep(0.02)

    yield str(shell), until


def test_agents_follow_the_hosts_of_a_job(
    tmp_path: Path, told: tuple[str, Callable[..., None]]
) -> None:
    shell, until = told
    shells = dict.fromkeys(["a", "b", "c"], [shell])
    with HostAgents(
        shells, "x:1", tmp_path, processes=1, hosts=["a", "b"], is_queued=True
    ) as agents:
        until("start a", "start b")
        agents.set_hosts(["b", "c", "elsewhere"])
        until("start a", "start b", "end a", "start c")
        agents.set_hosts(["a", "b"])
        lines = ["start a", "start b", "end a", "start c", "end c", "start a"]
        until(*lines)
        for pid, _ in agents._commands.identities().values():
            os.kill(pid, signal.SIGTERM)  # As an engine ends an allocation.
        until(*lines, "end a", "end b", "start a", "start b")
        agents.set_hosts([])
        until(*lines, "end a", "end b", "start a", "start b", "end a", "end b")


def until_recorded(folder: Path, *names: str) -> None:
    """Waits until the file of running agents has those of these hosts."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(FileNotFoundError):
            told = json.loads((folder / "elastic" / "agents.json").read_text())
            if sorted(told["agents"]) == sorted(names):
                return
        assert time.monotonic() < end
        time.sleep(0.02)


HOLDS: Final = """
import sys, time
from pathlib import Path
from typing import Final
from whalejax.elastic.agents.on_hosts import HostAgents
folder, shell, *hosts = sys.argv[1:]
with HostAgents(dict.fromkeys(hosts, [shell]), "x:1", Path(folder), processes=1):
    time.sleep(1000)
"""


@contextlib.contextmanager
def killed_at_the_end(*words: str) -> Iterator[None]:
    """A process that holds agents while a block runs, and is killed then."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, *words], cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_agents_of_a_killed_process_are_taken_over(
    tmp_path: Path, told: tuple[str, Callable[..., None]]
) -> None:
    shell, until = told
    shells = dict.fromkeys(["a", "b"], [shell])
    with killed_at_the_end(str(tmp_path), shell, "a", "b"):
        until("start a", "start b")
        until_recorded(tmp_path, "a", "b")
    with HostAgents(shells, "x:1", tmp_path, processes=1, hosts=["a"]) as agents:
        until("start a", "start b", "end b")
        agents.set_hosts(["a"])
        agents.set_hosts([])
        until("start a", "start b", "end b", "end a")
    with killed_at_the_end(str(tmp_path), shell, "a"):
        until("start a", "start b", "end b", "end a", "start a")
        until_recorded(tmp_path, "a")
    # Those of another supervisor are ended.
    with HostAgents({"a": [shell]}, "x:2", tmp_path, processes=1, hosts=[]):
        until("start a", "start b", "end b", "end a", "start a", "end a")


def test_what_a_killed_command_leaves_is_freed_before_the_next(
    tmp_path: Path, told: tuple[str, Callable[..., None]]
) -> None:
    shell, until = told
    with HostAgents(
        {"a": [shell]},
        "x:1",
        tmp_path,
        processes=1,
        environments={"a": {"X": "1"}},
        releases={"a": ["sh", "-c", f"echo freed >> {tmp_path / 'log'}"]},
    ) as agents:
        until("start a")
        pid, _ = agents._commands.identities()["a"]
        assert b"X=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        os.kill(pid, signal.SIGKILL)
        until("start a", "freed", "start a")
        agents.set_hosts([])
        until("start a", "freed", "start a", "end a")


def test_what_a_missing_agent_printed_is_shown(tmp_path: Path) -> None:
    add = Add(name="a", model="mlp", steps=9, devices=(1, 2), folder=str(tmp_path))
    run = JobRun(tmp_path, add, ThreadPoolExecutor(1))
    run.want_hosts(["s-0", "s-1"])
    assert run.missing_agent() == ""  # It has not been started.
    logs = tmp_path / "elastic"
    logs.mkdir()
    (logs / "agent-s-1.log").write_text("srun: error: Invalid partition\n\n")
    with FolderLock(tmp_path / "front"):
        assert run.missing_agent() == "s-0 has no agent yet"
        run.reader.agents.add("s-0")
        said = "s-1 has no agent yet: srun: error: Invalid partition"
        assert run.missing_agent() == said
        run.reader.agents.add("s-1")
        assert run.missing_agent() == ""
