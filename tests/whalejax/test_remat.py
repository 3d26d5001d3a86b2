"""Computing again in the backward pass: where, what is kept, and when it is chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import whalejax as wh
from tests.equality import OneDevice, check, on_one_device
from whalejax import _compat, models
from whalejax.adapters.base import adapt
from whalejax.capture import Captured, capture
from whalejax.jobs import abstract_model
from whalejax.planner.cost_terms import ALL
from whalejax.planner.model.analysis import analyse_graph
from whalejax.planner.sharding.program_regions import Region, checked_policies, regions


LAYERS, EMBED, MLP, BATCH = 4, 32, 128, 64


def layer(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(checkpoint_name(x @ params["up"], "up"))
    return x + checkpoint_name(hidden @ params["down"], "down")


def unrolled(params: Any, batch: Any) -> Any:
    x = batch
    for one in params["layers"]:
        x = layer(one, x)
    return (x @ params["head"]).mean()


def scanned(params: Any, batch: Any) -> Any:
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *params["layers"])
    x, _ = jax.lax.scan(lambda x, one: (layer(one, x), None), batch, stack)
    return (x @ params["head"]).mean()


def in_a_call(params: Any, batch: Any) -> Any:
    return jax.jit(unrolled)(params, batch)


def nets(layers: int = LAYERS) -> Any:
    random = np.random.default_rng(0)

    def leaf(*shape: int) -> Any:
        return jnp.asarray(random.standard_normal(shape) / 8, jnp.float32)

    return {
        "layers": [
            {"up": leaf(EMBED, MLP), "down": leaf(MLP, EMBED)} for _ in range(layers)
        ],
        "head": leaf(EMBED, 8),
    }


def batches() -> Any:
    return np.random.default_rng(1).standard_normal((BATCH, EMBED)).astype(np.float32)


def captured(loss: Callable[..., Any], net: Any = None) -> Captured:
    return capture(adapt(nets() if net is None else net, loss), batches())


def found(loss: Callable[..., Any], policy: str = "full") -> tuple[Region, ...]:
    return regions(captured(loss).graph, {"*": policy})


def test_each_layer_is_a_region_and_nothing_else() -> None:
    one = found(unrolled)
    assert len(one) == LAYERS
    sizes = {r.end - r.first for r in one}
    assert len(sizes) == 1, "equal layers have equal regions"
    assert all(a.end == b.first for a, b in zip(one, one[1:], strict=False))


def test_layers_are_found_inside_a_call() -> None:
    inside = found(in_a_call)
    assert len(inside) == LAYERS
    assert all(r.prefix for r in inside)


def test_the_body_of_a_scan_is_a_region() -> None:
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *nets()["layers"])

    def loss(net: Any, x: Any) -> Any:
        x, _ = jax.lax.scan(lambda x, one: (layer(one, x), None), x, net)
        return x.mean()

    graph = captured(loss, stack).graph
    (one,) = regions(graph, {"*": "full"})
    assert one.prefix[-1] == 0 and one.first == 0


def test_few_layers_below_a_large_vocabulary_are_layers() -> None:
    job = models.job("llama-test", vocab=4096)
    adapter = adapt(abstract_model(job), job.loss_fn)
    captured_ = capture(adapter, jax.eval_shape(lambda: job.batch_at(0, 8)))
    (one,) = regions(captured_.graph, {"*": "full"})
    assert one.prefix and one.first == 0
    kept = captured_.with_remat((("*", "full"),)).graph.stacked
    assert sum(s.nbytes for s in kept) < sum(s.nbytes for s in captured_.graph.stacked)


def test_a_loop_that_is_no_layers_is_left() -> None:
    def loss(params: Any, x: Any) -> Any:
        one = params["layers"][0]
        x, _ = jax.lax.scan(lambda x, _: (layer(one, x), None), x, None, length=6)
        return (x @ params["head"]).mean()

    before = captured(loss)
    assert before.with_remat((("*", "full"),)) is before


def test_layers_of_one_residual_stream_keep_nothing_but_it() -> None:
    again = captured(unrolled).with_remat((("*", "full"),))
    bodies = [
        e
        for e in _compat.open_jaxpr(again.jaxpr)[0].eqns
        if _compat.recursion(e) == "remat"
    ]
    assert len(bodies) == LAYERS
    for equation in bodies:
        given = [v.aval.shape for v in equation.invars]
        assert given.count((BATCH, EMBED)) == 1
        assert [v.aval.shape for v in equation.outvars] == [(BATCH, EMBED)]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("dots", {"dot_general": 2 * LAYERS}),
        ("named", {"name": 2 * LAYERS}),
        ("named:up", {"name": LAYERS}),
        ("full", {}),
    ],
)
def test_a_policy_keeps_what_it_says(policy: str, kept: dict[str, int]) -> None:
    graph = captured(unrolled).with_remat((("*", policy),)).graph
    assert Counter(op.kind for op in graph.ops if op.kept) == kept


def test_what_the_user_wrapped_stays_as_it_is() -> None:
    keep = jax.checkpoint_policies.save_only_these_names("up")

    def loss(params: Any, x: Any) -> Any:
        for one in params["layers"]:
            x = jax.checkpoint(layer, policy=keep)(one, x)
        return (x @ params["head"]).mean()

    before = captured(loss)
    after = before.with_remat((("*", "full"),))
    assert after is before


@pytest.mark.smoke
def test_marks_stay_what_they_are() -> None:
    def loss(params: Any, x: Any) -> Any:
        with wh.replicate():
            for one in params["layers"]:
                x = layer(one, x)
        with wh.split():
            return (x @ params["head"]).mean()

    before = captured(loss)
    after = before.with_remat((("*", "full"),))
    assert sum(op.remat is not None for op in after.graph.ops) > 0
    assert [g.name for g in after.graph.task_graphs] == [
        g.name for g in before.graph.task_graphs
    ]
    assert after.graph.model_hash == before.graph.model_hash
    only = before.with_remat((("split", "full"),))
    assert only is before, "the head is no layer"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", ["dots", "full"])
def test_experts_that_no_mark_names_are_no_regions_of_their_own(policy: str) -> None:
    """So that one policy for all does without the analysis that finds them."""
    job = models.job("moe-test", annotated=False)
    graph = capture(adapt(abstract_model(job), job.loss_fn), job.batch_at(0)).graph
    apart = analyse_graph(graph).graph
    assert len(apart.task_graphs) > len(graph.task_graphs)
    places = regions(graph, {"*": policy})
    assert places
    assert places == regions(apart, {"*": policy})


def test_a_model_without_layers_is_cut_into_parts() -> None:
    job = models.job("resnet-test")
    adapter = adapt(abstract_model(job), job.loss_fn)
    graph = capture(adapter, jax.eval_shape(lambda: job.batch_at(0))).graph
    convolutions = sum(op.matmul is not None for op in graph.ops)
    parts = regions(graph, {"*": "full"})
    assert 2 <= len(parts) <= convolutions**0.5 + 2


@pytest.fixture(scope="module")
def reference() -> OneDevice:
    job = wh.Job(unrolled, lambda key: nets(), batches(), None, BATCH)
    return on_one_device(job, model=nets())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [{"data": 8}, {"fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize("policy", ["dots", "named", "named:down", "full"])
def test_it_equals_one_device(
    reference: OneDevice, policy: str, mesh: dict[str, int]
) -> None:
    outcome = check(reference, mesh=mesh, remat=policy)
    assert outcome.plan.remat == (("*", policy),)
    assert outcome.error < 1e-5 and outcome.compilations == 1


# Choosing.


def asked(**options: Any) -> wh.Plan:
    job = models.job(
        "llama-test", embed=1024, heads=8, mlp=4096, sequence=256, layers=12
    )
    batch = jax.eval_shape(lambda: job.batch_at(0, 64))
    memory = options.pop("memory", 80e9)
    options = {"num_micro_batches": 1, "optimizer": optax.sgd(1e-3), **options}
    machine = wh.cluster(options.pop("machine", "h100:8")).with_memory(int(memory))
    return wh.plan(job.loss_fn, abstract_model(job), batch, cluster=machine, **options)


def test_where_there_is_room_nothing_is_computed_again() -> None:
    assert asked().remat == ()


def test_where_nothing_else_fits_the_planner_computes_again() -> None:
    roomy = asked(mesh={"fsdp": 8})
    small = wh.cluster("h100:8").with_memory(roomy.memory.total_bytes // 2)
    tight = roomy.what_if(cluster=small)
    assert tight.remat and tight.runnable
    assert tight.time.compute_seconds > roomy.time.compute_seconds
    assert tight.memory.activations_bytes < roomy.memory.activations_bytes
    with pytest.raises(wh.WhaleError, match="Leave remat to the planner"):
        roomy.what_if(cluster=small, remat="none")


@pytest.mark.full
def test_the_planner_takes_the_policy_that_costs_least() -> None:
    policies = {p: asked(mesh={"fsdp": 8}, remat=p) for p in ("none", "dots", "full")}
    none, dots, full = policies.values()
    assert none.memory.total_bytes > dots.memory.total_bytes > full.memory.total_bytes
    assert none.time.step_seconds < dots.time.step_seconds < full.time.step_seconds
    between = (dots.memory.total_bytes + none.memory.total_bytes) / 2
    assert asked(mesh={"fsdp": 8}, memory=between).remat == (("*", "dots"),)
    between = (dots.memory.total_bytes + full.memory.total_bytes) / 2
    tight = asked(mesh={"fsdp": 8}, memory=between, offload=())
    assert tight.remat == (("*", "full"),)
    # Transfers that hide behind the computation cost less than computing again.
    v100 = {"machine": "v100-32:8", "mesh": {"fsdp": 8}, "memory": between}
    again, moved = asked(**v100, offload=()), asked(**v100)
    assert again.remat == (("*", "full"),)
    assert (moved.remat, moved.offload) == ((("*", "dots"),), ("activations",))
    assert moved.time.step_seconds < again.time.step_seconds


@pytest.mark.full
def test_a_plan_remembers_it(tmp_path: Any) -> None:
    plan = asked(mesh={"fsdp": 8}, remat={"default": "dots"})
    assert plan.remat == (("default", "dots"),)
    assert "remat dots in default" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == plan
    assert plan.hash != asked(mesh={"fsdp": 8}, remat="none").hash
    assert plan.what_if(remat="full").remat == (("*", "full"),)


@pytest.mark.parametrize("names", ["a", "a,b", "b, a"])
def test_a_plan_remembers_the_names_that_are_kept(tmp_path: Any, names: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        for number in range(3):
            x = checkpoint_name(jnp.tanh(x @ p[f"layer{number}"]), "a")
            x = checkpoint_name(x * 2.0, "b")
        return jnp.mean(x**2)

    shape = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    params = {f"layer{number}": shape for number in range(3)}
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    plan = wh.plan(loss, params, x, cluster="h100:4", remat=f"named:{names}")
    assert plan.remat == (("*", f"named:{names}"),)
    plan.save(tmp_path / "plan.json")
    assert wh.Plan.load(tmp_path / "plan.json") == plan


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("remat", "message"),
    [
        ("some", "remat is 'some'; expected one of none, dots, named, full"),
        (
            {"*": "some"},
            "'some' is not a policy; expected one of none, dots, named, full",
        ),
        ("named", "it names none: put jax.ad_checkpoint.checkpoint_name"),
        ({"head": "full"}, "there is no TaskGraph 'head'; expected some of default"),
        (3, "remat is 3; expected a word such as 'full', one for each"),
        ("named:", "'named:' lists no name"),
        ({"default": ["dots"]}, r"remat is {'default': \['dots'\]}; expected a word"),
        ({"experts": "full"}, "there is no TaskGraph 'experts'"),
    ],
)
def test_bad_policies_are_named(remat: Any, message: str) -> None:
    with pytest.raises(wh.WhaleError, match=message):
        asked(remat=remat)


def test_an_exception_stays_one() -> None:
    graph = captured(unrolled).graph
    given = {"*": "full", "default": "none"}
    kept = checked_policies(given, graph, ())
    assert kept == (("default", "none"), ("*", "full"))
    assert regions(graph, dict(kept)) == ()
    plan = asked(remat=given)
    assert plan.remat == ()
    assert any("has no effect" in note for note in plan.notes)


@pytest.mark.smoke
def test_layers_that_cannot_be_computed_again_are_left() -> None:
    def heard(one: Any, x: Any) -> Any:
        y = layer(one, x)
        io_callback(lambda _: None, None, jax.lax.stop_gradient(y.sum()))
        return y

    def loss(params: Any, x: Any) -> Any:
        for one in params["layers"]:
            x = heard(one, x)
        return (x @ params["head"]).mean()

    @jax.custom_jvp
    def opaque(params: Any, x: Any) -> Any:
        return unrolled(params, x)

    opaque.defjvps(None, None)
    for one in (loss, lambda params, x: opaque(params, x)):
        before = captured(one)
        assert before.with_remat((("*", "full"),)) is before


@pytest.mark.parametrize(
    "loss", [lambda p, b: p["w"].mean(), lambda p, b: (p["w"] * 2.0).sum()]
)
def test_a_loss_of_parameters_alone(loss: Any) -> None:
    net = {"w": jnp.ones((8, 8))}
    plan = wh.plan(loss, net, batches(), cluster="h100:8", remat="full")
    assert plan.remat == ()


def test_a_name_that_the_model_does_not_give() -> None:
    with pytest.raises(wh.WhaleError, match="no value .mid.; it has the names up"):
        wh.plan(unrolled, nets(), batches(), cluster="h100:8", remat="named:up,mid")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["gpt-test", pytest.param("moe-test", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("attention", [(), ((ALL, "ring"),)], ids=["gather", "ring"])
def test_what_checkpoints_keep_takes_no_derivative_to_tell(
    name: str, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = models.job(name, scan_layers=True, layers=4, annotated=False)
    adapter = adapt(abstract_model(job), job.loss_fn)
    found = capture(adapter, job.batch_at(0, 8)).with_attention(attention)
    told = []

    def both(scan: Any, run: Any = None, flowing: Any = None) -> Any:
        kept = _compat._kept_by_checkpoint(scan)
        assert kept is not None
        told.append((kept, _compat.residuals_by_vjp(scan, run, flowing)))
        return kept

    monkeypatch.setattr(_compat, "scan_residuals", both)
    assert len(found.with_remat(((ALL, "full"),)).graph.stacked)
    assert told and all(kept and kept == truth for kept, truth in told)


def test_checkpoints_whose_input_no_product_reads_are_told_by_derivatives() -> None:
    def body(x: Any, w: Any) -> tuple[Any, None]:
        return jax.checkpoint(lambda x, w: x + w)(x, w), None

    jaxpr = jax.make_jaxpr(lambda x, w: jax.lax.scan(body, x, w))(
        jnp.ones(4), jnp.ones((3, 4))
    )
    (scan,) = jaxpr.jaxpr.eqns
    assert _compat._kept_by_checkpoint(scan) is None
    assert _compat.scan_residuals(scan) == []
