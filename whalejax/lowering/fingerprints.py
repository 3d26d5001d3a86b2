"""What an optimizer does, in a few digits that processes compare.

Processes whose optimizers are of another form compile other programs, and wait for
each other's collectives; where only numbers of theirs differ, their parameters drift
apart without a word. An optimizer is functions: compared are the state that it keeps
and the numbers and operations of its update, in any order, so that sets and
dictionaries may be walked in another one.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax.optimizers import updates


if TYPE_CHECKING:
    from whalejax.lowering.spmd import Program


_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")
"""Functions are printed with theirs, which differ between processes."""


def fingerprint(program: Program) -> str:
    """Twelve hexadecimal digits of what an optimizer keeps and does.

    Args:
        program: whose optimizer updates its parameters; structure, shapes and types of
            both count, and what its update computes.

    Raises:
        WhaleError: its update takes more than a step has for it.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.adapter.params
    )
    state = jax.eval_shape(program.optimizer.init, params)
    leaves = jax.tree.leaves((params, state))
    forms = [(x.shape, str(x.dtype)) for x in leaves]
    step = functools.partial(updates, program.optimizer)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        done = [
            *_operations(jax.make_jaxpr(program.optimizer.init)(params)),
            *_operations(jax.make_jaxpr(step)(params, state, params, loss)),
        ]
    text = _ADDRESS.sub("", f"{jax.tree.structure(state)} {forms} {sorted(done)}")
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _operations(closed: Any) -> Iterator[str]:
    """Each operation with the type of its result and its numbers, inner ones too."""
    jaxpr = getattr(closed, "jaxpr", closed)
    yield from map(_number, getattr(closed, "consts", ()))
    yield from (_number(x.val) for x in jaxpr.outvars if hasattr(x, "val"))
    for eqn in jaxpr.eqns:
        numbers = [_number(x.val) for x in eqn.invars if hasattr(x, "val")]
        results = [str(x.aval) for x in eqn.outvars]
        yield f"{eqn.primitive.name} {numbers} {results}"
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from _operations(inner)


def _is_jaxpr(value: object) -> bool:
    return hasattr(value, "eqns")


def _number(value: Any) -> str:
    """A constant in a few characters."""
    if isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    ):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    digits = hashlib.sha256(array.tobytes()).hexdigest()[:12]
    return f"{array.dtype}{array.shape} {digits}"
