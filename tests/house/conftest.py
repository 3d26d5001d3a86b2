"""What the tests of the house share: its files, and an environment far from it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest


ROOT: Final = Path(__file__).resolve().parents[2]
LINKED_ROOMS: Final = ("planner", "meshes", "models")


@pytest.fixture(scope="session")
def python_files() -> Callable[..., list[Path]]:
    """Lists the Python files below folders of the root; those behind a link once."""
    linked = {ROOT / "whalejax" / room for room in LINKED_ROOMS}

    def files(*folders: str) -> list[Path]:
        return [
            path
            for folder in folders
            for path in sorted((ROOT / folder).rglob("*.py"))
            if not linked & set(path.parents)
        ]

    return files


@pytest.fixture(scope="session")
def far_environment() -> dict[str, str]:
    """The environment without what would let a subprocess find this checkout."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
