"""Questions and answers between the two sections of a recommender.

Messages have step numbers, so a question may arrive twice: a repeated update changes
nothing, and a repeated lookup of a step reads the same rows.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta

from whalejax.wire.messages import (
    Arrays,
    Count,
    Message,
    Question,
    Seconds,
    Text,
    Whole,
)


Address: TypeAlias = tuple[Text, Annotated[int, Meta(gt=0, lt=1 << 16)]]
Widths: TypeAlias = Annotated[
    list[tuple[Count, Whole, Whole, Whole, Whole]], Meta(max_length=4096)
]
"""Width, rows, slots, offset and first id of each buffer."""


# Answers.


class HelloHeard(Message):
    known: bool


class BeginAnswer(Message, tag="begun"):
    """``version`` is that of the restored rows; -1 for none."""

    version: Whole


class RowsPut(Message):
    pass


class RowsChunk(Message):
    arrays: Arrays = ()


class Saved(Message):
    version: Whole


class Vectors(Message):
    """Answer to a lookup: rows with the updates of the first ``version`` steps."""

    version: Whole
    seconds: Seconds
    arrays: Arrays = ()


class Updated(Message):
    version: Whole
    seconds: Seconds


class MadeBatch(Message):
    """The leaves of a batch, followed by the ids of its lookups."""

    seconds: Seconds
    arrays: Arrays = ()


# Questions to the dense section.


class Hello(Question[HelloHeard]):
    rank: Whole
    incarnation: Whole
    address: Address


# Questions to a process that stores tables.


class Begin(Question[BeginAnswer]):
    """Start of a run, with six arrays for each buffer; see ``width_arrays``.

    If ``restores``, the process reads the snapshot of ``version``, or the newest for
    -1. If not, it removes its snapshots.
    """

    staleness: Whole
    optimizer: dict[Text, Any]
    dtype: Text
    widths: Widths
    restores: bool
    version: Whole = -1
    model: Text = ""
    settings: dict[Text, Any] = {}
    batch_size: Whole = -1
    arrays: Arrays = ()


class PutRows(Question[RowsPut]):
    width: Count
    state: Text
    first: Whole
    arrays: Arrays = ()


class GetRows(Question[RowsChunk]):
    width: Count
    state: Text
    first: Whole
    count: Whole


class Commit(Question[Saved]):
    """Applies the updates of the first ``version`` steps, and saves the rows.

    If ``fresh``, the rows already contain the updates. The snapshot of version ``kept``
    is not removed; -1 means none.
    """

    version: Whole
    fresh: bool
    kept: Whole = -1


class Save(Question[Saved]):
    kept: Whole = -1


class LookUp(Question[Vectors]):
    """Lookup of rows. For each buffer, ``arrays`` has ids ``int32[samples, columns]``
    or row numbers ``int32[rows]``.
    """

    step: Whole
    arrays: Arrays = ()


class Update(Question[Updated]):
    """Update of rows. ``arrays`` has the gradients for each buffer, and then the arrays
    of the lookup if the process may lack them.

    The sender has received the vectors of the first ``received`` steps.
    """

    step: Whole
    received: Whole
    arrays: Arrays = ()


class MakeBatch(Question[MadeBatch]):
    step: Whole
