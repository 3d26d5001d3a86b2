"""``wh.search``: the plans of one model on several clusters, best first.

The model is traced once. Then every cluster has its own search.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import optax

from whalejax.api.plan_request import PlanQuestion, PlanRequest, question_about
from whalejax.api.plan_settings import parsed_cluster
from whalejax.api.search_result import ClusterCandidate, InfeasibleCluster, SearchResult
from whalejax.meshes import Cluster
from whalejax.meshes.arguments.near_names import ARGUMENT_SYNONYMS, near_hint
from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_number, short_repr
from whalejax.meshes.errors import Problems, WhaleError, tell, visible
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_entries import Candidate
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.ranking import best_first
from whalejax.planner.search.user_shares import samples_at_a_time, unlike_note
from whalejax.planner.sharding.layout import GRID_AXES, MESH_AXES, STAGE


@names_arguments("wh.search")
def search(
    loss_fn: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    clusters: Sequence[Cluster | str],
    optimizer: optax.GradientTransformation | None = None,
    prices: Mapping[str, float] | None = None,
    each: int = 1,
    **options: Any,
) -> SearchResult:
    """Plans a training step on several clusters, and ranks the plans.

    Args:
        loss_fn: Loss: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
        model: NNX module, Linen variables, or any pytree. Abstract leaves suffice.
        batch: GLOBAL batch, abstract or real.
        clusters: Clusters, or their texts such as ``"h100:8"``.
        optimizer: Optax transformation, whose state counts as memory; default None.
        prices: Hourly price of one device, by the name of its kind such as ``"h100"``,
            all in one currency. With prices, the result has the price of a step. Kinds
            whose cluster file has ``price_per_hour`` need none.
        each: Largest number of plans for each cluster, on different meshes. With
            ``verified=True``, the first plan of each cluster is compiled, and no other.
        options: Other options of ``wh.plan``, such as ``precision="bf16"``. With a
            fixed ``num_micro_batches``, devices of one cluster may process more samples
            at a time than devices of another. ``notes`` of the result report this.

    Returns:
        Plans, fastest step first; ``print`` shows a table. Clusters on which no plan
        fits are listed with the missing memory.

    Raises:
        WhaleError: Arguments are invalid; the message lists all problems.
        PlanError: No cluster has a plan; the message gives the reason of each.

    >>> import jax, jax.numpy as jnp
    >>> import whalejax as wh
    >>> net = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    >>> found = wh.search(lambda net, x: (x @ net["w"]).mean(), net, x,
    ...                   clusters=["h100:8", "v5p:2x2x1"], prices={"h100": 2.0})
    >>> len(found), found[0].cluster.num_devices in (4, 8)
    (2, True)
    """
    places = _places(clusters, {} if prices is None else prices, each, options)
    request = PlanRequest(optimizer=optimizer, cluster=places[0][1], **options)
    return search_on(question_about(request, loss_fn, model, batch), places, each)


def search_on(
    question: PlanQuestion, places: Sequence[tuple[str, Cluster]], each: int
) -> SearchResult:
    """Answers a question on several clusters.

    Args:
        question: Question, whose cluster is replaced.
        places: Name of each cluster, and the cluster.
        each: Largest number of plans for each cluster.

    Raises:
        PlanError: No cluster has a plan.
    """
    plans: list[tuple[str, Plan]] = []
    first: list[tuple[str, Plan]] = []
    refused: list[InfeasibleCluster] = []
    for name, cluster in places:
        tell(f"turning to {name}")
        try:
            best = question.replan(cluster=cluster)
        except PlanError as problem:
            refused.append(
                InfeasibleCluster(name=name, cluster=cluster, problem=problem)
            )
            continue
        first.append((name, best))
        plans += [(name, one) for one in (best, *_others(best, each - 1))]
    refused.sort(key=lambda one: one.lacks_bytes or math.inf)
    if not plans:
        raise _nowhere(refused)
    plans = best_first(
        plans,
        seconds=lambda pair: pair[1].time.step_seconds,
        ties=lambda pair: (
            pair[1].memory.total_bytes,
            pair[1].time.communication_seconds,
        ),
    )
    return SearchResult(
        plans=tuple(one for _, one in plans),
        names=tuple(name for name, _ in plans),
        refused=tuple(refused),
        weighed=tuple(_evaluated_candidates(first, plans)),
        notes=_notes(question, first),
    )


def _notes(
    question: PlanQuestion, first: Sequence[tuple[str, Plan]]
) -> tuple[str, ...]:
    asked = question.num_micro_batches
    if asked is None:
        return ()
    return unlike_note(asked, {name: samples_at_a_time(one) for name, one in first})


def _evaluated_candidates(
    first: Sequence[tuple[str, Plan]], plans: Sequence[tuple[str, Plan]]
) -> Iterable[ClusterCandidate]:
    places = {(name, _chosen(one)): i for i, (name, one) in enumerate(plans)}
    for name, best in first:
        for candidate in best.candidates:
            yield ClusterCandidate(
                name=name,
                cluster=best.cluster,
                candidate=candidate,
                index=places.get((name, candidate.layout)),
            )


def _chosen(one: Plan) -> str:
    return next((c.layout for c in one.candidates if c.verdict == "chosen"), "")


def _others(best: Plan, count: int) -> list[Plan]:
    result: list[Plan] = []
    tried = [mesh_of(c) for c in best.candidates if c.verdict == "chosen"]
    for candidate in best.candidates:
        mesh = mesh_of(candidate)
        if len(result) >= count:
            break
        if not candidate.fits or mesh is None or mesh in tried:
            continue
        tried.append(mesh)
        with contextlib.suppress(PlanError):  # If this mesh does not fit, others may.
            result.append(best.what_if(mesh=mesh, verified=False))
    return result


_AXIS = re.compile(rf"({'|'.join(MESH_AXES)}) ([0-9]+)")


def mesh_of(candidate: Candidate) -> dict[str, int] | None:
    """Returns the mesh of a candidate, in the form of ``wh.plan``.

    Args:
        candidate: Candidate with a layout such as ``"data 2 × tensor 4, ZeRO-1"``.

    Returns:
        Sizes by axis; ``stage`` and spatial axes occur only if the layout names them.
        None if stages have their own meshes.
    """
    words = candidate.layout.partition(",")[0]
    if "(" in words:
        return None
    sizes = {axis: int(size) for axis, size in _AXIS.findall(words)}
    always = (a for a in MESH_AXES if a in sizes or a in GRID_AXES and a != STAGE)
    return {a: sizes.get(a, 1) for a in always}


def _places(
    clusters: Sequence[Cluster | str],
    prices: Mapping[str, float],
    each: int,
    options: Mapping[str, Any],
) -> list[tuple[str, Cluster]]:
    problems = Arguments("wh.search")
    problems.whole("each", each, least=1)
    return named_clusters("wh.search", clusters, prices, options, problems)


def named_clusters(
    function: str,
    clusters: Sequence[Cluster | str],
    prices: Mapping[str, float],
    options: Mapping[str, Any],
    problems: Arguments | None = None,
) -> list[tuple[str, Cluster]]:
    """Returns clusters with their names and prices.

    Args:
        function: Name of the public function, for messages.
        clusters: Clusters or their texts.
        prices: Hourly price of one device, by the name of its kind.
        options: Other named arguments, which must be options of ``wh.plan``.
        problems: Collector of earlier errors.

    Raises:
        WhaleError: Arguments are invalid. The message lists all problems.
    """
    problems = Arguments(function) if problems is None else problems
    known = [f.name for f in dataclasses.fields(PlanRequest)]
    for name in options:
        if name == "cluster":
            problems.add("cluster= is wh.plan's; give clusters=, a list")
        elif name not in known:
            hint = near_hint(name, known, ARGUMENT_SYNONYMS) or (
                f"; expected some of {', '.join(known)}"
            )
            problems.add(f"there is no option {short_repr(name)}{hint}")
    if isinstance(clusters, str | bytes | Cluster | type) or not isinstance(
        clusters, Sequence
    ):
        said = (
            clusters.describe()
            if isinstance(clusters, Cluster)
            else short_repr(clusters)
        )
        problems.add(f"clusters is {said}; expected a list such as ['h100:8']")
        clusters = []
    elif not clusters:
        problems.add("clusters is empty; expected some, such as ['h100:8']")
    result: list[tuple[str, Cluster]] = []
    for given in clusters:
        try:
            cluster = parsed_cluster(given)
        except WhaleError as error:
            problems.add(f"clusters: {error}")
            continue
        name = visible(given) if isinstance(given, str) else cluster.describe()
        if name in (one for one, _ in result):
            problems.add(f"{name} is given twice")
        result.append((name, cluster))
    _check_prices(prices, [cluster for _, cluster in result], problems)
    problems.raise_if_any()
    return [(name, cluster.with_prices(prices)) for name, cluster in result]


def _check_prices(
    prices: Mapping[str, float], clusters: Sequence[Cluster], problems: Problems
) -> None:
    if not isinstance(prices, Mapping):
        problems.add(
            f"prices is {short_repr(prices)}; expected the hourly price of one "
            "device by the name of its kind, "
            'such as {"h100": 2.5}'
        )
        return
    kinds = list(dict.fromkeys(kind.name for c in clusters for kind in c.kinds))
    for name, price in prices.items():
        if not is_number(price) or not price > 0:
            problems.add(
                f"prices[{short_repr(name)}] is {short_repr(price)}; expected the "
                "hourly price of one "
                "device, above 0"
            )
        if clusters and name not in kinds:
            problems.add(
                f"prices has {short_repr(name)}, and the clusters have "
                f"{', '.join(kinds)}"
            )


def _nowhere(refused: Sequence[InfeasibleCluster]) -> PlanError:
    texts = {str(one.problem) for one in refused}
    if len(texts) == 1:
        return refused[0].problem
    problems = Problems("no plan on any of the clusters", PlanError)
    for one in refused:
        problems.add(f"{one.name}: {one.problem}")
    return PlanError(problems.text())
