"""From a captured loss and a cluster to a Plan that may only be an estimate.

The wide search chooses; what it chose is written down with the layouts, collectives
and terms of an ordinary plan, and beside them what no executor of this version runs.
Where the best plan needs nothing of that kind, it is planned again as a runnable one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from whalejax.meshes.cluster import Cluster
from whalejax.meshes.units import gigabytes, milliseconds
from whalejax.planner.entries import (
    BatchLeaf,
    Beyond,
    Candidate,
    Collective,
    LeafPlan,
    Pace,
)
from whalejax.planner.errors import NothingFits, PlanError
from whalejax.planner.model.analysis import Analysed, analyse_graph
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.repeated_layers import kind_of
from whalejax.planner.plan.build import (
    KEPT_CANDIDATES,
    batch_layouts,
    region_tables,
    role_infos,
)
from whalejax.planner.plan.plan import Plan, Stages
from whalejax.planner.plan.report.why import leaf_note
from whalejax.planner.plan.spmd import decide
from whalejax.planner.search.batched.branch_and_bound import (
    Case,
    NoMeshError,
    WideSearch,
)
from whalejax.planner.search.batched.cases import Cases, usual_axes
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.mesh_grid import ORDERS, SCHEDULES
from whalejax.planner.search.batched.partition import cut_layers, stage_layers
from whalejax.planner.search.batched.share_notes import share_notes, stage_kinds
from whalejax.planner.search.batched.space import Spaces
from whalejax.planner.search.batched.step_time import handed_seconds, part_seconds
from whalejax.planner.search.enumerate import Search
from whalejax.planner.search.infeasible import refusal
from whalejax.planner.search.request import Request
from whalejax.planner.search.spmd import Again, Known, by_marks
from whalejax.planner.search.user_choices import Asked
from whalejax.planner.sharding.layout import MESH_AXES, Spec, Table
from whalejax.planner.sharding.offload_candidates import hosts_known, sliced_leaves
from whalejax.planner.sharding.parameter_layout import LeafFacts, lay_out
from whalejax.planner.step_options import StepOptions, option_words, options_of
from whalejax.planner.terms import ALL, OFFLOADS, UNCOUNTED_MOVES, Remat


def foresee(
    graph: Graph,
    cluster: Cluster,
    request: Request,
    *,
    precision: str = "f32",
    batch: Sequence[BatchLeaf] = (),
    again: Again | None = None,
    known: Known | None = None,
    spaces: Spaces | None = None,
) -> Plan:
    """Choose how a model could run on a cluster, whether it can today or not.

    Args:
        graph: the captured loss.
        cluster: the machine.
        request: optimizer state, micro-batches and the default strategy.
        precision: noted in the plan.
        batch: leaves of the GLOBAL batch, in the order of ``graph.batch_dims``.
        again, known: as for ``plan_spmd.decide``.
        spaces: what other searches of the same loss ranged over.

    Raises:
        PlanError: the marks cannot be obeyed, or nothing fits; the smallest missing
            resource is named in bytes.
    """
    stages = Asked.of(graph, request).mesh.get("stage", 1)
    request = by_marks(graph, request, stages)
    _check_stages(graph)
    try:
        search = WideSearch(graph, cluster, request, spaces)
    except NoMeshError:
        raise _no_mesh(graph, cluster, request) from None
    found = search.run()
    if not search.tally.covered:
        raise _no_mesh(graph, cluster, request)
    if not found:
        raise _nothing_fits(search)
    best = _Chosen(search, found[0])
    marked = any(m.kind == "pipeline" for g in graph.task_graphs for m in g.marks)
    estimate = _plan(search, graph, best, found, precision, batch)
    if marked or not best.runnable:
        return estimate
    request = dataclasses.replace(
        request,
        mesh={a: n for a, n in best.mesh.items() if a != "stage"},
        zero=best.zero,
        num_micro_batches=best.micro_batches,
        remat=best.remat if request.remat is None else request.remat,
        offload=best.offload,
        sequence_parallel=best.case.variant.sequence_parallel,
    )
    for asked in request.whole_logits_first():
        try:
            plan = decide(
                graph,
                cluster,
                asked,
                precision=precision,
                batch=batch,
                again=again,
                known=known,
            )
        except PlanError:
            continue
        notes = (*plan.notes, _proof(search))
        return dataclasses.replace(plan, candidates=estimate.candidates, notes=notes)
    # What runs today holds more memory than an executor has to.
    return estimate


def _check_stages(graph: Graph) -> None:
    """Refuse marks that say where to cut."""
    staged = {
        g.name: None
        for g in graph.task_graphs
        if any(m.kind == "stage" for m in g.marks)
    }
    if staged:
        raise PlanError(
            f"{', '.join(staged)}: stage marks say where to cut, and estimates "
            "(runnable=False) cut where they find it best. Remove them, or plan what "
            "runs"
        )


def _no_mesh(graph: Graph, cluster: Cluster, request: Request) -> PlanError:
    """Why no mesh serves the marks, the batch and what the user fixed."""
    mesh = dict(request.mesh or {})
    stages = mesh.pop("stage", 1)
    analysed = analyse_graph(graph)
    request = dataclasses.replace(request, mesh=mesh)
    search = Search(analysed.graph, analysed.dims, cluster, request)
    if not search.run() and stages == 1:
        return refusal(search)
    named = f"stage {stages}" if stages > 1 else "such a mesh"
    devices, batch = request.num_devices, graph.batch_size * graph.num_micro_batches
    return PlanError(
        f"no plan has {named}: stages need as many equal layers, the "
        f"sequence must divide by context, and with the other axes both must divide "
        f"{devices} devices and leave a batch of {batch} that divides by what shares "
        "it and by the micro-batches that are asked for. Change one of them"
    )


class _Chosen:
    """One case in words and numbers."""

    def __init__(self, search: WideSearch, case: Case) -> None:
        self.search = search
        self.case = case
        f, cells = case.frames, search.model.cells
        self.cell = int(f.cell[0])
        sizes = {"stage": f.stage, "data": f.data, "fsdp": f.fsdp}
        self.mesh = {
            a: int(sizes[a][0] if a in sizes else cells[Column(a)][self.cell])
            for a in MESH_AXES
        }
        self.order = ORDERS[int(f.order[0])]
        self.axes = tuple((a, self.mesh[a]) for a in self.order if self.mesh[a] > 1)
        self.zero = int(f.zero[0]) if self.mesh["data"] > 1 else 0
        self.micro_batches = max(case.micro_batches)
        self.stages = self._stages() if self.mesh["stage"] > 1 else None
        self.beyond = self._beyond()

    @property
    def runnable(self) -> bool:
        """An executor of this version runs it."""
        plain = dataclasses.replace(self.beyond, covered=0, gap=0.0, attention="")
        usual = tuple(a for a in MESH_AXES if self.mesh[a] > 1)
        # What waits in host memory is what layers that are computed again keep.
        waits = "activations" not in self.offload or ALL in dict(self.remat)
        slices = "params" not in self.offload or (
            not self.zero and bool(sliced_leaves(self.search.graph))
        )
        straight = tuple(a for a, _ in self.axes) == usual
        whole = self.stages is None
        return plain == Beyond() and whole and straight and waits and slices

    def _beyond(self) -> Beyond:
        search, case = self.search, self.case
        f, kinds = case.frames, search.cluster.kinds
        several = case.placement.by == "replicas"
        names = [kinds[k].name for k in case.placement.kinds]
        attention = ("all-gather", "ring")[int(f.ring[0])]
        return Beyond(
            attention=attention if self.mesh["context"] > 1 else "",
            shares=tuple(zip(names, case.micro_batches, strict=True))
            if several
            else (),
            covered=search.tally.covered,
            gap=search.tally.gap,
        )

    @property
    def options(self) -> StepOptions:
        """Its options of a step; attention is told by ``beyond``."""
        return StepOptions(
            remat=self.remat,
            offload=self.offload,
            sequence_parallel=self.case.variant.sequence_parallel,
        )

    @property
    def remat(self) -> Remat:
        """Which TaskGraphs are computed again."""
        graphs = self.search.graph.task_graphs
        found = self.search.model.policies[int(self.case.frames.remat[0])]
        policies = {graphs[g].name: policy for g, policy in found.items()}
        if len(set(policies.values())) == 1:
            policies = {ALL: next(iter(policies.values()))}
        return tuple((n, p) for n, p in policies.items() if p != "none")

    @property
    def offload(self) -> tuple[str, ...]:
        """What lies in host memory."""
        bits = int(self.case.frames.offload[0])
        return tuple(name for i, name in enumerate(OFFLOADS) if bits >> i & 1)

    def _stages(self) -> Stages:
        search, case = self.search, self.case
        f = case.frames
        kind = case.placement.kinds[0] if case.placement.by == "replicas" else None
        cases = Cases(search.model, f, case.placement, kind)
        cut_layers(cases)
        layers = stage_layers(cases, np.zeros(1, dtype=np.int64))[:, 0]
        held = [search.cluster.kinds[kind].name for kind in stage_kinds(cases)]
        ahead, back = part_seconds(cases, np.zeros(1, dtype=np.int64))
        return Stages(
            schedule=SCHEDULES[int(f.schedule[0])],
            chunks=int(f.chunks[0]),
            layers=tuple(int(n) for n in layers),
            kinds=tuple(held) if case.placement.by == "stages" else (),
            paces=tuple(
                Pace(forward_seconds=float(f), backward_seconds=float(b))
                for f, b in zip(ahead[:, 0], back[:, 0], strict=True)
            ),
            handed_seconds=float(handed_seconds(cases)[0]),
        )

    @property
    def layout(self) -> str:
        """All of it in one line."""
        words = " × ".join(f"{a} {n}" for a, n in self.axes) or "one device"
        if self.zero:
            words += f", ZeRO-{self.zero}"
        if self.micro_batches > 1:
            words += f", {self.micro_batches} micro-batches"
        own = option_words(self.options)
        own += [self.stages.words()] if self.stages else []
        return ", ".join([words, *own, *self.beyond.words()])

    @property
    def tables(self) -> dict[int, Table]:
        """Compute table of each TaskGraph."""
        return dict(self.case.variant.tables)


def _plan(
    search: WideSearch,
    graph: Graph,
    best: _Chosen,
    found: Sequence[Case],
    precision: str,
    batch: Sequence[BatchLeaf],
) -> Plan:
    analysed = Analysed(graph=search.graph, dims=search.dims)
    tables, request, cluster = best.tables, search.request, search.cluster
    facts = LeafFacts.of(
        search.graph,
        search.dims,
        search.views.reading,
        request.optimizer,
        narrowed=request.narrowed,
        cast_bytes=request.cast_bytes,
    )
    names = tuple(search.dims.roles[r].name for r in facts.storage)
    weighed, row = best.case.weighed, best.case.row
    return Plan(
        model_hash=graph.model_hash,
        cluster=cluster,
        axes=best.axes,
        num_micro_batches=best.micro_batches,
        zero=best.zero,
        **options_of(best.options),
        precision=precision,
        default=request.default or "",
        roles=role_infos(search.dims, graph.batch_size),
        compute=region_tables(analysed, tables, best.mesh),
        storage=tuple((a, names) for a in ("data", "fsdp") if best.mesh[a] > 1),
        leaves=tuple(_leaves(search, graph, facts, best)),
        batch=batch_layouts(analysed, tables, best.mesh, batch),
        collectives=tuple(_collectives(search, best)),
        time=weighed.time_terms(row),
        memory=weighed.memory_terms(row),
        candidates=_candidates(search, found),
        notes=tuple(_notes(search, best)),
        runnable=False,
        stages=best.stages,
        beyond=best.beyond,
    )


def _leaves(
    search: WideSearch, graph: Graph, facts: LeafFacts, best: _Chosen
) -> Iterator[LeafPlan]:
    """The plan of every parameter; equal layers' from those that were written once."""
    layouts = lay_out(facts, best.tables, best.mesh, best.zero)
    kept: dict[str, LeafPlan] = {}
    kinds: dict[object, LeafPlan] = {}
    found = facts.leaves(layouts, best.tables, best.mesh)
    for tensor, leaf in zip(search.graph.params, found, strict=True):
        note = leaf_note(leaf, tensor, best.mesh, search.dims)
        leaf = _on_stages(search, best, leaf)
        kept[tensor.path] = dataclasses.replace(leaf, note=note)
        kinds[kind_of(tensor)] = kept[tensor.path]
    for tensor in graph.params:
        leaf = kept.get(tensor.path) or kinds[kind_of(tensor)]
        yield dataclasses.replace(leaf, path=tensor.path)


