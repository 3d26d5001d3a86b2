"""Parameters that are in host memory, and come to the device where they are read.

Such a parameter is a stack of layers that a scan reads a slice of in each turn. It goes
through the program as it is, in host memory, to the operation that reads it; what is
between (casts, changes of form) is done there. So its slice alone is on the device, and
the backward pass brings it again.

Its gradient is made on the device and stays there. JAX would send the gradient of what
was brought from host memory back to it; therefore nothing is differentiated by the
parameter itself, but by a seed of its shape: an array that the forward pass never
reads, of which nothing is left in the compiled program. What is cast arrives at the
seed of the narrow type, so that gradients are as narrow as without host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from whalejax.lowering.spmd.optimizer_offload import to_device


Run = Callable[[Any, int], Any]
"""From a value and the number of leading dimensions that were sliced off since the step
was noted, to another value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStep:
    """Pending operation on an offloaded parameter.

    Attributes:
        run: Does it.
        rank: Rank of the parameter when the operation was recorded.
        keeps: Leading dimensions that it leaves alone, of which slices can be taken.
    """

    run: Run
    rank: int
    keeps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParameter:
    """A parameter in host memory, or a layer's slice of it, on its way to its reader.

    Attributes:
        host: Its values.
        seed: Array that is differentiated in its place; None where no gradient is
            needed.
        steps: Pending operations, in order; they have been applied to the seed.
    """

    host: Any
    seed: Any = None
    steps: tuple[ReadStep, ...] = ()

    @property
    def sliceable(self) -> bool:
        """Returns whether the pending operations can be applied to slices."""
        rank = self.host.ndim
        return all(step.keeps > step.rank - rank for step in self.steps)

    def then(self, run: Run, *, keeps: int) -> HostParameter:
        """The same with one more step.

        Args:
            run: Does it.
            keeps: Leading dimensions that it leaves alone.
        """
        step = ReadStep(run=run, rank=self.host.ndim, keeps=keeps)
        seed = None if self.seed is None else run(self.seed, 0)
        return replace(self, seed=seed, steps=(*self.steps, step))

    def fetched(self) -> Any:
        """The value on the device."""
        value = to_device(self.host)
        for step in self.steps:
            value = step.run(value, step.rank - self.host.ndim)
        return value if self.seed is None else _differentiated_by(self.seed, value)


jax.tree_util.register_dataclass(
    HostParameter, data_fields=["host", "seed"], meta_fields=["steps"]
)


def settled(values: Sequence[Any]) -> list[Any]:
    """Values with those that are away brought to the device."""
    return [v.fetched() if isinstance(v, HostParameter) else v for v in values]


def out_of_host(value: Any) -> Any:
    """An array in the devices' memory, wherever it lies."""
    space = getattr(jax.typeof(value), "memory_space", None)
    return to_device(value) if space == jax.memory.Space.Host else value


def viewed(equation: Any, value: HostParameter) -> HostParameter | None:
    """Returns the offloaded parameter after an operation that only changes its shape or
    dtype.

    Args:
        equation: The operation.
        value: Its only operand.

    Returns:
        The parameter with one more step, or None where the operation does more.
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
    """The value, whose gradient is the seed's."""
    return value


def _forward(seed: Any, value: Any) -> tuple[Any, None]:
    return value, None


def _backward(_: None, gradient: Any) -> tuple[Any, None]:
    return gradient, None


_differentiated_by.defvjp(_forward, _backward)
