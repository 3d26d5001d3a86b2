"""Hosts that are to run together meet where they will, and compare themselves.

Every host starts this for itself. The one that has the coordinator's address listens
there, on the very port; the others come to it with what was found on them. It takes the
time of each clock, compares, and gives all of it to all. Plain sockets and lines of
JSON: where versions of JAX differ, JAX cannot be asked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

from whalejax.meshes.checkup import CLOCK_SECONDS, Check, Report
from whalejax.meshes.problems import WhaleError


GREETING: Final = {"whalejax": "doctor"}
ROUNDS: Final = 5
"""Times that a clock is asked; the quickest answer counts."""

_PAUSE_SECONDS: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What all hosts know when they have met.

    Attributes:
        reports: of the hosts that came; first that of the coordinator's host.
        between: what was found by comparing them.
    """

    reports: tuple[Report, ...]
    between: tuple[Check, ...]

    def document(self) -> dict[str, Any]:
        """Plain data that ``from_document`` reads."""
        return {
            "hosts": [report.document() for report in self.reports],
            "between": list(
                Report(host="", facts={}, checks=self.between).document()["checks"]
            ),
        }

    @classmethod
    def from_document(cls, data: dict[str, Any]) -> Met:
        """What ``document`` described."""
        return cls(
            reports=tuple(map(Report.from_document, data["hosts"])),
            between=tuple(Check(**check) for check in data["between"]),
        )


def meet(mine: Report, coordinator: str, count: int, timeout_seconds: float) -> Met:
    """Meet the other hosts.

    Args:
        mine: of this one.
        coordinator: ``"host:port"``.
        count: of all that come, this one too.
        timeout_seconds: after which those that have not come are missed.

    Raises:
        WhaleError: the coordinator cannot be reached, or something else listens there.
    """
    end = time.monotonic() + timeout_seconds
    listener = _listener(coordinator)
    if listener is None:
        return _come(mine, coordinator, end, timeout_seconds)
    with listener:
        return _receive(mine, coordinator, count, listener, end)


def split_address(coordinator: str) -> tuple[str, int]:
    """Host and port of an address.

    Raises:
        WhaleError: it is no ``"host:port"``.

    >>> split_address("node0:8476")
    ('node0', 8476)
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise WhaleError(
            f"--coordinator is {coordinator!r}; expected HOST:PORT, such as node0:8476"
        )
    return host, int(port)


def _listener(coordinator: str) -> socket.socket | None:
    """A socket at the coordinator's address; None where that is elsewhere or taken."""
    host, port = split_address(coordinator)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise WhaleError(
            f"--coordinator {coordinator}: {host} has no address here "
            f"({error.strerror}). Give an address of its network"
        ) from error
    found = socket.socket(family, kind, proto)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind(address)
        found.listen()
    except OSError as error:
        found.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise WhaleError(
            f"--coordinator {coordinator} cannot be listened at ({error.strerror}). "
            "Give another port"
        ) from error
    return found


# The coordinator's host.


def _receive(
    mine: Report, coordinator: str, count: int, listener: socket.socket, end: float
) -> Met:
    came: list[tuple[IO[Any], Report]] = []
    clocks = []
    with contextlib.ExitStack() as stack:
        while len(came) < count - 1 and time.monotonic() < end:
            listener.settimeout(max(0.05, end - time.monotonic()))
            with contextlib.suppress(OSError, ValueError, KeyError):
                link = stack.enter_context(listener.accept()[0])
                link.settimeout(max(0.05, end - time.monotonic()))
                lines: IO[Any] = stack.enter_context(
                    link.makefile("rw", encoding="utf-8")
                )
                _tell(lines, GREETING)
                found = Report.from_document(_told(lines))
                clocks.append((found.host, *_offset(lines)))
                came.append((lines, found))
        reports = (mine, *(found for _, found in came))
        between = (
            _attendance(coordinator, count, reports),
            *compared(reports),
            *_clocks(clocks),
        )
        met = Met(reports=reports, between=between)
        for lines, _ in came:
            with contextlib.suppress(OSError):
                _tell(lines, met.document())
    return met


