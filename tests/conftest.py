"""What every test stands on: eight virtual CPU devices and strict promotion.

The environment is set while pytest starts, before any test module imports JAX, and the
subprocesses that tests start inherit it. Whatever the caller has set already is kept.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import flags


ROOT = Path(__file__).resolve().parents[1]

os.environ["XLA_FLAGS"] = flags.added(os.environ.get("XLA_FLAGS", ""))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests start many processes, which would each compile every module of ours anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Compiled programs are kept between runs; JAX's key holds its version and all options.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
# Displays are tested as somebody sees them who watches, without wishes of their own.
for name in ("CI", "COLUMNS", "NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(name, None)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


# Traces make objects by the hundred thousand, and hardly any of them in circles.
gc.set_threshold(50_000, 20, 20)

# A busy machine is no reason to fail.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.register_profile("brief", deadline=None, max_examples=30)
hypothesis.settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where tests marked ``full`` are left out."""
    if "not full" in str(config.getoption("markexpr")):
        hypothesis.settings.load_profile("brief")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--cpu``."""
    parser.addoption(
        "--cpu",
        metavar="FILE",
        type=Path,
        help="append a line for each test: its CPU seconds, ended processes included",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Writes down what a test takes, however busy the machine is."""
    before = sum(os.times()[:4])
    result = yield
    path = item.config.getoption("cpu")
    if path is not None:
        line = f"{sum(os.times()[:4]) - before:8.2f} {item.nodeid}\n"
        with path.open("a") as lines:
            lines.write(line)
    return result


@pytest.fixture(autouse=True)
def strict_promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Makes silent rank and dtype promotion an error.

    Mark a test ``relaxed_promotion`` where code that is not ours promotes. JAX is not
    imported for the sake of tests that do without it.
    """
    with contextlib.ExitStack() as stack:
        relaxed = request.node.get_closest_marker("relaxed_promotion") is not None
        if "jax" in sys.modules and not relaxed:
            import jax

            stack.enter_context(jax.numpy_rank_promotion("raise"))
            stack.enter_context(jax.numpy_dtype_promotion("strict"))
        yield


LONGEST = (
    "test_equality",
    "test_drawn_faults",
    "test_docs",
    "test_estimates",
    "test_collectives",
    "test_agents",
    "test_verification",
    "test_reported",
    "test_foreign",
    "test_imports",
    "test_cli",
    "test_processes",
    "test_runs",
    "test_lost_processes",
    "test_ring",
    "test_pipes",
    "test_joining",
    "test_agreement",
    "test_launching_failures",
)
"""Files that take longest. They come first, so that no worker is left with one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring long files to the front, and leave out cases of ``sampled`` tests.

    ``sampled(n)`` keeps n cases of a parametrised test, spread over those that are not
    marked ``full`` already; the others are marked so.
    """
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "sampled" in marks and "full" not in marks:
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in groups.values():
        mark = group[0].get_closest_marker("sampled")
        assert mark is not None
        (count,) = mark.args
        kept = {(2 * i + 1) * len(group) // (2 * count) for i in range(count)}
        for place, item in enumerate(group):
            if place not in kept:
                item.add_marker(pytest.mark.full)
