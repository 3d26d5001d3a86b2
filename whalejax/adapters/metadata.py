"""Reads Flax metadata of a parameter's dimensions: names, and fixed mesh axes.

Linen boxes and NNX variables have the same metadata under different names. Each
dimension has a name, several names, or None. The name of one of our mesh axes shards
the dimension over that axis; any other name becomes the name of the dimension.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.meshes.checks import is_array
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.sharding.layout import MESH_AXES


DimensionTexts = tuple[str | None, ...]
"""Text, or None, for each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafMetadata:
    """Metadata of one leaf.

    Attributes:
        names: Logical name of each dimension, or None.
        pinned: Fixed mesh axes of each dimension, joined by ``+``, or None.
        called: Names of these axes in the model, in the same order.
    """

    names: DimensionTexts
    pinned: DimensionTexts
    called: DimensionTexts


def read_metadata(
    paths: Sequence[str],
    params: Sequence[Any],
    metadata: Callable[[str], Any],
    axis_names: Mapping[str, str],
    problems: Problems,
) -> list[LeafMetadata]:
    """Returns names and pinned axes of the dimensions of every leaf.

    Args:
        paths: Dotted paths of the leaves, in flatten order.
        params: Leaves, in the same order.
        metadata: Function from a path to the leaf's box or metadata mapping, or None.
        axis_names: The user's names of mesh axes, mapped to ours.
        problems: Collector of surplus names, unknown mesh axes and unused names.
    """
    axes = _known_axes(axis_names)
    met: set[str] = set()
    result: list[LeafMetadata] = []
    for path, leaf in zip(paths, params, strict=True):
        shape = leaf.shape if is_array(leaf) else ()
        rank = len(shape)
        entries, mesh_names = _box_entries(metadata(path))
        if len(entries) > rank:
            problems.add(
                f"{path}: its metadata names {count_text(len(entries), 'dimension')} "
                f"{tuple(entries)}, but its shape is {tuple(shape)}. Name each "
                "dimension once."
            )
            entries = entries[:rank]
        entries = [*entries, *[None] * (rank - len(entries))]
        met |= _names_in(metadata(path))
        fixed = [_pinned_axes(e, axes, mesh_names, path, problems) for e in entries]
        result.append(
            LeafMetadata(
                names=tuple(_logical_name(e, axes, mesh_names) for e in entries),
                pinned=tuple("+".join(one) or None for one in fixed),
                called=tuple("+".join(one.values()) or None for one in fixed),
            )
        )
    _check_met(axis_names, met, problems)
    return result


def short_ones(
    leaves: Mapping[str, Any], metadata: Callable[[str], Any]
) -> dict[str, int]:
    """Returns the number of missing names in NNX metadata, by path, if not 0.

    Linen needs no such check, as it refuses to add a dimension without a name.

    Args:
        leaves: Leaves by dotted path.
        metadata: Function from a path to the leaf's metadata mapping, or None.
    """
    ones: dict[str, int] = {}
    for path, leaf in leaves.items():
        box = metadata(path)
        if isinstance(box, Mapping) and _names_in(box):
            rank = len(leaf.shape) if is_array(leaf) else 0
            missing = rank - len(_box_entries(box)[0])
            if missing > 0:
                ones[path] = missing
    return ones


def _check_met(
    axis_names: Mapping[str, str], met: Collection[str], problems: Problems
) -> None:
    for theirs, ours in axis_names.items():
        if theirs in met:
            continue
        near = difflib.get_close_matches(theirs, met, n=3, cutoff=0.3) or sorted(met)
        known = f"Nearest: {', '.join(near[:6])}" if near else "It names none at all"
        problems.add(
            f"axis_names maps {theirs!r} to {ours!r}, but no parameter's metadata "
            f"names {theirs!r}. {known}. Correct the name, or leave it out."
        )


def _box_entries(box: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Returns a metadata box's entry of each dimension, and the axes of its mesh."""
    if box is None:
        return [], ()
    fields = box if isinstance(box, Mapping) else vars(box)
    box_entries = next(
        (
            fields[name]
            for name in ("names", "out_sharding", "sharding", "sharding_names")
            if fields.get(name) is not None
        ),
        (),
    )
    mesh = fields.get("mesh") or getattr(box_entries, "mesh", None)
    box_entries = getattr(box_entries, "spec", box_entries)
    return list(box_entries), tuple(getattr(mesh, "axis_names", ()))


def _names_in(box: Any) -> set[str]:
    return {part for entry in _box_entries(box)[0] for part in _parts(entry)}


def _known_axes(axis_names: Mapping[str, str]) -> dict[str, str]:
    return {**dict(zip(MESH_AXES, MESH_AXES, strict=True)), **axis_names}


def _parts(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _logical_name(
    entry: Any, axes: Mapping[str, str], mesh_names: Collection[str]
) -> str | None:
    parts = [p for p in _parts(entry) if p not in axes and p not in mesh_names]
    return "+".join(parts) or None


def _pinned_axes(
    entry: Any,
    axes: Mapping[str, str],
    mesh_names: Collection[str],
    path: str,
    problems: Problems,
) -> dict[str, str]:
    """Returns the mesh axes that an entry fixes, with the model's name for each."""
    pinned_axes: dict[str, str] = {}
    for part in _parts(entry):
        if part in axes:
            pinned_axes.setdefault(axes[part], part)
        elif part in mesh_names:
            problems.add(
                f"{path}: its metadata names the mesh axis {part!r}, which is none of "
                f"ours ({', '.join(MESH_AXES)}). Map it, as in "
                f"axis_names={{{part!r}: 'tensor'}}."
            )
    return pinned_axes
