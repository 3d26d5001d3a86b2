"""Gating: which expert takes which token, with a limit on tokens per expert.

Apart from the model that uses it because it is the one piece of it with a loop to check
it against: no parameter and no layer comes in, only scores.

After Lepikhin et al., "GShard" (2020), algorithm 1 without its random second expert,
and Fedus et al., "Switch Transformers" (2021), equations 1 to 6. GShard drops what
finds no place. Here a token knows its place in the queue before its expert, however
long that is, so that it can also be served in a later pass: ``seats`` gives the
dispatch of any stretch of the queues.
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
        picks: For each choice ``[groups, tokens, experts]``, one where a token asks.
        places: For each choice ``int32[groups, tokens]``, how many of its group asked
            the same expert before it.
        weights: For each choice ``[groups, tokens]``, with which an answer counts.
        lengths: ``[groups, 1, experts]``, tokens in each queue.
        balance: Scalar, 1 where all experts are used alike and more where not.
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
        dispatch: ``[groups, tokens, experts, capacity]``, one where a token takes a
            place at an expert and zero elsewhere.
        combine: The same shape; the weight with which that expert's answer counts.
    """

    dispatch: Array
    combine: Array


def capacity(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Places at each expert for one group of tokens.

    Args:
        tokens: Tokens of a group.
        experts: Number of experts.
        choices: Experts that a token asks for.
        factor: Places over what an even spread would need.

    >>> capacity(tokens=24, experts=16, choices=2, factor=1.5)
    5
    """
    return min(tokens, math.ceil(choices * tokens * factor / experts))


def queue(scores: Array, *, choices: int) -> Queues:
    """Line every token up before its best experts, within its group.

    All first choices of a group stand before any second one. With several choices the
    weights of a token sum to 1; with one choice the weight is the expert's probability,
    so that the router gets a gradient.

    Args:
        scores: ``[groups, tokens, experts]``, before the softmax.
        choices: Experts per token: 1 is "switch", 2 is "top-2".

    Returns:
        The queues, in float32 or wider. Their numbers of load are taken over all
        groups and are no means over groups.

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
    # A product and no running sum, which would need the whole sequence in one place.
    earlier = jnp.tril(jnp.ones((tokens, tokens), probabilities.dtype), -1)
    for _ in range(choices):
        best = jnp.argmax(remaining, axis=-1)
        pick = jax.nn.one_hot(best, experts, dtype=probabilities.dtype)
        # Those turned away are counted too: no place comes free.
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
    """The probability of each choice; over all of a token's choices if several."""
    weights = [jnp.sum(probabilities * pick, axis=-1) for pick in picks]
    if len(weights) > 1:
        share = sum(weights[1:], weights[0])
        weights = [weight / share for weight in weights]
    return tuple(weights)


def seats(queues: Queues, *, places: int, first: int | Array = 0) -> Routing:
    """Gives the places of one pass to those whose turn it is.

    Args:
        queues: From ``queue``.
        places: Tokens that an expert takes from one group in a pass.
        first: Number of each queue's tokens that earlier passes served.

    Returns:
        The routing; a token stands in none where its turn is another pass.

    >>> routing = seats(queue(jnp.zeros((1, 4, 2)), choices=1), places=3)
    >>> float(jnp.sum(routing.dispatch))
    3.0
    """
    taken = []
    for pick, place in zip(queues.picks, queues.places, strict=True):
        # Places outside the pass are a row of zeros.
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
    """Tokens in the longest queue of any group, an ``int32`` scalar.

    Args:
        queues: From ``queue``.
    """
    return jnp.max(queues.lengths).astype(jnp.int32)


def dropped(queues: Queues, *, places: int) -> Array:
    """The fraction of choices without a place in one pass, a scalar over all groups.

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
