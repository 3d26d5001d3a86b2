"""Step time and memory of many runs at once, with given layouts.

Everything is an array over the runs, so a table needs one pass. A fit of the constants
evaluates the same formulas. ``workload`` has the work of the runs, and
``meshes.fitted_constants`` the speed of devices. Simulated schedules give the waits of
stages.

The module is long because all terms of a step are computed from the same arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from whalejax.estimates.decoder import recomputed_shares
from whalejax.estimates.published_run import PublishedRun
from whalejax.estimates.workload import (
    COPIES,
    EMBED,
    GROUPS,
    HEAD,
    LAYER,
    REPLICAS,
    SHARDS,
    Axes,
    HeldParameters,
    MicroBatchWork,
    arrays,
    copies_of_experts,
    levels_of,
    link_waits,
    wires,
    work_of,
)
from whalejax.meshes.catalogue import CatalogueEntry
from whalejax.meshes.fitted_constants import Achieved, Constants, pace_of, shape_share
from whalejax.meshes.topology import detour
from whalejax.planner.balance.shares import even_shares
from whalejax.planner.pipeline.schedules import schedule
from whalejax.planner.pipeline.simulate import STEADY_AFTER, simulate


Array = np.ndarray
ALIGNED = 8
"""Divisor of a product's sizes, in 16-bit elements, for full speed."""

STATE_BYTES = 12
"""Bytes of a parameter's float32 copy and Adam's moments."""

CAST_AHEAD, CAST_BEHIND = 4, 8
"""Bytes of memory traffic per parameter for its cast to 16 bits in every micro-batch,
and for the cast of its gradient to float32.

They are the float32 sides of both casts; the 16-bit sides are products' operands. One
of the float32 sides is added to.
"""

CAST_BYTES = 2
"""Bytes that a kernel writes for an 8-bit operand of the next product."""

WEIGHT_BYTES = 2
"""Bytes of a parameter in computation and in gathers."""

MASTER_BYTES = 4
"""Bytes of a parameter that every micro-batch casts to 16 bits itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predictions as arrays, with one entry per run.

    Attributes:
        step_seconds: Step time in seconds.
        compute_seconds: Seconds of products, memory traffic and tensor-parallel
            collectives of all micro-batches, on the slowest stage.
        bubble_seconds: Seconds in which stages wait for each other.
        exposed_seconds: Seconds of data-parallel collectives that do not overlap.
        update_seconds: Seconds of the optimizer's update.
        layer_seconds: Seconds of both passes of one layer and micro-batch.
        peak_bytes: Memory of the fullest device in bytes.
    """

    step_seconds: Array
    compute_seconds: Array
    bubble_seconds: Array
    exposed_seconds: Array
    update_seconds: Array
    layer_seconds: Array
    peak_bytes: Array


