"""Converts clusters to plain data and to TOML files, and reads both.

A file of the user may omit what the catalogue knows. A kind with ``base`` inherits from
a kind of the catalogue. Missing ``levels`` come from the kinds, and missing values of
``compiler`` from the platform.

    [kinds.small]
    base = "h100"
    memory_bytes = 4294967296

    [[nodes]]
    kind = "small"
    count = 8
    repeat = 2
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from whalejax.meshes.catalogue import CatalogueEntry, entry, kind_names
from whalejax.meshes.cluster_data import (
    COMPILERS,
    ClusterData,
    CompilerProfile,
    Level,
    Node,
    check_level,
)
from whalejax.meshes.device_kinds import (
    PLATFORMS,
    BandwidthPoint,
    DeviceKind,
    MatmulPoint,
    Source,
    TimedModel,
)
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.fitted_constants import ASSUMED
from whalejax.meshes.formats.cluster_text import MAX_DEVICES, node_levels
from whalejax.meshes.read_file import (
    FileTable,
    UnreadableFileError,
    check_depth,
    parse_toml,
    read_text,
    toml_text,
)
from whalejax.meshes.topology import RETIRED_FACTS


def load(path: str | os.PathLike[str]) -> ClusterData:
    """Reads a cluster from a TOML file.

    Raises:
        WhaleError: The file cannot be read, or is invalid; lists every problem.
    """
    try:
        data = parse_toml(read_text(path))
    except FileNotFoundError:
        raise WhaleError(
            f"cluster file {os.fspath(path)!r} does not exist. "
            f"whalejax calibrate -o {os.fspath(path)} writes one for this machine"
        ) from None
    except (OSError, UnreadableFileError) as error:
        raise WhaleError(
            f"cluster file {os.fspath(path)!r} cannot be read as TOML: {error}"
        ) from error
    return from_data(data, f"cluster file {os.fspath(path)!r}")


def save(cluster: ClusterData, path: str | os.PathLike[str]) -> None:
    """Writes a cluster to a TOML file."""
    text = f"# {cluster.describe()}\n{toml_text(to_data(cluster))}"
    Path(path).write_text(text, encoding="utf-8")


def to_data(cluster: ClusterData) -> dict[str, Any]:
    """Returns a cluster as complete plain data, without references to the catalogue."""
    nodes = []
    for node, group in groupby(cluster.nodes):
        repeat = len(list(group))
        nodes.append({"kind": node.kind.name, "count": node.count, "repeat": repeat})
    return {
        "compiler": dataclasses.asdict(cluster.compiler),
        "kinds": {kind.name: _kind_data(kind) for kind in cluster.kinds},
        "nodes": nodes,
        "levels": [_level_data(level) for level in cluster.levels],
        "links": [
            {
                "source": a,
                "bytes_per_second": {str(b): x for b, x in enumerate(row) if a != b},
            }
            for a, row in enumerate(cluster.links)
        ],
    }


def _kind_data(kind: DeviceKind) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        value = getattr(kind, item.name)
        if item.name == "name" or not item.init or value in (None, (), ""):
            continue
        if item.name == "flops_per_second":
            value = dict(value)
        elif isinstance(value, tuple):
            value = [dataclasses.asdict(v) for v in value]
        data[item.name] = value
    return data


def _level_data(level: Level) -> dict[str, Any]:
    data = dataclasses.asdict(level)
    data["slowdown"] = dict(level.slowdown) or None
    data["torus"] = level.torus or None
    data["shared"] = level.shared or None
    data["peers"] = level.peers or None
    return {k: v for k, v in data.items() if v is not None}


def from_data(data: Mapping[str, Any], title: str) -> ClusterData:
    """Returns a cluster from plain data.

    Args:
        data: Data of ``to_data``, or of a file that omits values.
        title: Subject of the message.

    Raises:
        WhaleError: Lists every problem.
    """
    problems = Problems(title)
    try:
        check_depth(data)
    except UnreadableFileError as error:
        raise WhaleError(f"{title}: {error}") from None
    top = FileTable(data, "", problems)
    facts = _compiler(top.table("compiler")) if "compiler" in top else {}
    tables = top.table("kinds")
    bases: dict[str, CatalogueEntry] = {}
    kinds = {
        name: kind
        for name in tables.data
        if (kind := _kind(name, tables.table(name), bases)) is not None
    }
    nodes = _nodes(top.tables("nodes"), kinds, tables, bases)
    given = [_level(table) for table in top.tables("levels")]
    links = _links(top.tables("links"), sum(node.count for node in nodes))
    top.asked = list(dict.fromkeys(["compiler", *top.asked]))
    top.report_unknown_keys()
    if not nodes and not problems:
        problems.add("nodes: missing, expected at least one [[nodes]] table")
    levels = given or _default_levels(nodes, bases, problems)
    for i, level in enumerate(given if problems else []):
        check_level(i, level, problems)
    problems.raise_if_any()
    try:
        return ClusterData(
            nodes=nodes,
            levels=tuple(levels),
            compiler=dataclasses.replace(COMPILERS[nodes[0].kind.platform], **facts),
            links=links,
        )
    except WhaleError as error:
        raise WhaleError(f"{title}: {error}") from None


def _compiler(table: FileTable) -> dict[str, Any]:
    """Returns the compiler values of a file; the platform's replace missing ones."""
    compiler: dict[str, Any] = {
        "merge_partials": table.boolean("merge_partials"),
        "reduce_scatter": table.boolean("reduce_scatter"),
    }
    if "lanes" in table:
        compiler["lanes"] = table.integer("lanes")
    for field in dataclasses.fields(CompilerProfile):
        if field.name in table and field.name not in compiler:
            compiler[field.name] = table.boolean(field.name)
    table.asked = [field.name for field in dataclasses.fields(CompilerProfile)]
    table.asked += [name for name in RETIRED_FACTS if name in table]
    table.report_unknown_keys()
    return compiler


