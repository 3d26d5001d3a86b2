"""Pipeline options that the user fixed, by arguments or by ``pipeline`` marks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConstraints:
    """Pipeline options that the user fixed, by arguments or by ``pipeline`` marks.

    Attributes:
        mesh: Fixed axis sizes.
        num_micro_batches: Number of micro-batches of one pipeline; None for any.
        schedule: Name of the pipeline schedule; None for any.
    """

    mesh: Mapping[str, int]
    num_micro_batches: int | None
    schedule: str | None

    @classmethod
    def of(
        cls, graph: Graph, request: Request, known: Collection[str]
    ) -> PipelineConstraints:
        """Returns the options of arguments and marks together.

        Args:
            graph: Captured loss with its marks.
            request: Arguments of the user.
            known: Names of the supported schedules.

        Raises:
            PlanError: Arguments and marks contradict each other, the schedule is not
                supported, or the micro-batches do not divide the batch. Lists every
                contradiction.
        """
        problems = Problems("the hints contradict each other", PlanError)
        fixed: dict[str, tuple[str, str]] = {}
        for axis, size in (request.mesh or {}).items():
            fixed[axis] = str(size), f"mesh={{{axis!r}: {size}}}"
        if request.num_micro_batches is not None:
            text = str(request.num_micro_batches)
            fixed["num_micro_batches"] = text, f"num_micro_batches={text}"
        marks = dict.fromkeys(
            m for g in graph.task_graphs for m in g.marks if m.kind == "pipeline"
        )
        names = {"num_stages": "stage"}
        for mark in marks:
            for name in ("num_stages", "num_micro_batches", "schedule"):
                text = mark.get(name) or "auto"
                key = names.get(name, name)
                other, where = fixed.setdefault(key, (text, str(mark)))
                if text == "auto":
                    continue
                if other == "auto":
                    fixed[key] = text, str(mark)
                elif other != text:
                    problems.add(
                        f"{mark} asks for {name} {text}, but {where} for {other}. "
                        "Drop one of the two, or change the mark"
                    )
        problems.raise_if_any()
        _check_schedule(*fixed.get("schedule", ("auto", "")), known)
        _check_parts(*fixed.get("num_micro_batches", ("auto", "")), graph)
        given = {k: v for k, (v, _) in fixed.items() if v != "auto"}
        schedule, parts = (
            given.pop("schedule", None),
            given.pop("num_micro_batches", None),
        )
        return cls(
            mesh={axis: int(size) for axis, size in given.items()},
            num_micro_batches=None if parts is None else int(parts),
            schedule=schedule,
        )


def _check_schedule(name: str, where: str, known: Collection[str]) -> None:
    if name not in ("auto", *known):
        raise PlanError(
            f"{where} asks for the schedule {name}, which no executor of this version "
            f"runs; expected one of {', '.join(known)}. Choose one of these, or leave "
            "schedule= to the planner"
        )


def _check_parts(text: str, where: str, graph: Graph) -> None:
    size = graph.batch_size * graph.num_micro_batches
    if text != "auto" and size % int(text):
        count, rest = int(text), size % int(text)
        near = f"{size - rest} or " if size > rest else ""
        raise PlanError(
            f"{where} asks for {count_text(count, 'micro-batch')}, but the "
            f"{count_text(size, 'sample')} of the "
            f"batch do not divide by {count}. Use a batch of "
            f"{near}{size - rest + count}, or another num_micro_batches"
        )
