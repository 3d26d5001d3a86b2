"""Files of copies: the shards that a process writes, and reads in another layout.

If several processes share one model, none has all of it, and the failure of one ends
all. Each writes its shards to a file of a memory file system, in parallel with its
steps and more often than checkpoints. Restarted processes, whatever their number, read
what they need from the newest complete set.
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

from whalejax.adapters.leaves import is_key
from whalejax.lowering.global_arrays import impl_of, wrapped
from whalejax.lowering.train_state import TrainState
from whalejax.meshes.errors import WhaleError
from whalejax.state.checkpoint import _leaves
from whalejax.state.remote_shard_copies import NAME


_HEADER_BYTES: Final = 8
_LONGEST_HEADER: Final = 1 << 28

Box = tuple[tuple[int, int], ...]


class BadCopies(WhaleError):
    """Copies that cannot be used."""


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
            OSError: They cannot be read.
        """
        ...


def whole_sets(names: Iterable[str]) -> list[ShardCopySet]:
    """Returns the complete sets, the newest first.

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
            raise BadCopies(f"{folder} is not this user's alone. Remove it")

    def begin(
        self,
        state: TrainState,
        plan: Any,
        copied: ShardCopySet,
        rank: int,
        send: Callable[[Path], None] | None = None,
    ) -> None:
        """Copies this process's shards to its host; writes them in parallel with the
        steps.

        Args:
            state: State to copy, which is not donated.
            plan: Plan of the state.
            copied: Set of the copy.
            rank: Rank of this process.
            send: Function that puts the file on another machine; raises ``OSError`` on
                failure.
        """
        self.wait()
        pieces: list[tuple[dict[str, Any], np.ndarray]] = []
        for leaf, array in _leaves(state, plan):
            raw = jax.random.key_data(array) if is_key(array) else array
            for shard in raw.addressable_shards:
                if shard.replica_id == 0:
                    box = box_of(shard.index, raw.shape)
                    about = {"leaf": [*leaf.place], "form": leaf.form, "box": box}
                    pieces.append((about, np.array(shard.data, copy=True)))
        path = self.folder / copied.names[rank]

        def work() -> None:
            began = time.monotonic()
            try:
                self._write(path, pieces, state.samples)
                pieces.clear()  # They need as much memory as the file.
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
        """Returns the reason why the last set was not written, once; else an empty
        text.
        """
        problem, self._error = self._error, ""
        return problem

    def _write(
        self,
        path: Path,
        pieces: Sequence[tuple[dict[str, Any], np.ndarray]],
        samples: int | None,
    ) -> None:
        draft, place, table = path.with_name(f".{path.name}"), 0, []
        for about, array in pieces:
            sha = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
            table.append({**about, "place": place, "sha256": sha})
            place += array.nbytes
        header = json.dumps({"samples": samples, "pieces": table}).encode()
        try:
            with draft.open("wb") as file:
                file.write(len(header).to_bytes(_HEADER_BYTES, "little") + header)
                for _, array in pieces:
                    file.write(np.ascontiguousarray(array).data)
            draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


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
    """
    return np.memmap(path, np.uint8, "r")


