"""Batches made by a counter: any process can make any step's batch by itself.

Philox is a counter-based generator: its state is (key, counter), so batch number one
million costs what the first one does and nothing has to be replayed on a restart.
The made-up token sequences here follow a rule, so that a loss on them can fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt


Batch: TypeAlias = Mapping[str, npt.NDArray[Any]]

_MULTIPLIER: Final = 5
_OFFSET: Final = 3
_NOISE: Final = 4
_TEST_BATCH_SIZE: Final = 16

IMAGE_CHANNELS: Final = 3
"""Colours of a made-up image."""


def generator(seed: int, step: int) -> np.random.Generator:
    """The random numbers of one step.

    Args:
        seed: which sequence of batches.
        step: which batch of it, from 0.

    >>> int(generator(0, 7).integers(100)) == int(generator(0, 7).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))


def chain_tokens(
    step: int, size: int, *, length: int, vocab: int, seed: int
) -> npt.NDArray[np.int32]:
    """Sequences in which each token nearly decides the next.

    ``next = (5 * token + 3 + noise) mod vocab`` with noise uniform over four values, so
    the best possible loss is ``log(4)`` nats per token.

    Args:
        step: which batch.
        size: sequences in it.
        length: tokens in a sequence.
        vocab: number of different tokens.
        seed: which sequence of batches.

    Returns:
        Tokens of shape ``[size, length]``; the first rows do not depend on ``size``.

    >>> chain_tokens(0, 2, length=5, vocab=512, seed=0).shape
    (2, 5)
    """
    draws = generator(seed, step).integers(0, vocab * _NOISE, size=(size, length))
    tokens = np.empty((size, length), np.int64)
    tokens[:, 0] = draws[:, 0] % vocab
    for position in range(1, length):
        noise = draws[:, position] % _NOISE
        tokens[:, position] = (
            _MULTIPLIER * tokens[:, position - 1] + _OFFSET + noise
        ) % vocab
    return tokens.astype(np.int32)


def default_batch_size(size: str, given: int | None, full: int) -> int:
    """The global batch size of a job: as given, or 16 at test size.

    >>> default_batch_size("test", None, 64), default_batch_size("test", 8, 64)
    (16, 8)
    """
    if given is not None:
        return given
    return _TEST_BATCH_SIZE if size == "test" else full


def lengths(step: int, size: int, *, longest: int, seed: int) -> npt.NDArray[np.int64]:
    """How many tokens of each sequence are real, at least one.

    >>> lengths(0, 3, longest=8, seed=0).shape
    (3,)
    """
    # A key of its own: lengths must not follow from the tokens of the same step.
    draws = generator(seed + (1 << 32), step).integers(1, longest + 1, size=size)
    return np.asarray(draws, np.int64)


def labelled_images(
    step: int, size: int, *, side: int, classes: int, seed: int
) -> Batch:
    """Noise images, each shifted in one colour channel by its label.

    Args:
        step: which batch.
        size: images in it.
        side: their height and width, in pixels.
        classes: number of different labels.
        seed: which sequence of batches.

    Returns:
        ``{"images": float32[size, side, side, 3], "labels": int32[size]}``.

    >>> labelled_images(0, 2, side=20, classes=40, seed=0)["images"].shape
    (2, 20, 20, 3)
    """
    random = generator(seed, step)
    labels = random.integers(0, classes, size=size).astype(np.int32)
    shape = (size, side, side, IMAGE_CHANNELS)
    images = random.standard_normal(shape, dtype=np.float32)
    shift = 2.0 * labels / classes - 1.0
    images[..., 0] += shift[:, None, None].astype(np.float32)
    return {"images": images, "labels": labels}
