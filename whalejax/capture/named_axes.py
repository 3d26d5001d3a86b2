"""Axes that a model itself names: in collectives, layouts and metadata.

Collectives: code for ``jax.pmap`` runs on the samples of one device, and names the axis
over all devices, as in ``pmean(x, "batch")``. Here a loss is traced for all samples of
a micro-batch at once. So the axis has size 1, and a mean over it is the value itself,
which is already the mean over all samples.

Layouts: ``with_sharding_constraint`` names axes of the user's mesh. The plan's mesh may
lack these axes, and divides the work in another way. A plan's program omits such
layouts, and a note says so. Explicit axes, along which JAX itself determines the layout
of every value, are refused.

Metadata: ``nnx.vmap`` adds a dimension to every variable that it makes. It adds a name
to the metadata only if it is given one; otherwise the remaining names would describe
the wrong dimensions. The program shows which dimension was added, as the model reads
its elements one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
from jax.sharding import Mesh, NamedSharding

from whalejax import _compat
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import count_text
from whalejax.planner.model.graph import LOOPS, Graph, Op


Flat = Callable[..., list[Any]]
"""Function from flat leaves to a list of flat results."""


def traced_with_axes(
    trace: Callable[[Flat, Sequence[Any]], Any],
    function: Flat,
    arguments: Sequence[Any],
) -> tuple[Any, tuple[str, ...]]:
    """Returns the jaxpr of a function, and the unbound axes that it names.

    Args:
        trace: Function from a flat function and abstract arguments to the jaxpr.
        function: The user's flat function.
        arguments: Abstract arguments of ``function``.
    """
    names: tuple[str, ...] = ()
    while True:
        try:
            return trace(bound(function, names), arguments), names
        except NameError as error:
            name = _compat.unbound_axis(error)
            if name is None or name in names:
                raise
            names = (*names, name)
        except Exception as error:
            for name in names:
                error.add_note(
                    f'whalejax: the axis "{name}" stands for all samples and has size '
                    "1. pmean, psum, pmax, pmin and all_gather along it cover all "
                    "samples. Operations that need several members (ppermute, "
                    "all_to_all, axis_index_groups) have no meaning there: apply them "
                    "to the dimension of the samples"
                )
            raise


def bound(function: Flat, names: Sequence[str]) -> Flat:
    """Returns a function in which each of the named axes has size 1."""
    for name in names:
        function = _bound(function, name)
    return function


def _bound(function: Flat, name: str) -> Flat:
    def mapped(out: int | None) -> Any:
        return jax.vmap(
            function, in_axes=None, out_axes=out, axis_name=name, axis_size=1
        )

    def run(*leaves: Any) -> list[Any]:
        try:
            return list(mapped(None)(*leaves))
        except ValueError as error:
            if "out_axes is None" not in str(error):
                raise
        # A result that depends on the index along the axis gets a dimension of size 1.
        return [x[0] for x in mapped(0)(*leaves)]

    return run


_ON_DEVICES: Final = (None, "device", "unpinned_host")
"""Kinds of the memory in which values are computed."""


def only_fixes_layout(equation: Any) -> bool:
    """Returns whether an equation returns its operands, and only fixes their layout.

    Such equations are those of ``with_sharding_constraint``, and of ``device_put`` with
    a ``NamedSharding``.
    """
    if equation.primitive.name == "device_put":
        return all(
            isinstance(to, NamedSharding) and to.memory_kind in _ON_DEVICES
            for to in equation.params["devices"]
        )
    return bool(equation.primitive.name == "sharding_constraint")


def fixed_devices(jaxpr: Any) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yields the devices of each ``jax.shard_map`` of a loss, and its source line.

    Args:
        jaxpr: Jaxpr of the loss.
    """
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        mesh = equation.params.get("mesh")
        if equation.primitive.name == "shard_map" and isinstance(mesh, Mesh):
            yield tuple(mesh.devices.flat), _compat.line_text(equation)
        for inner in _compat.inner_jaxprs(equation):
            yield from fixed_devices(inner)


