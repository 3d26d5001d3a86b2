"""Plain pytrees and Linen variables behind the adapter's interface.

The two parts are the user's own tree with gaps. So functions on parameters, such as an
optimizer's masks, see the user's structure.
"""

from __future__ import annotations

import copy
import fnmatch
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import jax

from whalejax.adapters.leaves import (
    abstract_tree,
    dotted,
    is_inexact,
    paths_of,
    refuse_other,
)
from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import Problems, WhaleError


_IGNORED_COLLECTIONS: Final = ("params", "intermediates")


class Form(Protocol):
    """Operations that differ between the three kinds of models.

    Attributes:
        frozen: Dotted paths of the weights in the rest, which ``trainable`` excludes.
    """

    frozen: frozenset[str]

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        """Splits a model into (params, rest)."""
        ...

    def join(self, params: Any, rest: Any) -> Any:
        """Returns the model in the form for the loss function."""
        ...

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        """Returns the rest after the loss function ran on ``model``."""
        ...

    def rebuild(self, params: Any, rest: Any) -> Any:
        """Returns the model in the user's type."""
        ...

    def evaluating(self) -> Form | None:
        """Returns the form in evaluation mode; None if that changes nothing."""
        ...

    def without_values(self) -> Form:
        """Returns the form without arrays of the original model."""
        ...


class Selection:
    """Selection of trained leaves by dotted path, which records the queried paths."""

    def __init__(self, trainable: Any) -> None:
        self._trainable = trainable
        self._seen: list[str] = []
        self._chosen = False
        self._patterns: tuple[str, ...] | None = None
        if isinstance(trainable, str):
            self._patterns = (trainable,)
        elif (
            isinstance(trainable, Collection)
            and not isinstance(trainable, Mapping)
            and getattr(trainable, "ndim", None)
            != 0  # a zero-dimensional array has no items
            and all(isinstance(item, str) for item in trainable)
        ):
            self._patterns = tuple(trainable)
        elif trainable is not None and (
            inspect.isclass(trainable) or not _is_predicate(trainable)
        ):
            raise WhaleError(
                f"trainable={short_repr(trainable)}: expected glob patterns of "
                "dotted paths "
                "such as 'head.*', or a predicate that takes one dotted path."
            )

    def __call__(self, path: str) -> bool:
        """Returns whether the leaf at a path is trained."""
        self._seen.append(path)
        if self._patterns is not None:
            chosen = any(fnmatch.fnmatchcase(path, p) for p in self._patterns)
        else:
            chosen = self._trainable is None or bool(self._trainable(path))
        self._chosen = self._chosen or chosen
        return chosen

    def check(self) -> None:
        """Raises an error if no leaf was selected, or a pattern selected none."""
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


def _is_predicate(function: Any) -> bool:
    """Returns whether a function accepts one argument, if its signature is known."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind("path")
    except ValueError:  # The function has no signature.
        return True
    except TypeError:
        return False
    return True


class PytreeForm:
    """Any pytree: the two parts are the user's tree with gaps (None)."""

    def __init__(self, model: Any, selection: Selection) -> None:
        self._tree: Any
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(model)
        self._trained = [
            is_inexact(leaf) and selection(dotted(path)) for path, leaf in leaves
        ]
        self._paths = [dotted(path) for path, _ in leaves]
        selection.check()
        self.frozen = frozenset(
            dotted(path)
            for (path, leaf), trained in zip(leaves, self._trained, strict=True)
            if is_inexact(leaf) and not trained
        )

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        if jax.tree.structure(model) != self._tree:
            _refuse_other_tree(self._paths, model)
        leaves = jax.tree.leaves(model)
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

    def evaluating(self) -> PytreeForm | None:
        return None

    def without_values(self) -> PytreeForm:
        return self


class Boxes:
    """Flax's metadata boxes around the leaves of a tree, to remove and restore.

    A loss function gets its model without boxes. A box would constrain its value to
    axes that our mesh may lack.
    """

    def __init__(self, tree: Any) -> None:
        from flax.core import meta

        self._meta = meta
        self._tree = tree
        is_box = meta.is_axis_metadata
        boxed, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
        self._by_path = {dotted(path): leaf for path, leaf in boxed if is_box(leaf)}

    def __bool__(self) -> bool:
        return bool(self._by_path)

    def metadata(self, path: str) -> Any:
        """Returns the box of a leaf, or None."""
        return self._by_path.get(path)

    def bare(self, tree: Any) -> Any:
        """Returns a tree without boxes; Flax's unboxing would constrain the values."""
        is_box = self._meta.is_axis_metadata

        def value(node: Any) -> Any:
            return next(iter(jax.tree.leaves(node)), None) if is_box(node) else node

        return jax.tree.map(value, tree, is_leaf=is_box)

    def boxed(self, tree: Any) -> Any:
        """Returns a tree without boxes in the boxes of the original tree."""
        return self._meta.replace_boxed(self._tree, tree)

    def without_values(self) -> Boxes:
        """Returns the same boxes around abstract leaves."""
        return Boxes(abstract_tree(self._tree))


class BoxedForm:
    """Any pytree with Flax's metadata boxes, such as ``params`` of Linen alone."""

    def __init__(self, model: Any, boxes: Boxes, selection: Selection) -> None:
        self._boxes = boxes
        self._form = PytreeForm(boxes.bare(model), selection)
        self.frozen = self._form.frozen

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        return self._form.take_apart(self._boxes.bare(model))

    def join(self, params: Any, rest: Any) -> Any:
        return self._form.join(params, rest)

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        return self._form.changed_rest(model, rest, variables)

    def rebuild(self, params: Any, rest: Any) -> Any:
        return self._boxes.boxed(self.join(params, rest))

    def evaluating(self) -> BoxedForm | None:
        return None

    def without_values(self) -> BoxedForm:
        values = copy.copy(self)
        values._boxes = self._boxes.without_values()
        return values


class LinenForm:
    """Linen variables: ``params`` is trained, other collections are the rest."""

    def __init__(self, variables: Mapping[str, Any], selection: Selection) -> None:
        from flax.core import FrozenDict

        self._boxes = Boxes(variables)
        plain = self._boxes.bare(variables)
        self._params = PytreeForm(plain["params"], selection)
        self.frozen = frozenset(f"params.{path}" for path in self._params.frozen)
        self._type = FrozenDict if isinstance(variables, FrozenDict) else dict

    def metadata(self, path: str) -> Any:
        """Returns the box of a leaf, or None; its path may omit ``params``."""
        metadata = self._boxes.metadata(f"params.{path.removeprefix('params.')}")
        return self._boxes.metadata(path) if metadata is None else metadata

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        plain = dict(self._boxes.bare(model))
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
        return {**rest, **self._boxes.bare(updated)}

    def rebuild(self, params: Any, rest: Any) -> Any:
        return self._boxes.boxed(self.join(params, rest))

    def evaluating(self) -> LinenForm | None:
        return None

    def without_values(self) -> LinenForm:
        values = copy.copy(self)
        values._boxes = self._boxes.without_values()
        return values


def _refuse_other_tree(paths: Sequence[str], model: Any) -> None:
    result = paths_of(model)
    gone = [f"{path} is gone" for path in paths if path not in result]
    fresh = [f"{path} is new" for path in result if path not in paths]
    refuse_other([*gone, *fresh] or ["its leaves stand in containers of other types"])
