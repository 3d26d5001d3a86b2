"""The batch of a plan that was read: its containers, names and element types.

Apart from ``validate``, because it knows the text in which ``batch_record`` writes down
the containers of a batch, without JAX.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from whalejax.meshes.errors import Problems
from whalejax.meshes.read_file import Unreadable, parse_json
from whalejax.meshes.texts import quoted
from whalejax.planner.plan_data import PlanData


_DTYPE: Final = re.compile(
    r"bool|u?int(2|4|8|16|32|64)|float(16|32|64)|bfloat16|complex(64|128)"
    r"|float[468]_[a-z0-9_]{1,16}|key<[a-z0-9_]{1,40}>"
)
"""Element types as JAX writes them."""


class _OtherContainersError(Exception):
    """The batch has containers that no plan rebuilds; ``wh.compile`` asks for it."""


def is_dtype(text: str) -> bool:
    """Whether it is the name of an element type, as JAX writes it.

    >>> is_dtype("bfloat16"), is_dtype("key<fry>"), is_dtype("f32")
    (True, True, False)
    """
    return _DTYPE.fullmatch(text) is not None


def check_batch(plan: PlanData, where: str, problems: Problems) -> None:
    """Record what the batch of no plan has.

    Args:
        plan: what was read.
        where: stands before the names of its fields.
        problems: where to record it.
    """
    paths = [leaf.path for leaf in plan.batch]
    for place, leaf in enumerate(plan.batch):
        if not is_dtype(leaf.dtype):
            problems.add(
                f"{where}batch[{place}].dtype is {quoted(leaf.dtype)}; expected as JAX "
                "says, such as 'float32'"
            )
        if paths.index(leaf.path) < place:
            problems.add(
                f"{where}batch[{place}].path is {quoted(leaf.path)}, as that of "
                "another; expected each once"
            )
    if not plan.batch_tree:
        return
    try:
        described = list(_paths(parse_json(plan.batch_tree), ""))
    except (Unreadable, ValueError, TypeError, AttributeError):
        problems.add(
            f"{where}batch_tree is {quoted(plan.batch_tree)}; expected the containers "
            'of a batch, such as {"dict": [["x", "leaf"]]}'
        )
        return
    except _OtherContainersError:
        return
    if described != paths:
        problems.add(
            f"{where}batch_tree has the leaves {quoted(described)}; batch has "
            f"{quoted(paths)}"
        )


def _paths(node: Any, path: str) -> Iterator[str]:
    """Paths of the leaves of a description, as JAX writes them."""
    if node is None:
        return
    if node == "leaf":
        yield path
        return
    ((kind, items),) = node.items()
    if kind == "dict":
        for key, item in items:
            if type(key) not in (str, int):
                raise TypeError("no key of a batch")
            yield from _paths(item, f"{path}[{key!r}]")
    elif kind in ("list", "tuple"):
        for number, item in enumerate(items):
            yield from _paths(item, f"{path}[{number}]")
    elif items == []:
        raise _OtherContainersError
    else:
        raise ValueError("no container")
