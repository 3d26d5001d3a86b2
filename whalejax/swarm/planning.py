"""A plan for a swarm: stages, wire format, peers of each stage, predictions.

One peer of each stage is planned as an ordinary pipeline, with one device per stage and
links of the swarm's bandwidth. So cuts, memory and times come from the usual planner.
This module adds the number of peers of each stage, the bytes and the deadline of each
call, and the simulated throughput.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from whalejax.meshes import Cluster
from whalejax.meshes.device_kinds import DeviceKind
from whalejax.meshes.errors import WhaleError
from whalejax.meshes.topology import Level, Node
from whalejax.meshes.units import count_text, gigabytes, milliseconds
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan.square_cube_of_plan import border_bytes, rate_words
from whalejax.planner.plan_entries import (
    WIRES,
    Swarm,
    SwarmStage,
    closed_form_seconds,
    sum_bytes,
    wire_bytes,
)
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.swarm.churn import ChurnEvent, PeerEventKind, PeerLink
from whalejax.swarm.simulator import (
    DEADLINE_FACTOR,
    Setting,
    StageCost,
    simulate,
)
from whalejax.swarm.stage_assignment import best_counts


LATENCY_SECONDS: Final = 0.02  # one-way, between homes on one continent
BUSY: Final = 0.9  # minimum fraction of computing time unless links are a bottleneck
_FAST_BYTES_PER_SECOND: Final = 12.5e9  # network of a data centre
MOST_CALLS: Final = 20_000  # in a simulated step; larger steps use a closed form
QUEUE: Final = 2  # micro-batches in flight per peer
SMALLEST_DEADLINE: Final = 1.0  # seconds, as a host may be busy
Again = Callable[..., Plan]


def swarm_plan(
    again: Again,
    *,
    cluster: Cluster,
    mesh: Mapping[str, int] | None,
    num_micro_batches: int | None,
    bandwidth: float,
    wire: str | None,
    sum_wire: str = "f32",
) -> Plan:
    """Returns the plan with the fewest stages that fit.

    Its wire format is the most exact format with which links do not limit the peers.

    Args:
        again: Function that plans again with other settings, such as ``Plan.what_if``.
        cluster: Cluster whose devices are the peers.
        mesh: ``{"stage": n}``, or None.
        num_micro_batches: Number of micro-batches in a step, or None.
        bandwidth: Rate of each peer's link, in bytes per second.
        wire: Wire format of tensors, one of ``WIRES``; None chooses it.
        sum_wire: Wire format of gradients during their reduction, one of ``SUM_WIRES``.

    Raises:
        PlanError: No swarm can train this model.
    """
    kind = _one_kind(cluster)
    fixed = _fixed_stages(mesh, cluster.num_devices)
    plan, tried = _fewest_stages(
        again, kind, cluster, fixed, num_micro_batches, bandwidth, wire or "int8"
    )
    formats = (wire,) if wire else WIRES
    result = [
        _swarm(plan, each, cluster.num_devices, bandwidth, sum_wire) for each in formats
    ]
    chosen = next((s for s in result if _link_share(s) >= BUSY), result[-1])
    chosen = _predicted(plan, chosen)
    reasons = {
        "wire": _why_wire(chosen, result, given=wire is not None),
        "stages": _why_stages(chosen, tried, given=fixed is not None),
        "micro-batches": _why_micro_batches(plan, chosen, num_micro_batches),
        "gradients": _why_gradients(chosen),
        "synchronous": _beside_synchronous(again, cluster, bandwidth, chosen),
    }
    chosen = dataclasses.replace(chosen, reasons=tuple(reasons.items()))
    notes = (_summary(chosen), *reasons.values(), *_what_would_help(chosen))
    return dataclasses.replace(plan, swarm=chosen, notes=(*plan.notes, *notes))


def setting_of(plan: Plan, **changes: Any) -> tuple[Setting, PeerLink]:
    """Returns the simulator's settings for a swarm's plan, and the link of each peer.

    Args:
        plan: Plan for a swarm.
        changes: Fields of ``Setting`` to replace.

    Raises:
        PlanError: The plan is not for a swarm.
    """
    if plan.swarm is None:
        raise PlanError("plan is for no swarm; plan with swarm=True and a bandwidth")
    return _setting(plan, plan.swarm, **changes), _link(plan.swarm)


def swarm_note(again: Again, plan: Plan, rate: float) -> tuple[str, ...]:
    """Returns a note that compares a plan with slow links to a swarm.

    Args:
        again: Function that plans again with other settings, such as ``Plan.what_if``.
        plan: Plan on one kind of devices, without a swarm.
        rate: Bandwidth of its slowest link, in bytes per second.

    Returns:
        One note, or none if no swarm is possible.
    """
    text = f"{8 * rate / 1e6:.6g}Mb/s"
    try:
        note = again(swarm=True, bandwidth=text, mesh=None, num_micro_batches=None)
    except WhaleError:  # such as a batch that a swarm's micro-batches do not divide
        return ()
    assert note.swarm is not None
    ratio = plan.time.step_seconds / note.swarm.step_seconds
    words = (
        f"{ratio:.2g} times faster" if ratio > 1 else f"{1 / ratio:.2g} times slower"
    )
    return (
        f"a swarm of the same devices (swarm=True, bandwidth={text!r}) would take "
        f"{milliseconds(note.swarm.step_seconds)} a step, {words}, with "
        f"{note.swarm.wire} on the wire",
    )


def _beside_synchronous(
    again: Again, cluster: Cluster, bandwidth: float, swarm: Swarm
) -> str:
    """Compares a swarm with the best synchronous plan over the same links."""
    levels = tuple(
        dataclasses.replace(
            level,
            bandwidth_bytes_per_second=min(level.bandwidth_bytes_per_second, bandwidth),
            latency_seconds=max(level.latency_seconds, LATENCY_SECONDS),
        )
        for level in cluster.levels
    )
    try:
        plan = again(
            swarm=False,
            bandwidth=None,
            wire=None,
            sum_wire=None,
            cluster=dataclasses.replace(cluster, levels=levels),
            mesh=None,
            num_micro_batches=None,
            allow_idle=True,
        )
    except WhaleError as error:
        words = " ".join(str(error).split())
        return f"without a swarm no plan runs over these links: {words}"
    sizes = " × ".join(f"{axis} {size}" for axis, size in plan.axes) or "one device"
    ratio = plan.time.step_seconds / swarm.step_seconds
    return (
        f"without a swarm the best plan over the same links ({sizes}, every link "
        f"{rate_words(bandwidth)}) takes {milliseconds(plan.time.step_seconds)} a "
        f"step, {ratio:.2g} times as long, and ends with the first peer that is lost"
    )


# Stages.


def _one_kind(cluster: Cluster) -> Node:
    kinds = sorted({node.kind.name for node in cluster.nodes})
    if len(kinds) > 1:
        raise PlanError(
            f"a swarm is planned for peers of one kind; the cluster has "
            f"{', '.join(kinds)}. Give the slowest of them: faster peers are given "
            "more micro-batches as the swarm runs"
        )
    return Node(kind=cluster.nodes[0].kind, count=1)


def _fixed_stages(mesh: Mapping[str, int] | None, peers: int) -> int | None:
    others = sorted(set(mesh or ()) - {"stage"})
    if others:
        raise PlanError(
            f"mesh fixes {', '.join(others)}; a swarm's peers are single devices, so "
            'only the axis stage can be fixed: mesh={"stage": 3}'
        )
    stages = (mesh or {}).get("stage")
    if peers < max(2, stages or 2):
        raise PlanError(
            f"the cluster has {count_text(peers, 'peer')} for "
            f"{count_text(stages or 2, 'stage')}; a swarm needs at "
            "least 2 stages and one peer in each. Have more peers, or fewer stages"
        )
    return stages


def _fewest_stages(
    again: Again,
    kind: Node,
    cluster: Cluster,
    fixed: int | None,
    num_micro_batches: int | None,
    bandwidth: float,
    wire: str,
) -> tuple[Plan, list[str]]:
    """Returns the plan with the fewest stages that fit, and why fewer do not."""
    tried: list[str] = []
    most = min(cluster.num_devices, 32)
    for stages in [fixed] if fixed else range(2, most + 1):
        try:
            plans = [
                again(
                    swarm=False,
                    bandwidth=None,
                    wire=None,
                    sum_wire=None,
                    cluster=part,
                    mesh={"stage": stages},
                    num_micro_batches=num_micro_batches or QUEUE * cluster.num_devices,
                    allow_idle=False,
                )
                for part in _networks(kind, cluster, stages, bandwidth, wire)
            ]
        except NothingFits as error:
            if fixed:
                raise
            tried.append(
                f"{stages} stages lack {gigabytes(error.lacks_bytes)} of "
                f"{gigabytes(error.of_bytes)} on a peer"
            )
            continue
        if any(plan.stages is None or not plan.stages.plans for plan in plans):
            raise PlanError(
                "a swarm's stages have programs of their own; this model's layers are "
                "one scan, which stages divide alike. Write the layers one by one "
                "(scan_layers=False in the reference models), or mark stages with "
                "wh.stage"
            )
        peers = cluster.num_devices
        result = [_swarm(plan, wire, peers, bandwidth) for plan in plans]
        lacking = [_lacking(kind.kind, swarm) for swarm in result]
        steps = [
            (swarm.step_seconds, plan)
            for swarm, plan, lacks in zip(result, plans, lacking, strict=True)
            if not lacks
        ]
        if steps:
            return min(steps, key=lambda one: one[0])[1], tried
        tried.append(lacking[0])
    raise PlanError(
        f"no swarm of {fixed or f'up to {most}'} stages has the memory: "
        f"{'; '.join(tried)}. Have peers with more memory, share the weights of "
        "layers, or offload the optimizer"
    )


def _networks(
    kind: Node, cluster: Cluster, stages: int, bandwidth: float, wire: str
) -> Iterator[Cluster]:
    """Yields clusters of one peer per stage, on two networks.

    Either network may lead to better cuts. On a slow network, the planned pipeline
    waits for every transfer, and gets uneven stages with small transfers. On a fast
    network it gets even stages. A swarm computes other micro-batches during transfers.
    """
    faster = 4 * 256 / wire_bytes(256, wire)
    for rate in (bandwidth * faster, _FAST_BYTES_PER_SECOND):
        level = Level(
            name="swarm",
            size=stages,
            bandwidth_bytes_per_second=rate,
            latency_seconds=0.0,
        )
        yield Cluster(
            nodes=(kind,) * stages, levels=(level,), compiler=cluster.compiler
        )


# One format.


def _swarm(
    plan: Plan, wire: str, peers: int, bandwidth: float, sum_wire: str = "f32"
) -> Swarm:
    assert plan.stages is not None
    paces = plan.stages.paces
    calls = []
    for number, pace in enumerate(paces):
        both = pace.backward_seconds + pace.weight_seconds + pace.forward_seconds
        is_last = number + 1 == len(paces)
        calls.append((0.0 if is_last else pace.forward_seconds, both))
    bound = []
    for number, (ahead, back) in enumerate(calls):
        received, sent = zip(*border_bytes(plan, number, wire), strict=True)
        bound.append(max(ahead + back, max(sum(received), sum(sent)) / bandwidth))
    counts = best_counts(peers, bound)
    stages = tuple(
        _stage(plan, number, wire, counts[number], calls[number], bandwidth)
        for number in range(len(paces))
    )
    swarm = Swarm(
        wire=wire,
        bytes_per_second=bandwidth,
        latency_seconds=LATENCY_SECONDS,
        peers=peers,
        stages=stages,
        step_seconds=0.0,
        samples_per_second=0.0,
        utilization=0.0,
        sum_wire=sum_wire,
    )
    seconds = closed_form_seconds(swarm, plan.num_micro_batches, QUEUE * peers)
    return _with_step(plan, swarm, seconds)


def _stage(
    plan: Plan,
    number: int,
    wire: str,
    peers: int,
    calls: tuple[float, float],
    bandwidth: float,
) -> SwarmStage:
    assert plan.stages is not None
    forward, backward = calls
    own = plan.stages.plans[number].memory
    borders = border_bytes(plan, number, wire)
    crossing = max(sum(borders[0]), sum(borders[1]))
    queue = QUEUE * len(plan.stages.plans) + 1
    state_bytes = own.params_bytes + own.optimizer_bytes + own.state_bytes
    slowest = max(forward, backward) + crossing / bandwidth + 2 * LATENCY_SECONDS
    return SwarmStage(
        peers=peers,
        forward_seconds=forward,
        backward_seconds=backward,
        forward_bytes=borders[0],
        backward_bytes=borders[1],
        state_bytes=state_bytes,
        gradient_bytes=own.gradients_bytes,
        memory_bytes=2 * state_bytes  # before and after the update
        + own.gradients_bytes
        + own.batch_bytes
        + own.activations_bytes
        + own.working_bytes,
        host_bytes=state_bytes  # copy for joining peers
        + _kept_bytes(plan, number, wire, peers, own.gradients_bytes),
        deadline_seconds=max(SMALLEST_DEADLINE, DEADLINE_FACTOR * slowest * queue),
    )


def _kept_bytes(
    plan: Plan, number: int, wire: str, peers: int, gradient_bytes: int
) -> int:
    """Returns the bytes of results and sums that a peer stores until a step ends.

    If a stage has several peers, a peer's forward and backward calls may be for
    different micro-batches. So it stores the unencoded input of each call.
    """
    coded = border_bytes(plan, number, wire)
    whole = border_bytes(plan, number, "f32")
    given = whole[0][0] if sum(whole[0]) else whole[1][0]
    inputs = given * min(peers, 2)
    each = inputs + coded[0][1] + coded[1][1] + gradient_bytes
    part = math.ceil(gradient_bytes / peers)
    return math.ceil(plan.num_micro_batches / peers) * each + part + gradient_bytes


def _lacking(kind: DeviceKind, swarm: Swarm) -> str:
    for number, stage in enumerate(swarm.stages):
        needs, has = {"device": stage.memory_bytes}, {"device": kind.memory_bytes}
        if kind.host_memory_bytes is not None:
            needs["host"], has["host"] = stage.host_bytes, kind.host_memory_bytes
        elif kind.platform == "cpu":
            needs["device"] += stage.host_bytes
        for where, size in needs.items():
            if size > has[where]:
                return (
                    f"stage {number} of {len(swarm.stages)} needs {gigabytes(size)} of "
                    f"a peer's {where} memory, which has {gigabytes(has[where])}"
                )
    return ""


def _link_share(swarm: Swarm) -> float:
    """Returns the computing fraction of the peer that is most limited by its link."""
    return min(
        stage.compute_seconds
        / max(stage.compute_seconds, stage.wire_seconds(swarm.bytes_per_second))
        for stage in swarm.stages
    )


def _with_step(plan: Plan, swarm: Swarm, seconds: float) -> Swarm:
    samples = max((leaf.shape[0] for leaf in plan.batch if leaf.shape), default=0)
    work = math.fsum(stage.compute_seconds for stage in swarm.stages)
    return dataclasses.replace(
        swarm,
        step_seconds=seconds,
        samples_per_second=samples / seconds,
        utilization=work * plan.num_micro_batches / (seconds * swarm.peers),
    )


def _setting(plan: Plan, swarm: Swarm, **changes: Any) -> Setting:
    costs = tuple(
        StageCost(
            forward_seconds=stage.forward_seconds,
            backward_seconds=stage.backward_seconds,
            forward_bytes=stage.forward_bytes,
            backward_bytes=stage.backward_bytes,
            state_bytes=stage.state_bytes,
            gradient_bytes=wire_bytes(stage.gradient_bytes // 4, swarm.sum_wire),
        )
        for stage in swarm.stages
    )
    setting = Setting(
        stages=costs,
        micro_batches=plan.num_micro_batches,
        in_flight=QUEUE * swarm.peers,
    )
    return dataclasses.replace(setting, **changes)


def _link(swarm: Swarm) -> PeerLink:
    return PeerLink(
        up_bytes_per_second=swarm.bytes_per_second,
        down_bytes_per_second=swarm.bytes_per_second,
        latency_seconds=swarm.latency_seconds,
    )


def _predicted(plan: Plan, swarm: Swarm) -> Swarm:
    """Returns the swarm with the simulator's step time, if that is fast to compute."""
    calls = plan.num_micro_batches * 2 * len(swarm.stages)
    if calls > MOST_CALLS:
        return swarm
    link = _link(swarm)
    trace = [
        ChurnEvent(time=0.0, event=PeerEventKind.JOIN, peer=f"p{number}", link=link)
        for number in range(swarm.peers)
    ]
    long_enough = 20 * swarm.step_seconds
    setting = _setting(plan, swarm)
    result = simulate(setting, trace, long_enough)
    # In the first step the speeds of the peers are unknown.
    steps = result.step_seconds[1:4] or result.step_seconds
    if not steps:
        return swarm
    return _with_step(plan, swarm, math.fsum(steps) / len(steps))


