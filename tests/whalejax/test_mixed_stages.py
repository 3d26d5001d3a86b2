"""Pipelines whose stages lie on unlike kinds: what is planned, and that it runs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from typing import Any, Final

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import whalejax as wh
from tests.equality import FLOAT64_TOLERANCE, check, on_one_device
from whalejax import jobs, models
from whalejax.meshes.device_kinds import TimedModel
from whalejax.meshes.units import gigabytes
from whalejax.planner.balance.shares import weights_hash
from whalejax.planner.plan.report.plan_traffic import traffic


pytestmark = pytest.mark.relaxed_promotion  # Flax promotes in its norms

TWO: Final = "p100-16:1+v100-32:1"


def job_of(name: str = "gpt-test", **options: Any) -> wh.Job:
    return models.job(name, batch_size=16, annotated=False, **{"layers": 2, **options})


def planned(cluster: Any, job: wh.Job | None = None, **options: Any) -> wh.Plan:
    job = job or job_of()
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0),
        optimizer=optax.sgd(0.1),
        cluster=cluster,
        **{"mesh": {"stage": 2}, **options},
    )


def blocks_of(plan: wh.Plan) -> tuple[int, ...]:
    """Which part of the cluster holds each stage."""
    assert plan.stages is not None
    return plan.stages.blocks


def counts(plan: wh.Plan) -> dict[str, int]:
    """Parts of the model by the kind that holds them, as the plan's note says."""
    notes = [n for n in plan.notes if n.startswith("stages: ")]
    (note,) = [n for n in notes if "parts of the model" in n]
    return {kind: int(n) for n, kind in re.findall(r"(\d+) on (\S+) \(", note)}


def test_stages_of_two_kinds_compute_what_one_device_does() -> None:
    """The kind that comes first holds the last stage."""
    with jax.enable_x64(True):
        wide = models.job(
            "mlp-test", batch_size=16, annotated=False, param_dtype="float64"
        )
        # Which of the two that is, is for the planner's constants to say.
        orders = "v100-32:1+p100-16:1", "p100-16:1+v100-32:1"
        (cluster,) = [c for c in orders if blocks_of(planned(c, wide)) == (1, 0)]
        one = on_one_device(wide, 4)
        found = check(one, steps=2, devices=2, mesh={"stage": 2}, cluster=cluster)
    stages = found.plan.stages
    assert stages is not None and stages.executor == "mpmd"
    assert sorted(stages.kinds) == ["P100-16", "V100-32"] and stages.blocks == (1, 0)
    assert found.error <= FLOAT64_TOLERANCE
    assert found.compilations == 1 and not found.recompiled
    runner: Any = found.step._runner
    first, second = jax.devices()[:2]
    assert [mesh.devices.item() for mesh in runner.meshes] == [second, first]
    again = wh.Plan.from_document(found.plan.document())
    assert again == found.plan


@pytest.mark.full
def test_the_plan_says_who_holds_what_and_what_that_gains() -> None:
    wide = job_of(layers=4, embed=512, mlp=2048, heads=8, sequence=128)
    plan = planned("p100-16:1+h100:1", wide)
    found = counts(plan)
    assert found["H100"] > found["P100-16"] > 0
    (note,) = [n for n in plan.notes if "equal layers" in n]
    gain, bound = map(float, re.findall(r"([\d.]+)×", note))
    assert 1 < gain <= bound
    text = str(plan)
    assert plan.stages is not None and " → ".join(plan.stages.kinds) in text
    assert note in text
    kinds = [one.cluster.kinds[0].display_name() for one in plan.stage_plans]
    assert kinds == [*plan.stages.kinds]
    shares = [
        one.memory.total_bytes / one.cluster.memory_bytes for one in plan.stage_plans
    ]
    assert plan.memory.total_bytes / plan.room_bytes == max(shares)


