"""The largest batch that fits on each of several clusters: ``wh.largest_batch``.

A batch that is computed in parts may have any size. So the search is for the largest
part, the samples that all devices process at a time. Sizes grow sixteenfold until one
does not fit, and its memory gives an estimate of the limit. Sizes near the limit keep
the layout of the largest size that fits, which takes a fraction of a second each. In
the end, a search over all layouts confirms the limit from both sides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import optax

from whalejax.api.plan_request import PlanQuestion, PlanRequest, question_about
from whalejax.api.search import named_clusters
from whalejax.meshes import Cluster
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.errors import tell
from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.plan.kept_layout import kept_layout
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.report.headline import speed_words
from whalejax.planner.plan.report.plan_page import page_width
from whalejax.planner.plan.report.search_data import place_of_cluster
from whalejax.planner.plan.report.text_layout import Line, paragraph, plain, table
from whalejax.planner.plan.report.why import layout_text
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.user_shares import samples_at_a_time


GROWTH: Final = 16
"""Ratio of successive batch sizes, while batches fit."""

CLOSENESS: Final = 1.125
"""Ratio of the smallest size that does not fit to the largest that fits, at which the
search over all layouts ends if no layout can be kept (unequal replicas, stage
programs).
"""

_PARTS: Final = 256
"""Precision of the result: sizes are told apart in steps of the size divided by this
number, or of one sample of each device and part if that is more.
"""

_COARSE: Final = 1.25
"""The same ratio if the layout of the size that fits can be kept."""

MOST_PLANS: Final = 16
"""Maximum number of searches over all layouts."""

MOST_SAMPLES: Final = 2**30
"""Largest number of samples that is tried."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LargestBatch:
    """The largest batch on one cluster.

    Attributes:
        name: Name of the cluster, as given.
        samples: Number of samples of the largest global batch that fits; 0 if none
            does.
        micro_batch: Number of samples that one replica of the model processes at a
            time.
        plan: Plan of this batch; None if none fits.
        next_samples: Number of samples of the smallest tried batch that does not fit;
            None if all up to ``MOST_SAMPLES`` fit, so that larger ones may fit too.
        problem: Error of the smallest batch that does not fit; None if all fit.
        num_plans: Number of searches over all layouts.
    """

    name: str
    samples: int
    micro_batch: int
    plan: Plan | None
    next_samples: int | None
    problem: PlanError | None
    num_plans: int

    def __repr__(self) -> str:
        layout = "" if self.plan is None else f": {layout_text(self.plan)}"
        above = f", not {self.next_samples:,}" if self.next_samples else ""
        samples = count_text(self.samples, "sample")
        return f"<LargestBatch of {samples}{above} on {self.name}{layout}>"


@dataclass(frozen=True, slots=True, repr=False)
class LargestBatches(Sequence[LargestBatch]):
    """The largest batch on each of several clusters, in the order they were given.

    It is a sequence: ``found[0]`` is the result for the first cluster, and
    ``found["h100:8"]`` is the result for the cluster of this name.

    Attributes:
        batches: Result for each cluster.
    """

    batches: tuple[LargestBatch, ...]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.batches[index]
        names = [batch.name for batch in self.batches]
        return self.batches[place_of_cluster(index, names, "batch")]

    def __len__(self) -> int:
        return len(self.batches)

    def rows(self) -> list[tuple[str, ...]]:
        """Returns the table rows of clusters on which a batch fits."""
        rows: list[tuple[str, ...]] = []
        for batch in self.batches:
            plan = batch.plan
            if plan is None:
                continue
            limit = plan.cluster.memory_bytes
            rate, *rest = speed_words(plan.throughput())
            rows.append(
                (
                    batch.name,
                    f"{'' if batch.next_samples else '≥ '}{batch.samples:,}",
                    f"{batch.micro_batch:,}",
                    layout_text(plan),
                    milliseconds(plan.time.step_seconds),
                    rate,
                    rest[-1] if rest else "–",
                    f"{gigabytes(plan.memory.total_bytes)} of {gigabytes(limit)}",
                )
            )
        return rows

    def document(self) -> dict[str, Any]:
        """Returns the batches as plain JSON data."""
        return {
            "whalejax_largest_batch": 1,
            "batches": [
                {
                    "cluster": batch.name,
                    "samples": batch.samples,
                    "micro_batch": batch.micro_batch,
                    "does_not_fit": batch.next_samples,
                    "reason": None if batch.problem is None else str(batch.problem),
                    "plan": None if batch.plan is None else batch.plan.document(),
                }
                for batch in self.batches
            ],
        }

    def lines(self, width: int | None) -> list[Line]:
        """Returns the lines of the table, and of clusters on which nothing fits.

        Args:
            width: Columns of a line; None does not wrap lines.
        """
        head = ["cluster", "largest batch", "a replica at a time", "layout", "step"]
        head += ["speed", "utilization", "memory per device"]
        rows = self.rows()
        lines = table(head, rows, width, right=[1, 2]) if rows else []
        for batch in self.batches:
            if batch.plan is None:
                text = f"on {batch.name}: {' '.join(str(batch.problem).split())}"
                lines += paragraph("none", [text], width)
        above = [
            f"{batch.next_samples:,} on {batch.name}"
            for batch in self.batches
            if batch.samples and batch.next_samples
        ]
        if above:
            words = ", ".join(above)
            lines += paragraph("next", [f"larger, and does not fit: {words}"], width)
        text = (
            "a global batch of any multiple can be computed in parts, one after the "
            "other: num_micro_batches="
        )
        return [*lines, *(paragraph("note", [text], width) if rows else ())]

    def __str__(self) -> str:
        return plain(self.lines(page_width()))

    def __repr__(self) -> str:
        return str(self)


