"""The record of a checkpoint: its leaves and files, and their hashes.

With the record, a checkpoint that is damaged, incomplete or of another model is refused
before an array is read. The record is plain JSON, so this module does not need JAX.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from whalejax._version import __version__
from whalejax.meshes.errors import Problems, WhaleError, quoted
from whalejax.meshes.read_file import read_text


if TYPE_CHECKING:
    from whalejax.planner.plan.plan import Plan


FORMAT: Final = 1
"""Version of the record. Records with and without hashes have the same version."""

UNFINISHED_SUFFIX: Final = ".unfinished"
"""Suffix of a checkpoint's name until it is complete."""

RECORD: Final = "whalejax.json"
"""Name of the record's file."""

OTHER_OPTIMIZER: Final = (
    'step.restore(path, only="model") takes it, keeps the step counter and begins the '
    "optimizer anew; keep_schedule=True lets its schedule go on"
)
"""Remedy for a checkpoint of another optimizer."""

_HASH: Final = "record_sha256"
_OLDER: Final = frozenset(
    ("whalejax_checkpoint", "whalejax", "model_hash", "plan_hash", "leaves")
    + ("file_bytes",)
)
MODEL_SECTIONS: Final = ("params", "rest")
_LINEN: Final = "params."
"""Prefix of the names of Linen parameters that are not trained."""

LONGEST_REASON: Final = 200
"""Maximum number of characters that an error quotes from another library's message."""


Place = tuple[str, str]
"""Identity of a leaf: the field of the state, and the name within the field."""


class DamagedCheckpoint(WhaleError):
    """A checkpoint is incomplete or was changed since it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Description of one array of a state in the record.

    Attributes:
        section: Field of the state.
        name: Dotted path inside the section; a parameter's path in the plan.
        shape: Shape of the global array; for random keys, the shape of the key array.
        dtype: Name of the dtype, such as ``"float32"``, or ``"key<fry>"`` for random
            keys.
        key_impl: Name of the random keys' algorithm, or empty.
    """

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    @property
    def place(self) -> Place:
        """The section and name, which identify the leaf."""
        return self.section, self.name

    @property
    def form(self) -> str:
        """The dtype and shape, such as ``"float32[240, 960]"``."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Description of a checkpoint's contents.

    Attributes:
        leaves: Descriptions of all arrays of the state.
        file_bytes: Size of each file, by its path in the checkpoint.
        file_sha256: SHA-256 of each file in hexadecimal digits; None in checkpoints of
            older versions, which cannot be checked.
        samples: Number of samples of the finished steps, or None if unknown.
        batch_size: Number of samples of the plan's global batch, or None if unknown.
        num_micro_batches: Number of micro-batches in a step of the plan, or None if
            unknown.
    """

    leaves: tuple[Leaf, ...]
    file_bytes: Mapping[str, int]
    file_sha256: Mapping[str, str] | None = None
    samples: int | None = None
    batch_size: int | None = None
    num_micro_batches: int | None = None


def unfinished(path: Path) -> Path:
    """Returns the path of a checkpoint while it is being written.

    >>> unfinished(Path("run/step_000010")).name
    'step_000010.unfinished'
    """
    return path.with_name(path.name + UNFINISHED_SUFFIX)


def files_of(folder: Path) -> list[str]:
    """Returns the relative paths of a checkpoint's files, without its record."""
    return [
        file.relative_to(folder).as_posix()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file != folder / RECORD
    ]


def write_record(
    building: Path,
    leaves: Sequence[Leaf],
    plan: Plan,
    file_sha256: Mapping[str, str],
    samples: int | None,
    batch_size: int | None,
) -> None:
    """Writes the record of a checkpoint after all its files.

    Args:
        building: Directory of the unfinished checkpoint.
        leaves: Descriptions of all arrays of the state.
        plan: Plan of the state.
        file_sha256: Hash of each file.
        samples: Number of samples of the finished steps, or None if unknown.
        batch_size: Number of samples of a global batch, or None.
    """
    record: dict[str, Any] = {
        "whalejax_checkpoint": FORMAT,
        "whalejax": __version__,
        "model_hash": plan.model_hash,
        "plan_hash": plan.hash,
        "samples": samples,
        "batch_size": batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "leaves": [dataclasses.asdict(leaf) for leaf in leaves],
        "file_bytes": {
            name: (building / name).stat().st_size for name in files_of(building)
        },
        "file_sha256": dict(file_sha256),
    }
    # The record's own hash is first, and fields that older records lack are last. So a
    # truncated record never looks like a complete record without hashes.
    whole = {_HASH: _hash_of(record), **record}
    (building / RECORD).write_text(json.dumps(whole, indent=1))


