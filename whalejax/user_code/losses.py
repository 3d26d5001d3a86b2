"""Return values of loss functions, and the job of the command line.

``normalise`` converts every allowed return value to one form: a total, a weight,
metrics, and updated variables. Executors handle that form alone. Models import this
module, so its import starts no JAX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import (
    Arguments,
    is_array,
    is_number,
    is_printable,
    plain,
    short_repr,
)
from whalejax.meshes.errors import WhaleError
from whalejax.user_code.argument_checks import (
    check_function,
    check_optimizer,
    is_module,
)


T = TypeVar("T")


@names_arguments("wh.WeightedLoss")
@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """A loss of the form ``total / weight``, such as a mean over valid tokens.

    Every executor sums the totals and the weights of all micro-batches and devices and
    divides the sums.

    Attributes:
        total: Scalar sum of the losses. Multiply a regulariser in it by the weight.
        weight: Scalar number of terms in the sum; constant for the gradient. Do
            not clamp it: a micro-batch of weight 0 has no effect, and the loss is NaN
            only if the full batch has weight 0.

    >>> (WeightedLoss(3.0, 2.0) + WeightedLoss(1.0, 2.0)).mean
    1.0
    """

    total: Any
    weight: Any

    def __post_init__(self) -> None:
        _register_pytrees()
        problems = Arguments("wh.WeightedLoss")
        for name, value in (("total", self.total), ("weight", self.weight)):
            number = isinstance(value, float) or is_number(value)
            if not number and not is_array(value):
                problems.refuse(name, value, "a scalar array or a number")
        problems.raise_if_any()

    def __add__(self, other: WeightedLoss) -> WeightedLoss:
        if not isinstance(other, WeightedLoss):
            return NotImplemented
        return WeightedLoss(self.total + other.total, self.weight + other.weight)

    @property
    def mean(self) -> Any:
        """Value of the loss: total over weight.

        With weight 0 it is NaN if the total is 0, and else inf, as for arrays.

        >>> WeightedLoss(0.0, 0).mean
        nan
        """
        import numpy as np

        numbers = int, float, np.number
        if isinstance(self.total, numbers) and isinstance(self.weight, numbers):
            with np.errstate(divide="ignore", invalid="ignore"):
                return float(np.divide(self.total, self.weight))
        return self.total / self.weight


@names_arguments("wh.Aux")
@dataclass(frozen=True, slots=True, kw_only=True)
class Aux:
    """Additional return values of a loss function, as ``(loss, Aux(...))``.

    Attributes:
        metrics: Values to report, by name. With several micro-batches, values with a
            batch dimension are concatenated in the order of the global batch. Means
            over the samples are averaged, sums and counts added, maxima and minima
            combined. Values that do not depend on the samples stay unchanged. Other
            floating-point scalars are averaged, with a note in the plan. All other
            values are refused.
        means: Values to average, of any shape.
        sums: Values to add up over the micro-batches, of any type.
        samples: Values with one row per sample, which are concatenated in the order of
            the global batch.
        variables: Updated Linen collections such as ``{"batch_stats": ...}``.
    """

    metrics: Mapping[str, Any] = field(default_factory=dict)
    means: Mapping[str, Any] = field(default_factory=dict)
    sums: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _register_pytrees()
        problems = Arguments("wh.Aux")
        for name in ("metrics", "means", "sums", "samples", "variables"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(map(is_printable, value)):
                problems.refuse(name, value, 'values by name, such as {"accuracy": x}')
        problems.raise_if_any()


@dataclass(frozen=True, slots=True)
class ReportedValue:
    """A reported value of several micro-batches, with its combination.

    Attributes:
        value: Value of one micro-batch, or of several.
        how: Combination over micro-batches. ``"mean"`` averages by the loss's weights,
            ``"average"`` over the samples. ``"sum"``, ``"max"`` and ``"min"`` combine
            so. ``"same"`` is for values that are equal in all. ``"concat"``
            concatenates along the samples because the user says so, ``"rows"`` because
            the program shows it.
        axis: Dimension of the samples.
        outer: Number of times that the dimension repeats all samples.
        inner: Number of consecutive elements of one sample.
        truths: For each leaf of the value, whether it is boolean, so that executors sum
            numbers in its place; empty if none is.
    """

    value: Any
    how: str
    axis: int = 0
    outer: int = 1
    inner: int = 1
    truths: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        _register_pytrees()


def is_merged(value: Any) -> bool:
    """Returns whether a metric is a ``ReportedValue``, to be treated as one leaf."""
    return isinstance(value, ReportedValue)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """The normalised return value of a loss function.

    Attributes:
        total: Real floating-point scalar.
        weight: Real scalar; 1.0 if the loss is a plain mean over samples.
        weighted: Whether the user gave the weight.
        metrics: Values to report, by name; ``ReportedValue`` if they are no means.
        variables: Updated collections; empty if none were returned.
        rest: Non-trainable leaves of the model after the call; set by the adapter.
    """

    total: Any
    weight: Any = 1.0
    weighted: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    rest: Any = None


@names_arguments("wh.Job", instance="job")
@dataclass(frozen=True, slots=True, repr=False)
class Job:
    """All inputs of ``whalejax train file.py:function``.

    Attributes:
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        make_model: Function that builds the model from a key or from nothing.
        batch: Function ``batch(step, size)`` that returns a global batch, or a pytree
            of arrays whose dimension 0 is cycled through. Shapes without values suffice
            to plan. If a run is resumed with another size, the function must return
            samples ``step * size`` to ``(step + 1) * size - 1``.
        optimizer: Optax gradient transformation.
        batch_size: Number of samples in a global batch; the command line may override
            it.
        name: Name of the job in reports.
        group_size: Number of consecutive samples that stay together, as for
            ``wh.plan``.
        per_micro_batch: Whether each part of the batch may have its own loss, as for
            ``wh.plan``.
        eval_batches: Sequence of batches for evaluation, or a function that returns
            such a sequence; None without evaluation.
    """

    loss_fn: Callable[..., Any]
    make_model: Callable[..., Any]
    batch: Any
    optimizer: Any
    batch_size: int | None = None
    name: str = "job"
    group_size: int | None = None
    per_micro_batch: bool = False
    eval_batches: Any = None

    def __post_init__(self) -> None:
        problems = Arguments("wh.Job")
        problems.function("loss_fn", self.loss_fn, "a function of model and batch")
        makes = "a function of a random key, or of nothing"
        if problems.function("make_model", self.make_model, makes):
            if is_module(self.make_model):
                kind = type(self.make_model).__name__
                problems.add(
                    f"make_model is a {kind}; expected {makes}, that makes one: every "
                    f"process makes its own. Write make_model=lambda key: {kind}(…)"
                )
        if callable(self.batch):
            check_function(problems, "batch", self.batch, "step", "size")
        elif not _holds_arrays(self.batch):
            problems.refuse(
                "batch",
                self.batch,
                "a function batch(step, size), or arrays with samples along "
                "dimension 0",
            )
        check_optimizer(problems, self.optimizer)
        problems.whole("batch_size", self.batch_size, least=1, none=True)
        problems.words("name", self.name)
        problems.whole("group_size", self.group_size, least=1, none=True)
        problems.switch("per_micro_batch", self.per_micro_batch)
        sets = self.eval_batches
        if sets is not None and not (callable(sets) or isinstance(sets, list | tuple)):
            problems.refuse(
                "eval_batches",
                sets,
                "a list of batches, or a function that gives them, or None",
            )
        elif callable(sets):
            check_function(problems, "eval_batches", sets)
        problems.raise_if_any()
        object.__setattr__(self, "batch_size", plain(self.batch_size))

    def __repr__(self) -> str:
        loss = getattr(self.loss_fn, "__name__", type(self.loss_fn).__name__)
        size = f", batches of {self.batch_size}" if self.batch_size else ""
        return f"<Job {self.name!r}: {loss}{size}>"

    def batch_at(self, step: int, size: int | None = None) -> Any:
        """Returns the global batch of one step.

        Args:
            step: Number of the step, from 0.
            size: Number of samples; default: ``batch_size``.

        Raises:
            WhaleError: No size is known, or an array has no sample.

        >>> import numpy as np
        >>> job = Job(len, len, {"x": np.arange(3)}, None, batch_size=2)
        >>> job.batch_at(1)["x"].tolist()
        [2, 0]
        """
        size = self.batch_size if size is None else size
        problems = Arguments(f"{self.name}: batch_at")
        problems.whole("step", step, what="the number of a step")
        problems.whole("size", size, least=1, none=True)
        problems.raise_if_any()
        if size is None:
            raise WhaleError(
                f"{self.name}: no batch size is known. Give Job(batch_size=...) or "
                "--batch on the command line."
            )
        if callable(self.batch):
            return self.batch(step, size)
        import jax
        import numpy as np

        def rows(path: Any, leaf: Any) -> Any:
            if not getattr(leaf, "shape", ()) or leaf.shape[0] == 0:
                raise WhaleError(
                    f"{self.name}: batch{jax.tree_util.keystr(path)} has shape "
                    f"{np.shape(leaf)}; expected samples along dimension 0."
                )
            if isinstance(leaf, jax.ShapeDtypeStruct):  # A plan needs no values.
                return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
            return leaf[(np.arange(size) + step * size) % leaf.shape[0]]

        return jax.tree_util.tree_map_with_path(rows, self.batch)


def _holds_arrays(batch: Any) -> bool:
    import jax

    leaves = jax.tree.leaves(batch)
    return bool(leaves) and all(map(is_array, leaves))


def normalise(result: Any) -> LossResult:
    """Converts a loss function's return value to its normal form.

    Args:
        result: A loss, which is a scalar or a ``WeightedLoss``; or a pair of a loss and
            an ``Aux``, a mapping of metrics, or any other pytree (reported as ``aux``).

    Returns:
        Parts of the result, with unchanged values.

    Raises:
        WhaleError: The loss is no real floating-point scalar, or a returned tuple is no
            pair.

    >>> normalise(2.5).total
    2.5
    """
    if isinstance(result, tuple):
        if len(result) != 2:
            raise WhaleError(
                f"loss_fn returned a tuple of {len(result)} values; expected the loss "
                "alone or a pair (loss, aux). Put other values into "
                "wh.Aux(metrics={...})."
            )
        loss, aux = result
    else:
        loss, aux = result, None
    metrics, variables = _aux_parts(aux)
    if isinstance(loss, WeightedLoss):
        _check_scalar("WeightedLoss.total", loss.total, must_be_inexact=True)
        _check_scalar("WeightedLoss.weight", loss.weight, must_be_inexact=False)
        return LossResult(
            total=loss.total,
            weight=loss.weight,
            weighted=True,
            metrics=metrics,
            variables=variables,
        )
    _check_scalar("the loss", loss, must_be_inexact=True)
    return LossResult(total=loss, metrics=metrics, variables=variables)


def _aux_parts(aux: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if aux is None:
        return {}, {}
    variables: Mapping[str, Any] = {}
    if isinstance(aux, Aux):
        metrics, variables = _reported(aux), aux.variables
    elif isinstance(aux, Mapping):
        metrics = aux
    else:
        metrics = {"aux": aux}
    for name in metrics:
        if name == "loss":
            raise WhaleError(
                "loss_fn returned a metric named 'loss'; that name is taken by the "
                "loss itself. Give the metric another name."
            )
    return metrics, variables


def _reported(aux: Aux) -> Mapping[str, Any]:
    import jax
    import numpy as np

    names = [*aux.metrics, *aux.means, *aux.sums, *aux.samples]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise WhaleError(
            f"wh.Aux has {', '.join(twice)} in several of metrics=, means=, sums= and "
            "samples=. Give each a different name."
        )
    for name, value in aux.samples.items():
        if any(not np.shape(leaf) for leaf in jax.tree.leaves(value)):
            raise WhaleError(
                f"wh.Aux(samples=) has the scalar {name!r}; expected a row for each "
                "sample along dimension 0. Report a scalar in metrics= or sums=."
            )
    return {
        **aux.metrics,
        **{name: ReportedValue(value, "mean") for name, value in aux.means.items()},
        **{name: ReportedValue(value, "sum") for name, value in aux.sums.items()},
        **{name: ReportedValue(value, "concat") for name, value in aux.samples.items()},
    }


def check_metrics(metrics: Mapping[str, Any], size: int) -> None:
    """Refuses metrics that are no arrays, and ``samples=`` without a row per sample.

    Args:
        metrics: Metrics of a micro-batch.
        size: Number of samples of the micro-batch.

    Raises:
        WhaleError: There are such metrics. The message has their names and the remedy.
    """
    import jax

    for name, metric in metrics.items():
        merged = isinstance(metric, ReportedValue)
        for leaf in jax.tree.leaves(metric.value if merged else metric):
            if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float):
                raise WhaleError(
                    f"loss_fn reports {name!r} with {short_repr(leaf)}; expected "
                    "arrays or numbers. Remove it from the values besides the loss"
                )
        if not merged or metric.how != "concat":
            continue
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(metric.value)]
        wrong = [shape for shape in shapes if shape[0] != size]
        if wrong:
            raise WhaleError(
                f"wh.Aux(samples=) has {name!r} of shape {wrong[0]}; expected {size} "
                "rows, one for each sample of a micro-batch, along dimension 0. Make "
                "the samples its first dimension, as in `x.reshape(samples, -1)`."
            )


def _check_scalar(what: str, value: Any, *, must_be_inexact: bool) -> None:
    import jax.numpy as jnp
    import numpy as np

    if value is None or isinstance(value, (str, Mapping, list, tuple, Aux)):
        raise WhaleError(
            f"loss_fn: {what} is {type(value).__name__}; expected a scalar array, a "
            "wh.WeightedLoss, or a pair (loss, aux)."
        )
    shape = tuple(np.shape(value))
    if shape:
        raise WhaleError(
            f"loss_fn: {what} has shape {shape}; expected a scalar of shape (). Take "
            "the mean over samples, as in `losses.mean()`."
        )
    dtype = jnp.result_type(value)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise WhaleError(
            f"loss_fn: {what} has the complex dtype {dtype}; expected a real "
            "floating-point scalar. Take its real part or its absolute value."
        )
    if must_be_inexact and not jnp.issubdtype(dtype, jnp.floating):
        raise WhaleError(
            f"loss_fn: {what} has dtype {dtype}; expected a floating-point scalar, "
            "because it is differentiated."
        )


def _rebuilt(kind: type[T], names: tuple[str, ...], parts: Iterable[Any]) -> T:
    """Makes an instance without checks, as JAX puts any objects into trees."""
    made = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(made, name, part)
    return made


@functools.cache
def _register_pytrees() -> None:
    import jax

    jax.tree_util.register_pytree_with_keys(
        WeightedLoss,
        lambda loss: (
            (
                (jax.tree_util.GetAttrKey("total"), loss.total),
                (jax.tree_util.GetAttrKey("weight"), loss.weight),
            ),
            None,
        ),
        lambda _, parts: _rebuilt(WeightedLoss, ("total", "weight"), parts),
    )
    jax.tree_util.register_pytree_with_keys(
        Aux,
        lambda aux: (
            (
                (jax.tree_util.GetAttrKey("metrics"), aux.metrics),
                (jax.tree_util.GetAttrKey("means"), aux.means),
                (jax.tree_util.GetAttrKey("sums"), aux.sums),
                (jax.tree_util.GetAttrKey("samples"), aux.samples),
                (jax.tree_util.GetAttrKey("variables"), aux.variables),
            ),
            None,
        ),
        lambda _, parts: _rebuilt(
            Aux, ("metrics", "means", "sums", "samples", "variables"), parts
        ),
    )
    jax.tree_util.register_pytree_with_keys(
        ReportedValue,
        lambda merged: (
            ((jax.tree_util.GetAttrKey("value"), merged.value),),
            (merged.how, merged.axis, merged.outer, merged.inner, merged.truths),
        ),
        lambda how, parts: ReportedValue(next(iter(parts)), *how),
    )
