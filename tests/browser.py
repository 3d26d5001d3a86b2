"""A browser without a screen or a network, for tests and pictures of what it shows."""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
from collections.abc import Sequence
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
    return Shown(html=done.stdout, console=_console(done.stderr))


def picture(
    program: str, path: Path, target: Path, size: tuple[int, int], *, dark: bool
) -> tuple[str, ...]:
    """Write what a file looks like as a PNG.

    Args:
        program: the browser.
        path: of the page.
        target: of the picture.
        size: width and height in pixels.
        dark: as on a system with a dark theme.

    Returns:
        What the scripts of the page wrote.
    """
    options = [f"--screenshot={target}", f"--window-size={size[0]},{size[1]}"]
    options += ["--blink-settings=preferredColorScheme=0"] * dark
    return _console(_run(program, options, path).stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a page looks like at a size.

    Attributes:
        size: Width and height of its picture in pixels.
        scroll_width: Width of the page; more than the window's scrolls sideways.
        brightness: Mean of all pixels, from 0, black, to 1, white.
        most: Part of the pixels that have the commonest colour.
    """

    size: tuple[int, int]
    scroll_width: int
    brightness: float
    most: float


_WIDTH: Final = (
    "<script>for (const e of ['DOMContentLoaded', 'load']) addEventListener(e, () => "
    "console.error('width ' + document.documentElement.scrollWidth))</script>"
)
# A window without a screen is at least 500 wide until its picture is taken.
_FRAME: Final = """<!DOCTYPE html><html><head></head><body style="margin:0">
<iframe src="%s" style="width:%dpx;height:%dpx;border:0;display:block"></iframe>
</body></html>"""
_PIXELS: Final = """<!DOCTYPE html><html><head></head><body><img id=i src="data:%s">
<script>addEventListener("load", () => {
const c = document.createElement("canvas"), n = i.naturalWidth, m = i.naturalHeight;
c.width = n; c.height = m;
const g = c.getContext("2d"); g.drawImage(i, 0, 0);
const d = g.getImageData(0, 0, n, m).data, counts = {};
let sum = 0, most = 0;
for (let p = 0; p < d.length; p += 4) {
  sum += d[p] + d[p + 1] + d[p + 2];
  const key = d[p] * 65536 + d[p + 1] * 256 + d[p + 2];
  most = Math.max(most, counts[key] = (counts[key] || 0) + 1);
}
console.error(["look", n, m, sum / (n * m * 765), most / (n * m)].join(" "));
})</script></body></html>"""


def look(
    program: str, path: Path, folder: Path, size: tuple[int, int], *, dark: bool
) -> Look:
    """Open a page, take its picture and count its pixels.

    Args:
        program: The browser.
        path: Path of the page, in whose folder a copy is written for a moment.
        folder: Folder for the picture.
        size: Width and height of the window in pixels.
        dark: As on a system with a dark theme.
    """
    target = folder / f"{path.stem}-{size[0]}-{'dark' if dark else 'light'}.png"
    copy = path.with_name(f"measured-{path.name}")
    copy.write_text(path.read_text().replace("</head>", f"{_WIDTH}</head>", 1))
    frame = path.with_name(f"framed-{path.name}")
    frame.write_text(_FRAME % (copy.name, *size))
    said = picture(program, frame, target, size, dark=dark)
    copy.unlink()
    frame.unlink()
    pixels = folder / "pixels.html"
    coded = base64.b64encode(target.read_bytes()).decode()
    pixels.write_text(_PIXELS % f"image/png;base64,{coded}")
    counted = _console(_run(program, ["--dump-dom"], pixels).stderr)
    width, height, brightness, most = _after("look ", counted).split()
    return Look(
        size=(int(width), int(height)),
        scroll_width=int(_after("width ", said)),
        brightness=float(brightness),
        most=float(most),
    )


def _console(log: str) -> tuple[str, ...]:
    """What scripts wrote, by the log of a browser."""
    return tuple(re.findall(r'CONSOLE[^"]*"(.*)", source', log))


def _after(start: str, lines: Sequence[str]) -> str:
    found = [line.removeprefix(start) for line in lines if line.startswith(start)]
    assert found, f"no {start!r} among {lines}"
    return found[-1]


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
