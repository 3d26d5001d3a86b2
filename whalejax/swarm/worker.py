"""What a peer computes and holds: its stage's state, tensors and gradients.

Tensors are pulled from whoever made them; what was computed stays until the step is
over on all stages. Gradients of a micro-batch are kept apart until the trainer assigns
them. Then each peer adds up those that it holds, and adds one part of every array of
these sums in the order of the peers, so that all mates hold the same sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from whalejax.elastic.wire.framing import Message
from whalejax.swarm.cut import Cut
from whalejax.swarm.ledger import check_partition
from whalejax.swarm.stage import Stage, StageState, StageUpdate, ready_stage
from whalejax.swarm.wire import coding
from whalejax.swarm.wire.service import Caller, Gone, Refused
from whalejax.swarm.wire.states import digest_of, downloaded, packed, piece


REACH_SECONDS: Final = 10.0
"""In which another peer answers whether it is there."""

_MOST_PINGS: Final = 16
"""At once."""

Hook = Callable[[str, int], None]
"""Is told a point of the protocol and the step as it is reached."""

Part = list[np.ndarray]


class Worker:
    """The work of one peer at one stage at a time.

    Attributes:
        name: of the peer.
        stage: that it serves; None while it changes.
        run: that the registry has told this peer of.
        generation: of that run, as it was last told; -1 before the first.
        done: micro-batches computed, forward or backward.
        waiting: calls that wait for the device, with the one that has it.
        seconds: of the last call on the device.
        sent_bytes: of tensors at the borders of stages that others were given.
    """

    def __init__(
        self,
        cut: Cut,
        caller: Caller,
        name: str,
        *,
        wire: str,
        sum_wire: str = "f32",
        pull_seconds: float,
        hook: Hook = lambda point, step: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            cut: of the job.
            caller: asks other processes.
            name: of the peer.
            wire: one of ``WIRES``.
            sum_wire: one of ``SUM_WIRES``.
            pull_seconds: deadline of a tensor that another peer is asked for.
            hook: called at points of the protocol.
        """
        self.cut, self.name = cut, name
        self.wire, self.sum_wire = wire, sum_wire
        self._caller, self._pull_seconds, self._hook = caller, pull_seconds, hook
        self.stage: Stage | None = None
        self.run, self.generation = "", -1
        self._syncs = 0
        self.done, self.waiting, self.seconds, self.sent_bytes = 0, 0, 0.0, 0
        self._lock = threading.RLock()
        self._device = threading.Lock()
        self._states: dict[int, StageState] = {}
        self._digests: dict[int, str] = {}
        self._tensors: dict[tuple[int, str, int, int], Part] = {}
        self._inputs: dict[tuple[int, int, tuple[int, ...]], Part] = {}
        self._gradients: dict[tuple[int, int, int], Part] = {}
        self._parts: dict[tuple[int, int], Part] = {}
        self._updates: dict[tuple[int, int], StageUpdate] = {}
        self._answers: dict[tuple[int, int, int], Message] = {}
        self._packed: tuple[int, np.ndarray] | None = None
        # All by the step first.
        self._held: tuple[dict[Any, Any], ...] = (
            self._tensors,
            self._inputs,
            self._gradients,
            self._parts,
            self._updates,
            self._answers,
        )

    @property
    def handlers(self) -> Mapping[str, Callable[[Message], Message]]:
        """What answers each kind of question."""
        return {
            "ping": lambda _: Message(kind="pong", fields={"name": self.name}),
            "forward": self._forward,
            "backward": self._backward,
            "fetch": self._fetch,
            "sum": self._sum,
            "gradients": self._send_gradients,
            "part": self._send_part,
            "update": self._update,
            "sync": self._sync,
            "state": self._send_state,
            "reach": self._reach,
        }

    @property
    def step(self) -> int:
        """Steps done, as the newest state says; -1 where there is none."""
        with self._lock:
            return max(self._states, default=-1)

    def enter(self, run: str) -> None:
        """Work for a run from now on; of another one only the state is kept.

        Args:
            run: its name, which every question of its trainer has.
        """
        with self._lock:
            if run != self.run:
                self._clear()
                self.run, self.generation = run, -1

    def serve(self, number: int) -> None:
        """Serve a stage from now on; its programs are compiled here.

        Args:
            number: of the stage.
        """
        with self._lock:
            self.stage = None
            self._clear()
            self._states, self._digests, self._packed = {}, {}, None
        stage = ready_stage(self.cut, number)
        with self._lock:
            self.stage = stage

    def _clear(self) -> None:
        for held in self._held:
            held.clear()

    # Which step.

    def _at(
        self, asked: Message, number: int | None = None
    ) -> tuple[Stage, StageState]:
        """The stage, and the state that a question is about.

        Raises:
            Refused: the question is of another generation, stage or step.
        """
        before = _state_of(asked)
        with self._lock:
            stage, state = self.stage, self._states.get(before)
            if not self._is_of_now(asked) or stage is None or state is None:
                raise Refused(
                    "stale",
                    f"{self.name} is at step {self.step} of generation "
                    f"{self.generation} of run {self.run!r}, and was asked for step "
                    f"{before} of generation {asked.fields['generation']} of run "
                    f"{asked.fields['run']!r}",
                )
            if number is not None and number != stage.number:
                raise Refused(
                    "stale",
                    f"{self.name} serves stage {stage.number}, and was asked for stage "
                    f"{number}",
                )
            self._release(before)
            return stage, state

    def _computes_with(self, asked: Message) -> tuple[Stage, StageState]:
        """The stage, and its state as the step of a call is computed with it."""
        stage, state = self._at(asked, asked.fields["stage"])
        step, delay = asked.fields["step"], int(self.cut.delayed_updates)
        if not state.step <= step <= state.step + delay:
            raise Refused(
                "stale", f"step {step} is not computed with the state of {state.step}"
            )
        return stage, stage.at(state, step)

    def _is_of_now(self, asked: Message) -> bool:
        """Whether a question is of the run and the generation that this peer is in."""
        now = self.run, self.generation
        return (asked.fields["run"], asked.fields["generation"]) == now

    def _release(self, step: int) -> None:
        """Let go of what no step from this one on reads."""
        for held in self._held:
            for key in [k for k in held if k[0] < step]:
                del held[key]
        for key in [k for k in self._states if k < step]:
            del self._states[key]
            self._digests.pop(key, None)
        if self._packed is not None and self._packed[0] < step:
            self._packed = None

    # Micro-batches.

    def _forward(self, asked: Message) -> Message:
        stage, state = self._computes_with(asked)
        step, number = state.step, asked.fields["number"]
        self._hook("forward", step)
        batch, imports = self._given(stage, asked)
        begun = time.monotonic()
        results = self._computed(lambda: stage.forward(state, number, batch, imports))
        coding.check_finite(results, self.name)
        key = step, "forward", number, asked.fields["attempt"]
        coded = self._coded(results)
        self._keep(asked, stage, lambda: self._tensors.update({key: coded}))
        return _receipt(time.monotonic() - begun)

    def _backward(self, asked: Message) -> Message:
        stage, state = self._computes_with(asked)
        step, number = state.step, asked.fields["number"]
        self._hook("backward", step)
        batch, imports = self._given(stage, asked)
        cotangents = self._cotangents(stage, asked)
        begun = time.monotonic()
        found = self._computed(
            lambda: stage.backward(state, number, batch, imports, cotangents)
        )
        coding.check_finite([*found.sums, *found.returns, *found.gradients], self.name)
        attempt, returns = asked.fields["attempt"], self._coded(found.returns)

        def keep() -> None:
            self._tensors[step, "backward", number, attempt] = returns
            self._gradients[step, number, attempt] = list(found.gradients)

        self._keep(asked, stage, keep)
        return _receipt(time.monotonic() - begun, *found.sums)

    def _coded(self, arrays: Sequence[np.ndarray]) -> Part:
        return coding.coded(arrays, self.wire)

    def _computed(self, compute: Callable[[], Any]) -> Any:
        """What the device computes, one call after the other."""
        with self._lock:
            self.waiting += 1
        try:
            with self._device:
                begun = time.monotonic()
                found = compute()
                self.seconds = time.monotonic() - begun
        finally:
            with self._lock:
                self.waiting -= 1
                self.done += 1
        return found

    def _keep(self, asked: Message, stage: Stage, keep: Callable[[], None]) -> None:
        """Keep a result.

        Raises:
            Refused: this peer has gone on to another generation, step or stage.
        """
        with self._lock:
            if (
                not self._is_of_now(asked)
                or stage is not self.stage
                or _state_of(asked) not in self._states
            ):
                raise Refused(
                    "stale",
                    f"{self.name} has gone on while it computed for step "
                    f"{asked.fields['step']} of generation "
                    f"{asked.fields['generation']}, stage {stage.number}",
                )
            keep()

    def _given(self, stage: Stage, asked: Message) -> tuple[Part, Part]:
        """Leaves of the micro-batch, and what earlier stages made of it."""
        step, number = asked.fields["step"], asked.fields["number"]
        sources = asked.fields["sources"]
        key = step, number, tuple(s[3] for s in sources)
        with self._lock:
            held = self._inputs.get(key)
        if held is None:
            found = [*self._leaves(stage, asked), *self._imports(stage, asked)]
            self._keep(asked, stage, lambda: self._inputs.update({key: found}))
            held = found
        count = len(held) - len(stage.imports)
        batch: list[Any] = [None] * len(self.cut.program.batch_axes)
        first = self.cut.params + self.cut.rest
        for n, leaf in zip(stage.place.batch, held[:count], strict=True):
            batch[n - first] = leaf
        return batch, held[count:]

    def _leaves(self, stage: Stage, asked: Message) -> Part:
        """Leaves of the micro-batch that the stage reads, from the trainer."""
        first = self.cut.params + self.cut.rest
        places = [n - first for n in stage.place.batch]
        if not places:
            return []
        fields = {
            **_at(asked),
            "number": asked.fields["number"],
            "places": places,
        }
        answer = self._pull(asked.fields["batch"], "batch", fields, "the trainer", "")
        if len(answer.arrays) != len(places):
            raise Refused("shape", "the trainer sent another batch than this job has")
        return list(answer.arrays)

    def _imports(self, stage: Stage, asked: Message) -> Part:
        found: list[Any] = [None] * len(stage.imports)
        wanted = self.cut.sources(stage.number)
        for source, name, address, attempt in asked.fields["sources"]:
            places = wanted.get(source, [])
            arrays = self._fetched(asked, "forward", stage, name, address, attempt)
            avals = [stage.imports[p] for p in places]
            values = coding.decoded(arrays, avals, self.wire, name)
            for place, value in zip(places, values, strict=True):
                found[place] = value
        if any(x is None for x in found):
            raise Refused("stale", f"stage {stage.number} was given too few sources")
        return found

    def _cotangents(self, stage: Stage, asked: Message) -> Part:
        """Of what was handed on, added up over the stages that read it."""
        sums: dict[Any, np.ndarray] = {}
        for source, name, address, attempt in asked.fields["cotangents"]:
            values = self.cut.returned(source, stage.number)
            arrays = self._fetched(asked, "backward", stage, name, address, attempt)
            avals = [self.cut.avals[v] for v in values]
            for value, array in zip(
                values, coding.decoded(arrays, avals, self.wire, name), strict=True
            ):
                sums[value] = sums[value] + array if value in sums else array
        sent = stage.place.sent
        if any(v not in sums for v in sent):
            raise Refused("stale", f"stage {stage.number} was given too few cotangents")
        return [sums[v] for v in sent]

    def _fetched(
        self,
        asked: Message,
        phase: str,
        stage: Stage,
        name: str,
        address: Sequence[Any],
        attempt: int,
    ) -> Sequence[np.ndarray]:
        fields = {
            **_at(asked),
            "phase": phase,
            "number": asked.fields["number"],
            "attempt": attempt,
            "target": stage.number,
        }
        return self._pull(address, "fetch", fields, name, name).arrays

    def _pull(
        self,
        address: Sequence[Any],
        kind: str,
        fields: Mapping[str, Any],
        name: str,
        blame: str,
    ) -> Message:
        """Another process's answer.

        Raises:
            Refused: it gave none; ``blame`` is who is at fault.
        """
        seconds = self._pull_seconds
        try:
            return self._caller.ask(
                (address[0], address[1]), kind, fields, seconds=seconds
            )
        except Gone as error:
            why = f"{name} did not give {kind} to {self.name}: {error}"
            raise Refused("source", why, blame) from None
        except Refused as error:
            why = f"{name} did not give {kind} to {self.name}: {error.why}"
            codes = {"answer": "shape", "overflow": "overflow"}
            code = codes.get(error.code, "missing")
            raise Refused(code, why, error.blame or blame) from None

    def _fetch(self, asked: Message) -> Message:
        fields = asked.fields
        phase, target = fields["phase"], fields["target"]
        key = fields["step"], phase, fields["number"], fields["attempt"]
        with self._lock:
            held, stage = self._tensors.get(key), self.stage
            if held is None or stage is None or not self._is_of_now(asked):
                raise Refused(
                    "missing",
                    f"{self.name} does not hold {phase} of micro-batch {key[2]} of "
                    f"step {key[0]}, attempt {key[3]}",
                )
        if not 0 <= target < self.cut.stages:
            raise Refused(
                "stale",
                f"{self.name} was asked for what stage {target} reads; there are "
                f"stages 0 to {self.cut.stages - 1}",
            )
        every = stage.place.part.exports if phase == "forward" else stage.place.received
        wanted = (
            self.cut.handed(stage.number, target)
            if phase == "forward"
            else self.cut.returned(stage.number, target)
        )
        named = dict(zip(every, held, strict=True))
        arrays = tuple(named[v] for v in wanted)
        with self._lock:
            self.sent_bytes += sum(x.nbytes for x in arrays)
        return Message(kind="tensors", fields={}, arrays=arrays)

    # The sum.

    def _sum(self, asked: Message) -> Message:
        stage, state = self._at(asked, asked.fields["stage"])
        step, peers = state.step, asked.fields["peers"]
        self._hook("sum", step)
        key = step, asked.fields["round"]
        names = [p[0] for p in peers]
        if self.name not in names:
            raise Refused("stale", f"{self.name} has no part in the sum of {names}")
        where = f"step {step}, stage {stage.number}"
        check_partition({p[0]: p[2] for p in peers}, self.cut.count, where)
        part, parts = names.index(self.name), len(names)
        # In the order of the peers, so that every mate makes the same sum.
        total, lost = Total(), 0.0
        for name, address, numbers, attempts in peers:
            if not numbers:
                continue
            fields = {
                **_at(asked),
                "numbers": numbers,
                "attempts": attempts,
                "part": part,
                "parts": parts,
            }
            if name == self.name:
                held = self._held_sum(Message(kind="gradients", fields=fields))
            else:
                answer = self._pull(address, "gradients", fields, name, name)
                slices = self._slices(stage, answer.arrays, part, parts, name)
                held = Total()
                held.add(answer.fields["numbers"], answer.fields["attempts"], slices)
                lost += answer.fields["lost"]
            total.add(held.numbers, held.attempts, held.arrays)
        what = f"the sum of the gradients of {where}"
        self._check_sum(total.arrays, what)
        coded, more = self._coded_sum(total.arrays, what)
        # Also this peer reads what it sends its mates, so that all have the same.
        self._keep(asked, stage, lambda: self._parts.update({key: coded}))
        return Message(
            kind="summed",
            fields={
                "numbers": total.numbers,
                "attempts": total.attempts,
                "lost": lost + more,
                "whole": 0.0
                if self.sum_wire == "f32"
                else coding.squared(total.arrays),
            },
        )

    def _coded_sum(self, arrays: Part, what: str) -> tuple[Part, float]:
        """Gradients as mates are sent them, and the squares of what that loses.

        Raises:
            Refused: they are too large for the format.
        """
        if self.sum_wire == "f32":
            return arrays, 0.0
        sent = coding.coded(arrays, self.sum_wire)
        try:
            read = coding.decoded(sent, arrays, self.sum_wire, self.name)
        except Refused as error:
            raise Refused(
                "overflow",
                f"{what} in {self.sum_wire}: {error.why}; --sum-wire int8 holds all "
                "that float32 does",
                self.name,
            ) from None
        pairs = zip(arrays, read, strict=True)
        return sent, coding.squared([a - b for a, b in pairs])

    def _check_sum(self, arrays: Sequence[np.ndarray], what: str) -> None:
        """Refuse what is not finite, though all that it was made of is."""
        try:
            coding.check_finite(arrays, self.name)
        except Refused as error:
            raise Refused("overflow", f"{what}: {error.why}", self.name) from None

    def _held_sum(self, asked: Message) -> Total:
        """The sum over micro-batches that this peer holds, in their order.

        Raises:
            Refused: it lacks some of them, or the sum overflows.
        """
        fields = asked.fields
        step, part, parts = fields["step"], fields["part"], fields["parts"]
        keys = sorted(zip(fields["numbers"], fields["attempts"], strict=True))
        with self._lock:
            is_of_now, stage = self._is_of_now(asked), self.stage
            held = {key: self._gradients.get((step, *key)) for key in keys}
        lacking = [number for (number, _), one in held.items() if one is None]
        if lacking or not is_of_now or stage is None:
            raise Refused(
                "missing",
                f"{self.name} does not hold the gradients of micro-batches "
                f"{lacking or fields['numbers']} of step {step} that it was assigned",
                self.name,
            )
        total = Total()
        for (number, attempt), one in held.items():
            slices = [_slice(x, part, parts) for x in one or ()]
            total.add([number], [attempt], slices)
        where = f"step {step}, stage {stage.number}"
        self._check_sum(total.arrays, f"the sum of the gradients of {where}")
        return total

    def _slices(
        self,
        stage: Stage,
        sent: Sequence[np.ndarray],
        part: int,
        parts: int,
        name: str,
    ) -> Part:
        """A part of every gradient, of how it was sent."""
        avals = [
            _Wanted((_size(a.shape, part, parts),), a.dtype) for a in stage.gradients
        ]
        return coding.decoded(sent, avals, self.sum_wire, name)

    def _send_gradients(self, asked: Message) -> Message:
        fields = asked.fields
        if not 0 <= fields["part"] < fields["parts"]:
            raise Refused("stale", f"part {fields['part']} of a gradient")
        if len(fields["numbers"]) != len(fields["attempts"]):
            raise Refused("stale", "numbers and attempts are not as many")
        held = self._held_sum(asked)
        what = f"the sum of gradients of step {fields['step']}"
        coded, lost = self._coded_sum(held.arrays, what)
        added = {"numbers": held.numbers, "attempts": held.attempts, "lost": lost}
        return Message(kind="slices", fields=added, arrays=tuple(coded))

    def _send_part(self, asked: Message) -> Message:
        key = asked.fields["step"], asked.fields["round"]
        with self._lock:
            held = self._parts.get(key)
            if held is None or not self._is_of_now(asked):
                raise Refused(
                    "missing",
                    f"{self.name} does not hold a sum of step {key[0]}, round {key[1]}",
                    self.name,
                )
            return Message(kind="slices", fields={}, arrays=tuple(held))

    # The update.

    def _update(self, asked: Message) -> Message:
        step, level = asked.fields["step"], asked.fields["level"]
        round_ = asked.fields["round"]
        stage, state = self._at(asked, asked.fields["stage"])
        with self._lock:
            if step + 1 in self._states and (step, round_, level) not in self._answers:
                return _applied(self._digests[step + 1], ())
            told = self._answers.get((step, round_, level))
        if told is not None:
            return told  # The question came twice.
        self._hook("apply", step)
        if level == 0:
            arrays = asked.arrays
            gradients = self._gathered(stage, asked)
            update = stage.update(state, arrays, gradients)
            heard: dict[int, np.ndarray] = {}
        else:
            with self._lock:
                found = self._updates.get((step, round_))
            if found is None:
                raise Refused("missing", f"{self.name} began no update of step {step}")
            update = found
            heard = dict(zip(asked.fields["heard"], asked.arrays, strict=True))
        said = self._computed(lambda: update.run(level, heard))
        answer = Message(
            kind="told",
            fields={"numbers": [*said], "digest": ""},
            arrays=tuple(said.values()),
        )
        after = None
        if level == self.cut.update.rounds - 1:
            after = update.finished()
            raw = stage.raw(after)
            self._check_state(stage, state, raw)
            answer = _applied(digest_of(raw), ())

        def keep() -> None:
            self._updates[step, round_] = update
            self._answers[step, round_, level] = answer
            if after is not None:
                self._states[step + 1] = after
                self._digests[step + 1] = answer.fields["digest"]

        self._keep(asked, stage, keep)
        return answer

    def _check_state(
        self, stage: Stage, before: StageState, after: Sequence[np.ndarray]
    ) -> None:
        """Refuse a new state that is not finite where the one before was."""
        if all(map(_is_finite, after)):
            return
        pairs = zip(after, stage.raw(before), strict=True)
        self._check_sum(
            [new for new, old in pairs if _is_finite(old)],
            f"the state after step {before.step}, stage {stage.number}",
        )

    def _gathered(self, stage: Stage, asked: Message) -> Part:
        """The whole sum, a part of every array from each mate."""
        peers = asked.fields["peers"]
        fields = {**_at(asked), "round": asked.fields["round"]}
        every: list[Sequence[np.ndarray]] = []
        for part, (name, address, _, _) in enumerate(peers):
            if name == self.name:
                question = Message(kind="part", fields=fields)
                sent = self._send_part(question).arrays
            else:
                sent = self._pull(address, "part", fields, name, name).arrays
            every.append(self._slices(stage, sent, part, len(peers), name))
        return [
            np.concatenate([several[i] for several in every]).reshape(aval.shape)
            for i, aval in enumerate(stage.gradients)
        ]

    # The state.

    def _sync(self, asked: Message) -> Message:
        """Be at a step of a generation; what is not there is pulled from a mate."""
        fields = asked.fields
        generation, step = fields["generation"], fields["step"]
        with self._lock:
            stage, state = self.stage, self._states.get(step)
            if stage is None or stage.number != fields["stage"]:
                raise Refused("stale", f"{self.name} does not serve {fields['stage']}")
            self._check_newer(asked)
            self._syncs += 1
            number = self._syncs
            if fields["keeps"] and state is not None:
                if generation != self.generation:
                    self._clear()
                self.generation = generation
                for other in [k for k in self._states if k != step]:
                    del self._states[other]
                    self._digests.pop(other, None)
                return _applied(self._digests[step], ())
        self._hook("download", step)
        if not fields["sources"]:
            state = self._computed(stage.born)
        else:
            state = self._downloaded(stage, asked)
        digest = digest_of(stage.raw(state))
        with self._lock:
            self._check_newer(asked)
            if stage is not self.stage or number != self._syncs:
                raise Refused(
                    "stale",
                    f"{self.name} was given another stage or step while it took the "
                    f"state of stage {stage.number} at step {step}",
                )
            self._clear()
            self._states, self._digests = {step: state}, {step: digest}
            self._packed, self.generation = None, generation
        return _applied(digest, ())

    def _check_newer(self, asked: Message) -> None:
        """Refuse to go back to a generation that is over, or to another run."""
        run, generation = asked.fields["run"], asked.fields["generation"]
        if run != self.run or generation < self.generation:
            raise Refused(
                "stale",
                f"{self.name} is in generation {self.generation} of run {self.run!r}, "
                f"and was asked for generation {generation} of run {run!r}",
            )

    def _downloaded(self, stage: Stage, asked: Message) -> StageState:
        """The state of a mate, or of the trainer; the next one where one fails."""
        step, sources = asked.fields["step"], asked.fields["sources"]
        failed: Refused | None = None
        for name, address, _, _ in sources:

            def ask(place: int, name: str = name, address: Any = address) -> Message:
                fields = {**_at(asked), "stage": stage.number, "place": place}
                answer = self._pull(address, "state", fields, name, name)
                self._hook("downloading", step)
                return answer

            try:
                arrays = downloaded(ask, self.cut, stage.number, name)
                return stage.typed(arrays, step)
            except Refused as error:
                failed = error
        assert failed is not None
        raise failed

    def _send_state(self, asked: Message) -> Message:
        step, place = asked.fields["step"], asked.fields["place"]
        with self._lock:
            stage, state = self.stage, self._states.get(step)
            if (
                stage is None
                or state is None
                or stage.number != asked.fields["stage"]
                or not self._is_of_now(asked)
            ):
                raise Refused(
                    "missing",
                    f"{self.name} does not hold the state of stage "
                    f"{asked.fields['stage']} at step {step}",
                    self.name,
                )
            if self._packed is None or self._packed[0] != step:
                self._packed = step, packed(stage.raw(state))
            data, digest = self._packed[1], self._digests[step]
        self._hook("save", step)
        return piece(data, place, digest)

    # Other peers.

    def _reach(self, asked: Message) -> Message:
        """Which peers do not answer this one, and why."""

        def why(one: Sequence[Any]) -> str:
            host, port = one[1]
            try:
                self._caller.ask((host, port), "ping", {}, seconds=REACH_SECONDS)
            except (Gone, Refused) as error:
                return str(error)
            return ""

        peers = asked.fields["peers"]
        with ThreadPoolExecutor(max(1, min(len(peers), _MOST_PINGS))) as pool:
            found = zip(peers, pool.map(why, peers), strict=True)
            unreached = {one[0]: text for one, text in found if text}
        return Message(kind="reached", fields={"unreached": unreached})


