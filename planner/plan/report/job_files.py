"""Writes a plan as a job file: a JobSet of Kubernetes or a task of SkyPilot.

The fields are those of kubernetes-sigs/jobset, ``jobset.x-k8s.io/v1alpha2``, and of
SkyPilot's task YAML, 2026-11. Processes find each other through the environment
variables that ``wh.init_distributed`` reads. On TPUs, JAX itself reads the environment.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from typing import Any, Final

from whalejax.meshes.cluster import Cluster
from whalejax.planner.plan.report.framework_configs import header, tpu_type, yaml_text
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_errors import PlanError


PORT: Final = 8476
"""Port on which process 0 listens."""

_GKE_TPUS: Final = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "v7x": "tpu7x",
}
"""Values of the node label ``cloud.google.com/gke-tpu-accelerator`` by TPU kind."""

_HOST_CHIPS: Final = 4
"""Chips per host in TPU slices of several hosts."""

_ONE_HOST_CHIPS: Final = {"v5e": 8, "v6e": 8}
"""Chips of the largest slice of one host, for kinds where it differs."""

_SKYPILOT: Final = {
    "p100-16": "P100",
    "v100-16": "V100",
    "v100-32": "V100-32GB",
    "t4": "T4",
    "a100-40": "A100",
    "a100-80": "A100-80GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "gh200-96": "GH200",
    "a10": "A10",
    "a10g": "A10G",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "mi300x": "MI300X",
}
"""SkyPilot's names of device kinds."""


def start_command(plan: PlanData) -> str:
    """Returns the shell command that starts a plan's run by default.

    ``whalejax train`` uses the devices of one host; several hosts need the user's
    script.
    """
    if plan.source and _hosts(plan.cluster) == 1:
        model, *settings = plan.source
        words = ["whalejax", "train", model, "--plan", "plan.json"]
        words += ["--set", *settings] if settings else []
        return shlex.join(words)
    return "python train.py"


def jobset_text(plan: PlanData, name: str, image: str, command: str) -> str:
    """Returns YAML of a JobSet with a pod for every host of a plan's cluster.

    Args:
        plan: The plan.
        name: Name of the JobSet; must be a valid DNS label.
        image: Container image with the script, its packages and ``plan.json``.
        command: Shell command; if empty, ``start_command``.

    Raises:
        PlanError: The cluster has several device kinds, or a kind that Kubernetes has
            no resource for.
    """
    _check_one_kind(plan.cluster, "a JobSet")
    kind = plan.cluster.kinds[0]
    hosts = _hosts(plan.cluster)
    slices = len(plan.cluster.nodes) if kind.platform == "tpu" else 1
    pod, count = _pod(plan.cluster, name, hosts)
    (container,) = pod["containers"]
    container |= {
        "name": "train",
        "image": image,
        "command": ["bash", "-c", command or start_command(plan)],
    }
    job = {
        "parallelism": hosts // slices,
        "completions": hosts // slices,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": name}
    if slices > 1:  # Each slice has a node pool of its own.
        key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {key: "cloud.google.com/gke-nodepool"}
    document = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [
                {"name": "workers", "replicas": slices, "template": {"spec": job}}
            ],
        },
    }
    said = [_script_text(hosts), "The image holds the script and plan.json."]
    if kind.platform == "gpu":
        label = kind.label or kind.name
        said.append(
            f"Where nodes differ, add a nodeSelector for those with {count} {label}."
        )
    return header([plan], [], said) + yaml_text(document)


def _pod(cluster: Cluster, name: str, hosts: int) -> tuple[dict[str, Any], int]:
    kind, count = cluster.kinds[0], cluster.nodes[0].count
    pod: dict[str, Any] = {"restartPolicy": "Never"}
    container: dict[str, Any] = {"name": "", "image": "", "command": []}
    if kind.platform == "tpu":
        if kind.name not in _GKE_TPUS:
            raise PlanError(f"Kubernetes has no label for {kind.name} here")
        shape = "x".join(str(x.size) for x in reversed(cluster.levels) if x.torus)
        pod["nodeSelector"] = {
            "cloud.google.com/gke-tpu-accelerator": _GKE_TPUS[kind.name],
            "cloud.google.com/gke-tpu-topology": shape,
        }
        count = count * len(cluster.nodes) // hosts
        resource = "google.com/tpu"
    elif kind.platform == "gpu":
        vendor = "amd.com" if kind.name.startswith(("mi", "w6")) else "nvidia.com"
        resource = f"{vendor}/gpu"
        container |= _process_variables(name, hosts)
    else:
        resource = "cpu"
        container |= _process_variables(name, hosts)
    container["resources"] = {"limits": {resource: count}}
    pod["containers"] = [container]
    return pod, count


