"""Network namespaces at one bridge, whose links can be slowed and cut (Linux, root).

A process in a namespace reaches the others and this machine over a pair of virtual
interfaces: ``eth0`` inside, and one at the bridge outside. ``tc tbf`` limits what goes
over it, and either end can be set down.
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
"""Where processes in namespaces reach those outside."""

_PREFIX: Final = "10.77.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """A network namespace.

    Attributes:
        name: of the namespace.
        address: of its interface.
        outer: name of the interface at the bridge.
    """

    name: str
    address: str
    outer: str

    @property
    def inside(self) -> list[str]:
        """Words before a command that is to run in it."""
        return ["ip", "netns", "exec", self.name]


def _run(words: Sequence[str]) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _ip(words: str) -> None:
    _run(["ip", *words.split()])


def why_none() -> str:
    """Why no namespaces can be made here; empty where they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"there is no program {program}"
    return "" if os.geteuid() == 0 else "this user is not root"


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[list[Space]]:
    """Namespaces at one bridge, for the time of the block.

    Args:
        count: how many.
    """
    shown = ["ip", "-o", "addr", "show", "to", BRIDGE_ADDRESS]
    if subprocess.run(shown, check=True, capture_output=True).stdout:
        raise SystemExit(
            f"{BRIDGE_ADDRESS} is in use: another benchmark has its namespaces at a "
            "bridge of that address. Start this one when that has ended"
        )
    tag = f"{os.getpid() % 10000}"
    bridge, found = f"wjb{tag}", []
    try:
        _ip(f"link add {bridge} type bridge")
        _ip(f"addr add {BRIDGE_ADDRESS}/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for n in range(count):
            name, outer, inner = f"wj{tag}-{n}", f"wjo{tag}-{n}", f"wji{tag}-{n}"
            space = Space(name=name, address=f"{_PREFIX}{n + 2}", outer=outer)
            _ip(f"netns add {name}")
            found.append(space)
            _ip(f"link add {outer} type veth peer name {inner}")
            _ip(f"link set {inner} netns {name}")
            _ip(f"link set {outer} master {bridge} up")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {inner} name eth0")
            _ip(f"-n {name} addr add {space.address}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
        yield found
    finally:
        for space in found:
            for words in (f"link del {space.outer}", f"netns del {space.name}"):
                subprocess.run(["ip", *words.split()], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def shape(space: Space, megabits: int) -> None:
    """Limit what a namespace sends and receives.

    Args:
        space: the namespace.
        megabits: a second, each way.
    """
    # A short queue: acknowledgements wait in it behind what goes the other way.
    limit = ["tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "50ms"]
    for words, name in ((space.inside, "eth0"), ([], space.outer)):
        _run([*words, "tc", "qdisc", "replace", "dev", name, "root", *limit])


def unshape(space: Space) -> None:
    """End the limit of ``shape``."""
    for words, name in ((space.inside, "eth0"), ([], space.outer)):
        _run([*words, "tc", "qdisc", "del", "dev", name, "root"])


def set_link(space: Space, state: str, *, inside: bool) -> None:
    """Set an end of a link up or down.

    Args:
        space: whose link.
        state: ``"up"`` or ``"down"``.
        inside: its own end, so that what it sends fails at once; the end at the bridge
            otherwise, so that it is lost.
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
    """Bytes a second that TCP carries each way, both ways at once, between two spaces.

    Less than the links' rate, which headers and acknowledgements count against.

    Args:
        spaces: of which the first two are used.
        seconds: to send.
    """
    first, second = spaces[:2]
    words = [first.address, "9000", str(seconds)]
    program = [sys.executable, "-c", _EXCHANGE, *words]
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
    """Bytes that went over a link, both ways together."""
    at = Path("/sys/class/net") / space.outer / "statistics"
    return sum(int((at / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
