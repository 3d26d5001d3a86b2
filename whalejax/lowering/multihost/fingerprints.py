"""Hashes of optimizers (their state and update), which processes compare.

Processes with different optimizers compile different programs, and wait for each
other's collectives. If only constants differ, their parameters diverge silently. An
optimizer consists of functions, so the hash covers its state and the operations of its
update, with constants. Each result is hashed with its inputs. The order of independent
operations does not count, so dictionaries may be traversed in any order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.lowering.optimizer_state import updates


if TYPE_CHECKING:
    from whalejax.lowering.spmd.spmd_executor import Program


_SIMPLE: Final = (bool, int, float, complex, str, type(None), np.dtype, np.generic)
"""Types of parameters that define an operation; others may name source lines."""

Constant = Callable[[Any], str]


def fingerprint(program: Program) -> str:
    """Returns the hash of an optimizer's state and update: twelve hexadecimal digits.

    Args:
        program: Program with the optimizer and its parameters. The hash covers names,
            shapes and dtypes of both, and the operations of the update.

    Raises:
        WhaleError: The update needs arguments that a step does not have.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.adapter.params
    )
    state = jax.eval_shape(program.optimizer.init, params)
    leaves = jax.tree_util.tree_flatten_with_path((params, state))[0]
    forms = [(jax.tree_util.keystr(p), x.shape, str(x.dtype)) for p, x in leaves]
    step = functools.partial(updates, program.optimizer)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        traced = (
            jax.make_jaxpr(program.optimizer.init)(params),
            jax.make_jaxpr(step)(params, state, params, loss),
        )
    constant = _Constants()
    return _digits(forms, [_results(one, constant) for one in traced])[:12]


def _digits(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:24]


def _results(closed: Any, constant: Constant) -> list[str]:
    jaxpr = getattr(closed, "jaxpr", closed)
    known: dict[Any, str] = {x: f"input {n}" for n, x in enumerate(jaxpr.invars)}
    constants = zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False)
    known.update((x, constant(value)) for x, value in constants)

    def read(values: Sequence[Any]) -> list[str]:
        return [constant(x.val) if hasattr(x, "val") else known[x] for x in values]

    for eqn in jaxpr.eqns:
        inner = jax.tree.leaves([*eqn.params.values()], is_leaf=_is_jaxpr)
        bodies = [_results(body, constant) for body in inner if _is_jaxpr(body)]
        made = _digits(
            eqn.primitive.name, _simple_params(eqn.params), read(eqn.invars), bodies
        )
        for number, x in enumerate(eqn.outvars):
            known[x] = _digits(made, number, str(x.aval))
    return read(jaxpr.outvars)


def _simple_params(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted((k, v) for k, v in params.items() if k != "name" and _is_simple(v))


def _is_simple(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns")


class _Constants:
    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def __call__(self, value: Any) -> str:
        call = self._known.get(id(value))
        if call is None:
            call = self._known[id(value)] = value, self._digits_of(value)
        return call[1]

    def _digits_of(self, value: Any) -> str:
        if isinstance(value, jax.Array) and jnp.issubdtype(
            value.dtype, jax.dtypes.prng_key
        ):
            value = jax.random.key_data(value)
        array = np.ascontiguousarray(np.asarray(value))
        digits = hashlib.sha256(array.view(np.uint8).data if array.size else b"")
        return f"{array.dtype}{array.shape} {digits.hexdigest()[:24]}"
