"""Rows sorted by their expert: every device sorts and multiplies its own samples'."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import whalejax as wh
from tests.compilations import count_compilations
from tests.equality import peak_bytes
from whalejax import hlo
from whalejax.adapters.base import adapt
from whalejax.capture import capture
from whalejax.planner.sharding.offload_candidates import waiting_values


SAMPLES, TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 16, 6, 24, 40, 4, 2
LAYERS: Final = 2
RATE: Final = 0.5


def _added(rows: Any, order: Any, tokens: Any) -> Any:
    return jnp.zeros_like(tokens).at[order // CHOICES].add(rows)


def _turned_back(rows: Any, order: Any, tokens: Any) -> Any:
    back = rows[jnp.argsort(order)]
    return back.reshape(len(tokens), CHOICES, -1).sum(1)


def _experts(
    p: Any,
    x: Any,
    *,
    back: Callable[..., Any] = _added,
    bend: Callable[[Any], Any] = jax.nn.silu,
    counts: Callable[[Any], Any] = lambda ids: jnp.bincount(ids, length=EXPERTS),
) -> Any:
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = lax.top_k(jax.nn.softmax(tokens @ p["router"]), CHOICES)
    ids = chosen.reshape(-1)
    order = jnp.argsort(ids)
    sizes = counts(ids)
    rows = tokens[order // CHOICES]
    gate = bend(lax.ragged_dot(rows, p["gate"], sizes))
    hidden = gate * lax.ragged_dot(rows, p["up"], sizes)
    out = lax.ragged_dot(hidden, p["down"], sizes)
    out = out * weights.reshape(-1)[order][:, None]
    return back(out, order, tokens).reshape(x.shape)


def _one_hot_counts(ids: Any) -> Any:
    return (ids[:, None] == jnp.arange(EXPERTS)[None]).sum(0)


FORMS: Final[Mapping[str, Mapping[str, Any]]] = {
    "added": {},
    "turned back": {"back": _turned_back},
    "rectified": {"bend": jax.nn.relu},
    "counted by one-hot": {"counts": _one_hot_counts},
}


def _loss(form: str = "added", *, loop: bool = True, again: bool = False) -> Any:
    def layer(h: Any, p: Any) -> tuple[Any, None]:
        return h + _experts(p, jnp.tanh(h), **FORMS[form]), None

    def loss(params: Any, x: Any) -> Any:
        turn = jax.checkpoint(layer) if again else layer
        h = x
        if loop:
            h, _ = lax.scan(turn, h, params["layers"])
        else:
            for number in range(LAYERS):
                one = jax.tree.map(lambda p, n=number: p[n], params["layers"])
                h, _ = turn(h, one)
        return jnp.mean((h @ params["head"]) ** 2)

    return loss


def _params() -> Any:
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def made(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    return {
        "layers": {
            "router": made(LAYERS, WIDTH, EXPERTS),
            "gate": made(LAYERS, EXPERTS, WIDTH, HIDDEN),
            "up": made(LAYERS, EXPERTS, WIDTH, HIDDEN),
            "down": made(LAYERS, EXPERTS, HIDDEN, WIDTH),
        },
        "head": made(WIDTH, WIDTH),
    }


def _batch() -> Any:
    # Tokens of zeros stand where a rectifier bends.
    x = jax.random.normal(jax.random.key(1), (SAMPLES, TOKENS, WIDTH))
    return x.at[::3, ::2].set(0.0)


def _step(loss: Any, mesh: Mapping[str, int], **options: Any) -> tuple[Any, Any, Any]:
    params, x = _params(), _batch()
    optimizer = optax.sgd(RATE)
    options = {"num_micro_batches": 1, "remat": "none", **options}
    plan = wh.plan(
        loss,
        params,
        x,
        optimizer=optimizer,
        cluster="cpu:8",
        mesh=dict(mesh),
        **options,
    )
    return wh.compile(plan, loss, params, optimizer=optimizer), params, x


def _calls(loss: Any) -> int:
    return len(capture(adapt(_params(), loss), _batch()).sorted_rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("loop", [True, False], ids=["loop", "written out"])
def test_sorted_rows_are_found(form: str, loop: bool) -> None:
    assert _calls(_loss(form, loop=loop)) == (1 if loop else LAYERS)


def _hardest(params: Any, x: Any) -> Any:
    """The mean of the half of all samples that is hardest."""
    each = jnp.mean((x @ params["head"]) ** 2, axis=(1, 2))
    return jnp.sort(each)[len(each) // 2 :].mean()


def _left_sorted(params: Any, x: Any) -> Any:
    """Rows are never brought back, and meet the batch in its own order."""
    p = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    tokens = x.reshape(-1, WIDTH)
    ids = (tokens @ p["router"]).argmax(-1)
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=EXPERTS)
    out = lax.ragged_dot(tokens[order], p["gate"], sizes)
    return jnp.mean((out[:, :WIDTH] - tokens) ** 2)


def _counts_of_others(params: Any, x: Any) -> Any:
    """Groups are counted of other numbers than rows are sorted by."""
    p = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    tokens = x.reshape(-1, WIDTH)
    ids = (tokens @ p["router"]).argmax(-1)
    order = jnp.argsort(ids)
    sizes = jnp.bincount((tokens[:, :EXPERTS]).argmax(-1), length=EXPERTS)
    out = lax.ragged_dot(tokens[order], p["gate"], sizes)
    return jnp.mean(out[jnp.argsort(order)] ** 2)


@pytest.mark.parametrize("loss", [_hardest, _left_sorted, _counts_of_others])
def test_what_mixes_samples_is_sorted_as_a_whole(loss: Any) -> None:
    assert _calls(loss) == 0


MESHES: Final = (
    {"fsdp": 8},
    {"data": 2, "fsdp": 4},
    {"data": 4, "tensor": 2},
    {"fsdp": 2, "tensor": 2},
)


def _worst(step: Any, params: Any, x: Any, loss: Any) -> float:
    """The largest difference to one device's gradients, of the largest of each."""
    expected = jax.grad(loss)(params, x)
    state, _ = step(step.init_from(params), x)
    changes = jax.tree.map(
        lambda a, b: (np.asarray(a) - np.asarray(b)) / RATE, params, state.params
    )
    pairs = zip(jax.tree.leaves(changes), jax.tree.leaves(expected), strict=True)
    tiny = 1e-30  # Some losses leave a parameter out.
    return max(np.abs(a - b).max() / max(tiny, np.abs(b).max()) for a, b in pairs)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"remat": "full"}, {"remat": "dots"}, {"num_micro_batches": 2}],
    ids=str,
)
def test_gradients_are_those_of_one_device(
    mesh: Mapping[str, int], form: str, options: Mapping[str, Any]
) -> None:
    loss = _loss(form)
    step, params, x = _step(loss, mesh, **options)
    assert _worst(step, params, x, loss) < 2e-5


