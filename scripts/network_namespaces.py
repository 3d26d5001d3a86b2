"""Creates network namespaces on one bridge, with links that can be slowed or cut.

It needs Linux and root. A process in a namespace reaches the others and this machine
over a pair of virtual interfaces: ``eth0`` inside, and one at the bridge outside. ``tc
tbf`` limits their traffic, and either end can be set down.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final


BRIDGE_ADDRESS: Final = "10.77.0.1"
"""Address at which processes in namespaces reach those outside."""

_PREFIX: Final = "10.77.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A network namespace.

    Attributes:
        name: Name of the namespace.
        address: Address of its interface.
        outer: Name of the interface at the bridge.
    """

    name: str
    address: str
    outer: str

    @property
    def inside(self) -> list[str]:
        """Command prefix that runs a program in the namespace."""
        return ["ip", "netns", "exec", self.name]


def _run(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _ip(words: str) -> None:
    _run(["ip", *words.split()])


def why_none() -> str:
    """Returns the reason why namespaces cannot be created; empty if they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    return "" if os.geteuid() == 0 else "this user is not root"


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[Space]]:
    """Creates ``count`` namespaces on one bridge; removes them after the block."""
    show = ["ip", "-o", "addr", "show", "to", BRIDGE_ADDRESS]
    if subprocess.run(show, check=True, capture_output=True).stdout:
        raise SystemExit(
            f"{BRIDGE_ADDRESS} is in use: another benchmark has its namespaces at a "
            "bridge of that address. Start this one when that has ended"
        )
    tag = f"{os.getpid() % 10000}"
    bridge, spaces = f"wjb{tag}", []
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {BRIDGE_ADDRESS}/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for n in range(count):
            name, outer, inner = f"wj{tag}-{n}", f"wjo{tag}-{n}", f"wji{tag}-{n}"
            space = Space(name=name, address=f"{_PREFIX}{n + 2}", outer=outer)
            _ip(f"netns add {name}")
            spaces.append(space)
            _ip(f"link add {outer} type veth peer name {inner}")
            _ip(f"link set {inner} netns {name}")
            _ip(f"link set {outer} master {bridge} up")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {inner} name eth0")
            _ip(f"-n {name} addr add {space.address}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
        yield spaces
    finally:
        for space in spaces:
            for words in (f"link del {space.outer}", f"netns del {space.name}"):
                subprocess.run(["ip", *words.split()], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def shape(space: Space, megabits: int) -> None:
    """Limits the traffic of a namespace to megabits a second, each way."""
    # A short queue, because acknowledgements wait in it behind other traffic.
    limit = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms"]
    for words, name in ((space.inside, "eth0"), ([], space.outer)):
        _run([*words, "tc", "qdisc", "replace", "dev", name, "root", *limit])


def unshape(space: Space) -> None:
    """Removes the limit of ``shape``."""
    for words, name in ((space.inside, "eth0"), ([], space.outer)):
        _run([*words, "tc", "qdisc", "del", "dev", name, "root"])


def set_link(space: Space, state: str, *, inside: bool) -> None:
    """Sets an end of a link up or down.

    Args:
        space: Namespace of the link.
        state: ``"up"`` or ``"down"``.
        inside: Whether to set the end inside, where sends then fail at once; at the
            bridge's end, traffic is lost.
    """
    if inside:
        _ip(f"-n {space.name} link set eth0 {state}")
    else:
        _ip(f"link set {space.outer} {state}")


_EXCHANGE: Final = """
import socket, sys, threading, time
host, port, seconds, listens = sys.argv[1:]
address, seconds = (host, int(port)), float(seconds)
if listens == "yes":
    with socket.create_server(address) as server:
        print("ready", flush=True)
        link, _ = server.accept()
else:
    link = socket.create_connection(address, timeout=10.0)
link.settimeout(10.0)
end, block, got = time.monotonic() + seconds, bytes(1 << 16), 0
def send():
    while time.monotonic() < end:
        link.sendall(block)
    link.shutdown(socket.SHUT_WR)
sender = threading.Thread(target=send)
begun = time.monotonic()
sender.start()
while piece := link.recv(1 << 16):
    got += len(piece)
print(got / (time.monotonic() - begun), flush=True)
"""


def goodput(spaces: Sequence[Space], seconds: float = 4.0) -> float:
    """Returns the TCP bytes per second in each direction, with both in use.

    It is less than the links' rate, which includes headers and acknowledgements.
    """
    first, second = spaces[:2]
    arguments = [first.address, "9000", str(seconds)]
    program = [sys.executable, "-c", _EXCHANGE, *arguments]
    ends = []
    for space, listens in ((first, "yes"), (second, "no")):
        process = subprocess.Popen(
            [*space.inside, *program, listens], stdout=subprocess.PIPE, text=True
        )
        ends.append(process)
        if listens == "yes":
            assert process.stdout is not None
            process.stdout.readline()
    rates = [float(end.communicate(timeout=60.0)[0]) for end in ends]
    return sum(rates) / len(rates)


def carried(space: Space) -> int:
    """Returns the bytes that a link carried, in both directions together."""
    folder = Path("/sys/class/net") / space.outer / "statistics"
    return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
