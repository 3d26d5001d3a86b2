"""Work of one device in one micro-batch of a run: FLOPs and bytes, not seconds.

The run's layout turns the rows and flows of the decoder's graph into kernels (sizes and
bytes on one device) and traffic (bytes on the wire by link). The module has no hardware
constants, so a fit computes the work once and evaluates it many times. ``step_model``
computes the time of many runs at once, so it takes parameters as arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from whalejax.estimates.decoder import (
    DROPOUT,
    IN_PLACE,
    PRODUCTS,
    REGIONS,
    SAVED_BY_NAME,
    SOFTMAX,
    DecoderSizes,
    Remat,
    decoder_graph,
    saved_shares,
)
from whalejax.estimates.published_run import PublishedRun
from whalejax.meshes.catalogue import CatalogueEntry
from whalejax.meshes.cluster import Cluster, cluster
from whalejax.planner.cost.operation_cost import (
    CostSetting,
    flow_cost,
    local_product,
    memory_traffic,
    row_hits,
)
from whalejax.planner.cost.row_builder import build_rows
from whalejax.planner.memory.saved_tensors import Residents, kept_bytes, residents
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.logical_dimensions import analyse
from whalejax.planner.plan_entries import Collective, CollectiveKind
from whalejax.planner.sharding.layout import Table
from whalejax.planner.sharding.operation_rows import OperationRows, Row


Array = np.ndarray
Axes = tuple[str, ...]
COPIES: Axes = ("context", "fsdp", "data")
SHARDS: Axes = ("context", "fsdp")
REPLICAS: Axes = ("data",)
GROUPS = (COPIES, SHARDS, REPLICAS)
"""Axes over which parameters are replicated, axes over which ZeRO-3 shards them, and
axes over which these shards are replicated.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameters:
    """One kind of parameters on a device of every run, as the computation uses them.

    Attributes:
        params: Number of parameters.
        copies: Number of devices that compute with the same parameters.
        shards: Number of ZeRO-3 shards of these parameters.
        levels: (Devices per node, nodes) by axes.
    """

    params: Array
    copies: Array
    shards: Array
    levels: dict[Axes, Array]

    def owners(self, zero: Array) -> Array:
        """Returns the number of devices over which ZeRO shards one copy."""
        whole = np.where(zero >= 1, self.copies, 1.0)
        owners: Array = np.where((zero >= 3) & (self.shards > 1), self.shards, whole)
        return owners


def link_waits(
    found: CatalogueEntry,
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns (base, hop) seconds inside a node or torus, and between these."""
    inner = found.torus.link if found.torus is not None else found.node
    outer = found.network or inner
    assert inner is not None and outer is not None
    return (
        (inner.base_seconds, inner.hop_seconds),
        (outer.base_seconds, outer.hop_seconds),
    )


EMBED, LAYER, HEAD = 0, 1, 2
"""Parts of a decoder: before its layers, one layer, and after the layers."""

VIEW_PASSES = 5
"""Passes of PyTorch over the gradient of a view that was written into. The gradient is
copied to the base's layout; the view's part is cloned, filled in a separate copy (two
passes), and copied back.
"""

UNFUSED_LOGIT_BYTES = 20
"""Bytes per logit, in float32, if the loss is not one fused kernel: the logits, a copy
shifted by a token, their log-probabilities, and the cotangents of the last two.
"""

_PLACE_OF = {"embed": EMBED, "residual": LAYER, "inner": LAYER}
_PLACE_OF |= {"experts": LAYER, "final": HEAD, "head": HEAD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Equal operations on one device in one micro-batch.

    Attributes:
        place: ``EMBED``, ``LAYER`` (the work of one layer) or ``HEAD``.
        m, k, n, batch: Sizes of the product; 1 without a product.
        product: Whether the operations are products.
        share: Fraction of the product that is computed.
        forward_bytes, backward_bytes: Memory traffic of each pass in bytes.
        gradients: Number of products, or passes, of the backward pass.
        count: Number of equal operations.
        attention: Whether the operations are in a fused attention kernel.
        scores: Whether the operations belong to attention's scores, without weights.
        weight: Whether the operations read a parameter.
        part: Index of the layer's product in ``PRODUCTS``, or -1.
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
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Equal collectives of one micro-batch, except those on parameters."""

    place: int
    forward: bool
    kind: CollectiveKind
    axes: tuple[str, ...]
    payload_bytes: float
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchWork:
    """Work and memory of one micro-batch on one device.

    Attributes:
        kernels, traffic: Kernels and collectives of the micro-batch.
        saved_bytes: Bytes of one layer's saved activations, by remat policy.
        head_bytes: Bytes of the largest temporaries around the loss.
    """

    kernels: tuple[Kernel, ...]
    traffic: tuple[Traffic, ...]
    saved_bytes: dict[Remat, float]
    head_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecoderAnalysis:
    graph: Graph
    dims: Dimensions
    rows: OperationRows
    residents: Residents


@functools.lru_cache(maxsize=256)
def _analyse_decoder(
    sizes: DecoderSizes, samples: int, compiled: bool, itemsize: int
) -> _DecoderAnalysis:
    dtype = "float32" if itemsize == 4 else "bfloat16"
    graph = decoder_graph(sizes, samples, dtype, itemsize)
    dims = analyse(graph)
    rows = build_rows(graph, dims, fuses=compiled)
    kept = residents(graph, dims, rows.weight, copies_kernels=False)
    return _DecoderAnalysis(graph=graph, dims=dims, rows=rows, residents=kept)


@functools.cache
def _profile() -> Cluster:
    result = cluster("h100:8")
    apart = dataclasses.replace(result.compiler, fuses_normalizations=False)
    return dataclasses.replace(result, compiler=apart)


def work_of(run: PublishedRun) -> MicroBatchWork:
    """Returns the work and memory of one micro-batch of a run."""
    # Layers are equal, so the graph has two; their number is divided out.
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
        4 if run.autocast else run.itemsize_bytes,
    )


