"""Fits the ratios of device kinds to single layers, and judges predictions of them.

One layer of a Transformer, forward and backward, timed on many kinds at equal shape,
type and micro-batch, shows how the kinds compare. Every kind's efficiencies are fitted
to its own layers alone, so that a kind is held out by removing its numbers: the rest
follows from the others of its generation.
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
"""Tokens of a micro-batch below which a layer is too small to judge a kind."""

LIKELY, SPREAD = 0.6, 0.6
"""The most likely efficiency, and its likely error in logarithms."""

LIKELY_MEMORY = 0.1
"""Likely error of memory's share, around that of the platform."""

SCALE = 0.05
"""Relative error from which a layer counts as an outlier."""

SAME_BOARD = 0.02
"""Largest difference in power between boards that count as one kind."""

_PROFILE = re.compile(r"PROFILE ms of one block: forward ([\d.]+); backward ([\d.]+)")

Shape = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """Timed layers.

    Attributes:
        runs: Run of each layer.
        shapes: Model, width, sequence, type and micro-batch of each.
        devices: Device names of the table.
        seconds: Seconds of forward and backward.
    """

    runs: tuple[PublishedRun, ...]
    shapes: tuple[Shape, ...]
    devices: tuple[str, ...]
    seconds: Array

    @property
    def tokens(self) -> Array:
        """Tokens of each micro-batch."""
        return np.array([run.micro_batch * run.sizes.seq for run in self.runs])

    @property
    def halves(self) -> Array:
        """0 or 1 for each layer, by its shape alone: every second one."""
        places = {shape: i for i, shape in enumerate(sorted(set(self.shapes)))}
        return np.array([places[shape] % 2 for shape in self.shapes])


def load(directory: str | Path) -> Profiles:
    """Returns the layers of every CSV file of a directory.

    Raises:
        WhaleError: No table, a malformed one, or none with such layers.
    """
    paths = sorted(Path(directory).glob("*.csv"))
    runs, shapes, devices, seconds = [], [], [], []
    for path in paths:
        for row in read_table(path).rows:
            match = _PROFILE.search(row.get("notes") or "")
            run = read_row(row).run if match else None
            if match is None or run is None:
                continue
            runs.append(run)
            names = ("model", "hidden", "seq", "precision", "micro_batch", "tp")
            shapes.append(tuple(row.get(name, "") for name in names))
            devices.append(row.get("device", ""))
            seconds.append((float(match[1]) + float(match[2])) / 1e3)
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
    """Returns forward and backward seconds of one layer of every run."""
    ahead, behind = runs.places(known)
    seconds: Array = ahead[LAYER] + behind[LAYER]
    return seconds


def fit_kinds(
    profiles: Profiles, base: Constants, kept: Array | None = None
) -> Constants:
    """Returns constants with the efficiencies of kinds that layers determine.

    Efficiencies that training steps determine keep their values.

    Args:
        profiles: Timed layers.
        base: Constants without them; its ``blocks`` and ``memory`` are replaced.
        kept: Whether each layer counts; all if left out.
    """
    base = dataclasses.replace(base, blocks={}, memory={})
    chosen = np.ones(len(profiles.runs), bool) if kept is None else kept
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index in np.flatnonzero(chosen).tolist():
        by_kind[profiles.runs[index].device.kind.name].append(index)
    blocks: dict[tuple[str, str], float] = {}
    memory: dict[str, float] = {}
    for indexes in by_kind.values():
        own_blocks, share = _fit_one(profiles, base, indexes)
        blocks |= own_blocks
        memory |= share
    return dataclasses.replace(base, blocks=blocks, memory=memory)


def _fit_one(
    profiles: Profiles, base: Constants, indexes: Sequence[int]
) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Returns efficiencies and memory's share of one kind."""
    runs = [profiles.runs[i] for i in indexes]
    kind = runs[0].device.kind
    types = dict.fromkeys(run.speed for run in runs)
    widths = [width for width in types if not _known(base, kind, width)]
    own_memory = not any(family == kind.family for family, _ in base.efficiency)
    name = _stored_name(kind)
    if not widths and not own_memory:
        return {}, {}
    kind_runs, logs = Runs(runs), np.log(profiles.seconds[list(indexes)])
    likely = base.memory_of(kind)

    def constants(x: Array) -> Constants:
        shares = np.exp(x)
        blocks = {(name, w): float(s) for w, s in zip(widths, shares, strict=False)}
        memory = {name: float(min(1.0, shares[-1]))} if own_memory else {}
        return dataclasses.replace(base, blocks=blocks, memory=memory)

    def off(x: Array) -> Array:
        return np.asarray(np.log(layer_seconds(kind_runs, constants(x))) - logs)

    pulls = [(math.log(LIKELY), SPREAD)] * len(widths)
    pulls += [(math.log(likely), LIKELY_MEMORY)] * own_memory
    middle, width = (np.array(side) for side in zip(*pulls, strict=True))

    def differences(x: Array) -> Array:
        pull = SCALE * math.sqrt(len(runs)) / 2 * (x - middle) / width
        return np.concatenate([off(x), pull])

    solution = least_squares(differences, middle, loss="soft_l1", f_scale=SCALE)
    fitted = constants(solution.x)
    return dict(fitted.blocks), dict(fitted.memory)


