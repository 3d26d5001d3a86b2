"""Checkpoints: writes a training state to disk atomically, readable by any plan.

Orbax writes and reads the arrays. This module defines the contents of a checkpoint. The
names of arrays do not depend on the plan, so another layout can restore the same bits.
A record describes every leaf and file, so a checkpoint that is damaged or of another
model is refused before an array is read.

On disk a checkpoint is a directory with ``arrays/`` in Orbax's format and the record
``whalejax.json``. It is written under another name, and renamed when it is complete.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from whalejax import _compat
from whalejax.adapters.base import dotted
from whalejax.lowering.global_arrays import raw_array, settle
from whalejax.lowering.loss_scale import LossScale
from whalejax.lowering.optimizer_schedules import COUNT
from whalejax.lowering.stage_arrays import collected, spread, spread_sharding
from whalejax.lowering.train_state import check_alive
from whalejax.meshes.errors import WhaleError, warn
from whalejax.state.checkpoint_files import (
    being_built,
    check_hashes,
    hashed,
    write_failure_message,
)
from whalejax.state.checkpoint_record import (
    LONGEST_REASON,
    MODEL_SECTIONS,
    DamagedCheckpoint,
    Leaf,
    Place,
    Record,
    check_same,
    moved_places,
    read_record,
    write_record,
)


if TYPE_CHECKING:
    from whalejax.planner.plan.plan import Plan


_SCALE: Final = "loss_scale"
_KEPT_WITH_MODEL: Final = (*MODEL_SECTIONS, "step", "rng")
_SECTIONS: Final = (*MODEL_SECTIONS, "opt_state", "step", "rng", _SCALE)
ARRAYS: Final = "arrays"


class UncheckedCheckpoint(UserWarning):
    """Warns that a checkpoint has no hashes, so changes cannot be detected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """Contents of a checkpoint without the optimizer's state.

    Attributes:
        params, rest: Parameters and non-trainable state, with the structures of a
            state.
        rng: The run's random key.
        step: Number of finished steps.
        samples: Number of samples in these steps, or None.
        updates: Number of updates that the optimizer counted; ``step`` if it has no
            counter.
    """

    params: Any
    rest: Any
    rng: Any
    step: int
    samples: int | None
    updates: int


def save(
    path: str | os.PathLike[str],
    state: Any,
    plan: Plan,
    batch_size: int | None = None,
    *,
    before_it_appears: Callable[[], None] | None = None,
) -> None:
    """Writes a checkpoint atomically.

    Args:
        path: Directory that does not exist yet; its parents are created.
        state: Training state of sharded arrays; it is not donated.
        plan: Plan of the state.
        batch_size: Number of samples of the global batch, or None if unknown.
        before_it_appears: Function to call when everything is written; if it raises,
            the files are removed.

    Raises:
        WhaleError: The path exists or cannot be written, or the state was donated.
    """
    target = new_path(path)
    check_alive(state)
    settle()
    leaves = _leaves(state, plan)
    with being_built(target) as building:
        mesh = _between(state)
        if mesh is not None:
            leaves = [(leaf, spread(x, mesh)) for leaf, x in leaves]
        write_contents(target, building, leaves, plan, state.samples, batch_size)
        if before_it_appears is not None:
            before_it_appears()


def write_contents(
    target: Path,
    building: Path,
    leaves: Sequence[tuple[Leaf, Any]],
    plan: Plan,
    samples: int | None,
    batch_size: int | None,
) -> None:
    """Writes the arrays and the record of a checkpoint; all processes call this.

    Args:
        target: Final path of the checkpoint, for errors.
        building: Folder that is written.
        leaves: Arrays, each after its description.
        plan: Plan of the state.
        samples: Number of samples of the finished steps, or None if unknown.
        batch_size: Number of samples of the global batch, or None if unknown.

    Raises:
        WhaleError: The checkpoint cannot be written.
    """
    arrays = nested([(leaf, raw_array(array)) for leaf, array in leaves])
    try:
        write_arrays(building / ARRAYS, arrays)
    except Exception as error:  # Orbax raises many classes for a full disk.
        raise WhaleError(write_failure_message(target, error)) from error
    hashes = hashed(building)
    if jax.process_index() == 0:
        described = [leaf for leaf, _ in leaves]
        write_record(building, described, plan, hashes, samples, batch_size)


def new_path(path: Any) -> Path:
    """Returns the checked path of a new checkpoint."""
    target = existing_path(path)
    if "://" in os.fspath(path):
        raise WhaleError(
            f"{os.fspath(path)}: checkpoints are written to a mounted file system, not "
            "to an address. Give a path"
        )
    try:
        is_there = target.exists()
    except OSError as error:
        raise WhaleError(write_failure_message(target, error)) from error
    if is_there:
        raise WhaleError(
            f"{target}: this path exists already. Nothing was changed, and the state "
            "is as it was. Save it at another path, or remove what is there and save "
            "again"
        )
    return target


