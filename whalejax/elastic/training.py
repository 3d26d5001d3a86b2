"""``wh.train_elastic``: a training loop whose members may join and leave."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from whalejax.distributed.launch_env import KEY_FILE
from whalejax.elastic.environment import SUPERVISOR
from whalejax.lowering.train_state import TrainState
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number, short_repr
from whalejax.meshes.errors import warn
from whalejax.user_code.argument_checks import check_function
from whalejax.user_code.losses import Job
from whalejax.wire.run_messages import NotSaved, Report


if TYPE_CHECKING:
    from whalejax.elastic.member import Training
    from whalejax.elastic.mesh_sizes import Asked
    from whalejax.elastic.replica_programs import PlannedReplica
    from whalejax.journals.reduction_choice import GradientReduction, Way
    from whalejax.planner.plan.plan import Plan
    from whalejax.tables.sparse_optimizers import SparseOptimizer


_LONGEST_SECONDS: Final = 10**10


@names_arguments("wh.train_elastic")
def train_elastic(
    job: Job,
    *,
    steps: int,
    save: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    keep: int = 3,
    batch: int | None = None,
    num_micro_batches: int | None = None,
    precision: str | Mapping[str, str] = "f32",
    seed: int = 0,
    mesh: Mapping[str, int] | Callable[[int], Mapping[str, int]] | str | None = None,
    copy_every: int | None = None,
    mtbf: float = 3600.0,
    noise_scale: bool = False,
    tables: SparseOptimizer | None = None,
    replace_every: int | None = None,
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Trains a job with the present processes, under ``whalejax launch --processes
    MIN:MAX``.

    A run has one of two forms. In the first, each process has a full replica and runs
    some of the micro-batches of every step. The processes reduce their gradients by
    messages. When a process fails, the others run its unfinished micro-batches and go
    on. A process that joins gets the state from the others. The global batch, its
    micro-batches, their random keys and the order of the sum depend only on the step,
    so losses equal those of an undisturbed run. Without a launcher, this process trains
    alone, to the same losses.

    In the second form, one model is sharded over all processes. They use the platform's
    collectives, and restart after each failure.

    If ``mesh`` is None, the first process that joins decides for all. It takes one
    model if a replica does not fit in one process, and else replicas on CPUs. On
    accelerators it takes the form that costs less, with the cost of failures. The
    launcher and ``whalejax status`` report the choice and its reason.

    Args:
        job: Job to train; the same in all processes.
        steps: Total number of steps, including those of a restored checkpoint.
        save: Folder of checkpoints; a new run goes on from the newest one there.
        save_every: Steps between checkpoints. The last step also has one, and so has
            the step at which the loop is left.
        keep: Number of newest checkpoints to keep.
        batch: Samples of the global batch; default: the job's own number.
        num_micro_batches: Number of micro-batches in a step, which members divide;
            default: the largest number up to 16 that divides the batch. One model over
            all processes takes this default only if ``mesh`` names stages, and else 1.
        precision: Precision of the model, as ``wh.plan`` takes it.
        seed: Seed of the model's and the run's random keys.
        mesh: None chooses the form as above, and ``"replicas"`` means full replicas.
            All other values mean one model over the devices of all processes.
            ``"auto"`` lets the planner choose the mesh. Sizes of mesh axes, such as
            ``{"fsdp": -1, "tensor": 2}``, may have one -1, for all remaining devices.
            A function returns the sizes for a number of devices. When the number of
            processes changes, they restart with another plan: after a failure from the
            newest saved state, and otherwise without a lost step. Numbers of processes
            without a plan are not used, and the journal has the reason.
        copy_every: For one model over all processes, steps between copies of its shards
            in the memory of this machine, and of another machine if there is one. The
            copies outlive the processes and are tried before a checkpoint. Default: the
            best number by Daly's formula; 0 makes no copies.
        mtbf: Mean seconds between failures of any process, for Daly's formula and for
            the choice between both forms.
        noise_scale: Whether to measure the gradient-noise scale of replicas, from the
            gradients of their micro-batches. The metric ``noise_scale`` has it, in
            samples. Far below it, twice the batch halves the number of steps. Each
            process measures its own micro-batches. Needs 2 micro-batches or more.
        tables: Update rule of embedding tables, from ``wh.sparse_optimizer``. The job
            is then one model over all processes, and each has a part of the tables. The
            tables are placed again whenever the number of processes changes. Only
            numbers of processes are used whose devices divide the batch.
        replace_every: With ``tables``, number of steps after which they are placed
            again if the lookups of these steps show a gain; see ``wh.compile_tables``.

    Yields:
        The state after each step since this process joined, and its metrics: ``loss``,
        the values that the loss reports, ``generation`` and ``goodput``. The next step
        donates the state. With ``tables`` the state is a ``TablesState``, and each
        process has the part of its devices.

    Raises:
        WhaleError: An argument is invalid, no supervisor answers, this process differs
            from the others, or the run cannot go on.
    """
    from whalejax.elastic.member import Training
    from whalejax.elastic.mesh_sizes import REPLICAS
    from whalejax.elastic.refusals import reported_refusals

    problems = Arguments("wh.train_elastic")
    _check_extent(problems, job, steps, save, save_every, keep, copy_every, mtbf)
    problems.whole("batch", batch, least=1, none=True)
    problems.whole("num_micro_batches", num_micro_batches, least=1, none=True)
    problems.whole("seed", seed)
    _check_mesh(problems, mesh)
    _check_noise_scale(problems, noise_scale, mesh)
    _check_tables(problems, tables, replace_every, mesh, num_micro_batches, noise_scale)
    with reported_refusals():
        problems.raise_if_any()
    if noise_scale:
        mesh = REPLICAS
    training = Training(
        steps=steps,
        save=None if save is None else Path(save),
        save_every=save_every,
        keep=keep,
        copy_every=copy_every,
        mtbf=float(mtbf),
    )
    settings: dict[str, Any] = {
        "batch": batch,
        "micro_batches": num_micro_batches,
        "precision": precision,
        "seed": seed,
    }
    with reported_refusals():
        if tables is not None:
            return TrainingSteps(
                _train_tables(job, training, settings, mesh, tables, replace_every)
            )
        return TrainingSteps(_train(job, training, settings, mesh, noise_scale))


