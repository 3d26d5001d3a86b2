"""Connects hosts that will run together, and compares their versions, devices, clocks.

Every host runs this. The host with the coordinator's address listens, and the others
send it their reports. It measures each clock, compares the reports, and sends the
result to all. JAX is not used, because its versions may differ.
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
from typing import Annotated, Final

from msgspec import Meta

from whalejax.agreement.host_checks import CLOCK_SECONDS, Check, HostReport
from whalejax.distributed.first_connection import listen_at, reach
from whalejax.meshes.errors import WhaleError
from whalejax.wire.acceptor import Acceptor
from whalejax.wire.connection import Channel, OtherProtocol, WireTimeoutError, WrongKey
from whalejax.wire.keys import Key
from whalejax.wire.messages import Message, Messages, WireError


ROUNDS: Final = 5
"""Number of requests for a clock's time, of which the quickest answer is used."""

ANSWER_SECONDS: Final = 10.0
"""Seconds after its deadline by which the coordinator has sent the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostComparison:
    """Reports of all hosts, and their comparison.

    Attributes:
        hosts: Reports of the hosts, the coordinator's first.
        between: Results of comparing the hosts.
    """

    hosts: tuple[HostReport, ...]
    between: tuple[Check, ...]


class Visit(Message):
    """First message of a host, with its report."""

    report: HostReport


class ClockTime(Message):
    """Message with the sender's clock."""

    time: Annotated[float, Meta(gt=-1e11, lt=1e11)]


class AskTime(Message):
    """Request for the clock's time."""


class Comparison(Message):
    """Message with the result of the comparison."""

    between: tuple[Check, ...]


_TO_HOST: Final = Messages[Visit | ClockTime](Visit, ClockTime)
_TO_VISITOR: Final = Messages[AskTime | Visit | Comparison](AskTime, Visit, Comparison)


def meet(
    mine: HostReport,
    coordinator: str,
    count: int,
    timeout_seconds: float,
    key: Key | None = None,
) -> HostComparison:
    """Exchanges reports with the other hosts, and returns the comparison.

    Args:
        mine: Report of this host.
        coordinator: Address of the coordinator, ``"host:port"``.
        count: Number of hosts, including this one.
        timeout_seconds: Seconds after which absent hosts count as missing.
        key: Key of this process; None without one.

    Raises:
        WhaleError: The coordinator cannot be reached or ends before its answer, or its
            port is in use.
    """
    end = time.monotonic() + timeout_seconds
    result = _listener(coordinator)
    if result is None:
        return _report_to_coordinator(mine, coordinator, end, timeout_seconds, key)
    return _HostCollector(mine, coordinator, count).receive(result, key, end)


def _listener(coordinator: str) -> socket.socket | None:
    """Returns a socket at the coordinator's address; None if not local or in use."""
    try:
        return listen_at(coordinator, "--coordinator")
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise WhaleError(
            f"--coordinator {coordinator} cannot be listened at ({error.strerror}). "
            "Give another port"
        ) from error


# The coordinator's host.


@dataclass(slots=True, kw_only=True)
class _Visitor:
    """A connected host, the offset of its clock, and the offset's uncertainty."""

    report: HostReport
    asked_at: float = 0.0
    asked: int = 0
    ahead: float = 0.0
    sure: float = math.inf


class _HostCollector:
    """Receives reports of hosts until all have come or time is up."""

    def __init__(self, mine: HostReport, coordinator: str, count: int) -> None:
        self._mine = mine
        self._coordinator = coordinator
        self._count = count
        self._visitors: dict[Channel, _Visitor] = {}
        self._came: dict[Channel, _Visitor] = {}
        self._changed = threading.Condition()

    def receive(
        self, listening: socket.socket, key: Key | None, end: float
    ) -> HostComparison:
        acceptor = Acceptor(listening, key, self._notice)
        with self._changed:
            self._changed.wait_for(self._is_full, max(0.0, end - time.monotonic()))
            came = {**self._came}
        reports = (self._mine, *(one.report for one in came.values()))
        between = (
            _attendance(self._coordinator, self._count, reports),
            *compare_hosts(reports),
            *_clocks([(v.report.host, v.ahead, v.sure) for v in came.values()]),
        )
        for channel in came:
            with contextlib.suppress(WireError):
                for message in (
                    *(Visit(report=r) for r in reports),
                    Comparison(between=between),
                ):
                    channel.send(message, seconds=ANSWER_SECONDS)
        acceptor.close()
        return HostComparison(hosts=reports, between=between)

    def _is_full(self) -> bool:
        return len(self._came) >= self._count - 1

    def _notice(self, channel: Channel) -> None:
        try:
            while (message := channel.next(_TO_HOST)) is not None:
                self._hear(channel, message)
        except WireError:
            with self._changed:
                self._visitors.pop(channel, None)
                if not self._is_full():
                    self._came.pop(channel, None)
            channel.close()

    def _hear(self, channel: Channel, message: Visit | ClockTime) -> None:
        if isinstance(message, Visit):
            visitor = _Visitor(report=message.report.printable())
            self._visitors[channel] = visitor
        else:
            visitor, now = self._visitors[channel], time.time()
            sure = (now - visitor.asked_at) / 2
            if sure < visitor.sure:
                ahead = message.time - (visitor.asked_at + now) / 2
                visitor.ahead, visitor.sure = ahead, sure
        if visitor.asked < ROUNDS:
            visitor.asked, visitor.asked_at = visitor.asked + 1, time.time()
            channel.post(AskTime())
            return
        with self._changed:
            if not self._is_full():
                self._came[channel] = visitor
                self._changed.notify_all()


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


def compare_hosts(reports: Sequence[HostReport]) -> list[Check]:
    """Returns the differences between the first host and the others."""
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
                "(docs/run/mixed.md), or start processes on hosts that are alike"
                if kind
                else f"Install one {name} on all hosts",
            )
        )
    return checks


def _clocks(clocks: Sequence[tuple[str, float, float]]) -> list[Check]:
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


def _report_to_coordinator(
    mine: HostReport,
    coordinator: str,
    end: float,
    timeout_seconds: float,
    key: Key | None,
) -> HostComparison:
    try:
        channel = reach(coordinator, key, end)
    except (WrongKey, OtherProtocol, WireTimeoutError) as error:
        raise WhaleError(
            f"what listens at {coordinator} is not whalejax doctor, or does not "
            f"answer ({error}). Stop it, or give another port"
        ) from error
    except WireError as error:
        raise WhaleError(
            f"{coordinator} was not reached in {timeout_seconds:.0f} s ({error}). Is "
            "whalejax doctor running there, is the address that of its network, and "
            "does a firewall let this port through?"
        ) from error
    with contextlib.closing(channel):
        try:
            channel.send(Visit(report=mine))
            hosts: list[HostReport] = []
            while True:
                # The coordinator's deadline counts from its own start.
                left = max(0.01, end - time.monotonic()) + ANSWER_SECONDS
                message = channel.receive(_TO_VISITOR, seconds=left)
                match message:
                    case AskTime():
                        channel.send(ClockTime(time=time.time()))
                    case Visit(report=report):
                        hosts.append(report.printable())
                    case Comparison(between=between):
                        return HostComparison(hosts=tuple(hosts), between=between)
        except WireError as error:
            raise WhaleError(
                f"the whalejax doctor at {coordinator} ended, or expected one host "
                f"fewer ({error}). Start it on all hosts anew, with the same words"
            ) from error
