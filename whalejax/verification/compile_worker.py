"""The process that compiles: ``python -m whalejax.verification.compile_worker``.

Compilers for absent hardware may abort or hang, so they run outside the user's process.
The request is a file with JAX's settings and a ``CompileRequest``, both pickled. The
answer is one JSON file, which is written in full or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whalejax.verification.targets import CHIP_CONFIGS, Target


if TYPE_CHECKING:
    from whalejax.planner.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """Plan, model and target of a compilation.

    Attributes:
        plan: Plan as JSON data.
        target: Target of the compilation.
        adapter: The model and its loss, without values.
        optimizer: An optax transformation, or None.
        batch: The global batch, abstract.
        batch_axes: Batch dimension of the batch's leaves, as for ``wh.plan``.
        gpu_target: The GPU's properties in the compiler's format; empty for others.
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


def main(request_path: str, answer_path: str, limit_seconds: str) -> None:
    """Compiles the request in a file, and writes the answer."""
    serve(request_path, answer_path, limit_seconds, _answer)


def serve(
    request_path: str,
    answer_path: str,
    limit_seconds: str,
    answered: Callable[[Any, list[str]], dict[str, Any]],
) -> None:
    """Handles the request in a file, and writes the answer.

    Args:
        request_path: File with the request, which the parent process wrote.
        answer_path: Path of the answer.
        limit_seconds: Seconds after which this process ends.
        answered: Function from the request to the answer. It appends the name of each
            phase to its second argument.
    """
    _lift_stack_limit()
    _end_with_parent(float(limit_seconds))
    import cloudpickle

    started = time.monotonic()
    phase = ["reading the model"]
    try:
        with open(request_path, "rb") as file:
            _apply(pickle.load(file))
            request = cloudpickle.load(file)
        answer = answered(request, phase)
    except Exception as error:  # The parent process reports it to the user.
        answer = _failure(error, phase[-1])
    answer["seconds"] = time.monotonic() - started
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer["host_peak_bytes"] = used * (1 if sys.platform == "darwin" else 1024)
    part = Path(f"{answer_path}.part")
    part.write_text(json.dumps(answer))
    os.replace(part, answer_path)


