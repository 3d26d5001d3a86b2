"""Compares predicted with compiled memory and traffic of training steps.

Every program is planned under a fixed layout, and compiled by the real TPU or GPU
compiler. ``verified.json`` beside this script has the compilers' results, with their
versions and dates. Without options, the script compares today's predictions with them.
Programs whose name hashes to 0 modulo 3 are held out as judges: no constant was fitted
to them.

    python scripts/bench_verify.py [--refresh] [--only TEXT] [--verbose]
        [--choices all|sample|none] [--seed N]

Other programs have a layout that the planner chooses (``verified_choices.py``). Their
stored results count only while the planner makes the same choice. A random sample of
them is planned again (``--choices all`` plans all of them); a program whose plan has
changed is left out, and counted in choices_changed, until it is compiled again.
``--refresh`` compiles the programs whose name contains TEXT, or, without ``--only``,
those without a stored result. It takes hours and can be interrupted. It needs the extra
tpu-compile and, for GPUs, whalejax verify --setup-gpu. The last line is one JSON
object; keys of GPUs begin with ``gpu_``, those of the planner's choices with
``choices_``:

    judge_mean_memory_error, judge_p95_memory_error, judge_max_memory_error
                     relative error of peak memory
    false_fits       programs that were predicted to fit, and do not
    band_coverage, band_width
                     part of the TPU programs, with fixed and chosen layouts, whose
                     memory is in the band made from all other kinds of programs, and
                     the mean width of these bands relative to the prediction
    refused          programs that were predicted to fit with the margin of plans, and
                     do not; of choices, those that the compiler refused
    traffic_within   part of all pairs of a program and mesh axes whose bytes are within
                     5 %; kinds_within is the same, also by kind of collective
    choices_full_mean_slower, choices_full_max_slower
                     of choices that fill 80 % of a device, with or without the margin,
                     the part by which the margin makes predicted steps longer
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout
import numpy as np
from foreign_programs import PROGRAMS
from verified_choices import CHOICES, FOREIGN, Choice

import whalejax as wh
from whalejax import jobs, models
from whalejax.planner.memory.prediction_band import MemoryBand, band_of
from whalejax.runtime.planned_traffic import CLOSE, planned_bytes
from whalejax.verification.comparison import Verification


FILE = Path(__file__).with_name("verified.json")
CHOSEN = Path(__file__).with_name("verified_choices.json")
SAMPLE = 8
"""Number of choices in a sample."""
LARGE_MEMORY = 2**43
"""Bytes of a device on which everything fits."""
SECONDS = 3600.0
FULL = 0.8
"""Used part of a device's memory from which a plan counts as full."""
LEAST = 0.001
"""Part of a program's traffic below which mesh axes do not count."""

LLAMA_1B = {
    "vocab": 128_256,
    "embed": 2048,
    "heads": 16,
    "kv_heads": 8,
    "mlp": 8192,
    "layers": 16,
}
MOE_8X = {
    "vocab": 32_768,
    "embed": 2048,
    "heads": 16,
    "mlp": 8192,
    "experts": 8,
    "layers": 16,
    "scan_layers": True,
}
MOE_1T = {
    "vocab": 32_768,
    "embed": 6144,
    "heads": 48,
    "mlp": 24_576,
    "experts": 64,
    "layers": 52,
    "scan_layers": True,
}


@dataclass(frozen=True, eq=False)
class Program:
    """A training step: a model, a topology, a layout.

    Attributes:
        label: Name without the layout.
        topology: Cluster that it is compiled for.
        model, options: Reference model and its options.
        batch: Samples in the global batch.
        mesh: Sizes of all axes that are not 1.
        zero: ZeRO level over ``data``.
    """

    label: str
    topology: str
    model: str
    options: Mapping[str, Any]
    batch: int
    mesh: Mapping[str, int]
    zero: int = 0

    @property
    def name(self) -> str:
        """Unique name."""
        sizes = [f"{axis}{size}" for axis, size in self.mesh.items()]
        mesh = "-".join(sizes) or "alone"
        zero = f"-zero{self.zero}" if self.zero else ""
        parts = [str(self.options.get("remat", "none"))]
        parts += [
            f"{key}{self.options[key]}" for key in ("sequence",) if key in self.options
        ]
        if self.options.get("scan_layers") is False:
            parts.append("unrolled")
        return f"{self.label} {self.topology} {mesh}{zero} {' '.join(parts)}"

    @property
    def kind(self) -> str:
        return kind_of(self.model, self.options)

    @property
    def judges(self) -> bool:
        """Whether it is held out: no constant was fitted to it."""
        return int(hashlib.sha256(self.name.encode()).hexdigest(), 16) % 3 == 0


