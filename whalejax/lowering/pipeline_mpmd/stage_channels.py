"""Transfers of arrays from the devices of one stage to those of another.

Within a process, arrays are copied. Between processes, a small program over the devices
of both stages moves shards, device by device. Such programs are collectives, so all
processes that have devices of either stage must launch them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from whalejax.adapters.leaves import is_key
from whalejax.lowering.global_arrays import (
    behind,
    impl_of,
    is_here,
    rows_of,
    run_alone,
    shards_on,
    unwrapped,
    wrapped,
    zeros_on,
)
from whalejax.planner.pipeline.layer_stack import STAGE


Coming = Callable[[], list[Any]]
"""Function that waits until a transfer is issued, and returns its arrays."""


class TransferThread:
    """A thread that issues transfers in order.

    After a failed transfer it issues no more. The other process would take the next
    transfer for the failed one.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "whalejax-moves")
        self._last: Future[list[Any]] | None = None

    def submit(
        self, hand: Callable[[Sequence[Any]], list[Any]], arrays: Sequence[Any]
    ) -> Future[list[Any]]:
        """Queues a transfer, which is issued after the earlier ones.

        Args:
            hand: Function that transfers arrays.
            arrays: Arguments of ``hand``.
        """
        before = self._last

        def then(arrays: Sequence[Any]) -> list[Any]:
            nonlocal before
            if before is not None:
                before.result()
                before = None
            return hand(arrays)

        self._last = self._thread.submit(then, arrays)
        return self._last

    def settle(self) -> list[Any]:
        """Waits until all transfers are issued; returns the arrays of the last one."""
        return [] if self._last is None else self._last.result()


class StageChannel:
    """Transfers arrays from the devices of one stage to as many of another stage."""

    def __init__(
        self,
        avals: Sequence[Any],
        sources: Sequence[NamedSharding],
        targets: Sequence[NamedSharding],
        *,
        alone: bool = False,
    ) -> None:
        """Prepares the transfer of arrays between two stages.

        Args:
            avals: Shapes and dtypes of the arrays.
            sources: Expected shardings on the sending stage; arrays may have others on
                its devices.
            targets: Shardings on the receiving stage.
            alone: Whether no other work is in flight during a transfer; default False.
        """
        self._targets = list(targets)
        devices: set[Any] = set()
        devices.update(*(s.device_set for s in (*sources[:1], *targets[:1])))
        processes = {d.process_index for d in devices}
        self._here = jax.process_index() in processes
        self._alone = alone
        self._crossing: _CrossProcessTransfer | None = None
        if self._here and len(processes) > 1 and sources[0].mesh != targets[0].mesh:
            self._crossing = _CrossProcessTransfer(avals, sources[0].mesh, targets)

    def send(
        self, arrays: Sequence[Any], aside: TransferThread | None = None
    ) -> Coming:
        """Sends arrays, and returns a function that returns them on the other stage.

        The function returns None for each array if this process has no devices of the
        other stage.

        Args:
            arrays: Arrays that are in this process, None for others.
            aside: Thread that waits for other processes; None waits in this thread.
        """
        if not self._here:
            return lambda: [None] * len(self._targets)
        if self._crossing is not None:
            return self._crossing.send(arrays, aside, alone=self._alone)
        result: list[Any] = jax.device_put(list(arrays), self._targets)
        return lambda: result


