"""Sliders in a notebook that call ``Plan.what_if``, with the plan below them.

Needs a kernel that runs, and the extra ``whalejax[notebook]`` for ipywidgets; readers
that know no widgets show the plan that was last found.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from html import escape
from typing import Any

from whalejax.display.bundles import plan_html
from whalejax.display.page import details_html, fragment
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.cluster import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan_data import PlanData
from whalejax.planner.step_options import REMAT_POLICIES


_TIMES = (0.25, 0.5, 1, 2, 4)
"""Batches that are offered, in units of the planned one."""

_SAME = "as planned"
"""What controls stand at first; ipywidgets take no None."""


class Sliders:
    """Controls, and the plan for what they stand at.

    Attributes:
        plan: the plan that was last found.
        problem: Reason why there is no plan at the controls' values; "" where there is
            one.
        controls: ``batch``, ``remat`` and ``cluster`` to their ipywidgets; setting the
            ``value`` of one plans again.
        widget: all of it, to be put among other widgets.
    """

    def __init__(
        self, plan: Any, batches: Sequence[int] | None, clusters: Sequence[str]
    ) -> None:
        _check(batches, clusters)
        if plan.question is None:
            plan.what_if()  # says that its model is missing
        widgets = _needed()
        self.plan: Any = plan
        self.problem = ""
        self._first = plan
        self._found: dict[tuple[tuple[str, Any], ...], Any] = {(): plan}
        self.controls: dict[str, Any] = {
            "batch": widgets.SelectionSlider(
                options=_sizes(plan, batches),
                value=_SAME,
                description="batch",
                continuous_update=False,
            ),
            "remat": widgets.SelectionSlider(
                options=[(_SAME, _SAME), *((name, name) for name in REMAT_POLICIES)],
                value=_SAME,
                description="remat",
                continuous_update=False,
            ),
            "cluster": widgets.Dropdown(
                options=[
                    (f"{plan.cluster.describe()} ({_SAME})", _SAME),
                    *((name, name) for name in clusters),
                ],
                value=_SAME,
                description="cluster",
            ),
        }
        self._shown = widgets.HTML(fragment(self._html()))
        self.widget = widgets.VBox([*self.controls.values(), self._shown])
        for control in self.controls.values():
            control.observe(self._on_change, names="value")

    def _on_change(self, change: object) -> None:
        """Plan for what the controls stand at, unless that was done before."""
        del change
        asked = {
            name: control.value
            for name, control in self.controls.items()
            if control.value != _SAME
        }
        key = tuple(asked.items())
        try:
            if key not in self._found:
                self._shown.value = fragment("<p>Planning …</p>")
                self._found[key] = self._first.what_if(**asked)
            self.plan, self.problem = self._found[key], ""
        except WhaleError as error:
            self.problem = str(error)
        self._shown.value = fragment(self._html())

    def _html(self) -> str:
        if self.problem:
            return f"<h3>No plan</h3><p>{escape(self.problem)}</p>"
        html = plan_html(self.plan)
        if self.plan is self._first:
            return html
        changes = f"<pre>{escape(str(self._first.diff(self.plan)))}</pre>"
        return details_html("What changes", changes, opened=True) + html

    def __str__(self) -> str:
        return self.problem or str(self.plan)

    __repr__ = __str__

    def _repr_mimebundle_(
        self, include: object = None, exclude: object = None
    ) -> dict[str, Any]:
        drawn: dict[str, Any] = dict(self.widget._repr_mimebundle_())
        html = fragment(self._html())
        return {**drawn, "text/html": html, "text/plain": str(self)}


def sliders(
    plan: PlanData, batches: Sequence[int] | None, clusters: Sequence[str]
) -> Sliders:
    """The sliders of a plan; see ``Plan.sliders``."""
    return Sliders(plan, batches, clusters)


def _check(batches: Any, clusters: Any) -> None:
    """Refuse choices that are none."""
    problems = Arguments("sliders")
    if not isinstance(batches, list | tuple | range | None):
        problems.refuse("batches", batches, "a list of numbers of samples, or None")
    elif wrong := [size for size in batches or () if not is_whole(size, 1)]:
        given = ", ".join(map(short_repr, wrong[:4]))
        problems.add(
            f"batches has {given}; expected numbers of samples, 1 or more each"
        )
    if not isinstance(clusters, list | tuple):
        problems.refuse("clusters", clusters, "a list of clusters as text")
    else:
        for text in clusters:
            try:
                cluster(text)
            except WhaleError as error:
                problems.add(f"clusters: {error}")
    if problems:
        raise WhaleError("\n".join(problems.messages))


def _sizes(
    plan: PlanData, batches: Sequence[int] | None
) -> list[tuple[str, int | str]]:
    """Labels and sizes of batches, in order; the planned one is ``_SAME``."""
    planned = next((leaf.shape[0] for leaf in plan.batch if leaf.shape), None)
    if batches is None:
        sizes = {int(planned * times) for times in _TIMES} if planned else set()
    else:
        sizes = {*batches}
    if planned is None:
        return [(_SAME, _SAME), *((str(size), size) for size in sorted(sizes))]
    return [
        (f"{size} ({_SAME})", _SAME) if size == planned else (str(size), size)
        for size in sorted({*sizes, planned} - {0})
    ]


def _needed() -> Any:
    try:
        return importlib.import_module("ipywidgets")
    except ImportError as error:
        raise WhaleError(
            "sliders need ipywidgets, which is not installed. Install it with "
            'pip install "whalejax[notebook]"; plan.what_if(batch=…) plans without it'
        ) from error
