"""Measures the local devices, for ``Cluster.detect()``. Starts JAX.

The times of ``probes`` determine a device kind and a level of links, which are cached
for each machine.

The memory of an accelerator is what JAX may allocate. The memory of a virtual CPU
device is that of the host or control group, divided by the number of devices.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax

from whalejax.meshes import host_facts
from whalejax.meshes.calibration import cache
from whalejax.meshes.calibration.link_fit import CollectiveTime, LinkFit, fit_link
from whalejax.meshes.calibration.probes import (
    EXP_BYTES,
    ChainProbe,
    CollectiveProbe,
    Convolution,
    Elementwise,
    FirstTouchProbe,
    ProductProbe,
    Seconds,
    measure_devices,
)
from whalejax.meshes.catalogue import CatalogueEntry, Link, entry_of_device
from whalejax.meshes.checks import Arguments, is_number, short_repr
from whalejax.meshes.cluster_data import COMPILERS, ClusterData, Level, Node
from whalejax.meshes.device_kinds import (
    BandwidthPoint,
    DeviceKind,
    MatmulPoint,
    Platform,
    Source,
)
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.jax_mesh import Device
from whalejax.meshes.merge_kinds import (
    check_joined,
    check_kind,
    check_replaced,
    renamed,
)


DEFAULT_BUDGET_SECONDS = 18.0


def calibrate(
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    *,
    use_cache: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    today: datetime.date | None = None,
) -> ClusterData:
    """Returns the local devices as one node, measured or from the cache.

    Args:
        budget_seconds: Seconds after which measuring stops. What a plan needs is always
            measured, even if it takes longer. Cached results of a smaller budget are
            not used.
        use_cache: Whether to use a cached result. Results are stored in any case.
        clock: Monotonic clock, in seconds.
        today: Date in the sources; default: the current date.

    Raises:
        WhaleError: An argument is invalid, or the memory of a device is unknown.
    """
    if not is_number(budget_seconds) or budget_seconds <= 0:
        raise WhaleError(
            f"budget_seconds: got {short_repr(budget_seconds)}, expected a number "
            "above zero"
        )
    problems = Arguments("calibrate")
    problems.switch("use_cache", use_cache)
    problems.function("clock", clock, "a function that gives seconds, rising")
    problems.of("today", today, datetime.date, "a date", none=True)
    problems.raise_if_any()
    devices = jax.local_devices()
    key = _machine(devices)
    if use_cache:
        cached = cache.load(key, budget_seconds)
        if cached is not None:
            return cached
    result = measure_devices(devices, budget_seconds, clock)
    date = (today or datetime.date.today()).isoformat()
    cluster = _cluster(devices, result, key, date)
    cache.store(key, budget_seconds, cluster)
    return cluster


def measured(
    budget_seconds: float = DEFAULT_BUDGET_SECONDS,
    *,
    kind: str | None = None,
    beside: ClusterData | None = None,
    instead: ClusterData | None = None,
) -> ClusterData:
    """Measures the local devices without the cache, to write a file.

    Args:
        budget_seconds: Budget of ``calibrate``, in seconds.
        kind: Name of the kind; default: that of the catalogue, else of JAX.
        beside: Contents of the file to which the devices are added, or None.
        instead: Contents of the file that is replaced, or None.

    Raises:
        WhaleError: Before measuring, if the name is invalid or in use, the devices
            cannot be added to ``beside``, kinds of ``instead`` would be lost, or the
            budget is not above zero. After it, if a device's memory is unknown.
    """
    devices = jax.local_devices()
    name = _name(devices[0]) if kind is None else kind
    if kind is not None or beside is not None:
        check_kind(name, beside)
    if instead is not None:
        check_replaced(name, instead)
    if beside is not None:
        check_joined(beside, devices[0].platform)
    cluster = calibrate(budget_seconds, use_cache=False)
    return cluster if kind is None else renamed(cluster, kind)


def local_network() -> Link | None:
    """Returns the catalogue's network of hosts like this one; None if unknown."""
    entry = entry_of_device(jax.local_devices()[0].device_kind)
    return None if entry is None else entry.network