@pytest.mark.smoke
@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_layers_written_out(again: bool) -> None:
    loss = _loss(loop=False, again=again)
    step, params, x = _step(loss, {"data": 2, "fsdp": 4})
    assert _worst(step, params, x, loss) < 2e-5


@pytest.mark.smoke
def test_no_rows_are_exchanged() -> None:
    step, *_ = _step(_loss(), {"fsdp": 8})
    text = step.lower().compile().as_text()
    found = hlo.collectives(hlo.read(text)).instructions
    rows = SAMPLES * TOKENS * CHOICES
    # Scores of all tokens are gathered to be compared, as this compiler has it.
    scores = SAMPLES * TOKENS * EXPERTS * 4
    most = max(i.payload_bytes for i in found if i.kind in ("all-gather", "all-to-all"))
    assert most <= max(EXPERTS * WIDTH * HIDDEN * 4, scores) < rows * WIDTH * 4
    assert f"f32[{rows},{HIDDEN}]" not in text
    assert f"f32[{rows // 8},{HIDDEN}]" in text


def test_traffic_is_what_the_plan_says() -> None:
    step, *_ = _step(_loss(), {"fsdp": 8})
    found = hlo.collectives(hlo.read(step.lower().compile().as_text())).instructions
    weights = 3 * EXPERTS * WIDTH * HIDDEN * 4 * LAYERS
    planned, compiled = (
        sum(c.payload_bytes * c.count for c in several if c.kind == "all-gather")
        for several in (step.plan.collectives, found)
    )
    assert planned == pytest.approx(compiled, rel=0.1)
    # Once ahead, and once more for the backward pass.
    assert 2 * weights <= planned <= 2.2 * weights


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_memory_and_work_fall_with_the_samples_of_a_device(precision: str) -> None:
    def plan(devices: int) -> wh.Plan:
        return wh.plan(
            _loss(),
            _params(),
            jax.ShapeDtypeStruct((SAMPLES * 64, TOKENS, WIDTH), jnp.float32),
            optimizer=optax.sgd(RATE),
            cluster=f"h100:{devices}",
            mesh={"data": devices},
            num_micro_batches=1,
            remat="none",
            precision=precision,
        )

    one, eight = plan(1), plan(8)

    def held(found: wh.Plan) -> int:
        return found.memory.activations_bytes + found.memory.working_bytes

    assert held(eight) < held(one) / 6


