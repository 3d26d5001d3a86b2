"""Stores the tables of a plan as data in the plan of the dense part."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np

from whalejax import _compat
from whalejax.capture.batch import aval_of
from whalejax.lowering.batch_record import batch_leaves, batch_of, batch_tree
from whalejax.planner.json_codec import DataError, decode, encode
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import (
    BatchLeaf,
    LeafPlan,
    ModelWork,
    RegionTable,
    RoleInfo,
    TablesData,
)
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.cpu_or_device import TableCost
from whalejax.planner.tables.placement import placement_data, placement_of
from whalejax.planner.tables.sections import Sections
from whalejax.tables.dense import OLD_PREFIXES
from whalejax.tables.device_use import DeviceUse
from whalejax.tables.recognize import TableProgram
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.tables.tables_plan import TablesPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesRecord:
    """Data of a plan's tables without the placement, from ``TablesPlan``.

    Attributes:
        rows, model_paths, sections, cut, use: Fields of ``TablesPlan``, unchanged.
        refused: (Path, reason why it is not a table) pairs.
        batch, batch_tree: Leaves of the global batch, and their containers.
        program_hash: Field of ``TablesPlan``, unchanged.
    """

    rows: SparseOptimizer
    refused: tuple[tuple[str, str], ...]
    model_paths: tuple[str, ...]
    batch: tuple[BatchLeaf, ...]
    batch_tree: str
    program_hash: str
    sections: Sections | None
    cut: tuple[TableCost, ...]
    use: DeviceUse = field(default=DeviceUse(), metadata={"unless_default": True})


def whole_plan(plan: TablesPlan) -> Plan:
    """Returns the plan of the dense part, with the tables as data.

    Args:
        plan: Plan of tables and dense part.
    """
    record = TablesRecord(
        rows=plan.rows,
        refused=tuple(plan.refused.items()),
        model_paths=plan.model_paths,
        batch=batch_leaves(plan.batch),
        batch_tree=batch_tree(plan.batch),
        program_hash=plan.program_hash,
        sections=plan.sections,
        cut=plan.cut,
        use=plan.use,
    )
    document = {**encode(record), "placement": placement_data(plan.placement)}
    if plan.beside is not None:
        document["beside"] = placement_data(plan.beside)
    # The data have the form of a file, so that a plan equals the one that is read back.
    data = TablesData(json.loads(json.dumps(document)))
    whole = plan.use.added_to(plan.dense)
    return dataclasses.replace(whole, tables=data, work=_whole_work(plan))


def _whole_work(plan: TablesPlan) -> ModelWork | None:
    """Returns the size of the full model and the dense part's work, or None."""
    work = plan.dense.work
    if work is None:
        return None
    size = sum(table.rows * table.width for table in plan.all_tables)
    sizes = ("parameters", "trained", "active", "chosen")
    return dataclasses.replace(
        work, **{name: getattr(work, name) + size for name in sizes}
    )


def tables_plan(plan: Plan, batch: Any = None) -> TablesPlan:
    """Returns the plan of tables and dense part from a plan with tables as data.

    Args:
        plan: Plan with tables.
        batch: Global batch, needed if the plan does not record its containers; default:
            None.

    Raises:
        PlanError: The plan has no tables, or its file is damaged.
    """
    if plan.tables is None:
        raise PlanError("this plan has no tables. Plan with tables= to place some")
    document = dict(plan.tables.document)
    placement = placement_of(document.pop("placement"))
    beside = document.pop("beside", None)
    try:
        record: TablesRecord = decode(TablesRecord, document, "tables")
    except DataError as error:
        raise PlanError(f"the tables of this plan cannot be read: {error}") from None
    known: Any = record  # It has the batch in the form of a plan.
    return TablesPlan(
        placement=placement,
        dense=record.use.taken_from(
            _without_prefixes(dataclasses.replace(plan, tables=None))
        ),
        rows=record.rows,
        refused=dict(record.refused),
        model_paths=record.model_paths,
        batch=batch_of(known) if batch is None else jax.tree.map(aval_of, batch),
        sections=record.sections,
        program_hash=record.program_hash,
        beside=None if beside is None else placement_of(beside),
        cut=record.cut,
        use=record.use,
    )


def _without_prefixes(plan: Plan) -> Plan:
    """Returns a plan with the model's paths, which older plans prefix."""
    prefixed = any(leaf.path.startswith(OLD_PREFIXES) for leaf in plan.leaves)
    return _renamed(plan) if prefixed else plan


_NAMED: Final = frozenset("leaves roles compute storage path axes name aliases".split())
"""Fields of plans and their entries that contain names of parameters."""


def _renamed(value: Any) -> Any:
    """Returns a value in which names of parameters have no prefix."""
    if isinstance(value, str):
        for prefix in OLD_PREFIXES:
            value = value.removeprefix(prefix)
        return value
    if isinstance(value, tuple):
        return tuple(map(_renamed, value))
    if isinstance(value, Plan | LeafPlan | RoleInfo | RegionTable):
        names = _NAMED.intersection(f.name for f in dataclasses.fields(value))
        renamed = {name: _renamed(getattr(value, name)) for name in names}
        return dataclasses.replace(value, **renamed)
    return value


def program_hash(program: TableProgram) -> str:
    """Returns the hash of a traced loss: its operations, their order and operands.

    Args:
        program: Loss of the model, cut at its lookups.
    """
    text = json.dumps(_described(*_compat.open_jaxpr(program.traced)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _described(body: Any, constants: Sequence[Any] = ()) -> list[Any]:
    numbers: dict[Any, int] = {}
    for variable in (*body.constvars, *body.invars):
        numbers[variable] = len(numbers)
    found: list[Any] = [[_digest(x) for x in constants]]
    for equation in body.eqns:
        given = [
            _digest(a.val) if _compat.is_literal(a) else numbers[a]
            for a in equation.invars
        ]
        inner = [
            _described(*_compat.open_jaxpr(one))
            for one in _compat.inner_jaxprs(equation)
        ]
        for variable in equation.outvars:
            numbers[variable] = len(numbers)
        shapes = [str(v.aval) for v in equation.outvars]
        plain = sorted(
            f"{name}={value!r}"
            for name, value in equation.params.items()
            if _is_plain(value)
        )
        found.append([equation.primitive.name, given, shapes, inner, plain])
    return found


def _is_plain(value: Any) -> bool:
    """Returns whether a parameter of an equation has the same text in every process."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _digest(value: Any) -> str:
    if _compat.is_key_dtype(getattr(value, "dtype", None)):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
