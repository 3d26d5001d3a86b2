"""Times routings of a mixture of experts that drop no token, on one device.

One layer of experts, forward and backward, in turns: with capacity, dropless in passes,
with places for every token at every expert, and with tokens sorted for
``jax.lax.ragged_dot``.

    python scripts/bench_routing.py [--tokens 128] [--groups 16] [--rounds 5]

The last line is one JSON object:

    tokens  tokens of a group
    ratios  times over that of the first routing, within this run
    passes  number of passes that ran
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from whalejax.models import moe
from whalejax.models.common.gating import Queues, queue


EXPERTS = 16
SIZES = {"embed": 256, "mlp": 1024, "experts": EXPERTS, "annotated": False}
CASES: dict[str, dict[str, Any]] = {
    "capacity 1.5": {},
    "dropless, passes of 1": {"routing": "dropless", "capacity_factor": 1.0},
    "dropless, passes of 1.5": {"routing": "dropless"},
    "dropless, passes of 2": {"routing": "dropless", "capacity_factor": 2.0},
    "places for all": {"capacity_factor": EXPERTS / 2},
    "ragged_dot": {},
}
Layer = Callable[[Any, jax.Array], jax.Array]


def ragged_layer(layer: moe.SparseFeedForward, x: jax.Array) -> jax.Array:
    """Computes the layer without drops, by products over groups of sorted tokens."""
    tokens = x.reshape(-1, x.shape[-1])
    queues: Queues = queue(x @ layer.router[...], choices=2)
    chosen = jnp.stack([jnp.argmax(pick, -1) for pick in queues.picks]).ravel()
    weights = jnp.stack(queues.weights).ravel()
    order = jnp.argsort(chosen, stable=True)
    rows = jnp.tile(jnp.arange(len(tokens)), 2)[order]
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    up, down = layer.experts.up[...], layer.experts.down[...]
    hidden = jax.nn.relu(jax.lax.ragged_dot(tokens[rows], up, sizes))
    answers = jax.lax.ragged_dot(hidden, down, sizes) * weights[order][:, None]
    return jnp.zeros_like(tokens).at[rows].add(answers).reshape(x.shape)


def compile_case(name: str, x: jax.Array) -> Callable[[], Any]:
    """Returns a forward and backward pass, which also counts its passes."""
    config = moe.MoEConfig(sequence=x.shape[1], **(SIZES | CASES[name]))
    graph, state = nnx.split(moe.SparseFeedForward(config, rngs=nnx.Rngs(0)))

    def loss(state: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = nnx.merge(graph, state, copy=True)
        if name == "ragged_dot":
            return jnp.mean(ragged_layer(layer, x) ** 2), jnp.ones(())
        y, load = layer(x)
        return jnp.mean(y**2), load.passes

    step = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    program = jax.jit(step).lower(state, x).compile()
    return lambda: jax.block_until_ready(program(state, x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128, help="per group")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    x = jax.random.normal(jax.random.key(1), (arguments.groups, arguments.tokens, 256))
    runs = {name: compile_case(name, x) for name in CASES}
    passes = {name: int(run()[0][1]) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    first = np.array(seconds["capacity 1.5"])
    ratios = {
        n: round(float(np.median(np.array(s) / first)), 2) for n, s in seconds.items()
    }
    for name, ratio in ratios.items():
        print(f"{name:24} {ratio:6.2f} × ({passes[name]} passes)")
    print(json.dumps({"tokens": arguments.tokens, "ratios": ratios, "passes": passes}))


if __name__ == "__main__":
    main()
