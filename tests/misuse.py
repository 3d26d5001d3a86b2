"""Wrong calls of every public callable, generated: what is tried, and what may come.

Callables are found by introspection: those of ``import whalejax as wh``, of
``whalejax.meshes`` and ``whalejax.models``, and the public methods of their classes and
of what they return. For each parameter every value of ``VALUES`` is given, while all
other arguments are as ``misuse_table`` has them. Allowed is a ``WhaleError`` that names
the parameter, or success where the table says why the value is right.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import whalejax as wh
from whalejax import meshes, models, planner


class Unprintable:
    """What has a ``repr`` that fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no words for it")


def function() -> None:
    """A function of no argument."""


VALUES: Final[Mapping[str, Any]] = {
    "none": None,
    "true": True,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus": -1,
    "zero": 0,
    "half": 1.5,
    "huge": 10**30,
    "endless": 10**5000,
    "empty": "",
    "text": "a",
    "control": "a\x1b[2J\nb",
    "bytes": b"a",
    "list": [],
    "texts": ["a"],
    "dict": {},
    "entry": {"a": 5},
    "array": np.arange(3),
    "numpy": np.int64(2),
    "single": np.array(2),
    "jax": jnp.int32(2),
    "arange": jnp.arange(3),
    "shape": jax.ShapeDtypeStruct((3,), np.int32),
    "key": jax.random.key(0),
    "module": np,
    "generator": (number for number in ()),
    "decimal": Decimal(2),
    "object": Unprintable(),
    "function": function,
    "class": int,
}
"""What is given in place of each argument, by a name."""

ALL: Final = " ".join(VALUES)

EITHER: Final = ("numpy?",)
"""What is taken where it is a right number, as Python's own is, or refused."""

SAID: Final = {
    "batch_axes": "batch_axes|batch dimension",
    "dtype": "dtype|element type",
}
"""What errors call a parameter that several callables have, if not by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """How one public callable is called rightly.

    Attributes:
        given: an argument for each of its parameters, from what the tests stand on.
        of: what a method is called on.
        legal: parameter to names of values that are right for it, and why; with ``?``
            behind the name where what else is given decides.
        says: parameter to what its errors call it, where that is another word.
        stops: what is put out of action, as ``module:name``: reaching it is success.
        kept: what stands in ``stops`` in the whole matrix too.
    """

    given: Callable[[Any], dict[str, Any]] = field(default=lambda world: {})
    of: Callable[[Any], Any] | None = None
    legal: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    says: Mapping[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


class Reached(BaseException):
    """A call went as far as what would take time: its arguments were taken."""


# Which callables there are.

RETURNED: Final = (
    "whalejax.user_code.annotations.Annotation",
    "whalejax.display.device_map.DeviceMap",
    "whalejax.display.memory.MemoryChart",
    "whalejax.display.searches.SearchChart",
    "whalejax.display.sliders.Sliders",
    "whalejax.display.timelines.StepTimeline",
    "whalejax.api.search_result.SearchResult",
    "whalejax.api.search_result.ClusterCandidate",
    "whalejax.planner.plan.report.diff.PlanDiff",
    "whalejax.verification.comparison.Verification",
)
"""Classes that nobody builds, but whose instances public callables return."""


NAMED: Final = (
    "whalejax.meshes.jax_mesh.build_mesh",
    "whalejax.meshes.jax_mesh.partition_spec",
    "whalejax.meshes.calibration.calibrate.calibrate",
)
"""Functions of modules that users import by name, because they start JAX."""

INNER: Final[Mapping[str, str]] = {
    "meshes.Problems": "collects the texts of errors; it is given no user's values",
    **dict.fromkeys(
        [
            f"meshes.Level.{name}"
            for name in ("detour", "payload_fraction", "slowdown_of", "waits")
        ],
        "arithmetic on arrays of candidates, of which a search makes millions",
    ),
    "Verification.document": "takes nothing, and is of what a compiler found",
    "planner.Graph": "made by capture alone, and by the hundred while planning",
    "planner.Request": "made by wh.plan alone, of arguments that it checked",
    "planner.TaskGraph": "made by capture alone, and by the hundred while planning",
    "planner.decide": "takes what capture and wh.plan made",
}
"""What bears a public name and is for the library's own rooms; why it is not tried."""


@functools.cache
def public() -> dict[str, Callable[..., Any]]:
    """Every public callable by its name; methods unbound."""
    found: dict[str, Callable[..., Any]] = {}
    for room in (wh, meshes, models, planner):
        prefix = room.__name__.removeprefix("whalejax").lstrip(".")
        for name in dir(room):
            value, title = getattr(room, name), ".".join(filter(None, (prefix, name)))
            if name.startswith("_") or not callable(value) or title in INNER:
                continue
            if room is models and value.__module__ != models.__name__:
                continue  # what the module imports for itself
            if not value.__module__.startswith("whalejax") or value in found.values():
                continue
            if not inspect.isclass(value):
                found[title] = value
            elif not issubclass(value, Exception):
                found[title] = value
                found |= _methods(title, value)
    for path in RETURNED:
        found |= _methods(path.rpartition(".")[2], _named(path))
    found |= {path.rpartition(".")[2]: _named(path) for path in NAMED}
    return {name: call for name, call in found.items() if name not in INNER}


