"""Parameters in host memory, fetched to the device where they are read.

Such a parameter is a stack of layers, of which a scan reads a slice in each iteration.
It stays in host memory until an operation reads it. Casts, reshapes and sharding
constraints before the read are pending, and are applied to the fetched slice. So only
the slice is on the device, and the backward pass fetches it again.

The gradient of the parameter is computed on the device and stays there. JAX would send
the gradient of a fetched value back to host memory. So the gradient is taken with
respect to ``seed``, an array of the parameter's shape that stands in for it. The
forward pass never reads the seed, and it is absent from the compiled program. Pending
operations are also applied to the seed. So gradients have the same narrow type as
without offload.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from whalejax.lowering.spmd.optimizer_offload import to_device


Run = Callable[[Any, int], Any]
"""Function from a value to another value. Its second argument is the number of leading
dimensions that were sliced off since the operation was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStep:
    """Pending operation on an offloaded parameter.

    Attributes:
        run: Function that runs the operation.
        rank: Rank of the parameter when the operation was recorded.
        keeps: Number of unchanged leading dimensions, which can be sliced.
    """

    run: Run
    rank: int
    keeps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParameter:
    """A parameter in host memory, or a layer's slice of it, before it is read.

    Attributes:
        host: Values of the parameter.
        seed: Array with respect to which the gradient is taken; None without a
            gradient.
        steps: Pending operations on ``host``, in order. They have been applied to
            ``seed``.
    """

    host: Any
    seed: Any = None
    steps: tuple[ReadStep, ...] = ()

    @property
    def sliceable(self) -> bool:
        """Whether the pending operations can be applied to slices."""
        rank = self.host.ndim
        return all(step.keeps > step.rank - rank for step in self.steps)

    def then(self, run: Run, *, keeps: int) -> HostParameter:
        """Returns the parameter with one more pending operation.

        Args:
            run: Function that runs the operation.
            keeps: Number of unchanged leading dimensions.
        """
        step = ReadStep(run=run, rank=self.host.ndim, keeps=keeps)
        seed = None if self.seed is None else run(self.seed, 0)
        return replace(self, seed=seed, steps=(*self.steps, step))

    def fetched(self) -> Any:
        """Returns the value on the device."""
        value = to_device(self.host)
        for step in self.steps:
            value = step.run(value, step.rank - self.host.ndim)
        return value if self.seed is None else _differentiated_by(self.seed, value)


jax.tree_util.register_dataclass(
    HostParameter, data_fields=["host", "seed"], meta_fields=["steps"]
)


def settled(values: Sequence[Any]) -> list[Any]:
    """Returns the values; offloaded parameters are fetched to the device."""
    return [v.fetched() if isinstance(v, HostParameter) else v for v in values]


def out_of_host(value: Any) -> Any:
    """Returns an array in device memory."""
    space = getattr(jax.typeof(value), "memory_space", None)
    return to_device(value) if space == jax.memory.Space.Host else value


def viewed(equation: Any, value: HostParameter) -> HostParameter | None:
    """Adds a reshape or a cast to the pending operations of an offloaded parameter.

    Args:
        equation: Operation on the parameter.
        value: Parameter, the only operand of the operation.

    Returns:
        The parameter with one more operation, or None for other operations.
    """
    name, params = equation.primitive.name, equation.params
    if name == "convert_element_type":
        dtype = params["new_dtype"]
        return value.then(lambda x, _: x.astype(dtype), keeps=value.host.ndim)
    if name == "reshape":
        old, new = equation.invars[0].aval.shape, params["new_sizes"]
        same = (a == b for a, b in zip(old, new, strict=False))
        keeps = sum(itertools.takewhile(bool, same))
        return value.then(lambda x, sliced: x.reshape(new[sliced:]), keeps=keeps)
    return None


@jax.custom_vjp
def _differentiated_by(seed: Any, value: Any) -> Any:
    """Returns the value, whose gradient becomes that of the seed."""
    return value


def _forward(seed: Any, value: Any) -> tuple[Any, None]:
    return value, None


def _backward(_: None, gradient: Any) -> tuple[Any, None]:
    return gradient, None


_differentiated_by.defvjp(_forward, _backward)