class Tower(nnx.Module):
    """Layers in a row, cut by marks before one of them or not at all."""

    def __init__(self, cut: int | None = None) -> None:
        self.layers = nnx.List(
            nnx.Linear(2048, 2048, use_bias=False, rngs=nnx.Rngs(0)) for _ in range(7)
        )
        self.cut = cut

    def __call__(self, x: jax.Array) -> jax.Array:
        with wh.pipeline() if self.cut else contextlib.nullcontext():
            for layers in (self.layers[: self.cut], self.layers[self.cut or 7 :]):
                with wh.stage() if self.cut else contextlib.nullcontext():
                    for layer in layers:
                        x = jnp.tanh(layer(x))
        return x


def tower(samples: int, cut: int | None = None) -> wh.Plan:
    return wh.plan(
        lambda model, x: jnp.mean(model(x)),
        nnx.eval_shape(lambda: Tower(cut)),
        jax.ShapeDtypeStruct((samples, 2048), jnp.float32),
        optimizer=optax.adam(1e-3),
        cluster=TWO,
        mesh={"stage": 2},
    )


@pytest.mark.full
@pytest.mark.parametrize("samples", [1024, pytest.param(8192, marks=pytest.mark.full)])
def test_no_mark_cuts_better(samples: int) -> None:
    """Links are slow here, and much of what crosses them does so beside the work."""

    def seconds(cut: int | None) -> float:
        return tower(samples, cut).time.step_seconds

    # Operations between parameters may lie on either side of a mark.
    assert seconds(None) <= 1.01 * min(seconds(cut) for cut in range(1, 7))


@pytest.mark.full
def test_traffic_is_that_of_every_stage() -> None:
    wide = job_of(layers=4, embed=512, mlp=2048, heads=8, sequence=128)
    options: Any = {"cluster": "h100:4+a100-80:4", "job": wide}
    plan = planned(mesh={"data": 1, "stage": 2, "tensor": 2}, **options)
    found = {(row.sort, home): row for row in traffic(plan) for home in row.where}
    for number, own in enumerate(plan.stage_plans):
        for sort, nbytes in sums(own, plan.num_micro_batches).items():
            assert found.pop((sort, (None, number))).nbytes == nbytes
    assert plan.stages is not None
    pace, count = plan.stages.paces[1], plan.num_micro_batches
    assert {row.what: row.nbytes for row in found.values()} == {
        "activation": count * pace.handed_bytes,
        "gradient": count * pace.returned_bytes,
    }
    assert {row.route_text for row in found.values()} == {
        "to stage 1",
        "back from stage 1",
    }
    handed = next(row for row in found.values() if row.what == "activation")
    assert handed.seconds == pytest.approx(count * plan.stages.handed_seconds)
    assert handed.links == ("infiniband",)
    assert "tensor 2" in str(plan)
    across = "from stage to stage: point to point, at most "
    assert plan.describe().count(across) == 2
    other = planned(mesh={"stage": 2, "tensor": 4}, **options)
    assert "hand-over over stage of activation" in str(plan.diff(other))


def sums(own: wh.Plan, count: int) -> collections.Counter[Any]:
    """Bytes of a stage's collectives in so many micro-batches, by sort."""
    counted = dataclasses.replace(own, num_micro_batches=count)
    found = collections.Counter[Any]()
    for c in own.collectives:
        found[c.kind, c.axes, c.what] += c.payload_bytes * counted.times(c)
    return found


