"""Processes that share a step with tables: their checks, batches and common decisions.

Every process has some of the mesh's devices and runs the same programs in the same
order. With a single process, these functions compare and exchange nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from whalejax.adapters.leaves import is_key
from whalejax.lowering.batch_layout import BatchLayout
from whalejax.lowering.batch_record import batch_leaves
from whalejax.lowering.global_arrays import put_global, run_alone, wrapped
from whalejax.lowering.multihost.plan_agreement import Agreement
from whalejax.lowering.multihost.watchdog import Watch
from whalejax.lowering.train_state import host_copy
from whalejax.planner.tables.placement import placement_data, placement_of
from whalejax.planner.tables.replace import Replacement
from whalejax.state.checkpoint_files import told_by_first
from whalejax.tables.recognize import TableProgram
from whalejax.tables.table_plan_record import program_hash, whole_plan
from whalejax.tables.tables_plan import TablesPlan
from whalejax.tables.wide_ids import check_32_bits


class TableProcesses:
    """Processes of a step with tables, one or several.

    Attributes:
        are_several: Whether other processes have some of the devices.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Finds the processes; compares nothing yet.

        Args:
            mesh: Devices of the step.
        """
        self._mesh = mesh
        self.are_several: bool = mesh.is_multi_process
        self._watch = Watch(alone=not self.are_several)
        self._agreement = Agreement(mesh, one_kind=True)
        self._is_checked = False

    def check(
        self,
        plan: TablesPlan,
        program: TableProgram,
        params: Callable[[], Any],
        optimizer: optax.GradientTransformation,
    ) -> None:
        """Compares plans, losses, optimizers and versions before the first step.

        Args:
            plan, program: Plan and loss of the step.
            params: Function that returns the abstract parameters of the dense part.
            optimizer: Optimizer of the dense part.

        Raises:
            PlanError: Processes differ, or did not call this in time.
        """
        if self._is_checked or not self.are_several:
            return
        self._is_checked = True
        given: Any = SimpleNamespace(
            adapter=SimpleNamespace(params=params()),
            optimizer=optax.with_extra_args_support(optimizer),
        )
        loss = {"loss": program_hash(program)}
        self._agreement.check(given, lambda: loss, plan=whole_plan(plan))

    def run(self, program: Callable[..., Any], *given: Any) -> Any:
        """Runs a program of all devices, and names a process that is lost meanwhile.

        With several processes on CPUs it waits for the result; see ``run_alone``.

        Args:
            program: Compiled function of arrays.
            given: Arguments of the function.

        Raises:
            WhaleError: Another process was lost.
        """
        with self._watch.step():
            result = run_alone(lambda given: program(*given), given, self._mesh)
            self._watch.issued([x for x in jax.tree.leaves(result) if not is_key(x)])
        return result

    def place(
        self, batch: Any, planned: Any, shardings: Sequence[NamedSharding]
    ) -> list[Any]:
        """Returns the leaves of a global batch, from this process's part of each.

        Args:
            batch: Samples of this process, or global arrays.
            planned: Abstract global batch.
            shardings: Sharding of each leaf; surplus shardings are not used.

        Raises:
            PlanError: A leaf has another structure, shape or type than planned.
            WhaleError: An integer does not fit in 32 bits; see ``check_32_bits``.
        """
        check_32_bits(batch)
        leaves = batch_leaves(planned)
        layout = BatchLayout(
            structure=jax.tree.structure(planned),
            leaves=leaves,
            shardings=tuple(shardings[: len(leaves)]),
        )
        return layout.place(batch)

    def first_replacement(self, find: Callable[[], Replacement]) -> Replacement:
        """Returns in all processes the replacement that the first process finds.

        The search has a time limit, so it may end differently in each process.

        Args:
            find: Function that searches for a placement.

        Raises:
            WhaleError: The search failed; all processes raise it.
        """
        if not self.are_several:
            return find()

        def text() -> str:
            found = find()
            seconds = found.planned_seconds, found.present_seconds, found.new_seconds
            return json.dumps([placement_data(found.placement), *seconds])

        first = told_by_first(text, "a new placement of tables")
        data, planned, present, new = json.loads(first)
        return Replacement(
            placement=placement_of(data),
            planned_seconds=planned,
            present_seconds=present,
            new_seconds=new,
        )


def put(leaf: Any, sharding: NamedSharding) -> Any:
    """Returns an array or random key on devices, even on those of other processes.

    Args:
        leaf: Value, equal in all processes, or a global array; it is copied.
        sharding: Sharding of the result.
    """
    is_shared = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
    if is_shared or sharding.is_fully_addressable:
        return jax.device_put(host_copy(leaf), sharding)
    if is_key(leaf):
        words = put_global(np.asarray(jax.random.key_data(leaf)), sharding)
        return wrapped(words, jax.random.key_impl(leaf))
    return put_global(leaf, sharding)


def rows_here(sharding: NamedSharding, samples: int) -> np.ndarray:
    """Returns the indices of the samples on this process's devices, in order.

    Args:
        sharding: Sharding of the global batch by samples.
        samples: Number of samples of the global batch.
    """
    parts = sharding.addressable_devices_indices_map((samples,)).values()
    numbers = np.arange(samples)
    return np.unique(np.concatenate([numbers[index] for index in parts if index]))
