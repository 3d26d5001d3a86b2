"""Synthetic batches, which any process can make for any step.

The random generator Philox has the state (key, counter), so the batch of a late step
costs as much as the first. Token sequences follow a rule, so that training reduces the
loss.

Volumes are smooth random fields: white noise whose wave number k is scaled by
k^(-index / 2), so that its power falls as k^-index. A small window does not suffice to
predict the label, because structures are of all sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from whalejax.meshes.errors import WhaleError


Batch: TypeAlias = Mapping[str, npt.NDArray[Any]]

_MULTIPLIER: Final = 5
_OFFSET: Final = 3
_NOISE: Final = 4
_TEST_BATCH_SIZE: Final = 16
_PADDING: Final = 0  # starts targets, too
_END: Final = 1
_SEGMENT: Final = 20
_SPAN: Final = 3  # 15 % of a segment

IMAGE_CHANNELS: Final = 3
"""Colour channels of a synthetic image."""

_CUBE: Final = (0, 1, 2)

LEAST_INDEX: Final = 1.0
MOST_INDEX: Final = 3.0
"""Range from which the spectral index of a field is drawn."""


def generator(seed: int, step: int) -> np.random.Generator:
    """Returns the random generator of one step.

    Args:
        seed: Seed of the sequence of batches.
        step: Number of the batch in that sequence, from 0.

    >>> int(generator(0, 7).integers(100)) == int(generator(0, 7).integers(100))
    True
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, step]))


def chain_tokens(
    step: int, size: int, *, length: int, vocab: int, seed: int
) -> npt.NDArray[np.int32]:
    """Returns sequences in which each token nearly determines the next.

    ``next = (5 * token + 3 + noise) mod vocab`` with noise uniform over four values. So
    the best possible loss is ``log(4)`` nats per token.

    Args:
        step: Number of the batch.
        size: Sequences in it.
        length: Tokens in a sequence.
        vocab: Number of different tokens.
        seed: Seed of the sequence of batches.

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
    """Returns a job's global batch size: the given one, or 16 at test size.

    >>> default_batch_size("test", None, 64), default_batch_size("test", 8, 64)
    (16, 8)
    """
    if given is not None:
        return given
    return _TEST_BATCH_SIZE if size == "test" else full


def lengths(step: int, size: int, *, longest: int, seed: int) -> npt.NDArray[np.int64]:
    """Draws the number of real tokens of each sequence, at least one.

    >>> lengths(0, 3, longest=8, seed=0).shape
    (3,)
    """
    # With a separate key, lengths do not depend on the tokens of the step.
    draws = generator(seed + (1 << 32), step).integers(1, longest + 1, size=size)
    return np.asarray(draws, np.int64)


def labelled_images(
    step: int, size: int, *, side: int, classes: int, seed: int
) -> Batch:
    """Returns noise images, each shifted in one colour channel by its label.

    Args:
        step: Number of the batch.
        size: Number of images.
        side: Height and width of an image, in pixels.
        classes: Number of different labels.
        seed: Seed of the sequence of batches.

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