@pytest.mark.full
def test_traffic_of_pipelines_side_by_side_is_that_of_each() -> None:
    plan = planned(
        "v100-32:2+p100-16:2+p100-16:4",
        job_of(layers=4, embed=256, mlp=1024, heads=8),
        mesh={"stage": 2, "tensor": 2},
        shares=[1, 3],
        num_micro_batches=4,
    )
    assert len(plan.pipelines) == 2
    rows = traffic(plan)
    found = {(row.sort, home): row for row in rows for home in row.where}
    for number, (one, share) in enumerate(
        zip(plan.pipelines, plan.shares, strict=True)
    ):
        for stage, own in enumerate(one.stage_plans):
            for sort, nbytes in sums(own, share).items():
                assert found.pop((sort, (number, stage))).nbytes == nbytes
    assert {sort[0] for sort, _ in found} == {"hand-over"}
    (own,) = [row for row in rows if not row.where]
    assert own.sort == ("all-reduce", ("data",), "gradient") and own.times == 1
    sort = "all-reduce", ("tensor",), "activation"
    most = max(row.nbytes for row in rows if row.sort == sort)
    assert f"all-reduce over tensor, at most {gigabytes(most)}" in plan.describe()


def test_a_tied_table_is_copied_once_in_a_step() -> None:
    """Its gradient goes back, and both count where nothing hides them."""

    def tied(net: Any, batch: Any) -> Any:
        with wh.pipeline(num_micro_batches=4):
            with wh.stage():
                x = jnp.take(net["table"], batch, axis=0)
            with wh.stage():
                x = x @ net["own" if "own" in net else "table"].T
                return -jax.nn.log_softmax(x)[:, :, 0].mean()

    def plan_of(*names: str) -> wh.Plan:
        leaf = jax.ShapeDtypeStruct((32768, 64), jnp.float32)
        batch = jax.ShapeDtypeStruct((32, 16), jnp.int32)
        options: Any = {"optimizer": optax.adam(1e-3), "cluster": TWO}
        return wh.plan(tied, dict.fromkeys(names, leaf), batch, **options)

    plan, apart = plan_of("table"), plan_of("table", "own")
    assert plan.stages is not None and apart.stages is not None
    nbytes = 32768 * 64 * 4
    assert [pace.copied_bytes for pace in plan.stages.paces] == [0, nbytes]
    assert not any(pace.copied_bytes for pace in apart.stages.paces)
    rows = {row.what: row for row in traffic(plan) if row.what.startswith("tied")}
    assert {row.nbytes for row in rows.values()} == {nbytes} and len(rows) == 2
    seconds = rows["tied parameter"].seconds
    assert seconds == pytest.approx(nbytes / 4.57e9, rel=0.01)
    waits = plan.time.parameter_seconds, plan.time.gradient_seconds
    assert 0 < min(waits) and max(waits) <= seconds
    assert plan.time.step_seconds > apart.time.step_seconds + seconds
    assert "parameters that several stages read: point to point" in plan.describe()
    assert "stage 1 reads it too" in plan.why("table")


@pytest.mark.full
def test_links_of_stages_are_those_between_their_devices() -> None:
    """What all stages have inside, their places are not multiplied by again."""
    mesh = dict.fromkeys(("data", "fsdp", "expert", "context"), 1)
    plan = planned(
        "h100:2x8",
        job_of(layers=4),
        mesh={**mesh, "stage": 4, "tensor": 2},
        allow_idle=True,
    )
    assert plan.axis_sizes == {"stage": 4, "tensor": 2} and plan.stages is not None
    rows = [row for row in traffic(plan) if row.what == "activation" and row.where]
    handed = [row for row in rows if row.kind == "hand-over"]
    assert {row.links for row in handed} == {("nvlink",)}
    # Means over what a stage is handed, beside the longest of all.
    longest = plan.stages.handed_seconds
    means = [row.seconds / row.times for row in handed]
    assert 0.9 * longest <= max(means) <= longest
    assert "stage 4 crosses nvlink" in str(plan)


@pytest.mark.full
@pytest.mark.parametrize(
    ("cluster", "stages", "used"),
    [("h100:2x8", 3, 15), ("v100-32:2+p100-16:2", 3, 3), ("v5e:2x4", 3, 6)],
)
def test_stages_that_leave_devices_idle_on_purpose(
    cluster: str, stages: int, used: int
) -> None:
    options: Any = {"mesh": {"stage": stages}, "job": job_of(layers=4)}
    with pytest.raises(wh.WhaleError, match="allow_idle=True"):
        planned(cluster, **options)
    assert planned(cluster, allow_idle=True, **options).num_devices == used