_OWN = frozenset({"efficiency", "matmul_half_size", "op_overhead_seconds"})
"""Values of a file that replace the fitted curve."""

_MEASURED = _OWN | {"matmul_points", "memory_points", "curve"}
"""Values whose presence shows that a kind without base is not from a datasheet."""


def _kind(
    name: str, table: FileTable, bases: dict[str, CatalogueEntry]
) -> DeviceKind | None:
    """Returns a kind, and adds its base, if any, to ``bases``."""
    before = len(table.problems)
    base_name = table.text("base", None)
    base: DeviceKind | None = None
    if base_name is not None:
        try:
            bases[name] = entry(base_name)
            base = bases[name].kind
        except WhaleError as error:
            table.problems.add(f"{table.at('base')}: {error}")
    values = _kind_values(table, needed=base_name is None)
    table.report_unknown_keys()
    if len(table.problems) > before:
        return None
    try:
        if base is None:
            if not _MEASURED.intersection(values) and values["platform"] != "cpu":
                # For datasheet numbers, the fitted shares apply.
                fitted = {"curve": values["platform"], "efficiency": ASSUMED}
                values = {**fitted, **values}
            return DeviceKind(name=name, **values)
        if "curve" not in values and _OWN.intersection(values):
            values["curve"] = ""  # values of the file replace the fitted shares
        kept = [s for s in base.sources if s.field.partition(".")[0] not in values]
        values["sources"] = (*kept, *values.get("sources", ()))
        return dataclasses.replace(base, name=name, **values)
    except WhaleError as error:
        table.problems.add(f"{table.path}: {error}")
        return None


def _kind_values(table: FileTable, needed: bool) -> dict[str, Any]:
    """Returns the values of a kind; if ``needed``, the main values are required."""
    values: dict[str, Any] = {}
    values["label"] = table.text("label", None)
    platform = table.text("platform") if needed else table.text("platform", None)
    if platform and platform not in PLATFORMS:
        table.problem("platform", platform, f"one of {', '.join(PLATFORMS)}")
    values["platform"] = platform
    values["memory_bytes"] = (
        table.integer("memory_bytes") if needed else table.integer("memory_bytes", None)
    )
    values["host_memory_bytes"] = table.integer("host_memory_bytes", None)
    values["cores"] = table.integer("cores", None)
    values["curve"] = table.text("curve", None)
    values["generation"] = table.text("generation", None)
    for key in (
        "memory_bytes_per_second",
        "host_link_bytes_per_second",
        "op_overhead_seconds",
        "efficiency",
        "matmul_half_size",
        "transcendentals_per_second",
        "fresh_bytes_per_second",
        "turned_bytes_per_second",
        "convolution_share",
        "price_per_hour",
        "watts",
    ):
        required = needed and key == "memory_bytes_per_second"
        values[key] = table.number(key) if required else table.number(key, None)
    if needed and table.data.get("flops_per_second", {}) == {}:
        what = "empty" if "flops_per_second" in table else "missing"
        table.problems.add(
            f"{table.at('flops_per_second')}: {what}, expected a table such as "
            f"{{ f32 = 1e12, bf16 = 2e12 }}"
        )
    values["flops_per_second"] = table.table("flops_per_second").numbers()
    values["matmul_points"] = tuple(map(_matmul_point, table.tables("matmul_points")))
    values["memory_points"] = tuple(map(_memory_point, table.tables("memory_points")))
    values["timed_models"] = tuple(map(_timed_model, table.tables("timed_models")))
    values["sources"] = tuple(map(_source, table.tables("sources")))
    return {key: value for key, value in values.items() if value not in (None, ())}


