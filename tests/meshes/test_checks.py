"""Arguments that are none: what is said of them, shortened and escaped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from tests import misuse
from whalejax.meshes.checks import (
    LARGEST,
    Arguments,
    check_fields,
    is_number,
    is_printable,
    is_whole,
    short_repr,
)
from whalejax.meshes.errors import WhaleError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\x1b[2J\n", r"'a\x1b[2J\n'"),
        (10**5000, "a whole number of 16610 bits"),
        (misuse.Unprintable(), "<Unprintable instance"),
        ("x" * 200, "xxx"),
        (np.zeros(10_000), "array([0."),
        ({"a": {"b": {"c": list(range(1000))}}}, "{'a': {'b'"),
    ],
    ids=["control", "endless", "unprintable", "long", "array", "deep"],
)
def test_values_are_shown_short_and_escaped(value: Any, text: str) -> None:
    said = short_repr(value)
    assert text in said
    assert len(said) <= 60
    assert said.isprintable()


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [
        (1, True, True),
        (np.int32(1), True, True),
        (np.float32(1), False, True),
        (1.5, False, True),
        (True, False, False),
        (LARGEST + 1, False, True),
        (10**5000, False, False),
        (float("nan"), False, False),
        (float("-inf"), False, False),
        ("1", False, False),
        (None, False, False),
        (np.arange(3), False, False),
    ],
    ids=range(12),
)
def test_what_is_a_number(value: Any, whole: bool, number: bool) -> None:
    assert is_whole(value) == whole
    assert is_number(value) == number


@pytest.mark.parametrize("text", ["", " ", "a\x7f", "a\u202eb", "a\nb", b"a", None])
def test_what_no_terminal_shows(text: Any) -> None:
    assert not is_printable(text)
    assert is_printable("層 ×")


def test_all_arguments_at_once() -> None:
    given = Arguments("wh.f")
    assert given.whole("n", 3, least=1)
    assert not given.whole("n", 0, least=1, most=8)
    assert not given.number("x", float("nan"), above=0, none=True)
    assert not given.number("y", -1, least=0)
    assert not given.switch("flag", 1)
    assert not given.words("name", "")
    assert not given.path("path", b"a")
    assert not given.function("call", 5, "a function of nothing")
    assert not given.choice("how", ["ring"], ("ring", "gather"))
    assert not given.of("table", [], Mapping, "values by name", none=True)
    with pytest.raises(WhaleError) as error:
        given.raise_if_any()
    assert str(error.value) == (
        "wh.f: 9 problems\n"
        "  1. n is 0; expected a whole number, 1 to 8\n"
        "  2. x is nan; expected a number above 0, or None\n"
        "  3. y is -1; expected a number, 0 or more\n"
        "  4. flag is 1; expected True or False\n"
        "  5. name is ''; expected a text\n"
        "  6. path is b'a'; expected the path of a file, without control characters\n"
        "  7. call is 5; expected a function of nothing\n"
        "  8. how is ['ring']; expected one of 'ring', 'gather'\n"
        "  9. table is []; expected values by name, or None"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Fields of every type that is known."""

    count: int = 1
    rate: float = 1.0
    name: str = ""
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    pairs: tuple[tuple[str, float], ...] = ()
    other: Sample | None = None
    anything: Any = None


def test_fields_of_other_types() -> None:
    check_fields(Sample(sizes=(1, 2), pairs=(("a", 1),), other=Sample()), "sample")
    wrong: Any = {
        "count": True,
        "rate": "1",
        "name": "a\n",
        "kind": 5,
        "sizes": (1, 2.0),
        "pairs": (("a", "b"),),
        "other": 5,
        "anything": object,
    }
    with pytest.raises(WhaleError) as error:
        check_fields(Sample(**wrong), "sample")
    assert str(error.value) == (
        "sample: 7 problems\n"
        "  1. count is True; expected a whole number\n"
        "  2. rate is '1'; expected a number\n"
        "  3. name is 'a\\n'; expected a text without control characters\n"
        "  4. kind is 5; expected one of 'a', 'b'\n"
        "  5. sizes is (1, 2.0); expected a tuple, each a whole number\n"
        "  6. pairs is (('a', 'b'),); expected a tuple, each a tuple of a text "
        "without control characters and a number\n"
        "  7. other is 5; expected a Sample or None"
    )
