"""Text from source files: the same windows everywhere, and real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import whalejax as wh
from whalejax.models import text_data


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library with what is to be read and what is not."""
    for name, content in {
        "b.py": "bb" * 50,
        "a.py": "aa" * 50,
        "package/c.py": "cc" * 50,
        "package/tests/t.py": "TT" * 50,
        "site-packages/s.py": "SS" * 50,
        "test/u.py": "UU" * 50,
        "notes.txt": "NN" * 50,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path


def test_library_files_are_read_in_order_and_nothing_else(library: Path) -> None:
    made = text_data.standard_library(4, root=library)
    assert made.data.tobytes().decode() == "a" * 100 + "b" * 100 + "c" * 100


def test_no_more_is_read_than_asked(library: Path) -> None:
    made = text_data.standard_library(4, root=library, max_bytes=150)
    assert made.data.tobytes().decode() == "a" * 100 + "b" * 50


def test_windows_are_pieces_of_the_text() -> None:
    made = text_data.standard_library(128)
    tokens = made.batch(11, 8)["tokens"]
    assert tokens.dtype == np.int32
    assert tokens.shape == (8, 129)
    whole = made.data.tobytes()
    for row in tokens:
        assert bytes(row.astype(np.uint8)) in whole


def test_the_last_byte_can_be_drawn() -> None:
    made = text_data.Text(data=np.arange(6, dtype=np.uint8), sequence=4)
    rows = {tuple(row) for row in made.batch(0, 64)["tokens"].tolist()}
    assert rows == {(0, 1, 2, 3, 4), (1, 2, 3, 4, 5)}


def test_first_rows_do_not_depend_on_the_batch_size() -> None:
    made = text_data.standard_library(128)
    small, large = made.batch(5, 4)["tokens"], made.batch(5, 16)["tokens"]
    assert (small == large[:4]).all()


def test_steps_and_seeds_draw_other_windows() -> None:
    made = text_data.standard_library(128)
    tokens = made.batch(0, 16)["tokens"]
    assert (tokens != made.batch(1, 16)["tokens"]).any()
    other = text_data.standard_library(128, seed=1)
    assert (tokens != other.batch(0, 16)["tokens"]).any()


def test_a_folder_without_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "compiled.pyc").write_bytes(b"x" * 500)
    with pytest.raises(wh.WhaleError) as caught:
        text_data.standard_library(128, root=tmp_path)
    message = str(caught.value)
    assert message.startswith(f"no Python source was found under {tmp_path}: ")
    assert "found 0 bytes" in message
    assert 'text.standard_library(128, root=Path("src"))' in message


def test_too_little_text_gives_both_numbers(library: Path) -> None:
    with pytest.raises(wh.WhaleError) as caught:
        text_data.standard_library(512, root=library)
    assert str(caught.value) == (
        "the text holds 300 bytes; windows of sequence + 1 = 513 bytes were asked "
        "for. Give more text or a shorter sequence."
    )
