"""Progress events: planning and compiling report their activities.

Planning and compiling take seconds to minutes. They report their activities here,
independent of terminals; ``whalejax.cli.progress`` shows them if requested. The module
is at the bottom of the import order, so that every package can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


_LISTENER: ContextVar[Callable[[str], None] | None] = ContextVar(
    "whalejax_listener", default=None
)


def tell(what: str) -> None:
    """Reports the start of an activity, such as ``"tracing the model"``."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(what)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Receives the reports inside the block.

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
