"""Shares of mixed devices: how many micro-batches of a step each computes.

Data-parallel ranks wait for the slowest, so shares are the integers ``k`` that minimise
``max(k_i * t_i)``. A device's memory may limit its share. Whale's Formula 1 defines
shares as fractions: ``water_fill`` solves it exactly, and ``whale_algorithm1`` has the
algorithm of the paper.

Data sheets, and even measured products and bandwidths, give only the limits of a
device. The relative speed of two kinds on a model is known only after the model has run
on both. ``corrections`` follow from measured times of the model's own micro-batches.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.model.graph import Tensor
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Device that has a share of equal pieces: samples, micro-batches or rows.

    A part of its memory use does not depend on the share, and a part grows with each
    piece. Micro-batches that run in sequence add nothing, as the first part includes
    one of them.

    Attributes:
        name: Name such as ``"v100-32"``.
        seconds: Measured or predicted seconds of one piece on the device.
        memory_bytes: Memory of the device in bytes.
        static_bytes: Bytes that do not grow with the share, such as parameters,
            gradients and optimizer state.
        piece_bytes: Bytes of one piece, such as its activations.
    """

    name: str = "device"
    seconds: float
    memory_bytes: float = math.inf
    static_bytes: float = 0.0
    piece_bytes: float = 0.0

    def needs(self, pieces: float) -> float:
        """Returns the bytes that a number of pieces needs.

        >>> Device(seconds=1.0, static_bytes=4.0, piece_bytes=2.0).needs(3)
        10.0
        """
        return self.static_bytes + pieces * self.piece_bytes

    def most(self, total: int) -> int:
        """Returns the number of pieces, at most ``total``, that fit in memory.

        >>> Device(seconds=1.0, memory_bytes=9.0, piece_bytes=2.0).most(12)
        4
        """
        room = self.memory_bytes - self.static_bytes
        if room < 0:
            return 0
        if total * self.piece_bytes <= room:
            return total
        return int(room / self.piece_bytes * (1 + 1e-12))


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Shares of devices, compared with even ones.

    Attributes:
        devices: Devices with the shares.
        pieces: Number of pieces of each device.
        even: Number of pieces of each device in even shares, within memory.
    """

    devices: tuple[Device, ...]
    pieces: tuple[int, ...]
    even: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds after which the last device finishes."""
        return makespan(self.pieces, [d.seconds for d in self.devices])

    @property
    def even_seconds(self) -> float:
        """Seconds after which the last device would finish with even shares."""
        return makespan(self.even, [d.seconds for d in self.devices])

    @property
    def gain(self) -> float:
        """Speed-up over even shares."""
        return self.even_seconds / self.seconds if self.seconds else 1.0

    @property
    def bound(self) -> float:
        """Largest possible gain of any shares; see ``speed_bound``."""
        return speed_bound([d.seconds for d in self.devices])

    def words(self) -> str:
        """Returns the shares, the gain and its bound in one line.

        >>> fast, slow = Device(name="a", seconds=1.0), Device(name="b", seconds=2.0)
        >>> balance(12, [fast, slow]).words()
        'shares 8 on a, 4 on b: 1.50× as fast as even shares (at most 1.50×)'
        """
        runs: dict[tuple[str, int], int] = {}
        for device, count in zip(self.devices, self.pieces, strict=True):
            runs[device.name, count] = runs.get((device.name, count), 0) + 1
        each = ", ".join(
            f"{count} on {f'each of {n} ' if n > 1 else ''}{name}"
            for (name, count), n in runs.items()
        )
        return f"shares {each}: {gain_words(self.gain, self.bound)}"


def gain_words(gain: float, bound: float) -> str:
    """Returns the text of a gain over even shares, and of its bound.

    >>> gain_words(1.18, 1.25)
    '1.18× as fast as even shares (at most 1.25×)'
    """
    return f"{gain:.2f}× as fast as even shares (at most {bound:.2f}×)"


