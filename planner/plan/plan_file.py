"""Plan files: writes a plan as a JSON document, and reads it with every check.

A document holds two hashes. ``hash`` covers what the plan's program depends on;
``document_hash`` covers everything in the document, so that every change is noticed.
Neither is a signature: whoever writes a file can hash it. So reading also checks for
impossible numbers (``validate``), and runs nothing of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final, TypeVar

from whalejax.meshes.errors import WhaleError, quoted
from whalejax.meshes.read_file import (
    UnreadableFileError,
    check_depth,
    parse_json,
    read_text,
)
from whalejax.meshes.topology import RETIRED_FACTS
from whalejax.planner.json_codec import DataError, decode, encode
from whalejax.planner.plan.validate import check_plan
from whalejax.planner.plan_data import PLAN_VERSION, PlanData
from whalejax.planner.plan_errors import PlanError


P = TypeVar("P", bound=PlanData)

_READ_TOO: Final = (15, 16)
"""Older formats that are still read, since their layouts are the same."""

_VERSION, _HASH, _WHOLE = "whalejax_plan", "hash", "document_hash"


def document_of(plan: PlanData) -> dict[str, Any]:
    """Returns the plan as plain JSON data, with its hashes."""
    data = {_VERSION: PLAN_VERSION, _HASH: plan.hash, **encode(plan)}
    return {**data, _WHOLE: document_hash(data)}


def document_hash(data: dict[str, Any]) -> str:
    """Returns the hash of all other entries of a document, whatever their order.

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
    # No temporary file of ``tempfile``, which only its owner can read.
    part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        part.write_text(json.dumps(document_of(plan), indent=1))
        os.replace(part, target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise PlanError(
            f"{path}: the plan cannot be written there ({error.strerror}). Give a "
            "file name in an existing folder that you may write to"
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
    """Returns the plan that ``document_of`` wrote.

    Args:
        cls: Class of plans.
        document: Document as JSON data, which stays unchanged.
        name: Name of the document in errors.

    Raises:
        PlanError: The document is no plan, damaged, edited or of another format.
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
    # The hash of an older plan covers the fields of its version.
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
