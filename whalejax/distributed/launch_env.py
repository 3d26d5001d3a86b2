"""Environment of a process that ``whalejax launch`` started, and its reports."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta

from whalejax.meshes.errors import Problems, WhaleError


COORDINATOR: Final = "WHALEJAX_COORDINATOR"
NUM_PROCESSES: Final = "WHALEJAX_NUM_PROCESSES"
PROCESS_ID: Final = "WHALEJAX_PROCESS_ID"

KEY_FILE: Final = "WHALEJAX_KEY_FILE"
"""Environment variable with the path of the key file that a run's processes share."""

EXIT: Final = "WHALEJAX_EXIT_SECONDS"
"""Environment variable with the seconds that a process waits for the others to end."""

EXIT_SECONDS: Final = 300.0
"""Default of these seconds, equal to JAX's own wait for the last process."""

PORT: Final = 8476
"""Default port of process 0 if it runs on another host."""

MARK: Final = "whalejax-rank "
"""Beginning of an output line with a report to the launcher, which removes the line."""

ENDS_FOR_ANOTHER: Final = 70
"""Exit status of a process that ends because another one has failed."""

LOSS_SIGNS: Final = (
    "gloo",
    "nccl",
    "connection",
    "socket",
    "unavailable",
    "deadline_exceeded",
    "aborted",
)
"""Lower-case words in errors that a lost process causes in other processes."""

MOST_WORDS: Final = 500
"""Maximum length of a text that a process reports about another one."""

ALL_ADDRESSES: Final = ("0.0.0.0", "::")
"""Addresses that stand for all addresses of a machine."""

_LOOPBACK: Final = frozenset({"localhost", "::1"})


def launched(
    environment: Mapping[str, str] = os.environ,
) -> tuple[str, int, int] | None:
    """Returns coordinator, number of processes and rank; None if no launcher set them.

    Raises:
        WhaleError: Some variables are missing, or are not numbers.

    >>> launched({})
    >>> launched({COORDINATOR: "a:1", NUM_PROCESSES: "2", PROCESS_ID: "0"})
    ('a:1', 2, 0)
    """
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    missing = [name for name in names if name not in environment]
    if len(missing) == len(names):
        return None
    problems = Problems("the environment of this process")
    if missing:
        problems.add(
            f"{' and '.join(missing)} not set; set all of {', '.join(names)}, or none"
        )
    numbers = {}
    for name in names[1:]:
        text = environment.get(name, "0").strip()
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            problems.add(f"{name} is {text[:40]!r}; expected a whole number")
            continue
        numbers[name] = int(text)
    problems.raise_if_any()
    return environment[COORDINATOR], numbers[NUM_PROCESSES], numbers[PROCESS_ID]


def split_address(address: str, parameter: str = "--coordinator") -> tuple[str, int]:
    """Splits an address into host and port.

    Args:
        address: ``"host:port"``; an IPv6 address in brackets.
        parameter: Name of the argument, for the error.

    Raises:
        WhaleError: The text is not such an address.

    >>> split_address("node0:8476"), split_address("[fd00::2]:8476")
    (('node0', 8476), ('fd00::2', 8476))
    """
    host, _, port = address.rpartition(":")
    good = port.isascii() and port.isdigit() and len(port) < 6
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise WhaleError(
            f"{parameter} is {address[:80]!r}, an IPv6 address without brackets, so "
            "that it is not clear where the port begins; expected [ADDRESS]:PORT, such "
            f"as [{host[:60]}]:{port[:10]}"
        )
    if not (host and host.isprintable() and good and 0 < int(port) < 65536):
        raise WhaleError(
            f"{parameter} is {address[:80]!r}; expected HOST:PORT, such as node0:8476"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("node0")
    (True, False)
    """
    parts = host.split(".")
    numbers = len(parts) == 4 and all(part.isdigit() for part in parts)
    return host in _LOOPBACK or (numbers and parts[0] == "127")


# Reports of a process to the launcher.


class _ReportLine(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower
):
    """A report in a line of the process's output."""


class DeviceReport(_ReportLine, frozen=True, kw_only=True, tag="introduced"):
    """Report of a process's devices: their kind and number."""

    kind: str
    devices: Annotated[int, Meta(ge=0, lt=10**6)]


class BlameReport(_ReportLine, frozen=True, kw_only=True, tag="blamed"):
    """Report of the rank that caused an exit, and text that says how."""

    rank: Annotated[int, Meta(ge=0)]
    why: str


class Joining(_ReportLine, frozen=True):
    """Report that a process waits in ``init_distributed`` for the others."""


_Line: TypeAlias = DeviceReport | BlameReport | Joining
_DECODER: Final[msgspec.json.Decoder[_Line]] = msgspec.json.Decoder(_Line)


def exit_seconds() -> float:
    """Returns the seconds that a process waits at its end for the others to end."""
    try:
        seconds = float(os.environ.get(EXIT, EXIT_SECONDS))
    except ValueError:
        return EXIT_SECONDS
    return seconds if seconds > 0 else EXIT_SECONDS


def tell_launcher(said: _Line) -> None:
    """Sends a report to the launcher, if there is one."""
    if PROCESS_ID in os.environ:
        print(f"{MARK}{msgspec.json.encode(said).decode()}", flush=True)


def blame(rank: int, why: str) -> None:
    """Reports to the launcher, if there is one, which rank makes this process end."""
    tell_launcher(BlameReport(rank=rank, why=why[:MOST_WORDS]))


def parse_report(line: bytes) -> _Line | None:
    """Parses a line that begins with the mark; None if it is no valid report.

    A script may print anything, so every part is checked.

    >>> parse_report(b'whalejax-rank {"type":"introduced","kind":"cpu","devices":2}')
    DeviceReport(kind='cpu', devices=2)
    >>> parse_report(b"whalejax-rank 1 is mine")
    """
    try:
        report = _DECODER.decode(line.removeprefix(MARK.encode()))
    except (ValueError, RecursionError):
        return None
    match report:
        case DeviceReport(kind=kind):
            return msgspec.structs.replace(report, kind=printable(kind)[:100])
        case BlameReport(why=why):
            return msgspec.structs.replace(report, why=printable(why)[:MOST_WORDS])
    return report


def reached_host(host: str) -> str:
    """Returns a name by which others can reach a listening host.

    Args:
        host: Host as it was given; an address that stands for all interfaces becomes
            this machine's name.

    >>> reached_host("10.0.0.1")
    '10.0.0.1'
    """
    return socket.gethostname() if host in ALL_ADDRESSES else host


def printable(text: str) -> str:
    r"""Returns a text without control characters.

    >>> printable("a\x1b[2Jb")
    'a?[2Jb'
    """
    return "".join(c if c.isprintable() else "?" for c in text)
