"""Rematerialization policies: which products of a layer the backward pass repeats.

It is separate from ``frameworks``, which has their defaults: both time and memory read
this module, so that a policy is one line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from whalejax.estimates.decoder import DecoderSizes


Remat = Literal[
    "none",
    "selective",
    "dots",
    "alternate_dots",
    "save_dot_with_context_except_mlp",
    "save_dot_except_mlpwi",
    "save_dot_except_mlp",
    "save_qkv_proj",
    "save_out_proj",
    "full",
]
"""Recomputation in the backward pass.

It repeats nothing, attention scores, all but matrix products, these and every second
product, all but the named products, or everything.
"""

PRODUCTS = ("qkv", "attention", "out", "up", "down")
"""Products of a layer, in order of computation."""

SAVED_BY_NAME: Mapping[Remat, tuple[str, ...]] = {
    "dots": ("qkv", "attention", "out", "up"),
    "save_dot_with_context_except_mlp": ("qkv", "attention", "out"),
    "save_dot_except_mlpwi": ("qkv", "out"),
    "save_dot_except_mlp": ("qkv", "out"),
    "save_qkv_proj": ("qkv",),
    "save_out_proj": ("out",),
}
"""Products whose results are saved. After the first, the names are MaxText's values of
``remat_policy`` (``get_remat_policy`` of its decoders). Nothing reads the result of
``down``, which joins the residual stream, so saving it changes nothing."""

UNCONFIRMED: frozenset[Remat] = frozenset(SAVED_BY_NAME) - {"dots"}
"""Policies whose memory was compared with no measured run."""


def saved_shares(remat: Remat, sizes: DecoderSizes) -> dict[str, float]:
    """Returns the share of each product's result that is saved for the backward pass.

    ``alternate_dots`` is TorchTitan's selective checkpointing of operations. It saves
    attention and drops every second other product, in order: key, output and the second
    up-projection of a gated layer. It never saves grouped products of experts.

    Args:
        remat: ``dots``, or a policy that saves fewer products.
        sizes: Sizes of the decoder.

    >>> sizes = DecoderSizes(
    ...     layers=1, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=192, vocab=512,
    ...     seq=32, gated=True)
    >>> shares = saved_shares("alternate_dots", sizes)
    >>> round(shares["qkv"], 3), shares["out"], shares["up"], shares["down"]
    (0.667, 0.0, 0.5, 1.0)
    """
    if remat == "alternate_dots":
        key = sizes.kv_heads / (sizes.heads + 2 * sizes.kv_heads)
        up = 0.0 if sizes.experts else 0.5 if sizes.gated else 1.0
        down = 1.0 if sizes.gated and not sizes.experts else 0.0
        shares = (1.0 - key, 1.0, 0.0, up, down)
        return dict(zip(PRODUCTS, shares, strict=True))
    saved = SAVED_BY_NAME.get(remat, ())
    return {name: float(name in saved) for name in PRODUCTS}


def recomputed_shares(remat: Remat, sizes: DecoderSizes) -> tuple[float, ...]:
    """Returns the share of each of ``PRODUCTS`` that the backward pass recomputes.

    Args:
        remat: Remat policy.
        sizes: Sizes of the decoder.
    """
    if remat in ("none", "selective"):
        return (0.0,) * len(PRODUCTS)
    if remat == "full":
        return (1.0,) * len(PRODUCTS)
    saved = saved_shares(remat, sizes)
    # The backward pass stops before the last product, whose result it does not read.
    return tuple(0.0 if name == "down" else 1.0 - saved[name] for name in PRODUCTS)
