"""Measures the error of predicted step times of published training runs.

Reads every table of a directory, predicts each source with constants fitted to the
other sources only, and prints per source the error of the step time, Kendall's tau
inside groups of equal model and device count, and the regret of the chosen plan.

    python scripts/bench_accuracy.py [--tables DIR] [--fit meshes/fitted.toml]
                                     [--docs docs/reference/accuracy.md]

--fit writes the constants fitted to all rows; --docs writes the page. The tables
belong to others and are not in this repository: without --tables the script prints
the last result with its commit. The last line is one JSON object:

    rows    number of rows of all tables
    SOURCE  rows, mean, median, max, tau and regret of a source; its name ends in ``*``
            if no other source has its device
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path


# One thread for each process: the fits run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax  # noqa: E402

from scripts import accuracy, checkout  # noqa: E402
from scripts.accuracy import Measured, Score  # noqa: E402
from whalejax.meshes.errors import WhaleError  # noqa: E402
from whalejax.meshes.fitted_constants import write  # noqa: E402


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def table(scores: Sequence[Score]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [
        "| source | rows | mean | median | max | bias | tau | regret |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for s in sorted(scores, key=lambda s: (not s.judged, s.source)):
        tau = "–" if s.tau is None else f"{s.tau:.2f}"
        name = s.source if s.judged else f"{s.source} (no other source has its device)"
        lines.append(
            f"| {name} | {s.count} | {percent(s.mean)} | {percent(s.median)} | "
            f"{percent(s.worst)} | {100 * s.bias:+.1f} % | {tau} | "
            f"{percent(s.regret)} |"
        )
    return lines


FILE = Path(__file__).with_name("accuracy.json")

SAILOR = ("sailor-profile", "sailor-validation")
HEADS = 20
HEADS_NOTE = (
    "Sailor's rows give GPT-Neo 2.7B 32 heads; its profiling script (read in a public "
    f"fork) and the model's published configuration have {HEADS}. The table above uses "
    f"the rows unchanged. With {HEADS} heads, each source left out as above:"
)


def with_true_heads(measured: Measured) -> Measured:
    """Returns the rows, with Sailor's number of heads for GPT-Neo 2.7B."""
    runs = list(measured.runs)
    for index, row in enumerate(measured.rows):
        if row["source"] in SAILOR and "GPT-Neo-2.7" in row["model"]:
            sizes = dataclasses.replace(
                runs[index].sizes,
                heads=HEADS,
                kv_heads=HEADS,
                head_dim=runs[index].sizes.hidden // HEADS,
            )
            runs[index] = dataclasses.replace(runs[index], sizes=sizes)
    return dataclasses.replace(measured, runs=tuple(runs))


def corrected_scores(measured: Measured) -> tuple[Score, ...]:
    """Returns the scores of Sailor's rows with true heads; may be empty."""
    if not set(SAILOR) & set(measured.sources):
        return ()
    changed = with_true_heads(measured)
    predicted, judged = accuracy.leave_one_source_out(changed, only=SAILOR)
    scores = accuracy.scores(changed, predicted, judged)
    return tuple(s for s in scores if s.source in SAILOR)


SCALED = ("maxtext", "axlearn")
SCALED_NOTE = (
    "Most of MaxText's rows name their models only by a scale, and are not predicted "
    "above. Its configuration defines the layers, widths and heads of a scale. With "
    "these, each TPU source left out:"
)
SCALED_LEGEND = (
    "The two disagree: MaxText states 0.46 to 0.71 of the peak of v5e and v5p. "
    "AXLearn's 7B takes 1.3 to 1.5 times as long there as MaxText's rows suggest. So "
    "neither predicts the other. The shipped constants are fitted to both, with "
    "MaxText's sizes by scale."
)


def scaled_scores(tables: Path) -> tuple[Score, ...]:
    """Returns the scores of the TPU sources, with sizes by MaxText's scales."""
    measured = accuracy.load(tables, scaled=True)
    if not set(SCALED) & set(measured.sources):
        return ()
    predicted, judged = accuracy.leave_one_source_out(measured, only=SCALED)
    scores = accuracy.scores(measured, predicted, judged)
    return tuple(s for s in scores if s.source in SCALED)


