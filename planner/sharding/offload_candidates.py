"""Finds what may be offloaded: values of checkpointed regions, and parameters.

The planner counts their bytes, and the lowering moves them. The module also computes
the transfer time that does not overlap with computation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.planner.model.graph import LOOPS, Graph, Op


MOST_READERS = 2
"""Largest number of regions that read an offloaded value. Each region needs a copy, as
decoder layers do of the encoder's output.
"""


FORMS = ("convert_element_type", "reshape")
"""Operations on full parameters that run on slices on the device instead, if the
parameters are in host memory.
"""


def hosts_known(cluster: Cluster) -> bool:
    """Returns whether the cluster gives size and transfer rate of host memory."""
    kinds = cluster.kinds
    return all(k.host_memory_bytes and k.host_link_bytes_per_second for k in kinds)


def exposed_seconds(nbytes: Any, bytes_per_second: float, compute_seconds: Any) -> Any:
    """Returns the seconds of transfers that do not overlap with computation.

    Args:
        nbytes: Bytes to or from the host; may be an array.
        bytes_per_second: Rate of the link between a device and its host.
        compute_seconds: Seconds of the pass in which they are transferred.
    """
    return np.maximum(0.0, nbytes / bytes_per_second - compute_seconds)


def waiting_values(graph: Graph) -> dict[int, int]:
    """Returns the tensors that are in host memory if a plan offloads activations.

    They are differentiable inputs of checkpointed regions, and the values that the
    regions' policies save. Values outside regions, and values that all iterations of a
    loop read, stay on the device.

    Args:
        graph: Captured loss.

    Returns:
        Number of offloaded copies by tensor id: one for each region that reads the
        value, and one if a policy saves it.
    """
    moves, reads = _movable(graph), _reads_again(graph)
    maker: dict[int, Op] = {}
    readers: dict[int, set[int]] = {}
    values: dict[int, int] = {}
    # Branches run unchanged, with the checkpointed regions inside them. So do calls
    # that sort rows, which reshape their operands and results.
    whole = {op.position for op in graph.ops if op.kind in ("while", "cond", "reshape")}
    for op in graph.ops:
        if any(op.position[:n] in whole for n in range(1, len(op.position), 2)):
            continue
        for t in op.operands if op.remat is not None and op.chunks == 1 else ():
            made = maker.get(t)
            wanted = moves[t] and (op.remat, t) in reads
            if wanted and made is not None and _is_region_input(made, op):
                readers.setdefault(t, set()).add(op.remat or 0)
        for t in op.results:
            maker[t] = op
            if op.kept and moves[t] and (op.remat, t) in reads:
                values[t] = 1
    for t, regions in readers.items():
        if len(regions) <= MOST_READERS:
            values[t] = values.get(t, 0) + len(regions)
    return values


def sliced_leaves(graph: Graph) -> frozenset[int]:
    """Returns the parameters that only loops over layers read, one slice at a time.

    They may be in host memory, from which each iteration fetches its slices. Parameters
    whose slices are vectors are left out, as they need separate transfers and save
    little. So are parameters whose slices enter an inner loop or branch: compilers
    would copy or slice them in host memory, which they cannot.

    Args:
        graph: Captured loss.

    Returns:
        Tensor ids of the parameters.
    """
    leaf_of = {t.id: t.id for t in graph.params}
    slice_of: dict[int, int] = {}
    sliced: set[int] = set()
    whole: set[int] = set()
    for op in graph.ops:
        for t in op.operands:
            before = graph.tensors[t].shape
            after = [graph.tensors[r].shape for r in op.results]
            alone = len(op.operands) == len(after) == 1
            inner = op.kind in LOOPS and (op.kind != "scan" or after == [before[1:]])
            if t in slice_of and inner:
                whole.add(slice_of[t])
            elif t in slice_of and op.kind in FORMS:
                slice_of[op.results[0]] = slice_of[t]
            leaf = leaf_of.get(t)
            if leaf is None:
                continue
            if op.kind in LOOPS and not after:
                continue
            if alone and op.kind in LOOPS and after[0] == before[1:]:
                sliced.add(leaf)
                slice_of[op.results[0]] = leaf
            elif alone and op.kind in FORMS and after[0][:1] == before[:1]:
                leaf_of[op.results[0]] = leaf
            else:
                whole.add(leaf)
    whole.update(leaf_of[t] for t in graph.whole if t in leaf_of)
    leaves = sliced - whole
    return frozenset(t for t in leaves if len(graph.tensors[t].shape) > 2)


def _reads_again(graph: Graph) -> set[tuple[int | None, int]]:
    """Returns the (region, tensor) pairs that the backward pass reads."""
    result: set[tuple[int | None, int]] = set()
    again = graph.runs_again()
    for op, runs in zip(graph.ops, again, strict=True):
        slots = op.operands + op.results
        result.update((op.remat, slots[slot]) for slot in op.saves)
        if runs:
            result.update((op.remat, t) for t in op.operands)
    return result


def _movable(graph: Graph) -> list[bool]:
    """Returns whether each tensor is computed, differentiable and no vector."""
    weight = graph.weight_tensors()
    data = [t.kind == "batch" for t in graph.tensors]
    for op in graph.ops:
        if any(data[t] for t in op.operands):
            for t in op.results:
                data[t] = True
    return [
        t.kind == "value"
        and t.differentiable
        and len(t.shape) > 1
        and data[t.id]
        and not weight[t.id]
        for t in graph.tensors
    ]


def _is_region_input(maker: Op, reader: Op) -> bool:
    """Returns whether a region reads an outside value of each iteration."""
    if maker.remat == reader.remat and maker.kind not in LOOPS:
        return False
    if maker.kind in LOOPS:
        inside = reader.position[: len(maker.position)] == maker.position
        return maker.remat != reader.remat and (inside or maker.trip == reader.trip)
    return maker.trip == reader.trip