def constraint_notes(jaxpr: Any) -> list[str]:
    """Returns notes on the layouts that the loss fixes; see ``only_fixes_layout``.

    Args:
        jaxpr: Jaxpr of the loss.
    """
    result = [*_constraints(jaxpr)]
    if not result:
        return []
    params, line = result[0].params, _compat.line_text(result[0])
    spec = params["sharding"] if "sharding" in params else params["devices"][0]
    spec = getattr(spec, "spec", spec)
    call = "device_put" if "devices" in params else "with_sharding_constraint"
    count = len(result)
    layouts = count_text(count, "layout")
    are = "is" if count == 1 else "are"
    return [
        f"{layouts} of values that the model fixes by {call} (the "
        f"first: {spec} in {line}) {are} omitted: this plan chooses layouts itself. "
        "Choose what an axis shards by the metadata of parameters, or by "
        "wh.split(axis=...)"
    ]


_DIVIDES: Final = "the plan divides the work itself"
_EXPLICIT: Final = (
    "loss_fn asks for layouts along explicit mesh axes (out_sharding=, reshard), and "
    "programs with explicit axes are not supported: {what}. Remove these layouts, as "
    f"{_DIVIDES}. Choose what an axis shards by the metadata of parameters, or by "
    "wh.split(axis=...)"
)
_OTHER_KIND: Final = (
    "loss_fn names a mesh with explicit axes in {what}, and is traced without a layout "
    "along these axes. Make that mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
    "its number of axes, or remove the call: " + _DIVIDES
)
_OF_MESHES: Final = {
    "context mesh cannot be empty": "loss_fn calls jax.shard_map without a mesh, and "
    "the plan's own mesh is chosen after the loss is traced. Give the call mesh=, plan "
    f"and compile under jax.set_mesh(mesh), or remove jax.shard_map: {_DIVIDES}",
    "with_sharding_constraint requires a non-empty mesh": "loss_fn calls "
    "with_sharding_constraint with a PartitionSpec, and no mesh defines its axes. "
    f"Remove the call, as {_DIVIDES} and ignores the layout; or plan and compile "
    "under jax.set_mesh(mesh), with a mesh of any axes",
    "can only refer to Auto axes of the mesh": _OTHER_KIND.format(
        what="with_sharding_constraint"
    ),
    "in_specs passed to shard_map": _OTHER_KIND.format(what="jax.shard_map"),
    "should match the mesh passed to shard_map": _OTHER_KIND.format(
        what="jax.shard_map"
    ),
}
"""Our message by JAX's error text about a missing or unsuitable mesh."""

_OF_EXPLICIT: Final = (
    "when you are not under a mesh context is not allowed",
    "cannot contain axis names that are of type Auto or Manual",
)
"""JAX's error texts about layouts along axes that do not exist or are not explicit."""


def mesh_error_text(error: Exception) -> str:
    """Returns the message for JAX's error about the mesh of a loss.

    Args:
        error: Error that was raised while the loss was traced.

    Returns:
        The message; empty if the error has another cause.
    """
    given = str(error)
    if any(text in given for text in _OF_EXPLICIT):
        return _EXPLICIT.format(what=given.splitlines()[0].removesuffix("."))
    return next((to for text, to in _OF_MESHES.items() if text in given), "")


def refuse_explicit_axes(jaxpr: Any) -> None:
    """Refuses a program in which values are sharded along explicit axes.

    Args:
        jaxpr: Jaxpr of the loss as the user wrote it.

    Raises:
        WhaleError: A value is sharded along an explicit axis. The message has the
            first such value and the line that makes it.
    """
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        for variable in equation.outvars:
            if _compat.has_explicit_axes(variable.aval):
                what = f"{variable.aval} in {_compat.line_text(equation)}"
                raise WhaleError(_EXPLICIT.format(what=what))
        for inner in _compat.inner_jaxprs(equation):
            refuse_explicit_axes(inner)


def _constraints(jaxpr: Any) -> Iterator[Any]:
    for equation in _compat.open_jaxpr(jaxpr)[0].eqns:
        if only_fixes_layout(equation):
            yield equation
        if _compat.recursion(equation) != "opaque":
            for inner in _compat.inner_jaxprs(equation):
                yield from _constraints(inner)


Shape = tuple[int, ...]
Texts = tuple[str | None, ...]

