"""The parts of a cluster: nodes, levels of links, and the compiler's behaviour."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from whalejax.meshes.checks import Arguments, check_fields
from whalejax.meshes.device_kinds import DeviceKind, Platform


def detour(peers: Any, size: Any) -> Any:
    """Returns the ratio of a member's bandwidth to all peers to that inside a group.

    The group has ``size`` members; the ratio is at least 1.
    """
    return np.maximum(1.0, peers / np.maximum(1, size - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the topology: ``size`` joined groups of the level below.

    A collective over the level takes ``rounds * (latency_seconds + payload_bytes *
    (size - 1) / size / bandwidth_bytes_per_second)``, times ``slowdown_of`` the
    collective. An all-reduce has two rounds, other collectives one. If the level is
    ``shared``, the full payload counts, and the latency once per member. A
    collective-permute takes one step of a ring over one link.

    Attributes:
        name: Name of the link, such as ``"nvlink"``.
        size: Number of joined groups. The product over all levels is the number of
            devices.
        bandwidth_bytes_per_second: Bandwidth per device in one direction. For a ring of
            a torus, it is the sum of both links of the axis.
        latency_seconds: Latency of one all-gather over the full level.
        torus: Whether the level is an axis of a torus; adjacent axes form one torus.
        slowdown: (collective, factor) pairs of measured over computed times, with names
            such as ``"all-to-all"``.
        shared: Whether the members are threads with one memory, like virtual CPU
            devices. Then each member reads and writes the full payload.
        peers: Number of other members to which each member has a direct link, as with
            four GPUs without a switch. The bandwidth is the sum over these links, and a
            smaller group uses only links inside it. 0 if a switch joins the members.
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
        """Whether the cost of mesh axes in this level depends on all of them."""
        return self.shared or self.peers > 0

    def slowdown_of(self, collective: str) -> float:
        """Returns the measured factor of one collective; 1.0 without measurements."""
        return dict(self.slowdown).get(collective, 1.0)

    def payload_fraction(self, size: Any) -> Any:
        """Returns the fraction of the payload that a round moves in a group of a size.

        If only some links of a member lead to the group, the fraction is multiplied by
        the ratio of all its links to these links.
        """
        if self.shared:
            return (size > 1) * 1.0
        part = (size - 1) / size
        return part * self.detour(size) if self.peers else part

    def detour(self, size: Any) -> Any:
        """Returns ``detour`` for a group of a size in this level."""
        return detour(self.peers, size) if self.peers else 1.0

    def waits(self, size: Any) -> Any:
        """Returns the number of latencies per round in a group of a size."""
        return (size > 1) * (size if self.shared else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Devices of one kind in one unit: a server, or a slice of a TPU pod."""

    kind: DeviceKind
    count: int

    def __post_init__(self) -> None:
        check_fields(self, "node of a cluster")


RETIRED_FACTS: Final = ("keeps_halos",)
"""Fields of ``CompilerProfile`` in older files, which are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerProfile:
    """Behaviour of a platform's compiler; each flag is True if the compiler does this.

    Attributes:
        merge_partials: Sums partial results on each device first, and reduces the sum
            over devices once, over the axes of all summed dimensions.
        reduce_scatter: Emits a reduce-scatter if the result is sharded, instead of an
            all-reduce and a slice.
        reduces_in_parts: Reduces a gradient that stays sharded over some of the summed
            axes by a reduce-scatter over these axes and an all-reduce over the others.
            Otherwise it runs an all-reduce over all summed axes and a slice.
        copies_kernels: Transposes kernels and images of convolutions in memory, and
            keeps the transposed kernel for the gradient of the input; see
            ``KERNEL_TURNS``.
        fuses_products: Fuses elementwise operations into the products that read their
            results, which need not be in memory then.
        fuses_normalizations: Fuses a softmax or a norm of rows into one kernel, so that
            intermediate values are not in memory.
        repeats: Recomputes cheap elementwise values in every fusion that reads them,
            instead of storing them.
        widens: Computes 16-bit values in float32, and stores them in float32.
        reduces_at_end: Computes all gradients, each in its own memory, before it
            reduces them. It reduces sharded gradients individually, others at once.
        gathers_first: Gathers all parameters before the computation, each parameter in
            every form in which it is read.
        narrow_products: Multiplies float32 as bfloat16, as JAX's default precision
            allows. Values that only products read are moved and stored as bfloat16.
        keeps_masks: Saves random masks for the backward pass, with one byte per
            element. Otherwise it draws them again.
        merges_regions: Reuses values of the forward pass instead of recomputing a
            checkpointed region with the same inputs. It never merges collectives that
            it inserted, nor operations after them.
        groups_rows: Multiplies each row only by the matrix of its group, if rows are
            sorted by group. Otherwise it multiplies all rows by all matrices and masks
            the results. The gradient of the matrices is always computed in this way.
        lanes: Length of one side of the tiles of arrays in memory; 1 without tiles.
        scatters_whole_torus: Reduce-scatters over all chips of a torus at once.
            Otherwise it runs an all-reduce and a slice if the torus has three lengths
            above 1, or two equal lengths of 4 or more.
        scatters_beyond_torus: Reduce-scatters over chips of several tori at once.
            Otherwise it runs an all-reduce and a slice.
        gathers_whole_torus: All-gathers over all chips of a torus at once. Otherwise it
            runs an all-reduce if the torus has three lengths of 4 or more, or, below 32
            MiB, two lengths of 8 or more.
        hides_updates: Gathers parameters that replicas updated in shards during
            products of weight gradients, on the kinds in ``HIDES_UPDATES_ON``. These
            products, outside loops and of one micro-batch, move to the end of the
            backward pass, if their operands fit in memory.
        scatters_odd_tiles: Reduce-scatters 16-bit values if the number of tiles of the
            last dimension is odd. Otherwise it runs an all-reduce and a slice.
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
            options: XLA options of the compiler. Unknown options change nothing.

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
"""Number of transposes of the kernel in the cost of a convolution on CPU: forward, and
for the gradient of the input.

Fifteen convolutions of 1 × 1 and 3 × 3 were measured on eight devices, with kernels of
0.03 to 9.4 MB. In addition to the products, the forward pass took 1.2 ms per megabyte
of the kernel, and the gradient of the input 2.9 ms."""

IMAGE_TURNS = 2
"""Number of transposes of images and cotangents for the gradient of the kernel.

The convolutions of ``KERNEL_TURNS`` took 2.7 ms per megabyte of both."""

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
"""XLA options that change fields of ``CompilerProfile``: the value of the option, and
the changed fields.

The effects were counted in compiled programs of one collective (libtpu 0.0.42.1), over
groups of many sizes and positions in tori of 2×2 to 16×16 and 2×2×1 to 16×16×16 chips.
"""


def _truth(value: Any) -> bool | None:
    """Returns the Boolean value of an XLA option; None if it has none."""
    text = str(value).lower()
    if text in ("true", "t", "1", "yes", "y"):
        return True
    return False if text in ("false", "f", "0", "no", "n") else None


# Counted in compiled programs (``scripts/verified.json``), for GPUs in programs of an
# H100. Other fields have the defaults of the class.
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
