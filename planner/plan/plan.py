"""The ``Plan`` class for users: the data of a plan, with all its functions as methods.

A plan has mesh axes, the logical dimension that each axis shards in each TaskGraph, the
layout of every leaf, and the predicted cost. It contains no JAX objects, so a plan made
on a laptop can be read, compared and checked on any machine. ``whalejax.compile`` makes
a program of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Final

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.plan import plan_file
from whalejax.planner.plan.report import (
    describe,
    export,
    headline,
    plan_page,
    table_text,
    why,
)
from whalejax.planner.plan.report.diff import PlanDiff, diff
from whalejax.planner.plan.report.framework_configs import named_mappings
from whalejax.planner.plan.report.headline import Throughput
from whalejax.planner.plan.report.pictures import PlanDisplay
from whalejax.planner.plan.report.why import layout_text
from whalejax.planner.plan_data import PLAN_VERSION as PLAN_VERSION
from whalejax.planner.plan_data import PlannedQuestion, StagesData
from whalejax.planner.plan_errors import NothingFits as NothingFits
from whalejax.planner.plan_errors import PlanError as PlanError
from whalejax.planner.search.uneven_replicas import slices_of
from whalejax.planner.search.user_shares import with_samples_note


_INTERNAL_NAMES = frozenset(
    "apart asked_precision batch_tree beyond compute device_order group_size home "
    "model_hash optimizer_bytes per_micro_batch precisions product_flops question "
    "replica roles room_bytes scales_loss source storage times trained version".split()
)
"""Attributes of a plan that completion does not offer, as only other modules use them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages(StagesData):
    """Pipeline of a plan; see ``StagesData`` for its fields."""

    plans: tuple[Plan, ...] = ()


_SPEED: Final = "plan.throughput() has it: {}"
_HABITS: Final = {
    **dict.fromkeys(("mfu", "utilization"), _SPEED.format("utilization, from 0 to 1")),
    "tokens_per_second": _SPEED.format("tokens_per_second"),
    "samples_per_second": _SPEED.format("samples_per_second"),
    "speed": _SPEED.format("tokens_per_second, utilization, step_price"),
    **dict.fromkeys(
        ("price", "cost"),
        _SPEED.format("step_price, million_price and run_price(tokens)"),
    ),
    "parameters": "plan.work.parameters is their number",
    "num_parameters": "plan.work.parameters is their number",
    "step_time": "plan.time.step_seconds is the predicted time of a step",
    "step_seconds": "plan.time.step_seconds is the predicted time of a step",
    "compile": "Write step = wh.compile(plan, loss_fn, model, optimizer=…)",
    "run": "Write step = wh.compile(plan, loss_fn, model, optimizer=…)",
}
"""Advice for attributes that users expect and plans do not have."""


