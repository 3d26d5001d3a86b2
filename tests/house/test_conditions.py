"""The conditions that tests/conftest.py promises to every other test."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import pytest


@pytest.mark.smoke
def test_there_are_eight_devices() -> None:
    assert jax.device_count() == 8


@pytest.mark.smoke
def test_rank_promotion_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank_promotion='raise'"):
        _ = jnp.ones(3) + jnp.ones((2, 3))


@pytest.mark.smoke
def test_dtype_promotion_is_an_error() -> None:
    with pytest.raises(jax.dtypes.TypePromotionError):
        _ = jnp.ones(3, jnp.float32) + jnp.ones(3, jnp.int32)


@pytest.mark.relaxed_promotion
def test_promotion_can_be_relaxed() -> None:
    summed = jnp.ones(3, jnp.float32) + jnp.ones((2, 3), jnp.int32)
    assert summed.shape == (2, 3)


def test_a_warning_is_an_error() -> None:
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)
