"""The arguments of ``wh.plan`` for tables, and their plan.

Tables are found in the program of the loss. They are placed on the devices, or in
separate CPU processes. The rest of the loss is planned like any other loss, with the
looked-up vectors as a part of its batch.

The module is long because it has all checks of these arguments.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import numpy as np
import optax

from whalejax.adapters.base import Adapter, adapt
from whalejax.api.memory_margin import with_devices, without_margin
from whalejax.api.plan_request import PlanQuestion, PlanRequest
from whalejax.api.plan_settings import PlanSettings, parsed_cluster
from whalejax.capture import capture
from whalejax.capture.batch import aval_of, check_batch
from whalejax.capture.split_checks import check_split
from whalejax.meshes.arguments.near_names import near_hint
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost_terms import ALL
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.tables.place import HOST_SPLITS, place_tables
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.sections import SectionTimes
from whalejax.planner.tables.storage_options import PIN_WORDS, SPLITS, read_pin
from whalejax.planner.tables.table import Ranks, Table
from whalejax.planner.tables.two_sections import (
    SectionsWanted,
    TwoSections,
    place_in_sections,
)
from whalejax.tables.dense import STAGE, dense_adapter, dense_batch
from whalejax.tables.device_use import DeviceUse, predict_device_use
from whalejax.tables.loss_cut import cut_program
from whalejax.tables.recognize import TableProgram, check_divisible
from whalejax.tables.sparse_optimizers import SPARSE_FORMS, SparseOptimizer
from whalejax.tables.table_plan_record import program_hash
from whalejax.tables.tables_plan import TablesPlan
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.argument_checks import check_optimizer


_CPU_KINDS: Final = ("cpu",)

_SEARCHED_AXES: Final = ("expert", "context", "tensor", STAGE)
"""Mesh axes of the dense part that have size 1 unless the user fixes their size, or
marks stages."""

_REFUSED: Final[Mapping[str, str]] = {
    "allow_idle": "all devices hold tables",
    "runnable": "a plan with tables is one that runs",
    "verified": "plan.verify() compiles a plan with tables",
    "swarm": "peers of a swarm hold no tables",
    "bandwidth": "peers of a swarm hold no tables",
    "wire": "peers of a swarm hold no tables",
    "sum_wire": "peers of a swarm hold no tables",
    "batch_axes": "batches have samples along dimension 0",
}
"""Arguments of ``wh.plan`` that cannot be given with tables, and why."""

_MEMORY_NOTE: Final = "memory: "
"""Beginning of notes on the memory of the dense part alone."""

_MOST_ROWS: Final = 2**31 - 1

_PLACEMENTS: Final = 4
"""Maximum number of placements that are tried, each with more room for exchanges."""

_DENSE_PLANS: Final = 6
"""Maximum number of plans of the dense part that are tried, each in less memory."""

USUAL_SPLITS: Final = ("whole", "rows", "columns", "node_rows", "replicate")
"""Ways of storing a table that every backend supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesRequest:
    """Checked arguments of ``wh.plan_tables``, without loss, model and batch.

    Attributes:
        rows, optimizer, cluster, splits, together, pins, counts, mesh, precision,
            trainable, staleness, times, in_processes: As for ``wh.plan_tables``.
        dense: Further settings of the dense part's plan, by name, as for ``wh.plan``.
    """

    rows: SparseOptimizer
    optimizer: optax.GradientTransformation | None = None
    cluster: Cluster | str | None = None
    splits: Collection[str] = USUAL_SPLITS
    together: Sequence[Sequence[str]] = ()
    pins: Mapping[str, int | str] | None = None
    counts: Mapping[str, Any] | None = None
    mesh: Mapping[str, int] | None = None
    precision: str | Mapping[str, str] = "f32"
    trainable: Any = None
    staleness: int = 0
    times: SectionTimes | None = None
    in_processes: Collection[str] | None = None
    dense: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(self)

    @without_mesh
    def plan(self, loss_fn: Callable[..., Any], model: Any, batch: Any) -> TablesPlan:
        """Returns the plan for a model.

        Args:
            loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
            model: An NNX module, Linen variables or any pytree.
            batch: Global batch, abstract or real.

        Raises:
            WhaleError: No table was found, nothing fits, or an argument is invalid.
        """
        sparse, dense_cluster = split_sections(self.cluster)
        _check_sections(sparse, self.staleness, self.in_processes)
        _check_bags(batch)
        adapter = adapt(model, loss_fn, trainable=self.trainable).without_values()
        _check_rows(adapter)
        batch = jax.tree.map(aval_of, batch)
        program = cut_program(adapter, batch)
        check_tables(adapter, program, self.counts)
        _check_lengths(batch, program)
        question = self._dense_question(
            adapter, program, batch, parsed_cluster(dense_cluster)
        )
        margin = question.margin
        known = without_margin(question.cluster, margin)
        tables = self._tables(adapter, program)
        names = [adapter.param_paths[one.param] for one in program.lookups]
        size = max(one.shape[0] for one in program.lookups)

        def place(dense: Plan) -> tuple[TwoSections, DeviceUse]:
            def use_of(placement: TablePlacement) -> DeviceUse:
                given = placement, program.lookups, names, self.rows, dense
                return predict_device_use(*given)

            return self._place_within_memory(
                *(tables, sparse, dense, known, size), use_of
            )

        least = 0 if sparse else self._least_bytes(tables) // known.num_devices
        dense, found, use = _fit(question, known.memory_bytes, least, place)
        check_divisible(program.lookups, dense.num_devices)
        if dense.combine != "mean":  # The dense part lacks the computation of ids.
            check_split(capture(adapter, batch), dense)
        refused = {adapter.param_paths[n]: text for n, text in program.refused.items()}
        refused |= {
            f"batch {path}": f"neither a table nor anything else reads {path} of the "
            "batch. Look it up in the loss, or leave it out"
            for path in program.unread
        }
        return TablesPlan(
            program_hash=program_hash(program),
            placement=found.placement,
            dense=dense,
            rows=self.rows,
            refused=refused,
            model_paths=adapter.param_paths,
            batch=batch,
            sections=found.sections,
            beside=found.beside,
            cut=found.cut,
            use=use,
        )

    def _least_bytes(self, tables: Sequence[Table]) -> int:
        pins = [pin[0] for pin in map(read_pin, (self.pins or {}).values()) if pin]
        if {*self.splits, *pins} & {*HOST_SPLITS}:
            return 0
        return sum(table.nbytes for table in tables)

    def _place_within_memory(
        self,
        tables: list[Table],
        sparse: Cluster | None,
        dense: Plan,
        cluster: Cluster,
        size: int,
        use_of: Callable[[TablePlacement], DeviceUse],
    ) -> tuple[TwoSections, DeviceUse]:
        """Places tables so that they, exchanges and the dense part fit in memory.

        The placement decides two sizes. Every device has buffers as long as those of
        the fullest device, and room for the vectors of an exchange.
        """
        reserved, left = 0, _PLACEMENTS
        while True:
            found = self._place_sections(tables, sparse, dense, cluster, size, reserved)
            placement = found.placement if found.sections is None else found.beside
            if placement is None:
                return found, DeviceUse()
            use = use_of(placement)
            memory = use.memory_with(dense.memory)
            over = memory.total_bytes - cluster.memory_bytes
            if over <= 0:
                return found, use
            left -= 1
            if not left:
                break
            reserved += over
        raise NothingFits(
            f"with a batch of {size:,} samples, tables take "
            f"{gigabytes(memory.tables_bytes)} on every device, and the rest of a step "
            f"{gigabytes(memory.total_bytes - memory.tables_bytes)}; a device "
            f"has {gigabytes(cluster.memory_bytes)}, {gigabytes(over)} too few. "
            'Use more devices, a smaller batch, or splits=[..., "host", "cached"]',
            lacks_bytes=over,
            of_bytes=cluster.memory_bytes,
            nearest="tables over devices",
        )

    def _place_sections(
        self,
        tables: list[Table],
        sparse: Cluster | None,
        dense: Plan,
        cluster: Cluster,
        size: int,
        reserved: int,
    ) -> TwoSections:
        """Places tables on the dense part's devices, or in CPU processes.

        The dense part and another ``reserved`` bytes of each device stay free.
        """
        used = dense.memory.total_bytes + reserved
        devices = Ranks.of(cluster, used_bytes=used)
        uses_all = dense.num_devices == cluster.num_devices
        wanted = SectionsWanted(
            staleness=self.staleness,
            times=self.times,
            in_processes=self.in_processes,
            splits=self.splits,
            together=self.together,
            pins=self.pins or {},
        )
        if sparse is not None:
            _check_beside_processes(dense)
            return place_in_sections(
                tables,
                Ranks.of(sparse),
                devices if uses_all else None,
                batch_size=size,
                dense_seconds=dense.time.step_seconds,
                wanted=wanted,
            )
        if not uses_all:
            raise PlanError(
                f"the dense part uses {dense.num_devices} of {cluster.num_devices} "
                "devices; tables need all of them. Use a batch size that the "
                "devices divide"
            )
        placement = place_tables(
            tables,
            devices,
            batch_size=size,
            splits=self.splits,
            together=self.together,
            pins=self.pins,
        )
        return TwoSections(placement=placement, beside=None, sections=None, cut=())

    def dense_question(
        self, loss_fn: Callable[..., Any], model: Any, batch: Any
    ) -> PlanQuestion:
        """Returns the question of the dense part of a model.

        Args:
            loss_fn: ``loss_fn(model, batch)`` or ``loss_fn(model, batch, rng)``.
            model: An NNX module, Linen variables or any pytree.
            batch: Global batch, abstract or real.
        """
        adapter = adapt(model, loss_fn, trainable=self.trainable).without_values()
        batch = jax.tree.map(aval_of, batch)
        program = cut_program(adapter, batch)
        return self._dense_question(adapter, program, batch, self.cluster)

    def _dense_question(
        self, adapter: Adapter, program: TableProgram, batch: Any, cluster: Any
    ) -> PlanQuestion:
        own = dense_adapter(adapter, program, batch)
        precision = self.precision
        if isinstance(precision, str) and precision != "f32":
            # Products alone are cast, as tables and vectors keep their types.
            precision = {ALL: precision}
        question = PlanQuestion(
            adapter=own,
            batch=jax.tree.map(aval_of, dense_batch(program, batch)),
            cluster=parsed_cluster(cluster),
            request=dataclasses.replace(self.dense_request, precision=precision),
        )
        graphs = question.programs().graph.task_graphs
        kinds = {mark.kind for graph in graphs for mark in graph.marks}
        mesh: dict[str, int] = dict.fromkeys(_SEARCHED_AXES, 1)
        if kinds & {"stage", "pipeline"}:
            del mesh[STAGE]
        mesh |= self.mesh or {}
        request = dataclasses.replace(question.request, mesh=mesh)
        return dataclasses.replace(question, request=request)

    @property
    def dense_request(self) -> PlanRequest:
        """Request for the dense part, as far as it does not depend on a model."""
        given = {"shares": "even", **self.dense}
        return PlanRequest(
            optimizer=self.optimizer, mesh=self.mesh, precision=self.precision, **given
        )

    def _tables(self, adapter: Adapter, program: TableProgram) -> list[Table]:
        leaves = jax.tree.leaves(adapter.params)
        samples = max(one.shape[0] for one in program.lookups)
        found, rows = [], self.rows
        for number in program.tables:
            leaf, path = leaves[number], adapter.param_paths[number]
            lookups = [one for one in program.lookups if one.param == number]
            itemsize = np.dtype(leaf.dtype).itemsize
            found.append(
                Table(
                    name=path,
                    rows=leaf.shape[0],
                    width=leaf.shape[1],
                    element_bytes=itemsize,
                    optimizer_bytes_per_row=rows.state_bytes_per_row(
                        leaf.shape[1], itemsize
                    ),
                    lookups_per_sample=sum(o.shape[0] * o.num_ids for o in lookups)
                    / samples,
                    vectors=sum(o.shape[0] * o.num_vectors for o in lookups) / samples,
                    splits_columns=not rows.is_row_wise,
                    counts=(self.counts or {}).get(path),
                )
            )
        return found


