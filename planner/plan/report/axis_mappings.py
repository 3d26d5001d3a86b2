"""Returns a plan as mappings from dimension names to mesh axes.

Libraries of named axes (haliax, Levanter) take one mapping for activations and one for
parameters, and MaxText's rules name both separately. ``export.flax_rules`` has one
table for both, which can express fewer plans. Parameters that a mapping cannot express
are listed with their bytes.

Without metadata, dimensions have only names such as ``"blocks.*.up.kernel[1]"``, from
the paths of their parameters. Config files need a word such as Flax, MaxText and T5X
use. The words in a path suggest it. If they suggest none, the path itself becomes the
word.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost.collectives import axis_parts
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import LeafPlan, RoleInfo, starred
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import STAGE, Spec


@dataclass(frozen=True, slots=True)
class _Place:
    """Dimension of a parameter, with the words of its path in lower case."""

    words: tuple[str, ...]
    dim: int
    rank: int

    def has(self, *parts: str) -> bool:
        """Whether a word of the path equals or begins with one of the given texts."""
        return any(
            word == part or (len(part) > 3 and word.startswith(part))
            for part in parts
            for word in self.words
        )


def logical_names(plan: PlanData) -> dict[str, str]:
    """Returns a config name for each dimension, by its name in the plan.

    Names from the model's metadata are kept. A second dimension of the same meaning
    gets the suffix ``_2``, so names are unique.

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
    """Returns the stacked layers' dimensions: the first in several equal parameters."""
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
    """Returns the name that a parameter's path suggests, or an empty text."""
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


Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMappings:
    """Mesh axes of every sharded dimension, by the names of ``Plan.logical_axes``.

    Attributes:
        compute: Mesh axes of the dimensions of activations, including the batch.
        experts: The same inside the experts of a mixture, if it differs; else empty.
        parameters: Mesh axes of the dimensions of stored parameters.
        exceptions: Bytes of the parameters that the plan stores in another way, by
            path; repeated layers have one path.
    """

    compute: Mapping[str, Axes]
    experts: Mapping[str, Axes]
    parameters: Mapping[str, Axes]
    exceptions: Mapping[str, int]

    def exception_text(self) -> str:
        """Returns the text on parameters that the plan stores in another way."""
        if not self.exceptions:
            return ""
        listed = [*self.exceptions][:3]
        more = len(self.exceptions) - len(listed)
        tail = f" and {more} more" if more else ""
        return (
            f"the plan stores {', '.join(listed)}{tail} "
            f"({gigabytes(sum(self.exceptions.values()))} unsharded) otherwise than "
            "this mapping does"
        )


def axis_mappings(plan: PlanData, form: str) -> AxisMappings:
    """Returns the mappings of a plan.

    Args:
        plan: Plan of one program on devices with equal shares.
        form: Name of the format in errors.

    Raises:
        PlanError: One mapping cannot express the plan: stages with layouts of their
            own, unequal shares, embedding tables, regions that shard one dimension over
            different axes, or layers stacked over stages along a dimension without a
            name.
    """
    check_one_program(plan, form)
    names = logical_names(plan)
    compute: dict[str, dict[Axes, list[str]]] = defaultdict(lambda: defaultdict(list))
    experts: dict[str, Axes] = {}
    for region in plan.compute:
        axes_of: dict[str, Axes] = {}
        for axis, roles in region.axes:
            for role in roles:
                axes_of[names[role]] = (*axes_of.get(names[role], ()), axis)
        if "experts" in axes_of:
            experts |= axes_of
            continue
        for name, axes in axes_of.items():
            compute[name][axes].append(region.task_graph)
    problems = Problems(f"{form} cannot say this plan", PlanError)
    for name, meanings in compute.items():
        if len(meanings) > 1:
            listed = "; ".join(
                f"{'+'.join(axes)} in {', '.join(regions)}"
                for axes, regions in meanings.items()
            )
            problems.add(f"{name} is sharded over {listed}. {remedy(meanings)}")
    problems.raise_if_any()
    found = {name: next(iter(meanings)) for name, meanings in compute.items()}
    parameters = _parameters(plan, names)
    return AxisMappings(
        compute=found,
        experts={} if experts.items() <= found.items() else experts,
        parameters=parameters,
        exceptions=_exceptions(plan, names, parameters, form),
    )