class TrainingSteps(Iterator[tuple[TrainState, dict[str, Any]]]):
    """Iterator over the steps of a run, which trains while it is iterated over."""

    def __init__(self, steps: Iterator[tuple[TrainState, dict[str, Any]]]) -> None:
        self._steps = steps
        self._is_begun = False

    def __next__(self) -> tuple[TrainState, dict[str, Any]]:
        self._is_begun = True
        return next(self._steps)

    def close(self) -> None:
        """Ends this process's part in the run, as when the loop is left."""
        self._is_begun = True
        self._steps.close()  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if not self._is_begun:
            warn(
                "nothing was trained: wh.train_elastic(…) trains while something "
                "iterates over it. Write `for state, metrics in wh.train_elastic(job, "
                "steps=…):`"
            )


def _check_extent(
    problems: Arguments,
    job: object,
    steps: object,
    save: object,
    save_every: object,
    keep: object,
    copy_every: object,
    mtbf: Any,
) -> None:
    if not isinstance(job, Job):
        problems.refuse("job", job, "a wh.Job")
    problems.whole("steps", steps, least=1)
    if save is not None:
        problems.path("save", save, "the path of a folder, or None")
    problems.whole("save_every", save_every, least=1)
    problems.whole("keep", keep, least=1)
    problems.whole("copy_every", copy_every, least=0, none=True)
    if not is_number(mtbf) or not 0 < mtbf < _LONGEST_SECONDS:
        problems.refuse(
            "mtbf", mtbf, f"seconds, more than 0 and below {_LONGEST_SECONDS}"
        )


def _check_mesh(problems: Arguments, mesh: object) -> None:
    from whalejax.elastic.mesh_sizes import refusal

    if mesh is not None and (expected := refusal(mesh)):
        problems.refuse("mesh", mesh, expected)
    elif callable(mesh):
        check_function(problems, "mesh", mesh, "num_devices")


