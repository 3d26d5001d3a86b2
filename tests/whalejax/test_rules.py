"""A plan's table of rules, as Flax itself reads it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
from flax.linen.spmd import logical_to_mesh_axes

import whalejax as wh
from whalejax import jobs, models


pytestmark = pytest.mark.relaxed_promotion  # Flax's norms rely on it


def planned(name: str, mesh: dict[str, int], **options: Any) -> wh.Plan:
    if not name.startswith("llama"):  # which has no marks to leave out
        options["annotated"] = False
    job = models.job(name, **options)
    model = jobs.abstract_model(job)
    return wh.plan(
        job.loss_fn,
        model,
        job.batch_at(0, 128),
        optimizer=job.optimizer,
        cluster="h100:8",
        mesh=mesh,
    )


def laid_out(names: tuple[str | None, ...], plan: wh.Plan) -> tuple[Any, ...]:
    """Mesh axes of each dimension, by Flax."""
    found = logical_to_mesh_axes(names, plan.flax_rules())
    assert found is not None
    whole = (*found, *[None] * (len(names) - len(found)))
    return tuple(
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in whole
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("gpt-test", {"fsdp": 8}, {"scan_layers": True, "layers": 4}),
        ("gpt-test", {"fsdp": 2, "tensor": 4}, {"scan_layers": True, "layers": 4}),
        ("moe-test", {"fsdp": 8}, {}),
        ("bert-test", {"data": 2, "tensor": 4}, {}),
    ],
)
def test_flax_lays_parameters_out_as_planned(
    name: str, mesh: dict[str, int], options: dict[str, Any]
) -> None:
    plan = planned(name, mesh, **options)
    for leaf in plan.leaves:
        names = plan.logical_axes()[leaf.path]
        assert laid_out(names, plan) == leaf.param_spec, leaf.path


def test_the_batch_takes_its_axis_before_what_storage_shards() -> None:
    plan = planned("gpt-test", {"fsdp": 8}, scan_layers=True, layers=4)
    names = plan.logical_axes()
    stored = [
        name
        for leaf in plan.leaves
        for name, axes in zip(names[leaf.path], leaf.param_spec, strict=True)
        if axes
    ]
    for dimension in set(stored):
        assert laid_out(("batch", dimension), plan) == (("fsdp",), ())


def test_stacks_whose_dimension_has_no_name_are_refused() -> None:
    plan = planned("gpt-test", {"stage": 4, "data": 2}, scan_layers=True, layers=4)
    with pytest.raises(wh.PlanError, match=r"would be stored as .*stage") as error:
        plan.flax_rules()
    assert "Use plan.partition_specs()" in str(error.value)


def test_dimensions_have_the_words_of_other_libraries() -> None:
    llama = planned("llama-test", {"fsdp": 8})
    axes = llama.logical_axes()
    assert axes["tokens.embedding"] == ("vocab", "embed")
    assert axes["blocks.up.kernel"] == ("layers", "embed", "mlp")
    assert axes["blocks.down.kernel"] == ("layers", "mlp", "embed")
    assert axes["blocks.key.kernel"] == ("layers", "embed", "heads", "head_dim")
    bert = planned("bert-test", {"data": 2, "tensor": 4})
    assert bert.logical_axes()["layer_0.attention.query.kernel"] == (
        "embed",
        "heads",
        "head_dim",
    )
    for plan in (llama, bert):
        names = [name for name, _ in plan.flax_rules()]
        assert len(set(names)) == len(names)
        assert all(name.isidentifier() for name in names), names


def test_names_of_the_models_own_stay() -> None:
    plan = planned("moe-test", {"fsdp": 8}, logical_names=True)
    names = {name for axes in plan.logical_axes().values() for name in axes}
    assert {"experts", "embed", "mlp"} <= names


def test_words_inside_words_name_nothing() -> None:
    """``network`` holds ``wo``, and ``group`` holds ``up``."""
    net = {"network": jnp.zeros((8, 16)), "group": jnp.zeros((16, 24))}
    plan = wh.plan(
        lambda net, x: (x @ net["network"] @ net["group"]).mean(),
        net,
        jnp.zeros((8, 8)),
        cluster="cpu:2",
    )
    names = {name for axes in plan.logical_axes().values() for name in axes}
    assert not any(name and name.startswith("mlp") for name in names)
