"""Plans with made-up numbers, and what displays say of them, for golden tests.

The numbers are fixed here, so that displays change only where displays are changed.
``python -m tests.planner.pages`` writes the files anew that the tests compare with.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final
from unittest import mock

from whalejax.api.search_result import ClusterCandidate, InfeasibleCluster, SearchResult
from whalejax.meshes import Cluster, CompilerProfile, Level, Node, device_kind
from whalejax.planner.cost_terms import MemoryTerms, TimeTerms
from whalejax.planner.plan.plan import Plan, Stages
from whalejax.planner.plan.report.plan_page import plan_lines
from whalejax.planner.plan.report.text_layout import plain
from whalejax.planner.plan_entries import (
    BatchLeaf,
    Candidate,
    Collective,
    LeafPlan,
    RegionTable,
)
from whalejax.planner.plan_entries import RoleInfo as Role
from whalejax.planner.plan_errors import NothingFits


FOLDER: Final = Path(__file__).parent / "golden"

COMPILER: Final = CompilerProfile(merge_partials=True, reduce_scatter=True)


def cluster(nodes: int = 4, each: int = 8) -> Cluster:
    """Nodes of made-up links."""
    kind = dataclasses.replace(
        device_kind("h100"), memory_bytes=80 * 10**9, price_per_hour=2.0
    )
    inside = Level(
        name="nvlink",
        size=each,
        bandwidth_bytes_per_second=4e11,
        latency_seconds=1e-6,
    )
    outside = dataclasses.replace(
        inside, name="infiniband", size=nodes, bandwidth_bytes_per_second=5e10
    )
    return Cluster(
        nodes=(Node(kind=kind, count=each),) * nodes,
        levels=(inside, outside) if nodes > 1 else (inside,),
        compiler=COMPILER,
    )


def leaf(path: str, shape: tuple[int, ...], *axes: str, **more: object) -> LeafPlan:
    """A parameter; ``axes`` shard its dimensions where it is used and stored."""
    spec = tuple(tuple(a.split("+")) if a else () for a in axes)
    roles = tuple((f"dim{i}",) for i in range(len(shape)))
    made = LeafPlan(
        path=path,
        shape=shape,
        dtype="float32",
        roles=roles,
        compute_spec=spec,
        param_spec=spec,
        gradient_spec=spec,
        optimizer_spec=spec,
        summed=("data", "fsdp"),
    )
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def moved(kind: str, axes: str, what: str, nbytes: int, count: int) -> Collective:
    """A collective of the backward pass, or a gather of the forward pass."""
    return Collective(
        kind=kind,  # type: ignore[arg-type]
        axes=tuple(axes.split("+")),
        phase="forward" if what == "parameter" else "backward",
        what=what,
        payload_bytes=nbytes,
        count=count,
    )


def layers(count: int) -> tuple[LeafPlan, ...]:
    """Equal layers between an embedding and a head."""
    stored = (("fsdp",), ("tensor",))
    used = ((), ("tensor",))
    found = [leaf("embed.table", (32_000, 4096), "", "", note="dim 0 does not divide")]
    for i in range(count):
        sharded = dict(
            compute_spec=used,
            param_spec=stored,
            gradient_spec=stored,
            optimizer_spec=stored,
            gathers=2,
        )
        found += [
            leaf(f"blocks.{i}.up.kernel", (4096, 16_384), "", "tensor", **sharded),
            leaf(f"blocks.{i}.down.kernel", (16_384, 4096), "tensor", ""),
            leaf(f"blocks.{i}.norm.scale", (4096,), ""),
        ]
    return (*found, leaf("head.kernel", (4096, 32_000), "", "tensor"))


TIME: Final = TimeTerms(
    compute_seconds=0.361, parameter_seconds=0.038, gradient_seconds=0.009
)
MEMORY: Final = MemoryTerms(
    params_bytes=1_058_078_720,
    optimizer_bytes=24_300_000_000,
    activations_bytes=29_600_000_000,
    working_bytes=5_200_000_000,
)


CANDIDATES: Final = (
    Candidate(
        layout="data 4 × fsdp 2 × tensor 4, 2 micro-batches",
        time=TIME,
        memory=MEMORY,
        fits=True,
        verdict="chosen",
    ),
    Candidate(
        layout="data 8 × tensor 4, 2 micro-batches",
        time=dataclasses.replace(TIME, gradient_seconds=0.021),
        memory=dataclasses.replace(MEMORY, params_bytes=3_958_078_720),
        fits=True,
        verdict="12.00 ms slower (gradient)",
    ),
)


def region(name: str, mark: str, **axes: str) -> RegionTable:
    """A TaskGraph whose batch ``data`` shards, and what other axes shard."""
    tables = [("data", ("batch",)), *((axis, (role,)) for axis, role in axes.items())]
    marks = (mark,) if mark else ()
    return RegionTable(task_graph=name, marks=marks, axes=tuple(tables))


def spmd() -> Plan:
    """One program on 32 devices, with marks, some of which change nothing."""
    return Plan(
        model_hash="0123456789abcdef",
        cluster=cluster(),
        axes=(("data", 4), ("fsdp", 2), ("tensor", 4)),
        num_micro_batches=2,
        zero=0,
        remat=(("*", "dots"),),
        precision="bf16",
        default="",
        roles=(
            Role(name="batch", size=512),
            Role(name="tokens[1]", size=129, unshardable="slice needs it whole"),
        ),
        compute=(
            region("default", "", fsdp="batch", tensor="mlp"),
            region("head", "split()", fsdp="batch", tensor="vocab"),
            region("norms", "split()"),
        ),
        storage=(("fsdp", ("embed", "mlp")),),
        leaves=layers(4),
        batch=(
            BatchLeaf(
                path="tokens", shape=(512, 129), dtype="int32", spec=(("data",), ())
            ),
        ),
        collectives=(
            moved("all-gather", "fsdp", "parameter", 67_108_864, 8),
            moved("reduce-scatter", "fsdp", "gradient", 268_435_456, 1),
            moved("all-reduce", "data", "gradient", 1_000_000_000, 1),
            moved("all-reduce", "tensor", "activation", 33_554_432, 16),
        ),
        time=TIME,
        memory=MEMORY,
        candidates=CANDIDATES,
        notes=(
            "1 marked TaskGraph obeyed",
            "norms: split() has no effect: it covers no dimension that can be sharded",
            "the loss: its statistics over the batch are per micro-batch of 256",
        ),
    )


def _stored(plan: Plan) -> Plan:
    """The plan with the memory that its parameters take: others are not read back."""
    sizes = plan.axis_sizes
    stored = sum(
        one.nbytes
        // math.prod(sizes[axis] for entry in one.param_spec for axis in entry)
        for one in plan.leaves
    )
    memory = dataclasses.replace(plan.memory, params_bytes=stored)
    return dataclasses.replace(plan, memory=memory)


def other() -> Plan:
    """The same model on the same devices in another layout."""
    plan = spmd()
    changed = dataclasses.replace(
        plan,
        axes=(("data", 8), ("tensor", 4)),
        num_micro_batches=4,
        zero=1,
        remat=(("*", "full"),),
        leaves=tuple(
            dataclasses.replace(
                one,
                param_spec=one.compute_spec,
                gradient_spec=one.compute_spec,
                optimizer_spec=one.compute_spec,
                summed=("data",),
                gathers=0,
            )
            for one in plan.leaves
        ),
        collectives=plan.collectives[2:],
        time=dataclasses.replace(TIME, compute_seconds=0.44, parameter_seconds=0.0),
        memory=dataclasses.replace(MEMORY, activations_bytes=9_000_000_000),
    )
    return _stored(changed)


def staged() -> Plan:
    """Four stages that share one program, unequal layers."""
    plan = other()
    stages = Stages(
        schedule="1f1b-lockstep", layers=(3, 2, 2, 1), turns=11, ahead=4, back=8
    )
    return dataclasses.replace(
        plan, axes=(("stage", 4), ("data", 2), ("tensor", 4)), stages=stages
    )


def shared() -> Plan:
    """Two kinds of devices, whose ranks take unlike shares."""
    plan, slow = other(), device_kind("v100-32")
    fast = plan.cluster.nodes[0].kind
    mixed = dataclasses.replace(
        plan.cluster,
        nodes=tuple(Node(kind=k, count=8) for k in (fast, fast, slow, slow)),
    )
    axes = (("data", 4), ("tensor", 8))
    once = dataclasses.replace(plan.collectives[0], phase="update")
    changed = dataclasses.replace(
        plan,
        cluster=mixed,
        axes=axes,
        num_micro_batches=62,
        shares=(21, 21, 10, 10),
        collectives=(once, *plan.collectives[1:]),
    )
    return _stored(changed)


def alone() -> Plan:
    """One device."""
    plan = spmd()
    whole = (("", ""), ("",))
    leaves = tuple(
        leaf(one.path, one.shape, *whole[len(one.shape) == 1], summed=())
        for one in plan.leaves
    )
    changed = dataclasses.replace(
        plan,
        cluster=cluster(1, 1),
        axes=(),
        compute=plan.compute[:1],
        leaves=leaves,
        batch=(dataclasses.replace(plan.batch[0], spec=((), ())),),
        collectives=(),
        candidates=(),
        notes=(),
    )
    return _stored(changed)


def many() -> Plan:
    """10,000 parameters of as many names, no two alike."""
    plan = spmd()
    leaves = tuple(
        leaf(f"part{'abcdefghij'[i % 10]}.leaf{i}x.kernel", (64 + i, 64), "", "tensor")
        for i in range(10_000)
    )
    return dataclasses.replace(plan, leaves=leaves)


def found() -> SearchResult:
    """What a search over three clusters found."""
    small = cluster(1, 2)
    first, second = spmd(), other()
    problem = NothingFits(
        "no plan fits",
        lacks_bytes=3_100_000_000,
        of_bytes=80_000_000_000,
        nearest="fsdp 2, remat full",
    )
    return SearchResult(
        plans=(first, second),
        names=("h100:4x8", "spare.toml"),
        refused=(InfeasibleCluster(name="h100:2", cluster=small, problem=problem),),
        weighed=tuple(
            ClusterCandidate(
                name="h100:4x8", cluster=first.cluster, candidate=c, index=None
            )
            for c in first.candidates
        ),
    )


def described(plan: Plan, width: int) -> str:
    """``plan.describe()`` in a terminal of so many columns."""
    with mock.patch.dict(os.environ, COLUMNS=str(width)):
        return plan.describe()


PLANS: Final[dict[str, Callable[[], Plan]]] = {
    "spmd": spmd,
    "staged": staged,
    "shared": shared,
    "alone": alone,
    "many": many,
}


def pages() -> dict[str, str]:
    """Every display by the name of its file."""
    texts = {}
    for width in (40, 80, 140):
        for name, make in PLANS.items():
            if width > 40 or name == "spmd":
                lines = plan_lines(make(), width, all_rows=False)
                texts[f"{name}-{width}"] = plain(lines)
        texts[f"diff-{width}"] = plain(spmd().diff(other()).lines(width))
        texts[f"found-{width}"] = plain(found().lines(width))
        texts[f"describe-{width}"] = described(spmd(), width)
    return texts


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
