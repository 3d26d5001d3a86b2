"""A browser without a screen or a network, for tests and pictures of what it shows."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final


NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "chrome")
"""Programs that are looked for."""

# Nothing resolves: whoever asks for the network gets an error, on the console too.
_OPTIONS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A page as a browser made it.

    Attributes:
        html: the document, after its scripts ran.
        console: what they wrote, errors of the network included.
    """

    html: str
    console: tuple[str, ...]

    def count(self, name: str, **attributes: str) -> int:
        """Elements of a name, with such attributes."""
        counter = _Counter(name, attributes)
        counter.feed(self.html)
        return counter.found


class _Counter(HTMLParser):
    def __init__(self, name: str, attributes: dict[str, str]) -> None:
        super().__init__()
        self.name, self.attributes, self.found = name, attributes, 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        if tag == self.name:
            self.found += all(given.get(k) == v for k, v in self.attributes.items())


def find() -> str | None:
    """The browser's program, or None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


# A browser keeps what it could not load from its log; a page is told of it.
_LISTENER: Final = (
    "<script>addEventListener('error', e => e.target === window || console.error("
    "'not loaded: ' + (e.target.src || e.target.href)), true);"
    "addEventListener('unhandledrejection', e => console.error(e.reason))</script>"
)


def opened(program: str, path: Path) -> Shown:
    """Open a page whose head is written out."""
    heard = path.with_name(f"heard-{path.name}")
    head, start, rest = path.read_text().partition("<head>")
    assert start, f"{path} has no head"
    heard.write_text(head + start + _LISTENER + rest)
    done = _run(program, ["--dump-dom"], heard)
    lines = re.findall(r'CONSOLE[^"]*"(.*)", source', done.stderr)
    return Shown(html=done.stdout, console=tuple(lines))


def picture(
    program: str, path: Path, target: Path, size: tuple[int, int], *, dark: bool
) -> None:
    """Write what a file looks like as a PNG.

    Args:
        program: the browser.
        path: of the page.
        target: of the picture.
        size: width and height in pixels.
        dark: as on a system with a dark theme.
    """
    options = [f"--screenshot={target}", f"--window-size={size[0]},{size[1]}"]
    options += ["--blink-settings=preferredColorScheme=0"] * dark
    _run(program, options, path)


def _run(
    program: str, options: list[str], path: Path
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *_OPTIONS, *options, path.resolve().as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
