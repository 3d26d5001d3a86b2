"""What the site shows otherwise than the repository: mkdocs calls this as a hook.

README, CONTRIBUTING, CHANGELOG and the notebooks become pages where they stand, so that
none of them has a second copy; links to files that are no page (scripts, the licence)
become words.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "notebooks/explore_plans.ipynb": "explore_plans.md",
    "notebooks/mixed_gpus.ipynb": "mixed_gpus.md",
    "notebooks/pipeline_schedules.ipynb": "pipeline_schedules.md",
    "notebooks/swarms.ipynb": "swarms.md",
}
"""Files outside the folder of documents and the pages that they become."""

_CODE: Final = r"^```.*?^```|`[^`\n]+`"
_LINK: Final = r"(?<!!)\[((?:`[^`\n]+`|[^]`])*)\]\(([^)#\s]*)(#[^)\s]*)?\)"
_LINK_OR_CODE: Final = re.compile(f"{_LINK}|{_CODE}", re.MULTILINE | re.DOTALL)


def as_page(text: str, folder: str = "") -> str:
    """A document with its links as they are on the site.

    Args:
        text: Markdown.
        folder: of the document, in the root.
    """

    def turned(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        if not target or re.match(r"[a-z]+:", target):  # code has none
            return link[0]
        path = (ROOT / folder / target).resolve().relative_to(ROOT).as_posix()
        page = PAGES.get(path, path.removeprefix("docs/"))
        is_page = path in PAGES or path.startswith("docs/")
        return f"[{words}]({page}{anchor})" if is_page else words

    return _LINK_OR_CODE.sub(turned, text)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages; called by mkdocs once it has listed the folder of documents."""
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    for name, page in PAGES.items():
        path = (ROOT / name).with_suffix(".md")  # notebooks have their text beside them
        text = as_page(
            re.sub(r"\A---\n.*?\n---\n", "", path.read_text(), flags=re.DOTALL)
        )
        files.append(generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn the links of a page; called by mkdocs for each. Those added are turned."""
    is_turned = page.file.src_uri in PAGES.values()
    return markdown if is_turned else as_page(markdown, "docs")
