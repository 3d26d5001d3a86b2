"""Writes a plan as a configuration file: MaxText, AXLearn, haliax or Levanter.

The comment at the top of each file lists decisions that the file cannot express.
The formats follow AI-Hypercomputer/maxtext (``configs/custom_mesh_and_rule``),
apple/axlearn (``experiments/text/gpt/common.py``,
``common/trainer_config_modifier.py``) and marin-community/marin
(``levanter/utils/mesh.py``, ``levanter/trainer.py``), 2026-11.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan.report.axis_mappings import (
    Axes,
    AxisMappings,
    axis_mappings,
    check_one_program,
    degrees,
    remedy,
)
from whalejax.planner.plan.report.why import layout_text
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES, STAGE
from whalejax.planner.step_options import option_words


def header(
    plans: Sequence[PlanData], unsaid: Iterable[str], said: Iterable[str]
) -> str:
    """Returns the comment at the top of an exported file.

    Args:
        plans: Exported plans.
        unsaid: Decisions that the file cannot express, as text.
        said: Additional sentences.
    """
    lines = []
    for plan in plans:
        lines.append(f"WhaleJAX: {layout_text(plan)}, on {plan.cluster.describe()}.")
    if listed := [*dict.fromkeys(unsaid)]:
        lines.append(f"Parts of the plan that this file lacks: {'; '.join(listed)}.")
    lines += said
    wrapped = [part for line in lines for part in textwrap.wrap(line, 86)]
    return "".join(f"# {line}\n" for line in wrapped)


def unsaid_options(plan: PlanData, *said: str) -> list[str]:
    """Describes the decisions of a plan other than its layout.

    Args:
        plan: The plan.
        said: Decisions to leave out: ``"precision"``, ``"micro-batches"``,
            ``"options"``.
    """
    found = []
    if plan.precision != "f32" and "precision" not in said:
        found.append(f"precision {plan.precision}")
    if plan.precisions:
        found.append("precision by region")
    if plan.num_micro_batches > 1 and "micro-batches" not in said:
        found.append(f"{count_text(plan.num_micro_batches, 'micro-batch')} a step")
    if plan.zero:
        found.append(f"ZeRO-{plan.zero} over data")
    if "options" not in said:
        found += option_words(plan, plan.axis_sizes)
    if plan.compiler_options:
        found.append("compiler options")
    if plan.device_order:
        found.append("an order of devices")
    return found


# ---------------------------------------------------------------- haliax and Levanter


def named_mappings(plan: PlanData, form: str) -> AxisMappings:
    """Returns the axis mappings of a plan of one program.

    Raises:
        PlanError: The plan has stages, or its experts shard the batch differently.
    """
    if STAGE in dict(plan.axes):
        raise PlanError(
            f"{form} has no pipelines, but this plan has {dict(plan.axes)[STAGE]} "
            f"stages. Plan with mesh={{'stage': 1}}"
        )
    found = axis_mappings(plan, form)
    if found.experts:
        listed = ", ".join(f"{n} over {'+'.join(a)}" for n, a in found.experts.items())
        raise PlanError(
            f"the experts of this plan are sharded differently ({listed}) from the "
            f"rest of the model, but {form} has one mapping for both. Plan with "
            f"mesh={{'expert': 1}}"
        )
    return found


def haliax_text(plan: PlanData) -> str:
    """Returns Python source with haliax's two axis mappings."""
    found = named_mappings(plan, "haliax")
    said = [
        "Names of axes are those of plan.logical_axes(): give your Axis objects these "
        "names, or rename the keys. Mesh: " + _mesh_text(plan) + ".",
        *_capital(found.exception_text()),
    ]
    compute = _python_dict("compute_mapping", found.compute)
    parameters = _python_dict("param_mapping", found.parameters)
    return f"{header([plan], unsaid_options(plan), said)}{compute}{parameters}"


