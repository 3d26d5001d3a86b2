"""Progress events: planning and compiling report what they do.

Planning and compiling take seconds to minutes. They say what they do here, and know
nothing of terminals; ``whalejax.cli.progress`` shows it where somebody wants to see
it. It stands at the bottom of the import order, so that every room can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar(
    "whalejax_listener", default=None
)


def tell(what: str) -> None:
    """Says what begins now, such as ``"tracing the model"``; often to nobody."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Hears what is told inside the block.

    Args:
        listener: Function that receives the name of each activity.

    >>> heard = []
    >>> with listening(heard.append):
    ...     tell("searching")
    >>> heard
    ['searching']
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)