@names_arguments(
    "wh.Plan",
    instance="plan",
    instead="wh.plan(loss_fn, model, batch, …) and wh.Plan.load(path) make plans.",
    habits=_HABITS,
)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanDisplay):
    """Plan of one model on one cluster.

    ``planner.step_options.StepOptions`` has the other fields of a plan. They say how a
    step is computed, such as its remat and offload.

    Attributes:
        version: Version of the file format.
        model_hash: Hash of the model, the batch and the annotations.
        cluster: Cluster of the plan.
        axes: (mesh axis, size) pairs, outermost first, without axes of size 1.
        device_order: For each mesh position, the number of its device in the cluster;
            empty for the cluster's own order.
        num_micro_batches: Number of micro-batches of a step.
        zero: ZeRO stage over ``data``: 0, 1 (shards optimizer state) or 2 (gradients
            too). Over ``fsdp`` parameters are always sharded (ZeRO-3).
        precision: ``"f32"`` (the model's own types), ``"bf16"`` or ``"f16"``.
        precisions: (TaskGraph, precision) pairs if TaskGraphs have different
            precisions; ``"*"`` stands for all others. Empty if ``precision`` holds for
            all.
        default: Strategy of the operations without a mark, as text, or empty.
        roles: Logical dimensions.
        compute: One table for each TaskGraph.
        storage: For each axis that shards only stored values, logical dimensions in
            order of preference.
        leaves: Parameters in the order of their tree, trained ones before others.
        batch: Leaves of the batch.
        batch_tree: Containers of the batch, as text.
        collectives: Collectives of one step; equal ones are one entry with a count.
        time, memory: Predicted seconds and bytes by term.
        candidates: Other evaluated plans, best first.
        notes: Notes for the user.
        product_flops: FLOPs of matrix products of one device in a step; 0 in estimates.
        optimizer_bytes: Bytes of the optimizer's state for all parameters, before
            sharding; None if unknown.
        work: Size of the model and FLOPs of a step, before sharding; None in files of
            older versions.
        stages: The pipeline, if there is one.
        shares: Micro-batches of each rank of ``data`` if ranks compute whole
            micro-batches of their own. Empty if every rank computes a part of each
            micro-batch.
        pipelines: Plan of each pipeline, with all its micro-batches, if several unequal
            pipelines run in parallel; ``stages`` is then the first pipeline.
        group_size: Number of adjacent samples that stay in one micro-batch.
        per_micro_batch: Whether each micro-batch may have a loss of its own although
            the samples of a batch are not independent, as the user accepted.
        gap: Upper bound on the predicted gain of another plan of one program, as a
            fraction of the step time; None if unknown.
        runnable: Whether ``whalejax.compile`` can run the plan.
        beyond: Unsupported features, as older plan files record them, or None.
        compiler_options: (name, value) pairs of XLA options for the step.
        swarm: Requirements on the peers if the plan is for a swarm; one peer then
            serves one stage. None for other plans.
        tables: Placement of embedding tables, or None. With tables, all other fields
            describe the rest of the loss, whose batch contains the looked-up vectors.
        source: Name of the model on the command line and its options, or empty.
        question: Request that the plan answers, for planning again; files lack it.
    """

    stages: Stages | None = None
    pipelines: tuple[Plan, ...] = ()

    def __dir__(self) -> list[str]:
        return [one for one in dir(type(self)) if one not in _INTERNAL_NAMES]

    def __repr__(self) -> str:
        return (
            f"<Plan {layout_text(self)}, on {self.cluster.describe()}: "
            f"{milliseconds(table_text.whole_seconds(self))} a step, "
            f"{gigabytes(self.memory.total_bytes)} per device>"
        )

    def __copy__(self) -> Plan:
        return self  # immutable

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the plan as its file, without the model of its request."""
        return Plan.from_document, (self.document(),)

    def batch_slices(self, node: int) -> tuple[slice, ...]:
        """Returns the samples of a node in every global batch, by the planned shares.

        Args:
            node: Number of the node; a process runs one node.

        Returns:
            One slice of the global batch for each micro-batch of the node, in order.

        Raises:
            PlanError: The node does not exist, or every device takes a part of each
                micro-batch.
        """
        return slices_of(self, node)

    def why(self, path: str) -> str:
        """Explains a parameter's layout, with the alternatives and their costs.

        Args:
            path: Dotted path of a parameter. For a swarm also ``"wire"``, ``"stages"``,
                ``"micro-batches"``, ``"gradients"`` or ``"synchronous"``.

        Raises:
            PlanError: No parameter has that path.
        """
        reasons = dict(self.swarm.reasons) if self.swarm is not None else {}
        if isinstance(path, str) and path in reasons:
            return reasons[path]
        if self.tables is not None and isinstance(path, str):
            reason = table_text.table_why(self, path)
            if reason is not None:
                return reason
            path = table_text.dense_path(self, path)
        return why.why(self, self.leaf(path))

    def what_if(self, **changes: Any) -> Plan:
        """Plans the same model with other settings.

        Args:
            changes: ``batch`` (samples of the global batch), ``sequence`` (tokens of a
                sample), settings of ``wh.plan`` (``cluster``, ``mesh``, ``zero``,
                ``num_micro_batches``, ``precision``, ``shares``, ``compiler_options``,
                ``allow_idle``, ``runnable``), and fields of ``UserOptions``. Other
                settings stay as requested. On another ``cluster``, a fixed number of
                micro-batches may mean micro-batches of another size; a note says so.

        Raises:
            PlanError: The plan was read from a file, which lacks the model, or no plan
                is possible.
        """
        what_if: Plan = self._require_question("what_if").replan(**changes)
        return with_samples_note(self, what_if, changes)

    def verify(
        self, topology: str | None = None, *, timeout_seconds: float = 1800.0
    ) -> Any:
        """Compiles the plan's training step with the real compiler, without running it.

        A separate process compiles, also for hardware that this machine lacks. TPUs
        need the extra ``whalejax[tpu-compile]``, GPUs ``whalejax verify --setup-gpu``.

        Args:
            topology: Topology such as ``"v5p:4x4x4"``, ``"h100:2x8"`` or ``"local"``;
                default: the plan's own cluster.
            timeout_seconds: Seconds after which the compiler is stopped.

        Returns:
            A ``whalejax.verification.comparison.Verification``. ``print`` shows its
            memory, traffic and products, predicted and compiled.

        Raises:
            PlanError: The plan was read from a file, which lacks the model; is not
                runnable; or is for another number of devices.
            WhaleError: The topology or its compiler is unavailable, or the compiler
                died or took too long.
        """
        question = self._require_question("verify")
        return question.verify(self, topology, timeout_seconds=timeout_seconds)

    def _require_question(self, what: str) -> PlannedQuestion:
        if self.question is None:
            raise PlanError(
                f"this plan was read from a file, without its model, which {what} "
                "needs. Make the plan with wh.plan(...)"
            )
        return self.question

    def throughput(self, step_seconds: float | None = None) -> Throughput:
        """Returns speed and price: tokens per second, FLOP/s, MFU, price of a run.

        Args:
            step_seconds: Measured seconds of a step; default: the predicted seconds.

        Raises:
            PlanError: ``step_seconds`` is not above 0, or the plan is from a file
                without the work of its model.

        >>> import jax, jax.numpy as jnp
        >>> import whalejax as wh
        >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
        >>> found = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x,
        ...                 cluster="h100:8")
        >>> found.throughput(step_seconds=0.5).samples_per_second
        128.0
        """
        return headline.throughput(self, step_seconds)

    def explain(self) -> str:
        """Explains the plan: decisive terms, alternatives and unsharded dimensions.

        Returns:
            Lines of text, with numbers.
        """
        return why.explain(self)

    def describe(self) -> str:
        """Describes the plan in the terms of surveys of distributed training.

        Returns:
            Lines of text: parallelism, synchrony, traffic with its topology, and
            replicated state.
        """
        return describe.describe(self)

    def diff(self, other: Plan) -> PlanDiff:
        """Returns the changes from this plan to another, with the cost of each.

        Args:
            other: A plan of the same model or of another one, on any cluster.

        Returns:
            Settings, parameters, traffic and terms that differ; ``print`` shows them.
        """
        return diff(self, other)

    def flax_rules(self) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
        """Returns the plan as Flax's table from logical dimensions to mesh axes.

        Returns:
            (dimension, axes) pairs; None for a dimension that stays unsharded.

        Raises:
            PlanError: One table cannot express the plan. The error lists the dimensions
                that would need two entries.
        """
        return export.flax_rules(self)

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Returns the names of the dimensions of every parameter, by its path.

        The names are those of ``flax_rules``. They come from the model's metadata.
        Without metadata they are words such as ``"vocab"``, ``"embed"``, ``"heads"``
        and ``"mlp"``.
        """
        return export.logical_axes(self)

    def maxtext_flags(self) -> dict[str, int]:
        """Returns the mesh as MaxText flags: ``{"ici_tensor_parallelism": 4}``."""
        return export.maxtext_flags(self)

    def axis_mappings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the plan as haliax's mappings from named axes to mesh axes.

        Returns:
            The mapping of activations and the mapping of parameters, by the names of
            ``logical_axes``. Neither contains unsharded dimensions.

        Raises:
            PlanError: One mapping cannot express the plan.
        """
        found = named_mappings(self, "haliax")
        return dict(found.compute), dict(found.parameters)

    def export(
        self,
        form: str,
        *,
        name: str = "train",
        image: str | None = None,
        command: str | None = None,
    ) -> str:
        """Returns the plan as a file of another system.

        Args:
            form: ``"maxtext"`` (rules, for ``custom_mesh_and_rule``), ``"axlearn"``
                (``mesh_rules``), ``"haliax"`` (axis mappings), ``"levanter"`` (the
                section ``trainer``), ``"jobset"`` or ``"skypilot"``.
            name: Name of the job, for ``"jobset"`` and ``"skypilot"``.
            image: Container image; required for ``"jobset"``.
            command: Shell command that starts the run; default: ``whalejax train`` on
                one host, ``python train.py`` on several.

        Returns:
            Text of the file; a comment at its top lists the decisions that the file
            cannot express.

        Raises:
            PlanError: The format cannot express the plan, or an argument is wrong.

        >>> import jax, jax.numpy as jnp
        >>> import whalejax as wh
        >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
        >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
        >>> plan = wh.plan(lambda net, x: (x @ net["w"]).mean(), net, x,
        ...                cluster="h100:8", mesh={"data": 8})
        >>> print(plan.export("skypilot").split("run:")[0])  # doctest: +ELLIPSIS
        # WhaleJAX: data 8..., on 8×H100 (1 node of 8, nvlink).
        # One process runs.
        # Add setup: with what installs your script's packages.
        # The folder holds the script and plan.json.
        name: "train"
        num_nodes: 1
        resources:
          accelerators: "H100:8"
        workdir: "."
        <BLANKLINE>
        """
        return export.export([self], form, name=name, image=image, command=command)

    def table(self, *, all_rows: bool = False) -> str:
        """Returns the text of ``print(plan)``, optionally with all rows.

        Args:
            all_rows: Whether to show all parameters, traffic and reasons, not only the
                largest; default: False.

        Returns:
            Lines as wide as the terminal or ``COLUMNS``; without either, long lines.
        """
        return plan_page.page(self, all_rows=all_rows)

    def __str__(self) -> str:
        return self.table()

    def document(self) -> dict[str, Any]:
        """Returns the plan as plain JSON data, with hashes for checking."""
        return plan_file.document_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically.

        Raises:
            PlanError: The file cannot be written.
        """
        _check_path("Plan.save", path)
        plan_file.write(self, path)

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str = "the plan") -> Plan:
        """Returns the plan of a document that ``document`` returned.

        Args:
            document: Document as JSON data; it is not modified.
            name: Name of the document in errors.

        Raises:
            PlanError: The document is no plan, is damaged, was edited or has another
                format.
        """
        problems = Arguments("Plan.from_document", PlanError)
        problems.of("document", document, dict, "what Plan.document gave")
        problems.words("name", name)
        problems.raise_if_any()
        return plan_file.from_document(cls, document, name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan from a file, without running or importing anything that it
        names.

        Raises:
            PlanError: The file is no plan, is damaged, was edited or has another
                format.
        """
        _check_path("Plan.load", path)
        return plan_file.read(cls, path)


def _check_path(title: str, path: object) -> None:
    problems = Arguments(title, PlanError)
    problems.path("path", path, "the path of a plan file")
    problems.raise_if_any()
