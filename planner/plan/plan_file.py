"""Plan files: writes a plan as a JSON document, and reads it with every check.

A document holds two hashes. ``hash`` covers what the plan's program depends on.
``document_hash`` covers all other entries, so every change is noticed. Neither hash is
a signature, as whoever writes a file can compute it.

Reading runs nothing of a file, and therefore also checks the numbers:

- Times and sizes are not negative.
- Layouts fit the shapes and the mesh.
- Shares add up to the number of micro-batches.
- Memory matches the parameters' shards and fits the devices.

An error lists all problems at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from whalejax.meshes.device_kinds import MOST_MEMORY_BYTES
from whalejax.meshes.dtypes import PRECISIONS
from whalejax.meshes.errors import Problems, WhaleError, quoted
from whalejax.meshes.read_file import (
    UnreadableFileError,
    check_depth,
    parse_json,
    read_text,
)
from whalejax.meshes.topology import RETIRED_FACTS
from whalejax.meshes.units import count_text
from whalejax.planner.json_codec import DataError, decode, encode
from whalejax.planner.pipeline.schedules import NAMES
from whalejax.planner.plan.allowed_xla_options import check_options
from whalejax.planner.plan.report.describe import SENT
from whalejax.planner.plan_data import PLAN_VERSION, PlanData, StagesData
from whalejax.planner.plan_errors import PlanError
from whalejax.planner.sharding.layout import MESH_AXES, Spec
from whalejax.planner.step_options import option_counts, option_limits


LOST_SECONDS: Final = 1e-9
"""Seconds below zero that a difference of times may have through rounding."""

SLACK: Final = 2
"""Factor by which the predicted memory may exceed that of the largest device."""

NEAR: Final = 0.01
"""Fraction by which the memory of parameters may differ from the bytes of their shards.
"""

_STASHES = ("", "inputs", "residuals")
_PHASES = ("forward", "backward", "update", "turn")
_DTYPE: Final = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|float(16|32|64)|bfloat16|complex(64|128)"
    r"|float[468]_[a-z0-9_]{1,16}|key<[a-z0-9_]{1,40}>"
)
"""Element types as JAX writes them."""

_APART = frozenset("axes cluster compiler_options question stages pipelines".split())
"""Fields of a plan that are checked by functions of their own."""


def check_plan(plan: PlanData) -> None:
    """Checks that a plan has no impossible numbers.

    Raises:
        PlanError: Some numbers are impossible; lists every problem with its field.
    """
    problems = Problems("numbers that no plan has", PlanError)
    _check(plan, "", problems)
    problems.raise_if_any()


def _check(plan: PlanData, where: str, problems: Problems) -> None:
    if plan.version != PLAN_VERSION:
        problems.add(f"{where}version is {plan.version}; expected {PLAN_VERSION}")
    for path, text in _unfit(plan):
        problems.add(f"{where}{path} {text}")
    _check_mesh(plan, where, problems)
    _check_choices(plan, where, problems)
    _check_shares(plan, where, problems)
    _check_combine(plan, where, problems)
    _check_leaves(plan, where, problems)
    _check_trained(plan, where, problems)
    _check_batch(plan, where, problems)
    _check_memory(plan, where, problems)
    options = Problems()
    check_options(dict(plan.compiler_options), options)
    for text in options.messages:
        problems.add(f"{where}compiler_options: {text}")
    if plan.stages is not None:
        _check_stages(plan, plan.stages, where, problems)
    for place, one in enumerate(plan.pipelines):
        _check(one, f"{where}pipelines[{place}].", problems)


def _unfit(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (path, error) of numbers that are negative, infinite or too large."""
    if isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from _unfit(item, f"{path}[{place}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name not in _APART:
                inner = getattr(value, field.name)
                yield from _unfit(inner, f"{path}.{field.name}" if path else field.name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if path.endswith("_seconds"):
            if not -LOST_SECONDS <= value < math.inf:
                yield path, f"is {value}; expected seconds of at least 0"
        elif not 0 <= value < math.inf:
            yield path, f"is {value}; expected at least 0"
        elif path.endswith("_bytes") and value > MOST_MEMORY_BYTES:
            yield path, f"is {value}; expected at most {MOST_MEMORY_BYTES}"


def _check_choices(plan: PlanData, where: str, problems: Problems) -> None:
    chosen: list[tuple[str, str, tuple[str, ...]]] = [
        ("precision", plan.precision, PRECISIONS),
        *((f"precisions.{n}", kind, PRECISIONS) for n, kind in plan.precisions),
        *option_limits(plan),
        *(
            ("collectives", collective.phase, _PHASES)
            for collective in plan.collectives
        ),
        *(
            ("collectives.what", collective.what, (*SENT,))
            for collective in plan.collectives
        ),
    ]
    for name, word, known in chosen:
        if word not in known:
            problems.add(
                f"{where}{name} is {quoted(word)}; expected one of {', '.join(known)}"
            )
    for name, number, most in (
        ("zero", plan.zero, 3),
        ("num_micro_batches", plan.num_micro_batches, 2**40),
        ("group_size", plan.group_size, 2**40),
        *((name, count, 2**40) for name, count in option_counts(plan).items()),
    ):
        least = 0 if name == "zero" else 1
        if not least <= number <= most:
            problems.add(f"{where}{name} is {number}; expected {least} to {most}")


# The mesh and the layouts on it.


def _check_mesh(plan: PlanData, where: str, problems: Problems) -> None:
    names = [axis for axis, _ in plan.axes]
    for axis, size in plan.axes:
        if axis not in MESH_AXES or names.count(axis) > 1:
            problems.add(
                f"{where}axes has {quoted(axis)}; expected each of "
                f"{', '.join(MESH_AXES)} at most once"
            )
        if size < 2:
            problems.add(f"{where}axes: {quoted(axis)} is {size}; expected 2 or more")
    product, there = math.prod(n for _, n in plan.axes), plan.cluster.num_devices
    if product > there:
        problems.add(
            f"{where}axes take {count_text(product, 'device')}; the cluster has {there}"
        )
    order = plan.device_order
    if order and (len(set(order)) != len(order) or not max(order) < there):
        problems.add(f"{where}device_order does not name devices 0 to {there - 1} once")
    used = {axis for collective in plan.collectives for axis in collective.axes}
    used |= {axis for axis, _ in plan.storage}
    used |= {axis for table in plan.compute for axis, _ in table.axes}
    for axis in sorted(used - set(MESH_AXES)):
        problems.add(f"{where}{quoted(axis)} is no mesh axis: {', '.join(MESH_AXES)}")


def _check_shares(plan: PlanData, where: str, problems: Problems) -> None:
    shares, whole = plan.shares, plan.num_micro_batches
    if shares and sum(shares) != whole:
        problems.add(
            f"{where}shares add up to {sum(shares)}; num_micro_batches is {whole}"
        )
    ranks = plan.axis_sizes.get("data", 1)
    if shares and len(shares) != ranks:
        problems.add(
            f"{where}shares has {count_text(len(shares), 'entry')}; data has "
            f"{count_text(ranks, 'rank')}"
        )
    if plan.pipelines and len(plan.pipelines) != ranks:
        problems.add(
            f"{where}pipelines has {count_text(len(plan.pipelines), 'entry')}; data "
            f"has {ranks} ranks"
        )


def _check_combine(plan: PlanData, where: str, problems: Problems) -> None:
    if plan.combine == "mean":
        return
    ranks = plan.axis_sizes.get("data", 1)
    if ranks < 2:
        problems.add(f"{where}combine is {plan.combine}; data has {ranks} rank")
    others = {
        "stages": plan.stages is not None,
        "shares": bool(plan.shares),
        "pipelines": bool(plan.pipelines),
        "offload": bool(plan.offload),
        f"zero {plan.zero}": plan.zero > (plan.combine != "adasum_updates"),
    }
    for name in (name for name, there in others.items() if there):
        problems.add(
            f"{where}combine is {plan.combine}; it cannot be combined with {name}"
        )


def _check_leaves(plan: PlanData, where: str, problems: Problems) -> None:
    sizes = {role.name: role.size for role in plan.roles}
    # Images may have more pixels along a dimension than parameters, as models pool them
    # or cut them into patches.
    commons = {role.name: role.common or role.size for role in plan.roles}
    # In stage programs, the plan of each stage has its own axes.
    mesh = plan.axis_sizes if plan.stages is None else None
    for place, leaf in enumerate(plan.leaves):
        at = f"{where}leaves[{place}]"
        for name in ("compute_spec", "param_spec", "gradient_spec", "optimizer_spec"):
            _check_spec(leaf.shape, getattr(leaf, name), mesh, f"{at}.{name}", problems)
        if not _is_dtype(leaf.dtype):
            problems.add(f"{at}.dtype is {quoted(leaf.dtype)}; expected as numpy says")
        if len(leaf.roles) != len(leaf.shape):
            problems.add(f"{at}.roles has {len(leaf.roles)} of {len(leaf.shape)} dims")
            continue
        for dim, (size, roles) in enumerate(zip(leaf.shape, leaf.roles, strict=True)):
            product = math.prod(sizes.get(role, 0) for role in roles)
            if not roles or not product or product == size:
                continue
            common = math.prod(commons[role] for role in roles)
            if not 1 <= size <= product or size % common:
                less = f", or less in steps of {common}" if common < product else ""
                problems.add(
                    f"{at}.shape[{dim}] is {size}; {' × '.join(roles)} is "
                    f"{product}{less}"
                )
    for place, part in enumerate(plan.batch):
        _check_spec(
            part.shape, part.spec, mesh, f"{where}batch[{place}].spec", problems
        )


def _check_trained(plan: PlanData, where: str, problems: Problems) -> None:
    seen: set[str] = set()
    for place, leaf in enumerate(plan.leaves):
        at = f"{where}leaves[{place}]"
        if leaf.path in seen:
            problems.add(
                f"{at}.path is {quoted(leaf.path)}, which another leaf has too"
            )
        seen.add(leaf.path)
        if leaf.trained and place and not plan.leaves[place - 1].trained:
            problems.add(
                f"{at}.trained is true after a leaf that is not trained; expected "
                "trained leaves first"
            )


def _check_spec(
    shape: tuple[int, ...],
    spec: Spec,
    mesh: dict[str, int] | None,
    at: str,
    problems: Problems,
) -> None:
    if len(spec) != len(shape):
        problems.add(
            f"{at} has {count_text(len(spec), 'entry')}; the shape has {len(shape)}"
        )
        return
    axes = [axis for entry in spec for axis in entry]
    known = MESH_AXES if mesh is None else tuple(mesh)
    stray = [axis for axis in axes if axis not in known]
    if stray or len(set(axes)) < len(axes):
        named = ", ".join(known) or "none"
        problems.add(f"{at} names {quoted(axes)}; expected each of {named} once")
        return
    if mesh is None:
        return
    for size, entry in zip(shape, spec, strict=True):
        over = math.prod(mesh[axis] for axis in entry)
        if over > 0 and size % over:  # ``_check_mesh`` refuses smaller axes.
            named = " × ".join(entry)
            problems.add(f"{at}: {named} is {over}, which does not divide {size}")


# The batch.


def _is_dtype(text: str) -> bool:
    return _DTYPE.fullmatch(text) is not None


class _OtherContainersError(Exception):
    """Plans cannot rebuild the batch's containers."""


def _check_batch(plan: PlanData, where: str, problems: Problems) -> None:
    paths = [leaf.path for leaf in plan.batch]
    for place, leaf in enumerate(plan.batch):
        if not _is_dtype(leaf.dtype):
            problems.add(
                f"{where}batch[{place}].dtype is {quoted(leaf.dtype)}; expected the "
                "name of a JAX dtype, such as 'float32'"
            )
        if paths.index(leaf.path) < place:
            problems.add(
                f"{where}batch[{place}].path is {quoted(leaf.path)}, which another "
                "leaf has too; expected each once"
            )
    if not plan.batch_tree:
        return
    try:
        described = list(_paths(parse_json(plan.batch_tree), ""))
    except (UnreadableFileError, ValueError, TypeError, AttributeError):
        problems.add(
            f"{where}batch_tree is {quoted(plan.batch_tree)}; expected the containers "
            'of a batch, such as {"dict": [["x", "leaf"]]}'
        )
        return
    except _OtherContainersError:
        return
    if described != paths:
        problems.add(
            f"{where}batch_tree has the leaves {quoted(described)}; batch has "
            f"{quoted(paths)}"
        )


def _paths(node: Any, path: str) -> Iterator[str]:
    if node is None:
        return
    if node == "leaf":
        yield path
        return
    ((kind, items),) = node.items()
    if kind == "dict":
        for key, item in items:
            if type(key) not in (str, int):
                raise TypeError("no key of a batch")
            yield from _paths(item, f"{path}[{key!r}]")
    elif kind in ("list", "tuple"):
        for number, item in enumerate(items):
            yield from _paths(item, f"{path}[{number}]")
    elif items == []:
        raise _OtherContainersError
    else:
        raise ValueError("no container")


# Memory.


def _check_memory(plan: PlanData, where: str, problems: Problems) -> None:
    largest = max(kind.memory_bytes for kind in plan.cluster.kinds)
    predicted = [("memory", plan.memory)]
    predicted += [
        (f"candidates[{i}].memory", c.memory)
        for i, c in enumerate(plan.candidates)
        if c.fits
    ]
    for name, terms in predicted:
        if terms.total_bytes > SLACK * largest:
            problems.add(
                f"{where}{name} adds up to {terms.total_bytes} bytes; a device has "
                f"{largest}"
            )
    _check_kinds(plan, where, problems)
    here = [leaf for leaf in plan.leaves if not leaf.hosted]
    if plan.stages is not None or len(here) < len(plan.leaves):
        return
    sizes = plan.axis_sizes
    stored = 0
    for leaf in here:
        axes = [axis for entry in leaf.param_spec for axis in entry]
        stored += leaf.nbytes // max(1, math.prod(sizes.get(axis, 1) for axis in axes))
    given = plan.memory.params_bytes
    if abs(given - stored) > NEAR * stored:
        problems.add(
            f"{where}memory.params_bytes is {given}; the shards of all leaves take "
            f"{stored}"
        )


def _check_kinds(plan: PlanData, where: str, problems: Problems) -> None:
    parts = [*plan.pipelines, *(() if plan.stages is None else plan.stages.plans)]
    given = {kind.name: kind.memory_bytes for kind in plan.cluster.kinds}
    for kind in (kind for part in parts for kind in part.cluster.kinds):
        if given.get(kind.name) != kind.memory_bytes:
            problems.add(
                f"{where}cluster.kinds.{kind.name}.memory_bytes is "
                f"{given.get(kind.name)}; its stages have {kind.memory_bytes}"
            )
    if parts or plan.num_devices < plan.cluster.num_devices:
        return  # Some devices are idle, or the plans of the parts are checked.
    for name, there in given.items():
        if plan.memory.params_bytes > SLACK * there:
            problems.add(
                f"{where}memory.params_bytes is {plan.memory.params_bytes}; a device "
                f"of {quoted(name)} has {there}"
            )


# Stages.


def _check_stages(
    plan: PlanData, stages: StagesData, where: str, problems: Problems
) -> None:
    at = f"{where}stages."
    for path, text in _unfit(dataclasses.replace(stages, plans=())):
        problems.add(f"{at}{path} {text}")
    for name, word, known in (
        ("schedule", stages.schedule, NAMES),
        ("executor", stages.executor, ("spmd", "mpmd")),
        ("stash", stages.stash, _STASHES),
    ):
        if word not in known:
            problems.add(
                f"{at}{name} is {quoted(word)}; expected one of {', '.join(known)}"
            )
    if stages.chunks < 1:
        problems.add(f"{at}chunks is {stages.chunks}; expected 1 or more")
    count = len(stages.plans) or plan.axis_sizes.get("stage", 1)
    parts = count * stages.chunks
    for name, number, expected in (
        ("layers", len(stages.layers), parts),
        ("starts", len(stages.starts), parts - 1),
        ("paces", len(stages.paces), parts),
        ("blocks", len(stages.blocks), count),
        ("kinds", len(stages.kinds), count),
    ):
        if number not in (0, expected):
            problems.add(
                f"{at}{name} has {count_text(number, 'entry')}; expected {expected}"
            )
    if stages.blocks and sorted(stages.blocks) != list(range(count)):
        problems.add(f"{at}blocks does not name 0 to {count - 1} once each")
    for place, one in enumerate(stages.plans):
        _check(one, f"{at}plans[{place}].", problems)


P = TypeVar("P", bound=PlanData)

_READ_TOO: Final = (15, 16)
"""Older formats that are still read, as their fields have the same meaning."""

_VERSION, _HASH, _WHOLE = "whalejax_plan", "hash", "document_hash"


def document_of(plan: PlanData) -> dict[str, Any]:
    """Returns the plan as plain JSON data, with its hashes."""
    data = {_VERSION: PLAN_VERSION, _HASH: plan.hash, **encode(plan)}
    return {**data, _WHOLE: document_hash(data)}


def document_hash(data: dict[str, Any]) -> str:
    """Returns the hash of all other entries of a document, in any order.

    >>> a = {"b": 1, "c": [1.5]}
    >>> document_hash(a) == document_hash({"c": [1.5], "b": 1, "document_hash": "…"})
    True
    """
    rest = {key: value for key, value in data.items() if key != _WHOLE}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Writes a plan as JSON, atomically.

    Raises:
        PlanError: The file cannot be written.
    """
    target = Path(path)
    # Files of ``tempfile`` can be read only by their owner.
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        part.write_text(json.dumps(document_of(plan), indent=1))
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PlanError(
            f"{path}: the plan cannot be written there ({error.strerror}). Give a file "
            "name in an existing folder in which you may write"
        ) from error


def read(cls: type[P], path: str | os.PathLike[str]) -> P:
    """Returns the plan of a file.

    Raises:
        PlanError: The file cannot be read, is no plan, is damaged, was edited, or has
            another format.
    """
    try:
        data = parse_json(read_text(path))
    except FileNotFoundError as error:
        raise PlanError(
            f"{path}: there is no such plan file. Make one with whalejax plan, or "
            "plan.save"
        ) from error
    except OSError as error:
        raise PlanError(
            f"{path} cannot be read as a plan ({error.strerror})"
        ) from error
    except UnreadableFileError as error:
        raise PlanError(
            f"{path} is not a plan: it is not JSON ({error}). "
            "Make it again with whalejax plan"
        ) from error
    return from_document(cls, data, str(path))


def from_document(cls: type[P], document: Any, name: str) -> P:
    """Returns the plan of a document that ``document_of`` returned.

    Args:
        cls: Class of the plan.
        document: Document as JSON data; it is not modified.
        name: Name of the document in errors.

    Raises:
        PlanError: The document is no plan, is damaged, was edited or has another
            format.
    """
    if not isinstance(document, dict) or _VERSION not in document:
        raise PlanError(
            f"{name} is not a plan: it has no entry {_VERSION!r}. Give a file that "
            "whalejax plan or plan.save wrote"
        )
    version = document[_VERSION]
    older = type(version) is int and version in _READ_TOO
    if not older:
        _check_version(document[_VERSION], name)
    fields = {k: v for k, v in document.items() if k not in (_VERSION, _HASH, _WHOLE)}
    try:
        check_depth(document)
        plan: P = decode(cls, _upgraded(fields) if older else fields)
        check_plan(plan)
        whole, stated = document_hash(document), document.get(_WHOLE)
    except (DataError, UnreadableFileError, WhaleError, KeyError, TypeError) as error:
        raise PlanError(
            f"{name} is a damaged plan: {error}. Make it again with whalejax plan"
        ) from error
    # The hash of an older plan covers the fields of its own format.
    if whole != stated or (not older and plan.hash != document.get(_HASH)):
        raise PlanError(
            f"{name} was changed by hand or damaged: its content has hash "
            f"{whole[:16]}, the file says {quoted(stated, str)[:16]}. Make it again "
            "with whalejax plan"
        )
    return plan


def _upgraded(data: Any) -> Any:
    if isinstance(data, list):
        return [_upgraded(one) for one in data]
    if not isinstance(data, dict):
        return data
    result = {k: _upgraded(v) for k, v in data.items() if k not in RETIRED_FACTS}
    if "model_hash" in result and result.get("version") in _READ_TOO:
        result["version"] = PLAN_VERSION
    if "step_flops" in result:  # Formats before 17 have no such field.
        result.setdefault("chosen", result.get("active"))
    return result


def _check_version(version: Any, name: str) -> None:
    if version == PLAN_VERSION and type(version) is int:
        return
    newer = isinstance(version, int) and version > PLAN_VERSION
    upgrade = "Upgrade whalejax, or make" if newer else "Make"
    raise PlanError(
        f"{name} has plan format {quoted(version)}; this WhaleJAX reads "
        f"{PLAN_VERSION}. {upgrade} the plan again: whalejax plan MODEL --cluster "
        "CLUSTER -o FILE, or plan.save(FILE) where wh.plan made it"
    )
