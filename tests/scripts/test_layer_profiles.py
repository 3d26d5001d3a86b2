"""Ratios of kinds from single layers: what is left out and what tells it again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from scripts import layer_profiles
from scripts.layer_profiles import Profiles, fit_kinds, held_out, load, pairs
from whalejax.estimates.step_model import Runs
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.fitted_constants import Constants, constants


HEADER = (
    "source,model,layers,hidden,heads,kv_heads,ffn,seq,global_batch,device,"
    "num_devices,micro_batch,remat,precision,notes"
)
KINDS = ("A10G-24GB", "RTX A6000-48GB", "T4-16GB")
TRUE = {
    ("a10g", "bf16"): 0.8,
    ("a6000", "bf16"): 0.6,
    ("t4", "bf16"): 0.4,
}
"""Efficiencies that the times of the table are made of."""


def _table(folder: Path, seconds: list[float] | None = None) -> Path:
    """Layers of two widths and three micro-batches on three kinds."""
    lines = []
    for device in KINDS:
        for hidden in (2048, 4096):
            for size in (2, 8, 16):
                at = len(lines)
                ms = 1e3 * seconds[at] if seconds else 3.0
                note = f"PROFILE ms of one block: forward {ms / 3:.6f}; backward "
                note += f"{2 * ms / 3:.6f}; kernels alone"
                lines.append(
                    f"zorse-profile,llama,8,{hidden},32,32,{11 * hidden // 4},512,"
                    f"{size},{device},1,{size},none,fp16 (autocast),{note}"
                )
    folder.mkdir(exist_ok=True)
    (folder / "layers.csv").write_text("\n".join([HEADER, *lines]) + "\n")
    return folder


def _made(tmp_path: Path) -> tuple[Profiles, Constants]:
    """A table whose times are those of known efficiencies."""
    known = dataclasses.replace(constants(), blocks=TRUE, memory={})
    layers = load(_table(tmp_path / "plain"))
    seconds = layer_profiles.layer_seconds(Runs(layers.runs), known)
    return load(_table(tmp_path / "made", seconds.tolist())), known


def test_rows_are_layers_of_kernels_alone(tmp_path: Path) -> None:
    layers = load(_table(tmp_path))
    assert set(layers.devices) == set(KINDS)
    assert set(layers.tokens.tolist()) == {1024, 4096, 8192}
    run = layers.runs[0]
    assert (run.autocast, run.sizes.flash, run.dtype) == (True, True, "f16")
    assert layers.seconds == pytest.approx(np.full(18, 3e-3))
    # No host launches them, and no optimizer follows.
    found = Runs(layers.runs).price(constants())
    assert not found.update_seconds.any() and not found.exposed_seconds.any()
    with pytest.raises(WhaleError, match="no row whose notes say 'PROFILE ms of one"):
        (tmp_path / "layers.csv").write_text(f"{HEADER}\n")
        load(tmp_path)


def test_efficiencies_are_found_again(tmp_path: Path) -> None:
    layers, _ = _made(tmp_path)
    found = fit_kinds(layers, constants())
    assert set(found.blocks) == set(TRUE)
    for key, share in TRUE.items():
        assert found.blocks[key] == pytest.approx(share, rel=0.05)
    assert found.efficiency == constants().efficiency


def test_a_kind_is_predicted_by_its_generation_alone(tmp_path: Path) -> None:
    """Its own layers, wrong by half, change nothing of what is predicted for it."""
    layers, _ = _made(tmp_path)
    wrong = np.array([name == KINDS[0] for name in layers.devices])
    other = dataclasses.replace(
        layers, seconds=layers.seconds * np.where(wrong, 1.5, 1.0)
    )
    before, after = (held_out(one, constants())[wrong] for one in (layers, other))
    assert after == pytest.approx(before)
    # The T4 has no other of its generation: half of its shapes tell the other half.
    alone = np.array([name == KINDS[2] for name in layers.devices])
    predicted = held_out(layers, constants())[alone]
    assert predicted == pytest.approx(layers.seconds[alone], rel=0.1)


def test_pairs_are_ratios_of_large_micro_batches(tmp_path: Path) -> None:
    layers, _ = _made(tmp_path)
    exact = pairs(layers, layers.seconds)
    assert len(exact) == 3
    assert all(pair.error == pytest.approx(0, abs=1e-9) for pair in exact)
    assert {len(pair.ratios) for pair in exact} == {4}
    slow = np.array([1.2 if name == KINDS[1] else 1.0 for name in layers.devices])
    worst = pairs(layers, layers.seconds * slow)[0]
    assert KINDS[1] in worst.kinds
    assert worst.error == pytest.approx(0.2, abs=0.04)


def test_the_benchmark_ends_in_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import runpy

    _made(tmp_path)
    script = Path(__file__).resolve().parents[2] / "scripts" / "bench_kinds.py"
    fitted = tmp_path / "fitted.toml"
    kept = ["--results", str(tmp_path / "kinds.json")]
    arguments = ["--tables", str(tmp_path / "made"), "--fit", str(fitted)]
    last = []
    for given in (arguments, []):
        monkeypatch.setattr("sys.argv", [str(script), *kept, *given])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert ended.value.code == 0
        last.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    found = last[0]
    assert last[1] == found
    assert found["median_error"] < 0.2 and found["worst_pair"] < 0.3
    assert (found["pairs"], found["shapes"]) == (3, 12)
    assert "[blocks]" in fitted.read_text()
