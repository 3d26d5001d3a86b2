"""Hosts find out before they run what would keep them from running together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.processes import free_port
from tests.whalejax.keys import KEY, OTHER
from whalejax.agreement import host_checks
from whalejax.agreement.host_checks import Check, HostReport
from whalejax.agreement.host_comparison import (
    AskTime,
    ClockTime,
    Comparison,
    HostComparison,
    Visit,
    meet,
)
from whalejax.cli import main
from whalejax.distributed.first_connection import reach, shared_key
from whalejax.distributed.launch_env import (
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
    launched,
    split_address,
)
from whalejax.meshes.errors import WhaleError
from whalejax.wire.connection import UNENCRYPTED, admission
from whalejax.wire.keys import Key
from whalejax.wire.messages import Messages, encode


FACTS = {"jax": "0.10.2", "python": "3.11", "device kind": "NVIDIA H100"}


def host(name: str, **facts: str) -> HostReport:
    return HostReport(
        host=name, facts={**FACTS, **facts}, checks=(Check(name="a", found=name),)
    )


def beside(work: Callable[[], Any]) -> Callable[[], Any]:
    """Do something in a thread; the result waits for its end."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        return found[0]

    return result


def together(
    *reports: HostReport, count: int | None = None, seconds: float = 20
) -> list[HostComparison]:
    """What hosts find that meet on this machine."""
    place = f"127.0.0.1:{free_port()}"
    size = len(reports) if count is None else count
    waiting = [beside(lambda r=r: meet(r, place, size, seconds)) for r in reports]
    return [result() for result in waiting]


def by_name(met: HostComparison) -> dict[str, Check]:
    return {check.name: check for check in met.between}


def test_hosts_that_are_alike_have_no_problem() -> None:
    found = together(host("a"), host("b"), host("c"))
    assert found[0] == found[1] == found[2]
    assert {report.host for report in found[0].hosts} == {"a", "b", "c"}
    assert {check.verdict for check in found[0].between} == {"ok"}
    assert "3 of 3" in by_name(found[0])["hosts"].found
    assert by_name(found[0])["clocks"].found.count("±") == 2


def test_versions_that_differ_are_a_problem_with_its_remedy() -> None:
    first, second = together(
        host("a"), host("b", jax="0.11.0", **{"device kind": "cpu"})
    )
    assert first == second
    checks = by_name(first)
    assert checks["same jax"].verdict == "problem"
    assert "has 0.11.0" in checks["same jax"].found
    assert "has 0.10.2" in checks["same jax"].found
    assert checks["same jax"].remedy == "Install one jax on all hosts"
    assert checks["same device kind"].verdict == "warning"
    assert checks["same python"].verdict == "ok"


def test_who_does_not_come_is_missed() -> None:
    (met,) = together(host("a"), count=2, seconds=0.5)
    assert by_name(met)["hosts"].verdict == "problem"
    assert "1 of 2 came" in by_name(met)["hosts"].found
    assert "firewall" in by_name(met)["hosts"].remedy


def test_a_clock_that_is_off_is_a_problem() -> None:
    port = free_port()
    met = beside(lambda: meet(host("a"), f"127.0.0.1:{port}", 2, 20))
    channel = reach(f"127.0.0.1:{port}", None, time.monotonic() + 20)
    channel.send(Visit(report=host("b")))
    asked = Messages[AskTime | Visit | Comparison](AskTime, Visit, Comparison)
    said = channel.receive(asked, seconds=20)
    while isinstance(said, AskTime):
        channel.send(ClockTime(time=time.time() - 5))
        said = channel.receive(asked, seconds=20)
    channel.close()
    check = by_name(met())["clocks"]
    assert check.verdict == "problem" and "b -5.0" in check.found
    assert said == Visit(report=host("a"))


def test_something_else_at_the_port_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(WhaleError, match="is not whalejax doctor, or does not"):
            meet(host("a"), place, 2, 0.3)


def test_a_coordinator_that_is_not_there_is_said() -> None:
    # 192.0.2.0/24 is for documentation: nothing is there, and it is not here.
    with pytest.raises(
        WhaleError, match="192.0.2.1:9 was not reached in 0 s|unreachable"
    ):
        meet(host("a"), "192.0.2.1:9", 2, 0.3)
    with pytest.raises(WhaleError, match="no-such.invalid has no address here"):
        meet(host("a"), "no-such.invalid:9", 2, 0.3)


def test_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in found["hosts"][0]["checks"]}
    assert found["ok"] and found["problem"] == 0
    assert {
        "whalejax",
        "jax",
        "jaxlib",
        "python",
        "devices",
        "address",
        "port",
        "clock",
    } <= set(checks)
    assert checks["devices"]["found"] == "8×cpu (cpu)"
    for check in checks.values():
        assert bool(check["remedy"]) == (check["verdict"] != "ok")


def test_what_is_wrong_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_checks, "_DEVICES", "raise SystemExit('no driver')")
    monkeypatch.setattr(host_checks.metadata, "version", lambda _: "0.4.1")
    refuse = "no control group can be made here (/sys: Read-only file system). Run as"
    monkeypatch.setattr(host_checks, "why_no_quota", lambda: refuse)
    monkeypatch.setattr(
        host_checks.metadata, "requires", lambda _: ["jax>=0.10.2,<0.13"]
    )
    with socket.create_server(("", 0)) as other:
        monkeypatch.setattr(host_checks, "PORT", other.getsockname()[1])
        assert main.main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    for text in (
        "no driver",
        "pip install 'jax>=0.10.2,<0.13'",
        "Read-only file",
        "port",
    ):
        assert text in said
    assert "2 problems" in said