class Runs:
    """Work of many runs, ready to be evaluated.

    Attributes:
        runs: Runs to evaluate.
        stretch: Step time of each run's pipeline, divided by that of its slowest stage.
    """

    def __init__(self, runs: Sequence[PublishedRun]) -> None:
        self.runs = tuple(runs)
        self.work: tuple[MicroBatchWork, ...] = tuple(work_of(run) for run in runs)
        self.entries: tuple[CatalogueEntry, ...] = tuple(run.device for run in runs)
        self.frozen = np.array([run.frozen for run in runs], dtype=bool)
        self.like = self._like()
        self.kernels = arrays(
            [(i, k) for i in np.unique(self.like) for k in self.work[i].kernels]
        )
        self.stretch = np.ones(len(self.runs))
        self.halvings = self._halvings()
        self._devices()
        self._traffic()
        self._parameters()

    def _like(self) -> Array:
        """Returns the first run that has equal layers and micro-batches as each run."""
        result: dict[PublishedRun, int] = {}
        first = []
        for i, run in enumerate(self.runs):
            sizes = replace(run.sizes, layers=1)
            alike = replace(run, sizes=sizes, num_devices=1, data=1, stages=1)
            alike = replace(alike, chunks=1, zero=0, global_batch=1, unlike=())
            alike = replace(alike, loss_chunks=1)
            first.append(result.setdefault(alike, i))
        return np.array(first, dtype=int)

    def _halvings(self) -> Array:
        """Returns how many halvings each product's rows are from alignment."""
        k, halvings = self.kernels, np.full(len(self.kernels["run"]), ALIGNED)
        for name in ("m", "k", "n"):
            size = np.where(k["weight"] & (name == "m"), ALIGNED, np.rint(k[name]))
            halvings = np.gcd(halvings, np.maximum(1, size).astype(int))
        launched = ~np.array([r.framework.compiled for r in self.runs], dtype=bool)
        counts = launched[k["run"]] & k["product"] & ~k["attention"]
        return np.where(counts, np.log2(ALIGNED / halvings), 0.0)

    def _column(self, values: Any) -> Array:
        return np.array([float(v) for v in values])

    def _devices(self) -> None:
        kinds = [e.kind for e in self.entries]
        pairs = list(zip(self.runs, kinds, strict=True))
        self.peak = self._column(k.peak_flops(r.multiplied) for r, k in pairs)
        self.half_peak = self._column(k.peak_flops("bf16") for k in kinds)
        self.memory = self._column(k.memory_bytes_per_second for k in kinds)
        self.cores = self._column(k.cores for k in kinds)
        self.gpu = np.array([k.platform == "gpu" for k in kinds])
        rated = {(k.name, k.watts, k.flops_per_second, r.speed): k for r, k in pairs}
        places = {key: place for place, key in enumerate(rated)}
        self._types = [(kind, key[-1]) for key, kind in rated.items()]
        self._type = np.array(
            [places[k.name, k.watts, k.flops_per_second, r.speed] for r, k in pairs],
            dtype=int,
        )
        self.eight = np.array([r.dtype in ("f8", "f4") for r in self.runs])
        self._platforms = sorted({k.platform for k in kinds})
        self._platform = np.array([self._platforms.index(k.platform) for k in kinds])
        self.behind = self._column(
            max(0, k.attention_generation - r.framework.attention_generation)
            for r, k in pairs
        )
        self.compiled = np.array([r.framework.compiled for r in self.runs])
        self.profiled = np.array([r.framework.kernels_only for r in self.runs])
        self.overlaps = np.array([r.framework.overlaps_gradients for r in self.runs])
        node, network = [], []
        for entry in self.entries:
            if entry.torus is not None:
                # Both directions of every axis carry a collective at once.
                link = entry.torus.link
                node.append(link.bandwidth_bytes_per_second * 2 * entry.torus.dims)
            else:
                assert entry.node is not None
                node.append(entry.node.bandwidth_bytes_per_second)
            outer = entry.network or entry.node
            network.append(outer.bandwidth_bytes_per_second if outer else node[-1])
        self.node, self.network = self._column(node), self._column(network)
        self.peers = self._column(
            e.node.peers if e.node and e.node.peers >= r.devices_per_node - 1 else 0
            for r, e in zip(self.runs, self.entries, strict=True)
        )

    def _traffic(self) -> None:
        """Computes the bytes and steps of activations: (place, forward, level, run)."""
        count = len(self.runs)
        self.wire = np.zeros((3, 2, 2, count))
        self.beside = np.zeros((3, 2, 2, count))
        self.latency = np.zeros((3, 2, count))
        self.meetings = np.zeros(count)
        self.begun = np.zeros((3, 2, count))
        for i in np.unique(self.like):
            run, hops = self.runs[i], link_waits(self.entries[i])
            for t in self.work[i].traffic:
                sizes = levels_of(run, t.axes)
                beside = run.framework.overlaps_layers and t.place == LAYER
                beside = beside and "expert" not in t.axes
                here = self.beside if beside else self.wire
                for level, (nbytes, steps) in enumerate(
                    wires(t.kind, t.payload_bytes, sizes)
                ):
                    if level == 0:
                        nbytes *= detour(self.peers[i], sizes[0])
                    here[t.place, int(t.forward), level, i] += nbytes * t.count
                    if steps:
                        begun = t.count if level == 0 else 0
                        self.begun[t.place, int(t.forward), i] += begun
                        wait = hops[level][0] + steps * hops[level][1]
                        self.latency[t.place, int(t.forward), i] += wait * t.count
                if t.place == LAYER:
                    self.meetings[i] += t.count * (math.prod(sizes) - 1)

    def _parameters(self) -> None:
        dense, expert, ends = [], [], []
        for run in self.runs:
            s = run.sizes
            networks = s.experts * s.network_params
            here = run.layers_per_stage / run.tensor
            dense.append(here * (s.layer_params - networks))
            expert.append(here * networks / run.expert)
            head = s.head_params or (s.hidden * s.vocab if run.stages > 1 else 0)
            both = (s.embedding_params, head)
            ends.append((max(both) if run.stages > 1 else sum(both)) / run.tensor)
        self.ends = self._column(ends)
        self.dense = self._column(dense) + self.ends
        self.expert = self._column(expert)
        self.ranks = self._column(r.weight_ranks for r in self.runs)
        self.shards = self._column(r.shards for r in self.runs)
        experts = self._column(r.expert for r in self.runs)
        self.held = (
            HeldParameters(
                params=self.dense,
                copies=self.ranks,
                shards=self.shards,
                levels={axes: self._levels(levels_of, axes) for axes in GROUPS},
            ),
            HeldParameters(
                params=self.expert,
                copies=np.maximum(1.0, self.ranks / experts),
                shards=np.maximum(1.0, self.shards / experts),
                levels={axes: self._levels(copies_of_experts, axes) for axes in GROUPS},
            ),
        )
        self.parts = self._column(r.num_micro_batches for r in self.runs)
        self.zero = self._column(r.zero for r in self.runs)
        self.gradient = self._column(r.framework.gradient_bytes for r in self.runs)
        self.gradient *= 1 - self.frozen
        self.cast = self._column(
            r.autocast * r.sizes.layer_params / r.tensor / r.expert for r in self.runs
        )
        self.weights = self._column(r.itemsize_bytes for r in self.runs)
        self.stages = self._column(r.stages for r in self.runs)
        self.layers = self._column(r.layers_per_stage for r in self.runs)
        self.mean_layers = self._column(r.sizes.layers / r.stages for r in self.runs)
        self.fused = np.array([r.framework.fused_accumulation for r in self.runs])
        self.remat = np.array([r.remat for r in self.runs])
        # The last entry is for products outside layers.
        self.recomputed = np.array(
            [(*recomputed_shares(r.remat, r.sizes), 0.0) for r in self.runs]
        )

    def _levels(
        self,
        found: Callable[[PublishedRun, tuple[str, ...]], tuple[int, int]],
        axes: Axes,
    ) -> Array:
        return np.array([found(r, axes) for r in self.runs], dtype=float).T

    def shares(self, constants: Constants, name: str) -> Array:
        """Returns one constant of every run's platform."""
        known = [getattr(constants.platforms[p], name) for p in self._platforms]
        shares: Array = np.array(known, dtype=float)[self._platform]
        return shares

    def _efficiency(self, constants: Constants, dtype: str = "") -> Array:
        """Returns the largest fraction of the peak, in every run's dtype or another."""
        known = [
            constants.efficiency_of(kind, dtype or speed).share
            for kind, speed in self._types
        ]
        efficiency: Array = np.array(known)[self._type]
        return efficiency

    def _bandwidth(self, constants: Constants) -> Array:
        known = [constants.memory_of(kind) for kind, _ in self._types]
        bandwidth: Array = self.memory * np.array(known)[self._type]
        return bandwidth

    def _node(self, constants: Constants) -> Array:
        kinds = [(e.kind.family, e.kind.platform) for e in self.entries]
        known = {key: constants.node_of(*key) for key in set(kinds)}
        node: Array = self.node * np.array([known[key] for key in kinds])
        return node

    def _kernel_seconds(self, constants: Constants) -> tuple[Array, Array]:
        k, run = self.kernels, self.kernels["run"]
        whole = self._efficiency(constants)
        half = self._efficiency(constants, "bf16")
        # Attention's products stay in 16 bits if other products run in 8.
        eight = self.eight[run]
        inside = k["product"] & k["scores"] & eight
        peak = np.where(inside, self.half_peak[run], self.peak[run])
        # The speed of an attention kernel is a fraction of the peak itself.
        most = np.where(inside, half[run], whole[run])
        rate = peak * np.where(k["attention"], 1.0, most)
        get = {name: self.shares(constants, name)[run] for name in Achieved.__slots__}
        curve, cores = SimpleNamespace(**get), self.cores[run]
        pace = pace_of(peak, cores)
        m, depth, n, batch = (k[name] for name in ("m", "k", "n", "batch"))
        forward_share = shape_share(m, depth, n, batch, cores, curve, pace)
        left = shape_share(m, n, depth, batch, cores, curve, pace)
        right = shape_share(depth, m, n, batch, cores, curve, pace)
        aligned = get["unaligned"] ** self.halvings
        forward_share = forward_share * aligned
        backward_share = 0.5 * (left + right) * aligned
        longest = np.maximum(k["m"], k["n"])
        # A device whose power limits its products has no more power for kernels.
        kernel = (
            np.minimum(get["attention"], most)
            * get["attention_before"] ** self.behind[run]
        )
        kernel = kernel * longest / (longest + get["attention_half"])
        ahead = np.where(k["attention"], kernel, forward_share)
        behind = np.where(k["attention"], kernel / 1.25, backward_share)
        flops = 2.0 * k["m"] * k["k"] * k["n"] * k["batch"] * k["share"]
        bandwidth = self._bandwidth(constants)[run]
        launched = np.where(
            self.compiled[run], get["kernel_seconds"], get["launch_seconds"]
        )
        gradients = k["gradients"] - (k["product"] & k["weight"] & self.frozen[run])
        passes = np.maximum(gradients, 1)
        forward = k["forward_bytes"] / bandwidth
        backward = k["backward_bytes"] / bandwidth
        forward = np.where(
            k["product"], np.maximum(flops / rate / ahead, forward), forward
        )
        backward = np.where(
            k["product"],
            gradients * np.maximum(flops / rate / behind, backward / passes),
            backward,
        )
        # Parameters are cast to 8 bits once per step, activations and gradients here.
        narrow = np.where(k["product"] & eight & ~inside, CAST_BYTES / bandwidth, 0.0)
        forward = forward + narrow * k["m"] * k["k"] * k["batch"]
        backward = backward + narrow * k["m"] * k["n"] * k["batch"]
        forward = forward + launched
        backward = backward + launched * gradients
        return forward * k["count"], backward * k["count"]

    def places(self, constants: Constants) -> tuple[Array, Array]:
        """Returns forward and backward seconds of one micro-batch, (place, run)."""
        k, run = self.kernels, self.kernels["run"]
        forward, backward = self._kernel_seconds(constants)
        again = self._recomputed_shares()
        backward = backward + forward * again
        count = len(self.runs)
        ahead, behind = np.zeros((3, count)), np.zeros((3, count))
        for place in (EMBED, LAYER, HEAD):
            here = k["place"] == place
            ahead[place] = np.bincount(run, weights=forward * here, minlength=count)
            behind[place] = np.bincount(run, weights=backward * here, minlength=count)
        ahead, behind = ahead[:, self.like], behind[:, self.like]
        cast = self.cast / self._bandwidth(constants)
        ahead[LAYER] += cast * CAST_AHEAD
        behind[LAYER] += cast * CAST_BEHIND
        self._dispatch(ahead, behind, again, constants)
        # Ranks wait for the slowest host, so exchanges add to the host's time as well
        # as the device's.
        sent = self._wires(constants)
        return ahead + sent[0], behind + sent[1]

    def _recomputed_shares(self) -> Array:
        k, run = self.kernels, self.kernels["run"]
        remat = self.remat[run]
        scores = (k["scores"] & ~k["attention"]).astype(float)
        products = self.recomputed[run, k["part"]]
        products = np.where(remat == "full", 1.0, products)
        shares = np.where(k["product"], products, 1.0)
        shares = np.where(remat == "selective", scores, shares)
        result: Array = np.where((remat == "none") | (k["place"] != LAYER), 0.0, shares)
        return result

    def _wires(self, constants: Constants) -> tuple[Array, Array]:
        network = self.network * self.shares(constants, "network")
        links = (self._node(constants), network)
        exposed = 1.0 - self.shares(constants, "overlap_layers")
        wire = self.wire + exposed * self.beside
        seconds = wire[:, :, 0] / links[0] + wire[:, :, 1] / links[1] + self.latency
        seconds = seconds + self.begun * self.shares(constants, "node_seconds")
        ahead, behind = seconds[:, 1], seconds[:, 0].copy()
        whole = self.remat == "full"
        behind[LAYER] += whole * ahead[LAYER]
        return ahead[:, self.like], behind[:, self.like]

    def _dispatch(
        self, ahead: Array, behind: Array, again: Array, constants: Constants
    ) -> None:
        """Raises a layer's time to its launch time, if a host launches operations."""
        k, run = self.kernels, self.kernels["run"]
        here = k["place"] == LAYER
        launches = (1.0 + k["gradients"] + again) * k["count"] * here
        number = np.bincount(run, weights=launches, minlength=len(self.runs))[self.like]
        # If hosts limit the speed, ranks wait for the slowest host.
        host = number * self.shares(constants, "dispatch_seconds")
        late = self.shares(constants, "jitter_seconds") * self.meetings[self.like]
        host = np.where(self.compiled | ~self.gpu | self.profiled, 0.0, host + late)
        device = ahead[LAYER] + behind[LAYER]
        blend = self.shares(constants, "blend")
        both = (device**blend + host**blend) ** (1.0 / blend)
        ahead[LAYER] *= both / device
        behind[LAYER] *= both / device

    def price(self, constants: Constants, *, settle: bool = True) -> Estimate:
        """Returns the predictions of all runs.

        Args:
            constants: Fitted speeds of devices.
            settle: Whether to compute the waits of pipelines again; default: True. If
                not, the previous waits are used, as between the rounds of a fit.
        """
        ahead, behind = self.places(constants)
        layers = self.mean_layers
        layer = ahead[LAYER] + behind[LAYER]
        ends = np.stack([ahead[p] + behind[p] for p in (EMBED, HEAD)])
        alone = self.stages == 1
        slowest = layers * layer + np.where(alone, ends.sum(axis=0), ends.max(axis=0))
        if settle:
            self._settle(ahead, behind, slowest, constants)
        slowest = slowest + self._accumulated(constants)
        alone_on_device = self.compiled | self.profiled
        slowest = slowest + np.where(
            alone_on_device, 0.0, self.shares(constants, "micro_seconds")
        )
        busy = self.parts * slowest
        compute = busy * self.stretch
        exposed = self._exposed(compute, constants)
        owned = sum(one.params / one.owners(self.zero) for one in self.held)
        moved = owned * ~self.frozen * self.shares(constants, "update_bytes")
        update = np.where(self.profiled, 0.0, moved / self.memory)
        fixed = self.shares(constants, "step_seconds")
        fixed = np.where(alone_on_device, 0.0, fixed)
        return Estimate(
            step_seconds=compute + exposed + update + fixed,
            compute_seconds=busy,
            bubble_seconds=compute - busy,
            exposed_seconds=exposed,
            update_seconds=update,
            layer_seconds=layer,
            peak_bytes=self.peak_bytes(constants),
        )

    def _accumulated(self, constants: Constants) -> Array:
        nbytes = (self.dense + self.expert) * (WEIGHT_BYTES + 2 * self.gradient)
        nbytes = nbytes * ((self.parts > 1) & ~self.fused & ~self.frozen)
        result: Array = nbytes / self._bandwidth(constants)
        return result

    def _settle(
        self, ahead: Array, behind: Array, slowest: Array, constants: Constants
    ) -> None:
        share = self.shares(constants, "point")
        here = self.node / detour(self.peers, 2)
        for i, run in enumerate(self.runs):
            if run.stages == 1:
                continue
            tokens = run.micro_batch * run.sizes.seq / run.context
            tokens /= run.tensor if run.sequence_parallel else 1
            sent = run.itemsize_bytes * tokens * run.sizes.hidden
            near = run.devices_per_node >= run.num_devices
            link = (here if near else self.network)[i] * share[i]
            counts = even_shares(run.sizes.layers, run.stages * run.chunks)
            step = pipeline_seconds(
                run,
                _along(counts, ahead[:, i]),
                _along(counts, behind[:, i]),
                sent / link,
            )
            self.stretch[i] = step / (run.num_micro_batches * slowest[i])

    def _exposed(self, compute: Array, constants: Constants) -> Array:
        node = self._node(constants)
        network = self.network * self.shares(constants, "network")
        hop = np.where(self.gpu, self.shares(constants, "ring_seconds"), 0.0)

        def once(each_bytes: float | Array, axes: Axes, *, sharded: bool) -> Array:
            total = np.zeros(len(self.runs))
            for one in self.held:
                nbytes = one.params * each_bytes / (one.shards if sharded else 1.0)
                inside, nodes = one.levels[axes]
                near = nbytes * (inside - 1) / inside / node
                near = near * detour(self.peers, inside)
                total += near + nbytes / inside * (nodes - 1) / nodes / network
            return total

        sharded = self.zero >= 1
        reduced = once(self.gradient, COPIES, sharded=False)
        gathered = once(WEIGHT_BYTES, COPIES, sharded=False)
        sent = sum(one.params for one in self.held) * self.gradient
        buckets = 1.0 + sent / self.shares(constants, "bucket_bytes")
        rings = hop * (self.ranks - 1) * buckets
        gradients = reduced + np.where(sharded, gathered + rings, reduced)
        hidden = np.where(
            self.overlaps, self.shares(constants, "overlap_gradients"), 0.0
        )
        # The reduction follows the last micro-batch's backward pass, and the gather
        # precedes the first one's forward pass. Both overlap with one micro-batch's
        # computation.
        room = compute / self.parts * hidden
        exposed = np.maximum(gradients * (1 - hidden), gradients - room)
        exposed = np.where((self.ranks > 1) & ~self.frozen, exposed, 0.0)
        # In each micro-batch, shards are gathered twice and reduced once; replicas of
        # the shards exchange once per step.
        each = 2 * once(self.weights, SHARDS, sharded=False)
        each = each + once(self.gradient, SHARDS, sharded=False)
        rounds = np.where(self.frozen, 2.0, 3.0)
        each = each + rounds * hop * (self.shards - 1) * (self.layers + 1)
        across = 2 * once(self.gradient, REPLICAS, sharded=True)
        total = each * self.parts + across
        share = self.shares(constants, "overlap_parameters")
        fsdp = np.maximum(total * (1 - share), total - share * compute)
        result: Array = np.where((self.zero >= 3) & (self.shards > 1), fsdp, exposed)
        return result

    def peak_bytes(self, constants: Constants) -> Array:
        """Returns the memory of the fullest device in bytes."""
        total: Array = self._used_bytes + self.shares(constants, "reserve_bytes")
        return total

    @functools.cached_property
    def _used_bytes(self) -> Array:
        result = []
        owners = [(one.params, one.owners(self.zero)) for one in self.held]
        for i, (run, work) in enumerate(zip(self.runs, self.work, strict=True)):
            params = self.dense[i] + self.expert[i]
            # XLA's programs cast gradients to float32, the dtype of stored parameters.
            least = 4 if run.framework.xla else WEIGHT_BYTES
            gradient = max(least, run.framework.gradient_bytes)
            trained = not run.frozen
            static = 0.0
            for number, among in owners:
                static += number[i] * (
                    WEIGHT_BYTES / (among[i] if run.zero >= 3 else 1)
                    + trained * gradient / (among[i] if run.zero >= 2 else 1)
                    + trained * STATE_BYTES / (among[i] if run.zero >= 1 else 1)
                )
            kept = "full" if run.offloaded else run.remat
            layers = run.layers_per_stage * run.in_flight
            saved = work.saved_bytes[kept] * layers
            working = work.saved_bytes["none"] if run.remat != "none" else 0.0
            head = work.head_bytes / run.loss_chunks if run.stages == 1 else 0.0
            if run.zero >= 3:
                width = MASTER_BYTES if run.autocast else WEIGHT_BYTES
                working += 2 * width * params / run.layers_per_stage
                if run.stages == 1 and not run.framework.xla:
                    # Parameters outside layers stay gathered, with unsharded gradients.
                    head += (1 + trained) * width * self.ends[i]
            result.append(static + saved + max(working, head))
        return np.array(result)