@names_arguments("wh.largest_batch")
def largest_batch(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    clusters: Sequence[Cluster | str],
    optimizer: optax.GradientTransformation | None = None,
    prices: Mapping[str, float] | None = None,
    **options: Any,
) -> LargestBatches:
    """Finds the largest batch that fits on each cluster, with its plan and throughput.

    Args:
        loss_fn: Loss: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: NNX module, Linen variables, or any pytree. Abstract leaves suffice.
        batch: A batch of any size, for the shapes of its samples.
        clusters: Clusters, or their texts such as ``"h100:8"``.
        optimizer: Optax transformation, whose state counts as memory; default None.
        prices: Hourly price of one device, by the name of its kind.
        options: Other options of ``wh.plan``, such as ``precision="bf16"``. With
            ``num_micro_batches=n`` the batch is computed in ``n`` parts. The default is
            one part. On devices of several kinds, one part for each kind is tried too,
            so that all devices work. ``remat="none"`` finds the largest batch without
            recomputation. Nothing is offloaded unless ``offload=`` is given.

    Returns:
        A sequence with one entry for each cluster; ``print`` shows a table.

    Raises:
        WhaleError: Arguments are invalid; the message lists all problems.
        PlanError: No batch can be planned on any cluster, for another reason than
            memory.

    >>> import jax, jax.numpy as jnp, optax
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((8, 4096), jnp.float32)
    >>> found = wh.largest_batch(lambda net, x: (jnp.tanh(x @ net["w"]) ** 2).mean(),
    ...                          net, x, clusters=["t4:1"], optimizer=optax.sgd(0.1))
    >>> found[0].samples > 100_000
    True
    """
    defaults: dict[str, Any] = {"num_micro_batches": 1, "offload": ()}
    unasked = frozenset(defaults) - options.keys()
    options = {**defaults, **options}
    places = named_clusters(
        "wh.largest_batch", clusters, {} if prices is None else prices, options
    )
    request = PlanRequest(optimizer=optimizer, cluster=places[0][1], **options)
    question = dataclasses.replace(
        question_about(request, loss_fn, model, batch), unasked=unasked
    )
    is_free = "num_micro_batches" in unasked
    result = LargestBatches(
        tuple(_largest_of(question, *place, is_free) for place in places)
    )
    problems = [batch.problem for batch in result.batches if batch.plan is None]
    other = [p for p in problems if p and not isinstance(p, NothingFits)]
    if other and len(problems) == len(result):
        raise other[0]  # Memory is not the reason, so no batch size helps.
    return result


def _largest_of(
    question: PlanQuestion, name: str, cluster: Cluster, is_free: bool
) -> LargestBatch:
    counts = {question.num_micro_batches or 1}
    if is_free:
        counts.add(len(cluster.kinds))
    found = [_largest(question, name, cluster, count) for count in sorted(counts)]
    best = max(found, key=lambda batch: batch.samples)
    plans = sum(batch.num_plans for batch in found)
    return dataclasses.replace(best, num_plans=plans)


