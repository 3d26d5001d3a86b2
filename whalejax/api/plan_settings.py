"""Settings of ``wh.plan`` except the model, checked before the model is traced.

Checks that depend on the model run when its graph is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import jax
import numpy as np
import optax

from whalejax.api.fixed_axes import check_axes
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.arguments.near_names import PRECISION_SYNONYMS, near_hint
from whalejax.meshes.checks import Arguments, is_number, is_whole, plain, short_repr
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.square_cube_of_plan import bytes_per_second
from whalejax.planner.plan_entries import SUM_WIRES, WIRES
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.step_options import UserOptions, by_task_graph, check_user_options
from whalejax.runtime.compiler_options import checked_options
from whalejax.user_code.argument_checks import check_optimizer


_NUMBERS: Final = (
    *(f.name for f in fields(UserOptions)),
    "num_micro_batches",
    "group_size",
    "batch_axes",
    "mesh",
    "zero",
    "shares",
    "compiler_options",
    "margin",
    "bandwidth",
)
"""Settings with numbers, which NumPy types may represent."""

_SWITCHES: Final = (
    "runnable allow_idle sync_batch_stats per_micro_batch verified swarm".split()
)

_KEPT: Final = frozenset(
    "optimizer default sync_batch_stats axis_names trainable batch_axes".split()
)
"""Settings that ``Plan.what_if`` cannot change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings(UserOptions):
    """Checked arguments of ``wh.plan``, without the loss, the model and the batch."""

    optimizer: optax.GradientTransformation | None = None
    cluster: Cluster | str | None = None
    default: Any = None
    precision: str | Mapping[str, str] = "f32"
    num_micro_batches: int | None = None
    allow_idle: bool = False
    sync_batch_stats: bool = False
    group_size: int | None = None
    per_micro_batch: bool = False
    axis_names: Mapping[str, str] | None = None
    trainable: Any = None
    batch_axes: Any = 0
    mesh: Mapping[str, int] | None = None
    zero: int | None = None
    runnable: bool = True
    shares: str | Sequence[int] | None = None
    compiler_options: Mapping[str, bool | int | float | str] | None = None
    margin: float | None = None
    verified: bool = False
    swarm: bool = False
    bandwidth: str | float | None = None
    wire: str | None = None
    sum_wire: str | None = None

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, plain(getattr(self, name)))
        problems = Arguments("wh.plan", PlanError)
        check_optimizer(problems, self.optimizer)
        for name in _SWITCHES:
            problems.switch(name, getattr(self, name))
        check_user_options(self, problems)
        _check_margin(self, problems)
        _check_precision(self.precision, problems)
        _check_numbers(self, problems)
        _check_default(self.default, problems)
        _check_swarm(self, problems)
        together(
            problems.raise_if_any,
            lambda: check_axes(self.mesh),
            lambda: checked_options(self.compiler_options),
            self._parse_cluster,
        )

    def _parse_cluster(self) -> None:
        """Parses the text of a cluster, except "local", which measures devices."""
        local = (
            isinstance(self.cluster, str) and self.cluster.strip().lower() == "local"
        )
        if self.cluster is not None and not local:
            object.__setattr__(self, "cluster", parsed_cluster(self.cluster))

    @property
    def default_kind(self) -> str | None:
        """The kind of the mark that is the default strategy, or None."""
        return None if self.default is None else str(self.default.mark.kind)


def together(*checks: Callable[[], Any]) -> None:
    """Runs all checks, and then reports all failures.

    Raises:
        WhaleError: One check failed; its error is raised unchanged.
        PlanError: Several checks failed; the message has all texts.
    """
    errors: list[WhaleError] = []
    for check in checks:
        try:
            check()
        except WhaleError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise PlanError("\n".join(map(str, errors)))


def changeable() -> list[str]:
    """Returns the names that ``Plan.what_if`` can change: settings, and batch sizes."""
    own = [f.name for f in fields(PlanSettings) if f.name not in _KEPT]
    return ["batch", "sequence", *own]


def parsed_cluster(cluster: Cluster | str | None) -> Cluster:
    """Returns the cluster for the argument ``cluster`` of ``wh.plan``.

    Args:
        cluster: Cluster, its text, or None for the devices of this process.

    Raises:
        WhaleError: The value is neither a cluster nor the text of one.
    """
    if cluster is None:
        return Cluster.detect()
    result = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(result, Cluster):
        raise WhaleError(
            f"cluster is {short_repr(cluster)}; expected a Cluster or text such as "
            "'h100:8', 'v5p:4x4x4', a .toml file or 'local'"
        )
    return result


