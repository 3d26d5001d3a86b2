"""Residuals of loops are computed when they are first read, and once."""

from __future__ import annotations

import pickle

from whalejax.planner.model.graph import LoopResidual, LoopResiduals


def test_they_are_computed_at_the_first_use_and_once() -> None:
    calls = []
    one = LoopResidual(tensor=3, nbytes=64, trip=2)

    def compute() -> tuple[LoopResidual, ...]:
        calls.append(1)
        return (one,)

    residuals = LoopResiduals(compute)
    assert not calls
    assert residuals and [*residuals] == [one] and residuals[0] == one
    assert residuals == (one,) and (one,) == residuals and residuals != ()
    assert residuals != LoopResiduals(lambda: ())
    assert hash(residuals) == hash((one,))
    assert pickle.loads(pickle.dumps(residuals)) == (one,)
    assert len(calls) == 1
