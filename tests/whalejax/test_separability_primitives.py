"""Operations that look as if they kept samples apart, and do not.

Each loss is measured first: its micro-batches give another gradient than the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests import coupling_losses as zoo
from whalejax.adapters.base import adapt
from whalejax.capture import capture


pytestmark = pytest.mark.relaxed_promotion

COUPLED: Final[dict[str, Callable[..., Any]]] = {}
"""Losses that couple samples, by their name."""

SEPARABLE: Final[dict[str, Callable[..., Any]]] = {}
"""Losses that do not, by their name."""


def coupled(function: Callable[..., Any]) -> Callable[..., Any]:
    COUPLED[function.__name__] = function
    return function


def separable(function: Callable[..., Any]) -> Callable[..., Any]:
    SEPARABLE[function.__name__] = function
    return function


def accumulated(function: Callable[..., Any], count: int) -> tuple[float, Any]:
    """Loss and gradient on one device, as the mean over micro-batches."""
    params, batch = zoo.parameters(), jax.tree.map(jnp.asarray, zoo.batch())
    found = [
        jax.value_and_grad(function)(params, {k: v[n::count] for k, v in batch.items()})
        for n in range(count)
    ]
    return jax.tree.map(lambda *leaves: sum(leaves) / count, *found)


def difference(function: Callable[..., Any], count: int) -> float:
    """How far micro-batches are from the whole batch, of the largest element."""
    pairs = zip(
        jax.tree.leaves(accumulated(function, count)),
        jax.tree.leaves(accumulated(function, 1)),
        strict=True,
    )
    both = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    size = max(np.abs(b).max() for _, b in both)
    return float(max(np.abs(a - b).max() for a, b in both) / size)


def is_proven(function: Callable[..., Any], count: int) -> bool:
    captured = capture(adapt(zoo.parameters(), function), zoo.batch())
    return captured.independence(zoo.BATCH // count, zoo.BATCH, None).proven


# Writes by index.


def _means(p: Any, b: Any) -> jax.Array:
    return zoo.hidden(p, b).mean(0)


@coupled
def larger_of_a_mean_and_a_number(p: Any, b: Any) -> Any:
    return _means(p, b).at[jnp.array([0, 2, 5])].max(0.01).sum()


@coupled
def means_times_means(p: Any, b: Any) -> Any:
    means = b["x"].mean(0)
    places = jnp.array([0, 2])
    product = means.at[places].multiply(means[:2], unique_indices=True)
    return product.sum() * p["w"].sum()


@coupled
def diagonal_by_two_places(p: Any, b: Any) -> Any:
    score = zoo.score(p, b)
    places = jnp.arange(len(score))
    diagonal = jnp.zeros((len(score), len(score))).at[places, places].set(1.0)
    return (diagonal * score[:, None]).mean()


@coupled
def diagonal_by_vmap(p: Any, b: Any) -> Any:
    score = zoo.score(p, b)
    n = len(score)
    rows = jax.vmap(lambda row, place: row.at[place].set(1.0))
    return (rows(jnp.zeros((n, n)), jnp.arange(n)) * score[:, None]).mean()


# Windows.


def _largest(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


@coupled
def tangents_of_windows_of_each(p: Any, b: Any) -> Any:
    given = jnp.broadcast_to(p["w"][0], b["x"].shape)
    _, chosen = jax.jvp(_largest, (b["x"],), (given,))
    return (chosen.max(0) * zoo.hidden(p, b)[:, :4]).sum(-1).mean()


@coupled
def tangents_of_windows_of_a_mean(p: Any, b: Any) -> Any:
    return jax.jvp(_largest, (b["x"].mean(0)[None],), (p["w"][:1],))[1].sum()


@coupled
def gradient_of_windows_of_a_mean(p: Any, b: Any) -> Any:
    slope = jax.grad(lambda x: _largest(x).sum())(_means(p, b)[None])
    return (slope * p["w"][:1]).sum()


# Dtypes that hold no sums, and numbers of the program.


def _share(total: jax.Array, p: Any, b: Any) -> jax.Array:
    """A number's share of each sample, times a parameter."""
    return total.astype(p["w"].dtype) / len(b["n"]) * p["w"].sum()


@coupled
def carried_in_eight_bits(p: Any, b: Any) -> Any:
    def add(total: Any, n: Any) -> Any:
        return total + (n * 7).astype(jnp.int8), None

    return _share(lax.scan(add, jnp.int8(0), b["n"])[0], p, b)


