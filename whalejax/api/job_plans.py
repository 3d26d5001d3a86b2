"""Makes the plan of a job, for the commands that plan and those that train.

A ``wh.Job`` makes a model and its batches. This module derives shapes, a cluster and a
plan from the job, without using a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from whalejax.adapters.abstract_models import abstract_model as abstract_model
from whalejax.api.plan import plan_with_tables, tables_question
from whalejax.api.plan_request import PlanRequest, question_about
from whalejax.api.search import search as find_plans
from whalejax.api.search_result import SearchResult
from whalejax.api.tables_request import TablesRequest
from whalejax.meshes import Cluster
from whalejax.meshes import cluster as parse_cluster
from whalejax.meshes.errors import WhaleError
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_data import PlannedQuestion
from whalejax.tables.sparse_optimizers import SparseOptimizer
from whalejax.user_code.losses import Job


def first_batch(job: Job, size: int | None) -> Any:
    """Returns a job's first global batch.

    Args:
        job: Job that makes the batch.
        size: Number of samples, or None for the job's own number.

    Raises:
        WhaleError: The batch does not fit in this host's memory.
    """
    try:
        return job.batch_at(0, size)
    except MemoryError as error:
        raise WhaleError(
            f"a batch of {size or job.batch_size} samples does not fit in the memory "
            f"of this host ({error}). Plan from Python with shapes instead: "
            "jax.ShapeDtypeStruct"
        ) from error


def machine(text: str | None) -> Cluster:
    """Returns the cluster that ``--cluster`` names; default: this process's devices."""
    return Cluster.detect() if text is None else parse_cluster(text)


def make_plan(
    job: Job,
    model: Any,
    batch: Any,
    cluster: Cluster,
    *,
    source: tuple[str, ...] = (),
    **settings: Any,
) -> Plan:
    """Calls ``wh.plan`` for a job.

    Args:
        job: Job to plan.
        model: Abstract model of the job.
        batch: Global batch of the job.
        cluster: Cluster to plan for.
        source: Name and options of the job on the command line, saved in the plan.
        settings: Other arguments of ``wh.plan``.
    """
    settings = {**split_settings(job), **settings}
    request = PlanRequest(optimizer=job.optimizer, cluster=cluster, **settings)
    plan = request.plan(job.loss_fn, model, batch)
    return dataclasses.replace(plan, source=source)


def make_table_plan(
    job: Job,
    model: Any,
    batch: Any,
    cluster: Cluster | str | None,
    *,
    tables: SparseOptimizer,
    staleness: int,
    source: tuple[str, ...] = (),
    **settings: Any,
) -> Plan:
    """Calls ``wh.plan`` for a job with embedding tables.

    Args:
        job: Job to plan.
        model: Abstract model of the job.
        batch: Global batch of the job.
        cluster: Cluster to plan for.
        tables: Optimizer of the tables.
        staleness: Number of newest updates that a lookup may lack.
        source: Name and options of the job on the command line, saved in the plan.
        settings: Other arguments of ``wh.plan`` that plans with tables take.
    """
    own = ("mesh", "precision")
    settings = {**split_settings(job), **settings}
    request = TablesRequest(
        rows=tables,
        optimizer=job.optimizer,
        cluster=cluster,
        staleness=staleness,
        **{name: settings.pop(name) for name in own if name in settings},
        dense=settings,
    )
    plan = plan_with_tables(request, job.loss_fn, model, batch)
    return dataclasses.replace(plan, source=source)


def split_settings(job: Job) -> dict[str, Any]:
    """Returns the arguments of ``wh.plan`` with which a job describes its batch."""
    return {"group_size": job.group_size, "per_micro_batch": job.per_micro_batch}


def search_plans(
    job: Job,
    clusters: Sequence[str],
    *,
    batch: int | None,
    prices: Mapping[str, float],
    each: int,
    **settings: Any,
) -> SearchResult:
    """Calls ``wh.search`` for a job.

    Args:
        job: Job to plan.
        clusters: Texts of the clusters, such as ``"h100:8"``.
        batch: Number of samples of the global batch, or None for the job's own number.
        prices: Hourly price of one device, by the name of its kind.
        each: Number of plans for each cluster.
        settings: Other arguments of ``wh.plan``.
    """
    return find_plans(
        job.loss_fn,
        abstract_model(job),
        first_batch(job, batch),
        optimizer=job.optimizer,
        clusters=list(clusters),
        prices=prices,
        each=each,
        **{**split_settings(job), **settings},
    )


def question_of(job: Job, plan: Plan) -> PlannedQuestion:
    """Returns the question that a job's plan answers, to plan with other settings.

    Args:
        job: Job of the plan.
        plan: Plan, for instance written by ``whalejax plan``.
    """
    batch = job.batch_at(0, plan.batch[0].shape[0])
    if plan.tables is not None:
        return tables_question(plan, job, abstract_model(job), batch)
    request = PlanRequest(
        optimizer=job.optimizer,
        cluster=plan.cluster,
        precision=plan.asked_precision,
        compiler_options=dict(plan.compiler_options),
        **split_settings(job),
    )
    return question_about(request, job.loss_fn, abstract_model(job), batch)
