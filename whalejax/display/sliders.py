"""Sliders in a notebook that call ``Plan.what_if``, with the plan below them.

By default the plan keeps the layout of the first plan, which takes a fraction of a
second. With other numbers of devices, its mesh grows or shrinks along ``data`` or
``fsdp``. A checkbox searches all layouts instead.

Sliders need a running kernel, and ipywidgets from the extra ``whalejax[notebook]``.
Without widgets, readers see the last plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from whalejax.display.charts import needed
from whalejax.display.page import details_html, fragment
from whalejax.display.plan_pages import plan_html
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.cluster import cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.kept_layout import kept_layout
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_errors import NothingFits
from whalejax.planner.step_options import REMAT_POLICIES


_TIMES = (0.25, 0.5, 1, 2, 4)
"""Batches of the slider, relative to the planned batch."""

_SAME = "as planned"
"""Value of a control for the option of the first plan."""


class Sliders:
    """Controls, and the plan for their values.

    Attributes:
        plan: The newest plan.
        problem: Reason why no plan exists for the controls' values; "" if one does.
        controls: Widgets by name, some of ``batch``, ``sequence``, ``devices``,
            ``remat``, ``cluster`` and ``search``. Setting a ``value`` plans again.
        widget: Widget with the controls and the plan.
    """

    def __init__(
        self, plan: Any, batches: Sequence[int] | None, clusters: Sequence[str]
    ) -> None:
        _check(batches, clusters)
        if plan.question is None:
            plan.what_if()  # raises if its model is missing
        widgets = _needed()
        self.plan: Any = plan
        self.problem = ""
        self._first = plan
        self._found: dict[tuple[tuple[str, Any], ...], Any] = {(): plan}
        self.controls = _controls(widgets, plan, batches, clusters)
        self._shown = widgets.HTML(fragment(self._html()))
        self.widget = widgets.VBox([*self.controls.values(), self._shown])
        for control in self.controls.values():
            control.observe(self._on_change, names="value")

    def _on_change(self, change: object) -> None:
        """Shows the plan for the controls' values, from the cache if it is known."""
        del change
        asked = {
            name: control.value
            for name, control in self.controls.items()
            if control.value != _SAME and name != "search"
        }
        if "devices" in asked:
            asked["cluster"] = asked.pop("devices")
        search = bool(self.controls["search"].value)
        key = (*asked.items(), ("search", search)) if asked else ()
        try:
            if key not in self._found:
                self._shown.value = fragment("<p>Planning …</p>")
                self._found[key] = self._planned(asked, search)
            self.plan, self.problem = self._found[key], ""
        except WhaleError as error:
            self.problem = str(error)
        self._shown.value = fragment(self._html())

    def _planned(self, asked: dict[str, Any], search: bool) -> Any:
        """Returns the plan with the first plan's layout, or the best of all layouts."""
        kept = {} if search else kept_layout(self._first, asked)
        if not kept:
            return self._first.what_if(**asked)
        if asked.get("sequence", 0) > (self._first.question.sequence_length or 0):
            kept["attention"] = dict(self._first.attention) or None  # perhaps in blocks
        try:
            # Try the planned number of micro-batches, then their planned size.
            fewest, most = _micro_batches(self._first, asked)
            if fewest != most and not _surely_lacks(self._first, asked, fewest):
                try:
                    return self._first.what_if(
                        **kept, **asked, num_micro_batches=fewest
                    )
                except NothingFits:
                    pass
            return self._first.what_if(**kept, **asked, num_micro_batches=most)
        except WhaleError as error:
            raise WhaleError(
                f"in the layout of the plan: {error}. Search all layouts instead"
            ) from error

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


