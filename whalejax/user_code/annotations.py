"""The four annotations: ``replicate``, ``split``, ``stage`` and ``pipeline``.

An annotation always opens a ``jax.named_scope`` whose *name* contains its arguments. So
a trace that JAX cached before planning still has the mark. It has no effect on numbers.
A context variable has the open marks of this thread. It is used to refuse forbidden
nesting at the user's line, to number stages, and to record the entered marks for
capture.

Models import this module, so its import starts no JAX.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Generic, NoReturn, ParamSpec, TypeVar

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import is_whole, short_repr
from whalejax.meshes.errors import WhaleError
from whalejax.planner.model.graph import Mark, MarkKind


P = ParamSpec("P")
R = TypeVar("R")

ALLOWED_NESTING: Final = "replicate > pipeline > stage > split"
SCHEDULES: Final = ("auto", "gpipe", "1f1b", "1f1b-ahead", "interleaved", "zb-h1")

_SCOPE: Final = re.compile(r"wh\.(replicate|split|stage|pipeline)\[([^\]/]*)\]")
_DIMENSION: Final = re.compile(r"\[(\d+(?:\.\d+)?)\]$")
_AXIS_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")


@dataclass(slots=True)
class _OpenMark:
    mark: Mark
    scope: Any
    stages: int = 0


@dataclass(slots=True)
class Recording:
    """The distinct marks that were entered during a block, in order."""

    entered: dict[Mark, None] = field(default_factory=dict)

    @property
    def marks(self) -> tuple[Mark, ...]:
        """Marks, in the order of their first entry."""
        return tuple(self.entered)


_open_marks: ContextVar[tuple[_OpenMark, ...]] = ContextVar(
    "whalejax_open_marks", default=()
)
_recording: ContextVar[Recording | None] = ContextVar(
    "whalejax_recording", default=None
)


class Annotation:
    """One annotation: a reusable context manager and decorator.

    Attributes:
        mark: Kind of the annotation and its arguments, as plain data.
    """

    __slots__ = ("mark",)

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def __enter__(self) -> Annotation:
        outer = _open_marks.get()
        problem = nesting_problem(tuple(o.mark for o in outer), self.mark)
        if problem is not None:
            raise WhaleError(problem)
        mark = _numbered(self.mark, outer)
        import jax  # Here, so that importing annotations starts no JAX.

        scope: Any = jax.named_scope(scope_name(mark))
        scope.__enter__()
        _open_marks.set((*outer, _OpenMark(mark, scope)))
        recording = _recording.get()
        if recording is not None:
            recording.entered[mark] = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        *outer, mine = _open_marks.get()
        _open_marks.set(tuple(outer))
        mine.scope.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Returns the function with its body inside this annotation."""
        if inspect.isclass(function):
            raise WhaleError(
                f"{self.mark} decorates the class {function.__name__}; an annotation "
                "decorates a function or method. Put it on the method that computes, "
                "such as __call__."
            )
        if not callable(function):
            raise WhaleError(
                f"{self.mark} decorates {short_repr(function)}; an annotation "
                "decorates a "
                "function or method, or is entered: with wh.split():"
            )

        @functools.wraps(function)
        def annotated(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return annotated

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Annotation) and self.mark == other.mark

    def __hash__(self) -> int:
        return hash(self.mark)

    def __repr__(self) -> str:
        return f"wh.{self.mark}"


