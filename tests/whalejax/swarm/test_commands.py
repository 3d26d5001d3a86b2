"""``whalejax swarm``: what it takes, prints and refuses."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.whalejax.keys import KEY
from tests.whalejax.swarm import swarm_jobs as jobs
from whalejax.cli import main, swarm
from whalejax.cli.swarm_options import SwarmJoinCommand, SwarmServeCommand
from whalejax.distributed.launch_env import reached_host
from whalejax.meshes.errors import WhaleError
from whalejax.swarm_runtime.swarm_process import open_listener, told_address
from whalejax.wire.connection import listen
from whalejax.wire.keys import Key, make_key
from whalejax.wire.service import Address
from whalejax.wire.swarm_messages import AskTerms, ShowSwarm


pytestmark = pytest.mark.relaxed_promotion  # Optax promotes its counts

JOB = f"{jobs.__file__}:make"


def test_serving_shows_steps_and_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, save = tmp_path / "k", tmp_path / "s"
    words = f"--stages 3 --steps 2 --micro-batches 6 --peers 3 --port 0 --key {key}"
    words = f"swarm serve {JOB} {words} --save {save} --json"
    assert main.main(words.split()) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said[0]["event"] == "listening" and said[0]["port"] > 0
    losses = [x["loss"] for x in said if x["event"] == "step"]
    assert losses == pytest.approx(jobs.losses(2), rel=1e-6)
    assert (save / "step_000002").is_dir()
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "serve mlp --stages 1 --steps 0 --port 70000",
            ["--stages is 1", "--steps is 0", "--port is 70000; expected 0 to 65535"],
        ),
        ("serve mlp --stages 3 --call-timeout nan", ["--call-timeout is nan"]),
        ("serve nothing --stages 3", ["no reference model is named 'nothing'"]),
        ("join nowhere mlp", ["HOST:PORT is 'nowhere'; expected HOST:PORT, such as"]),
        ("show fd00::2:8476", ["an IPv6 address without brackets"]),
        (
            "join h:1 mlp --stage -1 --patience 0",
            ["--stage is -1; expected 0 to 4095", "--patience is 0; expected 0.1"],
        ),
        (
            "join h:1 mlp --key absent.key --patience 0.1",
            ["absent.key: the key of the run cannot be"],
        ),
        ("show h:99999", ["HOST:PORT is 'h:99999'"]),
    ],
)
def test_wrong_options_are_named(
    words: str,
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # A key is written before the job is made.
    assert main.main(["swarm", *words.split()]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert all(text in found for text in said), found


def test_no_registry_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "k"
    make_key(key)
    assert main.main(["swarm", "show", "127.0.0.1:1", "--key", str(key)]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert "127.0.0.1:1: no registry of a swarm answers there" in found
    words = ["swarm", "train", "127.0.0.1:1", "gpt-test", "--key", str(key)]
    assert main.main([*words, "--patience", "0.5"]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert "waiting for the registry at 127.0.0.1:1" in found
    assert "127.0.0.1:1: no registry of a swarm answers there" in found
    assert main.main([*words, "--port", "0", "--patience", "0"]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert "--port is 0; expected 1 to 65535" in found
    assert "--patience is 0; expected 0.1 to 1e6 seconds" in found


def test_another_service_at_the_address_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "k"
    make_key(key)
    listening = listen("127.0.0.1", 0)

    def answer() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.0 400 Bad Request" + bytes(200))
            connection.recv(1 << 16)

    monkeypatch.setattr(swarm, "_AGAIN_SECONDS", math.inf)  # A second try would raise.
    thread = threading.Thread(target=answer)
    thread.start()
    host, port = listening.getsockname()[:2]
    words = ["swarm", "train", f"{host}:{port}", "gpt-test", "--key", str(key)]
    assert main.main(words) == 2
    thread.join()
    listening.close()
    found = " ".join(capsys.readouterr().err.split())
    assert f"{host}:{port}: no registry of a swarm answers there" in found
    assert "is no process of a run of this version" in found


def test_a_process_that_joins_waits_for_a_registry_that_is_started_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key, tries = tmp_path / "k", 0

    def again(_: float) -> None:
        nonlocal tries
        tries += 1
        shutil.copy2(KEY.path, key)

    def asked(address: Address, _: Key, question: Any) -> dict[str, Any]:
        if tries < 3:
            raise swarm._Absent("nobody answers")
        return {"asked": question, "at": address}

    monkeypatch.setattr(swarm.time, "sleep", again)
    monkeypatch.setattr(swarm, "_query_registry", asked)
    command = SwarmJoinCommand(registry="h:7", model="m", key=key)
    address, found, terms = swarm._terms(command)
    assert (address, found.path) == (("h", 7), key) and tries == 3
    assert terms == {"asked": AskTerms(), "at": ("h", 7)}
    assert capsys.readouterr().err.count("waiting for the registry at h:7") == 1


def test_a_process_that_joins_waits_for_a_registry_that_still_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It listens from its start and answers later: patience holds, and no less."""
    key, begun = tmp_path / "k", time.monotonic()
    now = [begun]
    monkeypatch.setattr(swarm, "_ASK_SECONDS", 0.2)
    monkeypatch.setattr(swarm.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(swarm.time, "monotonic", lambda: now[0])
    asked = swarm._query_registry

    def later(address: Address, given: bytes, what: str) -> dict[str, Any]:
        now[0] += 20.0
        return asked(address, given, what)

    monkeypatch.setattr(swarm, "_query_registry", later)
    make_key(key)
    with open_listener("a test", "127.0.0.1", 0) as listening:
        where = f"127.0.0.1:{listening.getsockname()[1]}"
        command = SwarmJoinCommand(registry=where, model="m", key=key, patience=100.0)
        with pytest.raises(swarm._Absent):
            swarm._terms(command)
    assert 100.0 <= now[0] - begun < 150.0
    now[0] = begun  # Where nothing listens, it comes soon or not at all.
    with pytest.raises(swarm._Absent):
        swarm._terms(command)
    assert now[0] - begun < 100.0


def test_serve_listens_and_has_a_key_before_it_makes_the_job(
    tmp_path: Path,
) -> None:
    key, found = tmp_path / "k", list[bool]()
    with open_listener("a test", "127.0.0.1", 0) as free:
        port = free.getsockname()[1]

    def find_job(model: str, given: Any) -> Any:
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            found.append(key.exists())
        raise WhaleError("no such job")

    command = SwarmServeCommand(model="m", stages=2, steps=1, key=key, port=port)
    with pytest.raises(WhaleError, match="no such job"):
        swarm.serve(command, find_job)
    assert found == [True]
    with open_listener("a test", "127.0.0.1", port):
        pass  # It is let go.


def test_who_listens_everywhere_names_an_address_that_others_reach() -> None:
    assert told_address(("0.0.0.0", 5), ("127.0.0.1", 7)) == ("127.0.0.1", 5)
    assert told_address(("10.0.0.1", 5), ("127.0.0.1", 7)) == ("10.0.0.1", 5)
    assert reached_host("0.0.0.0") == socket.gethostname()


def test_a_registry_that_does_not_answer_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Silent:
        """Its registry is away for a while, and comes back."""

        failed, over, silences = False, "left", [0.0, 6.0, 7.0, 0.0, 0.0]

        def start(self) -> None: ...
        def leave(self) -> None: ...
        def close(self) -> None: ...

        def wait(self, seconds: float) -> bool:
            self.silences = self.silences[1:]
            return not self.silences

        @property
        def silent_seconds(self) -> float:
            return self.silences[0]

    signals = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        swarm._until_over(Silent(), lambda: "it serves", "leaving")  # type: ignore[arg-type]
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "whalejax: it serves",
        "whalejax: the registry has not answered for 6 s; waiting for it",
        "whalejax: the registry answers again",
        "whalejax: left",
    ]


