"""Habits of the frameworks of published runs, where a table does not name them.

A row of a table may name what it ran. The habits here are those frameworks' documented
defaults; they are properties of a framework and never of one table, model or row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from whalejax.estimates.rematerialization import Remat


Convention = Literal["model", "hardware", "causal"]
"""How FLOP/s are counted: ``model`` counts forward and backward with whole attention
scores; ``hardware`` adds what rematerialization computes again; ``causal`` is ``model``
with half of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Habits of one framework.

    Attributes:
        name: For reports.
        words: Words that mean it where a table uses them; see ``framework``.
        compiled: One program on the device; otherwise a host launches every operation.
            Where the row does not say, under ``compile``.
        xla: Its programs are XLA's, which are compiled whatever a row says.
        flash: Attention is one kernel that keeps its scores on chip.
        overlaps_gradients: Their reduction runs beside the backward pass.
        overlaps_layers: tensor- and context-parallel collectives run beside products,
            piece by piece.
        interleaves: Its recipes cut the layers of a stage into chunks of one or two,
            where the row does not say.
        sequence_parallel: Beside tensor parallelism, where the row does not say.
        zero: State that it shards over data-parallel devices, where the row does not
            say.
        remat: Recomputation, where the row does not say; None: as much as fits.
        selective: Meaning of its word "selective".
        flops: Its way of counting FLOPs.
        dtype: Type in which its products multiply, where the row does not say.
        gradient_bytes: Bytes of one parameter's gradient, as it is reduced (XLA reduces
            the results of products, in their type).
        fused_accumulation: Products of weight gradients add to those of the
            micro-batches before.
        eager: Masks of attention without a kernel, RMSNorm, rotary embeddings and gates
            are written operation by operation, and launched so unless compiled.
        tuned: Its products have an efficiency of their own, fitted apart: Megatron-LM's
            layers before attention kernels, which multiplied faster than others'
            for what no other term says.
        grouped: Its attention has fewer heads of keys than of queries where the model
            has.
        fused_loss: The loss is one kernel that reads logits in their own type; where
            it is compiled, it always is.
        pads_vocabulary: Whether it pads the vocabulary to a multiple of 128 for every
            rank that shards it; otherwise ranks hold the remainder of the division.
        dropout: Its models drop attention weights and what joins the residual stream.
        attention_generation: Generation of devices that its attention kernel was
            written for: 7 is that before Ampere, 8 Ampere's, 9 Hopper's and later.
        flash_anywhere: Whether it has an attention kernel for older devices, too.
        flash_plain: Models without a gated feed-forward have the kernel, too.
        kernels_only: Whether the time of kernels was measured alone: no host launches
            them, and there is no optimizer.
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
"""Word of the one whose years and authors tell apart."""

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
        # Its scaling was measured with PyTorch's own data parallelism, which overlaps.
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
        # ZeRO-3 overlaps what it exchanges; its own examples compute in float16.
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
"""Those that a table may name."""

UNKNOWN = Framework(
    name="an unnamed framework", words=(), sequence_parallel=True, zero=1
)
"""Where the row names none: what today's frameworks have in common."""


def with_compilation(found: Framework, compiled: bool) -> Framework:
    """The habits of a framework whose step is compiled, or launched by a host.

    Args:
        found: The framework.
        compiled: One program on the device.

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
    """The framework that a row means.

    Its words may stand anywhere in the text, as words, their hyphens also as blanks,
    brackets, commas or nothing. Of several, the last counts (``jax-toolbox-maxtext`` is
    MaxText), of those that end together the longest. Megatron-LM is that of the year or
    of the authors that stand anywhere beside it.

    Args:
        source: The row's ``source``.
        place: Source of the row, used where the framework is not named.

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
    """The Megatron whose other words stand in a text that names one."""
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
