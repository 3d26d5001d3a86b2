"""Runs probes: small programs that measure a device. Starts JAX.

A program is a compiled loop over many operations, so that the time of dispatch hardly
counts. It runs on all devices at once, because virtual CPU devices share cores and
memory. The number of iterations is an argument, so that the trial and the measurement
need one compilation.

Probes are in order of their importance to a plan, and the last ones are left out when
the budget is spent. ``calibrate`` derives the numbers of a device kind from the times.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.meshes.jax_mesh import Device, build_mesh
from whalejax.meshes.topology import IMAGE_TURNS, KERNEL_TURNS


Run = Callable[[int], object]

JAX_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}
OPS_IN_CHAIN = 16
REPEATED = 8
"""Number of times that an accelerator runs the body of a loop per iteration.

An iteration has a fixed cost of over ten microseconds on a GPU, because the host checks
the loop's condition. On an H200 (2026-11-26) an iteration with one addition of 1 MB
took 17.3 us; with eight additions, each took 3.6 us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPlan:
    """Number and duration of a program's runs.

    Attributes:
        clock: Monotonic clock, in seconds.
        target_seconds: Approximate duration of one timed run.
        repeats: Number of timed runs, of which the median counts.
        fewest: Least number of iterations. With few iterations, the fixed cost of a
            run would dominate, which varies by several milliseconds.
    """

    clock: Callable[[], float]
    target_seconds: float = 0.02
    repeats: int = 3
    fewest: int = 1

    def seconds_each(self, run: Run) -> float:
        """Compiles a program, and returns the seconds of one iteration.

        The fixed cost of a run, such as dispatch, is subtracted. A run of one iteration
        measures it.
        """
        jax.block_until_ready(run(1))
        # The first trial overestimates an iteration, because it includes the dispatch.
        # A second trial corrects this.
        iterations = self._towards_target(self._time(run, 1), self.fewest)
        if iterations > self.fewest:
            once = self._time(run, iterations) / iterations
            iterations = self._towards_target(once, iterations)
        return statistics.median(
            self._one_more(run, iterations) for _ in range(self.repeats)
        )

    def _one_more(self, run: Run, iterations: int) -> float:
        single = self._time(run, 1)
        whole = self._time(run, 1 + iterations)
        if whole <= single:  # noise
            return whole / (1 + iterations)
        return (whole - single) / iterations

    def _towards_target(self, seconds: float, at_least: int) -> int:
        wanted = self.target_seconds / max(seconds, 1e-9)
        return max(at_least, min(100_000, round(wanted)))

    def _time(self, run: Run, iterations: int) -> float:
        start = self.clock()
        jax.block_until_ready(run(iterations))
        return max(self.clock() - start, 1e-9)


def _looped(
    body: Callable[..., jax.Array],
    mesh: Mesh,
    arguments: Sequence[np.ndarray],
    repeated: int = 1,
) -> Run:
    """Returns a program that runs ``x = body(x, *rest)`` on every device of a mesh.

    An iteration runs the body ``repeated`` times, separated by barriers. Each device
    gets a copy of the arguments.
    """
    spec = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)
    count = mesh.devices.size

    def on_all(array: np.ndarray) -> jax.Array:
        block = np.expand_dims(array, 0)
        shape = (count, *array.shape)
        return jax.make_array_from_callback(shape, sharding, lambda _: block)

    arrays = [on_all(array) for array in arguments]

    def on_device(iterations: jax.Array, *blocks: jax.Array) -> jax.Array:
        state, *rest = (jnp.squeeze(block, 0) for block in blocks)

        def turn(number: jax.Array, x: jax.Array) -> jax.Array:
            del number
            for _ in range(repeated - 1):
                x = jax.lax.optimization_barrier(body(x, *rest))
            return body(x, *rest)

        end = jax.lax.fori_loop(0, iterations, turn, state)
        return jnp.expand_dims(end, 0)

    program = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), *[spec] * len(arrays)),
            out_specs=spec,
            check_vma=False,
        )
    )
    return lambda iterations: program(jnp.int32(iterations), *arrays)


def _orthogonal(rows: int, columns: int, dtype: str) -> np.ndarray:
    """Returns a part of a Hadamard matrix, whose product with its transpose projects.

    So many products in turn neither overflow nor become denormal numbers, which are
    slow on some processors. Sizes are powers of two.
    """
    i = np.arange(rows, dtype=np.uint32)[:, None] & np.arange(columns, dtype=np.uint32)
    signs = 1 - 2 * (np.bitwise_count(i) & 1).astype(np.int8)
    scale = 1.0 / np.sqrt(max(rows, columns))
    return np.asarray(signs * scale, dtype=jnp.dtype(dtype))


def _repeated(devices: Sequence[Device]) -> int:
    return 1 if devices[0].platform == "cpu" else REPEATED


