"""The checking process: ``python -m whalejax.equality.check_worker``.

The process has its own virtual CPU devices and memory limit, so that it cannot crash
the user's program. It reads a pickled ``CheckRequest`` from a folder that only this
user can read, and answers with JSON.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import warnings
from typing import Any

from whalejax.equality.check_request import CheckRequest
from whalejax.verification.compile_worker import serve


def main(request_path: str, answer_path: str, limit_seconds: str) -> None:
    """Reads a request from a file, runs it, and writes the answer."""
    serve(request_path, answer_path, limit_seconds, _answer)


def _answer(request: CheckRequest, phase: list[str]) -> dict[str, Any]:
    import jax

    from whalejax.equality.run_checks import run_checks

    _end_at(request.limit_bytes)
    if request.wide:
        jax.config.update("jax_enable_x64", True)
    phase.append("checking the plan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # planning already showed them
        runs, failures = run_checks(request)
    return {
        "runs": [dataclasses.asdict(run) for run in runs],
        "failures": failures,
    }


def _end_at(limit_bytes: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096

    def watch() -> None:
        while True:
            used = _resident_pages() * page
            if used > limit_bytes:
                print(
                    f"the check took {used / 1e9:.1f} GB of memory; the limit is "
                    f"{limit_bytes / 1e9:.1f} GB (memory_bytes= of wh.check)",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()


def _resident_pages() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


if __name__ == "__main__":
    main(*sys.argv[1:4])
