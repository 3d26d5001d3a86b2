"""Runs a script as Python would, and keeps its exit status.

Exit handlers cannot see a SystemExit in Python, so a script that ends with
``sys.exit(3)`` would seem to have succeeded. This module is run by its path and imports
nothing of this package, so that the script alone decides on imports.
"""

import os
import sys
import types
from importlib.machinery import SourceFileLoader


def run_script(path: str) -> None:
    """Runs a script as ``__main__``; its SystemExit stays in ``sys.last_value``.

    Args:
        path: Path of the script, whose own arguments follow it in ``sys.argv``.
    """
    file = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main = types.ModuleType("__main__")
    main.__file__ = file
    main.__loader__ = SourceFileLoader("__main__", file)
    sys.modules["__main__"] = main
    with open(file, "rb") as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
    except SystemExit as error:
        sys.last_value = error
        raise


if __name__ == "__main__":
    del sys.argv[0]
    run_script(sys.argv[0])
