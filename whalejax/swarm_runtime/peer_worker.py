"""Runs a peer's calls and stores its stage's state, tensors and gradients.

A peer pulls tensors from the peers that made them, and stores its results until the
step is over on all stages. Gradients of micro-batches stay separate until the trainer
assigns them to peers. Then each peer sums its gradients, and reduces one part of every
array over the peers, in a fixed order. So all peers of a stage have the same sum.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from whalejax.state.state_bytes import digest_of, packed
from whalejax.swarm_runtime.peer_programs import StagePrograms, StageState
from whalejax.swarm_runtime.peer_store.gradient_sums import SumHolder
from whalejax.swarm_runtime.peer_store.stage_store import Part, at
from whalejax.swarm_runtime.wire import tensor_codec
from whalejax.swarm_runtime.wire.state_transfer import downloaded, piece
from whalejax.wire import swarm_messages as messages
from whalejax.wire.connection import SLOWEST_BYTES_PER_SECOND
from whalejax.wire.service import Handlers, RefusedRequestError, ask_all


REACH_SECONDS: Final = 10.0
"""Seconds in which another peer must answer a ping."""

PATIENT_TRANSFERS: Final = 8
"""Longest wait of a download for its turn, in multiples of its own duration over a link
of ``SLOWEST_BYTES_PER_SECOND``."""


class Worker(SumHolder):
    """Runs the calls of one peer, which serves one stage at a time."""

    @property
    def handlers(self) -> Handlers:
        """Handler of each kind of request."""
        return {
            messages.Ping: lambda _: messages.Pong(name=self.name),
            messages.Forward: self._forward,
            messages.BackwardCall: self._backward,
            messages.Fetch: self._fetch,
            messages.Sum: self._sum,
            messages.Gradients: self._send_gradients,
            messages.SumPart: self._send_part,
            messages.UpdateStage: self._update,
            messages.Sync: self._sync,
            messages.FetchState: self._send_state,
            messages.Reach: self._reach,
        }

    # Micro-batches.

    def _computes_with(
        self, asked: messages.StageCall
    ) -> tuple[StagePrograms, StageState]:
        stage, state = self._at(asked, asked.stage)
        step, delay = asked.step, int(self.cut.delayed_updates)
        if not state.step <= step <= state.step + delay:
            raise RefusedRequestError(
                "stale", f"step {step} is not computed with the state of {state.step}"
            )
        return stage, stage.at(state, step)

    def _forward(self, asked: messages.Forward) -> messages.Receipt:
        stage, state = self._computes_with(asked)
        step, number = state.step, asked.number
        self._hook("forward", step)
        batch, imports = self._call_inputs(stage, asked)
        begun = time.monotonic()
        results = self._run_on_device(
            lambda: stage.forward(state, number, batch, imports)
        )
        tensor_codec.check_finite(results, self.name)
        key = step, "forward", number, asked.attempt
        coded, lost = self._coded(results, number)
        self._keep(asked, stage, lambda: self._tensors.update({key: coded}))
        return _receipt(time.monotonic() - begun, lost)

    def _backward(self, asked: messages.BackwardCall) -> messages.Receipt:
        stage, state = self._computes_with(asked)
        step, number = state.step, asked.number
        self._hook("backward", step)
        batch, imports = self._call_inputs(stage, asked)
        cotangents = self._cotangents(stage, asked)
        begun = time.monotonic()
        backward = self._run_on_device(
            lambda: stage.backward(state, number, batch, imports, cotangents)
        )
        tensor_codec.check_finite(
            [*backward.sums, *backward.returns, *backward.gradients], self.name
        )
        attempt = asked.attempt
        returns, lost = self._coded(backward.returns, number)

        def keep() -> None:
            self._tensors[step, "backward", number, attempt] = returns
            self._gradients[step, number, attempt] = list(backward.gradients)

        self._keep(asked, stage, keep)
        return _receipt(time.monotonic() - begun, lost, *backward.sums)

    def _coded(self, arrays: Sequence[np.ndarray], number: int) -> tuple[Part, float]:
        """Returns encoded tensors, and their coding error.

        The error is the sum of squared errors divided by the sum of squared values. It
        is computed only for a step's first micro-batch, because that takes as long as
        decoding. For other micro-batches it is 0.
        """
        sent = tensor_codec.coded(arrays, self.wire)
        if self.wire == "f32" or number:
            return sent, 0.0
        read = tensor_codec.decoded(sent, arrays, self.wire, self.name)
        whole = tensor_codec.squared(arrays)
        pairs = zip(arrays, read, strict=True)
        lost = tensor_codec.squared([a - b for a, b in pairs])
        return sent, lost / whole if whole else 0.0

    def _call_inputs(
        self, stage: StagePrograms, asked: messages.StageCall
    ) -> tuple[Part, Part]:
        step, number = asked.step, asked.number
        sources = asked.sources
        key = step, number, tuple(s[3] for s in sources)
        with self._lock:
            held = self._inputs.get(key)
        if held is None:
            result = [*self._leaves(stage, asked), *self._imports(stage, asked)]
            self._keep(asked, stage, lambda: self._inputs.update({key: result}))
            held = result
        count = len(held) - len(stage.imports)
        batch: list[Any] = [None] * len(self.cut.program.batch_axes)
        first = self.cut.params + self.cut.rest
        for n, leaf in zip(stage.place.batch, held[:count], strict=True):
            batch[n - first] = leaf
        return batch, held[count:]

    def _leaves(self, stage: StagePrograms, asked: messages.StageCall) -> Part:
        first = self.cut.params + self.cut.rest
        places = [n - first for n in stage.place.batch]
        if not places:
            return []
        question = messages.Batch(**at(asked), number=asked.number, places=places)
        answer = self._pull(asked.batch, question, "the trainer", "")
        if len(answer.arrays) != len(places):
            raise RefusedRequestError(
                "shape", "the trainer sent another batch than this job has"
            )
        return list(answer.arrays)

    def _imports(self, stage: StagePrograms, asked: messages.StageCall) -> Part:
        imports: list[Any] = [None] * len(stage.imports)
        wanted = self.cut.sources(stage.number)
        for source, name, address, attempt in asked.sources:
            places = wanted.get(source, [])
            arrays = self._fetched(
                asked, "forward", source, stage, name, address, attempt
            )
            avals = [stage.imports[p] for p in places]
            values = tensor_codec.decoded(arrays, avals, self.wire, name)
            for place, value in zip(places, values, strict=True):
                imports[place] = value
        if any(x is None for x in imports):
            raise RefusedRequestError(
                "stale", f"stage {stage.number} was given too few sources"
            )
        return imports

    def _cotangents(self, stage: StagePrograms, asked: messages.BackwardCall) -> Part:
        """Returns the cotangents of exports, summed over the stages that read them."""
        sums: dict[Any, np.ndarray] = {}
        for source, name, address, attempt in asked.cotangents:
            values = self.cut.returned(source, stage.number)
            arrays = self._fetched(
                asked, "backward", source, stage, name, address, attempt
            )
            avals = [self.cut.avals[v] for v in values]
            for value, array in zip(
                values,
                tensor_codec.decoded(arrays, avals, self.wire, name),
                strict=True,
            ):
                sums[value] = sums[value] + array if value in sums else array
        sent = stage.place.sent
        if any(v not in sums for v in sent):
            raise RefusedRequestError(
                "stale", f"stage {stage.number} was given too few cotangents"
            )
        return [sums[v] for v in sent]

    def _fetched(
        self,
        asked: messages.StageCall,
        phase: str,
        stage_of: int,
        stage: StagePrograms,
        name: str,
        address: messages.Address,
        attempt: int,
    ) -> Sequence[np.ndarray]:
        question = messages.Fetch(
            **at(asked),
            phase=phase,
            number=asked.number,
            attempt=attempt,
            target=stage.number,
        )
        wanted = (
            self.cut.exported_values(stage_of, stage.number)
            if phase == "forward"
            else self.cut.returned(stage_of, stage.number)
        )
        with self._turn(sum(_bytes(self.cut.avals[v]) for v in wanted)):
            return self._pull(address, question, name, name).arrays

    @contextlib.contextmanager
    def _turn(self, size: int) -> Iterator[None]:
        """Waits for a turn to download: few downloads run at a time, in call order.

        If all ran at once, they would share the link and end late, while the device
        waits. A download whose turn does not come in time begins anyway, because
        another one may hang.
        """
        seconds = PATIENT_TRANSFERS * size / SLOWEST_BYTES_PER_SECOND
        taken = self._turns.acquire(timeout=seconds)
        try:
            yield
        finally:
            if taken:
                self._turns.release()

    def _fetch(self, asked: messages.Fetch) -> messages.Tensors:
        phase, target = asked.phase, asked.target
        key = asked.step, phase, asked.number, asked.attempt
        with self._lock:
            held, stage = self._tensors.get(key), self.stage
            if held is None or stage is None or not self._is_of_now(asked):
                raise RefusedRequestError(
                    "missing",
                    f"{self.name} does not hold {phase} of micro-batch {key[2]} of "
                    f"step {key[0]}, attempt {key[3]}",
                )
        if not 0 <= target < self.cut.stages:
            raise RefusedRequestError(
                "stale",
                f"{self.name} was asked for what stage {target} reads; there are "
                f"stages 0 to {self.cut.stages - 1}",
            )
        every = stage.place.part.exports if phase == "forward" else stage.place.received
        wanted = (
            self.cut.exported_values(stage.number, target)
            if phase == "forward"
            else self.cut.returned(stage.number, target)
        )
        named = dict(zip(every, held, strict=True))
        arrays = tuple(named[v] for v in wanted)
        with self._lock:
            self.sent_bytes += sum(x.nbytes for x in arrays)
        return messages.Tensors(arrays=arrays)

    # The update.

    def _update(self, asked: messages.UpdateStage) -> messages.StageValues:
        step, level = asked.step, asked.level
        round_ = asked.round
        stage, state = self._at(asked, asked.stage)
        with self._lock:
            if step + 1 in self._states and (step, round_, level) not in self._answers:
                return _applied(self._digests[step + 1])
            told = self._answers.get((step, round_, level))
        if told is not None:
            return told  # The question is a duplicate.
        self._hook("apply", step)
        if level == 0:
            arrays = asked.arrays
            gradients = self._collect_sum(stage, asked)
            update = stage.update(state, arrays, gradients)
            heard: dict[int, np.ndarray] = {}
        else:
            with self._lock:
                entry = self._updates.get((step, round_))
            if entry is None:
                raise RefusedRequestError(
                    "missing", f"{self.name} began no update of step {step}"
                )
            update = entry
            heard = dict(zip(asked.heard, asked.arrays, strict=True))
        said = self._run_on_device(lambda: update.run(level, heard))
        answer = messages.StageValues(
            numbers=[*said], digest="", arrays=tuple(said.values())
        )
        after = None
        if level == self.cut.update.rounds - 1:
            after = update.finished()
            raw = stage.raw(after)
            self._check_state(stage, state, raw)
            answer = _applied(digest_of(raw))

        def keep() -> None:
            self._updates[step, round_] = update
            self._answers[step, round_, level] = answer
            if after is not None:
                self._states[step + 1] = after
                self._digests[step + 1] = answer.digest

        self._keep(asked, stage, keep)
        return answer

    def _check_state(
        self, stage: StagePrograms, before: StageState, after: Sequence[np.ndarray]
    ) -> None:
        if all(map(_is_finite, after)):
            return
        pairs = zip(after, stage.raw(before), strict=True)
        self._check_sum(
            [new for new, old in pairs if _is_finite(old)],
            f"the state after step {before.step}, stage {stage.number}",
        )

    # The state.

    def _sync(self, asked: messages.Sync) -> messages.StageValues:
        """Brings the peer to a step; downloads a missing state from another peer."""
        generation, step = asked.generation, asked.step
        with self._lock:
            stage, state = self.stage, self._states.get(step)
            if stage is None or stage.number != asked.stage:
                raise RefusedRequestError(
                    "stale", f"{self.name} does not serve {asked.stage}"
                )
            self._check_newer(asked)
            self._syncs += 1
            number = self._syncs
            if asked.keeps and state is not None:
                if generation != self.generation:
                    self._clear()
                self.generation = generation
                for other in [k for k in self._states if k != step]:
                    del self._states[other]
                    self._digests.pop(other, None)
                return _applied(self._digests[step])
        self._hook("download", step)
        if not asked.sources:
            state = self._run_on_device(stage.init_state)
        else:
            state = self._downloaded(stage, asked)
        digest = digest_of(stage.raw(state))
        with self._lock:
            self._check_newer(asked)
            if stage is not self.stage or number != self._syncs:
                raise RefusedRequestError(
                    "stale",
                    f"{self.name} was given another stage or step while it took the "
                    f"state of stage {stage.number} at step {step}",
                )
            self._clear()
            self._states, self._digests = {step: state}, {step: digest}
            self._packed, self.generation = None, generation
        return _applied(digest)

    def _check_newer(self, asked: messages.At) -> None:
        run, generation = asked.run, asked.generation
        if run != self.run or generation < self.generation:
            raise RefusedRequestError(
                "stale",
                f"{self.name} is in generation {self.generation} of run {self.run!r}, "
                f"and was asked for generation {generation} of run {run!r}",
            )

    def _downloaded(self, stage: StagePrograms, asked: messages.Sync) -> StageState:
        step, sources = asked.step, asked.sources
        failed: RefusedRequestError | None = None
        for name, address, _, _ in sources:

            def ask(
                place: int, name: str = name, address: messages.Address = address
            ) -> messages.StateChunk:
                question = messages.FetchState(
                    **at(asked), stage=stage.number, place=place
                )
                answer = self._pull(address, question, name, name)
                self._hook("downloading", step)
                return answer

            try:
                arrays = downloaded(ask, self.cut, stage.number, name)
                return stage.typed(arrays, step)
            except RefusedRequestError as error:
                failed = error
        assert failed is not None
        raise failed

    def _send_state(self, asked: messages.FetchState) -> messages.StateChunk:
        step, place = asked.step, asked.place
        with self._lock:
            stage, state = self.stage, self._states.get(step)
            if (
                stage is None
                or state is None
                or stage.number != asked.stage
                or not self._is_of_now(asked)
            ):
                raise RefusedRequestError(
                    "missing",
                    f"{self.name} does not hold the state of stage "
                    f"{asked.stage} at step {step}",
                    self.name,
                )
            known, digest = self._packed, self._digests[step]
        if known is None or known[0] != step:
            # Calls of the step continue during the transfer.
            known = step, packed(stage.raw(state))
            with self._lock:
                if self._states.get(step) is state:
                    self._packed = known
        data = known[1]
        self._hook("save", step)
        return piece(data, place, digest)

    # Other peers.

    def _reach(self, asked: messages.Reach) -> messages.PeersReached:
        answers = ask_all(
            self._caller,
            [address for _, address in asked.peers],
            messages.Ping(),
            REACH_SECONDS,
        )
        unreached = {
            name: str(answer)
            for (name, _), answer in zip(asked.peers, answers, strict=True)
            if not isinstance(answer, messages.Pong)
        }
        return messages.PeersReached(unreached=unreached)


def _bytes(aval: Any) -> int:
    return int(np.prod(aval.shape)) * int(np.dtype(aval.dtype).itemsize)


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def _receipt(seconds: float, lost: float, *arrays: np.ndarray) -> messages.Receipt:
    return messages.Receipt(seconds=seconds, lost=lost, arrays=arrays)


def _applied(digest: str) -> messages.StageValues:
    return messages.StageValues(numbers=[], digest=digest)
