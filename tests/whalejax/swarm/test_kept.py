"""A registry and its peers as processes: what is killed is started again."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, free_port
from tests.whalejax.swarm import swarm_jobs as jobs
from whalejax.cli import main
from whalejax.cli.swarm_options import SwarmServeCommand
from whalejax.cli.swarm_processes import _words
from whalejax.processes import heartbeat_pipe
from whalejax.processes.restarting_processes import Keeper, KeptCommand


# JAX may be there; nothing is shared.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")

SECONDS = 240
STEPS = 120


def keeper(folder: Path, leader: str, *others: str) -> tuple[Keeper, list[str]]:
    said: list[str] = []
    names = ["registry", *(f"peer-{n + 1}" for n in range(len(others)))]
    programs = [
        KeptCommand(name=name, command=("sh", "-c", text))
        for name, text in zip(names, (leader, *others), strict=True)
    ]
    return Keeper(programs, folder, said.append), said


WAITS = "while ! [ -e {} ]; do sleep 0.05; done"


BEAT = "echo >/proc/self/fd/${WHALEJAX_BEAT_PIPE%%:*}"


def test_the_leader_that_ends_by_itself_ends_the_run(tmp_path: Path) -> None:
    found, said = keeper(tmp_path, "exit 3", "sleep 1000", "exit 0")
    assert found.run() == 3
    assert not [text for text in said if "peer-1" in text]


def test_what_is_killed_is_started_again(tmp_path: Path) -> None:
    """The leader is killed once, the first peer once; then both find a file."""
    once = f"if ! [ -e {tmp_path}/{{0}} ]; then touch {tmp_path}/{{0}}; kill -9 $$; fi"
    peer = f"{once.format('p')}; touch {tmp_path}/again; exec sleep 1000"
    leader = f"{once.format('r')}; {WAITS.format(tmp_path / 'again')}"
    found, said = keeper(tmp_path, leader, peer)
    assert found.run() == 0
    assert sorted(said) == [
        "peer-1 ended by SIGKILL; it is started again",
        "registry ended by SIGKILL; it is started again",
    ]


def test_a_peer_that_left_does_not_stand_still(tmp_path: Path) -> None:
    """Its beats are forgotten when it ends, though they are silent from then on."""
    beats = f"for _ in 1 2 3 4 5 6; do {BEAT}; sleep 0.1; done"
    programs = [
        KeptCommand(name="registry", command=("sleep", "4")),
        KeptCommand(name="peer-1", command=("sh", "-c", beats)),
    ]
    said: list[str] = []
    assert Keeper(programs, tmp_path, said.append, silent_seconds=2.0).run() == 0
    assert not said


def test_one_that_stands_still_is_killed_and_started_again(tmp_path: Path) -> None:
    once = f"[ -e {tmp_path}/p ] || {{ touch {tmp_path}/p; {BEAT}; kill -STOP $$; }}"
    peer = f"{once}; touch {tmp_path}/again"
    programs = [
        KeptCommand(
            name="registry", command=("sh", "-c", WAITS.format(tmp_path / "again"))
        ),
        KeptCommand(name="peer-1", command=("sh", "-c", peer)),
    ]
    said: list[str] = []
    assert Keeper(programs, tmp_path, said.append, silent_seconds=1.0).run() == 0
    assert [text.partition(" for ")[0] for text in said] == [
        "peer-1 stands still: no beat",
        "peer-1 ended by SIGKILL; it is started again",
    ]


def test_heartbeats_begin_end_and_go_to_no_other_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child of the process has the variable, and may have another file there."""
    monkeypatch.setattr(heartbeat_pipe, "BEAT_SECONDS", 0.01)
    with selectors.DefaultSelector() as selector:
        pipes = heartbeat_pipe.HeartbeatPipes(selector, seconds=1000.0)
        with pipes.pipe("peer-1", 1000.0) as (_, variables):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            end = heartbeat_pipe.begin_beats()
            selector.select()[0][0].data()
            assert pipes.beating == {"peer-1"}
            end()
            selector.select()[0][0].data()
            assert not pipes.beating and not selector.get_map()
    read, write = os.pipe()
    number = variables[heartbeat_pipe.BEAT_PIPE].partition(":")[0]
    os.dup2(write, int(number))
    os.close(write)
    heartbeat_pipe.beat()
    os.close(int(number))
    assert not os.read(read, 1)
    os.close(read)


