"""Finds the parameter of each leaf of an optimizer's state.

The planner counts the bytes of the leaves by parameter, and the lowering shards them
like their parameters.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from whalejax._compat import inner_jaxprs, open_jaxpr
from whalejax.adapters.base import Adapter
from whalejax.adapters.leaves import WHOLE
from whalejax.meshes.device_kinds import Platform
from whalejax.meshes.errors import WhaleError
from whalejax.planner.model.graph import TRANSCENDENTAL
from whalejax.planner.sharding.parameter_layout import OptimizerBytes


def updates(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    params: Any,
    loss: Any,
) -> tuple[Any, Any]:
    """Returns an optimizer's updates of the parameters, and its new state.

    Args:
        optimizer: Optimizer that accepts extra arguments.
        gradients: Gradients, in the structure that the optimizer takes.
        state: State of the optimizer.
        params: Parameters, in the structure that the optimizer takes.
        loss: Loss, passed as ``value`` if the optimizer accepts that argument.

    Raises:
        WhaleError: The update needs other arguments, or parameters in another form.
    """
    try:
        result: tuple[Any, Any] = _updated(optimizer, gradients, state, params, loss)
    except (TypeError, AttributeError, ValueError) as error:
        told = {AttributeError: "", TypeError: "argument", ValueError: "be provided"}
        if told.get(type(error), "\0") not in str(error):
            raise  # JAX itself may have raised it.
        raise WhaleError(
            "the optimizer's update fails with gradients, state, parameters and value= "
            f"(the loss), all that a step can give: {error}. An optimizer that needs a "
            "line search, a second gradient or parameters in another form cannot be "
            "used; take another"
        ) from error
    return result


def _updated(
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    params: Any,
    loss: Any,
) -> tuple[Any, Any]:
    result: tuple[Any, Any]
    try:
        result = optimizer.update(gradients, state, params, value=loss)
    except TypeError as error:
        if "unexpected keyword argument 'value'" not in str(error):
            raise
        result = optimizer.update(gradients, state, params)
    return result


def optimizer_bytes(
    adapter: Adapter,
    optimizer: optax.GradientTransformation,
    platform: Platform | None = None,
) -> OptimizerBytes:
    """Returns the bytes of an optimizer's state, by parameter.

    Args:
        adapter: Adapter of the model.
        optimizer: Optax transformation.
        platform: Platform that runs the optimizer. On ``"cpu"``, slow operations such
            as square roots are counted too.

    Raises:
        WhaleError: The object is not an optimizer, or a step cannot give the parameters
            or arguments that it needs.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), adapter.params
    )
    state = _abstract_state(adapter, optimizer, params)
    shapes = dict(
        zip(
            adapter.param_paths, [x.shape for x in jax.tree.leaves(params)], strict=True
        )
    )
    by_path: Counter[str] = Counter()
    other = 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        owner = state_leaf_param(path, leaf.shape, shapes)
        nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize
        if owner is None:
            other += nbytes
        else:
            by_path[owner] += nbytes
    return OptimizerBytes(
        by_path=dict(by_path),
        other_bytes=other,
        operations=_operations(params, optimizer, counted=platform == "cpu"),
    )


_SLOW = TRANSCENDENTAL | {"div", "sqrt", "rsqrt", "cbrt"}
"""Primitives that are about as slow on a CPU as an exponential."""

_TRACED_LEAVES = 128
"""Above this number of leaves, equal layers are traced once."""


def _operations(
    params: Any, optimizer: optax.GradientTransformation, *, counted: bool
) -> float:
    """Returns the number of slow operations of an update per element of a parameter.

    It is 0 unless ``counted``, or if the optimizer raises; its next call reports that.
    """
    unfit: WhaleError | None = None
    extended = optax.with_extra_args_support(optimizer)
    for tree in (params,) if counted else (_thinned(params), params):
        try:
            state = jax.eval_shape(extended.init, tree)
            loss = jax.ShapeDtypeStruct((), np.float32)
            with (
                jax.numpy_dtype_promotion("standard"),
                jax.numpy_rank_promotion("allow"),
            ):
                traced = jax.make_jaxpr(updates, static_argnums=0)(
                    extended, tree, state, tree, loss
                )
        except Exception as error:  # A user's update may raise anything.
            unfit = error if isinstance(error, WhaleError) else None
            continue
        if not counted:
            return 0.0
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
        slow: float = _slow_elements(traced.jaxpr) / max(1, size)
        return slow
    if unfit is not None:
        raise unfit
    return 0.0