# Texts.


def _summary(swarm: Swarm) -> str:
    peers = " + ".join(str(stage.peers) for stage in swarm.stages)
    return (
        f"a swarm of {count_text(swarm.peers, 'peer')} ({peers}) over "
        f"{rate_words(swarm.bytes_per_second)}, {swarm.wire} on the wire: steps of "
        f"{milliseconds(swarm.step_seconds)}, {swarm.samples_per_second:.3g} "
        f"samples/s, peers compute {swarm.utilization:.0%} of the time"
    )


def _why_wire(chosen: Swarm, found: list[Swarm], *, given: bool) -> str:
    shares = ", ".join(
        f"{swarm.wire} {_link_share(swarm):.0%} ({_widest(swarm)} a micro-batch)"
        for swarm in found
    )
    link = rate_words(chosen.bytes_per_second)
    if given:
        return (
            f"wire {chosen.wire}, as asked; over {link} a peer computes at most "
            f"{shares} of the time"
        )
    if _link_share(chosen) >= BUSY:
        return (
            f"wire {chosen.wire}, the most exact format over which {link} keeps every "
            f"peer busy for {BUSY:.0%} of the time; by format: {shares}"
        )
    return (
        f"wire {chosen.wire}, the smallest; over {link} peers of the stage that sends "
        f"most wait for their links in every format, and compute {shares} of the time"
    )


