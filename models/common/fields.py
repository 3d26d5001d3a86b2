"""Made-up volumes: smooth random fields whose spectrum is known.

A field is white noise of which wave number k is scaled by k^(-index / 2), so that its
power falls as k^-index: large structures, whose label no small window can tell, beside
small ones. It is apart from ``_batches`` because it takes Fourier transforms.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import scipy.fft

from whalejax.models.common.batches import Batch, generator


LEAST_INDEX: Final = 1.0
MOST_INDEX: Final = 3.0
"""Between these the spectral index of a field is drawn."""


def smooth_fields(
    step: int, size: int, *, extent: int, channels: int, seed: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Random fields, each of mean 0 and variance 1.

    Args:
        step: which batch.
        size: samples in it.
        extent: depth, height and width of a field, in voxels.
        channels: fields in a sample, of a spectral index each.
        seed: which sequence of batches.

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
    """The wave number of each coefficient of a real transform; 1 for the mean's.

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
    """White noise with a falling spectrum, of mean 0 and variance 1.

    Args:
        noise: a cube.
        wave: from ``wave_numbers``.
        index: by which power of the wave number its power falls.
    """
    spectrum = scipy.fft.rfftn(noise) * wave ** np.float32(-index / 2)
    spectrum[0, 0, 0] = 0.0
    field = scipy.fft.irfftn(spectrum, noise.shape)
    return np.asarray(field / field.std(), np.float32)


def regression_volumes(
    step: int, size: int, *, extent: int, channels: int, outputs: int, seed: int
) -> Batch:
    """Fields, and their spectral indices as targets between -1 and 1.

    Args:
        step, size, extent, channels, seed: as in ``smooth_fields``.
        outputs: targets of a sample, those of its first channels, in turn.

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
    """Fields, and for each voxel how high their large structures stand there.

    Only wave numbers up to an eighth of the extent count for a label, and classes are
    equally many voxels each.

    Args:
        step, size, extent, channels, seed: as in ``smooth_fields``.
        classes: number of different labels.

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
        large = scipy.fft.irfftn(scipy.fft.rfftn(field) * low, field.shape)
        ranks = np.argsort(np.argsort(large, axis=None, kind="stable"))
        labels[sample] = (ranks * classes // large.size).reshape(large.shape)
    return {"volumes": volumes, "labels": labels}