def test_pipelines_side_by_side_leave_none_idle_unasked() -> None:
    def tower(net: Any, x: Any) -> Any:
        with wh.pipeline(num_stages=2):
            for kernel in net:
                x = jnp.tanh(x @ kernel)
        return x.mean()

    net, x = [jnp.zeros((64, 64))] * 4, jnp.zeros((16, 64))
    cluster = "v100-32:3+p100-16:2"
    with pytest.raises(wh.WhaleError, match="allow_idle=True"):
        wh.plan(tower, net, x, cluster=cluster)
    plan = wh.plan(tower, net, x, cluster=cluster, allow_idle=True)
    assert plan.num_devices == 4


def test_two_cuts_of_one_layout_are_one_candidate() -> None:
    plan = tower(1024)
    layouts = [one.layout for one in plan.candidates]
    assert len(layouts) == len({*layouts}) > 2
    runner_up = plan.runner_up
    assert runner_up is not None and runner_up.layout != layouts[0]


@pytest.mark.full
def test_measured_times_decide_where_all_kinds_have_them() -> None:
    """One kind is said to be slow by its data sheet, and was measured to be fast."""
    before = planned(TWO)
    weights = weights_hash(before.leaves)

    def timed(ratios: dict[str, float]) -> wh.Cluster:
        machine = wh.cluster(TWO)
        nodes = [
            dataclasses.replace(
                node,
                kind=dataclasses.replace(
                    node.kind,
                    timed_models=(
                        TimedModel(
                            weights=weights,
                            samples=1,
                            seconds=ratios[node.kind.name],
                            predicted_seconds=1.0,
                        ),
                    )
                    if node.kind.name in ratios
                    else (),
                ),
            )
            for node in machine.nodes
        ]
        return dataclasses.replace(machine, nodes=tuple(nodes))

    after = planned(timed({"v100-32": 8.0, "p100-16": 1.0}))
    assert counts(after)["V100-32"] < counts(after)["P100-16"]
    assert after.time.step_seconds > before.time.step_seconds
    assert any(
        "stages: by measured times of this model's own samples" in n
        for n in after.notes
    )
    some = planned(timed({"v100-32": 8.0}))
    assert counts(some) == counts(before)
    assert any("was not timed on P100-16" in n for n in some.notes)


