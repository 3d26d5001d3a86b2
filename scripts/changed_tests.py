"""Prints the test files of the changes, one a line, for ``scripts/test --quick``.

    python scripts/changed_tests.py [--base COMMIT] [--most N]

The changes are those of ``git diff`` and the untracked files against ``--base`` (by
default the commit at which the branch left its upstream, or HEAD without one). A
changed test file stands for itself; a changed module for the test files that import it,
or its folder if none does, those with the fewest imports first. At most four files are
printed: changed test files first.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("whalejax", "planner", "meshes", "models")


def git(*arguments: str) -> list[str]:
    """Returns the lines that a git command prints; none if it fails."""
    process = subprocess.run(
        ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return process.stdout.splitlines() if process.returncode == 0 else []


def changed_paths(base: str | None) -> list[str]:
    """Returns paths that differ from a commit, with untracked ones."""
    if base is None:
        fork = git("merge-base", "HEAD", "@{upstream}")
        base = fork[0] if fork else "HEAD"
    untracked = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", base), *untracked})


def module_of(path: str) -> str:
    """Returns the name of a product file for imports; empty for other files."""
    parts = Path(path).with_suffix("").parts
    if not path.endswith(".py") or parts[0] not in ROOMS:
        return ""
    inside = parts if parts[0] == "whalejax" else ("whalejax", *parts)
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def imports(text: str) -> set[str]:
    """Returns the product's modules, and names from them, that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(
                (node.module, *(f"{node.module}.{n.name}" for n in node.names))
            )
        elif isinstance(node, ast.Import):
            names.update(n.name for n in node.names)
    return {name for name in names if name.startswith("whalejax")}


def tests_of(paths: Iterable[str], most: int) -> list[str]:
    """Returns test files for changed paths, ``most`` for each module."""
    known = {
        str(file.relative_to(ROOT)): imports(file.read_text(encoding="utf-8"))
        for file in sorted(ROOT.glob("tests/**/test_*.py"))
    }
    tests: dict[str, None] = {}
    for path in sorted(paths, key=lambda file: file not in known):
        module = module_of(path)
        if path in known:
            tests[path] = None
        elif module:
            users = [file for file, names in known.items() if module in names]
            room = module.rpartition(".")[0] + "."
            users = users or [
                file for file, names in known.items() if any(room in n for n in names)
            ]
            users.sort(key=lambda file: len(known[file]))
            tests.update(dict.fromkeys(users[:most]))
    return list(tests)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--base", metavar="COMMIT")
    parser.add_argument("--most", type=int, default=2, metavar="N")
    options = parser.parse_args()
    print("\n".join(tests_of(changed_paths(options.base), options.most)[:4]))


if __name__ == "__main__":
    main()