def _all_device_mesh(devices: Sequence[Device]) -> Mesh:
    return build_mesh((("all", len(devices)),), devices)


def matmul_run(
    devices: Sequence[Device], dtype: str, m: int, k: int, n: int, batch: int = 1
) -> Run:
    """Times a product (m, k) × (k, n) followed by (m, n) × (n, k).

    Args:
        devices: Devices that run the products at once.
        dtype: A key of ``JAX_DTYPES``.
        m, k, n: Powers of two.
        batch: Number of products at once, each with its own matrices.
    """
    there = _orthogonal(k, n, JAX_DTYPES[dtype])
    x = np.random.default_rng(0).standard_normal((m, k)).astype(there.dtype)

    def body(x: jax.Array, there: jax.Array, back: jax.Array) -> jax.Array:
        return (x @ there) @ back

    arrays = [x, there, np.ascontiguousarray(there.T)]
    if batch > 1:
        arrays = [np.tile(array, (batch, 1, 1)) for array in arrays]
    return _looped(body, _all_device_mesh(devices), arrays, _repeated(devices))


def convolution_run(
    devices: Sequence[Device], batch: int, side: int, channels: int
) -> Run:
    """Times a 3 × 3 convolution and the gradients of its input and its kernel.

    The host runs the loop, because CPU convolutions are many times slower in a loop on
    the device.

    Args:
        devices: Devices that run the convolution at once.
        batch: Images per device.
        side: Side of the images and of the result, in pixels.
        channels: Number of input and of output channels.
    """
    spec = NamedSharding(_all_device_mesh(devices), PartitionSpec("all"))
    image = np.ones((len(devices), batch, side, side, channels), np.float32)
    kernel = np.ones((len(devices), 3, 3, channels, channels), np.float32)
    arrays = jax.device_put((image, kernel), spec)

    def on_device(image: jax.Array, kernel: jax.Array) -> jax.Array:
        result, pull = jax.vjp(_convolve, image[0], kernel[0])
        of_image, of_kernel = pull(result)
        return (jnp.sum(of_image) + jnp.sum(of_kernel)).reshape(1)

    program = jax.jit(
        jax.shard_map(
            on_device,
            mesh=_all_device_mesh(devices),
            in_specs=PartitionSpec("all"),
            out_specs=PartitionSpec("all"),
            check_vma=False,
        )
    )

    def run(iterations: int) -> list[jax.Array]:
        return [program(*arrays) for _ in range(iterations)]

    return run


def _convolve(image: jax.Array, kernel: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    convolve: jax.Array = jax.lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=numbers
    )
    return convolve


