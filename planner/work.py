"""What one device does in one micro-batch of a run, before any clock looks at it.

The rows and flows of the decoder's graph, under the tables that the run's layout
means, become kernels (sizes and bytes on one device) and traffic (bytes on the wire by
link). No constant of any hardware is in here, so that work is computed once and priced
as often as a fit asks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

import numpy as np

from whalejax.meshes.cluster import Cluster, cluster
from whalejax.planner.collectives import CollectiveKind
from whalejax.planner.cost import (
    Setting,
    flow_cost,
    local_product,
    memory_traffic,
    row_hits,
)
from whalejax.planner.decoder import (
    DROPOUT,
    IN_PLACE,
    REGIONS,
    SOFTMAX,
    Decoder,
    decoder_graph,
)
from whalejax.planner.dimensions import Dimensions, analyse
from whalejax.planner.graph import Graph
from whalejax.planner.layout import Table
from whalejax.planner.memory import Residents, kept_bytes, residents
from whalejax.planner.rows import Row, Rows
from whalejax.planner.runs import Run
from whalejax.planner.views import build_rows


EMBED, LAYER, HEAD = 0, 1, 2
"""Places of a decoder: before its layers, one of them, and behind them."""

VIEW_PASSES = 5
"""Reads and writes of a gradient behind a view that was written into, in PyTorch: it is
copied to the base's layout, the view's part cloned, filled in a copy of its own (two),
and copied back."""

_PLACE_OF = {"embed": EMBED, "residual": LAYER, "inner": LAYER}
_PLACE_OF |= {"experts": LAYER, "final": HEAD, "head": HEAD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Equal operations on one device in one micro-batch.

    Attributes:
        place: ``EMBED``, ``LAYER`` or ``HEAD``; of a layer for one layer.
        m, k, n, batch: sizes of the product, all 1 where it is none.
        product: it is one.
        share: part of it that is done.
        forward_bytes, backward_bytes: through memory.
        gradients: how many products, or passes, its backward is.
        count: how many.
        attention: it is in a fused attention kernel.
        scores: it belongs to attention's scores, without weights.
        weight: it reads a parameter.
    """

    place: int
    product: bool
    m: float
    k: float
    n: float
    batch: float
    share: float
    forward_bytes: float
    backward_bytes: float
    gradients: int
    count: float
    attention: bool
    scores: bool
    weight: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Equal collectives of one micro-batch, but for those on parameters."""

    place: int
    forward: bool
    kind: CollectiveKind
    axes: tuple[str, ...]
    payload_bytes: float
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch on one device.

    Attributes:
        kernels, traffic: see there.
        saved_bytes: for each rematerialization, activations that one layer keeps.
        head_bytes: largest temporaries around the loss.
    """

    kernels: tuple[Kernel, ...]
    traffic: tuple[Traffic, ...]
    saved_bytes: dict[str, float]
    head_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Analysed:
    graph: Graph
    dims: Dimensions
    rows: Rows
    residents: Residents


@functools.lru_cache(maxsize=256)
def _analysed(sizes: Decoder, samples: int, compiled: bool, itemsize: int) -> _Analysed:
    dtype = "float32" if itemsize == 4 else "bfloat16"
    graph = decoder_graph(sizes, samples, dtype, itemsize)
    dims = analyse(graph)
    rows = build_rows(graph, dims, fuses=compiled)
    kept = residents(graph, dims, rows.weight, copies_kernels=False)
    return _Analysed(graph=graph, dims=dims, rows=rows, residents=kept)


@functools.cache
def _profile() -> Cluster:
    """Any machine whose compiler merges and scatters: frameworks do it by hand."""
    return cluster("h100:8")


def work_of(run: Run) -> Work:
    """The work of a run."""
    # Layers are alike, so that those of two say all; the trip count is divided out.
    sizes = dataclasses.replace(run.sizes, layers=2)
    return _work(
        sizes,
        run.micro_batch,
        run.tensor,
        run.sequence_parallel,
        run.context,
        run.expert,
        run.framework.compiled,
        run.itemsize_bytes,
    )