def reference(
    name: str, topology: str, batch: int, mesh: dict[str, int], **options: Any
) -> Program:
    zero = options.pop("zero", 0)
    return Program(name, topology, name, options, batch, mesh, zero)


def llama(
    size: str, topology: str, batch: int, mesh: dict[str, int], **options: Any
) -> Program:
    """Returns a Llama, 1B or one of the reference sizes."""
    if size != "1b":
        return reference(f"llama-{size}", topology, batch, mesh, **options)
    zero = options.pop("zero", 0)
    changes = {**LLAMA_1B, **options}
    return Program("llama-1b", topology, "llama-test", changes, batch, mesh, zero)


def sparse(
    label: str,
    sizes: Mapping[str, Any],
    topology: str,
    batch: int,
    mesh: dict[str, int],
    **options: Any,
) -> Program:
    return Program(
        label, topology, "moe", {**sizes, "annotated": False, **options}, batch, mesh
    )


UNROLLED = {"scan_layers": False, "layers": 8, "sequence": 2048}
UNMARKED = {"annotated": False}
SCANNED = {"scan_layers": True, **UNMARKED}

TPU = (
    llama("1b", "v5e:4x4", 32, {"fsdp": 16}, remat="full", sequence=2048),
    llama("1b", "v5e:4x4", 16, {"data": 4, "tensor": 4}, sequence=1024),
    llama("1b", "v5e:4x4", 16, {"data": 16}, remat="dots", sequence=1024, zero=1),
    llama("1b", "v5e:4x4", 32, {"data": 2, "fsdp": 8}, remat="full", sequence=2048),
    llama(
        "1b",
        "v5e:4x4",
        16,
        {"fsdp": 8, "tensor": 2},
        remat="full",
        sequence=1024,
        scan_layers=False,
        layers=8,
    ),
    llama("8b", "v5e:4x4", 16, {"fsdp": 16}, remat="full", sequence=2048),
    llama("8b", "v5e:4x4", 16, {"fsdp": 4, "tensor": 4}, remat="full", sequence=2048),
    llama("8b", "v5e:16x16", 256, {"fsdp": 256}, remat="full", sequence=4096),
    llama(
        "8b", "v5e:16x16", 256, {"data": 16, "fsdp": 16}, remat="dots", sequence=2048
    ),
    llama(
        "70b", "v5e:16x16", 64, {"fsdp": 32, "tensor": 8}, remat="full", sequence=4096
    ),
    llama("70b", "v5e:16x16", 256, {"fsdp": 256}, remat="full", sequence=2048),
    llama("8b", "v5p:2x2x4", 32, {"fsdp": 16}, remat="dots", sequence=4096),
    llama("8b", "v5p:2x2x4", 16, {"fsdp": 4, "tensor": 4}, sequence=2048),
    llama("1b", "v5p:2x2x4", 64, {"data": 16}, sequence=2048),
    sparse("moe-8x", MOE_8X, "v5p:2x2x4", 64, {"data": 2, "expert": 8}, sequence=1024),
    sparse(
        "moe-8x",
        MOE_8X,
        "v5p:2x2x4",
        64,
        {"fsdp": 4, "expert": 4},
        sequence=1024,
        remat="full",
    ),
    llama(
        "70b", "v5p:4x4x4", 64, {"fsdp": 16, "tensor": 4}, remat="full", sequence=4096
    ),
    llama("70b", "v5p:4x4x4", 64, {"fsdp": 64}, remat="dots", sequence=2048),
    llama(
        "405b",
        "v5p:8x8x16",
        256,
        {"fsdp": 128, "tensor": 8},
        remat="full",
        sequence=4096,
    ),
    sparse(
        "moe-1t",
        MOE_1T,
        "v5p:8x8x16",
        1024,
        {"fsdp": 16, "expert": 64},
        sequence=2048,
        remat="full",
    ),
    llama(
        "405b",
        "v5p:16x16x16",
        512,
        {"fsdp": 512, "tensor": 8},
        remat="full",
        sequence=4096,
    ),
    llama("8b", "v6e:4x4", 16, {"fsdp": 16}, remat="full", sequence=4096),
    llama("1b", "v6e:4x4", 32, {"data": 16}, sequence=1024, zero=2),
    llama("8b", "v6e:4x4", 32, {"fsdp": 8, "tensor": 2}, remat="dots", sequence=2048),
    llama(
        "70b", "v6e:16x16", 128, {"fsdp": 64, "tensor": 4}, remat="full", sequence=4096
    ),
    sparse(
        "moe-8x",
        MOE_8X,
        "v6e:16x16",
        512,
        {"fsdp": 32, "expert": 8},
        sequence=2048,
        remat="dots",
    ),
    Program("bert-large", "v6e:4x4", "bert-large", {}, 256, {"data": 16}),
    llama("1b", "v6e:4x4", 32, {"fsdp": 16}, remat="full", **UNROLLED),
    llama("1b", "v5p:2x2x4", 32, {"fsdp": 16}, **UNROLLED),
    llama("1b", "v5p:2x2x4", 32, {"data": 4, "tensor": 4}, remat="dots", **UNROLLED),
    llama("1b", "v5e:4x4", 16, {"fsdp": 16}, remat="dots", **UNROLLED),
    llama("8b", "v5p:4x4x4", 64, {"fsdp": 64}, remat="full", **UNROLLED),
    reference("gpt-xl", "v5e:4x4", 64, {"fsdp": 16}, **SCANNED),
    reference("gpt-xl", "v6e:4x4", 64, {"data": 16}, remat="full", zero=1, **SCANNED),
    reference("gpt-large", "v5e:4x4", 64, {"data": 8, "tensor": 2}, remat="dots"),
    llama("7b", "v5e:16x16", 128, {"fsdp": 64, "tensor": 4}, remat="full"),
    llama("7b", "v5p:4x4x4", 64, {"data": 4, "fsdp": 16}),
    llama("70b", "v5p:8x8x8", 512, {"fsdp": 512}, remat="full", sequence=4096),
    llama("70b", "v6e:16x16", 256, {"fsdp": 256}, remat="full", sequence=4096),
    llama("405b", "v6e:16x16", 64, {"fsdp": 32, "tensor": 8}, remat="full"),
    sparse("moe-8x", MOE_8X, "v5p:4x4x4", 256, {"data": 8, "expert": 8}, remat="dots"),
    sparse(
        "moe-8x",
        {**MOE_8X, "scan_layers": False, "layers": 8},
        "v5e:4x4",
        32,
        {"fsdp": 2, "expert": 8},
        remat="full",
    ),
    sparse(
        "moe-1t", MOE_1T, "v5p:16x16x16", 4096, {"fsdp": 64, "expert": 64}, remat="dots"
    ),
    Program("resnet50", "v5e:4x4", "resnet50", UNMARKED, 1024, {"data": 16}),
    Program("bert-base", "v5p:2x2x4", "bert-base", UNMARKED, 512, {"data": 16}),
)

