"""NNX modules, Linen variables and plain pytrees, brought to one shape.

Everything behind this module sees a model as two pytrees, trained ``params`` and the
``rest``, and as a loss that takes both and returns the new rest. It is a module of its
own because it alone knows Flax, and imports it only where the model is Flax's.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import jax
import jax.numpy as jnp

from whalejax import _compat
from whalejax.losses import LossResult, normalise
from whalejax.meshes.problems import Problems, WhaleError
from whalejax.planner.layout import MESH_AXES


ModelKind = Literal["nnx", "linen", "pytree"]
Path = tuple[Any, ...]

_IGNORED_COLLECTIONS: Final = ("params", "intermediates")
_RNG_NAMES: Final = ("rng", "rngs", "key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A model and its loss in the one shape that capture and lowering know.

    Attributes:
        kind: what the user's model is.
        params: pytree of the trained leaves, real or abstract.
        rest: pytree of all other leaves: statistics, random keys, frozen weights.
        param_paths: dotted path of each trained leaf, in flatten order.
        rest_paths: dotted path of each other leaf, in flatten order.
        names: for each trained leaf, the logical name of each dimension, or None.
        pinned: for each trained leaf, the mesh axes that the user fixed for each
            dimension (several joined by ``+``), or None.
        takes_rng: the loss function wants a random key of its own.
        compute_dtype: what float32 parameters and batches are cast to before the loss
            sees them; None leaves the model's own types.
    """

    kind: ModelKind
    params: Any
    rest: Any
    param_paths: tuple[str, ...]
    rest_paths: tuple[str, ...]
    names: tuple[tuple[str | None, ...], ...]
    pinned: tuple[tuple[str | None, ...], ...]
    takes_rng: bool
    _form: _Form
    _loss_fn: Callable[..., Any]
    compute_dtype: Any = None

    def loss(self, params: Any, rest: Any, batch: Any, rng: Any = None) -> LossResult:
        """The user's loss.

        Args:
            params: trained leaves, in the structure of ``params``.
            rest: other leaves, in the structure of ``rest``.
            batch: what the loss function takes as its batch.
            rng: a random key, where the loss function takes one.

        Returns:
            Total and weight as scalar arrays (weight 1 for a plain mean), metrics, and
            the rest as the call left it, in the structure of ``rest``.

        Raises:
            WhaleError: the return value is no loss, or the rest changed its form.
        """
        if self.compute_dtype is not None:
            params = cast_floats(params, jnp.float32, self.compute_dtype)
            batch = cast_floats(batch, jnp.float32, self.compute_dtype)
        model = self._form.join(params, rest)
        arguments = (model, batch, rng) if self.takes_rng else (model, batch)
        result = normalise(self._loss_fn(*arguments))
        changed = self._form.changed_rest(model, rest, result.variables)
        total = jnp.asarray(result.total)
        if self.compute_dtype is not None:
            changed = _cast_back(changed, rest, self.compute_dtype)
            total = cast_floats(total, self.compute_dtype, jnp.float32)
        changed = _conformed(self.rest_paths, rest, changed)
        return dataclasses.replace(
            result,
            total=total,
            weight=jnp.asarray(result.weight, total.dtype),
            rest=changed,
        )

    def rebuild(self, params: Any, rest: Any) -> Any:
        """The model in the user's own type, from its two parts."""
        return self._form.rebuild(params, rest)

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        """The (params, rest) of another instance of the same model.

        Args:
            model: what ``rebuild`` gives, such as a freshly initialised module.

        Raises:
            WhaleError: it is another model; the leaves that differ are listed.
        """
        params, rest = self._form.take_apart(model)
        return (
            _conformed(self.param_paths, self.params, params, what="parameter"),
            _conformed(self.rest_paths, self.rest, rest),
        )

    def fold_rest(self, rest: Any, number: Any) -> Any:
        """The rest with an integer folded into every random key that it holds.

        Executors fold in the step and the index of the micro-batch, always starting
        from the rest of the step's start, so that every micro-batch draws other
        dropout masks and no plan changes which. Undo it with ``restore_keys``.

        Args:
            rest: in the structure of ``rest``.
            number: integer scalar.
        """
        return jax.tree.map(lambda leaf: _fold_leaf(leaf, number), rest)

    def restore_keys(self, rest: Any, original: Any) -> Any:
        """``rest`` with the random keys of ``original``."""
        return jax.tree.map(
            lambda new, old: old if _is_key(new) else new, rest, original
        )


def cast_floats(tree: Any, source: Any, target: Any) -> Any:
    """A tree with every leaf of one floating-point type cast to another."""

    def cast(leaf: Any) -> Any:
        dtype = getattr(leaf, "dtype", None)
        return leaf.astype(target) if dtype == source else leaf

    return jax.tree.map(cast, tree)


