"""The options of a step: recomputation, offload, chunks and the like.

Each option is a field of three classes, one for each stage of planning:

    ``UserOptions``   as ``wh.plan`` takes it, checked without the model
    ``FixedOptions``  checked against the model: requirements of a search
    ``StepOptions``   values in a plan, their words in reports, their limits in files

A request, a search's candidates and a plan inherit these fields and pass them on
together. So code that only passes an option on does not name it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.planner.cost_terms import ALL, OFFLOADS, Chosen, Remat


REMAT_POLICIES: Final = ("none", "dots", "named", "full")
"""Remat policies, the one that saves most first."""

ATTENTION_KINDS: Final = ("ring", "gather")

COMBINATIONS: Final = ("mean", "adasum", "adasum_nodes", "adasum_updates")
"""Ways in which ranks of ``data`` combine their gradients."""


STAGE_ESTIMATES: Final = ("offload", "loss_chunks", "attention")
"""Options that no executor runs in stages; only estimates may have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserOptions:
    """Options of a step from a user; None leaves one to the planner.

    Attributes:
        remat: ``"none"``, ``"dots"``, ``"named"`` (or ``"named:a,b"``) or ``"full"``;
            or a policy for each TaskGraph by name.
        offload: State in host memory: some of ``"optimizer"``, ``"activations"`` and
            ``"params"`` (and, in estimates, ``"gradients"``); ``"none"`` or ``()`` for
            nothing.
        sequence_parallel: Whether ``tensor`` shards the sequence between products.
        attention: ``"ring"`` or ``"gather"``; or one for each TaskGraph by name.
        loss_chunks: Chunks of a device's tokens whose logits are computed in turn.
        combine: One of ``COMBINATIONS``.
    """

    remat: str | Mapping[str, str] | None = None
    offload: str | Sequence[str] | None = None
    sequence_parallel: bool | None = None
    attention: str | Mapping[str, str] | None = None
    loss_chunks: int | None = None
    combine: str = "mean"


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedOptions:
    """Options of a step that a user fixed for a model; None leaves one to the search.

    Attributes:
        remat: Rematerialisation policy of each TaskGraph.
        offload: State in host memory, in the order of ``OFFLOADS``.
        sequence_parallel: Whether ``tensor`` shards the sequence between products.
        attention: Variant of attention, by TaskGraph.
        loss_chunks: Number of chunks of the tokens whose logits are computed in turn.
        combine: Combination of gradients over the ranks of ``data``.
    """

    remat: Remat | None = None
    offload: tuple[str, ...] | None = None
    sequence_parallel: bool | None = None
    attention: Chosen | None = None
    loss_chunks: int | None = None
    combine: str = "mean"

    def or_off(self, **decided: Any) -> dict[str, Any]:
        """Returns a candidate's values of all options: fixed, or without effect.

        Args:
            decided: Options of the candidate.
        """
        own = {name: getattr(self, name) for name in options_of(StepOptions())}
        fixed = {name: value for name, value in own.items() if value is not None}
        return options_of(StepOptions(**{**fixed, **decided}))

    def refused_by_stages(self) -> dict[str, str]:
        """Returns why pipeline stages cannot have these options, with remedies.

        Returns:
            Reasons by name of the option.
        """
        result: dict[str, str] = {}
        if self.offload:
            result["offload"] = (
                f"offload is {', '.join(self.offload)}: stages keep nothing in host "
                "memory yet. Leave offload out, or the axis stage"
            )
        if (self.loss_chunks or 1) > 1:
            result["loss_chunks"] = (
                f"loss_chunks is {self.loss_chunks}: stages make all logits of a "
                "micro-batch at once. Leave loss_chunks out, or the axis stage; more "
                "micro-batches make fewer logits at once"
            )
        if self.combine != "mean":
            result["combine"] = (
                f'combine is "{self.combine}": stages add up the gradients of all '
                "micro-batches and ranks. Leave combine out, or the axis stage"
            )
        if any(kind == "ring" for _, kind in self.attention or ()):
            result["attention"] = (
                'attention is "ring": stages do not run attention in blocks yet. Leave '
                "attention out, or the axis stage"
            )
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """Decided options of a step; by default none has any effect.

    Attributes:
        remat: (TaskGraph, policy) pairs for the backward pass's recomputation:
            ``"dots"`` saves results of products with weights, ``"named"`` values that
            the model names, ``"full"`` only the inputs of a layer.
        offload: State in host memory: ``"optimizer"`` state (of matrices; vectors
            stay), ``"activations"``, ``"params"`` (those with ``hosted``); in estimates
            also ``"gradients"``.
        sequence_parallel: Whether ``tensor`` shards the sequence between the products
            whose other dimensions it shards.
        attention: (TaskGraph, ``"ring"`` or ``"gather"``) pairs for attention that
            differs from the model's; ``"*"`` means the others.
        loss_chunks: Chunks of a device's tokens whose logits are computed in turn.
        combine: Combination of the ranks of ``data``, each with its own samples:
            ``"mean"`` of gradients, ``"adasum"`` of them, ``"adasum_nodes"`` of their
            means over the ranks of a node, or ``"adasum_updates"`` of the updates by
            each rank's optimizer.
    """

    remat: Remat = ()
    offload: tuple[str, ...] = ()
    sequence_parallel: bool = False
    attention: Chosen = ()
    loss_chunks: int = 1
    combine: str = dataclasses.field(default="mean", metadata={"unless_default": True})


