"""Prints the test files of what changed, one a line, for ``scripts/test --quick``.

    python scripts/changed_tests.py [--base COMMIT] [--most N]

What changed is what ``git diff`` and untracked files say against ``--base`` (without
it, the commit that the branch left its upstream at, or HEAD where there is none). A
changed test file stands for itself; a changed module for the test files that import it,
or its folder where none does, those with the fewest imports first. At most four files
are printed: changed test files first.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("whalejax", "planner", "meshes", "models")


def git(*words: str) -> list[str]:
    """The lines that a git command prints; none where it fails."""
    done = subprocess.run(
        ("git", *words), cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed(base: str | None) -> list[str]:
    """Paths that differ from a commit, untracked ones among them."""
    if base is None:
        fork = git("merge-base", "HEAD", "@{upstream}")
        base = fork[0] if fork else "HEAD"
    untracked = git("ls-files", "--others", "--exclude-standard")
    return sorted({*git("diff", "--name-only", base), *untracked})


def module_of(path: str) -> str:
    """The name under which a product file is imported; empty for other files."""
    parts = Path(path).with_suffix("").parts
    if not path.endswith(".py") or parts[0] not in ROOMS:
        return ""
    inside = parts if parts[0] == "whalejax" else ("whalejax", *parts)
    return ".".join(inside[:-1] if inside[-1] == "__init__" else inside)


def imports(text: str) -> set[str]:
    """The modules of ours that a file names, and what it takes from packages."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(
                (node.module, *(f"{node.module}.{n.name}" for n in node.names))
            )
        elif isinstance(node, ast.Import):
            found.update(n.name for n in node.names)
    return {name for name in found if name.startswith("whalejax")}


def tests_of(paths: Iterable[str], most: int) -> list[str]:
    """Test files for changed paths, at most so many for each changed module.

    Args:
        paths: relative to the repository.
        most: for each module, those that import least.
    """
    known = {
        str(one.relative_to(ROOT)): imports(one.read_text(encoding="utf-8"))
        for one in sorted(ROOT.glob("tests/**/test_*.py"))
    }
    found: dict[str, None] = {}
    for path in sorted(paths, key=lambda one: one not in known):
        module = module_of(path)
        if path in known:
            found[path] = None
        elif module:
            by = [one for one, names in known.items() if module in names]
            room = module.rpartition(".")[0] + "."
            by = by or [
                one for one, names in known.items() if any(room in n for n in names)
            ]
            by.sort(key=lambda one: len(known[one]))
            found.update(dict.fromkeys(by[:most]))
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--base", metavar="COMMIT")
    parser.add_argument("--most", type=int, default=2, metavar="N")
    options = parser.parse_args()
    print("\n".join(tests_of(changed(options.base), options.most)[:4]))


if __name__ == "__main__":
    main()
