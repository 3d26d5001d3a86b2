"""Finds the embedding tables of a loss: parameters that ids of the batch look up.

A table is a trained parameter of two dimensions that the loss reads only as
``table[ids]`` (``jnp.take``, ``nnx.Embed``), where ``ids`` depends on the batch alone.
If the loss sums the rows of a sample at once, perhaps with masks, the lookup is pooled:
only the sum is exchanged.

``split_loss`` cuts the program at the lookups. Ids are then a function of the batch.
The rest of the loss is a function of the other parameters, the batch and the looked-up
vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from whalejax import _compat
from whalejax.meshes.errors import WhaleError


_INLINED: Final = frozenset(("jit", "pjit", "closed_call", "core_call"))

NO_ID: Final = -(2**31)
"""Id that stands for a masked lookup."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lookup:
    """Lookup of rows of one table.

    Attributes:
        param: Index of the table among the trained leaves.
        shape: Shape of the ids; dimension 0 is divided over ranks.
        pooled: Whether the rows for each index of dimension 0 are summed.
        width: Number of columns of the table.
        dtype: Dtype of the vectors.
        feature: Path of the batch leaf from which the ids come, or several paths.
        ids: Variable of the ids in the program.
        masks: (Variable of a boolean mask, whether True keeps a row) pairs.
        vectors: Variable that the vectors replace.
    """

    param: int
    shape: tuple[int, ...]
    pooled: bool
    width: int
    dtype: Any
    feature: str
    ids: Any
    masks: tuple[tuple[Any, bool], ...]
    vectors: Any

    @property
    def num_ids(self) -> int:
        """Number of ids for one index of dimension 0."""
        return int(np.prod(self.shape[1:], dtype=int))

    @property
    def num_vectors(self) -> int:
        """Number of exchanged vectors for one index of dimension 0."""
        return 1 if self.pooled else self.num_ids

    @property
    def vectors_shape(self) -> tuple[int, ...]:
        """Shape of the vectors for the full batch."""
        middle = () if self.pooled else self.shape[1:]
        return (self.shape[0], *middle, self.width)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableProgram:
    """Loss that is cut at its lookups.

    Attributes:
        lookups: All lookups of tables.
        tables: Indices of the trained leaves that are tables, in order.
        refused: Reason why a looked-up leaf is not a table, by index of the leaf.
        inputs: Numbers of trained leaves, other leaves, and leaves of the batch.
        unread: Paths of the batch's leaves that no equation reads.
        metrics: Structure of the reported metrics.
        weighted: Whether the loss has a weight of its own.
        batch: Abstract batch for which the loss was traced.
    """

    lookups: tuple[Lookup, ...]
    tables: tuple[int, ...]
    refused: Mapping[int, str]
    inputs: tuple[int, int, int]
    _closed: Any
    unread: tuple[str, ...] = ()
    metrics: Any = None
    weighted: bool = False
    batch: Any = None

    @property
    def traced(self) -> Any:
        """Traced loss, including its lookups."""
        return self._closed

    def ids(self, batch: Sequence[Any]) -> list[Any]:
        """Returns each lookup's ids, ``int32[samples, ids]``; ``NO_ID`` where masked.

        Args:
            batch: Leaves of the batch.
        """
        jaxpr = self._closed.jaxpr
        first = sum(self.inputs[:2])
        known = dict(zip(jaxpr.invars[first : first + len(batch)], batch, strict=True))
        wanted = [
            v for one in self.lookups for v in (one.ids, *(m for m, _ in one.masks))
        ]
        values = _evaluate(self._closed, known, wanted)
        found = []
        for one in self.lookups:
            ids = _narrow(values[one.ids][..., 0].reshape(one.shape[0], -1))
            for mask, keeps in one.masks:
                kept = values[mask][..., 0].reshape(one.shape[0], -1)
                ids = jnp.where(kept if keeps else ~kept, ids, NO_ID)
            found.append(ids)
        return found

    def loss(
        self, params: Sequence[Any], others: Sequence[Any], vectors: Sequence[Any]
    ) -> list[Any]:
        """Returns the outputs of the loss.

        Args:
            params: Trained leaves that are not tables, in order.
            others: Other leaves, leaves of the batch, and further arguments.
            vectors: Vectors of each lookup.
        """
        jaxpr = self._closed.jaxpr
        trained = self.inputs[0]
        numbers = [n for n in range(trained) if n not in set(self.tables)]
        known = {jaxpr.invars[n]: x for n, x in zip(numbers, params, strict=True)}
        known |= zip(jaxpr.invars[trained:], others, strict=True)
        known |= {one.vectors: x for one, x in zip(self.lookups, vectors, strict=True)}
        values = _evaluate(self._closed, known, jaxpr.outvars)
        return [a.val if _compat.is_literal(a) else values[a] for a in jaxpr.outvars]


