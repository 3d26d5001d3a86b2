"""Feeds of grain's datasets and loaders, taken as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

import numpy as np
import pytest

import whalejax as wh


grain: Any = pytest.importorskip(
    "grain", reason="grain is not installed; it comes with the extra whalejax[grain]"
)

COUNT: Final = 23
SAMPLES: Final = [{"x": np.full(2, i, np.int32)} for i in range(COUNT)]


def dataset() -> Any:
    return grain.MapDataset.source(SAMPLES).shuffle(seed=3).map(lambda sample: sample)


def loader() -> Any:
    shards = grain.sharding.NoSharding()
    sampler = grain.samplers.IndexSampler(
        COUNT, shard_options=shards, shuffle=True, num_epochs=1, seed=1
    )
    return grain.DataLoader(data_source=SAMPLES, sampler=sampler, worker_count=0)


SOURCES: Final[dict[str, Callable[[], Any]]] = {
    "MapDataset": dataset,
    "repeated MapDataset": lambda: dataset().repeat(),
    "IterDataset": lambda: dataset().to_iter_dataset(),
    "filtered IterDataset": lambda: (
        dataset().filter(lambda sample: sample["x"][0] != 5).to_iter_dataset()
    ),
    "DataLoader": loader,
}


def numbers(feed: wh.Feed, batches: int) -> list[int]:
    """The samples of the next batches, in order."""
    found = [batch["x"][:, 0].tolist() for batch in islice(feed, batches)]
    return sum(found, [])


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_gives_its_own_order_and_goes_on_at_any_sample(name: str) -> None:
    make = SOURCES[name]
    whole = numbers(wh.Feed(make(), 4, seed=None), 5)
    own = [int(sample["x"][0]) for sample in islice(iter(make()), 20)]
    assert whole == own
    for given in (4, 6, 11):  # in the middle of a batch too
        feed = wh.Feed(make(), 3, seed=None, first_sample=given)
        assert numbers(feed, 2) == whole[given : given + 6]


@pytest.mark.parametrize("name", SOURCES)
def test_a_state_is_json_and_goes_on_exactly(name: str) -> None:
    make = SOURCES[name]
    whole = numbers(wh.Feed(make(), 4, seed=None), 5)
    first = wh.Feed(make(), 4, seed=None)
    assert numbers(first, 2) == whole[:8]
    second = wh.Feed(make(), 4, seed=None)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert numbers(second, 3) == whole[8:]


def test_a_map_dataset_is_shuffled_by_the_seed_of_the_feed() -> None:
    raw = grain.MapDataset.source(SAMPLES)
    listed = numbers(wh.Feed(SAMPLES, 4, seed=7), 7)
    assert numbers(wh.Feed(raw, 4, seed=7), 7) == listed
    assert listed[:20] != sorted(listed[:20])


def test_a_filtered_map_dataset_says_how_to_give_it() -> None:
    filtered = dataset().filter(lambda sample: sample["x"][0] > 100)
    with pytest.raises(wh.WhaleError, match="sample 0 of the source is None") as error:
        next(iter(wh.Feed(filtered, 4, seed=None)))
    assert "give source.to_iter_dataset()" in str(error.value)


def test_an_endless_dataset_has_no_order_of_a_seed() -> None:
    with pytest.raises(wh.WhaleError, match="source has 9223372036854775807") as error:
        wh.Feed(dataset().repeat(), 4)
    assert "Give seed=None" in str(error.value)


def test_a_damaged_state_is_refused() -> None:
    feed = wh.Feed(loader(), 4, seed=None)
    numbers(feed, 1)
    state = feed.get_state() | {"source": {"base64": "?"}}
    with pytest.raises(wh.WhaleError, match=r"state\['source'\] is damaged"):
        wh.Feed(loader(), 4, seed=None).set_state(state)
