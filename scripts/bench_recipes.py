"""Counts the lines of ordinary loops that change when they are planned.

Every page of ``docs/recipes`` has a block titled "one device" and one titled "planned".
All blocks of each page run in an empty folder, with eight virtual devices; those that
need a missing library are left out and named. The number of changed lines is the larger
number of lines that only one of the two blocks has, without empty lines.

    python scripts/bench_recipes.py

The last line is one JSON object:

    recipes, run              number of pages, and of those that ran
    median_lines, most_lines  median and largest number of changed lines
    lines                     changed lines of each page
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "docs" / "recipes"
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
RUN = """
import json, sys
namespace = {"__name__": "__main__"}
for text in json.load(sys.stdin):
    exec(compile(text, sys.argv[1], "exec"), namespace)
"""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of Python of a page.

    Attributes:
        title: Title of the block, or empty.
        requires: Third-party modules that it needs.
        text: Its lines.
    """

    title: str
    requires: tuple[str, ...]
    text: str

    @property
    def can_run(self) -> bool:
        return all(importlib.util.find_spec(name) for name in self.requires)


def blocks_of(text: str) -> Iterator[Block]:
    """Yields the blocks of Python of a page, in order."""
    for attributes, body in FENCE.findall(text):
        title = re.search(r'title="([^"]*)"', attributes)
        requires = re.findall(r"requires=(\S+)", attributes)
        yield Block(title[1] if title else "", tuple(requires), body)


def lines_that_differ(before: str, after: str) -> int:
    """Returns the larger number of lines that only one of two texts has.

    >>> lines_that_differ("a\\nb\\nc\\n", "a\\n\\nd\\nc\\ne\\n")
    2
    """
    old = [line for line in before.splitlines() if line.strip()]
    new = [line for line in after.splitlines() if line.strip()]
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    same = sum(block.size for block in matcher.get_matching_blocks())
    return max(len(old) - same, len(new) - same)


def run(name: str, blocks: list[Block]) -> bool:
    """Runs the blocks of a page in turn; returns whether all succeeded."""
    flags = "--xla_force_host_platform_device_count=8"
    env = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-c", RUN, name],
            input=json.dumps([block.text for block in blocks]),
            env={**os.environ, **env},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=500,
        )
    if process.returncode:
        print(process.stderr[-2000:], file=sys.stderr)
    return process.returncode == 0


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    differ: dict[str, int] = {}
    ran: dict[str, bool] = {}
    for path in sorted(RECIPES.glob("*.md")):
        blocks = list(blocks_of(path.read_text(encoding="utf-8")))
        by_title = {block.title: block.text for block in blocks}
        if not {"one device", "planned"} <= by_title.keys():
            continue
        differ[path.stem] = lines_that_differ(
            by_title["one device"], by_title["planned"]
        )
        left_out = sorted({r for b in blocks if not b.can_run for r in b.requires})
        ran[path.stem] = run(path.name, [block for block in blocks if block.can_run])
        note = f" (without {', '.join(left_out)})" if left_out else ""
        verdict = "ran" if ran[path.stem] else "FAILED"
        print(f"{path.stem:12} {differ[path.stem]:3} lines differ, {verdict}{note}")
    report = {
        "recipes": len(differ),
        "run": sum(ran.values()),
        "median_lines": statistics.median(differ.values()),
        "most_lines": max(differ.values()),
        "lines": differ,
    }
    print(json.dumps(report))
    return 0 if all(ran.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
