"""Makes a plan's ``Verification``: compiles, compares, and offers a plan that fits."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from whalejax.adapters.base import Adapter
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.catalogue import kind_names
from whalejax.meshes.checks import is_number, is_printable, short_repr
from whalejax.meshes.errors import tell
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.verification.comparison import Verification, compare_with_compiled
from whalejax.verification.compile_worker import CompileRequest
from whalejax.verification.processes import VerifyError, run
from whalejax.verification.targets import NoCompiler, Target, target_of


LONGEST_SECONDS = 10**6
"""Largest timeout in seconds, longer than any compilation takes."""


def check(
    plan: Plan,
    adapter: Adapter,
    batch: Any,
    *,
    optimizer: Any,
    batch_axes: Any,
    topology: str | None,
    timeout_seconds: float,
    again: Callable[..., Plan] | None,
) -> Verification:
    """Compiles a plan for a topology, and compares the result with its predictions.

    Args:
        plan: A runnable plan.
        adapter: Model of the plan, without values.
        batch: The global batch, abstract.
        optimizer: An optax transformation.
        batch_axes: Batch dimension of the batch's leaves, as for ``wh.plan``.
        topology: Text of a cluster; None for the plan's own cluster.
        timeout_seconds: Seconds after which compilation is abandoned.
        again: Function that plans the same model with changes, to find a plan that fits
            if this one does not; None to search for none.

    Raises:
        PlanError: The plan is an estimate, has unequal shares or pipelines, or is for
            another number of devices.
        WhaleError: An argument is invalid, or the compiler is missing, died or took too
            long.
    """
    if not plan.runnable:
        raise PlanError(
            "this plan is an estimate (runnable=False): there is no program to "
            "compile. Plan again without runnable=False"
        )
    if plan.shares or plan.pipelines:
        whose = "pipeline" if plan.pipelines else "rank of data"
        raise PlanError(
            f"verify compiles programs that devices of one kind run, but every {whose} "
            "of this plan has its own programs. Plan for one of them, as in "
            f"plan.what_if(cluster={_one_of(plan)}, shares=None, mesh=None), and "
            "verify that plan"
        )
    if not is_number(timeout_seconds) or not 0 < timeout_seconds <= LONGEST_SECONDS:
        raise VerifyError(
            f"timeout_seconds is {short_repr(timeout_seconds)}; expected a number of "
            f"seconds above 0, at most {LONGEST_SECONDS}"
        )
    if topology is not None and not is_printable(topology):
        raise VerifyError(
            f"topology is {short_repr(topology)}; expected such as 'v5p:4x4x4', "
            "'h100:2x8' "
            "or 'local', or None for the plan's own cluster"
        )
    target = target_of(plan, topology)
    gpu_target, extra_paths = _compiler(target)
    request = CompileRequest(
        plan=plan.document(),
        target=target,
        adapter=adapter,
        optimizer=optimizer,
        batch=batch,
        batch_axes=batch_axes,
        gpu_target=gpu_target,
    )
    tell(f"compiling for {target.words}, in a separate process")
    answer = run(request, limit_seconds=timeout_seconds, extra_paths=extra_paths)
    failure, phase = answer.data.get("failure"), answer.data.get("phase")
    if phase == "asking":
        raise PlanError(str(failure))
    if failure and "needed_bytes" not in answer.data:
        raise VerifyError(f"{phase} for {target.words} failed: {failure}")
    tell("comparing with the predictions")
    result = compare_with_compiled(plan, target, answer)
    if result.fits or again is None:
        return result
    cluster = plan.cluster if topology is None else parse_cluster(topology)
    return dataclasses.replace(result, better=_next(plan, cluster, result, again))


def _one_of(plan: Plan) -> str:
    devices, node = plan.num_devices // len(plan.shares), plan.cluster.nodes[0]
    if node.kind.name not in kind_names():
        return f"<a file of {devices}×{node.kind.name}>"
    several = devices > node.count
    size = f"{devices // node.count}x{node.count}" if several else str(devices)
    return f'"{node.kind.name}:{size}"'


def _compiler(target: Target) -> tuple[str, Sequence[str]]:
    if target.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise NoCompiler(
            f"compiling for {target.words} needs the TPU compiler. Install the extra "
            "whalejax[tpu-compile]; it needs no TPU"
        )
    if target.platform == "gpu":
        from whalejax.verification.gpu import packages, properties

        return properties(target), packages()
    return "", ()


def _next(
    plan: Plan, cluster: Cluster, found: Verification, again: Callable[..., Plan]
) -> Plan | None:
    needed, predicted = found.peak.compiled, plan.memory.total_bytes
    capacity = found.capacity_bytes
    if not needed or not capacity or predicted <= 0:
        return None
    # The next plan's prediction may have the same error as this one's.
    room = int(capacity * min(1.0, predicted / needed))
    free: dict[str, Any] = {"mesh": None, "zero": None, "num_micro_batches": None}
    free["margin"] = 0.0  # The capacity was already reduced by the error.
    try:
        better = again(cluster=cluster.with_memory(room), **free)
    except PlanError:
        return None
    return dataclasses.replace(better, source=plan.source)
