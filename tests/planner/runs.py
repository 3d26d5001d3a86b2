"""A run to vary in tests."""

from __future__ import annotations

import dataclasses
from typing import Any

from whalejax.estimates.decoder import DecoderSizes
from whalejax.estimates.frameworks import framework
from whalejax.estimates.published_run import PublishedRun
from whalejax.meshes.catalogue import entry


SIZES = DecoderSizes(
    layers=8,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn=4096,
    vocab=32768,
    seq=1024,
    gated=True,
    norm_bias=False,
    positions=False,
    tied=False,
)

BASE = PublishedRun(
    sizes=SIZES,
    framework=framework("nemo"),
    device=entry("h100"),
    num_devices=1,
    devices_per_node=8,
    data=1,
    fsdp=1,
    tensor=1,
    stages=1,
    context=1,
    expert=1,
    chunks=1,
    zero=0,
    sequence_parallel=False,
    micro_batch=2,
    global_batch=2,
    remat="none",
    dtype="bf16",
)


def run(device: str = "h100", source: str = "nemo", **changes: Any) -> PublishedRun:
    """A run on one device, with changes."""
    sizes = dataclasses.replace(SIZES, **changes.pop("sizes", {}))
    found = dataclasses.replace(
        BASE, sizes=sizes, device=entry(device), framework=framework(source)
    )
    return dataclasses.replace(found, **changes)
