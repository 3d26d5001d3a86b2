"""Describes the checked-out commit, at which results were measured."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final


ROOT: Final = Path(__file__).resolve().parents[1]
CHANGED: Final = "+"
"""Suffix of a commit from which files differ."""


def is_clean() -> bool:
    """Returns whether no file but stored results differs from a commit."""
    return bool(_git("rev-parse", "HEAD")) and not _git(
        "status", "--porcelain", "--", ".", ":!scripts/*.json"
    )


def commit() -> str:
    """Returns the first ten digits, and ``CHANGED`` if files differ or git fails."""
    digits = _git("rev-parse", "--short=10", "HEAD")
    return digits + ("" if is_clean() else CHANGED)


def _git(*arguments: str) -> str:
    process = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return process.stdout.strip()
