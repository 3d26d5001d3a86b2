"""Device kinds corrected by measured times of a model's own micro-batches.

A data sheet, and even measured products and bandwidths, give the limits of a device.
The relative speed of two kinds on a model is known only after it has run on both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Protocol

from whalejax.meshes.device_kinds import DeviceKind


class _Leaf(Protocol):
    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def weights_hash(leaves: Iterable[_Leaf]) -> str:
    """Returns a short hash of a model's parameters, the key of its timings.

    Args:
        leaves: Parameters with paths and shapes, in any order. Neither the batch nor
            the precision matters.
    """
    text = json.dumps(sorted((leaf.path, leaf.shape) for leaf in leaves))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def corrections(kinds: Sequence[DeviceKind], weights: str) -> tuple[float, ...]:
    """Returns the measured over the predicted time of a model on each kind.

    Args:
        kinds: Kinds of the replicas.
        weights: ``weights_hash`` of the model.

    Returns:
        One ratio for each kind. All are 1 unless the model was timed on every kind:
        otherwise measured times would be compared with predicted ones.
    """
    result = []
    for kind in kinds:
        timed = [model for model in kind.timed_models if model.weights == weights]
        if not timed:
            return (1.0,) * len(kinds)
        result.append(timed[-1].seconds / timed[-1].predicted_seconds)
    return tuple(result)


def timing_note(kinds: Sequence[DeviceKind], weights: str) -> str:
    """Returns the note on the sources of the kinds' measured speeds."""
    names = dict.fromkeys(kinds)
    timed = {
        kind: [model for model in kind.timed_models if model.weights == weights]
        for kind in names
    }
    if not any(timed.values()):
        return _weights_note(list(names))
    if missing := [kind.display_name() for kind, result in timed.items() if not result]:
        return (
            f"shares: this model was not timed on {', '.join(missing)}, so no timing "
            "counts. Run whalejax calibrate --model there"
        )
    words = ", ".join(
        f"{kind.display_name()} {result[-1].seconds / result[-1].samples * 1e3:.3g} ms"
        for kind, result in timed.items()
    )
    return f"shares: by this model's own samples, measured: {words} each"


def _weights_note(kinds: Sequence[DeviceKind]) -> str:
    own = [kind.display_name() for kind in kinds if kind.matmul_points]
    listed = [kind.display_name() for kind in kinds if not kind.matmul_points]
    if not listed:
        return "shares: by products and memory that were measured on every kind"
    weights = f"by the catalogue's efficiencies of {', '.join(listed)}"
    if own:
        weights += f", beside what was measured on {', '.join(own)}"
    return f"shares: {weights}, until a run measures"
