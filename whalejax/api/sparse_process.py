"""A process of the sparse section, which stores, looks up and updates rows.

``whalejax.sections.sparse_section`` starts it with ``python -m``, and replaces it if it
dies. It ends with its parent process, or when the ssh connection ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whalejax.processes.local_processes import die_with_parent
from whalejax.sections.row_service import BatchMaker, RowService
from whalejax.wire.connection import listen
from whalejax.wire.keys import load_key
from whalejax.wire.section_messages import Hello
from whalejax.wire.service import Caller, Service


_HELLO_SECONDS = 60.0


def find_maker(model: str, settings: Mapping[str, Any], batch_size: int) -> BatchMaker:
    """Returns a function that makes a job's batches.

    The last arrays of a batch are the ids of all lookups.

    Args:
        model: Name of the job on the command line.
        settings: Options of the job.
        batch_size: Number of samples of a global batch.
    """
    import jax

    from whalejax.adapters.abstract_models import abstract_model
    from whalejax.adapters.base import adapt
    from whalejax.api.named_jobs import find_job
    from whalejax.tables.loss_cut import cut_program

    job = find_job(model, settings)
    adapter = adapt(abstract_model(job), job.loss_fn).without_values()
    program = cut_program(adapter, job.batch_at(0, batch_size))
    ids_of = jax.jit(program.ids)

    def make(step: int) -> Sequence[np.ndarray]:
        leaves = [
            np.asarray(x) for x in jax.tree.leaves(job.batch_at(step, batch_size))
        ]
        return [*leaves, *(np.asarray(ids) for ids in ids_of(leaves))]

    return make


def main(words: Sequence[str]) -> None:
    """Serves until the parent process ends.

    Args:
        words: Command-line arguments; the only one has the settings as JSON.
    """
    settings = json.loads(words[0])
    die_with_parent()
    if settings["parent"] and os.getppid() != settings["parent"]:
        return
    key = load_key(Path(settings["key"]))
    rows = RowService(Path(settings["folder"]), find_maker)
    service = Service(listen(settings["host"]), key, rows.handlers)
    caller = Caller(key)
    host, port = settings["address"]
    hello = Hello(
        rank=settings["rank"],
        incarnation=settings["incarnation"],
        address=service.address,
    )
    if not caller.ask((host, port), hello, seconds=_HELLO_SECONDS).known:
        return
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1:])
