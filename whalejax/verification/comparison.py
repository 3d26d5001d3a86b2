"""Compares a plan's predictions with its compiled program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whalejax.hlo.hlo_text import OP_NAME, SOURCE_LINE
from whalejax.planner.plan.plan import Plan
from whalejax.runtime.planned_traffic import (
    Finding,
    Quantity,
    compared_traffic,
    own_place,
    unplanned_traffic,
)
from whalejax.verification import report
from whalejax.verification.processes import Answer
from whalejax.verification.quantities import VerificationData
from whalejax.verification.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(VerificationData):
    """A plan compared with its compiled program; see ``VerificationData``."""

    def document(self) -> dict[str, Any]:
        """Returns the verification as plain JSON data."""
        return report.document(self)

    def __str__(self) -> str:
        return report.text(self)


def compare_with_compiled(plan: Plan, target: Target, answer: Answer) -> Verification:
    """Compares a plan with its compiled program."""
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
    if plan.stage_plans:
        return _compared_stages(plan, common, answer)
    memory = _memory(plan, data["memory"])
    traffic = data["collectives"]
    collectives = () if data["refused"] else compared_traffic(plan, traffic)
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
        unplanned=unplanned_traffic(plan, collectives, traffic),
    )


def _compared_stages(
    plan: Plan, common: Mapping[str, Any], answer: Answer
) -> Verification:
    data = answer.data
    stages: list[Mapping[str, Any]] = data["stages"]
    memory: list[Quantity] = []
    collectives: list[Quantity] = []
    unplanned: list[Finding] = []
    for number, (one, compared_stages) in enumerate(
        zip(plan.stage_plans, stages, strict=True)
    ):
        of = _stage_memory(one, compared_stages["memory"])
        traffic = (
            ()
            if data["refused"]
            else compared_traffic(one, compared_stages["collectives"])
        )
        unplanned += (
            replace(f, what=f"stage {number}: {f.what}")
            for f in unplanned_traffic(one, traffic, compared_stages["collectives"])
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
    every = [
        entry for compared_stages in stages for entry in compared_stages["collectives"]
    ]
    return Verification(
        **common,
        fits=not capacity or (memory[-1].compiled or 0) <= capacity,
        memory=tuple(memory),
        collectives=(*collectives, *_transfer_quantities(plan, data)),
        product_flops=Quantity(
            name="products",
            predicted=max(one.product_flops for one in plan.stage_plans),
            compiled=max(
                compared_stages["product_flops"] for compared_stages in stages
            ),
            unit="flops",
        ),
        lower_seconds=data["lower_seconds"],
        compile_seconds=data["compile_seconds"],
        refused=data["refused"],
        rematerializations=rematerializations(answer.words, every),
        unplanned=tuple(unplanned),
    )


def _stage_memory(plan: Plan, compiled: Mapping[str, int]) -> tuple[Quantity, ...]:
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


def _transfer_quantities(plan: Plan, data: Mapping[str, Any]) -> Iterator[Quantity]:
    assert plan.stages is not None
    paces, count = plan.stages.paces, plan.num_micro_batches
    result = {(one["part"], one["action"]): one for one in data["moved"]}
    for part, pace in enumerate(paces):
        for action, words, nbytes in (
            ("forward", "handed to", pace.handed_bytes),
            ("backward", "handed back by", pace.returned_bytes),
        ):
            one = result.get((part, action), {"times": 0, "nbytes": 0})
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
                name=f"received once by stage {stage}",
                predicted=None,
                compiled=one["once_bytes"],
            )


def _memory(plan: Plan, compiled: Mapping[str, int]) -> tuple[Quantity, ...]:
    terms = plan.memory
    lying = terms.params_bytes + terms.optimizer_bytes + terms.state_bytes
    lying += terms.batch_bytes + terms.tables_bytes
    predicted = {
        "arguments": lying,
        "temporaries": terms.temporary_bytes,
        "peak": terms.total_bytes,
    }
    names = ["arguments", "outputs", "temporaries", "peak"]
    if plan.offload or terms.host_bytes:
        predicted["host"] = terms.host_bytes
        names.insert(-1, "host")
    return tuple(
        Quantity(name=name, predicted=predicted.get(name), compiled=compiled[name])
        for name in names
    )


_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization.*?from sharding (\{.*?\}) to (\{.*?\}) without"
    r".*?HLO operation: %?(\S+) = (\S+)(.*)"
)


def rematerializations(
    words: str, traffic: Sequence[Mapping[str, Any]] = ()
) -> tuple[Finding, ...]:
    """Returns the values that a compiler warned to gather, one for each source line.

    Args:
        words: Output of the compiler.
        traffic: Collectives of the program, for source lines that the warning lacks.
    """
    result: dict[tuple[str, str], Finding] = {}
    for match in _REMATERIALIZED.finditer(words):
        before, after, _, shape, rest = match.groups()
        name = OP_NAME.search(rest)
        source = SOURCE_LINE.search(rest)
        stack = name[1] if name else ""
        place = f"{source[1]}:{source[2]}" if source else _place_of(stack, traffic)
        finding = Finding(
            what=f"{shape} is gathered in full to go from {before} to {after}",
            name=stack,
            place=place,
        )
        result.setdefault((finding.what, stack), finding)
    return tuple(result.values())


def _place_of(name: str, traffic: Sequence[Mapping[str, Any]]) -> str:
    for result in traffic:
        if name and result["name"] == name:
            return own_place(result["places"])
    return ""