def _hash_of(record: Mapping[str, Any]) -> str:
    said = {name: value for name, value in record.items() if name != _HASH}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(target: Path) -> Record:
    """Reads the record of a checkpoint; does not compare the hashes of the files.

    Raises:
        DamagedCheckpoint: The record cannot be read or was changed, or files are
            missing or have another size.
        WhaleError: No checkpoint exists at that path, or it cannot be accessed, or it
            has another format.
    """
    try:
        is_there = target.is_dir()
        rest = unfinished(target)
        is_cut = not is_there and rest.exists()
    except OSError as error:
        raise WhaleError(
            f"{target}: {error.strerror or error}. Give the path of a checkpoint that "
            "step.save wrote"
        ) from error
    if not is_there and os.path.lexists(target):
        what = "is a file" if target.exists() else "is a link to nothing"
        raise DamagedCheckpoint(
            f"{target}: there is no checkpoint at this path: it {what}, and a "
            "checkpoint is a folder. Restore another one"
        )
    if not is_there:
        cut = f"; its writing was cut short, there is {rest.name}" if is_cut else ""
        raise WhaleError(
            f"{target}: there is no checkpoint at this path{cut}. Give the path of one "
            "that step.save wrote"
        )
    try:
        record = json.loads(read_text(target / RECORD))
        version, is_whole = record["whalejax_checkpoint"], _is_whole(record)
        read = _record_of(record) if version == FORMAT and is_whole else None
    except PermissionError as error:
        raise WhaleError(
            f"{target}: {error.strerror}. Ask for permission to read it, or restore "
            "another one"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _refuse_parent(target)
        if isinstance(error, FileNotFoundError):
            raise DamagedCheckpoint(
                f"{target} is not a whole checkpoint: it has no {RECORD}. Give the "
                "path of one that step.save wrote"
            ) from error
        said = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        raise DamagedCheckpoint(
            f"{target} is not a whole checkpoint: its record {RECORD} cannot be read "
            f"({said}). Restore another one"
        ) from error
    if version != FORMAT:
        kind = WhaleError if is_whole else DamagedCheckpoint
        raise kind(
            f"{target} has checkpoint format {version!r:.40}; this WhaleJAX reads "
            f"{FORMAT}. Upgrade whalejax, or use the version that wrote it"
        )
    if read is None:
        raise DamagedCheckpoint(
            f"{target} is damaged: its record {RECORD} was changed since it was "
            "written: its hash differs. Restore another checkpoint"
        )
    _check_sizes(target, read.file_bytes)
    return read


def _refuse_parent(target: Path) -> None:
    """Raises an error that names the checkpoints inside a folder of checkpoints."""
    inside = sorted(one.parent.name for one in target.glob(f"*/{RECORD}"))
    if inside:
        names = ", ".join([*["…"][: max(0, len(inside) - 3)], *inside[-3:]])
        raise WhaleError(
            f"{target} is no checkpoint, but holds {len(inside)}: "
            f"{quoted(names)}. Give the path of one, such as {target / inside[-1]}"
        )


def _is_whole(record: Mapping[str, Any]) -> bool:
    if _HASH in record:
        return bool(record[_HASH] == _hash_of(record))
    return record.keys() == _OLDER


def _record_of(record: Mapping[str, Any]) -> Record:
    """Converts a complete record.

    Raises:
        ValueError: A field has another form. Other classes of errors are possible.
    """
    leaves = tuple(
        Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in record["leaves"]
    )
    file_bytes = dict(record["file_bytes"])
    hashes = record.get("file_sha256")
    if hashes is not None and hashes.keys() != file_bytes.keys():
        raise ValueError("its hashes are not those of its files")
    for name in file_bytes:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name!r:.60} is no file in it")
    names = ("samples", "batch_size", "num_micro_batches")
    counts = [record.get(name) for name in names]
    for count in counts:
        if count is not None and (type(count) is not int or count < 0):
            raise ValueError(f"{count!r:.40} is no number of samples")
    return Record(
        leaves=leaves,
        file_bytes=file_bytes,
        file_sha256=None if hashes is None else dict(hashes),
        samples=counts[0],
        batch_size=counts[1],
        num_micro_batches=counts[2],
    )