def test_what_a_killed_command_leaves_elsewhere_is_freed(tmp_path: Path) -> None:
    """Before it is started again, and when it is killed at the end."""
    freed = tmp_path / "freed"
    once = f"if ! [ -e {tmp_path}/p ]; then touch {tmp_path}/p; kill -9 $$; fi"
    counts = f"[ -e {freed} ] && cp {freed} {tmp_path}/again"
    peer = f"{once}; {counts}; trap '' TERM; while :; do sleep 0.1; done"
    leader = f"{WAITS.format(tmp_path / 'again')}; exit 3"
    said: list[str] = []
    programs = [
        KeptCommand(name="registry", command=("sh", "-c", leader)),
        KeptCommand(
            name="peer-1",
            command=("sh", "-c", peer),
            release=("sh", "-c", f"echo x >> {freed}"),
        ),
        KeptCommand(name="peer-2", command=("sleep", "1000"), release=("false",)),
    ]
    assert Keeper(programs, tmp_path, said.append).run() == 3
    assert freed.read_text() == "x\nx\n"
    assert (tmp_path / "again").read_text() == "x\n"
    assert any("peer-2 may have left something: false" in text for text in said)


def test_the_same_error_twice_ends_the_run(tmp_path: Path) -> None:
    peer = "echo 'WhaleError: another job'; exit 2"
    found, said = keeper(tmp_path, "sleep 1000", peer)
    assert found.run() == 1
    assert said[0] == (
        "peer-1 ended with status 2: WhaleError: another job; it is started again"
    )
    assert "the run is given up: the same error ended peer-1 and then peer-1" in said[1]


def test_who_is_told_to_end_ends_the_leader_first(tmp_path: Path) -> None:
    leader = f"trap 'touch {tmp_path}/told; exit 7' TERM; kill -TERM $PPID; "
    found, _ = keeper(tmp_path, leader + WAITS.format(tmp_path / "never"), "sleep 1000")
    assert found.run() == 7
    assert (tmp_path / "told").exists()


def test_options_are_given_on() -> None:
    command = SwarmServeCommand(
        model="gpt", set=("a=1", "b=2"), stages=3, save=Path("s"), json=True
    )
    assert _words("serve", command)[3:] == [
        *("swarm", "serve", "gpt", "--set", "a=1", "b=2", "--stages", "3"),
        *("--save", "s", "--json"),
    ]


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[KeptCommand]:
    """Programs that a command would keep running."""
    seen: list[KeptCommand] = []

    class Seen(Keeper):
        def __init__(self, given: Any, *_: Any) -> None:
            seen.extend(given)

        def run(self) -> int:
            return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("whalejax.cli.swarm_processes.Keeper", Seen)
    return seen


def test_peers_of_other_hosts_are_started_by_a_shell(
    tmp_path: Path, programs: list[KeptCommand]
) -> None:
    words = "swarm serve gpt-test --stages 2 --save s --processes 3 --host 10.0.0.1"
    words += " --hosts localhost,node-b --remote-shell sh --port 7"
    assert main.main(words.split()) == 0
    registry, *peers = programs
    assert "--hosts" not in registry.command and "--processes" not in registry.command
    join = "swarm join 10.0.0.1:7 gpt-test --host"
    assert [f"{join} 10.0.0.1" in " ".join(p.command) for p in peers] == [1, 0, 1]
    assert [*peers[1].command[:2]] == ["sh", "node-b"]
    assert peers[1].command[2].startswith(f"cd {tmp_path} && exec ")
    assert peers[1].command[2].endswith(f"{join} node-b")


