"""Arrays without values that NNX modules hold outside their variables.

Variables of a module from ``nnx.eval_shape`` have shapes in place of values. Arrays in
plain attributes or containers of the module are tracers whose trace has ended, so no
loss can compute with them. Only this module looks at attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from whalejax.meshes.errors import Problems


def refuse_arrays_without_values(model: Any, variables: Mapping[Any, Any]) -> None:
    """Raises an error if modules have arrays without values outside their variables.

    Args:
        model: Module, or a container of modules.
        variables: Values of the variables and arrays that Flax finds, by path.

    Raises:
        WhaleError: There are such arrays. The message lists every attribute with one,
            and the remedy.
    """
    known = {id(value) for value in variables.values()}
    problems = Problems("model")
    for path, module in nnx.iter_modules(model):
        for name, value in vars(module).items():
            if name.startswith("_pytree__"):
                continue
            arrays = [x for x in _arrays(value) if id(x) not in known]
            if arrays:
                where = ".".join(map(str, (*path, name)))
                problems.add(_text(where, value, arrays[0]))
    problems.raise_if_any()


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, Tracer | jax.ShapeDtypeStruct):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _arrays(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _arrays(item)
    elif callable(value) and not isinstance(value, nnx.Module | nnx.Variable):
        for cell in getattr(value, "__closure__", None) or ():
            if isinstance(_content(cell), Tracer):
                yield cell.cell_contents


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The cell is empty.
        return None


def _text(where: str, value: Any, array: Any) -> str:
    kind = f"{array.dtype}{list(array.shape)}"
    holds = "is" if array is value else f"({type(value).__name__}) holds"
    return (
        f"{where} {holds} a plain array, {kind}, of which nnx.eval_shape leaves no "
        "value. Give the module itself, built without nnx.eval_shape; or make it a "
        "variable, as in nnx.Variable(jnp.arange(8.0)), or a NumPy array"
    )