def _fit(
    question: PlanQuestion,
    room: int,
    least: int,
    place: Callable[[Plan], tuple[TwoSections, DeviceUse]],
) -> tuple[Plan, TwoSections, DeviceUse]:
    """Returns the fastest dense plan with room for the tables, and the placement.

    Plans may fill ``room`` bytes of a device. Tables take at least ``least`` bytes.
    """
    whole, room = room, room - least if least < room else room
    refused: NothingFits | None = None
    for _ in range(_DENSE_PLANS):
        try:
            dense = _plan_dense(question, room)
        except NothingFits as error:
            if refused is not None or room == whole:
                raise refused or error from error
            dense = _plan_dense(question, whole)  # Shows whether tables are at fault.
        try:
            return dense, *place(dense)
        except NothingFits as error:
            took = dense.memory.total_bytes
            refused = error.with_sentence(
                f"The dense part takes {gigabytes(took)} of each device, with a batch "
                f"of {_samples(question):,} samples; a smaller batch leaves more"
            )
            room = min(room, took) - max(error.lacks_bytes, 1)
            whole = room
    assert refused is not None
    raise refused


def _samples(question: PlanQuestion) -> int:
    leaves = jax.tree.leaves(question.batch)
    return max(int(leaf.shape[0]) for leaf in leaves if leaf.shape)