def _check_precision(precision: object, problems: Arguments) -> None:
    known = ", ".join(PRECISIONS)
    if isinstance(precision, str):
        if precision not in PRECISIONS:
            hint = near_hint(precision, PRECISIONS, PRECISION_SYNONYMS)
            problems.refuse("precision", precision, f"one of {known}{hint}")
    elif not by_task_graph(precision):
        problems.refuse(
            "precision",
            precision,
            f"one of {known}, or one for each TaskGraph by its name, such as "
            "{'*': 'bf16', 'split': 'f32'}"
            + near_hint(_type_name(precision), PRECISIONS, PRECISION_SYNONYMS),
        )


def _type_name(value: object) -> str:
    if isinstance(value, np.dtype):
        return str(value.name)
    return value.__name__ if isinstance(value, type) else ""


def _check_numbers(settings: PlanSettings, problems: Arguments) -> None:
    count, zero = settings.num_micro_batches, settings.zero
    if count is not None and not is_whole(count, 1):
        problems.refuse("num_micro_batches", count, "1 or more, or None")
    group = settings.group_size
    if group is not None and not is_whole(group, 1):
        problems.refuse("group_size", group, "1 or more samples, or None")
    if settings.sync_batch_stats is True and settings.per_micro_batch is True:
        problems.add(
            "sync_batch_stats=True asks for statistics of the global batch, and "
            "per_micro_batch=True for those of each micro-batch. Drop one of the two"
        )
    if zero is not None and not is_whole(zero, 0, 2):
        problems.refuse(
            "zero",
            zero,
            "0, 1 or 2 (over the axis data). ZeRO-3 is the mesh axis fsdp: "
            'mesh={"fsdp": n}',
        )
    shares: Any = settings.shares
    listed = isinstance(shares, np.ndarray | jax.Array) and shares.ndim == 1
    several = isinstance(shares, list | tuple) or listed
    if shares is None or (isinstance(shares, str) and shares == "even"):
        return
    if several and len(shares) and not any(map(_is_word, shares)):
        return  # Devices and batch are checked later.
    problems.refuse(
        "shares",
        shares,
        "'even', the micro-batches of each replica such as [5, 3], or None for the "
        "planner to choose",
    )


def _check_swarm(settings: PlanSettings, problems: Arguments) -> None:
    for name, formats in (("wire", WIRES), ("sum_wire", SUM_WIRES)):
        given = getattr(settings, name)
        if given is not None and not (isinstance(given, str) and given in formats):
            problems.refuse(name, given, f"one of {', '.join(formats)}, or None")
    if settings.bandwidth is not None:
        try:
            bytes_per_second(settings.bandwidth)
        except PlanError as error:
            problems.add(str(error))
    if settings.swarm is True and settings.bandwidth is None:
        problems.add(
            "swarm is True, and bandwidth is None; give the bandwidth of each peer's "
            "link, such as bandwidth='200Mb/s'"
        )
    several = [
        name
        for name in ("bandwidth", "wire", "sum_wire")
        if getattr(settings, name) is not None
    ]
    if settings.swarm is False and several:
        verb = "is" if len(several) == 1 else "are"
        problems.add(
            f"{' and '.join(several)} {verb} given without "
            "swarm=True, which alone uses it; add swarm=True, or leave it out"
        )


def _is_word(value: object) -> bool:
    return not isinstance(value, int | float | np.number)


def _check_margin(settings: PlanSettings, problems: Arguments) -> None:
    margin = settings.margin
    if margin is not None and not (is_number(margin) and 0 <= margin < 1):
        problems.refuse(
            "margin",
            margin,
            "the free memory to leave, as a fraction of the predicted memory from 0 to "
            "below 1, such as 0.1, or None",
        )
    if settings.verified is True and settings.runnable is False:
        problems.add(
            "verified=True compiles the plan, and runnable=False allows plans that "
            "cannot be compiled. Leave one of them out"
        )
    if settings.verified is True and settings.swarm is True:
        problems.add(
            "verified=True compiles one program for the whole cluster, and peers of a "
            "swarm run programs of their own. Leave one of them out"
        )


def _check_default(default: Any, problems: Arguments) -> None:
    mark = getattr(default, "mark", None)
    if default is not None and (mark is None or mark.kind in ("stage", "pipeline")):
        problems.refuse("default", default, "wh.replicate(), wh.split() or None")
        return
    if mark is not None and mark.attributes:
        problems.add(
            f"default is {short_repr(default)}; a default takes no arguments. Give "
            f"wh.{mark.kind}(), and mark the regions that need more"
        )
