"""Copies on other machines: each process sends a copy of its shards to another machine.

So the loss of a machine costs no more than the loss of a process. If a restarted
process's machine lacks a file, the process reads it from a machine that has it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from msgspec import Meta

from whalejax.wire.connection import SLOWEST_BYTES_PER_SECOND, listen
from whalejax.wire.keys import Key
from whalejax.wire.messages import Arrays, Message, Question
from whalejax.wire.service import (
    Address,
    Caller,
    RefusedRequestError,
    Service,
    UnansweredError,
)


NAME: Final = re.compile(r"(\d{1,12})-(\d{1,12})-(\d{1,6})of(\d{1,6})", re.ASCII)
"""Pattern of file names: step, generation, rank and number of processes."""

_PART_BYTES: Final = 1 << 24
_ASK_SECONDS: Final = 30.0


CopyName = Annotated[str, Meta(pattern=rf"(?a)\A{NAME.pattern}\Z")]
Place = Annotated[int, Meta(ge=0, lt=1 << 53)]


class CopyStored(Message, tag="taken"):
    pass


class CopyBytes(Message):
    size: Place
    arrays: Arrays = ()


class Put(Question[CopyStored]):
    name: CopyName
    place: Place
    last: bool
    arrays: Arrays


class Read(Question[CopyBytes]):
    name: CopyName
    begin: Place
    end: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyHolder:
    """A process with copies.

    Attributes:
        machine: Machine of the process.
        folder: Folder of its copies; agents of one machine may have different folders.
        host, port: Address at which it serves copies; unused if all share one folder.
    """

    machine: str
    folder: str = ""
    host: str = ""
    port: int = 0


def other_machine(holders: Sequence[CopyHolder], rank: int) -> CopyHolder | None:
    """Returns the holder of a second copy for a process; None on a single machine.

    Process k of a machine sends its copies to process k of the next machine, modulo
    that machine's number of processes.

    Args:
        holders: Holders of all ranks, in order.
        rank: Rank of the process.

    >>> holders = [CopyHolder(machine=m, port=n) for n, m in enumerate("aabc")]
    >>> [other_machine(holders, rank).port for rank in range(4)]
    [2, 2, 3, 0]
    """
    machines = list(dict.fromkeys(holder.machine for holder in holders))
    if len(machines) == 1:
        return None
    mine = holders[rank].machine
    before = sum(holder.machine == mine for holder in holders[:rank])
    target = machines[(machines.index(mine) + 1) % len(machines)]
    there = [holder for holder in holders if holder.machine == target]
    return there[before % len(there)]


class CopyExchange:
    """Stores copies from other machines in a folder, and serves parts of its files.

    Attributes:
        host, port: Address at which other machines reach this exchange.
    """

    def __init__(self, folder: Path, key: Key, host: str) -> None:
        """Listens for other machines.

        Args:
            folder: Folder of this machine's copies.
            key: Key of the run.
            host: Address at which other machines reach this one.

        Raises:
            OSError: The address is not available.
        """
        self._folder = folder
        listening = listen(host)
        self._service = Service(listening, key, {Put: self._put, Read: self._read})
        self.host, self.port = self._service.address
        self._caller = Caller(key)

    def close(self) -> None:
        """Ends all connections."""
        self._caller.close()
        self._service.close()

    # For this process.

    def send(self, path: Path, holder: CopyHolder) -> None:
        """Sends a file to another machine, under the same name.

        Args:
            path: Path of the file.
            holder: Process that receives the file.

        Raises:
            OSError: The file cannot be read, or the receiver refused it.
        """
        address = holder.host, holder.port
        whole = np.memmap(path, np.uint8, "r")
        for place in range(0, whole.size, _PART_BYTES):
            part = whole[place : place + _PART_BYTES]
            last = place + part.size == whole.size
            question = Put(name=path.name, place=place, last=last, arrays=(part,))
            try:
                self._caller.ask(address, question, seconds=_seconds(part))
            except UnansweredError as error:
                raise OSError(
                    f"{holder.host} did not take copies of this machine: {error}"
                ) from None

    def file(self, name: str, holder: CopyHolder) -> RemoteCopy:
        """Opens a file of another machine."""
        return RemoteCopy(self._caller, (holder.host, holder.port), name)

    # For the others.

    def _put(self, asked: Put) -> CopyStored:
        name, place = asked.name, asked.place
        if len(asked.arrays) != 1 or asked.arrays[0].dtype != np.uint8:
            raise RefusedRequestError(
                "shape", f"a part of {name} is one array of bytes"
            )
        draft, path = self._folder / f".{name}.put", self._folder / name
        taken = CopyStored()
        if place and not draft.exists():
            if asked.last and path.exists():
                return taken  # The part is a duplicate.
            raise RefusedRequestError("missing", f"{name} lacks bytes before {place}")
        try:
            with draft.open("r+b" if place else "wb") as file:
                if file.seek(0, 2) < place:
                    raise RefusedRequestError(
                        "missing", f"{name} lacks bytes before {place}"
                    )
                file.seek(place)
                file.write(asked.arrays[0].data)
            if asked.last:
                draft.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise
        return taken

    def _read(self, asked: Read) -> CopyBytes:
        begin, end = asked.begin, asked.end
        try:
            whole = np.memmap(self._folder / asked.name, np.uint8, "r")
        except (OSError, ValueError) as error:
            raise RefusedRequestError("missing", str(error)) from None
        part = whole[begin : min(end, begin + _PART_BYTES)]
        return CopyBytes(size=whole.size, arrays=(part,))


class RemoteCopy:
    """A file of another machine, read in parts.

    Attributes:
        size: Size in bytes.
    """

    def __init__(self, caller: Caller, address: Address, name: str) -> None:
        """Asks for the size of the file.

        Raises:
            OSError: The file is missing, or its machine does not answer.
        """
        self._caller, self._address, self._name = caller, address, name
        self.size = self._ask(0, 0).size

    def __getitem__(self, part: slice) -> np.ndarray:
        """Returns a range of bytes.

        Raises:
            OSError: The bytes did not arrive.
        """
        begin, end, _ = part.indices(self.size)
        getitem = np.empty(max(end - begin, 0), np.uint8)
        for place in range(begin, end, _PART_BYTES):
            until = min(place + _PART_BYTES, end)
            (got,) = self._ask(place, until).arrays
            if got.dtype != np.uint8 or got.shape != (until - place,):
                raise OSError(f"{self._name} was cut short")
            getitem[place - begin : until - begin] = got
        return getitem

    def _ask(self, begin: int, end: int) -> CopyBytes:
        question = Read(name=self._name, begin=begin, end=end)
        try:
            return self._caller.ask(
                self._address, question, seconds=_seconds(np.empty(0))
            )
        except UnansweredError as error:
            raise OSError(f"{self._name} did not come: {error}") from None


def _seconds(part: np.ndarray) -> float:
    return _ASK_SECONDS + (part.nbytes + _PART_BYTES) / SLOWEST_BYTES_PER_SECOND


def names_in(folder: Path) -> list[str]:
    """Returns the names of all files in a folder; empty if it does not exist."""
    with contextlib.suppress(OSError):
        return sorted(path.name for path in folder.iterdir())
    return []


def remove_others(folder: Path, kept: Iterable[str]) -> None:
    """Removes all files of a folder except ``kept``."""
    for name in {*names_in(folder)} - {*kept}:
        with contextlib.suppress(OSError):
            (folder / name).unlink()
