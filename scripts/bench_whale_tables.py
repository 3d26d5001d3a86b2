"""Predicts Whale's published results for mixed clusters and for a split head.

V100 over P100 for each model follows from the planner's speeds of the two kinds for the
model's products and memory traffic; data parallelism and pipelines use the same ratio.
Nothing is fitted to Whale's own speed-ups, nor to any of these models. Shares and
stages are the planner's (``shares``, ``stage_placement``, the 1F1B table, simulated),
as are the prices of collectives. Data-parallel rows count no communication, because the
paper gives no batch sizes for them.

    python scripts/bench_whale_tables.py

The last line is one JSON object with, for each case and model,

    NAME                  predicted speed-up
    NAME_error            predicted over published, less one
    NAME_sheet            prediction from the data sheets' float32 rates alone
    ratio_NAME            predicted V100 over P100; ratio_NAME_measured by others
    head_N_fitted         split head with the fitted efficiency of networks
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from whalejax.estimates.decoder import DecoderSizes  # noqa: E402
from whalejax.estimates.frameworks import framework  # noqa: E402
from whalejax.estimates.published_run import PublishedRun  # noqa: E402
from whalejax.estimates.step_model import Runs  # noqa: E402
from whalejax.estimates.workload import LAYER  # noqa: E402
from whalejax.meshes import Cluster, device_kind  # noqa: E402
from whalejax.meshes import cluster as parse  # noqa: E402
from whalejax.meshes.catalogue import entry  # noqa: E402
from whalejax.meshes.cluster import Level, Node  # noqa: E402
from whalejax.meshes.device_kinds import DeviceKind  # noqa: E402
from whalejax.meshes.fitted_constants import constants  # noqa: E402
from whalejax.planner.balance.shares import Device, balance  # noqa: E402
from whalejax.planner.cost.collectives import axis_parts, collective_seconds  # noqa: E402
from whalejax.planner.pipeline.heterogeneous_stages import place  # noqa: E402
from whalejax.planner.pipeline.schedules import schedule  # noqa: E402
from whalejax.planner.pipeline.simulate import simulate  # noqa: E402
from whalejax.planner.pipeline.stage_cuts import Layer, Stage  # noqa: E402


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Samples or steps per second on one GPU of each kind, and their source."""

    v100: float
    p100: float
    source: str
    stands_in: str = ""

    @property
    def ratio(self) -> float:
        """V100 over P100."""
        return self.v100 / self.p100


GAVEL: Final = (
    "stanford-futuredata/gavel, scheduler/oracle_throughputs.json (19b15c0), alone on "
    "one GPU, steps/s, "
)
MEASURED: Final = {
    "resnet50": Measured(
        v100=298.51,
        p100=181.53,
        source="MXNet docs, training, batch 32, images/s: V100 docs/faq/perf.md "
        "(054aeee, MXNet 1.2, cuDNN 7), P100 docs/how_to/perf.md (076c2a0, cuDNN 5.1)",
    ),
    "gnmt": Measured(
        v100=43.904,
        p100=26.360,
        source=GAVEL + "LM, batch 80",
        stands_in="an LSTM language model",
    ),
    "bert": Measured(
        v100=5.7712,
        p100=3.0295,
        source=GAVEL + "Transformer, batch 128",
        stands_in="a translation Transformer",
    ),
    "t5": Measured(
        v100=5.7712,
        p100=3.0295,
        source=GAVEL + "Transformer, batch 128",
        stands_in="a translation Transformer",
    ),
}
"""Others' measurements to compare ``ratio`` with; no prediction uses them. Batch sizes
are the largest that both report. Gavel's ResNet-50 (ratio 2.1 to 2.7) is left out: its
P100 makes 130 to 142 images/s at every batch from 16 to 128, so that the GPU is not the
limit."""

DATA: Final = {"resnet50": 1.30, "gnmt": 1.27, "bert": 1.45}
PIPELINE: Final = {"bert": 1.23, "t5": 1.23}
HEAD: Final = {8: 1.13, 16: 1.66, 32: 2.43}
"""Published by Jia et al., USENIX ATC 2022, evaluation; some are read from figures."""

KINDS: Final = ("v100-16", "p100-16")
PASSES: Final = 13
"""Passes over an activation that is normalized and clipped, by separate kernels:
forward five (statistics read; normalized and clipped, each read and written), backward
eight (clipped: two read, one written; two read for sums, two for the gradient, one
written)."""

GATES: Final = 30
"""Passes over the state of an LSTM's step: four gates and two states, forward read and
written, backward twice as many, and the sums between."""


