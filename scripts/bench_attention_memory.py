"""Measures the compiled memory of attention in blocks by the length of the sequence.

Layers of a scan get one mask (causal, of padding, or of segments); a training step
(forward and backward) and an evaluation (forward alone) are compiled for sequences of
32,768, 65,536 and 131,072 tokens, on one device and round a ring of four, for TPU
(v5e, v5p) and for CPU. ``attention_memory.json`` beside this script has the results,
with commit and versions; without options the script reads it, and compiles one case,
chosen by --seed, anew for CPU.

    python scripts/bench_attention_memory.py [--refresh] [--only TEXT] [--seed N]

``--refresh`` compiles the missing cases (with ``--only``, all whose names contain
TEXT) in at most an hour; it can be interrupted. The last line is one JSON object:

    cases                         number of stored cases
    doubling_max                  largest ratio of temporaries to those of half the
                                  sequence: 2 is linear, 4 is the square
    doubling                      ratios of each case
    memory_error                  by platform, the largest relative error of today's
                                  prediction of the peak of a training step
    fresh_case, fresh_over_kept   the fresh case; its temporaries over the stored ones
    seed                          seed that chose the fresh case

Temporaries are the peak without the arguments. Up to 0.12 GB of a TPU's temporaries
are in memory on the chip, which no figure counts: in programs that take less than 1 GB
of the other memory, that one grows by more than the temporaries do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from checkout import commit
from paired import eight_devices


eight_devices()

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.experimental import topologies  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax.lowering.train_state import bare  # noqa: E402


FILE: Final = Path(__file__).with_name("attention_memory.json")
TOPOLOGIES: Final = {
    "v5e": {1: "v5e:1x1", 4: "v5e:2x2"},
    "v5p": {1: "v5p:1x1x1", 4: "v5p:2x2x1"},
}
LENGTHS: Final = (32_768, 65_536, 131_072)
RAM: Final = 2**36
"""Memory of a CPU that only compiles."""
VOCAB: Final = 1024
"""Small, because logits are no memory of attention."""


class Layer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> tuple[Any, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(
            y, y, y, mask=mask
        )
        y = nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y), None


class Model(nn.Module):
    """Layers in a scan that share one mask."""

    mask: str
    layers: int
    embed: int

    @nn.compact
    def __call__(self, tokens: Any, segments: Any) -> Any:
        real = segments > 0
        masks = [nn.make_causal_mask(tokens, dtype=bool)]
        if self.mask == "padding":
            masks = [nn.make_attention_mask(real, real, dtype=bool)]
        if self.mask == "segments":
            same = nn.make_attention_mask(segments, segments, jnp.equal, dtype=bool)
            masks.append(same)
        x = nn.Embed(VOCAB, self.embed)(tokens)
        scanned = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.layers,
        )
        x, _ = scanned(self.embed // 128)(x, nn.combine_masks(*masks, dtype=bool))
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


@dataclass(frozen=True)
class Case:
    """A training step or an evaluation.

    Attributes:
        platform: ``"v5e"``, ``"v5p"`` or ``"cpu"``.
        devices: Devices that share the sequence.
        mask: Kind of mask.
        trains: Whether it is a training step.
        length: Tokens of the one sample.
    """

    platform: str
    devices: int
    mask: str
    trains: bool
    length: int

    @property
    def series(self) -> str:
        """Name without the length."""
        ring = f"ring of {self.devices}" if self.devices > 1 else "one device"
        return (
            f"{self.platform} {ring}, {self.mask}, {'step' if self.trains else 'eval'}"
        )

    @property
    def name(self) -> str:
        return f"{self.series}, {self.length}"

    @property
    def topology(self) -> str:
        """Devices that it is compiled for."""
        if self.platform == "cpu":
            return f"cpu:{self.devices}"
        return TOPOLOGIES[self.platform][self.devices]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes with which 32,768 tokens take 1 GB or more of a TPU."""
        if self.platform == "cpu":
            return {"layers": 2, "embed": 256}
        if not self.trains:
            return {"layers": 1, "embed": 8192 if self.devices > 1 else 4096}
        if self.devices > 1:
            return {"layers": 4, "embed": 1024}
        return {"layers": 2, "embed": 512}


CASES: Final = [
    Case(platform, devices, mask, trains, length)
    for platform, passes in (
        ("v5e", (True,)),
        ("v5p", (False,)),
        ("cpu", (True, False)),
    )
    for devices in (4, 1)
    for mask in ("causal", "padding", "segments")
    for trains in passes
    for length in LENGTHS
]


