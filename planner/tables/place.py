"""Finds the placement of tables on devices with the smallest maximum load.

A greedy placement comes first. If it is far from the lower bound, or the problem is
small, an integer program with at most 200 shards searches for a better one and bounds
the optimum. ``cpu_or_device`` chooses which tables are in CPU processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.cluster import Cluster, cluster
from whalejax.meshes.units import gigabytes
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.tables.placement import (
    TablePlacement,
    TableShard,
    gap_over,
    table_shards,
)
from whalejax.planner.tables.rank_assignment import (
    Assignment,
    Scale,
    Solution,
    assign,
    largest_load,
    solve,
)
from whalejax.planner.tables.storage_options import (
    OBJECTIVES,
    PIN_WORDS,
    SPLITS,
    Item,
    Objective,
    StorageOption,
    list_ways,
    read_pin,
)
from whalejax.planner.tables.table import Ranks, Table


MOST_EXACT_SHARDS: Final = 200
"""Number of shards above which no integer program is solved."""

_SHARDS_PER_TABLE: Final = 2.5
_MOST_VARIABLES: Final = 4000
_EXACT_VARIABLES: Final = 400
"""Number of variables up to which the integer program is solved to optimality."""

_NODES: Final = 400
_LEAST_GAP: Final = 1e-6
_ENOUGH_GAP: Final = 0.02
"""Gap to the bound, as a fraction, at which a small program ends, and a larger one."""

_NEAR: Final = 0.02
_NEARLY_EXACT_VARIABLES: Final = 750
"""Limits for programs with more than ``_EXACT_VARIABLES`` variables, which take seconds
and gain little. The greedy placement is kept if its gap is at most the first number, or
if the program has more variables than the second.
"""

_LONGEST_SECONDS: Final = 60.0
"""Largest number of seconds of a program. Normally its nodes and gap end it, so a
placement does not depend on the load of the machine.
"""

_REACHED: Final = 1e-4
_POOR: Final = 0.2
_ROOMY: Final = 0.5
"""Fraction of the devices' memory up to which tables stay out of host memory."""

HOST_SPLITS: Final = ("host", "cached")


def place_tables(
    tables: Sequence[Table],
    ranks: Ranks | Cluster | str,
    *,
    batch_size: int,
    objective: Objective = "time",
    splits: Collection[str] = SPLITS,
    together: Sequence[Sequence[str]] = (),
    pins: Mapping[str, int | str] | None = None,
    most_shards: int | None = None,
    seconds: float = _LONGEST_SECONDS,
) -> TablePlacement:
    """Chooses where embedding tables are stored.

    Args:
        tables: Tables with distinct names.
        ranks: Devices: a ``Ranks``, a cluster, or the text of one such as ``"h100:8"``.
        batch_size: Number of samples of a global batch, over all ranks.
        objective: Load of the most loaded rank to minimise: ``"time"`` (seconds of
            lookups, exchange and update in a step; default), ``"rows"`` (stored table
            elements), ``"lookups"`` (table elements that are looked up) or ``"both"``
            (the larger of the last two, each divided by its mean).
        splits: Allowed ways to store a table; default: all. ``"whole"``, ``"rows"``,
            ``"columns"``, ``"node_rows"`` (by rows over the ranks of one node),
            ``"replicate"``, ``"host"`` (undivided, in host memory) and ``"cached"`` (in
            host memory, with some rows on the device: the most read by ``counts``, or
            the first). The last two are tried only if tables take more than half of the
            ranks' memory, or if no other way is allowed.
        together: Groups of table names; the tables of a group share one rank. Default:
            none.
        pins: Fixed rank or fixed way by name of the table; default: none. A way is such
            as ``"rows"``, or ``"cached:0.25"`` with the fraction of the rows on the
            device.
        most_shards: Largest total number of shards. By default the larger of 2.5 per
            table and four per rank, and twice as many if the greedy placement fails or
            is far from the bound.
        seconds: Seconds after which the integer program returns the best placement so
            far; default: 60.0.
    Raises:
        PlanError: Nothing fits, or no allowed split can store a table.
        WhaleError: An argument is wrong, or pins contradict each other.

    >>> tables = [Table(name="user", rows=1_000_000, width=64),
    ...           Table(name="item", rows=50_000, width=64)]
    >>> placement = place_tables(tables, "h100:4", batch_size=4096)
    >>> sorted({shard.table for shard in placement.shards})
    ['item', 'user']
    """
    _check(tables, batch_size, objective, splits, together, pins, most_shards, seconds)
    if isinstance(ranks, str):
        ranks = cluster(ranks)
    if isinstance(ranks, Cluster):
        ranks = Ranks.of(ranks)
    pins = dict(pins or {})
    if (
        sum(table.nbytes for table in tables)
        <= _ROOMY * ranks.count * ranks.memory_bytes
    ):
        splits = [split for split in splits if split not in HOST_SPLITS] or splits
    groups = _groups(tables, together, pins, ranks)
    items = _items(tables, groups, pins, ranks, batch_size, objective, splits)
    _check_room(tables, items, ranks)
    scale = Scale(items, ranks)
    limit = most_shards or max(int(_SHARDS_PER_TABLE * len(tables)), 4 * ranks.count)
    found = assign(items, ranks, scale, limit)
    if most_shards is None and _is_poor(items, found, ranks, scale):
        limit *= 2
        finer = assign(items, ranks, scale, limit)
        found = found if finer is None else finer
    assignment, bound, optimal = _proven(found, items, ranks, scale, limit, seconds)
    if assignment is None:
        raise _full(tables, items, ranks, limit)
    load = largest_load(items, assignment, ranks, scale)
    return TablePlacement(
        tables=tuple(tables),
        ranks=ranks,
        batch_size=batch_size,
        objective=objective,
        shards=_shards(tables, items, assignment),
        **_sums(items, assignment, ranks, len(scale.mean)),
        bound=bound,
        gap=gap_over(load, bound),
        is_optimal=optimal or gap_over(load, bound) <= _REACHED,
        items=items,
        chosen=assignment.ways,
        mean=scale.mean,
        hottest=_hottest(tables, items, assignment),
    )


