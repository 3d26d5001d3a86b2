"""Programs of a member: a job as one replica, and its state as bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from whalejax.agreement.facts import training_facts, values_hash
from whalejax.api import job_plans
from whalejax.capture.split_checks import DependentSamplesError
from whalejax.distributed.standard_streams import say
from whalejax.elastic.noise_scale import NoiseScale
from whalejax.lowering.global_arrays import impl_of, raw_array, wrapped
from whalejax.lowering.multihost.fingerprints import fingerprint
from whalejax.lowering.train_state import TrainState
from whalejax.lowering.uneven.contributing_replica import ContributingReplica
from whalejax.lowering.uneven.replica_executor import UnevenReplicasExecutor
from whalejax.membership.assignment import Node, halves
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.train_step import compile as compile_step
from whalejax.state.adopt_state import to_save
from whalejax.state.async_checkpoints import Tell
from whalejax.state.checkpoint import save
from whalejax.state.resume import (
    RestoredRun,
    batches_by_samples,
    checkpoints,
    restore_newest,
)
from whalejax.state.state_bytes import (
    PIECE_BYTES,
    digest_of,
    packed,
    piece_count,
    unpacked,
)
from whalejax.user_code.losses import Job
from whalejax.wire.run_messages import Note, Recovered, State


MICRO_BATCHES: Final = 16
"""Largest default number of micro-batches in a step: several for each member, so that
members seldom idle."""

_LONGEST_NOTE: Final = 2000

Buffers = list[np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedReplica:
    """A job, planned as one full replica.

    Attributes:
        plan: Plan of this single replica.
        model: Shapes of the model.
        first: The first global batch, or its shapes.
        size: Samples of a global batch.
        count: Number of micro-batches in a step.
    """

    plan: Plan
    model: Any
    first: Any
    size: int
    count: int


def planned_replica(
    job: Job,
    cluster: Cluster,
    *,
    batch: int | None,
    micro_batches: int | None,
    precision: Any,
    by_shapes: bool = False,
) -> PlannedReplica:
    """Plans a full replica; touches no device, unless the job's batch function does.

    Args:
        job: Job to train.
        cluster: The devices of one process.
        batch: Samples of the global batch; default: the job's own number.
        micro_batches: Number of micro-batches in a step; default: the largest up to
            ``MICRO_BATCHES`` that divides the batch.
        precision: Precision of the model, as ``wh.plan`` takes it.
        by_shapes: Whether to take only the shapes of the first batch, if its function
            can be traced.

    Raises:
        PlanError: The replica does not fit on ``cluster``, or cannot be planned.
    """
    make = _shapes_of_batch if by_shapes else job_plans.first_batch
    first = make(job, batch)
    size = batch or job.batch_size or 0
    model = job_plans.abstract_model(job)

    def planned(count: int) -> Plan:
        return job_plans.make_plan(
            job,
            model,
            first,
            cluster,
            precision=precision,
            num_micro_batches=count,
            shares=[count],
        )

    counts = possible_counts(size, job.group_size)
    count = micro_batches or counts[0]
    try:
        plan = planned(count)
    except DependentSamplesError as error:
        if micro_batches is not None:
            raise
        plan, count = _with_fewer(planned, counts[1:], error)
    return PlannedReplica(plan=plan, model=model, first=first, size=size, count=count)


def _shapes_of_batch(job: Job, batch: int | None) -> Any:
    """Returns the first batch's shapes; its values if the job cannot be traced."""
    try:
        return jax.eval_shape(lambda: job.batch_at(0, batch))
    except Exception:  # any error of the user's function
        return job_plans.first_batch(job, batch)


