"""The documentation site: it builds without a warning, and needs no network to be read.

Built once for the module. Every page is read back: where its links lead, what a browser
would fetch for it, and whether the API reference has every public name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pytest

import whalejax as wh
from scripts.site_pages import MOVED, PAGES, _shown, as_page
from tests import browser


ROOT: Final = Path(__file__).resolve().parents[2]
needs_docs: Final = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("mkdocstrings") is None,
    reason="needs the extra whalejax[docs]",
)


class Page(HTMLParser):
    """What a page of the site has that others can refer to, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one tag."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given.get("id", ""), given.get("name", "")} - {""}
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag == "link" and given.get("rel") != "canonical":
            self.fetched.add(given.get("href", ""))
        elif "src" in given:
            self.fetched.add(given["src"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; a warning is an error of the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(built: Path) -> dict[str, Page]:
    """The pages by their path in the site."""
    return {
        path.relative_to(built).as_posix(): Page(path.read_text())
        for path in built.rglob("*.html")
    }


def dangling(name: str, pages: dict[str, Page]) -> list[str]:
    """Links of a page to a page or an anchor of the site that does not exist."""
    found = []
    for link in sorted(pages[name].links):
        parts = urlsplit(link)
        if parts.scheme or link.startswith("/"):
            continue
        target = os.path.normpath(Path(name).parent / unquote(parts.path or name))
        page = pages.get(target if parts.path else name)
        anchor = unquote(parts.fragment)
        if page is None or (anchor and anchor not in page.anchors):
            found.append(link)
    return found


@pytest.mark.full
@needs_docs
def test_links_of_the_site_lead_somewhere(site: dict[str, Page]) -> None:
    lost = {name: dangling(name, site) for name in site if name != "404.html"}
    assert not {name: links for name, links in lost.items() if links}
    assert {"index.html", "reference/api/planning.html", "changelog.html"} <= set(site)


def test_dangling_links_are_seen() -> None:
    text = '<a href="a.html#here"></a><a href="b.html"></a><a href="#gone"></a>'
    pages = {"a.html": Page(text + '<p id="here"></p>')}
    assert dangling("a.html", pages) == ["#gone", "b.html"]


@pytest.mark.full
@needs_docs
def test_pages_fetch_nothing_from_elsewhere(site: dict[str, Page]) -> None:
    fetched = {url for page in site.values() for url in page.fetched}
    assert not {url for url in fetched if urlsplit(url).netloc}
    assert any(url.endswith(".js") for url in fetched)


API_PAGES: Final = sorted((ROOT / "docs/reference/api").glob("*.md"))


def listed() -> set[str]:
    """The names that the sources of the API reference list."""
    text = "\n".join(path.read_text() for path in API_PAGES)
    return set(re.findall(r"^::: \S+\.(\w+)$", text, re.M))


def test_api_reference_lists_every_public_name() -> None:
    assert set(wh.__all__) - {"__version__"} <= listed()


@pytest.mark.full
@needs_docs
def test_api_reference_has_every_public_name(site: dict[str, Page]) -> None:
    pages = [site[f"reference/api/{path.stem}.html"] for path in API_PAGES]
    anchors = {anchor for page in pages for anchor in page.anchors}
    ends = {anchor.rpartition(".")[2] for anchor in anchors}
    assert listed() <= ends


@pytest.mark.full
@needs_docs
def test_pages_that_moved_lead_on(site: dict[str, Page]) -> None:
    assert {"planner-reference.html", "elastic.html", "api.html"} <= {*MOVED} <= {*site}
    for old, new in MOVED.items():
        assert site[old].links == {new}


def test_what_has_moved_is_gone_from_where_it_was() -> None:
    for old, new in MOVED.items():
        assert not (ROOT / "docs" / old).with_suffix(".md").exists()
        page = ROOT / "docs" / Path(new).with_suffix(".md")
        assert page.is_file() or f"{Path(new).with_suffix('.md')}" in PAGES.values()


PAGE: Final = """
[page](../plan/time.md#time) [script](../../scripts/run)
[notebook](../../notebooks/swarms.ipynb)
<picture>
  <source media="(prefers-color-scheme: dark)" srcset="../pictures/plan-dark.png">
  <img alt="A plan" src="../pictures/plan-light.png">
</picture>
"""


def test_links_and_pictures_become_those_of_the_site() -> None:
    assert (
        as_page(PAGE, "docs/start/x.md", "start/x.md")
        == """
[page](../plan/time.md#time) script
[notebook](swarms.md)
![A plan](../pictures/plan-light.png#only-light)
![A plan](../pictures/plan-dark.png#only-dark)
"""
    )
    assert "(../README.md)" not in as_page("[home](../README.md)", "docs/x.md", "x.md")


LOOKED_AT: Final = (
    "index",
    "start/explore_plans",
    "start/notebooks",
    "start/swarms",
    "plan/kinds",
    "plan/time",
    "recipes/nnx",
    "reference/api/planning",
)
"""Pages with wide tables, code, pictures and what notebooks show."""


@pytest.mark.full
@needs_docs
@pytest.mark.parametrize("name", LOOKED_AT)
def test_pages_fit_their_window_and_theme(
    name: str, built: Path, tmp_path: Path
) -> None:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is on the path")
    page = built / f"{name}.html"
    for width in (1200, 400):
        for dark in (False, True):
            size = width, 1600
            found = browser.look(program, page, tmp_path, size, dark=dark)
            case = f"{name} at {width}, {'dark' if dark else 'light'}: {found}"
            assert found.size == size, case
            assert found.scroll_width <= width, case
            assert (found.brightness < 0.35) if dark else (found.brightness > 0.65), (
                case
            )
            assert 0.2 < found.most < 0.99, case  # a ground, and something on it


class _Cell:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def get(self, name: str, default: Any) -> Any:
        return vars(self).get(name, default)


def test_cells_show_drawings_without_scripts() -> None:
    drawn = {"image/svg+xml": "<svg>\n\n</svg>", "text/html": "<script></script>"}
    shown = _shown(_Cell(output_type="display_data", data=drawn))
    assert shown == '<div class="shown" markdown="0"><svg>\n</svg></div>'
    said = _shown(_Cell(output_type="stream", text="a <b>\n\nc\n"))
    assert said == (
        '<div class="shown" markdown="0"><pre>a &lt;b&gt;\n \nc</pre></div>'
    )