def _plan_dense(question: PlanQuestion, room: int) -> Plan:
    devices, margin = question.cluster, question.margin
    short = devices.with_memory(max(1, int(room * (1 + margin)) + 1))
    request = dataclasses.replace(question.request, margin=margin)
    asked = dataclasses.replace(question, cluster=short, request=request)
    try:
        plan = with_devices(asked.plan(), devices)
    except NothingFits as error:
        raise NothingFits(
            "the part of the loss beside the tables, with a batch of "
            f"{_samples(question):,} samples, lacks {gigabytes(error.lacks_bytes)} of "
            f"{gigabytes(error.of_bytes)} per device ({error.nearest}). Use a smaller "
            "batch or more devices",
            lacks_bytes=error.lacks_bytes,
            of_bytes=error.of_bytes,
            nearest=error.nearest,
        ) from error
    if plan.pipelines:
        raise PlanError(
            "with tables, all pipelines need equal devices, and these pipelines would "
            "have programs of their own. Give devices of one kind, or leave "
            "stages out"
        )
    if plan.stage_plans and plan.scales_loss:
        raise PlanError(
            'precision="f16" scales the loss, but stages with programs of their own '
            'skip no rows of tables. Use precision="bf16", or leave stages out'
        )
    notes = tuple(note for note in plan.notes if not note.startswith(_MEMORY_NOTE))
    return dataclasses.replace(plan, notes=notes, question=question)


