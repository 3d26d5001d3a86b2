"""Processes that take unlike shares compute what one device does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from tests.processes import finish, start


PROGRAM: Final = """
import hashlib, json
jax.config.update("jax_enable_x64", True)
import numpy as np
import whalejax as wh
from whalejax.lowering.uneven import replica_executor
from whalejax.lowering.global_arrays import unwrapped
from tests.whalejax.test_uneven import apart, dropping

job = dropping()
model = jax.eval_shape(job.make_model, jax.random.key(0))
made = []
for shares, devices in [
    ([5, 2, 1], jax.devices()[:3]), ("even", jax.local_devices()[:1])
]:
    plan = wh.plan(job.loss_fn, model, job.batch_at(0), optimizer=job.optimizer,
                   cluster=f"cpu:{len(devices)}", num_micro_batches=8, shares=shares,
                   per_micro_batch=True)
    made.append(wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer,
                           devices=devices))
step, single = made
step.rebalances = False
state, expected = (s.init(job.make_model, rng=jax.random.key(0)) for s in made)
losses, worst = [], 0.0

def here(tree):
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)

def own(batch, shares):
    first = sum(shares[:2]) if index else 0
    mine = range(first, first + (shares[2] if index else sum(shares[:2])))
    return {k: np.concatenate([v[m::8] for m in mine]) for k, v in batch.items()}

for number, shares in enumerate([(5, 2, 1), (1, 1, 6), (3, 3, 2)]):
    step.shares = shares
    batch = job.batch_at(number)
    state, metrics = step(state, own(batch, shares) if number else batch)
    expected, wanted = single(expected, batch)
    worst = max(worst, apart(here(metrics), wanted))
    losses.append(float(metrics["loss"]))
ours, theirs = state.params, expected.params
worst = max(worst, apart(here(ours), theirs))
step.save(sys.argv[5], state)
again = step.restore(sys.argv[5])
exact = all(
    np.array_equal(s.data, t.data)
    for a, b in zip(*map(jax.tree.leaves, (again.params, ours)), strict=True)
    for s, t in zip(a.addressable_shards, b.addressable_shards, strict=True)
)
step.rebalances = True
for number in range(12):
    again, metrics = step(again, job.batch_at(number))
jax.block_until_ready(metrics)

# Processes that make unlike states, as unlike devices would, begin with the first's.
def begun(mine):
    def make(key):
        return job.make_model(jax.random.fold_in(key, mine))

    found = step.init(make, rng=jax.random.key(mine))
    shards = [unwrapped(x).addressable_shards for x in jax.tree.leaves(found)]
    copies = len(shards[0])
    digests = [hashlib.sha256() for _ in range(copies)]
    for several in shards:
        for digest, shard in zip(digests, several, strict=True):
            digest.update(np.asarray(shard.data).tobytes())
    return sorted({digest.hexdigest() for digest in digests})

unlike = begun(index)
first = begun(0)
replica_executor.several_kinds = lambda mesh: True
alike = begun(index)
begins = [unlike == first, alike == first]

# Four replicas, of which each updates a quarter: alike, and restored by others.
plan = wh.plan(job.loss_fn, model, job.batch_at(0), optimizer=job.optimizer,
               cluster="cpu:4", num_micro_batches=8, shares=[4, 2, 1, 1], zero=1,
               per_micro_batch=True)
sliced = wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer)
sliced.rebalances = False
state, expected = (
    s.init(job.make_model, rng=jax.random.key(0)) for s in (sliced, single)
)
for number, shares in enumerate([(4, 2, 1, 1), (0, 0, 5, 3), (1, 6, 1, 0)]):
    sliced.shares = shares
    state, metrics = sliced(state, job.batch_at(number))
    expected, wanted = single(expected, job.batch_at(number))
    worst = max(worst, apart(here(metrics), wanted))
worst = max(worst, apart(here(state.params), expected.params))
sliced.save(sys.argv[5] + "-sliced", state)
expected, _ = single(expected, job.batch_at(9))
for other in (sliced, step):
    again, _ = other(other.restore(sys.argv[5] + "-sliced"), job.batch_at(9))
    worst = max(worst, apart(here(again.params), expected.params))

# Shares that one process alone sets are found out by all, a step later.
again = sliced.restore(sys.argv[5] + "-sliced")
sliced.shares = (4, 2, 1, 1) if index else (2, 2, 2, 2)
said = []
for number in range(2):
    try:
        again, _ = sliced(again, job.batch_at(number))
    except wh.WhaleError as error:
        said.append((number, str(error)))
results = worst, exact, losses, step.shares, step.seconds, begins, said
print(json.dumps(results), flush=True)
"""


SPANNING: Final = """
import json
jax.config.update("jax_enable_x64", True)
import numpy as np
import whalejax as wh
from tests.whalejax.test_uneven import apart, dropping

job = dropping()
model = jax.eval_shape(job.make_model, jax.random.key(0))
made = []
for options, cluster, devices in [
    ({"shares": [6, 2], "mesh": {"fsdp": 2}}, "h100:4x1", jax.devices()),
    ({}, "cpu:1", jax.local_devices()[:1]),
]:
    plan = wh.plan(job.loss_fn, model, job.batch_at(0), optimizer=job.optimizer,
                   cluster=cluster, num_micro_batches=8, per_micro_batch=True,
                   **options)
    made.append(wh.compile(plan, job.loss_fn, model, optimizer=job.optimizer,
                           devices=devices))
step, single = made
rows = [r for s in step.plan.batch_slices(index) for r in np.arange(16)[s]]
assert rows == step.batch_rows().tolist()
state, expected = (s.init(job.make_model, rng=jax.random.key(0)) for s in made)
worst = 0.0
for number in range(10):
    batch = job.batch_at(number)
    mine = {k: v[step.batch_rows()] for k, v in batch.items()}
    state, metrics = step(state, mine)
    expected, wanted = single(expected, batch)
    here = jax.tree.map(lambda x: x.addressable_shards[0].data, metrics)
    worst = max(worst, apart(here, wanted))
print(json.dumps([worst, step.shares, step.seconds]), flush=True)
"""


@pytest.mark.full
def test_replicas_that_lie_on_several_nodes() -> None:
    """Their processes measure differently, and come to the same shares."""
    running = start(SPANNING, count=4)
    found = [json.loads(output.splitlines()[-1]) for output in finish(running)]
    for worst, shares, seconds in found:
        assert worst <= 1e-10
        assert [shares, seconds] == found[0][1:]
        assert sum(shares) == 8 and min(seconds) > 0


@pytest.mark.full
def test_two_processes_with_three_replicas(tmp_path: Path) -> None:
    """Two replicas are the first's, and one the second's; then shares move.

    Then there are two in each, which cut the optimizer's state between them.
    """
    running = start(PROGRAM, tmp_path / "kept", devices=2)
    found = [json.loads(output.splitlines()[-1]) for output in finish(running)]
    for index, result in enumerate(found):
        worst, exact, losses, shares, seconds, begins, said = result
        assert worst <= 1e-10 and exact
        assert [losses, shares, seconds] == found[0][2:5]
        assert begins == [index == 0, True]
        ((number, text),) = said
        assert number == 1 and text.startswith(
            f"replicas {'0, 1' if index else '2, 3'} ran with other shares than "
            f"{[4, 2, 1, 1] if index else [2, 2, 2, 2]}, those of process {index}: "
        )
        assert sum(shares) == 8 and min(seconds) > 0
