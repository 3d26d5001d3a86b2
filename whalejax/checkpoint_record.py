"""The record of a checkpoint: which leaves and files it holds.

A checkpoint is refused by its record, before an array is read: where it is damaged, cut
short, or another model's. The record is plain JSON, so nothing here needs JAX.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from whalejax import __version__
from whalejax.meshes.problems import Problems, WhaleError


if TYPE_CHECKING:
    from whalejax.planner.plan import Plan


FORMAT: Final = 1
"""Version of the record."""

UNFINISHED_SUFFIX: Final = ".unfinished"
"""What a checkpoint's name ends in until it is whole."""

_RECORD: Final = "whalejax.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a state, as the record describes it.

    Attributes:
        section: the field of the state that it belongs to.
        name: dotted path inside the section; of a parameter, the plan's.
        shape: of the whole array; of random keys, without the words of a key.
        dtype: such as ``"float32"``, or ``"key<fry>"`` for random keys.
        key_impl: name of the random keys' algorithm, or empty.
    """

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """What the leaf is known by: its section and its name in it."""
        return self.section, self.name

    @property
    def form(self) -> str:
        """Type and shape, such as ``"float32[240, 960]"``."""
        return f"{self.dtype}{list(self.shape)}"


def unfinished(path: Path) -> Path:
    """Where a checkpoint stands while it is being written.

    >>> unfinished(Path("run/step_000010")).name
    'step_000010.unfinished'
    """
    return path.with_name(path.name + UNFINISHED_SUFFIX)


def write_record(building: Path, leaves: Sequence[Leaf], plan: Plan) -> None:
    """Describe a checkpoint, when all its files are written.

    Args:
        building: its directory.
        leaves: every array of the state.
        plan: what the state was made for.
    """
    record = {
        "whalejax_checkpoint": FORMAT,
        "whalejax": __version__,
        "model_hash": plan.model_hash,
        "plan_hash": plan.hash,
        "leaves": [dataclasses.asdict(leaf) for leaf in leaves],
        "file_bytes": {
            file.relative_to(building).as_posix(): file.stat().st_size
            for file in sorted(building.rglob("*"))
            if file.is_file()
        },
    }
    (building / _RECORD).write_text(json.dumps(record, indent=1))


def read_record(target: Path) -> list[Leaf]:
    """The leaves that a checkpoint holds.

    Raises:
        WhaleError: it is not whole, of a newer format, or files were lost or cut;
            every such file is listed.
    """
    if not target.is_dir():
        rest = unfinished(target)
        cut = (
            f"; its writing was cut short, there is {rest.name}"
            if rest.exists()
            else ""
        )
        raise WhaleError(
            f"{target}: there is no checkpoint at this path{cut}. Give the path of one "
            "that step.save wrote"
        )
    try:
        record = json.loads((target / _RECORD).read_text())
        version = record["whalejax_checkpoint"]
        if version != FORMAT:
            raise WhaleError(
                f"{target} has checkpoint format {version}; this WhaleJAX reads "
                f"{FORMAT}. Upgrade whalejax, or use the version that wrote it"
            )
        leaves = [
            Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in record["leaves"]
        ]
        file_bytes = dict(record["file_bytes"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise WhaleError(
            f"{target} is not a whole checkpoint: its record {_RECORD} cannot be read "
            f"({type(error).__name__}: {error}). Restore another one"
        ) from error
    _check_files(target, file_bytes)
    return leaves


def _check_files(target: Path, file_bytes: Mapping[str, int]) -> None:
    problems = Problems()
    for name, nbytes in file_bytes.items():
        file = target / name
        if not file.is_file():
            problems.add(f"{name} is missing ({nbytes} bytes)")
        elif file.stat().st_size != nbytes:
            found = file.stat().st_size
            problems.add(f"{name} has {found} bytes; {nbytes} were written")
    problems.raise_if_any(title=f"{target} is damaged; restore another checkpoint")


def check_same(
    target: Path,
    saved: Mapping[tuple[str, str], Leaf],
    wanted: Mapping[tuple[str, str], Leaf],
) -> None:
    """Refuse a checkpoint whose leaves are not those that are wanted.

    Args:
        target: the checkpoint, for the message.
        saved, wanted: leaves by their place.

    Raises:
        WhaleError: every leaf that differs.
    """
    problems = Problems()
    for place in [*wanted, *(place for place in saved if place not in wanted)]:
        there, here = saved.get(place), wanted.get(place)
        # The run's own key may be of another algorithm: the saved one goes on.
        if there and here and (there.form == here.form or there.section == "rng"):
            continue
        problems.add(
            f"{' '.join(place)}: the checkpoint has "
            f"{there.form if there else 'no such leaf'}, this model "
            f"{here.form if here else 'has no such leaf'}"
        )
    problems.raise_if_any(
        title=f"{target} is a checkpoint of another model or optimizer"
    )
