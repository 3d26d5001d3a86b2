"""``DeviceKind``: memory, bandwidth and speed of a device, from datasheets or measured.

The planner knows a device only by this class, which returns the seconds of operations.
They follow from measured points if there are any. Otherwise they follow from the
datasheet's peak times an efficiency, which depends on the shape.

The module is long because each kind of operation has its own rule from peaks, fitted
shares and measured points to seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from whalejax.meshes.checks import (
    LARGEST,
    check_fields,
    is_number,
    is_whole,
    short_repr,
)
from whalejax.meshes.dtypes import DTYPES, FALLBACKS, dtype_name
from whalejax.meshes.errors import (
    MOST_NAME,
    Problems,
    WhaleError,
    as_json,
    is_shown_as_written,
    quoted,
)
from whalejax.meshes.fitted_constants import Efficiency, constants, pace_of, shape_share
from whalejax.meshes.measured_points import FILLED as FILLED
from whalejax.meshes.measured_points import (
    IN_A_STEP,
    ITEM_BYTES,
    NARROW,
    Curve,
    least_seconds,
    wide_rates,
)
from whalejax.meshes.measured_points import BandwidthPoint as BandwidthPoint
from whalejax.meshes.measured_points import MatmulPoint as MatmulPoint
from whalejax.meshes.measured_points import Source as Source
from whalejax.meshes.measured_points import TimedModel as TimedModel
from whalejax.meshes.measured_points import effective_size as effective_size
from whalejax.meshes.units import gigabytes


Platform = Literal["cpu", "gpu", "tpu"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "gpu", "tpu")


VOLTA = 7
"""Generation number of GPUs before those with an attention kernel."""

MOST_MEMORY_BYTES = 2**50
"""Largest accepted memory of a device, or of its share of host memory."""

MOST_NUMBER = 1e24
"""Largest accepted rate, time or price; products of larger ones could overflow."""

MOST_CORES = 10**6

KEPT_BYTES = 2**25
"""Largest freed block that glibc's malloc reuses (DEFAULT_MMAP_THRESHOLD_MAX, 64
bits)."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DeviceKind:
    """One kind of device, for the planner.

    Attributes:
        name: Name in a cluster's text, such as ``"h100"``.
        label: Name for displays; ``name`` if empty.
        platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
        memory_bytes: Capacity of one device.
        memory_bytes_per_second: Bandwidth of the device's memory.
        flops_per_second: Pairs of a supported dtype and its dense peak.
        host_memory_bytes: Memory of the host, divided by its number of devices.
        host_link_bytes_per_second: Bandwidth from device to host, in one direction.
        op_overhead_seconds: Fixed cost of launching one operation of a program.
        efficiency: Fraction of the peak that large matrix products reach, for a kind
            without ``curve`` and measurements.
        curve: Platform whose ``fitted_constants`` determine the speed; empty for kinds
            that are not based on the catalogue, or whose file gives ``efficiency``.
        matmul_half_size: Effective size at which products reach half of ``efficiency``;
            0 means that small shapes are as fast as large ones.
        matmul_points: Measured products, which replace peak and efficiency.
        memory_points: Measured bandwidths by bytes moved; if empty, the bandwidth is
            ``achieved_bytes_per_second`` at every size.
        transcendentals_per_second: Rate of exp, tanh and similar functions; None if
            memory traffic alone determines their time.
        fresh_bytes_per_second: Rate that gives the extra time of first writes to newly
            allocated memory, which cause page faults; None without extra time.
        turned_bytes_per_second: Rate of transposes in memory, which convolutions on
            CPUs need; None if they take no longer than reads and writes.
        convolution_share: Ratio of the rate of convolutions, forward and backward, to
            that of products of the same sizes; None if they are equal.
        cores: Number of cores that compute tiles of a product, such as the streaming
            multiprocessors of a GPU; 0 if tiles do not matter.
        generation: Generation of the design, such as ``"ampere"``. Measured kinds of a
            generation determine the speed of its other kinds.
        watts: Power of the board; see ``ratings.POWER``.
        timed_models: Models whose micro-batches were measured on this kind.
        price_per_hour: Price of one device for an hour, in any currency; None unless
            the user gave one.
        sources: Source of each number.
    """

    name: str
    platform: Platform
    memory_bytes: int
    memory_bytes_per_second: float
    flops_per_second: tuple[tuple[str, float], ...]
    label: str = ""
    host_memory_bytes: int | None = None
    host_link_bytes_per_second: float | None = None
    op_overhead_seconds: float = 0.0
    efficiency: float = 1.0
    curve: str = ""
    matmul_half_size: float = 0.0
    matmul_points: tuple[MatmulPoint, ...] = ()
    memory_points: tuple[BandwidthPoint, ...] = ()
    transcendentals_per_second: float | None = None
    fresh_bytes_per_second: float | None = None
    turned_bytes_per_second: float | None = None
    convolution_share: float | None = None
    cores: int = 0
    generation: str = ""
    watts: float | None = None
    timed_models: tuple[TimedModel, ...] = ()
    price_per_hour: float | None = None
    sources: tuple[Source, ...] = ()
    _matmul: dict[tuple[str, bool], Curve] = field(
        init=False, repr=False, compare=False, hash=False
    )
    _memory: Curve | None = field(init=False, repr=False, compare=False, hash=False)
    _efficiency: dict[str, Efficiency] = field(
        init=False, repr=False, compare=False, hash=False
    )
    _achieved: float | None = field(init=False, repr=False, compare=False, hash=False)
    _product_seconds: float = field(init=False, repr=False, compare=False, hash=False)
    _wide: dict[str, Curve] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        _check(self)
        measured: dict[tuple[str, bool], list[tuple[float, float]]] = {}
        for p in self.matmul_points:
            size = effective_size(p.m, p.k, p.n)
            result = measured.setdefault((p.dtype, p.batch > 1), [])
            result.append((size, p.flops_per_second))
        curves = {key: Curve(points) for key, points in measured.items()}
        object.__setattr__(self, "_matmul", curves)
        least = least_seconds(self.matmul_points) if self.platform == "gpu" else 0.0
        least = max(0.0, least - self.launch_seconds)
        object.__setattr__(self, "_product_seconds", least)
        wide = wide_rates(self.matmul_points, self._product_seconds)
        object.__setattr__(self, "_wide", {t: Curve(p) for t, p in wide.items()})
        moved = [(float(p.moved_bytes), p.bytes_per_second) for p in self.memory_points]
        if self._measured_gpu:
            # In a step, arrays leave the cache between two uses.
            most = self.memory_bytes_per_second
            moved = [(nbytes, min(rate, most)) for nbytes, rate in moved]
        object.__setattr__(self, "_memory", Curve(moved) if moved else None)
        object.__setattr__(self, "_efficiency", {})
        object.__setattr__(self, "_achieved", None)

    def __repr__(self) -> str:
        memory = gigabytes(self.memory_bytes)
        return f"<DeviceKind {self.name}: {self.display_name()}, {memory}>"

    @property
    def family(self) -> str:
        """Name without the size of the memory: ``"a100"`` of ``"a100-80"``."""
        return self.name.partition("-")[0]

    @property
    def attention_generation(self) -> int:
        """Generation of the attention kernels for this kind; see ``Framework``."""
        if self.family in ("p100", "v100"):
            return VOLTA
        return 9 if self.family in ("h100", "h200", "b200", "gh200") else 8

    def display_name(self) -> str:
        """Returns the label, or the name if it is empty."""
        return self.label or self.name

    def peak_flops(self, dtype: str) -> float:
        """Returns the dense peak in FLOP/s.

        A type without a peak takes the peak of its first fallback that has one; for
        bf16 the fallbacks are f16 and then f32. Products may run in another type: see
        ``multiplies_in``. For a measured kind without a datasheet, the peak is the best
        observed rate.

        Args:
            dtype: One of ``DTYPES`` or a numpy name.

        Raises:
            WhaleError: The kind has no peak for the type and its fallbacks.

        Example:
            >>> from whalejax.meshes import device_kind
            >>> device_kind("v100-32").peak_flops("bf16") / 1e12  # that of f16
            125.0
        """
        peaks = dict(self.flops_per_second)
        for candidate in FALLBACKS[dtype_name(dtype)]:
            if candidate in peaks:
                return peaks[candidate]
        known = ", ".join(peaks)
        raise WhaleError(
            f"{self.display_name()} has no FLOP/s for {dtype_name(dtype)}; it has "
            f"{known}. Add kinds.{self.name}.flops_per_second.{dtype_name(dtype)} to "
            f"the cluster's TOML file, or compute in one of those types"
        )

    def was_measured(self, dtype: str) -> bool:
        """Whether products in a type were measured on this kind."""
        name = dtype_name(dtype)
        return (name, False) in self._matmul or (name, True) in self._matmul

    def multiplies_in(self, dtype: str, *, exact: bool = False) -> str:
        """Returns the type in which the device multiplies operands of a type.

        JAX's default precision multiplies float32 in TensorFloat-32 if available. GPUs
        without units for bfloat16 (compute capability below 8) or float16 multiply in
        float32. In a type that was measured, the device multiplies as it is.

        Args:
            dtype: One of ``DTYPES`` or a numpy name.
            exact: Whether float32 is multiplied in float32.

        >>> from whalejax.meshes import device_kind
        >>> [device_kind("v100-32").multiplies_in(d) for d in ("bf16", "f16", "f32")]
        ['f32', 'f16', 'f32']
        >>> device_kind("a100-80").multiplies_in("f32")
        'tf32'
        """
        if not isinstance(exact, bool):
            raise WhaleError(f"exact is {short_repr(exact)}; expected True or False")
        name, peaks = dtype_name(dtype), dict(self.flops_per_second)
        if self.platform != "gpu" or self.was_measured(name):
            return name
        if name == "f32" and not exact:
            return "tf32" if "tf32" in peaks else name
        half = ("bf16", "tf32") if name == "bf16" else ("f16", "bf16")
        wide = name in ("bf16", "f16") and "f32" in peaks and not peaks.keys() & {*half}
        return "f32" if wide or (name == "tf32" and "tf32" not in peaks) else name

    @property
    def widens_bfloat16(self) -> bool:
        """Whether products in bfloat16 run in float32.

        >>> from whalejax.meshes import device_kind
        >>> [device_kind(name).widens_bfloat16 for name in ("v100-32", "a100-80")]
        [True, False]
        """
        return self.multiplies_in("bf16") == "f32"

    def efficiency_in(self, dtype: str) -> Efficiency:
        """Returns the fraction of its peak that this kind reaches, and its origin.

        Args:
            dtype: Type in which the device multiplies.
        """
        name = dtype_name(dtype)
        if name not in self._efficiency:
            efficiency = constants().efficiency_of(self, name, self.efficiency)
            self._efficiency[name] = efficiency
        return self._efficiency[name]

    def matmul_flops_per_second(
        self, dtype: str, m: Any, k: Any, n: Any, *, batch: Any = 1
    ) -> Any:
        """Returns the FLOP/s of a product of this shape on one device.

        Args:
            dtype: One of ``DTYPES`` or a numpy name.
            m, k, n: Sizes of an (m, k) times (k, n) product; arrays give an array.
            batch: Number of products in one operation.
        """
        for name, side in (("m", m), ("k", k), ("n", n), ("batch", batch)):
            _check_amount(name, side, above_zero=True)
        dtype = self.multiplies_in(dtype)
        if not self._product_seconds:
            return self._filled(dtype, m, k, n, batch)
        matmul_flops_per_second = self._least_and_roof(dtype, m, k, n, batch)
        if (dtype, True) in self._matmul:
            narrow = np.minimum(np.minimum(m, k), n) <= NARROW
            measured = narrow & (np.asarray(batch) > 1)
            matmul_flops_per_second = np.where(
                measured, self._filled(dtype, m, k, n, batch), matmul_flops_per_second
            )
        return (
            matmul_flops_per_second
            if np.ndim(matmul_flops_per_second)
            else float(matmul_flops_per_second)
        )

    def _least_and_roof(self, dtype: str, m: Any, k: Any, n: Any, batch: Any) -> Any:
        """Returns FLOP/s for the least time plus the longer of memory and compute time.

        The rates are those of ``wide_rates``.
        """
        flops = 2.0 * m * k * n * batch
        size = ITEM_BYTES.get(dtype, 4)
        moved = size * (m * k + k * n + m * n) * batch / self.memory_bytes_per_second
        if dtype in self._wide:
            rate = self._wide[dtype].at(effective_size(m, k, n))
        else:
            rates = [p.flops_per_second for p in self.matmul_points if p.dtype == dtype]
            rate = max(rates, default=self.peak_flops(dtype))
        return flops / (self._product_seconds + np.maximum(moved, flops / rate))

    def _filled(self, dtype: str, m: Any, k: Any, n: Any, batch: Any) -> Any:
        """Returns FLOP/s of a product by its size; pads narrow ones with zeros."""
        if all(np.min(side) >= FILLED[-1] for side in (m, k, n)):
            result = self._flops_per_second(dtype, m, k, n, batch)
            return result if np.ndim(result) else float(result)
        fills = np.array((0, *FILLED)).reshape(-1, *np.ndim(m * k * n * batch) * (1,))
        rows, depth, columns = (np.maximum(side, fills) for side in (m, k, n))
        part = (m * k * n) / (rows * depth * columns)
        rate = self._flops_per_second(dtype, rows, depth, columns, batch)
        result = np.max(part * rate, axis=0)
        return result if np.ndim(result) else float(result)

    def _flops_per_second(self, dtype: str, m: Any, k: Any, n: Any, batch: Any) -> Any:
        """Returns FLOP/s of a product with sides in the measured or fitted range."""
        size = effective_size(m, k, n)
        peaks = dict(self.flops_per_second)
        for candidate in FALLBACKS[dtype_name(dtype)]:
            alone = self._matmul.get((candidate, False))
            several = self._matmul.get((candidate, True)) or alone
            alone = alone or several
            if alone is not None and several is not None:
                if isinstance(batch, np.ndarray):
                    return np.where(batch > 1, several.at(size), alone.at(size))
                return (several if batch > 1 else alone).at(size)
            if candidate in peaks:
                break
        peak = self.peak_flops(dtype)
        if self.curve:
            known = constants()
            curve, pace = known.platforms[self.curve], pace_of(peak, self.cores)
            share = shape_share(m, k, n, batch, self.cores, curve, pace)
            most = self.efficiency_in(dtype_name(dtype)).share
            return peak * most * (share if np.ndim(share) else float(share))
        return peak * self.efficiency * size / (size + self.matmul_half_size)

    def matmul_seconds(self, dtype: str, m: Any, k: Any, n: Any, count: Any = 1) -> Any:
        """Returns the seconds for ``count`` products of an (m, k) with a (k, n) matrix.

        Memory traffic is not included: take the larger of this time and
        ``elementwise_seconds`` of the bytes. ``op_overhead_seconds`` is not included
        either. On a measured GPU, the time is that within a step, longer than that of a
        product alone (``matmul_flops_per_second``).

        Example:
            >>> from whalejax.meshes import device_kind
            >>> kind = device_kind("h100")
            >>> seconds = kind.matmul_seconds("bf16", 4096, 4096, 4096)
            >>> seconds >= 2 * 4096**3 / kind.peak_flops("bf16")
            True
        """
        _check_amount("count", count, above_zero=True)
        rate = self.matmul_flops_per_second(dtype, m, k, n, batch=count)
        return 2.0 * m * k * n * count / rate * self._longer

    @property
    def _longer(self) -> float:
        """Factor by which a kernel takes longer in a step than when measured alone."""
        return IN_A_STEP if self._measured_gpu else 1.0

    @property
    def _measured_gpu(self) -> bool:
        return self.platform == "gpu" and bool(self.matmul_points)

    @property
    def achieved_bytes_per_second(self) -> float:
        """Memory bandwidth that operations reach, if ``memory_points`` is empty."""
        if self._achieved is None:
            share = constants().memory_of(self) if self.curve else 1.0
            achieved = self.memory_bytes_per_second * share
            object.__setattr__(self, "_achieved", achieved)
            return achieved
        return self._achieved

    @property
    def is_linear_in_bytes(self) -> bool:
        """Whether ``elementwise_seconds`` is proportional to the bytes."""
        return self._memory is None

    @property
    def launch_seconds(self) -> float:
        """Fixed seconds of one operation of a compiled program.

        For a measured GPU, it is at least the fitted cost of a kernel in training
        steps, because the measured kernels are of one kind and start sooner.
        """
        if self.curve:
            return constants().platforms[self.curve].kernel_seconds
        if self._measured_gpu:
            fitted = constants().platforms["gpu"].kernel_seconds
            return max(fitted, self.op_overhead_seconds)
        return self.op_overhead_seconds

    def fresh_seconds(self, nbytes: float) -> float:
        """Returns the extra seconds of the first writes to newly allocated memory.

        They are 0 for up to ``KEPT_BYTES``, which reuse freed memory.
        """
        if isinstance(nbytes, np.ndarray):
            raise WhaleError("nbytes is an array; expected one number of bytes")
        _check_amount("nbytes", nbytes)
        if self.fresh_bytes_per_second is None or nbytes <= KEPT_BYTES:
            return 0.0
        return nbytes / self.fresh_bytes_per_second

    def turned_seconds(self, nbytes: Any) -> Any:
        """Returns the seconds to transpose an array of some bytes in memory.

        >>> from whalejax.meshes import device_kind
        >>> kind = device_kind("cpu")  # which nobody measured
        >>> kind.turned_seconds(2**20) == kind.elementwise_seconds(2 * 2**20)
        True
        """
        _check_amount("nbytes", nbytes)
        if self.turned_bytes_per_second is None:
            return self.elementwise_seconds(2 * nbytes)
        return nbytes / self.turned_bytes_per_second

    def elementwise_seconds(self, moved_bytes: Any, transcendentals: Any = 0) -> Any:
        """Returns the seconds of one pass over some bytes at memory speed.

        Args:
            moved_bytes: Bytes read plus written on one device; arrays give an array.
            transcendentals: Number of exp, tanh, log and the like in the pass.

        Example:
            >>> from whalejax.meshes import device_kind
            >>> 1.0 < device_kind("a100-80").elementwise_seconds(2.039e12) < 2.0
            True
        """
        _check_amount("moved_bytes", moved_bytes)
        _check_amount("transcendentals", transcendentals)
        seconds: Any
        if self._memory is None:
            seconds = moved_bytes / self.achieved_bytes_per_second
        elif isinstance(moved_bytes, np.ndarray):
            seconds = moved_bytes / self._memory.at(np.maximum(1.0, moved_bytes))
        elif moved_bytes <= 0:
            seconds = 0.0
        else:
            seconds = moved_bytes / self._memory.at(moved_bytes)
        if self.transcendentals_per_second is not None:
            seconds += transcendentals / self.transcendentals_per_second
        return seconds * self._longer