def products_seconds(
    kind: DeviceKind, shapes: list[tuple[int, int, int, int]]
) -> float:
    """Returns the seconds of float32 products (m, k, n, count) with both gradients."""
    return math.fsum(
        float(kind.matmul_seconds("f32", *sides)) * times
        for m, k, n, times in shapes
        for sides in ((m, k, n), (m, n, k), (k, m, n))
    )


def resnet50_seconds(kind: DeviceKind, batch: int = 32) -> float:
    """Returns a step of ResNet-50 on 224 × 224 images, as products."""
    shapes, elements = [(batch * 112 * 112, 3 * 49, 64, 1)], batch * 112 * 112 * 64
    channels, side = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(blocks):
            pixels = batch * side * side
            shapes += [(pixels, channels, width, 1), (pixels, 9 * width, width, 1)]
            shapes += [(pixels, width, 4 * width, 1)]
            shapes += [(pixels, channels, 4 * width, 1)] * (number == 0)
            elements += pixels * (2 * width + 4 * width * (1 + (number == 0)))
            channels = 4 * width
        side //= 2
    moved = 4.0 * elements * PASSES
    return products_seconds(kind, shapes) + float(kind.elementwise_seconds(moved))


def gnmt_seconds(kind: DeviceKind, batch: int = 128, length: int = 25) -> float:
    """Returns a step of GNMT: 16 LSTM layers of 1,024 units, 32,000 words, no
    attention.

    A layer's reads of the layer below are one product over all steps; its reads of its
    own state are one for each step.
    """
    tokens, layers, units = batch * length, 16, 1024
    shapes = [
        (tokens, units, 4 * units, layers),
        (batch, units, 4 * units, layers * length),
    ]
    shapes += [(tokens, units, 32_000, 1)]
    moved = 4.0 * tokens * (layers * units * GATES + 32_000 * 6)
    return products_seconds(kind, shapes) + float(kind.elementwise_seconds(moved))


def transformer_seconds(kind: str, sizes: DecoderSizes) -> float:
    """Returns a layer of a Transformer in float32, without an attention kernel."""
    run = PublishedRun(
        sizes=sizes,
        framework=framework("vtrain"),
        device=entry(kind),
        dtype="f32",
        remat="none",
        micro_batch=8,
        global_batch=8,
        **dict.fromkeys(("num_devices", "devices_per_node", "data", "fsdp"), 1),
        **dict.fromkeys(("tensor", "stages", "context", "expert", "chunks"), 1),
        zero=0,
        sequence_parallel=False,
    )
    runs = Runs([dataclasses.replace(run, framework=ALONE)])
    ahead, behind = runs.places(constants())
    return float((ahead + behind)[LAYER, 0])


ALONE: Final = dataclasses.replace(framework("vtrain"), kernels_only=True)
LARGE: Final = DecoderSizes(
    layers=24,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn=4096,
    vocab=30522,
    seq=512,
    flash=False,
    dropout=True,
)
"""BERT-Large, and T5-Large, with layers of the same width."""


def ratio(model: str) -> float:
    """Returns V100 over P100 by the planner's speeds."""
    if model == "resnet50":
        fast, slow = (resnet50_seconds(device_kind(name)) for name in KINDS)
    elif model == "gnmt":
        fast, slow = (gnmt_seconds(device_kind(name)) for name in KINDS)
    else:
        fast, slow = (transformer_seconds(name, LARGE) for name in KINDS)
    return slow / fast


SAMPLES: Final = 240
"""Samples of a step on all 16 devices; shares are whole samples."""

LAYERS: Final = {"bert": 24, "t5": 48}
STAGES: Final = 4
MICRO_BATCHES: Final = 16
"""Not published."""


def data_parallel(ratio: float) -> float:
    """Returns the gain of the planner's shares on eight V100 and eight P100."""
    fast, slow = Device(seconds=1.0), Device(seconds=ratio)
    return balance(SAMPLES, [fast] * 8 + [slow] * 8).gain


