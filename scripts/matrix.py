"""Compares every strategy with one device: the whole matrix of ``tests/cases.py``.

The pairs of features of ``tests/features.py`` and the pipelines of ``tests/stages.py``
are at its end: ``--only features``, ``--only stages``. Each case appends one line of
JSON to a file, and a case that passed there under the same code does not run again, so
that an interrupted run continues. Fails if any case does, and stops if the code changes
meanwhile.

    python scripts/matrix.py [--only SUBSTRING] [--limit-seconds S] [--jobs N]

The last line is one JSON object:

    cases    number of cases that --only selects
    passed   those that passed, now or in an earlier run of the same code
    failed   those that failed; their ids are printed before
    left     cases that did not run, because --limit-seconds came first
    skipped  combinations without meaning, by reason
    worst    largest gradient error in float64
    seconds  seconds of this run
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final


ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import cases, features, stages, workers  # noqa: E402


PRODUCT: Final = ("whalejax", "planner", "meshes", "models")
MEASURE: Final = (
    "cases.py",
    "covering.py",
    "equality.py",
    "features.py",
    "linen_job.py",
    "stages.py",
)


def code_hash() -> str:
    """Returns a hash of the product, the measuring code, JAX and Flax."""
    digest = hashlib.sha256()
    files = [p for room in PRODUCT for p in (ROOT / room).glob("**/*")]
    files = [p for p in files if p.suffix in (".py", ".toml")]
    files += [ROOT / "tests" / name for name in MEASURE]
    for path in sorted(files):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    for package in ("jax", "jaxlib", "flax", "optax"):
        digest.update(f"{package} {version(package)}\0".encode())
    return digest.hexdigest()[:16]


def records_of(path: Path, code: str) -> dict[str, dict[str, Any]]:
    """Returns passed cases of earlier runs of this code, by id, without torn lines."""
    records: dict[str, dict[str, Any]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("code") == code and record["ok"]:
            records[record["id"]] = record
    return records


def line_of(record: dict[str, Any], place: str) -> str:
    """Returns the printed line of a case."""
    if not record["ok"]:
        return f"{place} FAILED {record['id']}: {'; '.join(record['problems'])}"
    noise = f" (one device: {record['noise']:.1e})" if record["noise"] else ""
    return (
        f"{place} {record['id']}: {record['worst']:.1e} of "
        f"{record['tolerance']:.1e}{noise}, {record['seconds']} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares all cases with one device.")
    parser.add_argument("--only", default="", help="cases whose id contains this")
    parser.add_argument("--limit-seconds", type=float, help="start no case after this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    default = ROOT / ".cache" / "matrix.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="the file")
    args = parser.parse_args()

    start = time.monotonic()
    stop_at = None if args.limit_seconds is None else start + args.limit_seconds
    code = code_hash()
    chosen = [c for c in features.whole() if args.only in c.id]
    passed = records_of(args.results, code)
    remaining = [c for c in chosen if c.id not in passed]
    records = [passed[c.id] for c in chosen if c.id in passed]
    print(f"{len(chosen)} cases, {len(records)} of them passed before; code {code}")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    with args.results.open("a") as file:
        running = workers.run_all(remaining, jobs=args.jobs, stop_at=stop_at)
        for number, record in enumerate(running, start=1):
            if code_hash() != code:
                sys.exit("the code changed while the matrix ran; start it again")
            records.append(record)
            print(json.dumps({**record, "code": code}), file=file, flush=True)
            print(line_of(record, f"[{number}/{len(remaining)}]"), flush=True)

    failed = [record for record in records if not record["ok"]]
    for record in failed:
        print(line_of(record, "*"))
    exact = [r["worst"] for r in records if "float64" in r["id"] and "worst" in r]
    summary = {
        "cases": len(chosen),
        "passed": len(records) - len(failed),
        "failed": len(failed),
        "left": len(chosen) - len(records),
        "skipped": {**cases.skipped(), **stages.skipped()},
        "worst": max(exact, default=None),
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(summary))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