def degrees(plan: PlanData) -> dict[str, tuple[int, int]]:
    """Returns (size inside a node or slice, size between them) of each mesh axis."""
    sizes = dict(plan.axes)
    outermost = plan.cluster.levels[-1]
    network = None if len(plan.cluster.nodes) == 1 or outermost.torus else outermost
    found = {}
    for axis in sizes:
        parts = axis_parts((axis,), sizes, plan.cluster)
        between = math.prod(p.size for p in parts if p.level == network)
        found[axis] = (math.prod(p.size for p in parts) // between, between)
    return found


def remedy(meanings: Iterable[Axes]) -> str:
    """Returns the advice for a dimension that is sharded in several ways.

    >>> remedy([("fsdp", "tensor"), ("fsdp",)])
    "Plan again with mesh={'tensor': 1}, or use plan.partition_specs()"
    """
    every = [{*axes} for axes in meanings]
    counts = Counter(axis for axes in every for axis in axes)
    unlike = sorted(axis for axis, count in counts.items() if count < len(every))
    fixed = ", ".join(f"{axis!r}: 1" for axis in unlike)
    return f"Plan again with mesh={{{fixed}}}, or use plan.partition_specs()"


def check_one_program(plan: PlanData, form: str) -> None:
    """Refuses plans whose devices do not all run one program with equal shares.

    Args:
        plan: The plan.
        form: Name of the format in errors.

    Raises:
        PlanError: The plan has stage programs, unequal shares, or embedding tables.
    """
    if plan.stage_plans:
        raise PlanError(
            "the stages of this plan have layouts of their own, which no single table "
            "or mesh expresses. Export each of plan.stages.plans"
        )
    if plan.shares or plan.pipelines:
        raise PlanError(
            "devices of different kinds have unequal shares of the batch in this "
            f"plan, which {form} cannot express. Plan for devices of one kind"
        )
    if plan.tables is not None:
        raise PlanError(
            f"this plan places embedding tables, which {form} cannot express. Plan the "
            "dense part alone, or use plan.partition_specs()"
        )


def _names(leaf: LeafPlan, names: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(names.get(roles[0], "") if roles else "" for roles in leaf.roles)


def _parameters(plan: PlanData, names: Mapping[str, str]) -> dict[str, Axes]:
    """Returns the axes over which most bytes of each name are stored in the plan.

    A library of named axes shards each dimension by its name alone, and no axis may
    occur twice in a parameter. If two names of a parameter have the same axis, the name
    with fewer bytes stays unsharded.
    """
    bytes_of: dict[str, dict[Axes, int]] = defaultdict(lambda: defaultdict(int))
    for leaf in plan.leaves:
        for name, axes in zip(_names(leaf, names), leaf.param_spec, strict=True):
            if name:
                bytes_of[name][axes] += leaf.nbytes
    best = {name: max(by, key=lambda a: by[a]) for name, by in bytes_of.items()}
    order = sorted(best, key=lambda name: -bytes_of[name][best[name]])
    found: dict[str, Axes] = {}
    together: dict[str, set[str]] = defaultdict(set)
    for leaf in plan.leaves:
        for name in (here := _names(leaf, names)):
            together[name] |= {*here}
    for name in order:
        taken = {a for other in together[name] for a in found.get(other, ())}
        if best[name] and not taken & {*best[name]}:
            found[name] = best[name]
    return found


def _exceptions(
    plan: PlanData, names: Mapping[str, str], found: Mapping[str, Axes], form: str
) -> dict[str, int]:
    exceptions: dict[str, int] = defaultdict(int)
    for leaf in plan.leaves:
        here: Spec = tuple(found.get(name, ()) for name in _names(leaf, names))
        if here != leaf.param_spec:
            if any(STAGE in axes for axes in leaf.param_spec):
                raise PlanError(
                    f"{form} cannot say this plan: {leaf.path} is stacked over stages "
                    "along a dimension that has no name. Use plan.partition_specs()"
                )
            exceptions[starred(leaf.path)] += leaf.nbytes
    return dict(exceptions)
