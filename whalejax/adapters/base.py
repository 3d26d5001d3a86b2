"""Adapts NNX modules, Linen variables and plain pytrees to one interface.

Other code sees a model as two pytrees, the trained ``params`` and the ``rest``. It sees
the loss as a function that takes both and returns the rest after the call. Only modules
of this folder depend on Flax, and they import it only for Flax models.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp

from whalejax.adapters.gradient_losses import refuse_gradients
from whalejax.adapters.leaves import (
    abstract_tree,
    cast_back,
    cast_floats,
    check_leaves,
    conformed,
    fold_key,
    is_key,
    paths_of,
    same_model,
)
from whalejax.adapters.leaves import dotted as dotted
from whalejax.adapters.loss_inputs import add_inputs_note
from whalejax.adapters.metadata import read_metadata, short_ones
from whalejax.adapters.pytrees import (
    BoxedForm,
    Boxes,
    Form,
    LinenForm,
    PytreeForm,
    Selection,
)
from whalejax.adapters.refused_states import refuse_training_states
from whalejax.meshes.arguments.near_names import AXIS_SYNONYMS, near_hint
from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.planner.sharding.layout import MESH_AXES
from whalejax.user_code.argument_checks import is_function
from whalejax.user_code.losses import LossResult, normalise


ModelKind = Literal["nnx", "linen", "pytree"]

_RNG_NAMES: Final = ("rng", "rngs", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A model and its loss, as capture and lowering use them.

    Attributes:
        kind: Kind of the user's model.
        params: Pytree of the trained leaves, real or abstract.
        rest: Pytree of all other leaves: statistics, random keys, frozen weights.
        param_paths: Dotted path of each trained leaf, in flatten order.
        rest_paths: Dotted path of each other leaf, in flatten order.
        names: For each trained leaf, the logical name of each dimension, or None.
        pinned: For each trained leaf, the mesh axes that the user fixed for each
            dimension (several joined by ``+``), or None.
        called: For each trained leaf, the model's own names of those mesh axes.
        rest_names: Like ``names``, for each other leaf.
        rest_pinned: Like ``pinned``, for each other leaf.
        rest_called: Like ``called``, for each other leaf.
        short: Number of missing names, by path of each leaf whose metadata names too
            few dimensions. The given names are assigned to the first dimensions.
        takes_rng: Whether the loss function takes a random key.
        compute_dtype: Type to which float32 weights, trained or not, and batches are
            cast before the loss; None leaves the model's own types.
        batch_gradients: Numbers of the flat batch leaves whose gradients a step
            returns; by default none.
    """

    kind: ModelKind
    params: Any
    rest: Any
    param_paths: tuple[str, ...]
    rest_paths: tuple[str, ...]
    names: tuple[tuple[str | None, ...], ...]
    pinned: tuple[tuple[str | None, ...], ...]
    called: tuple[tuple[str | None, ...], ...]
    rest_names: tuple[tuple[str | None, ...], ...]
    rest_pinned: tuple[tuple[str | None, ...], ...]
    rest_called: tuple[tuple[str | None, ...], ...]
    short: Mapping[str, int]
    takes_rng: bool
    _form: Form
    _loss_fn: Callable[..., Any]
    compute_dtype: Any = None
    batch_gradients: tuple[int, ...] = ()

    def loss(self, params: Any, rest: Any, batch: Any, rng: Any = None) -> LossResult:
        """Evaluates the user's loss.

        Args:
            params: Trained leaves, in the structure of ``params``.
            rest: Other leaves, in the structure of ``rest``.
            batch: Batch that the loss function takes.
            rng: Random key, if the loss function takes one.

        Returns:
            Total and weight as scalar arrays (weight 1 for a plain mean), metrics, and
            the rest after the call, in the structure of ``rest``.

        Raises:
            WhaleError: The return value is no loss, or contains gradients or
                collections, or the rest has another structure after the call.
        """
        used = rest
        if self.compute_dtype is not None:
            params = cast_floats(params, jnp.float32, self.compute_dtype)
            batch = cast_floats(batch, jnp.float32, self.compute_dtype)
            used = self._frozen_cast(rest)
        model = self._form.join(params, used)
        arguments = (model, batch, rng) if self.takes_rng else (model, batch)
        try:
            returned = self._loss_fn(*arguments)
        except Exception as error:
            add_inputs_note(error, self._loss_fn, model, batch)
            raise
        refuse_gradients(returned, self.param_paths, jax.tree.leaves(self.params))
        result = normalise(returned)
        self._check_metrics(result)
        changed = self._form.changed_rest(model, used, result.variables)
        total = jnp.asarray(result.total)
        if self.compute_dtype is not None:
            changed = cast_back(changed, used, rest, self.compute_dtype)
            total = cast_floats(total, self.compute_dtype, jnp.float32)
        changed = conformed(self.rest_paths, rest, changed)
        return dataclasses.replace(
            result,
            total=total,
            weight=jnp.asarray(
                result.weight, total.dtype if total.dtype.itemsize >= 4 else jnp.float32
            ),
            rest=changed,
        )

    def _frozen_cast(self, rest: Any) -> Any:
        leaves: list[Any] = jax.tree.leaves(rest)
        tree: Any = jax.tree.structure(rest)
        for index, is_weight in enumerate(self.frozen):
            if is_weight:
                leaves[index] = cast_floats(
                    leaves[index], jnp.float32, self.compute_dtype
                )
        return tree.unflatten(leaves)

    def _check_metrics(self, result: LossResult) -> None:
        held = self.rest if self.kind == "linen" else {}
        lost = sorted(set(result.metrics) & set(held))
        if lost:
            raise WhaleError(
                f"loss_fn returned the collections {', '.join(lost)} as metrics; they "
                "would not be updated. Return (loss, wh.Aux(variables=updates))"
            )

    def without_values(self) -> Adapter:
        """Returns a copy with abstract leaves, which keeps no arrays of the user's."""
        return dataclasses.replace(
            self,
            params=abstract_tree(self.params),
            rest=abstract_tree(self.rest),
            _form=self._form.without_values(),
        )

    @property
    def frozen(self) -> tuple[bool, ...]:
        """Whether each leaf of the rest is a weight that is not trained."""
        return tuple(path in self._form.frozen for path in self.rest_paths)

    def rebuild(self, params: Any, rest: Any, modes: Any = None) -> Any:
        """Returns the model in the user's own type, from its two parts.

        Args:
            params: Trained leaves, in the structure of ``params``.
            rest: Other leaves, in the structure of ``rest``.
            modes: Modes from ``modes_of``; default: those of the adapted model.
        """
        model = self._form.rebuild(params, rest)
        if modes:
            from whalejax.adapters.nnx import set_modes

            set_modes(model, modes)
        return model

    def evaluating(self) -> Adapter | None:
        """Returns a copy in evaluation mode; None if that changes nothing.

        Of all models, NNX modules alone have modes. For others the loss function passes
        the mode as an argument.
        """
        form = self._form.evaluating()
        return None if form is None else dataclasses.replace(self, _form=form)

    def modes_of(self, model: Any) -> Any:
        """Returns the modes of a rebuilt NNX model, as its ``eval()`` sets them."""
        if self.kind != "nnx":
            return None
        from whalejax.adapters.nnx import modes_of

        return modes_of(model)

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        """Splits another instance of the same model into (params, rest).

        Args:
            model: Model in the user's own type, such as a new module.

        Raises:
            WhaleError: ``model`` is another model. The message names the first leaf
                that differs.
        """
        params, rest = self._form.take_apart(model)
        return (
            same_model(self.param_paths, self.params, params),
            same_model(self.rest_paths, self.rest, rest),
        )

    def fold_rest(self, rest: Any, number: Any) -> Any:
        """Folds an integer into every random key of the rest.

        Executors fold the step and the index of the micro-batch into the rest at the
        start of the step. So each micro-batch draws its own dropout masks, which are
        the same with every plan. ``restore_keys`` undoes the folding.

        Args:
            rest: Non-trainable state, in the structure of ``rest``.
            number: Integer scalar.
        """
        return jax.tree.map(lambda leaf: fold_key(leaf, number), rest)

    def restore_keys(self, rest: Any, original: Any) -> Any:
        """Returns ``rest`` with the random keys of ``original``."""
        return jax.tree.map(
            lambda new, old: old if is_key(new) else new, rest, original
        )


