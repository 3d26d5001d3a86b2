"""``wh.square_cube``: compares a pipeline plan's compute time with its transfers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number, short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import milliseconds
from whalejax.planner.pipeline.square_cube import StageOverLink, StageWork
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.pictures import SquareCubeDisplay
from whalejax.planner.plan_entries import WIRES, wire_bytes
from whalejax.planner.plan_errors import PlanError


BANDWIDTHS: Final = ("80Mb/s", "200Mb/s", "1Gb/s", "10Gb/s", "100Gb/s")
_UNITS: Final = {
    f"{prefix}{unit}/s": factor / bits
    for prefix, factor in (("k", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
    for unit, bits in (("b", 8), ("B", 1))
}
RECOMPUTED: Final = 4 / 3  # FLOPs with a second forward pass, over FLOPs without


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareCube(SquareCubeDisplay):
    """The square-cube law on the stages of a plan; ``print`` shows a table.

    Attributes:
        wire: Wire format of activations and gradients.
        stages: Work of each stage for one micro-batch.
        rows: One row for each stage and link.
    """

    head: ClassVar[tuple[str, ...]] = (
        "link",
        "stage",
        "compute",
        "wire",
        "utilization",
        "overlapped",
        "busy from width",
    )
    wire: str
    stages: tuple[StageWork, ...]
    rows: tuple[StageOverLink, ...]

    def utilization(self, bytes_per_second: float, *, overlap: bool = True) -> float:
        """Returns the utilisation over one link of the table, of its slowest stage.

        Args:
            bytes_per_second: Bandwidth of the link.
            overlap: Whether computation and transfers overlap.

        Raises:
            WhaleError: The table has no such link.
        """
        utilization = [r for r in self.rows if r.bytes_per_second == bytes_per_second]
        if not utilization:
            known = ", ".join(dict.fromkeys(str(r.bytes_per_second) for r in self.rows))
            raise WhaleError(
                f"square_cube: there is no link of {bytes_per_second} bytes per second "
                f"in the table; it has {known}"
            )
        return min(
            row.overlapped if overlap else row.utilization for row in utilization
        )

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the rows of the table, in the order of ``head``'s columns."""
        return [
            (
                rate_words(row.bytes_per_second),
                str(row.stage),
                milliseconds(row.compute_seconds),
                milliseconds(row.wire_seconds),
                f"{row.utilization:.1%}",
                f"{row.overlapped:.1%}",
                f"× {row.busy_width:.3g}",
            )
            for row in self.rows
        ]

    def __str__(self) -> str:
        rows = [self.head, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(
                f"{text:>{width}}" for text, width in zip(row, widths, strict=True)
            )
            for row in rows
        )
        return "\n".join(
            [f"one micro-batch of each stage, {self.wire} on the wire", *lines]
        )


@names_arguments("wh.square_cube")
def square_cube(
    plan: Plan,
    *,
    bandwidths: Sequence[str | float] = BANDWIDTHS,
    wire: str = "f32",
) -> SquareCube:
    """Compares the compute time of a plan's stages with their transfer time over links.

    For each micro-batch, a stage receives its input twice, as another peer may run the
    backward pass. It also receives the gradient of its result, and sends its result and
    the gradient of its input. The batch that enters the first stage is not counted.

    Args:
        plan: A pipeline plan with stage programs.
        bandwidths: Bandwidths of links, as ``"200Mb/s"``, ``"1GB/s"`` or numbers in
            bytes per second.
        wire: Wire format: ``"f32"`` (default), ``"bf16"`` or ``"int8"``.

    Returns:
        The table. Its last column is the smallest width of the model at which the link
        keeps devices busy, as a multiple of the plan's width.

    Raises:
        WhaleError: The plan has no stage programs, or a bandwidth or the format is
            wrong.

    >>> import jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> def loss(net, x):
    ...     for name in "abcd":
    ...         x = jnp.tanh(x @ net[name])
    ...     return (x * x).mean()
    >>> net = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in "abcd"}
    >>> plan = wh.plan(loss, net, jax.ShapeDtypeStruct((64, 256), jnp.float32),
    ...                optimizer=optax.sgd(0.1), cluster="t4:2x1",
    ...                mesh={"stage": 2}, num_micro_batches=4)
    >>> table = wh.square_cube(plan, bandwidths=["200Mb/s", "20Gb/s"])
    >>> table.utilization(25e6) < table.utilization(2.5e9)
    True
    """
    problems = Arguments("square_cube", PlanError)
    problems.of("plan", plan, Plan, "a plan, as wh.plan gives it")
    if not (isinstance(wire, str) and wire in WIRES):
        problems.refuse("wire", wire, f"one of {', '.join(WIRES)}")
    listed = isinstance(bandwidths, list | tuple) and len(bandwidths) > 0
    if not listed:
        problems.refuse("bandwidths", bandwidths, "a list such as ['200Mb/s', 1e9]")
    problems.raise_if_any()
    rates = [bytes_per_second(bandwidth, "bandwidths") for bandwidth in bandwidths]
    stages = stage_works(plan, wire)
    rows = tuple(
        StageOverLink(
            stage=number,
            bytes_per_second=rate,
            compute_seconds=work.compute_seconds,
            wire_seconds=work.wire_seconds(rate),
        )
        for rate in rates
        for number, work in enumerate(stages)
    )
    return SquareCube(wire=wire, stages=stages, rows=rows)


