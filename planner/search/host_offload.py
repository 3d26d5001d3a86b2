"""Host memory of one search: what can be offloaded, its bytes and its transfer times.

The offloadable activations, parameters and state depend only on the model and its
optimizer. The search asks this module for the costs under each layout.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from whalejax.meshes.cluster import Cluster
from whalejax.planner.cost_terms import OFFLOADS
from whalejax.planner.memory.live_sets import AnalysedProgram
from whalejax.planner.search.request import OffloadableState, Request
from whalejax.planner.sharding.offload_candidates import (
    exposed_seconds,
    hosts_known,
)
from whalejax.planner.sharding.parameter_layout import LeafFacts, LeafLayout
from whalejax.planner.sharding.shard_counts import LeafShardCounts


Offload = tuple[str, ...]

NOTHING_WAITS = "no activations to keep in host memory"
NOTHING_IS_SLICED = "no parameters to keep in host memory"
UPDATED_IN_OTHER_SHARDS = (
    "parameters in host memory are updated in the shards in which they are stored"
)


@dataclass(frozen=True)
class HostMemoryLimits:
    """Offloadable state of one search, its bytes and its transfer times.

    Attributes:
        program: Analysed operations of the loss.
        cluster: Devices and links of the cluster.
        request: Options that the user fixed.
        facts: Parameters of the model, in groups of equal ones.
    """

    program: AnalysedProgram
    cluster: Cluster
    request: Request
    facts: LeafFacts

    @functools.cached_property
    def streamed(self) -> OffloadableState:
        """State that the optimizer can update in chunks.

        In estimates, an optimizer that can update no state in chunks counts as one that
        can update all of it.
        """
        request = self.request
        result = OffloadableState() if request.hosted is None else request.hosted()
        if not request.estimate:
            return result
        return OffloadableState(
            state=result.state
            if any(result.state.values())
            else request.optimizer.by_path,
            params=result.params or frozenset(t.path for t in self.facts.tensors),
        )

    @functools.cached_property
    def state(self) -> list[int]:
        """Bytes of each parameter's optimizer state that may be in host memory."""
        return [self.streamed.state.get(t.path, 0) for t in self.facts.tensors]

    @functools.cached_property
    def leaves(self) -> list[bool]:
        """Whether each parameter itself may be in host memory."""
        sliced, streamed = self.program.sliced, self.streamed.params
        anywhere = self.request.estimate and not sliced
        return [
            (anywhere or t.id in sliced) and t.path in streamed
            for t in self.facts.tensors
        ]

    @property
    def is_host_memory_known(self) -> bool:
        """Whether the cluster gives the size and transfer rate of host memory."""
        return hosts_known(self.cluster)

    @property
    def nothing(self) -> str:
        """Reason why the model cannot offload as requested; empty if it can."""
        asked = self.request.offload or ()
        if "activations" in asked and not self.program.waiting:
            return NOTHING_WAITS
        return NOTHING_IS_SLICED if "params" in asked and not any(self.leaves) else ""

    def serves(self, layouts: Sequence[LeafLayout], offload: Offload) -> bool:
        """Returns whether some parameter can be offloaded, or none has to be.

        Args:
            layouts, offload: Arguments of ``params_on_host``.
        """
        return "params" not in offload or any(self.params_on_host(layouts, offload))

    def on_paper(self) -> list[Offload]:
        """Returns the offload options of estimates that no executor supports."""
        if not self.is_host_memory_known:
            return []
        runs = dataclasses.replace(
            self, request=dataclasses.replace(self.request, estimate=False)
        )
        kept = [*itertools.chain(*runs.options())]
        return [one for some in self.options() for one in some if one not in kept]

    def options(self) -> Iterator[list[Offload]]:
        """Yields lists of offload options, from few to many offloaded terms.

        A list is used only if no option of the lists before it fits.
        """
        asked = self.request.offload
        yield [() if asked is None else asked]
        if asked is not None or not self.is_host_memory_known:
            return
        # An optimizer that reads all its state at once can offload none.
        there = {
            "optimizer": any(self.state),
            "activations": bool(self.program.waiting),
            "params": any(self.leaves),
            "gradients": self.request.estimate and any(self.leaves),
        }
        each = [name for name in OFFLOADS if there[name]]
        for size in range(1, len(each) + 1):
            yield [
                some
                for some in itertools.combinations(each, size)
                if "gradients" not in some or "params" in some
            ]

    def state_bytes(
        self, cuts: Sequence[LeafShardCounts], offload: Offload, shares: Any = None
    ) -> Any:
        """Returns the bytes of one device's optimizer state in host memory, by case.

        Args:
            cuts: Shard counts of each group of parameters.
            offload: Names of the offloaded memory terms.
            shares: Fraction of each group of parameters on the device; None for all.
        """
        if "optimizer" not in offload:
            return 0
        state_bytes: Any = 0
        for (nbytes, group), times in self._state_counts.items():
            here = times * (nbytes // cuts[group].optimizer.num_shards)
            state_bytes = state_bytes + (
                here if shares is None else here * shares[group]
            )
        return state_bytes

    @functools.cached_property
    def _state_counts(self) -> Counter[tuple[int, int]]:
        return Counter(zip(self.state, self.facts.group_of, strict=True))

    def params_on_host(
        self, layouts: Sequence[LeafLayout], offload: Offload
    ) -> list[bool]:
        """Returns whether each parameter is in host memory.

        A parameter stays on the device if its update uses other shards than its
        storage. It would otherwise be gathered on the device before the update.

        Args:
            layouts: Layout of each group of parameters.
            offload: Names of the offloaded memory terms.
        """
        if "params" not in offload:
            return [False] * len(self.facts.tensors)
        return [
            may and layouts[group].param == layouts[group].optimizer
            for may, group in zip(self.leaves, self.facts.group_of, strict=True)
        ]

    def host_param_counts(
        self, cuts: Sequence[LeafShardCounts], offload: Offload
    ) -> list[Any]:
        """Returns how many parameters of each group are in host memory, by case.

        Args:
            cuts: Shard counts of each group of parameters.
            offload: Names of the offloaded memory terms.
        """
        host_param_counts: list[Any] = [0] * len(cuts)
        if "params" in offload:
            for may, group in zip(self.leaves, self.facts.group_of, strict=True):
                host_param_counts[group] += may
            host_param_counts = [
                count * cut.is_updated_as_stored
                for count, cut in zip(host_param_counts, cuts, strict=True)
            ]
        return host_param_counts

    def params_bytes(self, cuts: Sequence[LeafShardCounts], offload: Offload) -> Any:
        """Returns the bytes of one device's parameters in host memory, by case.

        Args:
            cuts: Shard counts of each group of parameters.
            offload: Names of the offloaded memory terms.
        """
        groups = zip(
            self.facts.groups, cuts, self.host_param_counts(cuts, offload), strict=True
        )
        return sum(
            count * (group.nbytes // cut.param.num_shards)
            for (group, _), cut, count in groups
        )

    def seconds(
        self,
        state: Any,
        params: Any,
        waiting: Any,
        passes: tuple[Any, Any],
        count: Any,
    ) -> Any:
        """Returns the seconds that transfers to and from host memory add to a step.

        They are 0 if the transfer rate is unknown. Arrays have one number per case.

        Args:
            state: Bytes of optimizer state of one device.
            params: Bytes of parameters of one device, which each pass reads.
            waiting: Bytes of activations of one micro-batch on one device.
            passes: Compute seconds of one micro-batch in the forward and backward pass.
            count: Number of micro-batches in a step.
        """
        link = min(k.host_link_bytes_per_second or 0.0 for k in self.cluster.kinds)
        if not link:
            return 0.0
        moved = waiting + params
        each = (exposed_seconds(moved, link, compute) for compute in passes)
        # The loop over chunks of state waits for each transfer, so nothing overlaps.
        return 2 * (state + params) / link + count * sum(each)


def unhosted(
    offload: Sequence[str],
    hosts: Callable[[], OffloadableState],
    *,
    has_optimizer: bool,
) -> Iterator[str]:
    """Yields the reasons why no executor keeps the requested state in host memory.

    Args:
        offload: Names of the memory terms to offload.
        hosts: Function that returns the offloadable state; called only if needed.
        has_optimizer: Whether there is an optimizer.
    """
    if "gradients" in offload:
        yield (
            "no executor of this version keeps gradients in host memory. Leave "
            "'gradients' out, or estimate with runnable=False"
        )
    if "params" in offload and not hosts().params:
        yield (
            "this optimizer does not update parameters element by element (it uses "
            "norms or noise, or a wrapper adds branches), so they cannot pass through "
            "the device in chunks. Choose another optimizer, or offload=()"
        )
    if "optimizer" in offload and has_optimizer and not any(hosts().state.values()):
        yield (
            "this optimizer has no state that is updated element by element, such as "
            "Adam's or momentum's, so no state can pass through the device in chunks. "
            "Choose another optimizer, or offload=()"
        )
