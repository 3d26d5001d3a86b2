"""Plans as files of other systems, read as those systems read them.

haliax and Levanter read theirs where they are installed: ``marin-haliax``, of the extra
``foreign``, and ``draccus`` with ``marin-levanter`` (``--no-deps``, since its pins
exclude ours), in an environment of their own. The other formats are held against what
their sources say, read in November 2026.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import types
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from flax.linen.spmd import logical_to_mesh_axes

import whalejax as wh
from tests.whalejax.test_rules import planned
from whalejax import jobs, models
from whalejax.planner.plan.report.axis_mappings import axis_mappings
from whalejax.planner.plan_entries import starred


pytestmark = pytest.mark.relaxed_promotion  # Flax's norms rely on it

SCANNED = {"scan_layers": True, "layers": 4}

MAXTEXT_NAMES = set(
    "activation_batch activation_batch_moe activation_embed_and_logits_batch "
    "activation_embed_and_logits_batch_sequence activation_kv_batch activation_length "
    "activation_norm_length activation_attn_length activation_q_length "
    "activation_embed activation_heads activation_kv_heads activation_kv "
    "activation_kv_head_dim activation_mlp activation_vocab activation_exp "
    "activation_stage vocab embed embed_vocab embed_moe heads q_heads kv_heads kv "
    "kv_head_dim mlp moe_mlp exp layers norm".split()
)
"""Names of rules in MaxText's ``configs/custom_mesh_and_rule/*.yml``."""

TO_MAXTEXT = {"heads_2": "q_heads", "head_dim": "kv", "experts": "exp"}


@cache
def network_plan() -> wh.Plan:
    """Two nodes, micro-batches, remat and bfloat16."""
    job = models.job("gpt-test", annotated=False, **SCANNED)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 128),
        optimizer=job.optimizer,
        cluster="h100:2x8",
        mesh={"data": 4, "fsdp": 4},
        num_micro_batches=2,
        precision="bf16",
        remat="full",
    )


@cache
def rules_plan() -> wh.Plan:
    return planned("llama-test", {"fsdp": 4, "tensor": 2})


@cache
def mixture_plan() -> wh.Plan:
    return planned("moe-test", {"fsdp": 4, "expert": 2})


@pytest.mark.parametrize("plan_of", [rules_plan, mixture_plan, network_plan])
def test_maxtext_lays_weights_out_as_planned(plan_of: Any) -> None:
    plan = plan_of()
    text = plan.export("maxtext")
    document = yaml.safe_load(text)
    assert {*document} - {"context_sharding"} == {
        "mesh_axes",
        "data_sharding",
        "logical_axis_rules",
    }
    assert document["mesh_axes"] == [*plan.axis_sizes]
    rules = [(name, tuple(axes)) for name, axes in document["logical_axis_rules"]]
    assert {name for name, _ in rules} <= MAXTEXT_NAMES
    otherwise = []
    for leaf in plan.leaves:
        names = [
            TO_MAXTEXT.get(name or "", name) for name in plan.logical_axes()[leaf.path]
        ]
        known = [name if name in MAXTEXT_NAMES else None for name in names]
        found = logical_to_mesh_axes(known, rules) or ()
        whole = [*found, *[None] * (len(names) - len(found))]
        axes = tuple(
            () if a is None else (a,) if isinstance(a, str) else tuple(a) for a in whole
        )
        if axes != leaf.param_spec:
            otherwise.append(leaf)
    named = text.partition("The plan stores")[2]
    assert {starred(leaf.path) for leaf in otherwise} == {*_exceptions(plan)}
    assert bool(otherwise) == bool(named)
    assert sum(leaf.nbytes for leaf in otherwise) < 0.01 * sum(
        leaf.nbytes for leaf in plan.leaves
    )


def _exceptions(plan: wh.Plan) -> Any:
    return axis_mappings(plan, "MaxText").exceptions


def test_experts_have_a_batch_of_their_own_in_maxtext() -> None:
    rules = dict(yaml.safe_load(mixture_plan().export("maxtext"))["logical_axis_rules"])
    assert rules["activation_batch"] == ["fsdp", "expert"]
    assert rules["activation_batch_moe"] == ["fsdp"]
    assert rules["activation_exp"] == rules["exp"] == ["expert"]