def _along(counts: Sequence[int], places: Array) -> list[float]:
    along = [count * float(places[LAYER]) for count in counts]
    along[0] += float(places[EMBED])
    along[-1] += float(places[HEAD])
    return along


def pipeline_seconds(
    run: PublishedRun,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float,
) -> float:
    """Returns the step time of a pipeline, by its simulated schedule.

    Once every stage has a micro-batch, each further one takes the slowest stage's time.
    So only the rows up to that point are simulated.

    Args:
        run: Run with its schedule, stages and micro-batches.
        forward, backward: Seconds of one micro-batch in each part of the model.
        transfer: Seconds from one part to the next.
    """
    parts, chunks = run.num_micro_batches, run.chunks
    few = min(parts, STEADY_AFTER * run.stages)
    if chunks > 1:
        # Chunks alternate in rounds of the stages.
        few = few // run.stages * run.stages
    if few == 0:
        forward, backward = (
            [math.fsum(seconds[stage :: run.stages]) for stage in range(run.stages)]
            for seconds in (forward, backward)
        )
        chunks, few = 1, parts
    name = "interleaved" if chunks > 1 else "1f1b"
    table = schedule(name, run.stages, few, chunks)
    result = simulate(table, forward, backward, transfer)
    pace = max(result.busy_seconds) / few
    return result.step_seconds + (parts - few) * pace
