"""Pipelines over mixed devices, from the column ``notes`` of a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from whalejax.estimates.published_run import ReplicaDevices, StageSpec
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.formats.device_aliases import read_device
from whalejax.meshes.texts import quoted


_STAGES = re.compile(r"stages\s*(\[.*?\](?:\s*->\s*\[.*?\])*)", re.IGNORECASE)
_LAYERS = re.compile(r"profile-layers per stage\s*([\d|\s]+)", re.IGNORECASE)


def stages_of(text: str, layers: int) -> tuple[StageSpec, ...]:
    """Returns the stages with their replicas and layers; empty if the text has none.

    Args:
        text: Text of the column ``notes``.
        layers: Number of layers of the model.

    Raises:
        WhaleError: The number of layers differs, or a replica is no ``KINDxTPn``.

    >>> first, last = stages_of(
    ...     "stages [V100-16xTP2] -> [T4xTP1]; profile-layers per stage 20|14", 32)
    >>> (first.layers, last.replicas[0].device.kind.name)
    (19, 't4')
    """
    result, counted = _STAGES.search(text), _LAYERS.search(text)
    if result is None or counted is None:
        return ()
    groups = re.findall(r"\[(.*?)\]", result[1])
    numbers = [int(n) for n in counted[1].split("|") if n.strip()]
    if len(numbers) != len(groups) or sum(numbers) != layers + 2:
        raise WhaleError(
            f"notes give {len(groups)} stages and layers {numbers}, in all "
            f"{sum(numbers)}; expected one number a stage and {layers} + 2 in all"
        )
    numbers[0] -= 1
    numbers[-1] -= 1
    return tuple(
        StageSpec(replicas=tuple(map(_replica, group.split(","))), layers=number)
        for group, number in zip(groups, numbers, strict=True)
    )


def devices_of(stages: Sequence[StageSpec]) -> int:
    """Returns the number of devices of the stages."""
    return sum(replica.tensor for stage in stages for replica in stage.replicas)


def notes_of(text: str, stages: Sequence[StageSpec], count: int) -> Iterator[str]:
    """Yields the notes on stages from a text.

    Args:
        text: Text of the column ``notes``.
        stages: Stages from the text.
        count: Number of devices in the row.
    """
    if not stages:
        return
    if devices_of(stages) != count:
        yield f"num_devices {devices_of(stages)} (of the stages; the row says {count})"
    for name in re.findall(r"[\[,]\s*([^\[\],]+?)\s*x\s*TP", text, re.IGNORECASE):
        yield from read_device(name, guess=True).notes


def _replica(text: str) -> ReplicaDevices:
    match = re.fullmatch(
        r"\s*(.+?)\s*x\s*TP\s*([1-9][0-9]{0,4})\s*", text, re.IGNORECASE
    )
    if match is None:
        raise WhaleError(f"notes: {quoted(text.strip())} is no KINDxTPn")
    return ReplicaDevices(
        device=read_device(match[1], guess=True).entry, tensor=int(match[2])
    )
