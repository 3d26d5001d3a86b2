"""Public models, unmodified: planned, compiled on eight devices, equal to one device.

The extra ``foreign`` brings their packages. Of each family that is compiled in a few
seconds one runs by default, all with ``-m ""``.
"""

from __future__ import annotations

import pytest


for _package in ("transformers", "diffusers", "haiku", "equinox", "jraph"):
    pytest.importorskip(_package, reason="needs the extra foreign")

from tests.foreign import flax_models, huggingface, others  # noqa: E402, F401
from tests.foreign.harness import MODELS, Foreign, check  # noqa: E402


FIRST = {one.family: one.name for one in reversed(MODELS.values())}
LONG = ("diffusion", "state-space", "ode")
DEFAULT = [name for family, name in FIRST.items() if family not in LONG]


def _cases() -> list[object]:
    return [
        pytest.param(
            one,
            id=f"{one.family}-{one.name}",
            marks=[] if one.name in DEFAULT else [pytest.mark.full],
        )
        for one in MODELS.values()
    ]


def test_there_are_enough() -> None:
    assert len(MODELS) >= 30
    assert len(FIRST) >= 9


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("one", _cases())
def test_two_steps_equal_those_of_one_device(one: Foreign) -> None:
    check(one.make())