GPU = (
    llama("8b", "h100:8", 8, {"fsdp": 8}, remat="full", sequence=2048),
    llama("8b", "h100:8", 16, {"fsdp": 4, "tensor": 2}, remat="dots", sequence=2048),
    llama("8b", "h100:2x8", 32, {"fsdp": 16}, remat="full", sequence=4096),
    llama("8b", "h100:2x8", 64, {"fsdp": 8, "tensor": 2}, sequence=4096),
    llama("1b", "h100:8", 32, {"data": 8}, remat="full", sequence=2048, zero=1),
    llama("70b", "h100:2x8", 16, {"fsdp": 16}, remat="full", sequence=2048),
    sparse("moe-8x", MOE_8X, "h100:2x8", 64, {"data": 2, "expert": 8}, sequence=1024),
    reference("gpt-medium", "h100:1", 8, {}, **SCANNED),
    llama("1b", "h100:1", 8, {}, remat="full", sequence=2048),
    Program("bert-large", "h100:1", "bert-large", UNMARKED, 32, {}),
    Program("resnet50", "h100:1", "resnet50", UNMARKED, 128, {}),
    reference("gpt-xl", "h100:8", 64, {"fsdp": 8}, **SCANNED),
    reference("gpt-large", "h100:8", 32, {"data": 4, "tensor": 2}, remat="dots"),
    llama("7b", "h100:8", 16, {"fsdp": 8}, remat="full"),
    sparse(
        "moe-8x",
        MOE_8X,
        "h100:8",
        32,
        {"fsdp": 2, "expert": 4},
        sequence=1024,
        remat="full",
    ),
    llama("1b", "h100:2x8", 32, {"fsdp": 16}, remat="dots", **UNROLLED),
    reference("gpt-xl", "h100:2x8", 64, {"data": 16}, remat="full", zero=1, **SCANNED),
    Program("bert-large", "h100:2x8", "bert-large", UNMARKED, 512, {"data": 16}),
    Program("resnet50", "h100:2x8", "resnet50", UNMARKED, 1024, {"data": 16}),
)