def _check_amount(name: str, value: Any, *, above_zero: bool = False) -> None:
    """Refuses invalid numbers of bytes or elements.

    Of arrays, only the type and, if ``above_zero``, the least value are checked.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        if not above_zero or (value.size and value.min() > 0):
            return
    most = LARGEST if above_zero else 1e300
    value = value.item() if isinstance(value, np.number) else value
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if known and 0 <= value <= most and (value > 0 or not above_zero):
        return
    least = "above 0" if above_zero else "of at least zero"
    raise WhaleError(f"{name} is {short_repr(value)}; expected a number {least}")


def check_name(where: str, name: str, problems: Problems) -> None:
    """Records a name that cannot be shown unchanged.

    Args:
        where: Parameter in the message.
        name: Name of a kind, a level or the like that reaches terminals and charts.
        problems: Collector of the errors.
    """
    if not isinstance(name, str) or not is_shown_as_written(name):
        problems.add(
            f"{where}: got {as_json(name)}, expected text without control and "
            "bidirectional characters"
        )
    elif len(name) > MOST_NAME:
        problems.add(
            f"{where}: got {quoted(name)}, expected at most {MOST_NAME} characters"
        )


def _check(kind: DeviceKind) -> None:
    title = f"device kind {short_repr(kind.name)}"
    check_fields(kind, title)
    problems = Problems(title)
    _check_names(kind, problems)
    for path, value in _positive_numbers(kind).items():
        most = MOST_MEMORY_BYTES if path in _MEMORIES else MOST_NUMBER
        if value is None or (is_number(value) and 0 < value <= most):
            continue
        if is_number(value) and value > most:
            limit = f"{most}" if path in _MEMORIES else f"{most:g}"
            problems.add(
                f"{path}: got {quoted(value)}, expected a number above zero, "
                f"at most {limit}"
            )
        else:
            problems.add(
                f"{path}: got {short_repr(value)}, expected a number above zero"
            )
    _check_rates(kind, problems)
    problems.raise_if_any()


def _check_names(kind: DeviceKind, problems: Problems) -> None:
    if not kind.name:
        problems.add("name: got '', expected a name")
    for field_name in ("name", "label"):
        check_name(field_name, getattr(kind, field_name), problems)
    for place, source in enumerate(kind.sources):
        for part in ("field", "url", "title", "date"):
            check_name(f"sources.{place}.{part}", getattr(source, part), problems)
    for place, timed in enumerate(kind.timed_models):
        for part in ("weights", "title"):
            check_name(f"timed_models.{place}.{part}", getattr(timed, part), problems)
    if kind.platform not in PLATFORMS:
        problems.add(
            f"platform: got {quoted(kind.platform)}, expected one of "
            f"{', '.join(PLATFORMS)}"
        )
    if kind.curve and kind.curve not in constants().platforms:
        known = ", ".join(constants().platforms)
        given = short_repr(kind.curve)
        problems.add(f"curve: got {given}, expected one of {known}, or nothing")


def _check_rates(kind: DeviceKind, problems: Problems) -> None:
    known = ", ".join(DTYPES)
    if not kind.flops_per_second:
        problems.add(f"flops_per_second: got none, expected at least one of {known}")
    named = [("flops_per_second", d) for d, _ in kind.flops_per_second]
    named += [("matmul_points", p.dtype) for p in kind.matmul_points]
    for path, dtype in named:
        if dtype not in DTYPES:
            problems.add(f"{path}: got {short_repr(dtype)}, expected one of {known}")
    if not 0 < kind.efficiency <= 1:
        problems.add(
            f"efficiency: got {short_repr(kind.efficiency)}, expected a fraction "
            "above 0, at most 1"
        )
    for path in ("op_overhead_seconds", "matmul_half_size"):
        value = getattr(kind, path)
        if not (is_number(value) and 0 <= value <= MOST_NUMBER):
            said = short_repr(value)
            problems.add(f"{path}: got {said}, expected a number of at least zero")
    if not is_whole(kind.cores, 0, MOST_CORES):
        problems.add(
            f"cores: got {short_repr(kind.cores)}, expected 0 to {MOST_CORES}; leave "
            "it out if tiles of a product do not matter"
        )


_MEMORIES = frozenset(("memory_bytes", "host_memory_bytes"))


def _positive_numbers(kind: DeviceKind) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {
        "memory_bytes": kind.memory_bytes,
        "memory_bytes_per_second": kind.memory_bytes_per_second,
        "host_memory_bytes": kind.host_memory_bytes,
        "host_link_bytes_per_second": kind.host_link_bytes_per_second,
        "transcendentals_per_second": kind.transcendentals_per_second,
        "fresh_bytes_per_second": kind.fresh_bytes_per_second,
        "turned_bytes_per_second": kind.turned_bytes_per_second,
        "convolution_share": kind.convolution_share,
        "price_per_hour": kind.price_per_hour,
        "watts": kind.watts,
    }
    numbers |= {f"flops_per_second.{d}": v for d, v in kind.flops_per_second}
    for i, p in enumerate(kind.matmul_points):
        numbers[f"matmul_points.{i}"] = min(p.m, p.k, p.n, p.batch, p.flops_per_second)
    for i, b in enumerate(kind.memory_points):
        numbers[f"memory_points.{i}"] = min(b.moved_bytes, b.bytes_per_second)
    for i, t in enumerate(kind.timed_models):
        numbers[f"timed_models.{i}"] = min(t.samples, t.seconds, t.predicted_seconds)
    return numbers
