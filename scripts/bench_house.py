"""Counts the size of the product, its dependencies, and the code that a plan enters.

    python scripts/bench_house.py [--options remat,zero,loss_chunks]

The last line is one JSON object, counted in the text except for the last three:

    lines            lines of product code in whalejax, planner, meshes and models,
                     without blank lines, comments and docstrings
    planner_lines    those in planner
    modules          number of modules
    largest_folder   modules of the largest folder, without its __init__.py
    cycles           modules that import each other in a ring, with imports inside
                     functions and for types
    upward           pairs of modules with an import from a folder of whalejax/ to a
                     later one in the order of tests/house/imports.py
    option_files     for each given option of wh.plan, product files that contain it
    twice            public class names that several modules define
    names_twice      these names
    process_lines    lines of the folders whose code runs between processes, counted as
                     by wc, and of their commands
    starters         modules of these that start a process by themselves
    wires            packages of these that open a connection
    leases           classes by which these find processes that have become silent
    evaluators       modules that compute the terms of a step's time from numbers
    plan_modules     modules of whalejax, planner and meshes that ``wh.plan`` enters for
                     two layers on eight devices
    plan_functions   functions that it enters, each once, without lambdas and
                     comprehensions
    frames_deep      largest number of their frames on the stack
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import optax


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import whalejax as wh  # noqa: E402
from tests.house.imports import (  # noqa: E402
    ORDERS,
    module_imports,
    product_files,
    upward_imports,
)


_SILENT = frozenset(
    (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    )
)


def code_lines(source: str) -> int:
    """Returns the number of lines without blank ones, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str())):
                    end = statement.end_lineno or statement.lineno
                    lines -= set(range(statement.lineno, end + 1))
    return len(lines)


def public_classes(files: list[Path]) -> Counter[str]:
    """Returns how many modules define a class of each public name."""
    return Counter(
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def modules_on_rings(graph: dict[str, set[str]]) -> int:
    """Returns the number of modules on a ring of imports.

    Args:
        graph: Imports of each module.
    """
    # A module without importers or without imports is on no ring.
    while True:
        imported = set().union(*graph.values()) if graph else set()
        acyclic = {n for n, out in graph.items() if not out or n not in imported}
        if not acyclic:
            return len(graph)
        graph = {n: out - acyclic for n, out in graph.items() if n not in acyclic}


PROCESS_FOLDERS = (
    "agreement",
    "distributed",
    "elastic",
    "journals",
    "lowering/multihost",
    "membership",
    "processes",
    "state",
    "swarm_runtime",
    "wire",
)
PROCESS_COMMANDS = re.compile(r"(launch|elastic|swarm|process_places|doctor)\w*\.py")


def process_files(files: Sequence[Path]) -> list[Path]:
    """Returns the files whose code runs between processes, and their commands."""
    room = ROOT / "whalejax"
    return [
        path
        for path in files
        if any(path.is_relative_to(room / name) for name in PROCESS_FOLDERS)
        or (path.parent == room / "cli" and PROCESS_COMMANDS.match(path.name))
    ]


def process_counts(texts: Mapping[Path, str]) -> dict[str, int]:
    """Returns the figures of the code that runs between processes."""

    def matching(pattern: str) -> list[Path]:
        return [path for path, text in texts.items() if re.search(pattern, text, re.M)]

    return {
        "process_lines": sum(text.count("\n") for text in texts.values()),
        "starters": len(matching(r"subprocess\.Popen\(|os\.fork\(|posix_spawn")),
        "wires": len({path.parent for path in matching(r"\bwrap_socket\(")}),
        "leases": len(matching(r"^    def silent\b")),
    }


def makes_time_terms(source: str) -> bool:
    """Returns whether a module makes ``TimeTerms`` that another module defines."""
    nodes = [*ast.walk(ast.parse(source))]
    calls = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "TimeTerms"
        for node in nodes
    )
    classes = (node.name for node in nodes if isinstance(node, ast.ClassDef))
    return calls and "TimeTerms" not in classes


class EnteredFunctions:
    """The product's functions that are entered while a profile function is set.

    Attributes:
        functions: File and qualified name of each.
        deepest: Largest number of their frames on the stack.
    """

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.deepest = 0
        self._depth = 0
        self._inside = tuple(
            f"{ROOT / room}{os.sep}" for room in ("whalejax", "planner", "meshes")
        )

    def profile(self, frame: FrameType, event: str, _: object) -> None:
        """Counts one call or return; a function for ``sys.setprofile``."""
        code = frame.f_code
        if event not in ("call", "return") or not self._counts(code):
            return
        if event == "return":
            self._depth -= 1
            return
        self._depth += 1
        self.deepest = max(self.deepest, self._depth)
        self.functions.add((code.co_filename, code.co_qualname))

    def _counts(self, code: CodeType) -> bool:
        return not code.co_name.startswith("<") and code.co_filename.startswith(
            self._inside
        )


def entered_by_plan() -> EnteredFunctions:
    """Plans two layers and returns the functions that this enters."""

    def plan(width: int) -> None:
        params = {
            name: jax.ShapeDtypeStruct((width, width), "float32")
            for name in ("first", "second")
        }
        batch = jax.ShapeDtypeStruct((64, width), "float32")

        def loss(net: Any, x: Any) -> Any:
            return (jax.nn.relu(x @ net["first"]) @ net["second"]).mean()

        wh.plan(loss, params, batch, optimizer=optax.sgd(0.1), cluster="h100:8")

    plan(256)  # Imports modules; another width, so that no cache serves the second.
    entered = EnteredFunctions()
    previous = sys.getprofile()
    sys.setprofile(entered.profile)
    try:
        plan(512)
    finally:
        sys.setprofile(previous)
    return entered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", default="loss_chunks,sequence_parallel,zero")
    options = parser.parse_args().options.split(",")
    files, graph = product_files(), module_imports()
    texts = {path: path.read_text() for path in files}
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    classes, entered = public_classes(files), entered_by_plan()
    print(
        json.dumps(
            {
                "lines": sum(map(code_lines, texts.values())),
                "planner_lines": sum(
                    code_lines(text)
                    for path, text in texts.items()
                    if path.is_relative_to(ROOT / "planner")
                ),
                "modules": len(files),
                "largest_folder": max(folders.values()),
                "cycles": modules_on_rings(graph),
                "upward": len(upward_imports(graph, "whalejax", ORDERS["whalejax"])),
                "option_files": {
                    option: sum(
                        bool(re.search(rf"\b{option}\b", text))
                        for text in texts.values()
                    )
                    for option in options
                },
                "twice": sum(count > 1 for count in classes.values()),
                "names_twice": sorted(n for n, c in classes.items() if c > 1),
                **process_counts({path: texts[path] for path in process_files(files)}),
                "evaluators": sum(map(makes_time_terms, texts.values())),
                "plan_modules": len({path for path, _ in entered.functions}),
                "plan_functions": len(entered.functions),
                "frames_deep": entered.deepest,
            }
        )
    )


if __name__ == "__main__":
    main()
