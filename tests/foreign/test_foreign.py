"""Public models, unmodified: planned, compiled on eight devices, equal to one device.

The extra ``foreign`` brings their packages. Of each family that is compiled in a few
seconds and is like no other one runs by default, all with ``-m ""``.
"""

from __future__ import annotations

import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.foreign.harness import MODELS, check


MODULES = ("flax_models", "huggingface", "others")
PACKAGES = ("transformers", "diffusers", "haiku", "equinox", "jraph")
pytestmark = pytest.mark.skipif(
    any(find_spec(package) is None for package in PACKAGES),
    reason="needs the extra foreign",
)


def _declared() -> dict[str, str]:
    """The family of each model, read without the packages, which import for long."""
    texts = [Path(__file__).with_name(f"{name}.py").read_text() for name in MODULES]
    found = re.findall(r'^@foreign\("(.+)"\)\ndef (\w+)', "\n".join(texts), re.M)
    return {name: family for family, name in found}


NAMES = _declared()
FIRST = {family: name for name, family in reversed(NAMES.items())}
LONG = ("diffusion", "state-space", "ode")
ALIKE = ("flax-linen", "flax-nnx", "vq-vae")
"""As models of this package and of Hugging Face are, and Haiku's."""

DEFAULT = [name for family, name in FIRST.items() if family not in (*LONG, *ALIKE)]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Fills ``MODELS``."""
    for name in MODULES:
        importlib.import_module(f"tests.foreign.{name}")


def test_there_are_enough() -> None:
    assert {one.name: one.family for one in MODELS.values()} == NAMES
    assert len(NAMES) >= 30
    assert len(FIRST) >= 9


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            id=f"{family}-{name}",
            marks=[] if name in DEFAULT else [pytest.mark.full],
        )
        for name, family in NAMES.items()
    ],
)
def test_two_steps_equal_those_of_one_device(name: str) -> None:
    check(MODELS[name].make())
