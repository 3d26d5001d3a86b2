"""Scripts use names of the product that exist, also those that they patch."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest


SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def _is_product(module: str) -> bool:
    return module.split(".")[0] == "whalejax"


def _product_objects(tree: ast.Module) -> Iterator[tuple[str, str, str | None]]:
    """Yields the local name, module and attribute of each import of the product."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_product(node.module or ""):
            for one in node.names:
                yield one.asname or one.name, str(node.module), one.name
        elif isinstance(node, ast.Import):
            for one in node.names:
                if _is_product(one.name) and one.asname:
                    yield one.asname, one.name, None


def _resolve(module: str, attribute: str | None) -> object:
    if attribute is None:
        return importlib.import_module(module)
    owner = importlib.import_module(module)
    if not hasattr(owner, attribute):
        return importlib.import_module(f"{module}.{attribute}")
    return getattr(owner, attribute)


def _used_names(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yields the object, the attribute and the line of each use or patch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr, node.lineno
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            owner, name = node.args[:2]
            called = ast.unparse(node.func)
            patches = called.endswith((".object", "setattr"))
            if (
                patches
                and isinstance(owner, ast.Name)
                and isinstance(name, ast.Constant)
            ):
                yield owner.id, str(name.value), node.lineno


def _local_names(tree: ast.Module) -> set[str]:
    """Returns the names of parameters and variables."""
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _own_names(script: str) -> set[str]:
    """Returns the names that another script defines."""
    tree = ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8"))
    defined = {getattr(node, "name", "") for node in tree.body}
    return defined | _local_names(tree)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda p: p.stem)
def test_names_of_the_product_exist(script: Path) -> None:
    tree = ast.parse(script.read_text(encoding="utf-8"))
    missing, objects = [], {}
    for local, module, attribute in _product_objects(tree):
        try:
            objects[local] = _resolve(module, attribute)
        except ImportError as error:
            missing.append(f"{module}.{attribute}: {error}")
    shadowed = _local_names(tree)
    for local, attribute, line in _used_names(tree):
        value = objects.get(local)
        if (
            local not in shadowed
            and value is not None
            and not hasattr(value, attribute)
        ):
            # Fields without defaults are no attributes of their class.
            if attribute not in getattr(value, "__annotations__", {}):
                missing.append(f"line {line}: {local}.{attribute}")
    for node in ast.walk(tree):
        module = str(getattr(node, "module", "")).removeprefix("scripts.")
        if isinstance(node, ast.ImportFrom) and (SCRIPTS / f"{module}.py").exists():
            wrong = {one.name for one in node.names} - _own_names(module)
            missing += [f"line {node.lineno}: {module}.{name}" for name in wrong]
    assert not missing