def _check_beside_processes(dense: Plan) -> None:
    if dense.stage_plans:
        raise PlanError(
            "beside processes with tables the dense part is one program; these stages "
            "would have programs of their own. Leave stages out, or the CPUs before "
            "the plus sign in cluster"
        )
    if dense.scales_loss:
        raise PlanError(
            'precision="f16" scales the loss, and processes with tables apply the '
            'gradients of a step that overflows. Use precision="bf16", or leave out '
            "the CPUs before the plus sign in cluster"
        )


def split_sections(
    cluster: Cluster | str | None,
) -> tuple[Cluster | None, Cluster | str | None]:
    """Returns (CPUs of the sparse section or None, cluster of the dense part).

    Args:
        cluster: Cluster, in the form of ``plan_tables``.

    >>> sparse, dense = split_sections("cpu:2+h100:8")
    >>> sparse.num_devices, dense
    (2, 'h100:8')
    """
    if not isinstance(cluster, str):
        return None, cluster
    first, plus, rest = cluster.partition("+")
    if not plus or first.strip().lower().partition(":")[0] not in _CPU_KINDS:
        return None, cluster
    return parsed_cluster(first), rest.strip()


def _check_sections(
    sparse: Cluster | None, staleness: int, in_processes: Collection[str] | None
) -> None:
    problems = Arguments("wh.plan_tables")
    if in_processes is not None and sparse is None:
        problems.add(
            "in_processes was given, and the cluster has no CPUs beside the devices of "
            "the dense part. Name them first, as in cpu:2+h100:8, or leave it out"
        )
    if staleness > 0 and sparse is None:
        problems.add(
            f"staleness is {staleness}, and the cluster has no CPUs beside the devices "
            "of the dense part, which could hold the tables. Name them first, as in "
            "cpu:2+h100:8, or leave staleness out"
        )
    problems.raise_if_any()