def denoising_batch(
    step: int, size: int, *, inputs: int, targets: int, vocab: int, seed: int
) -> Batch:
    """Returns padded sequences with hidden spans, and these spans as targets.

    A text consists of segments of twenty tokens. In each segment, a span of three
    tokens is hidden. In the inputs a sentinel replaces the span; in the targets the
    span follows the sentinel, and an end token comes last, as in Raffel et al.,
    "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer"
    (2020), section 3.3.4. The number of segments differs between texts.

    Args:
        step: Number of the batch.
        size: Number of texts.
        inputs: Tokens of a corrupted text, padded.
        targets: Tokens of the spans, padded, without the start token.
        vocab: Number of different tokens: 0 pads and starts, 1 ends, the last ones are
            the sentinels.
        seed: Seed of the sequence of batches.

    Returns:
        ``inputs`` ``int32[size, inputs]``, ``targets`` ``int32[size, targets + 1]``,
        and masks of real tokens, without the start: ``input_padding`` ``bool[size,
        inputs]`` and ``target_padding`` ``bool[size, targets]``.

    Raises:
        WhaleError: The lengths are too short for even one segment.

    >>> batch = denoising_batch(0, 2, inputs=40, targets=16, vocab=512, seed=0)
    >>> sorted(batch), batch["targets"].shape
    (['input_padding', 'inputs', 'target_padding', 'targets'], (2, 17))
    """
    kept = _SEGMENT - _SPAN + 1
    segments = min(inputs // kept, (targets - 1) // (_SPAN + 1))
    if segments < 1:
        raise WhaleError(
            f"texts of {inputs} inputs and {targets} targets; expected at least {kept} "
            f"inputs and {_SPAN + 2} targets, which a text of {_SEGMENT} tokens takes."
        )
    length, first = segments * _SEGMENT, _END + 1
    chain = chain_tokens(
        step, size, length=length, vocab=vocab - segments - first, seed=seed
    )
    words = (chain + first).reshape(size, segments, _SEGMENT)
    draws = generator(seed + (1 << 34), step)
    starts = draws.integers(0, kept, size=(size, segments, 1))
    sentinels = np.broadcast_to(vocab - 1 - np.arange(segments), (size, segments))
    places = np.arange(kept)[None, None]
    after = np.where(places > starts, places + _SPAN - 1, places)
    left = np.take_along_axis(words, after, axis=2)
    left = np.where(places == starts, sentinels[..., None], left)
    hidden = np.take_along_axis(words, starts + np.arange(_SPAN)[None, None], axis=2)
    spans = np.concatenate([sentinels[..., None], hidden], axis=2)
    real = lengths(step, size, longest=segments, seed=seed)
    made, input_padding = _padded(left, real, inputs)
    wanted, target_padding = _padded(spans, real, targets)
    ends = real * (_SPAN + 1)
    wanted[np.arange(size), ends] = _END
    target_padding[np.arange(size), ends] = True
    return {
        "inputs": made,
        "input_padding": input_padding,
        "targets": np.pad(wanted, ((0, 0), (1, 0)), constant_values=_PADDING),
        "target_padding": target_padding,
    }


def _padded(
    segments: npt.NDArray[Any], real: npt.NDArray[np.int64], length: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """Returns the real segments of each text, flattened, and their mask."""
    size, count, width = segments.shape
    padding = np.arange(length)[None] < width * real[:, None]
    flat = np.full((size, length), _PADDING, np.int32)
    flat[:, : count * width] = segments.reshape(size, count * width)
    return np.where(padding, flat, _PADDING).astype(np.int32), padding


def smooth_fields(
    step: int, size: int, *, extent: int, channels: int, seed: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns random fields with mean 0 and variance 1.

    Args:
        step: Number of the batch.
        size: Number of samples.
        extent: Depth, height and width of a field, in voxels.
        channels: Fields in a sample, each with its own spectral index.
        seed: Seed of the sequence of batches.

    Returns:
        Fields ``[size, extent, extent, extent, channels]`` and their spectral indices
        ``[size, channels]``.

    >>> fields, indices = smooth_fields(0, 2, extent=8, channels=3, seed=0)
    >>> fields.shape, indices.shape
    ((2, 8, 8, 8, 3), (2, 3))
    """
    random = generator(seed, step)
    indices = random.uniform(LEAST_INDEX, MOST_INDEX, size=(size, channels))
    made = np.empty((size, extent, extent, extent, channels), np.float32)
    wave = wave_numbers(extent)
    for sample, channel in np.ndindex(size, channels):
        noise = random.standard_normal((extent,) * 3, np.float32)
        made[sample, ..., channel] = shaped(noise, wave, indices[sample, channel])
    return made, indices.astype(np.float32)


def wave_numbers(extent: int) -> npt.NDArray[np.float32]:
    """Returns the wave number of each coefficient of a real transform, 1 for the mean.

    >>> wave_numbers(4)[0, 0].tolist()
    [1.0, 1.0, 2.0]
    """
    full = np.fft.fftfreq(extent, 1 / extent)
    half = np.fft.rfftfreq(extent, 1 / extent)
    squares = full[:, None, None] ** 2 + full[:, None] ** 2 + half**2
    squares[0, 0, 0] = 1.0
    return np.asarray(np.sqrt(squares), np.float32)


def shaped(
    noise: npt.NDArray[np.float32], wave: npt.NDArray[np.float32], index: Any
) -> npt.NDArray[np.float32]:
    """Returns white noise with a falling spectrum, mean 0 and variance 1.

    Args:
        noise: Cube of white noise.
        wave: Result of ``wave_numbers``.
        index: Exponent with which the power falls with the wave number.
    """
    spectrum = np.fft.rfftn(noise) * wave ** np.float32(-index / 2)
    spectrum[0, 0, 0] = 0.0
    field = np.fft.irfftn(spectrum, noise.shape, _CUBE)
    return np.asarray(field / field.std(), np.float32)


def regression_volumes(
    step: int, size: int, *, extent: int, channels: int, outputs: int, seed: int
) -> Batch:
    """Returns fields, with their spectral indices as targets between -1 and 1.

    Args:
        step, size, extent, channels, seed: Arguments of ``smooth_fields``, unchanged.
        outputs: Number of targets: those of the first channels, in order.

    Returns:
        ``{"volumes": float32[size, extent, extent, extent, channels], "targets":
        float32[size, outputs]}``.

    >>> regression_volumes(0, 2, extent=8, channels=1, outputs=4, seed=0)[
    ...     "targets"
    ... ].shape
    (2, 4)
    """
    volumes, indices = smooth_fields(
        step, size, extent=extent, channels=channels, seed=seed
    )
    middle, half = (MOST_INDEX + LEAST_INDEX) / 2, (MOST_INDEX - LEAST_INDEX) / 2
    places = np.arange(outputs) % channels
    targets = ((indices - middle) / half)[:, places]
    return {"volumes": volumes, "targets": targets.astype(np.float32)}


def segmented_volumes(
    step: int, size: int, *, extent: int, channels: int, classes: int, seed: int
) -> Batch:
    """Returns fields, with the level of their large structures as class of each voxel.

    Only wave numbers up to an eighth of the extent count for a label, and all classes
    have the same number of voxels.

    Args:
        step, size, extent, channels, seed: Arguments of ``smooth_fields``, unchanged.
        classes: Number of different labels.

    Returns:
        ``{"volumes": float32[size, extent, extent, extent, channels], "labels":
        int32[size, extent, extent, extent]}``.

    >>> labels = segmented_volumes(0, 1, extent=8, channels=1, classes=2, seed=0)[
    ...     "labels"
    ... ]
    >>> labels.shape, float(labels.mean())
    ((1, 8, 8, 8), 0.5)
    """
    volumes, _ = smooth_fields(step, size, extent=extent, channels=channels, seed=seed)
    low = wave_numbers(extent) <= max(1.0, extent / 8)
    labels = np.empty(volumes.shape[:-1], np.int32)
    for sample, field in enumerate(volumes[..., 0]):
        large = np.fft.irfftn(np.fft.rfftn(field) * low, field.shape, _CUBE)
        ranks = np.argsort(np.argsort(large, axis=None, kind="stable"))
        labels[sample] = (ranks * classes // large.size).reshape(large.shape)
    return {"volumes": volumes, "labels": labels}
