"""Measures the memory that remat and host memory save, by the real compilers.

For each topology a training step is compiled with and without, by the TPU compiler,
which needs no TPU (extra ``whalejax[tpu-compile]``), and on eight virtual CPU devices.
Every line has the predicted and the compiled value.

    python scripts/bench_memory.py [--only TOPOLOGY]

The last line is one JSON object; keys of the TPU are the worst of its topologies, those
of the CPU end in _cpu, and each but the last has its prediction under NAME_predicted:

    remat_memory_ratio   temporaries under remat full over those without: at most 0.25
    context_memory_ratio temporaries of a GPT at 32,768 tokens over context 8, over
                         those of the full sequence on each device: at most 0.16
    logits_ratio         chunks of logits in memory at once, in pairs, by the fall of
                         the peak when chunks are halved: at most 1.1
    offload_freed        bytes of peak that optimizer state in host memory frees, over
                         the moved bytes: at least 0.95
    params_offload_freed the same ratio for parameters with their casts
    activations_offload_freed
                         the same ratio for activations in host memory: at least 0.95
    memory_error         largest relative error of a predicted peak: at most 0.10

On a CPU host memory is the device's own, and nothing is offloaded.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from typing import Any

import whalejax as wh
from whalejax import jobs, models


TOPOLOGIES = ("v5e:4x4", "v5p:2x2x4", "local")
LLAMA = {"layers": 16, "embed": 2048, "heads": 16, "mlp": 5632, "sequence": 1024}
SMALL = {"layers": 16, "embed": 256, "heads": 4, "mlp": 1024, "sequence": 256}
WIDE = {
    "layers": 2,
    "embed": 1024,
    "heads": 8,
    "mlp": 2816,
    "sequence": 16384,
    "vocab": 131072,
}
SMALL_WIDE = {
    "layers": 2,
    "embed": 64,
    "heads": 4,
    "mlp": 128,
    "sequence": 512,
    "vocab": 32768,
}
GPT = {"layers": 12, "embed": 768, "heads": 12, "mlp": 3072, "sequence": 32768}
SMALL_GPT = {"layers": 4, "embed": 128, "heads": 2, "mlp": 512, "sequence": 32768}
COMPILED, PREDICTED = "compiled", "predicted"


@dataclass(frozen=True)
class Compiled:
    """Bytes on one device, as predicted and as compiled.

    Attributes:
        plan: Compiled plan.
        quantities: Quantities by name, as in ``whalejax verify --json``.
    """

    plan: wh.Plan
    quantities: dict[str, dict[str, Any]] = field(default_factory=dict)

    def peak(self, kind: str = COMPILED) -> int:
        """Returns the peak bytes."""
        return int(self.quantities["peak"][kind])

    def temporaries(self, kind: str) -> int:
        """Returns the peak bytes without the arguments."""
        return self.peak(kind) - int(self.quantities["arguments"][kind])

    @property
    def error(self) -> float:
        """Error of the predicted peak, relative to the compiled one."""
        return self.peak(PREDICTED) / self.peak() - 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="a topology")
    only = parser.parse_args().only
    results: dict[str, Pair] = {}
    for topology in TOPOLOGIES:
        if only in topology:
            for key, pair in _measure(topology).items():
                name = f"{key}_cpu" if topology == "local" else key
                worst = min if key.endswith("offload_freed") else max
                results[name] = worst(results.get(name, pair), pair)
    keys = {name: compiled for name, (compiled, _) in results.items()}
    for name, (_, predicted) in results.items():
        if not name.startswith("memory_error"):
            keys[f"{name}_predicted"] = predicted
    print(json.dumps({key: round(value, 4) for key, value in keys.items()}))


Pair = tuple[float, float]
"""Compiled and predicted value."""

Measurement = tuple[dict[str, Pair], list[Compiled]]
"""Keys, and all steps that were compiled for them."""


def _measure(topology: str) -> dict[str, Pair]:
    parts = [_layers, _context, _vocabulary]
    if topology != "local":
        parts.append(_host)
    results: dict[str, Pair] = {}
    errors = []
    for part in parts:
        keys, steps = part(topology)
        for key, (compiled, predicted) in keys.items():
            text = f"{key} {compiled:.3f}, predicted {predicted:.3f}"
            print(f"{topology:10s} {text}", flush=True)
        results.update(keys)
        errors += [abs(step.error) for step in steps]
    return {**results, "memory_error": (max(errors), 0.0)}


def _ratio(step: Compiled, base: Compiled) -> Pair:
    """Returns the temporaries of one step over another's."""
    compiled, predicted = (
        step.temporaries(kind) / base.temporaries(kind)
        for kind in (COMPILED, PREDICTED)
    )
    return compiled, predicted


