"""What a plan predicts beside what the compiled program does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.hlo.text import OP_NAME, SOURCE_LINE
from whalejax.planner.plan.plan import Plan
from whalejax.verification import report
from whalejax.verification.processes import Answer
from whalejax.verification.quantities import Finding, Quantity, VerificationData
from whalejax.verification.targets import Target


CLOSE = 0.05
"""Relative difference up to which traffic counts as planned."""

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(VerificationData):
    """A plan held against its compiled program; ``VerificationData`` has its fields."""

    def document(self) -> dict[str, Any]:
        """As plain JSON data."""
        return report.document(self)

    def __str__(self) -> str:
        return report.text(self)


def compared(plan: Plan, target: Target, answer: Answer) -> Verification:
    """Set a plan beside what was compiled of it."""
    data = answer.data
    capacity = data.get("capacity_bytes") or target.memory_bytes
    common: dict[str, Any] = {
        "plan_hash": plan.hash,
        "target": target,
        "device_kind": data.get("kind", ""),
        "versions": data.get("versions", {}),
        "host_peak_bytes": data["host_peak_bytes"],
        "capacity_bytes": capacity,
    }
    if "failure" in data:
        peak = Quantity(
            name="peak",
            predicted=plan.memory.total_bytes,
            compiled=data.get("needed_bytes"),
        )
        return Verification(
            **common,
            fits=False,
            memory=(peak,),
            compile_seconds=data["seconds"],
            failure=data["failure"],
        )
    if plan.apart:
        return _compared_stages(plan, common, answer)
    memory = _memory(plan, data["memory"])
    traffic = data["collectives"]
    collectives = () if data["refused"] else _collectives(plan, traffic)
    return Verification(
        **common,
        fits=not capacity or data["memory"]["peak"] <= capacity,
        memory=memory,
        collectives=collectives,
        product_flops=Quantity(
            name="products",
            predicted=plan.product_flops,
            compiled=data["product_flops"],
            unit="flops",
        ),
        lower_seconds=data["lower_seconds"],
        compile_seconds=data["compile_seconds"],
        refused=data["refused"],
        rematerializations=rematerializations(answer.words, traffic),
        unplanned=_unplanned(plan, collectives, traffic),
    )


def _compared_stages(
    plan: Plan, common: Mapping[str, Any], answer: Answer
) -> Verification:
    """The same of stages with programs of their own, one after the other."""
    data = answer.data
    stages: list[Mapping[str, Any]] = data["stages"]
    memory: list[Quantity] = []
    collectives: list[Quantity] = []
    unplanned: list[Finding] = []
    for number, (one, found) in enumerate(zip(plan.apart, stages, strict=True)):
        of = _stage_memory(one, found["memory"])
        traffic = () if data["refused"] else _collectives(one, found["collectives"])
        unplanned += (
            replace(f, what=f"stage {number}: {f.what}")
            for f in _unplanned(one, traffic, found["collectives"])
        )
        memory += (replace(q, name=f"stage {number}: {q.name}") for q in of)
        collectives += (replace(q, name=f"stage {number}: {q.name}") for q in traffic)
    peaks = [q for q in memory if q.name.endswith("peak")]
    memory.append(
        Quantity(
            name="peak",
            predicted=plan.memory.total_bytes,
            compiled=max(q.compiled or 0 for q in peaks),
        )
    )
    capacity = common["capacity_bytes"]
    every = [entry for found in stages for entry in found["collectives"]]
    return Verification(
        **common,
        fits=not capacity or (memory[-1].compiled or 0) <= capacity,
        memory=tuple(memory),
        collectives=(*collectives, *_moved(plan, data)),
        product_flops=Quantity(
            name="products",
            predicted=max(one.product_flops for one in plan.apart),
            compiled=max(found["product_flops"] for found in stages),
            unit="flops",
        ),
        lower_seconds=data["lower_seconds"],
        compile_seconds=data["compile_seconds"],
        refused=data["refused"],
        rematerializations=rematerializations(answer.words, every),
        unplanned=tuple(unplanned),
    )


def _stage_memory(plan: Plan, compiled: Mapping[str, int]) -> tuple[Quantity, ...]:
    """The memory of a stage, by what it holds."""
    terms = plan.memory
    resting = terms.state_bytes + terms.batch_bytes
    predicted = {
        "params": terms.params_bytes,
        "optimizer": terms.optimizer_bytes,
        "gradients": terms.gradients_bytes,
        "kept": resting + terms.activations_bytes,
        "temporary": terms.working_bytes,
    }
    words = ("parameters", "optimizer state", "gradients", "batch and kept")
    quantities = [
        Quantity(name=word, predicted=expected, compiled=compiled[f"{name}_bytes"])
        for word, (name, expected) in zip(
            (*words, "temporaries"), predicted.items(), strict=True
        )
    ]
    peak = Quantity(
        name="peak", predicted=terms.total_bytes, compiled=sum(compiled.values())
    )
    return (*quantities, peak)


def _moved(plan: Plan, data: Mapping[str, Any]) -> Iterator[Quantity]:
    """What goes from stage to stage in a step, to each device."""
    assert plan.stages is not None
    paces, count = plan.stages.paces, plan.num_micro_batches
    found = {(one["part"], one["action"]): one for one in data["moved"]}
    for part, pace in enumerate(paces):
        for action, words, nbytes in (
            ("forward", "handed to", pace.handed_bytes),
            ("backward", "handed back by", pace.returned_bytes),
        ):
            one = found.get((part, action), {"times": 0, "nbytes": 0})
            if nbytes or one["nbytes"]:
                yield Quantity(
                    name=f"{words} part {part}",
                    predicted=count * nbytes,
                    compiled=one["times"] * one["nbytes"],
                    predicted_count=count if nbytes else 0,
                    compiled_count=one["times"],
                )
    for stage, one in enumerate(data["stages"]):
        if one["once_bytes"]:
            yield Quantity(
                name=f"brought to stage {stage} once",
                predicted=None,
                compiled=one["once_bytes"],
            )


def _memory(plan: Plan, compiled: Mapping[str, int]) -> tuple[Quantity, ...]:
    terms = plan.memory
    lying = terms.params_bytes + terms.optimizer_bytes + terms.state_bytes
    lying += terms.batch_bytes
    predicted = {
        "arguments": lying,
        "temporaries": terms.temporary_bytes,
        "peak": terms.total_bytes,
    }
    names = ["arguments", "outputs", "temporaries", "peak"]
    if plan.offload:
        predicted["host"] = terms.host_bytes
        names.insert(-1, "host")
    return tuple(
        Quantity(name=name, predicted=predicted.get(name), compiled=compiled[name])
        for name in names
    )


# Traffic.


def planned_bytes(plan: Plan) -> Counter[str]:
    """Payload bytes of a step by kind and mesh axes, as a plan predicts them."""
    found: Counter[str] = Counter()
    for c in plan.collectives:
        name = _name(c.kind, _ordered(c.axes, plan))
        found[name] += c.payload_bytes * plan.times(c)
    return found


def _collectives(
    plan: Plan, traffic: Sequence[Mapping[str, Any]]
) -> tuple[Quantity, ...]:
    predicted = planned_bytes(plan)
    predicted_count: Counter[str] = Counter()
    for c in plan.collectives:
        name = _name(c.kind, _ordered(c.axes, plan))
        predicted_count[name] += plan.times(c)
    compiled: Counter[str] = Counter()
    compiled_count: Counter[str] = Counter()
    for entry in traffic:
        name = _name(entry["kind"], _axes(entry))
        compiled[name] += entry["payload_bytes"] * entry["count"]
        compiled_count[name] += entry["count"]
    names = {*predicted, *compiled}
    return tuple(
        Quantity(
            name=name,
            predicted=predicted[name],
            compiled=compiled[name],
            predicted_count=predicted_count[name],
            compiled_count=compiled_count[name],
        )
        for name in sorted(names, key=lambda n: -max(predicted[n], compiled[n]))
    )


def _ordered(axes: Iterable[str], plan: Plan) -> Axes:
    return tuple(a for a in plan.axis_sizes if a in set(axes))


def _axes(found: Mapping[str, Any]) -> Axes:
    return ("other groups",) if found["axes"] is None else tuple(found["axes"])


def _unplanned(
    plan: Plan, quantities: Sequence[Quantity], traffic: Sequence[Mapping[str, Any]]
) -> tuple[Finding, ...]:
    """Collectives over axes that carry more than planned, the largest first.

    Which of them they are is told by their sizes; the compiler joins and parts
    collectives, so that this is a hint and the sums are the finding.
    """
    sums: dict[str, list[float]] = {}
    for q in quantities:
        pair = sums.setdefault(q.name.partition(" over ")[2], [0.0, 0.0])
        pair[0] += q.predicted or 0
        pair[1] += q.compiled or 0
    more = {
        axes: compiled - predicted
        for axes, (predicted, compiled) in sums.items()
        if compiled > (1 + CLOSE) * predicted
    }
    total = sum(q.compiled or 0 for q in quantities)
    planned: Counter[tuple[str, int]] = Counter()
    for c in plan.collectives:
        name = _name(c.kind, _ordered(c.axes, plan))
        planned[name, c.payload_bytes] += plan.times(c)
    findings = []
    for found in sorted(traffic, key=lambda f: -f["payload_bytes"] * f["count"]):
        name = _name(found["kind"], _axes(found))
        times = found["count"] - planned[name, found["payload_bytes"]]
        axes = name.partition(" over ")[2]
        nbytes = min(more.get(axes, 0), times * found["payload_bytes"])
        if nbytes <= CLOSE * total:
            continue
        more[axes] -= nbytes
        findings.append(
            Finding(
                what=f"{name}, {times} times",
                nbytes=int(nbytes),
                name=found["name"],
                place=_own(found["places"]),
            )
        )
    return tuple(findings[:5])


def _name(kind: str, axes: Axes) -> str:
    return f"{kind} over {' × '.join(axes)}"


_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization.*?from sharding (\{.*?\}) to (\{.*?\}) without"
    r".*?HLO operation: %?(\S+) = (\S+)(.*)"
)
_LIBRARIES = ("site-packages", "dist-packages", "/whalejax/", "/lib/python")


def rematerializations(
    words: str, traffic: Sequence[Mapping[str, Any]] = ()
) -> tuple[Finding, ...]:
    """What the compiler warned that it gathers whole, each place once.

    Args:
        words: what the compiler wrote.
        traffic: the program's collectives, whose places serve where the warning names
            none.
    """
    found: dict[tuple[str, str], Finding] = {}
    for match in _REMATERIALIZED.finditer(words):
        before, after, _, shape, rest = match.groups()
        name = OP_NAME.search(rest)
        source = SOURCE_LINE.search(rest)
        stack = name[1] if name else ""
        place = f"{source[1]}:{source[2]}" if source else _place_of(stack, traffic)
        finding = Finding(
            what=f"{shape} is gathered whole to go from {before} to {after}",
            name=stack,
            place=place,
        )
        found.setdefault((finding.what, stack), finding)
    return tuple(found.values())


def _place_of(name: str, traffic: Sequence[Mapping[str, Any]]) -> str:
    for found in traffic:
        if name and found["name"] == name:
            return _own(found["places"])
    return ""


def _own(places: Sequence[str]) -> str:
    """The innermost line that is no library's; of all lines if there is none."""
    plain = [p for p in places if not p.startswith("<")]
    own = [p for p in plain if not any(part in p for part in _LIBRARIES)]
    models = [p for p in plain if "/models/" in p and "site-packages" not in p]
    return next(iter([*own, *models, *plain]), "")