def idle_note(
    what: str, pieces: Sequence[int], seconds: Sequence[float], pace: float
) -> str | None:
    """Returns the note on devices without pieces, with the reason; None without any.

    Args:
        what: Name of the devices in the plural, such as ``"replicas"``.
        pieces: Number of pieces of each device.
        seconds: Seconds of one piece on each device.
        pace: Seconds after which the last device finishes.

    >>> idle_note("replicas", (3, 0), (1.0, 2.0), 3.0)
    'replica 1 takes no micro-batch: shares asks for that, or its memory does'
    """
    idle = [rank for rank, count in enumerate(pieces) if not count]
    if not idle:
        return None
    one = len(idle) == 1
    takes, their, them = ("takes", "its", "it") if one else ("take", "their", "them")
    numbers = ", ".join(map(str, idle))
    said = f"{what.removesuffix('s') if one else what} {numbers} {takes} no micro-batch"
    if min(seconds[rank] for rank in idle) < pace:
        return f"{said}: shares asks for that, or {their} memory does"
    if sum(pieces) == 1:
        return f"{said}, as the step has only one. Plan without {them}"
    return (
        f"{said}: the others are done before. Give more micro-batches, or plan without "
        f"{them}"
    )


def speed_bound(seconds: Sequence[float]) -> float:
    """Returns the largest gain over even shares: Σw / (n · min w), with w the speeds.

    Even shares wait for the slowest device. Ideal shares keep all devices busy.

    Args:
        seconds: Seconds of one piece on each device.

    >>> speed_bound([1.0, 2.0])
    1.5
    """
    speed = math.fsum(1.0 / t for t in seconds)
    return speed * max(seconds) / len(seconds)


def balance(total: int, devices: Sequence[Device]) -> Balance:
    """Divides equal pieces among mixed devices, as fast as memory allows.

    The result is exact: no other integer shares that fit finish earlier.

    Args:
        total: Total number of pieces.
        devices: Devices that get the pieces; a slow device may get none.

    Raises:
        PlanError: A device has no memory for one piece, or all devices together have
            too little; names the missing bytes.

    >>> found = balance(
    ...     12,
    ...     [
    ...         Device(name="fast", seconds=1.0, memory_bytes=8.0, piece_bytes=1.5),
    ...         Device(name="slow", seconds=2.0, memory_bytes=16.0, piece_bytes=1.5),
    ...     ],
    ... )
    >>> found.pieces, found.even
    ((5, 7), (5, 7))
    """
    most = room_of(total, devices)
    alike = [1.0] * len(devices)
    return Balance(
        devices=tuple(devices),
        pieces=shares(total, [d.seconds for d in devices], most),
        even=shares(total, alike, most),
    )


def room_of(total: int, devices: Sequence[Device]) -> list[int]:
    """Returns how many pieces fit on each device.

    Args:
        total: Total number of pieces.
        devices: Devices that get the pieces.

    Raises:
        PlanError: A device has no memory for one piece, or all devices have too little.
    """
    problems = Problems("memory for shares", PlanError)
    most = [device.most(total) for device in devices]
    for i, device in enumerate(devices):
        if total and not most[i]:
            short = device.needs(1) - device.memory_bytes
            problems.add(
                f"device {i} ({device.name}) has no memory for one piece: it needs "
                f"{device.needs(1):.0f} bytes and has {device.memory_bytes:.0f}, "
                f"{short:.0f} short. Use smaller pieces (more micro-batches), save "
                "less for the backward pass (remat), shard more, or leave it out"
            )
    missing = total - sum(most)
    if missing > 0 and not problems:
        least = min(d.piece_bytes for d in devices)
        problems.add(
            f"all devices are too small: {sum(most)} pieces fit, but there are "
            f"{total}, {missing * least:.0f} bytes short. Use a smaller batch or more "
            "devices, or save less for the backward pass (remat)"
        )
    problems.raise_if_any()
    return most


def check_pieces(pieces: Sequence[int], total: int, devices: Sequence[Device]) -> None:
    """Refuses impossible shares from the user.

    Args:
        pieces: Number of pieces of each device.
        total: Total number of pieces.
        devices: Devices with these pieces.

    Raises:
        PlanError: Shares have the wrong number or sum, or do not fit on a device.
    """
    problems = Problems("shares", PlanError)
    if len(pieces) != len(devices):
        problems.add(
            f"got {count_text(len(pieces), 'share')} for "
            f"{count_text(len(devices), 'device')}. Give each one"
        )
    elif sum(pieces) != total or min(pieces, default=0) < 0:
        listed = ", ".join(map(str, pieces))
        problems.add(
            f"got {listed}, together {sum(pieces)}; expected numbers of at least 0 "
            f"that add up to {total}"
        )
    for i, (count, device) in enumerate(zip(pieces, devices, strict=False)):
        most = device.most(total)
        if count > most:
            short = device.needs(count) - device.memory_bytes
            problems.add(
                f"device {i} ({device.name}) got {count} pieces, but only {most} fit, "
                f"{short:.0f} bytes short. Give it at most {most}"
            )
    problems.raise_if_any()


