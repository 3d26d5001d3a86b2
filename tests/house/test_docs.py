"""The documents tell the truth: their Python runs, their commands and links exist.

Every ``python`` block of a document runs, in order and in one namespace, in a process
with eight devices and an empty working folder, by default.
Commands in ``bash`` and ``console`` blocks are not run, since some train for minutes;
their scripts, subcommands and options are looked up instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

from tests.flags import QUICK
from whalejax.cli import main
from whalejax.distributed.launch_env import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from whalejax.meshes import cluster


ROOT: Final = Path(__file__).resolve().parents[2]
DOCUMENTS: Final = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
SHELL_LANGUAGES: Final = ("bash", "sh", "shell", "console")
# Programs that are not ours and need no looking up.
FOREIGN_PROGRAMS: Final = ("cd", "export", "git", "pip", "source", "srun", "uv")
SEPARATORS: Final = ("&&", "||", "|", ";")
HelpOf = Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a document."""

    path: Path
    language: str
    line: int  # of the first line inside the fence, counted from 1
    text: str
    attributes: str = ""  # what stands behind the language: requires=MODULE


def blocks_of(path: Path, text: str) -> Iterator[Block]:
    """Yields the fenced blocks of a Markdown text."""
    fence = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
    for match in fence.finditer(text):
        yield Block(
            path=path,
            language=match[1],
            attributes=match[2],
            line=text.count("\n", 0, match.start(3)) + 1,
            text=match[3],
        )


def blocks(*languages: str) -> list[Block]:
    """The blocks of all documents that are in one of the languages."""
    return [
        block
        for path in DOCUMENTS
        for block in blocks_of(path, path.read_text())
        if block.language in languages
    ]


# Python.

# Line numbers in a traceback are those of the document.
RUN_BLOCKS = """
import json, sys
namespace = {"__name__": "__main__"}
for line, text in json.load(sys.stdin):
    code = compile("\\n" * (line - 1) + text, sys.argv[1], "exec")
    exec(code, namespace)
"""


