"""Explains calls that Python refuses, by a ``WhaleError``.

``names_arguments`` decorates every public function and class. It reads a signature only
after a failed call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

from whalejax.meshes.arguments.near_names import (
    ARGUMENT_SYNONYMS,
    near_hint,
    near_names,
)
from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import WhaleError


C = TypeVar("C", bound=Callable[..., Any])


_BOUND: Final = ("self", "cls")
"""Parameters that users do not write."""

_MARK: Final = "whalejax_names_arguments"
"""Attribute that marks decorated functions."""


class WrongArguments(WhaleError, TypeError):
    """A call has an unknown, repeated or surplus argument, or lacks a required one."""


def names_arguments(
    name: str,
    *,
    instance: str = "",
    instead: str = "",
    habits: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[C], C]:
    """Returns a decorator of public functions and classes with better errors.

    Calls that Python refuses raise ``WrongArguments``, which names the wrong or missing
    argument. For a class, this applies to its constructor, ``__call__`` and the public
    methods that WhaleJAX defines; errors about unknown attributes suggest the nearest.

    Args:
        name: Name under which users call the function or class.
        instance: Usual name of an instance, for messages about methods; default:
            ``name``.
        instead: Sentence that tells what to write; if empty, messages show the
            signature.
        habits: Attribute names of other libraries, each with a sentence that tells what
            to write instead.

    Returns:
        The decorator. A ``TypeError`` from inside a call is not changed.
    """

    def decorate(target: C) -> C:
        if not inspect.isclass(target):
            return cast("C", _checked(target, name, instead))
        kind: Any = target
        attributes: dict[str, Any] = {}
        for base in reversed(kind.__mro__):
            attributes |= vars(base)
        for key, value in attributes.items():
            call = _checked_method(value, key, name, instance or name, instead)
            if call is not None:
                setattr(kind, key, call)
        kind.__getattr__ = _attribute_finder(kind.__name__, habits)
        return cast("C", kind)

    return decorate


def _attribute_finder(kind: str, habits: Mapping[str, str]) -> Callable[..., Any]:
    """Returns a ``__getattr__`` that suggests attributes."""

    def find(self: Any, name: str) -> Any:
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # Raise the property's error.
        text = f"this {kind} has no {name!r}"
        if name in habits:
            text += f". {habits[name]}"
        elif not name.startswith("_"):
            known = [one for one in dir(self) if not one.startswith("_")]
            text += near_hint(name, known) or f"; it has {', '.join(known)}"
        raise AttributeError(text, name=name, obj=self)

    return find


def _checked_method(
    value: Any, key: str, name: str, instance: str, instead: str
) -> Any | None:
    """Returns a decorated public method; None for other attributes of a class."""
    inner = getattr(value, "__func__", value)
    ours = inspect.isfunction(inner) and inner.__module__.startswith("whalejax")
    if not ours or hasattr(inner, _MARK):
        return None
    if key == "__init__":
        return _checked(value, name, instead)
    if key == "__call__":
        return _checked(value, instance)
    if key.startswith("_"):
        return None
    if isinstance(value, staticmethod):
        return staticmethod(_checked(inner, f"{name}.{key}"))
    if isinstance(value, classmethod):
        return classmethod(_checked(inner, f"{name}.{key}"))
    return _checked(inner, f"{instance}.{key}")


def _checked(
    function: Callable[..., Any], name: str, instead: str = ""
) -> Callable[..., Any]:

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                pass
            else:
                raise  # the error comes from inside the call
        known = [p for p in signature.parameters.values() if p.name not in _BOUND]
        num_bound = len(signature.parameters) - len(known)
        text = _problems_of(name, known, len(args) - num_bound, kwargs, instead)
        raise WrongArguments(text) from None

    setattr(call, _MARK, True)
    return call


def _problems_of(
    name: str,
    parameters: Sequence[inspect.Parameter],
    num_positional: int,
    named: Mapping[str, object],
    instead: str,
) -> str:
    """Describes what is wrong with a call, and how to write it."""
    known = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    in_order = [p.name for p in known if p.kind is not p.KEYWORD_ONLY]
    names = [p.name for p in known]
    open_end = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [one for one in named if one not in names and not open_end]
    problems = [
        f"there is no argument {short_repr(one)}"
        f"{near_hint(one, names, ARGUMENT_SYNONYMS) or '.'}"
        for one in unknown
    ]
    meant = {
        one for given in unknown for one in near_names(given, names, ARGUMENT_SYNONYMS)
    }
    given = in_order[: max(0, num_positional)]
    if num_positional > len(in_order):
        problems.append(_too_many(num_positional, in_order))
    twice = [one for one in given if one in named]
    if twice:
        problems.append(f"{_list_text(twice)} {_is(twice)} given twice.")
    needed = [p.name for p in known if p.default is p.empty]
    lacks = [one for one in needed if one not in {*given, *named, *meant}]
    if lacks and not (instead and problems):
        problems.append(f"{_list_text(lacks)} {_is(lacks)} missing.")
    text = f"{name}: {' '.join(problems)} "
    if instead:
        return text + instead
    clear = all("Did you mean" in problem for problem in problems)
    rest = [p for p in names if p not in needed]
    text += f"Write {_call_text(name, known)}"
    return text if not rest or clear else f"{text}, where … may be {', '.join(rest)}"


def _too_many(count: int, in_order: Sequence[str]) -> str:
    some = "1 argument is" if count == 1 else f"{count} arguments are"
    most = f"at most {len(in_order)} can be ({', '.join(in_order)})"
    return f"{some} given without a name; {most if in_order else 'none can be'}."


def _call_text(name: str, parameters: Sequence[inspect.Parameter]) -> str:
    needed = [
        p.name if p.kind is not p.KEYWORD_ONLY else f"{p.name}=…"
        for p in parameters
        if p.default is p.empty
    ]
    return f"{name}({', '.join([*needed, *['…'][: len(parameters) - len(needed)]])})"


def _list_text(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
