"""Defaults of the frameworks of published runs, for values that a table omits.

Most defaults are those that the frameworks document. ``UNKNOWN`` has common values,
``tuned`` is fitted, and the last three attributes of ``Framework`` describe profiles of
one paper. Defaults never depend on a model or a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from whalejax.estimates.decoder import Remat


Convention = Literal["model", "hardware", "causal"]
"""Ways to count FLOP/s. ``model`` counts both passes with all attention scores,
``hardware`` adds recomputation, and ``causal`` is ``model`` with half of the scores.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Defaults of one framework.

    Attributes:
        name: Name for reports.
        words: Words that name the framework in tables; see ``framework``.
        compiled: Whether the step is one program on the device. If not, a host launches
            every operation. A row may say otherwise under ``compile``.
        xla: Whether XLA compiles the step; a row cannot change this.
        flash: Whether attention is one kernel that keeps its scores on chip. A row may
            say otherwise, and devices before Ampere need ``flash_anywhere``.
        overlaps_gradients: Whether gradient reduction overlaps with the backward pass.
        overlaps_layers: Whether tensor- and context-parallel collectives overlap with
            products, in chunks.
        interleaves: Whether published recipes divide a stage into virtual stages, at
            most eight. A row may say otherwise.
        sequence_parallel: Whether tensor parallelism shards the sequence. A row may say
            otherwise.
        zero: ZeRO stage over data-parallel devices. A row may say otherwise.
        remat: Remat policy; None for no remat with an attention kernel, and selective
            remat without one. A row may say otherwise.
        selective: Remat policy that the framework calls "selective".
        flops: Way to count FLOPs.
        dtype: Dtype of products. A row may say otherwise.
        gradient_bytes: Bytes of one parameter's gradient, in memory and in the
            reduction. With XLA, gradients in the reduction have the products' dtype.
        fused_accumulation: Whether products of weights' gradients add to the gradients
            of earlier micro-batches.
        eager: Whether RMSNorm, rotary embeddings, gates, and masks of attention without
            a kernel are launched as single operations if the step is not compiled.
        tuned: Whether products have a separately fitted efficiency. In Megatron-LM from
            before attention kernels, products were faster than in other frameworks, for
            an unknown reason.
        grouped: Whether attention supports fewer heads of keys than of queries.
        fused_loss: Whether the loss is one kernel that reads logits in their own dtype.
            ``with_compilation`` sets it for compiled steps.
        pads_vocabulary: Whether the vocabulary is padded to a multiple of 128 per rank
            that shards it. If not, it is rounded down to a multiple of the ranks.
        dropout: Whether models have dropout of attention weights and residual inputs.
            Models with gates have none.
        attention_generation: Generation of devices for which the attention kernel was
            written: 7 before Ampere, 8 Ampere, 9 Hopper and later.
        flash_anywhere: Whether older devices have an attention kernel too.
        flash_plain: Whether models without a gated feed-forward have the kernel too.
        kernels_only: Whether only the time of kernels was measured, without host
            launches and optimizer.
    """

    name: str
    words: tuple[str, ...]
    compiled: bool = False
    xla: bool = False
    flash: bool = True
    overlaps_gradients: bool = True
    overlaps_layers: bool = False
    interleaves: bool = False
    sequence_parallel: bool = False
    zero: int = 0
    remat: Remat | None = None
    selective: Remat = "selective"
    flops: Convention = "model"
    dtype: str = "bf16"
    gradient_bytes: int = 2
    fused_accumulation: bool = False
    eager: bool = False
    tuned: bool = False
    grouped: bool = True
    fused_loss: bool = True
    pads_vocabulary: bool = True
    dropout: bool = False
    attention_generation: int = 8
    flash_anywhere: bool = False
    flash_plain: bool = True
    kernels_only: bool = False


MEGATRON = "megatron"
"""Word for Megatron-LM, whose versions differ by year and authors."""

FRAMEWORKS = (
    Framework(
        # Single layers of Hugging Face's Llama and of DeepSpeed's BERT and GPT.
        name="Zorse's profiles of layers",
        words=("zorse",),
        eager=True,
        remat="none",
        fused_loss=False,
        pads_vocabulary=False,
        dropout=True,
        flash_anywhere=True,
        flash_plain=False,
        kernels_only=True,
    ),
    Framework(
        name="Megatron-DeepSpeed",
        words=(
            "vtrain",
            "megatron-deepspeed",
            "deepspeed-megatron",
            "bigscience",
            "mt-nlg",
        ),
        tuned=True,
        flash=False,
        overlaps_gradients=False,
        remat="full",
        fused_loss=False,
        pads_vocabulary=False,
        dropout=True,
    ),
    Framework(
        name="Sailor",
        words=("sailor", "metis"),
        flash=False,
        overlaps_gradients=False,
        remat="none",
        eager=True,
        grouped=False,
        gradient_bytes=4,
        fused_loss=False,
        pads_vocabulary=False,
        dtype="tf32",
    ),
    Framework(
        # Its scaling was measured with PyTorch's data parallelism, which overlaps.
        name="Megatron-LM of 2020",
        words=("megatron-lm-2019", "megatron-lm-2020", "megatron-2020", "shoeybi"),
        tuned=True,
        flash=False,
        remat="full",
        flops="hardware",
        fused_loss=False,
        dropout=True,
    ),
    Framework(
        name="Megatron-LM of 2021 and 2022",
        words=(
            "megatron-lm-a100-2021",
            "megatron-lm-2021",
            "megatron-lm-2022",
            "megatron-2021",
            "megatron-2022",
            "narayanan",
            "korthikanti",
        ),
        tuned=True,
        flash=False,
        overlaps_gradients=False,
        remat="full",
        flops="hardware",
        gradient_bytes=4,
        fused_accumulation=True,
        fused_loss=False,
        dropout=True,
    ),
    Framework(
        name="Megatron-LM and NeMo",
        words=("megatron", "megatronlm", "nemo"),
        overlaps_layers=True,
        fused_accumulation=True,
        sequence_parallel=True,
        interleaves=True,
        zero=1,
    ),
    Framework(
        name="LLM Foundry",
        words=("llm-foundry", "composer", "mosaicml", "mosaic"),
        zero=3,
        attention_generation=7,
    ),
    Framework(
        name="InternEvo",
        words=("intern-evo", "internlm"),
        overlaps_gradients=False,
        attention_generation=7,
        zero=1,
    ),
    Framework(
        name="TorchTitan",
        words=("torch-titan", "pytorch-fsdp"),
        compiled=True,
        eager=True,
        fused_loss=False,
        sequence_parallel=True,
        zero=3,
        remat="alternate_dots",
        selective="alternate_dots",
        gradient_bytes=4,
    ),
    Framework(
        name="PaxML and T5X",
        words=("jax-toolbox", "pax", "paxml", "t5x"),
        compiled=True,
        xla=True,
        flash=False,
        overlaps_gradients=False,
        remat="full",
    ),
    Framework(
        name="AXLearn",
        words=("ax-learn",),
        compiled=True,
        xla=True,
        flash=False,
        zero=3,
        remat="full",
        flops="causal",
    ),
    Framework(
        name="MaxText",
        words=("max-text",),
        compiled=True,
        xla=True,
        zero=3,
        remat="full",
        flops="causal",
    ),
    Framework(
        # ZeRO-3 overlaps its exchanges; its own examples compute in float16.
        name="DeepSpeed",
        words=("deep-speed", "zero-infinity", "zero-offload"),
        zero=3,
        fused_loss=False,
        dtype="f16",
    ),
    Framework(
        name="GPT-NeoX",
        words=("gpt-neox", "neox"),
        zero=1,
        remat="full",
        fused_loss=False,
        dtype="f16",
    ),
    Framework(
        name="Metaseq",
        words=("metaseq", "opt-175b"),
        tuned=True,
        flash=False,
        zero=3,
        remat="full",
        fused_loss=False,
        dropout=True,
        dtype="f16",
    ),
    Framework(
        name="Hugging Face Transformers",
        words=("huggingface", "hugging-face", "hf", "transformers", "accelerate"),
        eager=True,
        fused_loss=False,
        pads_vocabulary=False,
    ),
    Framework(
        name="Levanter",
        words=("levanter",),
        compiled=True,
        xla=True,
        zero=3,
        remat="full",
    ),
    Framework(
        name="Alpa",
        words=("alpa",),
        compiled=True,
        xla=True,
        flash=False,
        overlaps_gradients=False,
        remat="full",
        flops="hardware",
        dtype="f16",
    ),
)
"""Frameworks that a table may name."""

UNKNOWN = Framework(
    name="an unnamed framework", words=(), sequence_parallel=True, zero=1
)
"""Framework of rows that name none, with defaults that are common today."""


def with_compilation(found: Framework, compiled: bool) -> Framework:
    """Returns the framework with its step compiled, or launched by a host.

    Args:
        found: Framework to change.
        compiled: Whether the step is one program on the device.

    >>> with_compilation(framework("torchtitan"), False).eager
    True
    """
    return replace(
        found,
        compiled=compiled,
        eager=found.eager and not compiled,
        fused_loss=found.fused_loss or compiled,
    )


def framework(source: str, place: str = "") -> Framework:
    """Returns the framework of a row.

    The words of a framework may be anywhere in the text, with blanks, brackets, commas
    or nothing instead of hyphens. If a text names several frameworks, the last counts:
    ``jax-toolbox-maxtext`` is MaxText. Of words that end at the same place, the longest
    counts. If that framework is Megatron-LM, other words in the text choose its
    version: a year, authors, or DeepSpeed.

    Args:
        source: Cell ``source`` of the row.
        place: Reference of the row's table, such as a repository. It is used if the
            cell names no framework; default: empty.

    >>> framework("nemo-24.07").name
    'Megatron-LM and NeMo'
    >>> framework("table 3", "pytorch/torchtitan:benchmarks/llama3.md").name
    'TorchTitan'
    >>> framework("Megatron-LM (2021)").name
    'Megatron-LM of 2021 and 2022'
    >>> framework("Shoeybi et al., Megatron-LM").name
    'Megatron-LM of 2020'
    """
    for text in (source.strip().lower(), place.strip().lower()):
        result = [
            (match.end(), len(word), number)
            for number, one in enumerate(FRAMEWORKS)
            for word in one.words
            for match in re.finditer(_pattern(word), text)
        ]
        if result:
            last = FRAMEWORKS[max(result)[2]]
            beside = _megatron_variant(text) if MEGATRON in last.words else None
            return beside or last
    return UNKNOWN


def _megatron_variant(text: str) -> Framework | None:
    """Returns the version whose words besides "megatron" and "lm" occur, or None."""
    if MEGATRON not in text:
        return None
    for one in FRAMEWORKS:
        for word in one.words if one.name.startswith("Megatron") else ():
            others = {*word.split("-")} - {MEGATRON, "lm"}
            if others and all(re.search(_pattern(part), text) for part in others):
                return one
    return None


def _pattern(word: str) -> str:
    inner = r"[-_ ()\[\],:/]*".join(map(re.escape, word.split("-")))
    return rf"(?<![a-z0-9]){inner}(?![a-z])"