def _name(device: Device) -> str:
    entry = entry_of_device(device.device_kind)
    return slug(device.device_kind) if entry is None else entry.kind.name


def _machine(devices: Sequence[Device]) -> dict[str, str | int | float]:
    """Returns the facts that identify a measurement in the cache."""
    return {
        "cpu_model": host_facts.cpu_model(),
        "cpu_cores": host_facts.cpu_cores(),
        "num_devices": len(devices),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "jaxlib": importlib.metadata.version("jaxlib"),
    }


def _cluster(
    devices: Sequence[Device],
    found: Seconds,
    machine: dict[str, str | int | float],
    date: str,
) -> ClusterData:
    entry = entry_of_device(devices[0].device_kind)
    platform = platform_of(devices[0])
    times = [
        CollectiveTime(
            collective=probe.collective,
            group_size=probe.group_size,
            payload_bytes=probe.payload_bytes,
            seconds=seconds,
            shared=platform == "cpu",
        )
        for probe, seconds in found.items()
        if isinstance(probe, CollectiveProbe)
    ]
    fit = fit_link(times) if times else None
    kind = _kind(devices, found, entry, platform)
    noun = "device" if len(devices) == 1 else "devices"
    where = f"{len(devices)} {noun}, {machine['cpu_cores']:g} cores"
    notes = "".join(f"; {note}" for note in fit.notes) if fit else ""
    source = Source(
        field="*",
        url="measured: whalejax calibrate",
        title=f"{machine['device_kind']} on {machine['cpu_model']}, {where}{notes}",
        date=date,
    )
    kind = replace(kind, sources=(*kind.sources, source))
    return ClusterData(
        nodes=(Node(kind=kind, count=len(devices)),),
        levels=(_level(len(devices), entry, fit, kind),),
        compiler=COMPILERS[platform],
    )


def _kind(
    devices: Sequence[Device],
    found: Seconds,
    entry: CatalogueEntry | None,
    platform: Platform,
) -> DeviceKind:
    products = _matmul_points(found)
    memory = _memory_points(found)
    best: dict[str, float] = {}
    for p in products:
        best[p.dtype] = max(best.get(p.dtype, 0.0), p.flops_per_second)
    measured = DeviceKind(
        name=slug(devices[0].device_kind),
        label="CPU" if platform == "cpu" else devices[0].device_kind,
        platform=platform,
        memory_bytes=device_memory_bytes(devices),
        memory_bytes_per_second=memory[-1].bytes_per_second,
        flops_per_second=tuple(best.items()),
        op_overhead_seconds=found[ChainProbe()],
        matmul_points=products,
        memory_points=memory,
    )
    measured = replace(
        measured,
        transcendentals_per_second=_transcendentals_per_second(measured, found),
        fresh_bytes_per_second=_fresh_bytes_per_second(measured, found),
    )
    share, turned = _convolutions(measured, found)
    measured = replace(
        measured, convolution_share=share, turned_bytes_per_second=turned
    )
    return measured if entry is None else _with_datasheet(measured, entry.kind)


def _with_datasheet(measured: DeviceKind, known: DeviceKind) -> DeviceKind:
    """Returns a measured kind with name, peaks and host memory of the catalogue."""
    prefixes = ("flops_per_second", "host_")
    return replace(
        measured,
        name=known.name,
        label=known.label,
        flops_per_second=known.flops_per_second,
        host_memory_bytes=known.host_memory_bytes,
        host_link_bytes_per_second=known.host_link_bytes_per_second,
        sources=tuple(s for s in known.sources if s.field.startswith(prefixes)),
    )


def _matmul_points(found: Seconds) -> tuple[MatmulPoint, ...]:
    return tuple(
        MatmulPoint(
            dtype=p.dtype,
            m=p.m,
            k=p.k,
            n=p.n,
            batch=p.batch,
            flops_per_second=2.0 * p.m * p.k * p.n * p.batch / seconds,
        )
        for p, seconds in found.items()
        if isinstance(p, ProductProbe)
    )