def _is_poor(
    items: Sequence[Item], found: Assignment | None, ranks: Ranks, scale: Scale
) -> bool:
    if found is None:
        return True
    load = largest_load(items, found, ranks, scale)
    return gap_over(load, scale.bound) > _POOR


def _proven(
    found: Assignment | None,
    items: Sequence[Item],
    ranks: Ranks,
    scale: Scale,
    limit: int,
    seconds: float,
) -> tuple[Assignment | None, float, bool]:
    """Returns the best assignment, a bound on the largest load, and whether it is
    optimal.

    ``limit`` is the largest number of shards; ``seconds`` limits the integer program.
    """
    load = None if found is None else largest_load(items, found, ranks, scale)
    if load is not None and gap_over(load, scale.bound) <= _REACHED:
        return found, scale.bound, True
    least = sum(min(way.shards * way.slots for way in item.ways) for item in items)
    variables = sum(ranks.count * len(item.ways) for item in items)
    if min(limit, least) > MOST_EXACT_SHARDS or variables > _MOST_VARIABLES:
        return found, scale.bound, False
    is_exact = variables <= _EXACT_VARIABLES
    is_large = variables > _NEARLY_EXACT_VARIABLES
    if load is not None and not is_exact:
        if is_large or gap_over(load, scale.bound) <= _NEAR:
            return found, scale.bound, False
    solution: Solution = solve(
        items,
        ranks,
        scale,
        most_shards=limit,
        at_most=load,
        node_limit=_NODES if is_exact else 1,
        gap=_LEAST_GAP if is_exact else _ENOUGH_GAP,
        time_limit=seconds,
    )
    if solution.assignment is None:
        return found, solution.bound, False
    exact = largest_load(items, solution.assignment, ranks, scale)
    if load is None or exact < load * (1 - 1e-9):
        found = solution.assignment
    return found, solution.bound, solution.is_optimal and is_exact


