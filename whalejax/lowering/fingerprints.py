"""What an optimizer keeps, in a few digits that processes compare.

Processes whose optimizers are of another form compile other programs, and wait for
each other's collectives. An optimizer is functions, and tracing its update takes longer
than all else that ``wh.compile`` does: what is compared is the state that it keeps,
which tells transformations apart but not their numbers.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Final

import jax


if TYPE_CHECKING:
    from whalejax.lowering.spmd import Program


_ADDRESS: Final = re.compile(r"0x[0-9a-f]+")
"""Functions are printed with theirs, which differ between processes."""


def fingerprint(program: Program) -> str:
    """Twelve hexadecimal digits of the state that an optimizer keeps.

    Args:
        program: whose optimizer updates its parameters; structure, shapes and types of
            both count.
    """
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.adapter.params
    )
    state = jax.eval_shape(program.optimizer.init, params)
    leaves = jax.tree.leaves((params, state))
    forms = [(x.shape, str(x.dtype)) for x in leaves]
    text = _ADDRESS.sub("", f"{jax.tree.structure(state)} {forms}")
    return hashlib.sha256(text.encode()).hexdigest()[:12]