def levanter_text(plan: PlanData) -> str:
    """Returns YAML of Levanter's ``trainer``: mesh, mappings, batch, precision."""
    found = named_mappings(plan, "Levanter")
    sizes = degrees(plan)
    inside = {axis: size for axis, (size, _) in sizes.items() if size > 1}
    between = {f"{axis}_dcn": size for axis, (_, size) in sizes.items() if size > 1}
    for name in ("data", "replica", "model"):  # Levanter adds these axes itself.
        inside.setdefault(name, 1)

    def split(mapping: Mapping[str, Axes]) -> dict[str, list[str]]:
        return {
            _LEVANTER_NAMES.get(name, name): [
                part
                for axis in axes
                for part in (f"{axis}_dcn", axis)
                if inside.get(part, between.get(part, 1)) > 1
            ]
            for name, axes in mapping.items()
        }

    own = {"mlp": ["model"], "heads": ["model"]}  # Replaces defaults of Levanter.
    batch = _batch_size(plan)
    rows = batch // plan.num_micro_batches
    ranks = math.prod(
        dict(plan.axes).get(axis, 1) for axis in found.compute.get("batch", ())
    )
    document = {
        "trainer": {
            "train_batch_size": batch,
            "per_device_parallelism": rows // ranks,
            "mp": _PRECISIONS[plan.precision],
            "mesh": {
                "axes": inside,
                "dcn_axes": {"replica_dcn": 1} | between,
                "shared_mapping": {},
                "compute_mapping": own | {"batch": ["model"]} | split(found.compute),
                "param_mapping": own | split(found.parameters),
            },
        }
    }
    said = [
        "Names of dimensions are those of plan.logical_axes(), with Levanter's for "
        "heads and sequence.",
        *_capital(found.exception_text()),
    ]
    unsaid = unsaid_options(plan, "precision", "micro-batches")
    return header([plan], unsaid, said) + yaml_text(document)


_LEVANTER_NAMES: Final = {"head_dim": "head_size", "sequence": "position"}
_PRECISIONS: Final = {
    "f32": "f32",
    "bf16": "p=f32,c=bfloat16",
    "f16": "p=f32,c=float16",
}
"""jmp policies that Levanter reads, by the plan's compute precision."""


# ---------------------------------------------------------------- MaxText

_ACTIVATIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "batch": (
        "activation_batch",
        "activation_embed_and_logits_batch",
        "activation_embed_and_logits_batch_sequence",
        "activation_kv_batch",
    ),
    "sequence": (
        "activation_length",
        "activation_norm_length",
        "activation_attn_length",
        "activation_q_length",
    ),
    "embed": ("activation_embed",),
    "heads": ("activation_heads", "activation_kv_heads"),
    "head_dim": ("activation_kv", "activation_kv_head_dim"),
    "mlp": ("activation_mlp",),
    "vocab": ("activation_vocab",),
}
_WEIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    "vocab": ("vocab",),
    "embed": ("embed", "embed_vocab", "embed_moe"),
    "heads": ("heads", "q_heads", "kv_heads"),
    "head_dim": ("kv", "kv_head_dim"),
    "mlp": ("mlp", "moe_mlp"),
    "experts": ("exp",),
    "layers": ("layers",),
    "norm": ("norm",),
}
_MAXTEXT_REMAT: Final = {"full": "full", "dots": "minimal", "none": "none"}


