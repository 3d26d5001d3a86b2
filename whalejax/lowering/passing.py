"""One pass of a batch through the places of a pipeline, by the rows of a schedule.

What a row needs is there or on its way: every program is issued before the one that it
waits for has ended, and what nothing reads any more is let go of at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from whalejax.cutting import Fixed
from whalejax.lowering.evaluate import named
from whalejax.lowering.pieces import Site
from whalejax.lowering.spmd import Sums
from whalejax.planner.parts import Value
from whalejax.planner.schedules import Row
from whalejax.state import TrainState


if TYPE_CHECKING:
    from whalejax.lowering.mpmd import Apart


class Pass:
    """One pass over a batch.

    Attributes:
        apart: what runs.
        common: for each place, what all micro-batches read, by number.
        rest: what is not trained, as it is now, by its number in the loss.
        live: of a place and micro-batch, what its backward pass reads.
        handed: of a place and micro-batch, what it was handed.
        returned: of a place and micro-batch, cotangents of what it handed on.
        sums, gradients: for each place, what was added up.
    """

    def __init__(
        self,
        apart: Apart,
        state: TrainState,
        batch: Sequence[Any],
        *,
        keeps: bool = True,
    ) -> None:
        self.apart = apart
        self.keeps = keeps
        self.state = state
        self.batch = batch
        self.live: dict[tuple[int, int], dict[int, Any]] = {}
        self.handed: dict[tuple[int, int], dict[Value, Any]] = defaultdict(dict)
        self.returned: dict[tuple[int, int], dict[Value, list[Any]]] = defaultdict(
            lambda: defaultdict(list)
        )
        adapter = apart.captured.adapter
        self.first = len(adapter.param_paths)
        self.rest = dict(enumerate(jax.tree.leaves(state.rest), start=self.first))
        self.copies: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.common = [self._common(site) for site in apart.sites]
        made = [zeros() for zeros in apart.zeros]
        self.sums = [sums for sums, _ in made]
        self.gradients = [gradients for _, gradients in made]

    def _on(self, stage: int, value: Any, sharding: NamedSharding) -> Any:
        """A value on a stage, copied there once."""
        key = stage, id(value)
        if key not in self.copies:
            # Both are held: what is forgotten might lend its id to another.
            self.copies[key] = value, jax.device_put(value, sharding)
        return self.copies[key][1]

    def _common(self, site: Site) -> dict[int, Any]:
        apart, place, stage = self.apart, site.place, site.stage
        names, whole, mesh = place.names, apart.whole[stage], apart.meshes[stage]
        params = jax.tree.leaves(self.state.params)
        paths = apart.captured.adapter.param_paths
        found: dict[int, Any] = {}
        for n, number in zip(place.params, names.params, strict=True):
            spec = apart.leaf(stage, paths[n]).param_spec
            found[number] = self._on(stage, params[n], named(spec, mesh))
        first = self.first + len(self.rest)
        for n, number in zip(place.batch, names.batch, strict=True):
            leaf = self.batch[n - first]
            found[number] = self._on(
                stage, leaf, apart.batch_sharding(stage, n - first)
            )
        found[names.step] = self._on(stage, self.state.step, whole)
        if names.rng is not None:
            found[names.rng] = self._on(stage, self.state.rng, whole)
        if names.scale is not None and self.state.loss_scale is not None:
            found[names.scale] = self._on(stage, self.state.loss_scale.scale, whole)
        return found

    def row(self, row: Row) -> None:
        """One action of the schedule."""
        place = row.chunk * self.apart.table.num_stages + row.stage
        getattr(self, row.action)(place, row.micro_batch)

    def forward(self, number: int, micro_batch: int) -> None:
        """A place takes a micro-batch forward."""
        site = self.apart.sites[number]
        place, names, key = site.place, site.place.names, (number, micro_batch)
        values = dict(self.common[number])
        numbers = self.apart.numbers[site.stage]
        values[names.number] = numbers[micro_batch]
        # Nothing is counted where nothing is trained.
        values[names.counted] = numbers[micro_batch if self.keeps else 0]
        whole = self.apart.whole[site.stage]
        for n, at in zip(place.rest, names.rest, strict=True):
            values[at] = self._on(site.stage, self.rest[n], whole)
        handed = self.handed.pop(key, {})
        for v, at in zip(place.part.imports, names.imports, strict=True):
            values[at] = handed[v]
        piece = site.forward if self.keeps else site.forward_only
        results, self.sums[number] = piece.run(
            [values[n] for n in piece.reads], self.sums[number]
        )
        count = len(place.part.exports)
        exports = dict(zip(place.part.exports, results[:count], strict=True))
        for reader, values_of in self.apart.readers[number].items():
            sent = self._sent(values_of, [exports[v] for v in values_of], reader)
            self.handed[reader, micro_batch].update(zip(values_of, sent, strict=True))
        if not self.keeps:
            return
        self.rest.update(zip(place.part.fresh, results[count:], strict=False))
        kept = results[count + len(place.part.fresh) :]
        values.update(zip(place.kept, kept, strict=True))
        self.live[key] = {n: values[n] for n in values if n in site.later}

    def _sent(
        self, values: Sequence[Value], arrays: Sequence[Any], place: int
    ) -> list[Any]:
        """Arrays on the devices of a place, as it has such values."""
        there = [self.apart.handing(v, place) for v in values]
        sent: list[Any] = jax.device_put(list(arrays), there)
        return sent

    def backward(self, number: int, micro_batch: int) -> None:
        """A place takes a micro-batch backward."""
        site = self.apart.sites[number]
        place, names, key = site.place, site.place.names, (number, micro_batch)
        values = self.live[key]
        returned = self.returned.pop(key, {})
        found = [self.apart.total(returned[v]) for v in place.sent]
        if number == len(self.apart.sites) - 1:
            found.append(self.apart.one)
        values.update(zip(names.cotangents, found, strict=True))
        added = [] if site.weight else self.gradients[number]
        results, added = site.backward.run(
            [values[n] for n in site.backward.reads], added
        )
        cotangents = dict(zip(place.received, results, strict=False))
        for maker, values_of in self.apart.makers[number].items():
            sent = self._sent(values_of, [cotangents[v] for v in values_of], maker)
            for v, back in zip(values_of, sent, strict=True):
                self.returned[maker, micro_batch][v].append(back)
        if site.weight is None:
            self.gradients[number] = added
            del self.live[key]
            return
        count = len(place.received)
        more = zip(site.backward.gives[count:], results[count:], strict=True)
        values.update((n, x) for n, x in more if not isinstance(n, Fixed))
        self.live[key] = {n: values[n] for n in site.weight.reads}

    def weight(self, number: int, micro_batch: int) -> None:
        """A place makes the gradients of its parameters."""
        site = self.apart.sites[number]
        assert site.weight is not None
        values = self.live.pop((number, micro_batch))
        _, self.gradients[number] = site.weight.run(
            [values[n] for n in site.weight.reads], self.gradients[number]
        )

    def losses(self) -> Sums:
        """What the micro-batches' losses add up to, without gradients."""
        tree = self.apart.sites[-1].place.sums_tree
        total, weight, metrics = tree.unflatten(self.sums[-1])
        return Sums(total=total, weight=weight, metrics=metrics, gradients=())

    def summed(self) -> Sums:
        """What the micro-batches add up to."""
        found: dict[int, list[Any]] = defaultdict(list)
        for site, gradients in zip(self.apart.sites, self.gradients, strict=True):
            for n, gradient in zip(site.place.params, gradients, strict=True):
                found[n].append(gradient)
        whole = [
            self.apart.total([jax.device_put(g, where) for g in found[n]])
            if n in found
            else self.apart.no_gradient(n)
            for n, where in enumerate(self.apart.gradient_shardings)
        ]
        return replace(self.losses(), gradients=tuple(whole))

    def rest_after(self) -> Any:
        """What is not trained, after all micro-batches."""
        tree: Any = jax.tree.structure(self.state.rest)
        counted = self.apart.counted({n: self.rest[n] for n in self.apart.counters})
        rest = {**self.rest, **counted}
        return tree.unflatten([rest[n] for n in sorted(rest)])