def plan_program(program: Program) -> wh.Plan:
    """Returns the plan of a program, whether it fits or not."""
    job = models.job(program.model, **program.options)
    cluster = wh.cluster(program.topology).with_memory(LARGE_MEMORY)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, program.batch),
        optimizer=job.optimizer,
        cluster=cluster,
        mesh=program.mesh,
        zero=program.zero,
        num_micro_batches=1,
        precision="bf16",
        # As it was compiled: with the model's own remat, and only the mesh fixed.
        remat="none",
        offload=(),
        sequence_parallel=False,
        attention="gather",
        loss_chunks=1,
    )


def job_of(choice: Choice) -> wh.Job:
    if choice.model in PROGRAMS:
        return PROGRAMS[choice.model](**choice.options)
    return models.job(choice.model, **choice.options)


def chosen_plan(choice: Choice, **options: Any) -> wh.Plan:
    """Returns the plan that the planner chooses."""
    job = job_of(choice)
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, choice.batch),
        optimizer=job.optimizer,
        cluster=choice.topology,
        precision=choice.precision,
        **jobs.split_settings(job),
        **options,
    )


def compile_plan(plan: wh.Plan, topology: str) -> dict[str, Any]:
    """Returns the stored form of the compiler's results for a plan."""
    verification: Verification = plan.verify(topology, timeout_seconds=SECONDS)
    document = verification.document()
    keys = ("versions", "fits", "failure", "refused", "lower_seconds")
    keys += ("compile_seconds", "host_peak_bytes", "capacity_bytes")
    return {
        "date": datetime.date.today().isoformat(),
        "commit": checkout.commit(),
        **{key: document[key] for key in keys},
        "failure": document["failure"][:300],
        "memory": {q["name"]: q["compiled"] for q in document["memory"]},
        "collectives": {
            q["name"]: [q["compiled_count"], q["compiled"]]
            for q in document["collectives"]
        },
        "product_flops": (document["product_flops"] or {}).get("compiled"),
    }


@dataclass(frozen=True)
class Line:
    """A program's prediction and compiled result.

    Attributes:
        program: Program that was compiled.
        predicted, measured: Peak bytes.
        fits, predicted_fits: Whether it fits, by the compiler and by the prediction.
        traffic: Predicted and compiled bytes by mesh axes.
        kinds: The same by kind of collective and mesh axes.
    """

    program: Program
    predicted: float
    measured: float
    fits: bool
    predicted_fits: bool
    traffic: Mapping[str, tuple[float, float]]
    kinds: Mapping[str, tuple[float, float]]

    @property
    def band(self) -> MemoryBand:
        """Likely range of the compiled memory, relative to the predicted memory."""
        by_default = self.program.model.startswith("llama")
        in_a_loop = self.program.options.get("scan_layers", by_default)
        return band_of(wh.cluster(self.program.topology).platform, in_a_loop=in_a_loop)

    @property
    def within_margin(self) -> bool:
        """Whether ``wh.plan`` accepts it."""
        room = wh.cluster(self.program.topology).memory_bytes
        return self.predicted * self.band.high <= room

    @property
    def error(self) -> float:
        """Relative error of peak memory."""
        return self.predicted / self.measured - 1


KINDS = {
    "bert": "encoder",
    "cosmoflow": "3-D convolutions",
    "dense_experts": "experts",
    "gnmt": "recurrent",
    "gpt": "decoder",
    "llama": "decoder",
    "lstm": "recurrent",
    "moe": "experts",
    "nnx_gpt": "decoder",
    "ragged_experts": "experts",
    "resnet3d": "3-D convolutions",
    "resnet50": "2-D convolutions",
    "separate_tables": "tables",
    "seq2seq": "recurrent",
    "stacked_tables": "tables",
    "t5": "encoder and decoder",
    "unet": "2-D convolutions",
    "unet3d": "3-D convolutions",
    "vgg16": "2-D convolutions",
    "vit": "encoder",
}
"""Kind of program by the first part of a model's name."""

