"""The Plan: what was decided, in plain data that travels as JSON.

A plan names mesh axes, the tables that say which logical dimension each axis shards
in each TaskGraph, the layout of every leaf, and what all of it is predicted to cost.
Nothing in it refers to JAX, so a plan made on a laptop can be read, compared and
checked anywhere; ``whalejax.compile`` turns it into a program.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from whalejax.meshes.checks import is_printable, is_whole, shown
from whalejax.meshes.cluster import Cluster
from whalejax.planner.entries import BatchLeaf as BatchLeaf
from whalejax.planner.entries import Beyond as Beyond
from whalejax.planner.entries import Candidate as Candidate
from whalejax.planner.entries import Candidates, Collective
from whalejax.planner.entries import LeafPlan as LeafPlan
from whalejax.planner.entries import Pace as Pace
from whalejax.planner.entries import RegionTable as RegionTable
from whalejax.planner.entries import RoleInfo as RoleInfo
from whalejax.planner.errors import NothingFits as NothingFits
from whalejax.planner.errors import PlanError as PlanError
from whalejax.planner.model.logical_dimensions import starred
from whalejax.planner.plan import fields, plan_file
from whalejax.planner.plan.fingerprint import program_data
from whalejax.planner.plan.plan_file import PLAN_VERSION as PLAN_VERSION
from whalejax.planner.plan.report.pictures import Pictured
from whalejax.planner.search.micro_batches import noted
from whalejax.planner.terms import Chosen as Chosen
from whalejax.planner.terms import MemoryTerms as MemoryTerms
from whalejax.planner.terms import Remat as Remat
from whalejax.planner.terms import TimeTerms as TimeTerms


if TYPE_CHECKING:
    from whalejax.planner.plan.report.diff import PlanDiff


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """A pipeline.

    Attributes:
        schedule: one of ``schedules.NAMES``.
        chunks: parts of the model on each stage.
        layers: of each part, along the model; empty where parts are no whole layers.
        executor: ``"spmd"``, one program in which all stages run one loop, or
            ``"mpmd"``, programs of each stage's own.
        starts: of stages with programs of their own, the parameter whose reading
            begins each part but the first; empty where ``stage`` marks say it.
        plans: of such stages, the plan of each on its own devices.
        kinds: device kind of each stage, where they differ.
        blocks: of such stages with programs of their own, which of the equal parts of
            the devices, in node order, each lies on; empty where they are in order.
        turns, ahead, back: of stages in lockstep, how many turns a step has, and in how
            many of them some stage computes forward and backward; else 0.
        stash: of stages in lockstep, what is kept of a micro-batch in flight:
            ``"inputs"``, and the backward pass computes the layers again, or
            ``"residuals"``, all that their derivative reads.
        paces: predictions for each part along the model, in its order.
        handed_seconds: predicted, from one part to the next on another stage.
    """

    schedule: str
    chunks: int = 1
    layers: tuple[int, ...] = ()
    executor: str = "spmd"
    starts: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = ()
    kinds: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    turns: int = 0
    ahead: int = 0
    back: int = 0
    stash: str = ""
    paces: tuple[Pace, ...] = ()
    handed_seconds: float = 0.0

    def words(self) -> str:
        """The pipeline in a few words."""
        layers = self.layers
        parts = f" of {self.chunks} parts a stage" if self.chunks > 1 else ""
        if not layers:
            return f"{self.schedule}{parts}, {self._from()}{self._on()}"
        each = f"{min(layers)}–{max(layers)}" if len(set(layers)) > 1 else layers[0]
        kept = f", {self.stash} kept" if self.stash else ""
        return f"{self.schedule}{parts}, {each} layers each{kept}{self._on()}"

    def _on(self) -> str:
        """Its kinds of devices, where there are several."""
        return f" on {' → '.join(dict.fromkeys(self.kinds))}" if self.kinds else ""

    def _from(self) -> str:
        """Where its parts begin."""
        if not self.starts:
            return "cut as marked"
        return f"cut before {', '.join(self.starts)}"


class Question(Protocol):
    """What was planned, kept beside its plan."""

    def again(self, **changes: Any) -> Plan:
        """The plan under other circumstances; ``Plan.what_if``."""
        ...

    def verify(
        self, plan: Plan, topology: str | None, *, timeout_seconds: float
    ) -> Any:
        """What its compiler makes of a plan; ``Plan.verify``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Pictured):
    """How to run one model on one cluster.

    Attributes:
        version: of the format.
        model_hash: of the model, batch and marks it was made for.
        cluster: the machine it was made for.
        axes: mesh axes and sizes, outermost first; sizes of 1 are left out.
        device_order: for each place of the mesh, the number of its device in the
            cluster; empty for the cluster's own order.
        num_micro_batches: parts of the global batch, one after the other.
        zero: what is sharded over ``data``: 1 optimizer state, 2 also gradients.
            Over ``fsdp`` parameters are always sharded (ZeRO-3).
        remat: (TaskGraph, policy) where the backward pass computes again: ``"dots"``
            keeps results of products with weights, ``"named"`` what the model names,
            ``"full"`` only what a layer is given.
        offload: what lies in host memory: ``"optimizer"`` state (of matrices; vectors
            stay), ``"activations"``, ``"params"`` (those that say ``hosted``).
        sequence_parallel: ``tensor`` shards the sequence between the products whose
            other dimensions it shards.
        attention: (TaskGraph, ``"ring"`` or ``"gather"``), how attention runs where
            not as the model computes it; ``"*"`` stands for the others.
        loss_chunks: parts of a device's tokens whose logits are made one at a time.
        precision: ``"f32"`` (as the model says), ``"bf16"`` or ``"f16"``.
        precisions: (TaskGraph, precision) where only some compute in 16 bits; ``"*"``
            stands for the others.
        default: the strategy of what no mark covers, as text, or empty.
        roles: the logical dimensions.
        compute: one table for each TaskGraph.
        storage: for the axes that shard storage only, roles in order of preference.
        leaves: every parameter; those that are trained first, in their tree's order.
        batch: every leaf of the batch.
        batch_tree: the containers around them, as text.
        collectives: what one step communicates, folded.
        time, memory: predictions by term.
        candidates: what else was weighed, best first.
        notes: what a user should know.
        product_flops: of matrix products, on one device in one step; 0 in estimates.
        optimizer_bytes: state that the planned optimizer keeps of all parameters,
            whole; None where that is not known.
        stages: the pipeline, if there is one.
        shares: micro-batches of each rank of ``data``, where ranks are unlike and each
            takes whole micro-batches; empty where every rank has a part of each.
        pipelines: where such ranks are pipelines, the plan of each, with all
            micro-batches; ``stages`` are then those of the first.
        runnable: ``whalejax.compile`` can run it.
        beyond: what it does beyond what can be run, or None.
        compiler_options: (name, value) pairs that the step is compiled with.
        source: how the command line named the model, then its options, or empty.
        question: what was planned, to be asked again. Not in files.
    """

    version: int = PLAN_VERSION
    model_hash: str
    cluster: Cluster
    axes: tuple[tuple[str, int], ...]
    device_order: tuple[int, ...] = ()
    num_micro_batches: int
    zero: int
    remat: Remat = ()
    offload: tuple[str, ...] = ()
    sequence_parallel: bool = False
    attention: Chosen = ()
    loss_chunks: int = 1
    precision: str
    precisions: Chosen = ()
    default: str
    roles: tuple[RoleInfo, ...]
    compute: tuple[RegionTable, ...]
    storage: tuple[tuple[str, tuple[str, ...]], ...]
    leaves: tuple[LeafPlan, ...]
    batch: tuple[BatchLeaf, ...]
    collectives: tuple[Collective, ...]
    time: TimeTerms
    memory: MemoryTerms
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    batch_tree: str = ""
    product_flops: int = 0
    optimizer_bytes: int | None = None
    stages: Stages | None = None
    shares: tuple[int, ...] = ()
    pipelines: tuple[Plan, ...] = ()
    runnable: bool = True
    beyond: Beyond | None = None
    compiler_options: tuple[tuple[str, bool | int | float | str], ...] = ()
    source: tuple[str, ...] = ()
    question: Question | None = dataclasses.field(
        default=None, compare=False, repr=False, metadata={"kept": False}
    )

    def __post_init__(self) -> None:
        fields.check_plan(self)

    @property
    def hash(self) -> str:
        """Short hash of everything that changes the program."""
        text = json.dumps(program_data(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def trained(self) -> tuple[LeafPlan, ...]:
        """The parameters that are trained, in the order of their tree."""
        return tuple(leaf for leaf in self.leaves if leaf.trained)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes and sizes, outermost first."""
        return dict(self.axes)

    @property
    def apart(self) -> tuple[Plan, ...]:
        """The plans of stages with programs of their own; empty without such."""
        return () if self.stages is None else self.stages.plans

    @property
    def room_bytes(self) -> int:
        """Memory of a device of those that ``memory`` is predicted for."""
        each = [own for one in self.pipelines or (self,) for own in one.apart]
        same = [p for p in each if self.memory in (p.memory, p.memory.crossing)]
        return min(own.cluster.memory_bytes for own in same or [self])

    @property
    def replica(self) -> Plan:
        """The plan of one rank of ``data``, where ranks take unlike shares."""
        axes = tuple(axis for axis in self.axes if axis[0] != "data")
        return dataclasses.replace(self, axes=axes, shares=())

    def batch_slices(self, node: int) -> tuple[slice, ...]:
        """The samples that a node takes of every global batch, with shares as planned.

        Args:
            node: its number; a process runs one node.

        Returns:
            A slice for each of its micro-batches, to be taken one behind the other.

        Raises:
            PlanError: there is no such node, or every device takes a part of each
                micro-batch.
        """
        from whalejax.planner.plan.uneven_replicas import slices_of

        return slices_of(self, node)

    @property
    def num_devices(self) -> int:
        """Devices the plan uses."""
        if self.pipelines or self.apart:
            return sum(plan.num_devices for plan in self.pipelines or self.apart)
        return math.prod(size for _, size in self.axes)

    def times(self, collective: Collective) -> int:
        """How often a collective of the plan runs in one step.

        Stages in lockstep that keep only what they were given compute forward again
        before they compute backward.
        """
        fields.check_collective(collective)
        stages, phase = self.stages, collective.phase
        if stages is None or not stages.turns or phase == "update":
            # Where ranks take unlike shares: on the one that takes most.
            return collective.times(max(self.shares, default=self.num_micro_batches))
        again = 0 if stages.stash == "residuals" else stages.back
        passes = {"forward": stages.ahead + again, "backward": stages.back}
        return collective.count * passes.get(phase, stages.turns)

    @property
    def asked_precision(self) -> str | dict[str, str]:
        """Its precision as ``wh.plan`` takes it, for all or by TaskGraph."""
        return dict(self.precisions) or self.precision

    @property
    def scales_loss(self) -> bool:
        """Some of it computes in float16, where small gradients vanish."""
        return "f16" in (self.precision, *dict(self.precisions).values())

    def home(self, path: str) -> Plan:
        """The plan of the stage that stores a parameter; itself without stages apart.

        Args:
            path: of the parameter.
        """
        if not is_printable(path):
            self.leaf(path)  # says what is wrong with it
        for plan in self.apart:
            if any(leaf.path == path for leaf in plan.leaves):
                return plan
        return self

    def leaf(self, path: str) -> LeafPlan:
        """The plan of one parameter.

        Args:
            path: dotted; a ``*`` in place of a layer's number, as plans are printed,
                takes the first.

        Raises:
            PlanError: no parameter has that path; the nearest are named.
        """
        from whalejax.planner.plan.report.why import no_such_leaf

        for leaf in self.leaves if isinstance(path, str) else ():
            if path in (leaf.path, starred(leaf.path)):
                return leaf
        raise PlanError(no_such_leaf(self, path))

    def why(self, path: str) -> str:
        """Why a parameter is laid out as it is, what else was weighed and its cost.

        Args:
            path: dotted path of a parameter.

        Raises:
            PlanError: no parameter has that path.
        """
        from whalejax.planner.plan.report.why import why

        return why(self, self.leaf(path))

    @property
    def runner_up(self) -> Candidate | None:
        """The best plan of another layout that fits; None where there is none."""
        return next(iter(self.alternatives(1)), None)

    def alternatives(self, n: int = 5) -> Candidates:
        """The best plans of other layouts that fit, best first; printed, a line each.

        Args:
            n: at most so many, 0 or more; a plan remembers about a dozen.
        """
        if not is_whole(n, 0):
            raise PlanError(f"alternatives: n is {shown(n)}; expected 0 or more")
        others = (c for c in self.candidates if c.fits and c.verdict != "chosen")
        return Candidates(itertools.islice(others, n))

    def what_if(self, **changes: Any) -> Plan:
        """The plan for the same model under other circumstances.

        Args:
            changes: ``batch`` (samples of the global batch), ``cluster``, ``mesh``,
                ``zero``, ``num_micro_batches``, ``precision``, ``compiler_options``,
                ``remat``, ``offload``, ``sequence_parallel``, ``attention``,
                ``loss_chunks``, ``shares``, ``allow_idle`` and ``runnable``; what is
                not given stays as it was asked for. A number of micro-batches that
                was fixed may mean other sizes on another ``cluster``; a note says so.

        Raises:
            PlanError: the plan was read from a file, which holds no model; or there is
                no such plan.
        """
        return noted(self, self._asked("what_if").again(**changes), changes)

    def verify(
        self, topology: str | None = None, *, timeout_seconds: float = 1800.0
    ) -> Any:
        """Compile the plan's training step with the real compiler; nothing is run.

        A process of its own compiles, for hardware that need not be here: TPUs need
        the extra ``whalejax[tpu-compile]``, GPUs ``whalejax verify --setup-gpu``.

        Args:
            topology: such as ``"v5p:4x4x4"``, ``"h100:2x8"`` or ``"local"``; the plan's
                own cluster if left out.
            timeout_seconds: the compiler is stopped after so long.

        Returns:
            A ``whalejax.verification.comparison.Verification``: ``print`` shows memory,
            traffic and products, predicted and compiled.

        Raises:
            PlanError: the plan was read from a file, which holds no model, cannot run,
                or is for another number of devices.
            WhaleError: the topology or its compiler is not to be had, or the compiler
                died or took too long.
        """
        question = self._asked("verify")
        return question.verify(self, topology, timeout_seconds=timeout_seconds)

    def _asked(self, what: str) -> Question:
        if self.question is None:
            raise PlanError(
                f"this plan was read from a file, without its model: {what} has "
                "nothing to work on. Make it with wh.plan(...)"
            )
        return self.question

    def explain(self) -> str:
        """Why this plan: what decided, what would change the choice, what stays whole.

        Returns:
            Lines of text, with numbers.
        """
        from whalejax.planner.plan.report.explain import explain

        return explain(self)

    def describe(self) -> str:
        """Where the plan stands on the taxonomy of distributed training.

        Returns:
            Lines of text: what is parallel, who is synchronous, what is exchanged over
            which topology, what is replicated.
        """
        from whalejax.planner.plan.report.describe import describe

        return describe(self)

    def diff(self, other: Plan) -> PlanDiff:
        """What changes from this plan to another, with its cost.

        Args:
            other: a plan of the same model or of another one, on any cluster.

        Returns:
            Settings, parameters, traffic and terms that differ; ``print`` shows them.
        """
        from whalejax.planner.plan.report.diff import diff

        return diff(self, other)

    def flax_rules(self) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
        """The plan as Flax's table from logical dimensions to mesh axes.

        Returns:
            (dimension, axes) pairs; None for one that stays whole.

        Raises:
            PlanError: one table cannot say what the plan does; every dimension with
                two meanings is listed.
        """
        from whalejax.planner.plan.report.export import flax_rules

        return flax_rules(self)

    def maxtext_flags(self) -> dict[str, int]:
        """The mesh as MaxText's flags, such as ``{"ici_tensor_parallelism": 4}``."""
        from whalejax.planner.plan.report.export import maxtext_flags

        return maxtext_flags(self)

    def table(self, *, all_rows: bool = False) -> str:
        """What ``print(plan)`` shows, and on demand all of it.

        Args:
            all_rows: every kind of parameter, not only those that hold most.

        Returns:
            Lines as wide as the terminal or ``COLUMNS``; whole ones without either.
        """
        from whalejax.planner.plan.report.page import page

        return page(self, all_rows=all_rows)

    def __str__(self) -> str:
        return self.table()

    def partition_specs(self) -> dict[str, Any]:
        """The stored layout of every parameter.

        Returns:
            Path to ``jax.sharding.PartitionSpec``.
        """
        from whalejax.meshes.jax_mesh import partition_spec

        return {leaf.path: partition_spec(leaf.param_spec) for leaf in self.leaves}

    def mesh(self, devices: Any = None) -> Any:
        """The ``jax.sharding.Mesh`` of the plan.

        Args:
            devices: the devices to use, in node order; all of them if left out. The
                plan's ``device_order`` is taken of them.
        """
        from whalejax.meshes.jax_mesh import build_mesh

        if self.apart:
            raise PlanError(
                "every stage of this plan has a mesh of its own. Take "
                "plan.stages.plans[i].mesh(devices) with the devices of stage i"
            )
        return build_mesh(self.axes, devices, order=self.device_order)

    def document(self) -> dict[str, Any]:
        """The plan as plain JSON data, with hashes for checking."""
        return plan_file.document_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file appears whole or not at all.

        Raises:
            PlanError: the file cannot be written there.
        """
        fields.check_path("Plan.save", path)
        plan_file.write(self, path)

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str = "the plan") -> Plan:
        """The plan that ``document`` wrote.

        Args:
            document: is kept.
            name: what errors call it.

        Raises:
            PlanError: it is no plan, is damaged, was edited, or has another format.
        """
        fields.check_document(document, name)
        return plan_file.from_document(cls, document, name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan. Nothing that the file names is run or imported.

        Raises:
            PlanError: the file is no plan, is damaged, was edited, or has another
                format.
        """
        fields.check_path("Plan.load", path)
        return plan_file.read(cls, path)
