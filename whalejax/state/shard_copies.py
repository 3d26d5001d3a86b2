"""Files with copies of a process's shards, which processes read in any layout.

If one model is sharded over several processes, the failure of one ends all. So each
process writes its shards to a file of a memory file system while its steps run, more
often than checkpoints. Any number of restarted processes can read the shards that they
need from the newest complete set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from whalejax.lowering.global_arrays import impl_of, raw_array, wrapped
from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import WhaleError
from whalejax.state.adopt_state import to_save
from whalejax.state.checkpoint import _leaves
from whalejax.state.checkpoint_record import Leaf
from whalejax.state.remote_shard_copies import NAME


_HEADER_BYTES: Final = 8
_LONGEST_HEADER: Final = 1 << 28

Box = tuple[tuple[int, int], ...]

Part = tuple[dict[str, Any], np.ndarray]
"""Description of a part of a leaf, to write as JSON, and the values of the part. The
description's ``leaf`` identifies the leaf in a state."""


class BadCopies(WhaleError):
    """Copies that cannot be written or used."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ShardCopySet:
    """A set of copies, one for each process.

    Attributes:
        step: Step of the state.
        generation: Generation of the processes that made it.
        count: Number of processes.
    """

    step: int
    generation: int
    count: int

    @property
    def names(self) -> list[str]:
        """File names of all processes, by rank."""
        return [
            f"{self.step}-{self.generation}-{rank}of{self.count}"
            for rank in range(self.count)
        ]


class CopyFile(Protocol):
    """Bytes of a file on this or another machine."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        ...

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Returns a range of bytes.

        Raises:
            OSError: The bytes cannot be read.
        """
        ...


class CopiedPart:
    """A part of a leaf in a file, on this or another machine.

    Attributes:
        about: Description of the part.
        name: Name of the leaf, for messages.
    """

    def __init__(
        self, about: Mapping[str, Any], place: int, file: CopyFile, name: str
    ) -> None:
        """Refers to the part; reads nothing.

        Args:
            about: Description of the part.
            place: Index of the first byte in the file.
            file: File with the part.
            name: Name of the leaf.
        """
        self.about, self.name = about, name
        self._place, self._file = place, file

    def values(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        """Returns the values, and checks their hash.

        Args:
            shape, dtype: Shape and dtype of the part.

        Raises:
            BadCopies: The values cannot be read, were changed, or have another type.
        """
        size = int(np.prod(shape)) * dtype.itemsize
        try:
            # A file of this machine gives a view, which takes no memory.
            raw = np.asarray(self._file[self._place : self._place + size])
        except OSError as error:
            raise BadCopies(f"a copy of {self.name} cannot be read: {error}") from error
        if hashlib.sha256(raw.data).hexdigest() != self.about["sha256"]:
            raise BadCopies(f"a copy of {self.name} was changed since it was written")
        try:
            return raw.view(dtype).reshape(shape)
        except ValueError as error:
            raise BadCopies(f"a copy of {self.name} is of another type") from error


CopiedParts = Mapping[tuple[str, ...], Sequence[CopiedPart]]
"""All parts of a set of copies, by the place of their leaf."""


class CopiedStates(Protocol):
    """Divides states of one kind into parts, from which any layout can be read."""

    def parts(self, state: Any) -> list[Part]:
        """Returns this process's part of each leaf, in host memory.

        Each value of the state is in the parts of exactly one process.

        Args:
            state: State to copy, which is not donated.
        """
        ...

    def read(self, found: CopiedParts) -> Any:
        """Returns a state in this process's layout; all processes call this.

        Args:
            found: Parts of all processes.

        Raises:
            BadCopies: The parts belong to another state, or are damaged.
        """
        ...


class CopiedModelStates:
    """States of a plan without tables, copied shard by shard."""

    def __init__(self, abstract: Callable[[], TrainState], plan: Any) -> None:
        """Prepares copies of the states of a step.

        Args:
            abstract: Function that returns a state of ``jax.ShapeDtypeStruct`` with
                layouts.
            plan: Plan of the states.
        """
        self._abstract, self._plan = abstract, plan

    def parts(self, state: TrainState) -> list[Part]:
        """Implements ``CopiedStates``."""
        whole: Any = to_save(state, self._abstract(), trains=True)
        return shards_of(_leaves(whole, self._plan))

    def read(self, found: CopiedParts) -> TrainState:
        """Implements ``CopiedStates``."""
        abstract = self._abstract()
        values = arrays_of(found, _leaves(abstract, self._plan))
        state: TrainState = jax.tree.unflatten(jax.tree.structure(abstract), values)
        return state


def shards_of(leaves: Iterable[tuple[Leaf, Any]]) -> list[Part]:
    """Returns copies of this process's shards of some arrays.

    Args:
        leaves: Descriptions of the arrays, and the arrays.
    """
    parts: list[Part] = []
    for leaf, array in leaves:
        raw = raw_array(array)
        for shard in raw.addressable_shards:
            if shard.replica_id == 0:
                box = box_of(shard.index, raw.shape)
                about = {"leaf": [*leaf.place], "form": leaf.form, "box": box}
                parts.append((about, np.array(shard.data, copy=True)))
    return parts


def arrays_of(found: CopiedParts, leaves: Iterable[tuple[Leaf, Any]]) -> list[Any]:
    """Returns arrays in this process's layout from their shards.

    Args:
        found: Parts of all processes.
        leaves: Descriptions of the arrays, and abstract arrays with layouts.

    Raises:
        BadCopies: The parts belong to other arrays, or are damaged.
    """
    values = []
    for leaf, aval in leaves:
        entry = found.get(leaf.place, [])
        if any(
            part.about["form"] != leaf.form
            or len(part.about["box"]) != len(raw_array(aval).shape)
            for part in entry
        ):
            raise BadCopies(f"the copy of {leaf.name} is of another array")
        values.append(_make_sharded_array(aval, _filler(entry, leaf.name)))
    return values


def whole_sets(names: Iterable[str]) -> list[ShardCopySet]:
    """Returns the complete sets among file names, the newest first.

    >>> [found.step for found in whole_sets(["7-1-0of2", "7-1-1of2", "8-1-0of2"])]
    [7]
    """
    result: dict[ShardCopySet, set[int]] = {}
    for match in filter(None, map(NAME.fullmatch, names)):
        step, generation, rank, count = map(int, match.groups())
        one = ShardCopySet(step=step, generation=generation, count=count)
        result.setdefault(one, set()).add(rank)
    whole = (s for s, ranks in result.items() if ranks == {*range(s.count)})
    return sorted(whole, reverse=True)


class Copies:
    """Writes this process's shards, one set at a time, in a separate thread.

    Attributes:
        folder: Folder of the copies.
        seconds: Seconds to write and send the last set.
    """

    def __init__(self, folder: Path) -> None:
        """Creates the folder, which only its owner may read.

        Raises:
            BadCopies: The folder cannot be created, or belongs to another user.
        """
        self.folder, self.seconds = folder, 0.0
        self._thread: threading.Thread | None = None
        self._error = ""
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            there = folder.lstat()
        except OSError as error:
            raise BadCopies(
                f"{folder} cannot be made ({error.strerror or error})"
            ) from error
        if there.st_uid != os.getuid() or there.st_mode & 0o077 or folder.is_symlink():
            raise BadCopies(
                f"{folder} belongs to another user, or others can open it. Remove it"
            )

    def begin(
        self,
        parts: list[Part],
        samples: int | None,
        copied: ShardCopySet,
        rank: int,
        send: Callable[[Path], None] | None = None,
    ) -> None:
        """Writes parts of a state while the steps run.

        Args:
            parts: Parts of this process, from ``CopiedStates.parts``. The list is
                emptied after the write.
            samples: Number of samples of the finished steps, or None if unknown.
            copied: Set to which the copy belongs.
            rank: Rank of this process.
            send: Function that sends the file to another machine; raises ``OSError`` on
                failure.
        """
        self.wait()
        path = self.folder / copied.names[rank]

        def work() -> None:
            began = time.monotonic()
            try:
                self._write(path, parts, samples)
                parts.clear()  # The parts need as much memory as the file.
                if send is not None:
                    send(path)
            except OSError as error:
                self._error = error.strerror or str(error)
            except Exception as error:  # After any error the set is incomplete.
                self._error = f"{type(error).__name__}: {error}"
            self.seconds = time.monotonic() - began

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a set is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the set is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def problem(self) -> str:
        """Returns once why the last set was not written or sent; empty if it was."""
        problem, self._error = self._error, ""
        return problem

    def _write(
        self,
        path: Path,
        parts: Sequence[Part],
        samples: int | None,
    ) -> None:
        draft, place, table = path.with_name(f".{path.name}"), 0, []
        for about, array in parts:
            sha = hashlib.sha256(_bytes_of(array)).hexdigest()
            table.append({**about, "place": place, "sha256": sha})
            place += array.nbytes
        header = json.dumps({"samples": samples, "pieces": table}).encode()
        try:
            with draft.open("wb") as file:
                file.write(len(header).to_bytes(_HEADER_BYTES, "little") + header)
                for _, array in parts:
                    file.write(_bytes_of(array))
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def _bytes_of(array: np.ndarray) -> memoryview:
    """Returns the bytes of an array, even of a type without a buffer, as bfloat16."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the start and end index of a shard in each dimension.

    >>> box_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def copy_file(path: Path) -> CopyFile:
    """Opens a file of this machine.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is empty.
    """
    return np.memmap(path, np.uint8, "r")


