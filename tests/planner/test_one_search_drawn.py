"""What ``test_one_search`` holds of named models, over drawn ones: hypothesis looks.

A plan equals its own row, a row equals what planning it alone gives, and no mesh and
level of ZeRO planned by itself beats the plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from tests.planner.graphs import stacked
from tests.planner.plans import batch_leaves
from tests.planner.test_one_search import choices, own_row
from whalejax.estimates.decoder import DecoderSizes, decoder_graph
from whalejax.meshes import Cluster, cluster
from whalejax.planner.model.graph import Graph
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.spmd_plan import decide
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.search.layout_search import meshes
from whalejax.planner.search.ranking import TIE
from whalejax.planner.search.request import Request
from whalejax.planner.sharding.parameter_layout import OptimizerBytes


def decoder(batch: int, regions: int = 1, **sizes: int) -> Graph:
    """A decoder in one TaskGraph, or with the head in one of its own."""
    given_sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "vocab": 512, **sizes}
    shape = DecoderSizes(**given_sizes)  # type: ignore[arg-type]
    graph = stacked(decoder_graph(shape, batch), shape.layers)
    head = len(graph.task_graphs) - 1
    return dataclasses.replace(
        graph,
        ops=tuple(
            dataclasses.replace(
                op, task_graph=int(regions > 1 and op.task_graph == head)
            )
            for op in graph.ops
        ),
        task_graphs=tuple(
            dataclasses.replace(region, index=index)
            for index, region in enumerate(graph.task_graphs[:regions])
        ),
    )


def request_of(graph: Graph, machine: Cluster, cast_bytes: float = 1.0) -> Request:
    return Request(
        optimizer=OptimizerBytes(by_path={t.path: 4 * t.size for t in graph.params}),
        num_devices=machine.num_devices,
        cast_bytes=cast_bytes,
    )


def with_memory(machine: Cluster, device: float, host: float | None) -> Cluster:
    """The same devices with so many bytes, on them and on their hosts."""
    kinds = {
        kind.name: dataclasses.replace(
            kind,
            memory_bytes=int(device),
            host_memory_bytes=None if host is None else int(host),
            host_link_bytes_per_second=16e9,
        )
        for kind in machine.kinds
    }
    nodes = tuple(
        dataclasses.replace(node, kind=kinds[node.kind.name]) for node in machine.nodes
    )
    return dataclasses.replace(machine, nodes=nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A graph, a machine and a request."""

    graph: Graph
    machine: Cluster
    request: Request

    def plan(self, **fixed: Any) -> Plan | None:
        request = dataclasses.replace(self.request, **fixed)
        try:
            batch = batch_leaves(self.graph)
            return decide(self.graph, self.machine, request, batch=batch)
        except PlanError:
            return None


CHOICES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 4),
        "regions": st.sampled_from([1, 2]),
        "layers": st.integers(1, 2),
        "hidden": st.sampled_from([256, 1024]),
        "vocab": st.sampled_from([512, 32_000]),
        "seq": st.sampled_from([128, 1024]),
        "text": st.sampled_from(["h100:2", "v5e:2x2", "v100-32:3"]),
        "room": st.sampled_from([1.5, 4.0, 20.0]),
        "host": st.sampled_from([None, 4.0]),
        "cast": st.sampled_from([1.0, 0.5]),
        "zero": st.sampled_from([None, None, 1]),
        "mesh": st.sampled_from([None, None, {"tensor": 2}]),
    }
)
"""Decoders of one or two layers on two to four devices, some of it fixed."""


def drawn(
    *,
    batch: int,
    regions: int,
    text: str,
    room: float,
    host: float | None,
    cast: float,
    zero: int | None,
    mesh: dict[str, int] | None,
    **sizes: int,
) -> Drawn:
    """The question of some choices; memory is in sizes of all parameters."""
    graph = decoder(batch, regions, ffn=768, **sizes)
    whole = sum(t.nbytes for t in graph.params)
    machine = with_memory(cluster(text), room * whole, host and host * whole)
    request = request_of(graph, machine, cast)
    request = dataclasses.replace(request, zero=zero, mesh=mesh)
    return Drawn(graph=graph, machine=machine, request=request)


@pytest.mark.full
@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(chosen=CHOICES)
def test_rows_and_plans_of_drawn_questions_say_the_same(chosen: dict[str, Any]) -> None:
    asked = drawn(**chosen)
    runs = asked.plan()
    assume(runs is not None)
    assert runs is not None
    assert own_row(runs).time == runs.time
    assert own_row(runs).memory == runs.memory
    for row in [c for c in runs.candidates if c.fits][:2]:
        alone = asked.plan(**_of(row.layout))
        assert alone is not None
        assert alone.time.step_seconds == pytest.approx(row.step_seconds, rel=1e-9)
        assert alone.memory == row.memory


def _of(layout: str) -> dict[str, Any]:
    """What a row fixes, of a graph that is not computed again."""
    fixed = choices(layout)
    return {k: v for k, v in fixed.items() if k in ("mesh", "zero", "offload")} | {
        "num_micro_batches": fixed["num_micro_batches"],
        "sequence_parallel": fixed["sequence_parallel"],
    }


@pytest.mark.full
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(chosen=CHOICES)
def test_no_mesh_planned_by_itself_beats_the_plan(chosen: dict[str, Any]) -> None:
    asked = drawn(**chosen)
    runs = asked.plan()
    assume(runs is not None)
    assert runs is not None
    fixed = asked.request.mesh or {}
    levels = (0, 1, 2) if asked.request.zero is None else (asked.request.zero,)
    # The sequence is sharded where it must be, not wherever that is faster.
    assume(runs.axis_sizes.get("context", 1) == 1)
    every = meshes(asked.request.num_devices)
    for mesh, zero in itertools.product(every, levels):
        if fixed.items() <= mesh.items() and (not zero or mesh["data"] > 1):
            alone = asked.plan(mesh=mesh, zero=zero)
            if alone is not None:
                least = alone.time.step_seconds * (1 + TIE)
                assert runs.time.step_seconds <= least, alone.candidates[0].layout
