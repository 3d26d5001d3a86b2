"""Memory of attention in blocks by the length of the sequence, as compilers allot it.

Layers of a scan are handed one mask (causal, of padding, or of segments); a training
step (forward and backward) and an evaluation (forward alone) are compiled for sequences
of 32,768, 65,536 and 131,072 tokens, on one device and round a ring of four, for TPU
(v5e, v5p) and for CPU. What was compiled is kept in ``attention_memory.json`` beside
this script, with commit and versions; without options that is read, and one case,
drawn by --seed, is compiled anew for CPU. The last line is one JSON object:

    cases               how many are kept
    doubling_max        the largest ratio of temporaries to those of half the sequence,
                        of all cases: 2 is linear, 4 is the square
    doubling            the ratios of each case
    memory_error        the largest relative error of a peak of a training step, as it
                        is predicted now, by platform
    fresh_case, fresh_over_kept   the drawn case, and its temporaries over those kept

Temporaries are the peak without what lies in memory all the time. Up to 0.12 GB of a
TPU's lie in memory on the chip, which is in no figure: where programs take less than
1 GB of the other, that grows by more than it would without.

    python scripts/bench_attention_memory.py [--refresh] [--only TEXT] [--seed N]

``--refresh`` compiles what is not kept yet (with ``--only``, all whose names hold it),
for an hour or less; it can be interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from checkout import commit
from paired import eight_devices


eight_devices()

import flax.linen as nn  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxlib  # noqa: E402
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
ROOM: Final = 2**36
"""Bytes of a CPU that runs nothing."""
VOCAB: Final = 1024
"""Small: logits are none of attention's memory."""


class Layer(nn.Module):
    """Attention and a perceptron."""

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
    """Layers in a scan that are handed one mask."""

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
        devices: that share the sequence.
        mask: of which kind.
        trains: a training step.
        length: tokens of the one sample.
    """

    platform: str
    devices: int
    mask: str
    trains: bool
    length: int

    @property
    def series(self) -> str:
        """The name without the length."""
        ring = f"ring of {self.devices}" if self.devices > 1 else "one device"
        return (
            f"{self.platform} {ring}, {self.mask}, {'step' if self.trains else 'eval'}"
        )

    @property
    def name(self) -> str:
        return f"{self.series}, {self.length}"

    @property
    def topology(self) -> str:
        """What it is compiled for."""
        if self.platform == "cpu":
            return f"cpu:{self.devices}"
        return TOPOLOGIES[self.platform][self.devices]

    @property
    def sizes(self) -> dict[str, int]:
        """Such that 32,768 tokens take 1 GB or more of a TPU."""
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


def planned(case: Case) -> tuple[Callable[..., Any], Any, wh.Plan]:
    """The loss of a case, its parameters and its plan."""
    model = Model(mask=case.mask, **case.sizes)

    def loss(params: Any, batch: Any) -> Any:
        logits = model.apply({"params": params}, batch["tokens"], batch["segments"])
        found = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["targets"]
        )
        return found.mean()

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
        cluster=wh.cluster(case.topology).with_memory(ROOM) if cpu else case.topology,
        precision="f32" if cpu else "bf16",
        mesh={"context": case.devices},
        attention="ring",
        remat="none",
        offload=(),
        loss_chunks=1,
        num_micro_batches=1,
    )
    return loss, params["params"], plan


def compiled(case: Case) -> dict[str, Any]:
    """Bytes of a case on one device."""
    loss, params, plan = planned(case)
    cpu = case.platform == "cpu"
    step = wh.compile(
        plan,
        loss,
        params,
        optimizer=optax.adamw(1e-3),
        devices=jax.devices()[: case.devices] if cpu else described(case.topology),
    )
    if case.trains:
        lowered = step.lower()
    else:
        state = bare(step.abstract_state())
        lowered = step._runner._loss.lower(state, step._layout.abstract())
    stats = lowered.compile().memory_analysis()
    lying = stats.argument_size_in_bytes
    peak = lying + stats.temp_size_in_bytes if cpu else stats.peak_memory_in_bytes
    return {"peak": peak, "temporaries": peak - lying}


def described(topology: str) -> list[Any]:
    """TPUs that are not there."""
    lengths = [int(n) for n in topology.partition(":")[2].split("x")]
    alone = max(lengths) == 1
    options = {"chips_per_host_bounds": (1, 1, 1)} if alone else {}
    return list(topologies.get_topology_desc(topology, "tpu", **options).devices)


def summary(kept: dict[str, Any]) -> dict[str, Any]:
    """The keys that the kept results make."""
    doubling: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    known = [case for case in CASES if case.name in kept]
    for case in known:
        found = kept[case.name]
        half = kept.get(dataclasses.replace(case, length=case.length // 2).name)
        if half is not None:
            ratio = found["temporaries"] / half["temporaries"]
            doubling.setdefault(case.series, []).append(round(ratio, 3))
        if case.trains:
            predicted = planned(case)[2].memory.total_bytes
            error = abs(predicted / found["peak"] - 1)
            worst = max(errors.get(case.platform, 0.0), error)
            errors[case.platform] = round(worst, 3)
    return {
        "cases": len(known),
        "doubling_max": max(ratio for ratios in doubling.values() for ratio in ratios),
        "doubling": doubling,
        "memory_error": errors,
    }


def main() -> None:
    """Compile what is asked for, and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--refresh", action="store_true", help="compile what is kept")
    parser.add_argument("--only", default="", help="text in the names")
    parser.add_argument("--seed", type=int, default=None, help="of the drawn case")
    arguments = parser.parse_args()
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for case in CASES if arguments.refresh else ():
        if arguments.only in case.name and (arguments.only or case.name not in kept):
            kept[case.name] = {
                **compiled(case),
                "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
                "commit": commit(),
            }
            print(case.name, kept[case.name], flush=True)
            text = json.dumps(kept, indent=1, sort_keys=True)
            FILE.write_text(text + "\n", encoding="utf-8")
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    short = [c for c in CASES if c.platform == "cpu" and c.length == LENGTHS[0]]
    drawn = random.Random(seed).choice([c for c in short if c.name in kept] or short)
    fresh = compiled(drawn)["temporaries"]
    before = kept[drawn.name]["temporaries"] if drawn.name in kept else fresh
    report = {
        **summary(kept),
        "fresh_case": drawn.name,
        "fresh_over_kept": round(fresh / before, 4),
        "seed": seed,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