@coupled
def carried_at_places_in_eight_bits(p: Any, b: Any) -> Any:
    def add(totals: Any, y: Any) -> Any:
        return totals.at[y].add(jnp.int8(50)), None

    totals = lax.scan(add, jnp.zeros(4, jnp.int8), b["y"])[0]
    return (totals.astype(p["w"].dtype) * p["head"][0]).sum() / len(b["n"])


@coupled
def carried_in_three_bits_of_mantissa(p: Any, b: Any) -> Any:
    def add(total: Any, n: Any) -> Any:
        return (total + n).astype(jnp.float8_e4m3fn).astype(p["w"].dtype), None

    start = jnp.zeros((), p["w"].dtype)
    return _share(lax.scan(add, start, b["n"].astype(p["w"].dtype) * 3.3)[0], p, b)


@coupled
def carried_below_zero_without_a_sign(p: Any, b: Any) -> Any:
    def add(total: Any, n: Any) -> Any:
        return total + jnp.uint32(3) - n.astype(jnp.uint32), None

    return _share(lax.scan(add, jnp.uint32(0), b["n"])[0], p, b)


@coupled
def differences_without_a_sign(p: Any, b: Any) -> Any:
    differences = b["y"].astype(jnp.uint32) - jnp.uint32(2)
    return _share(jnp.dot(differences, jnp.ones_like(differences)), p, b)


@coupled
def sum_cast_to_no_sign(p: Any, b: Any) -> Any:
    return _share((b["y"] - 2).sum().astype(jnp.uint32), p, b)


@separable
def bytes_of_a_mask(p: Any, b: Any) -> Any:
    mask = (b["y"] > 1).astype(jnp.uint8)
    return _share(mask.sum(), p, b)


@coupled
def number_of_samples_squared_and_divided(p: Any, b: Any) -> Any:
    number = len(b["x"])
    over = lax.div(lax.integer_pow(jnp.asarray(number), 2), jnp.asarray(5))
    return zoo.score(p, b).sum() * over.astype(p["w"].dtype) / number**3


@coupled
def means_multiplied_in_one_place(p: Any, b: Any) -> Any:
    places = jnp.array([0, 0])
    product = jnp.ones(3).at[places].multiply(b["x"].mean(0)[:2])
    return product.sum() * p["w"].sum()


# Rules of derivatives: of solves, and of sums that loops carry.


@coupled
def transposed_solve_of_its_own(p: Any, b: Any) -> Any:
    solved = lax.custom_linear_solve(
        lambda v: 2.0 * v,
        zoo.hidden(p, b),
        lambda _, v: v / 2.0,
        transpose_solve=lambda _, v: v * jnp.square(v).sum() * 100.0,
    )
    return solved.mean()


@separable
def transposed_solve_that_is_one(p: Any, b: Any) -> Any:
    solved = lax.custom_linear_solve(
        lambda v: 2.0 * v,
        zoo.hidden(p, b),
        lambda _, v: v / 2.0,
        transpose_solve=lambda _, v: v / 2.0,
    )
    return jnp.square(solved).mean()


@jax.custom_vjp
def _squared_gradient(x: Any) -> Any:
    return x


_squared_gradient.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.abs(g),))


@jax.custom_jvp
def _scaled_gradient(x: Any) -> Any:
    return x


_scaled_gradient.defjvp(lambda given, moved: (given[0], moved[0] * given[0]))


@coupled
def carried_behind_a_gradient_of_its_own(p: Any, b: Any) -> Any:
    def add(total: Any, x: Any) -> Any:
        return _squared_gradient(total) + jnp.tanh(x @ p["w"]).sum(), None

    return lax.scan(add, jnp.zeros(()), b["x"])[0] / len(b["x"])


@coupled
def carried_behind_a_tangent_of_its_own(p: Any, b: Any) -> Any:
    def add(total: Any, x: Any) -> Any:
        return _scaled_gradient(total + jnp.tanh(x @ p["w"]).sum()), None

    return lax.scan(add, jnp.zeros(()), b["x"])[0] / len(b["x"])


# Shapes, products and dtypes.


@coupled
def every_other_of_as_many_copies(p: Any, b: Any) -> Any:
    score = zoo.score(p, b)
    n = len(score)
    return jnp.broadcast_to(score[:, None], (n, n)).reshape(-1)[::2].sum() / n


@coupled
def groups_of_all_rows(p: Any, b: Any) -> Any:
    left, sizes = jnp.ones((2, len(b["x"]))), jnp.array([2], jnp.int32)
    rows = lax.ragged_dot(left, b["x"][None], sizes)
    return (rows.sum(0) * zoo.hidden(p, b)).sum(-1).mean()