def test_a_run_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.whalejax.swarm.fleets import swarm as running

    with running(steps=1) as found:
        for stage in range(jobs.STAGES):
            found.join(stage)
        found.run()
        address: Address = found.serving.address
        told = swarm._query_registry(address, KEY, ShowSwarm()).fields
    text = swarm.as_text(told)
    assert "step 1 of 1, generation 0" in text and "wire f32" in text
    assert all(f"stage {stage}: 1 peer" in text for stage in range(jobs.STAGES))
    assert "working" in text
    assert "trainer with the registry" in text
    assert "leads 0  has led 6" in text
    assert "ledger: 0 parts of the current step are not counted yet" in text


class Interrupted:
    """A run in which Ctrl-C is pressed after a step."""

    serving = SimpleNamespace(address=("127.0.0.1", 8476))

    def __init__(self, *given: Any, **more: Any) -> None: ...

    def run(self) -> Iterator[tuple[int, dict[str, float]]]:
        yield 7, {"loss": 1.0}
        raise KeyboardInterrupt


@pytest.mark.parametrize("saves", [False, True])
def test_an_interrupt_says_what_is_not_saved(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    saves: bool,
) -> None:
    monkeypatch.setattr("whalejax.swarm_runtime.swarm_run.SwarmRun", Interrupted)
    monkeypatch.setattr(signal, "signal", lambda *given: None)
    words = ["swarm", "serve", JOB, "--stages", str(jobs.STAGES)]
    words += ["--key", str(tmp_path / "k")]
    words += ["--save", str(tmp_path / "s"), "--save-every", "5"] if saves else []
    assert main.main(words) == 130
    said = " ".join(capsys.readouterr().err.split())
    assert "ended after step 7; " in said
    expected = "are lost (--save-every 5)" if saves else "without --save"
    assert expected in said


def test_joining_ends_with_the_error_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.whalejax.swarm.fleets import swarm as running

    key = tmp_path / "k"
    shutil.copy2(KEY.path, key)
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with running(steps=1, patience_seconds=0.0) as found:

        def fails() -> None:
            while not any(m.ready for m in found.members()):
                threading.Event().wait(0.05)
            with pytest.raises(WhaleError, match="no peer serves stage 1, 2"):
                found.run()

        thread = threading.Thread(target=fails, daemon=True)
        thread.start()
        host, port = found.serving.address
        words = f"swarm join {host}:{port} {JOB} --key {key} --stage 0"
        try:
            code = main.main(words.split())
            said = " ".join(capsys.readouterr().err.split())
            assert code == 2 and "the run has failed: no peer serves stage 1, 2" in said
        finally:
            for number, handler in zip(
                (signal.SIGINT, signal.SIGTERM), handlers, strict=True
            ):
                signal.signal(number, handler)
        thread.join(300)
