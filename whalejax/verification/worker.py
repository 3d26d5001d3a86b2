"""The process that compiles: ``python -m whalejax.verification.worker REQUEST ANSWER``.

Compilers for hardware that is not here may abort or hang, so nothing of a user's own
process is theirs. The request is a pickle of ``Request``; the answer is one JSON file,
which appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalejax.verification.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to compile.

    Attributes:
        plan: the plan's document.
        target: for what.
        adapter: the model and its loss, without values.
        optimizer: an optax transformation, or None.
        batch: the global batch, abstract.
        batch_axes: as given to ``wh.plan``.
        gpu_target: the GPU's properties as the compiler reads them, or empty.
    """

    plan: dict[str, Any]
    target: Target
    adapter: Any
    optimizer: Any
    batch: Any
    batch_axes: Any
    gpu_target: str = ""


_MEMORY = re.compile(
    r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm|"
    r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)",
    re.IGNORECASE,
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(request_path: str, answer_path: str) -> None:
    """Compile what a file asks for, and write down what came of it."""
    import cloudpickle

    started = time.monotonic()
    try:
        with open(request_path, "rb") as file:
            request: Request = cloudpickle.load(file)
        answer = _answer(request)
    except Exception as error:  # the parent process says it in the user's words
        answer = _failure(error)
    answer["seconds"] = time.monotonic() - started
    answer["host_peak_bytes"] = (
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    part = Path(f"{answer_path}.part")
    part.write_text(json.dumps(answer))
    os.replace(part, answer_path)


def _answer(request: Request) -> dict[str, Any]:
    import jax

    from whalejax.planner.plan import Plan
    from whalejax.train import step_of

    plan = Plan.from_document(request.plan)
    devices = _devices(request)[: plan.num_devices]
    start = time.monotonic()
    step = step_of(
        plan,
        request.adapter,
        request.batch,
        optimizer=request.optimizer,
        batch_axes=request.batch_axes,
        devices=devices,
    )
    lowered = step.lower()
    between = time.monotonic()
    compiled = lowered.compile()
    done = time.monotonic()
    return {
        "kind": devices[0].device_kind,
        "versions": _versions(jax, request.target.platform),
        "lower_seconds": between - start,
        "compile_seconds": done - between,
        "memory": _memory(compiled.memory_analysis()),
        **_program(compiled.as_text(), plan.axis_sizes),
    }


def _devices(request: Request) -> list[Any]:
    import jax
    from jax.experimental import topologies

    from whalejax.meshes.build import cluster_order

    target = request.target
    if target.platform == "local":
        return list(jax.devices())
    options: dict[str, Any] = {}
    if target.platform == "tpu":
        name, platform = target.topology, "tpu"
        if target.slices > 1:
            options["num_slices"] = target.slices
    else:
        name, platform = target.kind, "cuda"
        options = {"target_config": request.gpu_target, "topology": target.topology}
    found = topologies.get_topology_desc(name, platform, **options)
    return cluster_order(found.devices)


def _versions(jax: Any, platform: str) -> dict[str, str]:
    import importlib.metadata

    package = {"tpu": "libtpu", "gpu": "jax-cuda12-plugin"}.get(platform, "jaxlib")
    return {
        "jax": jax.__version__,
        package: importlib.metadata.version(package),
    }


def _memory(stats: Any) -> dict[str, int]:
    """Bytes on one device; what is aliased is an argument and an output."""
    return {
        "peak": stats.peak_memory_in_bytes,
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "host": stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    }


def _program(text: str, mesh: dict[str, int]) -> dict[str, Any]:
    from whalejax import hlo

    try:
        module = hlo.read(text)
        found = hlo.collectives(module)
        flops = hlo.product_flops(module)
    except hlo.HloError as error:
        return {"refused": str(error), "collectives": [], "product_flops": None}
    return {
        "refused": "",
        "product_flops": flops,
        "collectives": [
            {
                "kind": i.kind,
                "axes": i.axes(mesh),
                "payload_bytes": i.payload_bytes,
                "count": i.count,
                "name": i.name,
                "places": i.places[:12],
            }
            for i in found.instructions
        ],
    }


def _failure(error: Exception) -> dict[str, Any]:
    text = str(error)
    words = traceback.format_exception_only(error)[-1].strip()
    found = _MEMORY.search(text)
    if found is None:
        return {"failure": words, "trace": traceback.format_exc()}
    numbers = [g for g in found.groups() if g is not None]
    need, capacity = (
        int(float(numbers[i]) * _UNITS[numbers[i + 1].upper()]) for i in (0, 2)
    )
    return {"failure": words, "needed_bytes": need, "capacity_bytes": capacity}


if __name__ == "__main__":
    main(*sys.argv[1:3])
