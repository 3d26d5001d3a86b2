"""The commands that compare: plans of several clusters, and plan files."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import whalejax as wh
from tests.planner import pages
from tests.whalejax.runs import ROOT
from whalejax.cli import main
from whalejax.planner.plan.plan import PLAN_VERSION


# Adam promotes its count.
pytestmark = pytest.mark.relaxed_promotion

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a job."""
    (tmp_path / "jobs.py").write_text(
        "from tests.whalejax import runs\ndef make():\n    return runs.make_job()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def refused(words: list[str] | tuple[str, ...], capsys: Captured) -> str:
    """The message of a command that must fail as a user error."""
    assert main.main(words) == 2
    return capsys.readouterr().err


# Searching.


SEARCH = ("search", "jobs.py:make", "--on", "h100:8", "--on", "v5p:2x2x1")


def test_search_ranks_clusters_and_prices_them(here: Path, capsys: Captured) -> None:
    assert main.main([*SEARCH, "--batch", "64", "--price", "h100=2.5"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["cluster", "devices"] and "price a step" in head
    rows = [row for row in rows if not row.startswith(" ")]
    assert rows.pop().startswith("prices  no price of v5p is listed: --price v5p=…")
    assert sorted(row.split()[1] for row in rows) == ["h100:8", "v5p:2x2x1"]
    for row in rows:
        assert row.rstrip().endswith("–") == ("v5p" in row)


def test_search_prints_json(here: Path, capsys: Captured) -> None:
    assert main.main([*SEARCH, "--each", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    names = [one["cluster"] for one in data["plans"]]
    assert set(names) == {"h100:8", "v5p:2x2x1"} and len(names) > 2
    assert wh.Plan.from_document(data["plans"][0]["plan"]).num_devices in (4, 8)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["search", "gpt"], "--on is missing; expected --on h100:8, once for each"),
        ([*SEARCH, "--price", "h100"], "--price: 1 problem"),
        ([*SEARCH, "--price", "h100=2", "--price", "h100=3"], "h100 is given twice"),
        ([*SEARCH, "--price", "h200=2"], "prices has 'h200', and the clusters have"),
        ([*SEARCH, "--batch", "0"], "--batch is 0; expected 1 or more"),
        ([*SEARCH, "--each", "0"], "--each is 0; expected 1 or more"),
    ],
)
def test_searches_that_cannot_be(
    here: Path, capsys: Captured, words: list[str], expected: str
) -> None:
    assert expected in refused(words, capsys)


# Showing and comparing plan files.


@pytest.fixture
def two_plans(tmp_path: Path) -> tuple[str, str]:
    """Files of two plans of one model."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    pages.spmd().save(paths[0])
    pages.other().save(paths[1])
    return str(paths[0]), str(paths[1])


def test_diff_prints_only_what_changes(
    two_plans: tuple[str, str], capsys: Captured
) -> None:
    assert main.main(["diff", *two_plans]) == 0
    text = capsys.readouterr().out
    assert "remat   dots → full" in text and "cluster" not in text
    assert main.main(["diff", *two_plans, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(
        json.dumps(pages.spmd().diff(pages.other()).document())
    )
    assert main.main(["diff", two_plans[0], two_plans[0]]) == 0
    assert capsys.readouterr().out == "the plans are the same\n"


def test_why_prints_json(two_plans: tuple[str, str], capsys: Captured) -> None:
    assert main.main(["why", two_plans[0], "head.kernel", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["parameter"]["shape"] == [4096, 32_000]
    assert data["why"] == pages.spmd().why("head.kernel").splitlines()
    assert len(data["weighed"]) == 2


def test_describe_is_a_command(two_plans: tuple[str, str], capsys: Captured) -> None:
    assert main.main(["show", two_plans[0], "--describe"]) == 0
    assert capsys.readouterr().out.split() == pages.spmd().describe().split()
    assert main.main(["show", two_plans[0], "--describe", "--json"]) != 0
    assert "--describe and --json" in capsys.readouterr().err


def test_a_plan_of_a_newer_version_is_refused(
    two_plans: tuple[str, str], capsys: Captured
) -> None:
    path = Path(two_plans[1])
    data = {**json.loads(path.read_text()), "whalejax_plan": PLAN_VERSION + 1}
    path.write_text(json.dumps({**data, "colour": "red"}))
    for words in (["show", str(path)], ["diff", *two_plans], ["why", str(path), "x"]):
        text = refused(words, capsys)
        assert f"has plan format {PLAN_VERSION + 1}; this WhaleJAX reads" in text
        assert "Upgrade whalejax" in text


@pytest.mark.parametrize("columns", [40, 80, 140])
def test_pipes_are_as_wide_as_columns_says(
    two_plans: tuple[str, str],
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main.main(["show", two_plans[0]]) == 0
    text = capsys.readouterr().out
    assert text == (pages.FOLDER / f"spmd-{columns}.txt").read_text()
    assert main.main(["diff", *two_plans]) == 0
    assert capsys.readouterr().out == (pages.FOLDER / f"diff-{columns}.txt").read_text()


ON_A_TERMINAL = """
import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-m", "whalejax", "show", sys.argv[1]])
found = b""
while True:
    try:
        part = os.read(fd, 65536)
    except OSError:  # the other end is closed
        break
    if not part:
        break
    found += part
sys.stdout.buffer.write(found)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.full
def test_colour_is_for_terminals_that_want_it(two_plans: tuple[str, str]) -> None:
    def shown(code: list[str], **env: str) -> str:
        done = subprocess.run(
            [sys.executable, *code, two_plans[0]],
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **env},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.replace("\r\n", "\n")

    plain = (pages.FOLDER / "spmd-80.txt").read_text()
    term = {"TERM": "xterm-256color"}
    assert shown(["-m", "whalejax", "show"], **term) == plain
    coloured = shown(["-c", ON_A_TERMINAL], **term)
    assert "\x1b[36m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    bare = shown(["-c", ON_A_TERMINAL], **term, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", bare)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("env", [{"COLUMNS": "0"}, {"PYTHONIOENCODING": "ascii"}])
def test_odd_surroundings_leave_a_plan_to_read(
    env: dict[str, str], two_plans: tuple[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "whalejax", "show", two_plans[0]],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and not done.stderr
    assert "Plan " in done.stdout and "predicted" in done.stdout


# Completion.


COMPLETES = """
set -e
eval "$("$PYTHON" -m whalejax completion bash)"
complete -p whalejax | sed 's/.*-F \\([^ ]*\\).*/\\1/' > name
for line in "whalejax dif" "whalejax search gpt --pri" "whalejax swarm jo" \
    "whalejax plan gpt-sm" "whalejax plan gpt --cluster h200" "whalejax jobs ad" \\
    "whalejax launch --kee"; do
    COMP_WORDS=($line); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMP_LINE=$line; COMP_POINT=${#line}; COMPREPLY=()
    "$(cat name)" || true
    echo "${COMPREPLY[@]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", COMPLETES],
        cwd=tmp_path,
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    words = ["diff", "--price", "join", "gpt-small", "h200:8", "add", "--keep"]
    assert done.stdout.split() == words, done.stderr


@pytest.mark.parametrize(
    ("shell", "begins"), [("zsh", "#compdef whalejax"), ("fish", "# ")]
)
def test_other_shells_get_a_script(shell: str, begins: str, capsys: Captured) -> None:
    assert main.main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert text.startswith(begins)
    assert all(word in text for word in ("search", "diff", "describe"))


def test_fish_completes_models_and_clusters(capsys: Captured) -> None:
    """By the program in its script, unescaped as fish reads double quotes."""
    assert main.main(["completion", "fish"]) == 0
    _, _, rest = capsys.readouterr().out.partition('set -l pycode "')
    quoted = re.match(r'(?:[^"\\]|\\.)*', rest, re.DOTALL)
    assert quoted is not None
    code = re.sub(r'\\(["\\$])', r"\1", quoted[0])
    for words, expected in (
        (["plan"], "gpt-small"),
        (["plan", "gpt", "--cluster"], "h200:8"),
        (["swarm"], "join"),
        (["swarm", "serve"], "gpt-small"),
        (["swarm", "join"], "gpt-small"),
        (["jobs", "add"], "gpt-small"),
        (["jobs", "serve"], "--cluster"),
        (["export", "plan.json", "--to"], "levanter"),
    ):
        line = ["whalejax", *words]
        done = subprocess.run(
            [sys.executable, "-c", code, *line, str(len(line))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert expected in done.stdout.split(), done.stderr
        assert ("gpt-small" in done.stdout.split()) == (expected == "gpt-small")


def test_an_unknown_shell_is_refused(capsys: Captured) -> None:
    assert "bash" in refused(["completion", "csh"], capsys)


def test_devices_may_be_left_idle_on_purpose(here: Path, capsys: Captured) -> None:
    words = ["plan", "jobs.py:make", "--cluster", "h100:8", "--mesh", "data=3"]
    assert "allow_idle=True (--allow-idle)" in refused(words, capsys)
    assert main.main([*words, "--batch", "12", "--allow-idle"]) == 0
    assert "2 of 8 devices are left idle" in capsys.readouterr().out


# Shares.


def test_shares_are_given_as_words(here: Path, capsys: Captured) -> None:
    plan = ("plan", "jobs.py:make", "--cluster", "cpu:2", "-o", "plan.json")
    assert main.main([*plan, "--shares", "3,1", "--batch", "8"]) == 0
    assert wh.Plan.load("plan.json").shares == (3, 1)
    capsys.readouterr()
    said = refused([*plan, "--shares", "3;1"], capsys)
    assert "--shares is '3;1'; expected even, or the micro-batches of each" in said
    given = ("train", "jobs.py:make", "--plan", "plan.json", "--shares", "even")
    assert "--shares even was given with --plan plan.json" in refused(given, capsys)


# Options of a model.


@pytest.mark.full
def test_a_model_is_trained_with_the_options_of_its_plan(
    here: Path, capsys: Captured
) -> None:
    smaller = ("--set", "layers=1", "--cluster", "cpu:8")
    assert main.main(["plan", "gpt-test", *smaller, "-o", "plan.json"]) == 0
    train = ("train", "gpt-test", "--steps", "1", "--json", "--quiet")
    capsys.readouterr()
    for words in (("--plan", "plan.json"), smaller):
        assert main.main([*train, *words]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])
    other = ("--plan", "plan.json", "--set", "layers=2")
    assert "another model or batch" in refused([*train, *other], capsys)


# Code and text that plan files name.


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """A plan that names a file of code as its model, and what that file would write."""
    written = tmp_path / "written"
    code = tmp_path / "it is; evil.py"
    code.write_text(
        f"open({str(written)!r}, 'w').close()\ndef make():\n    raise OSError\n"
    )
    plan = dataclasses.replace(pages.spmd(), source=(f"{code}:make", "layers=2"))
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", written


def test_code_that_a_plan_names_is_not_run(
    hostile: tuple[Path, Path], capsys: Captured
) -> None:
    path, written = hostile
    text = refused(["verify", str(path)], capsys)
    code = path.parent / "it is; evil.py"
    assert f"is in '{code}:make', which does not run only because" in text
    assert f"give --model '{code}:make' --set layers=2" in text
    for words in (["show"], ["why"], ["diff"]):
        more = {"why": ["head.kernel"], "diff": [str(path)]}.get(words[0], [])
        assert main.main([*words, str(path), *more]) == 0
    assert not written.exists()


def test_code_that_the_user_names_is_run(
    hostile: tuple[Path, Path], capsys: Captured
) -> None:
    path, written = hostile
    model = f"{path.parent / 'it is; evil.py'}:make"
    assert "raised OSError" in refused(["verify", str(path), "--model", model], capsys)
    assert written.exists()


def test_options_that_a_plan_may_not_carry(here: Path, capsys: Captured) -> None:
    words = ["plan", "mlp-test", "--cluster", "h100:8", "--compiler-options"]
    assert "is not among the" in refused([*words, "xla_dump_to=/tmp/x"], capsys)


def test_numbers_of_samples_that_nobody_has(here: Path, capsys: Captured) -> None:
    words = ["plan", "mlp-test", "--cluster", "h100:8"]
    for name in ("--batch", "--micro-batches"):
        text = refused([*words, name, str(10**26)], capsys)
        assert text == (f"whalejax: {name} is {10**26}; expected at most {2**40}\n")
    text = refused([*words, "--batch", str(2**40)], capsys)
    assert "does not fit in the memory of this host" in text
