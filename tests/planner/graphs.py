"""Models written by hand, so that the planner is tested without tracing anything.

``gpt`` is the transformer that most tests reason about.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from whalejax.planner.model.graph import Factor, Graph
from whalejax.planner.model.graph_builder import GraphBuilder as GraphBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the hand-written GPT; all different unless a test says otherwise."""

    batch: int = 16
    seq: int = 24
    embed: int = 48
    heads: int = 8
    key: int = 6
    value: int = 10
    mlp: int = 320
    vocab: int = 512


def gpt(
    layers: int,
    sizes: Sizes | None = None,
    *,
    swapped: bool = False,
    flat_heads: bool = False,
    fused: bool = False,
    tied: bool = False,
) -> Graph:
    """A GPT without norms and masks; a human would name ten dimensions in it.

    Args:
        layers: how many, unrolled.
        sizes: of the dimensions.
        swapped: the scores are ``k · q`` instead of ``q · k``.
        flat_heads: query and the others are ``[embed, heads · width]`` and reshaped.
        fused: one kernel ``[embed, 3 · heads · key]`` for the three.
        tied: the head is the embedding table.
    """
    z = sizes or Sizes()
    p = GraphBuilder()
    tokens = p.batch("tokens", z.batch, z.seq)
    targets = p.batch("targets", z.batch, z.seq)
    table = p.param("tokens.embedding", z.vocab, z.embed)
    x = p.gather(table, tokens)
    for i in range(layers):
        x = _block(p, z, x, f"blocks.{i}", swapped, flat_heads, fused)
    head = table if tied else p.param("head.kernel", z.embed, z.vocab)
    logits = p.einsum("bse,ve->bsv" if tied else "bse,ev->bsv", x, head)
    picked = p.einsum("bsv->bs", p.unary("exp", logits))
    loss = p.einsum("bs->", p.add(picked, targets))
    return p.graph(loss)


def _block(
    p: GraphBuilder,
    z: Sizes,
    x: int,
    path: str,
    swapped: bool,
    flat_heads: bool,
    fused: bool,
) -> int:
    def kernel(name: str, *shape: int) -> int:
        return p.param(f"{path}.{name}.kernel", *shape)

    q, k, v = _query_key_value(p, z, x, kernel, flat_heads, fused)
    scores = (
        p.einsum("bthd,bshd->bhst", k, q)
        if swapped
        else p.einsum("bshd,bthd->bhst", q, k)
    )
    weights = p.unary("exp", scores)
    mixed = p.einsum("bhst,bthd->bshd", weights, v)
    value = z.key if fused else z.value
    if flat_heads or fused:
        flat = p.reshape(mixed, z.batch, z.seq, z.heads * value)
        out = kernel("output", z.heads * value, z.embed)
        x = p.add(x, p.einsum("bsn,ne->bse", flat, out))
    else:
        out = kernel("output", z.heads, value, z.embed)
        x = p.add(x, p.einsum("bshd,hde->bse", mixed, out))
    up = kernel("up", z.embed, z.mlp)
    hidden = p.unary("tanh", p.einsum("bse,em->bsm", x, up))
    down = kernel("down", z.mlp, z.embed)
    return p.add(x, p.einsum("bsm,me->bse", hidden, down))


def _query_key_value(
    p: GraphBuilder,
    z: Sizes,
    x: int,
    kernel: Callable[..., int],
    flat_heads: bool,
    fused: bool,
) -> tuple[int, int, int]:
    if fused:
        joint = p.einsum("bse,en->bsn", x, kernel("qkv", z.embed, 3 * z.heads * z.key))
        split = p.reshape(joint, z.batch, z.seq, 3, z.heads, z.key)
        parts = [p.einsum("bsnhd->bshd", split) for _ in range(3)]
        return parts[0], parts[1], parts[2]
    widths = (("query", z.key), ("key", z.key), ("value", z.value))
    if flat_heads:
        found = []
        for name, width in widths:
            flat = p.einsum("bse,en->bsn", x, kernel(name, z.embed, z.heads * width))
            found.append(p.reshape(flat, z.batch, z.seq, z.heads, width))
        return found[0], found[1], found[2]
    q, k, v = (
        p.einsum("bse,ehd->bshd", x, kernel(name, z.embed, z.heads, width))
        for name, width in widths
    )
    return q, k, v


def mlp(
    batch: int, widths: tuple[int, ...], *, path: str = "layers.{}.w"
) -> tuple[GraphBuilder, int]:
    """A perceptron ``x @ w``, ``tanh``, …; the program and its scalar loss."""
    p = GraphBuilder()
    x = p.batch("x", batch, widths[0])
    for i, (rows, columns) in enumerate(itertools.pairwise(widths)):
        w = p.param(path.format(i), rows, columns)
        x = p.unary("tanh", p.einsum("bi,ij->bj", x, w))
    return p, p.einsum("bj->", x)


def stacked(graph: Graph, layers: int) -> Graph:
    """A graph of ``decoder_graph`` with its layers' weights as a scan slices them.

    The decoder's own layers are read by name; capture sees stacks of weights.
    """
    tensors = list(graph.tensors)
    slices = []
    loop = next(i for i, op in enumerate(graph.ops) if op.kind == "scan")
    for tensor in graph.params:
        if not tensor.path.startswith("layer."):
            continue
        stack = dataclasses.replace(
            tensor,
            id=len(tensors),
            shape=(layers, *tensor.shape),
            names=(None, *tensor.names) if tensor.names else (),
            pinned=(None, *tensor.pinned) if tensor.pinned else (),
        )
        tensors.append(stack)
        tensors[tensor.id] = dataclasses.replace(tensor, kind="value", path="")
        factors = tuple(
            Factor(members=((0, d + 1), (1, d)), kind="linked")
            for d in range(len(tensor.shape))
        )
        slices.append(
            dataclasses.replace(
                graph.ops[loop],
                operands=(stack.id,),
                results=(tensor.id,),
                factors=factors,
            )
        )
    ops = (*graph.ops[:loop], *slices, *graph.ops[loop:])
    return dataclasses.replace(graph, tensors=tuple(tensors), ops=ops)
