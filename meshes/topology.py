"""The parts of a cluster: nodes, levels of links, and the compiler's habits.

Plain data without behaviour of their own, apart from ``Cluster`` so that the modules
which build clusters and the one which checks them share no more than these.
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
    """Bandwidth of links to so many peers over that of those among so many members."""
    return np.maximum(1.0, peers / np.maximum(1, size - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the topology: groups of ``size`` of the level below, joined.

    A collective over the level takes ``rounds * (latency_seconds + payload_bytes *
    (size - 1) / size / bandwidth_bytes_per_second)``, with two rounds for an
    all-reduce and one otherwise, times ``slowdown_of`` the collective. Where the level
    is ``shared``, the payload counts whole and the latency once for each member.

    Attributes:
        name: Name of the link, such as ``"nvlink"``.
        size: Number of groups that are joined; the sizes multiply to the devices.
        bandwidth_bytes_per_second: Per device, one direction. On a ring of a torus
            it is that of both links of the axis together.
        latency_seconds: Latency of one all-gather over the whole level.
        torus: The level is one axis of a torus; adjoining ones form one torus.
        slowdown: (collective, factor) pairs by which it was measured to differ from
            the formula; names as in ``"all-to-all"``.
        shared: The members are threads over one memory, as virtual CPU devices are:
            each of them reads and writes the payload, however many there are.
        peers: Number of other members to which each has a link of its own, as four GPUs
            without a switch have; the bandwidth is that of all these links, and a
            collective among fewer members uses those between them. 0 where a switch
            gives all of it to any of them.
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
        """Axes that follow each other in the level cannot be priced one by one."""
        return self.shared or self.peers > 0

    def slowdown_of(self, collective: str) -> float:
        """The measured factor of one collective; 1.0 where nothing was measured."""
        return dict(self.slowdown).get(collective, 1.0)

    def payload_fraction(self, size: Any) -> Any:
        """Part of the payload that one round moves among so many members.

        Where only some of a member's links lead to the others, it counts as often as
        all of them would be faster.
        """
        if self.shared:
            return (size > 1) * 1.0
        part = (size - 1) / size
        return part * self.detour(size) if self.peers else part

    def detour(self, size: Any) -> Any:
        """Bandwidth of all links of a member over that of those to so many members."""
        return detour(self.peers, size) if self.peers else 1.0

    def waits(self, size: Any) -> Any:
        """Returns the number of latencies in one round among so many members."""
        return (size > 1) * (size if self.shared else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices of one kind under one roof: a server, or a slice of a TPU pod."""

    kind: DeviceKind
    count: int

    def __post_init__(self) -> None:
        check_fields(self, "node of a cluster")


RETIRED_FACTS: Final = ("keeps_halos",)
"""Facts of compilers that older files hold and nothing asks for any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerProfile:
    """Treatment of partial sums by a platform's compiler.

    Attributes:
        merge_partials: Adds partial sums up before it reduces them over devices once,
            over the axes of several dimensions at a time.
        reduce_scatter: Emits reduce-scatter where the result is sharded, instead of an
            all-reduce and a slice.
        reduces_in_parts: Reduces a gradient that is sharded over some of the axes that
            it is summed over by scattering it over these and reducing the parts over
            the others, not by reducing the whole over all and cutting it.
        copies_kernels: Turns kernels and images of convolutions round in memory, and
            keeps the kernel that it turned for the gradient of the input; see
            ``KERNEL_TURNS``.
        fuses_products: Computes what a product reads inside it, so that the results of
            elementwise operations before it need not stand in memory.
        fuses_normalizations: Makes one kernel of a softmax or a norm of rows, so that
            what its passes hand each other does not cross memory.
        repeats: Computes what is elementwise and cheap again in every fusion that reads
            it, rather than keep its result.
        widens: Computes what is of 16 bits in float32, and keeps it so.
        reduces_at_end: Reduces gradients when all are there, each into memory of its
            own; all at once, or one by one where they are cut into shards afterwards.
        gathers_first: Gathers all parameters before it computes with any, each in every
            form in which it is read.
        narrow_products: Multiplies float32 as bfloat16, as JAX's default precision lets
            it, and moves and keeps what only products read in that type.
        keeps_masks: Masks that are drawn at random are kept for the backward pass, a
            byte each; if not, they are drawn again.
        merges_regions: Takes what a checkpointed region computes again from the forward
            pass, where the region is given the same values. A collective that the
            compiler made itself is not merged, nor what follows from it.
        groups_rows: Multiplies rows that are sorted by group by the matrix of their
            own group alone. If not, it multiplies all rows by the matrices of all
            groups and masks what is not asked for; so do all compilers for the
            gradient of the matrices.
        lanes: Memory holds arrays in tiles, of which one side is this long; 1 where
            it holds them as they are.
        scatters_whole_torus: Reduce-scatters over all chips of a torus at once. If
            not, it reduces the whole and cuts it where the torus has three lengths
            above 1, or two equal ones of 4 or more.
        scatters_beyond_torus: Reduce-scatters over chips of a torus and of others at
            once. If not, it reduces the whole and cuts it.
        gathers_whole_torus: All-gathers over all chips of a torus at once. If not, it
            puts together by an all-reduce where the torus has three lengths of 4 or
            more, and what is smaller than 32 MiB where it has two of 8 or more.
        hides_updates: Gathers parameters that replicas updated in shards inside
            products, on the kinds in ``HIDES_UPDATES_ON``. Products of weights'
            gradients, outside loops and of one micro-batch, wait for that to the end
            of the backward pass, as long as memory holds what they read.
        scatters_odd_tiles: Reduce-scatters 16-bit values whose last dimension is left
            with an odd number of tiles. If not, it reduces the whole and cuts it.
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
"""By how many turns of a kernel a convolution is priced on CPU: forward, and for the
input's gradient.

As fifteen convolutions took on eight devices, of 1 × 1 and 3 × 3, with kernels of 0.03
to 9.4 MB: beyond their products, 1.2 ms a megabyte of the kernel forward and 2.9 for
the gradient of the input."""

IMAGE_TURNS = 2
"""By how many turns of images and their cotangents the gradient of the kernel is.

In the same fifteen, 2.7 ms a megabyte of both."""

KEEPS_SCATTERS = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
"""Option under which reduce-scatters over all chips of a torus stay what they are."""

HIDES_UPDATES_ON = frozenset({"v5e"})
"""Kinds on which libtpu 0.0.42.1 does so; v5p and v6e wait for each gather."""

_OPTIONS: Mapping[str, tuple[bool, Mapping[str, bool]]] = {
    KEEPS_SCATTERS: (True, {"scatters_whole_torus": True}),
    "xla_tpu_enable_async_collective_fusion": (False, {"hides_updates": False}),
    "xla_tpu_enable_latency_hiding_scheduler": (False, {"hides_updates": False}),
    "xla_tpu_enable_all_reduce_scatter_fusion": (False, {"reduce_scatter": False}),
}
"""Options that change facts: the value that does, and what becomes of them.

As counted in programs that libtpu 0.0.42.1 compiled: one collective alone, over groups
of many sizes and places of tori from 2×2 to 16×16 chips and 2×2×1 to 16×16×16.
"""


def _truth(value: Any) -> bool | None:
    """A switch as compilers read it, or None where it is none."""
    text = str(value).lower()
    if text in ("true", "t", "1", "yes", "y"):
        return True
    return False if text in ("false", "f", "0", "no", "n") else None


# As counted in compiled programs (``scripts/verified.json``); for GPU in those of an
# H100, and what they do not show is as the class says.
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
