"""Hosts that are to run together connect, and compare versions, devices and clocks.

Every host starts this for itself. The one that has the coordinator's address listens
there, on the very port; the others come to it with what was found on them. It takes the
time of each clock, compares, and gives all of it to all. Plain sockets and lines of
JSON: where versions of JAX differ, JAX cannot be asked. Each visitor has a thread of
its own, so that one that says nothing, or nonsense, keeps nobody from being heard.
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from whalejax.distributed.host_checks import CLOCK_SECONDS, Check, HostReport
from whalejax.distributed.json_lines import (
    ANSWER_SECONDS,
    Connection,
    Stranger,
    greet,
    listener,
    receive,
)
from whalejax.distributed.launch_env import split_address
from whalejax.meshes.errors import WhaleError


PURPOSE: Final = "doctor"
ROUNDS: Final = 5
"""Times that a clock is asked; the quickest answer counts."""

AT_ONCE: Final = 64
"""Visitors more than are expected that are heard at once; others wait."""

_PAUSE_SECONDS: Final = 0.2
_MOST_BYTES_OF_ALL: Final = 1 << 26  # of what all hosts have, told by the coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """What all hosts know when they have met.

    Attributes:
        reports: of the hosts that came; first that of the coordinator's host.
        between: what was found by comparing them.
    """

    reports: tuple[HostReport, ...]
    between: tuple[Check, ...]

    def document(self) -> dict[str, Any]:
        """Plain data that ``from_document`` reads."""
        return {
            "hosts": [report.document() for report in self.reports],
            "between": list(
                HostReport(host="", facts={}, checks=self.between).document()["checks"]
            ),
        }

    @classmethod
    def from_document(cls, data: dict[str, Any]) -> Met:
        """What ``document`` described.

        Raises:
            ValueError: it is no such document.
        """
        hosts = data.get("hosts")
        if not isinstance(hosts, list) or not hosts:
            raise ValueError("no hosts")
        between = HostReport.from_document(
            {"host": "", "facts": {}, "checks": data.get("between")}
        )
        return cls(
            reports=tuple(map(HostReport.from_document, hosts)), between=between.checks
        )


def meet(
    mine: HostReport,
    coordinator: str,
    count: int,
    timeout_seconds: float,
    key: bytes = b"",
) -> Met:
    """Meet the other hosts.

    Args:
        mine: of this one.
        coordinator: ``"host:port"``.
        count: of all that come, this one too.
        timeout_seconds: after which those that have not come are missed.
        key: a secret that all know, and prove to know; empty where there is none.

    Raises:
        WhaleError: the coordinator cannot be reached, or something else listens there.
    """
    end = time.monotonic() + timeout_seconds
    found = _listener(coordinator)
    if found is None:
        return _come(mine, coordinator, end, timeout_seconds, key)
    with found:
        return _Reception(mine, coordinator, count, key).receive(found, end)


def _listener(coordinator: str) -> socket.socket | None:
    """A socket at the coordinator's address; None where that is elsewhere or taken."""
    host, port = split_address(coordinator)
    try:
        return listener(host, port)
    except socket.gaierror as error:
        raise WhaleError(
            f"--coordinator {coordinator}: {host} has no address here "
            f"({error.strerror}). Give an address of its network"
        ) from error
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise WhaleError(
            f"--coordinator {coordinator} cannot be listened at ({error.strerror}). "
            "Give another port"
        ) from error


# The coordinator's host.


