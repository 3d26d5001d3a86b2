"""Probes of a device, their order, and when to stop. Starts JAX.

Twenty seconds do not suffice for all probes, so they are ordered by their importance to
a plan, and the budget cuts the list. ``timers`` has the programs, ``calibrate`` derives
the numbers of a device kind from the times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import jax

from whalejax.meshes.calibration import timers
from whalejax.meshes.jax_mesh import Device
from whalejax.meshes.topology import IMAGE_TURNS, KERNEL_TURNS


# (m, k, n), most informative first: a medium one, a small one, then sizes around. On
# accelerators the small one gives the least time of any product, and is always
# measured; narrow ones, common for shards of vocabularies and for adapters, come next.
_CPU_SHAPES = (
    (512, 256, 512),
    (64, 64, 64),
    (1024, 512, 512),
    (256, 64, 256),
    (64, 256, 256),
    (4096, 64, 256),
    (128, 1024, 512),
    (2048, 256, 1024),
)
# Products of many matrices, as in attention: (m, k, n, batch).
_CPU_BATCHES = ((128, 32, 128, 64), (256, 64, 256, 16))
_ACCELERATOR_BATCHES = ((1024, 128, 1024, 128), (512, 64, 512, 256))
_ACCELERATOR_SHAPES = (
    (4096, 1024, 4096),
    (256, 256, 256),
    (16384, 64, 2048),
    (16384, 2048, 64),
    (4096, 4096, 4096),
    (1024, 1024, 1024),
    (64, 4096, 4096),
    (8192, 4096, 8192),
    (2048, 64, 2048),
    (64, 64, 64),
    (512, 512, 512),
    (8192, 1024, 1024),
)
NARROW = 2  # of the shapes, after the first two
_CPU_ARRAY_BYTES = (2**18, 2**24, 2**21)
_ACCELERATOR_ARRAY_BYTES = (2**20, 2**28, 2**24)
_CPU_PAYLOAD_BYTES = (2**23, 2**14, 2**21)
_ACCELERATOR_PAYLOAD_BYTES = (2**24, 2**16, 2**20, 2**27)
_ROUNDS = 3
# On CPUs small enough for caches; elsewhere large enough to hide the loop's overhead.
EXP_BYTES = {True: 2**18, False: 2**28}
# Above the 32 MiB that the C library may keep after a free.
FRESH_BYTES = 5 * 2**23


@dataclass(frozen=True, slots=True)
class ProductProbe:
    """Probe of a product of an (m, k) and a (k, n) matrix, or of a batch of them."""

    dtype: str
    m: int
    k: int
    n: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Probe of ``"add"`` or ``"exp"`` over f32 arrays of this size."""

    operation: str
    array_bytes: int


@dataclass(frozen=True, slots=True)
class FirstTouchProbe:
    """Probe of a write of an array of this size to newly allocated memory."""

    array_bytes: int


@dataclass(frozen=True, slots=True)
class Convolution:
    """Probe of a 3 × 3 convolution with its gradients, for images of this size."""

    batch: int
    side: int
    channels: int

    @property
    def product(self) -> tuple[int, int, int]:
        """(m, k, n) of the equivalent product, which runs three times."""
        pixels = self.batch * self.side * self.side
        return pixels, 9 * self.channels, self.channels

    @property
    def turned_bytes(self) -> int:
        """Bytes that are transposed in memory, for a compiler that does that."""
        kernel = 4 * 9 * self.channels**2
        image = 4 * self.batch * self.side**2 * self.channels
        return sum(KERNEL_TURNS) * kernel + IMAGE_TURNS * 2 * image


@dataclass(frozen=True, slots=True)
class ChainProbe:
    """Probe of a sequence of many tiny operations."""


@dataclass(frozen=True, slots=True)
class CollectiveProbe:
    """Probe of one collective in groups of this size."""

    collective: str
    group_size: int
    payload_bytes: int


Probe = (
    ProductProbe
    | Elementwise
    | FirstTouchProbe
    | Convolution
    | ChainProbe
    | CollectiveProbe
)
Seconds = dict[Probe, float]

# Fewest iterations, after the first run of essential probes, for operations that are
# slow on many devices with one memory. Every plan's time depends on the rate of large
# arrays.
_FEWEST: dict[type[Probe], int] = {Elementwise: 10, CollectiveProbe: 3}

# On CPUs, one dominated by products, and one that transposes its kernel.
_CPU_CONVOLUTIONS = (
    Convolution(batch=2, side=16, channels=128),
    Convolution(batch=2, side=4, channels=512),
)
_ACCELERATOR_CONVOLUTIONS = (Convolution(batch=64, side=28, channels=256),)


