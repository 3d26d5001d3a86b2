"""Compares every strategy with one device: the whole matrix of ``tests/cases.py``.

The pairs of features of ``tests/features.py`` and the pipelines of ``tests/stages.py``
are at its end: ``--only features``, ``--only stages``.
Each case appends one line of JSON to a file, and a case that passed there under the
same code is not run again, so an interrupted run is taken up where it stopped. Fails if
any case does, and stops if the code changes meanwhile. The last line printed is one
JSON object:

    cases    in the matrix, as far as --only takes them
    passed   of them, now or in an earlier run of the same code
    failed   of them; the ids stand above
    left     not run, because --limit-seconds came first
    skipped  combinations that make no sense, by reason
    worst    the largest gradient error in float64
    seconds  of this run

    python scripts/matrix.py [--only SUBSTRING] [--limit-seconds S] [--jobs N]
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
    """Sixteen digits that change with the product, the measure, JAX or Flax."""
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
    """The passed cases of earlier runs of this code, by id; a torn line is none."""
    found: dict[str, dict[str, Any]] = {}
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record.get("code") == code and record["ok"]:
            found[record["id"]] = record
    return found


def line_of(record: dict[str, Any], place: str) -> str:
    """What is printed about a case."""
    if not record["ok"]:
        return f"{place} FAILED {record['id']}: {'; '.join(record['problems'])}"
    beside = f" (one device: {record['noise']:.1e})" if record["noise"] else ""
    return (
        f"{place} {record['id']}: {record['worst']:.1e} of "
        f"{record['tolerance']:.1e}{beside}, {record['seconds']} s"
    )


def main() -> None:
    """Runs what is left, and prints the counts as one line of JSON."""
    parser = argparse.ArgumentParser(description="Compares all cases with one device.")
    parser.add_argument("--only", default="", help="cases whose id contains this")
    parser.add_argument("--limit-seconds", type=float, help="start no case after this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    default = ROOT / ".cache" / "matrix.jsonl"
    parser.add_argument("--results", type=Path, default=default, help="the file")
    given = parser.parse_args()

    start = time.monotonic()
    stop_at = None if given.limit_seconds is None else start + given.limit_seconds
    code = code_hash()
    chosen = [c for c in features.whole() if given.only in c.id]
    known = records_of(given.results, code)
    todo = [c for c in chosen if c.id not in known]
    records = [known[c.id] for c in chosen if c.id in known]
    print(f"{len(chosen)} cases, {len(records)} of them passed before; code {code}")
    given.results.parent.mkdir(parents=True, exist_ok=True)
    with given.results.open("a") as file:
        running = workers.run_all(todo, jobs=given.jobs, stop_at=stop_at)
        for number, record in enumerate(running, start=1):
            if code_hash() != code:
                sys.exit("the code changed while the matrix ran; start it again")
            records.append(record)
            print(json.dumps({**record, "code": code}), file=file, flush=True)
            print(line_of(record, f"[{number}/{len(todo)}]"), flush=True)

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
