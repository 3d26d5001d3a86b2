"""Aligns the dimensions of operands, and regroups dimensions in reshapes.

Both tasks have two lists of atoms for the same elements in the same order, and cut them
into atoms of equal sizes. Plain, equal and drawn atoms may be cut. Samples may not, as
micro-batches would then have other groups of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from whalejax.capture.separability.values import (
    Along,
    Atom,
    CoupledError,
    Dim,
    Dims,
    is_samples,
    plain_dim,
    size_of,
)


_RANK: Final = {Along.EQUAL: 0, Along.DRAWN: 1, Along.PLAIN: 2, Along.SAMPLES: 2}

PLACES: Final = "gives each place in the batch a number of its own"


def merged_atoms(atoms: Sequence[Atom]) -> Dim:
    """Merges neighbouring atoms of one kind, and drops atoms of size 1.

    Atoms of samples stay as they are.
    """
    result: list[Atom] = []
    for atom in atoms:
        if atom.part == atom.whole == 1 and atom.along is not Along.SAMPLES:
            continue
        last = result[-1] if result else None
        if last and last.along is atom.along and atom.along is not Along.SAMPLES:
            result[-1] = atom.sized(last.part * atom.part, last.whole * atom.whole)
        else:
            result.append(atom)
    return tuple(result)


def align_dims(dims: Sequence[Dims]) -> Dims:
    """Returns the dimensions of an elementwise result.

    Args:
        dims: Dimensions of each operand, all of equal rank.

    Raises:
        CoupledError: Samples are combined with batch indices or with other samples, or
            the sizes of a dimension differ.
    """
    result = dims[0]
    for other in dims[1:]:
        if other is not result and other != result:
            pairs = zip(result, other, strict=True)
            result = tuple(a if a == b else align_dim(a, b) for a, b in pairs)
    check_one_batch(result)
    return result


def check_one_batch(dims: Dims) -> None:
    """Refuses values with samples along two dimensions.

    Raises:
        CoupledError: Samples are along two dimensions.
    """
    if sum(a.along is Along.SAMPLES for dim in dims for a in dim) > 1:
        raise CoupledError("compares samples with each other")


def align_dim(a: Dim, b: Dim) -> Dim:
    """Returns the common form of one dimension of two operands.

    Raises:
        CoupledError: Samples are combined with batch indices or with other samples, or
            the sizes differ.
    """
    if size_of(a) != size_of(b):  # The side of size 1 is repeated.
        short, full = (a, b) if size_of(a) == (1, 1) else (b, a)
        if size_of(short) == (1, 1):
            return full
        raise CoupledError("has dimensions of unlike sizes")
    first, second = list(a), list(b)
    dim: list[Atom] = []
    while first and second:
        x, y = first.pop(), second.pop()
        if (x.part, x.whole) != (y.part, y.whole):
            x, y = _cut(x, y, first) or _cut_reversed(x, y, first, second)
        if Along.SAMPLES in (x.along, y.along) and x.along is not y.along:
            other = y if x.along is Along.SAMPLES else x
            if other.along is Along.PLAIN:
                raise CoupledError(PLACES)
        dim.append(max(x, y, key=lambda atom: _RANK[atom.along]))
    dim += [*reversed(first), *reversed(second)]
    return merged_atoms(dim[::-1])


_Pair = tuple[Atom, Atom]


def _cut(x: Atom, y: Atom, rest: list[Atom]) -> _Pair | None:
    """Cuts an inner atom as large as ``y`` from ``x``; ``rest`` gets the outer rest."""
    if x.along is Along.SAMPLES or x.part % y.part or x.whole % y.whole:
        return None
    rest.append(x.sized(x.part // y.part, x.whole // y.whole))
    return x.sized(y.part, y.whole), y


def _cut_reversed(x: Atom, y: Atom, first: list[Atom], second: list[Atom]) -> _Pair:
    result = _cut(y, x, second)
    if result is not None:
        return result[1], result[0]
    if Along.SAMPLES in (x.along, y.along):
        raise CoupledError("regroups samples")
    # Where atoms of different kinds overlap, the common dimension is plain.
    wide = [*first, x]
    other = [*second, y]
    first.clear()
    second.clear()
    if any(a.along is Along.SAMPLES for a in (*wide, *other)):
        raise CoupledError("regroups samples")
    part, whole = size_of(tuple(wide))
    return Atom(Along.PLAIN, part, whole), Atom(Along.PLAIN, part, whole)


def regroup_dims(dims: Dims, part: Sequence[int], whole: Sequence[int]) -> Dims:
    """Returns dimensions after a reshape.

    Args:
        dims: Dimensions before the reshape.
        part: Shape after the reshape in the trace of the part.
        whole: Shape after the reshape in the trace of the whole.

    Raises:
        CoupledError: The reshape divides or regroups the samples.
    """
    atoms = [atom for dim in dims for atom in dim]
    result: list[Dim] = []
    for sizes in reversed([*zip(part, whole, strict=True)]):
        result.append(_take(atoms, *sizes))
    return tuple(reversed(result))


def _take(atoms: list[Atom], part: int, whole: int) -> Dim:
    taken: list[Atom] = []
    while part > 1 or whole > 1:
        atom = atoms.pop()
        if part % atom.part == 0 and whole % atom.whole == 0:
            part, whole = part // atom.part, whole // atom.whole
            taken.append(atom)
            continue
        if atom.along is Along.SAMPLES:
            raise _partial_dim_error(atom, part, whole)
        if atom.part % part or atom.whole % whole:
            return _take_mixed(atoms, atom, taken, part, whole)
        atoms.append(atom.sized(atom.part // part, atom.whole // whole))
        taken.append(atom.sized(part, whole))
        part = whole = 1
    # Atoms of one element stay in the list, as they need no dimension.
    return merged_atoms(taken[::-1])


def _partial_dim_error(samples: Atom, part: int, whole: int) -> CoupledError:
    if part == whole and samples.part % part == 0 and samples.whole % part == 0:
        why = f"parts the samples into groups of {part} neighbours"
        return CoupledError(why, group=part)
    runs = samples.part // part
    if (samples.part, samples.whole) == (part * runs, whole * runs):
        return CoupledError(f"parts the samples into {runs} runs", runs=runs)
    return CoupledError("regroups samples")


def _take_mixed(
    atoms: list[Atom], atom: Atom, taken: list[Atom], part: int, whole: int
) -> Dim:
    """Removes the elements of a dimension inside which an atom ends.

    The result is plain. The rest of all atoms becomes one plain dimension.
    """
    every = [*atoms, atom]
    if is_samples(tuple(every)) or is_samples(tuple(taken)):
        raise CoupledError("regroups samples")
    before = size_of(tuple(every))
    atoms.clear()
    if before[0] % part or before[1] % whole:
        raise CoupledError("regroups what depends on the number of samples")
    atoms.extend(plain_dim(before[0] // part, before[1] // whole))
    inner = size_of(tuple(taken))
    return plain_dim(inner[0] * part, inner[1] * whole)
