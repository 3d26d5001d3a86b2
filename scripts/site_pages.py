"""Makes the site's pages from the repository: mkdocs calls this as a hook.

README, CONTRIBUTING, CHANGELOG and the notebooks become pages without second copies;
links to files without a page (scripts, the licence) become text. Notebooks run, and
their pages include the outputs. Pictures are light or dark as the page is. Moved pages
stay reachable under their earlier names.
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
"""Files outside the folder of documents, and their pages."""

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
"""Earlier and present addresses of moved pages."""

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
    """Returns a document with links and pictures for the site.

    Args:
        text: Markdown.
        source: Path of the document in the repository.
        page: Path of its page in the site, such as ``"plan/time.md"``.
    """

    def site_path(target: str) -> str:
        path = (ROOT / source).parent / target
        name = path.resolve().relative_to(ROOT).as_posix()
        target_page = PAGES.get(name, name.removeprefix("docs/"))
        if name not in PAGES and not name.startswith("docs/"):
            return ""
        return os.path.relpath(target_page, Path(page).parent)

    def site_link(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if not target or re.match(r"[a-z]+:", target):  # code has none
            return link[0]
        path = site_path(target)
        return f"[{text}]({path}{anchor})" if path else text

    def themed_picture(picture: re.Match[str]) -> str:
        dark, text, light = picture.groups()
        return (
            f"![{text}]({site_path(light)}#only-light)\n"
            f"![{text}]({site_path(dark)}#only-dark)"
        )

    return _PICTURE.sub(themed_picture, _LINK_OR_CODE.sub(site_link, text))


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the pages; mkdocs calls it with the listed documents."""
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    for name, page in PAGES.items():
        path = ROOT / name
        is_notebook = path.suffix == ".ipynb"
        text = notebook_text(path) if is_notebook else path.read_text()
        files.append(generated(config, page, content=as_page(text, name, page)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Changes the links of a page, unless ``on_files`` added it; mkdocs calls it."""
    path = page.file.src_uri
    is_turned = path in PAGES.values()
    return markdown if is_turned else as_page(markdown, f"docs/{path}", path)


def on_post_build(*, config: Any) -> None:
    """Writes a redirect for each moved page; mkdocs calls it."""
    for old, new in MOVED.items():
        target = Path(config["site_dir"]) / old
        target.write_text(
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            f'<title>Moved</title><meta http-equiv="refresh" content="0; url={new}">'
            f'</head><body>This page is now <a href="{new}">{new}</a>.</body></html>\n'
        )


def notebook_text(path: Path) -> str:
    """Returns a notebook as Markdown, with the outputs of its cells.

    Args:
        path: Path of the notebook, which is stored without outputs. It runs in its own
            kernel, once for each state of the package; ``.cache`` stores the outputs.
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
    cached = _CACHE / f"{path.stem}-{_state(path)}.ipynb"
    if cached.is_file():
        return nbformat.read(cached, as_version=4)
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
    nbformat.write(notebook, cached)
    return notebook


def _state(path: Path) -> str:
    """Returns a hash of a notebook, and of all Python and data that it may read."""
    digest = hashlib.sha256(path.read_bytes())
    for room in ("whalejax", "planner", "meshes", "models"):
        for file in sorted((ROOT / room).rglob("*")):
            if file.suffix in _READ:
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _shown(output: Any) -> str:
    """Returns a cell's output, as HTML without scripts, or as text."""
    if output.output_type == "stream":
        return _words(output.text)
    data = output.get("data", {})
    markup = data.get("image/svg+xml") or data.get("text/html")
    if markup is not None:  # Markdown ends a block of HTML at an empty line.
        inner = re.sub(r"\n\s*\n+", "\n", "".join(markup))
        return f'<div class="shown" markdown="0">{inner}</div>'
    return _words("".join(data.get("text/plain", "")))


def _words(text: str) -> str:
    """Returns printed text as a block that keeps its lines and wraps long ones."""
    lines = [line or " " for line in escape(text.rstrip(), quote=False).split("\n")]
    joined = "\n".join(lines)
    return f'<div class="shown" markdown="0"><pre>{joined}</pre></div>' if text else ""
