"""The loss of an adapted model, cut at its lookups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from whalejax.adapters.base import Adapter
from whalejax.capture.batch import aval_of
from whalejax.tables.recognize import TableProgram, split_loss


def cut_program(adapter: Adapter, batch: Any) -> TableProgram:
    """Returns the loss of an adapted model, cut at its lookups.

    Args:
        adapter: The model, without values.
        batch: Abstract or real batch with any number of samples.
    """
    batch = jax.tree.map(aval_of, batch)
    trees: list[Any] = [adapter.params, adapter.rest, batch]
    flat = [jax.tree.leaves(tree) for tree in trees]
    structures: list[Any] = [jax.tree.structure(tree) for tree in trees]
    facts: dict[str, Any] = {}

    def loss(params: Any, rest: Any, batch: Any, *key: Any) -> list[Any]:
        given = zip(structures, (params, rest, batch), strict=True)
        result = adapter.loss(*(tree.unflatten(leaves) for tree, leaves in given), *key)
        metrics = dict(result.metrics)
        facts["metrics"] = jax.tree.structure(metrics)
        facts["weighted"] = result.weighted
        return jax.tree.leaves((result.total, result.weight, metrics, result.rest))

    paths = [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_flatten_with_path(batch)[0]
    ]
    key = [jax.eval_shape(lambda: jax.random.key(0))] if adapter.takes_rng else []
    paths_of = {"paths": adapter.param_paths, "batch_paths": paths}
    program = split_loss(loss, *flat, *key, **paths_of)
    return dataclasses.replace(program, batch=batch, **facts)
