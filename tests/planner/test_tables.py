"""``whalejax estimate``: a table in, the same table with predictions out."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.fuzzing import fuzzed
from whalejax.cli.main import main
from whalejax.estimates.estimate_table import ADDED, write_estimates
from whalejax.meshes.errors import WhaleError


HEADER = (
    "source,model,layers,hidden,heads,seq,global_batch,device,num_devices,tp,pp,"
    "remark,notes"
)
STAGES = (
    "stages [V100-16xTP2,V100-16xTP2] -> [T4xTP2,T4xTP2]; profile-layers per stage 7|3"
)
TABLE = f"""{HEADER}
nemo,gpt,8,1024,16,2048,64,H100,8,2,1,mine,
nemo,gpt,,1024,16,2048,64,H100,8,2,1,"no, layers",
maxtext,llama,8,1024,16,2048,64,TPU v5e,16,1,1,,
sailor,gpt,8,1024,16,2048,32,4xV100-16+4xT4,8,,,,"{STAGES}"
"""


def estimated(tmp_path: Path) -> list[dict[str, str]]:
    """Rows of the table that comes out."""
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(TABLE)
    found = write_estimates(source, target)
    assert (found.predicted, found.runs) == (3, 4)
    with target.open() as file:
        return list(csv.DictReader(file))


def test_columns_are_appended_and_the_rest_passes_through(tmp_path: Path) -> None:
    rows = estimated(tmp_path)
    assert list(rows[0])[-len(ADDED) :] == list(ADDED)
    assert [row["remark"] for row in rows] == ["mine", "no, layers", "", ""]


def test_predictions_agree_with_each_other(tmp_path: Path) -> None:
    row = estimated(tmp_path)[0]
    step = float(row["predicted_step_time_s"])
    tokens = float(row["predicted_tokens_per_s_per_device"])
    assert tokens == pytest.approx(64 * 2048 / (8 * step), rel=1e-3)
    assert row["fits"] == "yes"
    assert 0 < float(row["predicted_peak_mem_gib"]) < 80
    assert "dp 4" in row["note"]


def test_a_row_without_layers_says_why_it_is_empty(tmp_path: Path) -> None:
    row = estimated(tmp_path)[1]
    assert row["predicted_step_time_s"] == row["fits"] == ""
    assert row["note"] == "no layers: nothing predicted"


def test_a_mix_is_predicted_by_its_stages(tmp_path: Path) -> None:
    row = estimated(tmp_path)[3]
    assert float(row["predicted_step_time_s"]) > 0
    assert row["fits"] in ("yes", "no")


def test_the_command_says_how_many_rows_it_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(TABLE)
    assert main(["estimate", str(source), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith("3 of 4 runs predicted, written to ")
    assert main(["estimate", str(target), "-o", str(source)]) == 2
    assert "has the columns predicted_step_time_s" in capsys.readouterr().err
    assert source.read_text() == TABLE


def test_a_target_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(TABLE)
    with pytest.raises(WhaleError, match="cannot be written there"):
        write_estimates(source, tmp_path / "none" / "out.csv")
    assert [p.name for p in tmp_path.iterdir()] == ["in.csv"]


def test_a_framework_that_interleaves_has_unlike_stages_too(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    row = f'Megatron-LM,gpt,8,1024,16,2048,64,V100-16,8,2,2,,"{STAGES}"'
    source.write_text(f"{HEADER}\n{row}\n")
    found = write_estimates(source, target)
    assert (found.predicted, found.runs) == (1, 1)


def test_what_is_taken_to_fit_fits(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    rows = [
        f"nemo,llama,{layers},4096,32,2048,256,TPU v5e,32,1,1,,"
        for layers in (16, 24, 32, 40)
    ]
    source.write_text("\n".join([HEADER, *rows]) + "\n")
    write_estimates(source, target)
    with target.open() as file:
        found = list(csv.DictReader(file))
    taken = [row for row in found if "taken to fit" in row["note"]]
    assert taken
    assert {row["fits"] for row in taken} == {"yes"}


MAXTEXT = "source,layers,hidden,heads,ffn,seq,global_batch,device,num_devices,remat"


@pytest.mark.parametrize(
    ("remat", "device", "fits"),
    [
        ("minimal", "TPU v5p", "yes"),
        ("save_dot_except_mlpwi", "TPU v5p", "unknown"),
        ("my_own_names", "TPU v5p", "unknown"),
        ("save_dot_except_mlpwi", "TPU v5e", "no"),
        ("my_own_names", "T4", "no"),
        ("full", "Foo9", "unknown"),
        ("full", "Foo9 80GB", "yes"),
    ],
)
def test_what_no_run_confirmed_is_not_said_to_fit(
    tmp_path: Path, remat: str, device: str, fits: str
) -> None:
    """A run with save_dot_except_mlpwi had too little memory where 34 GiB and yes were
    answered: only policies whose memory was held against runs are said to fit.
    """
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    row = f"maxtext,32,4096,32,14336,8192,32,{device},8,{remat}"
    source.write_text(f"{MAXTEXT}\n{row}\n")
    write_estimates(source, target)
    with target.open() as file:
        (found,) = csv.DictReader(file)
    assert found["fits"] == fits
    assert ("from remat none to full: " in found["note"]) == (remat == "my_own_names")


def test_the_table_is_not_written_over(tmp_path: Path) -> None:
    source = tmp_path / "in.csv"
    source.write_text(TABLE)
    with pytest.raises(WhaleError, match="is the table itself. Give -o another"):
        write_estimates(source, tmp_path / "." / "in.csv")
    assert source.read_text() == TABLE
    with pytest.raises(WhaleError, match="is a folder"):
        write_estimates(source, tmp_path)


def test_rows_that_cannot_be_read_say_why_and_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are estimated as without them."""
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    bad = ["nemo,gpt,8,wide,16,2048,64,H100,8,2,1,,", "nemo,gpt,8"]
    source.write_text(TABLE + "\n".join(bad) + "\n")
    assert main(["estimate", str(source), "-o", str(target)]) == 2
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("3 of 6 runs predicted")
    assert out[1] == "2 rows could not be read; the column note has the reason"
    assert out[2] == "1 row could not be predicted; the column note has the reason"
    with target.open() as file:
        rows = list(csv.DictReader(file))
    assert rows[4]["hidden"] == "wide"
    assert rows[4]["predicted_step_time_s"] == rows[5]["fits"] == ""
    assert rows[4]["note"] == (
        "not read: column hidden: 'wide' is not a number; expected a whole number of "
        "at least 1"
    )
    assert rows[5]["note"] == "not read: 3 cells, the header has 13"
    assert rows[:4] == estimated(tmp_path)


