"""Annotations: scopes that carry their arguments, nesting rules, decorators."""

from __future__ import annotations

import inspect
import pickle
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import whalejax as wh
from whalejax.planner.model.graph import Mark
from whalejax.user_code.annotations import (
    Annotation,
    nesting_problem,
    parse_scope,
    recording,
    scope_name,
)


MARKS = [
    (wh.replicate(), "wh.replicate[]"),
    (wh.replicate(devices=2), "wh.replicate[devices=2]"),
    (wh.split(devices=4, axis="mlp"), "wh.split[axis=mlp;devices=4]"),
    (wh.split(axis="head.kernel[1]"), "wh.split[axis=head.kernel.1]"),  # as in plans
    (wh.split(axis="blocks.*.up.kernel[1]"), "wh.split[axis=up.kernel.1]"),
    (wh.stage(devices=3), "wh.stage[devices=3]"),
    (
        wh.pipeline(num_stages=2, num_micro_batches=8, schedule="1f1b"),
        "wh.pipeline[num_micro_batches=8;num_stages=2;schedule=1f1b]",
    ),
    (wh.pipeline(), "wh.pipeline[]"),
]


def scopes_of(function: Callable[..., jax.Array], *shape: int) -> list[str]:
    """The name stacks of a function's equations."""
    traced = jax.make_jaxpr(function)(jnp.ones(shape))
    return [str(eqn.source_info.name_stack) for eqn in traced.eqns]


@pytest.mark.parametrize(("annotation", "name"), MARKS, ids=lambda x: str(x))
def test_the_scope_name_carries_the_arguments(annotation: Annotation, name: str):
    assert scope_name(annotation.mark) == name
    assert parse_scope(name) == annotation.mark


@pytest.mark.parametrize(
    "text", ["jvp(wh.split[axis=mlp])", "transpose(jvp(wh.split[axis=mlp]))"]
)
def test_names_that_jax_wrapped_are_read(text: str) -> None:
    assert parse_scope(text) == Mark(kind="split", attributes=(("axis", "mlp"),))


@pytest.mark.parametrize("text", ["", "Block_0", "split[]", "wh.merge[]", "wh.split"])
def test_other_scopes_are_no_marks(text: str) -> None:
    assert parse_scope(text) is None


def test_context_manager_and_decorator_open_the_same_scope() -> None:
    @wh.split(axis="mlp")
    def decorated(x: jax.Array) -> jax.Array:
        """Doubles."""
        return x * 2

    def managed(x: jax.Array) -> jax.Array:
        with wh.split(axis="mlp"):
            return x * 2

    assert scopes_of(decorated, 3) == scopes_of(managed, 3) == ["wh.split[axis=mlp]"]
    assert decorated.__name__ == "decorated" and decorated.__doc__ == "Doubles."


def test_an_annotation_is_entered_again_and_inside_itself() -> None:
    mark = wh.split()

    def function(x: jax.Array) -> jax.Array:
        with mark:
            with mark:
                x = x + 1
            x = x + 2
        with mark:
            return x + 3

    assert scopes_of(function, 3) == [
        "wh.split[]/wh.split[]",
        "wh.split[]",
        "wh.split[]",
    ]


def test_it_has_no_effect_on_numbers() -> None:
    x = jnp.arange(6.0)
    with wh.replicate(), wh.split(devices=3):
        inside = jnp.sin(x) @ x
    assert inside == jnp.sin(x) @ x


def test_an_error_inside_closes_the_scope() -> None:
    with pytest.raises(RuntimeError, match="inside"), wh.split():
        raise RuntimeError("inside")
    with wh.replicate():  # would be refused inside split
        pass


def test_stages_are_numbered_inside_their_pipeline() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(2):
            with wh.pipeline():
                for _ in range(2):
                    with wh.stage(devices=2):
                        x = x + 1
        return x

    assert (
        scopes_of(function, 3)
        == [
            "wh.pipeline[]/wh.stage[devices=2;i=0]",
            "wh.pipeline[]/wh.stage[devices=2;i=1]",
        ]
        * 2
    )


def test_threads_do_not_see_each_other() -> None:
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            with wh.replicate():
                pass
        except BaseException as error:
            failed.append(error)

    with wh.split():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert not failed


def test_recording_lists_each_entered_mark_once() -> None:
    with recording() as record:
        with wh.replicate():
            for _ in range(3):
                with wh.split(axis="mlp"):
                    pass
    with wh.replicate(devices=7):
        pass
    assert [str(mark) for mark in record.marks] == ["replicate()", "split(axis=mlp)"]