@coupled
def any_of_the_samples(p: Any, b: Any) -> Any:
    found = jnp.dot(b["r"] > 1.0, jnp.ones(len(b["r"]), bool))
    return found.astype(float) / len(b["r"]) * p["w"].sum()


@coupled
def difference_of_natural_numbers(p: Any, b: Any) -> Any:
    sums = [b[name].astype(jnp.uint8).sum() for name in ("y", "n")]
    return (sums[0] - sums[1]).astype(float) / len(b["y"]) * p["w"].sum()


@coupled
def sum_in_eight_bits(p: Any, b: Any) -> Any:
    total = (b["n"] * 7).sum().astype(jnp.int8)
    return total.astype(float) / len(b["n"]) * p["w"].sum()


# Experts, keys, and functions of a known name.


@coupled
def experts_counted_under_another_number(p: Any, b: Any) -> Any:
    expert = jnp.argmax(b["x"] @ p["head"], -1)
    order = jnp.argsort(expert)
    ones = jnp.ones(len(expert), jnp.int32)
    sizes = jax.ops.segment_sum(ones, expert + (-1), 4)
    rows = lax.ragged_dot(b["x"][order], p["experts"], sizes)
    return jnp.zeros_like(rows).at[order].set(rows).sum(-1).mean()


@coupled
def neighbours_by_a_function_named_as_a_division(p: Any, b: Any) -> Any:
    @jax.jit
    def floor_divide(places: Any, by: Any) -> Any:
        return jnp.maximum(places - by, 0)

    order = jnp.argsort(jnp.argmax(b["x"] @ p["head"], -1))
    return b["x"][floor_divide(order, 1)].sum(-1).mean() * p["w"].sum()


@coupled
def words_of_keys(p: Any, b: Any) -> Any:
    words = jax.random.key_data(jax.random.split(jax.random.key(0), len(b["y"])))
    return ((words[:, 0] % 7).astype(float) * zoo.score(p, b)).mean()


# What is separable, though it looks as if it were not.


@coupled
def means_of_three_bits(p: Any, b: Any) -> Any:
    return lax.reduce_precision(_means(p, b), 8, 3).sum()


@coupled
def means_of_eight_bits(p: Any, b: Any) -> Any:
    return _means(p, b).astype(jnp.float8_e4m3fn).astype(p["w"].dtype).sum()


@separable
def columns_one_after_the_other(p: Any, b: Any) -> Any:
    hidden = zoo.hidden(p, b)

    def add(i: Any, total: Any) -> Any:
        return total + hidden[:, i] ** 2

    return lax.fori_loop(0, 8, add, jnp.zeros(len(hidden))).mean()


@separable
def columns_written_one_after_the_other(p: Any, b: Any) -> Any:
    hidden = zoo.hidden(p, b)

    def write(i: Any, kept: Any) -> Any:
        return kept.at[:, i].set(hidden[:, i] ** 2)

    return lax.fori_loop(0, 8, write, jnp.zeros_like(hidden)).mean()


@separable
def means_times_numbers_in_place(p: Any, b: Any) -> Any:
    places = jnp.array([0, 2])
    return _means(p, b).at[places].multiply(p["w"][0, :2], unique_indices=True).sum()


@separable
def about_the_largest_of_each(p: Any, b: Any) -> Any:
    values, places = lax.approx_max_k(zoo.hidden(p, b), 3)
    return (values * p["w"][places, 0]).mean()


@separable
def about_the_least_columns(p: Any, b: Any) -> Any:
    cube = zoo.hidden(p, b)[:, :, None] * p["w"][None]
    return lax.approx_min_k(cube, 2, reduction_dimension=1)[0].mean()


@coupled
def about_the_largest_of_all(p: Any, b: Any) -> Any:
    hidden = zoo.hidden(p, b)
    return lax.approx_max_k(hidden, 2, reduction_dimension=0)[0].mean()


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_samples_is_not_proven(name: str) -> None:
    function = COUPLED[name]
    assert difference(function, 4) > 1e-3
    assert not is_proven(function, 4)


@pytest.mark.parametrize("name", SEPARABLE)
def test_what_keeps_samples_apart_is_proven(name: str) -> None:
    function = SEPARABLE[name]
    assert difference(function, 4) < 1e-5
    assert is_proven(function, 4)