class Total:
    """Gradients added up in order, and of which micro-batches they are.

    Attributes:
        arrays: the sum.
        numbers: of the micro-batches that are in it, each time that one was added.
        attempts: of those, as the ledger counts.
    """

    def __init__(self) -> None:
        """Nothing has been added."""
        self.arrays: Part = []
        self.numbers: list[int] = []
        self.attempts: list[int] = []

    def add(
        self,
        numbers: Sequence[int],
        attempts: Sequence[int],
        slices: Sequence[np.ndarray],
    ) -> None:
        """Add the gradients of a micro-batch, or those that were added up before.

        Args:
            numbers, attempts: of the micro-batches.
            slices: their gradients.
        """
        if self.numbers:
            pairs = zip(self.arrays, slices, strict=True)
            with np.errstate(over="ignore", invalid="ignore"):  # Checked in the end.
                self.arrays = [a + b for a, b in pairs]
        else:
            self.arrays = [np.array(x) for x in slices]
        self.numbers += numbers
        self.attempts += attempts


class _Wanted:
    """Shape and dtype of an array that is expected."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


def _size(shape: Sequence[int], part: int, parts: int) -> int:
    size = int(np.prod(shape))
    return size * (part + 1) // parts - size * part // parts


def _slice(array: np.ndarray, part: int, parts: int) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[flat.size * part // parts : flat.size * (part + 1) // parts]


def _at(asked: Message) -> dict[str, Any]:
    """Run, generation and step of a question."""
    return {name: asked.fields[name] for name in ("run", "generation", "step")}


def _state_of(asked: Message) -> int:
    """Steps done in the state that a question is about; calls name it."""
    found: int = asked.fields.get("state", asked.fields["step"])
    return found


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _receipt(seconds: float, *arrays: np.ndarray) -> Message:
    return Message(kind="receipt", fields={"seconds": seconds}, arrays=arrays)


def _applied(digest: str, arrays: tuple[np.ndarray, ...]) -> Message:
    return Message(kind="told", fields={"numbers": [], "digest": digest}, arrays=arrays)
