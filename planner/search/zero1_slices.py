"""ZeRO-1 for replicas with unequal shares: each keeps a slice of the optimizer state.

If a parameter has a divisible dimension, each replica keeps and updates an equal slice
of its state, whatever the replica's share of the micro-batches. Then all gather the
parameters. State that an optimizer needs unsharded is replicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import gigabytes
from whalejax.planner.balance.shares import micro_batch_ranges
from whalejax.planner.cost.collectives import axis_parts, collective_seconds
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import Collective, LeafPlan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.layout import extend_spec, shards


DATA = "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices of the optimizer's state.

    Attributes:
        leaves: Parameters with the layout of their state.
        state_bytes: Bytes of the optimizer state on a device.
        whole_bytes: Bytes on a device if every replica kept all of the state.
        gather: Collective that gathers the parameters, and its seconds.
    """

    leaves: tuple[LeafPlan, ...]
    state_bytes: int
    whole_bytes: int
    gather: tuple[Collective, float]

    def note(self, replicas: int) -> str:
        """Returns the note on the saved memory."""
        return (
            f"ZeRO-1: each of {replicas} replicas keeps and updates a slice of the "
            f"optimizer's state, {gigabytes(self.state_bytes)} a device and not "
            f"{gigabytes(self.whole_bytes)}; then they gather the parameters, "
            f"{gigabytes(self.gather[0].payload_bytes)} a step"
        )


def sliceable(request: Request) -> frozenset[str]:
    """Returns the paths of the parameters whose state can be divided into slices.

    Args:
        request: Options of the search.
    """
    return request.sliced() if request.sliced is not None else frozenset()


def check_zero(request: Request) -> None:
    """Checks the ZeRO level of replicas with unequal shares.

    Args:
        request: Options of the search.

    Raises:
        PlanError: The level would shard gradients, or the optimizer or offload leaves
            no state to slice.
    """
    if not request.zero:
        return
    if request.zero > 1:
        raise PlanError(
            f"zero is {request.zero}, and replicas with shares of their own add up "
            "whole gradients. Give zero=1, which cuts the optimizer's state, or plan "
            "for devices of one kind, without shares="
        )
    if request.offload:
        raise PlanError(
            f"zero is 1 and offload is {', '.join(request.offload)}: slices of the "
            "optimizer's state lie in the devices' own memory. Leave one of them out"
        )
    if not sliceable(request):
        raise PlanError(
            "zero is 1, and this optimizer has no state that it updates element by "
            "element (norms over a parameter, as in LAMB, need it as a whole): there "
            "is nothing to cut between replicas. Leave zero out, or take another "
            "optimizer"
        )


def with_slices(request: Request, replicas: int) -> Request:
    """Returns the request for one replica that keeps a slice of the state.

    Args:
        request: Request for a replica that keeps all of the state.
        replicas: Number of replicas that divide the state.
    """
    paths = sliceable(request)
    by_path = {
        path: nbytes // replicas if path in paths else nbytes
        for path, nbytes in request.optimizer.by_path.items()
    }
    state = dataclasses.replace(request.optimizer, by_path=by_path)
    return dataclasses.replace(request, optimizer=state, offload=())


def sliced(plan: PlanData, cluster: Cluster, replicas: int, request: Request) -> Slices:
    """Divides the state of a plan's parameters into slices.

    Args:
        plan: Plan of one replica.
        cluster: Cluster of all replicas.
        replicas: Number of replicas.
        request: Request with the bytes of the full state.

    Raises:
        PlanError: No parameter has a dimension that the number of replicas divides.
    """
    mesh = {DATA: replicas, **plan.axis_sizes}
    paths = sliceable(request)
    leaves = tuple(_cut(leaf, mesh, paths) for leaf in plan.leaves)
    if leaves == plan.leaves:
        raise PlanError(
            f"zero is 1, and no parameter whose optimizer state can be cut has a "
            f"dimension that {replicas} replicas divide. Leave zero out, or ask for "
            "another number of replicas"
        )
    gathered = sum(
        leaf.nbytes // shards(leaf.param_spec, mesh) for leaf in leaves if leaf.trained
    )
    gather = Collective(
        kind="all-gather",
        axes=(DATA,),
        phase="update",
        what="parameter",
        payload_bytes=gathered,
        count=1,
    )
    parts = axis_parts((DATA,), mesh, cluster)
    return Slices(
        leaves=leaves,
        state_bytes=_state_bytes(leaves, mesh, request),
        whole_bytes=_state_bytes(plan.leaves, mesh, request),
        gather=(gather, collective_seconds(gather.kind, gathered, parts)),
    )


def _cut(leaf: LeafPlan, mesh: Mapping[str, int], paths: Collection[str]) -> LeafPlan:
    """Returns a leaf with its state sharded along the longest divisible dimension."""
    if leaf.path not in paths:
        return leaf
    dims = sorted(range(len(leaf.shape)), key=lambda dim: -leaf.shape[dim])
    spec = extend_spec(leaf.param_spec, leaf.shape, DATA, mesh, dims)
    return dataclasses.replace(leaf, optimizer_spec=spec)


def _state_bytes(
    leaves: Collection[LeafPlan], mesh: Mapping[str, int], request: Request
) -> int:
    state = request.optimizer
    held: int = state.other_bytes
    for leaf in leaves:
        held += state.by_path.get(leaf.path, 0) // shards(leaf.optimizer_spec, mesh)
    return held


def slices_of(plan: PlanData, node: int) -> tuple[slice, ...]:
    """Implements ``Plan.batch_slices``."""
    if not is_whole(node, 0):
        raise PlanError(
            f"node is {short_repr(node)}; expected the number of a node, from 0"
        )
    if not plan.shares:
        raise PlanError(
            "every device of this plan takes a part of each micro-batch, so nodes have "
            "no micro-batches of their own. A compiled step's batch_rows says which "
            "samples a process gives"
        )
    counts = [node.count for node in plan.cluster.nodes]
    if not 0 <= node < len(counts):
        raise PlanError(
            f"node is {node}; the plan is for {len(counts)} nodes, numbered from 0. Of "
            "processes that are no nodes, step.batch_rows() gives the samples"
        )
    size = plan.num_devices // len(plan.shares)
    start, end = sum(counts[:node]), sum(counts[: node + 1])
    mine = micro_batch_ranges(plan.shares)[start // size : -(-end // size)]
    total = plan.num_micro_batches
    return tuple(slice(m, None, total) for numbers in mine for m in numbers)
