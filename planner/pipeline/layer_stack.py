"""Finds the layers that equal pipeline stages divide.

They are the iterations of one scan over stacked parameters. The model of one stage is
the full model with fewer iterations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.memory.saved_tensors import CHEAP, SPREAD
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.model.graph import Graph, Op
from whalejax.planner.model.repeated_layers import stacked_loops
from whalejax.planner.plan_errors import DeviceCountError, PlanError
from whalejax.planner.sharding.layout import STAGE as STAGE
from whalejax.planner.sharding.layout import Spec
from whalejax.planner.sharding.offload_candidates import FORMS


NO_LAYERS = (
    "the model has no scan over stacked layers, which equal stages divide",
    "Write its layers as one scan (nnx.scan, nn.scan, jax.lax.scan), or leave the axis "
    "stage out",
)
"""Reason why a model cannot be cut into equal stages, and the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedLayers:
    """Scan over layers that stages divide.

    Attributes:
        position: Position of the scan in the program.
        paths: Paths of the parameters that the scan slices.
        length: Number of layers.
        carried: Ids of the tensors that a layer passes to the next.
        others: Other scans over layers, which only estimates divide among stages.
    """

    position: tuple[int, ...]
    paths: frozenset[str]
    length: int
    carried: tuple[int, ...]
    others: tuple[StackedLayers, ...] = ()

    @classmethod
    def of(cls, graph: Graph, *, every: bool = False) -> StackedLayers:
        """Returns the scan over the layers of a model.

        Args:
            graph: The captured loss.
            every: Whether stages divide all scans over layers, as no executor does;
                default: False.

        Raises:
            PlanError: The layers are not one scan over stacked parameters.
        """
        positions = stacked_loops(graph)
        if not positions:
            raise PlanError(". ".join(NO_LAYERS))
        first, depth = cls._at(graph, positions[0]), len(positions[0])
        apart = [
            position for position in positions if position[:depth] != first.position
        ]
        others = tuple(cls._at(graph, one) for one in apart) if every else ()
        return replace(first, others=others)

    def holds(self, position: tuple[int, ...]) -> bool:
        """Returns whether an operation at a position is inside one of the scans.

        Args:
            position: Position of the operation.
        """
        places = (self.position, *(other.position for other in self.others))
        return any(position[: len(place)] == place for place in places)

    @property
    def every_path(self) -> frozenset[str]:
        """Paths of the parameters that all scans slice."""
        return self.paths.union(*(other.paths for other in self.others))

    @classmethod
    def _at(cls, graph: Graph, position: tuple[int, ...]) -> StackedLayers:
        source = {t.id: t for t in graph.params}
        paths: dict[str, int] = {}
        carried: list[int] = []
        for op in graph.ops:
            if op.position[: len(position)] == position and op.position != position:
                break
            if op.kind in FORMS and op.operands and op.operands[0] in source:
                stack, other = (op.operands[0], op.results[0])
                if graph.tensors[stack].shape[:1] == graph.tensors[other].shape[:1]:
                    source[other] = source[stack]
            if op.position != position or not op.results:
                continue
            stack = op.operands[0] if op.operands else op.results[0]
            before, after = (
                graph.tensors[stack].shape,
                graph.tensors[op.results[0]].shape,
            )
            if len(before) == len(after) + 1 and before[1:] == after:
                if stack in source:
                    paths[source[stack].path] = source[stack].shape[0]
            else:
                carried += op.results
        return cls(
            position=position,
            paths=frozenset(paths),
            length=next(iter(paths.values())),
            carried=tuple(carried),
        )

    def of_stage(self, graph: Graph, layers: int) -> Graph:
        """Returns the model of one stage, with its number of layers.

        Args:
            graph: The captured loss.
            layers: Number of layers of the stage.
        """
        for other in self.others:
            graph = other.of_stage(graph, max(1, other.length * layers // self.length))
        dims = analyse_graph(graph).dims
        stacked = {t.id for t in graph.params if t.path in self.paths}
        stack = {dims.layouts[t][0] for t in stacked}
        depth, inside = len(self.position), set[int]()
        makers = {t: op for op in graph.ops for t in op.results}
        ops = []
        for op in graph.ops:
            within = op.position[:depth] == self.position and len(op.position) > depth
            if within:
                inside.update((*op.operands, *op.results))
                op = replace(op, trip=op.trip * layers // self.length)
            ops.append(_summing(op, makers, graph))
        tensors = tuple(
            replace(
                t,
                shape=tuple(
                    size * layers // self.length if atoms in stack else size
                    for size, atoms in zip(t.shape, dims.layouts[t.id], strict=True)
                ),
            )
            for t in graph.tensors
        )
        kept = tuple(
            replace(one, trip=one.trip * layers // self.length)
            if one.tensor in inside
            else one
            for one in graph.stacked
        )
        return replace(graph, ops=tuple(ops), tensors=tensors, stacked=kept)


def _summing(op: Op, makers: Mapping[int, Op], graph: Graph) -> Op:
    """Replaces a lookup of one element per row by a sum over the row, as stages run it.

    The sum fuses with the operations that make the rows, such as 32-bit logits, while a
    lookup needs the rows in memory. So the sum reads a value that is in memory anyway,
    such as a product's result. Other operations stay unchanged.
    """
    if op.kind != "gather":
        return op
    rows, indices, result = (graph.tensors[t] for t in (*op.operands, *op.results))
    one_of_each = (
        rows.differentiable
        and result.shape == (*rows.shape[:-1], 1)
        and indices.shape == (*result.shape, 1)
    )
    source = rows.id
    while one_of_each and source in makers and makers[source].kind in CHEAP:
        large = [t for t in makers[source].operands if not _spread(t, makers)]
        if len(large) != 1 or graph.tensors[large[0]].shape != rows.shape:
            break
        (source,) = large
    return replace(op, operands=(source, indices.id))


def _spread(tensor: int, makers: Mapping[int, Op]) -> bool:
    return tensor in makers and makers[tensor].kind in SPREAD


def check_devices(devices: int, stages: int, *, most: int) -> None:
    """Refuses a number of stages that does not divide the number of devices.

    Args:
        devices: Total number of devices.
        stages: Number of stages.
        most: Largest number of stages.

    Raises:
        PlanError: The number is impossible; names the numbers that are possible.
    """
    if devices % stages == 0:
        return
    near = [n for n in range(2, min(devices, most) + 1) if devices % n == 0]
    remedy = "no number of stages above 1 is possible. Use other devices, or no stages"
    if near:
        remedy = f"expected one of {', '.join(map(str, near))}"
    if stages <= devices:
        idle = (
            "leave some idle on purpose: allow_idle=True (whalejax plan --allow-idle)"
        )
        remedy += f", or {idle}" if near else f". Or {idle}"
    raise DeviceCountError(
        f"stage is {stages}, which does not divide the {count_text(devices, 'device')} "
        f"into equal stages; {remedy}"
    )


def devices_of_stage(cluster: Cluster, devices: int, stages: int) -> Cluster:
    """Returns the devices of one stage.

    Args:
        cluster: All devices.
        devices: Number of devices of a stage.
        stages: Number of stages.

    Raises:
        PlanError: Links do not join the devices in this way.
    """
    try:
        return cluster.part(devices)
    except WhaleError as error:
        raise PlanError(
            f"stage is {stages}, but {cluster.describe()} has no {stages} equal parts "
            f"of {count_text(devices, 'device')} with equal links. Use another number "
            "of stages, or of devices"
        ) from error


def of_stage(spec: Spec) -> Spec:
    """Returns a layout without the stage axis.

    >>> of_stage((("stage", "fsdp"), ("tensor",)))
    (('fsdp',), ('tensor',))
    """
    return tuple(tuple(a for a in axes if a != STAGE) for axes in spec)
