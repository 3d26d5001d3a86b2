"""``python -m whalejax`` and the ``whalejax`` command: two names for one entry.

It is a separate module because the packaging names it. It only calls
``whalejax.cli.main``, so that finding the command never costs an import.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name; those of the process if None.

    Returns:
        Exit status of the process.
    """
    # A user who interrupts the import needs no traceback.
    interrupts = threading.current_thread() is threading.main_thread()
    interrupts &= signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from whalejax.cli.main import main as run
    finally:
        if interrupts:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
