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


Dtype = Literal["float32", "float64"]

DEVICES: Final = (2, 4, 8)
MICRO_BATCHES: Final = (1, 2, 4)
DTYPES: Final[tuple[Dtype, ...]] = ("float64", "float32")
BATCH_SIZE: Final = 32  # 4 micro-batches of 8 samples, one for each of 8 devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model under test.

    Attributes:
        name: in case ids.
        make: its job; takes ``batch_size``, ``annotated``, the dtypes and ``options``.
        options: what else ``make`` is given.
        quiet: further options that take away what depends on a sample's place in the
            batch (dropout), for measuring the noise of float32.
        marks: what its annotations cover: ``"all"`` of the model, ``"part"`` of it
            (the rest is left to the default strategy).
        experts: it has some.
        seconds: about what a case takes, to prefer cheap ones.
    """

    name: str
    make: Callable[..., wh.Job]
    options: Mapping[str, Any] = field(default_factory=dict)
    quiet: Mapping[str, Any] = field(default_factory=dict)
    marks: Literal["all", "part"] = "all"
    experts: bool = False
    seconds: float

    def job(self, dtype: Dtype, *, annotated: bool, quiet: bool = False) -> wh.Job:
        """The job at a dtype."""
        options = {**self.options, **(self.quiet if quiet else {})}
        return self.make(
            dtype=dtype, annotated=annotated, batch_size=BATCH_SIZE, **options
        )


def _reference_model(name: str) -> Callable[..., wh.Job]:
    """A model of the package, with all of its dtypes set to one."""

    def make(*, dtype: str, **options: Any) -> wh.Job:
        kinds = {"param_dtype": dtype}
        if not name.startswith("mlp"):
            kinds["dtype"] = dtype
        return models.job(name, **kinds, **options)

    return make


_GPT: Final = _reference_model("gpt-test")
_MOE: Final = _reference_model("moe-test")

MODELS: Final = (
    Model(name="mlp", make=_reference_model("mlp-test"), seconds=1.0),
    Model(name="gpt", make=_GPT, options={"layers": 1}, seconds=2.5),
    Model(name="gpt-scan", make=_GPT, options={"scan_layers": True}, seconds=3.5),
    Model(
        name="gpt-scan-remat",
        make=_GPT,
        options={"scan_layers": True, "remat": True},
        seconds=4.0,
    ),
    Model(
        name="gpt-tied",
        make=_GPT,
        options={"layers": 1, "tied_embedding": True},
        seconds=2.5,
    ),
    Model(
        name="gpt-padded",
        make=_GPT,
        options={"layers": 1, "padded": True, "dropout_rate": 0.1},
        quiet={"dropout_rate": 0.0},
        seconds=3.5,
    ),
    Model(
        name="bert",
        make=_reference_model("bert-test"),
        options={"layers": 1},
        quiet={"deterministic": True},
        seconds=4.0,
    ),
    Model(
        name="resnet",
        make=_reference_model("resnet-test"),
        options={"blocks": (1, 1), "width": 8, "image_size": 12},
        seconds=6.0,
    ),
    Model(
        name="linen",
        make=linen_job.job,
        quiet={"dropout_rate": 0.0},
        seconds=2.0,
    ),
    Model(
        name="moe-top-2",
        make=_MOE,
        options={"layers": 1, "gating": "top_2"},
        marks="part",
        experts=True,
        seconds=4.0,
    ),
    Model(
        name="moe-switch",
        make=_MOE,
        options={"layers": 1, "gating": "switch"},
        marks="part",
        experts=True,
        seconds=4.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A way to spread a model.

    Attributes:
        name: in case ids.
        mesh: of so many devices; None where there are too few. An empty mesh leaves
            it to the planner.
        zero: ZeRO level, or None for the planner's choice.
        default: of what no mark covers.
        annotated: the model's own marks are in.
        batch, params, gradients, optimizer: mesh axes that shard some leaf of each;
            None where the planner decides. A plan that shards less would be compared
            for nothing.
    """

    name: str
    mesh: Callable[[int], dict[str, int] | None]
    zero: int | None = 0
    default: Literal["replicate", "split"] | None = None
    annotated: bool = False
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
        }


def _all(axis: str) -> Callable[[int], dict[str, int] | None]:
    return lambda n: {axis: n}


def _two_by(outer: str, inner: str) -> Callable[[int], dict[str, int] | None]:
    return lambda n: {outer: 2, inner: n // 2} if n >= 4 else None


def _axes(*names: str) -> frozenset[str]:
    return frozenset(names)


def _sharded(
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