def existing_path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise WhaleError(
            f"path is {path!r:.60}; expected the path of a checkpoint, such as "
            "'run/step_000100'"
        )
    if "\0" in os.fspath(path):
        raise WhaleError(f"path is {path!r:.60}; no path has a null character in it")
    return Path(path).absolute()


def restore(
    path: str | os.PathLike[str],
    abstract_state: Any,
    plan: Plan,
    batch_size: int | None = None,
) -> Any:
    """Reads a checkpoint of any layout into the layout of a state.

    Args:
        path: Path of a checkpoint.
        abstract_state: State of ``jax.ShapeDtypeStruct`` leaves with shardings.
        plan: Plan of the new state.
        batch_size: Number of samples of the global batch, or None if unknown.

    Returns:
        State of the same structure, with arrays bitwise equal to the saved ones.

    Raises:
        DamagedCheckpoint: The checkpoint was changed, which is checked first.
        WhaleError: No checkpoint exists at that path, or it is of another model.
    """
    target = existing_path(path)
    record = checked(target)
    saved = {leaf.place: leaf for leaf in record.leaves}
    wanted = _leaves(abstract_state, plan)
    # With another precision, the loss scale starts anew.
    fresh: list[Any] = []
    had_scale = any(leaf.section == _SCALE for leaf in record.leaves)
    if had_scale != (abstract_state.loss_scale is not None):
        like = jax.tree.leaves(abstract_state.loss_scale)
        pairs = zip(jax.tree.leaves(LossScale.initial()), like, strict=False)
        fresh = [jax.device_put(x, aval.sharding) for x, aval in pairs]
        wanted = [pair for pair in wanted if pair[0].section != _SCALE]
        saved = {place: x for place, x in saved.items() if x.section != _SCALE}
    check_same(target, saved, {leaf.place: leaf for leaf, _ in wanted})
    mesh = _between(abstract_state)
    entries = [
        (
            saved[leaf.place],
            array.sharding if mesh is None else spread_sharding(leaf.shape, mesh),
        )
        for leaf, array in wanted
    ]
    values = read_leaves(target, record, entries)
    if mesh is not None:
        pairs = zip(values, wanted, strict=True)
        values = [collected(x, array.sharding, mesh) for x, (_, array) in pairs]
    values += fresh
    state = jax.tree.unflatten(jax.tree.structure(abstract_state), values)
    seen = _samples(record, int(state.step), batch_size)
    return dataclasses.replace(state, samples=seen)


def restore_model(
    path: str | os.PathLike[str],
    abstract_state: Any,
    plan: Plan,
    batch_size: int | None = None,
    *,
    on_host: bool = False,
) -> SavedModel:
    """Reads a checkpoint without the optimizer's state.

    Args:
        path, abstract_state, plan, batch_size: Arguments of ``restore``. Leaves are
            matched by name even if only the checkpoint, or only the state, trains them.
        on_host: Whether to return NumPy arrays. If not, the arrays have the state's
            layout, in device memory.

    Raises:
        WhaleError: The errors of ``restore``.
    """
    target = existing_path(path)
    record = checked(target)
    # In the state's flattening order.
    parts = tuple(getattr(abstract_state, name) for name in _KEPT_WITH_MODEL)
    wanted = [
        (leaf, array)
        for leaf, array in _leaves(abstract_state, plan)
        if leaf.section in _KEPT_WITH_MODEL
    ]
    places = {leaf.place: leaf for leaf, _ in wanted}
    saved = _by_place(record, places)
    check_same(target, saved, places)
    entries: list[tuple[Leaf, Any]] = []
    for leaf, array in wanted:
        # The arrays are in device memory, even if the state's are in host memory.
        there = None if on_host else (array.sharding.mesh, array.sharding.spec)
        entries.append((saved[leaf.place], there and NamedSharding(*there)))
    counters = [(leaf, None) for leaf in record.leaves if _counts_updates(leaf)]
    values = read_leaves(target, record, [*entries, *counters])
    tree: Any = jax.tree.structure(parts)
    params, rest, number, rng = tree.unflatten(values[: len(entries)])
    step = int(number)
    return SavedModel(
        params=params,
        rest=rest,
        rng=rng,
        step=step,
        samples=_samples(record, step, batch_size),
        updates=max(map(int, values[len(entries) :]), default=step),
    )


def _counts_updates(leaf: Leaf) -> bool:
    name = leaf.name.rpartition(".")[2]
    scalar = leaf.section == "opt_state" and not leaf.shape and not leaf.key_impl
    return scalar and name == COUNT and jnp.issubdtype(leaf.dtype, jnp.integer)


