"""``wh.compile_tables``: compiles a plan with tables into a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import optax

from whalejax.adapters.base import Adapter, adapt
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, short_repr
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.tables.place import HOST_SPLITS
from whalejax.runtime.sections_step import SectionsStep, check_job
from whalejax.runtime.staged_table_step import StagedTableStep
from whalejax.runtime.table_step import TableStep
from whalejax.sections.section_run import SectionRun
from whalejax.tables.host_rows import copied_bytes
from whalejax.tables.scatter_check import wrong_sums
from whalejax.tables.table_plan_record import program_hash, tables_plan
from whalejax.tables.tables_plan import TablesPlan
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.argument_checks import refuse_bad_optimizer


_OUT_OF_RANGE: Final = ("error", "clip")


@without_mesh
@names_arguments("wh.compile_tables")
def compile_tables(
    plan: TablesPlan,
    loss_fn: Callable[..., Any],
    model: Any,
    *,
    optimizer: optax.GradientTransformation | None = None,
    out_of_range: str = "error",
    trainable: Any = None,
    devices: Any = None,
    job: str | None = None,
    job_settings: Mapping[str, Any] | None = None,
    replace_every: int | None = None,
    section_run: SectionRun | None = None,
) -> TableStep:
    """Compiles a plan with tables into a step.

    Args:
        plan: Plan from ``wh.plan_tables``.
        loss_fn: Loss of the plan.
        model: Model of the plan, abstract or real.
        optimizer: Optimizer of parameters that are not tables; None to evaluate.
        out_of_range: Treatment of ids without a row: ``"error"`` checks every batch
            before it is used, ``"clip"`` takes the nearest row.
        trainable: Selection of trained parameters, as given to ``wh.plan_tables``.
        devices: Devices of the dense part, in node order; None uses all.
        job: Name of a job, as on the command line. The sparse section of a two-section
            plan makes the job's batches for ``SectionsStep.run``.
        job_settings: Options of that job.
        replace_every: Number of steps after which tables are placed again, if the
            lookups of these steps show a gain of 5 % of the most loaded device's time.
            The gain is printed. None counts no lookups.
        section_run: For two sections, hosts of the sparse section's processes, and the
            state that is saved for a successor of this process. None uses this machine
            and saves nothing.

    Returns:
        The step; nothing is compiled before its first call. A step of two sections
        keeps its processes until ``close``.

    Raises:
        WhaleError: Arguments are invalid.
        PlanError: The plan is for another model, batch or machine. Or it has two
            sections, and JAX runs in several processes.
    """
    problems = Arguments("wh.compile_tables")
    problems.of("plan", plan, TablesPlan, "what wh.plan_tables gave")
    problems.choice("out_of_range", out_of_range, _OUT_OF_RANGE)
    check_job(problems, job, job_settings)
    problems.whole("replace_every", replace_every, least=1, none=True)
    expected = "wh.SectionRun(...)"
    problems.of("section_run", section_run, SectionRun, expected, none=True)
    if isinstance(plan, TablesPlan):
        _check_sections(problems, plan, replace_every, job, section_run)
    problems.raise_if_any()
    refuse_bad_optimizer(optimizer)
    if jax.process_count() > 1 and plan.sections is not None:
        raise PlanError(
            f"{jax.process_count()} processes are running, and tables in processes of "
            "their own are served by one process with all devices of the dense part. "
            "Start one process, or plan without CPUs beside the devices and without "
            "staleness="
        )
    adapter = adapt(model, loss_fn, trainable=trainable).without_values()
    if adapter.param_paths != plan.model_paths:
        other = set(adapter.param_paths) ^ set(plan.model_paths)
        raise PlanError(
            f"this plan is for another model: {', '.join(sorted(other)[:4])} "
            f"{'is' if len(other) == 1 else 'are'} in one of them only. Plan again"
        )
    _check_shapes(plan, adapter)
    given = plan, adapter, optimizer, out_of_range, devices
    if plan.sections is None:
        kind = StagedTableStep if plan.dense.stage_plans else TableStep
        step = kind(*given, replace_every)
    else:
        named = None if job is None else (job, dict(job_settings or {}))
        step = SectionsStep(*given, job=named, run=section_run)
    if optimizer is not None:
        _check_host_memory(plan, step)
        _check_sums(step)
        _check_program(plan, step)
    return step


def _check_sections(
    problems: Arguments, plan: TablesPlan, replace_every: Any, job: Any, run: Any
) -> None:
    if plan.sections is not None:
        if replace_every is not None:
            problems.add(
                "replace_every was given, and tables in processes of their own stay "
                "where they are. Leave it out"
            )
        return
    if isinstance(job, str):
        problems.add(
            f"job is {short_repr(job)}, and this plan has no sparse section that "
            "could make its batches. Plan with staleness= on such as cpu:2+h100:1"
        )
    if run is not None:
        problems.add(
            "section_run was given, and this plan has no sparse section, whose "
            "processes it is about. Leave it out"
        )


def compile_plan(
    plan: Plan,
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    optimizer: optax.GradientTransformation | None,
    **options: Any,
) -> TableStep:
    """Implements ``wh.compile`` for a plan with tables.

    Args:
        plan: Plan with tables.
        loss_fn, model, batch, optimizer: Arguments of ``wh.compile``, unchanged.
        options: Other arguments of ``compile_tables``.
    """
    own = tables_plan(plan, batch)
    return compile_tables(own, loss_fn, model, optimizer=optimizer, **options)


def table_step_of(
    plan: Plan, adapter: Adapter, batch: Any, optimizer: Any, devices: list[Any]
) -> TableStep:
    """Returns the step of a plan whose tables are all on its devices.

    Args:
        plan: Plan with tables, in one section.
        adapter: The model and its loss.
        batch: Global batch, abstract.
        optimizer: Optimizer of the parameters that are not tables.
        devices: Devices of the plan, which may be absent.
    """
    own = tables_plan(plan, batch)
    _check_shapes(own, adapter)
    step = TableStep(own, adapter, optimizer, "error", devices)
    _check_host_memory(own, step)
    return step


def _check_sums(step: TableStep) -> None:
    """Refuses to train if the compiler sums gradients of repeated rows wrongly."""
    wrong, of_all = wrong_sums(step.mesh)
    if wrong:
        kind = step.mesh.devices.flat[0].device_kind
        raise PlanError(
            f"JAX {jax.__version__} sums gradients of repeated rows wrongly on "
            f"{step.mesh.size}×{kind}: {wrong:,} of {of_all:,} elements of a test "
            "program differ from NumPy's. Use another version of JAX, or the flag "
            "--xla_disable_hlo_passes=while-loop-all-reduce-code-motion if it helps"
        )


def _check_host_memory(plan: TablesPlan, step: TableStep) -> None:
    """Refuses tables in host memory if a change of some rows copies the whole table."""
    placed = plan.placement if plan.sections is None else plan.beside
    hosted = {
        shard.table: shard.split
        for shard in (() if placed is None else placed.shards)
        if shard.split in HOST_SPLITS
    }
    named = ", ".join(f"{name} ({split})" for name, split in hosted.items())
    device = step.mesh.devices.flat[0]
    if not hosted or device.platform == "cpu":  # Both memories are one.
        return
    if plan.sections is not None:
        raise PlanError(
            f"{named}: beside processes of CPUs no table is in the host memory of "
            f"{device.device_kind}. Name it in in_processes, and leave its pin out"
        )
    copied, size = copied_bytes(device)
    if copied < size:
        return
    raise PlanError(
        f"{named}: tables in host memory cannot be trained on {device.device_kind}, "
        f"whose compiler (JAX {jax.__version__}) copies a whole table to change "
        f"some of its rows: {copied:,} bytes for 8 rows of a test table of {size:,}. "
        "Plan without host and cached in splits and pins; on such as cpu:2+h100:8 "
        "processes of CPUs hold what devices cannot"
    )


def _check_program(plan: TablesPlan, step: TableStep) -> None:
    """Refuses a loss with the plan's tables but another program."""
    if plan.program_hash not in ("", program_hash(step.program)):
        raise PlanError(
            "this plan is for another loss: the tables are the same, and the program "
            "around their lookups is not, or another version of JAX traced it. Plan "
            "again for this loss"
        )


def _check_shapes(plan: TablesPlan, adapter: Adapter) -> None:
    leaves = dict(
        zip(adapter.param_paths, jax.tree.leaves(adapter.params), strict=True)
    )
    planned: dict[str, tuple[int, ...]] = {
        table.name: (table.rows, table.width) for table in plan.all_tables
    }
    planned |= {leaf.path: tuple(leaf.shape) for leaf in plan.dense.trained}
    for path, shape in planned.items():
        found = tuple(leaves[path].shape) if path in leaves else shape
        if found != shape:
            raise PlanError(
                f"this plan is for another model: {path} has the shape {found}, and "
                f"{shape} was planned. Plan again"
            )
