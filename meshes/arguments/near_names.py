"""Suggests the intended name for a misspelt one, or for another library's name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Final


Synonyms = Mapping[str, tuple[str, ...]]
"""Names in other libraries, each with our names for it, the likeliest first."""


def _by_synonym(text: str) -> Synonyms:
    """Parses lines with one of our names, a colon, and names in other libraries."""
    synonyms = dict[str, tuple[str, ...]]()
    for line in text.strip().splitlines():
        ours, _, others = line.partition(":")
        for other in others.split():
            synonyms[other] = (*synonyms.get(other, ()), ours.strip())
    return synonyms


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
"""Our names of mesh axes, by names in other libraries."""

PRECISION_SYNONYMS: Final = _by_synonym(
    """
    bf16: bfloat16 bf16_mixed mixed_bfloat16 mixed
    f16: float16 fp16 half 16 16_mixed
    f32: float32 fp32 full float 32 single
    """
)
"""Our names of precisions, by names in other libraries."""

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
    cluster: clusters gpus num_gpus nodes num_nodes num_devices devices
    clusters: cluster on pools
    sequence: seq seq_len seq_length sequence_length max_length context_length
    steps: epochs num_epochs num_steps max_steps total_steps iterations
    save_dir: checkpoint_dir ckpt_dir output_dir workdir out save path
    save_every: save_steps save_interval save_interval_steps checkpoint_every
    keep: max_to_keep save_total_limit keep_last save_top_k
    eval_batches: eval_data eval_dataset val_data validation_data val_batches
    eval_every: eval_steps eval_interval val_every val_check_interval
    best: monitor metric metric_for_best_model
    best_mode: mode greater_is_better
    patience: early_stop early_stopping early_stopping_patience
    hooks: callbacks loggers
    """
)
"""Our names of arguments, by names in other libraries."""


OPTION_SYNONYMS: Final = _by_synonym(
    """
    batch: batch_size bs global_batch global_batch_size train_batch_size
    best: monitor metric
    best_mode: mode greater_is_better
    cluster: gpus num_gpus nodes num_nodes devices num_devices on hardware topology
    early_stop: patience early_stopping
    eval_every: eval eval_steps eval_interval
    keep: max_to_keep save_total_limit keep_last
    mesh: dp tp pp ep cp fsdp data tensor stage expert context axes parallelism
    mesh: tensor_parallel data_parallel pipeline_parallel sequence_parallel
    micro_batches: num_micro_batches microbatches accum_steps grad_accum
    micro_batches: gradient_accumulation_steps
    on: cluster clusters gpus
    output: out o save
    precision: dtype bf16 fp16 f32 amp mixed_precision
    price: prices cost
    processes: nproc nproc_per_node num_processes n
    remat: checkpointing activation_checkpointing gradient_checkpointing
    resume: restore load continue
    save: save_dir checkpoint_dir ckpt_dir output_dir workdir out output o logdir
    save_every: save_steps save_interval checkpoint_every
    set: lr learning_rate layers hidden heads vocab sequence seq_len model_options
    steps: epochs num_epochs num_steps max_steps iterations
    to: format form
    tokens: num_tokens total_tokens
    """
)
"""Our names of options without dashes, by names in other programs.

A name may mean several options: the first one that the command has.
"""

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
"""Our names of commands, by names that users may try."""


def near_names(
    given: str, known: Iterable[str], synonyms: Synonyms | None = None
) -> list[str]:
    """Returns the known names that were probably meant, the likeliest first.

    Args:
        given: Name from the user.
        known: Known names.
        synonyms: Our names by names in other libraries.

    >>> near_names("tp", ["data", "tensor"], AXIS_SYNONYMS)
    ['tensor']
    >>> near_names("tensr", ["data", "tensor"])
    ['tensor']
    """
    names = list(known)
    folded = given.strip().casefold().replace("-", "_")
    meant = [one for one in (synonyms or {}).get(folded, ()) if one in names]
    if meant:
        return meant[:1]
    by_fold = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(folded, by_fold, n=2, cutoff=0.6)
    return [by_fold[name] for name in close]


def near_hint(
    given: object, known: Iterable[str], synonyms: Synonyms | None = None
) -> str:
    """Returns text that suggests the probable name, or an empty text.

    It continues a sentence without its full stop.

    >>> near_hint("dp", ["data", "tensor"], AXIS_SYNONYMS)
    ". Did you mean 'data'?"
    >>> near_hint("xyz", ["data", "tensor"])
    ''
    """
    near = near_names(given, known, synonyms) if isinstance(given, str) else []
    return f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