def _check_sizes(target: Path, file_bytes: Mapping[str, int]) -> None:
    problems = Problems(kind=DamagedCheckpoint)
    for name, nbytes in file_bytes.items():
        file = target / name
        try:
            result = file.stat().st_size if file.is_file() else None
        except (OSError, ValueError) as error:
            problems.add(f"{name} cannot be read ({error})")
            continue
        if result is None:
            problems.add(f"{name} is missing ({nbytes} bytes)")
        elif result != nbytes:
            problems.add(f"{name} has {result} bytes; {nbytes} were written")
    refuse_damaged(target, problems)


def refuse_damaged(target: Path, problems: Problems) -> None:
    """Refuses a checkpoint if its files have problems.

    Raises:
        DamagedCheckpoint: A file has problems.
    """
    title = f"{target} is damaged; restore another checkpoint"
    problems.raise_if_any(DamagedCheckpoint, title=title)


def moved_places(
    saved: Mapping[Place, Leaf], wanted: Mapping[Place, Leaf]
) -> dict[Place, Place]:
    """Matches leaves that are trained in the checkpoint and frozen in the state.

    It also matches the reverse.

    Returns:
        Requested place of each matched leaf, by its place in the checkpoint.
    """
    places: dict[Place, Place] = {}
    for section, name in saved:
        if section not in MODEL_SECTIONS or (section, name) in wanted:
            continue
        trained = section == MODEL_SECTIONS[0]
        names = (name, _LINEN + name if trained else name.removeprefix(_LINEN))
        for other in ((MODEL_SECTIONS[trained], name) for name in names):
            if other in wanted and other not in saved:
                places[section, name] = other
                break
    return places


def check_same(
    target: Path,
    saved: Mapping[Place, Leaf],
    wanted: Mapping[Place, Leaf],
    remedy: str = OTHER_OPTIMIZER,
) -> None:
    """Refuses a checkpoint whose leaves are not the requested ones.

    Args:
        target: Folder of the checkpoint.
        saved, wanted: Leaves of the checkpoint, and requested leaves.
        remedy: Remedy if only the optimizer differs.

    Raises:
        WhaleError: Leaves differ.
    """
    problems = Problems()
    is_model = False
    moved = moved_places(saved, wanted)
    for old, new in moved.items():
        is_model = is_model or saved[old].form != wanted[new].form
        roles = ("trained", "not trained")
        was, now = roles if old[0] == MODEL_SECTIONS[0] else roles[::-1]
        problems.add(
            f"{saved[old].name}: {saved[old].form}, {was} where the checkpoint was "
            f"saved; {wanted[new].form}, {now} in this step"
        )
    known = {*moved, *moved.values()}
    every = [*wanted, *(place for place in saved if place not in wanted)]
    for place in every:
        there, here = saved.get(place), wanted.get(place)
        if place in known:
            continue
        # The saved key is used, so the requested key may have another algorithm.
        if there and here and (there.form == here.form or there.section == "rng"):
            continue
        is_model = is_model or place[0] in MODEL_SECTIONS
        problems.add(
            f"{' '.join(place)}: the checkpoint has "
            f"{there.form if there else 'no such leaf'}, this model "
            f"{here.form if here else 'has no such leaf'}"
        )
    title = f"{target} is a checkpoint of another model or optimizer"
    if not is_model:
        title += f". The model is the same: {remedy}"
    problems.raise_if_any(title=title)