COMMAND = (
    "python scripts/bench_accuracy.py --tables DIR --docs docs/reference/accuracy.md"
)

INTRODUCTION = (
    "This page compares WhaleJAX's predictions with published training steps of "
    "others. Every source below was predicted with constants fitted to the *other* "
    "sources, so no constant was fitted to the rows that judge it; a sweep of hundreds "
    "of layouts on one machine is predicted half by half. The behaviour of a framework "
    "(launched operations, overlap, storage) was read in its sources and "
    "documentation. In some cases its rows were off and led to the reading: Sailor's "
    "masks, norms and gradients among them. The command that writes this page:"
)
LEGEND = (
    "A bias above zero means that the prediction is too slow. Tau is Kendall's, inside "
    "groups of equal model and device count. Regret compares WhaleJAX's choice with "
    "the best measured plan: how much slower it is, in groups of equal model, device "
    "count and batch. Rows of one layout are one plan with their mean."
)
OTHERS = (
    ("vTrain (its authors, 2024)", "8.37 % mean", "1,440 points, one node of 8 A100"),
    ("vTrain (its authors, 2024)", "14.73 % mean", "109 points, up to 512 A100"),
    (
        "Calculon (its own validation, 2024)",
        "3.65 % mean, 8.87 % max",
        "8 points of one machine, efficiencies set by hand",
    ),
)
TABLES = (
    "The tables are CSV with the header that `whalejax estimate` reads. Public tables "
    "can be converted: vTrain's ground truth of one node (VIA-Research/vTrain), LLM "
    "Foundry's benchmarking README, NeMo's performance summaries, InternEvo's training "
    "performance page, JAX-Toolbox's PaxML page, the configurations of MaxText and "
    "AXLearn, Sailor's profiles and validation (eth-easl/sailor), and the tables of "
    "the Megatron-LM papers."
)
SHORTFALLS = (
    "Runs that a table does not describe fully are predicted by defaults: for a layout "
    "without its micro-batch or rematerialization, the framework's default.",
    "Collectives of a thousand ranks are predicted from rings; if a framework "
    "broadcasts parameter by parameter, steps are much longer.",
    "Frameworks differ by a tenth for reasons that no layout shows; the same layout "
    "took a fifth longer in one release of a framework than in another.",
    "The speed of a host that launches operations one by one comes from one sweep "
    "(vTrain's). Its times are exact sums over 32 shapes of layers. If the host is the "
    "limit, a layer takes 2.7 to 5.0 ms, without an order in width, micro-batch or "
    "ranks, so no smooth model gets much below 6 % there.",
    "Rows that are equal in every column differ: by 3.4 % on average in InternEvo's "
    "table (groups of ZeRO have no column), by 4.0 % in PaxML's (releases), by 0.9 % "
    "in NeMo's. No prediction can remove this part of the error.",
    "AXLearn's fuji-7B takes 2.44 s on 256 H100 in its first version and 1.78 s in its "
    "second, which has a longer sequence with as many tokens in total. The second must "
    "have an attention kernel that its row does not name, and is predicted without "
    "one.",
    "One row of Sailor's validation (data 4, tensor 4, no stages) is three times as "
    "fast for each sample as its neighbours and needs half of their memory; its stated "
    "batch cannot be right. That row alone is half of the source's error.",
    "Six published rows of LoRA are predicted 12 % off on average, four of them 15 to "
    "19 % too slow; others were reported to be 13 to 24 % too fast. Products of the "
    "adapters themselves are not priced: with them the six would be 15 % off (adapters "
    "of query, key and value) to 29 % (of every product).",
    "Without torch.compile, the work of TorchTitan's host for sharded tensors "
    "(DTensor) is not priced: on 8 tensor ranks the prediction is 2 to 20 % more time "
    "than compiled, but one run took 53 % more.",
    "Step times of plans were compared with measured ones on CPUs, one H100 and one "
    "H200; `scripts/device_check` does so on another device. Memory on an H100, by its "
    "compiler, is in [compilers.md](compilers.md#errors-of-the-predictions).",
    "Cards with only PCIe between them (RTX 3090 and similar) slow down several times "
    "beyond two tensor-parallel ranks, which the bandwidth of a slot does not explain.",
)