def _process_variables(name: str, hosts: int) -> dict[str, Any]:
    if hosts == 1:
        return {}
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    first = f"{name}-workers-0-0.{name}:{PORT}"
    variables = [
        {"name": "WHALEJAX_COORDINATOR", "value": first},
        {"name": "WHALEJAX_NUM_PROCESSES", "value": str(hosts)},
        {
            "name": "WHALEJAX_PROCESS_ID",
            "valueFrom": {"fieldRef": {"fieldPath": index}},
        },
    ]
    return {"env": variables}


def skypilot_text(
    plans: Sequence[PlanData], name: str, image: str, command: str
) -> str:
    """Returns YAML of a SkyPilot task for one plan, or for one of several clusters.

    Args:
        plans: The plan, or plans of one model on several clusters, best first. The task
            tries the clusters in turn that have as many hosts as the first.
        name: Name of the task.
        image: Container image; if empty, the default image of the cloud.
        command: Shell command; if empty, ``start_command``.

    Raises:
        PlanError: The cluster has several device kinds or TPU slices, or a kind without
            a SkyPilot name.
    """
    first = plans[0]
    hosts = _nodes(first.cluster)
    tried = [plan for plan in plans if _nodes(plan.cluster) == hosts]
    resources: dict[str, Any] = {}
    if len(tried) == 1:
        resources |= {"accelerators": _accelerators(first.cluster)}
    else:
        resources["ordered"] = [
            {"accelerators": _accelerators(plan.cluster)} for plan in tried
        ]
    if image:
        resources["image_id"] = f"docker:{image}"
    lines = []
    if hosts > 1:
        lines = [
            f'export WHALEJAX_COORDINATOR="$(echo "$SKYPILOT_NODE_IPS" | head -n1):'
            f'{PORT}"',
            "export WHALEJAX_NUM_PROCESSES=$SKYPILOT_NUM_NODES",
            "export WHALEJAX_PROCESS_ID=$SKYPILOT_NODE_RANK",
        ]
    if not command and len(tried) > 1:
        command = _planning_command(first)
    lines.append(command or start_command(first))
    document = {
        "name": name,
        "num_nodes": hosts,
        "resources": resources,
        "workdir": ".",
        "run": "\n".join(lines) + "\n",
    }
    said = [
        _script_text(_hosts(first.cluster)),
        "Add setup: with what installs your script's packages.",
    ]
    if len(tried) > 1:
        said.append(
            "Each cluster has a plan of its own, which the run makes when it starts."
        )
    else:
        said.append("The folder holds the script and plan.json.")
    left = [p.cluster.describe() for p in plans if p not in tried]
    if left:
        said.append(f"Left out, as a task has one number of nodes: {'; '.join(left)}.")
    return header(tried, [], said) + yaml_text(document)


def _planning_command(plan: PlanData) -> str:
    if plan.source and _hosts(plan.cluster) == 1:
        model, *settings = plan.source
        words = ["whalejax", "train", model]
        words += ["--set", *settings] if settings else []
        words += ["--batch", str(plan.batch[0].shape[0])] if plan.batch else []
        return shlex.join(words)
    return "python train.py"


def _accelerators(cluster: Cluster) -> str:
    _check_one_kind(cluster, "a SkyPilot task")
    kind = cluster.kinds[0]
    if kind.platform == "tpu":
        if len(cluster.nodes) > 1:
            raise PlanError(
                "a SkyPilot task has one TPU slice, but this plan has "
                f"{len(cluster.nodes)}. Export it as a JobSet"
            )
        return f"{tpu_type(cluster)}:1"
    if kind.name not in _SKYPILOT:
        raise PlanError(
            f"no SkyPilot name is known for {kind.name}; expected one of "
            f"{', '.join(_SKYPILOT)}"
        )
    return f"{_SKYPILOT[kind.name]}:{cluster.nodes[0].count}"


def _check_one_kind(cluster: Cluster, form: str) -> None:
    if len({(node.kind.name, node.count) for node in cluster.nodes}) > 1:
        raise PlanError(
            f"{form} has hosts of one kind, but this plan is for {cluster.describe()}. "
            "Start the hosts of each kind separately, and number WHALEJAX_PROCESS_ID "
            "over all of them"
        )


def _hosts(cluster: Cluster) -> int:
    """Returns the number of machines with a process: GPU nodes or TPU hosts."""
    if cluster.platform != "tpu":
        return len(cluster.nodes)
    chips = cluster.nodes[0].count
    alone = _ONE_HOST_CHIPS.get(cluster.kinds[0].name, _HOST_CHIPS)
    each = 1 if chips <= alone else math.ceil(chips / _HOST_CHIPS)
    return len(cluster.nodes) * each


def _nodes(cluster: Cluster) -> int:
    """Returns the number of nodes as SkyPilot counts them: a TPU slice is one node."""
    return len(cluster.nodes)


def _script_text(hosts: int) -> str:
    if hosts == 1:
        return "One process runs."
    return (
        f"One process runs on each of {hosts} hosts; the script calls "
        "wh.init_distributed() before it touches a device."
    )