@functools.lru_cache(maxsize=4096)
def _work(
    sizes: Decoder,
    micro_batch: int,
    tensor: int,
    sequence_parallel: bool,
    context: int,
    expert: int,
    compiled: bool,
    itemsize: int,
) -> Work:
    found = _analysed(sizes, micro_batch * expert, compiled, itemsize)
    mesh = {"expert": expert, "context": context, "tensor": tensor}
    batch = frozenset(r.index for r in found.dims.batch)
    s = Setting(mesh, 1, _profile(), found.dims, batch)
    tables = _tables(found, sizes, sequence_parallel)
    places = [_PLACE_OF[name] for name in REGIONS]
    kernels = tuple(
        _kernel(row, tables[row.task_graph], places[row.task_graph], sizes.layers, s)
        for row in found.rows.ops
        if row.product is not None or row.reads or row.writes
    )
    traffic = []
    for flow in found.rows.flows:
        here = flow.task_graph if not flow.source.weight else flow.uses[0].task_graph
        place = places[here]
        for c in flow_cost(flow, tables, s):
            traffic.append(
                Traffic(
                    place=place,
                    forward=c.phase == "forward",
                    kind=c.kind,
                    axes=c.axes,
                    payload_bytes=c.payload_bytes,
                    count=c.count / (sizes.layers if place == LAYER else 1),
                )
            )
    saved, head = _saved(found, tables, s, sizes, micro_batch * itemsize)
    return Work(
        kernels=kernels, traffic=tuple(traffic), saved_bytes=saved, head_bytes=head
    )


def _tables(
    found: _Analysed, sizes: Decoder, sequence_parallel: bool
) -> dict[int, Table]:
    """What each region shards: Megatron's layout, said in roles."""
    dims = found.dims
    leaves = {t.path: t.id for t in found.graph.tensors if t.path}

    def role(path: str, dim: int) -> tuple[int, ...]:
        atoms = dims.layouts[leaves[path]][dim]
        return atoms[:1]

    batch = tuple(r.index for r in dims.batch)
    sequence = role("tokens", 1)
    vocabulary = role("embed.table", 0)
    # Behind the router, the places at the experts are what the sequence was.
    sent = [op.results[0] for op in found.graph.ops if op.kind == "dispatch"]
    places = dims.layouts[sent[0]][2][:1] if sent else ()
    base: dict[str, tuple[int, ...]] = {"context": sequence + places, "expert": batch}
    heads = role("layer.qkv", 1)
    wide = role("layer.down", 1 if sizes.experts else 0)
    between: Table = {**base, "tensor": sequence if sequence_parallel else ()}
    by_region: dict[str, Table] = {
        "embed": {**base, "tensor": vocabulary},
        "residual": between,
        "final": between,
        "inner": {**base, "tensor": heads if sizes.experts else heads + wide},
        "experts": {
            "context": places,
            "expert": role("layer.up", 0) if sizes.experts else (),
            "tensor": wide,
        },
        "head": {
            **base,
            "tensor": vocabulary if sizes.tied else role("head.kernel", 1),
        },
    }
    return {index: by_region[name] for index, name in enumerate(REGIONS)}


def _kernel(row: Row, table: Table, place: int, layers: int, s: Setting) -> Kernel:
    hits = row_hits(row, table, s)
    forward, backward = memory_traffic(row, hits, s)
    if row.kind == IN_PLACE:
        backward = forward * VIEW_PASSES
    elif row.kind == SOFTMAX:
        # Gradients are made of what it gave, which is read again.
        backward += forward
    elif row.kind == DROPOUT:
        # What is dropped is a byte for each element, written and read.
        mask = forward / 2 / row.results[0].itemsize_bytes
        forward, backward = forward + mask, backward + mask
    product = row.product
    m, k, n, batch = (1.0, 1.0, 1.0, 1.0)
    gradients = int(backward > 0)
    if product is not None:
        m, k, n, batch = local_product(product, hits, s)
        gradients = product.left_gradient + product.right_gradient
    weighed = any(slot.weight for slot in row.slots)
    return Kernel(
        place=place,
        product=product is not None,
        m=m,
        k=k,
        n=n,
        batch=batch,
        share=product.share if product is not None else 1.0,
        forward_bytes=forward,
        backward_bytes=backward,
        gradients=gradients,
        count=row.count / (layers if place == LAYER else 1),
        attention=row.fused and product is not None,
        scores=not weighed and any(_is_scores(slot.sizes) for slot in row.slots),
        weight=weighed,
    )