def _on_stages(search: WideSearch, best: _Chosen, leaf: LeafPlan) -> LeafPlan:
    """Stacked layers lie in parts on the stages: by their first dimension."""
    layers = search.model.layers
    chain = search.served[0].chain
    if not (chain.scanned and best.mesh["stage"] > 1 and leaf.shape[:1] == (layers,)):
        return leaf

    def cut(spec: Spec) -> Spec:
        return (("stage", *spec[0]), *spec[1:])

    return dataclasses.replace(
        leaf,
        compute_spec=cut(leaf.compute_spec),
        param_spec=cut(leaf.param_spec),
        gradient_spec=cut(leaf.gradient_spec),
        optimizer_spec=cut(leaf.optimizer_spec),
    )


def _collectives(search: WideSearch, best: _Chosen) -> Iterator[Collective]:
    """What one stage communicates in a micro-batch, and once in a step; folded."""
    cells, cell = search.model.cells, best.cell
    stages = best.mesh["stage"]

    def present(axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in usual_axes(tuple(axes)) if best.mesh[a] > 1)

    for column, values in cells.items():
        axes, nbytes = present(column.axes), float(values[cell])
        if not axes or nbytes <= 0:
            continue
        if column.what == "bytes":
            times = dataclasses.replace(column, what="times")
            count = float(cells[times][cell])
            yield Collective(
                kind=column.collective,  # type: ignore[arg-type]
                axes=axes,
                phase=column.phase,
                what=column.term,
                payload_bytes=int(nbytes / count),
                count=max(1, round(count / stages)),
            )
        elif column.what == "gradient":
            yield Collective(
                kind="all-reduce",
                axes=axes,
                phase="update",
                what="gradient",
                payload_bytes=int(nbytes / stages),
                count=1,
            )


