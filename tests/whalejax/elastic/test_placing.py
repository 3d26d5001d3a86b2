"""Where the processes of an ordinary script meet, and who else could come there."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.whalejax.elastic.test_supervisor import live
from whalejax.distributed.first_connection import listen_at
from whalejax.distributed.launch_env import KEY_FILE, split_address
from whalejax.distributed.reserved_port import (
    HELD_PORT,
    is_reserved,
    release_port,
    reserve_port,
)
from whalejax.elastic import script_placement
from whalejax.elastic.environment import SUPERVISOR
from whalejax.elastic.supervisor.supervisor import KEY
from whalejax.journals.journal import FOLDER
from whalejax.meshes.errors import WhaleError
from whalejax.processes.launch_spec import Launch
from whalejax.wire.connection import listen


def taken(port: int) -> bool:
    """Whether another program could not listen there."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
            other.listen()
        except OSError as error:
            assert error.errno == errno.EADDRINUSE
            return True
    return False


def test_a_reserved_port_is_for_this_process_alone() -> None:
    port = reserve_port("127.0.0.1")
    assert is_reserved(port) and taken(port)
    for _ in range(2):  # Again after it was let go.
        with listen_at(f"127.0.0.1:{port}") as found:
            assert found.getsockname()[1] == port
    assert taken(port)
    with pytest.raises(OSError, match=r"[Cc]annot assign|not available"):
        reserve_port("192.0.2.1")


def test_a_port_that_is_not_reserved_is_not_shared() -> None:
    with listen() as found:
        port = found.getsockname()[1]
        assert not is_reserved(port)
        with pytest.raises(OSError, match="in use"):
            listen_at(f"127.0.0.1:{port}")


def test_the_launcher_holds_the_port_of_its_first_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = Launch(command=("python",), processes=2)
    where = launch.coordinator()
    port = split_address(where)[1]
    assert taken(port)  # Whoever asks for a free one meanwhile gets another.
    given = launch.environment_of(0, where)
    release_port(port)
    release_port(port)
    assert given[HELD_PORT] == str(port) and not taken(port)
    assert HELD_PORT not in launch.environment_of(0, "127.0.0.1:1")
    # A process that is told so listens at a port which another one holds.
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen_at(f"127.0.0.1:{port}")
        monkeypatch.setenv(HELD_PORT, str(port))
        with listen_at(f"127.0.0.1:{port}") as found:
            assert found.getsockname()[1] == port
        with pytest.raises(WhaleError, match=f"--port is {port}, which cannot be"):
            Launch(command=("python",), processes=2, port=port).coordinator()


def test_the_port_that_a_process_announces_is_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    obey = script_placement._obey

    def prepares(control: Any, said: Any) -> None:
        if said.kind == "prepare":  # Else it would end this process.
            obey(control, said)

    monkeypatch.setattr(script_placement, "_obey", prepares)
    with live(tmp_path, most=1, lease_seconds=2.0) as there:
        key = str(tmp_path / FOLDER / KEY)
        found = script_placement.await_placement(
            {SUPERVISOR: there.where, KEY_FILE: key}
        )
        assert found is not None and found[1:] == (1, 0)
        assert taken(split_address(found[0])[1])
        control: Any = script_placement._held.pop()
        control.close()
    said = capsys.readouterr().err
    assert f"the coordination service of JAX listens at {found[0]}; it does" in said
    assert "any user of this machine can end a generation or join it" in said


def test_who_can_reach_the_service_is_said() -> None:
    said = script_placement.listens("10.0.0.1:8476")
    assert "JAX listens at 10.0.0.1:8476; it does not check" in said
    assert "so whoever reaches it can end a generation" in said