def _saved(
    found: _Analysed,
    tables: dict[int, Table],
    s: Setting,
    sizes: Decoder,
    sample_bytes: int,
) -> tuple[dict[str, float], float]:
    """Activations that a layer keeps under each policy, and the loss's temporaries."""
    inside = {REGIONS.index(name) for name in ("residual", "inner", "experts")}
    kept = found.residents.saved
    nbytes = kept_bytes(kept, tables, s)
    layer = [(e, b / sizes.layers) for e, b in zip(kept, nbytes, strict=True)]
    layer = [(e, b) for e, b in layer if e.task_graph in inside]
    everything = math.fsum(b for _, b in layer)
    scores = math.fsum(b for e, b in layer if _is_scores(e.sizes))
    parts = s.mesh["context"] * (s.mesh["tensor"] if tables[1].get("tensor") else 1)
    stream = 1.0 * sample_bytes * sizes.seq * sizes.hidden / parts
    products = [e for e, _ in layer if e.task_graph != REGIONS.index("residual")]
    dots = math.fsum(b for e, b in layer if e in products and not _is_scores(e.sizes))
    saved = {
        "none": everything,
        "selective": everything - scores,
        "dots": dots + stream,
        "full": stream,
    }
    # The logits, in float32 for the loss, and their cotangent.
    parts = s.mesh["tensor"] * s.mesh["context"]
    logits = (sample_bytes + 2 * sample_bytes) * sizes.seq * sizes.vocab / parts
    return saved, logits + sample_bytes * sizes.seq * sizes.vocab / parts


def _is_scores(sizes: tuple[tuple[int, ...], ...]) -> bool:
    """Sample, group, head, query, key: the last two are the sequence."""
    return len(sizes) == 5 and sizes[3] == sizes[4] != ()


def wires(
    kind: CollectiveKind, payload_bytes: float, sizes: tuple[int, int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bytes on the wire and steps of one collective, inside a node and between nodes.

    Args:
        kind: the collective.
        payload_bytes: as in ``collectives``.
        sizes: devices that take part inside a node, and nodes.

    Returns:
        (bytes, steps) for the two levels.
    """
    rounds = 2 if kind == "all-reduce" else 1
    found = []
    remaining = payload_bytes
    for size in sizes:
        found.append(
            (rounds * remaining * (size - 1) / size, float(rounds * (size - 1)))
        )
        if kind != "all-to-all":
            remaining /= size
    return found[0], found[1]


def levels_of(run: Run, axes: tuple[str, ...]) -> tuple[int, int]:
    """How many devices of some axes share a node, and over how many nodes they lie.

    Tensor ranks are neighbours, then context ranks, then data ranks (experts are some
    of these), then pipeline stages.
    """
    sizes = {
        "tensor": run.tensor,
        "context": run.context,
        "expert": run.expert,
        "fsdp": run.fsdp,
        "data": run.data,
        "stage": run.stages,
    }
    stride = 1
    for axis in ("tensor", "context", "fsdp", "data", "stage"):
        if axis in axes or (axis == "fsdp" and "expert" in axes):
            break
        stride *= sizes[axis]
    total = math.prod(sizes[a] for a in axes)
    inside = min(total, max(1, run.devices_per_node // stride))
    while total % inside:
        inside -= 1
    return inside, total // inside


def arrays(kernels: list[tuple[int, Kernel]]) -> dict[str, np.ndarray]:
    """Kernels of many runs as columns; ``run`` is the index of each one's."""
    names = [f.name for f in dataclasses.fields(Kernel)]
    found = {"run": np.array([i for i, _ in kernels], dtype=int)}
    for name in names:
        found[name] = np.array([getattr(k, name) for _, k in kernels])
    return found
