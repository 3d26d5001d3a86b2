"""One error that lists every problem."""

from __future__ import annotations

import pytest

from whalejax.meshes.errors import Problems, WhaleError


class _Narrower(WhaleError):
    pass


def test_nothing_recorded_raises_nothing() -> None:
    problems = Problems("plan")
    problems.raise_if_any()
    assert not problems
    assert len(problems) == 0


def test_lists_all_with_their_number() -> None:
    problems = Problems("plan")
    problems.add("a: wrong")
    problems.add("b: wrong\nand why")
    problems.add("a: wrong")
    with pytest.raises(WhaleError) as error:
        problems.raise_if_any()
    assert str(error.value) == (
        "plan: 2 problems\n  1. a: wrong\n  2. b: wrong\n     and why"
    )


def test_kind_and_title_can_be_given_when_raising() -> None:
    problems = Problems()
    problems.add("x")
    with pytest.raises(_Narrower, match=r"^model: 1 problem\n  1\. x$"):
        problems.raise_if_any(kind=_Narrower, title="model")


def test_context_raises_at_the_end_and_lets_other_errors_through() -> None:
    with pytest.raises(WhaleError, match="1 problem"), Problems("x") as problems:
        problems.add("one")
    with pytest.raises(KeyError), Problems("x") as problems:
        problems.add("one")
        raise KeyError


def test_extend_takes_over_the_messages_of_another() -> None:
    first, second = Problems("a"), Problems("b")
    first.add("one")
    second.add("one")
    second.add("two")
    first.extend(second)
    assert first.messages == ["one", "two"]
