"""Sends signals to launched runs at random moments and checks how the runs end.

Each case launches a training run (``chaos_training.py``: one program, a pipeline of
stage programs, or three replicas with unequal shares), waits until a random rank
reports a random point of its work, waits a random time more, and sends it a random
signal. A fourth of the runs are started again afterwards and train to their end from
the latest checkpoint. ``chaos.json`` beside this script has the results, with commits,
versions and the seed; without options the script prints these and measures a few cases
with a seed of their own.

    python scripts/bench_chaos.py [--signals 6] [--seconds 540] [--seed N] [--refresh]

``--refresh`` measures the 300 stored cases; it takes hours, writes each case as it
ends, and continues where it stopped (``--anew`` begins again). The last line is one
JSON object, over the stored and the fresh cases:

    signals        number of sent signals
    hangs          launchers that had not ended 30 s after the signal
    wrong_curves   runs with a missing step, or with a loss more than 1e-5 off that of
                   an undisturbed run, before or after a restart
    blamed_right   part of the failed runs whose launcher names the right rank
    failed         number of failed runs
    resumed        runs that were started again
    kept, fresh    signals of the file, and of this call
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import checkout


ROOT: Final = Path(__file__).resolve().parents[1]
FILE: Final = Path(__file__).with_name("chaos.json")
TRAINING: Final = Path(__file__).with_name("chaos_training.py")

KINDS: Final = {"data": 2, "pipeline": 2, "uneven": 3}
"""Number of processes of each kind of run."""

PLACES: Final = (
    *("begins", "imported", "joined", "planned", "compiled"),
    *(f"step {n}" for n in (1, 3, 4, 5, 8, 9, 12, 14)),
    "ends",
)
SIGNALS: Final = (
    *("SIGKILL", "SIGKILL", "SIGSTOP", "SIGSTOP", "SIGTERM", "SIGINT"),
    *("SIGSEGV", "SIGABRT", "SIGHUP", "SIGRTMIN"),
)
STEPS: Final = 14
STORED_CASES: Final = 300
HANG_SECONDS: Final = 30.0
RUN_SECONDS: Final = 240.0
"""Limit on a run that no signal has reached."""

TOLERANCE: Final = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Disturbance of one run."""

    index: int
    kind: str
    rank: int
    place: str
    delay_seconds: float
    signal: str
    resumes: bool


def drawn(seed: int, index: int) -> Case:
    """Returns the case of a number, which is the same on every machine."""
    rng = random.Random(f"{seed}/{index}")
    kind = rng.choice(sorted(KINDS))
    return Case(
        index=index,
        kind=kind,
        rank=rng.randrange(KINDS[kind]),
        place=rng.choice(PLACES),
        delay_seconds=round(rng.uniform(0, 0.5), 3),
        signal=rng.choice(SIGNALS),
        resumes=rng.random() < 0.25,
    )