def test_maxtext_flags_say_what_rules_do_not() -> None:
    text = network_plan().export("maxtext").replace("\n# ", " ")
    for flag in (
        "ici_data_parallelism=2",
        "dcn_data_parallelism=2",
        "ici_fsdp_parallelism=4",
        "gradient_accumulation_steps=2",
        "per_device_batch_size=4",
        "dtype=bfloat16",
        "remat_policy=full",
    ):
        assert f" {flag}" in text


@dataclass(frozen=True)
class HybridMeshShape:
    """As in axlearn/common/utils.py."""

    ici_mesh_shape: Any
    dcn_mesh_shape: Any


class Modifier:
    """A stand-in for a configurable class of AXLearn with the fields it has."""

    fields: tuple[str, ...] = ()

    @classmethod
    def default_config(cls) -> Modifier:
        return cls()

    def set(self, **values: Any) -> Modifier:
        assert {*values} <= {*self.fields}
        self.values = values
        return self


def modifier(name: str, *fields: str) -> type[Modifier]:
    return type(name, (Modifier,), {"fields": fields})


def mesh_shape_from_axes(
    *,
    pipeline: int = 1,
    data: int = 1,
    expert: int = 1,
    fsdp: int = 1,
    seq: int = 1,
    model: int = 1,
) -> tuple[int, ...]:
    """As in axlearn/experiments/text/gpt/common.py."""
    return pipeline, data, expert, fsdp, seq, model


def mesh_rules(text: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the exported source makes of AXLearn's functions."""
    contents: dict[str, dict[str, Any]] = {
        "axlearn.experiments.text.gpt.common": {
            "mesh_shape_from_axes": mesh_shape_from_axes
        },
        "axlearn.common.utils": {"HybridMeshShape": HybridMeshShape},
        "axlearn.common.trainer_config_modifier": {
            "ChainConfigModifier": modifier("Chain", "config_modifiers"),
            "GradientAccumulationModifier": modifier("Gradient", "grad_acc_steps"),
            "MeshShapeModifier": modifier("Mesh", "mesh_shape"),
        },
    }
    for name, found in contents.items():
        module = types.ModuleType(name)
        vars(module).update(found)
        for parent in [name.rsplit(".", n)[0] for n in range(name.count(".") + 1)]:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, name, module)
    space: dict[str, Any] = {}
    exec(text, space)
    return space["mesh_rules"]


def test_axlearn_takes_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    ((selector, shape),) = mesh_rules(rules_plan().export("axlearn"), monkeypatch)
    assert "p5.48xlarge" in selector
    assert selector.endswith("-8")
    assert shape == mesh_shape_from_axes(fsdp=4, model=2)


def test_axlearn_takes_the_network_and_accumulation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = network_plan().export("axlearn")
    assert "precision bf16; remat" in text
    ((_, rule),) = mesh_rules(text, monkeypatch)
    mesh, accumulation = rule.values["config_modifiers"]
    assert mesh.values["mesh_shape"] == HybridMeshShape(
        ici_mesh_shape=mesh_shape_from_axes(data=2, fsdp=4),
        dcn_mesh_shape=mesh_shape_from_axes(data=2),
    )
    assert accumulation.values == {"grad_acc_steps": 2}


def test_haliax_lays_parameters_out_as_planned() -> None:
    hax = pytest.importorskip("haliax")
    from haliax.partitioning import pspec_for_axis

    for plan in (rules_plan(), network_plan()):
        space: dict[str, Any] = {}
        text = plan.export("haliax")
        exec(text, space)
        compute, parameters = plan.axis_mappings()
        assert {n: _tuple(a) for n, a in space["compute_mapping"].items()} == compute
        assert {n: _tuple(a) for n, a in space["param_mapping"].items()} == parameters
        assert compute["batch"]
        apart = 0
        for leaf in plan.leaves:
            names = plan.logical_axes()[leaf.path]
            axes = tuple(
                hax.Axis(name or f"unnamed_{n}", size)
                for n, (name, size) in enumerate(zip(names, leaf.shape, strict=True))
            )
            found = pspec_for_axis(axes, space["param_mapping"])
            if tuple(map(_tuple, found)) != leaf.param_spec:
                assert starred(leaf.path) in _exceptions(plan)
                apart += 1
        assert bool(apart) == ("otherwise than this mapping" in text.replace("\n#", ""))


