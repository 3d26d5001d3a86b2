"""Takes the pictures of the documentation: displays in a browser.

Every display is written to docs/pictures in light and in dark. A browser without a
screen has to be on the path, such as Debian's ``chromium``.

    python scripts/pictures.py [--to FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import math
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


WIDTH: Final = 1000
_HEIGHT: Final = (
    "<script>addEventListener('load', () => setTimeout(() => console.error("
    "'height ' + document.body.getBoundingClientRect().bottom), 2000))</script>"
)


def pages() -> Iterator[tuple[str, str]]:
    """Yields the name and the text of every page of a display.

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
        yield "chart", target.read_text()
    yield "plan", display_page(names["plan"])
    yield "topology", display_page(names["across"])
    yield "shards", display_page(names["kernel"])
    yield "timeline", display_page(names["line"])


def display_page(value: object) -> str:
    """Returns a page with a notebook's display of a value."""
    bundle: dict[str, str] = value._repr_mimebundle_()  # type: ignore[attr-defined]
    return page(bundle["text/html"], "Plan" if isinstance(value, Plan) else "Picture")


def page_height(program: str, text: str, scratch: Path) -> int:
    """Returns the height of a page in pixels, so that its picture cuts nothing."""
    source = scratch / "measured.html"
    source.write_text(text.replace("</head>", f"{_HEIGHT}</head>", 1))
    said = browser.picture(
        program, source, scratch / "measured.png", (WIDTH, 200), dark=False
    )
    return math.ceil(float(said[-1].removeprefix("height "))) + 16


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
        for name, text in pages():
            height = page_height(program, text, Path(scratch))
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
