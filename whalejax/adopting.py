"""States of one step in the hands of another.

A state belongs to a layout: a step takes every state of its own model and optimizer
whose arrays lie where its own would. Others are moved from device to device. It is
apart from the step because it compares and moves arrays and runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from whalejax.meshes.problems import Problems
from whalejax.planner.plan import PlanError
from whalejax.precision import LossScale
from whalejax.state import Origin, TrainState, bare, check_alive, following


_SECTIONS = ("params", "rest", "opt_state", "step", "rng", "loss_scale")


def own_state(
    given: Any, origin: Origin, own: Callable[[], TrainState], *, trains: bool
) -> TrainState:
    """A state as one of a step's own.

    Args:
        given: what the step was given.
        origin: of the step's own.
        own: gives an abstract one, with layouts.
        trains: it is trained; else an evaluation reads it, and no optimizer's state.

    Raises:
        PlanError: it is consumed, or no state of such a layout; what differs is listed.
    """
    state = checked(given)
    if state.origin is not origin:
        abstract = own()
        compared = (state, abstract) if trains else (bare(state), bare(abstract))
        problems = [*_other_leaves(*compared)]
        _raise_for(problems, _OTHER if trains else _OTHER_MODEL)
        _raise_for([*_other_places(*compared)], _ELSEWHERE)
        state = following(replace(state, origin=origin), state)
    if trains:
        _check_apart(state)
    return state


_OTHER = (
    "this state is another model's or optimizer's than this step is compiled for. Give "
    "a state of the same model and optimizer, or begin with step.init_from(state.model)"
)
_OTHER_MODEL = (
    "this state is another model's than this step is compiled for. Give a state of the "
    "same model"
)
_ELSEWHERE = (
    "the arrays of this state lie otherwise than this step has them. Move them with "
    "state = step.adopt(state)"
)
_MOST_LISTED = 5


def checked(state: Any) -> TrainState:
    """A state whose arrays are all there.

    Raises:
        PlanError: it is none, or a step has consumed it.
    """
    if not isinstance(state, TrainState):
        raise PlanError(
            f"the state is {type(state).__name__}; expected the TrainState that init, "
            "init_from, restore or adopt of a step gave, or that its last call returned"
        )
    check_alive(state)
    return state


def _check_apart(state: TrainState) -> None:
    """Refuse an array that stands in two places, which a step cannot reuse twice."""
    leaves = jax.tree.leaves(state)
    if len({*map(id, leaves)}) == len(leaves):
        return
    names: dict[int, str] = {}
    for name, leaf in _leaves(state).items():
        first = names.setdefault(id(leaf), name)
        if first != name and isinstance(leaf, jax.Array):
            raise PlanError(
                f"{first} and {name} are one array, and a step reuses the memory of "
                "each. Put a copy into one of them: jax.numpy.copy(x)"
            )


def _raise_for(problems: Sequence[str], title: str) -> None:
    found = Problems(kind=PlanError)
    for text in problems[:_MOST_LISTED]:
        found.add(text)
    if len(problems) > _MOST_LISTED:
        found.add(f"and {len(problems) - _MOST_LISTED} more arrays")
    found.raise_if_any(title=title)


def _leaves(state: TrainState) -> dict[str, Any]:
    found = {}
    for section in _SECTIONS:
        several = jax.tree_util.tree_flatten_with_path(getattr(state, section))[0]
        for path, leaf in several:
            found[f"state.{section}{jax.tree_util.keystr(path)}"] = leaf
    return found


def _other_leaves(state: TrainState, own: TrainState) -> Iterator[str]:
    """Arrays that only one of two states has, or of which they have unlike ones."""
    given, wanted = _leaves(state), _leaves(own)
    for name in [*wanted, *(n for n in given if n not in wanted)]:
        a, b = (_text(leaves.get(name)) for leaves in (given, wanted))
        if a != b:
            yield f"{name} is {a}; expected {b}"
    there: Any = jax.tree.structure(_sections(state))
    here: Any = jax.tree.structure(_sections(own))
    if given.keys() == wanted.keys() and there != here:
        yield f"its containers are {there!s:.200}; expected {here!s:.200}"


def _sections(state: TrainState) -> list[Any]:
    return [getattr(state, section) for section in _SECTIONS]


def _text(leaf: Any) -> str:
    if leaf is None:
        return "not there"
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(jnp.shape(leaf))}"


def _other_places(state: TrainState, own: TrainState) -> Iterator[str]:
    given, wanted = _leaves(state), _leaves(own)
    for name, leaf in given.items():
        target = wanted[name].sharding
        if not isinstance(leaf, jax.Array):
            yield f"{name} is {type(leaf).__name__}; expected a jax.Array"
        elif not _lies(leaf, target):
            yield f"{name} lies as {_place(leaf.sharding)}; here {_place(target)}"


def _lies(leaf: Any, target: Any) -> bool:
    there = leaf.sharding
    if (there.memory_kind or "device") != (target.memory_kind or "device"):
        return False
    return bool(there == target or there.is_equivalent_to(target, leaf.ndim))


def _place(sharding: Any) -> str:
    devices = len(sharding.device_set)
    where = f"{devices} device{'s' * (devices > 1)}"
    if not isinstance(sharding, NamedSharding):
        return f"{type(sharding).__name__} on {where}"
    kind = sharding.memory_kind
    host = "" if kind in (None, "device") else f" in {kind}"
    return f"{sharding.spec} on {where}{host}"


# Moving.


def adopted(given: Any, abstract: TrainState) -> TrainState:
    """A copy of a state where a step has its own.

    Args:
        given: a state of the same model and optimizer; of an optimizer's state and a
            loss scale as far as the step has them.
        abstract: a state of the step, with layouts.

    Raises:
        PlanError: it is consumed, another model's, or lies in parts in other processes.
    """
    state = checked(given)
    if not jax.tree.leaves(abstract.opt_state):
        state = following(replace(state, opt_state=abstract.opt_state), state)
    if (state.loss_scale is None) != (abstract.loss_scale is None):
        scale = None if abstract.loss_scale is None else LossScale.fresh()
        state = following(replace(state, loss_scale=scale), state)
    _raise_for([*_other_leaves(state, abstract)], _OTHER)
    _check_reach(state, abstract)
    moved = {
        name: jax.tree.map(
            lambda leaf, aval: _moved(leaf, aval.sharding),
            getattr(state, name),
            getattr(abstract, name),
        )
        for name in _SECTIONS
    }
    return following(replace(abstract, samples=state.samples, **moved), state)


def _check_reach(state: TrainState, abstract: TrainState) -> None:
    """Refuse what cannot go from device to device."""
    if jax.process_count() == 1:
        return
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True)
    for leaf, aval in pairs:
        if leaf.sharding.device_set != aval.sharding.device_set:
            raise PlanError(
                "adopt: of several processes, arrays go from device to device only "
                "where both steps have every array on the same devices. Save with the "
                "one step and restore with the other"
            )


def _moved(leaf: Any, target: Any) -> Any:
    """A copy of an array in another layout."""
    # What is put elsewhere may share the memory of shards that stay where they are.
    leaf = jnp.copy(leaf)
    if _lies(leaf, target):
        return leaf
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, target)
    return jax.jit(lambda x: x, out_shardings=target)(leaf)
