"""Pages of the documentation that are files of the root: mkdocs calls this as a hook.

README, CONTRIBUTING and CHANGELOG are read where they stand, so that none of them has a
second copy; only their links are turned towards the pages of the site.
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
}
"""Files of the root and the pages that they become."""


def as_page(text: str) -> str:
    """A file of the root with its links as they are on the site.

    Files that are no page (the licence) are named without a link.

    >>> as_page("[a](docs/a.md#b), [c](CHANGELOG.md), [d](LICENSE), [e](https://e.org)")
    '[a](a.md#b), [c](changelog.md), d, [e](https://e.org)'
    """

    def turned(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"[a-z]+:", target) or not target:
            return match[0]
        page = PAGES.get(target) or (
            target.removeprefix("docs/") if target.startswith("docs/") else None
        )
        return f"[{words}]({page}{anchor})" if page else words

    return re.sub(r"(?<!!)\[([^]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", turned, text)


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages; called by mkdocs once it has listed the folder of documents."""
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    for name, page in PAGES.items():
        text = as_page((ROOT / name).read_text())
        files.append(generated(config, page, content=text))
    return files