def read_copies(
    opened: Callable[[str], CopyFile], copied: ShardCopySet, states: CopiedStates
) -> Any:
    """Returns a state in this process's layout, from the copies of all processes.

    Args:
        opened: Function that opens a file by its name, on any machine; raises
            ``OSError`` on failure.
        copied: Complete set.
        states: Kind of the state.

    Raises:
        BadCopies: The copies belong to another state, or are damaged.
    """
    found: dict[tuple[str, ...], list[CopiedPart]] = {}
    samples = None
    try:
        for name in copied.names:
            header, end, file = _read_header(opened(name), name)
            samples = header["samples"]
            for about in header["pieces"]:
                leaf, place = tuple(about["leaf"]), about["place"] + end
                part = CopiedPart(about, place, file, leaf[-1])
                found.setdefault(leaf, []).append(part)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCopies(f"copies of step {copied.step} cannot be read: {error}") from (
            error
        )
    state = states.read(found)
    if int(state.step) != copied.step:
        raise BadCopies(f"copies of step {copied.step} hold step {int(state.step)}")
    return state if samples is None else dataclasses.replace(state, samples=samples)


def _read_header(file: CopyFile, name: str) -> tuple[dict[str, Any], int, CopyFile]:
    size = int.from_bytes(file[:_HEADER_BYTES].tobytes(), "little")
    if not 0 < size < min(file.size, _LONGEST_HEADER):
        raise ValueError(f"{name} has no table")
    end = _HEADER_BYTES + size
    return json.loads(file[_HEADER_BYTES:end].tobytes()), end, file


