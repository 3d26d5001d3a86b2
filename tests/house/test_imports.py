"""What importing costs, and which room may import which.

Imports are observed in subprocesses, because this process has imported JAX already;
directions are read from the syntax trees, so that an import inside a function counts.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import whalejax
from tests.house.imports import (
    ORDERS,
    ROOMS,
    ROOT,
    imports_of,
    module_imports,
    package_of,
    upward_imports,
)


HEAVY: Final = ("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "scipy", "rich")
JAX_FAMILY: Final = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "tensorstore")
ALLOWED_TARGETS: Final = {
    "models": {"models", "whalejax", "planner", "meshes"},
    "whalejax": {"whalejax", "planner", "meshes"},
    "planner": {"planner", "meshes"},
    "meshes": {"meshes"},
}
# These measure devices or build a mesh: JAX is what they are for.
MESHES_WITH_JAX: Final = (
    "calibrate.py",
    "detect.py",
    "jax_mesh.py",
    "probes.py",
)
# Plans and clusters show themselves in notebooks by what stands above them.
DOORS: Final = ("meshes/cluster.py", "planner/plan/report/pictures.py")
MOST_MODULES_IN_A_FOLDER: Final = 22
PythonFiles = Callable[..., list[Path]]
NAMES: Final = tuple(name for name in whalejax.__all__ if name != "__version__")


def run_python(code: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported_by(statement: str) -> set[str]:
    """The top-level names in ``sys.modules`` after a statement in a new process."""
    listing = run_python(f"{statement}\nimport sys; print(*sys.modules)")
    return {name.partition(".")[0] for name in listing.split()}


# What an import costs.


@pytest.mark.smoke
def test_import_whalejax_imports_nothing_heavy() -> None:
    assert imported_by("import whalejax").isdisjoint(HEAVY)


@pytest.mark.smoke
@pytest.mark.parametrize("room", ["planner", "meshes", "models"])
def test_import_room_imports_no_jax(room: str) -> None:
    assert imported_by(f"import whalejax.{room}").isdisjoint(JAX_FAMILY)


def test_planner_imports_no_display() -> None:
    code = "import sys, whalejax.planner; print(*sys.modules)"
    assert "whalejax.planner.plan.report.pictures" in (
        names := run_python(code).split()
    )
    assert not [name for name in names if name.startswith("whalejax.display")]


def test_dir_and_version_import_nothing_heavy() -> None:
    statement = "import whalejax; dir(whalejax); whalejax.__version__"
    assert imported_by(statement).isdisjoint(HEAVY)


RESOLVE_ALL = """
import json, traceback, whalejax
found = {}
for name in whalejax.__all__:
    try:
        value = getattr(whalejax, name)
    except Exception:
        found[name] = traceback.format_exc(limit=-2)
    else:
        found[name] = "callable" if callable(value) else type(value).__name__
import jax._src.xla_bridge as bridge
print(json.dumps({"found": found, "backends": list(bridge._backends)}))
"""


@pytest.fixture(scope="module")
def resolved() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(run_python(RESOLVE_ALL))
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_public_name_resolves(name: str, resolved: dict[str, dict[str, str]]) -> None:
    kind = "module" if name == "loop" else "callable"
    assert resolved["found"][name] == kind, resolved["found"][name]


@pytest.mark.smoke
def test_public_names_start_no_backend(resolved: dict[str, dict[str, str]]) -> None:
    assert not resolved["backends"]


IMPORT_ALL = """
import importlib, pkgutil, whalejax
names = [m.name for m in pkgutil.walk_packages(whalejax.__path__, "whalejax.")]
names = [n for n in names if not n.endswith("__main__")]
for name in names:
    importlib.import_module(name)