def fresh_run(devices: Sequence[Device], array_bytes: int) -> Run:
    """Times filling an f32 array in newly allocated memory on every device."""
    mesh = _all_device_mesh(devices)
    spec = PartitionSpec(mesh.axis_names)
    shape = (len(devices), array_bytes // 4)
    fill = jax.jit(
        lambda value: jnp.broadcast_to(value, shape),
        out_shardings=NamedSharding(mesh, spec),
    )
    value = jax.device_put(np.float32(1), NamedSharding(mesh, PartitionSpec()))

    def run(iterations: int) -> None:
        for _ in range(iterations):
            fill(value).block_until_ready()

    return run


def add_run(devices: Sequence[Device], array_bytes: int) -> Run:
    """Times the sum of two f32 arrays, which moves three times ``array_bytes``."""
    x = np.ones(array_bytes // 4, np.float32)
    mesh, repeated = _all_device_mesh(devices), _repeated(devices)
    return _looped(lambda x, y: x + y, mesh, [x, x * 1e-6], repeated)


def exp_run(devices: Sequence[Device], array_bytes: int) -> Run:
    """Times exp of an f32 array, which moves twice ``array_bytes``."""
    x = np.ones(array_bytes // 4, np.float32)
    mesh = _all_device_mesh(devices)
    return _looped(lambda x: jnp.exp(-x), mesh, [x], _repeated(devices))


def chain_run(devices: Sequence[Device]) -> Run:
    """Times ``OPS_IN_CHAIN`` operations on tiny arrays, for the overhead of each."""
    weight = _orthogonal(16, 16, "float32")

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(OPS_IN_CHAIN // 2):
            x = jnp.tanh(x @ w)
        return x

    mesh = _all_device_mesh(devices)
    return _looped(body, mesh, [weight, weight], _repeated(devices))


def _all_reduce(x: jax.Array, size: int) -> jax.Array:
    total: jax.Array = jax.lax.psum(x, "in")
    return total * (1.0 / size)


def _all_gather(x: jax.Array, size: int) -> jax.Array:
    whole: jax.Array = jax.lax.all_gather(x, "in", tiled=True)
    return whole[: x.shape[0]]


def _reduce_scatter(x: jax.Array, size: int) -> jax.Array:
    part: jax.Array = jax.lax.psum_scatter(x, "in", tiled=True)
    return jnp.tile(part * (1.0 / size), size)


def _all_to_all(x: jax.Array, size: int) -> jax.Array:
    exchanged: jax.Array = jax.lax.all_to_all(x, "in", 0, 0, tiled=True)
    return exchanged


COLLECTIVES: dict[str, Callable[[jax.Array, int], jax.Array]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "reduce-scatter": _reduce_scatter,
}


def collective_run(
    devices: Sequence[Device],
    collective: str,
    group_size: int,
    payload_bytes: int,
) -> Run:
    """Times a collective in groups of neighbours, in all groups at once.

    Args:
        devices: Devices; their number is a multiple of ``group_size``.
        collective: A key of ``COLLECTIVES``.
        group_size: Size of a group, at least 2.
        payload_bytes: Payload (see ``CollectiveTime``); a multiple of ``4 *
            group_size``.
    """
    elements = payload_bytes // 4
    if collective == "all-gather":
        elements //= group_size
    operation = COLLECTIVES[collective]
    groups = len(devices) // group_size
    mesh = build_mesh((("out", groups), ("in", group_size)), devices)
    x = np.ones(elements, np.float32)
    return _looped(lambda x: operation(x, group_size), mesh, [x])


# (m, k, n), most informative first: medium, small, narrow, others. On accelerators, the
# small product is always measured, because it gives the least time of any product.
# Shards of vocabularies and adapters have narrow products.
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
# Batched products as in attention: (m, k, n, batch).
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
# Small enough for the caches of CPUs; on accelerators, large compared with overheads.
EXP_BYTES = {True: 2**18, False: 2**28}
# Above the 32 MiB of freed memory that the C library may reuse.
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
    """Probe of ``"add"`` or ``"exp"`` of f32 arrays of this size."""

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
        """Sizes (m, k, n) of a product with the FLOPs of the forward convolution."""
        pixels = self.batch * self.side * self.side
        return pixels, 9 * self.channels, self.channels

    @property
    def turned_bytes(self) -> int:
        """Bytes that a compiler with ``copies_kernels`` transposes in memory."""
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

# Least number of iterations when essential probes run again. Large arrays are slow on
# many devices with one memory, and their rate matters for every plan.
_FEWEST: dict[type[Probe], int] = {Elementwise: 10, CollectiveProbe: 3}

# For CPUs: a convolution dominated by products, and one by the transpose of its kernel.
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

    Essential probes always run. Other probes run while the longest time so far fits in
    the remaining budget. If time is left, all probes run up to twice more, and the
    shortest time counts, because other load only makes a probe slower.
    """
    start = clock()
    target = min(0.02, budget_seconds / 400)
    on_cpu = devices[0].platform == "cpu"
    watch = TimingPlan(clock=clock, target_seconds=target)
    probes, essential = _probes(devices)
    runs: dict[Probe, Run] = {}
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
    each = {ProductProbe: 2, ChainProbe: OPS_IN_CHAIN}.get(type(probe), 1)
    return each * (1 if on_cpu or isinstance(probe, CollectiveProbe) else REPEATED)


def _run_of(probe: Probe, devices: Sequence[Device]) -> Run:
    match probe:
        case ProductProbe(dtype, m, k, n, batch):
            return matmul_run(devices, dtype, m, k, n, batch)
        case Elementwise("add", array_bytes):
            return add_run(devices, array_bytes)
        case Elementwise(_, array_bytes):
            return exp_run(devices, array_bytes)
        case FirstTouchProbe(array_bytes):
            return fresh_run(devices, array_bytes)
        case Convolution(batch, side, channels):
            return convolution_run(devices, batch, side, channels)
        case ChainProbe():
            return chain_run(devices)
        case CollectiveProbe(collective, size, payload):
            return collective_run(devices, collective, size, payload)


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
    cases = [(c, g, p) for p in payloads for g in sizes for c in COLLECTIVES]
    # First the essential part: one large and one small all-reduce.
    head = [("all-reduce", g, p) for p in payloads[:2] for g in sizes[:1]]
    return [
        CollectiveProbe(collective, size, payload // (4 * size) * 4 * size)
        for collective, size, payload in dict.fromkeys(head + cases)
    ]


def _interleaved(a: list[Probe], b: list[Probe]) -> list[Probe]:
    """Interleaves two lists evenly, so that a small budget cuts both."""
    ranked = [(i / max(1, len(a)), probe) for i, probe in enumerate(a)]
    ranked += [(i / max(1, len(b)), probe) for i, probe in enumerate(b)]
    return [probe for _, probe in sorted(ranked, key=lambda pair: pair[0])]
