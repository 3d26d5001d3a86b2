"""Planning pauses the garbage collector, and leaves it as it was."""

from __future__ import annotations

import gc

import pytest

from whalejax.api.plan_request import collections_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_before(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ZeroDivisionError), collections_paused():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
