"""Compares predicted and measured ratios of layer times between kinds of devices.

Reads the tables of a directory for single layers that were timed on several kinds at
equal shape, type and micro-batch, predicts each kind without its own layers if another
kind of its generation was timed in that type, else from the other half of the shapes,
and compares the ratio of any two kinds. Micro-batches of at least 4,096 tokens count.

    python scripts/bench_kinds.py [--tables DIR] [--fit meshes/fitted.toml]

--fit writes the efficiencies fitted to all layers. The tables belong to others and are
not in this repository: without --tables the script prints the last result, which
--results names, with its commit. The last line is one JSON object:

    median_error             median over every shape of every two kinds
    worst_pair, worst_kinds  largest median over the shapes of two kinds; these kinds
    all_sizes_median_error   median_error with the smaller micro-batches
    pairs, shapes            numbers of pairs of kinds, and of their shapes
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path


os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import checkout, layer_profiles  # noqa: E402
from scripts.layer_profiles import Pair, Profiles  # noqa: E402
from whalejax.meshes.errors import WhaleError  # noqa: E402
from whalejax.meshes.fitted_constants import constants, write  # noqa: E402


FILE = Path(__file__).with_name("kinds.json")

SHOWN = 12
"""Number of printed pairs, the worst first."""


def errors(pairs: tuple[Pair, ...]) -> list[float]:
    """Returns the error of every shape of every pair."""
    return [abs(ratio - 1.0) for pair in pairs for ratio in pair.ratios]


def refit(profiles: Profiles, path: Path) -> None:
    """Writes the constants with the efficiencies of all layers."""
    known = constants()
    write(layer_profiles.fit_kinds(profiles, known), path, known.sources)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, metavar="DIR")
    parser.add_argument("--fit", type=Path, metavar="FILE.toml")
    parser.add_argument("--results", type=Path, default=FILE, metavar="FILE.json")
    arguments = parser.parse_args()
    if arguments.tables is None:
        if arguments.fit:
            parser.error("--fit needs --tables")
        record = json.loads(arguments.results.read_text())
        print("\n".join(record["lines"]))
        print(f"measured at {record['commit']}")
        print(json.dumps(record["result"]))
        return 0
    try:
        profiles = layer_profiles.load(arguments.tables)
    except WhaleError as error:
        print(error, file=sys.stderr)
        return 2
    kinds = len(set(profiles.devices))
    print(f"{len(profiles.runs)} layers on {kinds} kinds")
    if arguments.fit:
        refit(profiles, arguments.fit)
        print(f"constants written to {arguments.fit}")
    predicted = layer_profiles.held_out(profiles, constants())
    large = layer_profiles.pairs(profiles, predicted)
    all_sizes = layer_profiles.pairs(profiles, predicted, least_tokens=1)
    if not large:
        print(f"{arguments.tables}: no two kinds at one shape", file=sys.stderr)
        return 2
    lines = [
        "| kinds | shapes | predicted over measured | median error |",
        "|---|---:|---:|---:|",
    ]
    for pair in large[:SHOWN]:
        median = statistics.median(pair.ratios)
        lines.append(
            f"| {' : '.join(pair.kinds)} | {len(pair.ratios)} | {median:.2f} | "
            f"{100 * pair.error:.0f} % |"
        )
    print("\n".join(lines))
    result = results(large, all_sizes)
    record = {"commit": checkout.commit(), "lines": lines, "result": result}
    arguments.results.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(result))
    return 0


def results(large: tuple[Pair, ...], all_sizes: tuple[Pair, ...]) -> dict[str, object]:
    return {
        "median_error": round(statistics.median(errors(large)), 4),
        "worst_pair": round(large[0].error, 4),
        "worst_kinds": " : ".join(large[0].kinds),
        "all_sizes_median_error": round(statistics.median(errors(all_sizes)), 4),
        "pairs": len(large),
        "shapes": sum(len(pair.ratios) for pair in large),
    }


if __name__ == "__main__":
    raise SystemExit(main())