def test_a_step_compiles_once() -> None:
    step, params, x = _step(_loss(), {"data": 2, "fsdp": 4})
    state = step.init_from(params)
    with count_compilations() as compiled:
        for _ in range(3):
            state, _ = step(state, x)
    assert compiled.count == 1


@pytest.mark.parametrize(("machine", "rows"), [("v5e:8", 1), ("h100:8", EXPERTS)])
def test_work_is_what_compilers_make_of_products_by_group(
    machine: str, rows: int
) -> None:
    plan = wh.plan(
        _loss(),
        _params(),
        _batch(),
        optimizer=optax.sgd(RATE),
        cluster=machine,
        mesh={"data": 8},
        num_micro_batches=1,
        remat="none",
    )
    tokens = SAMPLES * TOKENS // 8
    router = 2 * tokens * WIDTH * EXPERTS * LAYERS
    head = 2 * tokens * WIDTH * WIDTH
    experts = 3 * 2 * tokens * CHOICES * WIDTH * HIDDEN * LAYERS
    # Forward and for the rows' gradient as the compiler does; for the matrices' all
    # compilers multiply every row in every group.
    assert plan.product_flops == pytest.approx(
        3 * (router + head) + experts * (2 * rows + EXPERTS), rel=0.01
    )


@pytest.mark.smoke
def test_sixteen_bits_are_added_up_as_any_others() -> None:
    loss = _loss()
    several, params, x = _step(loss, {"data": 4}, precision="bf16")
    state, _ = several(several.init_from(params), x)
    expected = jax.grad(loss)(params, x)
    changes = jax.tree.map(
        lambda a, b: (np.asarray(a) - np.asarray(b)) / RATE, params, state.params
    )
    for got, want in zip(
        jax.tree.leaves(changes), jax.tree.leaves(expected), strict=True
    ):
        assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def _one_product(p: Any, x: Any) -> Any:
    tokens = x.reshape(-1, x.shape[-1])
    ids = (tokens @ p["router"]).argmax(-1)
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=p["up"].shape[0])
    out = lax.ragged_dot(tokens[order], p["up"], sizes)
    return jnp.mean(jnp.tanh(out[jnp.argsort(order)]) ** 2)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"fsdp": 8}], ids=str)
def test_masked_copies_of_each_group_are_counted(mesh: dict[str, int]) -> None:
    # This compiler multiplies all rows by all groups' matrices.
    params = {"router": jnp.ones((128, 8)), "up": jnp.ones((8, 128, 256))}
    optimizer = optax.sgd(RATE)
    plan = wh.plan(
        _one_product,
        params,
        jax.ShapeDtypeStruct((16, 512, 128), jnp.float32),
        optimizer=optimizer,
        cluster="cpu:8",
        mesh=mesh,
        num_micro_batches=1,
        remat="none",
    )
    step = wh.compile(plan, _one_product, params, optimizer=optimizer)
    compiled = peak_bytes(step.lower().compile())
    masked = 16 * 512 // 8 * 8 * (128 + 256) * 4
    assert masked < compiled
    assert plan.memory.total_bytes == pytest.approx(compiled, rel=0.15)


def test_what_devices_sort_for_themselves_stays_there() -> None:
    captured = capture(adapt(_params(), _loss()), _batch())
    found = captured.with_remat((("*", "dots"),))
    (call,) = found.sorted_rows.values()
    kept = {t for op in found.graph.ops if op.kept for t in op.results}
    assert kept & call.tensors
    assert not waiting_values(found.graph).keys() & call.tensors


def _attending(p: Any, x: Any) -> Any:
    """Attention before experts: their sort needs the sequence whole."""
    q, k, v = (x @ p[name] for name in ("q", "k", "v"))
    heads = (*x.shape[:2], 8, -1)
    q, k, v = (y.reshape(heads) for y in (q, k, v))
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    return jnp.mean((x + _experts(p, x + h)) ** 2)


def test_attention_in_blocks_needs_no_sequence_to_share() -> None:
    shapes = {
        **{name: (1024, 1024) for name in ("q", "k", "v")},
        "router": (1024, EXPERTS),
        "gate": (EXPERTS, 1024, 1024),
        "up": (EXPERTS, 1024, 1024),
        "down": (EXPERTS, 1024, 1024),
    }
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}

    def seconds(**options: Any) -> float:
        plan = wh.plan(
            _attending,
            params,
            jax.ShapeDtypeStruct((16, 4096, 1024), jnp.float32),
            optimizer=optax.adam(RATE),
            cluster="v5e:4x4",
            precision="bf16",
            **options,
        )
        assert plan.axis_sizes.get("context", 1) == 1
        return plan.time.step_seconds

    free, ring, gathered = (
        seconds(**options)
        for options in ({}, {"attention": "ring"}, {"attention": "gather"})
    )
    assert ring < 0.9 * gathered
    assert free <= 1.01 * ring


