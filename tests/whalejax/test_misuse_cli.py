"""Every option of every command is given wrong values: exit code 2, and its name.

By default the parser is left out, but for one option of each type: it takes longer than
all that stands behind it. The whole matrix goes through it.
"""

from __future__ import annotations

import dataclasses
import shutil
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import tyro

from tests import misuse, misuse_world
from whalejax.cli import main, options
from whalejax.cli.option_checks import LONGEST_WORD, word_of


pytestmark = pytest.mark.relaxed_promotion

TEXTS: Final = {
    "empty": "",
    "text": "a",
    "minus": "-1",
    "control": "a\x1b[2J\nb",
    "long": "a" * (LONGEST_WORD + 1),
}
WHOLE: Final = {"minus": "-1", "zero": "0", "huge": "1" + "0" * 30}
NUMBERS: Final = {**WHOLE, "nan": "nan", "inf": "inf", "endless": "1e400"}
UNREAD: Final = {"empty": "", "text": "a", "half": "1.5", "digits": "9" * 3000}
"""What the parser itself refuses where numbers are expected."""

COMMANDS: Final[Mapping[str, type]] = {
    kind.__name__.removesuffix("Command").lower(): kind
    for kind in (typing.get_args(one)[0] for one in typing.get_args(options.Command))
}

GIVEN: Final[Mapping[str, tuple[str, ...]]] = {
    "train": ("mlp-test", "--cluster", "h100:8"),
    "plan": ("mlp-test", "--cluster", "h100:8"),
    "show": ("plan.json",),
    "diff": ("plan.json", "plan.json"),
    "why": ("plan.json", "w"),
    "search": ("mlp-test", "--on", "h100:8"),
    "verify": ("plan.json", "--model", "mlp-test"),
    "calibrate": ("-o", "new.toml"),
    "estimate": ("table.csv", "-o", "out.csv"),
    "completion": ("bash",),
    "launch": ("script.py",),
    "agent": ("localhost:1",),
    "status": (".",),
    "goodput": ("plan.json", "--mtbf", "1000"),
    "doctor": ("--coordinator", "localhost:8476", "--processes", "2"),
}
"""How each command is called rightly."""

MORE: Final[Mapping[str, Mapping[str, Any]]] = {
    "calibrate": {"model": "mlp-test"},
    "train": {"save": Path("checkpoints")},
}
"""What some options need beside them."""

ANY_WORDS: Final = ("text minus", "any words")
LEGAL: Final[Mapping[str, tuple[str, str]]] = {
    "seed": ("minus zero", "any number is a seed"),
    "margin": ("zero", "nothing is kept free"),
    "replay": ("zero", "no step is repeated"),
    "spares": ("zero", "nobody stands by"),
    "restarts": ("zero", "the first failure ends all"),
    "staleness": ("zero", "no lookup lacks an update"),
    "restart": ("zero", "what takes no time"),
    "snapshot": ("zero", "what takes no time"),
    "recovery": ("zero", "what takes no time"),
    "repair": ("zero", "what takes no time"),
    "logs": ("empty text minus", "a folder that can be made, or this one"),
    "train.csv": ("text minus", "a file that can be made"),
    "train.best": ("text minus", "a metric, if the job is evaluated"),
    "train.save": ("empty text minus", "a folder that can be made, or this one"),
    "calibrate.kind": ANY_WORDS,
    "agent.key": ("text minus", "a file that is waited for"),
    "agent.name": ("text minus", "any name"),
    "launch.remote_shell": ANY_WORDS,
    "doctor.remote_shell": ANY_WORDS,
    "launch.hosts": ("text", "a name that ssh may know"),
    "doctor.hosts": ("text", "a name that ssh may know"),
    "plan.output": ("text minus", "a file that can be made"),
    "estimate.output": ("text minus", "a file that can be made"),
    "verify.output": ("text minus", "a file that can be made"),
    "arguments": (" ".join(TEXTS), "what a script takes is its own affair"),
    "cpu_quota": ("empty", "no quota"),
}

