"""Errors of searches without a feasible layout.

Each message names the parameter, the numbers and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from whalejax.meshes.errors import Problems
from whalejax.meshes.units import count_text, gigabytes
from whalejax.planner.model.dimensions import roles_of
from whalejax.planner.model.graph import RAGGED, Tensor
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.search.host_offload import (
    NOTHING_IS_SLICED,
    NOTHING_WAITS,
    UPDATED_IN_OTHER_SHARDS,
)
from whalejax.planner.search.layout_search import (
    BATCH_DOES_NOT_DIVIDE,
    HALO_IS_WIDER,
    NO_SEQUENCE,
    NO_SPACE,
    SEQUENCE_DOES_NOT_DIVIDE,
    SPACE_DOES_NOT_DIVIDE,
    Search,
    fixed_space,
)
from whalejax.planner.sharding.layout import divisors
from whalejax.planner.sharding.metadata_constraints import pins_of
from whalejax.planner.sharding.strategies import (
    NEEDS_AN_AXIS,
    NO_EXPERTS,
    NO_TENSOR,
    Choice,
    sharded_by_split,
)


MOST_LEAVES = 4
"""Largest number of dimensions that a message lists for one region."""


_AXES = {
    NO_EXPERTS: "expert",
    NO_SEQUENCE: "context",
    NO_TENSOR: "tensor",
    SEQUENCE_DOES_NOT_DIVIDE: "context",
}
"""Mesh axis of each reason that concerns one axis."""


def refusal(searches: Sequence[Search], *, open_remat: bool = True) -> PlanError:
    """Returns the error for searches without a feasible plan.

    Args:
        searches: Searches of all programs, none of which has a plan that fits.
        open_remat: Whether the user left remat to the planner; default: True.
    """
    search = min(searches[::-1], key=_lacks)
    if search.hosting.nothing == NOTHING_WAITS:
        return PlanError(_nothing_waits(search, open_remat=open_remat))
    if search.hosting.nothing == NOTHING_IS_SLICED:
        return PlanError(_nothing_is_sliced())
    if search.scored:
        full = any(policy == "full" for _, policy in search.request.remat or ())
        weighed = sum(search.weighed for search in searches)
        return _nothing_fits(search, weighed, more=not (open_remat or full))
    devices = count_text(search.request.num_devices, "device")
    problems = Problems(f"no layout of {devices} serves this model", PlanError)
    for text in (*_unobeyed_pins(search), *_indivisible(search)):
        problems.add(text)
    fixed = search.request.mesh or {}
    if BATCH_DOES_NOT_DIVIDE in search.refused:
        problems.add(_batch(search))
        if "context" in fixed and SEQUENCE_DOES_NOT_DIVIDE in search.refused:
            problems.add(_reason(search, SEQUENCE_DOES_NOT_DIVIDE))
    if not problems:
        # Other axes were tried by the planner alone.
        asked = {w for w in search.refused if _AXES.get(w, "") in ("", *fixed)}
        for why in sorted(asked or search.refused):
            problems.add(_reason(search, why))
    text = problems.text()
    if _may_leave_idle(search):
        text += "\nTo leave some devices idle, give allow_idle=True (--allow-idle)"
    return PlanError(text)


def _may_leave_idle(search: Search) -> bool:
    """Returns whether fewer devices are possible, by the user's mesh and marks."""
    request = search.request
    marks = (mark for graph in search.graph.task_graphs for mark in graph.marks)
    fixed = request.mesh or any(mark.devices is not None for mark in marks)
    return not fixed and request.num_devices == search.cluster.num_devices > 1


