"""Reads the samples of a run: each process reads its own samples alone.

Lists, grain's ``MapDataset``, ``IterDataset`` and ``DataLoader``, and other sources
with the same methods are accepted. This module does not import grain.
"""

from __future__ import annotations

import base64
import enum
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import jax
import numpy as np

from whalejax.meshes.arguments.wrong_arguments import names_arguments
from whalejax.meshes.checks import Arguments, is_whole, plain, short_repr
from whalejax.meshes.errors import WhaleError


if TYPE_CHECKING:
    from whalejax.runtime.train_step import TrainStep


_MOST_SHUFFLED: Final = 2**36
"""Most samples whose order fits in memory. Grain's repeated datasets have 2**63 - 1."""

_BYTES: Final = "base64"
"""Key of encoded bytes in a JSON state."""


class DataSource(Protocol):
    """Samples by index, as in lists and grain's data sources."""

    def __len__(self) -> int:
        """Returns the number of samples."""
        ...

    def __getitem__(self, number: int, /) -> Any:
        """Returns a sample: a pytree of arrays without a batch dimension."""
        ...


class Unset(enum.Enum):
    """Marker of an omitted argument for which None is a possible value.

    In a rebuilt state, the number of samples is None. If that counted as omitted, the
    run would restart at the first sample.
    """

    NOT_GIVEN = enum.auto()