SAYS: Final[Mapping[str, str]] = {
    "--set": "--set|is no NAME=VALUE",
    "--on": "--on|clusters?",
    "--shares": "shares",
    "--cluster": "cluster",
    "--price": "--price|prices",
    "--mesh": "mesh",
    "--precision": "precision",
    "--remat": "remat",
    "--attention": "attention",
    "MODEL": "MODEL|reference model",
    "--model": "--model|reference model",
    "PLAN.json": "PLAN.json|plan file|a plan",
    "A.json": "A.json|plan file",
    "B.json": "B.json|plan file",
    "--plan": "--plan|plan file",
    "PATH": "PATH|path",
    "SCRIPT.py": "SCRIPT.py",
    "TABLE.csv": "TABLE.csv|cannot be read",
    "--topology": "topology",
    "--hosts": "--hosts|host",
    "--coordinator": "coordinator",
    "HOST:PORT": "HOST:PORT",
}
"""What else errors call an option; those of ``wh.plan`` have its names."""

STOPS: Final = (
    "whalejax.api.plan_request:PlanQuestion.programs",
    "whalejax.meshes.detect:detect",
    "whalejax.verification.checking:run",
    "whalejax.meshes.calibration.calibrate:measured",
    "whalejax.processes.launcher:run",
    "whalejax.cli.doctor:report",
    "whalejax.cli.doctor:_on_all",
    "whalejax.elastic.agents.agent:Agent.run",
)
"""What takes time or touches devices."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands name."""
    folder = tmp_path_factory.mktemp("misuse")
    plan = misuse_world.planned()
    plan.save(folder / "plan.json")
    (folder / "script.py").write_text("")
    header = "layers,hidden,seq,global_batch,num_devices,device"
    (folder / "table.csv").write_text(f"{header}\n2,64,16,8,8,h100\n")
    return folder


@pytest.fixture
def quick(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """In a copy of that folder, with the reference model made once."""
    from whalejax import jobs

    job = main.find_job("mlp-test")
    model = jobs.abstract_model(job)
    find = main.find_job

    def found(name: str, given: Mapping[str, Any] | None = None) -> Any:
        return (
            job if (name, dict(given or {})) == ("mlp-test", {}) else find(name, given)
        )

    here = tmp_path / "here"
    shutil.copytree(folder, here)
    monkeypatch.chdir(here)
    monkeypatch.setattr(main, "find_job", found)
    monkeypatch.setattr(jobs, "abstract_model", lambda job: model)
    with misuse.stopped(STOPS):
        yield


def fields(command: str) -> dict[str, Any]:
    """The options of a command that take a value, and the type of each."""
    hints = typing.get_type_hints(COMMANDS[command])
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(COMMANDS[command])
        if hints[field.name] is not bool and command != "completion"
    }


def tried(hint: Any) -> dict[str, str]:
    """Words for an option that the parser takes, by their names."""
    kinds = [hint, *typing.get_args(hint)]
    if int in kinds:
        return WHOLE
    return NUMBERS if float in kinds else TEXTS


def valued(hint: Any, word: str) -> Any:
    """What the parser makes of a word."""
    kinds = [hint, *typing.get_args(hint)]
    for kind in (int, float, Path):
        if kind in kinds:
            return kind(word)
    return (word,) if typing.get_origin(hint) is tuple else word


def wrong(command: str, name: str, hint: Any) -> Iterator[tuple[str, str]]:
    """Names of values for an option, and the words."""
    if any(typing.get_origin(kind) is typing.Literal for kind in typing.get_args(hint)):
        return  # the parser's own
    yield from tried(hint).items()


