"""``wh.search``: several clusters, ranked, with prices and refusals."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import whalejax as wh
from whalejax.api.search import mesh_of
from whalejax.api.search_result import SearchResult
from whalejax.planner.plan.report.search_data import price_text
from whalejax.planner.plan_errors import NothingFits


CLUSTERS = ["h100:8", "h100:2x8", "v5p:2x2x1"]


def loss(net: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    for name in ("first", "second"):
        x = jax.nn.relu(x @ net[name])
    return jnp.mean(x)


MODEL = {
    "first": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
    "second": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
}
BATCH = jax.ShapeDtypeStruct((512, 1024), jnp.float32)


def searched(clusters: Any = CLUSTERS, **options: Any) -> SearchResult:
    return wh.search(
        loss,
        MODEL,
        BATCH,
        optimizer=optax.sgd(1e-3, momentum=0.9),
        clusters=clusters,
        **options,
    )


@cache
def priced() -> SearchResult:
    small = wh.cluster("v100-32:2").with_memory(10**6)
    return searched([*CLUSTERS, small], prices={"h100": 3.0}, each=2)


@pytest.mark.smoke
def test_plans_are_ranked_by_step_time() -> None:
    found = priced()
    steps = [plan.time.step_seconds for plan in found]
    assert len(found) == len(steps) == 6
    # Half a percent is a tie, which less memory wins.
    assert all(a <= b * 1.0051 for a, b in zip(steps, steps[1:], strict=False))
    assert found[0] is next(iter(found)) and found[1:] == found.plans[1:]
    assert {plan.cluster.num_devices for plan in found} == {4, 8, 16}


def test_plans_are_those_of_each_cluster_alone() -> None:
    found = searched()
    for name, plan in zip(found.names, found, strict=True):
        alone = wh.plan(
            loss, MODEL, BATCH, optimizer=optax.sgd(1e-3, momentum=0.9), cluster=name
        )
        assert plan.hash == alone.hash and plan.time == alone.time


def test_each_cluster_gives_plans_on_different_meshes() -> None:
    found = priced()
    for name in CLUSTERS:
        meshes = [p.axes for p, n in zip(found, found.names, strict=True) if n == name]
        assert len(meshes) == len(set(meshes)) == 2


def test_every_candidate_of_every_cluster_is_kept() -> None:
    found = priced()
    best = dict(zip(found.names[::-1], found.plans[::-1], strict=True))
    assert set(best) == {one.name for one in found.weighed} == set(CLUSTERS)
    for one in found.weighed:
        assert one.cluster.num_devices == best[one.name].cluster.num_devices
        costs = one.costs(3)
        assert costs == tuple(sorted(costs, key=lambda pair: -pair[1]))
        assert costs[0][1] == max(dataclasses.asdict(one.candidate.time).values())
    linked = [one for one in found.weighed if one.index is not None]
    assert len(linked) == len(found)
    for one in linked:
        assert one.index is not None
        plan = found[one.index]
        assert plan.time.step_seconds == pytest.approx(one.candidate.step_seconds)
        mesh = mesh_of(one.candidate)
        assert mesh is not None
        assert {a: n for a, n in mesh.items() if n > 1} == plan.axis_sizes


def test_a_cluster_where_nothing_fits_says_what_lacks() -> None:
    (refused,) = priced().refused
    assert isinstance(refused.problem, NothingFits)
    assert refused.lacks_bytes == refused.problem.lacks_bytes > 0
    assert refused.problem.of_bytes == 10**6
    assert refused.reason.startswith("lacks ") and "of 1 MB device memory" in (
        refused.reason
    )
    line = str(priced()).splitlines()[-1]
    assert line == f"no plan on {refused.name}: {refused.reason}"


def test_prices_are_of_all_devices_for_the_step() -> None:
    found = priced()
    for index, plan in enumerate(found):
        price = found.step_price(index)
        if plan.cluster.platform == "tpu":
            assert price is None
        else:
            hour = 3.0 * plan.cluster.num_devices
            assert price == pytest.approx(plan.time.step_seconds * hour / 3600)
    head, *rows = str(found).splitlines()
    assert "price a step" in head and head.endswith("a million samples")
    assert sum(row.endswith("–") for row in rows) == 2
    assert "price" not in str(searched(["v100-32:8"]))  # which has no public price
    assert "USD" in str(searched(["h100:8"]))


def test_the_document_is_json_that_plans_can_be_read_from() -> None:
    found = priced()
    data = json.loads(json.dumps(found.document()))
    again = wh.Plan.from_document(data["plans"][0]["plan"])
    assert again.hash == found[0].hash
    assert again.cluster.price_per_hour == found[0].cluster.price_per_hour
    assert data["refused"][0]["lacks_bytes"] == found.refused[0].lacks_bytes
    assert len(data["weighed"]) == len(found.weighed)


def test_a_plan_that_was_not_found() -> None:
    with pytest.raises(IndexError, match="there is no plan 9: 6 were found"):
        priced()[9]


def test_every_problem_of_what_is_given_is_listed() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        searched(
            ["h100:8", "h100:8", "h1000:2"],
            prices={"v5e": 1.0, "h100": -2},
            each=0,
            cluster="h100:8",
            precison="bf16",
        )
    text = str(caught.value)
    assert "wh.search: 7 problems" in text
    for words in (
        "h100:8 is given twice",
        "unknown device kind 'h1000'",
        "prices has 'v5e', and the clusters have h100",
        "prices['h100'] is -2; expected the hourly price of one device, above 0",
        "each is 0; expected a whole number, 1 or more",
        "cluster= is wh.plan's; give clusters=, a list",
        "there is no option 'precison'. Did you mean 'precision'?",
    ):
        assert words in text, words


@pytest.mark.parametrize("clusters", ["h100:8", [], None])
def test_clusters_that_are_no_list(clusters: Any) -> None:
    with pytest.raises(wh.WhaleError, match=r"clusters is .*expected"):
        searched(clusters)


def test_where_nothing_fits_anywhere_every_cluster_says_why() -> None:
    small = [wh.cluster(text).with_memory(10**6) for text in ("h100:2", "v5p:2x1x1")]
    with pytest.raises(wh.PlanError) as caught:
        searched(small)
    text = str(caught.value)
    assert "no plan on any of the clusters: 2 problems" in text
    assert text.count("no plan fits") == 2 and "2×H100" in text


def test_what_no_cluster_can_do_is_said_once() -> None:
    with pytest.raises(wh.WhaleError, match="precision is 'f8'") as caught:
        searched(precision="f8")
    assert str(caught.value).count("f8") == 1


def test_prices_of_a_cluster_file_are_read_and_written(tmp_path: Any) -> None:
    path = tmp_path / "priced.toml"
    path.write_text(
        '[kinds.mine]\nbase = "h100"\nprice_per_hour = 1.25\n'
        '[[nodes]]\nkind = "mine"\ncount = 4\n'
    )
    cluster = wh.Cluster.load(path)
    assert cluster.price_per_hour == 5.0
    cluster.save(tmp_path / "again.toml")
    assert wh.Cluster.load(tmp_path / "again.toml") == cluster
    assert cluster.hash == wh.Cluster.from_json(cluster.to_json()).hash
    path.write_text(path.read_text().replace("1.25", "-1.0"))
    with pytest.raises(wh.WhaleError, match=r"price_per_hour: got -1\.0, expected"):
        wh.Cluster.load(path)


def test_the_catalogue_has_no_prices() -> None:
    assert wh.cluster("h100:8").price_per_hour is None
    mixed = wh.cluster("v100-32:8+p100-16:8").with_prices({"p100-16": 1.0})
    assert mixed.price_per_hour is None


@pytest.mark.parametrize(
    ("price", "text"), [(None, "–"), (0.0123456, "0.0123 USD"), (12.0, "12 USD")]
)
def test_prices_in_words(price: float | None, text: str) -> None:
    assert price_text(wh.cluster("h100:8"), price) == text
    own = wh.cluster("h100:8").with_prices({"h100": 1.0})
    assert price_text(own, price) == text.removesuffix(" USD")
    assert price_text(wh.cluster("cpu:8"), price) == "–"


def test_one_number_of_micro_batches_that_means_several_sizes() -> None:
    """Where replicas have shares, each takes whole micro-batches."""
    clusters = ["v100-32:4", "p100-16:4", "v100-32:4+p100-16:4"]
    found = searched(clusters, num_micro_batches=16, mesh={"tensor": 1, "fsdp": 1})
    (note,) = found.notes
    assert note == (
        "num_micro_batches=16 is not the same everywhere: a device does the work "
        "of 8 samples at a time on v100-32:4 and p100-16:4, 32 on "
        "v100-32:4+p100-16:4. To compare step times, leave it out, or give each "
        "cluster its own number"
    )
    assert found.document()["notes"] == [note]
    assert " ".join(str(found).split()).endswith(f"note {note}")
    assert not searched(clusters[:2], num_micro_batches=16).notes
    # The same where a model axis shares the work of the samples.
    (note,) = searched(clusters, num_micro_batches=16, mesh={}).notes
    assert "is not the same everywhere" in note


def test_what_if_says_so_too() -> None:
    options = {"optimizer": optax.sgd(1e-3), "mesh": {"tensor": 1, "fsdp": 1}}
    plan = wh.plan(
        loss, MODEL, BATCH, cluster="v100-32:4", num_micro_batches=16, **options
    )
    mixed = "v100-32:4+p100-16:4"
    assert (
        "num_micro_batches=16 is not the same" in plan.what_if(cluster=mixed).notes[-1]
    )
    for one in (
        plan.what_if(cluster="p100-16:4"),
        plan.what_if(cluster=mixed, num_micro_batches=16),
        plan.what_if(batch=256),
    ):
        assert not any("is not the same" in note for note in one.notes)
    free = wh.plan(loss, MODEL, BATCH, cluster="v100-32:4", **options)
    again = free.what_if(cluster=mixed)
    assert not any("is not the same" in note for note in again.notes)
