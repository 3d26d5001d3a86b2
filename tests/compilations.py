"""Counts what a training step compiles."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class _Compiles(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        found = re.match(r"Compiling jit\((\w+)\)", record.getMessage())
        if found:
            self.names[found[1]] += 1

    @property
    def count(self) -> int:
        """How often the step's program was; of several, the one that was most often."""
        own = re.compile(r"_advance|(forward|backward|weight)_\d+")
        counts = [n for name, n in self.names.items() if own.fullmatch(name)]
        return max(counts, default=0)


@contextmanager
def count_compilations() -> Iterator[_Compiles]:
    """Counts the programs that the training step compiles."""
    handler = _Compiles()
    logger = logging.getLogger("jax._src.interpreters.pxla")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
