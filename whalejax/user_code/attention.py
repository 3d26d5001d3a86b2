"""Attention that is always recognised, for models that write their own.

Any softmax between two products is recognised. A custom kernel, or a kernel of another
library, is not; call this function in its place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_array


@names_arguments("wh.attention")
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    bias: Any = None,
    mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Computes softmax attention in a form that plans can divide.

    On one device, and unless a plan says otherwise, it is
    ``jax.nn.dot_product_attention``. A plan with ring attention computes it in blocks
    of scores. If the sequence is sharded, keys and values go from device to device. A
    row whose keys are all masked gives the mean of all values with every plan; exclude
    such rows from the loss.

    Args:
        query: Array ``[batch, rows, heads, head_dim]``.
        key: Array ``[batch, columns, key_heads, head_dim]``; ``key_heads`` divides
            ``heads`` (grouped-query attention).
        value: Array ``[batch, columns, key_heads, head_dim]``.
        bias: Bias of the scores; broadcasts to ``[batch, heads, rows, columns]``. With
            a trained bias, keys and values are gathered, as its gradient cannot be sent
            round the ring. Default: none.
        mask: Boolean array that broadcasts like the bias; False hides a score. Default:
            none.
        is_causal: Whether no row sees a later column; default False.
        scale: Scale of the scores; default: ``head_dim ** -0.5``.

    Returns:
        Array ``[batch, rows, heads, head_dim]``.

    Raises:
        WhaleError: An argument has a wrong type, or the shapes are incompatible.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 8, 4, 16))
    >>> attention(x, x[:, :, :2], x[:, :, :2], is_causal=True).shape
    (2, 8, 4, 16)
    """
    _check(query, key, value, bias, mask)
    problems = Arguments("wh.attention")
    problems.switch("is_causal", is_causal)
    given: Any = scale
    single = is_array(given) and given.shape == ()
    if not (single and jnp.issubdtype(given.dtype, np.number)):
        problems.number("scale", scale, none=True)
    problems.raise_if_any()
    if isinstance(scale, int):
        scale = float(scale)  # Of integers, JAX accepts those of up to 64 bits.
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        implementation="xla",
    )


def _check(query: Any, key: Any, value: Any, bias: Any, mask: Any) -> None:
    problems = Arguments("wh.attention")
    for name, array in (("query", query), ("key", key), ("value", value)):
        if not _is_floating(array):
            problems.refuse(name, array, "an array of floating-point numbers")
    for name, array in (("bias", bias), ("mask", mask)):
        if array is not None and not is_array(array):
            problems.refuse(name, array, "an array, or None")
    problems.raise_if_any()
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape}
    for name, shape in shapes.items():
        if len(shape) != 4:
            problems.add(
                f"{name} has shape {tuple(shape)}; expected four dimensions, "
                "[batch, sequence, heads, head_dim]"
            )
    problems.raise_if_any()
    (batch, rows, heads, depth) = query.shape
    columns, shared = key.shape[1], key.shape[2]
    if key.shape != (batch, columns, shared, depth):
        problems.add(
            f"key has shape {tuple(key.shape)} beside query {tuple(query.shape)}; "
            f"expected [{batch}, columns, key_heads, {depth}]"
        )
    if value.shape != key.shape:
        problems.add(
            f"value has shape {tuple(value.shape)}; expected that of key, "
            f"{tuple(key.shape)}"
        )
    if heads % shared:
        problems.add(
            f"query has {heads} heads and key {shared}, which does not divide {heads}; "
            "every head of key serves the same number of heads of query"
        )
    whole = (batch, heads, rows, columns)
    for name, array in (("bias", bias), ("mask", mask)):
        shape = () if array is None else tuple(array.shape)
        fits = len(shape) == 4 and all(
            n in (1, m) for n, m in zip(shape, whole, strict=True)
        )
        if array is not None and not fits:
            problems.add(
                f"{name} has shape {shape}; expected one that broadcasts to "
                f"[batch, heads, rows, columns] = {whole}"
            )
    if mask is not None and mask.dtype != bool:
        problems.add(
            f"mask is {mask.dtype}; expected bool, False where a score is hidden. What "
            "is to be added to the scores is bias="
        )
    problems.raise_if_any()


def _is_floating(array: Any) -> bool:
    return is_array(array) and jnp.issubdtype(array.dtype, np.floating)