def _reason(search: Search, why: str) -> str:
    """Returns why meshes were refused, with the user's mesh and a remedy."""
    fixed = " × ".join(f"{a} {n}" for a, n in (search.request.mesh or {}).items())
    given = f"mesh= fixes {fixed}" if fixed else "no mesh gives it"
    marks = (m.kind for g in search.graph.task_graphs for m in g.marks)
    replicated = search.request.default == "replicate" or "replicate" in marks
    outside = " outside replicate" if replicated else ""
    remedies = {
        NO_SEQUENCE: (
            f"{_sorted_rows(search, 'tokens of a sample stay together')}No dimension "
            "that can be sharded occurs twice in a product, as the sequence does in "
            "attention: leave context out"
        ),
        SEQUENCE_DOES_NOT_DIVIDE: _padding(search),
        NO_SPACE: _no_space(search),
        SPACE_DOES_NOT_DIVIDE: _extents(search),
        HALO_IS_WIDER: _wide_halos(search),
        UPDATED_IN_OTHER_SHARDS: (
            "ZeRO 1 and 2 update in other shards: take zero=0, with fsdp instead of "
            "data where parameters are to be sharded"
        ),
        NEEDS_AN_AXIS: "Leave devices for tensor or expert, or remove the mark",
        NO_TENSOR: f"No weights{outside} can be sharded: leave tensor out",
        NO_EXPERTS: (
            f"{_sorted_rows(search, 'every device needs all experts')}No product of "
            f"activations with weights has a batch dimension{outside}, such as an "
            "einsum over experts has: leave expert out"
        ),
    }
    return f"{why}; {given}. {remedies.get(why, 'Change one of the two')}"


def _sorted_rows(search: Search, means: str) -> str:
    """Returns a sentence on rows sorted by expert, or an empty text without them."""
    if all(op.kind not in RAGGED for op in search.graph.ops):
        return ""
    return (
        "Rows that are sorted by expert (jax.lax.ragged_dot) can be sharded only along "
        f"the batch, by data and fsdp: {means}. "
    )


def _padding(search: Search) -> str:
    """Returns the length to which a sequence would be padded, and the added memory."""
    parts = (search.request.mesh or {}).get("context", 2)
    padding = []
    for role in search.options.sequence:
        size = search.options.sizes[role]
        more = -size % parts
        if not more:
            continue
        kept = [k for k in search.residents.saved if role in roles_of(k.layout)]
        nbytes = sum(k.nbytes * k.count for k in kept) * more // size // parts
        padding.append(
            f"It is {size} long: pad it to {size + more} ({more / size:.1%} more; its "
            f"activations then take {gigabytes(nbytes)} more on each device) and mask "
            "the padding"
        )
    sizes = [search.options.sizes[role] for role in search.options.sequence]
    usable = divisors(math.gcd(search.request.num_devices, *sizes))[1:]
    other = (
        f"take context of {', '.join(map(str, usable))}" if usable else "leave it out"
    )
    return "; ".join([*padding, f"or {other}"]) if padding else other.capitalize()


def _no_space(search: Search) -> str:
    result = []
    for axis in fixed_space(search.request.mesh):
        if search.options.space[axis]:
            continue
        whys = (r.unshared for r in search.dims.roles)
        why = next((w for w in whys if axis in w.partition(":")[0].split(" and ")), "")
        if not why:
            dims = "two or three" if axis != "depth" else "three"
            why = f"{axis}: the model has no convolution over {dims} dimensions"
        result.append(why)
    causes = "; ".join(dict.fromkeys(result))
    return f"{causes}. Leave these axes out, and use data or fsdp instead"


def _extents(search: Search) -> str:
    extents, mesh = [], fixed_space(search.request.mesh)
    scaled = search.scaled_space(mesh)
    for axis, size in mesh.items():
        for index in search.options.space[axis]:
            role = search.dims.roles[index]
            if role.divisible % size == 0:
                continue
            common = role.divisible + -role.divisible % size
            padded = role.size // role.divisible * common
            devices = search.request.num_devices
            usable = ", ".join(map(str, divisors(math.gcd(role.divisible, devices))))
            # Windows without padding change each extent by a different amount.
            other = (
                f"pad the extent to {padded}"
                if axis in scaled
                else f"an extent whose every resolution is divisible by {size} (with "
                'padding="SAME" and strides that divide the extent, resolutions are '
                "fractions of it)"
            )
            extents.append(
                f"{axis} {size}: the extent is {role.size}, and the largest number "
                "that divides it at every resolution of the model is "
                f"{role.divisible}: take {axis} of {usable}, or {other}"
            )
    return "; ".join(extents)


