"""Makes the table of device kinds in the documentation, from the catalogue.

python -m whalejax.meshes.kind_table
"""

from __future__ import annotations

from whalejax.meshes.catalogue import entries
from whalejax.meshes.device_kinds import DeviceKind


HEADER = (
    "| kind | generation | memory, GiB | GB/s | f32 | 16 bits | 8 bits | 4 bits | "
    "reached in f32 | in 16 bits | watts |",
    "|---|---|---:|---:|---:|---:|---:|---:|---|---|---:|",
)


def table() -> list[str]:
    """Returns a Markdown table's lines, with peaks in TFLOP/s and reached shares."""
    return [*HEADER, *(_line(entry.kind) for entry in entries().values())]


def _line(kind: DeviceKind) -> str:
    peaks = dict(kind.flops_per_second)
    half = peaks.get("bf16", peaks.get("f16"))
    cells = [
        kind.name,
        kind.generation or "–",
        f"{kind.memory_bytes / 2**30:.0f}",
        f"{kind.memory_bytes_per_second / 1e9:.4g}",
        *(_tera(rate) for rate in (peaks.get("f32"), half)),
        *(_tera(peaks.get(dtype)) for dtype in ("f8", "f4")),
        _efficiency_cell(kind, "f32"),
        _efficiency_cell(kind, "bf16" if "bf16" in peaks else "f16"),
        f"{kind.watts:g}" if kind.watts else "–",
    ]
    return f"| {' | '.join(cells)} |"


def _tera(rate: float | None) -> str:
    return "–" if rate is None else f"{rate / 1e12:.5g}"


def _efficiency_cell(kind: DeviceKind, dtype: str) -> str:
    """Returns the share of the peak, and its source if the kind was not measured."""
    runs_in = kind.multiplies_in(dtype, exact=True)
    if not kind.curve:
        return f"{kind.efficiency:.0%}"
    known = kind.efficiency_in(runs_in)
    words = f"{known.share:.0%}"
    if runs_in != dtype:
        words += f" of {runs_in}"
    if not known.measured:
        words += f" ({', '.join(known.of) or 'assumed'})"
    return words


if __name__ == "__main__":
    print("\n".join(table()))
