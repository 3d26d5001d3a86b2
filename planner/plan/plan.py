"""The Plan that users hold: its data, and every function on it as a method.

A plan names mesh axes, the tables that say which logical dimension each axis shards
in each TaskGraph, the layout of every leaf, and what all of it is predicted to cost.
Nothing in it refers to JAX, so a plan made on a laptop can be read, compared and
checked anywhere; ``whalejax.compile`` turns it into a program.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

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
from whalejax.planner.search.micro_batches import with_samples_note
from whalejax.planner.search.zero1_slices import slices_of


_INTERNAL_NAMES = frozenset(
    "apart asked_precision batch_tree beyond compute device_order group_size home "
    "model_hash optimizer_bytes per_micro_batch precisions product_flops question "
    "replica roles room_bytes scales_loss source storage times trained version".split()
)
"""Attributes of a plan that completion does not offer: other modules read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages(StagesData):
    """A pipeline; see ``StagesData`` for its fields."""

    plans: tuple[Plan, ...] = ()


@names_arguments(
    "wh.Plan",
    instance="plan",
    instead="wh.plan(loss_fn, model, batch, …) and wh.Plan.load(path) make plans.",
)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(PlanDisplay):
    """Plan of one model on one cluster.

    How a step is computed, such as what is computed again and what is in host memory,
    are the fields of ``planner.step_options.StepOptions``, which a plan has beside its
    own.

    Attributes:
        version: Version of the file format.
        model_hash: Hash of the model, the batch and the marks that it was made for.
        cluster: The machine it was made for.
        axes: Mesh axes and sizes, outermost first; sizes of 1 are left out.
        device_order: For each place of the mesh, the number of its device in the
            cluster; empty for the cluster's own order.
        num_micro_batches: Parts of the global batch, one after the other.
        zero: Stage of ZeRO over ``data``: 1 shards optimizer state, 2 gradients too.
            Over ``fsdp`` parameters are always sharded (ZeRO-3).
        precision: ``"f32"`` (as the model says), ``"bf16"`` or ``"f16"``.
        precisions: (TaskGraph, precision) where only some compute in 16 bits; ``"*"``
            stands for the others.
        default: The strategy of what no mark covers, as text, or empty.
        roles: The logical dimensions.
        compute: One table for each TaskGraph.
        storage: For the axes that shard storage only, roles in order of preference.
        leaves: Every parameter; those that are trained first, in their tree's order.
        batch: Every leaf of the batch.
        batch_tree: The containers around them, as text.
        collectives: Collectives of one step, folded.
        time, memory: Predictions by term.
        candidates: Other evaluated plans, best first.
        notes: Notes for the user.
        product_flops: FLOPs of matrix products on one device in one step; 0 in
            estimates.
        optimizer_bytes: State that the planned optimizer keeps of all parameters,
            whole; None where that is not known.
        work: Size of the model and FLOPs of a step, before anything is sharded; None in
            files of older versions.
        stages: The pipeline, if there is one.
        shares: Micro-batches of each rank of ``data``, where ranks are unlike and each
            takes whole micro-batches; empty where every rank has a part of each.
        pipelines: Plan of each pipeline with all its micro-batches, where pipelines run
            in parallel; ``stages`` are then those of the first.
        group_size: Number of neighbouring samples that micro-batches keep together.
        per_micro_batch: The user means each micro-batch's own loss, where the samples
            of a batch are not independent.
        gap: Part of the step's time by which another plan of one program can at most be
            faster, as predicted; None where that is not known.
        runnable: ``whalejax.compile`` can run it.
        beyond: Features that no executor supports, or None.
        compiler_options: (name, value) pairs that the step is compiled with.
        swarm: Requirements on a swarm's peers, where the plan is for one; ``stages``
            are then those of one peer each.
        tables: Placement of embedding tables, where the model has some; all other
            fields then describe the rest of the loss, whose batch has the looked-up
            vectors.
        source: Name of the model on the command line, then its options, or empty.
        question: Question that the plan answers, to be asked again. Not in files.
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
        return self  # nothing of it changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A plan is pickled as its file: without the model that it was asked for."""
        return Plan.from_document, (self.document(),)

    def batch_slices(self, node: int) -> tuple[slice, ...]:
        """The samples that a node takes of every global batch, with shares as planned.

        Args:
            node: Its number; a process runs one node.

        Returns:
            A slice for each of its micro-batches, to be taken one behind the other.

        Raises:
            PlanError: There is no such node, or every device takes a part of each
                micro-batch.
        """
        return slices_of(self, node)

    def why(self, path: str) -> str:
        """Explains a parameter's layout, with the alternatives and their costs.

        Args:
            path: Dotted path of a parameter; of a swarm also ``"wire"``, ``"stages"``,
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
        """The plan for the same model under other circumstances.

        Args:
            changes: ``batch`` (samples of the global batch), ``sequence`` (tokens of
                a sample), and settings of ``wh.plan``: ``cluster``, ``mesh``, ``zero``,
                ``num_micro_batches``, ``precision``, ``shares``, ``compiler_options``,
                ``allow_idle``, ``runnable`` and how a step is computed
                (``UserOptions``); what is not given stays as it was asked for. A number
                of micro-batches that was fixed may mean other sizes on another
                ``cluster``; a note says so.

        Raises:
            PlanError: The plan was read from a file, which holds no model; or there is
                no such plan.
        """
        what_if: Plan = self._require_question("what_if").replan(**changes)
        return with_samples_note(self, what_if, changes)

    def verify(
        self, topology: str | None = None, *, timeout_seconds: float = 1800.0
    ) -> Any:
        """Compiles the plan's training step with the real compiler; nothing is run.

        A process of its own compiles, for hardware that need not be here: TPUs need
        the extra ``whalejax[tpu-compile]``, GPUs ``whalejax verify --setup-gpu``.

        Args:
            topology: Topology such as ``"v5p:4x4x4"``, ``"h100:2x8"`` or ``"local"``;
                default: the plan's own cluster.
            timeout_seconds: The compiler is stopped after so long.

        Returns:
            A ``whalejax.verification.comparison.Verification``: ``print`` shows memory,
            traffic and products, predicted and compiled.

        Raises:
            PlanError: The plan was read from a file, which holds no model, cannot run,
                or is for another number of devices.
            WhaleError: The topology or its compiler is not to be had, or the compiler
                died or took too long.
        """
        question = self._require_question("verify")
        return question.verify(self, topology, timeout_seconds=timeout_seconds)

    def _require_question(self, what: str) -> PlannedQuestion:
        if self.question is None:
            raise PlanError(
                f"this plan was read from a file, without its model: {what} has "
                "nothing to work on. Make it with wh.plan(...)"
            )
        return self.question

    def throughput(self, step_seconds: float | None = None) -> Throughput:
        """Speed and price of a step: tokens a second, FLOP/s, MFU, price of a run.

        Args:
            step_seconds: Measured seconds of a step; None takes the predicted ones.

        Raises:
            PlanError: The plan is from a file that does not say its model's work, or
                the seconds are not above 0.

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
        """Explains the plan: the deciding terms, possible changes, and whole
        dimensions.

        Returns:
            Lines of text, with numbers.
        """
        return why.explain(self)

    def describe(self) -> str:
        """Describes where the plan stands on the taxonomy of distributed training.

        Returns:
            Lines of text: what is parallel, who is synchronous, what is exchanged over
            which topology, what is replicated.
        """
        return describe.describe(self)

    def diff(self, other: Plan) -> PlanDiff:
        """Returns the changes from this plan to another, with their costs.

        Args:
            other: A plan of the same model or of another one, on any cluster.

        Returns:
            Settings, parameters, traffic and terms that differ; ``print`` shows them.
        """
        return diff(self, other)

    def flax_rules(self) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
        """The plan as Flax's table from logical dimensions to mesh axes.

        Returns:
            (dimension, axes) pairs; None for one that stays whole.

        Raises:
            PlanError: One table cannot say what the plan does; every dimension with
                two meanings is listed.
        """
        return export.flax_rules(self)

    def logical_axes(self) -> dict[str, tuple[str | None, ...]]:
        """Names of the dimensions of every parameter, by its path.

        They are the names of ``flax_rules``: those of the model's metadata, or words
        such as ``"vocab"``, ``"embed"``, ``"heads"`` and ``"mlp"`` where it has none.
        """
        return export.logical_axes(self)

    def maxtext_flags(self) -> dict[str, int]:
        """The mesh as MaxText's flags, such as ``{"ici_tensor_parallelism": 4}``."""
        return export.maxtext_flags(self)

    def axis_mappings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The plan as haliax's mappings from named axes to mesh axes.

        Returns:
            The mapping of computation and that of parameters; a dimension that is not
            sharded is in neither. Names are those of ``logical_axes``.

        Raises:
            PlanError: One mapping cannot say what the plan does.
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
        """The plan as a file of another system.

        Args:
            form: ``"maxtext"`` (rules, for ``custom_mesh_and_rule``), ``"axlearn"``
                (``mesh_rules``), ``"haliax"`` (axis mappings), ``"levanter"`` (the
                section ``trainer``), ``"jobset"`` or ``"skypilot"``.
            name: Name of the job, for a JobSet or SkyPilot.
            image: Container image, which a JobSet needs.
            command: Words for the shell that start the run; None takes ``whalejax
                train`` on one host, and ``python train.py`` on several.

        Returns:
            The text; a comment on top names what the plan decides and the file does
            not say.

        Raises:
            PlanError: The format cannot say the plan.

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
        """Returns the page of ``print(plan)``, on demand with all rows.

        Args:
            all_rows: Every kind of parameter, not only those that hold most.

        Returns:
            Lines as wide as the terminal or ``COLUMNS``; whole ones without either.
        """
        return plan_page.page(self, all_rows=all_rows)

    def __str__(self) -> str:
        return self.table()

    def document(self) -> dict[str, Any]:
        """The plan as plain JSON data, with hashes for checking."""
        return plan_file.document_of(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file appears whole or not at all.

        Raises:
            PlanError: The file cannot be written there.
        """
        _check_path("Plan.save", path)
        plan_file.write(self, path)

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str = "the plan") -> Plan:
        """The plan that ``document`` wrote.

        Args:
            document: Document, which is not changed.
            name: Name of the document in errors.

        Raises:
            PlanError: It is no plan, is damaged, was edited, or has another format.
        """
        problems = Arguments("Plan.from_document", PlanError)
        problems.of("document", document, dict, "what Plan.document gave")
        problems.words("name", name)
        problems.raise_if_any()
        return plan_file.from_document(cls, document, name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a plan. Nothing that the file names is run or imported.

        Raises:
            PlanError: The file is no plan, is damaged, was edited, or has another
                format.
        """
        _check_path("Plan.load", path)
        return plan_file.read(cls, path)


def _check_path(title: str, path: object) -> None:
    problems = Arguments(title, PlanError)
    problems.path("path", path, "the path of a plan file")
    problems.raise_if_any()
