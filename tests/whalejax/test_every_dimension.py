"""Every dimension that the analysis calls shardable, sharded on real devices.

One after the other, each logical dimension of a model is sharded over two devices and
nothing else is. The gradient must be one device's, and the program must communicate
what the plan predicts, to the byte: a dimension that the rules tie together wrongly
would be gathered, exchanged or summed somewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Final

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whalejax as wh
from tests.cases import MODELS
from tests.chains import STEPS, WIDTHS, Step, job_of
from tests.equality import OneDevice, build, keep_gradient, on_one_device, worst_leaf
from whalejax import hlo
from whalejax.adapters.base import Adapter, adapt
from whalejax.capture import capture
from whalejax.lowering.batch_record import batch_leaves, batch_tree
from whalejax.lowering.optimizer_state import optimizer_bytes
from whalejax.planner.model.analysis import GraphAnalysis, analyse_graph
from whalejax.planner.plan.build import build_plan
from whalejax.planner.plan.plan import Plan
from whalejax.planner.search.layout_search import Search
from whalejax.planner.search.request import Request


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

DEVICES: Final = 2
TOLERANCE: Final = 1e-4
"""Of float32: batch normalisation over few samples amplifies rounding that much."""

NOT_EXACT: Final = {
    ("moe-switch", "experts"): "gates are chosen along it, which gathers them",
    ("bert", "head_dense.kernel[1]"): "the norm behind it gathers its scale and bias",
    ("linen", "head.kernel[1]"): "the loss gathers the bias of the head",
}
"""Dimensions whose programs communicate a little more than is predicted, and why."""

NAMES: Final = ("mlp", "gpt", "moe-switch", "bert", "linen", "resnet")


@dataclasses.dataclass(frozen=True)
class Known:
    """A model, captured and run on one device."""

    one: OneDevice
    adapter: Adapter
    analysed: GraphAnalysis
    cluster: wh.Cluster


@functools.cache
def known(name: str) -> Known:
    """A model of the matrix, without what depends on a sample's place."""
    model = next(m for m in MODELS if m.name == name)
    return known_of(model.job("float32", annotated=False, **model.quiet))


def known_of(job: Any) -> Known:
    """A model and its loss."""
    one = on_one_device(job, model=build(job))
    adapter = adapt(one.model, job.loss_fn)
    graph = capture(adapter, one.batch, num_micro_batches=1, batch_axes=0).graph
    here = wh.Cluster.detect(calibrate=False)
    node = dataclasses.replace(here.nodes[0], count=DEVICES)
    level = dataclasses.replace(here.levels[0], size=DEVICES)
    cluster = dataclasses.replace(here, nodes=(node,), levels=(level,))
    return Known(one, adapter, analyse_graph(graph), cluster)


def sharded_along(model: Known, role: int) -> Plan:
    """The plan that shards one logical dimension and no other."""
    request = Request(
        optimizer=optimizer_bytes(model.adapter, keep_gradient()), num_devices=DEVICES
    )
    found = model.analysed
    search = Search(found.graph, found.dims, model.cluster, request)
    mesh = {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": DEVICES}
    search.score(mesh, dict.fromkeys(search.options.order, {"tensor": (role,)}))
    leaves = batch_leaves(model.one.batch)
    plan = build_plan(
        found, search, search.scored, model.cluster, request, "f32", leaves
    )
    return dataclasses.replace(plan, batch_tree=batch_tree(model.one.batch))


def differences(model: Known, role: int) -> tuple[float, int, int]:
    """The gradient's error, and the bytes that were predicted and compiled."""
    plan, one = sharded_along(model, role), model.one
    step = wh.compile(
        plan,
        one.job.loss_fn,
        one.model,
        optimizer=keep_gradient(),
        devices=jax.devices()[:DEVICES],
    )
    state: Any = step.init_from(one.model, rng=one.key)
    text = step.lower(state).compile().as_text()
    state, _ = step(state, one.batch)
    got = [np.asarray(g) for g in jax.tree.leaves(state.opt_state["gradient"])]
    error, _ = worst_leaf(got, one.gradients, one.paths)
    predicted = sum(c.payload_bytes * c.times(1) for c in plan.collectives)
    return error, predicted, sum(hlo.collectives(text).nbytes.values())


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_every_dimension_can_be_sharded(name: str) -> None:
    model = known(name)
    roles = [
        role
        for role in model.analysed.dims.roles
        if not role.unshardable and role.size % DEVICES == 0
    ]
    assert len(roles) >= 5
    for role in roles:
        error, predicted, compiled = differences(model, role.index)
        assert error < TOLERANCE, role.name
        if (name, role.name) in NOT_EXACT:
            assert predicted < compiled < 1.05 * predicted, role.name
        else:
            assert predicted == compiled, role.name


@pytest.mark.full
def test_every_exception_is_a_dimension() -> None:
    for name, role in NOT_EXACT:
        assert known(name).analysed.dims.find(role) is not None


@pytest.mark.parametrize(
    "steps",
    [
        ("dense", "sort", "look_up", "gate", "grouped", "convolve", "window"),
        pytest.param(
            (
                *("heads", "merged", "attend", "scan"),
                *("recurrent", "cumsum", "top_k", "swap"),
            ),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("ruled", "segments", "write", "pad", "join", "update", "turn", "cond"),
            marks=pytest.mark.full,
        ),
        pytest.param(
            ("residual", "over_batch", "fft", "factor", "noise", "while", "prod"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_every_dimension_of_most_primitives_can_be_sharded(
    steps: tuple[str, ...],
) -> None:
    assert_sharded_alike([(step, 32) for step in steps])


@pytest.mark.full
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from([*STEPS]), st.sampled_from(WIDTHS)),
        min_size=3,
        max_size=8,
    )
)
def test_every_dimension_of_chains_drawn_at_random_can_be_sharded(
    chain: list[Step],
) -> None:
    assert_sharded_alike(chain)


def assert_sharded_alike(chain: list[Step]) -> None:
    """The gradient of a chain is one device's, whatever is sharded."""
    model = known_of(job_of(chain))
    roles = [
        role
        for role in model.analysed.dims.roles
        if not role.unshardable and role.size % DEVICES == 0
    ]
    assert roles
    for role in roles:
        error, *_ = differences(model, role.index)
        assert error < TOLERANCE, (role.name, chain)