def water_fill(weights: Sequence[float], most: Sequence[float]) -> tuple[float, ...]:
    """Solves Whale's Formula 1 exactly: proportional shares within bounds.

    ``L_i = min(most_i, level · w_i)``, where ``level`` makes them add up to 1 (Jia et
    al., 2022, section 3.3.1, formula 1). Of all shares that minimise the formula's ``Σ
    |L_i − w_i / Σw|``, these also finish first.

    Args:
        weights: Speed of each device, in any unit.
        most: Largest share that fits in each device's memory, as a fraction.

    Raises:
        PlanError: The bounds add up to less than 1, or a number is invalid.

    >>> [round(x, 4) for x in water_fill([2.0, 1.0], [1.0, 1.0])]
    [0.6667, 0.3333]
    >>> [round(x, 4) for x in water_fill([2.0, 1.0], [8 / 18, 16 / 18])]
    [0.4444, 0.5556]
    """
    _check_fractions(weights, most)
    # The device that is full first comes first; the others divide the rest.
    order = sorted(range(len(weights)), key=lambda i: most[i] / weights[i])
    result, left = [0.0] * len(weights), 1.0
    for place, i in enumerate(order):
        speed = math.fsum(weights[j] for j in order[place:])
        result[i] = min(most[i], left * (weights[i] / speed))
        left -= result[i]
    return tuple(result)


def _check_fractions(weights: Sequence[float], most: Sequence[float]) -> None:
    problems = Problems("water_fill", PlanError)
    for i, weight in enumerate(weights):
        if not (weight > 0 and math.isfinite(weight)):
            problems.add(f"weights[{i}] is {weight}; expected a number above 0")
    if len(most) != len(weights):
        problems.add(
            f"most has {count_text(len(most), 'entry')} for "
            f"{count_text(len(weights), 'device')}"
        )
    elif min(most, default=0.0) < 0:
        problems.add(f"most is {', '.join(map(str, most))}; expected numbers from 0")
    elif math.fsum(most) < 1 - 1e-12:
        problems.add(
            f"the devices hold at most {math.fsum(most):.6g} together, less than 1. "
            "Use more devices, or divide something smaller"
        )
    problems.raise_if_any()