def _candidates(search: WideSearch, found: Sequence[Case]) -> tuple[Candidate, ...]:
    best = found[0]
    kept: dict[str, Candidate] = {}
    for case in found:
        slower = case.step_seconds - best.step_seconds
        verdict = "chosen"
        if case is not best:
            verdict = f"{slower * 1e3:.2f} ms slower"
            if slower <= 0:
                verdict = "equally fast, more memory or communication"
        layout = _Chosen(search, case).layout
        kept.setdefault(
            layout,
            Candidate(
                layout=layout,
                time=case.weighed.time_terms(case.row),
                memory=case.weighed.memory_terms(case.row),
                fits=True,
                verdict=verdict,
            ),
        )
        if len(kept) == KEPT_CANDIDATES:
            break
    return tuple(kept.values())


def _proof(search: WideSearch) -> str:
    tally = search.tally
    return (
        f"chosen among {tally.covered:,} combinations, {tally.weighed:,} weighed, the "
        f"others ruled out by a lower bound on their step time (gap {tally.gap:.2%})"
    )


def _notes(search: WideSearch, best: _Chosen) -> Iterator[str]:
    yield "an estimate: no executor of this version runs it; wh.compile refuses it"
    yield _proof(search)
    yield from share_notes(search.model, best.case.frames, best.case.placement)
    if search.model.layers == 1:
        yield "no repeated layers were found, so that no pipeline was weighed"
    for name in search.graph.unknown_primitives:
        yield f"no rule for the primitive {name!r}: everything around it stays whole"
    if best.offload and not hosts_known(search.cluster):
        yield UNCOUNTED_MOVES
    yield from search.limits


