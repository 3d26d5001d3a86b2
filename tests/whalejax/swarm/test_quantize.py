"""Blockwise int8: its error bound, its bytes, and what it refuses from the wire."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from whalejax.meshes.errors import WhaleError
from whalejax.swarm.quantize import (
    LEVELS,
    Quantized,
    dequantize,
    pack,
    packed_bytes,
    quantize,
    unpack,
)


# Rounding of a scale and of a product in float32, in addition to half a level.
ROUNDING = 4 * float(np.finfo(np.float32).eps)
FLOATS = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False)
TENSORS = arrays.arrays(
    np.float32, arrays.array_shapes(max_dims=3, max_side=9), elements=FLOATS
)


@settings(max_examples=200, deadline=None)
@given(TENSORS, st.integers(1, 40))
def test_the_error_is_below_its_bound(values: np.ndarray, block: int) -> None:
    sent = quantize(values, block)
    got = dequantize(unpack(pack(sent), values.shape, block))
    assert got.dtype == np.float32 and got.shape == values.shape
    assert len(pack(sent)) == packed_bytes(values.size, block)
    each = sent.scales * (0.5 + LEVELS * ROUNDING)
    bound = np.repeat(each.astype(np.float64), block)[: values.size]
    error = np.abs(got.astype(np.float64) - values.astype(np.float64)).reshape(-1)
    assert (error <= bound).all()
    largest = np.abs(values).max()
    assert (bound <= max(largest / 254 * 1.001, 1e-38)).all()


@settings(max_examples=50, deadline=None)
@given(TENSORS)
def test_sent_twice_is_sent_once(values: np.ndarray) -> None:
    """Codes of what was decoded are the same codes: relays add no error."""
    sent = quantize(values)
    assert (quantize(dequantize(sent)).codes == sent.codes).all()


def test_large_blocks_of_activations_lose_less_than_one_percent() -> None:
    values = np.random.default_rng(0).normal(size=(64, 1000)).astype(np.float32)
    lost = np.linalg.norm(values - dequantize(quantize(values)))
    assert lost < 0.01 * np.linalg.norm(values)
    assert values.nbytes / len(pack(quantize(values))) > 3.9


def test_traced_arrays_give_what_numpy_gives() -> None:
    values = np.random.default_rng(1).normal(size=(7, 33)).astype(np.float32)

    def there_and_back(x: jax.Array) -> jax.Array:
        return dequantize(quantize(x, 16))

    got = jax.jit(there_and_back)(jnp.asarray(values))
    assert np.allclose(got, dequantize(quantize(values, 16)), rtol=0, atol=1e-6)
    assert jax.jit(there_and_back)(jnp.ones((2, 3), jnp.bfloat16)).dtype == jnp.float32


def test_what_is_not_finite_spoils_its_block_only_where_traced() -> None:
    values = jnp.arange(8.0).at[5].set(jnp.nan)
    got = np.asarray(dequantize(quantize(values, 4)))
    assert np.isfinite(got[:4]).all() and np.isnan(got[4:]).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e300])
def test_what_is_not_finite_is_refused(wrong: float) -> None:
    values = np.array([1.0, wrong, 2.0])
    with pytest.raises(WhaleError, match="1 of 3 values of a tensor .* are not finite"):
        quantize(values)


def test_an_empty_tensor_has_no_bytes() -> None:
    empty = np.zeros((0, 4), np.float32)
    assert pack(quantize(empty)) == b""
    assert dequantize(unpack(b"", (0, 4))).shape == (0, 4)


def packed(scales: list[float], codes: list[int]) -> bytes:
    return np.array(scales, "<f4").tobytes() + np.array(codes, np.int8).tobytes()


@pytest.mark.parametrize(
    ("buffer", "match"),
    [
        (b"", "has 7 bytes; 0 were given"),
        (packed([1.0], [1, 2, 3, 4]), "has 7 bytes; 8 were given"),
        (packed([np.nan], [1, 2, 3]), "not finite and positive"),
        (packed([-1.0], [1, 2, 3]), "not finite and positive"),
        (packed([1.0], [1, -128, 3]), "codes below -127"),
    ],
)
def test_damaged_buffers_are_refused(buffer: bytes, match: str) -> None:
    with pytest.raises(WhaleError, match=match):
        unpack(buffer, (3,), 256)


def test_a_block_holds_values() -> None:
    with pytest.raises(WhaleError, match="block is 0"):
        quantize(np.ones(3, np.float32), 0)


def test_codes_and_scales_are_small() -> None:
    sent = quantize(np.ones((3, 5), np.float32), 4)
    assert isinstance(sent, Quantized)
    assert (sent.codes.dtype, sent.scales.dtype) == (np.int8, np.float32)
    assert (sent.codes.shape, sent.scales.shape) == ((4, 4), (4,))
