"""The dense part of steps with tables: remat, precision and tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.whalejax.test_table_step import collectives
from whalejax.lowering.global_arrays import put_global


SAMPLES: Final = 32
TABLES: Final = {"user": (37, 16), "item": (29, 16)}
LAYERS: Final = 6
ROWS: Final = wh.sparse_optimizer("adagrad", 0.05)
OPTIMIZER: Final = optax.sgd(0.05, momentum=0.9)


def loss(net: Any, batch: Any) -> jax.Array:
    """Two lookups, equal layers, and a part of each sample's history in every one."""
    events = net["item"][batch["items"]]
    x = net["user"][batch["user"]]
    for number in range(LAYERS):
        up, down = net[f"up{number}"], net[f"down{number}"]
        x = x + jnp.tanh((x + events[:, number % 3]) @ up) @ down
    return jnp.mean((x @ net["out"] - batch["label"]) ** 2)


def make_net() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {**TABLES, "out": (16,)}
    for number in range(LAYERS):
        shapes |= {f"up{number}": (16, 64), f"down{number}": (64, 16)}
    return {
        name: jnp.asarray(random.standard_normal(shape) * 0.2, np.float32)
        for name, shape in shapes.items()
    }


def make_batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step + 1)
    return {
        "user": random.integers(0, 37, SAMPLES).astype(np.int32),
        "items": random.integers(0, 29, (SAMPLES, 3)).astype(np.int32),
        "label": random.standard_normal(SAMPLES).astype(np.float32),
    }