def _check_noise_scale(problems: Arguments, noise_scale: bool, mesh: object) -> None:
    from whalejax.elastic.mesh_sizes import REPLICAS

    problems.switch("noise_scale", noise_scale)
    if noise_scale is True and mesh not in (None, REPLICAS):
        problems.add(
            f"noise_scale is measured from micro-batches of replicas, and mesh is "
            f"{mesh!r:.100}. Give mesh='replicas', or leave noise_scale out"
        )


def _check_tables(
    problems: Arguments,
    tables: object,
    replace_every: object,
    mesh: object,
    num_micro_batches: object,
    noise_scale: object,
) -> None:
    from whalejax.elastic.mesh_sizes import REPLICAS
    from whalejax.tables.sparse_optimizers import SparseOptimizer

    expected = 'wh.sparse_optimizer("adagrad", 0.01), or None'
    problems.of("tables", tables, SparseOptimizer, expected, none=True)
    problems.whole("replace_every", replace_every, least=1, none=True)
    if tables is None:
        if replace_every is not None:
            problems.add(
                f"replace_every is {short_repr(replace_every)} without tables; it is "
                "the interval at which tables are placed again. Give both, or leave it "
                "out"
            )
        return
    if isinstance(mesh, str) and mesh == REPLICAS:
        problems.add(
            "mesh is 'replicas' with tables, but each process has only a part of the "
            "tables. Leave mesh out, or leave tables out to keep a full model in each "
            "process"
        )
    if num_micro_batches not in (None, 1):
        problems.add(
            f"num_micro_batches is {short_repr(num_micro_batches)}; expected 1, since "
            "a step with tables has one micro-batch. Leave it out"
        )
    if noise_scale is True:
        problems.add(
            "noise_scale was given with tables, and only replicas measure it. Leave it "
            "out"
        )


