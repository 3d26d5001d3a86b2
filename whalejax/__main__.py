"""Entry of ``python -m whalejax`` and of the command ``whalejax``.

The packaging names this module. It calls ``whalejax.cli.main``, and imports nothing
else before.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments after the program's name; None for those of the process.

    Returns:
        Exit status of the process.
    """
    # The user may interrupt the import too, and needs no traceback then.
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