def pipeline(ratio: float, layers: int) -> float:
    """Returns the gain of chosen over equal layers on V100 and P100 stages."""
    table = schedule("1f1b", STAGES, MICRO_BATCHES)
    gigabyte = 2.0**30
    fast = Stage(kind="v100-32", speed=1.0, memory_bytes=32 * gigabyte)
    slow = Stage(kind="p100-16", speed=1 / ratio, memory_bytes=16 * gigabyte)
    placement = place(
        [Layer(seconds=3.0)] * layers, [fast, fast, slow, slow], table.in_flight
    )
    counts = placement.cut.counts
    equal = [layers // STAGES] * STAGES

    def seconds(layers_by_stage: list[int]) -> float:
        pairs = list(zip(layers_by_stage, placement.stages, strict=True))
        ahead = [n / stage.speed for n, stage in pairs]
        back = [2 * n / stage.speed for n, stage in pairs]
        return simulate(table, ahead, back).step_seconds

    return seconds(equal) / seconds(list(counts))


BATCH: Final = 32
BODY_BYTES, HEAD_BYTES = 90e6, 782e6
FEATURES, CLASSES = 2048, 100_000


ETHERNET: Final = 1460 / 1538
"""Part of the line rate: TCP payload over IPv4 in the bytes of a full frame on the
wire, preamble and gap included (IEEE 802.3, 1500 bytes; RFC 9293)."""


def testbed(devices: int, share: float) -> Cluster:
    """Returns nodes of eight V100-32 on a part of 50 Gb/s Ethernet."""
    nodes, kind = devices // 8, device_kind("v100-32")
    inside = parse("v100-32:8").levels[0]
    # Links count per device: the eight of a node share one.
    speed = 50e9 / 8 / 8 * share
    outside = Level(
        name="ethernet",
        size=nodes,
        bandwidth_bytes_per_second=speed,
        latency_seconds=50e-6,
    )
    levels = (inside, outside) if nodes > 1 else (inside,)
    node = parse("v100-32:8")
    return dataclasses.replace(
        node, nodes=(Node(kind=kind, count=8),) * nodes, levels=levels
    )


def split_head(devices: int, share: float = ETHERNET) -> float:
    """Returns the gain of a split head over full replication."""
    machine = testbed(devices, share)
    parts = axis_parts(("data",), {"data": devices}, machine)
    kind, achieved = device_kind("v100-32"), constants().platforms["gpu"]
    overlapped = achieved.overlap_gradients
    flops = 3 * 2.0 * FEATURES * CLASSES * BATCH
    head = flops / kind.peak_flops("f32")
    compute = BATCH / MEASURED["resnet50"].v100 + head

    def reduced(nbytes: float) -> float:
        # As in estimates: overlap is limited by the computation.
        total = collective_seconds("all-reduce", nbytes, parts)
        return max(total * (1 - overlapped), total - compute * overlapped)

    def updated(nbytes: float) -> float:
        moved = nbytes / 4 * achieved.update_bytes
        return moved / (achieved.memory * kind.memory_bytes_per_second)

    # Features go to every shard of the head and their gradients come back summed.
    features = 4.0 * BATCH * devices * FEATURES
    border = collective_seconds("all-gather", features, parts)
    border += collective_seconds("reduce-scatter", features, parts)
    both = BODY_BYTES + HEAD_BYTES
    replicated = compute + reduced(both) + updated(both)
    own = updated(BODY_BYTES + HEAD_BYTES / devices)
    return replicated / (compute + reduced(BODY_BYTES) + border + own)


def main() -> None:
    sheet = 1 / (
        device_kind("p100-16").peak_flops("f32")
        / device_kind("v100-32").peak_flops("f32")
    )
    ratios = {model: ratio(model) for model in MEASURED}
    rows = [
        *(
            (f"dp_{m}", p, data_parallel(ratios[m]), data_parallel(sheet))
            for m, p in DATA.items()
        ),
        *(
            (
                f"pipeline_{m}",
                p,
                pipeline(ratios[m], LAYERS[m]),
                pipeline(sheet, LAYERS[m]),
            )
            for m, p in PIPELINE.items()
        ),
        *((f"head_{n}", p, split_head(n), split_head(n)) for n, p in HEAD.items()),
    ]
    report: dict[str, float] = {}
    for name, rate in MEASURED.items():
        note = f" ({rate.stands_in})" if rate.stands_in else ""
        print(
            f"{name}: V100 {ratios[name]:.2f}× P100, measured {rate.ratio:.2f}{note}: "
            f"{rate.source}"
        )
        report[f"ratio_{name}"] = round(ratios[name], 3)
        report[f"ratio_{name}_measured"] = round(rate.ratio, 3)
    for name, published, predicted, by_sheet in rows:
        error = predicted / published - 1
        print(
            f"{name:14} predicted {predicted:.2f}, published {published:.2f} "
            f"({error:+.0%}), data sheets alone {by_sheet:.2f}"
        )
        report[name] = round(predicted, 3)
        report[f"{name}_error"] = round(error, 3)
        report[f"{name}_sheet"] = round(by_sheet, 3)
    fitted = constants().platforms["gpu"].network
    for devices in HEAD:
        report[f"head_{devices}_fitted"] = round(split_head(devices, fitted), 3)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
