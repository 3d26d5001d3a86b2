"""``wh.train_elastic``: a training loop whose members may come and go."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from whalejax.api.losses import Job
from whalejax.distributed.launch_env import KEY_FILE
from whalejax.elastic.environment import SUPERVISOR
from whalejax.meshes.checks import Arguments, is_number
from whalejax.runtime.state import TrainState


_LONGEST_SECONDS: Final = 10**10


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
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Train a job with whoever is there, under ``whalejax launch --processes MIN:MAX``.

    Each process runs some of the micro-batches of every step and adds its gradients up
    with those of the others by messages. When one is lost, the others run what it had
    not done and go on; when one joins, it gets the state from them. The global batch,
    its micro-batches, their random keys and the order of the sum depend on the step
    alone, so that losses are those of an undisturbed run. Without a launcher, this
    process trains alone, to the same losses.

    Args:
        job: what is trained; the same in all processes.
        steps: to be done in all, those of a checkpoint counted.
        save: folder of checkpoints, in which a run that begins goes on from the newest.
        save_every: steps between checkpoints; there is one after the last step too.
        keep: how many checkpoints stay, the newest ones.
        batch: samples of the global batch; the job's own number if left out.
        num_micro_batches: of a step, which is what members share; the largest number
            up to 16 that divides the batch if left out. With ``mesh``, 1 if left out,
            or that number where ``mesh`` names stages.
        precision: as for ``wh.plan``.
        seed: of the model's and the run's random keys.
        mesh: one model over the devices of all processes, in place of a whole replica
            in each: ``"auto"`` as the planner chooses; sizes of mesh axes, such as
            ``{"fsdp": -1, "tensor": 2}`` where -1 takes all that is left; or a
            function that gives them for a number of devices. The processes meet by
            the platform's collectives and begin anew, with another plan, when they
            change: from their newest state where one was lost, without losing a step
            where one is told to end or others come. A number of processes for which
            there is no plan is not used, and the reason is in the journal.
        copy_every: with ``mesh``, steps between copies of the shards in the memory of
            the machine, and of a second one where there are several, which outlive the
            processes and are read before a checkpoint is; the best number by Daly's
            formula if left out, none are made if 0.
        mtbf: mean seconds between failures, for that formula.

    Yields:
        The state after each step from where this process joined, and its metrics:
        ``loss``, what the loss reports, ``generation`` and ``goodput``. The next step
        consumes the state.

    Raises:
        WhaleError: an argument cannot be used, no supervisor answers, this process
            differs from the others, or the run cannot go on.
    """
    from whalejax.elastic.member import Member, Training
    from whalejax.elastic.mesh_sizes import refusal
    from whalejax.elastic.programs import ReplicaPrograms

    problems = Arguments("wh.train_elastic")
    if not isinstance(job, Job):
        problems.refuse("job", job, "a wh.Job")
    problems.whole("steps", steps, least=1)
    if save is not None:
        problems.path("save", save, "the path of a folder, or None")
    problems.whole("save_every", save_every, least=1)
    problems.whole("keep", keep, least=1)
    problems.whole("batch", batch, least=1, none=True)
    problems.whole("num_micro_batches", num_micro_batches, least=1, none=True)
    problems.whole("seed", seed)
    if mesh is not None and (expected := refusal(mesh)):
        problems.refuse("mesh", mesh, expected)
    problems.whole("copy_every", copy_every, least=0, none=True)
    if not is_number(mtbf) or not 0 < mtbf < _LONGEST_SECONDS:
        problems.refuse(
            "mtbf", mtbf, f"seconds, more than 0 and below {_LONGEST_SECONDS}"
        )
    problems.raise_if_any()
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
    if mesh is not None:
        return _spread(job, training, settings, mesh)
    programs = ReplicaPrograms(job, **settings)
    address = os.environ.get(SUPERVISOR)
    if address is None:
        return _alone(programs, training)
    return Member(programs, training, address, os.environ.get(KEY_FILE, "")).run()


def _spread(
    job: Job, training: Any, settings: dict[str, Any], mesh: Any
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """The steps of one model over all processes."""
    from whalejax.elastic.spread import SpreadMember
    from whalejax.elastic.spread_programs import SpreadPrograms

    facts = {k: str(settings[k]) for k in ("batch", "precision", "seed")}
    facts["asked micro-batches"] = str(settings["micro_batches"])
    if isinstance(mesh, Mapping | str):
        facts["mesh"] = str(mesh)
    member = SpreadMember(
        lambda: SpreadPrograms(job, mesh=mesh, **settings),
        training,
        facts,
        supervised=SUPERVISOR in os.environ,
    )
    return member.run()


def _alone(programs: Any, training: Any) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """The same steps in one process."""
    from whalejax.elastic.saving import Saver
    from whalejax.meshes.errors import warn
    from whalejax.runtime.resume import held

    def tell(kind: str, *, step: int, path: str = "", why: str = "") -> None:
        if kind == "not_saved":
            warn(f"no checkpoint was written after step {step}: {why}")

    with held(training.save):
        saver = Saver(programs, training.save, training.save_every, training.keep, tell)
        state = programs.newest(training.save)
        try:
            for done in range(int(state.step), training.steps):
                parts: dict[Any, Any] = {}
                nodes = [(0, programs.count)]
                programs.add_up(state, programs.batch(done), nodes, parts, lambda: None)
                state, metrics = programs.finish(state, parts[nodes[0]])
                if saver.is_due(done + 1, training.steps):
                    saver.save(state, done + 1)
                yield state, {**metrics, "generation": 0, "goodput": 1.0}
        finally:
            saver.wait()  # Also where the loop was left.
