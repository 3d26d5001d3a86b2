"""Adasum over the ranks of ``data``: its limits on a search, its costs and its notes.

Each rank of ``data`` computes its own gradients, and Adasum combines them. So gradients
are not sharded over ``data``, and all ranks have equal shares of the batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.cost.adasum_cost import DATA, Part, combining, node_size
from whalejax.planner.cost.collectives import axis_parts
from whalejax.planner.model.dimensions import Dimensions
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.repeated_layers import layer_axes
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Collective
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import shards
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafLayout


BUFFERS = 3
"""Number of copies of a device's gradients in memory while ranks combine: send buffer,
receive buffer, and results of Adasum's levels.
"""

PASSES = 12
"""Bytes that all levels of Adasum read and write, over the bytes of the gradients."""


def check_combine(
    request: Request,
    graph: Graph,
    cluster: Cluster,
    *,
    shares: object,
    others: Iterable[str] = (),
) -> None:
    """Refuses requests under which ranks cannot combine gradients by Adasum.

    Args:
        request: Options of the search.
        graph: Captured loss.
        cluster: Devices and links of the cluster.
        shares: Requested micro-batches of each replica, a rule for them, or None.
        others: Texts of other known problems of the request; default: none.

    Raises:
        PlanError: Ranks cannot combine; lists every problem with a remedy.
    """
    if request.combine == "mean":
        return
    problems = Problems("combine", PlanError)
    texts = (
        *_of_ranks(request, cluster),
        *_of_shares(request, cluster, shares),
        *_of_storage(request),
        *(
            request.refused_by_stages().values()
            if (request.mesh or {}).get("stage", 1) > 1
            else ()
        ),
        *_of_parameters(graph),
        *others,
    )
    for text in texts:
        problems.add(text)
    problems.raise_if_any()


def _of_ranks(request: Request, cluster: Cluster) -> Iterator[str]:
    way, mesh = request.combine, dict(request.mesh or {})
    ranks = mesh.get(DATA)
    others = math.prod(size for axis, size in mesh.items() if axis != DATA)
    most = request.num_devices // others
    if ranks == 1 or most < 2:
        which = "mesh= gives data 1 rank" if ranks == 1 else f"data is at most {most}"
        remedy = 'Give data at least 2, as in mesh={"data": 2}'
        if most < 2:
            few = request.num_devices < 2
            remedy = (
                "Use more devices"
                if few
                else "Give data at least 2, and other axes less"
            )
        devices = count_text(request.num_devices, "device")
        yield (
            f'combine is "{way}", and {which} on {devices}: one rank has nothing to '
            f"combine with. {remedy}, or leave combine out"
        )
    if way == "adasum_nodes" and len(cluster.nodes) < 2:
        yield (
            f'combine is "{way}", and all {cluster.num_devices} devices are on one '
            "node, whose ranks are averaged: nothing is left to combine. Choose "
            '"adasum"'
            ", or a cluster of several nodes"
        )


def _of_shares(request: Request, cluster: Cluster, shares: object) -> Iterator[str]:
    kinds = list(dict.fromkeys(node.kind.name for node in cluster.nodes))
    alike = shares is None or (isinstance(shares, str) and len(kinds) == 1)
    if alike and len(kinds) == 1:
        return
    mixed = len(kinds) > 1
    which = f"devices are {kinds}" if mixed else f"shares is {shares}"
    remedy = "Use devices of one kind" if mixed else "Leave shares out"
    yield (
        f'combine is "{request.combine}", and {which}: Adasum counts all ranks '
        "alike, so it takes ranks of one program with equally many samples. "
        f"{remedy}, or leave combine out"
    )


def _of_storage(request: Request) -> Iterator[str]:
    way = request.combine
    if way == "adasum_updates" and request.zero:
        yield (
            f'zero is {request.zero}, but with combine "{way}" each rank updates with '
            "the full optimizer state; expected 0. Give 0, or shard over the mesh axis "
            "fsdp"
        )
    elif (request.zero or 0) > 1:
        yield (
            f'zero is {request.zero}, but with combine "{way}" each rank has its full '
            "gradients; expected 0 or 1. Give one of these, or shard over the mesh "
            "axis fsdp"
        )
    if request.offload:
        yield (
            f"offload is {', '.join(request.offload)}, but ranks that combine by "
            "Adasum keep nothing in host memory. Leave offload or combine out"
        )


def _of_parameters(graph: Graph) -> Iterator[str]:
    trained = [t for t in graph.params if not t.frozen]
    unread = [t.path for t in graph.unread_weights(gradient=True)]
    if unread:
        some = ", ".join(unread[:3]) + " …" * (len(unread) > 3)
        yield (
            f"{len(unread)} of {len(trained)} trained parameters have no gradient, "
            "because the loss does not read them, or only behind stop_gradient: "
            f"{some}. They cannot be combined; leave them out of trainable="
        )
    blocks = [
        f"{graph.tensors[t].path} {list(graph.tensors[t].shape)}"
        for t, axes in layer_axes(graph).items()
        if axes is None
    ]
    if blocks:
        yield (
            f"{len(blocks)} of {len(trained)} trained parameters are read in blocks "
            f"that are not single layers: {', '.join(blocks[:3])}. Adasum combines "
            "each layer by itself. Read single layers, or equal blocks that together "
            "are all layers; or leave combine out"
        )
    odd = [f"{t.path} ({t.dtype})" for t in trained if t.dtype.startswith("complex")]
    if odd:
        yield (
            f"{len(odd)} of {len(trained)} trained parameters are complex numbers, for "
            f"which Adasum is not defined: {', '.join(odd[:3])}. Leave combine out"
        )


def may_combine(request: Request, mesh: Mapping[str, int], cluster: Cluster) -> bool:
    """Returns whether the ranks of a mesh can combine as requested."""
    if request.combine == "mean":
        return True
    ranks: int = mesh[DATA]
    if request.combine != "adasum_nodes":
        return ranks > 1
    parts = axis_parts((DATA,), mesh, cluster)
    return bool(parts) and parts[-1].level != cluster.levels[0]


def zero_levels(request: Request, levels: Sequence[int]) -> tuple[int, ...]:
    """Returns the ZeRO stages over ``data`` under which ranks can combine."""
    most = {"mean": 2, "adasum_updates": 0}.get(request.combine, 1)
    return tuple(level for level in levels if level <= most)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradientCombineCost:
    """Cost of combining gradients under one layout.

    Attributes:
        collectives: Collectives of one step that combine gradients, and that average
            loss, metrics and optimizer state.
        nbytes: Bytes of a device's send buffer, which has its gradients with padding.
    """

    collectives: tuple[Collective, ...] = ()
    nbytes: int = 0


class CombiningCosts:
    """Costs of combining the gradients or updates of all ranks, by layout.

    Args:
        graph, dims: Graph of the loss, and its logical dimensions.
        facts: Parameters of the model.
        cluster: Devices and links of the cluster.
        combine: Combination: ``mean`` or a form of Adasum.
    """

    def __init__(
        self,
        graph: Graph,
        dims: Dimensions,
        facts: LeafFacts,
        cluster: Cluster,
        combine: str,
    ) -> None:
        self._facts, self._cluster, self._combine = facts, cluster, combine
        asked = combine != "mean"
        self._averaged_bytes = averaged_bytes(graph, dims) if asked else 0
        self._axes = layer_axes(graph) if asked else {}
        self._known: dict[tuple[object, ...], GradientCombineCost] = {}

    def of(
        self, layouts: tuple[LeafLayout, ...], mesh: Mapping[str, int]
    ) -> GradientCombineCost:
        """Returns the cost under one layout.

        Args:
            layouts: Layout of each group of parameters.
            mesh: Sizes of the mesh axes.
        """
        if self._combine == "mean":
            return GradientCombineCost()
        key = (layouts, *mesh.items())
        if key not in self._known:
            result = self._combine_cost(layouts, mesh)
            mean = dataclasses.replace(
                result.collectives[0],
                kind="all-reduce",
                what="activation",
                payload_bytes=self._averaged_bytes,
            )
            collectives = (*result.collectives, mean)
            self._known[key] = dataclasses.replace(result, collectives=collectives)
        return self._known[key]

    def _combine_cost(
        self, layouts: Sequence[LeafLayout], mesh: Mapping[str, int]
    ) -> GradientCombineCost:
        parts, itemsize, state = list[Part](), 4, 0.0
        pairs = zip(self._facts.tensors, self._facts.group_of, strict=True)
        for tensor, place in pairs:
            (group, _), spec = self._facts.groups[place], layouts[place].param
            if not group.trained:
                continue
            axes = self._axes.get(tensor.id)
            if axes is None:
                parts.append(Part.of(tensor.shape, spec, 1, mesh))
            else:
                laid = axes.stacked_spec(spec, mesh)
                parts.append(Part.of(axes.stacked_shape, laid, axes.count, mesh))
            itemsize = max(itemsize, tensor.itemsize_bytes)
            state += group.optimizer_bytes / shards(spec, mesh)
        node = node_size(mesh, self._cluster, self._combine)
        result = combining(parts, mesh, node=node, itemsize_bytes=itemsize)
        nbytes = result[0].payload_bytes
        if self._combine == "adasum_updates" and state:
            mean = dataclasses.replace(
                result[0], kind="all-reduce", what="moments", payload_bytes=int(state)
            )
            result.append(mean)
        return GradientCombineCost(collectives=tuple(result), nbytes=nbytes)


def averaged_bytes(graph: Graph, dims: Dimensions) -> int:
    """Returns the bytes that ranks average once a step, in addition to gradients.

    They are the bytes of the loss and its other results, such as metrics and running
    statistics. Results with a value per sample, and results that are unchanged inputs,
    do not count.
    """
    batch = {role.index for role in dims.batch}
    made = {t for op in graph.ops for t in op.results}
    result = 0
    for t in made.intersection((graph.loss, *graph.whole)):
        tensor = graph.tensors[t]
        if not any(role in batch for atoms in dims.layouts[t] for role in atoms):
            result += math.prod(tensor.shape) * max(4, tensor.itemsize_bytes)
    return result


def combine_seconds(nbytes: int, cluster: Cluster) -> float:
    """Returns the seconds of the arithmetic of all levels of Adasum."""
    return float(cluster.slowest.elementwise_seconds(PASSES * nbytes, 0.0))


_FORMS = {
    "adasum": "gradients over {ranks} ranks of data",
    "adasum_nodes": "gradients over {groups} groups of {node} ranks of data, which are "
    "averaged first",
    "adasum_updates": "updates over {ranks} ranks of data: each rank computes its "
    "update from one shared optimizer state; after the step it is the mean of the "
    "ranks' states",
}


def combine_notes(plan: PlanData) -> list[str]:
    """Returns the notes of a plan whose ranks combine by Adasum."""
    if plan.combine == "mean":
        return []
    mesh = plan.axis_sizes
    ranks, node = mesh[DATA], node_size(mesh, plan.cluster, plan.combine)
    groups = ranks // node
    form = _FORMS[plan.combine].format(ranks=ranks, groups=groups, node=node)
    notes = [
        f"Adasum of {form}; statistics over the batch are those of each rank's own "
        "samples, and the order of ranks affects the result"
    ]
    if groups & (groups - 1):
        which = "update" if plan.combine == "adasum_updates" else "gradient"
        notes.append(
            f"{groups} is no power of two, so some levels of Adasum leave one {which} "
            "without a partner. It stays unchanged there, and counts at the next "
            "level as much as the combined ones"
        )
    if plan.combine == "adasum_updates":
        notes.append(
            "checkpoints store one optimizer state, the mean of the ranks' states, "
            "and runs under any plan can resume from them"
        )
    return notes