def _cast_back(after: Any, before: Any, computed: Any) -> Any:
    """State that was computed in another float type, in the type that it had."""
    types = dict(zip(_paths(before), map(_dtype, jax.tree.leaves(before)), strict=True))

    def cast(path: Path, leaf: Any) -> Any:
        had = types.get(dotted(path), leaf.dtype)
        return leaf.astype(had) if leaf.dtype == computed != had else leaf

    return jax.tree_util.tree_map_with_path(cast, after)


class _Form(Protocol):
    """What differs between the three kinds of model."""

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        """(params, rest) of a model."""
        ...

    def join(self, params: Any, rest: Any) -> Any:
        """The model as the loss function gets it."""
        ...

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        """The rest after the loss function ran on ``model``."""
        ...

    def rebuild(self, params: Any, rest: Any) -> Any:
        """The model in the user's own type."""
        ...


def adapt(
    model: Any,
    loss_fn: Callable[..., Any],
    *,
    trainable: Any = None,
    axis_names: Mapping[str, str] | None = None,
) -> Adapter:
    """Bring a model and its loss into the one shape.

    Args:
        model: an NNX module, a Linen module's variables (a mapping with ``params``),
            or any pytree; leaves may be abstract.
        loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        trainable: what to train, where that is not every ``nnx.Param``, every leaf of
            ``params``, or every floating-point leaf: glob patterns of dotted paths, a
            predicate on the dotted path, or (NNX) a filter.
        axis_names: the user's names of mesh axes, mapped to ours.

    Returns:
        The adapter; nothing is computed.

    Raises:
        WhaleError: nothing is trained, a pattern matches nothing, the loss function
            has another signature, or the metadata names a mesh axis that is not ours.

    >>> import jax.numpy as jnp
    >>> net = {"w": jnp.ones((3, 2)), "step": 0}
    >>> adapt(net, lambda net, batch: (batch @ net["w"]).mean()).param_paths
    ('w',)
    """
    problems = Problems("model")
    takes_rng = _takes_rng(loss_fn, problems)
    axes = {**dict(zip(MESH_AXES, MESH_AXES, strict=True)), **(axis_names or {})}
    kind, form, metadata = _form_of(model, trainable)
    params, rest = form.take_apart(model)
    param_paths = _paths(params)
    _check_leaves(params, rest, problems)
    if not param_paths:
        problems.add(
            "no leaf is trained. Expected floating-point parameters; give trainable= "
            "to choose them, or check that the model was built."
        )
    names, pinned = _read_metadata(param_paths, params, metadata, axes, problems)
    problems.raise_if_any()
    return Adapter(
        kind=kind,
        params=params,
        rest=rest,
        param_paths=param_paths,
        rest_paths=_paths(rest),
        names=names,
        pinned=pinned,
        takes_rng=takes_rng,
        _form=form,
        _loss_fn=loss_fn,
    )


# Choosing what is trained.


class Selection:
    """Which leaves are trained, by dotted path; the paths asked are remembered."""

    def __init__(self, trainable: Any) -> None:
        self._trainable = trainable
        self._seen: list[str] = []
        self._chosen = False
        self._patterns: tuple[str, ...] | None = None
        if isinstance(trainable, str):
            self._patterns = (trainable,)
        elif isinstance(trainable, Collection) and all(
            isinstance(item, str) for item in trainable
        ):
            self._patterns = tuple(trainable)
        elif trainable is not None and not callable(trainable):
            raise WhaleError(
                f"trainable={trainable!r}: expected glob patterns of dotted paths such "
                "as 'head.*', or a predicate on the dotted path."
            )

    def __call__(self, path: str) -> bool:
        """Whether the leaf at a path is trained."""
        self._seen.append(path)
        if self._patterns is not None:
            chosen = any(fnmatch.fnmatchcase(path, p) for p in self._patterns)
        else:
            chosen = self._trainable is None or bool(self._trainable(path))
        self._chosen = self._chosen or chosen
        return chosen

    def check(self) -> None:
        """Raise where nothing was chosen, or a pattern chose nothing."""
        problems = Problems("trainable")
        known = ", ".join(self._seen[:5]) + (", …" if len(self._seen) > 5 else "")
        if self._patterns is not None:
            for pattern in self._patterns:
                if not fnmatch.filter(self._seen, pattern):
                    problems.add(
                        f"the pattern {pattern!r} matches none of the "
                        f"{len(self._seen)} parameters ({known}). Patterns match whole "
                        "dotted paths; '*' also matches dots."
                    )
        elif not self._chosen and self._trainable is not None:
            problems.add(
                f"the predicate chose none of the {len(self._seen)} parameters "
                f"({known}). It gets one dotted path and returns whether to train it."
            )
        problems.raise_if_any()


# The three kinds of model.


