"""The commands of docs/hosts/jobs.md, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from live_jobs import Serving, environment


pytestmark = pytest.mark.relaxed_promotion

PAGE = Path(__file__).resolve().parents[3] / "docs" / "hosts" / "jobs.md"


def block(language: str, beginning: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return next(text for text in found if text.startswith(beginning))


@pytest.mark.full
def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block("python", "# train.py"))
    program = tmp_path / "bin" / "whalejax"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m whalejax "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    serving = Serving(tmp_path, start=False)
    try:
        with (
            (tmp_path / "out").open("w") as printed,
            (tmp_path / "serve.log").open("w") as log,
        ):
            done = subprocess.run(
                ["bash", "-ec", block("bash", "whalejax jobs serve")],
                cwd=tmp_path,
                env={**environment(), "PATH": path},
                stdout=printed,
                stderr=log,
                timeout=500,
                check=False,
            )
        out = (tmp_path / "out").read_text()
        said = (tmp_path / "serve.log").read_text()
        assert done.returncode == 0, out + said
        assert "listening at jobs/socket, which its user alone can open" in said
        assert "first is added, and " in out and "urgent is added, and " in out
        assert re.search(r"^first +\w+ ", out, re.MULTILINE), out
        assert re.search(r"\d of 4 devices held on 4×CPU", out)
        assert "first writes a checkpoint after a step and pauses" in out
        assert "first is cancelled" in out
        assert serving.until(lambda: serving.shown()["urgent"].status == "complete")
        assert serving.until(lambda: serving.shown()["first"].status == "cancelled")
    finally:
        serving.end(["first", "urgent"])
