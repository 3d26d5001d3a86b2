"""Plans on a terminal, in colour and with bars.

``print(plan)`` needs nothing but Python; this needs rich, so it stands apart. Showing a
plan imports no JAX: a plan file can be read at once, on any machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    RenderableType,
    RenderResult,
)
from rich.table import Table
from rich.text import Text

from whalejax.display.facts import axis_rows, shape_text, traffic_rows
from whalejax.planner.explain import gigabytes, layout_text, spec_text
from whalejax.planner.layout import shards
from whalejax.planner.plan import LeafPlan, Plan
from whalejax.planner.roles import starred


_BAR_WIDTH = 24
_SHOWN_ROWS = 12
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red", "white")
_Form = Callable[[float], str]


def print_plan(plan: Plan, console: Console, *, all_rows: bool = False) -> None:
    """Print ``plan_table`` to a console."""
    console.print(plan_table(plan, all_rows=all_rows))


def plan_table(plan: Plan, *, all_rows: bool = False) -> RenderableType:
    """A plan with its predicted time and memory, parameters and traffic.

    Args:
        plan: the plan.
        all_rows: show every kind of parameter, not only those that hold most.

    Returns:
        Something that ``rich`` prints.

    >>> import jax, jax.numpy as jnp
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x, cluster="h100:8")
    >>> table = plan_table(plan)
    """
    return Group(
        _line("Plan", f"{plan.cluster.describe()} · {layout_text(plan)}"),
        _time_line(plan),
        _memory_line(plan),
        _links_line(plan),
        *_region_lines(plan),
        "",
        _parameters(plan, all_rows),
        "",
        _traffic(plan),
        *(_line("note", note) for note in plan.notes),
        *_runner_up(plan),
    )


# The lines above the tables.


def _line(name: str, text: RenderableType) -> Table:
    """A word in front, and a text that wraps beside it."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=7, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(name, Text(text) if isinstance(text, str) else text)
    return grid


def _terms(value: object, suffix: str) -> list[tuple[str, float]]:
    """Non-zero fields of a dataclass, largest first, with the unit off their names."""
    assert dataclasses.is_dataclass(value)
    pairs = [
        (f.name.removesuffix(suffix), float(getattr(value, f.name)))
        for f in dataclasses.fields(value)
    ]
    return sorted((pair for pair in pairs if pair[1] > 0), key=lambda pair: -pair[1])


@dataclass(frozen=True, slots=True)
class _Packed:
    """Texts side by side, as many in a line as fit; none is broken in two."""

    texts: tuple[Text, ...]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        line = Text()
        for text in self.texts:
            if line and line.cell_len + 2 + text.cell_len > options.max_width:
                yield line
                line = Text()
            line = line + "  " + text if line else text
        yield line


def _bars(head: str, terms: list[tuple[str, float]], form: _Form) -> _Packed:
    """Each term with a bar of its share, its name and its size."""
    total = sum(size for _, size in terms) or 1.0
    texts = [Text(head)]
    for number, (name, size) in enumerate(terms):
        bar = bar_text(size / total, _BAR_WIDTH)
        colour = _COLOURS[number % len(_COLOURS)]
        texts.append(Text(bar, colour) + Text(f" {name} {form(size)}"))
    return _Packed(tuple(texts))