@pytest.mark.full
def test_a_fast_kind_with_little_memory_gets_what_fits() -> None:
    """Stages are cut again until what a search knows of their memory fits too."""
    job = job_of(layers=4)
    machine = wh.cluster("v100-32:1+p100-16:1")

    def limited(nbytes: int) -> wh.Cluster:
        fast, slow = machine.nodes
        small = dataclasses.replace(fast.kind, memory_bytes=nbytes)
        return dataclasses.replace(
            machine, nodes=(dataclasses.replace(fast, kind=small), slow)
        )

    options: Any = {"num_micro_batches": 4, "remat": "none"}
    roomy = planned(machine, job, **options)
    need = next(
        one.memory.total_bytes
        for one in roomy.stage_plans
        if one.cluster.kinds[0].name == "v100-32"
    )
    tight = planned(limited(need * 3 // 5), job, **options)
    held = next(
        one for one in tight.stage_plans if one.cluster.kinds[0].name == "v100-32"
    )
    assert held.memory.total_bytes <= need * 3 // 5
    assert counts(tight)["V100-32"] < counts(roomy)["V100-32"]
    assert tight.time.step_seconds > roomy.time.step_seconds
    with pytest.raises(wh.WhaleError, match=r"needs .* on a device and there are"):
        planned(limited(1000), job, **options)


@pytest.mark.parametrize(
    ("cluster", "mesh", "schedule", "words"),
    [
        (
            "v100-32:1+p100-16:3",
            {"stage": 2, "fsdp": 2},
            None,
            r"one stage would have devices 0 to 1, which are .*of every kind into full",
        ),
        (
            TWO,
            {"stage": 2},
            "interleaved",
            "stages on devices of several kinds have one",
        ),
    ],
)
def test_what_cannot_be_is_said(
    cluster: str, mesh: dict[str, int], schedule: str | None, words: str
) -> None:
    job = job_of()
    mark = wh.pipeline(schedule=schedule or "auto")

    def loss(model: Any, batch: Any) -> Any:
        with mark:
            return job.loss_fn(model, batch)

    with pytest.raises(wh.WhaleError, match=words):
        planned(cluster, dataclasses.replace(job, loss_fn=loss), mesh=mesh)


def test_shares_are_those_of_whole_pipelines() -> None:
    words = "2 devices do not divide into 2 pipelines of 2 equal stages"
    with pytest.raises(wh.WhaleError, match=words):
        planned(TWO, shares=[3, 1])
    job = job_of()
    pipeline = wh.pipeline()

    def loss(model: Any, batch: Any) -> Any:
        with pipeline:
            return job.loss_fn(model, batch)

    with pytest.raises(wh.WhaleError, match="but the number of stages is not fixed"):
        planned(TWO, dataclasses.replace(job, loss_fn=loss), shares=[3, 1], mesh=None)


def test_stages_hold_what_replicas_cannot() -> None:
    """Nobody asks for either: replicas where they fit, as they are faster here."""

    def loss(model: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ model["up"])
        return ((hidden @ model["down"] - batch["y"]) ** 2).mean()

    shape = jax.ShapeDtypeStruct
    model = {"up": shape((256, 1024), "float32"), "down": shape((1024, 256), "float32")}
    batch = {name: shape((1024, 256), "float32") for name in "xy"}

    def chosen(nbytes: int) -> wh.Plan:
        machine = wh.cluster("v100-32:1+p100-16:1")
        fast, slow = machine.nodes
        small = dataclasses.replace(slow.kind, memory_bytes=nbytes)
        nodes = fast, dataclasses.replace(slow, kind=small)
        return wh.plan(
            loss,
            model,
            batch,
            optimizer=optax.adam(1e-3),
            cluster=dataclasses.replace(machine, nodes=nodes),
        )

    roomy, tight = chosen(20_000_000), chosen(8_000_000)
    assert roomy.shares and roomy.stages is None
    assert tight.stages is not None and len(set(tight.stages.kinds)) == 2
    small = next(p for p in tight.stage_plans if p.cluster.kinds[0].name == "p100-16")
    assert small.memory.total_bytes <= 8_000_000
    weighed = [c for c in tight.candidates if "data 2" in c.layout]
    assert not any(c.fits and c.verdict == "chosen" for c in weighed)


@pytest.mark.full
@pytest.mark.parametrize("scan", [True, False])
def test_a_loop_that_leaves_stages_uneven_is_named(scan: bool) -> None:
    sizes = {"layers": 4, "embed": 512, "heads": 8, "sequence": 256}
    job = models.job("llama-test", scan_layers=scan, **sizes)
    warned = pytest.warns(UserWarning, match="one of 2 stages takes")
    with warned if scan else contextlib.nullcontext():
        plan = wh.plan(
            job.loss_fn,
            jobs.abstract_model(job),
            jax.eval_shape(lambda: job.batch_at(0, 32)),
            optimizer=optax.adam(1e-3),
            cluster="v100-32:1+p100-16:1",
            mesh={"stage": 2},
        )
    said = [note for note in plan.notes if note.startswith("one of 2 stages takes")]
    assert bool(said) == scan
    assert all("scan_layers=False" in note and note in str(plan) for note in said)
