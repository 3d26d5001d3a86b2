"""The limits a reader relies on: sizes, docstrings, finished code, real links."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest


ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("whalejax", "planner", "meshes", "models")
LINKED_ROOMS: Final = ("planner", "meshes", "models")
PythonFiles = Callable[..., list[Path]]
LONGEST_FUNCTION_LINES: Final = 60
# Spelled in two halves, so that this file does not hold what it looks for.
UNFINISHED: Final = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")


def long_functions(tree: ast.Module, limit: int) -> list[str]:
    """The functions of more than ``limit`` lines, docstrings not counted."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            length -= (text.end_lineno or text.lineno) - text.lineno + 1
        if length > limit:
            found.append(f"line {node.lineno}: {node.name} has {length} lines")
    return found


@functools.cache
def read_of(path: Path) -> tuple[bool, list[str]]:
    """Whether a file has a docstring, and its long functions; it is parsed once."""
    tree = ast.parse(path.read_text())
    return bool(ast.get_docstring(tree)), long_functions(tree, LONGEST_FUNCTION_LINES)


def test_functions_are_short(python_files: PythonFiles) -> None:
    long = {
        path.relative_to(ROOT).as_posix(): found
        for path in python_files(*ROOMS, "tests", "scripts")
        if (found := read_of(path)[1])
    }
    assert not long


def test_a_long_function_is_seen() -> None:
    source = "def f():\n" + "    x = 1\n" * 80
    assert long_functions(ast.parse(source), 80) == ["line 1: f has 81 lines"]
    told = 'def f():\n    """Says."""\n' + "    x = 1\n" * 79
    assert not long_functions(ast.parse(told), 80)


def test_an_option_touches_six_files(python_files: PythonFiles) -> None:
    named = [
        path.relative_to(ROOT).as_posix()
        for path in python_files(*ROOMS)
        if re.search(r"\bloss_chunks\b", path.read_text())
        and path.parent.name != "estimates"  # a column of tables, no option of plans
    ]
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    told = re.findall(r"^\| `(\S+\.py)` \| ", guide.partition("How to add")[2], re.M)
    assert sorted(named) == sorted(told) and len(told) == 6


def test_modules_say_what_they_are_for(python_files: PythonFiles) -> None:
    silent = [
        path.relative_to(ROOT).as_posix()
        for path in python_files(*ROOMS, "tests", "scripts")
        if not read_of(path)[0]
    ]
    assert not silent


def test_nothing_is_left_unfinished(python_files: PythonFiles) -> None:
    texts = [
        *python_files(*ROOMS, "tests", "scripts"),
        *(path for path in (ROOT / "scripts").iterdir() if path.is_file()),
        *ROOT.glob("*.md"),
        *ROOT.glob("*.toml"),
    ]
    marks = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in dict.fromkeys(texts)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if any(word in line for word in UNFINISHED)
    ]
    assert not marks, "\n".join(marks)


@pytest.mark.parametrize("name", ["CHANGELOG.md", "CONTRIBUTING.md", "README.md"])
def test_no_merge_is_half_done(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.findall(r"^(?:<{7}|\|{7}|>{7}) .*", text, re.M)


@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_room_is_a_relative_link(room: str) -> None:
    link = ROOT / "whalejax" / room
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{room}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_git_holds_the_room_as_a_link(room: str) -> None:
    git = ["git", "-c", "safe.directory=*", "ls-files", "--stage", "--"]
    listing = subprocess.run(
        [*git, f"whalejax/{room}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listing.stdout.startswith("120000 "), listing.stdout or "not tracked"


@pytest.mark.parametrize(
    "script", ["scripts/docs", "scripts/run", "scripts/test", ".ci/run"]
)
def test_script_is_executable(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o111 == 0o111