FORBIDDEN = [
    ([wh.split()], wh.replicate(), "replicate() is inside split()"),
    (
        [wh.split(devices=4)],
        wh.pipeline(),
        "pipeline() is inside split(devices=4)",
    ),
    ([wh.pipeline(), wh.split()], wh.stage(), "stage() is inside split()"),
    (
        [wh.pipeline(), wh.stage()],
        wh.replicate(),
        "replicate() is inside stage()",
    ),
    ([wh.pipeline(), wh.stage()], wh.pipeline(), "pipeline() is inside stage()"),
    ([wh.pipeline()], wh.pipeline(), "pipeline() is inside pipeline()"),
    ([], wh.stage(), "stage() has no pipeline around it"),
    (
        [wh.replicate()],
        wh.stage(),
        "stage() inside replicate() has no pipeline around it",
    ),
]


@pytest.mark.parametrize(("outer", "inner", "text"), FORBIDDEN)
def test_forbidden_nesting_is_refused_at_once(
    outer: list[Annotation], inner: Annotation, text: str
) -> None:
    problem = nesting_problem(tuple(o.mark for o in outer), inner.mark)
    assert problem is not None
    assert text in problem
    assert "replicate > pipeline > stage > split" in problem


def test_refused_where_it_is_written() -> None:
    with wh.split(axis="mlp"):
        with pytest.raises(wh.WhaleError) as caught, wh.replicate():
            pass
    assert str(caught.value) == (
        "replicate() is inside split(axis=mlp), which is not allowed: annotations "
        "nest as replicate > pipeline > stage > split. Leave split before entering "
        "replicate, or remove one of the two."
    )


ALLOWED = [
    [wh.replicate(), wh.pipeline(), wh.stage(), wh.split()],
    [wh.split(), wh.split()],
    [wh.replicate(), wh.replicate()],
    [wh.replicate(), wh.split()],
    [wh.pipeline(), wh.replicate(), wh.stage()],
]


@pytest.mark.parametrize("marks", ALLOWED)
def test_allowed_nesting_passes(marks: list[Annotation]) -> None:
    for depth, mark in enumerate(marks):
        assert nesting_problem(tuple(m.mark for m in marks[:depth]), mark.mark) is None


BAD_ARGUMENTS: list[tuple[Callable[[], Annotation], str]] = [
    (lambda: wh.replicate(devices=0), "replicate(devices=0): expected a positive"),
    (lambda: wh.split(devices=-1), "split(devices=-1): expected a positive integer"),
    (lambda: wh.stage(devices=True), "stage(devices=True): expected a positive"),
    (lambda: wh.split(axis="a/b"), "split(axis='a/b'): expected the name of one"),
    (lambda: wh.split(axis="a;b"), "split(axis='a;b'): expected the name of one"),
    (lambda: wh.split(axis=""), "split(axis=''): expected the name of one"),
    (
        lambda: wh.pipeline(num_stages=0),
        "pipeline(num_stages=0): expected a positive integer",
    ),
    (
        lambda: wh.pipeline(schedule="fast"),
        "pipeline(schedule='fast'): no such schedule; expected one of 'auto', "
        "'gpipe', '1f1b', '1f1b-ahead', 'interleaved', 'zb-h1'.",
    ),
    (
        lambda: wh.split()(int),  # type: ignore[return-value]
        "split() decorates the class int; an annotation decorates a function",
    ),
]


@pytest.mark.parametrize(("make", "text"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused(make: Callable[[], Annotation], text: str) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        make()
    assert text in str(caught.value)


def test_equal_annotations_are_equal() -> None:
    assert wh.split(axis="mlp") == wh.split(axis="mlp") != wh.split()
    assert repr(wh.split(axis="mlp", devices=2)) == "wh.split(axis=mlp, devices=2)"
    assert len({wh.replicate(), wh.replicate()}) == 1


@pytest.mark.parametrize("mark", [wh.replicate, wh.split, wh.stage, wh.pipeline])
def test_a_mark_without_parentheses_is_refused(mark: Callable[..., Annotation]) -> None:
    name = mark.__name__
    words = rf"`with wh.{name}:` has no parentheses. Write `with wh.{name}\(\):`"
    with pytest.raises(wh.WhaleError, match=words), mark:  # type: ignore[attr-defined]
        pass
    assert pickle.loads(pickle.dumps(mark)) is mark
    assert repr(mark) == f"<function wh.{name}>"
    assert "devices" in inspect.signature(mark).parameters or mark is wh.pipeline