def measure_devices(
    devices: Sequence[Device],
    budget_seconds: float,
    clock: Callable[[], float],
) -> Seconds:
    """Times the probes in order until the budget is spent.

    The essential ones always run; all others end as soon as the longest so far would
    not fit the remaining budget. If time is left, all are timed up to twice more and
    the shortest time counts: a busy machine was slower, never faster.
    """
    start = clock()
    target = min(0.02, budget_seconds / 400)
    on_cpu = devices[0].platform == "cpu"
    watch = timers.TimingPlan(clock=clock, target_seconds=target)
    probes, essential = _probes(devices)
    runs: dict[Probe, timers.Run] = {}
    result: Seconds = {}
    longest = 0.0
    for number in range(_ROUNDS * len(probes)):
        before = clock()
        if number == len(probes):
            longest = 0.0
        if number >= essential and before - start + longest > budget_seconds:
            break
        probe = probes[number % len(probes)]
        with jax.enable_x64(True) if _is_double(probe) else nullcontext():
            if probe not in runs:
                runs[probe] = _run_of(probe, devices)
            fewest = _FEWEST.get(type(probe), 1) if number >= essential else 1
            timed = dataclasses.replace(watch, fewest=fewest)
            seconds = timed.seconds_each(runs[probe]) / _operations_in(probe, on_cpu)
        result[probe] = min(result.get(probe, seconds), seconds)
        longest = max(longest, clock() - before)
    return result


def _is_double(probe: Probe) -> bool:
    # Without ``jax_enable_x64``, JAX turns f64 into f32.
    return isinstance(probe, ProductProbe) and probe.dtype == "f64"


def _operations_in(probe: Probe, on_cpu: bool) -> int:
    if isinstance(probe, Convolution | FirstTouchProbe):
        return 1
    each = {ProductProbe: 2, ChainProbe: timers.OPS_IN_CHAIN}.get(type(probe), 1)
    return each * (
        1 if on_cpu or isinstance(probe, CollectiveProbe) else timers.REPEATED
    )


def _run_of(probe: Probe, devices: Sequence[Device]) -> timers.Run:
    match probe:
        case ProductProbe(dtype, m, k, n, batch):
            return timers.matmul_run(devices, dtype, m, k, n, batch)
        case Elementwise("add", array_bytes):
            return timers.add_run(devices, array_bytes)
        case Elementwise(_, array_bytes):
            return timers.exp_run(devices, array_bytes)
        case FirstTouchProbe(array_bytes):
            return timers.fresh_run(devices, array_bytes)
        case Convolution(batch, side, channels):
            return timers.convolution_run(devices, batch, side, channels)
        case ChainProbe():
            return timers.chain_run(devices)
        case CollectiveProbe(collective, size, payload):
            return timers.collective_run(devices, collective, size, payload)


def _probes(devices: Sequence[Device]) -> tuple[list[Probe], int]:
    """Returns the probes, most useful first, and the number of essential ones."""
    on_cpu = devices[0].platform == "cpu"
    shapes = _CPU_SHAPES if on_cpu else _ACCELERATOR_SHAPES
    arrays = _CPU_ARRAY_BYTES if on_cpu else _ACCELERATOR_ARRAY_BYTES
    dtypes = ["f32", "bf16"] + (["f64"] if devices[0].platform != "tpu" else [])
    products: list[Probe] = []
    for rank, shape in enumerate(shapes):
        for dtype in dtypes if rank < 2 else dtypes[:2]:
            products.append(ProductProbe(dtype, *shape))
    batches = _CPU_BATCHES if on_cpu else _ACCELERATOR_BATCHES
    batched = [ProductProbe(dtype, *batch) for batch in batches for dtype in dtypes[:2]]
    memory = [Elementwise("add", size) for size in arrays]
    collectives = _collective_probes(len(devices), on_cpu)
    small = 0 if on_cpu else len(dtypes)
    first = [
        *products[: len(dtypes) + small],
        memory[0],
        ChainProbe(),
        Elementwise("exp", EXP_BYTES[on_cpu]),
        *[FirstTouchProbe(FRESH_BYTES)] * on_cpu,
        *collectives[:2],
    ]
    convolutions = _CPU_CONVOLUTIONS if on_cpu else _ACCELERATOR_CONVOLUTIONS
    later = products[len(dtypes) + small :]
    narrow = [] if on_cpu else later[: 2 * NARROW]
    later = [*narrow, *batched, *later[len(narrow) :]]
    rest = _interleaved(collectives[2:], later)
    return [*first, *memory[1:], *convolutions, *rest], len(first)


def _collective_probes(count: int, on_cpu: bool) -> list[Probe]:
    """Returns probes of collectives in groups of all devices, of 2 and of 4."""
    sizes = [g for g in dict.fromkeys((count, 2, 4)) if 1 < g and count % g == 0]
    payloads = _CPU_PAYLOAD_BYTES if on_cpu else _ACCELERATOR_PAYLOAD_BYTES
    cases = [(c, g, p) for p in payloads for g in sizes for c in timers.COLLECTIVES]
    # First the essential part: one large and one small all-reduce.
    head = [("all-reduce", g, p) for p in payloads[:2] for g in sizes[:1]]
    return [
        CollectiveProbe(collective, size, payload // (4 * size) * 4 * size)
        for collective, size, payload in dict.fromkeys(head + cases)
    ]


def _interleaved(a: list[Probe], b: list[Probe]) -> list[Probe]:
    """Interleaves both lists evenly, so that a budget that ends early cuts both."""
    ranked = [(i / max(1, len(a)), probe) for i, probe in enumerate(a)]
    ranked += [(i / max(1, len(b)), probe) for i, probe in enumerate(b)]
    return [probe for _, probe in sorted(ranked, key=lambda pair: pair[0])]
