"""Names and docstrings explain themselves: entries, summaries, functions, classes.

An entry under Args or Attributes and the first words of a docstring can be read without
the name in front of them. A function is a verb with its object or the noun that it
returns, a class is a noun phrase, and no two folders have a module or a public class of
one name. A few of each are allowed, as a word may be a noun of the field after all.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
FOLDERS = ("whalejax", "planner", "meshes", "models")
NO_NOUN = frozenset(
    "are as at by had has how in is it of on such that them they those to was were "
    "what where which who whose why".split()
)
"""First words with which neither an entry nor a summary says what something is."""
PARTICIPLES = frozenset(
    "allotted analysed announced answered asked begun born built closed combined "
    "compared computed copied counted dealt decided divided done drawn ended "
    "followed folded found fused gathered given gone grown handed heard held hidden "
    "hosted introduced joined kept known laid left lent listed looked lost made meant "
    "merged met moved named noted opened paced paid parted placed priced rated reached "
    "refused rehearsed replayed resized resumed said scaled seen sent shared shown "
    "sought spent stacked stood stopped taken thought told understood "
    "untrained unwritten wanted weighed won worked worn written".split()
)
PLACES = frozenset(
    "again alike apart aside away beside beyond crossing everywhere fresh fullest here "
    "inside long loose narrower other out over own same steady there unclear uneven "
    "unlike unobeyed unreadable unshared way".split()
)
ENTRY = re.compile(r" {2,4}([A-Za-z_*][\w, *]*)(?: \(.*?\))?: (.*)")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")


@dataclass(frozen=True)
class Definition:
    """A module, a class or a function of the product.

    Attributes:
        path: Path of its file, relative to the repository.
        node: Syntax tree.
        doc: Docstring, or an empty text.
    """

    path: str
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    doc: str

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "module")

    @property
    def place(self) -> str:
        return f"{self.path}:{getattr(self.node, 'lineno', 1)} {self.name}"


def product_files() -> Iterator[Path]:
    """Every Python file of the product once: links between folders are not followed."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            linked = any(p.is_symlink() for p in path.parents if p != ROOT)
            if not linked:
                yield path


@pytest.fixture(scope="module")
def definitions() -> list[Definition]:
    """All modules, classes and functions of the product."""
    found = []
    for path in product_files():
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(
                node,
                (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef),
            ):
                doc = ast.get_docstring(node) or ""
                found.append(Definition(str(path.relative_to(ROOT)), node, doc))
    return found


def entries(doc: str) -> Iterator[tuple[str, str]]:
    """Names and texts under Args and Attributes."""
    section = ""
    for line in doc.splitlines():
        if match := SECTION.match(line):
            section = match[1]
        elif section in ("Args", "Attributes") and (match := ENTRY.match(line)):
            yield match[1], match[2]


def first_word(text: str) -> str:
    """The first word in small letters, without marks around it."""
    match = re.match(r"[\W_]*([A-Za-z]+)", text)
    return match[1].lower() if match else ""


def is_fragment(text: str) -> bool:
    """Whether a text cannot be read without the name in front of it.

    >>> is_fragment("of the step, in seconds."), is_fragment("Duration of the step.")
    (True, False)
    """
    return first_word(text) in NO_NOUN


def test_entries_can_be_read_without_their_name(definitions: list[Definition]) -> None:
    every = [
        (f"{one.place} {name}: {text}", text)
        for one in definitions
        for name, text in entries(one.doc)
    ]
    bad = [where for where, text in every if is_fragment(text)]
    assert len(every) > 5000
    assert len(bad) <= 0.002 * len(every), "\n".join(bad[:40])


def test_summaries_are_sentences_of_their_own(definitions: list[Definition]) -> None:
    every = [one for one in definitions if one.doc]
    # "Has JAX take SIGTERM." is a sentence, and no fragment behind a name.
    bad = [
        f"{one.place}: {one.doc[:70]}"
        for one in every
        if is_fragment(one.doc) and first_word(one.doc) != "has"
    ]
    assert len(every) > 5000
    assert len(bad) <= 0.002 * len(every), "\n".join(bad[:40])


def test_functions_are_verbs_or_nouns(definitions: list[Definition]) -> None:
    every = [
        one
        for one in definitions
        if isinstance(one.node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    bad = [one.place for one in every if one.name.strip("_") in PARTICIPLES | PLACES]
    assert len(every) > 5000
    assert len(bad) <= 0.002 * len(every), "\n".join(bad[:40])


def test_classes_are_noun_phrases(definitions: list[Definition]) -> None:
    bad = [
        one.place
        for one in definitions
        if isinstance(one.node, ast.ClassDef)
        and one.name.strip("_").lower() in PARTICIPLES | PLACES
    ]
    assert not bad, "\n".join(bad)


def test_classes_and_files_have_names_of_their_own(
    definitions: list[Definition],
) -> None:
    classes = defaultdict(set)
    for one in definitions:
        if isinstance(one.node, ast.ClassDef) and not one.name.startswith("_"):
            classes[one.name].add(one.path)
    doubled = {name: sorted(at) for name, at in classes.items() if len(at) > 1}
    assert len(doubled) <= 5, doubled
    files = defaultdict(list)
    for path in product_files():
        if path.name != "__init__.py":
            files[path.name].append(str(path.relative_to(ROOT)))
    same = {name: at for name, at in files.items() if len(at) > 1}
    assert len(same) <= 8, same


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("of the step", True),
        ("What is made of the logits.", True),
        ("Who does what when.", True),
        ("Bytes of gradients on one device, by TaskGraph.", False),
        ("``int32[stages, most]``.", False),
        ("Returns which inputs are weights.", False),
    ],
)
def test_a_fragment_is_told_from_a_sentence(text: str, fragment: bool) -> None:
    assert is_fragment(text) is fragment
