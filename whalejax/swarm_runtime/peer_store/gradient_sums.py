"""Sums gradients on a peer: first its own, then its part of the stage's sum."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from whalejax.swarm.ledger import check_partition
from whalejax.swarm_runtime.peer_programs import StagePrograms
from whalejax.swarm_runtime.peer_store.stage_store import Part, StageHolder, at
from whalejax.swarm_runtime.wire import tensor_codec
from whalejax.wire import swarm_messages as messages
from whalejax.wire.service import RefusedRequestError


class SumHolder(StageHolder):
    """A peer's stage with its gradient sums."""

    def _sum(self, asked: messages.Sum) -> messages.Summed:
        stage, state = self._at(asked, asked.stage)
        step, peers = state.step, asked.peers
        self._hook("sum", step)
        key = step, asked.round
        names = [p[0] for p in peers]
        if self.name not in names:
            raise RefusedRequestError(
                "stale", f"{self.name} has no part in the sum of {names}"
            )
        where = f"step {step}, stage {stage.number}"
        check_partition({p[0]: p[2] for p in peers}, self.cut.count, where)
        part, parts = names.index(self.name), len(names)
        # Add in the order of the peers, so that all make the same sum.
        total, lost = GradientSum(), 0.0
        for name, address, numbers, attempts in peers:
            if not numbers:
                continue
            question = messages.Gradients(
                **at(asked), numbers=numbers, attempts=attempts, part=part, parts=parts
            )
            if name == self.name:
                held = self._held_sum(question)
            else:
                answer = self._pull(address, question, name, name)
                slices = self._slices(stage, answer.arrays, part, parts, name)
                held = GradientSum()
                held.add(answer.numbers, answer.attempts, slices)
                lost += answer.lost
            total.add(held.numbers, held.attempts, held.arrays)
        what = f"the sum of the gradients of {where}"
        self._check_sum(total.arrays, what)
        coded, more = self._coded_sum(total.arrays, what)
        # This peer also uses the encoded sum, so that all have the same values.
        self._keep(asked, stage, lambda: self._parts.update({key: coded}))
        is_exact = self.sum_wire == "f32"
        return messages.Summed(
            numbers=total.numbers,
            attempts=total.attempts,
            lost=lost + more,
            whole=0.0 if is_exact else tensor_codec.squared(total.arrays),
        )

    def _coded_sum(self, arrays: Part, what: str) -> tuple[Part, float]:
        """Returns encoded gradients, and the sum of the squared coding errors.

        Raises:
            RefusedRequestError: The gradients are too large for the format.
        """
        if self.sum_wire == "f32":
            return arrays, 0.0
        sent = tensor_codec.coded(arrays, self.sum_wire)
        try:
            read = tensor_codec.decoded(sent, arrays, self.sum_wire, self.name)
        except RefusedRequestError as error:
            raise RefusedRequestError(
                "overflow",
                f"{what} in {self.sum_wire}: {error.why}; --sum-wire int8 holds all "
                "that float32 does",
                self.name,
            ) from None
        pairs = zip(arrays, read, strict=True)
        return sent, tensor_codec.squared([a - b for a, b in pairs])

    def _check_sum(self, arrays: Sequence[np.ndarray], what: str) -> None:
        try:
            tensor_codec.check_finite(arrays, self.name)
        except RefusedRequestError as error:
            raise RefusedRequestError(
                "overflow", f"{what}: {error.why}", self.name
            ) from None

    def _held_sum(self, asked: messages.Gradients) -> GradientSum:
        """Returns the sum over this peer's micro-batches, in order.

        Raises:
            RefusedRequestError: Gradients are missing, or the sum overflows.
        """
        step, part, parts = asked.step, asked.part, asked.parts
        keys = sorted(zip(asked.numbers, asked.attempts, strict=True))
        with self._lock:
            is_of_now, stage = self._is_of_now(asked), self.stage
            held = {key: self._gradients.get((step, *key)) for key in keys}
        lacking = [number for (number, _), one in held.items() if one is None]
        if lacking or not is_of_now or stage is None:
            raise RefusedRequestError(
                "missing",
                f"{self.name} does not hold the gradients of micro-batches "
                f"{lacking or asked.numbers} of step {step} that it was assigned",
                self.name,
            )
        total = GradientSum()
        for (number, attempt), one in held.items():
            slices = [_slice(x, part, parts) for x in one or ()]
            total.add([number], [attempt], slices)
        where = f"step {step}, stage {stage.number}"
        self._check_sum(total.arrays, f"the sum of the gradients of {where}")
        return total

    def _slices(
        self,
        stage: StagePrograms,
        sent: Sequence[np.ndarray],
        part: int,
        parts: int,
        name: str,
    ) -> Part:
        avals = [
            jax.ShapeDtypeStruct((_size(a.shape, part, parts),), a.dtype)
            for a in stage.gradients
        ]
        return tensor_codec.decoded(sent, avals, self.sum_wire, name)

    def _send_gradients(self, asked: messages.Gradients) -> messages.GradientSlices:
        if not 0 <= asked.part < asked.parts:
            raise RefusedRequestError("stale", f"part {asked.part} of a gradient")
        held = self._held_sum(asked)
        what = f"the sum of gradients of step {asked.step}"
        coded, lost = self._coded_sum(held.arrays, what)
        return messages.GradientSlices(
            numbers=held.numbers,
            attempts=held.attempts,
            lost=lost,
            arrays=tuple(coded),
        )

    def _send_part(self, asked: messages.SumPart) -> messages.Tensors:
        key = asked.step, asked.round
        with self._lock:
            held = self._parts.get(key)
            if held is None or not self._is_of_now(asked):
                raise RefusedRequestError(
                    "missing",
                    f"{self.name} does not hold a sum of step {key[0]}, round {key[1]}",
                    self.name,
                )
            return messages.Tensors(arrays=tuple(held))

    def _collect_sum(self, stage: StagePrograms, asked: messages.UpdateStage) -> Part:
        """Returns the full sum, from every peer's part of each array."""
        peers = asked.peers
        question = messages.SumPart(**at(asked), round=asked.round)
        every: list[Sequence[np.ndarray]] = []
        for part, (name, address, _, _) in enumerate(peers):
            if name == self.name:
                sent = self._send_part(question).arrays
            else:
                sent = self._pull(address, question, name, name).arrays
            every.append(self._slices(stage, sent, part, len(peers), name))
        return [
            np.concatenate([several[i] for several in every]).reshape(aval.shape)
            for i, aval in enumerate(stage.gradients)
        ]