def outcome(command: str, name: str, label: str, argv: list[str], capsys: Any) -> str:
    """What is wrong with how a command ends, or nothing."""
    labels = (LEGAL.get(f"{command}.{name}") or LEGAL.get(name) or ("", ""))[0].split()
    try:
        status = main.main(argv)
    except misuse.Reached:
        status = 0
    except BaseException as error:  # a command has no business to raise
        return f"ends in {type(error).__name__}: {str(error)[:200]}"
    told = capsys.readouterr().err
    if status != 2:
        return "" if label in labels else f"is taken, with status {status}"
    if label in labels:
        return f"should be taken, and says: {told}"
    word = word_of(COMMANDS[command], name)
    known = SAYS.get(word, word).split("|")
    known += (
        [name, name.replace("_", "-"), "num_micro_batches"]
        if word in ("--micro-batches")
        else [name]
    )
    if not any(one in told for one in known):
        return f"does not name {word}: {told}"
    bad = [c for c in told if not c.isprintable() and c != "\n"]
    return (
        f"shows control characters or too much: {told!r:.200}"
        if bad or len(told) > 5000
        else ""
    )


@pytest.mark.parametrize("command", [name for name in GIVEN if name != "completion"])
def test_wrong_options(
    command: str, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    right = main._parse([command, *GIVEN[command]])
    right = dataclasses.replace(right, **MORE.get(command, {}))
    found = []
    for name, hint in fields(command).items():
        for label, word in wrong(command, name, hint):
            given = dataclasses.replace(right, **{name: valued(hint, word)})
            with mock.patch.object(tyro, "cli", return_value=(given, [])):
                argv = [command, f"--{name}", word, *GIVEN[command]]
                if name == "arguments":  # what stands behind the script
                    argv = [command, *GIVEN[command], word]
                fault = outcome(command, name, label, argv, capsys)
            if fault:
                found.append(f"{command} --{name} <{label}>: {fault}")
    assert not found, "\n".join(found)


def unread(argv: list[str], word: str, capsys: Any) -> str:
    """What is wrong with how words end that the parser does not take, or nothing."""
    try:
        status = main.main(argv)
    except BaseException as error:
        return f"{argv}: ends in {type(error).__name__}: {str(error)[:200]}"
    printed = capsys.readouterr()
    told = printed.err + printed.out
    if status != 2 or word not in told or len(told) > 5000:
        return f"{argv}: ends with {status}, and says: {told[:500]}"
    return ""


@pytest.mark.parametrize("value", UNREAD.values(), ids=list(UNREAD))
def test_words_that_are_no_numbers(value: str, capsys: Any) -> None:
    argv = ["plan", "mlp-test", "--batch", value]
    assert not unread(argv, "--batch", capsys)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["verify", "plan.json", "--timeout", "soon"], "--timeout"),
        (["train", "mlp-test", "--offload", "everything"], "--offload"),
        (["completion", "a"], "bash"),
    ],
)
def test_words_of_other_types(argv: list[str], word: str, capsys: Any) -> None:
    assert not unread(argv, word, capsys)


def without(word: str, given: Sequence[str]) -> list[str]:
    """Words of a command, but for an option and its value."""
    places = [place for place, one in enumerate(given) if one == word]
    return [x for i, x in enumerate(given) if not {i, i - 1} & {*places}]


@pytest.mark.full
@pytest.mark.parametrize("command", [name for name in GIVEN if name != "completion"])
def test_the_parser_refuses_what_is_no_number(command: str, capsys: Any) -> None:
    found = []
    for name, hint in fields(command).items():
        kinds = [hint, *typing.get_args(hint)]
        if int not in kinds and float not in kinds:
            continue
        word = f"--{name.replace('_', '-')}"
        for label, value in UNREAD.items():
            if label == "digits" or (label == "half" and float in kinds):
                continue
            given = without(word, GIVEN[command])  # of two the last one counts
            fault = unread([command, word, value, *given], word, capsys)
            found += [fault] if fault else []
    assert not found, "\n".join(found)
