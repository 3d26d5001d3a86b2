"""Whale's Formula 1 and Algorithm 1, as in the paper, with their gaps closed.

Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs", USENIX ATC
2022, section 3.3.1. The planner takes its shares from ``shares``, which is exact; this
module serves for comparison. The gaps in the paper are closed as follows.

- A peak is a device with too little memory for its load, a valley one with room. A peak
  gives away only its excess: more would overload the valley needlessly. If one valley
  cannot take all of it, the next valley takes the rest.
- A device without room for one more sample is no longer a valley.
- Shares are integers, rounded by largest remainders before memory is considered.
- Memory has a constant part and one per sample. The paper scales all of it with the
  load, which is the case of no constant part.

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
    """Computes the objective of Formula 1: Σ |L_i − DF_i / ΣDF|, DF the weights.

    Args:
        loads: Share of each device; they add up to 1.
        weights: FLOP/s, or speed, of each device.

    >>> round(formula_1([4 / 9, 5 / 9], [2.0, 1.0]), 4)
    0.4444
    """
    whole = math.fsum(weights)
    return math.fsum(abs(x - w / whole) for x, w in zip(loads, weights, strict=True))


def algorithm_1(total: int, devices: Sequence[Device]) -> tuple[int, ...]:
    """Balances load within memory as in the paper, with the gaps closed as above.

    Args:
        total: Samples of the global batch.
        devices: Devices of one TaskGraph; 1 / ``seconds`` stands for their FLOP/s.

    Returns:
        Samples of each device.

    Raises:
        PlanError: Some device cannot store one sample, or all together too few; names
            the missing bytes.

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
        # Of equals the first, for a deterministic result.
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
    """Uneven shards of one dimension, which Whale's ``split`` gives mixed devices.

    Attributes:
        sizes: Size of each device's shard; the sizes add up to the dimension.
        padded: Stored size on every device: shards of one program have one shape.
        gain: Speed-up over even shards, without collectives.
        bound: Largest possible gain of any shards.
    """

    sizes: tuple[int, ...]
    padded: int
    gain: float
    bound: float


def uneven_shards(size: int, seconds: Sequence[float], *, multiple: int = 1) -> Shards:
    """Divides a dimension in proportion to the speed of devices, as near as possible.

    Every device stores the largest shard's size, and computes only its own.

    Args:
        size: Size of the dimension.
        seconds: Seconds of each device for the full dimension, or for any equal part.
        multiple: Divisor of every shard size, such as a head's width.

    Raises:
        PlanError: ``multiple`` does not divide the dimension, or a time is invalid.

    >>> uneven_shards(12, [1.0, 2.0])
    Shards(sizes=(8, 4), padded=8, gain=1.5, bound=1.5)
    """
    if size % multiple:
        raise PlanError(
            f"a dimension of {size} has no shards in multiples of {multiple}. Use a "
            "multiple that divides it"
        )
    pieces = size // multiple
    shards = balance(pieces, [Device(seconds=t) for t in seconds])
    sizes = [count * multiple for count in shards.pieces]
    return Shards(
        sizes=tuple(sizes), padded=max(sizes), gain=shards.gain, bound=shards.bound
    )
