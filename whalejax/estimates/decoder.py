"""Builds the graph of a decoder transformer from its sizes.

Tables of published runs have layers, widths and heads, but no code. This module builds
the graph that capture would make of a traced loss, so the same rows, costs and memory
terms apply. Layers are one body with a trip count, so depth costs nothing.

A remat policy says which products of a layer the backward pass recomputes. Both time
and memory follow from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from whalejax.planner.model.graph import Graph
from whalejax.planner.model.graph_builder import GraphBuilder


REGIONS = ("embed", "residual", "inner", "experts", "final", "head")
"""TaskGraphs of the graph, in order: the embedding, the operations between the products
of a layer, attention and the feed-forward products, the experts' products, the last
norm, and the head with the loss. Only residual, inner and experts run once per layer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """Sizes and options of a decoder transformer.

    Attributes:
        layers, hidden, heads, ffn, vocab: Numbers of layers, of hidden elements, of
            heads, of feed-forward elements and of tokens in the vocabulary.
        kv_heads: Number of heads of keys and values; below ``heads`` if query heads
            share them.
        head_dim: Size of one head; usually ``hidden // heads``.
        seq: Number of tokens of a sample.
        gated: Whether the feed-forward has a gate, so three products instead of two.
        experts, topk: Number of feed-forward networks per layer, and number that a
            token uses; 0 without experts.
        flash: Whether attention is one kernel, which keeps scores on chip and skips
            masked ones. If not, scores and their softmax go through memory.
        eager: Whether the following run as single operations, without a kernel: the
            mask of attention without a kernel, rotary embeddings, RMSNorm and gates.
        fused_loss: Whether one kernel computes the loss from logits in their own dtype.
            If not, they are first cast to float32.
        dropout: Whether attention weights and residual inputs have dropout.
        norm_bias: Whether norms are LayerNorm with biases (GPT) instead of RMSNorm.
        positions: Whether the model has learned position embeddings.
        tied: Whether the head uses the embedding's table.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    seq: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    experts: int = 0
    topk: int = 0
    flash: bool = True
    eager: bool = False
    fused_loss: bool = True
    dropout: bool = False
    norm_bias: bool = True
    positions: bool = True
    tied: bool = True

    @property
    def layer_params(self) -> int:
        """Number of parameters of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        networks = max(1, self.experts)
        return (
            attention
            + networks * self.network_params
            + self.hidden * (self.experts + (4 if self.norm_bias else 2))
        )

    @property
    def network_params(self) -> int:
        """Number of parameters of one feed-forward network."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def embedding_params(self) -> int:
        """Number of parameters of the embedding, including learned positions."""
        return self.hidden * (self.vocab + self.positions * self.seq)

    @property
    def head_params(self) -> int:
        """Number of parameters of the head; 0 if it is tied."""
        return 0 if self.tied else self.hidden * self.vocab

    @property
    def params(self) -> int:
        """Number of all parameters, including those of every expert."""
        return (
            self.layers * self.layer_params + self.embedding_params + self.head_params
        )

    @property
    def active_params(self) -> int:
        """Number of parameters that a token uses."""
        idle = max(0, self.experts - self.topk) * self.network_params * self.layers
        return self.params - idle


SOFTMAX, DROPOUT = "softmax", "dropout"
"""Kinds of operations whose backward pass reads more than gradients."""

IN_PLACE = "masked_fill"
"""Kind of operation that writes into a view of an earlier result."""


class _Writer:
    def __init__(
        self, sizes: DecoderSizes, batch: int, dtype: str, itemsize: int
    ) -> None:
        self.sizes = sizes
        self.samples = batch
        self.p = GraphBuilder(dtype=dtype, itemsize_bytes=itemsize)
        for name in REGIONS[1:]:
            self.p.region(name)
        self.p.task_graphs[0] = replace(self.p.task_graphs[0], name=REGIONS[0])

    def go(self, region: str) -> None:
        self.p.here = REGIONS.index(region)

    def norm(self, name: str, x: int) -> int:
        p, hidden = self.p, self.sizes.hidden
        with p.kernel(fused=self.sizes.norm_bias or not self.sizes.eager):
            square = p.add(x, x, kind="mul")
            p.keeps(0)
            mean = p.einsum("bse->bs", square)
            scale = p.reshape(p.param(f"{name}.scale", hidden), 1, 1, hidden)
            spread = p.reshape(mean, *p.shape(mean), 1)
            return p.add(p.add(x, spread, kind="mul"), scale, kind="mul")

    def embed(self) -> int:
        p, s = self.p, self.sizes
        tokens = p.batch("tokens", self.samples, s.seq)
        self.table = p.param("embed.table", s.vocab, s.hidden)
        x = p.gather(self.table, tokens)
        if s.positions:
            where = p.param("positions", s.seq, s.hidden)
            x = p.add(x, p.reshape(where, 1, s.seq, s.hidden))
        return x

    def attention(self, x: int) -> int:
        p, s = self.p, self.sizes
        groups, rest = s.kv_heads, s.heads // s.kv_heads
        self.go("inner")
        # Query, key and value are one product, as in every framework of the tables.
        w = p.param("layer.qkv", s.hidden, groups, rest + 2, s.head_dim)
        wo = p.param("layer.o", groups, rest, s.head_dim, s.hidden)
        qkv = p.einsum("bse,egrd->bsgrd", x, w)
        q, k, v = p.part(qkv, 3, rest), p.part(qkv, 3), p.part(qkv, 3)
        if not s.positions:
            q, k = self.rotate(q), self.rotate(k)
        if s.flash:
            with p.kernel(share=0.5):
                mixed = self.core(q, k, v)
        else:
            mixed = self.core(q, k, v)
        return self.drop(p.einsum("bsgrd,grde->bse", mixed, wo))

    def rotate(self, x: int) -> int:
        p = self.p
        if not self.sizes.eager:
            return p.unary("rotate", x)
        turned = p.add(p.add(x, kind="concatenate"), kind="scale")
        return p.add(p.add(x, kind="scale"), turned)

    def core(self, q: int, k: int, v: int) -> int:
        p = self.p
        scores = p.einsum("bsgrd,btgd->bgrst", q, k)
        if self.sizes.eager and not self.sizes.flash:
            scores = p.add(scores, kind=IN_PLACE)
        with p.kernel(fused=not self.sizes.flash):
            top = p.einsum("bgrst->bgrs", scores)
            shifted = p.add(scores, p.reshape(top, *p.shape(top), 1), kind="sub")
            weights = p.unary("exp", shifted)
            p.keeps()  # The backward pass reads only the result.
            total = p.einsum("bgrst->bgrs", weights)
            total = p.reshape(total, *p.shape(total), 1)
            even = p.add(weights, total, kind=SOFTMAX)
            p.keeps(2)
        if not self.sizes.flash:
            even = self.drop(even)
        return p.einsum("bgrst,btgd->bsgrd", even, v)

    def drop(self, x: int) -> int:
        return self.p.unary(DROPOUT, x) if self.sizes.dropout else x

    def feed_forward(self, x: int) -> int:
        p, s = self.p, self.sizes
        self.go("inner")
        up = p.param("layer.up", s.hidden, 1 + s.gated, s.ffn)
        h = self.activate(p.einsum("bse,egm->bsgm", x, up), 2)
        down = p.param("layer.down", s.ffn, s.hidden)
        return self.drop(p.einsum("bsm,me->bse", h, down))

    def activate(self, both: int, dim: int) -> int:
        p = self.p
        with p.kernel(fused=not (self.sizes.eager and self.sizes.gated)):
            h = p.unary("tanh", p.part(both, dim))
            p.keeps(0)
            return p.add(h, p.part(both, dim), kind="mul") if self.sizes.gated else h

    def mixture(self, x: int) -> int:
        p, s = self.p, self.sizes
        self.go("residual")
        router = p.param("layer.router", s.hidden, s.experts)
        p.einsum("bse,ex->bsx", x, router)
        # Every sample sends an equal part of its tokens to every expert.
        each = max(1, s.seq * s.topk // s.experts)
        sent = p.dispatch(x, self.samples, s.experts, each, s.hidden)
        self.go("experts")
        up = p.param("layer.up", s.experts, s.hidden, 1 + s.gated, s.ffn)
        h = self.activate(p.einsum("bxce,xegm->bxcgm", sent, up), 3)
        down = p.param("layer.down", s.experts, s.ffn, s.hidden)
        back = p.einsum("bxcm,xme->bxce", h, down)
        self.go("residual")
        return p.dispatch(back, self.samples, s.seq, s.hidden)

    def head(self, x: int) -> int:
        p, s = self.p, self.sizes
        self.go("final")
        x = self.norm("final", x)
        self.go("head")
        if s.tied:
            logits = p.einsum("bse,ve->bsv", x, self.table)
        else:
            head = p.param("head.kernel", s.hidden, s.vocab)
            logits = p.einsum("bse,ev->bsv", x, head)
        full = logits if s.fused_loss else p.cast(logits, "float32", 4)
        with p.kernel():
            top = p.einsum("bsv->bs", full)
            shifted = p.add(full, p.reshape(top, *p.shape(top), 1), kind="sub")
            weights = p.unary("exp", shifted)
            total = p.einsum("bsv->bs", weights)
            even = p.add(weights, p.reshape(total, *p.shape(total), 1), kind="div")
        return p.einsum("bs->", p.einsum("bsv->bs", even))


def decoder_graph(
    sizes: DecoderSizes, batch: int, dtype: str = "bfloat16", itemsize_bytes: int = 2
) -> Graph:
    """Returns the forward loss of a decoder.

    Args:
        sizes: Sizes of the decoder.
        batch: Number of samples.
        dtype, itemsize_bytes: Dtype of the computation, and bytes per element.

    >>> sizes = DecoderSizes(
    ...     layers=4, hidden=64, heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=512,
    ...     seq=32)
    >>> graph = decoder_graph(sizes, batch=8)
    >>> [region.name for region in graph.task_graphs] == list(REGIONS)
    True
    """
    writer = _Writer(sizes, batch, dtype, itemsize_bytes)
    x = writer.embed()
    writer.go("residual")
    x = writer.p.carry(x)
    writer.p.trip = sizes.layers
    mixed = writer.attention(writer.norm("layer.before", x))
    writer.go("residual")
    x = writer.p.add(x, mixed)
    normed = writer.norm("layer.between", x)
    mixed = writer.mixture(normed) if sizes.experts else writer.feed_forward(normed)
    writer.go("residual")
    x = writer.p.carry(writer.p.add(x, mixed))
    writer.p.trip = 1
    return writer.p.graph(writer.head(x))


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
"""Remat policies. The backward pass recomputes, in this order of policies: nothing;
attention scores; everything but matrix products; this and every second product;
everything but the named products; everything.
"""

PRODUCTS = ("qkv", "attention", "out", "up", "down")
"""Products of a layer, in the order of computation."""

SAVED_BY_NAME: Mapping[Remat, tuple[str, ...]] = {
    "dots": ("qkv", "attention", "out", "up"),
    "save_dot_with_context_except_mlp": ("qkv", "attention", "out"),
    "save_dot_except_mlpwi": ("qkv", "out"),
    "save_dot_except_mlp": ("qkv", "out"),
    "save_qkv_proj": ("qkv",),
    "save_out_proj": ("out",),
}
"""Products whose results are saved, by policy. After the first, the names are MaxText's
values of ``remat_policy`` (``get_remat_policy`` of its decoders). No operation reads
the result of ``down``, which is added to the residual stream, so saving it changes
nothing.
"""

UNCONFIRMED: frozenset[Remat] = frozenset(SAVED_BY_NAME) - {"dots"}
"""Policies whose predicted memory was not compared with a measured run."""


def saved_shares(remat: Remat, sizes: DecoderSizes) -> dict[str, float]:
    """Returns the fraction of each product's result that is saved for the backward
    pass.

    ``alternate_dots`` is TorchTitan's selective checkpointing of operations. It saves
    attention, and drops every second other product in order: key, output, and the
    second up-projection of a gated layer. It saves no grouped products of experts.

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
    """Returns the fraction of each of ``PRODUCTS`` that the backward pass recomputes.

    Args:
        remat: Remat policy.
        sizes: Sizes of the decoder.
    """
    if remat in ("none", "selective"):
        return (0.0,) * len(PRODUCTS)
    if remat == "full":
        return (1.0,) * len(PRODUCTS)
    saved = saved_shares(remat, sizes)
    # The backward pass does not need the result of the last product, so it stops
    # before.
    return tuple(0.0 if name == "down" else 1.0 - saved[name] for name in PRODUCTS)
