"""One model over all processes of a generation, which start again when they change.

Its shards lie on the devices of several processes, which meet by the platform's
collectives: one that is lost ends the generation for all. The supervisor starts them
again, as many as there are, and they plan anew. Where it asks them to stop, because
others came or one is to leave, they do so together behind a step, with a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jax

from whalejax.distributed.launch_env import KEY_FILE
from whalejax.elastic.init_distributed import init_distributed
from whalejax.elastic.member import Training, check_shared
from whalejax.elastic.script_placement import await_placement, connection
from whalejax.elastic.shard_copies.copy_schedule import ShardCopyManager
from whalejax.elastic.sharded_programs import SpreadPrograms
from whalejax.elastic.supervisor_client import Control, on_notice
from whalejax.lowering.train_state import TrainState
from whalejax.membership.elastic_run import AT_STEPS, MODE
from whalejax.membership.phases import BETWEEN, COMPILING, RESTORING, SAVING, WAITING
from whalejax.meshes.errors import WhaleError, warn
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.runtime.checkpoint_files import fail_together, told_by_all
from whalejax.runtime.resume import agreed_checkpoints, checkpoints
from whalejax.wire.run_messages import (
    Committed,
    CompiledAhead,
    Leaving,
    NotCopied,
    NotSaved,
    Prepare,
    Prepared,
    Recovered,
    Report,
    RunEnded,
    Saved,
    Stop,
    ToMember,
    Unfit,
)


_TERMINATED_STATUS: Final = 143
_KEEP_SECONDS: Final = 300.0
_STOPS: Final = "stops"
_COPIES: Final = "copies"
_BUSY: Final = "busy"
_FLUSH_SECONDS: Final = 5.0
_MOST_WORDS: Final = 2000
_NICE: Final = 10
"""Of the thread that plans and compiles ahead, as ``nice`` counts."""

Steps = Iterator[tuple[TrainState, dict[str, Any]]]


class SpreadMember:
    """A process of a model that lies on several."""

    def __init__(
        self,
        programs: Callable[[], SpreadPrograms],
        training: Training,
        facts: dict[str, str],
        *,
        supervised: bool,
    ) -> None:
        """Prepares the member; joins nothing yet.

        Args:
            programs: Plans and traces, once the devices of all are known.
            training: Extent of the training, and its folder.
            facts: Facts that all members must share, compared before anything is
                planned.
            supervised: A supervisor says who takes part.
        """
        self._make, self._training, self._facts = programs, training, facts
        self._supervised = supervised
        self._control: Control | None = None
        self._copying: ShardCopyManager | None = None
        self._programs: SpreadPrograms
        self._changed = threading.Condition()
        self._asked = -1
        self._leaves = self._told_leaving = self._stopped = False
        self._over = False
        self._times: list[float] = []
        self._status: int | None = None

    def run(self) -> Steps:
        """The states and metrics of steps, from the one where this process began.

        Raises:
            WhaleError: There is no plan, or the run cannot go on.
            SystemExit: It was asked to end.
        """
        self._join()
        with on_notice(self._leave) if self._supervised else contextlib.nullcontext():
            self._phase(COMPILING)
            self._plan()
            self._phase(RESTORING)
            state = self._restore_or_init()
            done = int(state.step)
            self._times.append(time.monotonic())
            try:
                yield from self._steps(state, done)
            finally:
                self._over = True
                if self._copying is not None:
                    self._copying.close()

    def _steps(self, state: TrainState, done: int) -> Steps:
        control = self._control
        while done < self._training.steps:
            if control is not None:
                control.step = done
                self._phase(WAITING)  # Steps are between the processes.
                self._agree(state, done)
            began = time.monotonic()
            state, metrics = self._programs.step(
                state, self._programs.batch(done, state.samples)
            )
            loss = float(metrics["loss"])
            done += 1
            if self._copying is not None:
                self._copying.took(time.monotonic() - began)
            self._committed(done, loss)
            self._look_ahead(done)
            if done % self._training.save_every == 0 or done == self._training.steps:
                self._save(state, done)
            self._phase(BETWEEN)
            yield (
                state,
                {
                    **metrics,
                    "generation": 0 if control is None else control.generation,
                    "goodput": 1.0 if control is None else control.goodput,
                },
            )
        self._phase(WAITING)

    # Beginning.

    def _join(self) -> None:
        if not self._supervised:
            return
        if jax.distributed.is_initialized():
            raise WhaleError(
                "wh.train_elastic joins the processes itself, by collectives: "
                "wh.init_distributed, or jax.distributed.initialize, was called "
                "before. Leave that out"
            )
        training = self._training
        told = {
            "steps": training.steps,
            "save": str(training.save.absolute()) if training.save else "",
            "facts": {**self._facts, MODE: AT_STEPS},
        }
        place = await_placement(told=told, hears=self._hears)
        assert place is not None
        check_shared(training.save)
        self._control = connection()
        init_distributed(*place)

    def _plan(self) -> None:
        try:
            self._programs = self._make()
        except PlanError as error:
            if self._control is None:
                raise
            why = str(error)[:_MOST_WORDS]
            print(f"whalejax: {why}", file=sys.stderr, flush=True)
            self._control.post(Unfit(count=jax.process_count(), why=why))
            while True:  # The supervisor ends it, and starts as many as there fit.
                self._wait()

    def _restore_or_init(self) -> TrainState:
        """The newest state that there is; where it was found is told."""
        save, control = self._training.save, self._control
        if control is None or self._training.copy_every == 0:
            return self._programs.restore_or_init(save, self._post_first)
        self._copying = ShardCopyManager(
            self._programs.step,
            Path(os.environ[KEY_FILE]),
            control.generation,
            every=self._training.copy_every,
            mtbf=self._training.mtbf,
            tell=self._not_copied,
        )
        paths = agreed_checkpoints(save) if save is not None else []
        saved = int(paths[0].name.removeprefix("step_")) if paths else 0
        state = self._copying.newest(saved)
        if state is not None:
            step = int(state.step)
            source = f"copies in memory, of step {step}"
            self._post_first(Recovered(step=step, source=source))
            return state
        return self._programs.restore_or_init(save, self._post_first)

    def _not_copied(self, done: int, why: str) -> None:
        self._post_first(NotCopied(step=done, why=why[:_MOST_WORDS]))

    def _look_ahead(self, done: int) -> None:
        """Prepares for other numbers of processes, once it is known what steps take."""
        if self._control is None or jax.process_index() != 0 or len(self._times) > 2:
            return
        self._times.append(time.monotonic())
        if len(self._times) > 2:
            # A process that ends waits for what it compiles, or it may crash: so not
            # where the run is over before. The first step was compiled, too.
            began, first, second = self._times
            left = (self._training.steps - done) * (second - first)
            work = functools.partial(self._prepare_ahead, left > 2 * (first - began))
            threading.Thread(target=work).start()

    def _prepare_ahead(self, compiles: bool) -> None:
        """Plans for the next numbers of processes, beside the steps, and compiles for
        the next smaller one."""
        with contextlib.suppress(OSError):  # The steps come first.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        here = jax.process_count()
        self._planned_for(here + 1)
        for count in range(here - 1, 0, -1):
            plan = self._planned_for(count)
            if plan is not None:
                if compiles:
                    self._compile_ahead(count, plan)
                break

    def _planned_for(self, count: int) -> Plan | None:
        """A plan for so many processes; the supervisor is told where there is none."""
        assert self._control is not None
        if self._over:
            return None
        try:
            return self._programs.plan_for(count)
        except PlanError as error:
            why = str(error)[:_MOST_WORDS]
            self._control.post(Unfit(count=count, why=why))
        except Exception as error:
            # Nothing depends on it: the processes plan again when they begin.
            warn(f"no plan was made ahead for {count} processes: {error}")
        return None

    def _compile_ahead(self, count: int, plan: Plan) -> None:
        assert self._control is not None
        if self._over or not getattr(jax.config, "jax_compilation_cache_dir", None):
            return
        began = time.monotonic()
        try:
            if self._programs.compile_for(plan):
                seconds = time.monotonic() - began
                self._control.post(CompiledAhead(count=count, seconds=seconds))
        except Exception as error:  # They compile when they begin.
            warn(f"nothing was compiled ahead for {count} processes: {error}")

    def _committed(self, done: int, loss: float) -> None:
        if self._control is None:
            return
        self._control.step = done
        if jax.process_index() == 0:
            committed = Committed(
                generation=self._control.generation,
                step=done,
                loss=loss,
                seconds=0.0,
                parts={self._control.name: [(0, self._programs.count)]},
            )
            self._control.post(committed)

    # Stopping.

    def _hears(self, said: ToMember) -> bool:
        """Handles the supervisor's messages, in a thread of its own."""
        with self._changed:
            match said:
                case Prepare(generation=generation):
                    self._asked = generation
                case Stop(why=why, well=well) | RunEnded(why=why, well=well):
                    self._status = _TERMINATED_STATUS if well else 1
                    if not self._stopped:
                        text = f"whalejax: {why}\n"
                        with contextlib.suppress(OSError):
                            os.write(2, text.encode())
                        # Its steps may wait for a process that is gone.
                        os._exit(self._status)
            self._changed.notify_all()
        return True

    def _agree(self, state: TrainState, done: int) -> None:
        """Stops or copies, where a process was asked to or the first finds it due."""
        assert self._control is not None
        if self._leaves and not self._told_leaving:
            self._told_leaving = True
            self._control.post(Leaving(why="it was asked to end (SIGTERM)"))
        due = self._copying is not None and self._copying.is_due(done)
        busy = self._copying is not None and self._copying.busy
        mine = _COPIES if due else _BUSY if busy else ""
        if self._asked >= 0 or self._leaves:
            mine = _STOPS
        said = told_by_all(mine, "whether to stop")
        if _STOPS in said:
            self._stop(state, done)
        elif said[0] == _COPIES and _BUSY not in said and self._copying is not None:
            self._copying.copy(state, done)

    def _stop(self, state: TrainState, done: int) -> None:
        """Save, say so, and wait to be ended or let go."""
        assert self._control is not None
        if done and self._training.save is not None:
            self._save(state, done)
        if done and self._copying is not None:
            self._copying.copy(state, done)
            self._copying.wait()
        told = -1
        with self._changed:
            self._stopped = True
        while self._status is None:
            asked = self._asked
            if asked > told:
                told = asked
                self._control.post(Prepared(generation=asked, step=done, held=[]))
            self._wait()
        self._control.flush(_FLUSH_SECONDS)
        raise SystemExit(self._status)

    def _wait(self) -> None:
        """Waits for a message of the supervisor, for a while.

        Raises:
            WhaleError: It is gone, so that it says nothing any more.
        """
        assert self._control is not None
        with self._changed:
            self._changed.wait(1.0)
        self._control.check()

    def _leave(self) -> None:
        """All stop behind a step, and none is lost."""
        self._leaves = True

    # Saving.

    def _save(self, state: TrainState, done: int) -> None:
        """Writes a checkpoint; one that cannot be written ends nothing."""
        folder = self._training.save
        if folder is None:
            return
        self._phase(SAVING)
        path = folder / f"step_{done:06d}"
        if any(told_by_all("there" if path.exists() else "", "checkpoints there")):
            return
        try:
            self._programs.save(path, state, lambda: self._approve(done))
        except WhaleError as error:
            self._not_saved(done, str(error))
            return
        self._post_first(Saved(step=done, path=str(path)))
        if jax.process_index() == 0:
            try:
                remove_old(folder, self._training.keep)
            except OSError as error:
                warn(f"old checkpoints stay in {folder}: {error}")

    def _not_saved(self, done: int, why: str) -> None:
        self._post_first(NotSaved(step=done, why=why[:_MOST_WORDS]))
        if self._control is None:
            warn(f"no checkpoint was written after step {done}: {why}")

    def _approve(self, done: int) -> None:
        """A process that was given up puts no checkpoint in another's place."""
        error = ""
        if self._control is not None and jax.process_index() == 0:
            folder = self._training.save
            assert folder is not None
            if not self._control.may_keep(done, folder, seconds=_KEEP_SECONDS):
                error = "the supervisor gave this process up, or is gone"
        fail_together(error, f"step {done} kept")

    def _post_first(self, report: Report) -> None:
        """Tells the supervisor what holds of all, once."""
        if self._control is not None and jax.process_index() == 0:
            self._control.post(report)

    def _phase(self, phase: str) -> None:
        if self._control is not None:
            self._control.phase = phase


def remove_old(folder: Path, keep: int) -> None:
    """Removes checkpoints but for the newest ones."""
    for path in checkpoints(folder)[keep:]:
        # Renamed first: half a checkpoint must never bear a checkpoint's name.
        gone = path.with_name(f"{path.name}.deleted")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