def maxtext_text(plan: PlanData) -> str:
    """Returns YAML for MaxText's ``configs/custom_mesh_and_rule``.

    Its rules name weights and activations separately. Mesh sizes and options of the
    step are flags of MaxText's command; the comment at the top of the file lists them.
    """
    found = axis_mappings(plan, "MaxText's rules")
    axes = [axis for axis in MESH_AXES if dict(plan.axes).get(axis, 1) > 1]
    activations = _maxtext_axes(found.compute, "activations")
    weights = _maxtext_axes(found.parameters, "weights")
    inside = _maxtext_axes(found.experts, "activations of experts")
    moe = inside.get("batch", activations.get("batch", ()))
    rules: list[tuple[str, Axes]] = []
    for meaning, names in _ACTIVATIONS.items():
        rules += [(name, activations.get(meaning, ())) for name in names]
    rules += [("activation_batch_moe", moe)]
    rules += [("activation_exp", inside.get("experts", activations.get("experts", ())))]
    if STAGE in axes:
        rules.append(("activation_stage", (STAGE,)))
    for meaning, names in _WEIGHTS.items():
        rules += [(name, weights.get(meaning, ())) for name in names]
    rules += [(n, a) for n, a in weights.items() if n not in _WEIGHTS]
    width = max(len(name) for name, _ in rules) + 3
    lines = [
        f"  [{_quoted(name) + ',':<{width}} [{', '.join(map(_quoted, axes_))}]],"
        for name, axes_ in rules
    ]
    mesh = ", ".join(map(_quoted, axes))
    text = f"mesh_axes: [{mesh}]\ndata_sharding: [[{mesh}]]\n"
    sequence = activations.get("sequence", ())
    if len(sequence) == 1:
        text += f"context_sharding: {_quoted(sequence[0])}\n"
    text += "logical_axis_rules: [\n" + "\n".join(lines) + "\n]\n"
    flags, unsaid = _maxtext_command(plan)
    said = [f"Run with {' '.join(flags)}.", *_capital(found.exception_text())]
    return header([plan], unsaid, said) + text


def _maxtext_axes(found: Mapping[str, Axes], what: str) -> dict[str, Axes]:
    """Returns the axes by a dimension's meaning; ``heads_2`` counts as ``heads``."""
    merged: dict[str, Axes] = {}
    problems = Problems("MaxText's rules cannot say this plan", PlanError)
    for name, axes in found.items():
        meaning = re.sub(r"_\d+$", "", name)
        meaning = meaning if meaning in {*_ACTIVATIONS, *_WEIGHTS} else name
        if merged.setdefault(meaning, axes) != axes:
            problems.add(
                f"{meaning} of {what} is sharded over {'+'.join(merged[meaning])} and, "
                f"as {name}, over {'+'.join(axes)}. {remedy([merged[meaning], axes])}"
            )
    problems.raise_if_any()
    return merged


def _maxtext_command(plan: PlanData) -> tuple[list[str], list[str]]:
    """Returns flags for other decisions, and the decisions without a flag."""
    flags = ["custom_mesh_and_rule=NAME_OF_THIS_FILE"]
    for axis, (inside, between) in degrees(plan).items():
        word = "pipeline" if axis == STAGE else axis
        for prefix, degree in (("ici", inside), ("dcn", between)):
            if degree > 1:
                flags.append(f"{prefix}_{word}_parallelism={degree}")
    batch, count = _batch_size(plan), plan.num_micro_batches
    per_device = batch / plan.cluster.num_devices
    if STAGE not in dict(plan.axes):
        per_device /= count
        flags += [f"gradient_accumulation_steps={count}"] * (count > 1)
    else:
        flags.append(f"num_pipeline_microbatches={count}")
    flags.append(f"per_device_batch_size={per_device:g}")
    unsaid = unsaid_options(plan, "precision", "micro-batches", "options")
    if plan.precision == "bf16":
        flags += ["dtype=bfloat16", "weight_dtype=float32"]
    elif plan.precision == "f16":
        unsaid.append("precision f16")
    policies = {policy for _, policy in plan.remat}
    (policy,) = policies if len(policies) == 1 else ("",)
    if policy in _MAXTEXT_REMAT:
        flags.append(f"remat_policy={_MAXTEXT_REMAT[policy]}")
    elif policies:
        unsaid.append("remat by region or name")
    for what, flag in (("optimizer", "optimizer"), ("params", "parameter")):
        if what in plan.offload:
            flags.append(f"{flag}_memory_host_offload=true")
    if "activations" in plan.offload:
        unsaid.append("offload of activations")
    said = ("remat", "offload")
    unsaid += [
        text
        for text in option_words(plan, plan.axis_sizes)
        if not text.startswith(said)
    ]
    return flags, unsaid


