"""Tables as a part of ``wh.plan``: their arguments and notes.

``wh.plan(..., tables=...)`` returns a plan that includes the tables. Without it, the
plan of a model that is mostly tables has a note on the savings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax

from whalejax.adapters.base import adapt
from whalejax.api.plan_request import PlanRequest
from whalejax.api.plan_settings import changeable
from whalejax.api.tables_request import TablesRequest, is_given
from whalejax.capture.batch import aval_of
from whalejax.meshes.checks import Arguments
from whalejax.meshes.units import gigabytes
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.parameter_layout import are_most, looked_up_tables
from whalejax.tables.dense import dense_adapter, dense_batch
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.table_plan_record import tables_plan, whole_plan
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.losses import Job


TABLE_SETTINGS: Final = (
    *("tables", "splits", "together", "pins", "counts", "staleness", "times"),
    "in_processes",
)
"""Arguments of ``wh.plan`` that apply only to tables."""

_SHARED: Final = ("optimizer", "cluster", "mesh", "precision", "trainable")
_FIXED: Final = frozenset(("rows", "optimizer", "trainable", "dense"))
"""Fields of a request that ``what_if`` cannot change."""

_SIZES: Final = ("batch", "sequence")
_FEWEST_PARAMS: Final = 100_000


@dataclass(frozen=True, slots=True)
class TablesQuestion:
    """A request about a model with tables; ``Plan.what_if`` and ``verify`` ask it.

    Attributes:
        request: Settings.
        given: Loss, model and batch, abstract.
        dense: Question of the dense part's plan.
    """

    request: TablesRequest
    given: tuple[Any, Any, Any]
    dense: Any

    @property
    def sequence_length(self) -> int | None:
        """None, as ``replan`` cannot change the batch."""
        return None

    def replan(self, **changes: Any) -> Plan:
        """Returns the plan with other settings.

        Args:
            changes: Settings of tables, and settings of ``wh.plan`` that plans with
                tables take.

        Raises:
            PlanError: A setting cannot be changed.
        """
        own = {f.name for f in dataclasses.fields(self.request)} - _FIXED
        dense = [name for name in changeable() if name not in _SIZES]
        known = [*TABLE_SETTINGS, *(name for name in dense if name not in own)]
        known += ["cluster", "mesh", "precision"]
        problems = Arguments("what_if", PlanError)
        for name in changes:
            if name not in known:
                problems.add(
                    f"{name!r} cannot be changed of a plan with tables; expected some "
                    f"of {', '.join(known)}"
                )
        problems.raise_if_any()
        values = {"rows" if n == "tables" else n: x for n, x in changes.items()}
        changed = {name: values.pop(name) for name in changes if name in {*dense} - own}
        settings = {**self.request.dense, **changed}
        request = dataclasses.replace(self.request, **values, dense=settings)
        return plan_with_tables(request, *self.given)

    def verify(
        self, plan: Plan, topology: str | None, *, timeout_seconds: float
    ) -> Any:
        """Compiles a step with the real compiler; with two sections or stage programs,
        only its dense part.

        Args:
            plan, topology, timeout_seconds: Arguments of ``Plan.verify``, unchanged.
        """
        from whalejax.verification.checking import check

        loss_fn, model, batch = self.given
        request = self.request
        adapter = adapt(model, loss_fn, trainable=request.trainable).without_values()
        own = tables_plan(plan, batch)
        if own.sections is not None or plan.stage_plans:
            program = cut_program(adapter, batch)
            found = check(
                own.dense,
                dense_adapter(adapter, program, batch),
                dense_batch(program, batch),
                optimizer=request.optimizer,
                batch_axes=0,
                topology=topology,
                timeout_seconds=timeout_seconds,
                again=None,
            )
            names = [table.name for table in own.all_tables]
            text = _left_out(names, in_processes=own.sections is not None)
            return dataclasses.replace(found, plan_hash=plan.hash, left_out=text)

        return check(
            plan,
            adapter,
            batch,
            optimizer=request.optimizer,
            batch_axes=0,
            topology=topology,
            timeout_seconds=timeout_seconds,
            again=self.replan,
        )


def _left_out(names: list[str], *, in_processes: bool) -> str:
    more = f" and {len(names) - 4} others" if len(names) > 4 else ""
    why = "whose lookups and updates are programs beside those of the stages"
    if in_processes:
        why = "some of which are in processes beside the devices"
    return f"the tables {', '.join(names[:4])}{more}, {why}; the dense part is compared"


def tables_question(plan: Plan, job: Job, model: Any, batch: Any) -> TablesQuestion:
    """Returns the question of a plan with tables, such as one from a file.

    Args:
        plan: Plan with tables.
        job: Job of the plan.
        model: Abstract model of the job.
        batch: Global batch of the plan.
    """
    own = tables_plan(plan, batch)
    request = TablesRequest(
        rows=own.rows,
        optimizer=job.optimizer,
        cluster=plan.cluster,
        precision=plan.asked_precision,
    )
    given = job.loss_fn, model, jax.tree.map(aval_of, batch)
    return TablesQuestion(request, given, request.dense_question(*given))


def plan_with_tables(
    request: TablesRequest, loss_fn: Callable[..., Any], model: Any, batch: Any
) -> Plan:
    """Returns the plan of a model with its tables.

    Args:
        request: Settings.
        loss_fn, model, batch: Arguments of ``wh.plan``, unchanged.
    """
    found = request.plan(loss_fn, model, batch)
    given = loss_fn, model, jax.tree.map(aval_of, batch)
    question = TablesQuestion(request, given, found.dense.question)
    return dataclasses.replace(whole_plan(found), question=question)


def table_request(settings: Mapping[str, Any]) -> TablesRequest:
    """Returns the tables request from the arguments of ``wh.plan``.

    Args:
        settings: All arguments except loss, model and batch.

    Raises:
        WhaleError: An argument is invalid or not supported with tables.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(PlanRequest)}
    own = {name: settings[name] for name in TABLE_SETTINGS if name != "tables"}
    shared = {name: settings[name] for name in _SHARED}
    dense = {
        name: settings[name]
        for name, default in defaults.items()
        if name not in _SHARED and is_given(settings[name], default)
    }
    return TablesRequest(rows=settings["tables"], **shared, **own, dense=dense)


