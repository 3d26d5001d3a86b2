"""Interprets the words of tables for remat policies, dtypes and sharding.

Tables have many words for one value. Unknown words give a default or None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from whalejax.estimates.decoder import SAVED_BY_NAME, Remat


NO = frozenset("none no false off 0 0.0 disabled n/a - na".split())
"""Words for no."""

YES = frozenset("yes true on 1 1.0 enabled".split())
"""Words for yes."""

GATED = (
    "llama vicuna fuji internlm mistral mixtral gemma qwen deepseek yi- grok dbrx olmo "
    "palm maxtext-gps baichuan chatglm granite minicpm gpt-oss kimi"
).split()
"""Words in a model's name that imply a gated feed-forward, RMSNorm, and an output layer
that is not the embedding.
"""

ADAPTERS = ("lora", "qlora", "peft", "adapter")
"""Words of a row that imply that the model's own parameters are not trained."""

DOTS = (
    "dots minimal minimal_with_context minimal_flash minimal_offloaded dots_saveable "
    "checkpoint_dots offload_dots_saveable offload_dots"
).split()
"""Names for saving the results of matrix products in JAX and MaxText."""

POLICIES: Mapping[str, Remat] = {
    **{name: name for name in (*SAVED_BY_NAME, "alternate_dots")},
    **dict.fromkeys(DOTS, "dots"),
}
"""Policies that save products, by their names in tables."""

KNOWN_REMATS = ("none", "selective", "full", *POLICIES)
"""Names of policies that a note on an unknown policy lists."""

_BESIDE = frozenset("flash remat policy offload offloaded with".split()) | {""}
"""Words that may be next to the name of a policy."""

_BY_LAYER = re.compile(r"selective\W*(layer\W*)?\d")

_COMPILED = frozenset("compiled compile torch.compile inductor xla jit".split())
"""Words for a compiled step."""

EIGHT = ("fp8", "f8", "float8", "e4m3", "e5m2", "int8", "mxfp8", "mxfp6")
"""Words for products in 8 bits, MXFP6 included. The time of block scales, as in MXFP8,
does not count.
"""

FOUR = ("nvfp4", "mxfp4", "fp4", "float4", "e2m1")
"""Words for a precision in 4 bits."""

SIXTEEN = ("fp16", "f16", "float16", "half")
"""Words for float16."""


def has(text: str, word: str) -> bool:
    """Returns whether a word occurs in a lower-case text without adjacent letters.

    >>> has("llama2_70b_lora", "lora"), has("model exploration", "lora")
    (True, False)
    """
    return re.search(rf"(?<![a-z]){word}(?![a-z])", text) is not None


def degree(text: str) -> int:
    """Returns the integer of a cell, at least 1; 1 if it is not an integer."""
    try:
        return max(1, int(float(text)))
    except (ValueError, OverflowError):
        return 1


def yes(text: str) -> bool:
    """Returns whether a cell means yes: any text but words for no and a degree of 1.

    >>> [yes(text) for text in ("on", "8", "True", "none", "1.0", "-")]
    [True, True, True, False, False, False]
    """
    lowered = text.strip().lower()
    return lowered not in NO and lowered not in ("1", "1.0")


def is_bool_or_number(text: str) -> bool:
    """Returns whether a cell is a word for yes or no, or a number.

    >>> [is_bool_or_number(text) for text in ("on", "8", "None", "maybe")]
    [True, True, True, False]
    """
    lowered = text.strip().lower()
    return lowered in NO | YES or lowered.replace(".", "", 1).isdigit()


_NEGATIONS = frozenset(("no", "not", "off", "without", "disabled"))
_RECOMPUTES = re.compile("recompu|checkpoint|remat|selective|full")


def remat(text: str, selective: Remat) -> Remat | None:
    """Returns the remat policy that a name means; None for unknown names.

    Args:
        text: Text of the cell, in lower case.
        selective: Policy that the framework calls "selective".

    >>> remat("full recompute", "selective"), remat("save_qkv_proj", "selective")
    ('full', 'save_qkv_proj')
    >>> remat("no activation checkpointing", "selective")
    'none'
    >>> remat("minimal", "selective"), remat("my_own_names", "selective")
    ('dots', None)
    """
    if text in NO:
        return "none"
    every = {*re.split(r"[\s+,;:/()]+", text)}
    if every & _NEGATIONS:
        return "none" if _RECOMPUTES.search(text) else None
    words = every - _BESIDE
    if len(words) == 1 and (policy := POLICIES.get(*words)) is not None:
        return policy
    if "selective" in text:
        # A number after it is TorchTitan's, which recomputes every so many layers.
        return None if _BY_LAYER.search(text) else selective
    if text in YES or has(text, "full") or "checkpointing" in text:
        return "full"
    return None


def compiled(text: str) -> bool | None:
    """Returns whether a step is compiled; None if the text does not say.

    >>> [compiled(text) for text in ("compiled", "torch.compile", "eager", "no", "x")]
    [True, True, False, False, None]
    """
    lowered = text.strip().lower()
    if lowered in NO or lowered == "eager":
        return False
    return True if lowered in YES or lowered in _COMPILED else None


def precision(text: str) -> str:
    """Returns the dtype of products for a lower-case text; ``bf16`` for unknown words.

    >>> [precision(text) for text in ("amp_bf16", "float16", "fp8 rowwise", "float32")]
    ['bf16', 'f16', 'f8', 'f32']
    >>> [precision(text) for text in ("nvfp4", "mxfp8", "MXFP4".lower())]
    ['f4', 'f8', 'f4']
    """
    if any(word in text for word in FOUR):
        return "f4"
    if any(word in text for word in EIGHT):
        return "f8"
    if "bf16" in text or "bfloat16" in text:
        return "bf16"
    if any(word in text for word in SIXTEEN):
        return "f16"
    if "32" in text:
        return "tf32" if "tf32" in text else "f32"
    return "bf16"
