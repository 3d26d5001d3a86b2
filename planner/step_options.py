"""The options of a step: remat, offload, chunks and others.

Each option is a field of three classes, one for each phase of planning:

    ``UserOptions``   as ``wh.plan`` takes it, checked without the model
    ``FixedOptions``  checked against the model, as a requirement of the search
    ``StepOptions``   values in a plan, with their texts in reports and limits in files

Requests, candidates and plans inherit these fields and pass them on together. So code
that only passes an option on does not name it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.planner.cost_terms import ALL, OFFLOADS, Chosen, Remat


REMAT_POLICIES: Final = ("none", "dots", "named", "full")
"""Remat policies; the one with least recomputation comes first."""

ATTENTION_KINDS: Final = ("ring", "gather")

COMBINATIONS: Final = ("mean", "adasum", "adasum_nodes", "adasum_updates")
"""Ways to combine the gradients of the ranks of ``data``."""


STAGE_ESTIMATES: Final = ("offload", "loss_chunks", "attention")
"""Options that no executor runs in stages; estimates may have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOptions:
    """Options of a step that the user gave; None leaves an option to the planner.

    Attributes:
        remat: ``"none"``, ``"dots"``, ``"named"`` (or ``"named:a,b"``) or ``"full"``;
            or a policy by name of a TaskGraph.
        offload: State in host memory: some of ``"optimizer"``, ``"activations"`` and
            ``"params"``, in estimates also ``"gradients"``. ``"none"`` and ``()`` mean
            nothing.
        sequence_parallel: Whether ``tensor`` shards the sequence between products.
        attention: ``"ring"`` or ``"gather"``; or one of them by name of a TaskGraph.
        loss_chunks: Number of chunks of a device's tokens whose logits are computed one
            after the other.
        combine: Combination of gradients, in ``COMBINATIONS``.
    """

    remat: str | Mapping[str, str] | None = None
    offload: str | Sequence[str] | None = None
    sequence_parallel: bool | None = None
    attention: str | Mapping[str, str] | None = None
    loss_chunks: int | None = None
    combine: str = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOptions:
    """Options of a step that the user fixed for a model; None leaves them to the
    search.

    Attributes:
        remat: (TaskGraph, policy) pairs.
        offload: State in host memory, in the order of ``OFFLOADS``.
        sequence_parallel: Whether ``tensor`` shards the sequence between products.
        attention: (TaskGraph, kind) pairs.
        loss_chunks: Number of chunks of a device's tokens whose logits are computed one
            after the other.
        combine: Combination of gradients over the ranks of ``data``.
    """

    remat: Remat | None = None
    offload: tuple[str, ...] | None = None
    sequence_parallel: bool | None = None
    attention: Chosen | None = None
    loss_chunks: int | None = None
    combine: str = "mean"

    def or_off(self, **decided: Any) -> dict[str, Any]:
        """Returns all options of a candidate; those left open have no effect.

        Args:
            decided: Options of the candidate that replace the fixed ones.
        """
        own = {name: getattr(self, name) for name in options_of(StepOptions())}
        fixed = {name: value for name, value in own.items() if value is not None}
        return options_of(StepOptions(**{**fixed, **decided}))

    def refused_by_stages(self) -> dict[str, str]:
        """Returns why pipeline stages cannot have some of these options, with remedies.

        Returns:
            Reasons by name of the option.
        """
        result: dict[str, str] = {}
        if self.offload:
            result["offload"] = (
                f"offload is {', '.join(self.offload)}: stages keep nothing in host "
                "memory in this version. Leave offload out, or the axis stage"
            )
        if (self.loss_chunks or 1) > 1:
            result["loss_chunks"] = (
                f"loss_chunks is {self.loss_chunks}: stages compute all logits of a "
                "micro-batch at once. Leave loss_chunks or the axis stage out; more "
                "micro-batches compute fewer logits at once"
            )
        if self.combine != "mean":
            result["combine"] = (
                f'combine is "{self.combine}": stages add up the gradients of all '
                "micro-batches and ranks. Leave combine out, or the axis stage"
            )
        if any(kind == "ring" for _, kind in self.attention or ()):
            result["attention"] = (
                'attention is "ring": stages do not run attention in blocks in this '
                "version. Leave attention out, or the axis stage"
            )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Decided options of a step; the defaults have no effect.

    Attributes:
        remat: (TaskGraph, policy) pairs for recomputation in the backward pass:
            ``"dots"`` saves results of products with weights, ``"named"`` values that
            the model names, ``"full"`` only the inputs of a layer.
        offload: State in host memory: ``"optimizer"`` (state of matrices; vectors stay
            on the device), ``"activations"``, ``"params"`` (parameters with
            ``hosted``), in estimates also ``"gradients"``.
        sequence_parallel: Whether ``tensor`` shards the sequence between the products
            whose other dimensions it shards.
        attention: (TaskGraph, ``"ring"`` or ``"gather"``) pairs for attention that
            differs from the model's; ``"*"`` stands for all other TaskGraphs.
        loss_chunks: Number of chunks of a device's tokens whose logits are computed one
            after the other.
        combine: Combination over the ranks of ``data``, each with samples of its own:
            ``"mean"`` of gradients, ``"adasum"`` of gradients, ``"adasum_nodes"`` of
            their means over the ranks of a node, or ``"adasum_updates"`` of the updates
            by each rank's optimizer.
    """

    remat: Remat = ()
    offload: tuple[str, ...] = ()
    sequence_parallel: bool = False
    attention: Chosen = ()
    loss_chunks: int = 1
    combine: str = dataclasses.field(default="mean", metadata={"unless_default": True})


class ProgramOptions(NamedTuple):
    """Options that change a loss's program, so that each value needs another capture.

    Attributes:
        remat, attention, loss_chunks: Fields of ``StepOptions``, unchanged.
    """

    remat: Remat = ()
    attention: Chosen = ()
    loss_chunks: int = 1

    @classmethod
    def of(cls, fixed: FixedOptions, remat: Remat, attention: Chosen) -> Self:
        """Returns the options of a program, with one loss chunk if the user fixed none.

        Args:
            fixed: Options that the user fixed.
            remat, attention: Fields of ``StepOptions``, unchanged.
        """
        return cls(remat, attention, fixed.loss_chunks or 1)


LOSS_CHUNKS: Final = 16
"""Number of loss chunks that the planner tries if memory is short."""

OPTION_NAMES: Final[Mapping[str, str]] = {
    "remat": "remat",
    "offload": "offload",
    "sequence_parallel": "sequence parallelism",
    "attention": "attention",
    "loss_chunks": "parts of the logits",
    "combine": "combination of gradients",
}
"""Names of the options in messages between processes."""


def options_of(chosen: StepOptions | FixedOptions) -> dict[str, Any]:
    """Returns the options of a plan, candidate or request, as keyword arguments.

    >>> options_of(StepOptions(loss_chunks=4))["loss_chunks"]
    4
    """
    return {f.name: getattr(chosen, f.name) for f in dataclasses.fields(StepOptions)}


def options_off(*keep: str) -> dict[str, Any]:
    """Returns options without effect, for models whose options other code chooses.

    Args:
        keep: Names of options to leave out of the result.
    """
    return {k: v for k, v in options_of(StepOptions()).items() if k not in keep}


def option_words(chosen: StepOptions, axes: Container[str]) -> list[str]:
    """Returns a text on each option that has an effect; the mesh is not among them.

    Args:
        chosen: Options of a plan.
        axes: Mesh axes of the plan, without those of size 1.

    >>> option_words(StepOptions(remat=(("*", "full"),), loss_chunks=16), ())
    ['remat full', 'logits in 16 chunks']
    """
    words = [
        "sequence parallel" if chosen.sequence_parallel else "",
        attention_words(chosen.attention, axes),
        remat_words(chosen.remat),
        offload_words(chosen.offload),
        f"logits in {chosen.loss_chunks} chunks" if chosen.loss_chunks > 1 else "",
        combine_words(chosen.combine),
    ]
    return [*filter(None, words)]


def option_rows(chosen: StepOptions, axes: Container[str]) -> list[tuple[str, str]]:
    """Returns (name, value) of every option, for a table of settings.

    Args:
        chosen, axes: Arguments of ``option_words``, unchanged.
    """
    return [
        ("remat", remat_words(chosen.remat).removeprefix("remat ")),
        ("offload", " and ".join(chosen.offload)),
        ("seq", "parallel over tensor" if chosen.sequence_parallel else ""),
        ("attends", attention_words(chosen.attention, axes)),
        ("logits", f"{chosen.loss_chunks} chunks"),
        *[("combine", combine_words(chosen.combine))] * (chosen.combine != "mean"),
    ]


def named_in(policy: str) -> tuple[str, ...]:
    """Returns the names that a remat policy lists; empty if it lists none."""
    kind, _, names = policy.partition(":")
    return tuple(n.strip() for n in names.split(",") if n.strip()) * (kind == "named")


def option_limits(chosen: StepOptions) -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns (path, value, possible values) of every option that is a text.

    A remat policy that lists names counts as ``"named"``.
    """
    return [
        *(
            (f"remat.{n}", "named" if named_in(policy) else policy, REMAT_POLICIES)
            for n, policy in chosen.remat
        ),
        *((f"attention.{n}", kind, ATTENTION_KINDS) for n, kind in chosen.attention),
        *(("offload", what, OFFLOADS) for what in chosen.offload),
        ("combine", chosen.combine, COMBINATIONS),
    ]