def _tuple(axes: Any) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def levanter_mesh() -> Any:
    """``levanter/utils/mesh.py`` by itself: its package imports what is not there."""
    found = importlib.util.find_spec("levanter")
    if found is None or not found.submodule_search_locations:
        pytest.skip("levanter is not installed")
    path = Path(found.submodule_search_locations[0]) / "utils" / "mesh.py"
    spec = importlib.util.spec_from_file_location("levanter_mesh", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def test_levanter_reads_its_mesh() -> None:
    draccus = pytest.importorskip("draccus")
    mesh_module = levanter_mesh()
    for plan, slices in ((rules_plan(), 1), (network_plan(), 2)):
        trainer = yaml.safe_load(plan.export("levanter"))["trainer"]
        mesh = draccus.decode(mesh_module.MeshConfig, trainer["mesh"])
        inside, between = mesh.axis_shapes(plan.cluster.num_devices, slices)
        sizes = {a: n for a, n in (inside | between).items() if n > 1}
        for axis, size in plan.axis_sizes.items():
            assert sizes.get(axis, 1) * sizes.get(f"{axis}_dcn", 1) == size
        batch = _tuple(mesh.resolved_compute_mapping["batch"])
        merged = tuple(dict.fromkeys(a.removesuffix("_dcn") for a in batch))
        assert merged == plan.batch[0].spec[0]
        assert _tuple(mesh.resolved_param_mapping["embed"]) == ("fsdp",)
        ranks = 1
        for axis in batch:
            ranks *= sizes[axis]
        rows = trainer["per_device_parallelism"] * ranks
        assert rows * plan.num_micro_batches == trainer["train_batch_size"] == 128


def test_levanter_reads_the_precision() -> None:
    jmp = pytest.importorskip("jmp")
    trainer = yaml.safe_load(network_plan().export("levanter"))["trainer"]
    policy = jmp.get_policy(trainer["mp"])
    assert str(policy.compute_dtype.__name__) == "bfloat16"
    assert str(policy.param_dtype.__name__) == "float32"


JOBSET = {
    "": ("apiVersion", "kind", "metadata", "spec"),
    "spec": ("replicatedJobs",),
    "spec.replicatedJobs.0": ("name", "template"),
    "spec.replicatedJobs.0.template.spec.template.spec": ("containers",),
    "spec.replicatedJobs.0.template.spec.template.spec.containers.0": ("name", "image"),
}
"""Required fields: kubernetes-sigs/jobset api/jobset/v1alpha2, batch/v1, core/v1."""


def at(document: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        document = document[int(part) if part.isdigit() else part]
    return document


def jobset(plan: wh.Plan) -> Any:
    document = yaml.safe_load(plan.export("jobset", image="registry/of/mine:1"))
    for path, fields in JOBSET.items():
        assert {*fields} <= {*at(document, path)}, path
    assert document["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    return document["spec"]["replicatedJobs"][0]


def test_a_jobset_has_a_pod_for_each_node() -> None:
    workers = jobset(network_plan())
    job = workers["template"]["spec"]
    assert workers["replicas"] == 1
    assert job["parallelism"] == job["completions"] == 2
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables == {
        "WHALEJAX_COORDINATOR": "train-workers-0-0.train:8476",
        "WHALEJAX_NUM_PROCESSES": "2",
        "WHALEJAX_PROCESS_ID": None,
    }
    assert "env" not in jobset(rules_plan())["template"]["spec"]["template"]["spec"]


def test_a_jobset_has_a_job_for_each_slice() -> None:
    workers = jobset(tpu_plan())
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    assert (workers["replicas"], job["parallelism"]) == (2, 4)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "2x2x4",
    }
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}


def tpu_plan(cluster: str = "v5p:2x2x2x4") -> wh.Plan:
    return network_plan().what_if(cluster=cluster, mesh={})


SKYPILOT = {"name", "num_nodes", "resources", "workdir", "setup", "envs", "run"}
SKYPILOT_RESOURCES = {"accelerators", "image_id", "ordered", "any_of"}
"""Properties in skypilot-org/skypilot sky/utils/schemas.py; none is required there."""


def test_skypilot_starts_every_process() -> None:
    document = yaml.safe_load(network_plan().export("skypilot", command="env"))
    assert {*document} <= SKYPILOT
    assert {*document["resources"]} <= SKYPILOT_RESOURCES
    assert document["num_nodes"] == 2
    assert document["resources"]["accelerators"] == "H100:8"
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(
        ["bash", "-c", document["run"]], env=given, capture_output=True, text=True
    )
    for line in (
        "WHALEJAX_COORDINATOR=10.0.0.1:8476",
        "WHALEJAX_NUM_PROCESSES=2",
        "WHALEJAX_PROCESS_ID=1",
    ):
        assert line in done.stdout.splitlines()


def test_skypilot_names_slices() -> None:
    plan = tpu_plan("v5p:2x2x4")
    document = yaml.safe_load(plan.export("skypilot"))
    assert document["resources"]["accelerators"] == "tpu-v5p-32:1"
    with pytest.raises(wh.PlanError, match="has one TPU slice, but this plan has 2"):
        tpu_plan().export("skypilot")


def test_a_search_exports_every_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    job = models.job("gpt-test", annotated=False)
    found = wh.search(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, 64),
        optimizer=job.optimizer,
        clusters=["h100:8", "a100-80:8", "h100:2x8"],
    )
    rules = mesh_rules(found.export("axlearn"), monkeypatch)
    assert len(rules) == len(found) == 3
    text = found.export("skypilot")
    document = yaml.safe_load(text)
    nodes = document["num_nodes"]
    same = [p for p in found if len(p.cluster.nodes) == nodes]
    if len(same) > 1:
        listed = document["resources"]["ordered"]
        assert [one["accelerators"] for one in listed] == [
            {"h100": "H100:8", "a100-80": "A100-80GB:8"}[p.cluster.kinds[0].name]
            for p in same
        ]
    assert ("Left out" in text) == (len(same) < 3)
    assert f"--on {nodes}" not in text