def stage_works(plan: Plan, wire: str) -> tuple[StageWork, ...]:
    """Returns the work of one micro-batch at each stage of a plan.

    Args:
        plan: Plan with stage programs, without virtual stages.
        wire: Wire format.

    Raises:
        PlanError: The plan has no stage programs, or several virtual stages per stage.
    """
    stages = plan.stages
    if stages is None or not stages.plans or len(stages.paces) != len(stages.plans):
        have = "no stages" if stages is None else f"stages that run {stages.schedule}"
        raise PlanError(
            f"plan has {have}; expected stages with programs of their own, one part of "
            "the model each. Plan with wh.stage marks, or plan a model whose layers "
            f'are not one scan with mesh={{"stage": 3}}'
        )
    works = []
    for number, (pace, own) in enumerate(zip(stages.paces, stages.plans, strict=True)):
        forward, backward = border_bytes(plan, number, wire)
        again = 0.0 if number + 1 == len(stages.plans) else pace.forward_seconds
        flops = own.product_flops / plan.num_micro_batches
        works.append(
            StageWork(
                flops=flops * (RECOMPUTED if again else 1.0),
                compute_seconds=pace.forward_seconds
                + pace.backward_seconds
                + pace.weight_seconds
                + again,
                received_bytes=forward[0] + backward[0],
                sent_bytes=forward[1] + backward[1],
            )
        )
    return tuple(works)


def border_bytes(
    plan: Plan, number: int, wire: str
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the bytes that a stage's peer receives and sends in both passes.

    The last stage runs both passes in one call, whose bytes count as backward.

    Args:
        plan: Plan with stages.
        number: Number of the stage.
        wire: Wire format.
    """
    assert plan.stages is not None
    paces = plan.stages.paces
    width = 4 if plan.precision == "f32" else 2
    own = paces[number]
    given = wire_bytes(own.handed_bytes // width, wire)
    returned = wire_bytes(own.returned_bytes // width, wire)
    if number + 1 == len(paces):
        return (0, 0), (given, returned)
    after = paces[number + 1]
    result = wire_bytes(after.handed_bytes // width, wire)
    cotangent = wire_bytes(after.returned_bytes // width, wire)
    return (given, result), (given + cotangent, returned)


def bytes_per_second(rate: object, name: str = "bandwidth") -> float:
    """Parses a bandwidth.

    Args:
        rate: Bandwidth: ``"200Mb/s"`` (bits), ``"25MB/s"`` (bytes), or a number in
            bytes per second.
        name: Name of the argument, for the error.

    Raises:
        PlanError: The text is no bandwidth.

    >>> bytes_per_second("200Mb/s"), bytes_per_second("25 MB/s"), bytes_per_second(10)
    (25000000.0, 25000000.0, 10.0)
    """
    if is_number(rate) and not isinstance(rate, bool):
        value = float(rate)  # type: ignore[arg-type]
        if 0 < value < math.inf:
            return value
    if isinstance(rate, str):
        text = rate.replace(" ", "")
        unit = next((u for u in _UNITS if text.endswith(u)), "")
        try:
            value = float(text.removesuffix(unit)) if unit else math.nan
        except ValueError:
            value = math.nan
        if 0 < value < math.inf:
            return value * _UNITS[unit]
    raise PlanError(
        f"{name} is {short_repr(rate)}; expected a bandwidth such as '200Mb/s' "
        "(bits) or "
        "'25MB/s' (bytes), or bytes per second as a number above 0"
    )


def rate_words(rate: Any) -> str:
    """Formats a bandwidth in bits per second.

    >>> rate_words(25e6), rate_words(1.25e9)
    ('200 Mb/s', '10 Gb/s')
    """
    bits = 8.0 * float(rate)
    for unit in ("b/s", "kb/s", "Mb/s", "Gb/s"):
        if bits < 1000:
            return f"{bits:.3g} {unit}"
        bits /= 1000
    return f"{bits:.3g} Tb/s"