@pytest.mark.parametrize(("axis", "why"), [("expert", "all experts"), ("context", "")])
def test_axes_that_sorted_rows_cannot_share_are_refused_in_words(
    axis: str, why: str
) -> None:
    with pytest.raises(wh.WhaleError) as refused:
        _step(_loss(), {axis: 2})
    said = str(refused.value)
    assert "Rows that are sorted by expert (jax.lax.ragged_dot)" in said
    assert why in said and f"leave {axis} out" in said


def _layer(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], params["layers"])


def _by_score(params: Any, x: Any) -> Any:
    """Numbers of tokens, sorted by a score and put back as they come: in one row."""
    p = _layer(params)
    score = jnp.tanh(x @ p["router"]).sum(-1).reshape(-1)
    tokens = jnp.tanh(x @ params["head"]).reshape(-1, WIDTH)
    order = jnp.argsort(score)
    found = jnp.zeros_like(score).at[order].set((tokens[order] * 3).sum(-1))
    return jnp.mean(jnp.cos(found) + jnp.log1p(found * found))


def _balanced(params: Any, x: Any) -> Any:
    """Two of the experts, flat to the end, and a loss that balances their counts."""
    p, tokens = _layer(params), x.reshape(-1, WIDTH)
    shares = jax.nn.softmax(tokens @ p["router"])
    weights, chosen = lax.top_k(shares, CHOICES)
    ids = chosen.reshape(-1)
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=EXPERTS)
    rows = lax.ragged_dot(tokens[order // CHOICES], p["gate"], sizes)[:, :WIDTH]
    out = _added(rows * weights.reshape(-1)[order][:, None], order, tokens)
    used = lax.stop_gradient(sizes / ids.shape[0])
    return jnp.mean(out**2) + 0.1 * EXPERTS * jnp.sum(shares.mean(0) * used)


def _crossing(params: Any, x: Any) -> Any:
    """Two orders, each of which reads what the other one's rows became."""
    p, one = _layer(params), x.reshape(-1, WIDTH)
    other = jnp.tanh(one * 2)

    def order(ids: Any) -> tuple[Any, Any]:
        return jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)

    def routed(tokens: Any, by: tuple[Any, Any], name: str) -> Any:
        out = lax.ragged_dot(tokens[by[0]], p[name][:, :, :WIDTH], by[1])
        return jnp.tanh(out[jnp.argsort(by[0])])

    first = order((one @ p["router"]).argmax(-1))
    second = order((other @ p["router"][::-1]).argmax(-1))
    ahead = routed(routed(one, first, "gate"), second, "up")
    back = routed(routed(other, second, "up"), first, "gate")
    return jnp.mean((ahead + back) ** 2)


def _marked(params: Any, x: Any) -> Any:
    """The order is made in one TaskGraph, and rows are multiplied in another."""
    p, tokens = _layer(params), x.reshape(-1, WIDTH)
    with wh.replicate():
        ids = (tokens @ p["router"]).argmax(-1)
        order, sizes = jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)
    with wh.split():
        out = lax.ragged_dot(tokens[order], p["gate"], sizes)[:, :WIDTH]
    return jnp.mean(out[jnp.argsort(order)] ** 2)


