"""Public names of the package: ``import whalejax as wh``.

A public name is imported at its first use. So ``import whalejax`` imports no JAX, and
neither does ``import whalejax.planner``, which runs this module first. No module beside
this one has the name of a public function, which it would replace.

>>> import whalejax as wh
>>> "plan" in dir(wh)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whalejax._version import __version__ as __version__


if TYPE_CHECKING:
    from whalejax.api.feed import Feed as Feed
    from whalejax.api.largest_batch import largest_batch as largest_batch
    from whalejax.api.plan import plan as plan
    from whalejax.api.plan_request import PlanRequest as PlanRequest
    from whalejax.api.search import search as search
    from whalejax.api.table_plans import count_lookups as count_lookups
    from whalejax.api.table_plans import plan_tables as plan_tables
    from whalejax.api.volumes import Volumes as Volumes
    from whalejax.display.elastic_runs import run_timeline as run_timeline
    from whalejax.elastic.init_distributed import (
        init_distributed as init_distributed,
    )
    from whalejax.elastic.training import train_elastic as train_elastic
    from whalejax.equality.check_plan import check as check
    from whalejax.lowering.train_state import TrainState as TrainState
    from whalejax.meshes import Cluster as Cluster
    from whalejax.meshes import WhaleError as WhaleError
    from whalejax.meshes import cluster as cluster
    from whalejax.planner import Plan as Plan
    from whalejax.planner import PlanError as PlanError
    from whalejax.planner.plan.goodput import goodput as goodput
    from whalejax.planner.plan.square_cube_of_plan import square_cube as square_cube
    from whalejax.runtime import loop as loop
    from whalejax.runtime.compile_tables import compile_tables as compile_tables
    from whalejax.runtime.train_step import TrainStep as TrainStep
    from whalejax.runtime.train_step import compile as compile
    from whalejax.scheduler.job_timeline import jobs_timeline as jobs_timeline
    from whalejax.sections.section_run import SectionRun as SectionRun
    from whalejax.tables.sparse_optimizers import (
        sparse_optimizer as sparse_optimizer,
    )
    from whalejax.user_code.annotations import pipeline as pipeline
    from whalejax.user_code.annotations import replicate as replicate
    from whalejax.user_code.annotations import split as split
    from whalejax.user_code.annotations import stage as stage
    from whalejax.user_code.attention import attention as attention
    from whalejax.user_code.losses import Aux as Aux
    from whalejax.user_code.losses import Job as Job
    from whalejax.user_code.losses import WeightedLoss as WeightedLoss

_MODULE_OF_NAME = {
    "Aux": "whalejax.user_code.losses",
    "Cluster": "whalejax.meshes",
    "Feed": "whalejax.api.feed",
    "Job": "whalejax.user_code.losses",
    "Plan": "whalejax.planner",
    "PlanError": "whalejax.planner",
    "PlanRequest": "whalejax.api.plan_request",
    "SectionRun": "whalejax.sections.section_run",
    "TrainState": "whalejax.lowering.train_state",
    "TrainStep": "whalejax.runtime.train_step",
    "Volumes": "whalejax.api.volumes",
    "WeightedLoss": "whalejax.user_code.losses",
    "WhaleError": "whalejax.meshes",
    "attention": "whalejax.user_code.attention",
    "check": "whalejax.equality.check_plan",
    "cluster": "whalejax.meshes",
    "compile": "whalejax.runtime.train_step",
    "compile_tables": "whalejax.runtime.compile_tables",
    "count_lookups": "whalejax.api.table_plans",
    "goodput": "whalejax.planner.plan.goodput",
    "init_distributed": "whalejax.elastic.init_distributed",
    "jobs_timeline": "whalejax.scheduler.job_timeline",
    "largest_batch": "whalejax.api.largest_batch",
    "loop": "whalejax.runtime",
    "pipeline": "whalejax.user_code.annotations",
    "plan": "whalejax.api.plan",
    "plan_tables": "whalejax.api.table_plans",
    "replicate": "whalejax.user_code.annotations",
    "run_timeline": "whalejax.display.elastic_runs",
    "search": "whalejax.api.search",
    "sparse_optimizer": "whalejax.tables.sparse_optimizers",
    "split": "whalejax.user_code.annotations",
    "square_cube": "whalejax.planner.plan.square_cube_of_plan",
    "stage": "whalejax.user_code.annotations",
    "train_elastic": "whalejax.elastic.training",
}

__all__ = [
    "Aux",
    "Cluster",
    "Feed",
    "Job",
    "Plan",
    "PlanError",
    "PlanRequest",
    "SectionRun",
    "TrainState",
    "TrainStep",
    "Volumes",
    "WeightedLoss",
    "WhaleError",
    "__version__",
    "attention",
    "check",
    "cluster",
    "compile",
    "compile_tables",
    "count_lookups",
    "goodput",
    "init_distributed",
    "jobs_timeline",
    "largest_batch",
    "loop",
    "pipeline",
    "plan",
    "plan_tables",
    "replicate",
    "run_timeline",
    "search",
    "sparse_optimizer",
    "split",
    "square_cube",
    "stage",
    "train_elastic",
]


_MODULES = ("loop",)
"""Names of modules with public functions."""


def __getattr__(name: str) -> object:
    module_name = _MODULE_OF_NAME.get(name)
    if module_name is None:
        raise AttributeError(_unknown(name), name=name)
    import importlib

    if name in _MODULES:
        value: object = importlib.import_module(f"{module_name}.{name}")
    else:
        value = getattr(importlib.import_module(module_name), name)
    globals()[name] = value  # Later uses do not call this function.
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _unknown(name: str) -> str:
    import difflib

    folded = {public.casefold() for public in _MODULE_OF_NAME}
    close = difflib.get_close_matches(name.casefold(), folded, n=3)
    near = [public for public in _MODULE_OF_NAME if public.casefold() in close]
    if near:
        return f"whalejax has no {name!r}; the nearest names are {', '.join(near)}"
    return f"whalejax has no {name!r}; it has {', '.join(_MODULE_OF_NAME)}"