def adapt(
    model: Any,
    loss_fn: Callable[..., Any],
    *,
    trainable: Any = None,
    axis_names: Mapping[str, str] | None = None,
) -> Adapter:
    """Returns the adapter of a model and its loss.

    Args:
        model: An NNX module, a Linen module's variables (a mapping with ``params``),
            or any pytree; leaves may be abstract.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        trainable: Trained parameters: glob patterns of dotted paths, a predicate on
            the dotted path, or (NNX) a filter. By default every ``nnx.Param``, leaf of
            ``params``, or floating-point leaf.
        axis_names: The user's names of mesh axes, mapped to ours.

    Returns:
        The adapter, without any computation.

    Raises:
        WhaleError: No leaf is trained, a pattern matches nothing, the loss function
            has another signature, or the metadata names an unknown mesh axis.

    >>> import jax.numpy as jnp
    >>> net = {"w": jnp.ones((3, 2)), "step": 0}
    >>> adapt(net, lambda net, batch: (batch @ net["w"]).mean()).param_paths
    ('w',)
    """
    problems = Problems("model")
    takes_rng = _takes_rng(loss_fn, problems)
    axis_names = _checked_axis_names(axis_names, problems)
    problems.raise_if_any()
    kind, form, metadata = _form_of(model, trainable)
    params, rest = form.take_apart(model)
    param_paths = paths_of(params)
    check_leaves(params, rest, problems)
    if not param_paths:
        problems.add(
            "no leaf is trained. Expected floating-point parameters; give trainable= "
            "to choose them, or check that the model was built."
        )
    leaves = dict(zip(param_paths, jax.tree.leaves(params), strict=True))
    leaves |= zip(paths_of(rest), jax.tree.leaves(rest), strict=True)
    known = read_metadata(
        list(leaves), list(leaves.values()), metadata, axis_names or {}, problems
    )
    problems.raise_if_any()
    trained = len(param_paths)
    return Adapter(
        kind=kind,
        params=params,
        rest=rest,
        param_paths=param_paths,
        rest_paths=paths_of(rest),
        names=tuple(leaf.names for leaf in known[:trained]),
        pinned=tuple(leaf.pinned for leaf in known[:trained]),
        called=tuple(leaf.called for leaf in known[:trained]),
        rest_names=tuple(leaf.names for leaf in known[trained:]),
        rest_pinned=tuple(leaf.pinned for leaf in known[trained:]),
        rest_called=tuple(leaf.called for leaf in known[trained:]),
        short=short_ones(leaves, metadata),
        takes_rng=takes_rng,
        _form=form,
        _loss_fn=loss_fn,
    )


