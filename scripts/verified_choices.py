"""Lists training steps whose layout the planner chooses, for ``bench_verify.py``.

Names, sizes, devices and global batches only: mesh, micro-batches, rematerialization,
attention and offload are the defaults of ``wh.plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """A training step to plan.

    Attributes:
        label: Name without cluster, batch and precision.
        topology: Cluster as text.
        model: A reference model, or one of ``foreign_programs``.
        batch: Samples in the global batch.
        options: Options of the model.
        precision: Precision for ``wh.plan``.
    """

    label: str
    topology: str
    model: str
    batch: int
    options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "bf16"

    @property
    def name(self) -> str:
        """Unique name."""
        return f"{self.label} {self.topology} batch {self.batch} {self.precision}"


def _each(
    label: str,
    model: str,
    places: Mapping[str, int],
    options: Mapping[str, Any] | None = None,
    precision: str = "bf16",
) -> tuple[Choice, ...]:
    return tuple(
        Choice(
            label=label,
            topology=topology,
            model=model,
            batch=batch,
            options=options or {},
            precision=precision,
        )
        for topology, batch in places.items()
    )


GEMMA_2B = {"vocab": 256_000, "embed": 2048, "heads": 8, "kv_heads": 1, "mlp": 16_384}
QWEN_SMALL = {"vocab": 151_936, "embed": 896, "heads": 14, "kv_heads": 2, "mlp": 4864}
LLAMA_3B = {"vocab": 128_256, "embed": 3072, "heads": 24, "kv_heads": 8, "mlp": 8192}
SCANNED = {"scan_layers": True}
SPARSE = {"embed": 1024, "heads": 16, "mlp": 4096, "layers": 12, **SCANNED}

CHOICES = (
    *_each(
        "llama-3b",
        "llama-test",
        {"v5e:4x4": 64, "v6e:2x4": 64, "v5p:2x2x1": 32, "v5e:8x8": 256},
        {"layers": 28, "sequence": 4096, **LLAMA_3B},
    ),
    *_each(
        "llama-3b long",
        "llama-test",
        {"v5p:2x2x2": 8, "v6e:4x4": 16},
        {"layers": 28, "sequence": 16_384, **LLAMA_3B},
    ),
    *_each(
        "llama-3b cut",
        "llama-test",
        {"v5e:2x2": 32, "v6e:1x1": 8, "v5p:2x2x1": 64},
        {"layers": 6, "sequence": 2048, **LLAMA_3B},
    ),
    *_each(
        "llama-3b unrolled",
        "llama-test",
        {"v5e:4x4": 64, "v5p:2x2x1": 32},
        {"layers": 6, "sequence": 2048, "scan_layers": False, **LLAMA_3B},
    ),
    *_each(
        "gemma-2b",
        "llama-test",
        {"v5e:4x4": 64, "v6e:2x2": 32, "v5p:2x2x1": 64, "v6e:4x4": 256},
        {"layers": 18, "sequence": 2048, **GEMMA_2B},
    ),
    *_each(
        "gemma-2b cut",
        "llama-test",
        {"v5e:2x2": 16, "v5e:2x4": 64},
        {"layers": 5, "sequence": 4096, **GEMMA_2B},
    ),
    *_each(
        "qwen-0.5b",
        "llama-test",
        {
            "v5e:2x2": 64,
            "v6e:1x1": 16,
            "v5p:2x2x1": 128,
            "v5e:4x4": 256,
            "v6e:2x2": 128,
        },
        {"layers": 24, "sequence": 2048, **QWEN_SMALL},
    ),
    *_each(
        "qwen-0.5b long",
        "llama-test",
        {"v5e:4x4": 16, "v6e:2x2": 8},
        {"layers": 24, "sequence": 32_768, **QWEN_SMALL},
    ),
    *_each(
        "qwen-0.5b unrolled",
        "llama-test",
        {"v5e:2x2": 64, "v6e:2x2": 64},
        {"layers": 8, "sequence": 2048, "scan_layers": False, **QWEN_SMALL},
    ),
    *_each(
        "llama-8b",
        "llama-8b",
        {"v5p:2x2x2": 32, "v6e:4x4": 128, "v5e:8x8": 128},
        {"sequence": 4096},
    ),
    *_each(
        "gpt-large",
        "gpt-large",
        {"v5e:2x2": 64, "v5e:4x4": 256, "v6e:2x2": 64, "v5p:2x2x1": 128},
        {**SCANNED},
    ),
    *_each(
        "gpt-xl",
        "gpt-xl",
        {"v5e:2x4": 64, "v5e:4x4": 128, "v6e:2x2": 64, "v5p:2x2x1": 64},
        {**SCANNED},
    ),
    *_each(
        "gpt-medium",
        "gpt-medium",
        {
            "v5e:1x1": 8,
            "v5e:2x2": 128,
            "v6e:1x1": 32,
            "v5p:2x2x1": 256,
            "v6e:2x2": 256,
        },
        {**SCANNED},
    ),
    *_each(
        "gpt-small",
        "gpt-small",
        {"v5e:1x1": 32, "v5e:2x2": 128, "v6e:1x1": 64},
    ),
    *_each("gpt-medium", "gpt-medium", {"v5e:2x2": 64}, SCANNED, "f32"),
    *_each("bert-large", "bert-large", {"v5e:2x2": 256, "v6e:2x2": 512, "v5e:1x1": 32}),
    *_each("bert-base", "bert-base", {"v5e:1x1": 128, "v6e:2x2": 1024}),
    *_each("t5-large", "t5-large", {"v5e:4x4": 128, "v6e:2x2": 64}),
    *_each("t5-base", "t5-base", {"v5e:2x2": 128, "v6e:1x1": 32}),
    *_each(
        "moe-16x",
        "moe",
        {"v5e:4x4": 256, "v6e:2x4": 128, "v5p:2x2x2": 256, "v5p:2x2x1": 64},
        {"experts": 16, "sequence": 1024, **SPARSE},
    ),
    *_each(
        "moe-8x",
        "moe",
        {"v5e:2x2": 64, "v6e:2x2": 128, "v5p:2x2x1": 256},
        {"experts": 8, "sequence": 2048, **SPARSE},
    ),
    *_each("resnet50", "resnet50", {"v5e:1x1": 256, "v5e:2x2": 1024, "v6e:2x2": 2048}),
    *_each("vgg16", "vgg16", {"v5e:2x2": 512}),
    *_each("gnmt", "gnmt", {"v5e:2x2": 1024, "v5e:1x1": 256}),
    *_each("unet3d", "unet3d", {"v5e:2x2": 8, "v6e:1x1": 2}),
    *_each("cosmoflow", "cosmoflow", {"v5e:2x2": 64, "v6e:2x2": 256}),
)
"""Sizes that fill the devices, chosen without a compiler."""

FOREIGN = (
    *_each("U-Net", "unet", {"v5e:2x2": 256}),
    *_each("3-D ResNet", "resnet3d", {"v5e:2x2": 768}),
    *_each("GPT in NNX", "nnx_gpt", {"v5e:2x4": 352, "v5p:2x2x1": 512}),
    *_each("ViT", "vit", {"v5e:2x2": 512, "v5p:2x2x1": 2048}),
    *_each("experts by products", "dense_experts", {"v5e:2x4": 192, "v5e:2x2": 64}),
    *_each("sorted experts", "ragged_experts", {"v5e:4x4": 128}),
    *_each("LSTM", "lstm", {"v5e:2x4": 1152}),
    *_each("translating LSTMs", "seq2seq", {"v5e:2x2": 1024, "v5e:1x1": 256}),
    *_each("stacked tables", "stacked_tables", {"v5e:4x4": 32_768}),
    *_each("separate tables", "separate_tables", {"v5e:4x4": 32_768}),
    *_each(
        "llama-0.8b of one sample",
        "llama-test",
        {"v5e:4x8": 1},
        {**LLAMA_3B, "layers": 4, "sequence": 131_072},
    ),
)
"""Programs as users write them; no judges, because sizes of the U-Net, the 3-D ResNet
and the GPT were raised after smaller ones had been compiled."""
