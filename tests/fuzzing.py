"""Damaged files, read one by one: ``python -m tests.fuzzing KIND FIRST COUNT``.

In a process of its own, so that a reader that never returns ends the process, with its
stack, and not the tests. What it prints is a JSON object: how many mutants were refused
by a WhaleError, how many are valid, and the failures: other errors, and documents that
were believed though they say something else than what was written.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.mutants import as_text, changed, damaged
from whalejax.meshes import Cluster, cluster
from whalejax.meshes.errors import WhaleError


ROOT: Final = Path(__file__).resolve().parents[1]
STUCK_SECONDS: Final = 300
"""A mutant that takes so long ends the process: none takes a hundredth of it."""

LONGEST_MESSAGE: Final = 20_000
"""An error of many problems has a line for each; none quotes what it was given."""

Target = Callable[[random.Random, Path], str]


def plans() -> Target:
    """Plan files: what was changed and not hashed anew is never believed."""
    from tests.planner.plans import example
    from whalejax.planner.json_codec import decode
    from whalejax.planner.plan.plan import Plan
    from whalejax.planner.plan.plan_file import document_hash

    plan = example()
    document = json.loads(json.dumps(plan.document()))
    content = json.dumps(document, indent=1).encode()

    def one(chance: random.Random, path: Path) -> str:
        hashed = False
        if chance.random() < 0.5:
            path.write_bytes(damaged(content, chance))
        else:
            data = changed(document, chance)
            hashed = chance.random() < 0.7 and isinstance(data, dict)
            with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
                ours = ("whalejax_plan", "hash", "document_hash")
                fields = {k: v for k, v in data.items() if k not in ours}
                if hashed:  # as somebody does who wants to be believed
                    data["hash"] = decode(Plan, fields).hash
                    data["document_hash"] = document_hash(data)
            path.write_text(as_text(data))
        loaded = Plan.load(path)
        if not hashed and loaded != plan:
            return "believed"
        assert str(loaded) and loaded.describe() and loaded.explain()
        assert Plan.from_document(loaded.document()) == loaded
        return "valid"

    return one


def toml() -> Target:
    """Cluster files in TOML."""
    from whalejax.meshes.read_file import toml_text

    texts = []
    for given in ("h100:2x4", "v5p:2x2x1", "v100-32:2+p100-16:2"):
        texts.append(toml_text(cluster(given).to_json()))
    texts.append('[kinds.a]\nbase = "h100"\nmemory_bytes = 2_000_000_000\n')
    texts[-1] += '[[nodes]]\nkind = "a"\ncount = 4\nrepeat = 2\n'
    datas: list[Any] = [cluster(t).to_json() for t in ("h100:2x4", "cpu:8")]

    def one(chance: random.Random, path: Path) -> str:
        if chance.random() < 0.5:
            path.write_bytes(damaged(chance.choice(texts).encode(), chance))
            return _used(Cluster.load(path))
        return _used(Cluster.from_json(changed(chance.choice(datas), chance)))

    return one


def paddle() -> Target:
    """Cluster files of PaddlePaddle."""
    from tests.meshes.test_paddle import TOPO, TWO

    def one(chance: random.Random, path: Path) -> str:
        data = chance.choice((TWO, TOPO))
        if chance.random() < 0.5:
            path.write_bytes(damaged(json.dumps(data).encode(), chance))
        else:
            path.write_text(as_text(changed(data, chance)))
        return _used(Cluster.from_paddle(path))

    return one


def _used(found: Cluster) -> str:
    """Whether what was read can be shown, written and read again."""
    assert found.describe().isprintable()
    assert Cluster.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.slowest.matmul_seconds("bf16", 512, 512, 512) > 0
    return "valid"


def tables() -> Target:
    """Tables for estimates."""
    from tests.planner.test_tables import TABLE
    from whalejax.estimates.csv_table import COLUMNS, OPTIONAL
    from whalejax.estimates.estimate_table import write_estimates

    cells = ("", "0", "1", "-1", "7", "1e26", "1e308", "1e309", "nan", "9" * 400, "x")
    cells += ("²", "a\x1b[1m", "4096.0", "1e6", "2147483648", "65536", "A100", "full")
    first, *rows = TABLE.splitlines()

    def one(chance: random.Random, path: Path) -> str:
        if chance.random() < 0.4:
            path.write_bytes(damaged(TABLE.encode(), chance))
        else:
            header = f"{first},cp,ep,experts,vpp,fsdp,micro_batch,compile,loss_chunks"
            row = rows[0]
            given: dict[str, str] = dict(
                zip(header.split(","), row.split(","), strict=False)
            )
            given |= {c: "" for c in header.split(",") if c not in given}
            for _ in range(chance.choice((1, 1, 2, 3))):
                name = chance.choice([c for c in given if c in (*COLUMNS, *OPTIONAL)])
                given[name] = chance.choice(cells)
            path.write_text(f"{header}\n{','.join(given.values())}\n")
        write_estimates(path, path.with_suffix(".out"))
        return "valid"

    return one


KINDS: Final = {"plans": plans, "toml": toml, "paddle": paddle, "tables": tables}


def run(kind: str, first: int, count: int) -> dict[str, Any]:
    """Read some mutants.

    Args:
        kind: one of ``KINDS``.
        first, count: seeds of the mutants.
    """
    found: dict[str, Any] = {"refused": 0, "valid": 0, "failures": []}
    warnings.simplefilter("error")
    target = KINDS[kind]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
            try:
                said = target(random.Random(seed), Path(folder, "file"))
                if said == "valid":
                    found["valid"] += 1
                else:
                    found["failures"].append(f"seed {seed}: {said}")
            except WhaleError as error:
                found["refused"] += 1
                text = str(error)
                if len(text) > LONGEST_MESSAGE or "\x1b" in text or "\u202e" in text:
                    found["failures"].append(f"seed {seed}: message {text[:300]!r}")
            except BaseException:
                trace = io.StringIO()
                traceback.print_exc(file=trace)
                found["failures"].append(f"seed {seed}: {trace.getvalue()[-1500:]}")
            faulthandler.cancel_dump_traceback_later()
    return found


def fuzzed(kind: str, first: int, count: int) -> dict[str, Any]:
    """``run`` in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzzing", kind, str(first), str(count)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