def _offset(lines: IO[Any]) -> tuple[float, float]:
    """How far another clock is ahead, and how sure that is, in seconds."""
    best = (0.0, math.inf)
    for _ in range(ROUNDS):
        before = time.time()
        _tell(lines, {"time": before})
        there = float(_told(lines)["time"])
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = there - (before + after) / 2, (after - before) / 2
    return best


def _attendance(coordinator: str, count: int, reports: Sequence[Report]) -> Check:
    names = ", ".join(report.host for report in reports)
    if len(reports) == count:
        return Check(
            name="hosts", found=f"{count} of {count} came to {coordinator}: {names}"
        )
    return Check(
        name="hosts",
        found=f"{len(reports)} of {count} came to {coordinator}: {names}",
        verdict="problem",
        remedy="On those that are missing: is whalejax doctor running, and does a "
        "firewall let them through to this port?",
    )


def compared(reports: Sequence[Report]) -> list[Check]:
    """What hosts have otherwise than the first of them.

    Args:
        reports: of all hosts.
    """
    checks = []
    for name, first in reports[0].facts.items():
        others = [r for r in reports[1:] if r.facts.get(name) != first]
        if not others:
            checks.append(Check(name=f"same {name}", found=first))
            continue
        words = [f"{report.host} has {report.facts.get(name)}" for report in others]
        kind = name == "device kind"
        checks.append(
            Check(
                name=f"same {name}",
                found=f"{', '.join(words)}; {reports[0].host} has {first}",
                verdict="warning" if kind else "problem",
                remedy="One program runs on devices of one kind: plan for all of them "
                "(docs/mixed.md), or start processes on hosts that are alike"
                if kind
                else f"Install one {name} on all hosts",
            )
        )
    return checks


def _clocks(clocks: Sequence[tuple[str, float, float]]) -> list[Check]:
    """How far clocks are from the coordinator's."""
    if not clocks:
        return []
    words = [f"{host} {ahead:+.3f} s (±{sure:.3f})" for host, ahead, sure in clocks]
    far = any(abs(ahead) - sure > CLOCK_SECONDS for _, ahead, sure in clocks)
    return [
        Check(
            name="clocks",
            found=f"against the coordinator's: {', '.join(words)}",
            verdict="problem" if far else "ok",
            remedy="Set them by one source: timedatectl set-ntp true" if far else "",
        )
    ]


# The other hosts.


def _come(mine: Report, coordinator: str, end: float, timeout_seconds: float) -> Met:
    address = split_address(coordinator)
    refused = "nothing was tried"
    while time.monotonic() < end:
        try:
            with (
                socket.create_connection(address, end - time.monotonic()) as link,
                link.makefile("rw", encoding="utf-8") as lines,
            ):
                return _visit(mine, lines)
        except ConnectionRefusedError as error:  # it has not begun yet
            refused = str(error.strerror)
            time.sleep(_PAUSE_SECONDS)
        except (ValueError, TimeoutError) as error:
            raise WhaleError(
                f"what listens at {coordinator} is not whalejax doctor, or does not "
                "answer. Stop it, or give another port"
            ) from error
        except OSError as error:
            refused = str(error.strerror or error)
            time.sleep(_PAUSE_SECONDS)
    raise WhaleError(
        f"{coordinator} was not reached in {timeout_seconds:.0f} s ({refused}). Is "
        "whalejax doctor running there, is the address that of its network, and does a "
        "firewall let this port through?"
    )


def _visit(mine: Report, lines: IO[Any]) -> Met:
    if _told(lines) != GREETING:
        raise ValueError("another greeting")
    _tell(lines, mine.document())
    while True:
        told = _told(lines)
        if "hosts" in told:
            return Met.from_document(told)
        _tell(lines, {"time": time.time()})


def _tell(lines: IO[Any], data: object) -> None:
    lines.write(json.dumps(data) + "\n")
    lines.flush()


def _told(lines: IO[Any]) -> Any:
    line = lines.readline()
    if not line:
        raise ConnectionResetError(errno.ECONNRESET, "the other side has closed")
    return json.loads(line)
