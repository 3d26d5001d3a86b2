"""The training state: everything that a step changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from whalejax import _compat
from whalejax.adapters.base import Adapter
from whalejax.adapters.leaves import is_key
from whalejax.capture.batch import aval_of
from whalejax.lowering.loss_scale import LossScale
from whalejax.lowering.spmd.parameter_offload import out_of_host
from whalejax.lowering.stage_arrays import spread
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import is_array, short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.units import count_digits
from whalejax.planner.plan_errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Identity of the step that made a state, equal to no other step's.

    A step that receives another step's state compares layouts once. JAX's caches store
    the tree of every state for ever. So the tree contains an origin instead of the
    step.

    Attributes:
        adapter: Adapter that divides the model into parameters and other state.
        mesh: Mesh of all devices if the plan has stage programs, else None.
    """

    adapter: Adapter
    mesh: Mesh | None = None


@dataclass(slots=True)
class ExportedModel:
    """Last model that was exported from a state.

    Attributes:
        model: Last exported model if modes can be set on it, else None.
        modes: Modes that the user set on an earlier exported model.
    """

    model: Any = None
    modes: Any = None


@names_arguments(
    "wh.TrainState",
    instance="state",
    instead="Of a model: step.init_from(model). Of a function that makes one: "
    "step.init(make_model, rng=key).",
)
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "rest", "opt_state", "step", "rng", "loss_scale"],
    meta_fields=["origin"],
    # As metadata, the number would cause recompilation.
    drop_fields=["samples"],
)
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainState:
    """Everything that a step changes, as sharded arrays.

    A step donates its state and returns the next one. ``model`` is the model in the
    user's type.

    Attributes:
        params: Trained leaves, in the structure of the user's model.
        rest: Non-trainable state: statistics, random keys, other collections.
        opt_state: State of the optimizer.
        step: Number of finished steps, an int32 scalar.
        rng: Random key of the run, from which each step derives its own, or None.
        loss_scale: Scale of float16 losses, or None.
        origin: Identity of the step that made the state.
        samples: Number of samples of all steps so far, whatever the batch sizes were.
            It is no array. ``jax.tree.map`` and similar functions return a state with
            None in its place; ``dataclasses.replace`` keeps it.
    """

    params: Any
    rest: Any
    opt_state: Any
    step: Any
    rng: Any
    loss_scale: LossScale | None
    origin: Origin
    samples: int | None = None
    _shown: ExportedModel = field(
        init=False, repr=False, compare=False, default_factory=ExportedModel
    )

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
        count = count_digits(sum(math.prod(shape) for shape in shapes))
        step = self.step
        if isinstance(step, jax.Array) and _compat.is_concrete(step):
            step = "(consumed)" if step.is_deleted() else int(step)
        elif not isinstance(step, int):
            step = "(abstract)"
        return f"<TrainState of step {step}: {count} parameters, {len(leaves)} arrays>"

    @property
    def model(self) -> Any:
        """The model in the user's type and tree, in device memory.

        Each access builds a model from the state's values. Modes that were set on it
        (``state.model.eval()``) persist, in later states too; they do not affect steps.
        The model shares the buffers of the state, which the next step donates. So read
        ``model`` again after the step, or copy its arrays before.

        Leaves on separate stages are moved to all devices, sharded if a dimension
        divides by their number, so that one function can read all of them.
        """
        check_alive(self)
        if not isinstance(self.origin, Origin):
            raise PlanError(
                f"the origin of this state is {short_repr(self.origin)}, which does "
                "not say how to build its "
                "model. Keep origin as the step returned it, "
                "or move the state to a step: step.adopt(state).model"
            )
        parts = jax.tree.map(out_of_host, self.params), self.rest
        if self.origin.mesh is not None:
            mesh = self.origin.mesh
            parts = jax.tree.map(lambda leaf: spread(leaf, mesh), parts)
        adapter, handed = self.origin.adapter, self._shown
        model = adapter.rebuild(*parts, modes=modes_of(self))
        handed.model = model if adapter.kind == "nnx" else None
        return model