def _layers(topology: str) -> Measurement:
    """Measures remat, and compiles sequence parallelism."""
    size = 8 if topology == "local" else 16
    shared = {"mesh": {"fsdp": size}, "remat": "none"}
    none = _compile(topology, **shared)
    full = _compile(topology, **{**shared, "remat": "full"})
    mesh = {"data": size // 4, "tensor": 4}
    others = [
        _compile(topology, mesh=mesh, remat="none", sequence_parallel=flag)
        for flag in (False, True)
    ]
    return {"remat_memory_ratio": _ratio(full, none)}, [none, full, *others]


def _host(topology: str) -> Measurement:
    """Measures optimizer state, parameters and activations in host memory."""
    # Replicated, so that the state is larger than the temporaries.
    state = {"mesh": {"data": 16}, "zero": 0, "remat": "full"}
    base, moved, stored = (
        _compile(topology, **state, offload=offload)
        for offload in ((), "optimizer", "params")
    )
    # Many samples, so that saved values are larger than parameters.
    deep = models.job("llama-test", **{**LLAMA, "layers": 48})
    settings = {"job": deep, "mesh": {"fsdp": 16}, "remat": "dots", "batch": 64}
    saved, saved_on_host = (
        _compile(topology, **settings, offload=offload)
        for offload in ((), "activations")
    )
    results = {
        "offload_freed": _freed(base, moved),
        "params_offload_freed": _freed(base, stored),
        "activations_offload_freed": _freed(saved, saved_on_host),
    }
    return results, [base, moved, stored, saved, saved_on_host]


def _context(topology: str) -> Measurement:
    """Measures the full sequence on each device against an eighth, both in blocks."""
    cpu = topology == "local"
    size = 8 if cpu else 16
    sizes = {**(SMALL_GPT if cpu else GPT), "vocab": 512, "annotated": False}
    full, shared = (
        _compile(
            topology,
            job=models.job("gpt-test", **sizes),
            batch=size // context,
            mesh={"data": size // context, "context": context},
            remat="none",
            attention="ring",
        )
        for context in (1, 8)
    )
    return {"context_memory_ratio": _ratio(shared, full)}, [full, shared]


def _vocabulary(topology: str) -> Measurement:
    """Measures logits in chunks, and in chunks of half that size."""
    cpu = topology == "local"
    size = 8 if cpu else 16
    sizes = SMALL_WIDE if cpu else WIDE
    larger, smaller = (
        _compile(
            topology,
            job=models.job("llama-test", **sizes),
            batch=size,
            mesh={"data": size},
            remat="none",
            attention="ring",
            loss_chunks=chunks,
        )
        for chunks in (4, 8)
    )
    logits = sizes["sequence"] * sizes["vocab"] * 4
    compiled, predicted = (
        (larger.peak(kind) - smaller.peak(kind)) / (logits / 4 - logits / 8) / 2
        for kind in (COMPILED, PREDICTED)
    )
    return {"logits_ratio": (compiled, predicted)}, [larger, smaller]


def _freed(base: Compiled, moved: Compiled) -> Pair:
    """Returns the freed bytes of peak over the bytes that moved to host memory."""
    plans, nbytes = (base.plan, moved.plan), moved.plan.memory.host_bytes
    before, after = (plan.memory.total_bytes for plan in plans)
    print(
        f"{'':10s} {' and '.join(moved.plan.offload)} in host memory: "
        f"{nbytes / 1e9:.2f} GB, {moved.quantities['host']['compiled'] / 1e9:.2f} GB "
        "compiled",
        flush=True,
    )
    return (base.peak() - moved.peak()) / nbytes, (before - after) / nbytes


def _compile(
    topology: str, *, job: wh.Job | None = None, batch: int = 16, **options: Any
) -> Compiled:
    cpu = topology == "local"
    job = job or models.job("llama-test", **(SMALL if cpu else LLAMA))
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        job.batch_at(0, batch),
        optimizer=job.optimizer,
        cluster="cpu:8" if cpu else topology,
        precision="f32" if cpu else "bf16",
        num_micro_batches=1,
        **{
            "zero": 0,
            "offload": (),
            "sequence_parallel": False,
            "attention": "gather",
            "loss_chunks": 1,
            **options,
        },
    )
    document = plan.verify(topology).document()
    if document["refused"] or document["failure"]:
        raise SystemExit(f"{topology}: {document['refused'] or document['failure']}")
    step = Compiled(plan, {q["name"]: q for q in document["memory"]})
    print(
        f"{topology:10s} {str(plan).splitlines()[0].split('·', 1)[1]}: peak "
        f"{step.peak() / 1e9:.2f} GB, predicted {step.error:+.1%}",
        flush=True,
    )
    return step


if __name__ == "__main__":
    main()