@functools.lru_cache(maxsize=4096)
def _work(
    sizes: DecoderSizes,
    micro_batch: int,
    tensor: int,
    sequence_parallel: bool,
    context: int,
    expert: int,
    compiled: bool,
    itemsize: int,
    stream_itemsize: int,
) -> MicroBatchWork:
    result = _analyse_decoder(sizes, micro_batch * expert, compiled, itemsize)
    mesh = {"expert": expert, "context": context, "tensor": tensor}
    batch = frozenset(r.index for r in result.dims.batch)
    s = CostSetting(mesh, 1, _profile(), result.dims, batch)
    tables = _tables(result, sizes, sequence_parallel)
    places = [_PLACE_OF[name] for name in REGIONS]
    kernels = tuple(
        _kernel(
            row, part, tables[row.task_graph], places[row.task_graph], sizes.layers, s
        )
        for row, part in _with_parts(result.rows.ops)
        if row.product is not None or row.reads or row.writes
    )
    traffic = []
    for flow in result.rows.flows:
        here = flow.task_graph if not flow.source.weight else flow.uses[0].task_graph
        place = places[here]
        changes = flow_cost(flow, tables, s)
        for c in changes:
            traffic.append(
                Traffic(
                    place=place,
                    forward=c.phase == "forward",
                    kind=c.kind,
                    axes=c.axes,
                    payload_bytes=c.payload_bytes / _gathered_behind(c, changes, s),
                    count=c.count / (sizes.layers if place == LAYER else 1),
                )
            )
    saved = _saved(
        result, tables, s, sizes, micro_batch * itemsize, stream_itemsize // itemsize
    )
    beside = _eager_bytes(s, sizes, micro_batch, itemsize, sequence_parallel)
    saved["none"] += beside
    saved["selective"] += beside
    return MicroBatchWork(
        kernels=kernels,
        traffic=tuple(traffic),
        saved_bytes=saved,
        head_bytes=_logit_bytes(s, sizes, micro_batch, itemsize),
    )


def _gathered_behind(
    one: Collective, others: Sequence[Collective], s: CostSetting
) -> float:
    """Returns the number of shards of an all-to-all's value; 1 for other collectives.

    Frameworks exchange the shards; a compiler would gather them first.
    """
    if one.kind != "all-to-all":
        return 1.0
    axes = {
        axis
        for other in others
        if (other.kind, other.phase) == ("all-gather", one.phase)
        for axis in other.axes
    }
    return float(math.prod(s.mesh[axis] for axis in axes))


