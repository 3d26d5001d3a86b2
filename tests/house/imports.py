"""What imports what in the product, read from its syntax trees, and the orders in it.

Every import counts: of modules, inside functions and for types. Nothing is imported
or run for it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Final


ROOT: Final = Path(__file__).resolve().parents[2]
ROOMS: Final = ("models", "whalejax", "planner", "meshes")
ORDERS: Final = {
    "whalejax.planner": (
        "model",
        "sharding",
        "cost",
        "memory",
        "balance",
        "tables",
        "pipeline",
        "search",
        "plan",
    ),
    "whalejax": (
        "hlo",
        "jaxpr",
        "wire",
        "user_code",
        "adapters",
        "capture",
        "distributed",
        "agreement",
        "membership",
        "processes",
        "lowering",
        "state",
        "tables",
        "sections",
        "runtime",
        "verification",
        "journals",
        "display",
        "swarm",
        "api",
        "jobs",
        "equality",
        "estimates",
        "elastic",
        "scheduler",
        "swarm_runtime",
        "cli",
        "__main__",
    ),
}
"""By package, its folders, each behind those that it may import. Modules beside them
may be imported by all, and import none of them; the package itself may import all."""


def product_files() -> list[Path]:
    """Every module of the product, those behind a link once."""
    return sorted(
        path
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if not any(part.is_symlink() for part in path.parents if part != ROOT)
    )


@functools.cache
def imports_of(source: str, package: str) -> tuple[tuple[str, int, bool], ...]:
    """(Absolute dotted name, line, inside a function) of each import.

    ``from a import b`` yields ``a.b``. A constant given to ``import_module`` counts.
    """

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, int, bool]]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield alias.name, node.lineno, lazy
            case ast.ImportFrom():
                parts = package.split(".")
                above = parts[: len(parts) + 1 - node.level] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield f"{base}.{alias.name}", node.lineno, lazy
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name, node.lineno, lazy
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy or inner)

    return tuple(visit(ast.parse(source), False))


def package_of(path: Path) -> str:
    """The dotted name of the folder that a module lies in."""
    parts = path.parent.relative_to(ROOT).parts
    return ".".join(parts if parts[0] == "whalejax" else ("whalejax", *parts))


def module_imports() -> dict[str, set[str]]:
    """Modules of ours, a package by the name of its folder, and what each imports."""
    names = {
        f"{package_of(path)}.{path.stem}".removesuffix(".__init__"): path
        for path in product_files()
    }
    found: dict[str, set[str]] = {}
    for module, path in names.items():
        targets = set()
        for name, _, _ in imports_of(path.read_text(), package_of(path)):
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != module:
                targets.add(target)
        found[module] = targets
    return found


def upward_imports(
    graph: dict[str, set[str]], package: str, order: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Modules of a package that import one of a folder which stands behind their own.

    Args:
        graph: what each module imports.
        package: whose folders have an order.
        order: its folders.
    """
    rooms = {f"whalejax.{room}" for room in ROOMS} - {package}

    def rank(module: str) -> int | None:
        if module == package:
            return len(order)
        name = module.removeprefix(f"{package}.").partition(".")[0]
        if not module.startswith(f"{package}.") or f"{package}.{name}" in rooms:
            return None
        return order.index(name) if name in order else -1

    return [
        (module, target)
        for module, targets in graph.items()
        if (own := rank(module)) is not None
        for target in sorted(targets)
        if (its := rank(target)) is not None and its > own
    ]