def _nothing_fits(search: WideSearch) -> PlanError:
    """The plan that lacks least, and how much of what."""
    case, lacks, host = search.nearest()
    count, copies = search.request.num_devices, search.request.copies
    if max(lacks, host) <= 0 and copies > 1:
        return PlanError(
            f"no plan serves the marks: devices= gives one copy of the model "
            f"{count // copies} of {count} devices. Change it, or leave it out"
        )
    chosen = _Chosen(search, case)
    limit = search.cluster.memory_bytes
    least = min(search.cluster.kinds, key=lambda kind: kind.memory_bytes)
    whose = "" if search.cluster.is_uniform else f" ({least.name} has least)"
    memory = case.weighed.memory_terms(case.row)
    terms = ", ".join(
        f"{name} {gigabytes(nbytes)}"
        for name, nbytes in memory.by_name().items()
        if nbytes
    )
    short = (
        f"lacks {gigabytes(lacks)} ({int(lacks)} bytes) of {gigabytes(limit)} per "
        f"device{whose}"
        if lacks > 0
        else f"lacks {gigabytes(host)} ({int(host)} bytes) of host memory per device"
    )
    step = milliseconds(case.step_seconds)
    room = min(kind.host_memory_bytes or 0 for kind in search.cluster.kinds)
    return NothingFits(
        f"no plan fits, with anything computed again or moved to host memory: the "
        f"nearest ({chosen.layout}; {step} a step) {short} ({terms}). Use more "
        "devices, a smaller batch or a smaller model",
        lacks_bytes=int(lacks if lacks > 0 else host),
        of_bytes=limit if lacks > 0 else room,
        nearest=chosen.layout,
        what="device memory" if lacks > 0 else "host memory",
    )
