"""Each sample once in an epoch, whoever takes how many; a run goes on where it was."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import whalejax as wh


SAMPLES = [{"x": np.full(4, i, np.float32)} for i in range(50)]


def numbers(batch: Any) -> list[int]:
    return [int(i) for i in batch["x"][:, 0]]


def loss(m: Any, b: Any) -> Any:
    return ((b["x"] @ m["w"] - 1) ** 2).mean()


def step_of(shares: Any, devices: int) -> wh.TrainStep:
    model = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    tx = optax.sgd(0.1)
    plan = wh.plan(
        loss,
        model,
        batch,
        optimizer=tx,
        cluster=f"cpu:{devices}",
        num_micro_batches=4,
        shares=shares,
    )
    here = jax.devices()[:devices]
    return wh.compile(plan, loss, model, optimizer=tx, devices=here)


def test_every_sample_is_seen_once_in_an_epoch() -> None:
    batches = [numbers(b) for b in wh.Feed(SAMPLES, 8, epochs=2)]
    assert len(batches) == 12
    first, second = (sorted(sum(b, [])) for b in (batches[:6], batches[6:]))
    assert len(set(first)) == len(set(second)) == 48
    assert batches[:6] != batches[6:]
    again = [numbers(b) for b in wh.Feed(SAMPLES, 8, epochs=2, first=5)]
    assert again == batches[5:]


def test_the_order_is_that_of_the_samples_without_a_seed() -> None:
    feed = wh.Feed(SAMPLES, 8, seed=None, epochs=1)
    assert sum(map(numbers, feed), []) == list(range(48))


def test_a_step_is_given_its_micro_batches_as_shares_are_now() -> None:
    step = step_of([3, 1], 2)
    feed = iter(wh.Feed(SAMPLES, 8, step, seed=None))
    assert numbers(next(feed)) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert step.batch_rows().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    state = step.init(lambda: {"w": jnp.ones((4, 4))}, rng=jax.random.key(0))
    plain = step_of("even", 1)
    same = plain.init(lambda: {"w": jnp.ones((4, 4))}, rng=jax.random.key(0))
    whole = wh.Feed(SAMPLES, 8, plain, first=1)
    for ours, theirs in itertools.islice(
        zip(wh.Feed(SAMPLES, 8, step, first=1), whole, strict=False), 3
    ):
        step.shares = step.shares[::-1]
        state, metrics = step(state, ours)
        same, wanted = plain(same, theirs)
        np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], same.params["w"], rtol=1e-6)


class Stream:
    """Samples in a row, as grain's iterable datasets give them."""

    def __iter__(self) -> Standing:
        return Standing()


