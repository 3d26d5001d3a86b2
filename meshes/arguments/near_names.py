"""Finds the intended name: the nearest known one, or another library's word.

Error messages end with these suggestions, so that users of another library learn the
words of this one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final


def _by_synonym(text: str) -> dict[str, str]:
    """Returns pairs from lines of one of our names, a colon, and names elsewhere."""
    synonym = {}
    for line in text.strip().splitlines():
        ours, _, others = line.partition(":")
        synonym.update(dict.fromkeys(others.split(), ours.strip()))
    return synonym


AXIS_SYNONYMS: Final = _by_synonym(
    """
    data: dp ddp replica replicas batch data_parallel
    tensor: tp mp model model_parallel tensor_parallel
    stage: pp pipe pipeline stages pipeline_parallel
    expert: ep experts expert_parallel
    context: cp sp seq sequence context_parallel sequence_parallel
    fsdp: zero zero3 hsdp sharded fully_sharded
    """
)
"""Names of mesh axes in other libraries, and ours."""

PRECISION_SYNONYMS: Final = _by_synonym(
    """
    bf16: bfloat16 bf16_mixed mixed_bfloat16 mixed
    f16: float16 fp16 half 16 16_mixed
    f32: float32 fp32 full float 32 single
    """
)
"""Names of precisions in other libraries, and ours."""

ARGUMENT_SYNONYMS: Final = _by_synonym(
    """
    num_micro_batches: micro_batches microbatches num_microbatches accum_steps
    num_micro_batches: gradient_accumulation_steps grad_accum_steps grad_accumulation
    num_micro_batches: accumulate_grad_batches gradient_accumulation
    precision: dtype compute_dtype amp mixed_precision
    optimizer: opt tx optim transform optimiser
    loss_fn: loss fn loss_function objective
    model: params module net network
    batch: data example inputs batch_size global_batch
    cluster: topology hardware machine on
    remat: checkpointing activation_checkpointing gradient_checkpointing
    zero: zero_stage zero_level
    mesh: mesh_shape parallelism axes axis_sizes
    offload: cpu_offload host_offload
    compiler_options: xla_flags xla_options flags
    rng: key seed prng rngs
    devices: num_devices device n_devices num_partitions
    num_stages: stages n_stages
    """
)
"""Names of arguments in other libraries, and ours."""


COMMAND_SYNONYMS: Final = _by_synonym(
    """
    batch: largest_batch max_batch batch_size
    diff: compare
    doctor: env info
    estimate: predict
    profile: bench benchmark trace
    show: print describe inspect cost price
    train: run fit resume
    why: explain
    """
)
"""Names that people try for commands, and ours."""


def near_names(
    given: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> list[str]:
    """Returns the known names that were probably meant, the likeliest first.

    Args:
        given: Name from the user.
        known: Known names.
        synonyms: Other names, each with its known one.

    >>> near_names("tp", ["data", "tensor"], AXIS_SYNONYMS)
    ['tensor']
    >>> near_names("tensr", ["data", "tensor"])
    ['tensor']
    """
    names = list(known)
    folded = given.strip().casefold().replace("-", "_")
    for other, ours in (synonyms or {}).items():
        if other == folded and ours in names:
            return [ours]
    by_fold = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(folded, by_fold, n=2, cutoff=0.6)
    return [by_fold[name] for name in close]


def near_hint(
    given: object, known: Iterable[str], synonyms: Mapping[str, str] | None = None
) -> str:
    """Returns the end of a sentence and a suggestion of the probable name, or nothing.

    >>> near_hint("dp", ["data", "tensor"], AXIS_SYNONYMS)
    ". Did you mean 'data'?"
    >>> near_hint("xyz", ["data", "tensor"])
    ''
    """
    near = near_names(given, known, synonyms) if isinstance(given, str) else []
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