TAIL = 4.6
"""Percentage of the programs of other kinds beyond each edge of a band; about nine in
ten programs of a new kind are then within it."""


def kind_of(model: str, options: Mapping[str, Any]) -> str:
    """Returns the kind of a reference model; there are two kinds of decoders."""
    kind = KINDS[model.partition("-")[0]]
    loop = options.get("scan_layers", model.startswith("llama"))
    return kind if loop or kind != "decoder" else "decoder, layers written out"


def band_quality(ratios: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Cross-validates the bands over kinds of programs.

    The result is the part of programs in the band of all other kinds, and the mean
    width of these bands.

    Args:
        ratios: Kind of each program, and its ratio of compiled to predicted memory.
    """
    inside, widths = [], []
    for kind, ratio in ratios:
        others = [r for k, r in ratios if k != kind]
        if not others:
            continue
        low, high = percentile(others, TAIL), percentile(others, 100 - TAIL)
        inside.append(low <= ratio <= high)
        widths.append(high - low)
    if not inside:
        return {}
    return {
        "band_coverage": round(statistics.fmean(inside), 4),
        "band_width": round(statistics.fmean(widths), 4),
    }


def ratios_of(lines: Sequence[Line]) -> list[tuple[str, float]]:
    """Returns kinds and memory ratios of the programs that fit."""
    return [(x.program.kind, x.measured / x.predicted) for x in lines if x.fits]


def percentile(values: Sequence[float], percent: float) -> float:
    return round(float(np.percentile(values, percent)), 4)


def line_of(program: Program, result: Mapping[str, Any]) -> Line:
    """Returns a program's new prediction with its stored result."""
    plan = plan_program(program)
    usable = wh.cluster(program.topology).memory_bytes
    predicted = planned_bytes(plan)
    measured = {name: nbytes for name, (_, nbytes) in result["collectives"].items()}
    return Line(
        program=program,
        predicted=plan.memory.total_bytes,
        measured=result["memory"]["peak"],
        fits=result["fits"],
        predicted_fits=plan.memory.total_bytes <= usable,
        traffic=totals(predicted, measured, lambda name: name.partition(" over ")[2]),
        kinds=totals(predicted, measured, str),
    )


def totals(
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    key: Callable[[str], str],
) -> dict[str, tuple[float, float]]:
    """Sums predicted and measured bytes by key; omits negligible sums."""
    sums: dict[str, list[float]] = {}
    for place, names in enumerate((predicted, measured)):
        for name, nbytes in names.items():
            sums.setdefault(key(name), [0.0, 0.0])[place] += nbytes
    least = LEAST * sum(measured.values())
    return {
        name: (ours, theirs)
        for name, (ours, theirs) in sums.items()
        if max(ours, theirs) > least
    }


def summary(lines: Sequence[Line], verbose: bool) -> dict[str, Any]:
    """Prints the lines and returns the totals."""
    pairs = close = kinds = agreeing = 0
    for line in lines:
        word = "judge" if line.program.judges else ""
        fits = {(True, True): "fits", (False, False): "does not fit"}.get(
            (line.fits, line.predicted_fits),
            "FALSE FIT" if line.predicted_fits else "false refusal",
        )
        print(
            f"{line.error:+7.1%}  {line.predicted / 1e9:7.2f} of "
            f"{line.measured / 1e9:7.2f} GB  {fits:13} {line.program.name}  {word}"
        )
        for axes, (ours, theirs) in line.traffic.items() if line.fits else ():
            off = abs(ours / theirs - 1) if theirs else float("inf")
            pairs, close = pairs + 1, close + (off <= CLOSE)
            if off > CLOSE or verbose:
                print(f"         {axes}: {ours / 1e9:.3f} of {theirs / 1e9:.3f} GB")
        for ours, theirs in line.kinds.values() if line.fits else ():
            kinds, agreeing = (
                kinds + 1,
                agreeing + (abs(ours - theirs) <= CLOSE * theirs),
            )
    measured = [line for line in lines if line.fits]
    if not measured:
        return {"programs": len(lines)}
    judges = [abs(line.error) for line in measured if line.program.judges]
    others = [abs(line.error) for line in measured if not line.program.judges]
    return {
        "programs": len(lines),
        "judges": sum(line.program.judges for line in lines),
        "judge_mean_memory_error": round(statistics.fmean(judges), 4)
        if judges
        else None,
        "judge_p95_memory_error": percentile(judges, 95) if judges else None,
        "judge_max_memory_error": round(max(judges), 4) if judges else None,
        "other_mean_memory_error": round(statistics.fmean(others), 4)
        if others
        else None,
        "other_max_memory_error": round(max(others), 4) if others else None,
        **band_quality(ratios_of(lines)),
        "refused": sum(x.within_margin and not x.fits for x in lines),
        "false_fits": sum(x.predicted_fits and not x.fits for x in lines),
        "false_refusals": sum(x.fits and not x.predicted_fits for x in lines),
        "traffic_pairs": pairs,
        "traffic_within": round(close / max(1, pairs), 4),
        "kind_pairs": kinds,
        "kinds_within": round(agreeing / max(1, kinds), 4),
    }


def facts_of(choice: Choice, plan: wh.Plan) -> dict[str, Any]:
    """Returns facts of a choice's plan, which is then judged without planning again."""
    without_margin = chosen_plan(choice, margin=0.0)
    filled = max(p.memory.total_bytes / p.room_bytes for p in (plan, without_margin))
    return {
        "slower": plan.time.step_seconds / without_margin.time.step_seconds - 1,
        "filled": filled,
        "program": program_of(plan),
        "predicted_bytes": plan.memory.total_bytes,
        "room_bytes": plan.room_bytes,
        "traffic": planned_bytes(plan),
        "layout": dict(plan.axes),
        "num_micro_batches": plan.num_micro_batches,
    }


def compile_choice(choice: Choice, stored: dict[str, Any]) -> None:
    """Plans and compiles a choice, unless that plan was compiled already."""
    plan = chosen_plan(choice)
    facts, known = facts_of(choice, plan), stored.get(choice.name)
    if known is not None and matches(facts, known["plan"]):
        print(f"compiled before: {choice.name}", flush=True)
        row = known
    else:
        row = compile_plan(plan, choice.topology)
        print(f"compiled in {row['compile_seconds']:.0f} s: {choice.name}", flush=True)
    stored[choice.name] = {**row, "plan": facts}
    CHOSEN.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def program_of(plan: wh.Plan) -> str:
    """Returns a digest of all that decides the compiled program."""
    deciding = (
        plan.axis_sizes,
        plan.num_micro_batches,
        *(plan.remat, plan.attention, plan.loss_chunks, plan.offload),
        plan.sequence_parallel,
        plan.compute,
        [(leaf.path, leaf.param_spec, leaf.optimizer_spec) for leaf in plan.leaves],
    )
    return hashlib.sha256(repr(deciding).encode()).hexdigest()[:16]


TOLERANCE = 2e-3
"""Allowed relative difference of a program's predictions if it has no digest."""


def matches(facts: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Returns whether today's plan is the compiled program."""
    if "program" in stored:
        return bool(facts["program"] == stored["program"])
    is_same = all(
        facts[name] == stored[name] for name in ("layout", "num_micro_batches")
    )
    return (
        is_same
        and abs(facts["predicted_bytes"] / stored["predicted_bytes"] - 1) < TOLERANCE
    )


def summary_of_choices(
    choices: Sequence[Choice],
    stored: Mapping[str, Any],
    anew: Mapping[str, Mapping[str, Any]],
    others: Sequence[tuple[str, float]],
) -> dict[str, Any]:
    """Prints the compilers' results for the planner's choices and returns totals.

    Args:
        choices: Choices that are judged.
        stored: Stored results by name.
        anew: Facts of today's plans by name, for choices that are planned again.
        others: ``ratios_of`` programs with a fixed layout.
    """
    usable = [c for c in choices if c.name in stored]
    changed = {n for n, facts in anew.items() if not matches(facts, stored[n]["plan"])}
    errors, slower, pairs, close, refused = [], [], 0, 0, 0
    ratios: list[tuple[str, float]] = []
    for choice in usable:
        if choice.name in changed:
            print(f"changed                        {choice.name}")
            continue
        row = stored[choice.name]
        plan = anew.get(choice.name, row["plan"])
        peak, predicted = row["memory"]["peak"], plan["predicted_bytes"]
        refused += not row["fits"]
        if plan["filled"] >= FULL:
            slower.append(plan["slower"])
        if row["fits"]:
            errors.append(abs(predicted / peak - 1))
            ratios.append((kind_of(choice.model, choice.options), peak / predicted))
        print(
            f"{predicted / peak - 1:+7.1%}  {predicted / 1e9:7.2f} of "
            f"{peak / 1e9:7.2f} GB  {'fits' if row['fits'] else 'REFUSED':13} "
            f"{predicted / plan['room_bytes']:.0%} full  {choice.name}"
        )
        theirs = {name: nbytes for name, (_, nbytes) in row["collectives"].items()}
        both = totals(plan["traffic"], theirs, lambda name: name.partition(" over ")[2])
        for axes, (ours, real) in both.items() if row["fits"] else ():
            off = abs(ours / real - 1) if real else float("inf")
            pairs, close = pairs + 1, close + (off <= CLOSE)
            if off > CLOSE:
                print(f"         {axes}: {ours / 1e9:.3f} of {real / 1e9:.3f} GB")
    if not errors:
        return {"choices": 0}
    errors.sort()
    return {
        "choices": len(usable) - len(changed),
        "choices_changed": len(changed),
        "choices_planned_anew": len(anew),
        "choices_refused": refused,
        "choices_mean_memory_error": round(statistics.fmean(errors), 4),
        "choices_p95_memory_error": percentile(errors, 95),
        "choices_max_memory_error": round(errors[-1], 4),
        **{f"choices_{key}": value for key, value in band_quality(ratios).items()},
        **band_quality([*others, *ratios]),
        "choices_full": len(slower),
        "choices_full_mean_slower": round(statistics.fmean(slower or [0.0]), 4),
        "choices_full_max_slower": round(max(slower, default=0.0), 4),
        "choices_traffic_pairs": pairs,
        "choices_traffic_within": round(close / max(1, pairs), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--only", metavar="TEXT", default="")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument(
        "--choices", choices=("all", "sample", "none"), default="sample"
    )
    parser.add_argument("--seed", type=int, help="seed of the sample")
    arguments = parser.parse_args()
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    stored_choices = json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}
    programs = [p for p in (*TPU, *GPU) if arguments.only in p.name]
    choices = [c for c in (*CHOICES, *FOREIGN) if arguments.only in c.name]
    if arguments.refresh:
        refresh(programs, stored, skip_known=not arguments.only)
        refresh_choices(choices if arguments.choices != "none" else (), stored_choices)
    lines = {p: line_of(p, stored[p.name]) for p in programs if p.name in stored}
    fixed = [lines[p] for p in TPU if p in lines]
    tpu = summary(fixed, arguments.verbose)
    print()
    gpu = summary([lines[p] for p in GPU if p in lines], arguments.verbose)
    print()
    usable = [c for c in choices if c.name in stored_choices]
    seed = arguments.seed
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    count = {"all": len(usable), "sample": min(SAMPLE, len(usable)), "none": 0}
    anew = random.Random(seed).sample(usable, count[arguments.choices])
    facts = {choice.name: facts_of(choice, chosen_plan(choice)) for choice in anew}
    chosen = summary_of_choices(choices, stored_choices, facts, ratios_of(fixed))
    gpu = {f"gpu_{key}": value for key, value in gpu.items()}
    print(json.dumps({**tpu, **gpu, **chosen, "seed": seed}))


def refresh(
    programs: Sequence[Program], stored: dict[str, Any], *, skip_known: bool
) -> None:
    """Compiles programs and stores the results."""
    for program in programs:
        if program.name in stored and skip_known:
            continue
        try:
            stored[program.name] = compile_plan(plan_program(program), program.topology)
        except wh.WhaleError as error:
            print(f"{program.name}: {str(error)[:300]}", flush=True)
            continue
        seconds = stored[program.name]["compile_seconds"]
        print(f"compiled in {seconds:.0f} s: {program.name}", flush=True)
        FILE.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")


def refresh_choices(choices: Sequence[Choice], stored: dict[str, Any]) -> None:
    """Compiles the planner's choices and stores the results."""
    for choice in choices:
        try:
            compile_choice(choice, stored)
        except wh.WhaleError as error:
            print(f"{choice.name}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