WRITTEN: Final = {
    "a score for each token": (_by_score, 1),
    "flat with a balance": (_balanced, 1),
    "orders that cross": (_crossing, 1),
    "two TaskGraphs": (_marked, 0),
}
"""Losses, and how many calls each has."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WRITTEN)
def test_ways_to_write_them(name: str) -> None:
    """The captured program is the loss, and its gradients are those of one device."""
    loss, calls = WRITTEN[name]
    params, x = _params(), _batch()
    captured = capture(adapt(params, loss), x)
    assert len(captured.sorted_rows) == calls
    program = captured.jaxpr
    flat = [*jax.tree.leaves(params), x]
    value = jax.core.eval_jaxpr(program.jaxpr, program.consts, *flat)[0]
    assert float(value) == pytest.approx(float(loss(params, x)), rel=1e-6)
    step, *_ = _step(loss, {"data": 4, "tensor": 2} if calls == 0 else {"data": 4})
    assert _worst(step, params, x, loss) < 2e-5


def _normalized(rows: Any, scale: Any) -> Any:
    square = jnp.mean(rows * rows, -1, keepdims=True)
    return rows * lax.rsqrt(square + 1e-6) * scale[None]


_with_rule = jax.custom_jvp(_normalized)
_with_rule.defjvp(lambda primals, tangents: jax.jvp(_normalized, primals, tangents))


def _as_wide(wide: int) -> Any:
    """Parameters of one layer of experts, so wide inside."""
    keys = iter(jax.random.split(jax.random.key(2), 5))

    def made(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    return {
        "router": made(WIDTH, EXPERTS),
        "gate": made(EXPERTS, WIDTH, wide),
        "up": made(EXPERTS, WIDTH, wide),
        "down": made(EXPERTS, wide, WIDTH),
        "scale": made(1, wide)[0] + 1.0,
    }


def _summed(rows: Any) -> Any:
    """Times a number that is made of a vector as long as a row is wide."""
    return rows * jnp.sin(lax.iota(jnp.float32, rows.shape[-1])).sum()


def _traced(rows: Any) -> Any:
    return rows * (1.0 + jnp.trace(jnp.eye(rows.shape[-1])) / rows.shape[-1])


def _picked(rows: Any) -> Any:
    first = jax.nn.softmax(-jnp.arange(1.0 * rows.shape[-1]) / 9.0)[0]
    return rows * (1.0 + first)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bend", [_summed, _traced, _picked])
@pytest.mark.parametrize("wide", [SAMPLES * TOKENS, SAMPLES * TOKENS * CHOICES])
def test_constants_as_long_as_there_are_rows(bend: Any, wide: int) -> None:
    """In a function with a rule of its own nothing tells them from rows."""
    ruled = jax.custom_jvp(bend)
    ruled.defjvp(lambda primals, tangents: jax.jvp(bend, primals, tangents))
    params, x, optimizer = _as_wide(wide), _batch(), optax.sgd(RATE)
    del params["scale"]

    def loss(p: Any, x: Any) -> Any:
        return jnp.mean(_experts(p, x, bend=ruled) ** 2)

    options = {"num_micro_batches": 1, "mesh": {"data": 8}, "cluster": "cpu:8"}
    plan = wh.plan(loss, params, x, optimizer=optimizer, **options)
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    assert _worst(step, params, x, loss) < 5e-4


@pytest.mark.parametrize("wide", [HIDDEN, SAMPLES * TOKENS, SAMPLES * TOKENS * CHOICES])
def test_a_scale_as_wide_as_there_are_rows(wide: int) -> None:
    """A rule for tangents tells rows from a vector of the same length."""
    params = _as_wide(wide)

    def loss(p: Any, x: Any) -> Any:
        bent = _experts(p, x, bend=lambda rows: _with_rule(rows, p["scale"]))
        return jnp.mean(bent**2)

    x, optimizer = _batch(), optax.sgd(RATE)
    assert len(capture(adapt(params, loss), x).sorted_rows) == 1
    options = {"num_micro_batches": 1, "mesh": {"data": 8}, "cluster": "cpu:8"}
    plan = wh.plan(loss, params, x, optimizer=optimizer, **options)
    step = wh.compile(plan, loss, params, optimizer=optimizer)
    assert _worst(step, params, x, loss) < 5e-5


def test_scopes_stay_with_their_operations() -> None:
    def loss(params: Any, x: Any) -> Any:
        p, tokens = _layer(params), x.reshape(-1, WIDTH)
        with jax.named_scope("router"):
            ids = (tokens @ p["router"]).argmax(-1)
            order, sizes = jnp.argsort(ids), jnp.bincount(ids, length=EXPERTS)
        with jax.named_scope("experts"):
            out = lax.ragged_dot(tokens[order], p["gate"], sizes)
        return jnp.mean(out[jnp.argsort(order)] ** 2)

    captured = capture(adapt(_params(), loss), _batch())
    assert len(captured.sorted_rows) == 1
    scopes = {op.kind: op.scope.split("/")[-1] for op in captured.graph.ops}
    assert scopes["ragged_dot_general"] == "experts"
    assert scopes["dot_general"] == "router"


@pytest.mark.filterwarnings("error")
def test_nobody_is_warned_of_a_batch_that_nobody_gave() -> None:
    seen = []

    def loss(params: Any, x: Any) -> Any:
        seen.append(len(x))
        if len(x) > SAMPLES:
            warnings.warn("a large batch", stacklevel=1)
        return _loss()(params, x)

    assert len(capture(adapt(_params(), loss), _batch()).sorted_rows) == 1
    assert max(seen) > SAMPLES
