"""The parts of a cluster: nodes, levels of links, and the compiler's behaviour.

Plain data, separate from ``Cluster`` because the modules that build and that check
clusters share only these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.meshes.checks import Arguments, check_fields
from whalejax.meshes.device_kinds import DeviceKind, Platform


def detour(peers: Any, size: Any) -> Any:
    """Returns the bandwidth to all ``peers`` over that inside a group, at least 1."""
    return np.maximum(1.0, peers / np.maximum(1, size - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the topology: ``size`` joined groups of the level below.

    A collective over the level takes ``rounds * (latency_seconds + payload_bytes *
    (size - 1) / size / bandwidth_bytes_per_second)``, with two rounds for an all-reduce
    and one otherwise, times ``slowdown_of`` the collective. If the level is ``shared``,
    the full payload counts, and the latency once for each member. A collective-permute
    takes one step of a ring instead, over one link.

    Attributes:
        name: Name of the link, such as ``"nvlink"``.
        size: Number of joined groups; the sizes' product is the number of devices.
        bandwidth_bytes_per_second: Bandwidth per device in one direction. On a ring of
            a torus it is that of both links of the axis together.
        latency_seconds: Latency of one all-gather over the full level.
        torus: Whether the level is one axis of a torus; adjacent ones form one torus.
        slowdown: (collective, factor) pairs of measured deviations from the formula;
            names such as ``"all-to-all"``.
        shared: Whether the members are threads over one memory, as virtual CPU devices
            are: each of them reads and writes the payload, whatever their number.
        peers: Number of other members to which each has a direct link, as with four
            GPUs without a switch. The bandwidth is that of all these links, and a
            collective in a smaller group uses only the links inside it. 0 if a switch
            gives the full bandwidth to any of them.
    """

    name: str
    size: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    torus: bool = False
    slowdown: tuple[tuple[str, float], ...] = ()
    shared: bool = False
    peers: int = 0

    def __post_init__(self) -> None:
        check_fields(self, "level of a cluster")

    @property
    def needs_whole_level(self) -> bool:
        """Whether consecutive axes in the level cannot be priced separately."""
        return self.shared or self.peers > 0

    def slowdown_of(self, collective: str) -> float:
        """Returns the measured factor of one collective; 1.0 without measurements."""
        return dict(self.slowdown).get(collective, 1.0)

    def payload_fraction(self, size: Any) -> Any:
        """Returns the fraction of the payload that one round moves in a group of a
        size.

        If only some of a member's links lead to the group, the fraction is multiplied
        by the ratio of all links to these.
        """
        if self.shared:
            return (size > 1) * 1.0
        part = (size - 1) / size
        return part * self.detour(size) if self.peers else part

    def detour(self, size: Any) -> Any:
        """Returns the ratio of a member's full bandwidth to that inside a group."""
        return detour(self.peers, size) if self.peers else 1.0

    def waits(self, size: Any) -> Any:
        """Returns the number of latencies in one round in a group of a size."""
        return (size > 1) * (size if self.shared else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices of one kind in one unit: a server, or a slice of a TPU pod."""

    kind: DeviceKind
    count: int

    def __post_init__(self) -> None:
        check_fields(self, "node of a cluster")


RETIRED_FACTS: Final = ("keeps_halos",)
"""Facts about compilers that older files contain and that are no longer read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerProfile:
    """Behaviour of a platform's compiler.

    Attributes:
        merge_partials: Sums partial results locally first, and reduces the sum over
            devices once. One reduction covers the axes of several dimensions.
        reduce_scatter: Emits reduce-scatter if the result is sharded, instead of an
            all-reduce and a slice.
        reduces_in_parts: Whether gradients sharded over some axes of their sum are
            scattered over these axes, and the parts reduced over the others. Otherwise
            an all-reduce over all axes is followed by a slice.
        copies_kernels: Transposes kernels and images of convolutions in memory, and
            keeps the transposed kernel for the gradient of the input; see
            ``KERNEL_TURNS``.
        fuses_products: Computes a product's operands inside it, so that the results of
            elementwise operations before it need not be in memory.
        fuses_normalizations: Makes one kernel of a softmax or a norm of rows, so that
            values between its passes do not go through memory.
        repeats: Recomputes cheap elementwise values in every fusion that reads them,
            rather than keep their result.
        widens: Computes 16-bit values in float32, and keeps them so.
        reduces_at_end: Computes all gradients, each in its own memory, before it
            reduces them: all at once, or individually if they are sharded afterwards.
        gathers_first: Gathers all parameters before it computes with any, each in every
            form in which it is read.
        narrow_products: Multiplies float32 as bfloat16, as JAX's default precision
            allows. Values that only products read are moved and stored as bfloat16.
        keeps_masks: Saves random masks for the backward pass, one byte each; otherwise
            they are drawn again.
        merges_regions: Reuses values of the forward pass instead of recomputing a
            checkpointed region that receives the same values. A collective that the
            compiler made itself is not merged, nor its successors.
        groups_rows: If rows are sorted by group, multiplies each by the matrix of its
            group only. If not, it multiplies all rows by the matrices of all groups and
            masks the rest; so do all compilers for the gradient of the matrices.
        lanes: Length of one side of memory's tiles for arrays; 1 for plain arrays.
        scatters_whole_torus: Reduce-scatters over all chips of a torus at once. If not,
            it runs an all-reduce and a slice if the torus has three lengths above 1, or
            two equal ones of 4 or more.
        scatters_beyond_torus: Reduce-scatters over chips of a torus and of others at
            once. If not, it runs an all-reduce and a slice.
        gathers_whole_torus: All-gathers over all chips of a torus at once. If not, it
            runs an all-reduce if the torus has three lengths of 4 or more, or, below 32
            MiB, two of 8 or more.
        hides_updates: Gathers parameters that replicas updated in shards inside
            products, on the kinds in ``HIDES_UPDATES_ON``. For that, all products of
            weights' gradients, outside loops and of one micro-batch, are delayed to the
            end of the backward pass; none if their operands do not fit the memory.
        scatters_odd_tiles: Reduce-scatters 16-bit values whose last dimension keeps an
            odd number of tiles. If not, it runs an all-reduce and a slice.
    """

    merge_partials: bool
    reduce_scatter: bool
    reduces_in_parts: bool = True
    copies_kernels: bool = False
    fuses_products: bool = False
    fuses_normalizations: bool = False
    repeats: bool = True
    widens: bool = False
    reduces_at_end: bool = False
    gathers_first: bool = False
    narrow_products: bool = False
    keeps_masks: bool = dataclasses.field(
        default=False, metadata={"unless_default": True}
    )
    merges_regions: bool = dataclasses.field(
        default=False, metadata={"unless_default": True}
    )
    groups_rows: bool = dataclasses.field(
        default=False, metadata={"unless_default": True}
    )
    hides_updates: bool = dataclasses.field(
        default=False, metadata={"unless_default": True}
    )
    lanes: int = 1
    scatters_whole_torus: bool = True
    scatters_beyond_torus: bool = True
    gathers_whole_torus: bool = True
    scatters_odd_tiles: bool = True

    def __post_init__(self) -> None:
        check_fields(self, "compiler of a cluster")
        problems = Arguments("compiler of a cluster")
        problems.whole("lanes", self.lanes, least=1)
        problems.raise_if_any()

    def under(self, options: Mapping[str, Any]) -> CompilerProfile:
        """Returns the profile under options that change collectives.

        Args:
            options: XLA options of the compiler; unknown ones change nothing.

        >>> COMPILERS["tpu"].under({KEEPS_SCATTERS: True}).scatters_whole_torus
        True
        """
        problems = Arguments("under")
        problems.of("options", options, Mapping, "options of the compiler by name")
        problems.raise_if_any()
        result = self
        for option, value in options.items():
            known, changed = _OPTIONS.get(option, (False, {}))
            if changed and _truth(value) == known:
                result = dataclasses.replace(result, **changed)
        return result


KERNEL_TURNS = (1, 2)
"""Number of transposes of a kernel in the cost of a convolution on CPU: forward, and
for the input's gradient.

Measured on fifteen convolutions on eight devices, of 1 × 1 and 3 × 3, with kernels of
0.03 to 9.4 MB: beyond their products, 1.2 ms per megabyte of the kernel forward and 2.9
for the gradient of the input."""

IMAGE_TURNS = 2
"""Number of transposes of images and cotangents for the kernel's gradient.

Measured on the same convolutions: 2.7 ms per megabyte of both."""

KEEPS_SCATTERS = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
"""Option that keeps reduce-scatters over all chips of a torus unchanged."""

HIDES_UPDATES_ON = frozenset({"v5e"})
"""Kinds on which libtpu 0.0.42.1 hides updates; v5p and v6e wait for each gather."""

_OPTIONS: Mapping[str, tuple[bool, Mapping[str, bool]]] = {
    KEEPS_SCATTERS: (True, {"scatters_whole_torus": True}),
    "xla_tpu_enable_async_collective_fusion": (False, {"hides_updates": False}),
    "xla_tpu_enable_latency_hiding_scheduler": (False, {"hides_updates": False}),
    "xla_tpu_enable_all_reduce_scatter_fusion": (False, {"reduce_scatter": False}),
}
"""Options that change facts: the value that changes them, and their new values.

Counted in programs of one collective that libtpu 0.0.42.1 compiled, over groups of many
sizes and positions in tori of 2×2 to 16×16 chips and 2×2×1 to 16×16×16.
"""


def _truth(value: Any) -> bool | None:
    """Returns a Boolean option as compilers read it; None if it is not Boolean."""
    text = str(value).lower()
    if text in ("true", "t", "1", "yes", "y"):
        return True
    return False if text in ("false", "f", "0", "no", "n") else None


# Counted in compiled programs (``scripts/verified.json``), for GPU in those of an H100;
# the rest are the class's defaults.
COMPILERS: Mapping[Platform, CompilerProfile] = {
    "tpu": CompilerProfile(
        merge_partials=True,
        reduce_scatter=True,
        reduces_in_parts=False,
        fuses_products=True,
        narrow_products=True,
        groups_rows=True,
        hides_updates=True,
        lanes=128,
        scatters_whole_torus=False,
        scatters_beyond_torus=False,
        gathers_whole_torus=False,
        scatters_odd_tiles=False,
    ),
    "gpu": CompilerProfile(
        merge_partials=True,
        reduce_scatter=True,
        reduces_in_parts=False,
        fuses_normalizations=True,
        keeps_masks=True,
    ),
    "cpu": CompilerProfile(
        merge_partials=False,
        reduce_scatter=False,
        copies_kernels=True,
        repeats=False,
        widens=True,
        reduces_at_end=True,
        gathers_first=True,
        merges_regions=True,
    ),
}
