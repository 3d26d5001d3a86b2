"""Checks one host before processes of several hosts run together.

Each check reports a value and, if the value does not suffice, a remedy. JAX never
starts in this process. Another process finds the devices, and can be stopped if a
driver hangs.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Final, Literal

from whalejax.distributed.cgroup_quota import why_no_quota
from whalejax.distributed.launch_env import PORT, printable, split_address
from whalejax.meshes.catalogue import entry_of_device


Verdict = Literal["ok", "warning", "problem"]

DEVICE_SECONDS: Final = 120.0
"""Seconds that JAX may take to find the devices."""

CLOCK_SECONDS: Final = 1.0
"""Seconds between clocks of hosts above which their logs are hard to compare."""

_TIME_ERROR: Final = 5  # adjtimex(2): the clock is not synchronised

_DEVICES: Final = """
import json, jax
found = jax.local_devices()
kinds = sorted({d.device_kind for d in found})
print(json.dumps([found[0].platform, kinds, len(found)]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        name: Name of the check.
        found: Value that was found.
        verdict: Whether the value suffices; a warning matters only for some runs.
        remedy: Remedy; empty if the value suffices.
    """

    name: str
    found: str
    verdict: Verdict = "ok"
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """Report of one host.

    Attributes:
        host: Name of the host.
        facts: Facts that must be equal on all hosts, by name.
        checks: Results of the checks.
    """

    host: str
    facts: Mapping[str, str]
    checks: tuple[Check, ...]

    def printable(self) -> HostReport:
        """Returns the report without terminal control characters."""
        check = [
            Check(
                name=printable(check.name),
                found=printable(check.found),
                verdict=check.verdict,
                remedy=printable(check.remedy),
            )
            for check in self.checks
        ]
        facts = {printable(name): printable(fact) for name, fact in self.facts.items()}
        return HostReport(host=printable(self.host), facts=facts, checks=tuple(check))


def report(version: str, coordinator: str | None = None) -> HostReport:
    """Checks this host.

    Args:
        version: Version of this package.
        coordinator: Address at which processes will meet, ``"host:port"``, or None.
    """
    devices, kinds = _devices()
    checks = (
        Check(name="whalejax", found=version),
        *map(_version, ("jax", "jaxlib")),
        Check(name="python", found=platform.python_version()),
        *devices,
        _address(),
        _port(PORT),
        *(() if coordinator is None else (_coordinator(coordinator), _proxies())),
        _clock(),
        _cgroup(),
    )
    alike = ("whalejax", "jax", "jaxlib")
    facts = {check.name: check.found for check in checks if check.name in alike}
    facts["python"] = ".".join(platform.python_version_tuple()[:2])
    facts["device kind"] = kinds
    return HostReport(host=socket.gethostname(), facts=facts, checks=checks)


def _version(package: str) -> Check:
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(
            name=package,
            found="not installed",
            verdict="problem",
            remedy=f"pip install {package}",
        )
    wanted = _required_versions(package)
    if wanted and not _within(version, wanted):
        return Check(
            name=package,
            found=version,
            verdict="problem",
            remedy=f"pip install '{package}{wanted}'",
        )
    return Check(name=package, found=version)


def _required_versions(package: str) -> str:
    try:
        needed = metadata.requires("whalejax") or []
    except metadata.PackageNotFoundError:  # This package is not installed.
        return ""
    for line in needed:
        match = re.fullmatch(rf"{package}\s*\(?([<>=!~][^;)]*)\)?", line.strip())
        if match:
            return match[1].strip()
    return ""


def _within(version: str, wanted: str) -> bool:
    """Returns whether a version is within bounds, by its first three numbers.

    >>> _within("0.10.2", ">=0.10.2,<0.13"), _within("0.13.0", ">=0.10.2,<0.13")
    (True, False)
    >>> _within("0.10.2", "~=0.10.1,!=0.10.2"), _within("0.10.2", "==0.10.*")
    (False, True)
    """

    def numbers(text: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d+", text)[:3]]

    for sign, bound in re.findall(r"([<>=!~]+)\s*([^,]+)", wanted):
        given = numbers(bound)
        result, limit = ((*n, 0, 0, 0)[:3] for n in (numbers(version), given))
        fixed = len(given) - 1 if sign == "~=" else len(given) if "*" in bound else 3
        same = result[:fixed] == limit[:fixed]
        if not {
            ">=": result >= limit,
            "<": result < limit,
            "<=": result <= limit,
            ">": result > limit,
            "==": same,
            "===": same,
            "!=": not same,
            "~=": same and result >= limit,
        }[sign]:
            return False
    return True


def _devices() -> tuple[list[Check], str]:
    remedy = (
        "Run python -c 'import jax; print(jax.local_devices())' here: it says more. "
        "Check the drivers, and processes that hold the devices"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICES],
            capture_output=True,
            text=True,
            timeout=DEVICE_SECONDS,
        )
        said = (done.stderr.splitlines() or ["nothing was said"])[-1][:120]
    except subprocess.TimeoutExpired:
        said = f"JAX found none in {DEVICE_SECONDS:.0f} s"
        done = None
    if done is None or done.returncode:
        problem = Check(name="devices", found=said, verdict="problem", remedy=remedy)
        return [problem], "none"
    name, kinds, count = json.loads(done.stdout.splitlines()[-1])
    words = ", ".join(kinds)
    checks = [Check(name="devices", found=f"{count}×{words} ({name})")]
    strange = [kind for kind in kinds if name != "cpu" and not entry_of_device(kind)]
    if strange:
        checks.append(
            Check(
                name="device kind",
                found=f"the catalogue lacks {', '.join(strange)}",
                verdict="warning",
                remedy="whalejax calibrate -o cluster.toml, and plan for that file",
            )
        )
    return checks, words


def _address() -> Check:
    name = socket.gethostname()
    try:
        result = sorted({str(x[4][0]) for x in socket.getaddrinfo(name, None)})
    except OSError as error:
        return Check(
            name="address",
            found=f"{name} has none ({error.strerror})",
            verdict="warning",
            remedy="Name hosts by addresses, or enter the name in /etc/hosts or DNS",
        )
    if all(address.startswith("127.") or address == "::1" for address in result):
        return Check(
            name="address",
            found=f"{name} is {', '.join(result)}",
            verdict="warning",
            remedy="Other hosts cannot reach this one under it: name it by an address "
            "of its network, or correct /etc/hosts",
        )
    return Check(name="address", found=f"{name} is {', '.join(result)}")


def _port(port: int) -> Check:
    try:
        with socket.socket() as result:
            result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            result.bind(("", port))
    except OSError as error:
        return Check(
            name="port",
            found=f"{port} cannot be listened at ({error.strerror})",
            verdict="warning",
            remedy="Where process 0 is to run here: whalejax launch --port with "
            "another one, or stop what holds it",
        )
    return Check(name="port", found=f"{port} is free")


def _coordinator(coordinator: str) -> Check:
    host, port = split_address(coordinator)
    try:
        where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return Check(
            name="coordinator",
            found=f"{host} has no address here ({error.strerror})",
            verdict="problem",
            remedy="Give --coordinator as ADDRESS:PORT, an address of its network",
        )
    return Check(name="coordinator", found=f"{coordinator} is {where[4][0]}")


def _proxies() -> Check:
    given = [
        name for name in os.environ if name.lower() in ("http_proxy", "grpc_proxy")
    ]
    if given and not os.environ.get("no_proxy", os.environ.get("NO_PROXY")):
        return Check(
            name="proxy",
            found=f"{', '.join(given)} set and no_proxy not",
            verdict="warning",
            remedy="Put the addresses of the hosts into no_proxy: JAX's service may "
            "be looked for behind the proxy",
        )
    return Check(name="proxy", found="none between hosts")


def _clock() -> Check:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    try:
        buffer = ctypes.create_string_buffer(512)  # struct timex, with room
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return Check(name="clock", found=f"{now}; not known whether it is synchronised")
    if state == _TIME_ERROR:
        return Check(
            name="clock",
            found=f"{now}; not synchronised",
            verdict="warning",
            remedy="Run chrony or systemd-timesyncd: timedatectl set-ntp true",
        )
    return Check(name="clock", found=f"{now}; synchronised")


def _cgroup() -> Check:
    """Checks whether the launcher's --cpu-quota would work."""
    why = why_no_quota()
    if why:
        return Check(
            name="CPU quotas",
            found=why.partition("(")[2].partition(")")[0] or why,
            verdict="warning",
            remedy="Only whalejax launch --cpu-quota needs them: run as root where "
            "control groups are mounted for writing",
        )
    return Check(name="CPU quotas", found="control groups can be made")
