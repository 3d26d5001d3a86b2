"""Reads volumes from files; each process reads the parts of its own devices alone.

A plan that shards the space of samples (mesh axes ``depth``, ``height``, ``width``)
gives every process a slab of each volume. Devices exchange halos, so no process reads
the slab of another.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.errors import Problems, WhaleError


if TYPE_CHECKING:
    from whalejax.runtime.train_step import TrainStep


Region = tuple[tuple[slice, ...], ...]
"""Slices to read in each dimension of a sample."""


@names_arguments("wh.Volumes", instance="volumes")
class Volumes:
    """Samples in files: a source for ``wh.Feed`` that reads slabs.

    A file is ``.npy``, or a folder with a Zarr array (version 2 or 3). The requested
    part of an ``.npy`` file is mapped into memory. Of a Zarr array, the chunks that
    contain the part are read. A chunk without a file has the array's fill value, as
    Zarr defines it.

    Attributes:
        bytes_read: Bytes read from files so far. For Zarr these are the bytes of full
            chunks before compression.
    Example:
        >>> import os, tempfile
        >>> import numpy as np
        >>> folder = tempfile.mkdtemp()
        >>> files = [os.path.join(folder, f"{n}.npy") for n in range(4)]
        >>> for n, file in enumerate(files):
        ...     np.save(file, np.full((4, 4, 4, 1), n, np.float32))
        >>> source = Volumes({"volumes": files, "targets": np.zeros((4, 2))})
        >>> source[3]["volumes"].shape, len(source), source.bytes_read
        ((4, 4, 4, 1), 4, 256)
    """

    def __init__(
        self, leaves: Mapping[str, Any], step: TrainStep | None = None
    ) -> None:
        """Prepares the volumes, and reads nothing yet.

        Args:
            leaves: For each name of a batch leaf, a file for each sample, or an array
                or list with a value for each sample, such as labels.
            step: Step that takes the batches and defines the parts of this process's
                devices. None reads full volumes.

        Raises:
            WhaleError: Leaves are not in the plan or differ in length. The message
                lists all problems.
        """
        problems = Problems("Volumes", WhaleError)
        if not isinstance(leaves, Mapping) or not leaves:
            raise WhaleError(
                f"leaves is {short_repr(leaves)}; expected a file for each sample, "
                "by the "
                "name of a batch leaf: {'volumes': ['0.npy', '1.npy']}"
            )
        for name, each in leaves.items():
            if isinstance(each, str | bytes | os.PathLike):
                problems.add(
                    f"leaves[{short_repr(name)}] is the one path {short_repr(each)}; "
                    "expected a "
                    "list with a file for each sample: for a single sample, give "
                    f"[{short_repr(each)}]"
                )
                continue
            several = isinstance(each, list | tuple) or _is_array(each)
            if not several:
                problems.add(
                    f"leaves[{short_repr(name)}] is {short_repr(each)}; expected a "
                    "list of files "
                    "or an array, with one for each sample"
                )
            elif len(each) == 0:
                problems.add(
                    f"leaves[{short_repr(name)}] has no samples; expected at least "
                    "one: a "
                    "file or a value"
                )
        if step is not None and not hasattr(step, "batch_regions"):
            problems.add(
                f"step is {short_repr(step)}; expected what wh.compile returned, or "
                "None"
            )
        problems.raise_if_any()
        counts = {name: len(each) for name, each in leaves.items()}
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name} {n}" for name, n in counts.items())
            problems.add(f"leaves have unlike numbers of samples: {listed}")
        # Indexing a device array would run a program for each sample.
        self._leaves = {
            name: np.asarray(each) if _is_array(each) else each
            for name, each in leaves.items()
        }
        self._count = min(counts.values())
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._regions: dict[str, Region] = {}
        self.bytes_read = 0
        if step is not None:
            self._take(step, problems)
        problems.raise_if_any()

    def _take(self, step: TrainStep, problems: Problems) -> None:
        planned = {leaf.path: leaf for leaf in step.plan.batch}
        names = {f"[{name!r}]": name for name in self._leaves}
        if names.keys() != planned.keys():
            problems.add(
                f"leaves are {', '.join(names)}; the plan's batch has "
                f"{', '.join(planned)}. Name them alike: a batch that is no dict of "
                "arrays must become one before it is planned"
            )
            return
        for path, region in step.batch_regions().items():
            self._regions[names[path]] = region
            self._shapes[names[path]] = tuple(planned[path].shape[1:])
            self._dtypes[names[path]] = planned[path].dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        """Returns this process's part of a sample.

        Raises:
            WhaleError: There is no such sample, or a file cannot be read, or its shape
                or type is not the plan's.
        """
        if not is_whole(number) or not 0 <= number < self._count:
            raise WhaleError(
                f"there is no sample {short_repr(number)}; expected a whole number "
                "from 0 "
                f"to {self._count - 1}, of {self._count} samples"
            )
        return {name: self._read(name, number) for name in self._leaves}

    def _read(self, name: str, number: int) -> Any:
        result = self._leaves[name][number]
        where = f"{name}[{number}]"
        file = _path(result)
        if file is not None:
            array = _open_array(file, where)
            where += f" ({file})"
        else:
            array = np.asarray(result)
        self._check(array, name, where, file=file is not None)
        region = self._regions.get(name) or tuple((slice(0, n),) for n in array.shape)
        try:
            part = _read_region(array, region)
        except (ValueError, OSError) as error:
            raise WhaleError(
                f"{where}: a part of it cannot be read ({error}). Write the file again"
            ) from error
        if file is not None:
            self.bytes_read += _touched(array, region)
        return part

    def _check(self, array: Any, name: str, where: str, *, file: bool) -> None:
        shape = tuple(array.shape)
        wanted = self._shapes.get(name, shape)
        if shape != wanted:
            raise WhaleError(
                f"{where} has shape {shape}; the plan is for samples of {wanted}. "
                "Give files of that shape, or plan again for this one"
            )
        # Values in memory are cast later, like values of any source.
        planned = self._dtypes.get(name)
        dtype = getattr(array.dtype, "name", str(array.dtype))
        if file and planned is not None and dtype != planned:
            raise WhaleError(
                f"{where} is of {dtype}; the plan is for samples of {planned}. Write "
                f"the files as {planned}, or plan again with a batch of {dtype}"
            )


def _is_array(each: Any) -> bool:
    return hasattr(each, "__array__") and getattr(each, "ndim", 0) > 0


def _path(value: Any) -> Path | None:
    return (
        Path(os.fsdecode(value))
        if isinstance(value, str | bytes | os.PathLike)
        else None
    )


def _open_array(path: Path, where: str) -> Any:
    if not path.exists():
        raise WhaleError(f"{where}: there is no file {path}")
    if path.is_dir():
        return _opened_zarr(path, where)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.ndarray):
            array.close()
            raise ValueError("it holds several arrays")
        return array
    except (ValueError, OSError, EOFError) as error:
        raise WhaleError(
            f"{where}: {path} cannot be read ({error}). Give .npy files of numbers, or "
            "folders with Zarr arrays"
        ) from error


def _opened_zarr(path: Path, where: str) -> Any:
    import tensorstore

    drivers = {".zarray": "zarr", "zarr.json": "zarr3"}
    driver = next((d for file, d in drivers.items() if (path / file).exists()), None)
    if driver is None:
        raise WhaleError(
            f"{where}: the folder {path} holds no Zarr array (neither .zarray nor "
            "zarr.json). Give the folder of one array, or a .npy file"
        )
    store = {"driver": "file", "path": str(path.absolute()) + "/"}
    try:
        return tensorstore.open(
            {"driver": driver, "kvstore": store}, open=True, read=True
        ).result()
    except ValueError as error:
        raise WhaleError(f"{where}: {path} cannot be read ({error})") from error


def _read_region(array: Any, region: Region) -> Any:
    pieces = list(itertools.product(*region))
    read = [_piece(array, piece) for piece in pieces]
    if len(read) == 1:
        return read[0]
    shape = tuple(sum(s.stop - s.start for s in each) for each in region)
    whole = np.empty(shape, read[0].dtype)
    begins = [_begins(each) for each in region]
    for piece, values in zip(pieces, read, strict=True):
        place = tuple(
            slice(start[s.start], start[s.start] + s.stop - s.start)
            for start, s in zip(begins, piece, strict=True)
        )
        whole[place] = values
    return whole


def _begins(pieces: Sequence[slice]) -> dict[int, int]:
    """Returns, by the first index of each chunk of a dimension, its target offset."""
    begins, place = {}, 0
    for piece in pieces:
        begins[piece.start] = place
        place += piece.stop - piece.start
    return begins


def _piece(array: Any, piece: tuple[slice, ...]) -> Any:
    part = array[piece]
    return np.array(part.read().result() if hasattr(part, "read") else part)


def _touched(array: Any, region: Region) -> int:
    chunk = (1,) * len(region)
    itemsize = getattr(array, "itemsize", None)
    if itemsize is None:
        chunk = array.chunk_layout.read_chunk.shape
        itemsize = array.dtype.numpy_dtype.itemsize
    elements = 1
    for pieces, size, length in zip(region, chunk, array.shape, strict=True):
        elements *= sum(
            min(length, math.ceil(p.stop / size) * size) - p.start // size * size
            for p in pieces
        )
    return int(elements * itemsize)
