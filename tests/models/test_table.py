"""The table of names: what there is, what it makes, and what a wrong name is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import whalejax as wh
import whalejax.models as models


ROOT: Final = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", models.available())
def test_every_name_is_a_job_with_batches(name: str) -> None:
    job = models.job(name)
    assert job.name == name
    assert job.batch_size is not None and job.batch_size % 8 == 0
    batch = job.batch_at(0, 2)
    assert batch
    assert {leaf.shape[0] for leaf in batch.values()} == {2}


@pytest.mark.parametrize(
    "name",
    [
        "bert-test",
        "gnmt-test",
        "gpt",
        "gpt-test",
        "m6-test",
        "mlp-test",
        "moe-test",
        "resnet-test",
        "t5-test",
        "vgg-test",
    ],
)
def test_a_batch_depends_on_its_step_alone(name: str) -> None:
    first, second = models.job(name), models.job(name)
    for step in (3, 0):
        first.batch_at(step)
    again, other = second.batch_at(3), second.batch_at(4)
    for key, leaf in first.batch_at(3).items():
        assert (leaf == again[key]).all()
    assert any((leaf != other[key]).any() for key, leaf in again.items())


def test_the_seed_chooses_other_batches() -> None:
    tokens = models.job("gpt-test").batch_at(0)["tokens"]
    assert (tokens != models.job("gpt-test", seed=1).batch_at(0)["tokens"]).any()


def test_made_up_tokens_follow_their_rule() -> None:
    tokens = models.job("gpt-test").batch_at(0)["tokens"].astype(int)
    noise = (tokens[:, 1:] - 5 * tokens[:, :-1] - 3) % 512
    assert set(noise.ravel().tolist()) == {0, 1, 2, 3}


def test_unknown_model_is_told_the_nearest_names() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        models.job("resnet-50")
    text = str(caught.value)
    assert text.startswith("no model is named 'resnet-50'; nearest: resnet50")
    assert text.endswith(f"There are: {', '.join(models.available())}.")


def test_unknown_options_are_all_listed() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        models.job("gpt-test", layer=3, fused_qvk=True, heads=4)
    text = str(caught.value)
    assert text.startswith("model options: 2 problems")
    assert "GPTConfig has no option 'layer'; nearest: layers, scan_layers, " in text
    assert "GPTConfig has no option 'fused_qvk'; nearest: fused_qkv." in text
    assert "learning_rate" in text


def test_unknown_gating_is_told_what_there_is() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        models.job("moe-test", gating="top2")
    assert str(caught.value) == (
        "no gating is named 'top2'; nearest: top_2. There are: switch, top_2."
    )


def test_routing_that_cannot_be_is_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        models.job("moe-test", routing="drop_less")
    assert str(caught.value) == (
        "no routing is named 'drop_less'; nearest: dropless. There are: capacity, "
        "dropless."
    )
    for factor in (0, -1.5, float("nan")):
        with pytest.raises(wh.WhaleError) as caught:
            models.job("moe-test", capacity_factor=factor)
        assert f"capacity_factor is {factor!r}; expected a number above 0" in str(
            caught.value
        )
        assert 'give routing="dropless"' in str(caught.value)


LIST_NAMES: Final = """
import sys
import whalejax.models as models
assert "gpt" in models.available()
try:
    models.job("gtp")
except ValueError as error:
    assert "nearest: gpt" in str(error), error
else:
    raise AssertionError("gtp was accepted")
assert not {"jax", "flax", "optax"} & set(sys.modules), sorted(sys.modules)
"""


def test_listing_names_imports_no_jax() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_NAMES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
