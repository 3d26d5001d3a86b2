"""Steps with embedding tables against one device, and what their programs hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import whalejax as wh
from whalejax.runtime.table_step import TableStep
from whalejax.tables import scatter_check
from whalejax.tables.layout import make_layout
from whalejax.tables.scatter_check import wrong_sums
from whalejax.tables.tables_plan import TablesPlan


SAMPLES: Final = 32
ROWS: Final = {"user": (37, 16), "item": (11, 32), "tag": (3, 16), "word": (29, 48)}
PINS: Final = {"user": "rows", "item": "columns", "word": "whole"}


def loss(net: Any, batch: Any) -> jax.Array:
    """Two lookups of one table, a masked bag, one of many ids, and words one by one."""
    users = net["user"][batch["user"]] - net["user"][batch["friend"]]
    bag = jnp.where(batch["present"][..., None], net["item"][batch["items"]], 0).sum(1)
    tags = jnp.take(net["tag"], batch["tags"], axis=0).sum(1)
    words = net["word"][batch["words"]]
    score = jnp.einsum("ntw,wk->nk", jnp.tanh(words), net["mix"])
    x = jnp.concatenate([users * tags, bag, score], axis=1)
    hidden = jnp.tanh(x @ net["w"])
    return jnp.mean((hidden.sum(1) - batch["label"]) ** 2)


def make_net(dtype: Any) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    shapes = {**ROWS, "mix": (48, 5), "w": (53, 6)}
    return {
        name: jnp.asarray(random.standard_normal(shape) * 0.3, dtype)
        for name, shape in shapes.items()
    }


def make_batch(step: int, dtype: Any) -> dict[str, np.ndarray]:
    """Ids with duplicates in and across samples, and bags of which some are empty."""
    random = np.random.default_rng(step + 1)
    users = np.minimum(random.geometric(0.2, SAMPLES) - 1, 36).astype(np.int32)
    return {
        "user": users,
        "friend": random.permutation(users),
        "items": random.integers(0, 11, (SAMPLES, 4)).astype(np.int32),
        "present": random.random((SAMPLES, 4)) < random.integers(0, 2, (SAMPLES, 1)),
        "tags": random.integers(0, 3, (SAMPLES, 3)).astype(np.int32),
        "words": random.integers(0, 29, (SAMPLES, 2)).astype(np.int32),
        "label": random.standard_normal(SAMPLES).astype(dtype),
    }


def touched(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    items = batch["items"][batch["present"]]
    return {
        "user": np.unique([batch["user"], batch["friend"]]),
        "item": np.unique(items),
        "tag": np.unique(batch["tags"]),
        "word": np.unique(batch["words"]),
    }


class OneDevice:
    """The same training on one device, rows by the printed formulas."""

    def __init__(self, kind: str, rate: float, net: Any) -> None:
        self.kind, self.rate = kind, rate
        self.net = {name: np.asarray(x) for name, x in net.items()}
        self.dense = optax.sgd(0.01, momentum=0.9)
        self.opt_state = self.dense.init(self._others(self.net))
        zeros = {name: np.zeros_like(self.net[name]) for name in ROWS}
        self.first = {
            n: z + (0.1 if "adagrad" in kind else 0) for n, z in zeros.items()
        }
        if kind == "row_adagrad":
            self.first = {n: x[:, :1] for n, x in self.first.items()}
        self.second = {name: z.copy() for name, z in zeros.items()}
        self.steps = 0

    def _others(self, net: Any) -> dict[str, Any]:
        return {name: x for name, x in net.items() if name not in ROWS}

    def step(self, batch: Any, tables: Any = None) -> tuple[float, Any]:
        """One step, whose lookups read other tables than are updated, if given."""
        read = {**self.net, **(tables or {})}
        value, gradients = jax.value_and_grad(loss)(
            {name: jnp.asarray(x) for name, x in read.items()}, batch
        )
        others = self._others(self.net)
        updates, self.opt_state = self.dense.update(
            self._others(gradients), self.opt_state, others
        )
        self.steps += 1
        changed = {
            name: self._rows(name, rows, np.asarray(gradients[name]))
            for name, rows in touched(batch).items()
        }
        new = optax.apply_updates(others, updates)
        self.net = self.net | changed | {name: np.asarray(x) for name, x in new.items()}
        return float(value), gradients

    def _rows(self, name: str, rows: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        table, g = self.net[name].copy(), gradient[rows]
        if self.kind == "sgd":
            table[rows] -= self.rate * g
        elif self.kind == "adagrad":
            self.first[name][rows] += g * g
            table[rows] -= self.rate * g / np.sqrt(self.first[name][rows] + 1e-7)
        elif self.kind == "row_adagrad":
            self.first[name][rows] += (g * g).mean(1, keepdims=True)
            table[rows] -= self.rate * g / (np.sqrt(self.first[name][rows]) + 1e-8)
        else:
            mu, nu = self.first[name], self.second[name]
            mu[rows] = 0.9 * mu[rows] + 0.1 * g
            nu[rows] = 0.999 * nu[rows] + 0.001 * g * g
            kind = table.dtype.type  # float32 rounds 1 - 0.999 in its fifth digit
            mean = mu[rows] / (1 - kind(0.9) ** kind(self.steps))
            root = np.sqrt(nu[rows] / (1 - kind(0.999) ** kind(self.steps))) + 1e-8
            table[rows] -= self.rate * mean / root
        return table


def make_step(
    ranks: int, kind: str, dtype: Any = np.float32, **options: Any
) -> tuple[TablesPlan, TableStep, Any]:
    net = make_net(dtype)
    chosen: dict[str, Any] = {"pins": PINS, **options}
    if kind == "row_adagrad":
        chosen["pins"] = {**chosen["pins"], "item": "rows"}
    optimizer = optax.sgd(0.01, momentum=0.9)
    plan = wh.plan_tables(
        loss,
        net,
        make_batch(0, dtype),
        rows=wh.sparse_optimizer(kind, 0.1),  # type: ignore[arg-type]
        optimizer=optimizer,
        cluster=f"cpu:{ranks}",
        **chosen,
    )
    step = wh.compile_tables(
        plan, loss, net, optimizer=optimizer, devices=jax.devices()[:ranks]
    )
    return plan, step, net


def check_equal(
    ranks: int, kind: str, dtype: Any, limit: float, **options: Any
) -> None:
    _, step, net = make_step(ranks, kind, dtype, **options)
    state, one = step.init_from(net), OneDevice(kind, 0.1, net)
    for number in range(4):
        batch = make_batch(number, dtype)
        expected, _ = one.step(batch)
        state, metrics = step(state, batch)
        assert abs(float(metrics["loss"]) - expected) <= limit * max(1, abs(expected))
    model = step.model(state)
    for name, value in one.net.items():
        found = np.asarray(model[name])
        assert found.dtype == dtype
        np.testing.assert_allclose(found, value, rtol=0, atol=4 * limit)
    for name, states in step.row_states(state).items():
        if "sum_of_squares" in states:
            np.testing.assert_allclose(
                states["sum_of_squares"], one.first[name], rtol=4 * limit, atol=limit
            )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.smoke), 8])
def test_steps_are_those_of_one_device(ranks: int) -> None:
    check_equal(ranks, "adagrad", np.float32, 1e-6)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["sgd", "row_adagrad", "lazy_adam"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_optimizer_is_that_of_one_device(ranks: int, kind: str) -> None:
    check_equal(ranks, kind, np.float32, 1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["adagrad", "lazy_adam", "row_adagrad"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_float64_to_the_last_digits(ranks: int, kind: str) -> None:
    with jax.enable_x64(True):
        check_equal(ranks, kind, np.float64, 1e-13)


def test_dense_parameters_may_be_sharded() -> None:
    check_equal(8, "adagrad", np.float32, 1e-6, mesh={"data": 2, "fsdp": 4})


def test_a_placement_of_the_planner_is_equal_too() -> None:
    check_equal(8, "adagrad", np.float32, 1e-6, pins={})


def collectives(text: str) -> dict[str, list[str]]:
    """Lines of each kind of collective in a compiled program."""
    found: dict[str, list[str]] = {}
    kinds = "all-to-all|all-reduce|all-gather|reduce-scatter|collective-permute"
    for line in text.splitlines():
        if (match := re.search(rf"= .*? ({kinds})(?:-start)?\(", line)) is not None:
            found.setdefault(match[1], []).append(line)
    return found


@pytest.mark.parametrize("ranks", [4, 8])
def test_two_exchanges_of_vectors_and_one_of_ids(ranks: int) -> None:
    _, step, net = make_step(ranks, "adagrad")
    check_exchanges(step, step.init_from(net), make_batch(0, np.float32), SAMPLES)


def check_exchanges(step: TableStep, state: Any, batch: Any, samples: int) -> None:
    """All-to-alls of a compiled step, and their bytes to the byte."""
    text = step.lower(state, batch).compile().as_text()
    found, layout = collectives(text), step.programs.layout
    assert set(found) == {"all-to-all", "all-reduce"}
    sent: dict[str, list[int]] = {"f32": [], "s32": []}
    for line in found["all-to-all"]:
        result = line.partition("all-to-all(")[0]
        parts = re.findall(r"(f32|s32)\[([\d,]+)\]", result)
        sizes = [np.prod([int(n) for n in part.split(",")]) for _, part in parts]
        assert len(sizes) == layout.ranks and len(set(sizes)) == 1
        total = layout.ranks * (layout.ranks - 1) * int(sizes[0]) * 4
        sent[parts[0][0]].append(total)
    there, back = (
        layout.exchanged_bytes(samples, 4, backward=b) for b in (False, True)
    )
    assert sorted(sent["f32"]) == sorted([there, back])
    ids = layout.id_bytes(samples)
    assert sent["s32"] == ([ids] if ids else [])


def test_a_whole_table_a_rank_exchanges_what_the_paper_says() -> None:
    def pooled(net: Any, batch: Any) -> jax.Array:
        vectors = [net[name][batch[name]].sum(1) for name in sorted(batch)]
        return jnp.mean(sum(vectors) ** 2)  # type: ignore[operator]

    names = [f"t{i}" for i in range(8)]
    net = {name: jnp.ones((50, 16)) for name in names}
    batch = {name: np.zeros((64, 3), np.int32) for name in names}
    plan = wh.plan_tables(
        pooled,
        net,
        batch,
        rows=wh.sparse_optimizer("sgd", 0.1),
        cluster="cpu:4",
        splits=("whole",),
    )
    step = wh.compile_tables(plan, pooled, net, devices=jax.devices()[:4])
    # q · E · T · N · (R - 1) / R over all ranks: arXiv:1906.00091.
    expected = 4 * 16 * 8 * 64 * 3 // 4
    assert step.programs.layout.exchanged_bytes(64, 4) == expected


def test_temporaries_do_not_grow_with_tables() -> None:
    def temporaries(rows: int) -> int:
        def loss(net: Any, batch: Any) -> jax.Array:
            both = net["a"][batch["a"]] * net["b"][batch["b"]].sum(1)
            return jnp.mean(jnp.tanh(both @ net["w"]))

        net = {
            "a": jnp.zeros((rows, 16)),
            "b": jnp.zeros((2 * rows, 16)),
            "w": jnp.ones((16, 4)),
        }
        batch = {"a": np.zeros(64, np.int32), "b": np.zeros((64, 5), np.int32)}
        optimizer = optax.sgd(0.1)
        plan = wh.plan_tables(
            loss,
            net,
            batch,
            rows=wh.sparse_optimizer("adagrad", 0.1),
            optimizer=optimizer,
            cluster="cpu:4",
            pins={"a": "whole", "b": "rows"},
        )
        step = wh.compile_tables(
            plan, loss, net, optimizer=optimizer, devices=jax.devices()[:4]
        )
        compiled = step.lower(step.init_from(net), batch).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes > 0.9 * memory.output_size_in_bytes
        return int(memory.temp_size_in_bytes)

    assert temporaries(40_000) <= 1.02 * temporaries(4_000)


def test_ids_out_of_range_are_refused_by_name() -> None:
    plan, step, net = make_step(4, "sgd")
    state, batch = step.init_from(net), make_batch(0, np.float32)
    batch["user"][3] = 37
    batch["words"][0, 1] = -60
    with pytest.raises(wh.WhaleError) as error:
        step(state, batch)
    assert "user has the id 37, and user has 37 rows" in str(error.value)
    assert "words has the id -60 (-31 if the loss" in str(error.value)
    clipped = wh.compile_tables(
        plan,
        loss,
        net,
        optimizer=optax.sgd(0.01, momentum=0.9),
        out_of_range="clip",
        devices=jax.devices()[:4],
    )
    _, metrics = clipped(clipped.init_from(net), batch)
    batch["user"][3], batch["words"][0, 1] = 36, 0
    assert float(metrics["loss"]) == float(step(state, batch)[1]["loss"])


def test_masked_ids_may_be_anything() -> None:
    _, step, net = make_step(4, "sgd")
    state, batch = step.init_from(net), make_batch(0, np.float32)
    expected = float(step.eval(state, batch)["loss"])
    batch["items"] = np.where(batch["present"], batch["items"], 999)
    assert float(step.eval(state, batch)["loss"]) == expected


def test_a_state_is_consumed_and_evaluation_keeps_it() -> None:
    _, step, net = make_step(2, "sgd")
    state, batch = step.init_from(net), make_batch(0, np.float32)
    value = float(step.eval(state, batch)["loss"])
    new, metrics = step(state, batch)
    assert float(metrics["loss"]) == value and int(new.step) == 1
    with pytest.raises(wh.WhaleError, match="was donated to a step"):
        step(state, batch)


def test_another_batch_or_model_is_refused() -> None:
    plan, step, net = make_step(2, "sgd")
    batch = make_batch(0, np.float32)
    state = step.init_from(net)
    with pytest.raises(
        wh.WhaleError, match=r"user is int32\[4\]; expected int32\[32\]"
    ):
        step(state, {**batch, "user": batch["user"][:4]})
    with pytest.raises(wh.WhaleError, match=r"user is float32\[32\]; expected int32"):
        step(state, {**batch, "user": batch["user"].astype(np.float32)})
    with pytest.raises(wh.WhaleError, match="Plan again for another batch"):
        step(state, {"user": batch["user"]})
    other = {**net, "user": jnp.zeros((38, 16))}
    with pytest.raises(wh.PlanError, match=r"user has the shape \(38, 16\)"):
        wh.compile_tables(plan, loss, other, devices=jax.devices()[:2])
    with pytest.raises(wh.WhaleError, match="divide"):
        wh.plan_tables(
            loss,
            net,
            {name: leaf[:30] for name, leaf in batch.items()},
            rows=wh.sparse_optimizer("sgd", 0.1),
            cluster="cpu:4",
        )


def test_compilers_that_sum_repeated_rows_wrongly_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, step, net = make_step(2, "sgd")
    wrong, of_all = wrong_sums(step.mesh)
    assert wrong == 0 and of_all > 1000
    optimizer = optax.sgd(0.01, momentum=0.9)
    given: Any = {"optimizer": optimizer, "devices": jax.devices()[:2]}

    def lossy(by_rows: Any, table: Any, ids: Any, gradients: Any) -> Any:
        return scatter_check_sum(by_rows, table, ids[:1], gradients[:1])

    scatter_check_sum = scatter_check._accumulate
    monkeypatch.setattr(scatter_check, "_accumulate", lossy)
    wrong_sums.cache_clear()
    with pytest.raises(wh.WhaleError, match="sums gradients of repeated rows wrongly"):
        wh.compile_tables(plan, loss, net, **given)
    wrong_sums.cache_clear()
    wh.compile_tables(plan, loss, net, devices=jax.devices()[:2])


def test_the_same_placement_serves_evaluation() -> None:
    """A step without an optimizer reads what a trained one wrote."""
    plan, step, net = make_step(4, "adagrad")
    state = step.init_from(net)
    batch = make_batch(0, np.float32)
    state, _ = step(state, batch)
    serving = wh.compile_tables(plan, loss, net, devices=jax.devices()[:4])
    held = serving.init_from(step.model(state))
    found = float(serving.eval(held, batch)["loss"])
    assert found == pytest.approx(float(step.eval(state, batch)["loss"]), rel=1e-6)
    assert serving.plan.placement.shards == step.plan.placement.shards
    with pytest.raises(wh.WhaleError, match="can only evaluate"):
        serving(held, batch)


def test_a_model_without_tables_is_refused() -> None:
    def tied(net: Any, batch: Any) -> jax.Array:
        return jnp.mean(net["user"][batch["ids"]] @ net["user"].T)

    batch = {"ids": np.zeros(8, np.int32)}
    net = {"user": jnp.ones((5, 4))}
    with pytest.raises(wh.PlanError, match="no table: user is also read by"):
        wh.plan_tables(
            tied, net, batch, rows=wh.sparse_optimizer("sgd", 0.1), cluster="cpu:2"
        )


def test_lookups_are_counted() -> None:
    net = make_net(np.float32)
    batches = [make_batch(number, np.float32) for number in range(3)]
    counts = wh.count_lookups(loss, net, batches)
    assert counts["user"].sum() == 2 * 3 * SAMPLES
    items = np.concatenate([b["items"][b["present"]] for b in batches])
    assert (counts["item"] == np.bincount(items, minlength=11)).all()
    plan, _, _ = make_step(4, "sgd", counts=counts)
    assert plan.why("user").startswith("user: 37 rows × 16")
    batches[1]["tags"][0, 0] = 3
    with pytest.raises(wh.WhaleError, match="tags has the ids 0 to 3, and tag has 3"):
        wh.count_lookups(loss, net, batches)


@pytest.mark.parametrize("mesh", [None, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_module_with_dropout_and_statistics_trains_as_in_one_program(
    mesh: Any,
) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.table = nnx.Embed(23, 16, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.out = nnx.Linear(16, 1, rngs=rngs)

        def __call__(self, batch: Any) -> jax.Array:
            x = self.table(batch["words"]).sum(1)
            return self.out(self.drop(self.norm(x)))[:, 0]

    def loss(net: Net, batch: Any, rng: Any) -> Any:
        noise = jax.random.normal(rng, (SAMPLES,))
        error = net(batch) + noise - batch["label"]
        return jnp.mean(error**2), {"largest": jnp.max(error)}

    batches = [
        {k: b[k] % 23 if k == "words" else b[k] for k in ("words", "label")}
        for b in (make_batch(n, np.float32) for n in range(3))
    ]
    optimizer, rows = optax.sgd(0.05), wh.sparse_optimizer("sgd", 0.05)
    given: Any = {"rows": rows, "optimizer": optimizer, "mesh": mesh}
    plan = wh.plan_tables(loss, Net(), batches[0], cluster="cpu:8", **given)
    step = wh.compile_tables(plan, loss, Net(), optimizer=optimizer)
    whole = wh.plan(loss, Net(), batches[0], optimizer=optimizer, cluster="cpu:1")
    one = wh.compile(whole, loss, Net(), optimizer=optimizer, devices=jax.devices()[:1])
    key = jax.random.key(7)
    states = step.init_from(Net(), rng=key), one.init_from(Net(), rng=key)
    for batch in batches:
        left, found = step(states[0], batch)
        right, expected = one(states[1], batch)
        states = left, right
        for name in ("loss", "largest"):
            assert float(found[name]) == pytest.approx(float(expected[name]), rel=1e-5)
    models = step.model(states[0]), states[1].model
    left, right = (nnx.state(m, (nnx.Param, nnx.BatchStat)) for m in models)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), left, right)


def test_a_model_of_tables_alone_is_trained() -> None:
    def norms(net: Any, batch: Any) -> jax.Array:
        return jnp.mean(net["user"][batch["user"]] ** 2)

    net, batch = {"user": make_net(np.float32)["user"]}, make_batch(0, np.float32)
    ids = {"user": batch["user"]}
    given: Any = {"optimizer": optax.sgd(0.5)}
    rows = wh.sparse_optimizer("sgd", 0.5)
    plan = wh.plan_tables(norms, net, ids, rows=rows, cluster="cpu:4", **given)
    step = wh.compile_tables(plan, norms, net, devices=jax.devices()[:4], **given)
    state, table = step.init_from(net), net
    for _ in range(3):
        value, gradient = jax.value_and_grad(norms)(table, ids)
        table = jax.tree.map(lambda x, g: x - 0.5 * g, table, gradient)
        state, metrics = step(state, ids)
        assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-5)


def test_a_step_gives_the_same_bits_again() -> None:
    _, step, net = make_step(8, "adagrad")
    found = []
    for _ in range(2):
        state = step.init_from(net)
        for number in range(3):
            state, _ = step(state, make_batch(number, np.float32))
        found.append(step.table_values(state))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_state_is_born_without_a_model() -> None:
    plan, step, _ = make_step(4, "adagrad")

    def make_model(key: Any) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 6)
        shapes = {**ROWS, "mix": (48, 5), "w": (53, 6)}
        return {
            name: jax.random.normal(one, shape) / 3
            for one, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    key = jax.random.key(3)
    state, model = step.init(make_model, rng=key), make_model(key)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        step.model(state),
        model,
    )
    for states in step.row_states(state).values():
        assert (states["sum_of_squares"] == np.float32(0.1)).all()
    _, metrics = step(state, make_batch(0, np.float32))
    expected = loss(model, make_batch(0, np.float32))
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(wh.WhaleError, match="make_model"):
        step.init(None, rng=key)  # type: ignore[arg-type]
    assert plan.tables == ("item", "tag", "user", "word")


def test_tables_of_two_types_are_refused() -> None:
    net = make_net(np.float32)
    net["word"] = net["word"].astype(jnp.bfloat16)

    def sums(net: Any, batch: Any) -> jax.Array:
        words = net["word"][batch["words"]].astype(jnp.float32)
        return words.sum() + net["user"][batch["user"]].sum()

    with pytest.raises(wh.WhaleError, match="types bfloat16, float32; expected one"):
        wh.plan_tables(
            sums,
            net,
            make_batch(0, np.float32),
            rows=wh.sparse_optimizer("sgd", 0.1),
            cluster="cpu:2",
        )


def history_loss(net: Any, batch: Any) -> jax.Array:
    """Histories that are looked up one by one, and a bag of the same table."""
    events = net["item"][batch["history"]] + net["shop"][batch["shops"]]
    bag = net["item"][batch["bag"]].sum(1) + net["user"][batch["user"]]
    x = jnp.tanh(events).sum(1) * bag
    return jnp.mean(((x @ net["w"]).sum(1) - batch["label"]) ** 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["adagrad", "lazy_adam"])
def test_rows_that_many_samples_need_are_exchanged_once(kind: str) -> None:
    """Tables with fewer rows than a device looks up, in every way of storing them."""
    random = np.random.default_rng(0)
    sizes = {"item": (21, 32), "shop": (9, 32), "user": (300, 32)}
    net = {
        name: jnp.asarray(random.standard_normal(shape) * 0.1, jnp.float32)
        for name, shape in {**sizes, "w": (32, 4)}.items()
    }

    def make(number: int) -> dict[str, np.ndarray]:
        own = np.random.default_rng(number)
        shapes = {"history": (32, 12), "shops": (32, 12), "bag": (32, 3), "user": (32,)}
        rows = {"history": 17, "shops": 9, "bag": 21, "user": 300}  # 4 are not read
        ids = {k: own.integers(0, rows[k], shapes[k]).astype(np.int32) for k in rows}
        return {**ids, "label": own.standard_normal(32).astype(np.float32)}

    rows = wh.sparse_optimizer(kind, 0.1)  # type: ignore[arg-type]
    given: Any = {"optimizer": optax.sgd(0.01)}
    losses, tables = [], []
    for ranks, pins in (
        (1, {}),
        (4, {"item": "rows", "shop": "columns"}),
        (4, {"item": "columns", "shop": "whole", "user": "rows"}),
        (8, {"item": 3, "shop": "rows"}),
    ):
        plan = wh.plan_tables(
            *(history_loss, net, make(0)),
            rows=rows,
            cluster=f"cpu:{ranks}",
            pins=pins,
            **given,
        )
        step = wh.compile_tables(
            *(plan, history_loss, net), devices=jax.devices()[:ranks], **given
        )
        layout = step.programs.layout
        if ranks > 1:
            assert {"item", "shop"} >= set(layout.gathered) >= {"shop"}
            plain = make_layout(
                plan.placement, step.programs.program.lookups, step.programs.names
            )
            less, more = (x.exchanged_bytes(32, 4) for x in (layout, plain))
            assert 2 * less < more
            check_exchanges(step, step.init_from(net), make(0), 32)
        state = step.init_from(net)
        found = []
        for number in range(3):
            state, metrics = step(state, make(number))
            found.append(float(metrics["loss"]))
        losses.append(found)
        tables.append(step.table_values(state))
    for found, held in zip(losses[1:], tables[1:], strict=True):
        np.testing.assert_allclose(found, losses[0], rtol=2e-6)
        for name, table in held.items():
            # Adam divides what is nearly zero by itself.
            limit = 1e-4 if kind == "lazy_adam" else 2e-6
            np.testing.assert_allclose(table, tables[0][name], rtol=0, atol=limit)
        read = np.unique([make(number)["user"] for number in range(3)])
        others = np.delete(held["user"], read, axis=0)
        assert np.array_equal(others, np.delete(np.asarray(net["user"]), read, axis=0))