def _thinned(params: Any) -> Any:
    flat, tree = jax.tree_util.tree_flatten_with_path(params)
    if len(flat) <= _TRACED_LEAVES:
        return params
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for path, leaf in flat:
        key = re.sub(r"\d+", "#", jax.tree_util.keystr(path)), leaf.shape
        kept.append(None if key in seen else leaf)
        seen.add(key)
    return jax.tree.unflatten(tree, kept)


def _slow_elements(jaxpr: Any) -> int:
    """Returns the number of elements of slow operations.

    It counts the largest branch, and all iterations of scans.
    """
    slow_elements = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name in _SLOW:
            slow_elements += math.prod(equation.outvars[0].aval.shape)
        inner = [_slow_elements(open_jaxpr(x)[0]) for x in inner_jaxprs(equation)]
        turns = equation.params["length"] if equation.primitive.name == "scan" else 1
        slow_elements += turns * max(inner, default=0)
    return slow_elements


def _abstract_state(
    adapter: Adapter, optimizer: optax.GradientTransformation, params: Any
) -> Any:
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise WhaleError(
            f"optimizer is {optimizer!r:.60}; expected an optax transformation such "
            "as optax.adamw(1e-3)"
        )
    try:
        return jax.eval_shape(optimizer.init, params)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        form = "the parameters in the structure that the model has"
        if adapter.kind == "nnx":
            form = "nested dictionaries of arrays, by attribute names"
        raise WhaleError(
            f"optimizer.init fails on the parameters ({str(error).splitlines()[0]}). "
            f"It gets {form}; masks and label trees must have that structure: give a "
            "function of the parameters instead of a tree"
        ) from error


def state_leaf_param(
    path: Any, shape: tuple[int, ...], params: Mapping[str, tuple[int, ...]]
) -> str | None:
    """Returns the parameter that a leaf of an optimizer's state follows, or None.

    A leaf follows a parameter if its path ends in the parameter's path and the shapes
    are equal, as for moments and traces in all optax transformations.

    Args:
        path: Key path of the leaf.
        shape: Shape of the leaf.
        params: Shapes of all parameters by dotted path.
    """
    if len(params) == 1 and WHOLE in params:  # The model is a single array.
        name = WHOLE if shape else None
    else:
        name = named_by(path, params)
    return name if name is not None and tuple(params[name]) == tuple(shape) else None


def named_by(path: Any, params: Collection[str]) -> str | None:
    """Returns the parameter whose path ends the path of a state leaf, or None.

    The leaf may have another shape than the parameter. An example is Adafactor's means
    of squares over rows and columns.

    Args:
        path: Key path of the leaf.
        params: Dotted paths of the parameters.
    """
    keys = [key_text(key) for key in path]
    names = (".".join(keys[start:]) for start in range(len(keys)))
    return next((name for name in names if name in params), None)


def owners_of(
    state: Any, params: Sequence[tuple[str, tuple[int, ...]]]
) -> list[int | None]:
    """Returns the index of the parameter that each leaf of an optimizer state follows.

    Args:
        state: Optimizer state, abstract or real.
        params: Path and shape of each parameter.

    Returns:
        An index for each leaf; None for a leaf that follows no parameter.
    """
    shapes = {path: tuple(shape) for path, shape in params}
    numbers = {path: i for i, (path, _) in enumerate(params)}
    owners = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        owner = state_leaf_param(path, leaf.shape, shapes)
        owners.append(None if owner is None else numbers[owner])
    return owners


def kin_of(state: Any, params: Sequence[str]) -> list[int | None]:
    """Returns the index of the parameter to which each leaf of a state belongs.

    Unlike in ``owners_of``, the leaf may have another shape than the parameter.

    Args:
        state: Optimizer state, abstract or real.
        params: Path of each parameter.

    Returns:
        An index for each leaf; None for a leaf that belongs to no parameter.
    """
    numbers = {path: i for i, path in enumerate(params)}
    names = (
        named_by(path, numbers)
        for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]
    )
    return [None if name is None else numbers[name] for name in names]


def key_text(key: Any) -> str:
    """Returns one key of a tree path as a part of a dotted path."""
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)