def split_loss(
    loss: Callable[..., Any],
    trained: Sequence[Any],
    rest: Sequence[Any],
    batch: Sequence[Any],
    *more: Any,
    paths: Sequence[str],
    batch_paths: Sequence[str],
) -> TableProgram:
    """Finds the tables of a loss, and cuts the loss at its lookups.

    Args:
        loss: Function ``loss(trained, rest, batch, *more)`` of lists that returns a
            list of leaves.
        trained, rest, batch: Abstract leaves.
        more: Further abstract arguments, such as a random key.
        paths: Dotted path of each trained leaf.
        batch_paths: Path of each leaf of the batch.

    Raises:
        WhaleError: The loss looks rows up by ids that are not integers.
    """
    sizes = len(trained), len(rest), len(batch)

    def flat(*values: Any) -> Any:
        ends = np.cumsum([0, *sizes])
        parts = [list(values[a:b]) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        return loss(*parts, *values[ends[-1] :])

    try:
        traced = _compat.trace(flat, [*trained, *rest, *batch, *more])
    except Exception as error:
        if "Indexer must have integer" in str(error):
            floats = [
                path
                for path, leaf in zip(batch_paths, batch, strict=True)
                if not np.issubdtype(leaf.dtype, np.integer)
            ]
            raise WhaleError(
                "the loss looks rows up by ids that are not integers; of the batch "
                f"{', '.join(floats[:8])} {'are' if floats[1:] else 'is'} of another "
                f"type. Give ids as int32 ({error})"
            ) from None
        if not isinstance(error, WhaleError):
            error.add_note("whalejax: raised in loss_fn, traced without values")
        raise
    closed = _inlined(traced)
    finder = _Finder(closed, sizes, batch_paths)
    lookups: list[Lookup] = []
    refused: dict[int, str] = {}
    for number, leaf in enumerate(trained):
        if len(leaf.shape) != 2 or not _compat.is_inexact(leaf.dtype):
            continue
        found = finder.lookups_of(number)
        if isinstance(found, str):
            refused[number] = f"{paths[number]} {found}"
        else:
            lookups += found
    tables = tuple(sorted({one.param for one in lookups}))
    return TableProgram(
        lookups=tuple(lookups),
        tables=tables,
        refused=refused,
        inputs=sizes,
        unread=finder.unread(sum(sizes[:2]), batch_paths),
        _closed=closed,
    )


def _inlined(closed: Any) -> Any:
    def run(jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        known = dict(zip(jaxpr.constvars, constants, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)
        for equation in jaxpr.eqns:
            given = [
                a.val if _compat.is_literal(a) else known[a] for a in equation.invars
            ]
            with _compat.equation_context(equation):
                if equation.primitive.name in _INLINED:
                    (inner,) = _compat.inner_jaxprs(equation)
                    results = run(*_compat.open_jaxpr(inner), given)
                else:
                    results = _compat.bind(equation, given)
            known |= zip(equation.outvars, results, strict=True)
        return [a.val if _compat.is_literal(a) else known[a] for a in jaxpr.outvars]

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in closed.jaxpr.invars
    ]
    body, constants = _compat.open_jaxpr(closed)
    return jax.make_jaxpr(lambda *values: run(body, constants, values))(*avals)


def _narrow(ids: Any) -> Any:
    if np.iinfo(ids.dtype).max > 2**31 - 1:
        ids = jnp.clip(ids, 0 if ids.dtype.kind == "u" else NO_ID + 1, 2**31 - 1)
    return ids.astype(jnp.int32)


def _evaluate(
    closed: Any, known: Mapping[Any, Any], wanted: Sequence[Any]
) -> dict[Any, Any]:
    jaxpr, constants = _compat.open_jaxpr(closed)
    values = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(known)
    needed = {v for v in wanted if not _compat.is_literal(v) and v not in values}
    equations = []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.difference_update(equation.outvars)
            needed.update(
                v
                for v in equation.invars
                if not _compat.is_literal(v) and v not in values
            )
    for equation in reversed(equations):
        given = [a.val if _compat.is_literal(a) else values[a] for a in equation.invars]
        with _compat.equation_context(equation):
            results = _compat.bind(equation, given)
        for variable, result in zip(equation.outvars, results, strict=True):
            values.setdefault(variable, result)
    return values


class _Finder:
    """Readers of a program's values, and the values that depend on the batch alone."""

    def __init__(
        self, closed: Any, sizes: tuple[int, int, int], batch_paths: Sequence[str]
    ) -> None:
        self.jaxpr, _ = _compat.open_jaxpr(closed)
        trained, rest, batch = sizes
        first = trained + rest
        self.origins: dict[Any, frozenset[str]] = {
            v: frozenset((path,))
            for v, path in zip(
                self.jaxpr.invars[first : first + batch], batch_paths, strict=True
            )
        }
        self.origins |= {v: frozenset() for v in self.jaxpr.constvars}
        self.makers: dict[Any, Any] = {}
        self.readers: dict[Any, list[Any]] = {}
        for equation in self.jaxpr.eqns:
            operands = [v for v in equation.invars if not _compat.is_literal(v)]
            for variable in operands:
                self.readers.setdefault(variable, []).append(equation)
            for variable in equation.outvars:
                self.makers[variable] = equation
            if all(v in self.origins for v in operands):
                origins = frozenset().union(*(self.origins[v] for v in operands))
                self.origins |= {v: origins for v in equation.outvars}
        self.results = {v for v in self.jaxpr.outvars if not _compat.is_literal(v)}

    def unread(self, first: int, paths: Sequence[str]) -> tuple[str, ...]:
        """Returns the paths of batch leaves that no equation reads.

        ``first`` is the index of the first batch leaf among the inputs.
        """
        variables = self.jaxpr.invars[first : first + len(paths)]
        return tuple(
            path
            for path, variable in zip(paths, variables, strict=True)
            if variable not in self.readers and variable not in self.results
        )

    def _hidden_lookup(self, table: Any, readers: Sequence[Any]) -> list[Lookup] | str:
        """Returns lookups after another operation, or the reason why there are none."""
        for equation in readers:
            name = equation.primitive.name
            after = [e for v in equation.outvars for e in self.readers.get(v, [])]
            cast = name == "convert_element_type"
            if cast and any(e.primitive.name == "gather" for e in after):
                return (
                    "is cast in full before it is looked up, as nnx.Embed does with "
                    "dtype=; cast the looked-up vectors instead"
                )
            if name in ("checkpoint", "remat2") and _looks_up(equation, table):
                return (
                    "is looked up inside jax.checkpoint; look it up outside, and give "
                    "the looked-up vectors to the checkpointed function"
                )
        return []

    def lookups_of(self, number: int) -> list[Lookup] | str:
        """Returns the lookups of a trained leaf, or why it is not a table."""
        table = self.jaxpr.invars[number]
        readers = self.readers.get(table, [])
        if not any(e.primitive.name == "gather" for e in readers):
            return self._hidden_lookup(table, readers)
        if table in self.results:
            return "is also a result of the loss"
        found = []
        for equation in readers:
            lookup = self._lookup(number, equation)
            if isinstance(lookup, str):
                return lookup
            found.append(lookup)
        return found

    def _lookup(self, number: int, equation: Any) -> Lookup | str:
        table, *indices = equation.invars
        name = equation.primitive.name
        if name != "gather":
            return f"is also read by {name}, which needs all of it"
        if not _takes_rows(equation):
            return "is not looked up by full rows along its first dimension"
        (ids,) = indices
        if _compat.is_literal(ids) or not self.origins.get(ids):
            return "is looked up by ids that do not depend on the batch alone"
        *shape, _ = ids.aval.shape
        if not shape:
            return "is looked up by a single id instead of ids of samples"
        (vectors,) = equation.outvars
        masks, pooled = self._pooled(vectors)
        return Lookup(
            param=number,
            shape=tuple(shape),
            pooled=pooled is not None,
            width=table.aval.shape[1],
            dtype=vectors.aval.dtype,
            feature=", ".join(sorted(self.origins[ids])),
            ids=ids,
            masks=masks if pooled is not None else (),
            vectors=vectors if pooled is None else pooled,
        )

    def _pooled(self, vectors: Any) -> tuple[tuple[tuple[Any, bool], ...], Any]:
        """Returns masks of the rows, and the variable of their sum or None."""
        masks: list[tuple[Any, bool]] = []
        dims = len(vectors.aval.shape)
        while vectors not in self.results:
            readers = self.readers.get(vectors, [])
            if len(readers) != 1 or dims < 3:
                break
            (equation,) = readers
            name = equation.primitive.name
            if name == "reduce_sum":
                whole = tuple(equation.params["axes"]) == tuple(range(1, dims - 1))
                if whole:
                    return tuple(masks), equation.outvars[0]
                break
            mask = self._mask(equation, vectors)
            if mask is None:
                break
            masks.append(mask)
            (vectors,) = equation.outvars
        return (), None

    def _mask(self, equation: Any, vectors: Any) -> tuple[Any, bool] | None:
        """Returns the mask of ``where(mask, vectors, 0)``, and whether True keeps a
        row.

        The result is None for other equations.
        """
        if equation.primitive.name == "select_n":
            which, *cases = equation.invars
            if len(cases) != 2 or sum(case is vectors for case in cases) != 1:
                return None
            keeps = cases[1] is vectors
            other = cases[0] if keeps else cases[1]
            return (
                (which, keeps)
                if self._is_zero(other) and self._same_in_row(which)
                else None
            )
        if equation.primitive.name != "mul":
            return None
        other = next(v for v in equation.invars if v is not vectors)
        mask = self._boolean(other)
        return None if mask is None else (mask, True)

    def _boolean(self, variable: Any) -> Any:
        """Returns the boolean of a 0/1 factor that is equal in all columns, or None."""
        is_row = False
        shape = variable.aval.shape
        while not _compat.is_literal(variable) and variable.aval.dtype != bool:
            maker: Any = self.makers.get(variable)
            if maker is None:
                return None
            name = maker.primitive.name
            if name == "broadcast_in_dim" and self._repeats_row(maker):
                is_row = True
            elif name != "convert_element_type":
                return None
            (variable, *_) = maker.invars
        if _compat.is_literal(variable) or variable not in self.origins:
            return None
        here = variable.aval.shape
        same = here[:-1] == shape[:-1] and (is_row or self._same_in_row(variable))
        return variable if same else None

    def _repeats_row(self, maker: Any) -> bool:
        """Returns whether a broadcast only extends the last dimension from size 1."""
        source, result = maker.invars[0].aval.shape, maker.outvars[0].aval.shape
        dims = tuple(maker.params["broadcast_dimensions"])
        whole = len(source) == len(result) and dims == tuple(range(len(result)))
        return whole and source[:-1] == result[:-1] and source[-1] == 1

    def _is_zero(self, variable: Any) -> bool:
        while not _compat.is_literal(variable):
            maker = self.makers.get(variable)
            if maker is None or maker.primitive.name not in (
                "broadcast_in_dim",
                "convert_element_type",
            ):
                return False
            variable = maker.invars[0]
        return bool(np.all(np.asarray(variable.val) == 0))

    def _same_in_row(self, variable: Any) -> bool:
        """Returns whether a value depends on the batch alone, and has equal columns."""
        if _compat.is_literal(variable) or variable not in self.origins:
            return False
        maker = self.makers.get(variable)
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return False
        last = len(variable.aval.shape) - 1
        dims = maker.params["broadcast_dimensions"]
        source = maker.invars[0].aval.shape
        return last not in dims or source[dims.index(last)] == 1


def _takes_rows(equation: Any) -> bool:
    """Returns whether a gather reads full rows of its operand, by single indices."""
    table, ids = equation.invars
    dims = equation.params["dimension_numbers"]
    last = len(ids.aval.shape) - 1
    return (
        len(table.aval.shape) == 2
        and tuple(dims.offset_dims) == (last,)
        and tuple(dims.collapsed_slice_dims) == (0,)
        and tuple(dims.start_index_map) == (0,)
        and not dims.operand_batching_dims
        and tuple(equation.params["slice_sizes"]) == (1, table.aval.shape[1])
    )


def check_divisible(lookups: Iterable[Lookup], ranks: int) -> None:
    """Refuses lookups that ranks cannot divide evenly.

    Args:
        lookups: Lookups of a loss.
        ranks: Number of ranks.

    Raises:
        WhaleError: The number of ranks does not divide dimension 0 of some ids.
    """
    bad = [one for one in lookups if one.shape[0] % ranks]
    if bad:
        named = "; ".join(f"{one.feature} has {one.shape[0]}" for one in bad[:4])
        raise WhaleError(
            f"ids are divided over {ranks} devices along their first dimension, which "
            f"is not divisible by {ranks}: {named}. Use another batch size or fewer "
            "devices"
        )


def _looks_up(equation: Any, table: Any) -> bool:
    inner = equation.params["jaxpr"]
    pairs = zip(equation.invars, inner.invars, strict=True)
    given = {own for value, own in pairs if value is table}
    return any(
        e.primitive.name == "gather" and e.invars[0] in given for e in inner.eqns
    )