def _train_tables(
    job: Job,
    training: Training,
    settings: dict[str, Any],
    mesh: Asked | None,
    tables: SparseOptimizer,
    replace_every: int | None,
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    from whalejax.elastic.mesh_sizes import AUTO
    from whalejax.elastic.table_programs import TableSpreadPrograms
    from whalejax.journals.reduction_choice import COLLECTIVES, GradientReduction

    address = os.environ.get(SUPERVISOR)
    if address is not None:
        why = "every process has a part of the tables"
        given = GradientReduction(by=COLLECTIVES, why=why)
        _agreed(job, given, settings, training, address)
    settings = {k: v for k, v in settings.items() if k != "micro_batches"}
    mesh = AUTO if mesh is None else mesh
    facts = {k: str(settings[k]) for k in ("batch", "precision", "seed")}
    facts |= {"tables": str(tables), "replace_every": str(replace_every)}
    made = functools.partial(
        TableSpreadPrograms,
        job,
        mesh=mesh,
        tables=tables,
        replace_every=replace_every,
        **settings,
    )
    return _spread(made, mesh, training, facts)


def _train(
    job: Job,
    training: Training,
    settings: dict[str, Any],
    mesh: Asked | None,
    noise_scale: bool,
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    from whalejax.elastic.member import ElasticMember
    from whalejax.elastic.mesh_sizes import AUTO, REPLICAS
    from whalejax.elastic.replica_programs import ReplicaPrograms
    from whalejax.journals.reduction_choice import MESSAGES

    address, key_file = os.environ.get(SUPERVISOR), os.environ.get(KEY_FILE, "")
    planned: PlannedReplica | None = None
    if address is not None:
        asked = None if mesh is None else _asked_reduction(mesh)
        way, planned = _agreed(job, asked, settings, training, address)
        if mesh is None:
            mesh = REPLICAS if way == MESSAGES else AUTO
    if mesh is not None and mesh != REPLICAS:
        return _train_sharded(job, training, settings, mesh)
    programs = ReplicaPrograms(
        job, **settings, planned=planned, noise_scale=noise_scale
    )
    if address is None:
        return _alone(programs, training)
    return ElasticMember(programs, training, address, key_file).run()


def _asked_reduction(mesh: Asked) -> GradientReduction:
    from whalejax.elastic.mesh_sizes import REPLICAS
    from whalejax.journals.reduction_choice import (
        COLLECTIVES,
        MESSAGES,
        GradientReduction,
    )

    said = f"mesh={mesh!r:.200}" if not callable(mesh) else "a function as mesh"
    by = MESSAGES if mesh == REPLICAS else COLLECTIVES
    return GradientReduction(by=by, why=f"{said} was given")


def _agreed(
    job: Job,
    asked: GradientReduction | None,
    settings: dict[str, Any],
    training: Training,
    address: str,
) -> tuple[Way, PlannedReplica | None]:
    from whalejax import _compat_processes
    from whalejax.elastic.gradient_reduction.reduction_agreement import Arbiter, agreed
    from whalejax.elastic.gradient_reduction.reduction_cost import ReductionProcesses
    from whalejax.elastic.replica_programs import planned_replica
    from whalejax.planner.plan_errors import NothingFits

    wanted = {k: settings[k] for k in ("batch", "micro_batches", "precision")}
    made: list[PlannedReplica] = []

    def replica(processes: ReductionProcesses) -> Plan | None:
        try:
            replica = planned_replica(
                job,
                processes.each,
                **wanted,
                # JAX arrays would initialise devices before the processes join.
                by_shapes=processes.platform != "cpu",
            )
        except NothingFits:
            return None
        if processes.platform == "cpu":  # Accelerators are measured and planned later.
            made.append(replica)
        return replica.plan

    found = agreed(
        Arbiter(address, os.environ.get(KEY_FILE, "")),
        asked,
        replica,
        mtbf=training.mtbf,
        too_late=_compat_processes.backends_are_there,
    )
    return found.by, made[0] if made else None


def _train_sharded(
    job: Job, training: Any, settings: dict[str, Any], mesh: Any
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    from whalejax.elastic.sharded_programs import SpreadPrograms

    facts = {k: str(settings[k]) for k in ("batch", "precision", "seed")}
    facts["asked micro-batches"] = str(settings["micro_batches"])
    made = functools.partial(SpreadPrograms, job, mesh=mesh, **settings)
    return _spread(made, mesh, training, facts)


def _spread(
    made: Callable[[], Any], mesh: Asked, training: Training, facts: dict[str, str]
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    from whalejax.elastic.sharded_member import SpreadMember

    if isinstance(mesh, Mapping | str):
        facts["mesh"] = str(mesh)
    supervised = SUPERVISOR in os.environ
    return SpreadMember(made, training, facts, supervised=supervised).run()


def _alone(programs: Any, training: Any) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    from whalejax.runtime.steps_in_flight import is_divergent
    from whalejax.state.async_checkpoints import Saver
    from whalejax.state.resume import hold_folder

    def tell(report: Report) -> None:
        if isinstance(report, NotSaved):
            warn(f"no checkpoint was written after step {report.step}: {report.why}")

    with hold_folder(training.save):
        saver = Saver(programs, training.save, training.save_every, training.keep, tell)
        state = programs.newest(training.save)
        is_good = False
        try:
            for done in range(int(state.step), training.steps):
                parts: dict[Any, Any] = {}
                nodes = [(0, programs.count)]
                programs.add_up(
                    state,
                    programs.batch(done, state.samples),
                    nodes,
                    parts,
                    lambda: None,
                )
                state, metrics = programs.finish(state, parts[nodes[0]])
                is_good = not is_divergent(float(metrics["loss"]), metrics)
                if is_good and saver.is_due(done + 1, training.steps):
                    saver.save(state, done + 1)
                yield state, {**metrics, "generation": 0, "goodput": 1.0}
        except GeneratorExit:  # The loop was left.
            done = int(state.step)
            if is_good and saver.is_due(done, done) and not sys.is_finalizing():
                saver.save(state, done)
            raise
        finally:
            saver.wait()
