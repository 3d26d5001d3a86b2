"""Agents of real processes: killed, frozen, asked to end, and back again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flags import QUICK
from tests.whalejax.elastic.runs import ROOT, Run
from tests.whalejax.elastic.test_runs import audit, lost
from tests.whalejax.keys import OTHER
from whalejax.distributed.reserved_port import release_port, reserve_port
from whalejax.elastic.agents.agent import Agent, AgentOptions, _check
from whalejax.elastic.supervisor.supervisor import KEY
from whalejax.journals.journal import FOLDER
from whalejax.meshes.errors import WhaleError
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.connection import Channel, ConnectionClosedError, listen
from whalejax.wire.keys import load_key, make_key
from whalejax.wire.messages import Message
from whalejax.wire.run_messages import TO_SUPERVISOR, Enlisted, Finish


pytestmark = pytest.mark.relaxed_promotion


class Agents:
    """A run, and agents that hold its processes."""

    def __init__(
        self,
        folder: Path,
        options: dict[str, Any],
        command: list[str] | None = None,
        **settings: Any,
    ) -> None:
        self.port = reserve_port("127.0.0.1")
        release_port(self.port)
        more = {"host": "127.0.0.1", "port": self.port, "places": True}
        self.run = Run(folder, options, settings, more=more, command=command)
        self.folder = folder
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str, *words: str) -> None:
        """Start an agent."""
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("XLA_")},
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK,
        }
        command = [
            *(sys.executable, "-m", "whalejax", "agent", f"127.0.0.1:{self.port}"),
            *("--key", str(self.folder / FOLDER / KEY), "--name", name),
            *("--logs", str(self.folder / name), *words),
        ]
        with (self.folder / f"agent-{name}.log").open("a") as log:
            self.agents[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=ROOT
            )

    def told(self, name: str) -> str:
        return (self.folder / f"agent-{name}.log").read_text()

    def end(self) -> None:
        """Leave nothing behind; members end with their agents."""
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        self.run.end()


@contextlib.contextmanager
def running(folder: Path, options: dict[str, Any], **settings: Any) -> Iterator[Agents]:
    found = Agents(folder, options, **settings)
    try:
        yield found
    finally:
        found.end()


def members_of(run: Run, agent: str) -> list[str]:
    there = run.members()
    return [
        e["name"]
        for e in run.events("started")
        if e["agent"] == agent and e["name"] in there
    ]


def test_a_killed_agent_costs_no_step_and_another_is_taken(tmp_path: Path) -> None:
    steps = 150
    options = {"steps": steps, "pause": 0.1, "save": str(tmp_path / "save")}
    with running(tmp_path, options, least=1, most=2) as there:
        run = there.run
        there.add("a")
        there.add("b", "--host", "127.0.0.2")
        run.until(lambda: bool(run.events("begun")) and run.step() >= 5)
        run.until(lambda: len(run.members()) == 2)
        (one,) = members_of(run, "b")
        there.agents["b"].kill()
        there.agents["b"].wait()
        run.until(lambda: lost(run) == [one])
        at = run.step()
        run.until(lambda: run.step() >= at + 3)
        there.add("b")
        run.until(lambda: bool(members_of(run, "b")))
        assert run.wait() == 0, run.told()
        audit(run, steps)
        hosts = {e["name"]: e["host"] for e in run.events("registered")}
        assert hosts[one] == "127.0.0.2"
        assert [a.wait(60) for a in there.agents.values()] == [0, 0]
    assert "the run is over: all steps are done" in there.told("a")


@pytest.mark.full
def test_an_ordinary_script_goes_on_without_a_lost_agent(tmp_path: Path) -> None:
    """Its processes meet where those of the agents are, and again without one."""
    script = [sys.executable, "-m", "tests.whalejax.elastic.ordinary"]
    command = [*script, str(tmp_path / "save"), "40"]
    with running(tmp_path, {}, command=command, least=1, most=2) as there:
        run = there.run
        there.add("a")
        there.add("b", "--host", "127.0.0.2")
        run.until(lambda: (tmp_path / "save" / "step_000020").is_dir())
        begun = run.events("begun")
        assert len(begun[-1]["members"]) == 2
        there.agents["b"].kill()
        run.until(lambda: len(run.events("begun")) > len(begun))
        assert run.wait() == 0, run.told()
    text = "".join(p.read_text() for p in tmp_path.glob("*/elastic/*.log"))
    losses: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+) of \d+: (\S+)", text):
        losses.setdefault(int(step), set()).add(loss)
    assert sorted(losses) == list(range(1, 41)), text
    assert all(len(found) == 1 for found in losses.values()), losses


@pytest.mark.full
def test_a_thawed_agent_ends_what_was_given_up(tmp_path: Path) -> None:
    options = {"steps": 3000, "pause": 0.02, "save": str(tmp_path / "save")}
    settings = {"least": 1, "most": 2, "lease_seconds": 5.0}
    with running(tmp_path, options, **settings) as there:
        run = there.run
        there.add("a")
        there.add("b")
        run.until(lambda: len(run.events("ready")) == 2 and run.step() >= 5)
        (one,) = members_of(run, "b")
        there.agents["b"].send_signal(signal.SIGSTOP)
        run.until(lambda: one in lost(run))
        at = run.step()
        run.until(lambda: run.step() >= at + 5)
        there.agents["b"].send_signal(signal.SIGCONT)
        run.until(lambda: len(members_of(run, "b")) == 1)
        generation = run.events("begun")[-1]["generation"]
        # The supervisor is killed: agents and members come back to the next.
        run.supervisor.kill()
        run.supervisor.wait()
        before = len(lost(run))
        run.start()
        at = run.step()
        run.until(lambda: run.step() >= at + 5)
        run.until(lambda: len(run.events("agent_joined")) >= 5)
        assert len(lost(run)) == before
        assert run.events("begun")[-1]["generation"] >= generation
        # A notice to all: no step is lost.
        for agent in there.agents.values():
            agent.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.told()
        assert run.events("ending")[-1]["how"] == "drained"
        saved = [said["step"] for said in run.events("saved")]
        assert saved[-1] == run.step()
        assert [a.wait(60) for a in there.agents.values()] == [0, 0]


def test_an_agent_without_supervisor_ends(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    options = AgentOptions(
        supervisor="127.0.0.1:1", key=tmp_path / "key", logs=tmp_path, patience=0.5
    )
    with pytest.raises(WhaleError, match="127.0.0.1:1 does not answer; it was away"):
        Agent(options).run()
    missing = AgentOptions(
        supervisor="127.0.0.1:1", key=tmp_path / "no", logs=tmp_path, patience=0.5
    )
    with pytest.raises(WhaleError, match="--key: there was no file .*no within"):
        Agent(missing).run()


def test_an_agent_with_another_key_ends_at_once(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    listening = listen()
    port = listening.getsockname()[1]
    acceptor = Acceptor(listening, OTHER, lambda channel: None)
    try:
        options = AgentOptions(
            supervisor=f"127.0.0.1:{port}", key=tmp_path / "key", logs=tmp_path
        )
        with pytest.raises(WhaleError, match="are of different runs. Give"):
            Agent(options).run()
    finally:
        acceptor.close()


def test_an_agent_that_cannot_send_hears_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beat fails when words that came before are still to be heard."""
    make_key(tmp_path / "key")
    heard, said = [], threading.Event()
    send = Channel.send

    def fails_to_beat(channel: Channel, message: Message, **options: Any) -> None:
        if message.kind == "agent_beat":
            assert said.wait(60)
            raise ConnectionClosedError("the other side is gone")
        send(channel, message, **options)

    monkeypatch.setattr(Channel, "send", fails_to_beat)

    def serve(channel: Channel) -> None:
        if heard or channel.is_closed:
            return
        enlist = channel.next(TO_SUPERVISOR)
        assert enlist is not None
        heard.append(enlist.kind)
        program = {"command": [""], "environment": {}, "beat_seconds": 60.0}
        channel.post(Enlisted(**program))
        channel.post(Finish(why=""))
        said.set()

    listening = listen()
    port = listening.getsockname()[1]
    acceptor = Acceptor(listening, load_key(tmp_path / "key"), serve)
    try:
        options = AgentOptions(
            supervisor=f"127.0.0.1:{port}",
            key=tmp_path / "key",
            logs=tmp_path,
            patience=600.0,
        )
        assert Agent(options).run() == 0
    finally:
        acceptor.close()
    assert heard == ["enlist"]


def test_names_and_addresses_that_no_agent_can_have() -> None:
    with pytest.raises(WhaleError, match="--name is 'a/b'; expected at most 64"):
        _check("a/b", None)
    with pytest.raises(WhaleError, match="--host is 192.0.2.1; nothing can listen"):
        _check("a", "192.0.2.1")
