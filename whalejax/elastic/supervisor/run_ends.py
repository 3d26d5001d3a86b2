"""The end of a run: who is told what, and how the end of each process is meant."""

from __future__ import annotations

from whalejax.elastic.phases import BETWEEN, SAVING
from whalejax.elastic.supervisor.endings import STATUS, Ending, exit_text
from whalejax.elastic.supervisor.history import Over
from whalejax.elastic.supervisor.member_record import End, Kill, Member
from whalejax.elastic.supervisor.run_state import RunState


_TERMINATED = (143, -15)
_ERRORS = (Ending.FAILED, Ending.REFUSED, Ending.LOST)


class RunEnds(RunState):
    """A run that can end, in one of the ways of ``Ending``."""

    def _end(self, now: float, how: Ending, text: str, *, saves: bool = True) -> None:
        """End the run.

        Args:
            now: the time.
            how: it ends.
            text: for a user.
            saves: a member writes its state, unless all steps are done.
        """
        if self.phase == "ending":
            return
        saver = self._saver() if saves and how is not Ending.COMPLETE else ""
        self.phase = "ending"
        self.over = Over(how=how, text=text, saver=saver)
        self._record("ending", how=how, status=STATUS[how], why=text, saver=saver)
        for member in self._there():
            self._dismiss(now, member)
        self._end_again()

    def _end_again(self) -> None:
        """Tell the loop of the end; also where an earlier supervisor came to it."""
        assert self.over is not None
        self._effects.append(End(how=self.over.how, text=self.over.text))

    def _saver(self) -> str:
        """Who has the newest state, and can write it."""
        there = [m for m in self._there() if m.status in ("active", "finished")]
        newest = max((m.step for m in there), default=-1)
        found = [m for m in there if m.step == newest and newest >= 0]
        return min(found, key=lambda m: not m.connected).name if found else ""

    def saves_last(self, now: float, name: str) -> bool:
        """Whether a member is about to write the last checkpoint, within its time.

        Args:
            now: the time.
            name: of the member.
        """
        member = self.members.get(name)
        if self.over is None or member is None or name != self.over.saver:
            return False
        if now - member.heard_at > self.settings.lease_seconds:
            return False
        limit = self._limit(member) if member.phase in (BETWEEN, SAVING) else None
        return limit is not None and now - member.moved_at <= limit

    def _miss_checkpoint(self, member: Member, status: int | None) -> None:
        """Say so where a member ends that should have written the last checkpoint."""
        if self.over is None or member.name != self.over.saver or self.restarts:
            return
        if self._facts.get("save") and not self._saver_has_told:
            why = f"{member.name} ended {exit_text(status)} before it was written"
            self._record("not_saved", name=member.name, step=member.step, why=why)

    def _dismiss(self, now: float, member: Member) -> None:
        """Tell a member that the run is over; it may be told again."""
        assert self.over is not None
        how = self.over.how
        if member.released_at is None:
            member.released_at = now
        if member.status in ("starting", "registered") and member.pid:
            # It imports or compiles, so that it hears nothing, and has nothing to save.
            member.ends_by_kill = True
            self._effects.append(Kill(name=member.name, pid=member.pid))
        elif member.status not in ("active", "finished", "left"):
            self._say(member.name, "over", why="the run is over", well=True)
        elif how is Ending.COMPLETE:
            self._say(member.name, "done")
        else:
            saves = member.name == self.over.saver
            well = how in (Ending.DRAINED, Ending.INTERRUPTED)
            self._say(member.name, "stop", why=self.over.text, saves=saves, well=well)

    def _how_ended(self, member: Member, status: int | None) -> Ending | None:
        """How the end of a process is meant; None where it should not have come.

        Args:
            member: whose it is.
            status: of the process; None where nobody can know.
        """
        if self.over is not None:
            ordered = status in (0, None, *_TERMINATED) or member.ends_by_kill
            if self.over.how is Ending.COMPLETE and ordered:
                return Ending.COMPLETE
            # Those that were told why the run fails say so, and end with an error.
            fails = self.over.how in _ERRORS and status == 1
            return Ending.DRAINED if ordered or fails else None
        if self.restarts and member.status in ("active", "finished"):
            done = status == 0 or (status is None and member.status == "finished")
            return Ending.COMPLETE if done else None
        if status in _TERMINATED and member.status in ("starting", "registered"):
            return Ending.DRAINED  # It was told to leave, and could not say so.
        if status not in (0, None):
            return None
        if member.leaving:
            return Ending.DRAINED
        return Ending.COMPLETE if member.status in ("finished", "left") else None