def _relative_slices(
    pairs: Sequence[tuple[int, int]], box: Sequence[tuple[int, int]]
) -> tuple[slice, ...]:
    both = zip(pairs, box, strict=True)
    return tuple(slice(x - a, y - a) for (x, y), (a, _) in both)


Filler = Callable[[Box, np.dtype], np.ndarray]


def _filler(found: Sequence[CopiedPart], name: str) -> Filler:
    def fill(box: Box, dtype: np.dtype) -> np.ndarray:
        part = np.empty([end - begin for begin, end in box], dtype)
        filled = 0
        for each in found:
            theirs = each.about["box"]
            pairs = [
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(box, theirs, strict=True)
            ]
            if any(begin >= end for begin, end in pairs):
                continue
            values = each.values([end - begin for begin, end in theirs], dtype)
            part[_relative_slices(pairs, box)] = values[_relative_slices(pairs, theirs)]
            filled += int(np.prod([y - x for x, y in pairs]))
        if filled != part.size:
            raise BadCopies(f"of {name}, {part.size - filled} numbers were not copied")
        return part

    return fill


def _make_sharded_array(aval: Any, fill: Filler) -> Any:
    raw = raw_array(aval)
    dtype, sharding = np.dtype(raw.dtype), aval.sharding
    known: dict[Box, np.ndarray] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(raw.shape).items():
        box = box_of(index or (slice(None),) * len(raw.shape), raw.shape)
        if box not in known:
            known[box] = fill(box, dtype)
        one = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        # A step may donate the array, so it needs its own buffer.
        arrays.append(jax.device_put(known[box], one, may_alias=False))
    sharded_array = jax.make_array_from_single_device_arrays(
        raw.shape, sharding, arrays, dtype=dtype
    )
    return wrapped(sharded_array, impl_of(aval))
