"""Ratios of kinds of devices, fitted to and judged by single layers.

One layer of a Transformer, forward and backward, timed on many kinds at equal shape,
type and micro-batch, says how the kinds compare. Every kind's efficiencies are fitted
to its own layers alone, so that leaving a kind out is taking its numbers away: what is
left is what the others of its generation say of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from whalejax.estimates.published_run import PublishedRun
from whalejax.estimates.read_table import read_row, read_table
from whalejax.estimates.step_model import Array, Runs
from whalejax.estimates.workload import LAYER
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.fitted_constants import TUNED, Constants
from whalejax.meshes.ratings import rating_of, watts_ratio


LEAST_TOKENS = 4096
"""Of a micro-batch, below which a layer is too small to say what a kind is worth."""

LIKELY, SPREAD = 0.6, 0.6
"""The most likely efficiency, and how far (in logarithms) it may well be off."""

LIKELY_MEMORY = 0.1
"""The same of memory's share, around that of the platform."""

SCALE = 0.05
"""Relative error from which a layer counts as an outlier."""

SAME_BOARD = 0.02
"""By how much power may differ between boards that are one kind to a training step."""

_PROFILE = re.compile(r"PROFILE ms of one block: forward ([\d.]+); backward ([\d.]+)")

Shape = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Layers that were timed.

    Attributes:
        runs: what each is.
        shapes: model, width, sequence, type and micro-batch of each.
        devices: as the table names them.
        seconds: forward and backward.
    """

    runs: tuple[PublishedRun, ...]
    shapes: tuple[Shape, ...]
    devices: tuple[str, ...]
    seconds: Array

    @property
    def tokens(self) -> Array:
        """Of every micro-batch."""
        return np.array([run.micro_batch * run.sizes.seq for run in self.runs])

    @property
    def halves(self) -> Array:
        """0 or 1 for each layer, by its shape alone: every second one."""
        places = {shape: i for i, shape in enumerate(sorted(set(self.shapes)))}
        return np.array([places[shape] % 2 for shape in self.shapes])


def load(directory: str | Path) -> Profiles:
    """The layers of every CSV file of a directory.

    Raises:
        WhaleError: no table there, a malformed one, or none with such layers.
    """
    paths = sorted(Path(directory).glob("*.csv"))
    runs, shapes, devices, seconds = [], [], [], []
    for path in paths:
        for row in read_table(path).rows:
            found = _PROFILE.search(row.get("notes") or "")
            run = read_row(row).run if found else None
            if found is None or run is None:
                continue
            runs.append(run)
            names = ("model", "hidden", "seq", "precision", "micro_batch", "tp")
            shapes.append(tuple(row.get(name, "") for name in names))
            devices.append(row.get("device", ""))
            seconds.append((float(found[1]) + float(found[2])) / 1e3)
    if not runs:
        raise WhaleError(
            f"{directory}: no row whose notes say 'PROFILE ms of one block: forward N; "
            "backward N'. Give the folder of such tables"
        )
    return Profiles(
        runs=tuple(runs),
        shapes=tuple(shapes),
        devices=tuple(devices),
        seconds=np.array(seconds),
    )


def layer_seconds(runs: Runs, known: Constants) -> Array:
    """Forward and backward of one layer of every run."""
    ahead, behind = runs.places(known)
    found: Array = ahead[LAYER] + behind[LAYER]
    return found


def fit_kinds(found: Profiles, base: Constants, kept: Array | None = None) -> Constants:
    """Constants with the efficiencies of kinds that the layers tell.

    Those that training steps tell stay as they are, and so does everything else.

    Args:
        found: the layers.
        base: what is known without them; what it has of ``blocks`` and ``memory`` goes.
        kept: which layers count; all if left out.
    """
    base = dataclasses.replace(base, blocks={}, memory={})
    chosen = np.ones(len(found.runs), bool) if kept is None else kept
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index in np.flatnonzero(chosen).tolist():
        by_kind[found.runs[index].device.kind.name].append(index)
    blocks: dict[tuple[str, str], float] = {}
    memory: dict[str, float] = {}
    for indexes in by_kind.values():
        mine, share = _fit_one(found, base, indexes)
        blocks |= mine
        memory |= share
    return dataclasses.replace(base, blocks=blocks, memory=memory)


def _fit_one(
    found: Profiles, base: Constants, indexes: Sequence[int]
) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Efficiencies and memory's share of one kind."""
    runs = [found.runs[i] for i in indexes]
    kind = runs[0].device.kind
    types = dict.fromkeys(run.speed for run in runs)
    wanted = [width for width in types if not _known(base, kind, width)]
    own_memory = not any(family == kind.family for family, _ in base.efficiency)
    name = _stored_name(kind)
    if not wanted and not own_memory:
        return {}, {}
    priced, logs = Runs(runs), np.log(found.seconds[list(indexes)])
    likely = base.memory_of(kind)

    def constants(x: Array) -> Constants:
        shares = np.exp(x)
        blocks = {(name, w): float(s) for w, s in zip(wanted, shares, strict=False)}
        memory = {name: float(min(1.0, shares[-1]))} if own_memory else {}
        return dataclasses.replace(base, blocks=blocks, memory=memory)

    def off(x: Array) -> Array:
        return np.asarray(np.log(layer_seconds(priced, constants(x))) - logs)

    pulls = [(math.log(LIKELY), SPREAD)] * len(wanted)
    pulls += [(math.log(likely), LIKELY_MEMORY)] * own_memory
    middle, width = (np.array(side) for side in zip(*pulls, strict=True))

    def differences(x: Array) -> Array:
        pull = SCALE * math.sqrt(len(runs)) / 2 * (x - middle) / width
        return np.concatenate([off(x), pull])

    solved = least_squares(differences, middle, loss="soft_l1", f_scale=SCALE)
    known = constants(solved.x)
    return dict(known.blocks), dict(known.memory)


