"""Policies of rematerialization: which products of a layer the backward pass repeats.

Apart from ``frameworks``, which says who uses which: time and memory both read what is
here, so that a policy is one line.
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
"""What the backward pass computes again: nothing, the scores of attention, all but
matrix products, those and every second product, all but the products of a name, or
everything."""

PRODUCTS = ("qkv", "attention", "out", "up", "down")
"""Products of a layer, in the order in which it computes them."""

SAVED_BY_NAME: Mapping[Remat, tuple[str, ...]] = {
    "dots": ("qkv", "attention", "out", "up"),
    "save_dot_with_context_except_mlp": ("qkv", "attention", "out"),
    "save_dot_except_mlpwi": ("qkv", "out"),
    "save_dot_except_mlp": ("qkv", "out"),
    "save_qkv_proj": ("qkv",),
    "save_out_proj": ("out",),
}
"""Products whose results are kept. Below the first, as MaxText's ``remat_policy`` names
them (``get_remat_policy`` of its decoders); nothing reads the result of ``down``, which
joins the residual stream, so that keeping it changes nothing."""

UNCONFIRMED: frozenset[Remat] = frozenset(SAVED_BY_NAME) - {"dots"}
"""Policies whose memory was held against no measured run."""


def saved_shares(remat: Remat, sizes: DecoderSizes) -> dict[str, float]:
    """Share of each product's result that is kept for the backward pass.

    ``alternate_dots`` is TorchTitan's selective checkpointing of operations: it keeps
    attention, and of the other products in their order every second one it does not
    (key, output and the second up-projection of a gated layer). Grouped products of
    experts are none that it keeps.

    Args:
        remat: ``dots``, or one that keeps fewer products.
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
    """Share of each of ``PRODUCTS`` that the backward pass computes again.

    Args:
        remat: The policy.
        sizes: Sizes of the decoder.
    """
    if remat in ("none", "selective"):
        return (0.0,) * len(PRODUCTS)
    if remat == "full":
        return (1.0,) * len(PRODUCTS)
    saved = saved_shares(remat, sizes)
    # The backward pass stops before the last product, whose result it does not read.
    return tuple(0.0 if name == "down" else 1.0 - saved[name] for name in PRODUCTS)
