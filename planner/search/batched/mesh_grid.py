"""Frames and cases, as arrays: whole meshes around the cells that ``cells`` prices.

A cell fixes what happens inside a pipeline stage; a frame adds how many stages and
replicas there are, how parameters are stored, the schedule, and which axis lies on
which link. A case adds what is kept, computed again and moved to host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from whalejax.planner.search.batched.layout_variants import Array
from whalejax.planner.sharding.layout import GRID_AXES, divisors


SCHEDULES = ("1f1b", "1f1b-ahead", "gpipe", "interleaved")
"""Schedules in the order in which ties are broken."""

CHUNKS = (2, 3, 4, 6, 8)
"""Parts of the model on each stage that interleaving tries."""


def orders() -> tuple[tuple[str, ...], ...]:
    """Mesh axes outermost first: the usual order, and each other axis innermost."""
    rest = [a for a in GRID_AXES if a != "tensor"]
    moved = [tuple(a for a in GRID_AXES if a != axis) + (axis,) for axis in rest]
    return (GRID_AXES, *moved)


ORDERS = orders()


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Columns over frames, or over cases; all arrays are alike.

    Attributes:
        cell: index into the priced columns.
        stage, data, fsdp: sizes of those axes.
        micro_batches: in a step, of one pipeline; of all where replicas take shares.
        schedule: index into ``SCHEDULES``.
        chunks: parts of the model on each stage.
        order: index into ``ORDERS``.
        ring: attention over ``context`` exchanges in a ring.
        remat: index of a combination of policies.
        zero: level over ``data``.
        offload: a bit for each of ``OFFLOADS``.
    """

    cell: Array
    stage: Array
    data: Array
    fsdp: Array
    micro_batches: Array
    schedule: Array
    chunks: Array
    order: Array
    ring: Array
    remat: Array
    zero: Array
    offload: Array

    def __len__(self) -> int:
        return len(self.cell)

    def take(self, chosen: Array) -> Frames:
        """Some of them, by mask or by index."""
        return Frames(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    def with_options(
        self, remat: Sequence[int], zero: Sequence[int], offload: Sequence[int]
    ) -> Frames:
        """Every frame under every combination of options, frame by frame."""
        table = np.array(list(itertools.product(remat, zero, offload))).reshape(-1, 3)
        columns = {
            f.name: np.repeat(getattr(self, f.name), len(table)) for f in fields(self)
        }
        for index, name in enumerate(("remat", "zero", "offload")):
            columns[name] = np.tile(table[:, index], len(self))
        return Frames(**columns)


def stacked(many: Sequence[Frames]) -> Frames:
    """Several one behind the other."""
    return Frames(
        **{
            f.name: np.concatenate([getattr(one, f.name) for one in many])
            for f in fields(Frames)
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What frames may be.

    Attributes:
        num_devices: of the whole mesh.
        global_batch: samples of a step.
        layers: that stages divide.
        fixed: sizes of axes, as far as the user says.
        micro_batches: fixed, or None; of all replicas where they take shares.
    """

    num_devices: int
    global_batch: int
    layers: int
    fixed: Mapping[str, int]
    micro_batches: int | None


def frames_of(
    cells: Array, sizes: Mapping[str, Array], bounds: Bounds, *, shares: bool = False
) -> Frames:
    """Every frame around some cells.

    Args:
        cells: their indices.
        sizes: ``samples``, ``expert``, ``context`` and ``tensor`` of each.
        bounds: what frames may be.
        shares: replicas take different numbers of micro-batches, so that the batch
            divides by one replica's; ``micro_batches`` are then those of all replicas.
    """
    inner = sizes["expert"] * sizes["context"] * sizes["tensor"]
    found: list[tuple[Array, ...]] = []
    stages = [p for p in divisors(bounds.num_devices) if p <= bounds.layers]
    for stage in stages:
        whole = bounds.num_devices % (inner * stage) == 0
        rest = bounds.num_devices // np.maximum(1, inner * stage)
        for fsdp in divisors(bounds.num_devices):
            fits = whole & (rest % fsdp == 0)
            data = rest // fsdp
            each = sizes["samples"] * sizes["expert"] * fsdp
            each = each * (1 if shares else data)
            fits &= (bounds.global_batch % np.maximum(each, 1) == 0) & (data > 0)
            parts = bounds.global_batch // np.maximum(each, 1)
            if bounds.micro_batches is not None:
                fits &= parts == bounds.micro_batches
            fits &= _obeys(bounds.fixed, stage, data, fsdp, sizes)
            if fits.any():
                here = np.flatnonzero(fits)
                same = np.ones(len(here), dtype=np.int64)
                found.append(
                    (cells[here], stage * same, data[here], fsdp * same, parts[here])
                )
    if not found:
        return _frames(*(np.zeros(0, dtype=np.int64) for _ in range(5)))
    return _frames(*(np.concatenate(c) for c in zip(*found, strict=True)))


def _obeys(
    fixed: Mapping[str, int],
    stage: int,
    data: Array,
    fsdp: int,
    sizes: Mapping[str, Array],
) -> Array:
    found = np.ones(len(data), dtype=bool)
    mesh = {"stage": stage, "data": data, "fsdp": fsdp, **sizes}
    for axis, size in fixed.items():
        found &= np.asarray(mesh[axis]) == size
    return found


def _frames(
    cell: Array, stage: Array, data: Array, fsdp: Array, parts: Array
) -> Frames:
    zero = np.zeros(len(cell), dtype=np.int64)
    return Frames(
        cell=cell,
        stage=stage,
        data=data,
        fsdp=fsdp,
        micro_batches=parts,
        schedule=zero,
        chunks=zero + 1,
        order=zero,
        ring=zero,
        remat=zero,
        zero=zero,
        offload=zero,
    )


def _schedules(frames: Frames, layers: int) -> Iterator[tuple[int, int, Array]]:
    """Schedules beside the first: index, chunks, and frames that allow it."""
    several = frames.stage > 1
    for index, name in enumerate(SCHEDULES[1:], start=1):
        for chunks in CHUNKS if name == "interleaved" else (1,):
            fits = several & (frames.stage * chunks <= layers)
            if name == "interleaved":
                fits &= frames.micro_batches % frames.stage == 0
            yield index, chunks, fits


def scheduled(frames: Frames, layers: int) -> Frames:
    """Frames under every schedule that their stages and micro-batches allow."""
    return stacked(
        [
            frames,
            *(
                _with(frames.take(fits), schedule=index, chunks=chunks)
                for index, chunks, fits in _schedules(frames, layers)
            ),
        ]
    )


def _differs(frames: Frames, sizes: Mapping[str, Array]) -> dict[int, Array]:
    """Orders beside the first, and the frames whose devices they place differently."""
    mesh = {"stage": frames.stage, "data": frames.data, "fsdp": frames.fsdp}
    mesh |= {a: sizes[a][frames.cell] for a in ("expert", "context", "tensor")}
    found = {}
    for index, order in enumerate(ORDERS[1:], start=1):
        other = np.zeros(len(frames), dtype=bool)
        for axis in GRID_AXES[GRID_AXES.index(order[-1]) + 1 :]:
            other |= mesh[axis] > 1
        found[index] = other & (mesh[order[-1]] > 1)
    return found


def ordered(frames: Frames, sizes: Mapping[str, Array]) -> Frames:
    """Frames with every order of their axes that differs."""
    return stacked(
        [
            frames,
            *(
                _with(frames.take(differs), order=index)
                for index, differs in _differs(frames, sizes).items()
            ),
        ]
    )


def expansions(
    frames: Frames,
    sizes: Mapping[str, Array],
    layers: int,
    *,
    schedules: bool,
    only: str | None = None,
    chunks: Sequence[int] = CHUNKS,
) -> int:
    """How many frames ``ordered``, ``ringed`` and ``scheduled`` make of these.

    Args:
        frames: before all three.
        sizes: of the cells.
        layers: that stages divide.
        schedules: whether they are scheduled.
        only: the one schedule that is allowed, if there is one.
        chunks: into how many parts stages may interleave.
    """
    count = np.ones(len(frames), dtype=np.int64)
    for differs in _differs(frames, sizes).values():
        count += differs
    count *= 1 + (sizes["context"][frames.cell] > 1)
    if schedules:
        first = only in (None, SCHEDULES[0])
        each = np.where(frames.stage > 1, int(first), 1)
        for index, parts, fits in _schedules(frames, layers):
            each += fits * (only in (None, SCHEDULES[index]) and parts in (1, *chunks))
        count *= each
    return int(count.sum())


def ringed(frames: Frames, context: Array) -> Frames:
    """Frames with ring attention beside gathered keys, where the sequence is cut."""
    several = frames.take(context[frames.cell] > 1)
    return stacked([frames, _with(several, ring=1)])


def _with(frames: Frames, **values: int) -> Frames:
    columns = {f.name: getattr(frames, f.name) for f in fields(frames)}
    for name, value in values.items():
        columns[name] = np.full(len(frames), value, dtype=np.int64)
    return Frames(**columns)