def _known(base: Constants, kind: DeviceKind, width: str) -> bool:
    """Training steps tell the efficiency of such a board."""
    reference = rating_of(kind.family)
    if (kind.family, width) not in base.efficiency or reference is None:
        return False
    ratio = watts_ratio(kind, reference, "bf16" if width == TUNED else width)
    return abs(ratio - 1.0) <= SAME_BOARD


def _stored_name(kind: DeviceKind) -> str:
    """The family's, where the kind is the board that stands for it."""
    reference = rating_of(kind.family)
    if reference is None:
        return kind.name
    same = dict(reference.flops_per_second) == dict(kind.flops_per_second)
    return kind.family if same and reference.watts == kind.watts else kind.name


def held_out(found: Profiles, base: Constants) -> Array:
    """Seconds of every layer, predicted without what would give them away.

    Where another kind of the generation was timed in the type, all layers of the kind
    are left out; elsewhere those of its half of the shapes.
    """
    predicted = np.zeros(len(found.runs))
    kinds = np.array([run.device.kind.name for run in found.runs])
    speeds = np.array([run.speed for run in found.runs])
    generations = np.array([run.device.kind.generation for run in found.runs])
    whole = fit_kinds(found, base)
    halves = [fit_kinds(found, base, found.halves != half) for half in (0, 1)]
    for kind, speed in dict.fromkeys(zip(kinds.tolist(), speeds.tolist(), strict=True)):
        mine = (kinds == kind) & (speeds == speed)
        first = found.runs[int(np.flatnonzero(mine)[0])].device.kind
        others = (generations == first.generation) & (kinds != kind) & (speeds == speed)
        if first.generation and others.any():
            parts = [(mine, _without(whole, first))]
        else:
            parts = [(mine & (found.halves == h), halves[h]) for h in (0, 1)]
        for part, known in parts:
            at = np.flatnonzero(part)
            if len(at):
                runs = Runs([found.runs[i] for i in at])
                predicted[at] = layer_seconds(runs, known)
    return predicted


def _without(known: Constants, kind: DeviceKind) -> Constants:
    """Constants that have nothing of a kind."""
    name = _stored_name(kind)
    blocks = {key: share for key, share in known.blocks.items() if key[0] != name}
    memory = {key: share for key, share in known.memory.items() if key != name}
    return dataclasses.replace(known, blocks=blocks, memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """How well the ratio of two kinds is predicted.

    Attributes:
        kinds: as the table names them.
        ratios: for each shape, predicted over measured.
    """

    kinds: tuple[str, str]
    ratios: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median over the shapes."""
        return statistics.median(abs(ratio - 1.0) for ratio in self.ratios)


def pairs(
    found: Profiles, predicted: Array, least_tokens: int = LEAST_TOKENS
) -> tuple[Pair, ...]:
    """Every two kinds that were timed at some shape, the worst first."""
    by_shape: dict[Shape, dict[str, int]] = defaultdict(dict)
    for index in np.flatnonzero(found.tokens >= least_tokens).tolist():
        by_shape[found.shapes[index]][found.devices[index]] = index
    return _pairs(by_shape.values(), predicted / found.seconds)


def _pairs(groups: Iterable[Mapping[str, int]], off: Array) -> tuple[Pair, ...]:
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in groups:
        for one, other in itertools.combinations(sorted(group), 2):
            ratios[one, other].append(float(off[group[one]] / off[group[other]]))
    found = [
        Pair(kinds=kinds, ratios=tuple(values)) for kinds, values in ratios.items()
    ]
    return tuple(sorted(found, key=lambda pair: -pair.error))
