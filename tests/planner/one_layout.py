"""Shard counts read off the layouts that a plan writes, for one mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whalejax.planner.sharding.parameter_layout import LeafLayout
from whalejax.planner.sharding.shard_counts import LeafShardCounts, spec_shard_counts


def layout_shard_counts(
    layouts: Sequence[LeafLayout], mesh: Mapping[str, int]
) -> tuple[LeafShardCounts, ...]:
    """Count the shards of one mesh's layouts.

    Args:
        layouts: Layouts of each parameter group, from ``lay_out``.
        mesh: Size of each axis.
    """
    counts = []
    for layout in layouts:
        specs = layout.compute, layout.param, layout.gradient, layout.optimizer
        of = {spec: spec_shard_counts(spec, mesh) for spec in dict.fromkeys(specs)}
        compute, param, gradient, optimizer = (of[spec] for spec in specs)
        counts.append(
            LeafShardCounts(
                compute=compute, param=param, gradient=gradient, optimizer=optimizer
            )
        )
    return tuple(counts)
