"""The compiled step of a plan with tables whose dense part has stage programs.

Lookups run before the stage programs, and updates after them; both are programs of all
devices. Vectors go to the stages that read them, and gradients come back from there.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from whalejax.lowering.train_state import bare
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.planner.plan_errors import PlanError
from whalejax.runtime.table_step import TablesState, TableStep, with_tables


@names_arguments("StagedTableStep", instance="step")
class StagedTableStep(TableStep):
    """A compiled plan with tables and stage programs."""

    def _make_programs(self) -> tuple[Any, Any]:
        programs = (self.programs, self.programs.plain)
        self._look_up = [jax.jit(one.look_up) for one in programs]
        self._update = [jax.jit(one.update, donate_argnums=0) for one in programs]
        self._all_ids = jax.jit(lambda x: self.programs.shared_out(self._ids_of(x)))
        return self._run_step, self._run_evaluation

    def _ids_of(self, leaves: list[Any]) -> Any:
        return self.programs.all_ids(leaves)

    def _on_devices(self, leaves: list[Any]) -> list[Any]:
        shared = NamedSharding(self.mesh, PartitionSpec(tuple(self.plan.axes)))
        whole = NamedSharding(self.mesh, PartitionSpec())
        sizes = [leaf.shape[0] if leaf.shape else 1 for leaf in leaves]
        divides = [size % self.mesh.size == 0 for size in sizes]
        return [
            jax.device_put(leaf, shared if divided else whole)
            for leaf, divided in zip(leaves, divides, strict=True)
        ]

    def _on_stages(self, leaves: list[Any], vectors: list[Any]) -> list[Any]:
        pairs = zip([*leaves, *vectors], self.runner.batch_shardings, strict=True)
        return [jax.device_put(*pair) for pair in pairs]

    def _run_step(
        self, state: TablesState, leaves: list[Any], is_crowded: bool
    ) -> tuple[TablesState, dict[str, Any]]:
        ids = self._all_ids(leaves)
        vectors, taken = self._look_up[is_crowded](state.tables, ids)
        dense = self._dense_state(state)
        batch = self._on_stages(leaves, vectors)
        whole = NamedSharding(self.mesh, PartitionSpec())
        step = jax.device_put(state.step, whole, may_alias=False)
        new, metrics, gradients = self.runner.step_with_gradients(dense, batch)
        gradients = [
            jax.device_put(gradient.astype(vector.dtype), vector.sharding)
            for gradient, vector in zip(gradients, vectors, strict=True)
        ]
        given = state.tables, ids, taken, gradients, step
        return with_tables(new, self._update[is_crowded](*given)), metrics

    def _run_evaluation(self, state: TablesState, leaves: list[Any]) -> dict[str, Any]:
        ids = self._all_ids(leaves)
        vectors, _ = self._look_up[True](state.tables, ids)
        batch = self._on_stages(leaves, vectors)
        dense = bare(self._dense_state(state))
        metrics: dict[str, Any] = self._evaluator.evaluate(dense, batch)[0]
        return metrics

    def lower(self, state: TablesState, batch: Any) -> Any:
        """Refuses to lower, because there is no single program.

        Args:
            state, batch: Arguments of a step, unused.

        Raises:
            PlanError: Always.
        """
        del state, batch
        return self.lower_shapes()

    def lower_shapes(self) -> Any:
        """Refuses to lower, because there is no single program.

        Raises:
            PlanError: Always.
        """
        raise PlanError(
            "the stages of this plan have programs of their own, and lookups and "
            "updates of tables are two more, so there is no one program to lower"
        )