def option_counts(chosen: StepOptions) -> dict[str, int]:
    """Returns the options that are integers of at least 1."""
    return {"loss_chunks": chosen.loss_chunks}


def check_user_options(options: UserOptions, problems: Arguments) -> None:
    """Records invalid options, whatever the model.

    Args:
        options: Options that the user gave.
        problems: Collector of the errors.
    """
    if not isinstance(options.sequence_parallel, bool | None):
        problems.refuse(
            "sequence_parallel",
            options.sequence_parallel,
            "True, False, or None, which leaves it to the planner",
        )
    for name, example, known in (
        ("remat", "full", REMAT_POLICIES),
        ("attention", "ring", ATTENTION_KINDS),
    ):
        value = getattr(options, name)
        if isinstance(value, str):
            policy, colon, _ = value.partition(":")
            listed = name == "remat" and policy == "named"
            if policy not in known or (colon and not listed):
                problems.refuse(name, value, f"one of {', '.join(known)}")
            continue
        if value is not None and not by_task_graph(value):
            problems.refuse(
                name,
                value,
                f"a word such as '{example}', one for each TaskGraph by its name, "
                f"such as {{'*': '{example}'}}, or None for the planner to choose",
            )
    _check_offload(options.offload, problems)
    problems.choice("combine", options.combine, COMBINATIONS)
    chunks = options.loss_chunks
    whole = isinstance(chunks, int) and is_whole(chunks, 1)
    if chunks is not None and not whole:
        problems.refuse(
            "loss_chunks",
            chunks,
            "a whole number, 1 or more, or None for the planner to choose",
        )


