"""A process of ``whalejax train --processes``: finds the job and takes part in it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from whalejax.meshes.errors import WhaleError


_USER_ERROR = 2


def _precision(words: Sequence[str]) -> str | dict[str, str]:
    """As ``wh.plan`` takes it; its default where nothing was given."""
    named: dict[str, str] = {}
    for word in words:
        name, _, value = word.rpartition("=")
        named[name] = value
    return named[""] if "" in named else named or "f32"


def main(words: Sequence[str]) -> int:
    """Train until the run is over.

    Args:
        words: one, the options of the command as JSON.
    """
    from whalejax.cli.named_jobs import find_job
    from whalejax.cli.options import named_values
    from whalejax.elastic.training import train_elastic

    options = json.loads(words[0])
    try:
        job = find_job(options["model"], named_values(options["set"]))
        for state, metrics in train_elastic(
            job,
            steps=options["steps"],
            save=options["save"],
            save_every=options["save_every"],
            batch=options["batch"],
            num_micro_batches=options["micro_batches"],
            precision=_precision(options["precision"]),
            seed=options["seed"],
        ):
            print(
                f"step {int(state.step)}  loss {float(metrics['loss']):.6g}", flush=True
            )
    except WhaleError as error:
        print(f"whalejax: {error}", file=sys.stderr, flush=True)
        return _USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