def _tables(
    found: _DecoderAnalysis, sizes: DecoderSizes, sequence_parallel: bool
) -> dict[int, Table]:
    """Returns the sharding of each region: Megatron's layout, in roles."""
    dims = found.dims
    leaves = {t.path: t.id for t in found.graph.tensors if t.path}

    def role(path: str, dim: int) -> tuple[int, ...]:
        atoms = dims.layouts[leaves[path]][dim]
        return atoms[:1]

    batch = tuple(r.index for r in dims.batch)
    sequence = role("tokens", 1)
    vocabulary = role("embed.table", 0)
    # After the router, the experts' slots replace the sequence.
    sent = [op.results[0] for op in found.graph.ops if op.kind == "dispatch"]
    places = dims.layouts[sent[0]][2][:1] if sent else ()
    base: dict[str, tuple[int, ...]] = {"context": sequence + places, "expert": batch}
    heads = role("layer.qkv", 1)
    wide = role("layer.down", 1 if sizes.experts else 0)
    # Ranks that share the sequence send their parts to the experts.
    shared = sequence + places if sequence_parallel else ()
    between: Table = {**base, "tensor": shared}
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


def _with_parts(rows: Sequence[Row]) -> Iterator[tuple[Row, int]]:
    """Yields rows with their index in ``PRODUCTS``, or -1."""
    inner = [REGIONS.index(name) for name in ("inner", "experts")]
    # Products with weights are in the order of PRODUCTS; attention has none.
    names = iter(name for name in PRODUCTS if name != "attention")
    for row in rows:
        if row.product is None or row.task_graph not in inner:
            yield row, -1
        elif any(slot.weight for slot in row.slots):
            yield row, PRODUCTS.index(next(names))
        else:
            yield row, PRODUCTS.index("attention")


def _kernel(
    row: Row, part: int, table: Table, place: int, layers: int, s: CostSetting
) -> Kernel:
    hits = row_hits(row, table, s)
    forward, backward = memory_traffic(row, hits, s)
    if row.kind == IN_PLACE:
        backward = forward * VIEW_PASSES
    elif row.kind == SOFTMAX:
        # Gradients are computed from the results, which are read again.
        backward += forward
    elif row.kind == DROPOUT:
        # A dropout mask has one byte per element, written and read.
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
        part=part,
    )


def _saved(
    found: _DecoderAnalysis,
    tables: dict[int, Table],
    s: CostSetting,
    sizes: DecoderSizes,
    sample_bytes: int,
    widened: int,
) -> dict[Remat, float]:
    """Returns the bytes of a layer's saved activations under each policy.

    ``sample_bytes`` has the bytes of one element of all samples of a micro-batch.
    ``widened`` says how many times wider the elements of the residual stream are.
    """
    residual, *inner = (REGIONS.index(n) for n in ("residual", "inner", "experts"))
    stream_like = ((), (sizes.seq,), (sizes.hidden,))
    # Operands from the stream are saved in its layout, and gathered again.
    kept = [
        dataclasses.replace(e, task_graph=residual)
        if e.task_graph in inner and _as_single(e.sizes) == stream_like
        else e
        for e in found.residents.saved
        if e.task_graph in (residual, *inner)
    ]
    # Operands of the stream's own operations have its width.
    wide = [
        widened
        if e.task_graph == residual and _as_single(e.sizes) == stream_like
        else 1
        for e in found.residents.saved
        if e.task_graph in (residual, *inner)
    ]
    nbytes = np.multiply(kept_bytes(kept, tables, s), wide) / sizes.layers
    layer = list(zip(kept, nbytes.tolist(), strict=True))
    everything = math.fsum(b for _, b in layer)
    scores = math.fsum(b for e, b in layer if _is_scores(e.sizes))
    parts = s.mesh["context"] * (s.mesh["tensor"] if tables[1].get("tensor") else 1)
    stream = 1.0 * sample_bytes * widened * sizes.seq * sizes.hidden / parts
    saved: dict[Remat, float] = {
        "none": everything,
        "selective": everything - scores,
        "full": stream,
    }
    results = _result_bytes(s, sizes, sample_bytes, stream)
    for remat in ("alternate_dots", *SAVED_BY_NAME):
        shares = saved_shares(remat, sizes)
        saved[remat] = stream + math.fsum(shares[n] * results[n] for n in PRODUCTS)
    return saved


