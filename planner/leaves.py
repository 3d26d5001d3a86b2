"""Layouts of the parameters: as computed with, as stored, and of what follows them.

Storage is a second table beside the compute tables: ZeRO and FSDP shard what is kept
(parameters, gradients, optimizer state) over axes on which the computation splits the
batch. Logical dimensions are tried in one order for all parameters, those that cover
most bytes first, so that the outcome reads like a table of rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whalejax.planner.dimensions import Dimensions, Layout
from whalejax.planner.graph import Graph, Tensor
from whalejax.planner.layout import Spec, Table, extend_spec, spec_of
from whalejax.planner.plan import LeafPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafFacts:
    """What the search needs of every parameter, worked out once.

    Attributes:
        tensors: the parameters.
        layouts, sizes: their atoms.
        homes: the TaskGraph that reads each first.
        storage: roles in the order in which storage tries them.
        dims_in_order: for each parameter, its dimensions in that order.
        role_names: for each parameter, names of the roles of each dimension.
    """

    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]
    sizes: tuple[Layout, ...]
    homes: tuple[int, ...]
    storage: tuple[int, ...]
    dims_in_order: tuple[tuple[int, ...], ...]
    role_names: tuple[tuple[tuple[str, ...], ...], ...]

    @property
    def nbytes(self) -> tuple[int, ...]:
        """Bytes of each parameter."""
        return tuple(t.nbytes for t in self.tensors)

    @classmethod
    def of(cls, graph: Graph, dims: Dimensions, weight: Sequence[bool]) -> LeafFacts:
        """Collect the facts.

        Args:
            graph: the captured loss.
            dims: its logical dimensions.
            weight: for every tensor, whether it depends on parameters alone.
        """
        tensors = graph.params
        homes = _homes(graph, weight)
        covered: Counter[int] = Counter()
        for t in tensors:
            for role in {r for atoms in dims.layouts[t.id] for r in atoms}:
                if not dims.roles[role].unshardable:
                    covered[role] += t.nbytes
        storage = tuple(role for role, _ in covered.most_common())
        rank = {role: place for place, role in enumerate(storage)}
        return cls(
            tensors=tensors,
            layouts=tuple(dims.layouts[t.id] for t in tensors),
            sizes=tuple(dims.sizes[t.id] for t in tensors),
            homes=tuple(homes.get(t.id, 0) for t in tensors),
            storage=storage,
            dims_in_order=tuple(_order(t, dims.layouts[t.id], rank) for t in tensors),
            role_names=tuple(
                tuple(
                    tuple(dims.roles[r].name for r in atoms)
                    for atoms in dims.layouts[t.id]
                )
                for t in tensors
            ),
        )


def _homes(graph: Graph, weight: Sequence[bool]) -> dict[int, int]:
    """The TaskGraph that first computes with each parameter, through casts."""
    homes: dict[int, int] = {}
    for op in reversed(graph.ops):
        passed = all(weight[t] for t in op.results)
        for t in op.operands:
            if weight[t]:
                home = homes.get(op.results[0]) if passed and op.results else None
                homes[t] = op.task_graph if home is None else home
    return homes


def _order(tensor: Tensor, layout: Layout, rank: Mapping[int, int]) -> tuple[int, ...]:
    """Dimensions that storage may shard: pinned to an axis first, then by role."""
    pins = {d for d, axis in enumerate(tensor.pinned) if axis in ("fsdp", "data")}
    usable = [d for d, atoms in enumerate(layout) if atoms and atoms[0] in rank]
    return tuple(sorted(usable, key=lambda d: (d not in pins, rank[layout[d][0]])))


def plan_leaves(
    facts: LeafFacts,
    tables: Mapping[int, Table],
    mesh: Mapping[str, int],
    zero: int,
) -> tuple[LeafPlan, ...]:
    """Lay out every parameter.

    Args:
        facts: what is known of the parameters.
        tables: compute table of each TaskGraph.
        mesh: axis sizes.
        zero: level over ``data``: 0, 1 or 2.
    """
    found = []
    for i, tensor in enumerate(facts.tensors):
        compute = spec_of(
            facts.layouts[i], facts.sizes[i], tables[facts.homes[i]], mesh
        )
        shape, order = tensor.shape, facts.dims_in_order[i]
        param: Spec = extend_spec(compute, shape, "fsdp", mesh, order)
        owned: Spec = extend_spec(param, shape, "data", mesh, order)
        found.append(
            LeafPlan(
                path=tensor.path,
                shape=shape,
                dtype=tensor.dtype,
                roles=facts.role_names[i],
                compute_spec=compute,
                param_spec=param,
                gradient_spec=owned if zero >= 2 else param,
                optimizer_spec=owned if zero >= 1 else param,
            )
        )
    return tuple(found)