class ProgramOptions(NamedTuple):
    """Options that change a loss's program: each value needs another capture.

    Attributes:
        remat, attention, loss_chunks: Fields of ``StepOptions``, unchanged.
    """

    remat: Remat = ()
    attention: Chosen = ()
    loss_chunks: int = 1

    @classmethod
    def of(cls, fixed: FixedOptions, remat: Remat, attention: Chosen) -> Self:
        """Returns a program's options, with the fixed number of loss chunks or one.

        Args:
            fixed: Options that the user fixed.
            remat, attention: Fields of ``StepOptions``, unchanged.
        """
        return cls(remat, attention, fixed.loss_chunks or 1)


LOSS_CHUNKS: Final = 16
"""Number of chunks of a device's tokens that the planner tries if memory is short."""

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
    """Returns the options of a plan, candidate or request, as arguments.

    >>> options_of(StepOptions(loss_chunks=4))["loss_chunks"]
    4
    """
    return {f.name: getattr(chosen, f.name) for f in dataclasses.fields(StepOptions)}


def options_off(*keep: str) -> dict[str, Any]:
    """Returns options without effect, for models whose options other code chooses.

    Args:
        keep: Names of options to omit from the result.
    """
    return {k: v for k, v in options_of(StepOptions()).items() if k not in keep}


def option_words(chosen: StepOptions, axes: Container[str]) -> list[str]:
    """Describes each option, except the mesh, that has an effect.

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
    """Returns the (name, value) of every option for a table of settings.

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
    """Returns the (path, value, possible values) of every option that is a text.

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
    """Records invalid options, with which no model can be planned.

    Args:
        options: Options from the user.
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
                f"offload: {short_repr(name)} is none of {known}; 'none', alone, is "
                "nothing"
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
    """Describes the combination of gradients over ``data``; empty for their mean.

    >>> combine_words("adasum_nodes")
    'Adasum of gradients across nodes'
    """
    return {
        "adasum": "Adasum of gradients",
        "adasum_nodes": "Adasum of gradients across nodes",
        "adasum_updates": "Adasum of updates",
    }.get(combine, "")


def offload_words(offload: tuple[str, ...]) -> str:
    """Describes the state in host memory; empty if there is none.

    >>> offload_words(("optimizer", "params"))
    'optimizer and params in host memory'
    """
    return f"{' and '.join(offload)} in host memory" if offload else ""


def attention_words(attention: Chosen, axes: Container[str]) -> str:
    """Describes a plan's attention; empty if it runs as the model defines it.

    Keys and values go round only if ``context`` shards the sequence; otherwise each
    device computes its scores in blocks.

    Args:
        attention: Variant of attention, by TaskGraph.
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
    """Describes a plan's remat, such as ``"remat full"``; empty if there is none.

    >>> remat_words((("*", "full"),))
    'remat full'
    >>> remat_words((("default", "full"), ("experts", "dots")))
    'remat full in default, dots in experts'
    """
    where = (policy + f" in {name}" * (name != ALL) for name, policy in remat)
    return f"remat {', '.join(where)}" if remat else ""
