"""Times small programs on all local devices at once. Starts JAX.

Every program is one compiled loop over many operations, so that the time is the
device's and not the dispatch's. It runs on all devices at once: virtual CPU devices
share cores and memory, and the speed of each while the others work is what matters. The
number of iterations is an argument, so one compilation serves both the trial and the
measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.meshes.jax_mesh import Device, build_mesh


Run = Callable[[int], object]

JAX_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16"}
OPS_IN_CHAIN = 16
REPEATED = 8
"""Times that an accelerator runs a loop's body in each iteration.

An iteration costs a GPU more than ten microseconds of its own, as the host checks
whether another follows. On an H200 (2026-11-26) an iteration that added 1 MB took 17.3
us, and each of eight such additions in one iteration 3.6."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPlan:
    """Number and duration of a program's runs.

    Attributes:
        clock: Monotonic clock, in seconds.
        target_seconds: Approximate duration of one timed run.
        repeats: Number of timed runs, of which the median counts.
        fewest: Fewest iterations. The fixed cost of a run varies by several
            milliseconds, which a few long iterations do not outweigh.
    """

    clock: Callable[[], float]
    target_seconds: float = 0.02
    repeats: int = 3
    fewest: int = 1

    def seconds_each(self, run: Run) -> float:
        """Returns the seconds of one more iteration of a program; compiles at first.

        The fixed cost of a run, such as dispatch and the first touch of its memory, is
        also in a run of one iteration, and is subtracted.
        """
        jax.block_until_ready(run(1))
        # The trial includes the dispatch, which a longer run shows to be small: hence
        # two steps towards the target instead of one.
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

    An iteration runs the body ``repeated`` times, with a barrier between. Each device
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
    """Returns a part of a Hadamard matrix; times its transpose it is a projection.

    Thousands of products with it neither overflow nor become denormal numbers, which
    some processors multiply a hundred times slower. Only for powers of two.
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
    """Times (m, k) × (k, n) and back, (m, n) × (n, k): two products in a loop's body.

    Args:
        devices: Devices that run it at once.
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

    There is no loop on the device: inside one, CPU convolutions are many times slower.

    Args:
        devices: Devices that run it at once.
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
    """Times the fill of an f32 array on every device, in newly allocated memory."""
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
    """Times ``OPS_IN_CHAIN`` operations too small to take measurable time."""
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
    """Times one collective an iteration, in groups of neighbours, all groups at once.

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