def test_a_strict_table_is_refused_with_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(f"{TABLE}nemo,gpt,8,wide,16,2048,64,H100,8,2,1,,\nnemo\n")
    assert main(["estimate", str(source), "-o", str(target), "--strict"]) == 2
    said = capsys.readouterr().err
    assert "line 6, column hidden: 'wide' is not a number" in said
    assert "line 7: 1 cells, the header has 13" in said
    assert not target.exists()


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("compile", "perhaps", "'perhaps'; expected compiled or eager, or nothing"),
        ("loss_chunks", "0", "0; expected a whole number of at least 1"),
        ("loss_chunks", "2.5", "2.5; expected a whole number of at least 1"),
        (
            "loss_chunks",
            "auto",
            "'auto' is not a number; expected a whole number of at least 1",
        ),
        ("loss_chunks", "-4", "-4; expected a whole number of at least 1"),
    ],
)
def test_optional_columns_are_refused_by_name(
    tmp_path: Path, column: str, cell: str, words: str
) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    source.write_text(
        f"layers,hidden,seq,global_batch,device,num_devices,{column}\n"
        f"8,1024,2048,64,H100,8,{cell}\n8,1024,2048,64,H100,8,\n"
    )
    assert write_estimates(source, target).unread == 1
    with target.open() as file:
        bad, good = csv.DictReader(file)
    assert bad["note"] == f"not read: column {column}: {words}"
    assert good["fits"] == "yes"


LARGE = {
    "layers": "1e308",
    "hidden": "1e26",
    "seq": "1e17",
    "global_batch": "1e26",
    "num_devices": "1e308",
    "tp": "1e18",
    "pp": "1e18",
    "step_time_s": "1e300",
}


@pytest.mark.parametrize("column", LARGE)
def test_a_number_beyond_all_runs_is_refused(tmp_path: Path, column: str) -> None:
    source = tmp_path / "in.csv"
    columns = (
        "model,layers,hidden,seq,global_batch,device,num_devices,tp,pp,step_time_s"
    )
    row: dict[str, str] = dict(
        zip(
            columns.split(","),
            "gpt,8,1024,2048,64,H100,8,2,1,1".split(","),
            strict=True,
        )
    )
    row[column] = LARGE[column]
    source.write_text(f"{columns}\n{','.join(row.values())}\n")
    with pytest.raises(WhaleError) as caught:
        write_estimates(source, tmp_path / "out.csv", strict=True)
    expected = f"line 2, column {column}: {LARGE[column]}; expected at most "
    assert expected in str(caught.value)


def test_a_pipeline_of_more_stages_than_can_be_simulated(tmp_path: Path) -> None:
    source, target = tmp_path / "in.csv", tmp_path / "out.csv"
    header = "model,layers,hidden,seq,global_batch,device,num_devices,pp,vpp"
    source.write_text(f"{header}\ngpt,9000,1024,2048,64,H100,256,256,30\n")
    found = write_estimates(source, target)
    assert (found.predicted, found.runs) == (0, 1)
    assert "pp 256 and vpp 30 make a schedule of too many rows" in target.read_text()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff", "is not text in UTF-8"),
        (b"a,a\n", "line 1: no column layers"),
        (b"k" * 20_000, "line 1: no column layers"),
        (HEADER.encode() + b"\n" + b"x" * 200_000, "field larger than"),
        (
            f"{HEADER}\nnemo,gpt,{'y' * 3000},1,1,1,1,H100,8,2,1,,\n".encode(),
            "(3002 characters) is not a number",
        ),
        (
            f"{HEADER}\nnemo,gpt,\x1b[31m,1,1,1,1,H100,8,2,1,,\n".encode(),
            "'\\x1b[31m' is not a number",
        ),
    ],
)
def test_tables_that_are_none(tmp_path: Path, content: bytes, text: str) -> None:
    source = tmp_path / "in.csv"
    source.write_bytes(content)
    with pytest.raises(WhaleError) as caught:
        write_estimates(source, tmp_path / "out.csv", strict=True)
    assert text in str(caught.value) and len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("first", "count"), [(0, 50), pytest.param(50, 950, marks=pytest.mark.full)]
)
def test_damaged_tables_are_refused_or_estimated(first: int, count: int) -> None:
    found = fuzzed("tables", first, count)
    assert not found["failures"]
    assert found["refused"] + found["valid"] == count