def _micro_batches(plan: PlanData, asked: Mapping[str, Any]) -> tuple[int, int]:
    """Returns two numbers of micro-batches to try.

    The first is the plan's number. The second keeps about the plan's number of tokens
    per micro-batch.
    """
    batch, length = _samples(plan) or 1, 1
    if plan.question is not None:
        length = plan.question.sequence_length or 1
    size = asked.get("batch", batch)
    tokens = size * asked.get("sequence", length)
    known = plan.num_micro_batches
    scaled = max(1, -(-known * tokens // (batch * length)))

    def divisor(least: int) -> int:
        return next((n for n in range(least, size + 1) if size % n == 0), least)

    return divisor(min(known, scaled)), divisor(scaled)


def _surely_lacks(plan: PlanData, asked: Mapping[str, Any], parts: int) -> bool:
    """Whether state and saved values certainly exceed the memory.

    Only changes of the batch's sizes can be certain.
    """
    samples = _samples(plan)
    if not {*asked} <= {"batch", "sequence"} or not samples or plan.question is None:
        return False
    length = plan.question.sequence_length or 1
    size: float = asked.get("batch", samples) * asked.get("sequence", length) / parts
    growth = size * plan.num_micro_batches / (samples * length)
    state = plan.memory.params_bytes + plan.memory.optimizer_bytes
    return bool(state + growth * plan.memory.activations_bytes > plan.room_bytes)


def _samples(plan: PlanData) -> int | None:
    return next((leaf.shape[0] for leaf in plan.batch if leaf.shape), None)


def _controls(
    widgets: Any, plan: Any, batches: Sequence[int] | None, clusters: Sequence[str]
) -> dict[str, Any]:
    """Returns the controls of a plan, by name of the option."""

    def slider(name: str, options: list[tuple[str, Any]]) -> Any:
        return widgets.SelectionSlider(
            options=options, value=_SAME, description=name, continuous_update=False
        )

    found = {"batch": slider("batch", _sizes(plan, batches))}
    length = plan.question.sequence_length
    if length is not None:
        found["sequence"] = slider("sequence", _lengths(length))
    if counts := _device_counts(plan):
        found["devices"] = slider("devices", counts)
    remats = [(_SAME, _SAME), *((name, name) for name in REMAT_POLICIES)]
    found["remat"] = slider("remat", remats)
    found["cluster"] = widgets.Dropdown(
        options=[
            (f"{plan.cluster.describe()} ({_SAME})", _SAME),
            *((name, name) for name in clusters),
        ],
        value=_SAME,
        description="cluster",
    )
    found["search"] = widgets.Checkbox(value=False, description="search every layout")
    return found


def _lengths(length: int) -> list[tuple[str, Any]]:
    sizes = sorted({max(1, int(length * times)) for times in _TIMES})
    return [
        (f"{size:,} ({_SAME})", _SAME) if size == length else (f"{size:,}", size)
        for size in sizes
    ]


def _device_counts(plan: PlanData) -> list[tuple[str, Any]]:
    """Returns labels and clusters with fewer and with more nodes of the plan's kind."""
    machine = plan.cluster
    kind, node = machine.kinds[0].name, machine.nodes[0].count
    if not machine.is_uniform or machine.platform == "tpu":
        return []
    texts = {n: f"{kind}:{n}" for n in (node // 4, node // 2, node) if n}
    texts |= {n * node: f"{kind}:{n}x{node}" for n in (2, 4, 8)}
    count = machine.num_devices
    if count not in texts or cluster(texts[count]) != machine:
        return []  # no text describes such a cluster, for instance one from a file
    return [
        (f"{n} ({_SAME})", _SAME) if n == count else (f"{n}", texts[n])
        for n in sorted(texts)
        if count / 4 <= n <= count * 4
    ]


def sliders(
    plan: PlanData, batches: Sequence[int] | None, clusters: Sequence[str]
) -> Sliders:
    """Returns the sliders of a plan; see ``Plan.sliders``."""
    return Sliders(plan, batches, clusters)


def _check(batches: Any, clusters: Any) -> None:
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
    """Returns labels and values of batches by size; the planned one is ``_SAME``."""
    planned = _samples(plan)
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
    return needed("ipywidgets", "sliders", "plan.what_if(batch=…) plans without it")