def _logit_bytes(
    s: CostSetting, sizes: DecoderSizes, micro_batch: int, itemsize: int
) -> float:
    shards = s.mesh["tensor"] * s.mesh["context"]
    logits = micro_batch * sizes.seq * sizes.vocab / shards
    # A fused kernel needs the logits, twice their bytes more, and their cotangent.
    each = 4 * itemsize if sizes.fused_loss else UNFUSED_LOGIT_BYTES
    return float(logits * each)


def _eager_bytes(
    s: CostSetting, sizes: DecoderSizes, micro_batch: int, itemsize: int, shared: bool
) -> float:
    """Returns the bytes that a gated layer saves in addition without fused kernels.

    Each of two RMSNorms saves four more bytes per element: its input in float32 instead
    of 16 bits, and the normalized input. A gate saves two more of its four values,
    which a fused kernel recomputes.
    """
    if not (sizes.eager and sizes.gated):
        return 0.0
    tokens = micro_batch * sizes.seq / s.mesh["context"]
    norms = 2 * 4 * sizes.hidden / (s.mesh["tensor"] if shared else 1)
    gates = 2 * itemsize * sizes.ffn * max(1, sizes.topk) / s.mesh["tensor"]
    return float(tokens * (norms + gates))


def _result_bytes(
    s: CostSetting, sizes: DecoderSizes, sample_bytes: int, stream_bytes: float
) -> dict[str, float]:
    each = sample_bytes * sizes.seq / (s.mesh["tensor"] * s.mesh["context"])
    heads = each * sizes.head_dim
    return {
        "qkv": heads * (sizes.heads + 2 * sizes.kv_heads),
        "attention": heads * sizes.heads,
        "out": stream_bytes,
        "up": each * sizes.ffn * (1 + sizes.gated) * max(1, sizes.topk),
        "down": stream_bytes,
    }


def _as_single(sizes: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return ((), *sizes[1:])


def _is_scores(sizes: tuple[tuple[int, ...], ...]) -> bool:
    """Returns whether sizes are those of scores: sample, group, head, query, key."""
    return len(sizes) == 5 and sizes[3] == sizes[4] != ()


def wires(
    kind: CollectiveKind, payload_bytes: float, sizes: tuple[int, int]
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns bytes and steps of one collective, inside a node and between nodes.

    Args:
        kind: Kind of collective.
        payload_bytes: Bytes of the payload, as in ``collectives``.
        sizes: Number of participating devices inside a node, and number of nodes.

    Returns:
        (Bytes, steps) inside a node, and (bytes, steps) between nodes.
    """
    rounds = 2 if kind == "all-reduce" else 1
    result = []
    remaining = payload_bytes
    for size in sizes:
        result.append(
            (rounds * remaining * (size - 1) / size, float(rounds * (size - 1)))
        )
        if kind != "all-to-all":
            remaining /= size
    return result[0], result[1]


def levels_of(run: PublishedRun, axes: tuple[str, ...]) -> tuple[int, int]:
    """Returns how many devices of some axes are in a node, and how many nodes they use.

    Tensor ranks are neighbours, then context ranks, then data ranks, then pipeline
    stages. Experts are on some of the data ranks.
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
    return _split(math.prod(sizes[a] for a in axes), run.devices_per_node // stride)


def copies_of_experts(run: PublishedRun, axes: tuple[str, ...]) -> tuple[int, int]:
    """Returns ``levels_of`` for the devices along some axes that have the same experts.

    Args:
        run: The run.
        axes: Some of ``context``, ``fsdp`` and ``data``, as for other parameters.
    """
    inside, nodes = levels_of(run, axes)
    # Ranks with other experts are between them, along fsdp first.
    unlike = run.expert if "fsdp" in axes else max(1, run.expert // run.fsdp)
    return _split(max(1, inside * nodes // unlike), -(-inside // unlike))


def _split(total: int, fits: int) -> tuple[int, int]:
    inside = min(total, max(1, fits))
    while total % inside:
        inside -= 1
    return inside, total // inside


def arrays(kernels: list[tuple[int, Kernel]]) -> dict[str, np.ndarray]:
    """Returns the kernels of many runs as columns; ``run`` has the index of the run."""
    names = [f.name for f in dataclasses.fields(Kernel)]
    result = {"run": np.array([i for i, _ in kernels], dtype=int)}
    for name in names:
        result[name] = np.array([getattr(k, name) for _, k in kernels])
    return result
