"""The table arguments of ``wh.plan``, and their plan.

Tables are found in the program of the loss. They are placed on the devices, or in
separate CPU processes. The rest of the loss is planned like any other, with the
looked-up vectors as a part of its batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
import optax

from whalejax.adapters.base import Adapter, adapt
from whalejax.api.plan_request import PlanQuestion, PlanRequest, question_about
from whalejax.api.plan_settings import parsed_cluster
from whalejax.capture.batch import aval_of, check_batch
from whalejax.meshes.checks import Arguments, is_whole, short_repr
from whalejax.meshes.cluster import Cluster
from whalejax.meshes.errors import Problems, WhaleError
from whalejax.meshes.units import gigabytes
from whalejax.planner.cost_terms import ALL
from whalejax.planner.plan.plan import Plan
from whalejax.planner.plan_errors import NothingFits, PlanError
from whalejax.planner.tables.place import place_tables
from whalejax.planner.tables.placement import TablePlacement
from whalejax.planner.tables.ranks import Ranks
from whalejax.planner.tables.sections import SectionTimes
from whalejax.planner.tables.storage_options import PIN_WORDS, SPLITS, read_pin
from whalejax.planner.tables.table import Table
from whalejax.planner.tables.two_sections import (
    SectionsWanted,
    TwoSections,
    place_in_sections,
)
from whalejax.tables.dense import ALL_AXES, dense_batch, dense_loss, dense_model
from whalejax.tables.device_use import DeviceUse, predict_device_use
from whalejax.tables.recognize import TableProgram
from whalejax.tables.sparse_optimizers import SPARSE_FORMS, SparseOptimizer
from whalejax.tables.table_plan_record import program_hash
from whalejax.tables.tables_plan import TablesPlan, cut_program
from whalejax.user_code.ambient_mesh import without_mesh
from whalejax.user_code.argument_checks import check_optimizer


_CPU_KINDS: Final = ("cpu",)

_REMAT: Final = ("none", "dots", "full")
"""Remat policies of the dense part, fastest first: each is tried until one fits."""

_PRECISIONS: Final[Mapping[str, Any]] = {"f32": "f32", "bf16": {ALL: "bf16"}}
"""Precision of each product of the dense part, by the argument's value. The dense part
is already traced, so its parameters and batch cannot be cast."""

_MOST_ROWS: Final = 2**31 - 1

_PLACEMENTS: Final = 4
"""Maximum number of placements to try, each with more room for exchanges."""

USUAL_SPLITS: Final = ("whole", "rows", "columns", "node_rows", "replicate")
"""Ways of storing a table that every backend supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesRequest:
    """Checked arguments of ``wh.plan_tables``, without loss, model and batch.

    Attributes:
        rows, optimizer, cluster, splits, together, pins, counts, mesh, remat,
            precision, trainable, staleness, times, in_processes: As for
            ``wh.plan_tables``.
    """

    rows: SparseOptimizer
    optimizer: optax.GradientTransformation | None = None
    cluster: Cluster | str | None = None
    splits: Collection[str] = USUAL_SPLITS
    together: Sequence[Sequence[str]] = ()
    pins: Mapping[str, int | str] | None = None
    counts: Mapping[str, Any] | None = None
    mesh: Mapping[str, int] | None = None
    remat: str | Mapping[str, str] | None = None
    precision: str = "f32"
    trainable: Any = None
    staleness: int = 0
    times: SectionTimes | None = None
    in_processes: Collection[str] | None = None

    def __post_init__(self) -> None:
        _check(self)

    @without_mesh
    def plan(self, loss_fn: Callable[..., Any], model: Any, batch: Any) -> TablesPlan:
        """Returns the plan for a model.

        Args:
            loss_fn, model, batch: Arguments of ``wh.plan_tables``, unchanged.

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
        known = parsed_cluster(dense_cluster)
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

        question = self._dense_question(adapter, program, batch, known)
        dense, found, use = self._fit(question, place)
        refused = {adapter.param_paths[n]: text for n, text in program.refused.items()}
        refused |= {
            f"batch {path}": f"{path} of the batch is read by no table, and by nothing "
            "else. Look it up in the loss, or leave it out"
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

    def _fit(
        self,
        question: PlanQuestion,
        place: Callable[[Plan], tuple[TwoSections, DeviceUse]],
    ) -> tuple[Plan, TwoSections, DeviceUse]:
        """Returns the dense part's plan and the placement of tables, with the least
        recomputation that fits in memory.

        Args:
            question: Question of the dense part's plan.
            place: Function that places the tables for a plan of the dense part.

        Raises:
            NothingFits: Nothing fits under any policy.
        """
        *others, last = _REMAT if self.remat is None else (self.remat,)
        for policy in others:
            with contextlib.suppress(NothingFits):
                dense = _plan_dense(_with_remat(question, policy))
                return dense, *place(dense)
        dense = _plan_dense(_with_remat(question, last))
        return dense, *place(dense)

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

        All devices have buffers of the fullest one's length, and need room for the
        vectors of an exchange; both depend on the placement.

        Args:
            tables, sparse, dense, cluster, size: Arguments of ``_place_sections``.
            use_of: Function from a placement on devices to its memory and traffic.

        Raises:
            NothingFits: No placement was found; names the bytes that are missing.
        """
        reserved, over = 0, 0
        for _ in range(_PLACEMENTS):
            found = self._place_sections(tables, sparse, dense, cluster, size, reserved)
            placement = found.placement if found.sections is None else found.beside
            if placement is None:
                return found, DeviceUse()
            use = use_of(placement)
            memory = use.memory_with(dense.memory)
            over = memory.total_bytes - cluster.memory_bytes
            if over <= 0:
                return found, use
            reserved += over
        raise NothingFits(
            f"tables take {gigabytes(memory.tables_bytes)} on every device, and the "
            f"rest of a step {gigabytes(memory.total_bytes - memory.tables_bytes)}; a "
            f"device has {gigabytes(cluster.memory_bytes)}, {gigabytes(over)} too few. "
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
        """Places tables on the devices of the dense part, or in CPU processes.

        Args:
            tables: All tables.
            sparse: CPUs of the processes, or None.
            dense: Plan of the dense part.
            cluster: Devices of the dense part.
            size: Number of samples of a global batch.
            reserved: Bytes per device to leave free, besides the dense part's.
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
            loss_fn, model, batch: Arguments of ``wh.plan_tables``, unchanged.
        """
        adapter = adapt(model, loss_fn, trainable=self.trainable).without_values()
        batch = jax.tree.map(aval_of, batch)
        program = cut_program(adapter, batch)
        return self._dense_question(adapter, program, batch, self.cluster)

    def _dense_question(
        self, adapter: Adapter, program: TableProgram, batch: Any, cluster: Any
    ) -> PlanQuestion:
        """Returns the question of the loss without its lookups."""
        request = PlanRequest(
            optimizer=self.optimizer,
            cluster=cluster,
            mesh={"expert": 1, "context": 1, "tensor": 1, **(self.mesh or {})},
            num_micro_batches=1,
            zero=0,
            offload="none",
            remat="none" if self.remat is None else self.remat,
            precision=_PRECISIONS[self.precision],
            shares="even",
            trainable="dense.*",
        )
        return question_about(
            request,
            dense_loss(adapter, program),
            dense_model(adapter, program),
            dense_batch(program, batch),
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


def _with_remat(question: PlanQuestion, policy: Any) -> PlanQuestion:
    request = dataclasses.replace(question.request, remat=policy)
    return dataclasses.replace(question, request=request)


def _plan_dense(question: PlanQuestion) -> Plan:
    """Returns the plan of the dense part.

    Raises:
        NothingFits: No layout fits in memory; names what a user can change.
    """
    try:
        return question.plan()
    except NothingFits as error:
        leaves = jax.tree.leaves(question.batch)
        samples = max(leaf.shape[0] for leaf in leaves if leaf.shape)
        raise NothingFits(
            "the part of the loss beside the tables runs with one micro-batch of "
            f"{samples:,} samples: it lacks {gigabytes(error.lacks_bytes)} of "
            f"{gigabytes(error.of_bytes)} per device ({error.nearest}). Use a smaller "
            "batch or more devices",
            lacks_bytes=error.lacks_bytes,
            of_bytes=error.of_bytes,
            nearest=error.nearest,
        ) from error


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
    rows, splits, mesh = request.rows, request.splits, request.mesh
    together: Any = request.together
    pins, times = request.pins, request.times
    problems.whole("staleness", request.staleness)
    problems.of("times", times, SectionTimes, "what report().times gave", none=True)
    if not isinstance(rows, SparseOptimizer):
        expected = f'wh.sparse_optimizer("adagrad", 0.01) or {SPARSE_FORMS}'
        problems.refuse("the optimizer of rows", rows, expected)
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
    if mesh is not None and (
        not isinstance(mesh, Mapping) or not set(mesh) <= {*ALL_AXES}
    ):
        problems.refuse("mesh", mesh, "sizes of data, fsdp and tensor, or None")
    problems.choice("precision", request.precision, tuple(_PRECISIONS))
    problems.raise_if_any()


def _are_names(value: Any) -> bool:
    """Whether a value is a non-empty collection of strings."""
    listed = isinstance(value, list | tuple | set | frozenset)
    return bool(listed and value and all(isinstance(name, str) for name in value))


def check_tables(adapter: Adapter, program: TableProgram, counts: Any) -> None:
    """Refuses a loss without tables, mixed element types, and invalid counts.

    Args:
        adapter: Model.
        program: Loss of the model, divided at the lookups.
        counts: Number of lookups of each row, in the form of ``wh.plan_tables``.
    """
    if not program.lookups:
        reasons = "; ".join(program.refused.values()) or (
            "no parameter of two dimensions is read by ids of the batch"
        )
        raise PlanError(f"the loss looks up no table: {reasons}. Use wh.plan")
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
    "Bags of unlike lengths are given padded: ids of one shape, (samples, longest), "
    "with -1 where there is none, and summed as "
    "jnp.where((ids >= 0)[..., None], table[ids], 0).sum(1); offsets and flat ids do "
    "not say which samples a device has"
)


def _check_bags(batch: Any) -> None:
    """Refuses an invalid batch; for ragged bags, the message explains padding."""
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
    """Refuses tables with more rows than 32-bit ids can address."""
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
    """Refuses lookups whose ids do not have one row for each sample."""
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
