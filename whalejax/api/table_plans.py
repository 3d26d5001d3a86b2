"""``wh.plan_tables`` and ``wh.count_lookups``: find and place a model's tables."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from whalejax.adapters.base import adapt
from whalejax.api.tables_request import USUAL_SPLITS, TablesRequest, check_tables
from whalejax.capture.batch import check_batch
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import is_array, short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.tables.sections import SectionTimes
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.recognize import NO_ID, TableProgram
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.tables.tables_plan import TablesPlan
from whalejax.tables.wide_ids import check_32_bits


@names_arguments("wh.plan_tables")
def plan_tables(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    rows: SparseOptimizer,
    optimizer: optax.GradientTransformation | None = None,
    cluster: Cluster | str | None = None,
    splits: Collection[str] = USUAL_SPLITS,
    together: Sequence[Sequence[str]] = (),
    pins: Mapping[str, int | str] | None = None,
    counts: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | None = None,
    precision: str | Mapping[str, str] = "f32",
    trainable: Any = None,
    staleness: int = 0,
    times: SectionTimes | None = None,
    in_processes: Collection[str] | None = None,
    **dense: Any,
) -> TablesPlan:
    """Finds the embedding tables of a model and decides where they are stored.

    A table is a trained parameter of two dimensions that the loss only looks up
    (``table[ids]``, ``jnp.take``, ``nnx.Embed``). Its integer ids depend on the batch
    alone. Everything else, the dense part, is planned as by ``wh.plan``.

    Args:
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: An NNX module, Linen variables or any pytree; abstract leaves suffice.
        batch: Global batch, abstract or real, with samples along dimension 0.
        rows: Update rule of rows: ``wh.sparse_optimizer(...)``.
        optimizer: Optimizer of all other parameters, from optax.
        cluster: Cluster, its text such as ``"h100:8"``, or None for the devices of this
            process. ``"cpu:2+h100:1"`` has two sections: some tables in at most 2
            processes that compute on CPUs, everything else on the other devices.
        splits: Ways in which a table may be stored: some of ``"whole"``, ``"rows"``,
            ``"columns"``, ``"node_rows"`` (by rows over the devices of a node) and
            ``"replicate"``; and, if the devices' memory is short, ``"host"`` (in host
            memory) and ``"cached"`` (with the rows that are read most on the device);
            both run on CPUs and TPUs.
        together: Groups of tables that must be on one device, by their paths.
        pins: Fixed placements by the path of a table: its device, or one of these
            splits. ``"cached:0.25"`` sets the fraction of its rows on the device.
        counts: Number of lookups of each row, by the path of a table:
            ``wh.count_lookups`` counts them.
        mesh: Fixed sizes of mesh axes of the dense part. Axes other than ``data`` and
            ``fsdp`` are used only if their size is fixed here.
        precision: Type in which the products of the dense part compute: ``"f32"``,
            ``"bf16"`` or ``"f16"``, or one for each TaskGraph. Tables, other parameters
            and gradients stay as they are.
        trainable: Selection of trained parameters, in the form of ``wh.plan``.
        staleness: Number of newest updates that a lookup may lack with two sections, so
            that both work at once; with 0 every row has all updates.
        times: Measured times of the sections, ``SectionsStep.report().times``; None
            predicts them.
        in_processes: Fixed paths of the tables in processes; the others are then on the
            devices. None lets the planner choose.
        dense: Further settings of the dense part, as for ``wh.plan``, such as
            ``num_micro_batches`` or ``zero``; by default the planner chooses.

    Returns:
        The plan; ``print`` shows it, ``why(path)`` explains it.

    Raises:
        WhaleError: No table was found, nothing fits, or an argument is invalid.

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
    request = TablesRequest(
        rows=rows,
        optimizer=optimizer,
        cluster=cluster,
        splits=splits,
        together=together,
        pins=pins,
        counts=counts,
        mesh=mesh,
        precision=precision,
        trainable=trainable,
        staleness=staleness,
        times=times,
        in_processes=in_processes,
        dense=dense,
    )
    return request.plan(loss_fn, model, batch)


@names_arguments("wh.count_lookups")
def count_lookups(
    loss_fn: Callable[..., Any],
    model: Any,
    batches: Iterable[Any],
    *,
    trainable: Any = None,
) -> dict[str, np.ndarray]:
    """Counts how often each row of each table is looked up.

    Args:
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: An NNX module, Linen variables or any pytree; abstract leaves suffice.
        batches: Batches with values, all of one shape.
        trainable: Selection of trained parameters, in the form of ``wh.plan``.

    Returns:
        ``int64[rows]`` by the path of each table, for ``counts=`` of ``plan_tables``.

    Raises:
        WhaleError: There is no batch or no table, an id is out of range or too wide, or
            an argument is invalid.

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
            f"batches is {short_repr(batches)}; expected some batches, as in a list"
        )
    program: TableProgram | None = None
    counted: dict[str, np.ndarray] = {}
    for batch in batches:
        if program is None:
            if isinstance(batch, str):
                raise WhaleError(f"batches holds {short_repr(batch)}; expected batches")
            check_batch(batch, 0)
            program = cut_program(adapter, batch)
            check_tables(adapter, program, None)
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