@names_arguments("wh.Feed", instance="feed")
class Feed:
    """Iterable of this process's part of each global batch.

    The samples of a global batch depend on the seed and the step, but not on the number
    of processes or their shares. So each sample is seen once in an epoch even if shares
    change. A resumed run continues at the next sample, also with another batch size:
    ``Feed(..., first_sample=state.samples)``.

    A source without a length (a generator, or an iterable dataset of grain) must yield
    the same samples in the same order in every process. Every process reads it from its
    beginning, and keeps its own samples. To continue in the middle without reading the
    earlier samples again, save ``get_state()`` with the checkpoint. This needs an
    iterator with ``get_state`` and ``set_state``, such as grain's.

    Attributes:
        step: Number of the next step.

    Example:
        >>> import numpy as np
        >>> samples = [{"x": np.full(3, i)} for i in range(10)]
        >>> feed = Feed(samples, 4, seed=None)
        >>> [int(i) for i in next(iter(feed))["x"][:, 0]]
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        source: DataSource | Iterable[Any],
        batch_size: int,
        step: TrainStep | None = None,
        *,
        seed: int | None = 0,
        first: int = 0,
        first_sample: int | None | Unset = Unset.NOT_GIVEN,
        epochs: int | None = None,
    ) -> None:
        """Prepares the feed, and reads nothing yet.

        Args:
            source: Samples, each a pytree of arrays without a batch dimension: a
                sequence or any iterable of them.
            batch_size: Number of samples in a global batch. The last samples of an
                epoch are skipped if they do not fill a batch.
            step: Step that takes the batches; None yields whole global batches. Take
                each batch just before the step is called, as shares may change.
            seed: Seed of the order, which differs in every epoch; None keeps the order.
                Iterables are not shuffled.
            first: Number of the next step, from 0, if all earlier steps had this batch
                size.
            first_sample: Number of samples before the next batch, with any batch size,
                in place of ``first``: ``state.samples``. It must not be None, the value
                of a state that lost the count. Epochs are counted with this batch size.
                If another size skipped more or fewer samples per epoch, only
                ``get_state`` is exact in later epochs.
            epochs: Number of epochs. None repeats the source for ever, or reads an
                iterator that can be read only once to its end.

        Raises:
            WhaleError: Arguments are invalid; the message lists all problems.
        """
        problems = Arguments("Feed")
        _check_source(problems, source, seed)
        sized = problems.whole("batch_size", batch_size, least=1)
        if sized and not problems and _numbered(source) and batch_size > len(source):
            problems.add(
                f"batch_size is {batch_size}, of {len(source)} samples; expected 1 to "
                f"{len(source)}"
            )
        problems.whole("first", first, what="the number of a step")
        if isinstance(first_sample, Unset):
            first_sample = None
        elif first_sample is None and not is_whole(first, 1):
            problems.add(_LOST)
        _check_beginning(problems, first, first_sample)
        problems.whole("seed", seed, none=True)
        problems.whole("epochs", epochs, none=True)
        if step is not None and not _is_step(step):
            problems.refuse("step", step, "what wh.compile gives, or None")
        elif step is not None and sized:
            for problem in _batch_mismatches(step, batch_size):
                problems.add(problem)
        problems.raise_if_any(WhaleError)
        begins: int | None
        first, begins = plain((first, first_sample))
        self._source, self._size, self._step = source, int(batch_size), step
        self._seed, self._epochs = plain((seed, epochs))
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._read = 0, 0
        self.step, self._shift = first, 0
        if begins is not None:
            self.step, self._shift = divmod(begins, self._size)
        self._anchor = self._beginning(begins or 0)

    def __iter__(self) -> Iterator[Any]:
        return self._in_a_row() if not _numbered(self._source) else self._by_number()

    def get_state(self) -> dict[str, Any]:
        """Returns the position for ``set_state``: JSON data with the source's state.

        Raises:
            WhaleError: The source's iterator has no ``get_state``.
        """
        if _numbered(self._source):
            epoch, place = self._place()
            return {"step": self.step, "epoch": epoch, "place": place}
        if self._iterator is None:
            start = {"step": self.step, "epoch": 0, "read": 0, "source": None}
            return {**start, "shift": self._shift}
        iterator: Any = self._iterator
        if not hasattr(iterator, "get_state"):
            raise WhaleError(
                f"a {type(iterator).__name__} cannot say where it stands: it has "
                "no get_state. Give Feed(..., first_sample=state.samples), which reads "
                "the source again up to there, or samples by number"
            )
        return {
            "step": self.step,
            "epoch": self._epoch,
            "read": self._read,
            "source": _as_text(iterator.get_state()),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues at the position of another feed of the same source.

        Args:
            state: Result of ``get_state``; the other feed may have another batch size.

        Raises:
            WhaleError: The state is invalid or of another kind of source.
        """
        if not isinstance(state, Mapping) or "step" not in state:
            raise WhaleError(
                f"state is {short_repr(state)}; expected what get_state gave, with "
                "'step'"
            )
        inner = state.get("source") is not None
        needed = {"epoch"} if inner or "place" in state else set[str]()
        needed |= {"read"} if inner else set()
        numbers: dict[str, Any] = {}
        problems = Arguments("state")
        for name in ("step", "epoch", "read", "place", "shift"):
            numbers[name] = state.get(name, None if name in needed else 0)
            problems.whole(f"state[{name!r}]", numbers[name])
        problems.raise_if_any()
        numbers = plain(numbers)
        self._iterator, self._epoch, self._read = None, 0, 0
        self.step, self._shift = numbers["step"], numbers["shift"]
        self._anchor = self._beginning(0)
        if "place" in state:
            self._anchor = self.step, numbers["epoch"], numbers["place"]
        if inner:
            iterator: Any = None if _numbered(self._source) else iter(self._source)
            if not hasattr(iterator, "set_state"):
                kind = type(self._source).__name__
                raise WhaleError(
                    "this state is of samples in a row whose iterator has set_state; "
                    f"the source is a {kind}, which has none. Give the feed the source "
                    "that the state is of"
                )
            iterator.set_state(_from_text(state["source"]))
            self._iterator = iterator
            self._epoch, self._read = numbers["epoch"], numbers["read"]

    def _beginning(self, samples: int) -> tuple[int, int, int]:
        """Returns the current step, and epoch and index after a number of samples."""
        if not samples or not _numbered(self._source):
            return 0, 0, 0
        whole = len(self._source) // self._size * self._size
        return self.step, *divmod(samples, whole)

    def _place(self) -> tuple[int, int]:
        """Returns the epoch of the next batch, and the index of its first sample."""
        assert _numbered(self._source)
        size, count = self._size, len(self._source)
        step, epoch, place = self._anchor
        done = self.step - step
        if done < 0:  # The position is before the known one: count from the start.
            step, epoch, place, done = 0, 0, 0, self.step
        left = max(0, count - place) // size
        if done < left:
            return epoch, place + done * size
        more, batch = divmod(done - left, count // size)
        return epoch + 1 + more, batch * size

    def _by_number(self) -> Iterator[Any]:
        source = self._source
        assert _numbered(source)
        order: Sequence[int] | np.ndarray = range(len(source))
        epoch = -1
        while True:
            now, place = self._place()
            if self._epochs is not None and now >= self._epochs:
                return
            if now != epoch and self._seed is not None:
                rng = np.random.default_rng([self._seed, now])
                order, epoch = rng.permutation(len(source)), now
            numbers = order[place : place + self._size]
            rows = self._rows()
            self.step += 1
            samples = [_sample(source, int(numbers[row])) for row in rows]
            yield _stack_samples(samples, samples[0] if samples else _sample(source, 0))

    def _rows(self) -> Sequence[int]:
        """Returns the indices of this process's samples in a global batch, in order."""
        if self._step is None:
            return range(self._size)
        rows: list[int] = self._step.batch_rows().tolist()
        return rows

    def _in_a_row(self) -> Iterator[Any]:
        while self._epochs is None or self._epoch < self._epochs:
            fresh, began = self._iterator is None, self._read
            if self._iterator is None:
                self._iterator = iter(self._source)
            # Batches of earlier steps are read, but not yielded.
            while (wanted := self._global()) is not None:
                self._read += 1
                if self._read > self.step:
                    if self._shift:  # The next batch begins within this one.
                        wanted = self._shift_samples(wanted)
                        if wanted is None:
                            break
                    self.step += 1
                    rows = self._rows()
                    samples = [wanted[row] for row in rows]
                    yield _stack_samples(samples, wanted[0])
            if fresh and self._read == began:
                raise WhaleError(
                    f"batch_size is {self._size}, and a {type(self._source).__name__} "
                    "gave fewer samples, or was read before. Give a source that begins "
                    "anew, or a smaller batch"
                )
            once = self._iterator is self._source
            self._iterator, self._epoch = None, self._epoch + 1
            if once:  # The iterator cannot restart, for example a generator.
                return

    def _shift_samples(self, found: list[Any]) -> list[Any] | None:
        assert self._iterator is not None
        shift, self._shift = self._shift, 0
        more = [*itertools.islice(self._iterator, shift)]
        return [*found[shift:], *more] if len(more) == shift else None

    def _global(self) -> list[Any] | None:
        assert self._iterator is not None
        result = [*itertools.islice(self._iterator, self._size)]
        return result if len(result) == self._size else None


def _check_source(problems: Arguments, source: Any, seed: Any) -> None:
    if isinstance(source, Mapping):
        problems.add(
            "source is a dictionary; expected samples in a list, or an iterable of "
            "them. Of whole arrays: [{'x': x} for x in arrays['x']]"
        )
    elif isinstance(source, str | bytes | type) or not (
        _numbered(source) or _in_a_row(source)
    ):
        problems.refuse("source", source, "samples by number or an iterable of them")
    elif seed is not None and _numbered(source) and len(source) > _MOST_SHUFFLED:
        problems.add(
            f"source has {len(source)} samples, as an endless one says, and its order "
            "is drawn from seed. Give seed=None, which keeps its own order; or the "
            "samples of one epoch, without repeat(), which the feed repeats"
        )


def _check_beginning(problems: Arguments, first: Any, first_sample: Any) -> None:
    problems.whole(
        "first_sample", first_sample, none=True, what="the number of a sample"
    )
    if is_whole(first, 1) and first_sample is not None:
        problems.add(
            f"first is {short_repr(first)} and first_sample "
            f"{short_repr(first_sample)}, and "
            "both say where to begin. Give one of them; "
            "first_sample=state.samples is right with another batch size too"
        )


_LOST = (
    "first_sample is None, which does not say where to begin: state.samples is None "
    "where jax.tree.map or another function has put the state together anew. Keep the "
    "number with dataclasses.replace(new, samples=state.samples), give int(state.step) "
    "* batch_size if all steps took as many samples, or leave first_sample out, which "
    "begins at the first"
)


def _numbered(source: Any) -> TypeGuard[DataSource]:
    return hasattr(source, "__getitem__") and _has_length(source)


def _sample(source: DataSource, number: int) -> Any:
    sample = source[number]
    if sample is None:
        raise WhaleError(
            f"sample {number} of the source is None, as one that a filter leaves out. "
            "Samples by number must all be there: give source.to_iter_dataset(), which "
            "passes over them, or filter before the dataset is made"
        )
    return sample


def _as_text(state: Any) -> Any:
    if not isinstance(state, bytes):
        return state
    return {_BYTES: base64.b64encode(state).decode("ascii")}


def _from_text(state: Any) -> Any:
    if not (isinstance(state, Mapping) and set(state) == {_BYTES}):
        return state
    try:
        return base64.b64decode(state[_BYTES], validate=True)
    except (TypeError, ValueError) as error:
        raise WhaleError(
            f"state['source'] is damaged: its bytes are {short_repr(state[_BYTES])}, "
            "which "
            f"is no base64 ({error}). Give the state that get_state gave"
        ) from error


def _is_step(step: Any) -> TypeGuard[TrainStep]:
    return all(hasattr(step, name) for name in ("batch_rows", "batch_axes", "plan"))


def _in_a_row(source: Any) -> bool:
    single = getattr(source, "ndim", 1) == 0  # a 0-d array
    known = isinstance(source, Iterable) or hasattr(source, "__getitem__")
    return known and not single


def _has_length(source: Any) -> bool:
    try:
        len(source)
    except TypeError:
        return False
    return True


def _batch_mismatches(step: TrainStep, batch_size: int) -> Iterator[str]:
    if {*step.batch_axes} - {0}:
        yield (
            "samples are put together along dimension 0, and this step has batch "
            f"dimensions {list(step.batch_axes)}. Give it global batches yourself"
        )
        return
    planned = {
        leaf.shape[axis]
        for leaf, axis in zip(step.plan.batch, step.batch_axes, strict=True)
        if axis is not None
    }
    if planned != {batch_size}:
        sizes = ", ".join(map(str, sorted(planned)))
        yield f"batch_size is {batch_size}; the plan is for {sizes}"


def _stack_samples(samples: Sequence[Any], like: Any) -> Any:
    """Stacks samples; without samples, returns empty arrays shaped like ``like``."""
    if not samples:
        return jax.tree.map(lambda x: np.asarray(x)[None][:0], like)
    return jax.tree_util.tree_map_with_path(_stack, *samples)


def _stack(path: Any, *leaves: Any) -> Any:
    shapes = dict.fromkeys(map(np.shape, leaves))
    if len(shapes) > 1:
        raise WhaleError(
            f"samples of one batch have {jax.tree_util.keystr(path) or 'arrays'} of "
            f"unlike shapes: {', '.join(map(str, shapes))}. Pad or cut them to one"
        )
    return np.stack(leaves)