def _end_with_parent(limit_seconds: float) -> None:
    parent, end = os.getppid(), time.monotonic() + limit_seconds

    def watch() -> None:
        while os.getppid() == parent and time.monotonic() < end + 5:
            time.sleep(1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


_LIFTED = "WHALEJAX_STACK_LIFTED"


def _lift_stack_limit() -> None:
    """Restarts this process once, without a limit on the stack, if the system allows.

    The TPU compiler recurses over long chains of operations. For a ResNet-50 on v6e it
    crashes with a limit of 8 MiB or 1 GiB, and compiles without a limit. A process
    reads the limit only when it starts.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_STACK)
    if limit == most or most != resource.RLIM_INFINITY or _LIFTED in os.environ:
        return
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (most, most))
    except (OSError, ValueError):
        return
    os.environ[_LIFTED] = "1"
    os.execv(sys.executable, sys.orig_argv)


def _apply(settings: dict[str, Any]) -> None:
    import jax

    for name, value in settings.items():
        jax.config.update(name, value)


def _answer(request: CompileRequest, phase: list[str]) -> dict[str, Any]:
    import jax

    from whalejax.planner.plan.plan import Plan

    plan = Plan.from_document(request.plan)
    phase.append("describing the topology")
    devices = _devices_of(plan, request)
    phase.append("tracing the model")
    start = time.monotonic()
    step = _step(plan, request, devices)
    if plan.stage_plans:
        phase.append("compiling the stages")
        return {
            "kind": devices[0].device_kind,
            "versions": _versions(jax, request.target.platform),
            "lower_seconds": time.monotonic() - start,
            **_stages(step.rehearse, plan),
        }
    lowered = step.lower() if plan.tables is None else step.lower_shapes()
    between = time.monotonic()
    phase.append("compiling")
    dumps = request.target.platform == "tpu" and "activations" in plan.offload
    compiled, heap = _dumped(lowered, plan) if dumps else (lowered.compile(), None)
    done = time.monotonic()
    return {
        "kind": devices[0].device_kind,
        "versions": _versions(jax, request.target.platform),
        "lower_seconds": between - start,
        "compile_seconds": done - between,
        "memory": _memory(compiled.memory_analysis(), devices[0].platform, heap),
        **_program(compiled.as_text(), plan.axis_sizes),
    }


def _step(plan: Plan, request: CompileRequest, devices: list[Any]) -> Any:
    if plan.tables is None:
        from whalejax.runtime.train_step import step_of

        return step_of(
            plan,
            request.adapter,
            request.batch,
            optimizer=request.optimizer,
            batch_axes=request.batch_axes,
            devices=devices,
        )
    from whalejax.runtime.compile_tables import table_step_of

    return table_step_of(
        plan, request.adapter, request.batch, request.optimizer, devices
    )


def _stages(rehearse: Callable[[], Any], plan: Plan) -> dict[str, Any]:
    start = time.monotonic()
    result = rehearse()
    seconds = time.monotonic() - start
    stages: list[dict[str, Any]] = [
        {
            "memory": dataclasses.asdict(memory),
            "once_bytes": once,
            "collectives": [],
            "product_flops": 0,
        }
        for memory, once in zip(result.memory, result.once_bytes, strict=True)
    ]
    refused = ""
    for one in result.programs:
        mesh = plan.stage_plans[one.stage].axis_sizes
        said = _program(one.compiled.as_text(), mesh)
        refused = refused or said["refused"]
        for entry in said["collectives"]:
            entry["count"] *= one.runs
        stage = stages[one.stage]
        stage["collectives"] += said["collectives"]
        stage["product_flops"] += (said["product_flops"] or 0) * one.runs
    return {
        "compile_seconds": seconds,
        "refused": refused,
        "stages": stages,
        "moved": [dataclasses.asdict(one) for one in result.moved],
    }


def _devices_of(plan: Plan, request: CompileRequest) -> list[Any]:
    from whalejax.planner.plan_errors import PlanError

    devices, count = _devices(request), plan.num_devices
    if request.target.platform == "tpu":
        if len(devices) % count:
            raise PlanError(
                f"the plan uses {count} of {len(devices)} chips. Without a TPU, the "
                "compiler accepts only numbers of chips that divide all. Plan for a "
                "topology all of whose chips are used"
            )
        if plan.stage_plans or count < len(devices):
            # The compiler accepts some of the chips only if they are consecutive.
            devices.sort(key=lambda device: device.id)
    return devices[:count]


def _devices(request: CompileRequest) -> list[Any]:
    import jax
    from jax.experimental import topologies

    from whalejax.meshes.jax_mesh import cluster_order

    target = request.target
    if target.platform == "local":
        return list(jax.devices())
    options: dict[str, Any] = {}
    if target.platform == "tpu":
        name, platform = target.topology, "tpu"
        if target.slices > 1:
            options["num_slices"] = target.slices
        if target.kind in CHIP_CONFIGS:
            options["chip_config_name"] = CHIP_CONFIGS[target.kind]
        lengths = [int(n) for n in name.partition(":")[2].split("x")]
        if lengths[0] % 2 or lengths[1] % 2:  # A host has 2 x 2 chips.
            bounds = [*lengths, 1, 1][:3]
            options["chips_per_host_bounds"] = tuple(bounds)
    else:
        name, platform = target.kind, "cuda"
        options = {"target_config": request.gpu_target, "topology": target.topology}
    devices = topologies.get_topology_desc(name, platform, **options)
    return cluster_order(devices.devices)


def _versions(jax: Any, platform: str) -> dict[str, str]:
    import importlib.metadata

    package = {"tpu": "libtpu", "gpu": "jax-cuda12-plugin"}.get(platform, "jaxlib")
    return {
        "jax": jax.__version__,
        package: importlib.metadata.version(package),
    }


_HEAP = re.compile(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)")


def _dumped(lowered: Any, plan: Plan) -> tuple[Any, int | None]:
    """Returns a compiled program, and the size of its heap on a device, if reported.

    The peak in the compiler's statistics is the larger one of the allocations on the
    device and those in host memory. The report on the heap separates them.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {**dict(plan.compiler_options), "xla_dump_to": folder}
        compiled = lowered.compile(compiler_options=options)
        texts = (p.read_text() for p in Path(folder).glob("*memory-usage-report.txt"))
        sizes = [int(size) for text in texts for size in _HEAP.findall(text)]
    return compiled, max(sizes, default=None)


def _memory(stats: Any, platform: str, heap: int | None = None) -> dict[str, int]:
    """Returns bytes on one device; aliased outputs count as arguments.

    The peak decides whether a program fits. Temporaries are the peak minus the
    arguments, so they include outputs that are not aliased to arguments. The compiler's
    own figure differs: on TPU it includes memory on the chip, and fragmentation.
    """
    host = stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes
    peak = stats.peak_memory_in_bytes
    if platform == "tpu":  # Its compiler also counts arguments in host memory.
        peak -= stats.host_argument_size_in_bytes
        peak = min(peak, heap or peak)
    if platform == "cpu":  # Its compiler allocates all temporaries at once.
        peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    return {
        "peak": peak,
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes - stats.alias_size_in_bytes,
        "temporaries": max(0, peak - stats.argument_size_in_bytes),
        "host": host,
    }


def _program(text: str, mesh: dict[str, int]) -> dict[str, Any]:
    from whalejax import hlo

    try:
        module = hlo.read(text)
        program = hlo.collectives(module)
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
            for i in program.instructions
        ],
    }


def _failure(error: Exception, phase: str) -> dict[str, Any]:
    from whalejax.meshes.errors import WhaleError

    text = str(error)
    notes = [n for n in getattr(error, "__notes__", ()) if n.startswith("whalejax: ")]
    # The first paragraph has the reason, before dumps of the program and stacks.
    said = text.strip().partition("\n\n")[0].partition("\n\t")[0].strip()
    words = "\n".join([f"{type(error).__name__}: {said}", *notes])
    match = _MEMORY.search(text)
    if isinstance(error, WhaleError):
        return {"failure": text, "phase": "asking"}
    if match is None:
        return {"failure": words, "phase": phase}
    numbers = [g for g in match.groups() if g is not None]
    need, capacity = (
        int(float(numbers[i]) * _UNITS[numbers[i + 1].upper()]) for i in (0, 2)
    )
    return {
        "failure": words,
        "phase": phase,
        "needed_bytes": need,
        "capacity_bytes": capacity,
    }


if __name__ == "__main__":
    main(*sys.argv[1:4])
