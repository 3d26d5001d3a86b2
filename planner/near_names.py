"""Finds the intended name: the nearest known one, or another library's word.

Error messages end with these suggestions, so that users of another library learn the
words of this one.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Final, ParamSpec, TypeVar

from whalejax.meshes.errors import WhaleError


P = ParamSpec("P")
R = TypeVar("R")


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


class WrongArguments(WhaleError, TypeError):
    """A call with an unknown argument, or without a required one."""


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


def names_arguments(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a public function name wrong, missing or misspelled arguments.

    Args:
        name: Name under which users call the function.

    Returns:
        Decorator. Calls that Python would refuse raise ``WrongArguments``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                text = _argument_problem(name, signature, len(args), kwargs, error)
                raise WrongArguments(text) from None
            return function(*args, **kwargs)

        return call

    return decorate


def _argument_problem(
    name: str,
    signature: inspect.Signature,
    num_positional: int,
    named: Mapping[str, object],
    error: TypeError,
) -> str:
    own = "self" in signature.parameters
    parameters = {
        one: parameter
        for one, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and one != "self"
    }
    needed = [
        one
        for one, parameter in parameters.items()
        if parameter.default is parameter.empty
    ]
    rest = [parameter for parameter in parameters if parameter not in needed]
    takes = f"{name} takes {', '.join(needed) or 'no argument'}"
    takes += f", and by name {', '.join(rest)}" if rest else ""
    problems = []
    for one in named:
        if one not in parameters:
            hint = near_hint(one, parameters, ARGUMENT_SYNONYMS)
            problems.append(f"there is no argument {one!r}{hint or '.'}")
    if not problems:
        positional = [
            one
            for one, parameter in parameters.items()
            if parameter.kind is not parameter.KEYWORD_ONLY
        ]
        given = {*positional[: num_positional - own], *named}
        lacks = [one for one in needed if one not in given]
        if lacks:
            verb = "is" if len(lacks) == 1 else "are"
            problems.append(f"{' and '.join(lacks)} {verb} missing.")
    if any("Did you mean" in problem for problem in problems):
        return f"{name}: {' '.join(problems)}"
    return f"{name}: {' '.join(problems) or str(error)} {takes}"