_NOTHING: Final = "none"


def _check_offload(offload: object, problems: Arguments) -> None:
    known = ", ".join(OFFLOADS)
    if offload is None or is_nothing(offload):
        return
    if not isinstance(offload, str | list | tuple | set | frozenset):
        problems.refuse(
            "offload",
            offload,
            f"some of {known}, 'none', or None for the planner to choose",
        )
        return
    for name in [offload] if isinstance(offload, str) else offload:
        if not isinstance(name, str) or name not in OFFLOADS:
            problems.add(
                f"offload: {short_repr(name)} is none of {known}; 'none' must be alone"
            )


def is_nothing(offload: object) -> bool:
    """Returns whether ``offload`` requests nothing in host memory.

    >>> is_nothing("none"), is_nothing(()), is_nothing(["none"]), is_nothing("params")
    (True, True, True, False)
    """
    if isinstance(offload, list | tuple | set | frozenset):
        return not offload or [*offload] == [_NOTHING]
    return isinstance(offload, str) and offload == _NOTHING


def by_task_graph(value: object) -> bool:
    """Returns whether a value is a dict of texts by TaskGraph."""
    return isinstance(value, Mapping) and all(
        isinstance(text, str) and text.isprintable()
        for pair in value.items()
        for text in pair
    )


def combine_words(combine: str) -> str:
    """Returns the text of the combination of gradients; empty for their mean.

    >>> combine_words("adasum_nodes")
    'Adasum of gradients across nodes'
    """
    return {
        "adasum": "Adasum of gradients",
        "adasum_nodes": "Adasum of gradients across nodes",
        "adasum_updates": "Adasum of updates",
    }.get(combine, "")


def offload_words(offload: tuple[str, ...]) -> str:
    """Returns the text of the state in host memory; empty without any.

    >>> offload_words(("optimizer", "params"))
    'optimizer and params in host memory'
    """
    return f"{' and '.join(offload)} in host memory" if offload else ""


def attention_words(attention: Chosen, axes: Container[str]) -> str:
    """Returns the text of a plan's attention; empty if it runs as the model defines it.

    Keys and values go round a ring only if ``context`` shards the sequence. If not,
    each device computes its scores in blocks.

    Args:
        attention: (TaskGraph, kind) pairs.
        axes: Mesh axes of the plan, without those of size 1.

    >>> attention_words((("*", "ring"),), ["data"])
    'attention in blocks'
    >>> attention_words((("default", "ring"), ("split", "gather")), ["context"])
    'ring attention in default'
    """
    names = [name for name, kind in attention if kind == "ring"]
    if not names:
        return ""
    words = "ring attention" if "context" in axes else "attention in blocks"
    return words + f" in {', '.join(names)}" * (names != [ALL])


def remat_words(remat: Remat) -> str:
    """Returns the text of a plan's remat, such as ``"remat full"``; empty without any.

    >>> remat_words((("*", "full"),))
    'remat full'
    >>> remat_words((("default", "full"), ("experts", "dots")))
    'remat full in default, dots in experts'
    """
    where = (policy + f" in {name}" * (name != ALL) for name, policy in remat)
    return f"remat {', '.join(where)}" if remat else ""