@pytest.mark.parametrize(
    ("plan_of", "form", "options", "message"),
    [
        (rules_plan, "maxtxt", {}, "form"),
        (rules_plan, "jobset", {}, "image is missing"),
        (rules_plan, "maxtext", {"image": "x"}, "maxtext has none"),
        (rules_plan, "jobset", {"image": "x", "name": "My_Job"}, "name is 'My_Job'"),
        (mixture_plan, "haliax", {}, "experts of this plan are sharded differently"),
        (mixture_plan, "levanter", {}, "Levanter has one mapping for both"),
    ],
)
def test_what_cannot_be_said_is_refused(
    plan_of: Any, form: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(wh.PlanError, match=message):
        plan_of().export(form, **options)


def test_stages_are_refused_where_there_are_none() -> None:
    plan = planned("gpt-test", {"stage": 4, "data": 2}, **SCANNED)
    with pytest.raises(wh.PlanError, match="haliax has no pipelines"):
        plan.export("haliax")
    with pytest.raises(wh.PlanError, match="stage"):
        plan.export("maxtext")


def test_the_command_line_exports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from whalejax.cli.main import main

    path = tmp_path / "plan.json"
    rules_plan().save(path)
    assert main(["export", str(path), "--to", "levanter"]) == 0
    assert capsys.readouterr().out == rules_plan().export("levanter")
    out = tmp_path / "job.yaml"
    words = ["export", str(path), "--to", "jobset", "--image", "x", "-o", str(out)]
    assert main([*words, "--command", "python -u mine.py"]) == 0
    assert json.dumps("python -u mine.py") in out.read_text()
    assert main(["export", str(path), "--to", "yaml"]) == 2
    assert "--to is 'yaml'" in capsys.readouterr().err
    words = [
        "search",
        "llama-test",
        "--on",
        "h100:4",
        "--on",
        "h100:8",
        "--batch",
        "64",
    ]
    assert main([*words, "--export", "skypilot"]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert document["run"].strip() == "whalejax train llama-test --batch 64"
    assert {"ordered"} == {*document["resources"]}
    assert main([*words, "--export", "skypilot", "--json"]) == 2
    assert "two ways to print" in capsys.readouterr().err


def test_formats_are_named_once() -> None:
    from whalejax.planner.plan.report.export import FORMS

    assert all(f'"{form}"' in str(inspect.getdoc(wh.Plan.export)) for form in FORMS)