def _check(request: TablesRequest) -> None:
    problems = Arguments("wh.plan_tables")
    rows, splits = request.rows, request.splits
    together: Any = request.together
    pins, times = request.pins, request.times
    problems.whole("staleness", request.staleness)
    problems.of("times", times, SectionTimes, "what report().times gave", none=True)
    if not isinstance(rows, SparseOptimizer):
        expected = f'wh.sparse_optimizer("adagrad", 0.01) or {SPARSE_FORMS}'
        problems.refuse("rows", rows, expected)
    check_optimizer(problems, request.optimizer)
    given = request.in_processes
    is_empty = isinstance(given, list | tuple) and not given
    if given is not None and not (is_empty or _are_names(given)):
        problems.refuse("in_processes", given, "paths of tables, in a list, or None")
    if not _are_names(splits) or not set(splits) <= set(SPLITS):
        problems.refuse(
            "splits",
            splits,
            f"some of {', '.join(SPLITS)}",
        )
    groups = list(together) if isinstance(together, list | tuple) else [None]
    if not all(_are_names(group) for group in groups):
        problems.refuse("together", together, "groups of paths of tables, in a list")
    fixed = {None: 0} if not isinstance(pins, Mapping) else pins
    for name, pin in () if pins is None else fixed.items():
        known = is_whole(pin, 0) or read_pin(pin) is not None
        if not isinstance(name, str) or not known:
            expected = f"by the path of a table a device, or {PIN_WORDS}; or None"
            problems.refuse("pins", pins, expected)
    _check_dense(problems, request.dense)
    problems.raise_if_any()
    request.dense_request  # noqa: B018  Checks the settings of the dense part.


def _check_dense(problems: Arguments, dense: Mapping[str, Any]) -> None:
    known = {f.name: f.default for f in dataclasses.fields(PlanSettings)}
    own = {f.name for f in dataclasses.fields(TablesRequest)}
    for name, value in dense.items():
        if name not in known or name in own:
            problems.add(
                f"there is no {name!r} to set{near_hint(name, known)}. Leave it out"
            )
        elif name in _REFUSED and is_given(value, known[name]):
            problems.add(
                f"{name} was given with tables: {_REFUSED[name]}. Leave it out"
            )
    shares = dense.get("shares")
    if not (shares is None or isinstance(shares, str)):
        problems.add(
            f"shares is {short_repr(shares)} with tables, which every device looks up "
            'for as many samples. Leave it out, or give "even"'
        )


def is_given(value: Any, default: Any) -> bool:
    """Returns whether an argument differs from its default.

    Args:
        value: The argument.
        default: Default of the argument.
    """
    if value is default:
        return False
    plain = isinstance(default, bool | int | float | str)
    return not (plain and type(value) is type(default) and value == default)


