"""Checkpoints: a training state on disk, whole or not at all, for any plan to read.

Orbax writes and reads the arrays; this module decides what is in a checkpoint. Arrays
are stored under names that do not depend on the plan, with a small record of every
leaf beside them, so that another layout can read them back bit by bit and another
model is refused before a single array is read.

On disk a checkpoint is a directory: ``state/`` holds the arrays as Orbax keeps them,
``whalejax/metadata`` the record as JSON. Both are written under a temporary name and
renamed together.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from whalejax import __version__, _compat
from whalejax.adapters import dotted
from whalejax.meshes.problems import Problems, WhaleError


if TYPE_CHECKING:
    from whalejax.planner.plan import Plan


FORMAT: Final = 1
"""Version of the record."""

UNFINISHED_SUFFIX: Final = ".orbax-checkpoint-tmp"
"""What Orbax adds to the name of a checkpoint until it is whole."""

_SECTIONS: Final = ("params", "rest", "opt_state", "step", "rng")
_RECORD: Final = "whalejax"
_ARRAYS: Final = "state"
_LONGEST_REASON: Final = 200


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


def save(path: str | os.PathLike[str], state: Any, plan: Plan) -> None:
    """Write a checkpoint; it appears whole or not at all.

    Args:
        path: a directory that does not exist yet; its parents are made.
        state: a training state of sharded arrays; is kept.
        plan: what the state was made for.

    Raises:
        WhaleError: something is at that path already.
    """
    ocp = _orbax()
    target = Path(path).absolute()
    if target.exists():
        raise WhaleError(
            f"{target}: there is something at this path already, and a checkpoint "
            "needs a new one. Choose another path, or remove what is there"
        )
    if jax.process_index() == 0:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished(target), ignore_errors=True)
    leaves = _leaves(state, plan)
    record = {
        "whalejax_checkpoint": FORMAT,
        "whalejax": __version__,
        "model_hash": plan.model_hash,
        "plan_hash": plan.hash,
        "leaves": [dataclasses.asdict(leaf) for leaf, _ in leaves],
    }
    arrays = _nested([(leaf, _raw(array)) for leaf, array in leaves])
    parts: dict[str, Any] = {
        _ARRAYS: ocp.args.StandardSave(arrays),
        _RECORD: ocp.args.JsonSave(record),
    }
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        checkpointer.save(target, args=ocp.args.Composite(**parts))


def restore(path: str | os.PathLike[str], abstract_state: Any, plan: Plan) -> Any:
    """Read a checkpoint into the layout of a state, whatever layout wrote it.

    Args:
        path: what ``save`` wrote.
        abstract_state: a state of ``jax.ShapeDtypeStruct`` leaves with shardings.
        plan: what the state is made for.

    Returns:
        A state of the same structure, with arrays equal to the saved ones to the bit.

    Raises:
        WhaleError: there is no whole checkpoint at that path, it is damaged, or it is
            another model's; every leaf that differs is listed.
    """
    target = Path(path).absolute()
    saved = {leaf.place: leaf for leaf in _read_record(target)}
    wanted = _leaves(abstract_state, plan)
    _check_same(target, saved, {leaf.place: leaf for leaf, _ in wanted})
    entries = [(saved[leaf.place], array.sharding) for leaf, array in wanted]
    requests = [(leaf, _request(leaf, sharding)) for leaf, sharding in entries]
    found = _read_arrays(target, _nested(requests))
    values = [_typed(leaf, found, sharding) for leaf, sharding in entries]
    return jax.tree.unflatten(jax.tree.structure(abstract_state), values)


def unfinished(path: Path) -> Path:
    """Where a checkpoint stands while it is being written.

    >>> unfinished(Path("run/step_000010")).name
    'step_000010.orbax-checkpoint-tmp'
    """
    return path.with_name(path.name + UNFINISHED_SUFFIX)


def _orbax() -> Any:
    """Orbax, imported when it is needed: it takes a while and has no types."""
    return importlib.import_module("orbax.checkpoint")


# What is in a state.


def _leaves(state: Any, plan: Plan) -> list[tuple[Leaf, Any]]:
    """Every leaf with its description, in the order that the state flattens in."""
    found: list[tuple[Leaf, Any]] = []
    for section in _SECTIONS:
        entries = jax.tree_util.tree_flatten_with_path(getattr(state, section))[0]
        names = [dotted(path) for path, _ in entries]
        if section == "params":
            names = [leaf.path for leaf in plan.leaves]
        seen: Counter[str] = Counter()
        for name, (_, array) in zip(names, entries, strict=True):
            seen[name] += 1
            unique = name if seen[name] == 1 else f"{name}#{seen[name]}"
            leaf = Leaf(
                section=section,
                name=unique,
                shape=tuple(array.shape),
                dtype=str(array.dtype),
                key_impl=_key_impl(array),
            )
            found.append((leaf, array))
    return found


def _key_impl(array: Any) -> str:
    if not _compat.is_key_dtype(array.dtype) or not isinstance(array, jax.Array):
        return ""
    return str(jax.random.key_impl(array))


def _nested(entries: Iterable[tuple[Leaf, Any]]) -> dict[str, dict[str, Any]]:
    """Arrays as they are stored: by section and name, those that hold anything."""
    tree: dict[str, dict[str, Any]] = {}
    for leaf, value in entries:
        if math.prod(leaf.shape):  # Orbax refuses arrays without elements
            tree.setdefault(leaf.section, {})[leaf.name] = value
    return tree


def _raw(array: Any) -> Any:
    """The array itself; of random keys, their words."""
    is_key = _compat.is_key_dtype(array.dtype)
    return jax.random.key_data(array) if is_key else array


def _request(leaf: Leaf, sharding: Any) -> Any:
    """What to read a leaf as."""
    make: Any = jax.ShapeDtypeStruct
    if not leaf.key_impl:
        return make(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharding)
    keys = functools.partial(_keys, leaf.shape, leaf.key_impl)
    words = jax.eval_shape(lambda: jax.random.key_data(keys()))
    return make(words.shape, words.dtype, sharding=sharding)


def _keys(shape: tuple[int, ...], impl: str) -> Any:
    return jax.random.split(jax.random.key(0, impl=impl), shape)


def _typed(leaf: Leaf, found: Mapping[str, Any], sharding: Any) -> Any:
    """A leaf of the state from what was read."""
    if math.prod(leaf.shape):
        array = found[leaf.section][leaf.name]
        if leaf.key_impl:
            return jax.random.wrap_key_data(array, impl=leaf.key_impl)
        return array
    if leaf.key_impl:
        return jax.device_put(_keys(leaf.shape, leaf.key_impl), sharding)
    return jnp.zeros(leaf.shape, jnp.dtype(leaf.dtype), device=sharding)


# Reading.


def _read_record(target: Path) -> list[Leaf]:
    if not target.is_dir():
        cut_short = unfinished(target).exists()
        reason = (
            f"; its writing was cut short, only {unfinished(target).name} is there"
            if cut_short
            else ""
        )
        raise WhaleError(
            f"{target}: there is no checkpoint at this path{reason}. Give the path of "
            "one that step.save wrote"
        )
    try:
        record = json.loads((target / _RECORD / "metadata").read_text())
        version = record["whalejax_checkpoint"]
        if version == FORMAT:
            return [
                Leaf(**{**leaf, "shape": tuple(leaf["shape"])})
                for leaf in record["leaves"]
            ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WhaleError(
            f"{target} is not a whole checkpoint: its record "
            f"{_RECORD}/metadata cannot be read ({type(error).__name__}: {error}). "
            "Restore another one"
        ) from error
    raise WhaleError(
        f"{target} has checkpoint format {version}; this WhaleJAX reads {FORMAT}. "
        "Upgrade whalejax, or restore it with the version that wrote it"
    )


def _check_same(
    target: Path,
    saved: Mapping[tuple[str, str], Leaf],
    wanted: Mapping[tuple[str, str], Leaf],
) -> None:
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


def _read_arrays(target: Path, request: dict[str, dict[str, Any]]) -> Mapping[str, Any]:
    ocp = _orbax()
    parts: dict[str, Any] = {_ARRAYS: ocp.args.StandardRestore(request)}
    try:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore(target, args=ocp.args.Composite(**parts))
    except Exception as error:  # of damaged files Orbax tells by a plain Exception
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise WhaleError(
            f"{target}: this checkpoint is damaged and cannot be read "
            f"({reason[:_LONGEST_REASON]}). Restore another one"
        ) from error
    arrays: Mapping[str, Any] = found[_ARRAYS]
    return arrays