# ---------------------------------------------------------------- AXLearn

_AXLEARN_AXES: Final = {
    "stage": "pipeline",
    "data": "data",
    "expert": "expert",
    "fsdp": "fsdp",
    "context": "seq",
    "tensor": "model",
}
_INSTANCES: Final = {
    ("h100", 8): "gpu-(p5.48xlarge|a3-highgpu-8g|a3-megagpu-8g)-{count}",
    ("h200", 8): "gpu-(p5e.48xlarge|p5en.48xlarge|a3-ultragpu-8g)-{count}",
    ("a100-80", 8): "gpu-(p4de.24xlarge|a2-ultragpu-8g)-{count}",
    ("a100-40", 8): "gpu-(p4d.24xlarge|a2-highgpu-8g)-{count}",
}
"""Instance types by kind of device and devices per node."""
_TPU_TYPES: Final = {
    "v4": ("tpu-v4-{size}", 2),
    "v5e": ("tpu-v5litepod-{size}", 1),
    "v5p": ("tpu-v5p-{size}", 2),
    "v6e": ("tpu-v6e-{size}", 1),
}
"""(Accelerator type, number that its name counts per chip) by kind of TPU."""


def axlearn_text(plans: Sequence[PlanData]) -> str:
    """Returns Python source of ``mesh_rules`` with one rule for each plan.

    Raises:
        PlanError: No mesh expresses a plan, or its ``tensor`` axis shards the batch.
            AXLearn's ``model`` axis cannot do that.
    """
    rules, unsaid, said = [], list[str](), list[str]()
    for plan in plans:
        check_one_program(plan, "AXLearn's mesh rules")
        if any("tensor" in axes for leaf in plan.batch for axes in leaf.spec[:1]):
            raise PlanError(
                "tensor shards the batch under this plan, which AXLearn's model axis "
                "cannot do. Fix the mesh, as in mesh={'tensor': 1}"
            )
        rules.append(_axlearn_rule(plan))
        unsaid += unsaid_options(plan, "micro-batches")
        if plan.cluster.kinds[0].platform == "gpu" and not _instance(plan.cluster):
            said.append(
                f"Put the name of your instance type in place of "
                f"{plan.cluster.kinds[0].name}."
            )
    said.append(
        "A rule gives the mesh. The model itself decides which axis shards which "
        "parameter (set_double_shard_weights_config)."
    )
    body = "".join(textwrap.indent(rule, "    ") for rule in rules)
    text = f"mesh_rules = (\n{body})\n"
    imports = [
        "from axlearn.experiments.text.gpt.common import mesh_shape_from_axes\n",
        "from axlearn.common.utils import HybridMeshShape\n" * ("Hybrid" in text),
    ]
    if "ChainConfigModifier" in text:
        imports.append(
            "from axlearn.common.trainer_config_modifier import (\n"
            "    ChainConfigModifier,\n    GradientAccumulationModifier,\n"
            "    MeshShapeModifier,\n)\n"
        )
    return header(plans, unsaid, dict.fromkeys(said)) + "".join(imports) + "\n" + text


def _axlearn_rule(plan: PlanData) -> str:
    sizes = degrees(plan)
    inside = _axlearn_mesh({axis: size for axis, (size, _) in sizes.items()})
    between = {axis: size for axis, (_, size) in sizes.items() if size > 1}
    shape = inside
    if between:
        shape = (
            "HybridMeshShape(\n"
            f"    ici_mesh_shape={inside},\n"
            f"    dcn_mesh_shape={_axlearn_mesh(between)},\n)"
        )
    if plan.num_micro_batches > 1:
        shape = (
            "ChainConfigModifier.default_config().set(\n    config_modifiers=[\n"
            "        MeshShapeModifier.default_config().set(\n"
            f"            mesh_shape={textwrap.indent(shape, ' ' * 12).lstrip()},\n"
            "        ),\n"
            "        GradientAccumulationModifier.default_config().set(\n"
            f"            grad_acc_steps={plan.num_micro_batches},\n        ),\n"
            "    ],\n)"
        )
    selector = json.dumps(_selector(plan.cluster))
    return f"(\n    {selector},\n{textwrap.indent(shape, '    ')},\n),\n"