def _form_of(
    model: Any, trainable: Any
) -> tuple[ModelKind, _Form, Callable[[str], Any]]:
    """The kind of a model, its form, and its metadata by dotted parameter path."""
    if _holds_nnx(model):
        from whalejax.adapters_nnx import nnx_form

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
        linen_form = _LinenForm(model, Selection(trainable))
        return "linen", linen_form, linen_form.metadata
    return "pytree", _PytreeForm(model, Selection(trainable)), lambda path: None


def _holds_nnx(model: Any) -> bool:
    """Whether it is an NNX module, or a container of some."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = (nnx.Module, nnx.Variable)
    leaves = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(leaf, kinds) for leaf in leaves)


class _PytreeForm:
    """Any pytree: the two parts are the user's tree with gaps (None)."""

    def __init__(self, model: Any, selection: Selection) -> None:
        self._tree: Any
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(model)
        self._trained = [
            _is_inexact(leaf) and selection(dotted(path)) for path, leaf in leaves
        ]
        selection.check()

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        leaves = self._tree.flatten_up_to(model)
        pairs = list(zip(leaves, self._trained, strict=True))
        return (
            self._tree.unflatten([leaf if t else None for leaf, t in pairs]),
            self._tree.unflatten([None if t else leaf for leaf, t in pairs]),
        )

    def join(self, params: Any, rest: Any) -> Any:
        trained, others = iter(jax.tree.leaves(params)), iter(jax.tree.leaves(rest))
        return self._tree.unflatten(
            [next(trained) if t else next(others) for t in self._trained]
        )

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        del model
        if variables:
            raise WhaleError(
                f"loss_fn returned Aux(variables={sorted(variables)}), but the model "
                "is a plain pytree without collections. Return updated values as "
                "metrics, or give Linen variables."
            )
        return rest

    def rebuild(self, params: Any, rest: Any) -> Any:
        return self.join(params, rest)


class _LinenForm:
    """Linen variables: ``params`` is trained, other collections are the rest.

    The loss function gets the variables without Flax's metadata boxes, because a box
    would constrain its value to axes that need not exist in our mesh; ``rebuild`` puts
    them back.
    """

    def __init__(self, variables: Mapping[str, Any], selection: Selection) -> None:
        from flax.core import meta

        self._meta = meta
        self._boxes = variables
        plain = self._bare(variables)
        self._params = _PytreeForm(plain["params"], selection)
        self._type: Callable[[Mapping[str, Any]], Any] = type(variables)
        is_box = meta.is_axis_metadata
        boxed, _ = jax.tree_util.tree_flatten_with_path(
            variables["params"], is_leaf=is_box
        )
        self._names = {dotted(path): leaf for path, leaf in boxed if is_box(leaf)}

    def metadata(self, path: str) -> Any:
        """The box of a parameter, or None."""
        return self._names.get(path)

    def _bare(self, tree: Any) -> Any:
        """The tree without boxes; Flax's own unboxing constrains the values."""
        is_box = self._meta.is_axis_metadata

        def bare(node: Any) -> Any:
            return jax.tree.leaves(node)[0] if is_box(node) else node

        return jax.tree.map(bare, tree, is_leaf=is_box)

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        plain = dict(self._bare(model))
        params, frozen = self._params.take_apart(plain.pop("params"))
        if jax.tree.leaves(frozen):
            plain["params"] = frozen
        return params, plain

    def join(self, params: Any, rest: Any) -> Any:
        collections = dict(rest)
        frozen = collections.pop("params", None)
        joined = {"params": self._params.join(params, frozen), **collections}
        return self._type(joined)

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        del model
        known = [name for name in rest if name != "params"]
        foreign = [n for n in variables if n not in (*known, *_IGNORED_COLLECTIONS)]
        if foreign:
            raise WhaleError(
                f"loss_fn returned Aux(variables=...) with the collections {foreign}; "
                f"the model has {known}. Return only those that the model holds."
            )
        updated = {name: variables[name] for name in known if name in variables}
        return {**rest, **self._bare(updated)}

    def rebuild(self, params: Any, rest: Any) -> Any:
        return self._meta.replace_boxed(self._boxes, self.join(params, rest))


# Metadata, signatures, leaves.


def _check_leaves(params: Any, rest: Any, problems: Problems) -> None:
    """Every leaf is an array or a number, and every path is told from the others."""
    seen: set[str] = set()
    for tree in (params, rest):
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = dotted(path)
            if name in seen:
                problems.add(
                    f"{name}: two leaves have this dotted path. Use names without dots."
                )
            seen.add(name)
            is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
            if not is_array and not isinstance(leaf, (bool, int, float, complex)):
                problems.add(
                    f"{name} is a {type(leaf).__name__}; expected an array, a number "
                    "or a jax.ShapeDtypeStruct. Keep what is no array out of the model."
                )


