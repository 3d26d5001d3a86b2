"""``whalejax goodput``: what failures would cost a plan, on paper."""

from __future__ import annotations

import dataclasses
import json

from whalejax.cli.elastic_options import GoodputCommand
from whalejax.planner.plan.goodput import goodput
from whalejax.planner.plan.plan import Plan


def show(command: GoodputCommand) -> None:
    """Print the goodput of a plan.

    Args:
        command: the options.
    """
    found = goodput(
        Plan.load(command.plan),
        mtbf=command.mtbf,
        restart=command.restart,
        snapshot_every=command.snapshot_every,
        spares=command.spares,
        snapshot=command.snapshot,
        recovery=command.recovery,
        repair=command.repair,
        nodes=command.nodes,
        trace=command.trace,
    )
    print(json.dumps(dataclasses.asdict(found)) if command.json else found)