def steps_section(path: Path) -> list[str]:
    """Returns the section of single steps, which this script does not measure."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    _, mark, rest = text.partition("## Steps on ")
    return [mark + rest.partition("\n## ")[0].rstrip(), ""] if mark else []


def page(
    scores: Sequence[Score],
    corrected: Sequence[Score],
    scaled: Sequence[Score],
    steps: Sequence[str] = (),
) -> str:
    """Returns the accuracy page.

    Args:
        scores: Scores of every source.
        corrected: Scores of the sources with a wrong size in their rows.
        scaled: Scores of the sources whose sizes follow from a scale.
        steps: Section of single steps.
    """
    vtrain = next((s.mean for s in scores if s.source.startswith("vtrain")), None)
    own = (
        "WhaleJAX",
        f"{percent(vtrain)} mean",
        "vTrain's single-node rows, other half held out",
    )
    lines = [
        *("# Accuracy", "", INTRODUCTION, "", f"    {COMMAND}", ""),
        *(*table(scores), "", LEGEND, ""),
        *((HEADS_NOTE, "", *table(corrected), "") if corrected else ()),
        *((SCALED_NOTE, "", *table(scaled), "") if scaled else ()),
        *((SCALED_LEGEND, "") if scaled else ()),
        *("## Other predictors", ""),
        *("| predictor | error of the step time | rows |", "|---|---|---|"),
        *(f"| {' | '.join(cells)} |" for cells in (own, *OTHERS)),
        *("", "## Input tables", "", TABLES, "", *steps, "## Known limits", ""),
        *(f"- {text}" for text in SHORTFALLS),
    ]
    return "\n".join(lines) + "\n"


def results(scores: Sequence[Score], measured: Measured) -> dict[str, object]:
    """Returns the object of the last line."""
    report: dict[str, object] = {"rows": len(measured.rows)}
    for s in scores:
        name = s.source if s.judged else f"{s.source}*"
        report[name] = {
            "rows": s.count,
            "mean": round(s.mean, 4),
            "median": round(s.median, 4),
            "max": round(s.worst, 4),
            "tau": None if s.tau is None else round(s.tau, 3),
            "regret": None if s.regret is None else round(s.regret, 4),
        }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, metavar="DIR")
    parser.add_argument("--fit", type=Path, metavar="FILE.toml")
    parser.add_argument("--docs", type=Path, metavar="FILE.md")
    arguments = parser.parse_args()
    if arguments.tables is None:
        if arguments.fit or arguments.docs:
            parser.error("--fit and --docs need --tables")
        record = json.loads(FILE.read_text())
        print("\n".join(record["lines"]))
        print(f"measured at {record['commit']}, with JAX {record['jax']}")
        print(json.dumps(record["result"]))
        return 0
    # Every process of a fit has a core; threads would take those of the others.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    try:
        measured = accuracy.load(arguments.tables)
    except WhaleError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(measured.rows)} rows of {len(set(measured.sources))} sources")
    if arguments.fit:
        sources = ", ".join(dict.fromkeys(measured.sources))
        scaled_rows = accuracy.load(arguments.tables, scaled=True)
        write(accuracy.fit_all(scaled_rows), arguments.fit, sources)
        print(f"constants written to {arguments.fit}")
    predicted, judged = accuracy.leave_one_source_out(measured)
    scores = accuracy.scores(measured, predicted, judged)
    lines = table(scores)
    print("\n".join(lines))
    corrected = corrected_scores(measured)
    if corrected:
        print("\n".join([HEADS_NOTE, *table(corrected)]))
    scaled = scaled_scores(arguments.tables)
    if scaled:
        print("\n".join([SCALED_NOTE, *table(scaled), SCALED_LEGEND]))
    if arguments.docs:
        text = page(scores, corrected, scaled, steps_section(arguments.docs))
        arguments.docs.write_text(text, encoding="utf-8")
    result = results(scores, measured)
    about = {"commit": checkout.commit(), "jax": jax.__version__}
    record = {**about, "lines": lines, "result": result}
    FILE.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