def _named(path: str) -> Any:
    home, _, name = path.rpartition(".")
    return getattr(importlib.import_module(home), name)


def _methods(name: str, kind: type) -> dict[str, Callable[..., Any]]:
    """The methods and settable properties of a class that are ours and public."""
    found = {}
    for key, value in inspect.getmembers_static(kind):
        if key.startswith("_") and key != "__call__":
            continue
        if isinstance(value, property):
            if value.fset is not None:
                found[f"{name}.{key}="] = value.fset
            continue
        inner = getattr(value, "__func__", value)
        if inspect.isfunction(inner) and inner.__module__.startswith("whalejax"):
            bound = isinstance(value, classmethod | staticmethod)
            found[f"{name}.{key}"] = getattr(kind, key) if bound else inner
    return found


def parameters(name: str, call: Callable[..., Any]) -> list[str]:
    """The names of a callable's parameters, without ``self`` and open ends."""
    found = inspect.signature(call).parameters.values()
    names = [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [n for n in names if n not in ("self", "cls")]


# Calling them.


def faults(name: str, entry: Entry, world: Any, *, whole: bool = False) -> list[str]:
    """What one callable does with wrong arguments that it should not.

    Args:
        name: as in ``public()``.
        entry: how it is called rightly.
        world: what the tests stand on.
        whole: go through with calls that are right, whatever time they take.
    """
    found = []
    stops = entry.kept if whole else entry.stops
    with tempfile.TemporaryDirectory() as folder, _inside(folder), stopped(stops):
        given, call = entry.given(world), _callable(name, entry, world)
        for parameter in given:
            for label, value in VALUES.items():
                arguments = {**given, parameter: value}
                fault = _fault(call, entry, arguments, parameter, label)
                if fault:
                    found.append(f"{name}({parameter}=<{label}>): {fault}")
    return found


def called(name: str, entry: Entry, world: Any) -> str:
    """What is wrong with the right call of a callable, or nothing."""
    with (
        tempfile.TemporaryDirectory() as folder,
        _inside(folder),
        stopped(entry.stops),
    ):
        try:
            _finish(_callable(name, entry, world)(**entry.given(world)))
        except Reached:
            pass
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def _fault(
    call: Callable[..., Any],
    entry: Entry,
    arguments: dict[str, Any],
    parameter: str,
    label: str,
) -> str:
    """What is wrong with the outcome of one call, or nothing."""
    labels = [*EITHER, *entry.legal.get(parameter, ("", ""))[0].split()]
    right, either = label in labels, f"{label}?" in labels
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Python iterable type")
            _finish(call(**arguments))
    except wh.WhaleError as error:
        text = str(error)
        if right:
            return f"should be taken, and says: {text}"
        words = entry.says.get(parameter, SAID.get(parameter, parameter))
        if not re.search(rf"(?<![a-z]){words}(?![a-z])", text):
            return f"does not name {words}: {text}"
        lost = [c for c in text if not c.isprintable() and c != "\n"]
        if lost or len(text) > 4000:
            return f"shows what was given as it is: {text!r:.300}"
        return ""
    except Reached:
        pass
    except Exception as error:
        # What the user's own function raises stays as it is, with a note of where.
        own = any("raised in loss_fn" in note for note in _notes(error))
        if own and (right or either):
            return ""
        return f"ends in {type(error).__name__}: {str(error)[:200]}"
    return "" if right or either else "is taken"


def _finish(result: Any) -> None:
    """Closes what warns where nothing iterates over it."""
    if isinstance(result, Iterator) and hasattr(result, "close"):
        result.close()


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])


def _callable(name: str, entry: Entry, world: Any) -> Callable[..., Any]:
    """What is called, of an instance where it is a method."""
    if entry.of is None:
        return public()[name]
    bound, key = entry.of(world), name.rpartition(".")[2]
    if key.endswith("="):
        return lambda **values: setattr(bound, key[:-1], *values.values())
    found: Callable[..., Any] = getattr(bound, key)
    return found


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Names of files are those of a folder of its own."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def stopped(paths: tuple[str, ...]) -> Iterator[None]:
    """Functions that would take time raise ``Reached``.

    Args:
        paths: as ``module:name``.
    """
    with contextlib.ExitStack() as stack:
        for path in paths:
            module, _, name = path.partition(":")
            *owners, last = name.split(".")
            owner: Any = importlib.import_module(module)
            for one in owners:
                owner = getattr(owner, one)
            stack.enter_context(mock.patch.object(owner, last, side_effect=Reached))
        yield
