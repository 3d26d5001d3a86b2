"""Options of ``whalejax jobs``; see ``options``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf


Policy = Literal["throughput", "completion", "fairness", "sia", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSimulateCommand:
    """Play a trace of jobs through, and say when each would start, change and end.

    Every job is planned on the numbers of devices that it may take; nothing is run.
    """

    trace: Annotated[conf.Positional[Path], conf.arg(metavar="TRACE.csv")]
    """columns name, arrival (seconds), model, batch (64, or 64:1024 where it may grow),
    steps, devices (4, or 1:8), and if you like priority and noise_scale"""
    cluster: Annotated[str, conf.arg(metavar="CLUSTER")]
    """such as h100:2x8, or a file"""
    policy: Policy = "throughput"
    """what is most: throughputs over those on the fewest devices; completion, which
    ends short jobs first; fairness or sia, a fair sum of speeds; static gives each job
    the most devices that it asks for, in the order of arrival"""
    every: Annotated[float, conf.arg(metavar="SECONDS")] = 60.0
    """between decisions where no job comes or ends"""
    resize: Annotated[float, conf.arg(metavar="SECONDS")] = 31.0
    """without progress where a job starts or its devices change"""
    horizon: Annotated[float, conf.arg(metavar="SECONDS")] = 600.0
    """in which a change has to win what it costs"""
    precision: Literal["f32", "bf16"] = "bf16"
    """in which the jobs compute"""
    json: bool = False
    """print the result as one line of JSON and nothing else"""