import jax._src.xla_bridge as bridge
assert len(names) >= 4, names
assert bridge._backends == {}, bridge._backends
"""


def test_every_module_imports_and_starts_no_backend() -> None:
    run_python(IMPORT_ALL)


# The lazy table.


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("pln", "plan"), ("Replicate", "replicate"), ("CLUSTER", "Cluster, cluster")],
)
def test_unknown_name_says_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(whalejax, given)
    message = str(caught.value)
    assert message.startswith(f"whalejax has no {given!r}; the nearest names are ")
    assert nearest in message


def test_unknown_name_without_a_near_one_lists_all() -> None:
    with pytest.raises(AttributeError) as caught:
        whalejax.zzzz  # noqa: B018
    assert str(caught.value) == f"whalejax has no 'zzzz'; it has {', '.join(NAMES)}"


def test_dir_is_the_table() -> None:
    assert dir(whalejax) == sorted(whalejax.__all__)


def test_table_and_type_checkers_agree() -> None:
    tree = ast.parse((ROOT / "whalejax" / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name: statement.module or ""
        for statement in guarded.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == whalejax._MODULE_OF_NAME
    assert sorted(seen) == sorted(NAMES)


def test_no_module_bears_a_public_name() -> None:
    stems = {path.stem for path in (ROOT / "whalejax").iterdir()}
    assert stems.isdisjoint(NAMES)


@pytest.mark.parametrize("room", ["planner", "meshes", "models"])
def test_bare_room_cannot_be_imported(room: str) -> None:
    code = f"""
try:
    import {room}
except ImportError as error:
    print(error)
"""
    assert run_python(code).strip() == f"import whalejax.{room}, not {room}"


# Who may import whom.


def room_of(name: str) -> str | None:
    """The room that a dotted name lies in; ``None`` when it is not ours."""
    parts = name.split(".")
    if parts[0] != "whalejax":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else "whalejax"


def breaches(room: str, path: Path, source: str) -> Iterator[str]:
    """Yields a line for each import that the directions forbid."""
    for name, line, lazy in imports_of(source, package_of(path)):
        place = f"{path.relative_to(ROOT)}:{line} imports {name}"
        top, target = name.partition(".")[0], room_of(name)
        here = path.relative_to(ROOT).as_posix()
        if target == "models" and here == "whalejax/api/named_jobs.py" and lazy:
            continue
        if here in DOORS and name.startswith("whalejax.display"):
            continue
        if target is not None and target not in ALLOWED_TARGETS[room]:
            yield f"{place}: {room} may import {sorted(ALLOWED_TARGETS[room])}"
        if room == "planner" and target is None:
            if top not in {*sys.stdlib_module_names, "numpy", "scipy"}:
                yield f"{place}: the planner stands on numpy and scipy alone"
        if room == "meshes" and top in JAX_FAMILY and not lazy:
            if path.name not in MESHES_WITH_JAX:
                yield f"{place}: only {', '.join(MESHES_WITH_JAX)} may, at the top"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way(room: str, python_files: PythonFiles) -> None:
    files = python_files(room)
    assert files
    found = [line for path in files for line in breaches(room, path, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "file", "source"),
    [
        ("meshes", "x.py", "from whalejax.planner import graph"),
        ("meshes", "x.py", "import jax"),
        ("meshes", "x.py", "def f():\n    from whalejax.display import page"),
        ("meshes", "cluster.py", "def f():\n    from whalejax.cli import show"),
        ("planner", "x.py", "def f():\n    import jax"),
        ("planner", "x.py", "import whalejax as wh"),
        ("planner", "x.py", "from whalejax.api import losses"),
        ("planner", "x.py", "from ..api import losses"),
        ("planner", "x.py", "import importlib\nimportlib.import_module('optax')"),
        ("whalejax", "x.py", "def f():\n    from whalejax.models import gpt"),
        ("whalejax", "api/named_jobs.py", "from whalejax import models"),
        ("whalejax", "capture/x.py", "from ..models import gpt"),
    ],
)
def test_forbidden_import_is_seen(room: str, file: str, source: str) -> None:
    assert list(breaches(room, ROOT / room / file, source))


@pytest.mark.parametrize(
    ("room", "file", "source"),
    [
        ("meshes", "x.py", "def f():\n    import jax"),
        ("meshes", "jax_mesh.py", "import jax"),
        ("meshes", "cluster.py", "def f():\n    from whalejax.display import page"),
        ("planner", "x.py", "import numpy as np\nfrom . import graph"),
        ("planner", "x.py", "from whalejax.meshes import Cluster"),
        (
            "whalejax",
            "api/named_jobs.py",
            "def f():\n    from whalejax.models import gpt",
        ),
        ("models", "x.py", "import whalejax as wh\nfrom flax import nnx"),
    ],
)
def test_allowed_import_is_let_be(room: str, file: str, source: str) -> None:
    assert not list(breaches(room, ROOT / room / file, source))


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a ring; empty where none do."""
    done: set[str] = set()
    for start in graph:
        path, left = [start], [sorted(graph[start])]
        while path:
            if not left[-1]:
                done.add(path.pop())
                left.pop()
                continue
            name = left[-1].pop()
            if name in path:
                return [*path[path.index(name) :], name]
            if name not in done:
                path.append(name)
                left.append(sorted(graph[name]))
    return []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_modules_import_each_other() -> None:
    assert not cycle(module_imports())