def _axlearn_mesh(sizes: Mapping[str, int]) -> str:
    words = [f"{_AXLEARN_AXES[a]}={n}" for a, n in sizes.items() if n > 1]
    return f"mesh_shape_from_axes({', '.join(words)})"


def _selector(cluster: Cluster) -> str:
    kind, count = cluster.kinds[0], cluster.num_devices
    if kind.platform == "tpu":
        return tpu_type(cluster) + f"-{len(cluster.nodes)}" * (len(cluster.nodes) > 1)
    pattern = _instance(cluster) or f"{kind.platform}-{kind.name}-{{count}}"
    return pattern.format(count=count)


def _instance(cluster: Cluster) -> str:
    return _INSTANCES.get((cluster.kinds[0].name, cluster.nodes[0].count), "")


def tpu_type(cluster: Cluster) -> str:
    """Returns Google's name for one slice of a TPU, such as ``tpu-v5p-128``.

    Args:
        cluster: Cluster whose slices have one kind and size.

    Raises:
        PlanError: The generation has no such name.
    """
    kind = cluster.kinds[0].name
    if kind not in _TPU_TYPES:
        raise PlanError(
            f"no accelerator type is known for {kind}; expected one of "
            f"{', '.join(_TPU_TYPES)}"
        )
    pattern, cores = _TPU_TYPES[kind]
    return pattern.format(size=cluster.nodes[0].count * cores)


# ---------------------------------------------------------------- texts


def yaml_text(value: object, indent: int = 0) -> str:
    """Returns plain data as YAML: mappings as blocks, plain lists in one line.

    Args:
        value: Mapping with text as keys, list, text, number or boolean. A text of
            several lines is written as a block.
        indent: Number of blanks before each line; default: 0.

    >>> print(yaml_text({"a": 1, "b": {"c": ["x", "y"], "d": {}}}), end="")
    a: 1
    b:
      c: ["x", "y"]
      d: {}
    """
    pad = " " * indent
    if isinstance(value, Mapping):
        lines = []
        for key, item in value.items():
            name = key if re.fullmatch(r"[A-Za-z_][\w./-]*", key) else json.dumps(key)
            lines.append(f"{pad}{name}:{_yaml_item(item, indent + 2)}")
        return "".join(lines)
    assert isinstance(value, list)
    lines = []
    for item in value:
        text = yaml_text(item, indent + 2) if isinstance(item, Mapping) else ""
        lines.append(f"{pad}- {text.lstrip() or json.dumps(item) + chr(10)}")
    return "".join(lines)


def _yaml_item(item: object, indent: int) -> str:
    pad = " " * indent
    if isinstance(item, str) and "\n" in item:
        return " |\n" + textwrap.indent(item.rstrip("\n"), pad) + "\n"
    if isinstance(item, list) and any(isinstance(part, Mapping) for part in item):
        return "\n" + yaml_text(item, indent)
    if isinstance(item, Mapping) and item:
        return "\n" + yaml_text(item, indent)
    return f" {json.dumps(item)}\n"


def _python_dict(name: str, found: Mapping[str, Axes]) -> str:
    items = [
        f"    {json.dumps(n)}: {json.dumps(a[0] if len(a) == 1 else [*a])},\n"
        for n, a in found.items()
    ]
    return f"{name} = {{\n{''.join(items)}}}\n" if items else f"{name} = {{}}\n"


def _mesh_text(plan: PlanData) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in plan.axes) or "one device"


def _quoted(text: str) -> str:
    return f"'{text}'"


def _capital(text: str) -> list[str]:
    return [f"{text[0].upper()}{text[1:]}."] if text else []


def _batch_size(plan: PlanData) -> int:
    return plan.work.samples if plan.work else plan.batch[0].shape[0]