def _known(base: Constants, kind: DeviceKind, width: str) -> bool:
    """Returns whether training steps determine the efficiency of such a board."""
    reference = rating_of(kind.family)
    if (kind.family, width) not in base.efficiency or reference is None:
        return False
    ratio = watts_ratio(kind, reference, "bf16" if width == TUNED else width)
    return abs(ratio - 1.0) <= SAME_BOARD


def _stored_name(kind: DeviceKind) -> str:
    """Returns the family's name if the kind is its reference board."""
    reference = rating_of(kind.family)
    if reference is None:
        return kind.name
    is_same = dict(reference.flops_per_second) == dict(kind.flops_per_second)
    return kind.family if is_same and reference.watts == kind.watts else kind.name


def held_out(profiles: Profiles, base: Constants) -> Array:
    """Returns seconds of every layer, predicted without the data of its kind.

    If another kind of the generation was timed in the type, all layers of the kind are
    left out; otherwise those of its half of the shapes.
    """
    predicted = np.zeros(len(profiles.runs))
    kinds = np.array([run.device.kind.name for run in profiles.runs])
    speeds = np.array([run.speed for run in profiles.runs])
    generations = np.array([run.device.kind.generation for run in profiles.runs])
    fitted = fit_kinds(profiles, base)
    halves = [fit_kinds(profiles, base, profiles.halves != half) for half in (0, 1)]
    for kind, speed in dict.fromkeys(zip(kinds.tolist(), speeds.tolist(), strict=True)):
        is_kind = (kinds == kind) & (speeds == speed)
        first = profiles.runs[int(np.flatnonzero(is_kind)[0])].device.kind
        others = (generations == first.generation) & (kinds != kind) & (speeds == speed)
        if first.generation and others.any():
            parts = [(is_kind, _without(fitted, first))]
        else:
            parts = [(is_kind & (profiles.halves == h), halves[h]) for h in (0, 1)]
        for part, fit in parts:
            at = np.flatnonzero(part)
            if len(at):
                runs = Runs([profiles.runs[i] for i in at])
                predicted[at] = layer_seconds(runs, fit)
    return predicted


def _without(known: Constants, kind: DeviceKind) -> Constants:
    """Returns constants without those of a kind."""
    name = _stored_name(kind)
    blocks = {key: share for key, share in known.blocks.items() if key[0] != name}
    memory = {key: share for key, share in known.memory.items() if key != name}
    return dataclasses.replace(known, blocks=blocks, memory=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Errors of the predicted ratio of two kinds.

    Attributes:
        kinds: Names of the kinds in the table.
        ratios: Predicted over measured ratio for each shape.
    """

    kinds: tuple[str, str]
    ratios: tuple[float, ...]

    @property
    def error(self) -> float:
        """Median over the shapes."""
        return statistics.median(abs(ratio - 1.0) for ratio in self.ratios)


def pairs(
    profiles: Profiles, predicted: Array, least_tokens: int = LEAST_TOKENS
) -> tuple[Pair, ...]:
    """Returns every two kinds that were timed at some shape, the worst first."""
    by_shape: dict[Shape, dict[str, int]] = defaultdict(dict)
    for index in np.flatnonzero(profiles.tokens >= least_tokens).tolist():
        by_shape[profiles.shapes[index]][profiles.devices[index]] = index
    return _pairs(by_shape.values(), predicted / profiles.seconds)


def _pairs(groups: Iterable[Mapping[str, int]], off: Array) -> tuple[Pair, ...]:
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group in groups:
        for first, second in itertools.combinations(sorted(group), 2):
            ratios[first, second].append(float(off[group[first]] / off[group[second]]))
    pairs = [
        Pair(kinds=kinds, ratios=tuple(values)) for kinds, values in ratios.items()
    ]
    return tuple(sorted(pairs, key=lambda pair: -pair.error))
