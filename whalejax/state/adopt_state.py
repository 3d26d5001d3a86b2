"""Moves the state of one compiled step to the layout of another.

A step accepts every state of its model and optimizer whose arrays have the step's
shardings. ``step.adopt`` moves other states from device to device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from whalejax import _compat
from whalejax.adapters.leaves import is_key, is_leaf
from whalejax.lowering.loss_scale import LossScale
from whalejax.lowering.train_state import (
    Origin,
    TrainState,
    bare,
    check_alive,
    following,
)
from whalejax.meshes.checks import is_whole, plain, short_repr
from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text
from whalejax.planner.plan_errors import PlanError


_SECTIONS = ("params", "rest", "opt_state", "step", "rng", "loss_scale")


class OwnStates:
    """Checks and converts states for one step.

    A state with the layout of the previous state passes without a check of each leaf.
    """

    def __init__(self, origin: Origin) -> None:
        """Creates the checker without a known layout.

        Args:
            origin: Identity of the step.
        """
        self._origin = origin
        self._seen: dict[bool, Any] = {}

    def checked(
        self, given: Any, own: Callable[[], TrainState], *, trains: bool
    ) -> TrainState:
        """Returns a state in the form of the step's own.

        Args:
            given: State that the step received.
            own: Function that returns an abstract state of the step, with layouts.
            trains: Whether the state is trained. If not, an evaluation reads it, and
                gets only the parts that it needs.

        Raises:
            PlanError: The value is not a state, or the state was donated, has one array
                twice, or has another layout.
        """
        whole = checked(given)
        state = whole if trains else bare(whole)
        if _layout(state) != self._seen.get(trains):
            abstract = own() if trains else bare(own())
            check_leaves(state, abstract, trains=trains)
            if any(map(_is_traced, jax.tree.leaves(state))):
                raise PlanError(_TRACED)
            _raise_for([*_other_places(state, abstract)], _ELSEWHERE)
            state = _place_loose_leaves(replace(state, origin=self._origin), abstract)
            self._seen[trains] = _layout(state)
            state = following(state, whole)
        if trains:
            _check_apart(state)
        return state


def _layout(state: TrainState) -> Any:
    """Returns a key that is equal for states of equal layout."""
    leaves, tree = jax.tree.flatten(state)
    places = [getattr(leaf, "sharding", None) for leaf in leaves]
    return tree, [getattr(leaf, "aval", None) for leaf in leaves], places


def check_leaves(state: TrainState, own: TrainState, *, trains: bool) -> None:
    """Refuses a state whose arrays differ from the step's, placement aside.

    Args:
        state: State from the user.
        own: Abstract state of the step.
        trains: Whether the message mentions the optimizer.

    Raises:
        PlanError: Arrays differ.
    """
    _raise_for([*_other_leaves(state, own)], _OTHER if trains else _OTHER_MODEL)


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not _compat.is_concrete(leaf)


def _is_loose(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array) and _compat.is_concrete(leaf):
        return not leaf.committed
    return isinstance(leaf, np.ndarray | np.generic)


def _place_loose_leaves(state: TrainState, own: TrainState) -> TrainState:
    def put(leaf: Any, aval: Any) -> Any:
        return jax.device_put(leaf, aval.sharding) if _is_loose(leaf) else leaf

    if not any(map(_is_loose, jax.tree.leaves(state))):
        return state
    parts = {
        name: jax.tree.map(put, getattr(state, name), getattr(own, name))
        for name in _SECTIONS
    }
    return replace(state, **parts)


_OTHER = (
    "this state is of another model or optimizer than this step. Give a state of the "
    "same model and optimizer, or begin with step.init_from(state.model)"
)
_OTHER_MODEL = (
    "this state is of another model than this step. Give a state of the same model"
)
_ELSEWHERE = (
    "the arrays of this state have other shardings than those of this step. Move them "
    "with state = step.adopt(state)"
)
_TRACED = (
    "this state is being traced; the step is compiled: call it outside jax.jit, "
    "jax.grad and other transformations"
)
_MOST_LISTED = 5


def checked(state: Any) -> TrainState:
    """Returns a state whose arrays all exist, with ``samples`` as an ``int``.

    Raises:
        PlanError: The value is not a state, a step has donated it, or its ``samples``
            are invalid.
    """
    if not isinstance(state, TrainState):
        raise PlanError(
            f"the state is {type(state).__name__}; expected the TrainState that init, "
            "init_from, restore or adopt of a step gave, or that its last call returned"
        )
    check_alive(state)
    seen = state.samples
    if seen is None or type(seen) is int and is_whole(seen, 0):
        return state
    if not is_whole(seen, 0):
        raise PlanError(
            f"state.samples is {short_repr(seen)}; expected the number of samples that "
            "its steps took, 0 or more, or None where that is not known"
        )
    return following(replace(state, samples=plain(seen)), state)


def _check_apart(state: TrainState) -> None:
    """Refuses an array that occurs twice, because a step cannot donate it twice."""
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
    result = Problems(kind=PlanError)
    for text in problems[:_MOST_LISTED]:
        result.add(text)
    if len(problems) > _MOST_LISTED:
        result.add(f"and {len(problems) - _MOST_LISTED} more arrays")
    result.raise_if_any(title=title)


def _leaves(state: TrainState) -> dict[str, Any]:
    leaves = {}
    for section in _SECTIONS:
        several = jax.tree_util.tree_flatten_with_path(getattr(state, section))[0]
        for path, leaf in several:
            leaves[f"state.{section}{jax.tree_util.keystr(path)}"] = leaf
    return leaves


def _other_leaves(state: TrainState, own: TrainState) -> Iterator[str]:
    """Yields the leaves and containers that differ between two states."""
    given, wanted = _leaves(state), _leaves(own)
    # Steps accept keys of any algorithm if the loss takes no key.
    free = "" if own.origin.adapter.takes_rng else "state.rng"
    for name in [*wanted, *(n for n in given if n not in wanted)]:
        x: Any = given.get(name)
        y: Any = wanted.get(name)
        a, b = _text(x), _text(y)
        alike = name == free and is_key(x) and is_key(y) and x.shape == y.shape
        if a != b and not alike:
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
    if not is_leaf(leaf):
        return f"a {type(leaf).__name__}"
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(jnp.shape(leaf))}"


def _other_places(state: TrainState, own: TrainState) -> Iterator[str]:
    given, wanted = _leaves(state), _leaves(own)
    for name, leaf in given.items():
        target = wanted[name].sharding
        if _is_loose(leaf):
            continue
        if not isinstance(leaf, jax.Array):
            yield f"{name} is {_text(leaf)}; expected a jax.Array with values"
        elif not _lies(leaf, target):
            yield f"{name} has {_place(leaf.sharding)}; expected {_place(target)}"


def _lies(leaf: Any, target: Any) -> bool:
    there = leaf.sharding
    if (there.memory_kind or "device") != (target.memory_kind or "device"):
        return False
    return bool(there == target or there.is_equivalent_to(target, leaf.ndim))


def _place(sharding: Any) -> str:
    devices = len(sharding.device_set)
    where = count_text(devices, "device")
    if not isinstance(sharding, NamedSharding):
        return f"{type(sharding).__name__} on {where}"
    kind = sharding.memory_kind
    host = "" if kind in (None, "device") else f" in {kind}"
    return f"{sharding.spec} on {where}{host}"


def to_lower(
    given: Any, states: OwnStates, own: Callable[[], TrainState]
) -> TrainState:
    """Returns the state with which a step is lowered; ``given`` may be abstract.

    Args:
        given: State that the step received.
        states, own: Checker of the step's states, and its abstract state, as in
            ``OwnStates.checked``.
    """
    leaves = jax.tree.leaves(given)
    if not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return states.checked(given, own, trains=True)
    abstract = own()
    check_leaves(checked(given), abstract, trains=True)
    return abstract


def to_save(given: Any, own: TrainState, *, trains: bool) -> TrainState:
    """Returns a state for a checkpoint of a step, with any sharding.

    Args:
        given: State to save.
        own: Abstract state of the step.
        trains: Whether the step trains. If not, the optimizer may be another one.

    Raises:
        PlanError: The value is not a state, or the state was donated, has no values, or
            is of another model or optimizer.
    """
    state = checked(given)
    compared = (state, own) if trains else (bare(state), bare(own))
    check_leaves(*compared, trains=trains)
    check_values(state)
    known = isinstance(state.origin, Origin)
    return state if known else replace(state, origin=own.origin)


# Moving.


def adopted(given: Any, abstract: TrainState) -> TrainState:
    """Returns a copy of a state in a step's layout.

    Args:
        given: State of the same model and optimizer. The optimizer's state and the loss
            scale are used only if the step has them; a missing loss scale starts anew.
        abstract: Abstract state of the step, with layouts.

    Raises:
        PlanError: The value is not a state, or the state was donated, has no values, is
            of another model, or would have to move between processes.
    """
    state = checked(given)
    if not jax.tree.leaves(abstract.opt_state):
        state = following(replace(state, opt_state=abstract.opt_state), state)
    if (state.loss_scale is None) != (abstract.loss_scale is None):
        scale = None if abstract.loss_scale is None else LossScale.initial()
        state = following(replace(state, loss_scale=scale), state)
    check_leaves(state, abstract, trains=True)
    check_values(state)
    _check_reach(state, abstract)
    moved = {
        name: jax.tree.map(
            lambda leaf, aval: _relayout(leaf, aval.sharding),
            getattr(state, name),
            getattr(abstract, name),
        )
        for name in _SECTIONS
    }
    return following(replace(abstract, samples=state.samples, **moved), state)


def check_values(state: TrainState) -> None:
    """Refuses a state with abstract leaves.

    Raises:
        PlanError: Leaves have no values.
    """
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
        shapes = [
            f"{name} is a shape; expected a jax.Array"
            for name, leaf in _leaves(state).items()
            if isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        _raise_for(shapes, "this state has no values")


def _check_reach(state: TrainState, abstract: TrainState) -> None:
    if jax.process_count() == 1:
        return
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True)
    for leaf, aval in pairs:
        if leaf.sharding.device_set != aval.sharding.device_set:
            raise PlanError(
                "adopt: with several processes, both steps must have every array on "
                "the same devices, since arrays cannot move between processes. Save "
                "with one step and restore with the other"
            )


def _relayout(leaf: Any, target: Any) -> Any:
    # A moved array may share memory with the original, for shards that do not move.
    leaf = jnp.copy(leaf)
    if _lies(leaf, target):
        return leaf
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, target)
    return jax.jit(lambda x: x, out_shardings=target)(leaf)
