"""What the site shows otherwise than the repository: mkdocs calls this as a hook.

README, CONTRIBUTING, CHANGELOG and the notebooks become pages where they stand, so that
none of them has a second copy; links to files that are no page (scripts, the licence)
become words. Notebooks are run, and their pages have what they show. Pictures are light
or dark as the page is. Pages that have moved are still found by their earlier names.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
from html import escape
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
NOTEBOOKS: Final = ("explore_plans", "mixed_gpus", "pipeline_schedules", "swarms")
PAGES: Final = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    **{f"notebooks/{name}.ipynb": f"start/{name}.md" for name in NOTEBOOKS},
}
"""Files outside the folder of documents and the pages that they become."""

MOVED: Final = {
    "accuracy.html": "reference/accuracy.html",
    "api.html": "reference/api/index.html",
    "checkpoints.html": "run/checkpoints.html",
    "coming-from.html": "start/coming-from.html",
    "elastic.html": "survive/elastic.html",
    "estimates.html": "reference/estimates.html",
    "examples.html": "start/examples.html",
    "explore_plans.html": "start/explore_plans.html",
    "flax.html": "start/flax.html",
    "jobs.html": "hosts/jobs.html",
    "kinds.html": "plan/kinds.html",
    "many-hosts.html": "hosts/many-hosts.html",
    "mixed.html": "plan/mixed.html",
    "mixed_gpus.html": "start/mixed_gpus.html",
    "notebooks.html": "start/notebooks.html",
    "pipeline_schedules.html": "start/pipeline_schedules.html",
    "pipelines.html": "plan/pipelines.html",
    "planner-measurements.html": "reference/measurements.html",
    "planner-reference.html": "plan/dimensions.html",
    "planner.html": "plan/planner.html",
    "profile.html": "run/profile.html",
    "recommenders.html": "recommenders/recommenders.html",
    "shares.html": "plan/shares.html",
    "spatial.html": "plan/spatial.html",
    "swarm-planning.html": "swarm/planning.html",
    "swarm.html": "swarm/swarm.html",
    "swarms.html": "start/swarms.html",
    "taxonomy.html": "reference/taxonomy.html",
    "verify.html": "run/verify.html",
}
"""Earlier addresses of pages, and where they are now."""

_CODE: Final = r"^```.*?^```|`[^`\n]+`"
_LINK: Final = r"(?<!!)\[((?:`[^`\n]+`|[^]`])*)\]\(([^)#\s]*)(#[^)\s]*)?\)"
_LINK_OR_CODE: Final = re.compile(f"{_LINK}|{_CODE}", re.MULTILINE | re.DOTALL)
_PICTURE: Final = re.compile(
    r'<picture>\s*<source[^>]* srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
_READ: Final = (".py", ".toml", ".csv", ".json")
_CACHE: Final = ROOT / ".cache" / "notebooks"


def as_page(text: str, source: str, page: str) -> str:
    """A document with its links and pictures as they are on the site.

    Args:
        text: Markdown.
        source: Path of the document in the repository.
        page: Path of its page in the site, such as ``"plan/time.md"``.
    """

    def site_path(target: str) -> str:
        path = (ROOT / source).parent / target
        name = path.resolve().relative_to(ROOT).as_posix()
        found = PAGES.get(name, name.removeprefix("docs/"))
        if name not in PAGES and not name.startswith("docs/"):
            return ""
        return os.path.relpath(found, Path(page).parent)

    def turned(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        if not target or re.match(r"[a-z]+:", target):  # code has none
            return link[0]
        path = site_path(target)
        return f"[{words}]({path}{anchor})" if path else words

    def themed(picture: re.Match[str]) -> str:
        dark, words, light = picture.groups()
        return (
            f"![{words}]({site_path(light)}#only-light)\n"
            f"![{words}]({site_path(dark)}#only-dark)"
        )

    return _PICTURE.sub(themed, _LINK_OR_CODE.sub(turned, text))


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages; called by mkdocs once it has listed the folder of documents."""
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    for name, page in PAGES.items():
        path = ROOT / name
        is_notebook = path.suffix == ".ipynb"
        text = notebook_text(path) if is_notebook else path.read_text()
        files.append(generated(config, page, content=as_page(text, name, page)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn the links of a page; called by mkdocs for each. Those added are turned."""
    path = page.file.src_uri
    is_turned = path in PAGES.values()
    return markdown if is_turned else as_page(markdown, f"docs/{path}", path)


def on_post_build(*, config: Any) -> None:
    """Write a page that leads on for each that has moved; called by mkdocs."""
    for old, new in MOVED.items():
        target = Path(config["site_dir"]) / old
        target.write_text(
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            f'<title>Moved</title><meta http-equiv="refresh" content="0; url={new}">'
            f'</head><body>This page is now <a href="{new}">{new}</a>.</body></html>\n'
        )


def notebook_text(path: Path) -> str:
    """A notebook as Markdown, with what its cells show.

    Args:
        path: Path of the notebook, which is kept without outputs. It runs in a kernel
            of its own, and once for each state of the package: what it shows is kept
            in ``.cache``.
    """
    cells = _run_notebook(path).cells
    parts = []
    for cell in cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [text for output in cell.outputs if (text := _shown(output))]
    return "\n\n".join(parts) + "\n"


def _run_notebook(path: Path) -> Any:
    nbformat: Any = importlib.import_module("nbformat")
    kept = _CACHE / f"{path.stem}-{_state(path)}.ipynb"
    if kept.is_file():
        return nbformat.read(kept, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.getenv('PYTHONPATH', '')}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    _CACHE.mkdir(parents=True, exist_ok=True)
    importlib.import_module("nbclient").NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(_CACHE)}},
    ).execute()
    nbformat.write(notebook, kept)
    return notebook


def _state(path: Path) -> str:
    """A hash of a notebook, and of all Python and data that it may read."""
    found = hashlib.sha256(path.read_bytes())
    for room in ("whalejax", "planner", "meshes", "models"):
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in _READ:
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


def _shown(output: Any) -> str:
    """What a cell shows, as HTML without scripts, or as text."""
    if output.output_type == "stream":
        return _words(output.text)
    data = output.get("data", {})
    drawn = data.get("image/svg+xml") or data.get("text/html")
    if drawn is not None:  # Markdown ends a block of HTML at an empty line.
        inner = re.sub(r"\n\s*\n+", "\n", "".join(drawn))
        return f'<div class="shown" markdown="0">{inner}</div>'
    return _words("".join(data.get("text/plain", "")))


def _words(text: str) -> str:
    """Printed text as a block that keeps its lines and wraps long ones."""
    lines = [line or " " for line in escape(text.rstrip(), quote=False).split("\n")]
    joined = "\n".join(lines)
    return f'<div class="shown" markdown="0"><pre>{joined}</pre></div>' if text else ""