def read_copies(
    opened: Callable[[str], CopyFile],
    copied: ShardCopySet,
    abstract: TrainState,
    plan: Any,
) -> TrainState:
    """Returns a state in this process's layout, from the copies of all processes.

    Args:
        opened: Function that opens a file by its name, on any machine; raises
            ``OSError`` on failure.
        copied: Complete set.
        abstract: State of ``jax.ShapeDtypeStruct`` with layouts.
        plan: Plan of the new state.

    Raises:
        BadCopies: They belong to another state, or are damaged.
    """
    try:
        files = [_read_header(opened(name), name) for name in copied.names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCopies(f"copies of step {copied.step} cannot be read: {error}") from (
            error
        )
    pieces: dict[tuple[str, ...], list[tuple[Mapping[str, Any], CopyFile]]] = {}
    for header, end, file in files:
        for piece in header["pieces"]:
            placed = {**piece, "place": piece["place"] + end}
            pieces.setdefault(tuple(piece["leaf"]), []).append((placed, file))
    values = []
    for leaf, aval in _leaves(abstract, plan):
        entry = pieces.get(leaf.place, [])
        if any(
            piece["form"] != leaf.form or len(piece["box"]) != _dimensions(aval)
            for piece, _ in entry
        ):
            raise BadCopies(f"{leaf.name} of step {copied.step} is another array")
        values.append(_make_sharded_array(aval, _filler(entry, leaf.name)))
    state: TrainState = jax.tree.unflatten(jax.tree.structure(abstract), values)
    if int(state.step) != copied.step:
        raise BadCopies(f"copies of step {copied.step} hold step {int(state.step)}")
    return dataclasses.replace(state, samples=files[0][0]["samples"])


def _dimensions(aval: Any) -> int:
    raw = jax.eval_shape(jax.random.key_data, aval) if is_key(aval) else aval
    return len(raw.shape)


def _read_header(file: CopyFile, name: str) -> tuple[dict[str, Any], int, CopyFile]:
    """Returns the table at the beginning of a file, its end, and the file."""
    size = int.from_bytes(file[:_HEADER_BYTES].tobytes(), "little")
    if not 0 < size < min(file.size, _LONGEST_HEADER):
        raise ValueError(f"{name} has no table")
    end = _HEADER_BYTES + size
    return json.loads(file[_HEADER_BYTES:end].tobytes()), end, file


def _relative_slices(
    pairs: Sequence[tuple[int, int]], box: Sequence[tuple[int, int]]
) -> tuple[slice, ...]:
    """Returns a part of a leaf, relative to the start of a box that contains it."""
    both = zip(pairs, box, strict=True)
    return tuple(slice(x - a, y - a) for (x, y), (a, _) in both)


Filler = Callable[[Box, np.dtype], np.ndarray]


def _filler(found: Sequence[tuple[Mapping[str, Any], CopyFile]], name: str) -> Filler:
    """Returns a function that assembles any part of a leaf from its copied chunks."""

    def fill(box: Box, dtype: np.dtype) -> np.ndarray:
        part = np.empty([end - begin for begin, end in box], dtype)
        filled = 0
        for piece, data in found:
            theirs = piece["box"]
            pairs = [
                (max(a, c), min(b, d))
                for (a, b), (c, d) in zip(box, theirs, strict=True)
            ]
            if any(begin >= end for begin, end in pairs):
                continue
            shape = [end - begin for begin, end in theirs]
            size = int(np.prod(shape)) * dtype.itemsize
            try:
                raw = np.array(data[piece["place"] : piece["place"] + size])
            except OSError as error:
                raise BadCopies(f"a copy of {name} cannot be read: {error}") from error
            if hashlib.sha256(raw.data).hexdigest() != piece["sha256"]:
                raise BadCopies(f"a copy of {name} is not as it was written")
            try:
                values = raw.view(dtype).reshape(shape)
            except ValueError as error:
                raise BadCopies(f"a copy of {name} is of another type") from error
            part[_relative_slices(pairs, box)] = values[_relative_slices(pairs, theirs)]
            filled += int(np.prod([y - x for x, y in pairs]))
        if filled != part.size:
            raise BadCopies(f"of {name}, {part.size - filled} numbers were not copied")
        return part

    return fill


def _make_sharded_array(aval: Any, fill: Filler) -> Any:
    """Returns an array of which each device gets its part."""
    key = is_key(aval)
    raw = jax.eval_shape(jax.random.key_data, aval) if key else aval
    dtype, sharding = np.dtype(raw.dtype), aval.sharding
    known: dict[Box, np.ndarray] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(raw.shape).items():
        box = box_of(index or (slice(None),) * len(raw.shape), raw.shape)
        if box not in known:
            known[box] = fill(box, dtype)
        one = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        # A separate buffer, which a step may donate.
        arrays.append(jax.device_put(known[box], one, may_alias=False))
    sharded_array = jax.make_array_from_single_device_arrays(
        raw.shape, sharding, arrays, dtype=dtype
    )
    return wrapped(sharded_array, impl_of(aval)) if key else sharded_array
