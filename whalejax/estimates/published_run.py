"""A training run from a table: a decoder, a machine, and a given layout.

The planner searches for layouts. Here the layout is given, as the run was measured. The
column ``notes`` of a table describes pipelines over mixed devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whalejax.estimates.decoder import DecoderSizes, Remat
from whalejax.estimates.frameworks import Framework
from whalejax.meshes.catalogue import CatalogueEntry
from whalejax.meshes.errors import WhaleError, quoted
from whalejax.meshes.fitted_constants import TUNED, width_of
from whalejax.meshes.formats.device_aliases import read_device
from whalejax.planner.pipeline.schedules import most_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDevices:
    """Devices of one replica of a pipeline stage.

    Attributes:
        device: Catalogue entry of the devices.
        tensor: Number of tensor-parallel devices.
    """

    device: CatalogueEntry
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One stage of a pipeline over mixed devices.

    Attributes:
        replicas: Devices of each data-parallel replica of the stage.
        layers: Number of layers of the decoder.
    """

    replicas: tuple[ReplicaDevices, ...]
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One training run.

    Attributes:
        sizes: Sizes of the model.
        framework: Framework of the run.
        device: Catalogue entry of the devices; of the slowest if they are mixed.
        num_devices, devices_per_node: Number of devices in total, and per node or
            slice.
        data, fsdp, tensor, stages, context, expert: Sizes of the mesh axes. ``expert``
            divides the devices of the other axes, and adds none.
        chunks: Number of parts of the model on each pipeline stage.
        zero: ZeRO stage over the data-parallel devices (0 to 3).
        sequence_parallel: Whether values between tensor-parallel products are sharded
            over the sequence.
        micro_batch: Number of samples in a micro-batch of one data-parallel rank.
        global_batch: Number of samples in a step.
        remat: Remat policy.
        dtype: Dtype of products: ``bf16``, ``f16``, ``f32``, ``tf32`` or ``f8``.
        unlike: Stages, if they are on mixed devices; else empty.
        offloaded: Whether the saved values are in host memory.
        frozen: Whether parameters are fixed, and only small adapters are trained.
        autocast: Whether parameters and the residual stream are float32, and every
            micro-batch casts parameters to 16 bits.
        loss_chunks: Number of chunks of a micro-batch whose logits are computed one
            after the other.
    """

    sizes: DecoderSizes
    framework: Framework
    device: CatalogueEntry
    num_devices: int
    devices_per_node: int
    data: int
    fsdp: int
    tensor: int
    stages: int
    context: int
    expert: int
    chunks: int
    zero: int
    sequence_parallel: bool
    micro_batch: int
    global_batch: int
    remat: Remat
    dtype: str
    unlike: tuple[StageSpec, ...] = ()
    offloaded: bool = False
    frozen: bool = False
    autocast: bool = False
    loss_chunks: int = 1

    @property
    def multiplied(self) -> str:
        """Dtype in which products run on this device; see ``multiplies_in``."""
        return self.device.kind.multiplies_in(self.dtype, exact=True)

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of an activation's element; products in 8 bits read 16-bit operands."""
        return 4 if self.dtype in ("f32", "tf32") else 2

    @property
    def speed(self) -> str:
        """Dtype of the products' efficiency; see ``fitted_constants``."""
        width = width_of(self.multiplied)
        return TUNED if width == "bf16" and self.framework.tuned else width

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.data * self.fsdp

    @property
    def weight_ranks(self) -> int:
        """Number of devices along batch and sequence that have the same parameters."""
        return self.ranks * self.context

    @property
    def shards(self) -> int:
        """Number of shards in which a parameter is stored (ZeRO-3)."""
        return self.fsdp * self.context if self.zero >= 3 else 1

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of one rank in a step."""
        return max(1, self.global_batch // (self.ranks * self.micro_batch))

    @property
    def in_flight(self) -> float:
        """Activations of the first stage, which has most, in units of one stage's."""
        name = "interleaved" if self.chunks > 1 else "1f1b"
        counts = self.num_micro_batches, self.chunks
        return float(most_in_flight(name, self.stages, 0, *counts)) / self.chunks

    @property
    def layers_per_stage(self) -> int:
        """Number of layers of the fullest stage."""
        return math.ceil(self.sizes.layers / self.stages)

    @property
    def tokens(self) -> int:
        """Number of tokens in a step."""
        return self.global_batch * self.sizes.seq

    def model_flops(self) -> float:
        """Returns the FLOPs of a step as the framework counts them."""
        s, convention = self.sizes, self.framework.flops
        seen = 0.5 if convention == "causal" else 1.0
        scores = 4.0 * s.layers * s.heads * s.head_dim * s.seq * seen
        lookups = s.embedding_params - (s.hidden * s.vocab if s.tied else 0)
        forward = 2.0 * (s.active_params - lookups) + scores
        total = 3.0 * forward
        if convention == "hardware" and self.remat == "full":
            idle = (s.params - s.active_params) / s.layers
            total += 2.0 * s.layers * (s.layer_params - idle) + scores
        return total * self.tokens


_STAGES = re.compile(r"stages\s*(\[.*?\](?:\s*->\s*\[.*?\])*)", re.IGNORECASE)
_LAYERS = re.compile(r"profile-layers per stage\s*([\d|\s]+)", re.IGNORECASE)


def stages_of(text: str, layers: int) -> tuple[StageSpec, ...]:
    """Returns the stages with their replicas and layers; empty if the text has none.

    Args:
        text: Text of the column ``notes``.
        layers: Number of layers of the model.

    Raises:
        WhaleError: The number of layers differs, or a replica is not ``KINDxTPn``.

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
            f"notes give {len(groups)} stages and layers {numbers}, in total "
            f"{sum(numbers)}; expected one number per stage and {layers} + 2 in total"
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
    """Yields the notes on stages that a text describes.

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
        raise WhaleError(f"notes: {quoted(text.strip())} is not KINDxTPn")
    return ReplicaDevices(
        device=read_device(match[1], guess=True).entry, tensor=int(match[2])
    )
