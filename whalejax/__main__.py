"""``python -m whalejax`` and the ``whalejax`` command: two names for one entry.

It is its own module because the packaging names it, and it does nothing but defer to
``whalejax.cli.main``, so that finding the command never costs an import.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the words after the program's name; those of the process when ``None``.

    Returns:
        The exit status of the process.
    """
    from whalejax.cli.main import main as run

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
