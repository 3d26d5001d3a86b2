"""``BatchLayout``: checks global batches and places them on the devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from whalejax import _compat
from whalejax.adapters.leaves import is_key, is_leaf
from whalejax.capture.batch import list_problem
from whalejax.lowering.batch_record import dtype_of
from whalejax.lowering.global_arrays import absent, is_here
from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import MOST_LISTED, Problems
from whalejax.planner.plan_entries import BatchLeaf
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Checks global batches and places them on the devices.

    Attributes:
        structure: Tree of the batch that was traced.
        leaves: Planned shape, dtype and batch dimension of each leaf.
        shardings: Target sharding of each leaf.
    """

    structure: Any
    leaves: tuple[BatchLeaf, ...]
    shardings: tuple[NamedSharding, ...]

    def abstract(self) -> list[Any]:
        """Returns the flat abstract leaves of a global batch, with shardings."""
        return [
            jax.ShapeDtypeStruct(leaf.shape, dtype_of(leaf.dtype), sharding=sharding)
            for leaf, sharding in zip(self.leaves, self.shardings, strict=True)
        ]

    def place(self, batch: Any) -> list[Any]:
        """Returns the flat leaves of a batch on their devices.

        Args:
            batch: Global batch. With several processes, the part of this process, or
                global arrays.

        Raises:
            PlanError: The structure, a shape or a dtype differs. The message lists all.
        """
        problems = Problems()
        placed = []
        for leaf, planned, sharding in zip(
            self.flat(batch), self.leaves, self.shardings, strict=True
        ):
            shapes = [planned.shape]
            if _is_part(leaf, sharding):
                # Leaves that are on devices of other processes alone are not checked.
                here = is_here(sharding)
                shapes.append(
                    part_shape(sharding, planned.shape) if here else np.shape(leaf)
                )
            problem = self.problem(leaf, planned, shapes)
            if problem:
                problems.add(problem)
            else:
                placed.append(_as_planned(leaf, planned, sharding))
        problems.raise_if_any(PlanError, title="the batch does not match the plan")
        return placed

    def check(self, batch: Any, step: int) -> list[Any]:
        """Returns the flat leaves of a job's global batch, without placing them.

        Args:
            batch: Complete global batch.
            step: Number of the step, from 0.

        Raises:
            PlanError: The structure, a shape or a dtype differs. The message lists all.
        """
        leaves, problems = self.flat(batch), Problems()
        remedy = "Let the job's batch function give as many samples in every step"
        for leaf, planned in zip(leaves, self.leaves, strict=True):
            problem = self.problem(leaf, planned, [planned.shape], remedy=remedy)
            if problem:
                problems.add(problem)
        title = f"the batch of step {step + 1} does not match the plan"
        problems.raise_if_any(PlanError, title=title)
        return leaves

    def flat(self, batch: Any) -> list[Any]:
        """Returns the leaves of a batch, in which lists and tuples are equivalent.

        Raises:
            PlanError: The leaves differ from the plan's.
        """
        leaves, structure = jax.tree.flatten(batch)
        self._check_arrays(batch, leaves)
        if structure == self.structure:
            return leaves
        flat = jax.tree_util.tree_flatten_with_path(batch)[0]
        given = [jax.tree_util.keystr(path) for path, _ in flat]
        planned = [leaf.path for leaf in self.leaves]
        if given != planned:
            problems = Problems("batch", PlanError)
            for path, leaf in flat:
                if listed := list_problem(path, leaf):
                    problems.add(listed)
            problems.raise_if_any()
            raise PlanError(_other_leaves(given, planned))
        return leaves

    @staticmethod
    def _check_arrays(batch: Any, leaves: Sequence[Any]) -> None:
        if all(map(is_leaf, leaves)):
            return
        problems = Problems("batch", PlanError)
        for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
            if not is_leaf(leaf):
                name = f"batch{jax.tree_util.keystr(path)}"
                other = f"{name} is {short_repr(leaf)}; expected an array"
                problems.add(list_problem(path, leaf) or other)
        problems.raise_if_any()

    def problem(
        self,
        leaf: Any,
        planned: BatchLeaf,
        shapes: Collection[tuple[int, ...]],
        *,
        remedy: str = "Plan again for this batch",
    ) -> str:
        """Returns the text of a leaf's problem; empty if there is none.

        Args:
            leaf: Leaf of the batch that the user gave.
            planned: Leaf as the plan describes it.
            shapes: Shapes that the leaf may have.
            remedy: Advice for a wrong shape if there is one process.
        """
        name = f"batch{planned.path}"
        if isinstance(leaf, jax.Array) and not _compat.is_concrete(leaf):
            return (
                f"{name} is being traced; the step is compiled: call it outside jax.jit"
            )
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return f"{name} is a shape without values; give arrays"
        shape = np.shape(leaf)
        dtype = str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
        if shape not in shapes:
            others = [str(other) for other in shapes if other != planned.shape]
            if jax.process_count() == 1 and not others:
                return (
                    f"{name} has shape {shape}; the plan is for the global shape "
                    f"{planned.shape}. {remedy}"
                )
            return (
                f"{name} has shape {shape} in process {jax.process_index()}; the plan "
                f"is for the global shape {planned.shape}, of which this process gives "
                f"{others[0] if others else 'all'}. Give the samples that "
                "step.batch_rows() names (as wh.Feed(..., step) does), or plan again "
                "for another batch"
            )
        if dtype != planned.dtype and not _harmless(dtype, planned.dtype):
            return (
                f"{name} has dtype {dtype}; the plan is for {planned.dtype}. Convert "
                "it, or plan again"
            )
        return ""