def refuse_table_settings(settings: Mapping[str, Any]) -> None:
    """Refuses arguments for tables if there are no tables.

    Args:
        settings: Arguments of ``wh.plan``.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(TablesRequest)}
    problems = Arguments("wh.plan", PlanError)
    for name in TABLE_SETTINGS[1:]:
        if is_given(settings[name], defaults[name]):
            problems.add(
                f"{name} was given without tables. Give "
                'tables=wh.sparse_optimizer("adagrad", 0.01), or leave it out'
            )
    problems.raise_if_any()


@without_mesh
def table_notes(plan: Plan) -> tuple[str, ...]:
    """Returns the note on the savings of placed tables.

    It is empty if tables are less than half of the parameters, or the loss cannot be
    cut at their lookups.

    Args:
        plan: Plan without placed tables.
    """
    question: Any = plan.question
    adapter, graph = question.adapter, question.programs().graph
    leaves = jax.tree.leaves(adapter.params)
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    looked_up = looked_up_tables(graph)
    if sum(sizes) < _FEWEST_PARAMS or not are_most(looked_up, graph.params):
        return ()
    try:
        program = cut_program(adapter, question.batch)
    except Exception:  # The loss was planned, so it is not at fault.
        return ()
    stored = sum(sizes[n] for n in program.tables)
    if 2 * stored < sum(sizes):
        return ()
    read = sum(one.shape[0] * one.num_ids * one.width for one in program.lookups)
    size = sum(sizes[n] * leaves[n].dtype.itemsize for n in program.tables)
    count = len(program.tables)
    return (
        f"{count} {'tables' if count > 1 else 'table'} of {gigabytes(size)} "
        f"{'are' if count > 1 else 'is'} only looked up, and a batch reads at most "
        f"{min(1.0, read / stored):.2%} of that; a step as planned goes through all of "
        'it. tables=wh.sparse_optimizer("adagrad", …) in place of optimizer= for them '
        "updates the rows that were read, and places each table where it costs least",
    )
