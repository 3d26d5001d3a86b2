"""Whale's Formula 1 and Algorithm 1 as in the paper, for comparison with ``shares``.

They are from Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous
GPUs", USENIX ATC 2022, section 3.3.1. The planner uses ``shares``, which is exact. This
module closes the gaps of the paper as follows:

- A peak is a device with too little memory for its load, a valley one with room. A peak
  gives away only its excess, as more would overload the valley needlessly. If one
  valley cannot take all of it, the next valley takes the rest.
- A device without room for one more sample is no longer a valley.
- Shares are integers, rounded by largest remainders before memory is considered.
- Memory has a constant part and a part per sample. In the paper, all memory grows with
  the load, as if the constant part were 0.

The algorithm moves as much of a peak's excess as fits to the least busy device. So its
shares may take longer than the optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whalejax.planner.balance.shares import (
    Device,
    balance,
    largest_remainder,
    room_of,
)
from whalejax.planner.plan_errors import PlanError


def formula_1(loads: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the objective of Formula 1: Σ |L_i − DF_i / ΣDF|, with DF the weights.

    Args:
        loads: Share of each device as a fraction; they add up to 1.
        weights: FLOP/s or speed of each device, in any unit.

    >>> round(formula_1([4 / 9, 5 / 9], [2.0, 1.0]), 4)
    0.4444
    """
    whole = math.fsum(weights)
    return math.fsum(abs(x - w / whole) for x, w in zip(loads, weights, strict=True))


def algorithm_1(total: int, devices: Sequence[Device]) -> tuple[int, ...]:
    """Balances load within memory as in the paper, with its gaps closed.

    Args:
        total: Number of samples of the global batch.
        devices: Devices of one TaskGraph; 1 / ``seconds`` stands for their FLOP/s.

    Returns:
        Number of samples of each device.

    Raises:
        PlanError: A device has no memory for one sample, or all devices together have
            too little; names the missing bytes.

    >>> def device(flops, gigabytes):
    ...     return Device(
    ...         seconds=1 / flops, memory_bytes=gigabytes * 1e9, piece_bytes=1.5e9
    ...     )
    >>> algorithm_1(12, [device(2.0, 8), device(1.0, 16)])
    (5, 7)
    >>> algorithm_1(12, [device(2.0, 80), device(1.0, 80)])
    (8, 4)
    """
    most = room_of(total, devices)
    loads = list(largest_remainder(total, [1 / d.seconds for d in devices]))

    def memory(i: int) -> float:
        return devices[i].needs(loads[i]) / devices[i].memory_bytes

    def busy(i: int) -> tuple[float, float]:
        return loads[i] * devices[i].seconds, memory(i)

    oom = {i for i, load in enumerate(loads) if load > most[i]}
    free = set(range(len(loads))) - oom
    while oom and free:
        # Of equal devices the first is chosen, so the result is deterministic.
        peak = max(sorted(oom), key=memory)
        valley = min(sorted(free), key=busy)
        moved = min(loads[peak] - most[peak], most[valley] - loads[valley])
        if moved < 1:
            free.remove(valley)
            continue
        loads[peak] -= moved
        loads[valley] += moved
        if loads[peak] <= most[peak]:
            oom.remove(peak)
    return tuple(loads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Uneven shards of one dimension, as Whale's ``split`` gives mixed devices.

    Attributes:
        sizes: Size of each device's shard; the sizes add up to the dimension.
        padded: Stored size on every device, as shards of one program have one shape.
        gain: Speed-up over even shards, without collectives.
        bound: Largest possible gain of any shards.
    """

    sizes: tuple[int, ...]
    padded: int
    gain: float
    bound: float


def uneven_shards(size: int, seconds: Sequence[float], *, multiple: int = 1) -> Shards:
    """Divides a dimension in proportion to the speed of devices, as near as possible.

    Every device stores as much as the largest shard, and computes only its own shard.

    Args:
        size: Size of the dimension.
        seconds: Seconds of each device for the full dimension, or for any equal part.
        multiple: Divisor of every shard's size, such as a head's width; default: 1.

    Raises:
        PlanError: ``multiple`` does not divide the dimension, or a time is invalid.

    >>> uneven_shards(12, [1.0, 2.0])
    Shards(sizes=(8, 4), padded=8, gain=1.5, bound=1.5)
    """
    if size % multiple:
        raise PlanError(
            f"a dimension of {size} cannot be divided into multiples of {multiple}. "
            "Use a multiple that divides it"
        )
    pieces = size // multiple
    shards = balance(pieces, [Device(seconds=t) for t in seconds])
    sizes = [count * multiple for count in shards.pieces]
    return Shards(
        sizes=tuple(sizes), padded=max(sizes), gain=shards.gain, bound=shards.bound
    )