def _check(
    tables: Sequence[Table],
    batch_size: int,
    objective: str,
    splits: Collection[str],
    together: Sequence[Sequence[str]],
    pins: Mapping[str, int | str] | None,
    most_shards: int | None,
    seconds: float,
) -> None:
    problems = Arguments("place_tables")
    if not tables or not all(isinstance(table, Table) for table in tables):
        problems.refuse("tables", tables, "one or more Table")
        problems.raise_if_any()
    names = [table.name for table in tables]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.add(f"{names.count(name)} tables are named {name!r}; expected one")
    problems.whole("batch_size", batch_size, least=1)
    problems.whole("most_shards", most_shards, least=len(tables), none=True)
    problems.number("seconds", seconds, above=0)
    if objective not in OBJECTIVES:
        problems.refuse("objective", objective, f"one of {', '.join(OBJECTIVES)}")
    if not splits or not set(splits) <= set(SPLITS):
        problems.refuse("splits", splits, f"some of {', '.join(SPLITS)}")
    known = f"which is not a table; the tables are {', '.join(list(names)[:8])}"
    for group in together:
        for name in group:
            if name not in names:
                problems.add(f"together names {short_repr(name)}, {known}")
    for name, pin in (pins or {}).items():
        if name not in names:
            problems.add(f"pins names {short_repr(name)}, {known}")
        if not is_whole(pin, 0) and read_pin(pin) is None:
            problems.refuse(f"pins[{name!r}]", pin, f"a rank, or {PIN_WORDS}")
    problems.raise_if_any()


def _groups(
    tables: Sequence[Table],
    together: Sequence[Sequence[str]],
    pins: Mapping[str, int | str],
    ranks: Ranks,
) -> list[tuple[int, ...]]:
    """Returns the groups of tables that share a rank; refuses contradictory pins."""
    number = {table.name: i for i, table in enumerate(tables)}
    group = list(range(len(tables)))
    for names in together:
        wanted = {group[number[name]] for name in names}
        group = [min(wanted) if g in wanted else g for g in group]
    members = [
        tuple(i for i, g in enumerate(group) if g == k) for k in range(len(group))
    ]
    problems = Arguments("place_tables")
    for each in filter(None, members):
        names_text = ", ".join(repr(tables[i].name) for i in each)
        fixed = {i: pins[tables[i].name] for i in each if tables[i].name in pins}
        numbers = {pin for pin in fixed.values() if not isinstance(pin, str)}
        ways = {pin for pin in fixed.values() if isinstance(pin, str)}
        if len(numbers) > 1:
            problems.add(
                f"together puts {names_text} on one rank, but pins puts them on ranks "
                f"{', '.join(map(str, sorted(numbers)))}; leave one of these out"
            )
        if len(each) > 1 and ways - {"whole"}:
            problems.add(
                f"together puts {names_text} on one rank, but pins divides one of them "
                f"by {', '.join(sorted(ways - {'whole'}))}; leave one of these out"
            )
        for pin in numbers:
            if int(pin) >= ranks.count:
                problems.add(
                    f"pins puts {names_text} on rank {pin}, but there are "
                    f"{ranks.count} ranks, from 0"
                )
    problems.raise_if_any()
    return [each for each in members if each]


def _items(
    tables: Sequence[Table],
    groups: Sequence[tuple[int, ...]],
    pins: Mapping[str, int | str],
    ranks: Ranks,
    batch_size: int,
    objective: Objective,
    splits: Collection[str],
) -> tuple[Item, ...]:
    items = []
    for group in groups:
        fixed = [pins[tables[i].name] for i in group if tables[i].name in pins]
        rank = next((int(pin) for pin in fixed if not isinstance(pin, str)), None)
        way = next((read_pin(pin) for pin in fixed if isinstance(pin, str)), None)
        allowed, part = ([way[0]], way[1]) if way is not None else (splits, None)
        if len(group) > 1 or rank is not None:
            allowed = ["whole"]
        listed = [
            list(
                list_ways(
                    tables[i],
                    ranks,
                    batch_size=batch_size,
                    objective=objective,
                    splits=allowed,
                    cached_part=part,
                )
            )
            for i in group
        ]
        if not listed[0]:
            raise _no_way(tables[min(group)], allowed, ranks, batch_size)
        ways = listed[0]
        if len(group) > 1:
            ways = [_sum_of([one for one, *_ in listed])]
        items.append(Item(tables=group, ways=tuple(ways), rank=rank))
    return tuple(items)


def _no_way(
    table: Table, allowed: Collection[str], ranks: Ranks, batch_size: int
) -> PlanError:
    words = ", ".join(allowed)
    text = (
        f"table {table.name!r} ({table.rows:,} rows × {table.width}) cannot be stored"
    )
    if set(allowed) <= set(HOST_SPLITS) and not ranks.host_bytes:
        return PlanError(
            f"{text} as {words}: the cluster has no host memory in addition to its "
            "devices' (CPUs have none; other kinds give host_memory_bytes and "
            f"host_link_bytes_per_second). Leave {words} out of pins and splits"
        )
    return PlanError(
        f"{text} as {words} on {ranks.count} ranks with {batch_size:,} samples per "
        "batch; allow other splits"
    )


