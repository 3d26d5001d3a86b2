"""What is counted of an optimizer: its state's bytes, slow operations of its update."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax import jobs, models
from whalejax.adapters.base import adapt
from whalejax.lowering.optimizer_state import optimizer_bytes, updates
from whalejax.meshes.device_kinds import Platform


PARAMS = {"wide": {"kernel": jnp.ones((8, 16))}, "bias": jnp.ones((4,))}
IS_WIDE = {"wide": {"kernel": True}, "bias": False}


MANY = {f"layer_{i}": {"kernel": jnp.ones((8, 16))} for i in range(200)}


def loss_fn(params: dict[str, Any], batch: jax.Array) -> jax.Array:
    """Any."""
    return jnp.sum(batch @ params["wide"]["kernel"]) + jnp.sum(params["bias"])


def layered(params: Any, batch: jax.Array) -> jax.Array:
    """Of ``MANY``."""
    parts = [jnp.sum(batch @ layer["kernel"]) for layer in params.values()]
    return jnp.sum(jnp.stack(parts))


def counted(
    optimizer: optax.GradientTransformation, platform: Platform = "cpu"
) -> float:
    """Slow operations for each element of a parameter."""
    found = optimizer_bytes(adapt(PARAMS, loss_fn), optimizer, platform)
    return round(found.operations, 1)  # scalars, such as powers of decays, aside


def test_sgd_divides_nothing() -> None:
    assert counted(optax.sgd(0.1, momentum=0.9)) == 0


def test_adam_takes_a_root_and_divides_three_times() -> None:
    assert counted(optax.adam(0.1)) == 4


def test_what_wraps_an_optimizer_counts() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    assert counted(clipped) == 5
    # Skipped or not, it has to be paid for.
    assert counted(optax.apply_if_finite(optax.adam(0.1), 3)) == 4


def test_masks_that_are_trees() -> None:
    assert counted(optax.masked(optax.adam(0.1), IS_WIDE)) == 3.9  # of the bias none


def test_only_cpus_take_time_for_them() -> None:
    assert counted(optax.adam(0.1), "gpu") == 0


@pytest.mark.parametrize("error", [ValueError, ZeroDivisionError, OSError])
def test_nothing_is_counted_of_one_that_cannot_be_called(
    error: type[Exception],
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error("no update")

    broken = optax.GradientTransformation(optax.adam(0.1).init, fails)
    assert counted(broken) == 0


def test_layers_may_be_trained_unlike() -> None:
    def label(params: Any) -> Any:
        low = {f"layer_{i}" for i in range(100)}
        return {name: "still" if name in low else "adam" for name in params}

    kinds: dict[Any, Any] = {"still": optax.set_to_zero(), "adam": optax.adam(0.1)}
    optimizer = optax.multi_transform(kinds, label)
    assert (
        round(optimizer_bytes(adapt(MANY, layered), optimizer, "cpu").operations) == 2
    )


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (optax.lbfgs(), "missing 2 required keyword-only"),
        (optax.contrib.sophia(0.1), "obj_fn must be provided"),
    ],
)
def test_one_that_wants_more_than_a_step_has_is_refused(
    optimizer: optax.GradientTransformation, text: str, platform: Platform
) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        counted(optimizer, platform)


def test_a_reference_model() -> None:
    job = models.job("gpt-test")
    adapter = adapt(jobs.abstract_model(job), job.loss_fn)
    found = optimizer_bytes(adapter, job.optimizer, "cpu")
    assert 4 <= found.operations <= 6


def test_masks_that_are_functions_count_what_the_same_trees_do() -> None:
    def only_wide(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[0].key == "wide", params
        )

    assert counted(optax.masked(optax.adam(0.1), only_wide)) == 3.9


def test_every_turn_of_a_scan_counts() -> None:
    adam: Any = optax.adam(0.1)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        def one(count: jax.Array, _: None) -> tuple[jax.Array, None]:
            return count / 2, None

        turned, _ = jax.lax.scan(one, params["wide"]["kernel"], length=10)
        found, state = adam.update(updates, state, params)
        found["wide"]["kernel"] += turned
        return found, state

    # Ten for each of the 128 elements of the kernel, none for the four of the bias.
    assert counted(optax.GradientTransformation(adam.init, update)) == 13.7


@pytest.mark.parametrize(("platform", "layers"), [("cpu", 200), ("gpu", 1)])
def test_of_many_layers_one_is_traced_where_none_is_counted(
    platform: Platform, layers: int
) -> None:
    seen: list[int] = []
    adam = optax.adam(0.1)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.append(len(jax.tree.leaves(updates)))
        return adam.update(updates, state, params)

    optimizer = optax.GradientTransformation(adam.init, update)
    found = optimizer_bytes(adapt(MANY, layered), optimizer, platform)
    assert round(found.operations, 1) == (4 if platform == "cpu" else 0)
    assert seen == [layers]


@pytest.mark.relaxed_promotion  # optax promotes in it
def test_an_optimizer_that_takes_no_loss() -> None:
    inner: Any = optax.contrib.sam(
        optax.sgd(0.1), optax.sgd(0.01), sync_period=2, opaque_mode=False
    )
    for optimizer in (inner, optax.chain(optax.clip_by_global_norm(1.0), inner)):
        state, gradients = optimizer.init(PARAMS), PARAMS
        found = updates(optimizer, gradients, state, PARAMS, jnp.float32(1.0))
        wanted = optimizer.update(gradients, state, PARAMS)
        chex.assert_trees_all_equal(found, wanted)
