"""Optimizers of table rows, which update only the rows that a batch looks up.

Gradients of a row that occurs several times are summed first. ``sgd`` and ``adagrad``
equal ``optax.sgd`` and ``optax.adagrad`` on the full table, as these do not change rows
with a gradient of zero. ``row_adagrad`` stores one number per row, the sum of the mean
squares of its gradients. ``lazy_adam`` differs from Adam: a row's moments decay only in
steps that look up the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import jax
import jax.numpy as jnp

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number
from whalejax.meshes.errors import WhaleError


Kind: TypeAlias = Literal["sgd", "adagrad", "row_adagrad", "lazy_adam"]
RowState: TypeAlias = dict[str, Any]

_KINDS: Final = ("sgd", "adagrad", "row_adagrad", "lazy_adam")
SPARSE_FORMS: Final = (
    f"one of {', '.join(_KINDS)}, which change only looked-up rows; Adam, momentum and "
    "weight decay change all rows in every step and have no sparse form"
)
"""Text on the expected optimizers of rows."""

_STATES: Final[Mapping[str, tuple[tuple[str, bool], ...]]] = {
    "sgd": (),
    "adagrad": (("sum_of_squares", False),),
    "row_adagrad": (("sum_of_squares", True),),
    "lazy_adam": (("mu", False), ("nu", False)),
}
"""(Name of a state array, whether it has one number per row) pairs by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizer:
    """Update rule of looked-up rows, as ``wh.sparse_optimizer`` makes it.

    Attributes:
        kind: ``"sgd"``, ``"adagrad"``, ``"row_adagrad"`` or ``"lazy_adam"``.
        learning_rate: Learning rate of the updates.
        initial_accumulator: Initial value of Adagrad's sums of squares.
        epsilon: Number that is added under the root (Adagrad) or to it (row-wise
            Adagrad, Adam).
        b1, b2: Decay of lazy Adam's moments.
    """

    kind: Kind
    learning_rate: float
    initial_accumulator: float = 0.1
    epsilon: float = 1e-7
    b1: float = 0.9
    b2: float = 0.999

    def __post_init__(self) -> None:
        problems = Arguments("wh.sparse_optimizer")
        if not isinstance(self.kind, str) or self.kind not in _KINDS:
            problems.refuse("kind", self.kind, SPARSE_FORMS)
        problems.number("learning_rate", self.learning_rate, least=0)
        problems.number("initial_accumulator", self.initial_accumulator, least=0)
        problems.number("epsilon", self.epsilon, least=0)
        for name in ("b1", "b2"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < 1:
                problems.refuse(name, value, "a number, 0 or more and below 1")
        problems.raise_if_any()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays."""
        return tuple(name for name, _ in _STATES[self.kind])

    @property
    def is_row_wise(self) -> bool:
        """Whether the state belongs to full rows, so that columns stay together."""
        return any(by_row for _, by_row in _STATES[self.kind])

    def state_width(self, name: str, width: int) -> int:
        """Returns the number of values per row in a state array.

        Args:
            name: Name in ``state_names``.
            width: Number of columns of the table.
        """
        return 1 if dict(_STATES[self.kind])[name] else width

    def state_bytes_per_row(self, width: int, element_bytes: int) -> int:
        """Returns the bytes of the state of one row."""
        widths = (self.state_width(name, width) for name in self.state_names)
        return sum(widths) * element_bytes

    def initial_value(self, name: str) -> float:
        """Returns the initial value of every element of a state array."""
        return self.initial_accumulator if name == "sum_of_squares" else 0.0

    def update(
        self, rows: Any, state: RowState, gradient: Any, step: Any
    ) -> tuple[Any, RowState]:
        """Returns the updated rows and their state.

        Args:
            rows: Rows, ``[rows, width]``.
            state: State of the rows, by name.
            gradient: Summed gradient of each row.
            step: Number of steps before this one.
        """
        rate = self.learning_rate
        if self.kind == "sgd":
            return rows + -rate * gradient, {}
        if self.kind == "adagrad":
            squares = gradient * gradient + state["sum_of_squares"]
            root = jax.lax.rsqrt(squares + self.epsilon)
            inverse = jnp.where(squares > 0, root, 0.0)
            return rows + -rate * (inverse * gradient), {"sum_of_squares": squares}
        if self.kind == "row_adagrad":
            mean = jnp.mean(gradient * gradient, axis=1, keepdims=True)
            squares = state["sum_of_squares"] + mean
            scale = rate / (jnp.sqrt(squares) + self.epsilon)
            return rows - scale * gradient, {"sum_of_squares": squares}
        count = (step + 1).astype(rows.dtype)
        mu = self.b1 * state["mu"] + (1 - self.b1) * gradient
        nu = self.b2 * state["nu"] + (1 - self.b2) * gradient * gradient
        mean = mu / (1 - self.b1**count)
        variance = nu / (1 - self.b2**count)
        new = rows - rate * mean / (jnp.sqrt(variance) + self.epsilon)
        return new, {"mu": mu, "nu": nu}


def optimizer_named(text: str) -> SparseOptimizer:
    """Returns the optimizer of rows that a text names.

    Args:
        text: Kind and learning rate with a colon between them.

    Raises:
        WhaleError: The text does not name an optimizer.

    >>> optimizer_named("row_adagrad:0.05").learning_rate
    0.05
    """
    kind, _, rate = text.partition(":")
    try:
        value = float(rate)
    except ValueError:
        raise WhaleError(
            "expected a kind and a learning rate, such as adagrad:0.02"
        ) from None
    named: Any = kind
    return sparse_optimizer(named, value)


@names_arguments("wh.sparse_optimizer")
def sparse_optimizer(
    kind: Kind,
    learning_rate: float,
    *,
    initial_accumulator: float = 0.1,
    epsilon: float | None = None,
    b1: float = 0.9,
    b2: float = 0.999,
) -> SparseOptimizer:
    """Returns an update rule for rows of embedding tables.

    Args:
        kind: ``"sgd"`` and ``"adagrad"`` equal optax's on the full table.
            ``"row_adagrad"`` stores one number per row. With ``"lazy_adam"``, unlike
            Adam, the moments of a row decay only in steps in which it occurs.
        learning_rate: Learning rate of the updates.
        initial_accumulator: Initial value of Adagrad's sums of squares; default: 0.1.
        epsilon: Number that is added to the root, or under it by ``"adagrad"``.
            Default: 1e-8 for ``"row_adagrad"`` and ``"lazy_adam"``, else 1e-7.
        b1, b2: Decay rates of lazy Adam's moments; default: 0.9 and 0.999.

    Raises:
        WhaleError: The kind is unknown, or a number is out of range.

    >>> sparse_optimizer("row_adagrad", 0.05).state_bytes_per_row(128, 4)
    4
    """
    small = isinstance(kind, str) and kind in ("row_adagrad", "lazy_adam")
    usual = 1e-8 if small else 1e-7
    return SparseOptimizer(
        kind=kind,
        learning_rate=learning_rate,
        initial_accumulator=initial_accumulator,
        epsilon=usual if epsilon is None else epsilon,
        b1=b1,
        b2=b2,
    )
