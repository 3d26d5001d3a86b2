"""Gating: assigns tokens to experts, with a limit on tokens per expert.

It has no parameters, only scores, so a test can check it against a loop.

After Lepikhin et al., "GShard" (2020), algorithm 1 without its random second expert,
and Fedus et al., "Switch Transformers" (2021), equations 1 to 6. GShard drops tokens
without a place. Here a token keeps its position in the queue of its expert, so that a
later pass can also serve it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from whalejax.models.common.layers import widened


Array: TypeAlias = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Queues of tokens for experts: order, and use of the experts.

    Attributes:
        picks: For each choice ``[groups, tokens, experts]``, one for the chosen expert.
        places: For each choice ``int32[groups, tokens]``, number of earlier tokens of
            its group with the same expert.
        weights: For each choice ``[groups, tokens]``, weight of the expert's answer.
        lengths: Tokens in each queue, ``[groups, 1, experts]``.
        balance: Scalar, 1 if all experts are used equally, else more.
        max_load: Scalar, choices of the busiest expert over those of the mean one.
    """

    picks: tuple[Array, ...]
    places: tuple[Array, ...]
    weights: tuple[Array, ...]
    lengths: Array
    balance: Array
    max_load: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Places of the tokens in one pass.

    Attributes:
        dispatch: ``[groups, tokens, experts, capacity]``, one for a token's place at an
            expert, else zero.
        combine: Weight of that expert's answer, in the same shape.
    """

    dispatch: Array
    combine: Array


def capacity(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Returns the number of places at each expert for one group of tokens.

    Args:
        tokens: Tokens of a group.
        experts: Number of experts.
        choices: Experts that a token chooses.
        factor: Ratio of places to those of an even distribution.

    >>> capacity(tokens=24, experts=16, choices=2, factor=1.5)
    5
    """
    return min(tokens, math.ceil(choices * tokens * factor / experts))


def queue(scores: Array, *, choices: int) -> Queues:
    """Queues every token for its best experts, within its group.

    All first choices of a group precede its second ones. With several choices the
    weights of a token sum to 1; with one choice the weight is the expert's probability,
    so that the router gets a gradient.

    Args:
        scores: ``[groups, tokens, experts]``, before the softmax.
        choices: Experts per token: 1 is "switch", 2 is "top-2".

    Returns:
        Queues, in float32 or wider. Their load numbers are over all groups, not means
        over groups.

    >>> queues = queue(jnp.zeros((1, 4, 2)), choices=1)
    >>> int(longest(queues)), float(queues.max_load)
    (4, 2.0)
    """
    probabilities = jax.nn.softmax(widened(scores), axis=-1)
    groups, tokens, experts = probabilities.shape
    picks: list[Array] = []
    places: list[Array] = []
    taken = jnp.zeros((groups, 1, experts), probabilities.dtype)
    remaining = probabilities
    # A product, since a running sum would need the unsharded sequence.
    earlier = jnp.tril(jnp.ones((tokens, tokens), probabilities.dtype), -1)
    for _ in range(choices):
        best = jnp.argmax(remaining, axis=-1)
        pick = jax.nn.one_hot(best, experts, dtype=probabilities.dtype)
        # Rejected tokens count too: no place becomes free.
        before = jnp.einsum("st,gte->gse", earlier, pick) + taken
        picks.append(pick)
        places.append(jnp.sum(before * pick, axis=-1).astype(jnp.int32))
        taken = taken + jnp.sum(pick, axis=1, keepdims=True)
        remaining = jnp.where(pick > 0, -1.0, remaining)
    with jax.named_scope("balance"):
        used = jnp.mean(picks[0], axis=(0, 1))
        expected = jnp.mean(probabilities, axis=(0, 1))
        balance = experts * jnp.sum(used * expected)
    asked = jnp.sum(taken, axis=(0, 1))
    return Queues(
        picks=tuple(picks),
        places=tuple(places),
        weights=_weights(probabilities, picks),
        lengths=taken,
        balance=balance,
        max_load=jnp.max(asked) * experts / (choices * groups * tokens),
    )


def _weights(probabilities: Array, picks: list[Array]) -> tuple[Array, ...]:
    weights = [jnp.sum(probabilities * pick, axis=-1) for pick in picks]
    if len(weights) > 1:
        share = sum(weights[1:], weights[0])
        weights = [weight / share for weight in weights]
    return tuple(weights)


def seats(queues: Queues, *, places: int, first: int | Array = 0) -> Routing:
    """Assigns the places of one pass to the tokens that it serves.

    Args:
        queues: From ``queue``.
        places: Tokens that an expert takes from one group in a pass.
        first: Number of tokens of each queue that earlier passes served.

    Returns:
        Routing of the pass; tokens of other passes have no place in it.

    >>> routing = seats(queue(jnp.zeros((1, 4, 2)), choices=1), places=3)
    >>> float(jnp.sum(routing.dispatch))
    3.0
    """
    taken = []
    for pick, place in zip(queues.picks, queues.places, strict=True):
        # Places outside the pass give a row of zeros.
        one_hot = jax.nn.one_hot(place - first, places, dtype=pick.dtype)
        taken.append(pick[..., None] * one_hot[:, :, None, :])
    weighted = [
        seat * weight[:, :, None, None]
        for seat, weight in zip(taken, queues.weights, strict=True)
    ]
    return Routing(
        dispatch=sum(taken[1:], taken[0]), combine=sum(weighted[1:], weighted[0])
    )


def longest(queues: Queues) -> Array:
    """Returns the length of the longest queue of any group, as an ``int32`` scalar.

    Args:
        queues: From ``queue``.
    """
    return jnp.max(queues.lengths).astype(jnp.int32)


def dropped(queues: Queues, *, places: int) -> Array:
    """Returns the fraction of choices without a place in one pass, over all groups.

    Args:
        queues: From ``queue``.
        places: Tokens that an expert takes from one group.

    >>> float(dropped(queue(jnp.zeros((1, 4, 2)), choices=1), places=3))
    0.25
    """
    late = [
        jnp.mean((place >= places).astype(weight.dtype))
        for place, weight in zip(queues.places, queues.weights, strict=True)
    ]
    return sum(late[1:], late[0]) / len(late)