def plan_case(case: Case) -> tuple[Callable[..., Any], Any, wh.Plan]:
    """Returns the loss of a case, its parameters and its plan."""
    model = Model(mask=case.mask, **case.sizes)

    def loss(params: Any, batch: Any) -> Any:
        logits = model.apply({"params": params}, batch["tokens"], batch["segments"])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
        return losses.mean()

    short = jnp.zeros((1, 64), jnp.int32)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), short, short))
    tokens = jax.ShapeDtypeStruct((1, case.length), jnp.int32)
    batch = {"tokens": tokens, "segments": tokens, "targets": tokens}
    cpu = case.platform == "cpu"
    plan = wh.plan(
        loss,
        params["params"],
        batch,
        optimizer=optax.adamw(1e-3),
        cluster=wh.cluster(case.topology).with_memory(RAM) if cpu else case.topology,
        precision="f32" if cpu else "bf16",
        mesh={"context": case.devices},
        attention="ring",
        remat="none",
        offload=(),
        loss_chunks=1,
        num_micro_batches=1,
    )
    return loss, params["params"], plan


def measure_case(case: Case) -> dict[str, Any]:
    """Returns the bytes of a case on one device."""
    loss, params, plan = plan_case(case)
    cpu = case.platform == "cpu"
    step = wh.compile(
        plan,
        loss,
        params,
        optimizer=optax.adamw(1e-3),
        devices=jax.devices()[: case.devices] if cpu else described_tpus(case.topology),
    )
    if case.trains:
        lowered = step.lower()
    else:
        state = bare(step.abstract_state())
        lowered = step._runner._loss.lower(state, step._layout.abstract())
    stats = lowered.compile().memory_analysis()
    inputs = stats.argument_size_in_bytes
    peak = inputs + stats.temp_size_in_bytes if cpu else stats.peak_memory_in_bytes
    return {"peak": peak, "temporaries": peak - inputs}


def described_tpus(topology: str) -> list[Any]:
    """Returns TPUs that do not exist on this machine."""
    lengths = [int(n) for n in topology.partition(":")[2].split("x")]
    is_single = max(lengths) == 1
    options = {"chips_per_host_bounds": (1, 1, 1)} if is_single else {}
    return list(topologies.get_topology_desc(topology, "tpu", **options).devices)


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that follow from the stored results."""
    doubling: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    stored_cases = [case for case in CASES if case.name in results]
    for case in stored_cases:
        result = results[case.name]
        half = results.get(dataclasses.replace(case, length=case.length // 2).name)
        if half is not None:
            ratio = result["temporaries"] / half["temporaries"]
            doubling.setdefault(case.series, []).append(round(ratio, 3))
        if case.trains:
            predicted = plan_case(case)[2].memory.total_bytes
            error = abs(predicted / result["peak"] - 1)
            worst = max(errors.get(case.platform, 0.0), error)
            errors[case.platform] = round(worst, 3)
    return {
        "cases": len(stored_cases),
        "doubling_max": max(ratio for ratios in doubling.values() for ratio in ratios),
        "doubling": doubling,
        "memory_error": errors,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--refresh", action="store_true", help="compile more cases")
    parser.add_argument("--only", default="", help="text in the names of cases")
    parser.add_argument("--seed", type=int, default=None, help="fresh case's seed")
    arguments = parser.parse_args()
    results = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for case in CASES if arguments.refresh else ():
        if arguments.only in case.name and (arguments.only or case.name not in results):
            results[case.name] = {
                **measure_case(case),
                "versions": {
                    "jax": jax.__version__,
                    "jaxlib": metadata.version("jaxlib"),
                },
                "commit": commit(),
            }
            print(case.name, results[case.name], flush=True)
            text = json.dumps(results, indent=1, sort_keys=True)
            FILE.write_text(text + "\n", encoding="utf-8")
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    short = [c for c in CASES if c.platform == "cpu" and c.length == LENGTHS[0]]
    pick = random.Random(seed).choice([c for c in short if c.name in results] or short)
    fresh = measure_case(pick)["temporaries"]
    before = results[pick.name]["temporaries"] if pick.name in results else fresh
    report = {
        **summary(results),
        "fresh_case": pick.name,
        "fresh_over_kept": round(fresh / before, 4),
        "seed": seed,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
