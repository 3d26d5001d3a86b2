"""What ``wh.plan``, ``Plan.what_if``, ``wh.search`` and commands ask for, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import optax

from whalejax.adapters.base import Adapter
from whalejax.capture.programs import Traces
from whalejax.meshes import Cluster
from whalejax.meshes.checks import plain


_NUMBERS: Final = (
    "num_micro_batches",
    "batch_axes",
    "mesh",
    "zero",
    "loss_chunks",
    "shares",
    "compiler_options",
)
"""Options that are whole numbers or hold some, which may be NumPy's."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Everything that ``wh.plan`` was asked; its options are documented there.

    Attributes:
        adapter: the model, without its values.
        batch: the global batch, abstract.
        traced: captures of the model by what they depend on.
    """

    adapter: Adapter
    batch: Any
    optimizer: optax.GradientTransformation
    cluster: Cluster
    default: Any = None
    precision: str | Mapping[str, str] = "f32"
    num_micro_batches: int | None = None
    allow_idle: bool = False
    sync_batch_stats: bool = False
    batch_axes: Any = 0
    mesh: Mapping[str, int] | None = None
    zero: int | None = None
    runnable: bool = True
    remat: str | Mapping[str, str] | None = None
    offload: str | Sequence[str] | None = None
    sequence_parallel: bool | None = None
    attention: str | Mapping[str, str] | None = None
    loss_chunks: int | None = None
    shares: str | Sequence[int] | None = None
    compiler_options: Mapping[str, bool | int | float | str] | None = None
    traced: Traces = field(default_factory=Traces)

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, plain(getattr(self, name)))


_KEPT: Final = frozenset(
    ("adapter", "optimizer", "default", "sync_batch_stats", "batch_axes", "traced")
)
"""What a plan's other versions keep; ``Plan.what_if`` changes the rest."""


def changeable() -> list[str]:
    """Names of the fields that ``Plan.what_if`` may change."""
    return [f.name for f in dataclasses.fields(PlanRequest) if f.name not in _KEPT]
