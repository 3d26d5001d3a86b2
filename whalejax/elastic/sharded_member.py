"""Member of a run whose model is sharded over all processes.

The processes use the platform's collectives, so the loss of one process ends the
generation for all: the supervisor restarts the processes, and they plan again. If a
process joins or leaves, the supervisor asks all processes to stop, and they save their
state after the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import jax

from whalejax.distributed.launch_env import KEY_FILE
from whalejax.elastic.copy_schedule import ShardCopyManager
from whalejax.elastic.init_distributed import init_distributed
from whalejax.elastic.member import Training, check_shared
from whalejax.elastic.script_placement import await_placement, connection
from whalejax.elastic.sharded_programs import SpreadPrograms
from whalejax.elastic.supervisor_client import Control, on_notice
from whalejax.lowering.train_state import TrainState
from whalejax.membership.elastic_run import AT_STEPS, MODE
from whalejax.membership.exit_status import TERMINATED
from whalejax.membership.phases import BETWEEN, COMPILING, RESTORING, SAVING, WAITING
from whalejax.meshes.errors import WhaleError, warn
from whalejax.meshes.units import count_text
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import PlanError
from whalejax.runtime.steps_in_flight import is_divergent
from whalejax.state.async_checkpoints import remove_after_error, remove_old_checkpoints
from whalejax.state.checkpoint_files import fail_together, told_by_all
from whalejax.state.resume import agreed_checkpoints
from whalejax.wire import run_messages as wire


_KEEP_SECONDS: Final = 300.0
_STOPS: Final = "stops"
_LEFT: Final = "left"
_COPIES: Final = "copies"
_BUSY: Final = "busy"
_FLUSH_SECONDS: Final = 5.0
_MOST_WORDS: Final = 2000
_NICE: Final = 10
"""``nice`` value of the thread that plans and compiles for other process counts."""

Steps = Iterator[tuple[TrainState, dict[str, Any]]]


class SpreadMember:
    """A process of a model that is sharded over several processes."""

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
            programs: Function that plans and traces the job, called once all processes
                have joined.
            training: Extent of the training, and its folder.
            facts: Data that must be equal in all members, compared before planning.
            supervised: Whether a supervisor chooses the members.
        """
        self._make, self._training, self._facts = programs, training, facts
        self._supervised = supervised
        self._control: Control | None = None
        self._copying: ShardCopyManager | None = None
        self._programs: SpreadPrograms
        self._changed = threading.Condition()
        self._asked = -1
        self._leaves = self._told_leaving = self._stopped = False
        self._is_divergent = False
        self._newest: tuple[TrainState, int] | None = None
        self._over = self._has_committed = False
        self._times: list[float] = []
        self._status: int | None = None

    def run(self) -> Steps:
        """Yields state and metrics after each step of this process.

        Raises:
            WhaleError: There is no plan, or the run cannot go on.
            SystemExit: The process was asked to end.
        """
        self._join()
        with on_notice(self._leave) if self._supervised else contextlib.nullcontext():
            self._phase(COMPILING)
            self._plan()
            self._phase(RESTORING)
            state = self._restore_or_init()
            done = int(state.step)
            self._tell_placement(done)
            self._times.append(time.monotonic())
            try:
                yield from self._steps(state, done)
            except GeneratorExit:
                self._save_left()
                raise
            finally:
                self._over = True
                if self._copying is not None:
                    self._copying.close()

    def _steps(self, state: TrainState, done: int) -> Steps:
        control = self._control
        while done < self._training.steps:
            if control is not None:
                control.step = done
                self._phase(WAITING)  # The processes monitor each other during a step.
                self._agree(state, done)
            began = time.monotonic()
            state, metrics = self._programs.step(
                state, self._programs.batch(done, state.samples)
            )
            loss = float(metrics["loss"])
            self._is_divergent = is_divergent(loss, metrics)
            done += 1
            if self._copying is not None:
                self._copying.took(time.monotonic() - began)
            self._committed(done, loss)
            self._tell_placement(done)
            self._look_ahead(done)
            due = done % self._training.save_every == 0 or done == self._training.steps
            if due:
                self._save(state, done)
            self._newest = None if due else (state, done)
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

    # Start.

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
            self._control.post(wire.Unfit(count=jax.process_count(), why=why))
            while True:  # The supervisor ends this process.
                self._wait()

    def _restore_or_init(self) -> TrainState:
        save, control = self._training.save, self._control
        if control is None or self._training.copy_every == 0:
            return self._programs.restore_or_init(save, self._post_first)
        self._copying = ShardCopyManager(
            self._programs.copied_states(),
            Path(os.environ[KEY_FILE]),
            control.generation,
            every=self._training.copy_every,
            mtbf=self._training.mtbf,
            tell=lambda done, why: self._post_first(
                wire.NotCopied(step=done, why=why[:_MOST_WORDS])
            ),
        )
        paths = agreed_checkpoints(save) if save is not None else []
        saved = int(paths[0].name.removeprefix("step_")) if paths else 0
        state = self._copying.newest(saved)
        if state is not None:
            step = int(state.step)
            source = f"copies in memory, of step {step}"
            self._post_first(wire.Recovered(step=step, source=source))
            return state
        return self._programs.restore_or_init(save, self._post_first)

    def _tell_placement(self, done: int) -> None:
        placed = self._programs.new_placement(done)
        if placed is not None:
            self._post_first(placed)

    def _look_ahead(self, done: int) -> None:
        """Prepares for other numbers of processes, once the step time is known."""
        if self._control is None or jax.process_index() != 0 or len(self._times) > 2:
            return
        self._times.append(time.monotonic())
        if len(self._times) > 2:
            # A process that ends must wait for its compilations, or it may crash. So
            # compile only if the rest of the run takes twice as long as the first step,
            # which included a compilation.
            began, first, second = self._times
            left = (self._training.steps - done) * (second - first)
            work = functools.partial(self._prepare_ahead, left > 2 * (first - began))
            threading.Thread(target=work).start()

    def _prepare_ahead(self, compiles: bool) -> None:
        """Plans for nearby numbers of processes; may compile for the next smaller."""
        with contextlib.suppress(OSError):  # The steps have priority.
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
        assert self._control is not None
        if self._over:
            return None
        try:
            return self._programs.plan_for(count)
        except PlanError as error:
            why = str(error)[:_MOST_WORDS]
            self._control.post(wire.Unfit(count=count, why=why))
        except Exception as error:
            # The processes plan again when they begin.
            warn(f"no plan was made ahead for {count_text(count, 'process')}: {error}")
        return None

    def _compile_ahead(self, count: int, plan: Plan) -> None:
        assert self._control is not None
        if self._over or not getattr(jax.config, "jax_compilation_cache_dir", None):
            return
        began = time.monotonic()
        try:
            if self._programs.compile_for(plan):
                seconds = time.monotonic() - began
                self._control.post(wire.CompiledAhead(count=count, seconds=seconds))
        except Exception as error:  # The processes compile again when they begin.
            warn(
                f"nothing was compiled ahead for {count_text(count, 'process')}: "
                f"{error}"
            )

    def _committed(self, done: int, loss: float) -> None:
        if self._control is None:
            return
        self._control.step = done
        self._has_committed = True
        if jax.process_index() == 0:
            committed = wire.Committed(
                generation=self._control.generation,
                step=done,
                loss=loss,
                seconds=0.0,
                parts={self._control.name: [(0, self._programs.count)]},
            )
            self._control.post(committed)

    # Stopping.

    def _hears(self, said: wire.ToMember) -> bool:
        with self._changed:
            match said:
                case wire.Prepare(generation=generation):
                    self._asked = generation
                case wire.Stop(why=why, well=well) | wire.RunEnded(why=why, well=well):
                    self._status = TERMINATED if well else 1
                    if not self._stopped:
                        text = f"whalejax: {why}\n"
                        with contextlib.suppress(OSError):
                            os.write(2, text.encode())
                        # A step may wait forever for a failed process.
                        os._exit(self._status)
            self._changed.notify_all()
        return True

    def _agree(self, state: TrainState, done: int) -> None:
        """Stops if any process was asked to; copies if the first process finds so."""
        assert self._control is not None
        if self._leaves and not self._told_leaving:
            self._told_leaving = True
            self._control.post(wire.Leaving(why="it was asked to end (SIGTERM)"))
        due = self._copying is not None and self._copying.is_due(done)
        busy = self._copying is not None and self._copying.busy
        mine = _COPIES if due else _BUSY if busy else ""
        # The supervisor asks a generation to stop only after its first step.
        if self._asked >= 0 or (self._leaves and self._has_committed):
            mine = _STOPS
        said = told_by_all(mine, "whether to stop")
        if _LEFT in said:
            raise WhaleError(
                f"process {said.index(_LEFT)} has left its loop after step {done}, "
                "where this one goes on. Leave all loops at the same step, by a "
                "condition on the loss"
            )
        if _STOPS in said:
            self._stop(state, done)
        elif said[0] == _COPIES and _BUSY not in said and self._copying is not None:
            self._copying.copy(state, done)

    def _stop(self, state: TrainState, done: int) -> None:
        """Saves and reports the state, and waits until the supervisor ends the process.

        Raises:
            SystemExit: The supervisor has asked the process to end.
            WhaleError: The supervisor is unreachable.
        """
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
                self._control.post(wire.Prepared(generation=asked, step=done, held=[]))
            self._wait()
        self._control.flush(_FLUSH_SECONDS)
        raise SystemExit(self._status)

    def _wait(self) -> None:
        """Waits for a message of the supervisor, for at most a second.

        Raises:
            WhaleError: The supervisor is unreachable.
        """
        assert self._control is not None
        with self._changed:
            self._changed.wait(1.0)
        self._control.check()

    def _leave(self) -> None:
        self._leaves = True

    # Saving.

    def _save_left(self) -> None:
        """Saves the state at which the loops of all processes were left."""
        if self._newest is None or sys.is_finalizing():
            return
        if self._control is not None:
            said = told_by_all(_LEFT, "whether to stop")
            if {*said} != {_LEFT}:
                return
        state, done = self._newest
        if jax.process_index() == 0 and self._training.save is not None:
            # An error in the body of a loop leaves it too; see ``Saver.save_left``.
            path = self._training.save / f"step_{done:06d}"
            atexit.register(remove_after_error, path)
        self._save(state, done, removes=False)

    def _save(self, state: TrainState, done: int, *, removes: bool = True) -> None:
        folder = self._training.save
        if folder is None or self._is_divergent:
            return  # The loss is not finite.
        self._phase(SAVING)
        path = folder / f"step_{done:06d}"
        if any(told_by_all("there" if path.exists() else "", "checkpoints there")):
            return
        try:
            self._programs.save(path, state, lambda: self._approve(done))
        except WhaleError as error:
            self._post_first(wire.NotSaved(step=done, why=str(error)[:_MOST_WORDS]))
            if self._control is None:
                warn(f"no checkpoint was written after step {done}: {error}")
            return
        self._post_first(wire.Saved(step=done, path=str(path)))
        if removes and jax.process_index() == 0:
            try:
                remove_old_checkpoints(folder, self._training.keep)
            except OSError as error:
                warn(f"old checkpoints stay in {folder}: {error}")

    def _approve(self, done: int) -> None:
        error = ""
        if self._control is not None and jax.process_index() == 0:
            folder = self._training.save
            assert folder is not None
            if not self._control.may_keep(done, folder, seconds=_KEEP_SECONDS):
                error = "the supervisor gave this process up, or is gone"
        fail_together(error, f"step {done} kept")

    def _post_first(self, report: wire.Report) -> None:
        if self._control is not None and jax.process_index() == 0:
            self._control.post(report)

    def _phase(self, phase: str) -> None:
        if self._control is not None:
            self._control.phase = phase
