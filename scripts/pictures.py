"""Takes the pictures of the documentation: displays in a browser.

Every display is written to docs/pictures in light and in dark. A browser without a
screen has to be on the path, such as Debian's ``chromium``.

    python scripts/pictures.py [--to FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import browser  # noqa: E402
from whalejax.display.page import page  # noqa: E402
from whalejax.planner.plan.plan import Plan  # noqa: E402


WIDTH: Final = 900


def pages() -> Iterator[tuple[str, int, str]]:
    """Yields the name, height in pixels and text of every page of a display.

    The blocks of docs/start/notebooks.md run as they are, so that each picture is of
    its code.
    """
    text = (ROOT / "docs" / "start" / "notebooks.md").read_text()
    names: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
            exec(block, names)
        target = Path(folder) / "chart.html"
        names["found"].chart().save(target)
        yield "chart", 500, target.read_text()
    yield "plan", 880, display_page(names["plan"])
    yield "topology", 200, display_page(names["across"])
    yield "shards", 400, display_page(names["kernel"])
    yield "timeline", 260, display_page(names["line"])


def display_page(value: object) -> str:
    """Returns a page with a notebook's display of a value."""
    bundle: dict[str, str] = value._repr_mimebundle_()  # type: ignore[attr-defined]
    return page(bundle["text/html"], "Plan" if isinstance(value, Plan) else "Picture")


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes the pictures of the docs.")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "pictures")
    folder: Path = parser.parse_args().to
    program = browser.find()
    if program is None:
        print(f"no browser: none of {', '.join(browser.NAMES)} is on the path")
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, height, text in pages():
            source = Path(scratch) / f"{name}.html"
            source.write_text(text)
            for theme in ("light", "dark"):
                target = folder / f"{name}-{theme}.png"
                size = WIDTH, height
                browser.picture(program, source, target, size, dark=theme == "dark")
                print(f"{target}: {target.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