def _read_metadata(
    paths: Sequence[str],
    params: Any,
    metadata: Callable[[str], Any],
    axes: Mapping[str, str],
    problems: Problems,
) -> tuple[tuple[tuple[str | None, ...], ...], tuple[tuple[str | None, ...], ...]]:
    names: list[tuple[str | None, ...]] = []
    pinned: list[tuple[str | None, ...]] = []
    for path, leaf in zip(paths, jax.tree.leaves(params), strict=True):
        rank = len(leaf.shape)
        entries, mesh_names = _box_entries(metadata(path))
        if len(entries) > rank:
            problems.add(
                f"{path}: its metadata names {len(entries)} dimensions "
                f"{tuple(entries)}, but its shape is {tuple(leaf.shape)}. Name each "
                "dimension once."
            )
            entries = entries[:rank]
        entries = [*entries, *[None] * (rank - len(entries))]
        names.append(tuple(_logical_name(entry, axes, mesh_names) for entry in entries))
        pinned.append(
            tuple(
                _pinned_axes(entry, axes, mesh_names, path, problems)
                for entry in entries
            )
        )
    return tuple(names), tuple(pinned)


def _box_entries(box: Any) -> tuple[list[Any], tuple[str, ...]]:
    """Per-dimension entries of one metadata box, and the names of its own mesh."""
    if box is None:
        return [], ()
    fields = box if isinstance(box, Mapping) else vars(box)
    found = next(
        (
            fields[name]
            for name in ("names", "out_sharding", "sharding", "sharding_names")
            if fields.get(name) is not None
        ),
        (),
    )
    mesh = fields.get("mesh") or getattr(found, "mesh", None)
    found = getattr(found, "spec", found)
    return list(found), tuple(getattr(mesh, "axis_names", ()))


def _parts(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _logical_name(
    entry: Any, axes: Mapping[str, str], mesh_names: Collection[str]
) -> str | None:
    parts = [p for p in _parts(entry) if p not in axes and p not in mesh_names]
    return "+".join(parts) or None


def _pinned_axes(
    entry: Any,
    axes: Mapping[str, str],
    mesh_names: Collection[str],
    path: str,
    problems: Problems,
) -> str | None:
    found = []
    for part in _parts(entry):
        if part in axes:
            found.append(axes[part])
        elif part in mesh_names:
            problems.add(
                f"{path}: its metadata names the mesh axis {part!r}, which is none of "
                f"ours ({', '.join(MESH_AXES)}). Map it, as in "
                f"axis_names={{{part!r}: 'tensor'}}."
            )
    return "+".join(found) or None


def _takes_rng(loss_fn: Callable[..., Any], problems: Problems) -> bool:
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
            "loss_fn(model, batch) or loss_fn(model, batch, rng). Bind what else it "
            "needs with functools.partial."
        )
        return False
    if len(required) == 3:
        return True
    return len(positional) >= 3 and positional[2].name in _RNG_NAMES


def dotted(path: Path) -> str:
    """A pytree key path as dotted text, such as ``"blocks.0.kernel"``.

    >>> dotted((jax.tree_util.DictKey("a"), jax.tree_util.SequenceKey(0)))
    'a.0'
    """
    return ".".join(_key_text(key) for key in path) or "value"


def _key_text(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _paths(tree: Any) -> tuple[str, ...]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return tuple(dotted(path) for path, _ in leaves)


def _dtype(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    return jnp.result_type(leaf) if dtype is None else dtype


def _is_inexact(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and _compat.is_inexact(_dtype(leaf))


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and _compat.is_key_dtype(leaf.dtype)


def _fold_leaf(leaf: Any, number: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    fold = jax.random.fold_in
    for _ in leaf.shape:
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(leaf, number)


def _conformed(
    paths: Sequence[str], before: Any, after: Any, *, what: str = "state"
) -> Any:
    """``after`` in the very structure of ``before``.

    Raises:
        WhaleError: a leaf is gone, new, or of another shape or dtype.
    """
    problems = Problems("model")
    tree: Any
    leaves, tree = jax.tree.flatten(before)
    old = dict(zip(paths, leaves, strict=True))
    new = dict(zip(_paths(after), jax.tree.leaves(after), strict=True))
    for path in [*old, *(p for p in new if p not in old)]:
        if path not in new or path not in old:
            change = "is gone" if path not in new else "is new"
            problems.add(
                f"{what} {path} {change}; a model keeps its leaves from step to step."
            )
            continue
        was, now = _form_text(old[path]), _form_text(new[path])
        if was != now:
            problems.add(
                f"{what} {path} changed from {was} to {now}; a model keeps its leaves' "
                "shapes and dtypes from step to step."
            )
    problems.raise_if_any()
    return tree.unflatten([new[path] for path in paths])


def _form_text(leaf: Any) -> str:
    return f"{_dtype(leaf)}{list(jnp.shape(leaf))}"
