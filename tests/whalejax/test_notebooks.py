"""The notebooks: they are their text, they run, and their pages show every picture.

Kernels and browser are real. One short notebook runs by default.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests import browser
from tests.whalejax.test_searching import searched


ROOT: Final = Path(__file__).resolve().parents[2]
NOTEBOOKS: Final = sorted((ROOT / "notebooks").glob("*.ipynb"))
DRAWN: Final = {
    "explore_plans": {"drawings": 3, "tables": 20, "charts": 1},
    "mixed_gpus": {"drawings": 1, "tables": 20, "charts": 1},
    "pipeline_schedules": {"drawings": 6, "tables": 2, "charts": 0},
    "recommenders": {"drawings": 0, "tables": 1, "charts": 0},
    "swarms": {"drawings": 2, "tables": 1, "charts": 0},
}
"""What the page of each notebook has at least."""


def read(path: Path) -> Any:
    jupytext: Any = pytest.importorskip("jupytext")
    return jupytext.read(path)


def test_every_notebook_is_known() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(DRAWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_its_text_and_holds_no_output(path: Path) -> None:
    notebook, text = read(path), read(path.with_suffix(".md"))
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in text.cells]
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            path.stem, marks=[] if "pipeline" in path.stem else pytest.mark.full
        )
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_its_page_shows_every_picture(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("altair")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.getenv('PYTHONPATH', '')}")
    notebook = read(ROOT / "notebooks" / f"{name}.ipynb")
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "stream" or output.name == "stdout", output
    check_page(exported(notebook, tmp_path / "page.html"), DRAWN[name])


def exported(notebook: Any, path: Path) -> Path:
    """The page of a notebook that ran, without formulas, which load from elsewhere."""
    nbconvert: Any = pytest.importorskip("nbconvert")
    exporter = nbconvert.HTMLExporter(mathjax_url="", require_js_url="")
    html, _ = exporter.from_notebook_node(notebook)
    path.write_text(re.sub(r'<script src="">\s*</script>', "", html))
    return path


def check_page(path: Path, expected: dict[str, int]) -> None:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is on the path")
    shown = browser.opened(program, path)
    assert not shown.console
    assert shown.count("svg", **{"class": "drawn"}) >= expected["drawings"]
    assert shown.count("table") >= expected["tables"]
    # One SVG for each chart, and in it a mark for each plan that was evaluated.
    assert shown.count("svg", **{"class": "marks"}) == expected["charts"]
    points = shown.count("path", **{"aria-roledescription": "point"})
    assert points >= 10 * expected["charts"]


CLICK: Final = """
<script>
function told(words) { document.title += words; }
addEventListener("load", () => setTimeout(() => {
  const open = () => document.querySelectorAll("details[open]").length;
  const point = [...document.querySelectorAll("path[aria-roledescription=point]")]
    .find((p) => p.__data__.href === "#whalejax-plan-HASH");
  const before = open(), box = point.getBoundingClientRect();
  const middle = {clientX: box.x + box.width / 2, clientY: box.y + box.height / 2};
  point.dispatchEvent(new MouseEvent("click", {bubbles: true, ...middle}));
  setTimeout(() => told(" at " + location.hash + " +" + (open() - before)), 1000);
}, 2000));
</script>
"""


@pytest.mark.full
def test_a_click_on_a_point_unfolds_its_plan(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is on the path")
    found = searched()
    page = tmp_path / "page.html"
    found.chart().save(page)
    head, end, rest = page.read_text().rpartition("</body>")
    page.write_text(head + CLICK.replace("HASH", found[1].hash) + end + rest)
    shown = browser.opened(program, page)
    assert not shown.console
    assert f" at #whalejax-plan-{found[1].hash} +1</title>" in shown.html


def test_errors_on_the_console_are_seen(tmp_path: Path) -> None:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is on the path")
    page = tmp_path / "page.html"
    page.write_text(
        '<!DOCTYPE html><head><title>x</title></head><p id="x"></p>'
        '<img src="https://example.com/a.png" alt="">'
        "<script>document.getElementById('x').innerHTML = '<svg class=\"drawn\">';"
        "throw Error('wrong')</script>"
    )
    shown = browser.opened(program, page)
    assert any("wrong" in line for line in shown.console)
    assert any("example.com/a.png" in line for line in shown.console)
    assert shown.count("svg", **{"class": "drawn"}) == 1