@pytest.mark.parametrize(
    ("options", "shell"),
    [
        (["--slurm=--mem=1G -p long"], "--mem=1G -p long sh -c"),
        (["--ray", "auto", "--peer-gpus", "2"], "engines.ray_shell auto 0 2"),
        (["--ray", "a:1"], "engines.ray_shell a:1 1 0"),
    ],
)
def test_peers_are_started_where_an_engine_gives_a_node(
    programs: list[KeptCommand],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    shell: str,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    words = "swarm serve gpt-test --stages 2 --save s --processes 2 --host 10.0.0.1"
    assert main.main([*words.split(), *options]) == 0
    registry, *peers = programs
    assert not {"--slurm", "--ray", "--peer-gpus"} & {*registry.command}
    assert ("SLURM_JOB_ID" in os.environ) == (options[0] == "--ray")
    for number, peer in enumerate(peers, 1):
        *before, name, command = peer.command
        assert shell in " ".join(before)
        assert name.endswith(f"-{number}")
        assert "swarm join 10.0.0.1:8476 gpt-test --host 0.0.0.0" in command
    names = [peer.environment.get("SLURM_JOB_NAME") for peer in peers]
    if options[0] != "--ray":
        assert len({*names}) == 2
        assert [[*peer.release] for peer in peers] == [
            ["scancel", "--quiet", f"--name={name}"] for name in names
        ]
    else:
        assert names == [None, None] and not any(peer.release for peer in peers)


def test_engines_that_contradict_each_other_are_refused(
    programs: list[KeptCommand],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "swarm serve gpt-test --stages 2 --save s --host 10.0.0.1".split()

    def said(*options: str) -> str:
        assert main.main([*words, *options]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "--ray is auto without --processes" in said("--ray", "auto")
    both = said("--processes", "2", "--slurm=", "--ray", "a", "--hosts", "b")
    assert "--hosts b and --slurm and --ray a were given" in both
    gpus = said("--processes", "2", "--peer-gpus", "2")
    assert "--peer-gpus is 2 without --ray" in gpus
    loopback = said("--processes", "2", "--ray", "a", "--host", "127.0.0.1")
    assert "which the machines of Ray cannot reach" in loopback
    unclosed = said("--processes", "2", '--slurm="')
    assert "--slurm is '\"' (No closing quotation)" in unclosed
    named = said("--processes", "2", "--slurm=-p long -J mine")
    assert "each allocation gets a job name" in named
    assert "Leave --job-name out" in named
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "there is no srun here" in said("--processes", "2", "--slurm=")
    assert not programs


def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "swarm serve gpt-test --stages 2 --processes 2 --port 0".split()
    assert main.main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--processes was given without --save DIR" in said
    assert "--port is 0 with --processes" in said
    words = "swarm serve gpt-test --stages 2 --hosts a,b,c --remote-shell sh".split()
    assert main.main(words) == 2
    assert "--hosts is a,b,c without --processes" in capsys.readouterr().err
    assert main.main([*words, "--processes", "2", "--save", "s"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--processes is 2 on 3 hosts; expected at least one on each" in said
    assert "--host is 127.0.0.1, which the machines of --hosts a,b,c cannot" in said


@pytest.mark.full
def test_one_that_always_fails_beside_others_that_serve_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whalejax.membership.kept_run.FRUITFUL_SECONDS", 0.5)
    monkeypatch.setattr(
        "whalejax.membership.restart_policy.Failures.hold", lambda *_: 0.0
    )
    fails = f"sleep 1; echo 'WhaleError: no'; echo x >> {tmp_path}/fails; exit 2"
    leader = f"while [ $(cat {tmp_path}/fails | wc -l) -lt 3 ]; do sleep 0.1; done"
    (tmp_path / "fails").touch()
    found, said = keeper(tmp_path, leader, "sleep 1000", fails)
    assert found.run() == 0
    assert len(said) >= 2 and not any("given up" in text for text in said)


@pytest.mark.full
@pytest.mark.relaxed_promotion  # Optax promotes its counts
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_registry_and_a_peer_that_are_killed(tmp_path: Path) -> None:
    """The losses are those of one process that nothing disturbs."""
    words = [
        *(sys.executable, "-m", "whalejax", "swarm", "serve", f"{jobs.__file__}:make"),
        *("--stages", "3", "--steps", str(STEPS), "--micro-batches", "6"),
        *("--processes", "3", "--save", "s", "--save-every", "5", "--json"),
        *("--port", str(free_port())),
    ]
    running = subprocess.Popen(
        words,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    losses: dict[int, float] = {}
    events: list[dict[str, Any]] = []
    try:
        assert running.stdout is not None
        for line in running.stdout:
            said = json.loads(line)
            events.append(said)
            if said["event"] != "step":
                continue
            losses[said["step"]] = said["loss"]
            steps = [x for x in events if x["event"] == "step"]
            if len(steps) == 12:
                os.kill(child(running.pid, "serve"), signal.SIGKILL)
            if len(steps) == 40:
                os.kill(child(running.pid, "join"), signal.SIGKILL)
        errors = running.communicate(timeout=SECONDS)[1]
    finally:
        running.kill()
    assert running.returncode == 0, errors
    assert "registry ended by SIGKILL; it is started again" in errors
    assert "peer-1 ended by SIGKILL; it is started again" in errors
    assert any(x["event"] == "restored" and x["step"] >= 5 for x in events)
    assert [*losses.values()] == pytest.approx(jobs.losses(STEPS), rel=1e-6)
    assert sorted(losses) == [*range(1, STEPS + 1)]


def child(pid: int, verb: str) -> int:
    """The first process that another one has started, of a verb of the swarm."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for text in sorted(found, key=int):
        words = Path(f"/proc/{text}/cmdline").read_bytes().split(b"\0")
        if verb.encode() in words:
            return int(text)
    raise AssertionError(f"none of {found} is {verb}")
