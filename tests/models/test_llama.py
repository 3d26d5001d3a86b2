"""Llama: its sizes are the published ones, and its parts do what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.test_sizes import nnx_count
from whalejax.models import llama, moe


# Counts of the released checkpoints.
@pytest.mark.parametrize(
    ("size", "published"),
    [("7b", 6_738_415_616), ("70b", 68_976_648_192), ("405b", 405_853_388_800)],
)
def test_sizes_are_the_published_ones(size: str, published: int) -> None:
    job = llama.job(size)
    assert nnx_count(lambda: job.make_model(jax.random.key(0))) == published


def test_a_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    random = np.random.default_rng(0)
    query, key = random.normal(size=(2, 1, 1, 1, 8)).astype("float32")
    many = [jnp.broadcast_to(jnp.asarray(v), (1, 6, 1, 8)) for v in (query, key)]
    turned, other = (llama.rotated(v, 100.0) for v in many)
    np.testing.assert_allclose(
        jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(many[0], axis=-1), rtol=1e-5
    )
    scores = np.asarray(jnp.einsum("bqhd,bkhd->qk", turned, other))
    for shift in range(1, 5):
        np.testing.assert_allclose(
            np.diagonal(scores, shift), scores[0, shift], rtol=1e-4
        )


def stack(blocks: list[nnx.Module]) -> nnx.State:
    """The states of equal blocks as one with a leading dimension."""
    states = [nnx.state(block) for block in blocks]
    found: nnx.State = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
    return found


def test_scanned_layers_give_the_same_loss() -> None:
    job = llama.job("test", scan_layers=False)
    plain = nnx.jit(job.make_model)(jax.random.key(0))
    scanned = nnx.jit(llama.job("test").make_model)(jax.random.key(1))
    for name in ("tokens", "norm", "head"):
        nnx.update(getattr(scanned, name), nnx.state(getattr(plain, name)))
    nnx.update(scanned.blocks, stack(list(plain.blocks)))
    batch, loss = job.batch_at(0, 4), nnx.jit(job.loss_fn)
    np.testing.assert_allclose(loss(scanned, batch), loss(plain, batch), rtol=1e-5)


@pytest.mark.full
def test_scanned_experts_give_the_same_loss_and_load() -> None:
    job = moe.job("test", logical_names=False)
    plain = job.make_model(jax.random.key(0))
    options = moe.job("test", logical_names=False, scan_layers=True)
    scanned = options.make_model(jax.random.key(1))
    for name in ("tokens", "norm", "head"):
        nnx.update(getattr(scanned, name), nnx.state(getattr(plain, name)))
    scanned.positions[...] = plain.positions[...]
    nnx.update(scanned.blocks, stack(list(plain.blocks)))
    batch = job.batch_at(0, 4)
    one, two = job.loss_fn(plain, batch), options.loss_fn(scanned, batch)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5)
    for name in ("aux", "dropped"):
        np.testing.assert_allclose(two[1][name], one[1][name], rtol=1e-5)
