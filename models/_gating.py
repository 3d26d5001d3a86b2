"""Gating: which expert takes which token, with a limit on tokens per expert.

Apart from the model that uses it because it is the one piece of it with a loop to check
it against: no parameter and no layer comes in, only scores.

After Lepikhin et al., "GShard" (2020), algorithm 1 without its random second expert,
and Fedus et al., "Switch Transformers" (2021), equations 1 to 6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp

from whalejax.models._layers import widened


Array: TypeAlias = jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where the tokens go.

    Attributes:
        dispatch: ``[groups, tokens, experts, capacity]``, one where a token takes a
            place at an expert and zero elsewhere.
        combine: the same shape; the weight with which that expert's answer counts.
        balance: scalar, 1 where all experts are used alike and more where not.
        dropped: scalar, the fraction of choices that found no place.
    """

    dispatch: Array
    combine: Array
    balance: Array
    dropped: Array


def capacity(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Places at each expert for one group of tokens.

    Args:
        tokens: tokens of a group.
        experts: number of experts.
        choices: experts that a token asks for.
        factor: places over what an even spread would need.

    >>> capacity(tokens=24, experts=16, choices=2, factor=1.5)
    5
    """
    return min(tokens, math.ceil(choices * tokens * factor / experts))


def route(scores: Array, *, choices: int, places: int) -> Routing:
    """Give every token its best experts, first come first served within a group.

    All first choices of a group are served before any second one. With several choices
    the weights of a token sum to 1 before places run out; with one choice the weight is
    the expert's probability, so that the router gets a gradient.

    Args:
        scores: ``[groups, tokens, experts]``, before the softmax.
        choices: experts per token: 1 is "switch", 2 is "top-2".
        places: tokens that an expert takes from one group.

    Returns:
        The routing, in float32 or wider. Its ``balance`` is no mean over groups.

    >>> routing = route(jnp.zeros((1, 4, 2)), choices=1, places=3)
    >>> float(routing.dropped)
    0.25
    """
    probabilities = jax.nn.softmax(widened(scores), axis=-1)
    groups, tokens, experts = probabilities.shape
    picks: list[Array] = []
    seats: list[Array] = []
    taken = jnp.zeros((groups, 1, experts), probabilities.dtype)
    remaining = probabilities
    for _ in range(choices):
        best = jnp.argmax(remaining, axis=-1)
        picks.append(jax.nn.one_hot(best, experts, dtype=probabilities.dtype))
        seats.append(_seat(picks[-1], taken, places))
        taken = taken + jnp.sum(picks[-1], axis=1, keepdims=True)
        remaining = jnp.where(picks[-1] > 0, -1.0, remaining)
    used = jnp.mean(picks[0], axis=(0, 1))
    expected = jnp.mean(probabilities, axis=(0, 1))
    dispatch = sum(seats[1:], seats[0])
    return Routing(
        dispatch=dispatch,
        combine=_combine(probabilities, picks, seats),
        balance=experts * jnp.sum(used * expected),
        dropped=1.0 - jnp.sum(dispatch) / (choices * groups * tokens),
    )


def _seat(pick: Array, taken: Array, places: int) -> Array:
    """One-hot places ``[groups, tokens, experts, capacity]`` of one choice.

    A token's place is the number of those that asked before it: in earlier choices
    (``taken``) and earlier in the group. Those turned away are counted too, which
    changes nothing, since no place comes free.
    """
    position = jnp.cumsum(pick, axis=1) - pick + taken
    kept = pick * (position < places).astype(pick.dtype)
    place = jnp.sum(position * kept, axis=-1).astype(jnp.int32)
    one_hot = jax.nn.one_hot(place, places, dtype=pick.dtype)
    return kept[..., None] * one_hot[:, :, None, :]


def _combine(probabilities: Array, picks: list[Array], seats: list[Array]) -> Array:
    """The seats, each times its token's weight for that expert."""
    weights = [jnp.sum(probabilities * pick, axis=-1) for pick in picks]
    if len(weights) > 1:
        share = sum(weights[1:], weights[0])
        weights = [weight / share for weight in weights]
    weighted = [
        seat * weight[:, :, None, None]
        for seat, weight in zip(seats, weights, strict=True)
    ]
    return sum(weighted[1:], weighted[0])
