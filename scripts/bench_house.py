"""How large the product is, and how it hangs together: counted, nothing is run.

    python scripts/bench_house.py [--options remat,zero,loss_chunks]

The last line is one JSON object:

    lines            of product code in whalejax, planner, meshes and models, without
                     blank lines, comments and docstrings
    modules          how many there are
    largest_folder   modules in the folder that holds most, without its __init__.py
    cycles           modules that import each other in a ring, imports inside functions
                     and for types counted
    upward           imports from a folder of whalejax/ to one behind it in the order
                     of tests/house/imports.py, counted by pairs of modules
    option_files     for each option of wh.plan that is asked for, product files in
                     which it occurs
    twice            public class names that more than one module defines
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

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
    """Lines that hold code: no blank ones, comments or docstrings."""
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
    """How many modules define a class of each public name."""
    return Counter(
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


def modules_on_rings(graph: dict[str, set[str]]) -> int:
    """How many modules lie on a ring of imports.

    Args:
        graph: what each module imports.
    """
    # What nothing that is left imports, or imports nothing that is left, is on no ring.
    while True:
        imported = set().union(*graph.values()) if graph else set()
        loose = {n for n, out in graph.items() if not out or n not in imported}
        if not loose:
            return len(graph)
        graph = {n: out - loose for n, out in graph.items() if n not in loose}


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--options", default="loss_chunks,sequence_parallel,zero")
    options = parser.parse_args().options.split(",")
    files, graph = product_files(), module_imports()
    texts = {path: path.read_text() for path in files}
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    classes = public_classes(files)
    print(
        json.dumps(
            {
                "lines": sum(map(code_lines, texts.values())),
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
            }
        )
    )


if __name__ == "__main__":
    main()
