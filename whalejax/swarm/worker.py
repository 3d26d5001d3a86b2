"""What a peer computes and holds: its stage's state, tensors and gradients.

Tensors are pulled from whoever made them; what was computed stays until the step is
over on all stages. Gradients of a micro-batch are kept apart until the trainer assigns
them, and are then added in the order of the micro-batches, each peer a part of every
array, so that all mates hold the same sum whoever computed what.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from whalejax.elastic.wire.framing import Message
from whalejax.swarm.cut import Cut
from whalejax.swarm.ledger import check_partition
from whalejax.swarm.stage import Stage, StageState, StageUpdate
from whalejax.swarm.wire import coding
from whalejax.swarm.wire.service import Caller, Gone, Refused


PIECE_BYTES: Final = 1 << 24
"""Of a state, in one answer."""

Hook = Callable[[str, int], None]
"""Is told a point of the protocol and the step as it is reached."""

Part = list[np.ndarray]


class Worker:
    """The work of one peer at one stage at a time.

    Attributes:
        name: of the peer.
        stage: that it serves; None while it changes.
        generation: of the run, as it was last told.
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
        pull_seconds: float,
        hook: Hook = lambda point, step: None,
    ) -> None:
        """Hold nothing yet.

        Args:
            cut: of the job.
            caller: asks other processes.
            name: of the peer.
            wire: one of ``coding.WIRES``.
            pull_seconds: deadline of a tensor that another peer is asked for.
            hook: called at points of the protocol.
        """
        self.cut, self.name, self.wire = cut, name, wire
        self._caller, self._pull_seconds, self._hook = caller, pull_seconds, hook
        self.stage: Stage | None = None
        self.generation = -1
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
        }

    @property
    def step(self) -> int:
        """Steps done, as the newest state says; -1 where there is none."""
        with self._lock:
            return max(self._states, default=-1)

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
        """The stage, and its state as the step of a question began.

        Raises:
            Refused: the question is of another generation, stage or step.
        """
        generation, step = asked.fields["generation"], asked.fields["step"]
        with self._lock:
            stage, state = self.stage, self._states.get(step)
            if generation != self.generation or stage is None or state is None:
                raise Refused(
                    "stale",
                    f"{self.name} is at step {self.step} of generation "
                    f"{self.generation}, and was asked for step {step} of generation "
                    f"{generation}",
                )
            if number is not None and number != stage.number:
                raise Refused(
                    "stale",
                    f"{self.name} serves stage {stage.number}, and was asked for stage "
                    f"{number}",
                )
            self._release(step)
            return stage, state

    def _release(self, step: int) -> None:
        """Let go of what no step from this one on reads."""
        for held in self._held:
            for key in [k for k in held if k[0] < step]:
                del held[key]
        for key in [k for k in self._states if k < step]:
            del self._states[key]
            self._digests.pop(key, None)

    # Micro-batches.

    def _forward(self, asked: Message) -> Message:
        stage, state = self._at(asked, asked.fields["stage"])
        step, number = state.step, asked.fields["number"]
        self._hook("forward", step)
        batch, imports = self._given(stage, asked)
        begun = time.monotonic()
        results = self._computed(lambda: stage.forward(state, number, batch, imports))
        coding.check_finite(results, self.name)
        key = step, "forward", number, asked.fields["attempt"]
        self._keep(asked, lambda: self._tensors.update({key: self._coded(results)}))
        return _receipt(time.monotonic() - begun)

    def _backward(self, asked: Message) -> Message:
        stage, state = self._at(asked, asked.fields["stage"])
        step, number = state.step, asked.fields["number"]
        self._hook("backward", step)
        batch, imports = self._given(stage, asked)
        cotangents = self._cotangents(stage, asked)
        begun = time.monotonic()
        found = self._computed(
            lambda: stage.backward(state, number, batch, imports, cotangents)
        )
        coding.check_finite([*found.sums, *found.returns, *found.gradients], self.name)
        attempt = asked.fields["attempt"]

        def keep() -> None:
            key = step, "backward", number, attempt
            self._tensors[key] = self._coded(found.returns)
            self._gradients[step, number, attempt] = list(found.gradients)

        self._keep(asked, keep)
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

    def _keep(self, asked: Message, keep: Callable[[], None]) -> None:
        """Keep a result, unless the run has gone on to another generation."""
        with self._lock:
            if asked.fields["generation"] == self.generation:
                keep()

    def _given(self, stage: Stage, asked: Message) -> tuple[Part, Part]:
        """Leaves of the micro-batch, and what earlier stages made of it."""
        step, number = asked.fields["step"], asked.fields["number"]
        sources = asked.fields["sources"]
        key = step, number, tuple(s[3] for s in sources)
        with self._lock:
            held = self._inputs.get(key)
        if held is None:
            held = [*self._leaves(stage, asked), *self._imports(stage, asked)]
            with self._lock:
                self._inputs[key] = held
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
            "step": asked.fields["step"],
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
            "generation": asked.fields["generation"],
            "step": asked.fields["step"],
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
            raise Refused("missing", why, error.blame or blame) from None

    def _fetch(self, asked: Message) -> Message:
        fields = asked.fields
        phase, target = fields["phase"], fields["target"]
        key = fields["step"], phase, fields["number"], fields["attempt"]
        with self._lock:
            held, stage = self._tensors.get(key), self.stage
            if held is None or stage is None or fields["generation"] != self.generation:
                raise Refused(
                    "missing",
                    f"{self.name} does not hold {phase} of micro-batch {key[2]} of "
                    f"step {key[0]}, attempt {key[3]}",
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
        holders = {
            number: (name, address, attempt)
            for name, address, numbers, attempts in peers
            for number, attempt in zip(numbers, attempts, strict=True)
        }
        self._check_own(step, {n: x for n, x in holders.items() if x[0] == self.name})
        total: Part | None = None
        for number in range(self.cut.count):
            name, address, attempt = holders[number]
            fields = {
                "generation": self.generation,
                "step": step,
                "number": number,
                "attempt": attempt,
                "part": part,
                "parts": parts,
            }
            if name == self.name:
                slices: Sequence[np.ndarray] = self._slices(fields)
            else:
                slices = self._pull(address, "gradients", fields, name, name).arrays
                self._check_slices(stage, slices, part, parts, name)
            total = (
                [np.array(x) for x in slices]
                if total is None
                else [a + b for a, b in zip(total, slices, strict=True)]
            )
        assert total is not None
        held = total
        self._keep(asked, lambda: self._parts.update({key: held}))
        return _receipt(0.0)

    def _check_own(self, step: int, mine: Mapping[int, tuple[str, Any, int]]) -> None:
        """Refuse an assignment of what this peer does not hold."""
        with self._lock:
            lacking = [
                number
                for number, (_, _, attempt) in sorted(mine.items())
                if (step, number, attempt) not in self._gradients
            ]
        if lacking:
            raise Refused(
                "missing",
                f"{self.name} does not hold the gradients of micro-batches {lacking} "
                f"of step {step} that it was assigned",
                self.name,
            )

    def _slices(self, fields: Mapping[str, Any]) -> Part:
        key = fields["step"], fields["number"], fields["attempt"]
        part, parts = fields["part"], fields["parts"]
        with self._lock:
            held = self._gradients.get(key)
            if held is None or fields["generation"] != self.generation:
                raise Refused(
                    "missing",
                    f"{self.name} does not hold the gradient of micro-batch {key[1]} "
                    f"of step {key[0]}, attempt {key[2]}",
                    self.name,
                )
        return [_slice(x, part, parts) for x in held]

    def _check_slices(
        self,
        stage: Stage,
        slices: Sequence[np.ndarray],
        part: int,
        parts: int,
        name: str,
    ) -> None:
        avals = [
            _Wanted((_size(a.shape, part, parts),), a.dtype) for a in stage.gradients
        ]
        coding.decoded(slices, avals, "f32", name)

    def _send_gradients(self, asked: Message) -> Message:
        if not 0 <= asked.fields["part"] < asked.fields["parts"]:
            raise Refused("stale", f"part {asked.fields['part']} of a gradient")
        slices = tuple(self._slices(asked.fields))
        return Message(kind="slices", fields={}, arrays=slices)

    def _send_part(self, asked: Message) -> Message:
        key = asked.fields["step"], asked.fields["round"]
        with self._lock:
            held = self._parts.get(key)
            if held is None or asked.fields["generation"] != self.generation:
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
            answer = _applied(digest_of(stage.raw(after)), ())

        def keep() -> None:
            self._updates[step, round_] = update
            self._answers[step, round_, level] = answer
            if after is not None:
                self._states[step + 1] = after
                self._digests[step + 1] = answer.fields["digest"]

        self._keep(asked, keep)
        return answer

    def _gathered(self, stage: Stage, asked: Message) -> Part:
        """The whole sum, a part of every array from each mate."""
        peers = asked.fields["peers"]
        fields = {name: asked.fields[name] for name in ("generation", "step", "round")}
        every: list[Sequence[np.ndarray]] = []
        for part, (name, address, _, _) in enumerate(peers):
            if name == self.name:
                question = Message(kind="part", fields=fields)
                every.append(self._send_part(question).arrays)
                continue
            slices = self._pull(address, "part", fields, name, name).arrays
            self._check_slices(stage, slices, part, len(peers), name)
            every.append(slices)
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
            if generation < self.generation:
                raise Refused(
                    "stale", f"{self.name} knows generation {self.generation}"
                )
            if fields["keeps"] and state is not None:
                if generation != self.generation:
                    self._clear()
                self.generation = generation
                for other in [k for k in self._states if k != step]:
                    del self._states[other]
                return _applied(self._digests[step], ())
        self._hook("download", step)
        if not fields["sources"]:
            state = self._computed(stage.born)
        else:
            state = self._downloaded(stage, step, fields["sources"])
        digest = digest_of(stage.raw(state))
        with self._lock:
            self._clear()
            self._states, self._digests = {step: state}, {step: digest}
            self._packed, self.generation = None, generation
        return _applied(digest, ())

    def _downloaded(
        self, stage: Stage, step: int, sources: Sequence[Sequence[Any]]
    ) -> StageState:
        """The state of a mate, or of the trainer; the next one where one fails."""
        why = ""
        for name, address, _, _ in sources:
            try:
                return self._download(stage, step, name, address)
            except Refused as error:
                why = error.why
        raise Refused("source", why, sources[-1][0])

    def _download(
        self, stage: Stage, step: int, name: str, address: Sequence[Any]
    ) -> StageState:
        pieces: list[np.ndarray] = []
        count, digest = 1, ""
        while len(pieces) < count:
            fields = {"stage": stage.number, "step": step, "place": len(pieces)}
            answer = self._pull(address, "state", fields, name, name)
            said = answer.fields.get("count"), answer.fields.get("digest")
            if type(said[0]) is not int or len(answer.arrays) != 1:
                raise Refused("shape", f"{name} sent no state", name)
            count, digest = said[0], str(said[1])
            pieces.append(answer.arrays[0].reshape(-1).view(np.uint8))
            self._hook("downloading", step)
        try:
            return unpacked(stage, np.concatenate(pieces), digest, step)
        except ValueError as error:
            raise Refused("shape", f"the state of {name}: {error}", name) from None

    def _send_state(self, asked: Message) -> Message:
        step, place = asked.fields["step"], asked.fields["place"]
        with self._lock:
            stage, state = self.stage, self._states.get(step)
            if stage is None or state is None or stage.number != asked.fields["stage"]:
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


class _Wanted:
    """Shape and dtype of an array that is expected."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


_READYING = threading.Lock()


def ready_stage(cut: Cut, number: int) -> Stage:
    """A stage whose programs are compiled; peers of one process share it.

    Args:
        cut: of the job.
        number: of the stage.
    """
    with _READYING:
        known: dict[int, Stage] = cut.ready
        if number not in known:
            stage = Stage(cut, number)
            warm_up(stage)
            known[number] = stage
        return known[number]


def warm_up(stage: Stage) -> None:
    """Compile what a step takes, on zeros that are thrown away.

    Args:
        stage: whose programs.
    """
    cut = stage.cut
    nothing = [np.zeros(shape, dtype) for shape, dtype in cut.raw_avals(stage.number)]
    state = stage.typed(nothing, 0)
    first = cut.params + cut.rest
    batch: list[Any] = [None] * len(cut.program.batch_axes)
    for n in stage.place.batch:
        aval = cut.avals[(), n]
        batch[n - first] = np.zeros(aval.shape, aval.dtype)
    imports = [np.zeros(a.shape, a.dtype) for a in stage.imports]
    cotangents = [
        np.zeros(cut.avals[v].shape, cut.avals[v].dtype) for v in stage.place.sent
    ]
    if not stage.last:
        stage.forward(state, 0, batch, imports)
    stage.backward(state, 0, batch, imports, cotangents)
    sums = [np.ones(a.shape, a.dtype) for a in cut.flat_sums]
    gradients = [np.zeros(a.shape, a.dtype) for a in stage.gradients]
    update, steps = stage.update(state, sums, gradients), cut.update.steps
    heard: dict[int, np.ndarray] = {}
    for level in range(cut.update.rounds):
        update.run(level, heard)
        told = [n for other in range(cut.stages) for n in cut.told(level, other)]
        avals = [steps.avals[n] for n in told]
        ones = [np.ones(a.shape, a.dtype) for a in avals]
        heard = dict(zip(told, ones, strict=True))
    update.finished()


def packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays as bytes, one behind the other."""
    flat = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]
    return np.concatenate(flat) if flat else np.zeros(0, np.uint8)


