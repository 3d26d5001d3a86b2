"""Runs a script as Python would, and keeps with which status it ends.

Python forgets a SystemExit before what looks on at the exit could see it, so that who
ends by ``sys.exit(3)`` would be taken for one that ended well. Started by its path and
importing nothing of ours, so that the script alone says what is imported and when.
"""

import os
import sys
import types
from importlib.machinery import SourceFileLoader


def run_script(path: str) -> None:
    """Runs a script as ``__main__``; a SystemExit of it stays in ``sys.last_value``.

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