@pytest.mark.parametrize("package", ORDERS)
def test_folders_import_one_way(package: str) -> None:
    graph = module_imports()
    inside = [name for name in graph if name.startswith(f"{package}.")]
    folders = {".".join(name.split(".")[: package.count(".") + 2]) for name in inside}
    folders &= {name.rpartition(".")[0] for name in inside}
    rooms = {f"whalejax.{room}" for room in ROOMS}
    named = {f"{package}.{name}" for name in ORDERS[package]}
    assert folders - rooms <= named <= set(inside)
    wrong = upward_imports(graph, package, ORDERS[package])
    assert not wrong, "\n".join(f"{module} imports {name}" for module, name in wrong)


@pytest.mark.parametrize(
    ("module", "target", "upward"),
    [
        ("api.plan", "capture.trace", False),
        ("api.plan", "api.search", False),
        ("api.plan", "_compat", False),
        ("api.plan", "planner.plan.plan", False),
        ("planner.plan.report.pictures", "display.page", False),
        ("__main__", "cli.main", False),
        ("", "api.plan", False),
        ("capture.trace", "api.plan", True),
        ("_compat", "hlo", True),
        ("new", "api.plan", True),
        ("jobs", "cli", True),
        ("api.plan", "", True),
    ],
)
def test_an_upward_import_is_seen(module: str, target: str, upward: bool) -> None:
    pair = tuple(f"whalejax.{name}".strip(".") for name in (module, target))
    found = upward_imports({pair[0]: {pair[1]}}, "whalejax", ORDERS["whalejax"])
    assert found == ([pair] if upward else [])


def test_contributors_read_the_same_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \|", text, re.MULTILINE)
    folders = [name for order in ORDERS.values() for name in order]
    assert rows == [name for name in folders if name != "__main__"]


def test_folders_are_small(python_files: PythonFiles) -> None:
    count = Counter(path.parent for path in python_files(*ROOMS))
    large = {
        folder.relative_to(ROOT).as_posix(): number
        for folder, number in count.items()
        if number > MOST_MODULES_IN_A_FOLDER + 1  # and its __init__.py
    }
    assert not large


def test_private_jax_is_used_in_one_module(python_files: PythonFiles) -> None:
    users = {
        path.relative_to(ROOT).as_posix()
        for path in python_files(*ROOMS)
        if any(name in path.read_text() for name in ("jax._src", "jax import _src"))
    }
    assert users <= {"whalejax/_compat.py", "whalejax/_compat_processes.py"}