def _sum_of(ways: Sequence[StorageOption]) -> StorageOption:
    return StorageOption(
        split="whole",
        shards=1,
        slots=len(ways),
        loads=tuple(np.sum([way.loads for way in ways], axis=0).tolist()),
        exchange_bytes=sum(way.exchange_bytes for way in ways),
        memory_bytes=sum(way.memory_bytes for way in ways),
        sample_bytes=sum(way.sample_bytes for way in ways),
        of_tables=tuple(ways),
    )


def _check_room(tables: Sequence[Table], items: Sequence[Item], ranks: Ranks) -> None:
    for item in items:
        least = min(way.memory_bytes + way.host_bytes for way in item.ways)
        short = min(
            max(
                way.memory_bytes - ranks.memory_bytes,
                way.host_bytes - ranks.host_bytes,
            )
            for way in item.ways
        )
        fits = any(
            way.memory_bytes <= ranks.memory_bytes
            and way.host_bytes <= ranks.host_bytes
            for way in item.ways
        )
        if fits:
            continue
        names = ", ".join(repr(tables[i].name) for i in item.tables)
        size = sum(tables[i].nbytes for i in item.tables)
        room = max(ranks.memory_bytes, ranks.host_bytes)
        raise NothingFits(
            f"table {names} takes {gigabytes(size)} with its optimizer state, its "
            f"smallest shard {gigabytes(least)}; for tables a device has "
            f"{gigabytes(ranks.memory_bytes)} and a host "
            f"{gigabytes(ranks.host_bytes)} per device: {gigabytes(short)} short. Use "
            "more devices, allow splits by rows, or store fewer bytes per row",
            lacks_bytes=int(short),
            of_bytes=int(room),
            nearest="tables over ranks",
        )


def _full(
    tables: Sequence[Table], items: Sequence[Item], ranks: Ranks, limit: int
) -> PlanError:
    size = sum(table.nbytes for table in tables)
    is_hosted = any(way.host_bytes for item in items for way in item.ways)
    room = ranks.memory_bytes + (ranks.host_bytes if is_hosted else 0.0)
    room *= ranks.count
    short = size - room
    reason = f"{gigabytes(short)} short" if short > 0 else "no division of them fits"
    text = (
        f"{len(tables)} tables take {gigabytes(size)} with their optimizer state, but "
        f"{ranks.count} ranks have {gigabytes(room)} for them: {reason}, with at most "
        f"{limit} shards. Use more devices, allow more splits or shards, or store "
        "fewer bytes per row"
    )
    return NothingFits(
        text,
        lacks_bytes=-int(-max(0, short) // ranks.count),
        of_bytes=int(room // ranks.count),
        nearest="tables over ranks",
    )


def _hottest(
    tables: Sequence[Table], items: Sequence[Item], assignment: Assignment
) -> dict[str, np.ndarray]:
    """Returns which rows of cached tables are on the device, if not the first."""
    found: dict[str, np.ndarray] = {}
    for item, way in zip(items, assignment.ways, strict=True):
        for table in (tables[i] for i in item.tables):
            count = item.ways[way].cached_rows
            rows = table.hottest_rows(count) if count else None
            if rows is not None:
                found[table.name] = rows
    return found


def _shards(
    tables: Sequence[Table], items: Sequence[Item], assignment: Assignment
) -> tuple[TableShard, ...]:
    found: dict[int, list[TableShard]] = {}
    for item, way, held in zip(items, assignment.ways, assignment.ranks, strict=True):
        chosen = item.ways[way]
        for i in item.tables:
            shards = table_shards(tables[i], chosen, held)
            found[i] = list(shards)
    return tuple(shard for i in sorted(found) for shard in found[i])


def _sums(
    items: Sequence[Item], assignment: Assignment, ranks: Ranks, measures: int
) -> dict[str, np.ndarray]:
    sums = {
        "loads": np.zeros((ranks.count, measures)),
        "memory_bytes": np.zeros(ranks.count),
        "host_bytes": np.zeros(ranks.count),
        "exchange_bytes": np.zeros(ranks.count),
    }
    for item, way, held in zip(items, assignment.ways, assignment.ranks, strict=True):
        for name, total in sums.items():
            np.add.at(total, list(held), getattr(item.ways[way], name))
    return sums
