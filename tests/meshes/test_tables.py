"""The TOML writer against the standard library's reader."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from whalejax.meshes.read_file import toml_text


SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=6)


def _tables(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    values: st.SearchStrategy[Any] = SCALARS
    if depth:
        below = _tables(depth - 1)
        values = values | below | st.lists(below, min_size=1, max_size=2)
    return st.dictionaries(KEYS, values, max_size=3)


@given(_tables(3))
def test_reads_back_as_it_was(data: dict[str, Any]) -> None:
    assert tomllib.loads(toml_text(data)) == data


def test_leaves_none_out() -> None:
    assert toml_text({"a": None, "b": 1}) == "b = 1\n"