class Standing:
    """An iterator that says where it stands."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Standing:
        return self

    def __next__(self) -> Any:
        if self.at == len(SAMPLES):
            raise StopIteration
        self.at += 1
        return SAMPLES[self.at - 1]

    def get_state(self) -> dict[str, int]:
        return {"at": self.at}

    def set_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_samples_in_a_row_are_seen_once_in_an_epoch_whatever_shares_do() -> None:
    step = step_of([3, 1], 2)
    feed = wh.Feed(Stream(), 8, step, epochs=2)
    seen = []
    for batch in feed:
        seen.append(numbers(batch))
        step.shares = step.shares[::-1]
    assert len(seen) == 12 and seen[0] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert sorted(sum(seen[:6], [])) == sorted(sum(seen[6:], [])) == list(range(48))
    given = numbers(next(iter(wh.Feed(iter(SAMPLES), 8, first=3))))
    assert given == list(range(24, 32))


@pytest.mark.parametrize("done", [4, 6, 7])
def test_a_stream_goes_on_where_it_stood(done: int) -> None:
    feed = wh.Feed(Stream(), 8, epochs=2)
    every = [numbers(batch) for batch in wh.Feed(Stream(), 8, epochs=2)]
    for _ in itertools.islice(feed, done):
        pass
    kept = json.loads(json.dumps(feed.get_state()))
    again = wh.Feed(Stream(), 8, epochs=2)
    again.set_state(kept)
    assert [numbers(batch) for batch in again] == every[done:]
    start = wh.Feed(Stream(), 8, epochs=2)
    kept = start.get_state()
    next(iter(start))
    start.set_state(kept)
    assert [numbers(batch) for batch in start] == every
    by_number = wh.Feed(SAMPLES, 8)
    by_number.set_state({"step": 5})
    assert by_number.get_state() == {"step": 5, "epoch": 0, "place": 40}


def sources() -> list[Any]:
    return [SAMPLES, Stream()]


@pytest.mark.parametrize("seed", [None, 3])
def test_another_batch_size_goes_on_at_the_next_sample(seed: int | None) -> None:
    for source in sources():
        before = wh.Feed(source, 4, seed=seed)
        seen = [numbers(batch) for batch in itertools.islice(before, 5)]
        after = wh.Feed(source, 8, seed=seed, first_sample=20, epochs=1)
        found = [numbers(batch) for batch in after]
        assert [len(batch) for batch in found] == [8, 8, 8]  # 6 samples are left over
        every = sum([*seen, *found], [])
        assert len(set(every)) == len(every) == 44
        order = sum((numbers(b) for b in wh.Feed(source, 1, seed=seed, epochs=1)), [])
        assert every == order[:44]


@pytest.mark.parametrize("given", [0, 6, 40, 44, 48, 50, 52, 96, 100])
def test_streams_and_numbered_samples_go_on_alike(given: int) -> None:
    options: Any = {"seed": None, "first_sample": given, "epochs": 3}
    first, second = ([numbers(b) for b in wh.Feed(s, 8, **options)] for s in sources())
    assert first == second
    whole = [numbers(b) for b in wh.Feed(SAMPLES, 8, seed=None, epochs=3)]
    if given % 8 == 0:
        assert first == whole[given // 8 :]


@pytest.mark.parametrize("done", [3, 13, 14])
def test_what_a_feed_says_of_itself_holds_for_another_batch_size(done: int) -> None:
    """Of 50 samples, batches of 4 leave 2 of an epoch out and those of 20 leave 10."""
    for source in sources():
        before = wh.Feed(source, 4, seed=None, epochs=2)
        seen = [numbers(batch) for batch in itertools.islice(before, done)]
        after = wh.Feed(source, 20, seed=None, epochs=2)
        after.set_state(json.loads(json.dumps(before.get_state())))
        found = [numbers(batch) for batch in after]
        assert found[0][0] == seen[-1][-1] + 1
        assert found[-1][-1] < 50 and len(found) == (3 if done == 3 else 2)


def test_a_state_that_was_kept_before_places_were_in_it() -> None:
    feed = wh.Feed(SAMPLES, 8)
    feed.set_state({"step": 7})
    expected = wh.Feed(SAMPLES, 8, first=7)
    assert numbers(next(iter(feed))) == numbers(next(iter(expected)))
    assert feed.get_state() == {"step": 8, "epoch": 1, "place": 16}
    feed.step = 2
    assert feed.get_state() == {"step": 2, "epoch": 0, "place": 16}


def test_streams_that_cannot_go_on_are_told_so() -> None:
    feed = wh.Feed((sample for sample in SAMPLES), 8)
    assert len([*feed]) == 6  # no more than there is, without epochs=
    with pytest.raises(wh.WhaleError, match="was read before"):
        next(iter(feed))
    other = wh.Feed((sample for sample in SAMPLES), 8)
    next(iter(other))
    with pytest.raises(wh.WhaleError, match=r"a generator cannot say where it stands"):
        other.get_state()
    reading = wh.Feed(Stream(), 8)
    next(iter(reading))
    with pytest.raises(wh.WhaleError, match="the source is a list, which has none"):
        wh.Feed(SAMPLES, 8).set_state(reading.get_state())
    with pytest.raises(wh.WhaleError, match="gave fewer samples"):
        next(iter(wh.Feed(Stream(), 51)))
    with pytest.raises(wh.WhaleError, match="expected what get_state gave"):
        wh.Feed(SAMPLES, 8).set_state({"place": 5})


def test_nodes_of_a_plan_know_their_samples() -> None:
    model = {"w": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    batch = {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}
    plan = wh.plan(loss, model, batch, cluster="h100:2x2", shares=[1, 0, 2, 1])
    first, second = plan.batch_slices(0), plan.batch_slices(1)
    assert first == (slice(0, None, 4),)
    assert second == tuple(slice(m, None, 4) for m in (1, 2, 3))
    rows = [r for s in (*first, *second) for r in np.arange(8)[s]]
    assert sorted(rows) == list(range(8))
    with pytest.raises(wh.WhaleError, match="2 nodes, numbered from 0"):
        plan.batch_slices(2)
    with pytest.raises(wh.WhaleError, match="no micro-batches of their own"):
        plan.what_if(shares="even").batch_slices(0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"batch_size": 51}, "batch_size is 51, of 50 samples"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 8, "first": -1}, "first is -1"),
        ({"batch_size": 8, "first_sample": -4}, "first_sample is -4; expected the num"),
        ({"batch_size": 8, "first_sample": "4"}, "first_sample is '4'; expected the n"),
        (
            {"batch_size": 8, "first": 2, "first_sample": 16},
            "first is 2 and first_sample 16, and both say where to begin",
        ),
        (
            {"batch_size": 8, "first_sample": None},
            r"first_sample is None, which does not say where.*samples=state\.samples",
        ),
    ],
)
def test_sizes_that_cannot_be(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(wh.WhaleError, match=text):
        wh.Feed(SAMPLES, **arguments)


def test_the_first_step_may_say_it_alone() -> None:
    feed = wh.Feed(SAMPLES, 8, seed=None, first=2, first_sample=None)
    assert numbers(next(iter(feed))) == list(range(16, 24))


def test_a_batch_of_another_size_than_planned_is_refused() -> None:
    with pytest.raises(wh.WhaleError, match="batch_size is 4; the plan is for 8"):
        wh.Feed(SAMPLES, 4, step_of([3, 1], 2))


def test_sources_that_hold_no_samples_are_refused() -> None:
    arrays: Any = {"x": np.ones((100, 4))}
    with pytest.raises(wh.WhaleError, match="source is a dictionary; expected samples"):
        wh.Feed(arrays, 32)
    number: Any = 5
    with pytest.raises(wh.WhaleError, match="source is 5; expected samples by number"):
        wh.Feed(number, 32)
    ragged = [{"x": np.ones(3)}, {"x": np.ones(4)}]
    with pytest.raises(
        wh.WhaleError, match=r"\['x'\] of unlike shapes: \(3,\), \(4,\)"
    ):
        next(iter(wh.Feed(ragged, 2, seed=None)))
