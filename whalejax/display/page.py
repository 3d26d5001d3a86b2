"""Makes HTML and SVG as text: pages, tables, bars and drawings with a common style.

Text and lines have the colour of the surrounding page (``currentColor``), and fills are
pale under dark text, so that light and dark pages are readable. All that colour shows
is also shown by text, positions or heights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from whalejax.meshes.checks import Arguments
from whalejax.meshes.errors import WhaleError


FILLS = (
    "#8ab4f8",
    "#f6b26b",
    "#93c47d",
    "#ffe08a",
    "#f4a6c0",
    "#b9a7e0",
    "#7fd3c6",
    "#c9c9c9",
    "#d9b38c",
    "#a7d8f0",
)
"""Pale fills for dark text, readable on light and dark pages."""

INK = "#111"
"""Colour of text on fills."""

_STYLE = """
.whalejax{font:13px/1.45 system-ui,sans-serif;max-width:80rem;color:inherit}
.whalejax table{border-collapse:collapse;margin:.3rem 0;font-size:inherit;
color:inherit;background:none;width:auto;table-layout:auto}
.whalejax th,.whalejax td{padding:.1rem .8rem .1rem 0;text-align:left;border:0;
vertical-align:top;color:inherit;background:none;white-space:normal;max-width:none}
.whalejax tbody tr{background:none}
.whalejax thead th{border-bottom:1px solid currentColor;font-weight:600}
.whalejax tbody th{font-weight:400}
.whalejax td.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.whalejax caption,.whalejax summary,.whalejax h3,.whalejax h4{font-weight:600;
font-size:inherit;text-align:left;margin:.5rem 0 .1rem;padding:0;color:inherit;
caption-side:top}
.whalejax h3{font-size:1.1em}
.whalejax summary{cursor:pointer}
.whalejax code{font:12px/1.4 ui-monospace,monospace;color:inherit;background:none;
padding:0;white-space:nowrap}
.whalejax .pair{display:flex;flex-wrap:wrap;gap:0 3rem;align-items:flex-start}
.whalejax .bar{display:block;width:11rem;height:.75em;margin-top:.3em;
border:1px solid currentColor;box-sizing:border-box}
.whalejax ul{margin:.2rem 0;padding-left:1.2rem}
.whalejax .map td,.whalejax .map th{border:1px solid currentColor;padding:.2rem .5rem}
.whalejax .drawn text{font:11px system-ui,sans-serif}
"""

# Selectors of three classes override notebooks' styles of two classes and an element.
_FIRM_STYLE = _STYLE.replace(".whalejax", ".whalejax" * 3)
_PAGE_STYLE = ":root{color-scheme:light dark}body{margin:1rem}"


class Picture:
    """A picture that is HTML in a notebook and text elsewhere.

    Args:
        html: HTML of the picture, without a style sheet.
        text: Text with the same content.
        svg: Drawing as SVG; empty without a drawing.
    """

    def __init__(self, *, html: str, text: str, svg: str = "") -> None:
        self.html = html
        self.text = text
        self.svg = svg

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, str]:
        return bundle_of(self.html, self.text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the picture to a file.

        Args:
            path: Path that ends in ``.html`` for a page, ``.svg`` for the drawing if
                there is one, or ``.txt``.

        Raises:
            WhaleError: The extension is unknown, or the file cannot be written.
        """
        check_path(path)
        forms = self._forms()
        ending = Path(path).suffix.lower()
        if ending not in forms:
            raise WhaleError(
                f"path is {path}, which has {ending or 'no ending'}; expected "
                f"{', '.join(forms)} for a {type(self).__name__}"
            )
        write(path, forms[ending])

    def _forms(self) -> dict[str, str]:
        drawn = {".svg": alone(self.svg)} if self.svg else {}
        return {".html": page(self.html, self.title), **drawn, ".txt": self.text + "\n"}

    @property
    def title(self) -> str:
        """First line of the text."""
        return self.text.partition("\n")[0]


