"""Finds the devices of a collective, and their mesh axes.

Programs write the groups in four ways. All are converted to lists of device numbers,
which count devices in the order of the mesh, last axis fastest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from whalejax.hlo.hlo_text import HloError


_LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\]"
    r"(?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_PAIRS = re.compile(r"source_target_pairs=\{([\d,{} ]*)\}")

Groups = tuple[tuple[int, ...], ...]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(x) for x in text.split(",") if x.strip())


def groups_of(text: str, num_devices: int) -> Groups:
    """Returns a collective's groups, as device numbers; empty if it has none.

    Args:
        text: Attributes of the collective.
        num_devices: Number of the program's devices. Several devices form one group if
            the list of groups is empty.

    Raises:
        HloError: The groups have an unknown form.

    >>> groups_of("replica_groups=[4,2]<=[2,4]T(1,0)", 8)
    ((0, 4), (1, 5), (2, 6), (3, 7))
    >>> groups_of("replica_groups=mesh['a'=4,'b'=2] {'b'}", 8)
    ((0, 1), (2, 3), (4, 5), (6, 7))
    """
    listed = _LISTED.search(text)
    if listed is not None:
        rows = re.findall(r"\{([\d, ]*)\}", listed[1])
        return tuple(_numbers(row) for row in rows)
    counted = _COUNTED.search(text)
    if counted is not None:
        shape, dims = _numbers(counted[1]), _numbers(counted[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        if counted[3]:
            ids = ids.transpose(_numbers(counted[3]))
        return _rows(ids.reshape(shape[0], -1))
    by_axes = _MESH.search(text)
    if by_axes is not None:
        return _mesh_groups(*by_axes.groups())
    if "replica_groups={}" in text:
        return (tuple(range(num_devices)),) if num_devices > 1 else ()
    if "replica_groups=" in text:
        at = text.index("replica_groups=")
        raise HloError(f"replica groups in an unknown form: {text[at : at + 80]}")
    return ()


def _rows(ids: np.ndarray) -> Groups:
    return tuple(tuple(int(x) for x in row) for row in ids)


def _mesh_groups(axes: str, dims: str | None, order: str | None, over: str) -> Groups:
    sizes = {m[1]: int(m[2]) for m in _AXIS.finditer(axes)}
    count = math.prod(sizes.values())
    ids = np.arange(count)
    if dims:
        ids = ids.reshape(_numbers(dims))
        ids = ids.transpose(_numbers(order)) if order else ids
    # Each axis becomes three axes: before the joined part, the part, and after it.
    shape: list[int] = []
    joined: list[int] = []
    wanted = {m[1]: (m[3], m[4]) for m in _AXIS.finditer(over)}
    for name, size in sizes.items():
        before, part = (int(x) if x else 0 for x in wanted.get(name, ("", "")))
        if name in wanted and not part:
            before, part = 1, size
        elif name not in wanted:
            before, part = size, 1
        shape += [before, part, size // (before * part)]
        joined.append(len(shape) - 2)
    ids = ids.reshape(shape)
    rest = [d for d in range(len(shape)) if d not in joined]
    width = math.prod(shape[d] for d in joined)
    return _rows(ids.transpose([*rest, *joined]).reshape(-1, width))


def pairs_of(text: str) -> Groups:
    """Returns (source, target) of each transfer of a collective-permute.

    >>> pairs_of("source_target_pairs={{0,1},{1,0}}")
    ((0, 1), (1, 0))
    """
    match = _PAIRS.search(text)
    if match is None:
        return ()
    return tuple(_numbers(row) for row in re.findall(r"\{?([\d]+,[\d]+)\}?", match[1]))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes whose groups these are, outermost first.

    Args:
        groups: Groups of device numbers.
        mesh: Mesh axes and sizes, outermost first.

    Returns:
        The axes; None if no axes have exactly these groups.

    >>> axes_of(((0, 4), (1, 5), (2, 6), (3, 7)), {"data": 2, "tensor": 4})
    ('data',)
    """
    sizes = list(mesh.values())
    if not groups or math.prod(sizes) != sum(map(len, groups)):
        return None
    first = np.array(np.unravel_index(np.array(groups[0]), sizes))
    varying = [d for d in range(len(sizes)) if len(set(first[d])) > 1]
    if math.prod(sizes[d] for d in varying) != len(groups[0]):
        return None
    rest = [d for d in range(len(sizes)) if d not in varying]
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose([*rest, *varying])
    expected = {frozenset(map(int, row)) for row in ids.reshape(-1, len(groups[0]))}
    if {frozenset(group) for group in groups} != expected:
        return None
    return tuple(list(mesh)[d] for d in varying)


def axes_between(
    pairs: Sequence[tuple[int, ...]], mesh: Mapping[str, int]
) -> tuple[str, ...]:
    """Returns the mesh axes of transfers, outermost first.

    >>> axes_between(((0, 1), (1, 0)), {"data": 1, "tensor": 2})
    ('tensor',)
    """
    sizes = list(mesh.values())
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    places = np.array(np.unravel_index(ends, sizes))
    moved = (places[:, :, 0] != places[:, :, 1]).any(axis=1)
    return tuple(name for name, here in zip(mesh, moved, strict=True) if here)