def _is_part(leaf: Any, sharding: NamedSharding) -> bool:
    shared = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    return not (shared or sharding.is_fully_addressable or is_key(leaf))


def part_shape(sharding: NamedSharding, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of this process's part of a global array.

    Args:
        sharding: Sharding of the array.
        shape: Shape of the global array.
    """
    spans: list[set[tuple[int, int]]] = [set() for _ in shape]
    for index in sharding.addressable_devices_indices_map(tuple(shape)).values():
        for result, cut, size in zip(spans, index or (), shape, strict=True):
            result.add(cut.indices(size)[:2])
    return tuple(sum(stop - start for start, stop in result) for result in spans)


def _harmless(given: str, planned: str) -> bool:
    if "key" in given or "key" in planned:
        return False
    a, b = jnp.dtype(given), jnp.dtype(planned)
    narrowed = a.kind == b.kind and (a.itemsize, b.itemsize) == (8, 4)
    return narrowed or np.can_cast(a, b, "safe")


def _as_planned(leaf: Any, planned: BatchLeaf, sharding: NamedSharding) -> Any:
    if isinstance(leaf, jax.Array) and not _is_part(leaf, sharding):
        if str(leaf.dtype) != planned.dtype:
            leaf = leaf.astype(planned.dtype)
        same = leaf.sharding == sharding
        return leaf if same else jax.device_put(leaf, sharding)
    dtype = jnp.dtype(planned.dtype)
    if not is_here(sharding):
        return absent(jax.ShapeDtypeStruct(planned.shape, dtype), sharding)
    # A loader may overwrite its buffer while the step still runs, and devices may share
    # memory with a NumPy array, even with may_alias=False.
    array = np.array(leaf, dtype, copy=True)
    if _is_part(leaf, sharding):
        return jax.make_array_from_process_local_data(sharding, array, planned.shape)
    return jax.device_put(array, sharding)


def _other_leaves(given: Sequence[str], planned: Sequence[str]) -> str:
    lacks, surplus = (
        [f"batch{path}" for path in one if path not in other]
        for one, other in ((planned, given), (given, planned))
    )
    words = []
    for verb, paths in (("lacks", lacks), ("has besides", surplus)):
        more = ["…"] if len(paths) > MOST_LISTED else []
        if paths:
            words.append(f"{verb} {', '.join([*paths[:MOST_LISTED], *more])}")
    said = ", and ".join(words) or "has the plan's leaves in another order"
    return (
        f"the batch {said}; the plan is for {len(planned)} leaves. Give the same "
        "structure, or plan again"
    )
