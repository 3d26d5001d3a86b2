"""Checks the options of a command before anything is imported or read.

This module checks numbers and their limits, and refuses control characters. tyro checks
other types, and the code that uses an option checks its meaning.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from whalejax.cli.options import (
    PLAN_NUMBERS,
    CalibrateCommand,
    CheckCommand,
    PlanCommand,
    ProfileCommand,
    TrainCommand,
    VerifyCommand,
)
from whalejax.meshes.arguments.near_names import OPTION_SYNONYMS, near_names
from whalejax.meshes.checks import (
    LARGEST,
    MOST_SAMPLES,
    is_number,
    is_whole,
    short_repr,
)
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.errors import Problems, WhaleError, is_shown_as_written


LONGEST_WORD: Final = 4096
"""Maximum length of one word: the longest path that Linux accepts."""

LONGEST_SECONDS: Final = 10**6
MOST_MEMBERS: Final = 4096
"""Maximum number of members of an elastic run; messages to members list all of them."""


_WHOLE: Final = {
    "batch": (1, MOST_SAMPLES),
    "each": (1, 10**6),
    "eval_every": (1, LARGEST),
    "keep": (1, 10**6),
    "early_stop": (1, 10**6),
    "nodes": (1, 2**20),
    **PLAN_NUMBERS,
    "port": (1, 65535),
    "processes": (1, 2**20),
    "replay": (0, LARGEST),
    "restarts": (0, 2**20),
    "spares": (0, 2**20),
    "samples": (1, MOST_SAMPLES),
    "replace_every": (1, LARGEST),
    "save_every": (1, LARGEST),
    "snapshot_every": (1, LARGEST),
    "seed": (-LARGEST, LARGEST),
    "steps": (1, LARGEST),
}
"""Least and greatest values of options that are integers."""

_SECONDS: Final = ("exit_timeout", "patience", "seconds", "timeout")
_SECONDS_OR_NONE: Final = ("mtbf", "restart", "snapshot", "recovery", "repair")
_MOST_SECONDS: Final = 1e12
_NUMBERS: Final = (*_SECONDS, *_SECONDS_OR_NONE, "margin", "tokens")
_MAY_BE_EMPTY: Final = ("cpu_quota", "arguments")
_NO_FOLDER: Final = (
    "csv",
    "output",
    "plan",
    "before",
    "after",
    "table",
    "script",
    "key",
)

_POSITIONAL: Final = {
    "after": "B.json",
    "arguments": "ARG",
    "before": "A.json",
    "supervisor": "HOST:PORT",
    "folder": "FOLDER",
    "path": "PATH",
    "script": "SCRIPT.py",
    "table": "TABLE.csv",
}
"""Names of positional arguments in the help."""


def check_words(argv: Sequence[str]) -> None:
    """Refuses words that are too long, have control characters or should be numbers.

    Words after the script of ``whalejax launch`` are not checked.

    Args:
        argv: Arguments after the program's name.

    Raises:
        WhaleError: A word is refused; the message names it and the last option.

    >>> check_words(["plan", "gpt", "--cluster", "h100:8"])
    """
    before = "a word"
    for word in argv[: argv.index("--") + 2 if "--" in argv else len(argv)]:
        if len(word) > LONGEST_WORD or not is_shown_as_written(word):
            raise WhaleError(
                f"{before} is {short_repr(word)}; expected no control characters, "
                f"and at most {LONGEST_WORD} characters"
            )
        before = word if word.startswith("--") else before
    _check_numbers(argv[: argv.index("--") if "--" in argv else len(argv)])


def _check_numbers(argv: Sequence[str]) -> None:
    for place, word in enumerate(argv):
        if not word.startswith("--"):
            continue
        option, equals, value = word[2:].partition("=")
        behind = value if equals else "".join(argv[place + 1 : place + 2])
        name = option.replace("-", "_")
        if not behind or behind.startswith("--") or ":" in behind:
            continue
        if name == "processes":
            continue
        if name in _WHOLE and not re.fullmatch(r"[+-]?\d+", behind):
            raise WhaleError(
                f"--{option} is {short_repr(behind)}; expected a whole number"
            )
        if name in _NUMBERS and not _is_float(behind):
            raise WhaleError(f"--{option} is {short_repr(behind)}; expected a number")


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_command(command: Any, problems: Problems) -> None:
    """Records option values that no command can use.

    Args:
        command: One of the classes of ``options``.
        problems: Collector of the errors.
    """
    for field in dataclasses.fields(command):
        value, name = getattr(command, field.name), field.name
        if value is None or isinstance(value, bool):
            continue
        problem = _problem(name, value)
        if name == "precision" and isinstance(command, CalibrateCommand):
            wrong = [w for w in value if w.rpartition("=")[2] not in PRECISIONS]
            if wrong:
                problem = f"{short_repr(wrong[0])}; expected {', '.join(PRECISIONS)}"
        if problem:
            problems.add(f"{word_of(type(command), name)} is {problem}")


def checked(command: Any) -> None:
    """Refuses a command whose options cannot be used.

    Args:
        command: One of the classes of ``options``.

    Raises:
        WhaleError: Some options cannot be used; lists all.
    """
    if isinstance(command, TrainCommand):
        return  # ``train_session.check_options`` reports all problems of the command.
    problems = Problems("options")
    check_command(command, problems)
    if len(problems) == 1:
        raise WhaleError(problems.messages[0])
    problems.raise_if_any()


_EXAMPLES: Final = {
    "--cluster": "--cluster h100:8",
    "--mesh": "--mesh data=2 tensor=4",
    "--on": "--on h100:8",
    "--precision": "--precision bf16",
    "--set": "--set learning_rate=0.001 (of a reference model)",
}
"""Options with an example of their value."""


def check_options(name: str, command: type, words: Sequence[str]) -> None:
    """Refuses unknown options, which would hide the words that follow them.

    Args:
        name: Program and command, such as ``"whalejax plan"``.
        command: Class of the command.
        words: Words of the command; those after ``--`` are not checked.

    Raises:
        WhaleError: Some words are no options of the command.
    """
    known = {"--help", "--"}
    for field in dataclasses.fields(command):
        word = word_of(command, field.name)
        known |= {word, word.replace("--", "--no-", 1)}
    own = words[: [*words, "--"].index("--")]
    options = [word for word in own if word.startswith("--") and " " not in word]
    unknown = [
        word
        for word in options
        if word.partition("=")[0].replace("_", "-") not in known
    ]
    if unknown:
        raise WhaleError(unknown_words_text(name, command, unknown))


def unknown_words_text(words: str, command: type, unknown: Sequence[str]) -> str:
    """Returns the message about words that a command cannot use.

    Args:
        words: Program and command, such as ``"whalejax plan"``.
        command: Class of the command.
        unknown: Words that are neither options of the command nor their values.

    >>> unknown_words_text("whalejax profile", ProfileCommand, ["--num-steps", "9"])
    "profile has no option '--num-steps'. Did you mean --steps?"
    """
    name = words.partition(" ")[2]
    names = [word_of(command, field.name) for field in dataclasses.fields(command)]
    options = [name for name in names if name.startswith("--")]
    known = {name[2:].replace("-", "_"): name for name in options}
    texts = list[str]()
    for word in dict.fromkeys(word.partition("=")[0] for word in unknown):
        if not word.startswith("-"):
            continue
        near = near_names(word.lstrip("-"), known, OPTION_SYNONYMS)
        hint = " or ".join(_EXAMPLES.get(known[n], known[n]) for n in near)
        text = f"{name} has no option {short_repr(word)}"
        texts.append(f"{text}. Did you mean {hint}?" if hint else f"{text}.")
    if not texts:
        text = f"{name}: no option takes {short_repr(' '.join(unknown))}."
        cluster = next((n for n in ("--cluster", "--on") if n in options), None)
        if cluster is not None and ":" in unknown[0]:
            text += f" Did you mean {cluster} {unknown[0]}?"
        texts.append(text)
    if not all(text.endswith("?") for text in texts):
        texts.append(
            f"Its options are {', '.join(options)}; {words} --help describes them"
        )
    return " ".join(texts)


_NAMING: Final = (CalibrateCommand, CheckCommand, ProfileCommand, VerifyCommand)
"""Commands that name a model by --model."""


def word_of(command: type, name: str) -> str:
    """Returns an option's name in the help.

    Args:
        command: The class of the command.
        name: Name of its field.
    """
    if name == "model" and command not in _NAMING:
        return "MODEL"
    if name == "plan" and command is not TrainCommand:
        return "PLAN.json"
    if name in _POSITIONAL:
        return _POSITIONAL[name]
    return f"--{name.replace('_', '-')}"


def _wrong_range(text: str) -> str:
    """Returns the error in a value of ``--processes``; empty if it is valid."""
    parts = text.split(":")
    good = len(parts) < 3 and all(p.isascii() and p.isdigit() for p in parts)
    numbers = [int(p) for p in parts if len(p) < 9] if good else []
    if len(numbers) == len(parts) and all(1 <= n <= 2**20 for n in numbers):
        if len(numbers) == 2 and numbers[1] > MOST_MEMBERS:
            return f"{text}; expected a MAX of at most {MOST_MEMBERS}"
        if numbers[0] <= numbers[-1]:
            return ""
        return f"{text}, with MIN above MAX; expected {numbers[-1]}:{numbers[0]}"
    return (
        f"{short_repr(text)}; expected a number, 1 or more, or MIN:MAX with MIN at "
        "most MAX, such as 2:4"
    )


def _problem(name: str, value: Any) -> str:
    if name == "processes" and isinstance(value, str):
        return _wrong_range(value)
    if name in _WHOLE:
        least, most = _WHOLE[name]
        if is_whole(value, least, most):
            return ""
        limit = f"at most {most}" if value > most else f"{least} or more"
        limit = "64 bits" if least < 0 else limit
        return f"{short_repr(value)}; expected {limit}"
    if name in _SECONDS:
        if is_number(value) and 0 < value <= LONGEST_SECONDS:
            return ""
        said = f"{value:g}" if isinstance(value, float) else short_repr(value)
        return f"{said}; expected more than 0 s, at most {LONGEST_SECONDS}"
    if name in _SECONDS_OR_NONE:
        if is_number(value) and (value > 0 or name != "mtbf" and value == 0):
            if value <= _MOST_SECONDS:
                return ""
        wanted = "more than 0 s" if name == "mtbf" else "0 s or more"
        return f"{value:g}; expected {wanted}, at most {_MOST_SECONDS:g}"
    if name == "hosts" and any(
        host.strip().startswith("-") for host in value.split(",")
    ):
        text = short_repr(value)
        return f"{text}; expected names of hosts that do not begin with a dash"
    if name in _NO_FOLDER and Path(value).is_dir():
        return f"{short_repr(str(value))}, which is a folder; expected a file"
    words = [value] if isinstance(value, str) else value
    if isinstance(words, tuple) and name not in _MAY_BE_EMPTY and not all(words):
        return "''; expected a word"
    if isinstance(value, str) and name not in _MAY_BE_EMPTY and not value.strip():
        return f"{short_repr(value)}; expected a word"
    return ""


_WITHOUT_TABLES: Final = (
    *("plan", "check", "replay"),
    *("verify", "allow_idle", "estimate", "swarm", "bandwidth", "wire", "sum_wire"),
)
"""Options that cannot be combined with ``--tables``: of training, then of planning."""


def check_table_options(
    options: TrainCommand | PlanCommand, problems: Problems
) -> None:
    """Records errors in the options of tables.

    Args:
        options: Options of the command.
        problems: Collector of the errors.
    """
    if options.tables is None:
        if options.staleness:
            problems.add(
                f"--staleness is {options.staleness} without --tables. Give both, or "
                "leave --staleness out"
            )
        # A plan file may contain tables.
        is_planned = getattr(options, "plan", None) is not None
        if getattr(options, "replace_every", None) is not None and not is_planned:
            problems.add(
                "--replace-every was given without --tables. Give both, or leave "
                "--replace-every out"
            )
        return
    from whalejax.tables.sparse_optimizers import optimizer_named

    try:
        optimizer_named(options.tables)
    except WhaleError as error:
        problems.add(f"--tables {options.tables}: {error}")
    usual = {field.name: field.default for field in dataclasses.fields(options)}
    for name in _WITHOUT_TABLES:
        if name in usual and getattr(options, name) != usual[name]:
            words = f"--{name.replace('_', '-')}"
            problems.add(
                f"{words} cannot be combined with --tables. Leave one of them out"
            )
