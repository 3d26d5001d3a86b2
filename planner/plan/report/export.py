"""Writes a plan in the formats of other systems: Flax's rules, MaxText's flags, files.

No format expresses all of a plan. The other decisions are listed in the file, or the
export is refused.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from whalejax.meshes.checks import Arguments, is_printable
from whalejax.meshes.errors import Problems
from whalejax.planner.plan.report.axis_mappings import (
    check_one_program,
    degrees,
    logical_names,
    remedy,
)
from whalejax.planner.plan.report.framework_configs import (
    axlearn_text,
    haliax_text,
    levanter_text,
    maxtext_text,
)
from whalejax.planner.plan.report.job_files import jobset_text, skypilot_text
from whalejax.planner.plan_data import PlanData
from whalejax.planner.plan_entries import LeafPlan
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import STAGE, Spec


Rules = tuple[tuple[str, tuple[str, ...] | None], ...]
"""(Dimension, mesh axes that shard it) pairs."""


def flax_rules(plan: PlanData) -> Rules:
    """Returns a table of rules: logical dimensions with the mesh axes that shard them.

    The table has one entry per dimension, for both activations and parameters. Of
    several dimensions with the same axis, the first gets it. So the table begins with
    dimensions that the computation shards. Dimensions that only ``fsdp`` shards follow,
    then stacked layers, which ``stage`` divides.

    Raises:
        PlanError: Two regions, or computation and storage, need different axes; a
            parameter would not be stored as planned; or the plan has unequal shares,
            embedding tables, or stages with layouts of their own.
    """
    check_one_program(plan, "a table of rules")
    wanted: dict[str, dict[tuple[str, ...], list[str]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for region in plan.compute:
        axes: dict[str, tuple[str, ...]] = {}
        for axis, roles in region.axes:
            for role in roles:
                axes[role] = (*axes.get(role, ()), axis)
        for role, found in axes.items():
            wanted[role][found].append(region.task_graph)
    for leaf in plan.leaves:
        for names, compute, stored in zip(
            leaf.roles, leaf.compute_spec, leaf.param_spec, strict=True
        ):
            if names and (stored != compute or STAGE in stored):
                places = wanted[names[0]][stored]
                if "storage" not in places:
                    places.append("storage")
    problems = Problems("a table of rules cannot say this plan", PlanError)
    for role, meanings in wanted.items():
        if len(meanings) > 1:
            listed = "; ".join(
                f"{'+'.join(axes)} in {', '.join(places)}"
                for axes, places in meanings.items()
            )
            problems.add(f"{role} is sharded over {listed}. {remedy(meanings)}")
    problems.raise_if_any()
    axes_of = {role: next(iter(meanings)) for role, meanings in wanted.items()}
    computed = {role for role, m in wanted.items() if ["storage"] not in m.values()}
    order = [role.name for role in plan.roles]
    order.sort(key=lambda name: name not in computed)
    rules = tuple((name, axes_of.get(name)) for name in _before(plan, axes_of, order))
    for leaf in plan.leaves:
        names = _names(leaf)
        if (by_rules := _by_rules(names, rules)) != leaf.param_spec:
            problems.add(
                f"{leaf.path} {names} would be stored as {by_rules}, not as "
                f"{leaf.param_spec}. Use plan.partition_specs()"
            )
    problems.raise_if_any()
    called = logical_names(plan)
    return tuple((called[name], axes) for name, axes in rules)


def logical_axes(plan: PlanData) -> dict[str, tuple[str | None, ...]]:
    """Returns the names of each parameter's dimensions in the rules, by its path.

    >>> import jax, jax.numpy as jnp
    >>> import whalejax as wh
    >>> net = {"up": jax.ShapeDtypeStruct((256, 1024), jnp.float32)}
    >>> x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    >>> plan = wh.plan(lambda net, x: (x @ net["up"]).mean(), net, x,
    ...                cluster="h100:8")
    >>> logical_axes(plan)
    {'up': ('up_0', 'mlp')}
    """
    called = logical_names(plan)
    return {
        leaf.path: tuple(called.get(name) if name else None for name in _names(leaf))
        for leaf in plan.leaves
    }


def _names(leaf: LeafPlan) -> tuple[str, ...]:
    return tuple(names[0] if names else "" for names in leaf.roles)


def _by_rules(names: Sequence[str], rules: Rules) -> Spec:
    found: list[tuple[str, ...]] = [() for _ in names]
    done = [False for _ in names]
    for name, axes in rules:
        place = names.index(name) if name in names else None
        free = not set(axes or ()) & {a for given in found for a in given}
        if place is not None and free and not done[place]:
            found[place], done[place] = axes or (), True
    return tuple(found)


def _before(
    plan: PlanData, axes_of: Mapping[str, tuple[str, ...]], order: Sequence[str]
) -> list[str]:
    """Orders the names so that each parameter's sharded names come before the others.

    If no order suits all parameters, some names keep the given order.
    """
    after: dict[str, set[str]] = {name: set() for name in order}
    for leaf in plan.leaves:
        names = _names(leaf)
        layout = [*zip(names, map(set, leaf.param_spec), strict=True)]
        for (name, axes), (other, others) in itertools.permutations(layout, 2):
            wished = set(axes_of.get(other, ()))
            if other and wished & axes and wished != others:
                after[other].add(name)
    found: list[str] = []
    waiting = list(order)
    while waiting:
        ready = (n for n in waiting if not after[n].difference(found))
        found.append(waiting.pop(waiting.index(next(ready, waiting[0]))))
    return found


def maxtext_flags(plan: PlanData) -> dict[str, int]:
    """Returns the sizes of mesh axes inside a slice (``ici``) and between (``dcn``).

    Axes of size 1 are omitted, as MaxText's default is 1.

    Raises:
        PlanError: MaxText has no flags for the plan: it has stages with layouts of
            their own, unequal shares or embedding tables, or ``tensor`` shards the
            batch in a part of the model.
    """
    check_one_program(plan, "MaxText's flags")
    if any("tensor" in axes for leaf in plan.batch for axes in leaf.spec[:1]):
        raise PlanError(
            "tensor shards the batch in a part of the model under this plan, which "
            "MaxText's tensor axis does not. Fix the mesh, as in mesh={'tensor': 1}"
        )
    flags: dict[str, int] = {}
    for axis, (inside, between) in degrees(plan).items():
        word = "pipeline" if axis == STAGE else axis
        for prefix, degree in (("ici", inside), ("dcn", between)):
            if degree > 1:
                flags[f"{prefix}_{word}_parallelism"] = degree
    return flags


FORMS: Final = ("maxtext", "axlearn", "haliax", "levanter", "jobset", "skypilot")
"""Formats of exported files."""

_OF_SEVERAL: Final = ("axlearn", "skypilot")
"""Formats with an entry for each of several clusters."""


def check_export(
    form: object,
    *,
    name: object = "train",
    image: object = None,
    command: object = None,
    called: str = "form",
) -> None:
    """Refuses arguments with which no plan can be exported.

    Args:
        form, name, image, command: Arguments of ``export``.
        called: Name of the argument ``form`` in errors; default: ``"form"``.

    Raises:
        PlanError: Lists every wrong argument.
    """
    problems = Arguments("export", PlanError)
    problems.choice(called, form, FORMS)
    known = isinstance(form, str) and form in FORMS
    if not (isinstance(name, str) and re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", name)):
        problems.refuse("name", name, "small letters, digits and -, such as 'train'")
    for what, text in (("image", image), ("command", command)):
        if text is not None and not (is_printable(text) and str(text).strip()):
            problems.refuse(what, text, "printable text, or None")
        elif text is not None and known and form in FORMS[:4]:
            problems.add(f"{what} is for jobset and skypilot; {form} has none")
    if known and form == "jobset" and image is None:
        problems.add(
            "image is missing; a JobSet needs a container image: image=, or --image"
        )
    problems.raise_if_any()


def export(
    plans: Sequence[PlanData],
    form: str,
    *,
    name: str = "train",
    image: str | None = None,
    command: str | None = None,
) -> str:
    """Returns the text of a file for another system.

    Args:
        plans: One plan, or the plans of a search, best first. Formats for one plan use
            the first.
        form: One of ``FORMS``.
        name: Name of the job, for a JobSet or SkyPilot.
        image: Container image, which a JobSet needs.
        command: Shell command that starts the run; default: ``whalejax train`` on one
            host, ``python train.py`` on several.

    Raises:
        PlanError: The format cannot express the plan, or an argument is wrong.
    """
    check_export(form, name=name, image=image, command=command)
    chosen = plans if form in _OF_SEVERAL else plans[:1]
    match form:
        case "maxtext":
            return maxtext_text(chosen[0])
        case "axlearn":
            return axlearn_text(chosen)
        case "haliax":
            return haliax_text(chosen[0])
        case "levanter":
            return levanter_text(chosen[0])
        case "jobset":
            return jobset_text(chosen[0], name, image or "", command or "")
        case _:
            return skypilot_text(chosen, name, image or "", command or "")