def _largest(
    question: PlanQuestion, name: str, cluster: Cluster, micro_batches: int
) -> LargestBatch:
    parts = cluster.num_devices * micro_batches
    tried: dict[int, Plan | PlanError] = {}

    def fits(samples: int) -> bool:
        if samples not in tried:
            tell(f"{name}: a batch of {samples:,}")
            try:
                tried[samples] = question.replan(
                    cluster=cluster, batch=samples, num_micro_batches=micro_batches
                )
            except PlanError as problem:
                tried[samples] = problem
        return isinstance(tried[samples], Plan)

    low = _smallest(parts, fits)
    above = [n for n, one in tried.items() if n > low and not isinstance(one, Plan)]
    high = min(above, default=0)
    most = MOST_SAMPLES // parts * parts
    while low and not high and low < most:
        larger = min(low * GROWTH, most)
        low, high = (larger, 0) if fits(larger) else (low, larger)
    unit = parts if low >= parts else 1
    while low and len(tried) < MOST_PLANS:
        kept = _layout_options(tried[low])
        if high <= low * (_COARSE if kept else CLOSENESS):
            break
        middle = _between(low, high, tried) // unit * unit
        if not low < middle < high:
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low and high:
        again = functools.partial(
            question.replan, cluster=cluster, num_micro_batches=micro_batches
        )
        finest = max(unit, low // _PARTS // unit * unit)
        low = _bisected(low, high, finest, tried, fits, again)
    plan = tried.get(low)
    not_fitting = [n for n, one in tried.items() if not isinstance(one, Plan)]
    refused = min(not_fitting, default=0)
    problem = tried.get(refused)
    result = plan if isinstance(plan, Plan) else None
    return LargestBatch(
        name=name,
        samples=low if result else 0,
        micro_batch=math.ceil(samples_at_a_time(result)) if result else 0,
        plan=result,
        next_samples=refused or None,
        problem=problem if isinstance(problem, PlanError) else None,
        num_plans=len(tried),
    )


def _layout_options(plan: Plan | PlanError) -> dict[str, Any]:
    return kept_layout(plan, {}) if isinstance(plan, Plan) else {}


def _bisected(
    low: int,
    high: int,
    unit: int,
    tried: Mapping[int, Plan | PlanError],
    fits: Callable[[int], bool],
    again: Callable[..., Plan],
) -> int:
    """Returns the largest size that fits, by bisection with a layout that fits.

    ``low`` fits and ``high`` does not. Tried sizes differ by ``unit``.
    """

    def fits_alike(samples: int, layout: Mapping[str, Any]) -> bool:
        try:
            again(batch=samples, **layout)
        except PlanError:
            return False
        return True

    while high - low > unit and len(tried) < MOST_PLANS:
        layout = _layout_options(tried[low])
        if not layout:
            break
        first, last = low, high
        while last - first > unit:
            middle = first + max(1, (last - first) // 2 // unit) * unit
            if fits_alike(middle, layout):
                first = middle
            else:
                last = middle
        # At this size another layout may be better, or fit the next size.
        if first != low and not fits(first):
            high, first = first, low
            continue
        if fits(first + unit):
            low = first + unit
        else:
            low, high = first, first + unit
    return low


def _between(low: int, high: int, tried: Mapping[int, Plan | PlanError]) -> int:
    """Returns the next size to try: where memory is full if it grows linearly.

    The estimate uses the memory of the size that does not fit, and the memory that does
    not grow with the samples. It keeps away from both ends, so that the search ends.
    """
    fitting, problem = tried[low], tried[high]
    assert isinstance(fitting, Plan)
    middle = math.sqrt(low * high)
    if not isinstance(problem, NothingFits):
        return int(middle)
    memory = fitting.memory
    constant = memory.params_bytes + memory.gradients_bytes + memory.optimizer_bytes
    needed = problem.lacks_bytes + problem.of_bytes - constant
    guess = high * (problem.of_bytes - constant) / max(1, needed)
    closest = math.sqrt(CLOSENESS)
    if guess < low * closest:
        return math.ceil(low * closest)
    return min(int(guess * 0.98), int(high / closest))


def _smallest(parts: int, fits: Callable[[int], bool]) -> int:
    samples = parts
    while samples and not fits(samples):
        samples = samples // 2
    return samples