class _CrossProcessTransfer:
    """Transfers arrays by one program, from each device to its counterpart."""

    def __init__(
        self, avals: Sequence[Any], source: Any, targets: Sequence[NamedSharding]
    ) -> None:
        target: Any = targets[0].mesh
        devices = np.asarray(source.devices).reshape(target.devices.shape)
        names = target.axis_names
        there = Mesh(devices, names)
        self.sends = is_here(NamedSharding(there, PartitionSpec()))
        self.takes = is_here(targets[0])
        raw = [jax.eval_shape(unwrapped, a) for a in avals]
        specs = [rows_of(t.spec) for t in targets]
        self.like = [NamedSharding(there, s) for s in specs]
        self.mine = [NamedSharding(target, s) for s in specs]
        self.shapes = [r.shape or (1,) for r in raw]
        self.plain = [not is_key(a) and bool(a.shape) for a in avals]
        self.unwrap, self.wrap = self._wrapping(avals, raw, targets)
        both = [behind(s) for s in specs]
        self.pair = pair = Mesh(np.stack([devices, target.devices]), (STAGE, *names))
        self.joint = [
            jax.ShapeDtypeStruct(
                (2 * shape[0], *shape[1:]), r.dtype, sharding=NamedSharding(pair, spec)
            )
            for shape, r, spec in zip(self.shapes, raw, both, strict=True)
        ]
        self.nothing = [
            zeros_on(shape, r.dtype, sharding) if self.takes else []
            for shape, r, sharding in zip(self.shapes, raw, self.mine, strict=True)
        ]

        def hand(xs: Sequence[Any]) -> list[Any]:
            return [jax.lax.ppermute(x, STAGE, [(0, 1)]) for x in xs]

        # Compiled here, as the thread that runs the program may lack JAX settings.
        crossing = jax.shard_map(hand, mesh=pair, in_specs=(both,), out_specs=both)
        self.hand = jax.jit(crossing).lower(self.joint).compile()

    def _wrapping(
        self, avals: Sequence[Any], raw: Sequence[Any], targets: Sequence[NamedSharding]
    ) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
        impls = [impl_of(a) for a in avals]

        def unwrap(xs: Sequence[Any]) -> list[Any]:
            pairs = zip(xs, self.shapes, strict=True)
            return [unwrapped(x).reshape(shape) for x, shape in pairs]

        def wrap(xs: Sequence[Any]) -> list[Any]:
            several = zip(xs, raw, impls, strict=True)
            return [wrapped(x.reshape(r.shape), impl) for x, r, impl in several]

        return (
            jax.jit(unwrap, out_shardings=self.like),
            jax.jit(wrap, out_shardings=list(targets)),
        )

    def send(
        self, arrays: Sequence[Any], aside: TransferThread | None, *, alone: bool
    ) -> Coming:
        if self.sends and not self._as_sent(arrays):
            arrays = self.unwrap(list(arrays))
        if aside is None:
            handed = self._cross(arrays, alone=alone)
            return lambda: self._received_arrays(handed)
        waiting = aside.submit(self._cross_at_once, arrays)
        return lambda: self._received_arrays(waiting.result())

    def _as_sent(self, arrays: Sequence[Any]) -> bool:
        return all(self.plain) and all(
            x.sharding.is_equivalent_to(like, x.ndim)
            for x, like in zip(arrays, self.like, strict=True)
        )

    def _cross_at_once(self, arrays: Sequence[Any]) -> list[Any]:
        # Waiting first, as the program would block threads that computations need.
        if self.sends:
            jax.block_until_ready(arrays)
        return self._cross(arrays)

    def _cross(self, arrays: Sequence[Any], *, alone: bool = False) -> list[Any]:
        shards = [list(zeros) for zeros in self.nothing]
        if self.sends:
            for several, x in zip(shards, arrays, strict=True):
                several += [shard.data for shard in x.addressable_shards]
        joint = [
            jax.make_array_from_single_device_arrays(aval.shape, aval.sharding, several)
            for aval, several in zip(self.joint, shards, strict=True)
        ]
        cross: list[Any] = (
            run_alone(self.hand, joint, self.pair) if alone else self.hand(joint)
        )
        return cross

    def _received_arrays(self, handed: Sequence[Any]) -> list[Any]:
        if not self.takes:
            return [None] * len(self.shapes)
        received_arrays = [
            jax.make_array_from_single_device_arrays(
                shape, sharding, shards_on(x, sharding)
            )
            for x, shape, sharding in zip(handed, self.shapes, self.mine, strict=True)
        ]
        return received_arrays if all(self.plain) else self.wrap(received_arrays)
