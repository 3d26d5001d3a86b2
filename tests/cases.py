"""What is compared with one device: models × strategies × devices × micro-batches.

Data and nothing else: which combinations there are, why some make no sense, and the
few that cover every pair of choices. The tests run the few, ``scripts/matrix.py`` all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import whalejax as wh
import whalejax.models as models
from tests import linen_job
from tests.covering import pinned


Dtype = Literal["float32", "float64"]
Precision = Literal["f32", "bf16", "f16"]

DEVICES: Final = (2, 4, 8)
MICRO_BATCHES: Final = (1, 2, 4)
KINDS: Final[tuple[tuple[Dtype, int, str], ...]] = (
    *(("float64", count, "none") for count in MICRO_BATCHES),
    ("float32", 2, "none"),
    ("float64", 2, "dots"),
    ("float64", 2, "full"),
)
"""Dtype, micro-batches, and what the backward pass computes again.

Whatever is wrong in float32 is wrong in float64, where it cannot hide in the rounding;
float32 stands for programs that differ by dtype, and 2 micro-batches for both what is
accumulated and what is not.
"""
BATCH_SIZE: Final = 32  # 4 micro-batches of 8 samples, one for each of 8 devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model under test.

    Attributes:
        name: in case ids.
        family: models alike in what a strategy does with them.
        make: its job; takes ``batch_size``, ``annotated``, the dtypes and ``options``.
        options: what else ``make`` is given.
        quiet: further options that take away what depends on a sample's place in the
            batch (dropout), for measuring the noise of float32.
        marks: what its annotations cover: ``"all"`` of it, or a ``"part"``, the rest
            being left to the default strategy.
        attention: it has some, and with it a sequence that meets itself.
        experts: it has some.
        tied: its only split kernel is the embedding, which the replicated part reads
            first, so that it is stored whole.
        repeats: it has layers that can be computed again and are not already.
        seconds: about what a case takes, to prefer cheap ones.
    """

    name: str
    family: str
    make: Callable[..., wh.Job]
    options: Mapping[str, Any] = field(default_factory=dict)
    quiet: Mapping[str, Any] = field(default_factory=dict)
    marks: Literal["all", "part"] = "all"
    attention: bool = False
    experts: bool = False
    tied: bool = False
    repeats: bool = True
    seconds: float

    def job(self, dtype: Dtype, *, annotated: bool, **changes: Any) -> wh.Job:
        """The job at a dtype.

        Args:
            dtype: of parameters, statistics and computation.
            annotated: its own marks are in.
            changes: of its options.
        """
        options = {"annotated": annotated, **self.options, **changes}
        return self.make(dtype=dtype, batch_size=BATCH_SIZE, **options)


def reference_model(name: str) -> Callable[..., wh.Job]:
    """A model of the package, with all of its dtypes set to one.

    Where ``follows`` it computes in the dtype that its parameters are cast to.
    """

    def make(*, dtype: str, follows: bool = False, **options: Any) -> wh.Job:
        kinds = {"param_dtype": dtype}
        if not name.startswith("mlp") and not follows:
            kinds["dtype"] = dtype
        return models.job(name, **kinds, **options)

    return make


_GPT: Final = reference_model("gpt-test")
_MOE: Final = reference_model("moe-test")

