"""Transfers a stage's state in pieces between processes.

The same function downloads it at a peer and at the trainer: both know the size of a
stage's state, so nothing larger is accepted from anyone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from whalejax.wire.service import RefusedRequestError
from whalejax.wire.swarm_messages import StateChunk


PIECE_BYTES: Final = 1 << 24
"""Bytes of a state in one answer."""


class Layout(Protocol):
    """Source of the arrays of each stage's state; a ``StagedJob``."""

    def state_bytes(self, stage: int) -> int:
        """Returns the bytes of a stage's state."""
        ...

    def split(self, stage: int, data: np.ndarray) -> list[np.ndarray] | None:
        """Returns the arrays of these bytes; None if the number of bytes differs."""
        ...


def packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the concatenated bytes of arrays."""
    flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]
    return np.concatenate(flat) if flat else np.zeros(0, np.uint8)


def digest_of(arrays: Sequence[np.ndarray]) -> str:
    """Returns the SHA-256 of arrays, as hexadecimal digits."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def piece(data: np.ndarray, place: int, digest: str) -> StateChunk:
    """Returns a part of a state, as an answer."""
    part = data[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]
    return StateChunk(count=_count(data.size), digest=digest, arrays=(part,))


def downloaded(
    ask: Callable[[int], StateChunk], layout: Layout, stage: int, whose: str
) -> list[np.ndarray]:
    """Downloads the arrays of a stage's state.

    Args:
        ask: Function from an index to the answer with that piece.
        layout: Source of the states' layout.
        stage: Number of the stage.
        whose: Name of the sender.

    Raises:
        RefusedRequestError: The data are no state of this stage.
    """
    size = layout.state_bytes(stage)
    count, digest = _count(size), ""
    pieces: list[np.ndarray] = []
    for place in range(count):
        answer = ask(place)
        expected = min(PIECE_BYTES, size - place * PIECE_BYTES)
        sent = [f"{x.dtype}{list(x.shape)}" for x in answer.arrays]
        if answer.count != count or sent != [f"uint8[{expected}]"]:
            raise RefusedRequestError(
                "shape",
                f"{whose} sent {', '.join(sent) or 'nothing'} as piece {place} of "
                f"{answer.count} of the state of stage {stage}; expected "
                f"uint8[{expected}], of {count} with {size} bytes together",
                whose,
            )
        digest = answer.digest
        pieces.append(answer.arrays[0])
    arrays = layout.split(stage, np.concatenate(pieces))
    result = "" if arrays is None else digest_of(arrays)
    if arrays is None or result != digest:
        raise RefusedRequestError(
            "shape",
            f"the state of stage {stage} that {whose} sent has the digest "
            f"{result[:12]}, and {digest[:12]} was announced",
            whose,
        )
    return arrays


def _count(size: int) -> int:
    return max(1, -(-size // PIECE_BYTES))