def check_path(path: object) -> None:
    """Raises ``WhaleError`` if a value is no path of a file."""
    problems = Arguments("save")
    problems.path("path", path, "the name of a file, such as 'plan.html'")
    problems.raise_if_any()


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file; raises ``WhaleError`` if that fails."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WhaleError(
            f"{path} cannot be written ({error.strerror}). Give a file name in an "
            "existing folder that you may write to"
        ) from error


def bundle_of(html: str, text: str) -> dict[str, str]:
    """Returns HTML with the style sheet, and text, by MIME type, for a notebook."""
    return {"text/html": fragment(html), "text/plain": text}


def fragment(html: str) -> str:
    """Returns HTML with the style sheet, for use inside a page."""
    return f'<div class="whalejax"><style>{_FIRM_STYLE}</style>{html}</div>'


def page(html: str, title: str) -> str:
    """Returns a complete page, light or dark as the reader's system prefers."""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        '<meta name="viewport" content="width=device-width">'
        f"<style>{_PAGE_STYLE}</style></head><body>{fragment(html)}</body></html>\n"
    )


def alone(svg: str) -> str:
    """Returns an SVG drawing as the text of a file, light or dark like ``page``."""
    style = (
        "<style>:root{color:#111}@media(prefers-color-scheme:dark){:root{color:#eee}}"
        "text{font:11px system-ui,sans-serif}</style>"
    )
    head, end, rest = svg.partition(">")
    return f"{head}{end}{style}{rest}\n"


def cell(text: str, *, number: bool = False, code: bool = False) -> str:
    """Returns one cell of a table."""
    inner = f"<code>{escape(text)}</code>" if code else escape(text)
    return f'<td class="n">{inner}</td>' if number else f"<td>{inner}</td>"


def table(
    names: Sequence[str], rows: Iterable[str], *, caption: str = "", kind: str = ""
) -> str:
    """Returns a table.

    Args:
        names: Names of the columns; empty for a table without a head.
        rows: HTML of the cells of each row; see ``cell``.
        caption: Caption above the table.
        kind: CSS class of the table.
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    head = f"<thead><tr>{head}</tr></thead>" if names else ""
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    mark = f' class="{kind}"' if kind else ""
    return f"<table{mark}>{above}{head}<tbody>{body}</tbody></table>"


def details_html(summary: str, html: str, *, opened: bool = False) -> str:
    """Returns HTML that a click on its summary unfolds."""
    state = " open" if opened else ""
    return f"<details{state}><summary>{escape(summary)}</summary>{html}</details>"


def list_html(texts: Iterable[str]) -> str:
    """Returns texts as an HTML list; empty without texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def bar(share: float, fill: str = FILLS[0]) -> str:
    """Returns a table cell with a bar for a fraction from 0 to 1."""
    width = f"{min(1.0, max(0.0, share)) * 100:.1f}"
    return (
        '<td><svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" '
        f'aria-hidden="true"><rect width="{width}" height="10" fill="{fill}"/>'
        "</svg></td>"
    )


def drawing(width: float, height: float, label: str, inner: str) -> str:
    """Returns an SVG drawing.

    Args:
        width, height: Size in units of ``inner``.
        label: Description for screen readers.
        inner: SVG elements of the drawing.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" class="drawn" '
        f'style="max-width:100%;height:auto" aria-label="{escape(label)}">{inner}</svg>'
    )


def words(
    x: float, y: float, text: str, *, anchor: str = "start", ink: str = "currentColor"
) -> str:
    """Returns an SVG text element at a position."""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:g}" y="{y:g}" fill="{ink}"{place}>{escape(text)}</text>'


def stage_names(each: Sequence[int]) -> tuple[str, ...]:
    """Returns names of the stages of all pipelines, for lanes and bars.

    Args:
        each: Number of stages of each pipeline.

    >>> stage_names([2]), stage_names([1, 1])
    (('stage 0', 'stage 1'), ('0: stage 0', '1: stage 0'))
    """
    several = len(each) > 1
    return tuple(
        f"{pipeline}: stage {stage}" if several else f"stage {stage}"
        for pipeline, count in enumerate(each)
        for stage in range(count)
    )