class Run:
    def __init__(self, kind: str, folder: Path, name: str) -> None:
        self.logs = folder / name
        self.logs.mkdir()
        self._errors = (self.logs / "errors").open("wb")
        argv = ["-m", "whalejax", "launch", "--processes", str(KINDS[kind])]
        argv += ["--logs", str(self.logs), str(TRAINING), kind, str(folder / "saved")]
        environment = {
            k: v for k, v in os.environ.items() if k[:4] not in ("XLA_", "JAX_")
        }
        self.process = subprocess.Popen(
            [sys.executable, *argv],
            env={**environment, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            preexec_fn=_heed_signals,  # noqa: PLW1509
        )

    def pid_of(self, rank: int) -> int | None:
        """Returns the process of a rank, if it runs."""
        variable = f"WHALEJAX_PROCESS_ID={rank}".encode()
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
            for pid in " ".join(path.read_text() for path in tasks).split():
                with contextlib.suppress(OSError):
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if variable in variables:
                        return int(pid)
        return None

    def log(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self.logs / f"rank-{rank}.log").read_text(errors="replace")
        return ""

    def ends_within(self, seconds: float) -> bool:
        """Waits for the launcher; kills it and returns False if it does not end."""
        try:
            self.process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        finally:
            self._errors.close()

    def errors(self) -> str:
        return (self.logs / "errors").read_text(errors="replace")

    def losses(self, kind: str) -> list[dict[int, float]]:
        """Returns the losses of every rank, by step."""
        logs = (self.log(rank) for rank in range(KINDS[kind]))
        return [
            {
                int(s): float(v)
                for s, v in re.findall(r"^chaos loss (\d+) (\S+)$", t, re.M)
            }
            for t in logs
        ]


def _heed_signals() -> None:
    """Restores signals that children would inherit as ignored from nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def is_right(losses: Mapping[int, float], reference: Mapping[int, float]) -> bool:
    """Returns whether no step is missing and all losses are as expected."""
    steps = sorted(losses)
    follow = steps == list(range(steps[0], steps[-1] + 1)) if steps else True
    return follow and all(
        abs(value - reference[step]) <= TOLERANCE * abs(reference[step])
        for step, value in losses.items()
    )


def undisturbed_losses(kind: str = "data") -> dict[int, float]:
    """Returns the losses of an undisturbed run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(kind, Path(folder), "first")
        if not run.ends_within(RUN_SECONDS) or run.process.returncode:
            raise SystemExit(f"the undisturbed run failed:\n{run.errors()}")
        (losses,) = {tuple(sorted(x.items())) for x in run.losses(kind)}
        assert [step for step, _ in losses] == list(range(1, STEPS + 1))
        return dict(losses)


def send_signal(run: Run, case: Case) -> bool:
    """Sends the signal at its moment; returns False if the rank had ended."""
    end = time.monotonic() + RUN_SECONDS
    mark = re.compile(rf"^chaos at {case.place}$", re.M)
    while not mark.search(run.log(case.rank)):
        if run.process.poll() is not None or time.monotonic() > end:
            return False
        time.sleep(0.02)
    time.sleep(case.delay_seconds)
    pid = run.pid_of(case.rank)
    if pid is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, getattr(signal, case.signal))
        return True
    return False


def measure(case: Case, reference: Mapping[int, float], folder: Path) -> dict[str, Any]:
    """Runs a case.

    Returns:
        Results, or ``sent`` False if the rank had ended before the signal.
    """
    run = Run(case.kind, folder, "first")
    record: dict[str, Any] = {**asdict(case), "sent": send_signal(run, case)}
    start = time.monotonic()
    if not record["sent"]:
        run.ends_within(RUN_SECONDS)
        return record
    record["hangs"] = not run.ends_within(HANG_SECONDS)
    record["seconds"] = round(time.monotonic() - start, 2)
    record["status"] = run.process.returncode
    curves = run.losses(case.kind)
    record["wrong"] = not all(is_right(curve, reference) for curve in curves)
    failed = run.process.returncode != 0
    if failed:
        match = re.search(r"^whalejax: rank (\d+) on localhost", run.errors(), re.M)
        record["named"] = int(match[1]) if match else None
    elif any(len(curve) < STEPS for curve in curves):
        record["wrong"] = True
    if failed and case.resumes and not record["hangs"]:
        again = Run(case.kind, folder, "again")
        ok = again.ends_within(RUN_SECONDS) and again.process.returncode == 0
        later = again.losses(case.kind)
        joint = {**curves[0], **later[0]}
        record["resumed_right"] = ok and is_right(joint, reference)
        record["resumed_right"] &= max(joint, default=STEPS) == STEPS
        record["wrong"] |= not record["resumed_right"]
    if (
        record["hangs"]
        or record["wrong"]
        or record.get("named", case.rank) != case.rank
    ):
        record["said"] = run.errors()[-1500:]
    return record


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "orbax-checkpoint", "numpy")
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in names
    }


