"""Finds failed members of an elastic run: silent, late, or blocking a step.

``lease`` measures silence. ``member_failures.lose`` handles a lost member, and
``member_failures.exited`` the end of a process.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from whalejax.membership import generations, member_failures
from whalejax.membership.elastic_run import ElasticRun, MemberRecord
from whalejax.membership.history import record
from whalejax.membership.lease import shifted
from whalejax.membership.phases import COMPUTING
from whalejax.membership.restart_policy import Failure


_SUSPECT_SECONDS: Final = 1.0
"""Seconds from the report of a broken link to the reaction. Meanwhile the end of a
member may be reported as its cause."""


def give_up_overdue(run: ElasticRun, now: float) -> None:
    """Gives up every member that is silent or past a deadline.

    Args:
        run: Run to change.
        now: The time, in seconds.
    """
    stood = run.lease.turn(now)
    if stood:
        _forgive(run, now, stood)
    if run.phase != "ending":  # While a run ends, the loop ends late processes.
        silent = run.lease.overdue(now)
        for member in [*run.members.values()]:
            why = _overdue(run, now, member, silent.get(member.name))
            if why and run.over is None:
                member_failures.lose(run, now, member, why)
    if not run.restarts:  # Processes with collectives monitor their steps themselves.
        check_step(run, now)


def _forgive(run: ElasticRun, now: float, seconds: float) -> None:
    for member in run.present_members():
        member.moved_at = shifted(member.moved_at, seconds, now)
        member.since = shifted(member.since, seconds, now)
    run.pace.at = min(run.pace.at + seconds, now)
    run.asked_at = min(run.asked_at + seconds, now)
    if run.short_since is not None:
        run.short_since = min(run.short_since + seconds, now)
    if run.suspected_at is not None:
        run.suspected_at = min(run.suspected_at + seconds, now)


def _overdue(
    run: ElasticRun, now: float, member: MemberRecord, silent: float | None
) -> str:
    settings = run.settings
    match member.status:
        case "gone":
            return ""
        case "starting":
            waited = now - member.since
            if member.slot is not None and waited > settings.start_seconds:
                return f"it said nothing in {waited:.0f} s after its start"
            return ""
        case "registered" if now - member.since > settings.compile_seconds:
            return f"it was not ready for steps after {now - member.since:.0f} s"
    if silent is not None:
        return f"it was silent for {silent:.1f} s"
    released = member.released_at
    if released is not None and now - released > settings.finish_seconds:
        return f"it did not end in {now - released:.0f} s after it was let go"
    return ""


def check_step(run: ElasticRun, now: float) -> None:
    """Gives up members that block a step; reconnects all if the cause is unknown."""
    at = run.suspected_at
    if at is not None and run.phase == "running" and now - at > _SUSPECT_SECONDS:
        _connect_anew(run, now)
    if run.phase != "running":
        return
    limit = run.pace.limit()
    there = [m for m in run.taking_part() if m.status == "active"]
    limits = [run.limit(member, limit) for member in there]
    for member, own in zip(there, limits, strict=True):
        if own is not None and now - member.moved_at > own:
            step = member.phase in (COMPUTING, "")
            what = "in a step" if step else f"({member.phase})"
            member_failures.lose(
                run, now, member, f"it did not move on {what} for {own:.0f} s"
            )
    moved_at = max([run.pace.at, *(m.moved_at for m in there)])
    if there and now - moved_at > limit and not any(limits):
        record(run, now, "stuck", seconds=limit, members=list(run.active))
        why, since = "waited for each other", run.pace.at
        run.failures.count(Failure(at=now, since=since, name="all members", why=why))
        member_failures.check_budget(run, now)
        generations.change(run, now, -1)


def _connect_anew(run: ElasticRun, now: float) -> None:
    """Handles broken links between members that all reach the supervisor.

    At first, members connect again. If links then break again, the member with most of
    these links is given up. Among several, it is the member with the oldest state.
    """
    there = {m.name: m for m in run.taking_part()}
    links = {link for link in run.broken_links if link <= there.keys()}
    if any(not there[name].connected for link in links for name in link):
        run.suspected_at = now  # A member reconnects, or its lease ends.
        return
    run.suspected_at = None
    again = links & run.reconnected_links
    run.reconnected_links |= links
    if again:
        ends = Counter(name for link in again for name in link)
        order = [*there]
        worst = max(ends, key=lambda n: (ends[n], -there[n].step, order.index(n)))
        member_failures.lose(run, now, there[worst], "other members cannot reach it")
    generations.change(run, now, -1)