def _checked_axis_names(axis_names: Any, problems: Problems) -> Mapping[str, str]:
    if axis_names is None:
        return {}
    if not isinstance(axis_names, Mapping):
        problems.add(
            f"axis_names is {short_repr(axis_names)}; expected your names of mesh axes "
            'mapped to ours, such as {"model": "tensor"}'
        )
        return {}
    for theirs, ours in axis_names.items():
        if not isinstance(ours, str) or ours not in MESH_AXES:
            problems.add(
                f"axis_names maps {short_repr(theirs)} to {short_repr(ours)}; "
                f"expected one of {', '.join(MESH_AXES)}"
                f"{near_hint(ours, MESH_AXES, AXIS_SYNONYMS)}"
            )
    return axis_names


def _form_of(
    model: Any, trainable: Any
) -> tuple[ModelKind, Form, Callable[[str], Any]]:
    if inspect.isclass(model):
        raise WhaleError(
            f"model is the class {model.__name__}; expected an instance of it, real or "
            "abstract. For an NNX module: nnx.eval_shape(lambda: make_model(...))"
        )
    refuse_training_states(model)
    if _holds_nnx(model):
        from whalejax.adapters.nnx import nnx_form

        form, metadata = nnx_form(model, trainable)
        return "nnx", form, metadata
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(model, linen.Module):
        raise WhaleError(
            f"model is the Linen module {type(model).__name__} itself; expected its "
            "variables. Give model.init(key, x), or jax.eval_shape of it, and call "
            "model.apply in the loss function."
        )
    if isinstance(model, Mapping) and isinstance(model.get("params"), Mapping):
        linen_form = LinenForm(model, Selection(trainable))
        return "linen", linen_form, linen_form.metadata
    if "flax.core.meta" in sys.modules:
        boxes = Boxes(model)
        if boxes:
            return (
                "pytree",
                BoxedForm(model, boxes, Selection(trainable)),
                boxes.metadata,
            )
    return "pytree", PytreeForm(model, Selection(trainable)), lambda path: None