def _memory_points(found: Seconds) -> tuple[BandwidthPoint, ...]:
    points = [
        BandwidthPoint(
            moved_bytes=3 * p.array_bytes,
            bytes_per_second=3 * p.array_bytes / seconds,
        )
        for p, seconds in found.items()
        if isinstance(p, Elementwise) and p.operation == "add"
    ]
    return tuple(sorted(points, key=lambda p: p.moved_bytes))


def _transcendentals_per_second(kind: DeviceKind, found: Seconds) -> float | None:
    """Returns the rate for the time of exp in addition to memory traffic, if any."""
    nbytes = EXP_BYTES[kind.platform == "cpu"]
    seconds = found[Elementwise("exp", nbytes)]
    extra = seconds - kind.elementwise_seconds(2 * nbytes)
    return nbytes / 4 / extra if extra > 0 else None


def _fresh_bytes_per_second(kind: DeviceKind, found: Seconds) -> float | None:
    """Returns the rate for the additional time of first writes, if any."""
    for probe, seconds in found.items():
        if isinstance(probe, FirstTouchProbe):
            extra = seconds - kind.elementwise_seconds(probe.array_bytes)
            return probe.array_bytes / extra if extra > 0 else None
    return None


def _convolutions(
    kind: DeviceKind, found: Seconds
) -> tuple[float | None, float | None]:
    """Fits ``convolution_share`` and ``turned_bytes_per_second`` to the times.

    A convolution is at most as fast as its product. A transpose is at most as fast as
    reading and writing its array.
    """
    timed = [
        (3 * kind.matmul_seconds("f32", *p.product), p.turned_bytes, seconds)
        for p, seconds in found.items()
        if isinstance(p, Convolution)
    ]
    if not timed:
        return None, None
    copies = COMPILERS[kind.platform].copies_kernels
    product, turned, seconds = timed[0]
    if not copies or len(timed) == 1:
        seconds -= copies * kind.elementwise_seconds(2 * turned)
        return min(1.0, product / max(seconds, product)), None
    other_product, most_turned, other_seconds = timed[-1]
    determinant = product * most_turned - other_product * turned
    slowdown = (seconds * most_turned - other_seconds * turned) / determinant
    per_byte = (other_seconds - other_product * max(1.0, slowdown)) / most_turned
    per_byte = max(per_byte, kind.elementwise_seconds(2 * most_turned) / most_turned)
    slowdown = max(1.0, (seconds - turned * per_byte) / product)
    return 1 / slowdown, 1 / per_byte


def _level(
    count: int, entry: CatalogueEntry | None, fit: LinkFit | None, kind: DeviceKind
) -> Level:
    known = entry.node if entry is not None else None
    name = known.name if known is not None else "host"
    if fit is None:
        # One device has no link; take the bandwidth of its memory, an upper bound.
        return Level(
            name=name,
            size=count,
            bandwidth_bytes_per_second=kind.memory_bytes_per_second,
            latency_seconds=0.0,
        )
    return Level(
        name=name,
        size=count,
        bandwidth_bytes_per_second=fit.bandwidth_bytes_per_second,
        latency_seconds=fit.latency_seconds,
        slowdown=fit.slowdown,
        shared=kind.platform == "cpu",
    )


def platform_of(device: Device) -> Platform:
    """Returns ``"cpu"``, ``"tpu"``, or ``"gpu"`` for all other accelerators."""
    if device.platform == "cpu":
        return "cpu"
    return "tpu" if device.platform == "tpu" else "gpu"


def slug(device_kind: str) -> str:
    """Returns a name for a device that is not in the catalogue, valid in cluster texts.

    Example:
        >>> slug("NVIDIA RTX A6000")
        'nvidia-rtx-a6000'
    """
    return re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") or "device"


def device_memory_bytes(devices: Sequence[Device]) -> int:
    """Returns the memory of one device; see the module's docstring."""
    if devices[0].platform == "cpu":
        return host_facts.host_memory_bytes() // len(devices)
    stats = devices[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit:
        return int(limit)
    entry = entry_of_device(devices[0].device_kind)
    if entry is None:
        raise WhaleError(
            f"JAX does not tell the memory of {devices[0].device_kind}, and the "
            f"catalogue lacks it. Describe the device in a TOML file"
        )
    return entry.kind.memory_bytes