def _are_names(value: Any) -> bool:
    listed = isinstance(value, list | tuple | set | frozenset)
    return bool(listed and value and all(isinstance(name, str) for name in value))


def check_tables(adapter: Adapter, program: TableProgram, counts: Any) -> None:
    """Refuses a loss without tables, mixed element types, and invalid counts.

    Args:
        adapter: Model.
        program: Loss of the model, divided at the lookups.
        counts: Number of lookups of each row, in the form of ``wh.plan_tables``.

    Raises:
        PlanError: The loss looks up no table.
        WhaleError: Tables have several element types, or ``counts`` is invalid.
    """
    if not program.lookups:
        reasons = "; ".join(program.refused.values()) or (
            "no parameter of two dimensions is read by ids of the batch"
        )
        raise PlanError(
            f"the loss looks up no table: {reasons}. Leave tables= (--tables) out"
        )
    names = [adapter.param_paths[n] for n in program.tables]
    problems = Arguments("wh.plan_tables")
    if counts is not None and not isinstance(counts, Mapping):
        problems.refuse("counts", counts, "counts of rows by the path of a table")
    for name in counts if isinstance(counts, Mapping) else ():
        if name not in names:
            problems.add(
                f"counts names {short_repr(name)}, which is no table; the tables are "
                f"{', '.join(names[:8])}"
            )
    leaves = jax.tree.leaves(adapter.params)
    types = {str(leaves[n].dtype) for n in program.tables}
    if len(types) > 1:
        problems.add(
            f"tables have the element types {', '.join(sorted(types))}; expected one. "
            "Cast them to one type"
        )
    problems.raise_if_any()


_BAGS: Final = (
    "Pad bags of unequal lengths: ids of one shape, (samples, longest), "
    "with -1 in unused places, summed as "
    "jnp.where((ids >= 0)[..., None], table[ids], 0).sum(1). Offsets and flat ids do "
    "not show which samples a device has"
)


def _check_bags(batch: Any) -> None:
    ragged = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if isinstance(leaf, np.ndarray) and leaf.dtype == object
    ]
    if ragged:
        raise PlanError(
            f"batch{ragged[0]} has the element type object, as NumPy gives lists of "
            f"unlike lengths; expected int32. {_BAGS}"
        )
    try:
        check_batch(batch, 0)
    except WhaleError as error:
        leaves = jax.tree.leaves(batch)
        if not any(_is_integer(leaf) for leaf in leaves):
            raise
        raise PlanError(f"{error}\n{_BAGS}") from None


def _is_integer(leaf: Any) -> bool:
    kind = getattr(getattr(leaf, "dtype", None), "kind", "")
    return kind in ("i", "u") or type(leaf) is int


def _check_rows(adapter: Adapter) -> None:
    leaves = zip(adapter.param_paths, jax.tree.leaves(adapter.params), strict=True)
    problems = Problems("model", PlanError)
    for path, leaf in leaves:
        if len(leaf.shape) == 2 and leaf.shape[0] > _MOST_ROWS:
            problems.add(
                f"{path} has {leaf.shape[0]:,} rows, and ids of 32 bits name "
                f"{_MOST_ROWS:,}: {leaf.shape[0] - _MOST_ROWS:,} too many. Hash ids "
                "into fewer rows, or divide it into several tables"
            )
    problems.raise_if_any()


def _check_lengths(batch: Any, program: TableProgram) -> None:
    lengths = Counter(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.shape)
    ((samples, _),) = lengths.most_common(1)
    problems = Problems("loss_fn", PlanError)
    for one in program.lookups:
        if one.shape[0] != samples:
            problems.add(
                f"{one.feature} is looked up by ids of shape {one.shape}, and the "
                f"batch has {samples} samples, which devices divide by the first "
                "dimension; look ids up in the shape that they have in the batch, "
                f"({samples}, …), padded where samples have unlike numbers of them, "
                "and reshape what was looked up"
            )
    problems.raise_if_any()