def test_one_sample_is_no_case_where_its_dimension_is_dropped() -> None:
    def squeezed(p: Any, b: Any) -> Any:
        hidden = jnp.squeeze(zoo.hidden(p, b))
        return (hidden.sum(0) * p["w"][0]).sum() / len(b["x"])

    assert difference(squeezed, 4) < 1e-5 and is_proven(squeezed, 4)
    assert difference(squeezed, zoo.BATCH) > 1e-3
    assert not is_proven(squeezed, zoo.BATCH)


def _squeezed(p: Any, b: Any) -> Any:
    """A square matrix of each sample; of one sample, the matrix itself."""
    return jnp.squeeze(zoo.hidden(p, b)[:, :, None] * b["x"][:, None, :])


SINGLE: Final[dict[str, Callable[..., Any]]] = {
    "sums": lambda p, b: (_squeezed(p, b).sum(1) @ p["v"][0]).sum(),
    "ends": lambda p, b: (_squeezed(p, b).max(1) * p["v"][0]).sum(),
    "products": lambda p, b: (
        (jnp.tensordot(_squeezed(p, b), p["v"], 1) * p["w"]).sum()
        + (jnp.tensordot(_squeezed(p, b), p["v"], ((1,), (0,))) * p["w"]).sum()
    ),
    "running sums": lambda p, b: (jnp.cumsum(_squeezed(p, b), 1) * p["v"]).sum(),
    "order": lambda p, b: (jnp.flip(_squeezed(p, b), 1) * p["v"]).sum(),
    "lookups": lambda p, b: (jnp.take(_squeezed(p, b), 2, axis=1) * p["v"][0]).sum(),
    "repeats": lambda p, b: (jnp.squeeze(b["x"])[:, None] * p["v"]).sum(),
    "parameters": lambda p, b: (
        zoo.hidden(p, b) @ p["v" if len(b["x"]) > 1 else "w"]
    ).sum(),
    "operands": lambda p, b: jnp.maximum(
        b["z"] - zoo.hidden(p, b) if len(b["x"]) > 1 else zoo.hidden(p, b) - b["z"], 0
    ).sum(),
    "powers": lambda p, b: (zoo.hidden(p, b) ** (2 if len(b["x"]) > 1 else 3)).sum(),
}
"""What else is done for one sample, beside the same operations and shapes."""


@pytest.mark.parametrize("name", SINGLE)
def test_one_sample_is_no_case_where_its_program_does_something_else(name: str) -> None:
    def loss(p: Any, b: Any) -> Any:
        return SINGLE[name](p, b) / len(b["x"])

    assert difference(loss, zoo.BATCH) > 1e-3
    assert not is_proven(loss, zoo.BATCH)


def test_one_sample_is_a_case_where_only_dimensions_are_dropped() -> None:
    def loss(p: Any, b: Any) -> Any:
        return jnp.square(jnp.squeeze(zoo.hidden(p, b))).sum() / len(b["x"])

    assert difference(loss, zoo.BATCH) < 1e-5 and is_proven(loss, zoo.BATCH)


def test_more_of_the_largest_in_larger_batches_is_not_proven() -> None:
    def loss(p: Any, b: Any) -> Any:
        hidden = zoo.hidden(p, b)
        return lax.approx_max_k(hidden, 1 + len(hidden) // 4)[0].mean()

    assert difference(loss, 4) > 1e-3 and not is_proven(loss, 4)


@pytest.mark.parametrize(
    ("solve", "text"),
    [
        (lambda h: jnp.linalg.qr(h.T @ h)[0], "to a sum over the samples"),
        (
            lambda h: jnp.linalg.cholesky(
                (h[:, :, None] * h[:, None] + jnp.eye(8)) / len(h)
            ),
            "to a value that depends on the number of samples",
        ),
        (
            lambda h: lax.linalg.triangular_solve(
                (h[:, :, None] * h[:, None] + jnp.eye(8)) / len(h),
                h[:, :, None],
                left_side=True,
            ),
            "to a value that depends on the number of samples",
        ),
    ],
)
def test_reasons_of_matrices_say_what_they_are_made_of(
    solve: Callable[[Any], Any], text: str
) -> None:
    def loss(p: Any, b: Any) -> Any:
        return solve(zoo.hidden(p, b)).mean()

    captured = capture(adapt(zoo.parameters(), loss), zoo.batch())
    reason = captured.independence(zoo.BATCH // 4, zoo.BATCH, None).reason
    assert reason is not None and text in reason.why


def test_what_a_reference_keeps_is_not_proven() -> None:
    def kept(p: Any, b: Any) -> Any:
        total = jax.new_ref(jnp.zeros(()))
        total[...] = b["x"].sum()
        return total[...] ** 2 * p["w"].sum()

    assert not is_proven(kept, 4)
