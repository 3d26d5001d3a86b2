"""A script with embedding tables over its processes, of which so many are let in."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def make_job() -> Any:
    """Tables of several widths; 48 samples, which 1 to 4, 6 and 8 devices divide."""
    import jax
    import optax

    import whalejax as wh
    from tests.whalejax.test_table_replacing import make_batch
    from tests.whalejax.test_table_step import loss, make_net

    def make_model(key: Any) -> Any:
        scale = 1 + jax.random.uniform(key)
        return jax.tree.map(lambda x: x * scale, make_net("float32"))

    def batch(step: int, size: int) -> Any:
        assert size == 48
        return make_batch(step)

    # Small rates, so that differences of rounding do not grow over the steps.
    optimizer = optax.sgd(1e-3, momentum=0.9)
    return wh.Job(loss, make_model, batch, optimizer, batch_size=48)


def main() -> None:
    options = json.loads(sys.argv[1])
    flag = f"--xla_force_host_platform_device_count={options['devices']}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

    from tests.whalejax.elastic.spread_script import wait_for_seat

    out = Path(options["out"])
    seat = wait_for_seat(out)

    import jax

    import whalejax as wh

    with (out / f"steps.{os.getpid()}.jsonl").open("a", buffering=1) as lines:
        for state, metrics in wh.train_elastic(
            make_job(),
            steps=options["steps"],
            save=options["save"],
            save_every=options["save_every"],
            copy_every=options["copy_every"],
            tables=wh.sparse_optimizer("adagrad", 0.01),
            replace_every=options.get("replace_every"),
        ):
            said = {
                "step": int(state.step),
                "loss": float(metrics["loss"]),
                "count": jax.process_count(),
                "generation": metrics["generation"],
            }
            lines.write(json.dumps(said) + "\n")
            time.sleep(options["pause"])
    seat.close()


if __name__ == "__main__":
    main()
