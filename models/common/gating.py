"""Gating: assigns tokens to experts by scores, with a limit on tokens per expert.

After Lepikhin et al., "GShard" (2020), algorithm 1 without its random second expert,
and Fedus et al., "Switch Transformers" (2021), equations 1 to 6. GShard drops tokens
without a place. Here a token keeps its position in the queue of its expert, so that a
later pass can serve it.
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
    """Queues of tokens for experts, and load of the experts.

    The first three attributes have an array for each choice of a token.

    Attributes:
        picks: ``[groups, tokens, experts]``, 1 for the chosen expert, else 0.
        places: ``int32[groups, tokens]``, position of the token in the queue of its
            group for the chosen expert.
        weights: ``[groups, tokens]``, weight of the expert's result.
        lengths: Number of tokens in each queue, ``[groups, 1, experts]``.
        balance: Scalar, 1 if all experts are used equally, else more.
        max_load: Scalar, number of tokens of the busiest expert relative to the mean.
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
        dispatch: ``[groups, tokens, experts, capacity]``, 1 for a token's place at an
            expert, else 0.
        combine: Array of the same shape, with the weight of the expert's result
            instead of 1.
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
    """Queues every token of a group for its best experts.

    In a queue, first choices precede second choices. With several choices, the weights
    of a token sum to 1. With one choice, the weight is the expert's probability, so
    that the router gets a gradient.

    Args:
        scores: ``[groups, tokens, experts]``, before the softmax.
        choices: Experts per token: 1 is "switch", 2 is "top-2".

    Returns:
        Queues, in float32 or wider. The load numbers are over all groups together.

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
    # A running sum would gather the sequence; a product does not.
    earlier = jnp.tril(jnp.ones((tokens, tokens), probabilities.dtype), -1)
    for _ in range(choices):
        best = jnp.argmax(remaining, axis=-1)
        pick = jax.nn.one_hot(best, experts, dtype=probabilities.dtype)
        # Tokens without a place count too.
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
    """Assigns the places of one pass to tokens.

    Args:
        queues: Result of ``queue``.
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
        # Tokens of other passes get a row of zeros.
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
        queues: Result of ``queue``.
    """
    return jnp.max(queues.lengths).astype(jnp.int32)


def dropped(queues: Queues, *, places: int) -> Array:
    """Returns the fraction of choices without a place in one pass, over all groups.

    Args:
        queues: Result of ``queue``.
        places: Tokens that an expert takes from one group.

    >>> float(dropped(queue(jnp.zeros((1, 4, 2)), choices=1), places=3))
    0.25
    """
    late = [
        jnp.mean((place >= places).astype(weight.dtype))
        for place, weight in zip(queues.places, queues.weights, strict=True)
    ]
    return sum(late[1:], late[0]) / len(late)