def _by_place(record: Record, wanted: Mapping[Place, Leaf]) -> dict[Place, Leaf]:
    """Returns a checkpoint's leaves by their place in a state, without the optimizer's.

    A leaf may be trained in the checkpoint and frozen in the state, or vice versa.
    """
    saved = {x.place: x for x in record.leaves if x.section in _KEPT_WITH_MODEL}
    moved = moved_places(saved, wanted)
    return {moved.get(place, place): leaf for place, leaf in saved.items()}


def checked(target: Path) -> Record:
    """Returns the record of an undamaged checkpoint; all processes call this.

    Raises:
        DamagedCheckpoint: Files were changed.
        WhaleError: No checkpoint exists at that path.
    """
    record = read_record(target)
    check_hashes(target, record)
    if record.file_sha256 is None:
        warn(unchecked(target), UncheckedCheckpoint)
    return record


def unchecked(target: Path) -> str:
    """Returns the warning for a checkpoint without hashes."""
    return (
        f"{target} was written by a version that kept no hashes: the sizes of its "
        "files are right, and their contents could not be checked"
    )


def _samples(record: Record, step: int, batch_size: int | None) -> int | None:
    if record.samples is not None:
        return record.samples
    size = batch_size if record.batch_size is None else record.batch_size
    return None if size is None else step * size


# Contents of a state.


def _between(state: Any) -> Mesh | None:
    """Returns the mesh of all devices if some arrays are not on all processes, or None.

    Orbax writes and reads only arrays on devices of all processes.
    """
    mesh: Mesh | None = state.origin.mesh
    return mesh if mesh is not None and mesh.is_multi_process else None


def _leaves(state: Any, plan: Plan) -> list[tuple[Leaf, Any]]:
    leaves: list[tuple[Leaf, Any]] = []
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
                key_impl=key_algorithm(array),
            )
            leaves.append((leaf, array))
    return leaves


def key_algorithm(array: Any) -> str:
    if not _compat.is_key_dtype(array.dtype) or not isinstance(array, jax.Array):
        return ""
    return str(jax.random.key_impl(array))


def nested(entries: Iterable[tuple[Leaf, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the non-empty arrays by section and name, as Orbax stores them."""
    tree: dict[str, dict[str, Any]] = {}
    for leaf, value in entries:
        if math.prod(leaf.shape):  # Orbax refuses arrays without elements.
            tree.setdefault(leaf.section, {})[leaf.name] = value
    return tree


def _request(leaf: Leaf, sharding: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    if not leaf.key_impl:
        return make(leaf.shape, jnp.dtype(leaf.dtype), sharding=sharding)
    keys = functools.partial(_keys, leaf.shape, leaf.key_impl)
    words = jax.eval_shape(lambda: jax.random.key_data(keys()))
    return make(words.shape, words.dtype, sharding=sharding)


def _keys(shape: tuple[int, ...], impl: str) -> Any:
    return jax.random.split(jax.random.key(0, impl=impl), shape)


def _typed(leaf: Leaf, found: Mapping[str, Any], sharding: Any) -> Any:
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
    """Imports Orbax at first use: the import is slow, and Orbax has no types."""
    return importlib.import_module("orbax.checkpoint")


def write_arrays(path: Path, arrays: dict[str, dict[str, Any]]) -> None:
    ocp = _orbax()
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(arrays))


def read_leaves(
    target: Path, record: Record, entries: Sequence[tuple[Leaf, Any]]
) -> list[Any]:
    """Reads leaves, each in its sharding, or as NumPy arrays if that is None."""
    ocp = _orbax()
    requests = nested([(leaf, _request(leaf, place)) for leaf, place in entries])
    how = jax.tree.map(
        lambda x: (
            ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
            if x.sharding is None
            else ocp.ArrayRestoreArgs(
                sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
            )
        ),
        requests,
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            leaves: Mapping[str, Any] = checkpointer.restore(
                target / ARRAYS,
                args=ocp.args.PyTreeRestore(
                    item=requests, restore_args=how, partial_restore=True
                ),
            )
    except Exception as error:  # Orbax raises many classes for unreadable data.
        first = (str(error).splitlines() or [""])[0] or type(error).__name__
        reason = f"{target}: this checkpoint cannot be read ({first[:LONGEST_REASON]})"
        if record.file_sha256 is None:
            raise DamagedCheckpoint(f"{reason}. Restore another one") from error
        raise WhaleError(
            f"{reason}, though its files are as they were written. See that there is "
            "memory for it, or restore it under a plan that shards more"
        ) from error
    return [_typed(leaf, leaves, place) for leaf, place in entries]
