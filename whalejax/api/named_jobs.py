"""Finds the models that the command line names: reference models, or users' files."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whalejax.distributed.standard_streams import say
from whalejax.meshes.errors import Problems, WhaleError


if TYPE_CHECKING:
    from types import ModuleType

    from whalejax.user_code.losses import Job


SYNONYMS = {"hidden": "embed", "ffn": "mlp", "seq": "sequence"}
"""Names in tables of runs, mapped to those of the reference models."""


def lasting_name(model: str) -> str:
    """Returns a name that is valid in any folder; a file gets its absolute path.

    Args:
        model: Name of the model on the command line.
    """
    path, colon, function = model.rpartition(":")
    return f"{Path(path).resolve()}{colon}{function}" if colon else model


def model_names() -> tuple[str, ...]:
    """Returns the names of the reference models."""
    from whalejax import models

    return models.available()


def is_file(model: str) -> bool:
    """Returns whether a model's name is that of a file, not of a reference model.

    Args:
        model: Name of the model on the command line.
    """
    return ":" in model or model.endswith(".py")


def find_job(name: str, options: Mapping[str, Any] | None = None) -> Job:
    """Returns the job that the command line names.

    Args:
        name: Name of a reference model, or ``file.py:function``.
        options: Options of the model, or arguments of the function.

    Raises:
        WhaleError: There is no such model, file, function or option; the user's code
            raises; or it returns no job.

    >>> find_job("mlp").name
    'mlp'
    """
    path, colon, function = name.rpartition(":")
    if is_file(name):
        return _job_from_file(Path(path or name), function if colon else "", options)
    from whalejax import models

    if name in models.available():
        own = models.option_names(name)
        words = {
            key if key in own else SYNONYMS.get(key, key): _whole_numbers(value)
            for key, value in (options or {}).items()
        }
        if wider := models.widened(name, words):
            sizes = " ".join(f"{key}={value}" for key, value in wider.items())
            text = f"{sizes}, in proportion to hidden as in {name}; --set fixes others"
            say(f"whalejax: {text}")
        return models.job(name, **words, **wider)
    near = difflib.get_close_matches(name, models.available(), n=3, cutoff=0.5)
    raise WhaleError(
        f"no reference model is named {name!r}"
        f"{'; nearest: ' + ', '.join(near) if near else ''}. There are: "
        f"{', '.join(models.available())}. A model of your own: file.py:function, "
        "whose function returns a wh.Job"
    )


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)+", value):
        return tuple(map(int, value.split(",")))
    return value


def named_values(
    words: Sequence[str], option: str = "--set", example: str = "layers=24"
) -> dict[str, Any]:
    """Parses words of the form ``NAME=VALUE``.

    Values are numbers, ``true`` and ``false``, or text.

    Args:
        words: Words of the command line.
        option: Option of the command line, for the message.
        example: Example of a word, for the message.

    Raises:
        WhaleError: A word has no ``=``, or a name is given twice. The message lists
            all.

    >>> named_values(["layers=2", "annotated=false", "dtype=bfloat16"])
    {'layers': 2, 'annotated': False, 'dtype': 'bfloat16'}
    """
    problems = Problems(option)
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier() and text):
            problems.add(f"{word!r} is no NAME=VALUE, such as {example}")
        elif name in values:
            problems.add(f"{name} is given twice")
        else:
            values[name] = value_of(text)
    problems.raise_if_any()
    return values


def value_of(text: str) -> int | float | bool | str:
    """Returns the number or boolean that a word represents, or the word itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text.replace("_", ""))
        except ValueError:
            continue
    return text


def _job_from_file(
    path: Path, function: str, options: Mapping[str, Any] | None = None
) -> Job:
    from whalejax.user_code.losses import Job

    if not path.is_file():
        raise WhaleError(
            f"MODEL is {str(path)!r} and {function!r}; there is no such file "
            f"({path.absolute()}). Give file.py:function"
        )
    module = _load(path)
    make = _function(module, path, function)
    parameters = inspect.signature(make).parameters.values()
    given = dict(options or {})
    known = [p.name for p in parameters]
    stray = [name for name in given if name not in known]
    if stray:
        raise WhaleError(
            f"--set {', '.join(stray)}: {path}:{function} takes "
            f"{', '.join(known) or 'no argument'}"
        )
    needed = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind < 2 and p.name not in given
    ]
    if needed:
        raise WhaleError(
            f"{path}:{function} takes {', '.join(needed)}; expected a function of no "
            "argument that returns a wh.Job. Give its parameters default values"
        )
    job = _of_the_user(path, functools.partial(make, **given))
    if not isinstance(job, Job):
        raise WhaleError(
            f"{path}:{function} returned {type(job).__name__}; expected "
            "wh.Job(loss_fn, make_model, batch, optimizer)"
        )
    return job


def _load(path: Path) -> ModuleType:
    """Runs a file as a module that can import files of its folder, like a script."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise WhaleError(f"{path} is no Python file; expected a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # Dataclasses look up their module.
    sys.path.insert(0, str(path.absolute().parent))
    _of_the_user(path, functools.partial(spec.loader.exec_module, module))
    return module


def _of_the_user(path: Path, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except WhaleError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [f"{frame.filename}:{frame.lineno}" for frame in frames]
        if isinstance(error, SyntaxError):
            places = [f"{error.filename}:{error.lineno}"]
        own = [p for p in places if p.startswith(str(path.absolute().parent))]
        raise WhaleError(
            f"{path} raised {type(error).__name__}: {error} (at {(own or places)[-1]})"
        ) from error


def _function(module: ModuleType, path: Path, name: str) -> Callable[..., Any]:
    own = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    function: Callable[..., Any] | None = getattr(module, name, None) if name else None
    if callable(function):
        return function
    if not name:
        raise WhaleError(
            f"MODEL is {str(path)!r} and names no function in it; expected "
            f"file.py:function. It has {', '.join(own) or 'none'}"
        )
    near = difflib.get_close_matches(name, own, n=3, cutoff=0.4)
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    raise WhaleError(
        f"{path} has no function {name!r}{nearest}. It has {', '.join(own) or 'none'}"
    )
