"""Logical names of dimensions, in the words that Flax, MaxText and T5X use.

Without metadata, dimensions have only names such as ``"blocks.*.up.kernel[1]"``, from
their parameters. A config needs a word. It is derived from the paths of the parameters,
as people read them; if these suggest none, it is made of the path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import RoleInfo, starred


@dataclass(frozen=True, slots=True)
class _Place:
    """A dimension of a parameter, with the words of its path in lower case."""

    words: tuple[str, ...]
    dim: int
    rank: int

    def has(self, *parts: str) -> bool:
        """Whether some word of the path equals or begins with one of some texts."""
        return any(
            word == part or (len(part) > 3 and word.startswith(part))
            for part in parts
            for word in self.words
        )


def logical_names(plan: PlanData) -> dict[str, str]:
    """Returns a config name for each dimension, by its name in the plan.

    Names from the model's metadata stay. Names are unique: a second dimension of the
    same meaning gets the suffix ``_2``.

    Args:
        plan: The plan.
    """
    ranks = {starred(leaf.path): len(leaf.shape) for leaf in plan.leaves}
    layers = _layer_dims(plan, ranks)
    taken: Counter[str] = Counter()
    found: dict[str, str] = {}
    for role in plan.roles:
        name = "layers" if role.name in layers else _name(role, ranks)
        taken[name] += 1
        found[role.name] = name if taken[name] == 1 else f"{name}_{taken[name]}"
    return found


def _places(role: RoleInfo, ranks: Mapping[str, int]) -> list[_Place]:
    found = []
    for alias in (role.name, *role.aliases):
        match = re.fullmatch(r"(.+)\[(\d+)(?:\.\d+)?\]", alias)
        if match and match[1] in ranks:
            words = tuple(re.split(r"[._]", match[1].lower()))
            found.append(_Place(words, int(match[2]), ranks[match[1]]))
    return found


def _layer_dims(plan: PlanData, ranks: Mapping[str, int]) -> frozenset[str]:
    """Returns the dimensions of stacked layers: first in several equal parameters."""
    found = set()
    for role in plan.roles:
        places = _places(role, ranks)
        firsts = {place.words[:-2] or place.words[:1] for place in places}
        apart = {place.words for place in places}
        if len(apart) >= 3 and all(place.dim == 0 for place in places):
            if (
                len({words[0] for words in firsts}) == 1
                and min(place.rank for place in places) >= 2
            ):
                found.add(role.name)
    return frozenset(found)


def _name(role: RoleInfo, ranks: Mapping[str, int]) -> str:
    if not re.search(r"\[[\d.]+\]$", role.name):
        return role.name.replace("#", "_")
    places = _places(role, ranks)
    for place in places:
        if place.has("embed", "wte", "tokens") and not _is_table_of_places(place):
            if place.dim == place.rank - 2:
                return "vocab"
            if place.dim == place.rank - 1:
                return "embed"
    for place in places:
        name = _by_path(place)
        if name:
            return name
    if role.name.startswith("batch."):
        return "sequence"
    return re.sub(r"\W+", "_", role.name.replace("*", "")).strip("_").lower()


def _is_table_of_places(place: _Place) -> bool:
    return place.has("pos", "position", "place", "segment", "distance", "type")


def _by_path(place: _Place) -> str:
    """Returns the logical name that a parameter's path suggests; else an empty text."""
    last = place.rank - 1
    if place.words[-1] in ("layers", "blocks") and place.dim == 0:
        return "layers"
    if place.has("expert") and place.dim == place.rank - 3:
        return "experts"
    if place.has("pos", "position", "place") and place.dim == 0:
        return "position"
    if place.has("attention", "attn", "query", "key", "value") and place.rank >= 3:
        if place.has("out", "output", "o", "proj"):
            return {last - 2: "heads", last - 1: "head_dim"}.get(place.dim, "")
        return {last - 1: "heads", last: "head_dim"}.get(place.dim, "")
    if place.has("mlp", "ffn", "up", "gate", "wi", "fc1") and place.dim == last:
        return "mlp"
    if place.has("down", "wo", "fc2") and place.dim == last - 1:
        return "mlp"
    if place.has("conv") and place.rank >= 4:
        return {last: "conv_out", last - 1: "conv_in"}.get(place.dim, "conv_kernel")
    return ""
