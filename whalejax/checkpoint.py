"""Checkpoints: a training state on disk, whole or not at all, for any plan to read.

Orbax writes and reads the arrays; this module decides what is in a checkpoint. Arrays
are stored under names that do not depend on the plan, with a record of every leaf and
file beside them, so that another layout can read them back bit by bit, and another
model or a damaged checkpoint is refused before an array is read.

On disk a checkpoint is a directory: ``arrays/`` as Orbax keeps them, and the record
``whalejax.json``. It is built under another name and renamed when it is whole.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from whalejax import _compat
from whalejax.adapters import dotted
from whalejax.checkpoint_record import (
    Leaf,
    check_same,
    read_record,
    unfinished,
    write_record,
)
from whalejax.lowering.spread import collected, dealt, spread
from whalejax.meshes.problems import WhaleError
from whalejax.precision import LossScale


if TYPE_CHECKING:
    from whalejax.planner.plan import Plan


_SCALE: Final = "loss_scale"
_SECTIONS: Final = ("params", "rest", "opt_state", "step", "rng", _SCALE)
_ARRAYS: Final = "arrays"
_LONGEST_REASON: Final = 200


def save(path: str | os.PathLike[str], state: Any, plan: Plan) -> None:
    """Write a checkpoint; it appears whole or not at all.

    Args:
        path: a directory that does not exist yet; its parents are made.
        state: a training state of sharded arrays; is kept.
        plan: what the state was made for.

    Raises:
        WhaleError: something is at that path already.
    """
    target = Path(path).absolute()
    if "://" in os.fspath(path):
        raise WhaleError(
            f"{os.fspath(path)}: checkpoints are written to a mounted file system, not "
            "to an address. Give a path"
        )
    if target.exists():
        raise WhaleError(
            f"{target}: there is something at this path already, and a checkpoint "
            "needs a new one. Nothing is changed, and the state is as it was: save it "
            "at another path, or remove what is there and save again"
        )
    building = unfinished(target)
    if jax.process_index() == 0:
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
    _wait_for_all_processes(f"{target.name} begun")
    leaves = _leaves(state, plan)
    mesh = _between(state)
    if mesh is not None:
        leaves = [(leaf, spread(x, mesh)) for leaf, x in leaves]
    _write_arrays(
        building / _ARRAYS, _nested([(leaf, _raw(array)) for leaf, array in leaves])
    )
    if jax.process_index() == 0:
        write_record(building, [leaf for leaf, _ in leaves], plan)
        building.rename(target)
    _wait_for_all_processes(f"{target.name} written")


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
    saved = {leaf.place: leaf for leaf in read_record(target)}
    wanted = _leaves(abstract_state, plan)
    # The scale of a loss belongs to a precision: another one's starts anew.
    scales = [leaf for leaf in saved.values() if leaf.section == _SCALE]
    fresh: list[Any] = []
    if bool(scales) != (abstract_state.loss_scale is not None):
        like = jax.tree.leaves(abstract_state.loss_scale)
        pairs = zip(jax.tree.leaves(LossScale.fresh()), like, strict=False)
        fresh = [jax.device_put(x, aval.sharding) for x, aval in pairs]
        wanted = [pair for pair in wanted if pair[0].section != _SCALE]
    else:
        scales = []
    known = {place: x for place, x in saved.items() if x not in scales}
    check_same(target, known, {leaf.place: leaf for leaf, _ in wanted})
    mesh = _between(abstract_state)
    entries = [
        (saved[leaf.place], array.sharding if mesh is None else dealt(leaf.shape, mesh))
        for leaf, array in wanted
    ]
    # Orbax reads all or nothing.
    unused = [(leaf, abstract_state.step.sharding) for leaf in scales]
    requests = [
        (leaf, _request(leaf, sharding)) for leaf, sharding in (*entries, *unused)
    ]
    found = _read_arrays(target, _nested(requests))
    values = [_typed(leaf, found, sharding) for leaf, sharding in entries]
    if mesh is not None:
        pairs = zip(values, wanted, strict=True)
        values = [collected(x, array.sharding, mesh) for x, (_, array) in pairs]
    values += fresh
    return jax.tree.unflatten(jax.tree.structure(abstract_state), values)


# What is in a state.


def _between(state: Any) -> Mesh | None:
    """All devices, where a state lies in parts on several processes' alone.

    Orbax writes and reads only what lies on devices of all processes.
    """
    mesh: Mesh | None = state.origin.mesh
    return mesh if mesh is not None and mesh.is_multi_process else None


def _leaves(state: Any, plan: Plan) -> list[tuple[Leaf, Any]]:
    """Every leaf with its description, in the order that the state flattens in."""
    found: list[tuple[Leaf, Any]] = []
    for section in _SECTIONS:
        entries = jax.tree_util.tree_flatten_with_path(getattr(state, section))[0]
        names = [dotted(path) for path, _ in entries]
        if section == "params":
            names = [leaf.path for leaf in plan.trained]
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


# Files.


def _orbax() -> Any:
    """Orbax, imported when it is needed: it takes a while and has no types."""
    return importlib.import_module("orbax.checkpoint")


def _wait_for_all_processes(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def _write_arrays(path: Path, arrays: dict[str, dict[str, Any]]) -> None:
    ocp = _orbax()
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))


def _read_arrays(target: Path, request: dict[str, dict[str, Any]]) -> Mapping[str, Any]:
    ocp = _orbax()
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            found: Mapping[str, Any] = checkpointer.restore(
                target / _ARRAYS, args=ocp.args.StandardRestore(request)
            )
    except Exception as error:  # of unreadable numbers Orbax tells by this very class
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        raise WhaleError(
            f"{target}: this checkpoint cannot be read ({reason[:_LONGEST_REASON]}). "
            "Restore another one"
        ) from error
    return found
