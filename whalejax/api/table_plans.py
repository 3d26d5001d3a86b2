"""``wh.plan_tables`` and ``wh.count_lookups``: tables of a model, found and placed.

The tables are found in the program of the loss. They are placed on the devices; what is
left of the loss is planned like any other, with the vectors that are looked up as a
part of its batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np
import optax

from whalejax.adapters.base import Adapter, adapt
from whalejax.api.plan_request import PlanRequest
from whalejax.api.plan_settings import parsed_cluster
from whalejax.capture.batch import aval_of, check_batch
from whalejax.meshes.checks import Arguments, is_array, is_whole, shown
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.errors import PlanError
from whalejax.planner.plan.plan import Plan
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.ranks import Ranks
from whalejax.planner.tables.table import Table
from whalejax.tables.dense import dense_loss, dense_model
from whalejax.tables.plan import TablesPlan, cut_program
from whalejax.tables.recognize import NO_ID, TableProgram
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.tables.wide_ids import check_32_bits
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.argument_checks import check_optimizer


RUNNABLE_SPLITS: Final = ("whole", "rows", "columns", "replicate")
"""Ways of storing a table that a step runs."""


@without_mesh
def plan_tables(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    rows: SparseOptimizer,
    optimizer: optax.GradientTransformation | None = None,
    cluster: Cluster | str | None = None,
    splits: Collection[str] = RUNNABLE_SPLITS,
    together: Sequence[Sequence[str]] = (),
    pins: Mapping[str, int | str] | None = None,
    counts: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    trainable: Any = None,
) -> TablesPlan:
    """Finds the embedding tables of a model and decides where they are stored.

    A table is a trained parameter of two dimensions that the loss only looks up, as
    ``table[ids]``, ``jnp.take`` and ``nnx.Embed`` do, by integer ids that follow from
    the batch. Everything else is planned as by ``wh.plan``, over the axes ``data`` and
    ``fsdp``.

    Args:
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: An NNX module, a Linen module's variables or any pytree; abstract leaves
            will do.
        batch: The global batch, abstract or real, samples along dimension 0.
        rows: How rows of tables change: ``wh.sparse_optimizer(...)``.
        optimizer: Optimizer of all other parameters, from optax.
        cluster: A cluster, its text such as ``"h100:8"``, or None for the devices of
            this process.
        splits: Ways of storing a table that may be used: some of ``"whole"``,
            ``"rows"``, ``"columns"`` and ``"replicate"``.
        together: Groups of tables that must be on one device, by their paths.
        pins: What you fix, by the path of a table: its device, or one of ``splits``.
        counts: How often each row is looked up, by the path of a table:
            ``wh.count_lookups`` counts it.
        mesh: Sizes of ``data`` and ``fsdp`` that you fix.
        trainable: As for ``wh.plan``.

    Returns:
        The plan; ``print`` shows it, ``why(path)`` explains it.

    Raises:
        WhaleError: no table was found, nothing fits, or an argument is wrong.

    >>> import jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> net = {"user": jax.ShapeDtypeStruct((100_000, 32), jnp.float32),
    ...        "w": jax.ShapeDtypeStruct((32,), jnp.float32)}
    >>> batch = {"user": jax.ShapeDtypeStruct((256,), jnp.int32)}
    >>> plan = wh.plan_tables(lambda net, b: (net["user"][b["user"]] @ net["w"]).mean(),
    ...                       net, batch, rows=wh.sparse_optimizer("adagrad", 0.01),
    ...                       optimizer=optax.sgd(0.1), cluster="h100:4")
    >>> plan.tables
    ('user',)
    """
    _check(rows, optimizer, splits, mesh, together, pins)
    check_batch(batch, 0)
    adapter = adapt(model, loss_fn, trainable=trainable).without_values()
    batch = jax.tree.map(aval_of, batch)
    program = cut_program(adapter, batch)
    _check_tables(adapter, program, counts)
    _check_lengths(batch, program)
    known = parsed_cluster(cluster)
    dense = _dense_plan(adapter, program, batch, optimizer, known, mesh)
    tables = _tables(adapter, program, rows, counts or {})
    ranks = Ranks.of(known, used_bytes=dense.memory.total_bytes)
    if dense.num_devices != ranks.count:
        raise PlanError(
            f"the dense part uses {dense.num_devices} of {ranks.count} devices; tables "
            "need all of them. Use a batch size that the devices divide"
        )
    placement = place_tables(
        tables,
        ranks,
        batch_size=max(one.shape[0] for one in program.lookups),
        splits=splits,
        together=together,
        pins=pins,
    )
    refused = {adapter.param_paths[n]: text for n, text in program.refused.items()}
    return TablesPlan(
        placement=placement,
        dense=dense,
        rows=rows,
        refused=refused,
        model_paths=adapter.param_paths,
        batch=batch,
    )


def _check(
    rows: Any, optimizer: Any, splits: Any, mesh: Any, together: Any, pins: Any
) -> None:
    problems = Arguments("wh.plan_tables")
    if not isinstance(rows, SparseOptimizer):
        problems.refuse("rows", rows, 'wh.sparse_optimizer("adagrad", 0.01) or another')
    check_optimizer(problems, optimizer)
    if not _are_names(splits) or not set(splits) <= set(RUNNABLE_SPLITS):
        problems.refuse(
            "splits",
            splits,
            f"some of {', '.join(RUNNABLE_SPLITS)}; others can be placed and not run",
        )
    groups = list(together) if isinstance(together, list | tuple) else [None]
    if not all(_are_names(group) for group in groups):
        problems.refuse("together", together, "groups of paths of tables, in a list")
    fixed = {None: 0} if not isinstance(pins, Mapping) else pins
    for name, pin in () if pins is None else fixed.items():
        known = is_whole(pin, 0) or (isinstance(pin, str) and pin in RUNNABLE_SPLITS)
        if not isinstance(name, str) or not known:
            problems.refuse(
                "pins",
                pins,
                "a device or one of splits by the path of a table, or None",
            )
    if mesh is not None and (
        not isinstance(mesh, Mapping) or not set(mesh) <= {"data", "fsdp"}
    ):
        problems.refuse("mesh", mesh, "sizes of data and fsdp, or None")
    problems.raise_if_any()


def _are_names(value: Any) -> bool:
    """Whether it is some texts, at least one."""
    listed = isinstance(value, list | tuple | set | frozenset)
    return bool(listed and value and all(isinstance(name, str) for name in value))


def _check_tables(adapter: Adapter, program: TableProgram, counts: Any) -> None:
    if not program.lookups:
        reasons = "; ".join(program.refused.values()) or (
            "no parameter of two dimensions is read by ids of the batch"
        )
        raise PlanError(f"the loss looks up no table: {reasons}. Use wh.plan")
    names = [adapter.param_paths[n] for n in program.tables]
    problems = Arguments("wh.plan_tables")
    if counts is not None and not isinstance(counts, Mapping):
        problems.refuse("counts", counts, "counts of rows by the path of a table")
    for name in counts if isinstance(counts, Mapping) else ():
        if name not in names:
            problems.add(
                f"counts names {shown(name)}, which is no table; the tables are "
                f"{', '.join(names[:8])}"
            )
    leaves = jax.tree.leaves(adapter.params)
    types = {str(leaves[n].dtype) for n in program.tables}
    if len(types) > 1:
        problems.add(
            f"tables have the element types {', '.join(sorted(types))}; expected one. "
            "Cast them to one type"
        )
    problems.raise_if_any()


def _dense_plan(
    adapter: Adapter,
    program: TableProgram,
    batch: Any,
    optimizer: optax.GradientTransformation | None,
    cluster: Cluster,
    mesh: Mapping[str, int] | None,
) -> Plan:
    """The plan of the loss without its lookups."""
    vectors = [
        jax.ShapeDtypeStruct(one.vectors_shape, one.dtype) for one in program.lookups
    ]
    request = PlanRequest(
        optimizer=optimizer,
        cluster=cluster,
        mesh={"expert": 1, "context": 1, "tensor": 1, **(mesh or {})},
        num_micro_batches=1,
        zero=0,
        offload="none",
        remat="none",
        shares="even",
        trainable="dense.*",
    )
    return request.plan(
        dense_loss(adapter, program),
        dense_model(adapter, program),
        {"batch": batch, "vectors": vectors},
    )


def _check_lengths(batch: Any, program: TableProgram) -> None:
    """Refuse lookups whose ids do not have a sample of the batch in each row."""
    lengths = Counter(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape)
    ((samples, _),) = lengths.most_common(1)
    problems = Problems("loss_fn", PlanError)
    for one in program.lookups:
        if one.shape[0] != samples:
            problems.add(
                f"{one.feature} is looked up by ids of shape {one.shape}, and the "
                f"batch has {samples} samples, which devices share out by the first "
                "dimension; look ids up in the shape that they have in the batch, "
                f"({samples}, …), padded where samples have unlike numbers of them, "
                "and reshape what was looked up"
            )
    problems.raise_if_any()


def _tables(
    adapter: Adapter,
    program: TableProgram,
    rows: SparseOptimizer,
    counts: Mapping[str, Any],
) -> list[Table]:
    leaves = jax.tree.leaves(adapter.params)
    samples = max(one.shape[0] for one in program.lookups)
    found = []
    for number in program.tables:
        leaf, path = leaves[number], adapter.param_paths[number]
        lookups = [one for one in program.lookups if one.param == number]
        itemsize = np.dtype(leaf.dtype).itemsize
        found.append(
            Table(
                name=path,
                rows=leaf.shape[0],
                width=leaf.shape[1],
                element_bytes=itemsize,
                optimizer_bytes_per_row=rows.state_bytes_per_row(
                    leaf.shape[1], itemsize
                ),
                lookups_per_sample=sum(o.shape[0] * o.num_ids for o in lookups)
                / samples,
                vectors=sum(o.shape[0] * o.num_vectors for o in lookups) / samples,
                splits_columns=not rows.is_row_wise,
                counts=counts.get(path),
            )
        )
    return found


def count_lookups(
    loss_fn: Callable[..., Any],
    model: Any,
    batches: Iterable[Any],
    *,
    trainable: Any = None,
) -> dict[str, np.ndarray]:
    """Counts how often each row of each table is looked up.

    Args:
        loss_fn, model, trainable: As for ``plan_tables``.
        batches: Some batches, with values, all of one shape.

    Returns:
        ``int64[rows]`` by the path of each table, for ``counts=`` of ``plan_tables``.

    Raises:
        WhaleError: there is no batch or no table, or an id is out of range.

    >>> import jax.numpy as jnp
    >>> import whalejax as wh
    >>> net = {"user": jnp.zeros((3, 2))}
    >>> wh.count_lookups(lambda net, b: net["user"][b["ids"]].mean(), net,
    ...                  [{"ids": np.array([0, 2, 2])}])["user"].tolist()
    [1, 0, 2]
    """
    adapter = adapt(model, loss_fn, trainable=trainable).without_values()
    if isinstance(batches, str | bytes | Mapping) or is_array(batches):
        batches = None  # type: ignore[assignment]
    if not isinstance(batches, Iterable):
        raise WhaleError(
            f"batches is {shown(batches)}; expected some batches, as in a list"
        )
    program: TableProgram | None = None
    counted: dict[str, np.ndarray] = {}
    for batch in batches:
        if program is None:
            if isinstance(batch, str):
                raise WhaleError(f"batches holds {shown(batch)}; expected batches")
            check_batch(batch, 0)
            program = cut_program(adapter, batch)
            _check_tables(adapter, program, None)
            leaves = jax.tree.leaves(adapter.params)
            counted = {
                adapter.param_paths[n]: np.zeros(leaves[n].shape[0], np.int64)
                for n in program.tables
            }
        check_32_bits(batch)
        for lookup, ids in zip(
            program.lookups, program.ids(jax.tree.leaves(batch)), strict=True
        ):
            path = adapter.param_paths[lookup.param]
            known = np.asarray(ids).ravel()
            known = known[known != NO_ID]
            size = len(counted[path])
            if known.size and (known.min() < 0 or known.max() >= size):
                raise WhaleError(
                    f"{lookup.feature} has the ids {known.min()} to {known.max()}, and "
                    f"{path} has {size:,} rows"
                )
            counted[path] += np.bincount(known, minlength=size)
    if program is None:
        raise WhaleError("batches is empty; expected at least one batch")
    return counted