def case_text(record: Mapping[str, Any]) -> str:
    text = f"{record['index']:4d} {record['kind']:8s} rank {record['rank']} "
    text += f"{record['signal']:8s} at {record['place']:9s} "
    if not record["sent"]:
        return text + "the rank had ended before"
    named = record.get("named", "no rank had to be named")
    name = f"named {named}" if isinstance(named, int) else str(named)
    flags = [word for word in ("hangs", "wrong") if record[word]]
    tail = " resumed" if record.get("resumed_right") else ""
    return text + f"{record['seconds']:5.1f} s, {name}{tail} {' '.join(flags).upper()}"


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of the last line."""
    sent = [record for record in records if record["sent"]]
    failed = [record for record in sent if "named" in record]
    right = sum(record["named"] == record["rank"] for record in failed)
    return {
        "signals": len(sent),
        "hangs": sum(record["hangs"] for record in sent),
        "wrong_curves": sum(record["wrong"] for record in sent),
        "blamed_right": round(right / len(failed), 4) if failed else None,
        "failed": len(failed),
        "resumed": sum("resumed_right" in record for record in sent),
    }


def run_cases(
    seed: int, known: dict[int, Any], count: int, stop_at: float, path: Path | None
) -> None:
    """Measures cases, into ``known``, until ``count`` signals were sent."""
    reference: dict[int, float] | None = None
    index = 0
    while sum(record["sent"] for record in known.values()) < count:
        if index not in known:
            if time.monotonic() > stop_at:
                return
            reference = undisturbed_losses() if reference is None else reference
            folder = Path(tempfile.mkdtemp())
            try:
                record = measure(drawn(seed, index), reference, folder)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            known[index] = {**record, "commit": checkout.commit()}
            print(case_text(record), flush=True)
            if path is not None:
                write(path, seed, known)
        index += 1


def write(path: Path, seed: int, known: Mapping[int, Any]) -> None:
    """Writes the results; the file is never half written."""
    data = {
        "seed": seed,
        "versions": versions(),
        "commits": sorted({record["commit"] for record in known.values()}),
        "result": summary(list(known.values())),
        "cases": [known[index] for index in sorted(known)],
    }
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(data, indent=1) + "\n")
    unfinished.replace(path)


def read(path: Path) -> tuple[int, dict[str, Any], dict[int, Any]]:
    """Returns the seed, all data, and the cases of the file."""
    if not path.exists():
        return 0, {}, {}
    data = json.loads(path.read_text())
    return data["seed"], data, {record["index"]: record for record in data["cases"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--signals", type=int, default=6, help="fresh ones")
    parser.add_argument("--seconds", type=float, default=540, help="for fresh cases")
    parser.add_argument("--seed", type=int, default=1, help="of fresh cases")
    parser.add_argument("--refresh", action="store_true", help="measure all cases")
    parser.add_argument(
        "--anew", action="store_true", help="with --refresh: begin again"
    )
    options = parser.parse_args()
    seed, data, known = read(FILE)
    if options.refresh:
        known = {} if options.anew else known
        run_cases(seed, known, STORED_CASES, float("inf"), FILE)
        print(json.dumps(summary(list(known.values()))))
        return
    if data:
        print(
            f"stored: {data['result']['signals']} signals, seed {seed}, commits "
            f"{', '.join(data['commits'])}, "
            f"{', '.join(f'{n} {v}' for n, v in data['versions'].items())}\n"
            f"      {json.dumps(data['result'])}"
        )
    fresh: dict[int, Any] = {}
    stop_at = time.monotonic() + options.seconds
    run_cases(options.seed, fresh, options.signals, stop_at, None)
    total = summary([*known.values(), *fresh.values()])
    stored = data["result"]["signals"] if data else 0
    print(json.dumps({**total, "kept": stored, "fresh": total["signals"] - stored}))


if __name__ == "__main__":
    main()
