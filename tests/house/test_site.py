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
from typing import Final
from urllib.parse import unquote, urlsplit

import pytest

import whalejax as wh


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
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """The pages by their path in the site; a warning is an error of the build."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        path.relative_to(folder).as_posix(): Page(path.read_text())
        for path in folder.rglob("*.html")
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
    assert {"index.html", "api.html", "changelog.html"} <= set(site)


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


def listed() -> set[str]:
    """The names that the source of the API reference lists."""
    text = (ROOT / "docs/api.md").read_text()
    return set(re.findall(r"^::: \S+\.(\w+)$", text, re.M))


def test_api_reference_lists_every_public_name() -> None:
    assert set(wh.__all__) - {"__version__"} <= listed()


@pytest.mark.full
@needs_docs
def test_api_reference_has_every_public_name(site: dict[str, Page]) -> None:
    ends = {anchor.rpartition(".")[2] for anchor in site["api.html"].anchors}
    assert listed() <= ends
