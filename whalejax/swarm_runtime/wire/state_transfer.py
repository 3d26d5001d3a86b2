"""Transfers a stage's state in pieces between processes.

Peers and the trainer use the same function. Both know the size of a stage's state, so
they accept nothing larger.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from whalejax.state.state_bytes import PIECE_BYTES, digest_of, piece_count
from whalejax.swarm_runtime.staged_job import StagedJob
from whalejax.wire.service import RefusedRequestError
from whalejax.wire.swarm_messages import StateChunk


def piece(data: np.ndarray, place: int, digest: str) -> StateChunk:
    """Returns the answer with a piece of a state."""
    part = data[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]
    return StateChunk(count=piece_count(data.size), digest=digest, arrays=(part,))


def downloaded(
    ask: Callable[[int], StateChunk], cut: StagedJob, stage: int, whose: str
) -> list[np.ndarray]:
    """Downloads the arrays of a stage's state.

    Args:
        ask: Function from an index to the answer with that piece.
        cut: Staged job.
        stage: Number of the stage.
        whose: Name of the sender.

    Raises:
        RefusedRequestError: The data are not a state of this stage.
    """
    size = cut.state_bytes(stage)
    count, digest = piece_count(size), ""
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
    arrays = cut.split(stage, np.concatenate(pieces))
    result = "" if arrays is None else digest_of(arrays)
    if arrays is None or result != digest:
        raise RefusedRequestError(
            "shape",
            f"the state of stage {stage} that {whose} sent has the digest "
            f"{result[:12]}, and {digest[:12]} was announced",
            whose,
        )
    return arrays