def largest_remainder(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divides pieces in proportion to weights, and rounds by the largest remainders.

    Args:
        total: Total number of pieces.
        weights: Weight of each device. Of equal remainders, the first device gets more.

    >>> largest_remainder(12, [2.0, 1.0])
    (8, 4)
    >>> largest_remainder(10, [1.0, 1.0, 1.0])
    (4, 3, 3)
    """
    whole = math.fsum(weights)
    exact = [total * (w / whole) for w in weights]
    remainder = [int(x * (1 + 1e-12)) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: remainder[i] - exact[i])
    for i in order[: total - sum(remainder)]:
        remainder[i] += 1
    return tuple(remainder)


def micro_batch_ranges(shares: Sequence[int]) -> list[range]:
    """Returns the numbers of each replica's micro-batches.

    Args:
        shares: Number of micro-batches of each replica.

    >>> micro_batch_ranges([3, 0, 2])
    [range(0, 3), range(3, 3), range(3, 5)]
    """
    ends = [0, *itertools.accumulate(shares)]
    return [range(*pair) for pair in itertools.pairwise(ends)]


def shares(
    total: int, seconds: Sequence[float], most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Divides equal pieces of work so that the last device finishes soonest.

    The result is exact. Each piece goes to the device that would finish it first, which
    is optimal for pieces of one size. Of equal devices, the first gets more.

    Args:
        total: Number of pieces, 0 or more.
        seconds: Seconds of one piece on each device.
        most: Largest number of pieces that fits on each device; None for no limit.

    Returns:
        Number of pieces of each device; they add up to ``total``. A device may get 0.

    Raises:
        PlanError: The bounds allow fewer pieces than ``total``, or a number is invalid.

    >>> shares(12, [1.0, 2.0])
    (8, 4)
    >>> shares(12, [1.0, 2.0], most=[5, 12])
    (5, 7)
    """
    bounds = [total] * len(seconds) if most is None else list(most)
    _check(total, seconds, bounds)
    # Each device gets at least what it finishes in the ideal time, rounded down.
    result = _start(total, seconds, bounds)
    queue = [
        ((result[i] + 1) * t, i) for i, t in enumerate(seconds) if result[i] < bounds[i]
    ]
    heapq.heapify(queue)
    for _ in range(total - sum(result)):
        _, i = heapq.heappop(queue)
        result[i] += 1
        if result[i] < bounds[i]:
            heapq.heappush(queue, ((result[i] + 1) * seconds[i], i))
    return tuple(result)


def _check(total: int, seconds: Sequence[float], bounds: Sequence[int]) -> None:
    problems = Problems("shares", PlanError)
    if total < 0:
        problems.add(f"total is {total}; expected 0 or more")
    for i, t in enumerate(seconds):
        if not (t > 0 and math.isfinite(t)):
            problems.add(f"seconds[{i}] is {t}; expected a number above 0")
    if len(bounds) != len(seconds):
        problems.add(
            f"most has {count_text(len(bounds), 'entry')} for "
            f"{count_text(len(seconds), 'device')}"
        )
    elif sum(bounds) < total:
        listed = ", ".join(map(str, bounds))
        problems.add(
            f"the devices hold {sum(bounds)} pieces together ({listed}), but there are "
            f"{total}. Use smaller micro-batches, or more devices"
        )
    problems.raise_if_any()


def _start(total: int, seconds: Sequence[float], bounds: Sequence[int]) -> list[int]:
    """Returns a lower bound on each device's pieces in any optimal division."""
    speed = math.fsum(1.0 / t for t in seconds)
    if not speed:
        return [0] * len(seconds)
    # Minus one piece per device, the pieces of the ideal time exceed no optimal share.
    ideal = max(0, total - len(seconds)) / speed
    return [min(b, int(ideal / t)) for t, b in zip(seconds, bounds, strict=True)]


def even_shares(total: int, count: int) -> tuple[int, ...]:
    """Returns numbers of pieces as even as integers allow; the first have one more.

    >>> even_shares(8, 3)
    (3, 3, 2)
    """
    each, over = divmod(total, count)
    return tuple(each + (i < over) for i in range(count))


def makespan(pieces: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns the seconds after which the last device finishes."""
    return max((k * t for k, t in zip(pieces, seconds, strict=True)), default=0.0)


def weights_hash(leaves: Iterable[Tensor | LeafPlan]) -> str:
    """Returns a short hash of a model's parameters, by which its timings are found.

    Args:
        leaves: Parameters with paths and shapes, in any order. Their dtypes do not
            count.
    """
    text = json.dumps(sorted((leaf.path, leaf.shape) for leaf in leaves))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def corrections(kinds: Sequence[DeviceKind], weights: str) -> tuple[float, ...]:
    """Returns the measured time of a model over its predicted time, on each kind.

    Args:
        kinds: Kinds of the replicas.
        weights: ``weights_hash`` of the model.

    Returns:
        One ratio per kind. All are 1 unless the model was timed on every kind, as
        measured times cannot be compared with predicted ones.
    """
    result = []
    for kind in kinds:
        timed = [model for model in kind.timed_models if model.weights == weights]
        if not timed:
            return (1.0,) * len(kinds)
        result.append(timed[-1].seconds / timed[-1].predicted_seconds)
    return tuple(result)


def timing_note(kinds: Sequence[DeviceKind], weights: str) -> str:
    """Returns the note on the sources of the kinds' speeds."""
    names = dict.fromkeys(kinds)
    timed = {
        kind: [model for model in kind.timed_models if model.weights == weights]
        for kind in names
    }
    if not any(timed.values()):
        return _weights_note(list(names))
    if missing := [kind.display_name() for kind, result in timed.items() if not result]:
        return (
            f"shares: this model was not timed on {', '.join(missing)}, so no timing "
            "counts. Run whalejax calibrate --model there"
        )
    words = ", ".join(
        f"{kind.display_name()} {result[-1].seconds / result[-1].samples * 1e3:.3g} ms"
        for kind, result in timed.items()
    )
    return f"shares: by measured times of this model's own samples: {words} each"


def _weights_note(kinds: Sequence[DeviceKind]) -> str:
    own = [kind.display_name() for kind in kinds if kind.matmul_points]
    listed = [kind.display_name() for kind in kinds if not kind.matmul_points]
    if not listed:
        return "shares: by products and memory that were measured on every kind"
    weights = f"by the catalogue's efficiencies of {', '.join(listed)}"
    if own:
        weights += f", beside what was measured on {', '.join(own)}"
    return f"shares: {weights}, until a run measures"