class MarkMaker(Generic[P]):
    """A function that makes annotations, such as ``wh.split``, and is none itself."""

    __name__: str

    def __init__(self, function: Callable[P, Annotation]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Annotation:
        return self._function(*args, **kwargs)

    def __enter__(self) -> NoReturn:
        name = f"wh.{self.__name__}"
        raise WhaleError(
            f"`with {name}:` has no parentheses. Write `with {name}():`, with its "
            "arguments if it has some"
        )

    def __exit__(self, *error: object) -> None: ...

    def __repr__(self) -> str:
        return f"<function wh.{self.__name__}>"

    def __reduce__(self) -> str:
        return self.__name__


@MarkMaker
@names_arguments("wh.replicate")
def replicate(devices: int | None = None) -> Annotation:
    """Marks a region as data-parallel: each device computes it for its own samples.

    Args:
        devices: Number of devices of one copy of the model that compute the region;
            default: the planner's choice.

    Returns:
        Context manager that is also a decorator.

    Raises:
        WhaleError: ``devices`` is not a positive integer.

    >>> replicate(devices=2)
    wh.replicate(devices=2)
    """
    return _annotation("replicate", devices=_positive("replicate", "devices", devices))


@MarkMaker
@names_arguments("wh.split")
def split(devices: int | None = None, axis: str | None = None) -> Annotation:
    """Marks a region whose tensors are sharded over devices.

    The planner shards the dimension with the least cost.

    Args:
        devices: Number of parts; default: the planner's choice.
        axis: Logical dimension to shard, by its name in the model's metadata, or by a
            leaf's path and dimension: ``"head.kernel.1"``, or ``"head.kernel[1]"`` as
            in plans.

    Returns:
        Context manager that is also a decorator.

    Raises:
        WhaleError: ``devices`` is not a positive integer or ``axis`` is no name.

    >>> split(devices=4, axis="mlp")
    wh.split(axis=mlp, devices=4)
    """
    given = axis
    if isinstance(axis, str):
        # Scopes hold no brackets, and the number of a repeated layer may be omitted.
        axis = _DIMENSION.sub(r".\1", axis).rpartition("*.")[2]
    if axis is not None and not (isinstance(axis, str) and _AXIS_NAME.fullmatch(axis)):
        raise WhaleError(
            f"split(axis={short_repr(given)}): expected the name of one logical "
            "dimension, of letters, digits, '_', '-' and '.', starting with a letter, "
            "such as 'mlp', or of a leaf's dimension, such as 'head.kernel[1]'"
        )
    return _annotation(
        "split", axis=axis, devices=_positive("split", "devices", devices)
    )


@MarkMaker
@names_arguments("wh.stage")
def stage(devices: int | None = None) -> Annotation:
    """Marks a region as one pipeline stage, on its own devices.

    A stage must be inside a ``pipeline``.

    Args:
        devices: Number of devices of the stage in one copy of the model; default: the
            planner's choice.

    Returns:
        Context manager that is also a decorator.

    Raises:
        WhaleError: ``devices`` is not a positive integer.

    >>> stage()
    wh.stage()
    """
    return _annotation("stage", devices=_positive("stage", "devices", devices))


@MarkMaker
@names_arguments("wh.pipeline")
def pipeline(
    num_stages: int | None = None,
    num_micro_batches: int | None = None,
    schedule: str = "auto",
) -> Annotation:
    """Marks a region whose stages are scheduled as a pipeline.

    Args:
        num_stages: Number of stages, if none is marked inside; default: the planner's
            choice.
        num_micro_batches: Number of micro-batches; default: the planner's choice.
        schedule: Schedule of the stages. ``"auto"`` leaves the choice to the planner.
            ``"gpipe"`` runs all forward passes first. ``"1f1b"`` alternates and stores
            fewer activations. ``"1f1b-ahead"`` stores those of one more micro-batch and
            overlaps transfers. ``"interleaved"`` puts several parts of the model on
            each stage. ``"zb-h1"`` splits the backward pass (estimates do not include
            it). One program for all stages runs the first two schedules; the others
            need stage programs.

    Returns:
        Context manager that is also a decorator.

    Raises:
        WhaleError: A count is not a positive integer or the schedule is unknown.

    >>> pipeline(num_stages=2)
    wh.pipeline(num_stages=2)
    """
    if not isinstance(schedule, str) or schedule not in SCHEDULES:
        known = ", ".join(repr(name) for name in SCHEDULES)
        raise WhaleError(
            f"pipeline(schedule={short_repr(schedule)}): no such schedule; expected "
            "one of "
            f"{known}."
        )
    return _annotation(
        "pipeline",
        num_stages=_positive("pipeline", "num_stages", num_stages),
        num_micro_batches=_positive("pipeline", "num_micro_batches", num_micro_batches),
        schedule=None if schedule == "auto" else schedule,
    )


def nesting_problem(outer: tuple[Mark, ...], inner: Mark) -> str | None:
    """Returns the reason why ``inner`` may not be inside ``outer``, or None if it may.

    Args:
        outer: Open marks, outermost first.
        inner: Mark to open.

    >>> nesting_problem((), Mark(kind="split")) is None
    True
    """
    kinds = [mark.kind for mark in outer]
    culprit: Mark | None = None
    if "split" in kinds and inner.kind != "split":
        culprit = outer[kinds.index("split")]
    elif "stage" in kinds and inner.kind in ("replicate", "pipeline", "stage"):
        culprit = outer[kinds.index("stage")]
    elif "pipeline" in kinds and inner.kind == "pipeline":
        culprit = outer[kinds.index("pipeline")]
    if culprit is not None:
        return (
            f"{inner} is inside {culprit}, which is not allowed: annotations nest "
            f"as {ALLOWED_NESTING}. Leave {culprit.kind} before entering {inner.kind}, "
            "or remove one of the two."
        )
    if inner.kind == "stage" and "pipeline" not in kinds:
        around = f" inside {outer[-1]}" if outer else ""
        return (
            f"{inner}{around} has no pipeline around it: annotations nest as "
            f"{ALLOWED_NESTING}. Put `with wh.pipeline():` around the stages."
        )
    return None


def scope_name(mark: Mark) -> str:
    """Returns the name of the scope that an annotation opens.

    >>> scope_name(Mark(kind="split", attributes=(("axis", "mlp"),)))
    'wh.split[axis=mlp]'
    """
    inner = ";".join(f"{name}={text}" for name, text in mark.attributes)
    return f"wh.{mark.kind}[{inner}]"


def parse_scope(text: str) -> Mark | None:
    """Returns the mark in one component of a name stack, or None.

    JAX wraps the names of transformed code, as in ``jvp(wh.split[])``.

    >>> parse_scope("transpose(jvp(wh.split[axis=mlp;devices=4]))")
    Mark(kind='split', attributes=(('axis', 'mlp'), ('devices', '4')))
    >>> parse_scope("MlpBlock_0") is None
    True
    """
    match = _SCOPE.search(text)
    if match is None:
        return None
    kind, inner = match.groups()
    pairs = [part.partition("=") for part in inner.split(";") if part]
    return Mark(
        kind=_mark_kind(kind),
        attributes=tuple(sorted((name, value) for name, _, value in pairs)),
    )


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Collects the marks that this thread enters during a block."""
    record = Recording()
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)


def _mark_kind(text: str) -> MarkKind:
    kinds: dict[str, MarkKind] = {
        "replicate": "replicate",
        "split": "split",
        "stage": "stage",
        "pipeline": "pipeline",
    }
    return kinds[text]


def _annotation(kind: MarkKind, **arguments: int | str | None) -> Annotation:
    given = {name: str(value) for name, value in arguments.items() if value is not None}
    return Annotation(Mark(kind=kind, attributes=tuple(sorted(given.items()))))


def _positive(kind: str, name: str, value: int | None) -> int | None:
    if value is None:
        return None
    if callable(value):
        raise WhaleError(
            f"@wh.{kind} stands over "
            f"{getattr(value, '__name__', short_repr(value))!r} as "
            f"its {name}; a mark is called before it decorates: @wh.{kind}()."
        )
    if not isinstance(value, int) or not is_whole(value, 1):
        raise WhaleError(
            f"{kind}({name}={short_repr(value)}): expected a positive integer, or "
            "nothing "
            "to let the planner choose."
        )
    return value


def _numbered(mark: Mark, outer: tuple[_OpenMark, ...]) -> Mark:
    if mark.kind != "stage":
        return mark
    inside = next(o for o in reversed(outer) if o.mark.kind == "pipeline")
    ordinal = inside.stages
    inside.stages += 1
    return Mark(
        kind="stage",
        attributes=tuple(sorted((*mark.attributes, ("i", str(ordinal))))),
    )
