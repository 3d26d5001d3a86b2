"""Who is overdue: one rule for members, agents, peers, trainers and beats."""

from __future__ import annotations

import pytest

from whalejax.membership.lease import Lease
from whalejax.swarm_runtime.registry import Registry


def test_the_silent_are_overdue_and_who_is_heard_again_is_not() -> None:
    lease: Lease[str] = Lease(10.0)
    for name in ("a", "b", "c"):
        lease.renew(name, 0.0)
    lease.renew("b", 5.0)
    lease.forget("c")
    assert lease.overdue(10.0) == {}
    assert lease.overdue(12.0) == {"a": 12.0}
    assert lease.overdue(12.0, 4.0) == {"a": 12.0, "b": 7.0}
    assert lease.silent("b", 12.0) == 7.0


def test_who_is_expected_has_until_then() -> None:
    lease: Lease[str] = Lease(10.0)
    lease.expect("a", 20.0)
    assert lease.overdue(20.0) == {} and lease.overdue(20.5) == {"a": 10.5}


@pytest.mark.parametrize("gap", [1.5, 30.0])
def test_a_standstill_is_forgiven_once_and_never_twice_in_a_row(gap: float) -> None:
    lease: Lease[str] = Lease(gap / 2, longest_turn=1.0)
    lease.turn(0.0)
    lease.renew("a", 0.0)
    assert lease.turn(gap) == gap and lease.overdue(gap) == {}
    assert lease.turn(2 * gap) == 0.0 and lease.overdue(2 * gap) == {"a": gap}


def test_what_was_heard_in_a_standstill_is_of_now_at_most() -> None:
    lease: Lease[str] = Lease(10.0, longest_turn=1.0)
    lease.turn(0.0)
    lease.renew("a", 25.0)
    lease.expect("b", 50.0)
    lease.turn(30.0)
    assert lease.heard_at == {"a": 30.0, "b": 40.0}


def test_peers_are_kept_where_their_registry_was_stopped() -> None:
    registry = Registry({}, stages=1, lease_seconds=10.0, longest_turn=5.0)
    registry.join("p", ("127.0.0.1", 1), 0, 0.0)
    assert [m.name for m in registry.members(4.0)] == ["p"]
    assert [m.name for m in registry.members(64.0)] == ["p"]
    assert registry.members(71.0) == []
