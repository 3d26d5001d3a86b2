"""A plan as plain data: the decisions, and their predicted costs.

``plan.plan.Plan`` adds the methods for users: reports, drawings, files and replanning.
Functions that do not need these methods take this type.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from whalejax.meshes.checks import (
    Arguments,
    check_fields,
    is_number,
    is_printable,
    is_whole,
    short_repr,
)
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.units import count_text
from whalejax.planner.cost_terms import Chosen, MemoryTerms, TimeTerms
from whalejax.planner.fingerprint import program_data
from whalejax.planner.plan_entries import (
    BatchLeaf,
    Candidate,
    Candidates,
    Collective,
    LeafPlan,
    ModelWork,
    RegionTable,
    RoleInfo,
    Swarm,
    TablesData,
    UnsupportedFeatures,
    VirtualStagePrediction,
    starred,
)
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.step_options import COMBINATIONS, StepOptions, option_counts


PLAN_VERSION: Final = 17
"""Version of the file format."""

_COUNTS: Final = ("version", "num_micro_batches", "group_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesData:
    """Pipeline of a plan: its schedule, its stages and their predictions.

    Attributes:
        schedule: Name in ``schedules.NAMES``.
        chunks: Number of parts of the model on each stage.
        layers: Number of layers of each part, in model order; empty if parts are not
            full layers.
        executor: ``"spmd"`` (all stages run one loop of one program) or ``"mpmd"``
            (each stage has programs of its own).
        starts: Cut points of stage programs: the parameter that each part but the first
            is first to read. Empty if ``stage`` marks set the parts.
        plans: Plan of each stage on its devices, for stage programs; else empty.
        kinds: Device kind of each stage if kinds differ, else empty.
        blocks: Index of each stage's block of devices, in node order, for stage
            programs; empty if stages are in that order.
        turns, ahead, back: Number of turns in a step of lockstep stages: all, those
            with forward passes, and those with backward passes. 0 for stage programs.
        stash: Values that lockstep stages save for a micro-batch in flight:
            ``"inputs"`` (the backward pass recomputes the layers) or ``"residuals"``
            (all values that the derivative reads).
        paces: Predictions for each part, in model order.
        handed_seconds: Predicted seconds of a transfer to the next part's stage.
    """

    schedule: str
    chunks: int = 1
    layers: tuple[int, ...] = ()
    executor: str = "spmd"
    starts: tuple[str, ...] = ()
    plans: tuple[PlanData, ...] = ()
    kinds: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()
    turns: int = 0
    ahead: int = 0
    back: int = 0
    stash: str = ""
    paces: tuple[VirtualStagePrediction, ...] = ()
    handed_seconds: float = 0.0

    def words(self) -> str:
        """Returns a short text on the pipeline."""
        layers = self.layers
        parts = f" of {self.chunks} parts a stage" if self.chunks > 1 else ""
        if not layers:
            return f"{self.schedule}{parts}, {self._from()}{self._on()}"
        each = count_text(max(layers), "layer")
        each = f"{min(layers)}–{each}" if len(set(layers)) > 1 else each
        kept = f", {self.stash} kept" if self.stash else ""
        return f"{self.schedule}{parts}, {each} each{kept}{self._on()}"

    def _on(self) -> str:
        return f" on {' → '.join(dict.fromkeys(self.kinds))}" if self.kinds else ""

    def _from(self) -> str:
        if not self.starts:
            return "cut as marked"
        return f"cut before {', '.join(self.starts)}"


class PlannedQuestion(Protocol):
    """Request that a plan answers. It is kept in memory, but not in files."""

    @property
    def sequence_length(self) -> int | None:
        """Number of tokens of a sample; None if samples differ or have none."""
        ...

    def replan(self, **changes: Any) -> Any:
        """Plans with other settings, as ``Plan.what_if`` does."""
        ...

    def verify(self, plan: Any, topology: str | None, *, timeout_seconds: float) -> Any:
        """Compiles a plan with the real compiler, as ``Plan.verify`` does."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanData(StepOptions):
    """Data of a model's plan on a cluster; ``plan.plan.Plan`` documents the fields."""

    version: int = PLAN_VERSION
    model_hash: str
    cluster: Cluster
    axes: tuple[tuple[str, int], ...]
    device_order: tuple[int, ...] = ()
    num_micro_batches: int
    zero: int
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
    work: ModelWork | None = dataclasses.field(
        default=None, metadata={"unless_default": True}
    )
    stages: StagesData | None = None
    shares: tuple[int, ...] = ()
    pipelines: tuple[PlanData, ...] = ()
    group_size: int = dataclasses.field(default=1, metadata={"unless_default": True})
    per_micro_batch: bool = dataclasses.field(
        default=False, metadata={"unless_default": True}
    )
    gap: float | None = dataclasses.field(
        default=None, metadata={"unless_default": True}
    )
    runnable: bool = True
    beyond: UnsupportedFeatures | None = None
    compiler_options: tuple[tuple[str, bool | int | float | str], ...] = ()
    swarm: Swarm | None = dataclasses.field(
        default=None, metadata={"unless_default": True}
    )
    tables: TablesData | None = dataclasses.field(
        default=None, metadata={"unless_default": True}
    )
    source: tuple[str, ...] = ()
    question: PlannedQuestion | None = dataclasses.field(
        default=None, compare=False, repr=False, metadata={"kept": False}
    )

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def hash(self) -> str:
        """Short hash of all parts that change the program."""
        text = json.dumps(program_data(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def trained(self) -> tuple[LeafPlan, ...]:
        """Trained parameters, in the order of their tree."""
        return tuple(leaf for leaf in self.leaves if leaf.trained)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes and sizes, outermost first."""
        return dict(self.axes)

    @property
    def stage_plans(self) -> tuple[Self, ...]:
        """Plans of the stages of stage programs; empty for other plans."""
        plans: Any = () if self.stages is None else self.stages.plans
        stage_plans: tuple[Self, ...] = plans  # of the same class as this plan
        return stage_plans

    @property
    def room_bytes(self) -> int:
        """Bytes of memory of one device of the kind that ``memory`` is for."""
        each = [
            own
            for pipeline in self.pipelines or (self,)
            for own in pipeline.stage_plans
        ]
        same = [
            p for p in each if self.memory in (p.memory, p.memory.with_exchange_buffer)
        ]
        return min(own.cluster.memory_bytes for own in same or [self])

    @property
    def replica(self) -> Self:
        """Plan of one rank of ``data``, for plans whose ranks have unequal shares."""
        axes = tuple(axis for axis in self.axes if axis[0] != "data")
        return dataclasses.replace(self, axes=axes, shares=())

    @property
    def num_devices(self) -> int:
        """Number of devices of the plan, including those of ranks with share 0."""
        if self.pipelines or self.stage_plans:
            return sum(plan.num_devices for plan in self.pipelines or self.stage_plans)
        return math.prod(size for _, size in self.axes)

    def times(self, collective: Collective) -> int:
        """Returns how often one of the plan's collectives runs in a step.

        Lockstep stages that save only their inputs also recompute the forward pass.
        """
        problems = Arguments("Plan.times", PlanError)
        problems.of("collective", collective, Collective, "one of plan.collectives")
        problems.raise_if_any()
        stages, phase = self.stages, collective.phase
        if stages is None or not stages.turns or phase == "update":
            # With unequal shares, the rank with the most micro-batches counts.
            shares = self.shares
            if self.beyond is not None and self.beyond.shares:
                shares = tuple(most for _, most in self.beyond.shares)
            return collective.times(max(shares, default=self.num_micro_batches))
        again = 0 if stages.stash == "residuals" else stages.back
        passes = {"forward": stages.ahead + again, "backward": stages.back}
        return collective.count * passes.get(phase, stages.turns)

    @property
    def asked_precision(self) -> str | dict[str, str]:
        """Precision in the form that ``wh.plan`` takes: for all, or by TaskGraph."""
        return dict(self.precisions) or self.precision

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, as small float16 gradients could underflow."""
        return "f16" in (self.precision, *dict(self.precisions).values())

    def home(self, path: str) -> Self:
        """Returns the plan of the stage that stores a parameter; without stages, this
        plan.

        Args:
            path: Path of the parameter.
        """
        if not is_printable(path):
            self.leaf(path)  # Raises the error for an unknown path.
        for plan in self.stage_plans:
            if any(leaf.path == path for leaf in plan.leaves):
                return plan
        return self

    def leaf(self, path: str) -> LeafPlan:
        """Returns the layouts of one parameter.

        Args:
            path: Dotted path. ``*`` as the number of a layer, as in printed plans,
                selects the first layer.

        Raises:
            PlanError: No parameter has that path; lists the nearest paths.
        """
        for leaf in self.leaves if isinstance(path, str) else ():
            if path in (leaf.path, starred(leaf.path)):
                return leaf
        raise PlanError(_no_such_leaf(self, path))

    @property
    def runner_up(self) -> Candidate | None:
        """Best candidate with another layout that fits, or None."""
        return next(iter(self.alternatives(1)), None)

    def alternatives(self, n: int = 5) -> Candidates:
        """Returns the best candidates with other layouts that fit, best first.

        They print as one line each.

        Args:
            n: Largest number of candidates; default: 5. A plan stores about a dozen.

        Raises:
            PlanError: ``n`` is not a whole number of 0 or more.
        """
        if not is_whole(n, 0):
            raise PlanError(f"alternatives: n is {short_repr(n)}; expected 0 or more")
        others = (c for c in self.candidates if c.fits and c.verdict != "chosen")
        return Candidates(itertools.islice(others, n))

    def partition_specs(self) -> dict[str, Any]:
        """Returns the stored layout of every parameter.

        Returns:
            ``jax.sharding.PartitionSpec`` of each parameter, by path.
        """
        from whalejax.meshes.jax_mesh import partition_spec

        return {leaf.path: partition_spec(leaf.param_spec) for leaf in self.leaves}

    def mesh(self, devices: Any = None) -> Any:
        """Returns the ``jax.sharding.Mesh`` of the plan.

        Args:
            devices: Devices to use, in node order; default: all. The plan's
                ``device_order`` is applied to them.

        Raises:
            PlanError: The plan has stage programs, so each stage has a mesh of its own.
            WhaleError: The number of devices differs from the plan's.
        """
        from whalejax.meshes.jax_mesh import build_mesh

        if self.stage_plans:
            raise PlanError(
                "every stage of this plan has a mesh of its own. Use "
                "plan.stages.plans[i].mesh(devices) with the devices of stage i"
            )
        return build_mesh(self.axes, devices, order=self.device_order)


def _check_fields(plan: PlanData) -> None:
    check_fields(plan, "plan", PlanError)
    problems = Arguments("plan", PlanError)
    counts = {name: getattr(plan, name) for name in _COUNTS}
    for name, count in (counts | option_counts(plan)).items():
        problems.whole(name, count, least=1)
    problems.whole("zero", plan.zero, most=2)
    problems.choice("combine", plan.combine, COMBINATIONS)
    for name in ("product_flops", "optimizer_bytes"):
        value = getattr(plan, name)
        if value is not None and not (is_number(value) and value >= 0):
            problems.refuse(name, value, "0 or more")
    if plan.gap is not None and not (is_number(plan.gap) and 0 <= plan.gap <= 1):
        problems.refuse("gap", plan.gap, "0 to 1")
    if plan.precision not in PRECISIONS:
        problems.refuse("precision", plan.precision, "f32, bf16 or f16")
    problems.raise_if_any()


def _no_such_leaf(plan: PlanData, path: object) -> str:
    paths = [leaf.path for leaf in plan.leaves]
    text = path if isinstance(path, str) else ""
    near = difflib.get_close_matches(text, paths, n=3, cutoff=0.3) or paths[:3]
    return (
        f"no parameter has the path {short_repr(path)} (the model has {len(paths)}). "
        f"Nearest: {', '.join(near)}"
    )