def _widest(swarm: Swarm) -> str:
    return gigabytes(max(sum(stage.wire_bytes) for stage in swarm.stages))


def _why_stages(swarm: Swarm, tried: list[str], *, given: bool) -> str:
    count = len(swarm.stages)
    if given:
        return f"{count_text(count, 'stage')}, as asked"
    fewer = f"; {'; '.join(tried)}" if tried else ""
    return (
        f"{count} stages, the fewest that fit: larger stages compute more for the "
        f"same transfers{fewer}"
    )


def _why_micro_batches(plan: Plan, swarm: Swarm, given: int | None) -> str:
    late = max(
        sum_bytes(stage.gradient_bytes, stage.peers, swarm.sum_wire)
        for stage in swarm.stages
    )
    seconds = late / swarm.bytes_per_second
    part = seconds / swarm.step_seconds if swarm.step_seconds else 0.0
    how = "as asked" if given else f"{QUEUE} for each peer"
    return (
        f"{count_text(plan.num_micro_batches, 'micro-batch')}, {how}; reducing "
        f"gradients in {swarm.sum_wire} takes {milliseconds(seconds)} or {part:.0%} of "
        "a step, which more micro-batches make a smaller part"
    )


def _why_gradients(swarm: Swarm) -> str:
    words = [
        f"stage {number} {gigabytes(stage.memory_bytes)} of the device and "
        f"{gigabytes(stage.host_bytes)} of the host"
        for number, stage in enumerate(swarm.stages)
    ]
    return (
        "a peer stores the gradients of each of its micro-batches until a step is "
        f"committed; with them it needs, in {', in '.join(words)}. With more peers in "
        "a stage, each stores fewer"
    )


def _what_would_help(swarm: Swarm) -> Iterator[str]:
    """Yields changes of the model that would help on a slow link."""
    share = _link_share(swarm)
    if share >= BUSY:
        return
    factor = math.ceil(BUSY / share)
    if swarm.wire != "int8":
        yield (
            f"over {rate_words(swarm.bytes_per_second)} peers wait for their links; "
            "wire='int8' sends a quarter of float32"
        )
    yield (
        f"peers would be busy with {factor} times the compute for each transfer: "
        f"layers {factor} times as wide, {factor} times as many of them a stage (each "
        f"weight used {factor} times costs no memory), or a bottleneck that sends "
        f"1/{factor} of the width (whalejax.models.borders)"
    )
