"""NNX modules behind the adapter's interface; imported only for such models.

A module is split into a static graph definition and its variables. The trained
variables and the rest are nested dictionaries of plain arrays. A variable to which the
module refers twice occurs once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from whalejax import _compat
from whalejax.adapters.leaves import abstract_tree
from whalejax.adapters.plain_arrays import refuse_arrays_without_values
from whalejax.adapters.pytrees import Selection
from whalejax.meshes.errors import WhaleError


Path = tuple[Any, ...]


def nnx_form(model: nnx.Module, trainable: Any) -> tuple[NnxForm, Callable[[str], Any]]:
    """Returns the form of a module, and its variables' metadata by dotted path."""
    form = NnxForm(model, trainable)
    return form, form.metadata


class NnxForm:
    """Splits and rebuilds modules; its methods are those of ``pytrees.Form``."""

    def __init__(self, model: nnx.Module, trainable: Any) -> None:
        self._graph, state = nnx.split(model)
        self._variables: dict[Path, Any] = dict(nnx.to_flat_state(state))
        values = {path: _value(v) for path, v in self._variables.items()}
        refuse_arrays_without_values(model, values)
        self._by_path = {_dotted(p): v for p, v in self._variables.items()}
        self._trained = _trained_paths(self._variables, trainable)
        self.frozen = frozenset(
            _dotted(path)
            for path, variable in self._variables.items()
            if path not in self._trained
            and isinstance(variable, nnx.Param)
            and _is_inexact(variable)
        )

    def metadata(self, path: str) -> Mapping[str, Any] | None:
        """Returns Flax's metadata of a variable; None for other leaves."""
        variable = self._by_path.get(path)
        if not isinstance(variable, nnx.Variable):
            return None
        metadata: Mapping[str, Any] = variable.get_metadata()
        return metadata

    def take_apart(self, model: Any) -> tuple[Any, Any]:
        flat = dict(nnx.to_flat_state(nnx.state(model)))
        params = {p: _value(v) for p, v in flat.items() if p in self._trained}
        rest = {p: _value(v) for p, v in flat.items() if p not in self._trained}
        return _nested(params), _nested(rest)

    def join(self, params: Any, rest: Any) -> Any:
        flat = []
        for path, variable in self._variables.items():
            value = _at(params if path in self._trained else rest, path)
            is_variable = isinstance(variable, nnx.Variable)
            flat.append((path, variable.replace(value) if is_variable else value))
        return nnx.merge(self._graph, nnx.from_flat_state(flat))

    def changed_rest(self, model: Any, rest: Any, variables: Mapping[str, Any]) -> Any:
        """Returns the rest after a call, without values that the call sowed."""
        del rest
        if variables:
            raise WhaleError(
                f"loss_fn returned Aux(variables={sorted(variables)}), but an NNX "
                "module updates its variables in place. Return metrics only."
            )
        after = dict(nnx.to_flat_state(nnx.state(model)))
        kept = {
            path: _value(after[path])
            for path in self._variables
            if path in after and path not in self._trained
        }
        return _nested(kept)

    def rebuild(self, params: Any, rest: Any) -> Any:
        return self.join(params, rest)

    def evaluating(self) -> NnxForm | None:
        """Returns the form in evaluation mode; None if that changes nothing.

        Raises:
            WhaleError: The module's ``eval`` changes its variables.
        """
        flat = nnx.from_flat_state([*self._variables.items()])
        model = nnx.merge(self._graph, flat)
        before = nnx.graphdef(model)
        if isinstance(model, nnx.Module):
            model.eval()
        else:  # A container of modules has no eval method of its own.
            for _, module in nnx.iter_modules(model):
                module.eval()
        graph, state = nnx.split(model)
        if graph == before:
            return None
        other = set(self._variables).symmetric_difference(
            dict(nnx.to_flat_state(state))
        )
        if other:
            names = ", ".join(sorted(map(_dotted, other)))
            raise WhaleError(
                f"the model's eval() adds or removes variables ({names}); expected it "
                "to set attributes only. Evaluate with training=True, or with a "
                "function of your own on state.model"
            )
        evaluating = copy.copy(self)
        evaluating._graph = graph
        return evaluating

    def without_values(self) -> NnxForm:
        values = copy.copy(self)
        values._by_path = {}  # The metadata was read before.
        values._variables = {
            path: variable.replace(abstract_tree(_value(variable)))
            if isinstance(variable, nnx.Variable)
            else abstract_tree(variable)
            for path, variable in self._variables.items()
        }
        return values


Modes = dict[Path, dict[str, bool]]
"""Boolean attributes of each module, by its path."""


def modes_of(model: Any) -> Modes:
    """Returns the modes of all modules of a model, such as ``deterministic``."""
    return {
        path: {k: v for k, v in vars(module).items() if isinstance(v, bool)}
        for path, module in nnx.iter_modules(model)
    }


def set_modes(model: Any, modes: Modes) -> None:
    """Sets the modes of a model's modules to those of another instance."""
    for path, module in nnx.iter_modules(model):
        for name, value in modes.get(path, {}).items():
            if isinstance(getattr(module, name, None), bool):
                setattr(module, name, value)


def _trained_paths(variables: Mapping[Path, Any], trainable: Any) -> frozenset[Path]:
    if _is_filter(trainable):
        chosen = nnx.filterlib.to_predicate(trainable)
        trained_paths = frozenset(
            path
            for path, variable in variables.items()
            if chosen(path, variable) and _is_inexact(variable)
        )
        if not trained_paths:
            raise WhaleError(
                f"trainable={trainable!r} selects no floating-point variable of the "
                f"{len(variables)} in the model. Check the filter against nnx.state."
            )
        return trained_paths
    selection = Selection(trainable)
    trained_paths = frozenset(
        path
        for path, variable in variables.items()
        if isinstance(variable, nnx.Param)
        and _is_inexact(variable)
        and selection(_dotted(path))
    )
    selection.check()
    return trained_paths


def _is_filter(trainable: Any) -> bool:
    if trainable is None or isinstance(trainable, str):
        return False
    if isinstance(trainable, (type, bool)) or trainable is Ellipsis:
        return True
    if isinstance(trainable, (tuple, list)):
        return not all(isinstance(item, str) for item in trainable)
    return type(trainable).__module__ == nnx.filterlib.__name__


def _value(variable: Any) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _is_inexact(variable: Any) -> bool:
    value = _value(variable)
    return _compat.is_inexact(
        value.dtype if hasattr(value, "dtype") else jnp.result_type(value)
    )


def _dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)


def _nested(flat: Mapping[Path, Any]) -> dict[Any, Any]:
    root: dict[Any, Any] = {}
    for path, value in flat.items():
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return root


def _at(tree: Mapping[Any, Any], path: Path) -> Any:
    node: Any = tree
    for part in path:
        node = node[part]
    return node