class _Reception:
    """Hears those that come, several at once, until all came or time is up."""

    def __init__(
        self, mine: HostReport, coordinator: str, count: int, key: bytes
    ) -> None:
        self._mine = mine
        self._coordinator = coordinator
        self._count = count
        self._key = key
        self._came: list[tuple[Connection, HostReport, tuple[float, float]]] = []
        self._links: set[Connection] = set()
        self._changed = threading.Condition()

    def receive(self, found: socket.socket, end: float) -> Met:
        """Hear who comes to a listener, and tell all what was found."""
        room = threading.BoundedSemaphore(self._count + AT_ONCE)
        accepting = threading.Thread(
            target=self._accept, args=(found, room), daemon=True
        )
        accepting.start()
        with self._changed:
            self._changed.wait_for(self._is_full, max(0.0, end - time.monotonic()))
            came = list(self._came)
        # Who waits in accept() is not woken by close() alone.
        with contextlib.suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)
        reports = (self._mine, *(report for _, report, _ in came))
        between = (
            _attendance(self._coordinator, self._count, reports),
            *compared(reports),
            *_clocks([(report.host, *clock) for _, report, clock in came]),
        )
        met = Met(reports=reports, between=between)
        for link, _, _ in came:
            with contextlib.suppress(OSError):
                link.tell(met.document())
        with self._changed:
            for link in self._links:
                link.close()
        return met

    def _is_full(self) -> bool:
        return len(self._came) >= self._count - 1

    def _accept(self, found: socket.socket, room: threading.BoundedSemaphore) -> None:
        while True:
            room.acquire()
            try:
                link = Connection(found.accept()[0])
            except OSError:  # all has ended
                return
            with self._changed:
                self._links.add(link)
            threading.Thread(target=self._hear, args=(link, room), daemon=True).start()

    def _hear(self, link: Connection, room: threading.BoundedSemaphore) -> None:
        with contextlib.suppress(OSError, ValueError):
            receive(link, PURPOSE, self._key)
            found = HostReport.from_document(link.told())
            clock = _offset(link)
            with self._changed:
                if not self._is_full():
                    self._came.append((link, found, clock))
                    self._changed.notify_all()
                    return  # it is told at the end what was found
        with self._changed:
            self._links.discard(link)
        link.close()
        room.release()


def _offset(link: Connection) -> tuple[float, float]:
    """How far another clock is ahead, and how sure that is, in seconds."""
    best = (0.0, math.inf)
    for _ in range(ROUNDS):
        before = time.time()
        link.tell({"time": before})
        told = link.told()
        there = told.get("time") if isinstance(told, dict) else None
        if isinstance(there, bool) or not isinstance(there, int | float):
            raise ValueError("no time")
        if not abs(there) < 1e11:
            raise ValueError("no time of a clock")
        after = time.time()
        if (after - before) / 2 < best[1]:
            best = there - (before + after) / 2, (after - before) / 2
    return best


def _attendance(coordinator: str, count: int, reports: Sequence[HostReport]) -> Check:
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


def compared(reports: Sequence[HostReport]) -> list[Check]:
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


def _come(
    mine: HostReport, coordinator: str, end: float, timeout_seconds: float, key: bytes
) -> Met:
    address = split_address(coordinator)
    refused = "nothing was tried"
    while time.monotonic() < end:
        try:
            link = Connection(
                socket.create_connection(address, max(0.01, end - time.monotonic())),
                most_bytes=_MOST_BYTES_OF_ALL,
            )
            with contextlib.closing(link):
                return _visit(mine, link, end, key)
        except ConnectionRefusedError as error:  # it has not begun yet
            refused = str(error.strerror)
            time.sleep(_PAUSE_SECONDS)
        except (ValueError, TimeoutError) as error:
            why = f" ({error})" if isinstance(error, Stranger) else ""
            raise WhaleError(
                f"what listens at {coordinator} is not whalejax doctor, or does not "
                f"answer{why}. Stop it, or give another port"
            ) from error
        except OSError as error:
            refused = str(error.strerror or error)
            time.sleep(_PAUSE_SECONDS)
    raise WhaleError(
        f"{coordinator} was not reached in {timeout_seconds:.0f} s ({refused}). Is "
        "whalejax doctor running there, is the address that of its network, and does a "
        "firewall let this port through?"
    )


def _visit(mine: HostReport, link: Connection, end: float, key: bytes) -> Met:
    greet(link, PURPOSE, key, max(0.01, end - time.monotonic()))
    link.tell(mine.document())
    while True:
        # It tells what was found when its own time is up, which began with its start.
        told = link.told(max(0.01, end - time.monotonic()) + ANSWER_SECONDS)
        if not isinstance(told, dict):
            raise ValueError("neither a time nor what was found")
        if "hosts" in told:
            return Met.from_document(told)
        link.tell({"time": time.time()})
