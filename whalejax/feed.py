"""Samples for a run: each process reads those that it gives, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from whalejax.meshes.problems import Problems, WhaleError


if TYPE_CHECKING:
    from whalejax.train import TrainStep


class Source(Protocol):
    """Samples by number, as grain's data sources and lists have them."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, number: int, /) -> Any:
        """A sample: a pytree of arrays without a batch dimension."""
        ...


class Feed:
    """This process's part of every global batch, from samples by number.

    Which samples make up a global batch depends on the seed and the step alone: not on
    the number of processes, nor on who takes how many of them. So each sample is seen
    once in an epoch, whatever shares do, and a run that is resumed goes on where it
    was: ``Feed(..., first=int(state.step))``.

    Example:
        >>> import numpy as np
        >>> samples = [{"x": np.full(3, i)} for i in range(10)]
        >>> feed = Feed(samples, 4, seed=None)
        >>> [int(i) for i in next(iter(feed))["x"][:, 0]]
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        step: TrainStep | None = None,
        *,
        seed: int | None = 0,
        first: int = 0,
        epochs: int | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            source: the samples.
            batch_size: of a global batch. What is left of an epoch when no whole batch
                is left is not seen in that epoch.
            step: whose batches they are; None gives whole global batches. Take a batch
                when the step is about to be called: shares may have changed.
            seed: of the order, another one in every epoch; None keeps the order.
            first: the step that comes next, counted from 0.
            epochs: after so many it ends; None goes on for ever.

        Raises:
            WhaleError: sizes that cannot be; every problem is listed.
        """
        problems = Problems("Feed")
        if not 0 < batch_size <= len(source):
            problems.add(
                f"batch_size is {batch_size}, of {len(source)} samples; expected 1 to "
                f"{len(source)}"
            )
        if first < 0:
            problems.add(f"first is {first}; expected the number of a step, from 0")
        if step is not None and {*step.batch_axes} - {0}:
            problems.add(
                "samples are put together along dimension 0, and this step has batch "
                f"dimensions {list(step.batch_axes)}. Give it global batches yourself"
            )
        elif step is not None:
            planned = {
                leaf.shape[axis]
                for leaf, axis in zip(step.plan.batch, step.batch_axes, strict=True)
                if axis is not None
            }
            if planned != {batch_size}:
                problems.add(
                    f"batch_size is {batch_size}; the plan is for "
                    f"{', '.join(map(str, sorted(planned)))}"
                )
        problems.raise_if_any(WhaleError)
        self._source, self._size, self._step = source, batch_size, step
        self._seed, self._epochs = seed, epochs
        self.step = first

    def __iter__(self) -> Iterator[Any]:
        batches = len(self._source) // self._size
        order, epoch = np.arange(0), -1
        while True:
            now, place = divmod(self.step, batches)
            if self._epochs is not None and now >= self._epochs:
                return
            if now != epoch:
                order, epoch = self._order(now), now
            numbers = order[place * self._size : (place + 1) * self._size]
            if self._step is not None:
                numbers = numbers[self._step.batch_rows()]
            self.step += 1
            yield self._batch(numbers)

    def _order(self, epoch: int) -> np.ndarray:
        """The samples of an epoch."""
        count = len(self._source)
        if self._seed is None:
            return np.arange(count)
        return np.random.default_rng([self._seed, epoch]).permutation(count)

    def _batch(self, numbers: np.ndarray) -> Any:
        """Samples, along the batch dimensions of the step's leaves."""
        samples = [self._source[int(n)] for n in numbers]
        if not samples:  # This process takes none; their shapes are those of any.
            like = self._source[0]
            return jax.tree.map(lambda x: np.asarray(x)[None][:0], like)
        return jax.tree.map(lambda *leaves: np.stack(leaves), *samples)