MODELS: Final = (
    Model(
        name="mlp",
        family="dense",
        make=reference_model("mlp-test"),
        repeats=False,
        seconds=0.4,
    ),
    Model(
        name="gpt",
        family="decoder",
        make=_GPT,
        options={"layers": 1},
        attention=True,
        seconds=2.0,
    ),
    Model(
        name="gpt-scan",
        family="decoder",
        make=_GPT,
        options={"scan_layers": True},
        attention=True,
        seconds=2.5,
    ),
    Model(
        name="gpt-scan-remat",
        family="decoder",
        make=_GPT,
        options={"scan_layers": True, "remat": True},
        attention=True,
        repeats=False,
        seconds=2.0,
    ),
    Model(
        name="gpt-fused",
        family="decoder",
        make=_GPT,
        options={"fused_qkv": True, "scan_layers": True, "remat": True},
        attention=True,
        repeats=False,
        seconds=3.0,
    ),
    Model(
        name="gpt-tied",
        family="decoder",
        make=_GPT,
        options={"layers": 1, "tied_embedding": True},
        tied=True,
        attention=True,
        seconds=1.5,
    ),
    Model(
        name="gpt-padded",
        family="decoder",
        make=_GPT,
        options={"layers": 1, "padded": True, "dropout_rate": 0.1},
        quiet={"dropout_rate": 0.0},
        attention=True,
        seconds=2.5,
    ),
    Model(
        name="bert",
        family="encoder",
        make=reference_model("bert-test"),
        options={"layers": 1},
        quiet={"deterministic": True},
        attention=True,
        seconds=3.0,
    ),
    Model(
        name="resnet",
        family="convolutions",
        make=reference_model("resnet-test"),
        options={"blocks": (1, 1), "width": 8, "image_size": 12},
        seconds=2.0,
    ),
    Model(
        name="linen",
        family="dense",
        make=linen_job.job,
        quiet={"dropout_rate": 0.0},
        seconds=1.2,
    ),
    Model(
        name="moe-top-2",
        family="experts",
        make=_MOE,
        options={"layers": 1, "gating": "top_2"},
        marks="part",
        experts=True,
        seconds=2.2,
    ),
    Model(
        name="moe-switch",
        family="experts",
        make=_MOE,
        options={"layers": 1, "gating": "switch"},
        marks="part",
        experts=True,
        seconds=1.8,
    ),
    Model(
        name="moe-dropless",
        family="experts",
        make=_MOE,
        options={"layers": 1, "gating": "top_2", "routing": "dropless"},
        marks="part",
        experts=True,
        seconds=2.5,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to spread a model.

    Attributes:
        name: in case ids.
        mesh: of so many devices; None where there are too few. An empty mesh leaves
            it to the planner.
        layout: the strategy that says where things lie, if this one says more.
        zero: ZeRO level, or None for the planner's choice.
        default: of what no mark covers.
        sequence_parallel: ``tensor`` shards the sequence too; None for the planner.
        attention: how it runs; None for the planner.
        loss_chunks: parts in which logits are made; None for the planner.
        annotated: the model's own marks are in.
        stages: of a pipeline around the loss; ``tests/stages.py`` has such strategies.
        schedule: theirs.
        batch, params, gradients, optimizer: mesh axes that shard some leaf of each;
            None where the planner decides. A plan that shards less would be compared
            for nothing.
    """

    name: str
    mesh: Callable[[int], dict[str, int] | None]
    layout: str = ""
    zero: int | None = 0
    default: Literal["replicate", "split"] | None = None
    annotated: bool = False
    sequence_parallel: bool | None = False
    attention: Literal["gather", "ring"] | None = "gather"
    loss_chunks: int | None = 1
    stages: int = 1
    schedule: str = ""
    batch: frozenset[str] | None = None
    params: frozenset[str] | None = None
    gradients: frozenset[str] | None = None
    optimizer: frozenset[str] | None = None

    def options(self, devices: int) -> dict[str, Any]:
        """What ``wh.plan`` is given."""
        marks = {"replicate": wh.replicate, "split": wh.split}
        return {
            "mesh": self.mesh(devices) or None,
            "zero": self.zero,
            "default": marks[self.default]() if self.default else None,
            "sequence_parallel": self.sequence_parallel,
            "attention": self.attention,
            "loss_chunks": self.loss_chunks,
        }


def _all(axis: str) -> Callable[[int], dict[str, int] | None]:
    return lambda n: {axis: n}


def _two_by(outer: str, inner: str) -> Callable[[int], dict[str, int] | None]:
    return lambda n: {outer: 2, inner: n // 2} if n >= 4 else None


def axes(*names: str) -> frozenset[str]:
    """Mesh axes."""
    return frozenset(names)


def sharded(
    batch: frozenset[str],
    params: frozenset[str] = frozenset(),
    gradients: frozenset[str] = frozenset(),
    optimizer: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The axes that a strategy shards by; what follows parameters has theirs too."""
    return {
        "batch": batch,
        "params": params,
        "gradients": params | gradients,
        "optimizer": params | gradients | optimizer,
    }


STRATEGIES: Final = (
    Strategy(name="dp", mesh=_all("data"), **sharded(axes("data"))),
    Strategy(
        name="zero-1",
        mesh=_all("data"),
        zero=1,
        **sharded(axes("data"), optimizer=axes("data")),
    ),
    Strategy(
        name="zero-2",
        mesh=_all("data"),
        zero=2,
        **sharded(axes("data"), gradients=axes("data")),
    ),
    Strategy(name="fsdp", mesh=_all("fsdp"), **sharded(axes("fsdp"), axes("fsdp"))),
    Strategy(
        name="hsdp",
        mesh=_two_by("data", "fsdp"),
        zero=1,
        **sharded(axes("data", "fsdp"), axes("fsdp"), optimizer=axes("data")),
    ),
    Strategy(
        name="tensor",
        mesh=_all("tensor"),
        default="split",
        **sharded(axes(), axes("tensor")),
    ),
    Strategy(
        name="data-tensor",
        mesh=_two_by("data", "tensor"),
        default="split",
        **sharded(axes("data"), axes("tensor")),
    ),
    Strategy(
        name="fsdp-tensor",
        mesh=_two_by("fsdp", "tensor"),
        default="split",
        **sharded(axes("fsdp"), axes("fsdp", "tensor")),
    ),
    Strategy(
        name="expert",
        mesh=_all("expert"),
        **sharded(axes("expert"), axes("expert")),
    ),
    Strategy(
        name="data-expert",
        mesh=_two_by("data", "expert"),
        **sharded(axes("data", "expert"), axes("expert")),
    ),
    Strategy(name="context", mesh=_all("context")),
    Strategy(name="data-context", mesh=_two_by("data", "context")),
    Strategy(name="context-tensor", mesh=_two_by("context", "tensor"), default="split"),
    Strategy(
        name="tensor-sequence",
        mesh=_all("tensor"),
        default="split",
        sequence_parallel=True,
        **sharded(axes(), axes("tensor")),
    ),
    Strategy(
        name="fsdp-tensor-sequence",
        mesh=_two_by("fsdp", "tensor"),
        default="split",
        sequence_parallel=True,
        **sharded(axes("fsdp"), axes("fsdp", "tensor")),
    ),
    Strategy(
        name="context-tensor-sequence",
        mesh=_two_by("context", "tensor"),
        default="split",
        sequence_parallel=True,
    ),
    Strategy(name="ring", mesh=_all("context"), attention="ring"),
    Strategy(name="data-ring", mesh=_two_by("data", "context"), attention="ring"),
    Strategy(
        name="fsdp-tensor-ring",
        mesh=_two_by("fsdp", "tensor"),
        default="split",
        attention="ring",
        **sharded(axes("fsdp"), axes("fsdp", "tensor")),
    ),
    Strategy(
        name="ring-tensor-sequence",
        mesh=_two_by("context", "tensor"),
        default="split",
        sequence_parallel=True,
        attention="ring",
    ),
    Strategy(
        name="data-chunks",
        mesh=_all("data"),
        loss_chunks=2,
        **sharded(axes("data")),
    ),
    Strategy(
        name="ring-tensor-sequence-chunks",
        mesh=_two_by("context", "tensor"),
        default="split",
        sequence_parallel=True,
        attention="ring",
        loss_chunks=3,
    ),
    Strategy(
        name="replicate-split",
        mesh=_all("tensor"),
        annotated=True,
        **sharded(axes("tensor"), axes("tensor")),
    ),
    Strategy(
        name="data-replicate-split",
        mesh=_two_by("data", "tensor"),
        annotated=True,
        **sharded(axes("data", "tensor"), axes("tensor")),
    ),
    Strategy(
        name="default-replicate",
        mesh=lambda n: {},
        zero=None,
        default="replicate",
        annotated=True,
        sequence_parallel=None,
        attention=None,
        loss_chunks=None,
    ),
    Strategy(
        name="planner",
        mesh=lambda n: {},
        zero=None,
        sequence_parallel=None,
        attention=None,
        loss_chunks=None,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination.

    Attributes:
        model, strategy: of ``MODELS`` and ``STRATEGIES``.
        devices: how many.
        num_micro_batches: accumulated in a step.
        dtype: of parameters, statistics and computation.
        remat: what the backward pass computes again.
        offload: what is in host memory.
        precision: what the model computes in; its own dtype if ``"f32"``.
    """

    model: Model
    strategy: Strategy
    devices: int
    num_micro_batches: int
    dtype: Dtype
    remat: str = "none"
    offload: tuple[str, ...] = ()
    precision: Precision = "f32"

    @property
    def id(self) -> str:
        """Such as ``"gpt/fsdp/8/m2/float64"``."""
        words = (
            self.model.name,
            self.strategy.name,
            str(self.devices),
            f"m{self.num_micro_batches}",
            self.dtype if self.precision == "f32" else self.precision,
            *[self.remat] * (self.remat != "none"),
            *["-".join(self.offload)] * bool(self.offload),
        )
        return "/".join(words)

    @property
    def choices(self) -> tuple[tuple[str, str], ...]:
        """What was chosen of each kind, by name."""
        return (
            ("model", self.model.name),
            ("strategy", self.strategy.name),
            ("devices", str(self.devices)),
            ("micro-batches", str(self.num_micro_batches)),
            ("dtype", self.dtype),
            ("remat", self.remat),
        )

    @property
    def seconds(self) -> float:
        """About what it takes beside its reference, to prefer cheap ones."""
        return self.model.seconds * (1.3 if self.num_micro_batches > 1 else 1.0)

    @property
    def reference(self) -> tuple[str, str, int, str]:
        """What it is compared with; cases of the same share it."""
        return self.model.name, self.dtype, self.num_micro_batches, self.precision

    @property
    def options(self) -> dict[str, Any]:
        """What ``wh.plan`` is given."""
        return {
            **self.strategy.options(self.devices),
            "remat": self.remat,
            "offload": self.offload,
            "precision": self.precision,
        }


def expected_axes(case: Case) -> dict[str, frozenset[str] | None]:
    """The mesh axes that shard the batch, the parameters and what follows them."""
    strategy = case.strategy
    found = {
        "batch": strategy.batch,
        "params": strategy.params,
        "gradients": strategy.gradients,
        "optimizer": strategy.optimizer,
    }
    if case.model.tied and strategy.annotated:
        for what in ("params", "gradients", "optimizer"):
            axes = found[what]
            found[what] = None if axes is None else axes - {"tensor"}
    return found


def reason_to_skip(case: Case) -> str | None:
    """Why a combination makes no sense, or None where it does."""
    strategy, model = case.strategy, case.model
    if strategy.mesh(case.devices) is None:
        return "two mesh axes need at least 4 devices"
    if "expert" in strategy.name and not model.experts:
        return "the model has no experts"
    words = ("context", "sequence", "ring")
    if any(word in strategy.name for word in words) and not model.attention:
        return "the model has no attention"
    if strategy.attention == "ring" and model.name == "bert":
        return "its attention has dropout, which no ring serves"
    if "replicate-split" in strategy.name and model.marks == "part":
        return "its marks leave the rest to a default strategy: see default-replicate"
    if case.remat != "none" and not model.repeats:
        return "no layers of the model are left to be computed again"
    return None


def every_combination() -> Iterator[Case]:
    """All combinations, sensible or not; those that share a reference together."""
    for model, (dtype, count, remat), strategy, devices in itertools.product(
        MODELS, KINDS, STRATEGIES, DEVICES
    ):
        yield Case(
            model=model,
            strategy=strategy,
            devices=devices,
            num_micro_batches=count,
            dtype=dtype,
            remat=remat,
        )


@functools.cache
def full_matrix() -> tuple[Case, ...]:
    """All combinations that make sense."""
    return tuple(c for c in every_combination() if reason_to_skip(c) is None)


def skipped() -> dict[str, int]:
    """How many combinations each reason takes out."""
    found: dict[str, int] = {}
    for case in every_combination():
        reason = reason_to_skip(case)
        if reason is not None:
            found[reason] = found.get(reason, 0) + 1
    return found


def pairs(case: Case) -> frozenset[Any]:
    """Every pair of choices that a case makes.

    Of the models of a family one is enough for each strategy and each dtype; strategies
    do not meet dtypes, because what is wrong in float32 is wrong in float64.
    """
    families = {("model", case.model.name): ("family", case.model.family)}
    return frozenset(
        (families.get(one, one) if other[0] in ("strategy", "dtype") else one, other)
        for one, other in itertools.combinations(case.choices, 2)
        if (one[0], other[0]) != ("strategy", "dtype")
    )


@functools.cache
def pairwise() -> tuple[Case, ...]:
    """Few and cheap cases that make every pair of choices which any case makes."""
    return pinned("cases", full_matrix(), lambda case: case.id)


def choices(case: Case) -> frozenset[Any]:
    """Every choice that a case makes, by itself; of models, the family.

    Of strategies that shard a sequence or experts, the words of their names: each of
    their axes and kinds of attention, in whichever company.
    """
    made = {one for pair in pairs(case) for one in pair}
    found = {one for one in made if one[0] not in ("model", "strategy")}
    words = case.strategy.name.split("-")
    if {"context", "sequence", "ring", "expert", "chunks"} & {*words}:
        return frozenset([*found, *(("word", word) for word in words)])
    return frozenset([*found, ("strategy", case.strategy.name)])


@functools.cache
def default() -> tuple[Case, ...]:
    """Cases of ``pairwise`` that make every choice once: what runs by default."""
    return pinned("default", pairwise(), lambda case: case.id)