def ordinary(
    ranks: int = 1, dense: Any = OPTIMIZER, **options: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Losses and parameters of the ordinary step, with Adagrad of whole tables."""
    net = make_net()
    labels = {name: "rows" if name in TABLES else "dense" for name in net}
    both = {"rows": optax.adagrad(0.05), "dense": dense}
    optimizer = optax.multi_transform(both, labels)
    plan = wh.plan(
        *(loss, net, make_batch(0)),
        optimizer=optimizer,
        cluster=f"cpu:{ranks}",
        **options,
    )
    step = wh.compile(
        plan, loss, net, optimizer=optimizer, devices=jax.devices()[:ranks]
    )
    state, losses = step.init_from(net), []
    for number in range(3):
        state, metrics = step(state, make_batch(number))
        losses.append(float(metrics["loss"]))
    return losses, {name: np.asarray(x) for name, x in state.model.items()}


def make_step(
    cluster: str, dense: Any = OPTIMIZER, **options: Any
) -> tuple[wh.Plan, Any]:
    net, count = make_net(), int(cluster.rpartition(":")[2])
    plan = wh.plan(
        *(loss, net, make_batch(0)),
        tables=ROWS,
        optimizer=dense,
        cluster=cluster,
        **options,
    )
    devices = jax.devices()[:count]
    return plan, wh.compile(plan, loss, net, optimizer=dense, devices=devices)


def check_equal(step: Any, limit: float, ranks: int = 1, **options: Any) -> None:
    """Compares a step with the ordinary one, of one device unless more are named."""
    losses, expected = ordinary(ranks, **options)
    state = step.init_from(make_net())
    for number, value in enumerate(losses):
        assert float(step.eval(state, make_batch(number))["loss"]) == pytest.approx(
            value, rel=limit
        )
        state, metrics = step(state, make_batch(number))
        assert float(metrics["loss"]) == pytest.approx(value, rel=limit)
    model = step.model(state)
    for name, value in expected.items():
        assert model[name].dtype == value.dtype
        np.testing.assert_allclose(model[name], value, rtol=0, atol=4 * limit)


def check_exchanges(step: Any) -> str:
    """Checks the number of all-to-alls and their bytes; returns the program."""
    state = step.init_from(make_net())
    text: str = step.lower(state, make_batch(0)).compile().as_text()
    layout = step.programs.layout
    found = collectives(text).get("all-to-all", [])
    planned = [layout.exchanged_bytes(SAMPLES, 4, backward=b) for b in (False, True)]
    planned.append(layout.id_bytes(SAMPLES))
    assert len(found) == sum(size > 0 for size in planned)
    return text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["dots", "full"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_dense_part_that_is_recomputed(ranks: int, policy: str) -> None:
    plan, step = make_step(f"cpu:{ranks}", remat=policy)
    assert plan.remat == (("*", policy),)
    check_equal(step, 2e-6)
    given = step.init_from(make_net()), make_batch(0)
    assert "optimization_barrier" in step.lower(*given).as_text()
    _, plain = make_step(f"cpu:{ranks}")
    assert "optimization_barrier" not in plain.lower(*given).as_text()
    if ranks > 1:
        check_exchanges(step)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_products_in_sixteen_bits(ranks: int) -> None:
    plan, step = make_step(f"cpu:{ranks}", precision="bf16")
    assert plan.precisions == (("*", "bf16"),)
    # The ordinary step on as many devices rounds alike; one device rounds other sums.
    precision = {"*": "bf16"}
    check_equal(step, 2e-6, ranks, precision=precision, mesh={"data": ranks})
    check_equal(step, 2e-2, precision=precision)
    state = step.init_from(make_net())
    products = [
        line
        for line in step.lower(state, make_batch(0)).as_text().splitlines()
        if "dot_general" in line
    ]
    assert products and all("xbf16>" in line for line in products)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.tables))
    if ranks > 1:
        check_exchanges(step)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, {"tensor": 2}),
        (4, {"data": 2, "tensor": 2}),
        (4, {"fsdp": 2, "tensor": 2}),
        (8, {"data": 2, "tensor": 4}),
        (8, {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_devices_that_compute_products_together(
    ranks: int, mesh: dict[str, int]
) -> None:
    plan, step = make_step(f"cpu:{ranks}", mesh=mesh)
    specs = {leaf.path: leaf.param_spec for leaf in plan.leaves}
    assert "tensor" in specs["up0"][1] and "tensor" in specs["down0"][0]
    check_equal(step, 2e-6)
    text = check_exchanges(step)
    planned = [
        c for c in plan.collectives if (c.kind, c.what) == ("all-gather", "rows")
    ]
    assert all(each.axes == ("tensor",) for each in planned)
    assert sum(each.count for each in planned) == 2
    assert len(collectives(text)["all-gather"]) >= 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "dense",
    [
        optax.chain(
            optax.masked(
                optax.trace(0.9),
                lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree),
            ),
            optax.scale(-0.01),
        ),
        optax.adafactor(0.01, min_dim_size_to_factor=4),
    ],
    ids=["masked", "adafactor"],
)
@pytest.mark.parametrize("tensor", [1, 2])
def test_states_that_differ_in_shape_from_their_parameters(
    dense: Any, tensor: int
) -> None:
    mesh = {} if tensor == 1 else {"mesh": {"tensor": tensor}}
    _, step = make_step(f"cpu:{tensor}", dense, **mesh)
    check_equal(step, 2e-6, dense=dense)


def test_all_of_it_at_once_and_from_a_file(tmp_path: Path) -> None:
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    plan, step = make_step("cpu:8", mesh=mesh, remat="full", precision="bf16")
    check_equal(step, 2e-2, precision={"*": "bf16"})
    plan.save(tmp_path / "plan.json")
    again = wh.Plan.load(tmp_path / "plan.json")
    assert again == plan and again.remat == (("*", "full"),)
    state = step.init_from(make_net())
    state, _ = step(state, make_batch(0))
    step.save(tmp_path / "saved", state)
    _, other = make_step("cpu:4", remat="dots")
    found = other.table_values(other.restore(tmp_path / "saved"))
    jax.tree.map(np.testing.assert_array_equal, found, step.table_values(state))


def test_beside_processes_with_tables() -> None:
    mesh = {"data": 2, "tensor": 2}
    given: dict[str, Any] = {"in_processes": ["user"], "mesh": mesh, "remat": "dots"}
    _, step = make_step("cpu:2+cpu:4", **given)
    with step:
        check_equal(step, 2e-6)


def test_memory_that_is_short_is_won() -> None:
    """By micro-batches or recomputation, and by neither where there is room."""
    net = {"user": jax.ShapeDtypeStruct((1000, 256), np.float32)}
    for number in range(12):
        net[f"up{number}"] = jax.ShapeDtypeStruct((256, 2048), np.float32)
        net[f"down{number}"] = jax.ShapeDtypeStruct((2048, 256), np.float32)

    def deep(net: Any, batch: Any) -> jax.Array:
        x = net["user"][batch]
        for number in range(12):
            x = x + jnp.tanh(x @ net[f"up{number}"]) @ net[f"down{number}"]
        return jnp.mean(x**2)

    def planned(memory: float, **options: Any) -> wh.Plan:
        machine = wh.cluster("h100:4").with_memory(int(memory))
        batch = jax.ShapeDtypeStruct((65_536,), np.int32)
        given: dict[str, Any] = {"optimizer": OPTIMIZER, "tables": ROWS, **options}
        return wh.plan(deep, net, batch, cluster=machine, **given)

    roomy = planned(80e9)
    assert roomy.remat == () and roomy.num_micro_batches == 1
    room = 0.8 * roomy.memory.total_bytes
    short = planned(room)
    assert short.remat or short.num_micro_batches > 1
    assert short.memory.total_bytes <= room
    whole = planned(room, num_micro_batches=1)
    assert dict(whole.remat)["*"] in ("dots", "full")
    assert planned(room, remat="none").num_micro_batches > 1
    with pytest.raises(wh.WhaleError, match=r"batch of 65,536 samples, lacks"):
        planned(0.01 * roomy.memory.total_bytes)
    # A part of the memory stays free.
    margin = planned(room, margin=0.5).memory.total_bytes
    assert margin <= room / 1.5


class Modal(nnx.Module):
    """A dense part that drops values, and may use statistics of batches."""

    def __init__(self, rngs: nnx.Rngs, *, norm: bool) -> None:
        self.user = nnx.Embed(37, 16, rngs=rngs)
        self.item = nnx.Embed(29, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs) if norm else nnx.tanh
        self.hidden = nnx.Linear(16, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, batch: Any) -> jax.Array:
        x = self.user(batch["user"]) + self.item(batch["items"]).sum(1)
        return self.out(nnx.tanh(self.hidden(self.drop(self.norm(x)))))[:, 0]


def modal_loss(net: Modal, batch: Any) -> jax.Array:
    return jnp.mean((net(batch) - batch["label"]) ** 2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cluster", "options"),
    [
        ("cpu:1", {}),
        ("cpu:4", {}),
        ("cpu:2", {"mesh": {"stage": 2}, "num_micro_batches": 2}),
        ("cpu:1+cpu:2", {"in_processes": ["user.embedding"]}),
    ],
)
def test_an_evaluation_has_the_model_in_evaluation_mode(
    cluster: str, options: dict[str, Any]
) -> None:
    net = Modal(nnx.Rngs(0), norm="mesh" not in options)
    plan = wh.plan(
        *(modal_loss, net, make_batch(0)),
        tables=ROWS,
        optimizer=OPTIMIZER,
        cluster=cluster,
        **options,
    )
    count = int(cluster.rpartition(":")[2])
    compiled: Any = wh.compile(
        plan, modal_loss, net, optimizer=OPTIMIZER, devices=jax.devices()[:count]
    )
    with compiled as step:
        state = step.init_from(net)
        for number in range(2):
            state, _ = step(state, make_batch(number))
        found = float(step.eval(state, make_batch(2))["loss"])
        model = step.model(state)
    model.eval()
    assert found == pytest.approx(float(modal_loss(model, make_batch(2))), rel=2e-6)
    model.train()
    assert found != pytest.approx(float(modal_loss(model, make_batch(2))), rel=1e-2)


def test_arrays_on_devices_have_memory_of_their_own() -> None:
    """Some allocations of NumPy are aligned, so that devices could share them."""
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for _ in range(20):
        array = np.ones(4096, np.float32)
        placed = put_global(array, whole)
        array[:] = 2
        assert float(placed.sum()) == 4096


@pytest.mark.parametrize("tables", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_may_overwrite_its_buffer(ranks: int, *, tables: bool) -> None:
    """What a step reads does not share memory with the batch that it was given."""
    if tables:
        _, step = make_step(f"cpu:{ranks}")
        leaves = step._place_batch(batch := make_batch(0))
    else:
        given: dict[str, Any] = {"optimizer": OPTIMIZER}
        net, batch = make_net(), make_batch(0)
        plan = wh.plan(loss, net, batch, cluster=f"cpu:{ranks}", **given)
        devices = jax.devices()[:ranks]
        step = wh.compile(plan, loss, net, devices=devices, **given)
        leaves = step._layout.place(batch)
    before = jax.tree.map(np.copy, leaves)
    for leaf in jax.tree.leaves(batch):
        leaf[...] = 1
    jax.tree.map(np.testing.assert_array_equal, before, leaves)