def can_run(attributes: str) -> bool:
    """Whether the libraries of others that a block needs are installed."""
    needed = re.findall(r"requires=(\S+)", attributes)
    return all(importlib.util.find_spec(name) is not None for name in needed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path, _ in groupby(block.path for block in blocks("python"))],
    ids=lambda path: str(path.relative_to(ROOT)).removeprefix("docs/"),
)
def test_python_of_a_document_runs(path: Path, tmp_path: Path) -> None:
    chosen = [
        block
        for block in blocks("python")
        if block.path == path and can_run(block.attributes)
    ]
    done = subprocess.run(
        [sys.executable, "-c", RUN_BLOCKS, path.name],
        input=json.dumps([(block.line, block.text) for block in chosen]),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Commands.


@pytest.fixture(scope="module")
def help_of() -> HelpOf:
    """What ``whalejax SUBCOMMAND --help`` prints; of the whole where it is empty."""

    @cache
    def text(subcommand: str) -> str:
        words = subcommand.split()
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main.main([*words, "--help"])
        return said.getvalue() if status == 0 else ""

    return text


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yields the words of each command; comments and variables in front left out."""
    text = block.text.replace("\\\n", " ")
    for line in text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue  # what the command printed
            line = line.removeprefix("$ ")
        words = shlex.split(line, comments=True)
        for is_separator, group in groupby(words, SEPARATORS.__contains__):
            command = list(group)
            while command and re.match(r"[A-Z_]+=", command[0]):
                del command[0]
            if command and not is_separator:
                yield command


def options_in(words: list[str]) -> list[str]:
    """The options among the words, up to a bare ``--`` and without their values."""
    if "--" in words:
        words = words[: words.index("--")]
    return [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def unknown_in(words: list[str], help_of: HelpOf) -> Iterator[str]:
    """Yields what of a command does not exist."""
    program, rest = words[0], words[1:]
    if program in ("python", "python3") and rest[:2] == ["-m", "whalejax"]:
        program, rest = "whalejax", rest[2:]
    elif program in ("python", "python3") and rest and rest[0].endswith(".py"):
        program, rest = rest[0], rest[1:]
    if program in FOREIGN_PROGRAMS:
        return
    if program == "whalejax":
        subcommand = rest[0] if rest and not rest[0].startswith("-") else ""
        if not re.search(rf"^\W*{subcommand}\b", help_of(""), re.MULTILINE):
            yield f"whalejax has no subcommand {subcommand!r}"
            return
        if subcommand in ("swarm", "jobs"):  # they have subcommands of their own
            subcommand = " ".join(rest[:2])
        known = help_of(subcommand)
    elif (ROOT / program).is_file() and program.removeprefix("./").startswith(
        "scripts/"
    ):
        known = (ROOT / program).read_text()
        if program.endswith("scripts/run"):  # it hands its options on
            known += help_of("train")
    else:
        yield f"no such program here: {program}"
        return
    for option in options_in(rest):
        if not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", known):
            yield f"{program} knows no option {option}"


def test_commands_of_the_documents_exist(help_of: HelpOf) -> None:
    unknown = [
        f"{block.path.name}:{block.line}: {shlex.join(words)}: {problem}"
        for block in blocks(*SHELL_LANGUAGES)
        for words in commands_of(block)
        for problem in unknown_in(words, help_of)
    ]
    assert not unknown, "\n".join(unknown)


def test_clusters_of_the_documents_exist() -> None:
    """The texts behind --cluster and --on, except files and ``local``."""
    texts = set()
    for block in blocks(*SHELL_LANGUAGES):
        for words in commands_of(block):
            takes = False
            for word in words:
                takes = word in ("--cluster", "--on") or (takes and word[:1] != "-")
                if takes and re.match(r"[a-z][\w-]*:\d", word):
                    texts.add(word)
    assert len(texts) > 5
    for text in texts:
        assert cluster(text).num_devices


def run_command(words: Sequence[str], folder: Path) -> str:
    """What ``whalejax`` prints in a folder, each of its processes with one device."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK,
    }
    done = subprocess.run(
        [sys.executable, "-m", "whalejax", *words],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_example_of_many_processes_trains(tmp_path: Path) -> None:
    words = ["launch", "--processes", "2", str(ROOT / "scripts/example.py")]
    out = run_command(words, tmp_path)
    said = re.search(r"^2 processes, .*: loss (\d\.\d+)$", out, re.MULTILINE)
    assert said and float(said[1]) < 0.5  # it is 1 where nothing is learned


@pytest.mark.full
def test_planning_commands_of_the_readme_run(tmp_path: Path) -> None:
    (block,) = (
        block
        for block in blocks("bash")
        if block.path.name == "README.md" and "whalejax diff" in block.text
    )
    ran = []
    for words in commands_of(block):
        if words[1] == "diff":
            (tmp_path / words[3]).write_bytes((tmp_path / words[2]).read_bytes())
        if words[1] in "plan show why diff search batch export".split():
            run_command(words[1:], tmp_path)
            ran.append(words[1])
    assert ran == "plan show why diff search batch export".split()


@pytest.mark.full
def test_elastic_commands_of_the_readme_run(tmp_path: Path) -> None:
    (block,) = (
        block
        for block in blocks("bash")
        if block.path.name == "README.md" and "--processes 1:2" in block.text
    )
    said = []
    for program, *words in commands_of(block):
        assert program == "whalejax"
        said.append(run_command(words, tmp_path))
    trained, status = said
    assert re.match(r"complete, loss \d.* in 30 steps, ", trained)
    assert re.match(r"run +complete, ", status)
    assert re.search(r"^step +30 of 30, loss \d", status, re.MULTILINE)
    # Lost members, if the machine was slow, have others in their place.
    assert re.search(
        r"^member +m\d+  complete, rank 0, pid \d+, host", status, re.MULTILINE
    )


def test_variables_of_the_documents_are_read() -> None:
    named = {
        name
        for block in blocks("yaml")
        for name in re.findall(r"name: (WHALEJAX_\w+)", block.text)
    }
    assert named == {COORDINATOR, NUM_PROCESSES, PROCESS_ID}


FAKE_HELP: Final = {
    "": "usage: whalejax SUBCOMMAND\n  train  trains\n  plan   plans\n",
    "train": "  --steps N\n",
    "plan": "  -o PATH\n",
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("scripts/test --full", []),
        ("scripts/test --all", ["scripts/test knows no option --all"]),
        ("scripts/test -- --anything", []),
        ("scripts/run --steps 5", []),
        ("scripts/run --stepz 5", ["scripts/run knows no option --stepz"]),
        ("python scripts/bench_import.py --repeats 3", []),
        ("python scripts/no.py", ["no such program here: scripts/no.py"]),
        ("XLA_FLAGS=--x whalejax train gpt --steps=3  # fast", []),
        ("whalejax train gpt --step 3", ["whalejax knows no option --step"]),
        ("whalejax trein", ["whalejax has no subcommand 'trein'"]),
        ("cd a && whalejax plan gpt -o p.json", []),
        ("python -m whalejax plan -p", ["whalejax knows no option -p"]),
        ("frobnicate", ["no such program here: frobnicate"]),
    ],
)
def test_unknown_command_is_seen(line: str, expected: list[str]) -> None:
    block = Block(path=ROOT / "x.md", language="bash", line=1, text=line)
    found = [
        problem
        for words in commands_of(block)
        for problem in unknown_in(words, lambda name: FAKE_HELP[name])
    ]
    assert found == expected


def test_blocks_are_found() -> None:
    text = "a\n```bash\nscripts/run \\\n  -x\n```\n```console\n$ cd b\nout\n```\n"
    shell, console = blocks_of(ROOT / "x.md", text)
    assert (shell.language, shell.line) == ("bash", 3)
    assert list(commands_of(shell)) == [["scripts/run", "-x"]]
    assert list(commands_of(console)) == [["cd", "b"]]


# Links.


def anchors_of(text: str) -> set[str]:
    """The anchors that a Markdown text's headings become, on its site and elsewhere."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings)
    return {found.replace(" ", "-") for found in words}


def lost_links(path: Path, text: str) -> list[str]:
    """Links of a document to files, or to anchors of documents, that do not exist."""
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = path.parent / name if name else path
        is_document = target.suffix == ".md" and target.is_file()
        if not target.exists() or (
            anchor and is_document and anchor not in anchors_of(target.read_text())
        ):
            lost.append(link)
    return lost


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_a_document_lead_somewhere(path: Path) -> None:
    assert not lost_links(path, path.read_text())


def test_lost_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A, b `c`\n```bash\n# no heading\n```\n")
    text = "[](a.md#a-b-c) [](#gone) [](a.md#no-heading) [](b.md) [](https://e.org#x)"
    assert lost_links(page, text) == ["#gone", "a.md#no-heading", "b.md"]
