"""``wh.PlanRequest``: the settings of ``wh.plan`` as one frozen value."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh
from whalejax.api.tables_request import TablesRequest
from whalejax.planner.step_options import FixedOptions, StepOptions, UserOptions


NET = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
BATCH = jax.ShapeDtypeStruct((16, 64), jnp.float32)


def loss(net: Any, x: Any) -> Any:
    return (x @ net["w"]).mean()


def sums(net: Any, x: Any) -> Any:
    return (x @ net["w"]).sum() + (x @ net["v"]).sum()


def test_its_settings_are_those_of_plan() -> None:
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(wh.plan).parameters.items()
        if name not in ("loss_fn", "model", "batch")
    }
    fields = {f.name: f.default for f in dataclasses.fields(wh.PlanRequest)}
    tables = {f.name: f.default for f in dataclasses.fields(TablesRequest)}
    del tables["dense"]  # The fields of PlanRequest.
    tables = {"tables" if k == "rows" else k: v for k, v in tables.items()}
    assert {**tables, "tables": None, **fields} == known


def test_options_have_a_field_at_each_stage_of_planning() -> None:
    user, fixed, chosen = (
        [f.name for f in dataclasses.fields(kind)]
        for kind in (UserOptions, FixedOptions, StepOptions)
    )
    assert user == fixed == chosen


def test_one_request_plans_several_models() -> None:
    request = wh.PlanRequest(cluster="h100:8", optimizer=optax.sgd(0.1), zero=1)
    first = request.plan(loss, NET, BATCH)
    second = request.plan(sums, {**NET, "v": NET["w"]}, BATCH)
    assert (first.zero, second.zero) == (1, 1)
    known = wh.plan(
        loss, NET, BATCH, cluster="h100:8", optimizer=optax.sgd(0.1), zero=1
    )
    assert first.document() == known.document()


def test_it_is_frozen_and_changed_by_copies() -> None:
    request = wh.PlanRequest(cluster="h100:8")
    with pytest.raises(dataclasses.FrozenInstanceError):
        request.zero = 1  # type: ignore[misc]
    other = dataclasses.replace(request, mesh={"fsdp": np.int64(8)})
    assert other.plan(loss, NET, BATCH).axis_sizes == {"fsdp": 8}
    assert request.mesh is None and isinstance(request.cluster, wh.Cluster)


def test_all_wrong_settings_are_told_when_it_is_made() -> None:
    with pytest.raises(wh.PlanError) as caught:
        wh.PlanRequest(zero=3, loss_chunks=0, precision="f8", offload="disk")
    text = str(caught.value)
    assert text.startswith("wh.plan: 4 problems\n")
    for said in (
        "zero is 3; expected 0, 1 or 2",
        "loss_chunks is 0; expected a whole number, 1 or more",
        "precision is 'f8'; expected one of f32, bf16, f16",
        "offload: 'disk' is none of optimizer, activations, params, gradients",
    ):
        assert said in text


def test_mesh_options_and_cluster_are_told_together() -> None:
    with pytest.raises(wh.PlanError) as caught:
        wh.PlanRequest(
            zero=5, mesh={"foo": 2}, compiler_options={"a": "\n"}, cluster="nope:4"
        )
    for said in ("zero is 5", "no mesh axis 'foo'", "a is '\\n'", "device kind 'nope'"):
        assert said in str(caught.value)


def test_every_option_that_stages_refuse_is_told() -> None:
    with pytest.raises(wh.PlanError) as caught:
        wh.plan(
            sums,
            {**NET, "v": NET["w"]},
            BATCH,
            cluster="h100:8",
            optimizer=optax.sgd(0.1, momentum=0.9),
            mesh={"stage": 2},
            offload="optimizer",
            remat="none",
        )
    assert "offload is optimizer: stages keep nothing in host memory" in str(
        caught.value
    )
    options = FixedOptions(offload=("params",), loss_chunks=4)
    refused = options.refused_by_stages()
    assert [*refused] == ["offload", "loss_chunks"]
    assert [text.partition(":")[0] for text in refused.values()] == [
        "offload is params",
        "loss_chunks is 4",
    ]