_INDEXING = ("slice", "dynamic_slice", "split")


def aligned(graph: Graph, short: Mapping[str, int]) -> tuple[Graph, list[str]]:
    """Returns the graph with each metadata name at the dimension that it describes.

    Args:
        graph: Graph of the loss, in which the names are at the first dimensions.
        short: Number of missing names by path, for each weight whose metadata does not
            name all dimensions.

    Returns:
        The graph, and notes for the user.

    Raises:
        WhaleError: Nothing shows which dimensions have no name. The message lists all
            such weights.
    """
    if not short:
        return graph, []
    problems, notes = Problems("model"), list[str]()
    looped, indexed = _taken_singly(graph)
    tensors = list(graph.tensors)
    for t in graph.params:
        missing = short.get(t.path, 0)
        if not missing:
            continue
        said = (
            f"{t.path}: its metadata names {len(t.shape) - missing} of its "
            f"{len(t.shape)} dimensions {t.shape}"
        )
        stacks = (looped[t.id], looped[t.id] | indexed[t.id])
        result = next((dims for dims in stacks if len(dims) == missing), None)
        if result is None:
            problems.add(
                f"{said}, and nothing shows which of them has no name. nnx.vmap "
                "without a name for its dimension does this. Name each dimension, with "
                "None for one that has no name, or give "
                "transform_metadata={nnx.PARTITION_NAME: None} to nnx.vmap"
            )
            continue
        tensors[t.id] = replace(
            t,
            names=_align_to_unstacked_dims(result, t.names),
            pinned=_align_to_unstacked_dims(result, t.pinned),
            called=_align_to_unstacked_dims(result, t.called),
        )
        notes.append(
            f"{said}: they are taken for those besides dimension "
            f"{' and '.join(map(str, sorted(result)))}, which the model reads one by "
            "one as layers. Name that dimension, or declare that it has no name, with "
            "transform_metadata={nnx.PARTITION_NAME: None}"
        )
    problems.raise_if_any()
    return replace(graph, tensors=tuple(tensors)), notes


def _align_to_unstacked_dims(stacks: Collection[int], texts: Texts) -> Texts:
    own = iter(texts)
    return tuple(None if d in stacks else next(own) for d in range(len(texts)))


def _taken_singly(
    graph: Graph,
) -> tuple[defaultdict[int, set[int]], defaultdict[int, set[int]]]:
    """Returns the dimensions of each parameter whose elements are read one by one.

    The first mapping has those that loops read, the second those that indices read.
    Casts and transpositions before the read are followed.
    """
    # For each dimension of a value, the dimension of the parameter, or -1 without one.
    origin = {t.id: (t.id, tuple(range(len(t.shape)))) for t in graph.params}
    looped, indexed = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for op in graph.ops:
        if not op.operands or not op.results or op.operands[0] not in origin:
            continue
        leaf, dims = origin[op.operands[0]]
        before = graph.tensors[op.operands[0]].shape
        after = graph.tensors[op.results[0]].shape
        single = len(op.operands) == len(op.results) == 1
        if single and op.kind in LOOPS and after == before[1:]:
            looped[leaf].add(dims[0])
            origin[op.results[0]] = leaf, dims[1:]
        elif op.kind in _INDEXING:
            indexed[leaf] |= {dims[d] for d in _indexed(before, after)}
        elif single and sorted(before) == sorted(after):
            origin[op.results[0]] = leaf, _through(op, dims)
    for result in (*looped.values(), *indexed.values()):
        result.discard(-1)
    return looped, indexed


def _indexed(before: Shape, after: Shape) -> list[int]:
    if len(before) != len(after):
        return []
    cut = [
        d
        for d, sizes in enumerate(zip(before, after, strict=True))
        if len({*sizes}) > 1
    ]
    return cut if len(cut) == 1 and after[cut[0]] == 1 else []


def _through(op: Op, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the dimension of the parameter at each dimension of the result."""
    result = [-1] * len(dims)
    for factor in op.factors:
        ends = dict(factor.members)
        if factor.kind == "linked" and ends.keys() == {0, 1}:
            result[ends[1]] = dims[ends[0]]
    return tuple(result)