def _wide_halos(search: Search) -> str:
    wide_halos = []
    mesh = fixed_space(search.request.mesh)
    for wide in search.wide_halos(mesh):
        parts = mesh[wide.axis]
        most = max(n for n in divisors(parts) if wide.size // n >= wide.halo or n == 1)
        place = f" at {wide.row.scope}" if wide.row.scope else ""
        wide_halos.append(
            f"{wide.row.kind}{place} reads {wide.halo} elements of a neighbour, but "
            f"with {wide.axis} {parts} each device has {wide.size // parts} of "
            f"{wide.size}: take {wide.axis} {most}, or a larger extent"
        )
    return "; ".join(dict.fromkeys(wide_halos))


def _nothing_waits(search: Search, *, open_remat: bool) -> str:
    policies = ", ".join(f'"{name}"' for name in search.request.policies[1:])
    if open_remat or search.request.remat:
        why = "the model has no repeated layers that remat can recompute"
        remedy = "Put jax.checkpoint around the model's layers"
    else:
        why = 'remat="none" recomputes no layers'
        remedy = f"Take remat= one of {policies}, leave it to the planner"
    return (
        'offload="activations": only saved activations of layers that the backward '
        f"pass recomputes can be in host memory, and {why}. {remedy}, or offload=()"
    )


def _nothing_is_sliced() -> str:
    return (
        'offload="params": only matrices that a loop over layers reads slice by slice '
        "can be in host memory, and this model has none. Put its layers into a scan "
        "(nnx.scan, nn.scan; scan_layers=True in the models of this package), or take "
        "offload=()"
    )


def _lacks(search: Search) -> float:
    lacks = (sum(search.lacks(one.memory)) for one in search.scored)
    return min(lacks, default=math.inf)


def _nothing_fits(search: Search, weighed: int, *, more: bool) -> NothingFits:
    nearest = min(search.scored, key=lambda s: sum(search.lacks(s.memory)))
    device, host = search.lacks(nearest.memory)
    need, limit, whose = nearest.memory.total_bytes, search.cluster.memory_bytes, ""
    if not device:
        need, whose = nearest.memory.host_bytes, " of host memory"
        limit = need - host
    sizes = nearest.memory.by_name()
    terms = ", ".join(
        f"{name} {gigabytes(nbytes)}"
        for name, nbytes in sorted(sizes.items(), key=lambda item: -item[1])
        if nbytes
    )
    text = (
        f"no plan fits: the nearest ({nearest.layout}) needs {gigabytes(need)} and "
        f"lacks {gigabytes(need - limit)} ({need - limit} bytes) of "
        f"{gigabytes(limit)}{whose} per device ({terms}). {weighed} "
        f"plan{'s were' if weighed > 1 else ' was'} evaluated. "
        f"{'Leave remat to the planner, use' if more else 'Use'} more devices, "
        f"{_smaller(search, nearest.num_micro_batches)} or a smaller model"
    )
    return NothingFits(
        text,
        lacks_bytes=need - limit,
        of_bytes=limit,
        nearest=nearest.layout,
        what="device memory" if device else "host memory",
    )


def _smaller(search: Search, used: int) -> str:
    graph, fixed = search.graph, search.request.num_micro_batches
    if fixed is None or fixed == graph.batch_size * graph.num_micro_batches:
        return "a smaller batch"
    return f"more micro-batches than {used}"


def _batch(search: Search) -> str:
    graph, request = search.graph, search.request
    count = request.num_micro_batches or 1
    size = graph.batch_size * graph.num_micro_batches
    micro = size // count
    least = _least_share(search)
    unit = least * count
    remedies = [f"Use a batch of {math.ceil(size / unit) * unit}"]
    if size > unit:
        remedies[0] += f" or {size // unit * unit}"
    usable = [d for d in range(2, request.num_devices) if micro % d == 0]
    if request.mesh:
        remedies.append("another mesh=")
    elif usable:
        remedies.append(count_text(max(usable), "device"))
    if count > 1:
        remedies.append("fewer micro-batches")
    each = f", {micro} in each of {count} micro-batches" if count > 1 else ""
    return (
        f"the global batch has {count_text(size, 'sample')}{each}; at least {least} "
        f"devices would share them, but {least} does not divide {micro}. "
        f"{', or '.join(remedies)}"
    )


def _least_share(search: Search) -> int:
    options, request = search.options, search.request
    shares = []
    for mesh in search.meshes():
        every = [t for region in options.order for t in options.tables(region, mesh)]
        unused = any(
            mesh[axis] > 1 and all(set(t[axis]) <= set(options.batch) for t in every)
            for axis in ("expert", "tensor")
        )
        if unused or sharded_by_split(options, mesh):
            continue
        regions = []
        for region in options.order:
            tables = options.tables(region, mesh)
            if options.choices[region].strategy is None:
                axes = set(mesh) - {"expert", "tensor"}
                tables += [{axis: table[axis] for axis in axes} for table in tables]
            parts = (options.batch_parts(t, mesh) for t in tables)
            regions.append(min(parts, default=request.num_devices))
        shares.append(max(regions))
    return min(shares, default=request.num_devices)


def _unobeyed_pins(search: Search) -> Iterator[str]:
    """Yields an error for each dimension that its metadata's axis cannot divide."""
    allowed = search.meshes()
    for tensor in search.graph.params:
        for dim, axis in pins_of(tensor):
            sizes = sorted({mesh.get(axis, 1) for mesh in allowed})
            length = tensor.shape[dim]
            if length == 1 or not sizes or any(length % n == 0 for n in sizes):
                continue
            padded = math.ceil(length / sizes[0]) * sizes[0]
            listed = ", ".join(map(str, sizes))
            yield (
                f"{tensor.path} dim {dim}: its metadata shards it over {axis}, and "
                f"no size of {axis} here ({listed}) divides {length}. "
                f"Pad it to {padded}, or drop that name"
            )


def _indivisible(search: Search) -> Iterator[str]:
    fixed = (search.request.mesh or {}).get("tensor", 1) > 1
    for choice in search.options.choices.values():
        free = fixed and choice.strategy != "replicate"
        if choice.sets and (choice.obliged or free):
            yield from _region(search, choice)


def _region(search: Search, choice: Choice) -> Iterator[str]:
    request, dims = search.request, search.dims
    fixed = (request.mesh or {}).get("tensor")
    axis = choice.devices or fixed or request.num_devices
    roles = choice.named_roles or {r for roles in choice.sets for r in roles}
    if choice.devices is None and fixed is None:
        fitting = [n for n in divisors(request.num_devices) if n > 1]
    else:
        fitting = [axis]
    if any(dims.roles[r].size % n == 0 for r in roles for n in fitting):
        return
    held = [
        (search.options.homes.get(tensor.id, 0), tensor, dim)
        for tensor in search.graph.params
        for dim, atoms in enumerate(dims.layouts[tensor.id])
        if atoms and atoms[0] in roles
    ]
    own = [(t, d) for home, t, d in held if home == choice.task_graph]
    whole = "remove the split mark" if choice.obliged else "leave tensor out of mesh="
    for tensor, dim in (own or [(t, d) for _, t, d in held])[:MOST_LEAVES]:
        yield _dimension(search, tensor, dim, axis, whole)


def _dimension(search: Search, tensor: Tensor, dim: int, axis: int, whole: str) -> str:
    parts, size = search.dims.sizes[tensor.id][dim], tensor.shape[dim]
    first, what, remedies = parts[0], f"is {size}; ", list[str]()
    if len(parts) > 1:
        regrouped = " × ".join(map(str, parts))
        what = (
            f"is {size}, which the model reshapes to {regrouped}, and only the first "
            "of these can be sharded: "
        )
    else:
        remedies.append(f"pad it to {math.ceil(size / axis) * axis}")
    usable = [n for n in divisors(search.request.num_devices) if first % n == 0]
    if max(usable) > 1:
        best = max(usable)
        remedies.append(
            f"split over {count_text(best, 'device')} (split(devices={best}))"
        )
    first_remedy, *others = [*remedies, whole]
    listed = ", ".join([first_remedy.capitalize(), *others[:-1]])
    listed += f", or {others[-1]}" if others else ""
    return (
        f"{tensor.path} dim {dim} {what}an axis of {axis} does not divide {first}. "
        f"{listed}"
    )