def raw(port: int) -> socket.socket:
    """A connection, as soon as something listens."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 30)
        except ConnectionRefusedError:
            continue


def frame(text: bytes) -> bytes:
    return UNENCRYPTED + len(text).to_bytes(4, "big") + bytes(8) + text


HOSTILE: Final = (
    b"[]\n",
    b"\xff\xfe\n",
    UNENCRYPTED[:5],
    UNENCRYPTED[:5] + b"x",
    UNENCRYPTED,
    UNENCRYPTED + b"\xff" * 12,
    frame(b"x"),
    frame(b"\x91" * 50_000),
    frame(encode(ClockTime(time=1.0))[0]),
    frame(encode(AskTime())[0]),
    frame(encode(Visit(report=host("x")))[0]) + b"\0\0",
    frame(encode(Visit(report=dataclasses.replace(host("x"), facts=())))[0]),
    b"x" * 400_000,
)


@pytest.mark.parametrize("key", [None, KEY])
def test_strangers_keep_nobody_from_meeting(key: Key | None) -> None:
    """Some say nonsense, and more than are expected say nothing at all."""
    port = free_port()
    place = f"127.0.0.1:{port}"
    first = beside(lambda: meet(host("a"), place, 2, 60, key))
    with contextlib.ExitStack() as stack:
        for said in (b"", b"", b"", *HOSTILE):
            link = stack.enter_context(raw(port))
            with contextlib.suppress(OSError):  # it may have heard enough
                link.sendall(said)
        second = beside(lambda: meet(host("b"), place, 2, 60, key))
        assert second() == first()
    assert [report.host for report in first().hosts] == ["a", "b"]
    assert by_name(first())["hosts"].verdict == "ok"


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (KEY, OTHER, "its key and that of this process are of different runs"),
        (KEY, None, "one side was given a key .* and the other was not"),
        (None, KEY, "does not speak 'whalejax 6' over TLS"),
    ],
)
def test_who_has_another_key_does_not_meet(
    one: Key | None, other: Key | None, says: str
) -> None:
    place = f"127.0.0.1:{(port := free_port())}"
    first = beside(lambda: meet(host("a"), place, 2, 3, one))
    raw(port).close()
    with pytest.raises(WhaleError, match=says):
        meet(host("b"), place, 2, 30, other)
    assert by_name(first())["hosts"].verdict == "problem"


def test_what_listens_must_have_the_key_too() -> None:
    """A program that admits everybody does not pass for one that has it."""
    with socket.create_server(("127.0.0.1", 0)) as other:

        def admit() -> None:
            link, _ = other.accept()
            with link:
                link.sendall(admission())
                link.recv(1 << 16)

        beside(admit)
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(WhaleError, match="is not whalejax doctor"):
            meet(host("a"), place, 2, 30, KEY)


def test_keys_of_a_version_that_signed_are_refused(tmp_path: Path) -> None:
    old = tmp_path / "key"
    old.write_text("5e" * 32)
    old.chmod(0o600)
    with pytest.raises(WhaleError) as error:
        shared_key({"WHALEJAX_KEY_FILE": str(old)})
    for text in ("WHALEJAX_KEY_FILE", "holds no certificate", "wire.keys new FILE"):
        assert text in str(error.value)
    with pytest.raises(WhaleError, match="WHALEJAX_KEY is set"):
        shared_key({"WHALEJAX_KEY": "5e" * 32})
    found = shared_key({"WHALEJAX_KEY_FILE": str(KEY.path)})
    assert found is not None and found.run == KEY.run


def test_control_characters_of_others_are_not_shown() -> None:
    found = host("a\x1b[2J", jax="\x9b1m").printable()
    assert (found.host, found.facts["jax"]) == ("a?[2J", "?1m")
    assert found.checks[0].found == "a?[2J"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("fd00::2:8476", r"IPv6 address without brackets.*expected \[ADDRESS\]:PORT"),
        ("::1:8476", r"such as \[::1\]:8476"),
        ("node:²", "expected HOST:PORT"),
        ("node:99999999999999", "expected HOST:PORT"),
        ("[]:1", "expected HOST:PORT"),
    ],
)
def test_addresses_that_are_none(address: str, says: str) -> None:
    with pytest.raises(WhaleError, match=says):
        split_address(address)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"WHALEJAX_NUM_PROCESSES": "abc"},
            "WHALEJAX_NUM_PROCESSES is 'abc'; expected",
        ),
        (
            {"WHALEJAX_PROCESS_ID": "-1"},
            "WHALEJAX_PROCESS_ID is '-1'; expected a whole",
        ),
        ({"WHALEJAX_PROCESS_ID": None}, "WHALEJAX_PROCESS_ID not set; set all of"),
    ],
)
def test_an_environment_that_is_wrong(
    variables: dict[str, str | None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = {COORDINATOR: "127.0.0.1:1", NUM_PROCESSES: "1", PROCESS_ID: "0"}
    given = {k: v for k, v in {**known, **variables}.items() if v is not None}
    with pytest.raises(WhaleError, match=says):
        launched(given)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main.main(["doctor"]) == 2
    assert says.partition(";")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--coordinator", "here"], "expected HOST:PORT"),
        (["--processes", "2"], "--processes is for --coordinator"),
        (["--hosts", "a,b", "--coordinator", "a:1"], "Give one"),
        (["--timeout", "0"], "--timeout is 0"),
    ],
)
def test_options_that_contradict(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["doctor", *words]) == 2
    assert text in capsys.readouterr().err