def unpacked(stage: Stage, data: np.ndarray, digest: str, step: int) -> StageState:
    """The state that bytes are.

    Args:
        stage: whose.
        data: as ``packed`` gives them.
        digest: that they must have.
        step: steps done.

    Raises:
        ValueError: they are none of this stage, or not as they were sent.
    """
    arrays = stage.cut.split(stage.number, data)
    if arrays is None:
        raise ValueError(f"it has {data.size} bytes, which are not those of this stage")
    if digest_of(arrays) != digest:
        raise ValueError("it is not as it was sent")
    return stage.typed(arrays, step)


def piece(data: np.ndarray, place: int, digest: str) -> Message:
    """A part of a state, as an answer.

    Args:
        data: all of it.
        place: of the part.
        digest: of the whole.
    """
    count = max(1, -(-data.size // PIECE_BYTES))
    part = data[place * PIECE_BYTES : (place + 1) * PIECE_BYTES]
    return Message(
        kind="state", fields={"count": count, "digest": digest}, arrays=(part,)
    )


def digest_of(arrays: Sequence[np.ndarray]) -> str:
    """SHA-256 of arrays, as hexadecimal digits."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _size(shape: Sequence[int], part: int, parts: int) -> int:
    size = int(np.prod(shape))
    return size * (part + 1) // parts - size * part // parts


def _slice(array: np.ndarray, part: int, parts: int) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[flat.size * part // parts : flat.size * (part + 1) // parts]


def _receipt(seconds: float, *arrays: np.ndarray) -> Message:
    return Message(kind="receipt", fields={"seconds": seconds}, arrays=arrays)


def _applied(digest: str, arrays: tuple[np.ndarray, ...]) -> Message:
    return Message(kind="told", fields={"numbers": [], "digest": digest}, arrays=arrays)