class GradientSum:
    """Gradients summed in order, with their micro-batches.

    Attributes:
        arrays: Summed arrays.
        numbers: Numbers of the micro-batches in the sum.
        attempts: Attempts of these micro-batches, as in the ledger.
    """

    def __init__(self) -> None:
        """Starts with an empty sum."""
        self.arrays: Part = []
        self.numbers: list[int] = []
        self.attempts: list[int] = []

    def add(
        self,
        numbers: Sequence[int],
        attempts: Sequence[int],
        slices: Sequence[np.ndarray],
    ) -> None:
        """Adds the gradients of a micro-batch, or an earlier sum."""
        if self.numbers:
            pairs = zip(self.arrays, slices, strict=True)
            with np.errstate(over="ignore", invalid="ignore"):  # ``_check_sum`` checks
                self.arrays = [a + b for a, b in pairs]
        else:
            self.arrays = [np.array(x) for x in slices]
        self.numbers += numbers
        self.attempts += attempts


def _size(shape: Sequence[int], part: int, parts: int) -> int:
    size = int(np.prod(shape))
    return size * (part + 1) // parts - size * part // parts


def _slice(array: np.ndarray, part: int, parts: int) -> np.ndarray:
    flat = array.reshape(-1)
    return flat[flat.size * part // parts : flat.size * (part + 1) // parts]