class ReplicaPrograms:
    """A job as one replica that runs some of the micro-batches of each step.

    Attributes:
        job: Job that is trained.
        size: Samples of a global batch.
        step: Compiled step of this replica alone.
        count: Number of micro-batches in a step.
        shapes: Length and dtype of each buffer of a gradient sum.
    """

    def __init__(
        self,
        job: Job,
        *,
        batch: int | None,
        micro_batches: int | None,
        precision: Any,
        seed: int,
        planned: PlannedReplica | None = None,
        noise_scale: bool = False,
    ) -> None:
        """Plans and traces the replica; compiles nothing yet.

        Args:
            job: Job to train.
            batch: Samples of the global batch; default: the job's own number.
            micro_batches: Number of micro-batches in a step; see ``planned_replica``.
            precision: Precision of the model, as ``wh.plan`` takes it.
            seed: Seed of the run.
            planned: Replica planned earlier with the first batch's values; default:
                planned here. A replica for another platform is planned again.
            noise_scale: Whether to measure the gradient-noise scale.
        """
        self.job, self._seed = job, seed
        here = jax.local_devices()[0].platform
        if planned is None or planned.plan.cluster.platform != here:
            planned = planned_replica(
                job,
                local_cluster(),
                batch=batch,
                micro_batches=micro_batches,
                precision=precision,
            )
        plan = planned.plan
        self.size = planned.size
        self.step = compile_step(
            plan,
            job.loss_fn,
            planned.model,
            optimizer=job.optimizer,
            batch=planned.first,
            devices=jax.local_devices()[: plan.cluster.num_devices],
        )
        runner = self.step._runner
        assert isinstance(runner, UnevenReplicasExecutor)
        self._runner = runner
        self._contributing = ContributingReplica(runner, measures_squares=noise_scale)
        self.count, self.shapes = planned.count, self._contributing.shapes
        self._noise: NoiseScale | None = None
        if noise_scale:
            if self.count < 2:
                raise WhaleError(
                    "noise_scale needs the gradients of 2 micro-batches or more, and "
                    "a step has 1. Give num_micro_batches=2"
                )
            self._noise = NoiseScale(self.size, self.count)
        self._data = values_hash(jax.tree.leaves(planned.first))

    def facts(self) -> dict[str, str]:
        """Returns data that must be equal in all members, by name."""
        program = self._runner.program
        return training_facts(
            program.captured.jaxpr,
            plan=self.step.plan.hash,
            optimizer=fingerprint(program),
            first_batch=self._data,
            seed=self._seed,
        )

    # The state.

    def init_state(self) -> TrainState:
        """Returns the initial state, which is the same in every member."""
        key = jax.random.key(self._seed)
        return self.step.init(self.job.make_model, rng=key)

    def newest(self, save: Path | None, tell: Tell = lambda report: None) -> TrainState:
        """Restores the newest complete checkpoint of a folder, or makes a new state.

        Args:
            save: Folder of checkpoints, or None.
            tell: Function that receives each ``Note`` and ``Recovered`` report.
        """
        newest = restore_newest(self.step, checkpoints(save) if save else [])
        state = self.init_state() if newest is None else newest.state
        tell_source(state, newest, tell)
        return state

    def pieces(self, state: TrainState) -> Iterator[State]:
        """Yields a state as messages; the last has a hash of the whole state."""
        data = packed([np.asarray(raw_array(x)) for x in jax.tree.leaves(state)])
        about = {
            "sha256": digest_of([data]),
            "samples": state.samples,
        }
        count = piece_count(data.size)
        for place in range(count):
            piece = data[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]
            text = json.dumps(about) if place == count - 1 else ""
            yield State(place=place, count=count, text=text, arrays=(piece,))

    def assembled(self, take: Callable[[], State], whose: str) -> TrainState:
        """Returns a state from another member's messages.

        Raises:
            WhaleError: The messages do not make up a state of this job.
        """
        pieces: list[np.ndarray] = []
        while True:
            said = take()
            pieces.extend(said.arrays)
            if said.place != len(pieces) - 1 or len(said.arrays) != 1:
                raise WhaleError(f"{whose} sent the pieces of its state out of order")
            if len(pieces) == said.count:
                break
        data = np.concatenate([x.reshape(-1).view(np.uint8) for x in pieces])
        try:
            about = json.loads(said.text)
            digest, samples = about["sha256"], int(about["samples"])
        except (ValueError, KeyError, TypeError) as error:
            raise WhaleError(
                f"{whose} sent a state without its hash and its number of samples. Run "
                "the same code in all members"
            ) from error
        if digest_of([data]) != digest:
            raise WhaleError(f"the state that {whose} sent was changed on the way")
        abstract = self.step.abstract_state()
        avals = jax.tree.leaves(abstract)
        arrays = unpacked([raw_array(aval) for aval in avals], data)
        if arrays is None:
            raise WhaleError(
                f"the state that {whose} sent has {data.size} bytes, which are not "
                "those of this job's state. Run the same code in all members"
            )
        tree: Any = jax.tree.structure(abstract)
        state: TrainState = tree.unflatten(map(_typed, arrays, avals))
        return dataclasses.replace(state, samples=samples)

    def save(
        self, path: Path, state: TrainState, before_it_appears: Callable[[], None]
    ) -> None:
        """Writes a checkpoint.

        Args:
            path: Path of the new checkpoint.
            state: State to write, which is not donated.
            before_it_appears: Function called before the checkpoint gets its name. It
                raises if the checkpoint must not appear.
        """
        whole = to_save(state, self.step.abstract_state(), trains=True)
        save(
            path,
            whole,
            self.step.plan,
            self.step._batch_size,
            before_it_appears=before_it_appears,
        )

    def copy_state(self, state: TrainState) -> TrainState:
        """Returns a copy of the state, which no later step donates."""
        result: TrainState = jax.tree.map(
            lambda x: _typed(np.array(raw_array(x), copy=True), x), state
        )
        return dataclasses.replace(result, samples=state.samples)

    # A step.

    def batch(self, step: int, samples: int | None = None) -> list[Any]:
        """Returns the flat leaves of the global batch of a step.

        Args:
            step: Number of the step, from 0.
            samples: Samples used by all earlier steps; default: those of ``step``
                batches.

        Raises:
            PlanError: The batch has other shapes than the planned one.
        """
        batch = self._batches(step * self.size if samples is None else samples)
        return self.step._layout.check(batch, step)

    @functools.cached_property
    def _batches(self) -> Callable[[int], Any]:
        return batches_by_samples(self.job, self.size)

    def add_up(
        self,
        state: TrainState,
        batch: Sequence[Any],
        nodes: Sequence[Node],
        held: dict[Node, Buffers],
        look: Callable[[], None],
    ) -> None:
        """Runs micro-batches, and sums their gradients for each node of the sum tree.

        Args:
            state: State of the run, which is not donated.
            batch: Global batch of the step.
            nodes: Nodes whose sums are computed.
            held: Sums by node. New sums are added here, so that they are kept if
                ``look`` raises.
            look: Function called before every micro-batch.
        """

        def value(node: Node) -> None:
            if node in held:
                return
            if node[1] - node[0] == 1:
                look()
                held[node] = self._contributing.part(state, batch, node[0])
                return
            both = halves(node)
            for half in both:
                value(half)
            left, right = (held.pop(half) for half in both)
            held[node] = [x + y for x, y in zip(left, right, strict=True)]

        for node in nodes:
            value(node)

    def finish(
        self, state: TrainState, sums: Sequence[np.ndarray]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Returns the next state and the metrics."""
        if self._noise is None:
            return self._contributing.finish(state, sums)
        squares = list(self._contributing.squares.values())
        self._contributing.squares.clear()
        self._noise.update(squares, self._contributing.total_square(sums))
        state, metrics = self._contributing.finish(state, sums)
        if (value := self._noise.value) is not None:
            metrics = {**metrics, "noise_scale": value}
        return state, metrics

    def warm_up(self) -> None:
        """Compiles the programs for steps and for copies of a state by running them."""
        # A member may have to save or fetch a state at any time in the run.
        state = self.copy_state(self.init_state())
        batch = self.batch(0)
        sums = self._contributing.part(state, batch, 0)
        if self._noise is not None:
            self._contributing.total_square(sums)
            self._contributing.squares.clear()
        state, metrics = self._contributing.finish(state, sums)
        jax.block_until_ready((state, metrics))


NEW_STATE: Final = "a new state"


def tell_source(state: TrainState, found: RestoredRun | None, tell: Tell) -> None:
    """Reports where a state came from.

    Args:
        state: State with which a run goes on.
        found: Restored checkpoint, with its notes; None for a new state.
        tell: Function that receives each ``Note`` and ``Recovered`` report.
    """
    for note in () if found is None else found.notes:
        say(f"whalejax: {note}")
        tell(Note(why=note[:_LONGEST_NOTE]))
    source = NEW_STATE if found is None else found.checkpoint.name
    tell(Recovered(step=int(state.step), source=source))


def possible_counts(size: int, group: int | None) -> list[int]:
    """Returns the numbers of micro-batches that divide a batch, the largest first.

    Args:
        size: Samples of the batch.
        group: Number of consecutive samples that stay in one micro-batch; None for 1.

    >>> possible_counts(40, 8), possible_counts(7, None), possible_counts(9, 2)
    ([5, 1], [7, 1], [1])
    """
    counts = range(MICRO_BATCHES, 1, -1)
    return [*(n for n in counts if size % (n * (group or 1)) == 0), 1]


def _with_fewer(
    planned: Callable[[int], Plan], counts: Sequence[int], error: DependentSamplesError
) -> tuple[Plan, int]:
    """Returns the plan with the most micro-batches that the loss allows, and their
    number."""
    for count in counts if error.unit else ():
        if count > 1:
            with contextlib.suppress(DependentSamplesError):
                return planned(count), count
    say(f"whalejax: a step is one micro-batch, which one member computes: {error}")
    return planned(1), 1


def local_cluster() -> Cluster:
    """Returns this process's devices: all its accelerators, or one CPU."""
    if jax.local_devices()[0].platform == "cpu":
        return parse_cluster("cpu:1")  # Micro-batches are divided by measured times.
    return Cluster.detect()


def _typed(array: np.ndarray, like: Any) -> Any:
    """Returns a NumPy array on devices, with the sharding and type of ``like``."""
    result = jax.device_put(array, like.sharding)
    # On CPUs the result may alias the NumPy memory, which a step would donate.
    result = jax.numpy.array(result, copy=True)
    return jax.device_put(wrapped(result, impl_of(like)), like.sharding)
