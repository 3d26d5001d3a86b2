"""Devices that the catalogue lacks, with the numbers of their datasheets.

This module does not describe the links of such devices: estimates and plans take those
of a kind in the catalogue, with a note. The cards are separate from the catalogue,
whose every number has a source and a date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DatasheetCard:
    """A device that the catalogue lacks, from its datasheet, without sparsity.

    Attributes:
        words: Regular expressions of its names.
        like: Entry whose family's efficiency, node and network are used.
        half, eight, single: TFLOP/s in 16 bits, in 8 bits (0 if it has none), in
            float32.
        memory: Gigabytes, and gigabytes per second.
        cores: Streaming multiprocessors or compute units.
    """

    words: tuple[str, ...]
    like: str
    half: float
    eight: float
    single: float
    memory: tuple[int, int]
    cores: int


CARDS = (
    # Intel's white papers of Gaudi 2 (2022) and Gaudi 3 (2024).
    DatasheetCard(
        ("gaudi2", "gaudi 2", "gaudi-2"), "a100-80", 432, 865, 11, (96, 2450), 0
    ),
    DatasheetCard(
        ("gaudi3", "gaudi 3", "gaudi-3"), "h100", 1835, 1835, 14.3, (128, 3700), 0
    ),
    # Amazon's documentation of Trainium chips.
    DatasheetCard(("trainium2", "trn2"), "h100", 667, 1299, 181, (96, 2900), 0),
    DatasheetCard(("trainium", "trn1"), "a100-80", 190, 190, 47.5, (32, 820), 0),
    # Google's documentation of TPU v2 and v3: half a chip, as JAX counts them.
    DatasheetCard(("tpu-v3", "tpu ?v3", "^v3"), "v4", 61.5, 0, 61.5, (16, 450), 0),
    DatasheetCard(("tpu-v2", "tpu ?v2", "^v2"), "v4", 22.5, 0, 22.5, (8, 350), 0),
)
"""Devices without a JAX plug-in, or no longer with one."""


def datasheet_card(name: str) -> DatasheetCard | None:
    """Returns the card that matches a name, or None.

    Args:
        name: Name in lower case.

    >>> card = datasheet_card("tpu v3")
    >>> card and card.memory
    (16, 450)
    """
    result = (card for card in CARDS if any(is_word(w, name) for w in card.words))
    return next(result, None)


def is_word(word: str, name: str) -> bool:
    """Whether a name contains a word, with no letter or digit before nor digit after.

    Args:
        word: Regular expression.
        name: Name in lower case.
    """
    return re.search(rf"(?<![a-z0-9]){word}(?![0-9])", name) is not None