def modes_of(state: TrainState) -> Any:
    """Returns the modes that were set on the model of a state, or None."""
    shown = state._shown
    if shown.model is not None:
        shown.modes = state.origin.adapter.modes_of(shown.model)
    return shown.modes


def following(state: TrainState, other: TrainState) -> TrainState:
    """Gives a state the model's modes of another state, and returns the first one."""
    state._shown.modes = modes_of(other)
    return state


def check_alive(state: TrainState) -> None:
    """Raises an error for a state whose buffers were donated; JAX might crash."""
    if _is_gone(state.step):
        raise PlanError(
            "this state was donated to a step, which reuses its memory. Continue with "
            "the state that the step returned: state, metrics = step(state, batch)"
        )
    if not any(map(_is_gone, jax.tree.leaves(state))):
        return
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    gone = [jax.tree_util.keystr(path) for path, leaf in leaves if _is_gone(leaf)]
    raise PlanError(
        f"{len(gone)} of the {len(leaves)} arrays of this state (state{gone[0]} first) "
        "were deleted, or donated to a step, which reuses their memory. Use arrays of "
        "the state that the last step returned, and no older ones, or restore a "
        "checkpoint"
    )


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and (
        _compat.is_concrete(leaf) and leaf.is_deleted()
    )


def bare(state: TrainState) -> TrainState:
    """Returns a state with only the parts that an evaluation reads."""
    return replace(state, opt_state=(), loss_scale=None)


@contextmanager
def consuming(state: TrainState) -> Iterator[None]:
    """Guards the donation of a state's buffers to several programs in sequence.

    A deleted step count marks a donated state. So the count is deleted at the end of
    the block. After an error it is deleted if any other buffer was.

    Args:
        state: State whose buffers are donated.
    """
    try:
        yield
    except BaseException:
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            state.step.delete()
        raise
    state.step.delete()


def strongly_typed(leaf: Any) -> Any:
    """Returns an array without a weak type, which would recompile the second step."""
    leaf = jnp.asarray(leaf)
    return leaf if is_key(leaf) else jax.lax.convert_element_type(leaf, leaf.dtype)


def typed_key(rng: Any, *, for_loss: bool) -> Any:
    """Returns a typed key; wraps raw uint32 keys, as from ``jax.random.PRNGKey``.

    Args:
        rng: Random key from the user.
        for_loss: Whether the loss takes the key, whose algorithm must then be the one
            with which the loss was traced.

    Raises:
        WhaleError: ``rng`` is no random key, or has another algorithm.
    """
    if not is_array(rng) or isinstance(rng, jax.ShapeDtypeStruct):
        raise WhaleError(
            f"rng is {short_repr(rng)}; expected a random key. Give "
            "jax.random.key(seed)"
        )
    if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) and not rng.shape:
        traced = jax.eval_shape(lambda: jax.random.key(0)).dtype
        if for_loss and rng.dtype != traced:
            raise WhaleError(
                f"rng is a {rng.dtype}; the loss was traced with a {traced}. Give "
                "jax.random.key(seed), or set jax_default_prng_impl before planning"
            )
        return rng
    if rng.dtype == jnp.uint32 and rng.shape == (2,):
        return jax.random.wrap_key_data(rng)
    raise WhaleError(
        f"rng has dtype {rng.dtype} and shape {tuple(rng.shape)}; expected a random "
        "key. Give jax.random.key(seed)"
    )


def host_copy(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return leaf  # An array of several processes is copied from device to device.
    if jnp.issubdtype(aval_of(leaf).dtype, jax.dtypes.prng_key):
        data: Any = np.array(jax.random.key_data(leaf), copy=True)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    return np.array(leaf, copy=True)
