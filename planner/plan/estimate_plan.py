"""One case of the wide search as a Plan: in words, with layouts and predictions.

Such a plan is an estimate: beside the layouts, collectives and terms of an ordinary
plan it says what no executor of this version runs, and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from whalejax.planner.entries import (
    BatchLeaf,
    Beyond,
    Candidate,
    Collective,
    LeafPlan,
    Pace,
)
from whalejax.planner.model.analysis import Analysed
from whalejax.planner.model.graph import Graph
from whalejax.planner.model.repeated_layers import kind_of
from whalejax.planner.plan.build import batch_layouts, region_tables, role_infos
from whalejax.planner.plan.plan import Plan, Stages
from whalejax.planner.plan.report.why import leaf_note
from whalejax.planner.search.batched.branch_and_bound import Case, WideSearch
from whalejax.planner.search.batched.cases import Cases, usual_axes
from whalejax.planner.search.batched.cells import Column
from whalejax.planner.search.batched.mesh_grid import ORDERS, SCHEDULES
from whalejax.planner.search.batched.partition import cut_layers, stage_layers
from whalejax.planner.search.batched.share_notes import share_notes, stage_kinds
from whalejax.planner.search.batched.step_time import handed_seconds, part_seconds
from whalejax.planner.search.request import Hosted
from whalejax.planner.sharding.layout import GRID_AXES, Spec, Table
from whalejax.planner.sharding.offload_candidates import hosts_known, sliced_leaves
from whalejax.planner.sharding.parameter_layout import LeafFacts, lay_out
from whalejax.planner.step_options import (
    ProgramOptions,
    StepOptions,
    option_words,
    options_of,
)
from whalejax.planner.terms import (
    ALL,
    OFFLOADS,
    UNCOUNTED_MOVES,
    MemoryTerms,
    Remat,
    TimeTerms,
)


class EstimatedPlan:
    """One case in words and numbers.

    Args:
        search: that found it.
        case: one of its cases.
        program: options of the program that it is a case of, beside what it says.

    Attributes:
        covered, gap: what the search for the plan covered, and leaves open.
    """

    def __init__(
        self,
        search: WideSearch,
        case: Case,
        program: ProgramOptions,
    ) -> None:
        self.search = search
        self.case = case
        self.program = program
        self.covered, self.gap = search.tally.covered, search.tally.gap
        f, cells = case.frames, search.model.cells
        self.cell = int(f.cell[0])
        sizes = {"stage": f.stage, "data": f.data, "fsdp": f.fsdp}
        self.mesh = {
            a: int(sizes[a][0] if a in sizes else cells[Column(a)][self.cell])
            for a in GRID_AXES
        }
        self.order = ORDERS[int(f.order[0])]
        self.axes = tuple((a, self.mesh[a]) for a in self.order if self.mesh[a] > 1)
        self.zero = int(f.zero[0]) if self.mesh["data"] > 1 else 0
        self.micro_batches = int(f.micro_batches[0])
        self.stages = self._stages() if self.mesh["stage"] > 1 else None

    @property
    def why_not(self) -> list[str]:
        """Why no executor of this version runs it; empty where one does."""
        found = []
        if self.stages is not None:
            found.append(
                "stages are estimated as they would be without an executor's limits"
            )
        usual = tuple(a for a in GRID_AXES if self.mesh[a] > 1)
        if tuple(a for a, _ in self.axes) != usual:
            found.append(f"axes lie in another order than {', '.join(usual)}")
        if self.case.placement.by == "all" and not self.search.cluster.is_uniform:
            found.append("one program runs on devices of one kind")
        if self.beyond.shares:
            found.append(
                "replicas of unlike devices are estimated as they would be without an "
                "executor's limits"
            )
            if self.zero > 1:
                found.append(
                    f"ZeRO-{self.zero} over replicas of unlike devices, which add up "
                    "whole gradients"
                )
        if "gradients" in self.offload:
            found.append("gradients in host memory")
        if "activations" in self.offload and ALL not in dict(self.remat):
            # What waits in host memory is what layers that are computed again keep.
            found.append("activations in host memory that no layer computes again")
        sliced = not self.zero and bool(sliced_leaves(self.search.graph))
        if "params" in self.offload and not sliced:
            found.append("parameters in host memory that no scan over layers slices")
        elif "params" in self.offload and not hosts_params(self.search):
            found.append(
                "parameters in host memory that the optimizer does not update element "
                "by element"
            )
        if "optimizer" in self.offload and not hosts_state(self.search):
            found.append(
                "optimizer state in host memory, of which none is updated element by "
                "element"
            )
        return found

    @property
    def time(self) -> TimeTerms:
        """Predicted, by term."""
        return self.case.weighed.time_terms(self.case.row)

    @property
    def memory(self) -> MemoryTerms:
        """Predicted on the fullest device, by term."""
        return self.case.weighed.memory_terms(self.case.row)

    @property
    def row(self) -> Candidate:
        """It as a plan remembers it; the verdict is left open."""
        return Candidate(
            layout=self.layout,
            time=self.time,
            memory=self.memory,
            fits=True,
            verdict="",
        )

    @property
    def beyond(self) -> Beyond:
        """What it does beyond what runs."""
        search, case = self.search, self.case
        f, kinds = case.frames, search.cluster.kinds
        several = case.placement.by == "replicas"
        names = [kinds[k].name for k in case.placement.kinds]
        attention = ("all-gather", "ring")[
            int(f.ring[0] or bool(self.program.attention))
        ]
        return Beyond(
            attention=attention if self.mesh["context"] > 1 else "",
            shares=tuple(zip(names, case.micro_batches, strict=True))
            if several
            else (),
            covered=self.covered,
            gap=self.gap,
        )

    @property
    def options(self) -> StepOptions:
        """Its options of a step."""
        decided = {
            **self.program._asdict(),
            "remat": self.remat,
            "offload": self.offload,
            "sequence_parallel": self.case.variant.sequence_parallel,
        }
        return StepOptions(**decided)

    @property
    def remat(self) -> Remat:
        """Which TaskGraphs are computed again."""
        graphs = self.search.graph.task_graphs
        found = self.search.model.policies[int(self.case.frames.remat[0])]
        policies = {graphs[g].name: policy for g, policy in found.items()}
        if len(set(policies.values())) == 1:
            policies = {ALL: next(iter(policies.values()))}
        own = tuple((n, p) for n, p in policies.items() if p != "none")
        return own or self.program.remat

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
        beyond = self.beyond
        if self.program.attention:  # Which says it already.
            beyond = dataclasses.replace(beyond, attention="")
        return ", ".join([words, *own, *beyond.words()])

    @property
    def tables(self) -> dict[int, Table]:
        """Compute table of each TaskGraph."""
        return dict(self.case.variant.tables)


def hosts_params(search: WideSearch) -> bool:
    """Whether plans that run keep some parameters of a search in host memory."""
    sliced, hosted = sliced_leaves(search.graph), _hosted(search)
    return any(t.id in sliced and t.path in hosted.params for t in search.graph.params)


def hosts_state(search: WideSearch) -> bool:
    """Whether plans that run keep some optimizer state of a search in host memory."""
    return any(_hosted(search).state.values())


def _hosted(search: WideSearch) -> Hosted:
    hosted = search.request.hosted
    return Hosted() if hosted is None else hosted()


def estimated_plan(
    graph: Graph, best: EstimatedPlan, precision: str, batch: Sequence[BatchLeaf]
) -> Plan:
    """A case written down as a plan; candidates are left to the caller.

    Args:
        graph: the captured loss.
        best: the case.
        precision: noted in the plan.
        batch: leaves of the GLOBAL batch, without layouts.
    """
    search = best.search
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
        time=best.time,
        memory=best.memory,
        notes=tuple(_notes(search, best)),
        runnable=False,
        stages=best.stages,
        beyond=best.beyond,
    )


def _leaves(
    search: WideSearch, graph: Graph, facts: LeafFacts, best: EstimatedPlan
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


def _on_stages(search: WideSearch, best: EstimatedPlan, leaf: LeafPlan) -> LeafPlan:
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


def _collectives(search: WideSearch, best: EstimatedPlan) -> Iterator[Collective]:
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


def _notes(search: WideSearch, best: EstimatedPlan) -> Iterator[str]:
    yield "an estimate: no executor of this version runs it; wh.compile refuses it"
    if best.why_not:
        yield f"it does not run because: {'; '.join(best.why_not)}"
    yield from share_notes(search.model, best.case.frames, best.case.placement)
    if search.model.layers == 1:
        yield "no repeated layers were found, so that no pipeline was weighed"
    for name in search.graph.unknown_primitives:
        yield f"no rule for the primitive {name!r}: everything around it stays whole"
    if best.offload and not hosts_known(search.cluster):
        yield UNCOUNTED_MOVES
    yield from search.limits