def _holds_nnx(model: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = (nnx.Module, nnx.Variable)
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


def wants_key(make_model: Callable[..., Any]) -> bool:
    """Returns whether a function that makes a model needs a random key.

    Args:
        make_model: Function that takes a key if its first parameter has no default, or
            has a name such as ``rng`` or ``key``.
    """
    # The constructor of a class decides, and not the signature of its metaclass.
    is_class = isinstance(make_model, type)
    try:
        signature = inspect.signature(make_model.__init__ if is_class else make_model)
        parameters = list(signature.parameters.values())[is_class:]
    except (TypeError, ValueError):
        return False
    first = next((p for p in parameters if p.kind < p.VAR_POSITIONAL), None)
    return first is not None and (
        first.default is first.empty or first.name in _RNG_NAMES
    )


def made_model(make_model: Callable[..., Any], key: Any) -> Any:
    """Returns the model that a function or a class makes.

    Args:
        make_model: Function of a random key, or of nothing. An NNX class with a
            parameter ``rngs`` gets ``nnx.Rngs(key)``.
        key: Random key.

    Raises:
        WhaleError: Other arguments are needed. The message names them, and how to bind
            them.
    """
    if _takes_rngs(make_model):
        from flax import nnx

        check_needed(make_model, "rngs")
        return make_model(rngs=nnx.Rngs(key))
    if wants_key(make_model):
        check_needed(make_model, positional=1)
        return make_model(key)
    name = _named_key(make_model)
    check_needed(make_model, *[name] * bool(name))
    return make_model(**{name: key}) if name else make_model()


def _named_key(make_model: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(make_model).parameters.values()
    except (TypeError, ValueError):
        return ""
    keywords = (p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    return next((name for name in keywords if name in ("rng", "key")), "")


def _takes_rngs(make_model: Callable[..., Any]) -> bool:
    nnx = sys.modules.get("flax.nnx")
    partial = make_model if isinstance(make_model, functools.partial) else None
    maker = make_model if partial is None else partial.func
    return (
        nnx is not None
        and isinstance(maker, type)
        and issubclass(maker, nnx.Module)
        and "rngs" in _constructor(maker).parameters
        and not (partial is not None and "rngs" in partial.keywords)
    )


def _constructor(make_model: type) -> inspect.Signature:
    """Returns the signature of a class's constructor, without that of its metaclass."""
    constructor: Any = vars(make_model).get("__init__") or make_model.__init__  # type: ignore[misc]
    return inspect.signature(constructor)


def check_needed(
    make_model: Callable[..., Any], *given: str, positional: int = 0
) -> None:
    """Checks that a model's constructor gets every argument that it needs.

    Args:
        make_model: Function or class that makes the model.
        given: Names of the parameters that are given by name.
        positional: Number of positional arguments; default 0.

    Raises:
        WhaleError: An argument is missing. The message names it, and how to bind it.
    """
    is_class = isinstance(make_model, type)
    try:
        signature = inspect.signature(make_model.__init__ if is_class else make_model)
    except (TypeError, ValueError):
        return
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name
        for p in list(signature.parameters.values())[is_class + positional :]
        if p.default is p.empty and p.kind not in variadic and p.name not in given
    ]
    if needed:
        name = getattr(make_model, "__name__", "make_model")
        raise WhaleError(
            f"make_model, {name}, needs {' and '.join(needed)} besides a random key. "
            f"Bind {'them' if len(needed) > 1 else 'it'}: functools.partial({name}, "
            f"{', '.join(f'{one}=…' for one in needed)})"
        )


def _takes_rng(loss_fn: Callable[..., Any], problems: Problems) -> bool:
    if not is_function(loss_fn):
        problems.add(
            f"loss_fn is {short_repr(loss_fn)}; expected a function loss_fn(model, "
            "batch) "
            "or loss_fn(model, batch, rng)"
        )
        return False
    try:
        parameters = inspect.signature(loss_fn).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    required = [p.name for p in positional if p.default is p.empty]
    needs_keyword = [
        p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty
    ]
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(required) > 3 or needs_keyword or (len(positional) < 2 and not open_ended):
        problems.add(
            f"loss_fn takes ({', '.join(p.name for p in parameters)}); expected "
            "loss_fn(model, batch) or loss_fn(model, batch, rng). Bind other arguments "
            "with functools.partial."
        )
        return False
    if len(required) == 3:
        return True
    return len(positional) >= 3 and positional[2].name in _RNG_NAMES
