"""Programs put together from equations of others, against tracing them anew."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.jaxpr import rebuild
from whalejax.jaxpr.splice import spliced


TABLE = np.array([3.0, 1.0, 2.0], np.float32)


@jax.jit
def _scaled(x: Any, factor: Any) -> Any:
    with jax.named_scope("inner"):
        return jnp.where(x > factor, x * jnp.asarray(TABLE), factor)


def _loss(x: Any) -> Any:
    """Two calls of one function, one of them with a number of the program's text."""
    with jax.named_scope("outer"):
        y = _scaled(x, jnp.float32(2))
    return _scaled(y, x.sum()).sum(), y


def _inlined(equation: Any) -> str | None:
    return "inline" if _compat.recursion(equation) == "inline" else None


def _traced_anew(jaxpr: Any, values: Any) -> list[Any]:
    def each(equation: Any, operands: Any) -> Any:
        if _compat.recursion(equation) == "inline":
            return _traced_anew(_compat.inner_jaxprs(equation)[0], operands)
        return _compat.bind(equation, operands)

    return rebuild.run(jaxpr, values, each)


def _text(jaxpr: Any) -> str:
    body, _ = _compat.open_jaxpr(jaxpr)
    return str(body.pretty_print(name_stack=True))


def test_calls_inlined_are_what_a_new_trace_gives() -> None:
    """Scopes, folded numbers and arrays of the program included."""
    x = jnp.asarray([1.0, 2.0, 4.0])
    program = jax.make_jaxpr(_loss)(x)
    found = spliced(program, _inlined)
    anew = jax.make_jaxpr(lambda *xs: _traced_anew(program, xs))(x)
    assert _text(found) == _text(anew)
    assert "outer" in _text(found) and "inner" in _text(found)
    assert not any(map(_inlined, _compat.open_jaxpr(found)[0].eqns))
    for one, other in zip(
        jax.core.eval_jaxpr(found.jaxpr, found.consts, x),
        jax.tree.leaves(_loss(x)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


def test_other_equations_stay_themselves() -> None:
    """Only what computes otherwise is traced."""
    program = jax.make_jaxpr(lambda x: jnp.exp(jnp.sin(x) + 1.0))(1.0)
    before = _compat.open_jaxpr(program)[0].eqns

    def change(equation: Any) -> Any:
        found: Any = jnp.cos if equation.primitive.name == "sin" else None
        return found and (lambda x: [found(x)])

    found = spliced(program, change)
    after = _compat.open_jaxpr(found)[0].eqns
    assert [e.primitive.name for e in after] == ["cos", "add", "exp"]
    assert after[2] is before[2]
    (result,) = jax.core.eval_jaxpr(found.jaxpr, found.consts, 0.5)
    np.testing.assert_allclose(result, np.exp(np.cos(0.5) + 1), rtol=1e-6)


def test_an_array_may_be_made_instead() -> None:
    """What stands for an array of the program is traced once, in front."""
    program = jax.make_jaxpr(lambda x: x + jnp.asarray(np.arange(3)))(
        jnp.zeros(3, jnp.int32)
    )
    assert len(_compat.open_jaxpr(program)[1]) == 1
    found = spliced(
        program,
        lambda equation: None,
        constant=lambda value: lambda: jax.lax.iota(value.dtype, 3),
    )
    body, constants = _compat.open_jaxpr(found)
    assert body.eqns[0].primitive.name == "iota" and not constants
    (result,) = jax.core.eval_jaxpr(body, (), jnp.ones(3, jnp.int32))
    assert result.tolist() == [1, 2, 3]
