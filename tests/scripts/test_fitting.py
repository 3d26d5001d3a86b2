"""Fits find constants back, and sources are not judged by their own rows."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import accuracy, fit_constants
from scripts.accuracy import Measured, leave_one_source_out, load, scores
from scripts.fit_constants import fit, source_weights
from tests.planner.runs import run
from whalejax.estimates.frameworks import framework
from whalejax.estimates.published_run import PublishedRun
from whalejax.estimates.step_model import Runs
from whalejax.meshes.catalogue import entry
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.fitted_constants import Constants, constants


def slower(efficiency: float) -> Constants:
    """Constants of a world where H100s are less efficient."""
    known = constants()
    changed = {**known.efficiency, ("h100", "bf16"): efficiency}
    return dataclasses.replace(known, efficiency=changed)


def sweep() -> list[PublishedRun]:
    """Layouts of several sizes."""
    found = []
    for hidden, tensor, micro in itertools.product((1024, 4096), (1, 4), (1, 4)):
        sizes = {"hidden": hidden, "heads": hidden // 64, "ffn": 4 * hidden}
        sizes["kv_heads"] = sizes["heads"]
        found.append(
            run(
                num_devices=8,
                data=8 // tensor,
                tensor=tensor,
                micro_batch=micro,
                global_batch=32,
                sizes=sizes,
            )
        )
    return found


def test_a_fit_explains_what_its_own_formulas_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit_constants, "ROUNDS", 1)
    runs = Runs(sweep())
    truth = runs.price(slower(0.4)).step_seconds
    before = runs.price(constants()).step_seconds
    found = fit(runs, truth, np.ones(len(truth)), constants())
    after = runs.price(found).step_seconds
    assert np.abs(after / truth - 1).mean() < 0.03
    assert np.abs(before / truth - 1).mean() > 0.08


def test_a_fit_finds_links_of_one_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_constants, "ROUNDS", 1)
    base = [dataclasses.replace(r, framework=framework("vtrain")) for r in sweep()]
    several = [*base, *(dataclasses.replace(r, device=entry("a100")) for r in base)]
    runs = Runs(several)
    world = dataclasses.replace(constants(), node={"h100": 0.85, "a100": 0.55})
    truth = runs.price(world).step_seconds
    found = fit(runs, truth, np.ones(len(truth)), constants())
    assert set(found.node) == {"h100", "a100"}
    assert found.node["a100"] < found.node["h100"] - 0.1


def test_constants_move_together_that_no_run_feels_two_of() -> None:
    several = [*sweep()[:2], run("v5p", source="maxtext"), run("a100-80"), run("h200")]
    runs = Runs(several)
    places, _ = fit_constants._places(runs)
    groups = fit_constants._together(runs, places)
    assert sorted(i for group in groups for i in group) == list(range(len(places)))
    assert len(groups) < len(places)
    for group in groups:
        felt = [fit_constants._feels(runs, places[i]) for i in group]
        assert np.sum(felt, axis=0).max() <= 1
    # What is said not to be felt is not.
    for place in places:
        changed = fit_constants._with(constants(), [place], np.array([place.range.low]))
        before = runs.price(constants(), settle=False).step_seconds
        after = runs.price(changed, settle=False).step_seconds
        assert (before == after)[~fit_constants._feels(runs, place)].all()


def test_a_source_of_many_rows_weighs_more_but_not_in_proportion() -> None:
    weights = source_weights(["many"] * 100 + ["few"])
    assert weights[0] < weights[-1] == 1.0
    assert (weights[:100] ** 2).sum() > 1.0


TABLE = "source,model,layers,hidden,heads,seq,global_batch,device,num_devices,tp,pp"


def write_tables(directory: Path) -> None:
    """Two sources whose steps take what other constants predict."""
    lines = []
    for source in ("nemo-one", "nemo-two"):
        for hidden, tensor, batch in itertools.product((1024, 2048), (1, 2), (16, 32)):
            cells = (source, "gpt", 8, hidden, hidden // 64, 1024, batch, "H100", 8)
            lines.append(",".join(map(str, (*cells, tensor, 1))))
    (directory / "plain.csv").write_text("\n".join([TABLE, *lines]) + "\n")
    with (directory / "plain.csv").open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["step_time_s"] = "1.0"
    path = directory / "table.csv"
    _dump(path, rows)
    (directory / "plain.csv").unlink()
    measured = load(directory)
    steps = Runs(measured.runs).price(slower(0.4)).step_seconds
    for row, step in zip(rows, steps, strict=True):
        row["step_time_s"] = repr(float(step))
    _dump(path, rows)


def _dump(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_a_source_is_predicted_from_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_constants, "ROUNDS", 1)
    write_tables(tmp_path)
    measured = load(tmp_path)
    predicted, judged = leave_one_source_out(measured, workers=1)
    assert judged.all()
    found = {s.source: s for s in scores(measured, predicted, judged)}
    assert set(found) == {"nemo-one", "nemo-two"}
    for score in found.values():
        assert score.mean < 0.05
        assert score.tau is not None
        assert score.tau > 0.8
        assert score.regret == pytest.approx(0.0, abs=0.01)


def made(seconds: list[float]) -> Measured:
    """Three layouts of one model on the same devices."""
    ranks: tuple[dict[str, Any], ...] = (
        {"data": 8},
        {"data": 4, "tensor": 2},
        {"data": 2, "tensor": 4},
    )
    runs = tuple(run(num_devices=8, global_batch=32, **mesh) for mesh in ranks)
    return Measured(
        rows=({"source": "own"},) * 3,
        runs=runs,
        seconds=np.array(seconds),
        layers=np.zeros(3, bool),
    )


def test_scores_are_the_definitions() -> None:
    measured = made([1.0, 2.0, 4.0])
    predicted = np.array([1.5, 1.4, 4.0])
    (score,) = scores(measured, predicted, np.ones(3, bool))
    assert score.mean == pytest.approx((0.5 + 0.3 + 0.0) / 3)
    assert score.worst == pytest.approx(0.5)
    assert score.bias == pytest.approx((0.5 - 0.3) / 3)
    # Of three pairs, one is in the wrong order; the second layout would be picked.
    assert score.tau == pytest.approx(1 / 3)
    assert score.regret == pytest.approx(1.0)


def test_a_kind_that_no_other_source_has_is_not_judged() -> None:
    measured = made([1.0, 2.0, 4.0])
    assert not accuracy._judged(measured).any()
    two = dataclasses.replace(
        measured, rows=({"source": "own"}, {"source": "own"}, {"source": "other"})
    )
    assert accuracy._judged(two).all()


def test_a_directory_without_measured_rows_is_said(tmp_path: Path) -> None:
    with pytest.raises(WhaleError, match="no CSV file there"):
        load(tmp_path)
    (tmp_path / "a.csv").write_text(f"{TABLE}\nnemo,gpt,8,64,1,32,8,H100,8,1,1\n")
    with pytest.raises(WhaleError, match="no row has a layout and a measured time"):
        load(tmp_path)