def _matmul_point(table: FileTable) -> MatmulPoint:
    point = MatmulPoint(
        dtype=table.text("dtype"),
        m=table.integer("m"),
        k=table.integer("k"),
        n=table.integer("n"),
        flops_per_second=table.number("flops_per_second"),
        batch=table.integer("batch", 1),
    )
    table.report_unknown_keys()
    return point


def _memory_point(table: FileTable) -> BandwidthPoint:
    point = BandwidthPoint(
        moved_bytes=table.integer("moved_bytes"),
        bytes_per_second=table.number("bytes_per_second"),
    )
    table.report_unknown_keys()
    return point


def _timed_model(table: FileTable) -> TimedModel:
    timed = TimedModel(
        weights=table.text("weights"),
        samples=table.integer("samples"),
        seconds=table.number("seconds"),
        predicted_seconds=table.number("predicted_seconds"),
        title=table.text("title", ""),
    )
    table.report_unknown_keys()
    return timed


def _source(table: FileTable) -> Source:
    source = Source(
        field=table.text("field"),
        url=table.text("url"),
        title=table.text("title", ""),
        date=table.text("date"),
    )
    table.report_unknown_keys()
    return source


def _nodes(
    tables: list[FileTable],
    kinds: dict[str, DeviceKind],
    defined: FileTable,
    bases: dict[str, CatalogueEntry],
) -> tuple[Node, ...]:
    """Returns the nodes in order; kinds that the file lacks are in the catalogue."""
    nodes: list[Node] = []
    total = 0
    for table in tables:
        name = table.text("kind")
        count, repeat = table.integer("count"), table.integer("repeat", 1)
        table.report_unknown_keys()
        for key, value in (("count", count), ("repeat", repeat)):
            if value < 1:
                table.problem(key, value, "at least 1")
        here = max(count, 0) * max(repeat, 0)
        if total + here > MAX_DEVICES:
            table.problem("count", total + here, f"at most {MAX_DEVICES} devices")
            continue
        total += here
        if name in kinds:
            nodes += [Node(kind=kinds[name], count=count)] * repeat
        elif name and name not in defined:
            try:
                bases[name] = entry(name)
            except WhaleError:
                known = ", ".join([*defined.data, *kind_names()])
                table.problem("kind", name, f"one of [kinds] or the catalogue: {known}")
            else:
                nodes += [Node(kind=bases[name].kind, count=count)] * repeat
                bases[bases[name].kind.name] = bases[name]
    return tuple(nodes)


def _level(table: FileTable) -> Level:
    level = Level(
        name=table.text("name"),
        size=table.integer("size"),
        bandwidth_bytes_per_second=table.number("bandwidth_bytes_per_second"),
        latency_seconds=table.number("latency_seconds"),
        torus=table.boolean("torus", False),
        slowdown=table.table("slowdown").numbers(),
        shared=table.boolean("shared", False),
        peers=table.integer("peers", 0),
    )
    table.report_unknown_keys()
    return level


def _links(tables: list[FileTable], count: int) -> tuple[tuple[float, ...], ...]:
    rows = []
    for number, table in enumerate(tables):
        if table.integer("source") != number:
            table.problem("source", table.data.get("source"), f"{number}, in order")
        rates = dict(table.table("bytes_per_second").numbers())
        table.report_unknown_keys()
        stray = [key for key in rates if not _is_device(key, count)]
        for key in stray:
            table.problem(f"bytes_per_second.{key}", key, f"0 to {count - 1}")
        # Missing rates become zero, which the cluster reports.
        rows.append(tuple(rates.get(str(other), 0.0) for other in range(count)))
    return tuple(rows)


def _is_device(key: str, count: int) -> bool:
    return key.isdecimal() and len(key) < 10 and int(key) < count


def _default_levels(
    nodes: tuple[Node, ...], bases: dict[str, CatalogueEntry], problems: Problems
) -> tuple[Level, ...]:
    """Returns levels from the catalogue, for a file without levels."""
    if problems:
        return ()
    remedy = "Add one [[levels]] table for each level of links, innermost first"
    default_levels = []
    for name in dict.fromkeys(node.kind.name for node in nodes):
        base = bases.get(name)
        if base is None:
            why = f"{name!r} has no base to take them from"
        elif base.torus is not None:
            why = f"a torus of {name!r} needs its lengths"
        elif base.network is None and len(nodes) > 1:
            why = f"no network is known for {name!r}"
        else:
            default_levels.append(base)
            continue
        problems.add(f"levels: missing, and {why}. {remedy}")
    if problems:
        return ()
    return node_levels(default_levels, [node.count for node in nodes])
