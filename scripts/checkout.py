"""What is checked out: the commit that kept results were measured at."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final


ROOT: Final = Path(__file__).resolve().parents[1]
CHANGED: Final = "+"
"""At the end of a commit from which files differ."""


def is_clean() -> bool:
    """There is a commit, and no file but kept results differs from it."""
    return bool(_git("rev-parse", "HEAD")) and not _git(
        "status", "--porcelain", "--", ".", ":!scripts/*.json"
    )


def commit() -> str:
    """The first ten digits, and ``CHANGED`` where files differ or git says nothing."""
    found = _git("rev-parse", "--short=10", "HEAD")
    return found + ("" if is_clean() else CHANGED)


def _git(*words: str) -> str:
    told = subprocess.run(
        ["git", "-c", "safe.directory=*", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return told.stdout.strip()
