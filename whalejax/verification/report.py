"""Formats a verification: a table on a terminal, and plain JSON data."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from whalejax.meshes.units import gigabytes
from whalejax.planner.plan.report.why import layout_text
from whalejax.verification.quantities import Finding, Quantity, VerificationData


_WIDTH = 110
_LEAST = 0.001
"""Smallest share of all traffic that has its own line."""


def document(found: VerificationData) -> dict[str, Any]:
    """Returns a verification as plain JSON data."""

    def quantity(q: Quantity | None) -> dict[str, Any] | None:
        if q is None:
            return None
        return {**dataclasses.asdict(q), "difference": q.difference}

    return {
        "whalejax_verification": 1,
        "plan_hash": found.plan_hash,
        "topology": found.target.words,
        "device_kind": found.device_kind,
        "versions": dict(found.versions),
        "fits": found.fits,
        "capacity_bytes": found.capacity_bytes,
        "memory": [quantity(q) for q in found.memory],
        "collectives": [quantity(q) for q in found.collectives],
        "product_flops": quantity(found.product_flops),
        "lower_seconds": found.lower_seconds,
        "compile_seconds": found.compile_seconds,
        "host_peak_bytes": found.host_peak_bytes,
        "refused": found.refused,
        "rematerializations": [dataclasses.asdict(f) for f in found.rematerializations],
        "unplanned": [dataclasses.asdict(f) for f in found.unplanned],
        "failure": found.failure,
        "left_out": found.left_out,
        "better": None if found.better is None else layout_text(found.better),
    }


def text(found: VerificationData) -> str:
    """Returns a verification as text without colours."""
    console = Console(file=io.StringIO(), width=_WIDTH, highlight=False)
    console.print(table(found))
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in written.splitlines())


def table(found: VerificationData) -> RenderableType:
    """Returns a verification as an object that ``rich`` prints."""
    rows = Table(box=None, pad_edge=False, header_style="bold")
    rows.add_column("")
    for name in ("predicted", "compiled", "difference"):
        rows.add_column(name, justify="right")
    for q in found.memory:
        rows.add_row(f"memory: {q.name}", *_cells(q))
    total = sum(q.compiled or 0 for q in found.collectives) or 1.0
    shown = [
        q
        for q in found.collectives
        if max(q.predicted or 0, q.compiled or 0) >= _LEAST * total
    ]
    for q in shown:
        rows.add_row(q.name, *_cells(q))
    if len(shown) > 1:
        # Compilers may replace collectives by others with the same traffic.
        both = _collective_total(found.collectives)
        rows.add_row(both.name, *_cells(both))
    if found.product_flops is not None and not found.refused:
        rows.add_row("matrix products", *_cells(found.product_flops))
    return Group(_head(found), "", rows, *_words(found))


def _collective_total(every: Sequence[Quantity]) -> Quantity:
    return Quantity(
        name="all collectives",
        predicted=sum(q.predicted or 0.0 for q in every),
        compiled=sum(q.compiled or 0.0 for q in every),
    )


def _head(found: VerificationData) -> Text:
    versions = ", ".join(f"{name} {v}" for name, v in found.versions.items())
    kind = f" ({found.device_kind})" if found.device_kind else ""
    line = f"compiled for {found.target.words}{kind}"
    if found.failure:
        line = f"not compiled for {found.target.words}{kind}"
    seconds = found.lower_seconds + found.compile_seconds
    return Text(
        f"{line} in {seconds:.0f} s, {gigabytes(found.host_peak_bytes)} of this "
        f"machine's memory{'; ' + versions if versions else ''}"
    )


def _cells(q: Quantity) -> tuple[str, str, str]:
    return (
        _amount(q.predicted, q.unit, q.predicted_count),
        _amount(q.compiled, q.unit, q.compiled_count),
        _percent(q),
    )


def _amount(value: float | None, unit: str, count: int | None) -> str:
    if value is None:
        return "–"
    if unit == "bytes":
        words = gigabytes(int(value)) if value >= 1e6 else f"{value / 1e3:.3g} kB"
    else:
        power = 12 if value >= 1e11 else 6
        words = f"{value / 10**power:,.3f} {'TM'[power == 6]}FLOP"
    return words if count is None else f"{count} × = {words}"


def _percent(q: Quantity) -> str:
    if q.difference is not None:
        return f"{q.difference:+.1%}"
    if q.predicted is None or q.compiled is None:
        return ""
    return "not compiled" if q.predicted else "not planned"


def _words(found: VerificationData) -> Iterator[RenderableType]:
    yield ""
    if found.left_out:
        yield Text(f"not compiled: {found.left_out}")
    capacity = gigabytes(found.capacity_bytes) if found.capacity_bytes else ""
    if found.fits:
        of = f"a device has {capacity}" if capacity else "its capacity is unknown"
        yield Text(f"fits: {of}" if capacity else of)
    elif not found.fits:
        yield Text(f"DOES NOT FIT: a device has {capacity}")
        yield Text(f"the compiler: {found.failure:.400}" if found.failure else "")
        if found.better is not None:
            yield Text(f"expected to fit: {layout_text(found.better)}")
        else:
            yield Text("no other plan is expected to fit")
    if found.refused:
        yield Text(f"traffic and products are not reported: {found.refused}")
    for title, findings in (
        ("gathered whole", found.rematerializations),
        ("not planned", found.unplanned),
    ):
        for finding in findings:
            yield Text(f"{title}: {_finding(finding)}")


def _finding(finding: Finding) -> str:
    words = finding.what
    if finding.nbytes:
        words += f", {gigabytes(finding.nbytes)}"
    if finding.place:
        words += f", at {finding.place}"
    return f"{words} ({finding.name})" if finding.name else words