def seconds_text(seconds: float) -> str:
    """A time with three digits: in milliseconds below a second.

    >>> seconds_text(0.4123), seconds_text(3.207)
    ('412 ms', '3.21 s')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def bar_text(share: float, width: int) -> str:
    """A bar in eighths of a character, at least one eighth.

    >>> bar_text(0.5, 3), bar_text(0.0, 3)
    ('█▌', '▏')
    """
    eighths = max(1, round(share * width * 8))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _time_line(plan: Plan) -> Table:
    head = f"{seconds_text(plan.time.step_seconds)} predicted"
    return _line("step", _bars(head, _terms(plan.time, "_seconds"), seconds_text))


def _memory_line(plan: Plan) -> Table:
    available = gigabytes(plan.cluster.memory_bytes)
    head = f"{gigabytes(plan.memory.total_bytes)} of {available} per device predicted"
    return _line("memory", _bars(head, _terms(plan.memory, "_bytes"), gigabytes))


def _links_line(plan: Plan) -> Table:
    crossed = [
        f"{row.name} crosses {' and '.join(row.links) or 'nothing'}"
        for row in axis_rows(plan)
    ]
    return _line("links", " · ".join(crossed) or "one device, nothing to cross")


def _region_lines(plan: Plan) -> Iterator[Table]:
    for region in plan.compute:
        axes = " · ".join(f"{a}: {', '.join(r)}" for a, r in region.axes if r)
        marks = " > ".join(region.marks) or "unmarked"
        yield _line("compute", f"{region.task_graph} ({marks})  {axes or 'whole'}")


# The parameters.


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRow:
    """Parameters that are alike but for the number of their layer.

    Attributes:
        label: their path, with ``[4]`` where four layers were folded.
        count: how many they are.
        leaf: the first of them.
        device_bytes: of all of them together, on one device.
    """

    label: str
    count: int
    leaf: LeafPlan
    device_bytes: int


def parameter_rows(plan: Plan) -> list[ParameterRow]:
    """A plan's parameters, repeated layers folded, in the model's order."""
    groups: dict[tuple[object, ...], list[LeafPlan]] = {}
    for leaf in plan.leaves:
        specs = (leaf.compute_spec, leaf.param_spec)
        alike = (leaf.shape, leaf.dtype, *specs, leaf.hosted)
        groups.setdefault((starred(leaf.path), *alike), []).append(leaf)
    rows = []
    for leaves in groups.values():
        leaf = leaves[0]
        whole = math.prod(leaf.shape) * _itemsize_bytes(leaf.dtype)
        local = whole // shards(leaf.param_spec, plan.home(leaf.path).axis_sizes)
        rows.append(
            ParameterRow(
                label=_folded_label(leaf.path, len(leaves)),
                count=len(leaves),
                leaf=leaf,
                device_bytes=local * len(leaves),
            )
        )
    return rows


def _folded_label(path: str, count: int) -> str:
    return path if count == 1 else f"{starred(path)} ×{count}"


def _itemsize_bytes(dtype: str) -> int:
    import ml_dtypes
    import numpy as np

    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


def _parameters(plan: Plan, all_rows: bool) -> Table:
    rows = parameter_rows(plan)
    by_size = sorted(rows, key=lambda row: -row.device_bytes)
    shown = rows if all_rows else by_size[:_SHOWN_ROWS]
    # Most plans use parameters in the layout they are stored in: one column says it.
    gathers = any(row.leaf.param_spec != row.leaf.compute_spec for row in rows)
    used = ("used as",) if gathers else ()
    table = _table("parameter", "shape", "stored as", *used, "per device")
    table.columns[-1].justify = "right"
    for row in rows:
        if row in shown:
            leaf = row.leaf
            _add(
                table,
                row.label,
                shape_text(leaf.shape),
                spec_text(leaf.param_spec),
                *([spec_text(leaf.compute_spec)] if gathers else []),
                gigabytes(row.device_bytes) + " of host" * leaf.hosted,
            )
    rest = [row for row in rows if row not in shown]
    if rest:
        nbytes = gigabytes(sum(row.device_bytes for row in rest))
        blanks = ["", "", *("" for _ in used)]
        _add(table, f"… {len(rest)} smaller rows folded", *blanks, nbytes)
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _add(table: Table, *cells: str) -> None:
    # As Text, because in plain strings rich takes [name] for a style.
    table.add_row(*(Text(cell) for cell in cells))


def _traffic(plan: Plan) -> RenderableType:
    rows = traffic_rows(plan)
    if not rows:
        return _line("traffic", "none")
    table = _table("traffic", "over", "of", "times a step", "bytes a step")
    for column in table.columns[-2:]:
        column.justify = "right"
    for row in rows:
        size = gigabytes(row.nbytes)
        _add(table, row.kind, row.axes, row.what, str(row.times), size)
    return table


def _runner_up(plan: Plan) -> Iterator[Table]:
    others = [c for c in plan.candidates if c.verdict != "chosen"]
    for c in others[:1]:
        yield _line(
            "next",
            f"{c.layout}: {seconds_text(c.step_seconds)}, "
            f"{gigabytes(c.memory_bytes)} per device; {c.verdict}",
        )
