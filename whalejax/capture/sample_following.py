"""Follows the samples of a batch, and what is reduced over them, through a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from whalejax import _compat
from whalejax.planner.model.graph import Graph, Op


_LINEAR: Final = frozenset(
    (
        "add add_any sub neg convert_element_type copy name reduce_sum psum reshape "
        "squeeze expand_dims broadcast_in_dim transpose scan while cond slice "
        "concatenate pad split rev real imag stop_gradient optimization_barrier "
        "sharding_constraint reduce_precision device_put gather dynamic_slice "
        "dynamic_update_slice stack unstack tile"
    ).split()
)
_LINEAR_IN_ONE: Final = frozenset(("mul", "dot_general", "conv_general_dilated"))

_PICKING: Final = frozenset(
    (
        *("reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin"),
        *("pmax", "pmin"),
        *("sort", "top_k", "slice", "dynamic_slice", "gather"),
    )
)
"""Operations that take some of the samples' values, and add none up."""

_GUARDS: Final = frozenset(
    "max min clamp select_n gt ge lt le eq ne convert_element_type copy "
    "broadcast_in_dim reshape squeeze".split()
)
"""Operations that keep a number of samples from being zero, as ``jnp.maximum(n, 1)``
does, before something is divided by it."""

_COMPARISONS: Final = frozenset("gt ge lt le eq ne".split())

_SHARING: Final = frozenset(
    "mul div neg add sub convert_element_type copy broadcast_in_dim reshape squeeze "
    "transpose select_n".split()
)
"""Operations that leave samples divided by what they were divided by."""

_ADDING: Final = frozenset(("reduce_sum", "psum", "dot_general"))
"""Operations that add samples up, each one times a number."""

Sources = frozenset[int]
"""Indices of the operations that reduced over the batch."""

_NONE: Final[Sources] = frozenset()


def statistics(
    graph: Graph, jaxpr: Any, loss: Sequence[int], state: Sequence[int]
) -> set[int]:
    """Indices of operations whose statistics of the samples the loss depends on.

    Args:
        graph, jaxpr: of the loss.
        loss, state: what it gives, and what it leaves of the model's state.
    """
    follow = Follow(graph, jaxpr, [*loss, *state])
    follow.run()
    follow.finish(loss, state)
    return {index for index, what in follow.found.items() if what == "statistic"}


class Follow:
    """Follows the batch dimension, and values that were reduced over it.

    A reduced value is harmless while it is only added, scaled and handed out as the
    loss. It is a statistic where it meets the samples again or ends in the state, and
    a term that is not linear in the samples where the loss bends it. A number of
    samples is a weight where it divides what was added up: as a divisor, as a factor
    that is one over it, or in each sample before they are added.
    """

    def __init__(self, graph: Graph, jaxpr: Any, roots: Iterable[int]) -> None:
        self.graph = graph
        self._jaxpr = jaxpr
        self.found: dict[int, str] = {}
        self._matters = _reaching(graph, roots)
        self._batch: dict[int, set[int]] = {}
        self._reduced: dict[int, Sources] = {}
        self._bent: dict[int, str] = {}
        self._scaled: set[int] = set()
        self._guarded: set[int] = set()
        self._shares: set[int] = set()
        self._inverse: set[int] = set()
        self._portion: dict[int, Sources] = {}
        self._trained = _trained(graph)
        for tensor, dim in graph.batch_dims:
            self._batch.setdefault(tensor, set()).add(dim)

    def run(self) -> None:
        """Go once through the program."""
        for index, op in enumerate(self.graph.ops):
            mixes, across = self._spread(op)
            if not any(t in self._matters for t in op.results):
                continue
            batched = any(self._batch.get(t) for t in op.results)
            self._share(op, index)
            if batched and not mixes and self._is_portion(op):
                continue
            sources = self._carried(op) | self._added(op)
            if not batched:
                sources |= {index} if mixes else _NONE
                self._reduced.update(dict.fromkeys(op.results, sources))
            elif mixes:
                self.found.setdefault(index, "statistic" if across else "auxiliary")
            else:
                self._blame(sources, "statistic")

    def _is_portion(self, op: Op) -> bool:
        """Note samples that are divided by a sum over them all, and nothing else."""
        slot = self._divisor(op)
        by = _NONE if slot is None else self._reduced.get(op.operands[slot], _NONE)
        portions = [t for t in op.operands if t in self._portion]
        others = [t for i, t in enumerate(op.operands) if i != slot or not by]
        if any(self._reduced.get(t) for t in others):
            return False
        if by:
            assert slot is not None
            if portions or not self._is_count(op.operands[slot]):
                return False
        elif not portions or op.kind not in _SHARING:
            return False
        elif len(portions) > 1 and op.kind in ("mul", "div"):
            return False
        elif slot is not None and op.operands[slot] in portions:
            return False
        self._scaled.update(by)
        sources = by.union(*(self._portion[t] for t in portions))
        self._portion.update(dict.fromkeys(op.results, sources))
        return True

    def _added(self, op: Op) -> Sources:
        """What divided the samples that an operation adds up.

        Where it does something else with them, that was a statistic.
        """
        given = [self._portion[t] for t in op.operands if t in self._portion]
        found = _NONE.union(*given)
        if len(given) == 1 and op.kind in _ADDING:
            self._bend(found, "weight")
            return found
        self._blame(found, "statistic")
        return _NONE

    def _is_count(self, tensor: int) -> bool:
        """Whether it is a sum over samples that no parameter changes."""
        sources = self._reduced.get(tensor, _NONE)
        return tensor not in self._trained and not any(
            self._picks(i) or self._bent.get(i, "weight") != "weight" for i in sources
        )

    def _divisor(self, op: Op) -> int | None:
        """The operand that an operation divides by, if it does.

        Literals are no operands, so that the program says which one is left.
        """
        if op.kind == "div":
            if len(op.operands) == 2:
                return 1
            equation = _equation(self._jaxpr, op)
            alone = equation is not None and _compat.is_literal(equation.invars[0])
            return 0 if alone else None
        if op.kind == "integer_pow":
            equation = _equation(self._jaxpr, op)
            return 0 if equation is not None and equation.params["y"] == -1 else None
        inverse = [i for i, t in enumerate(op.operands) if t in self._inverse]
        return inverse[0] if op.kind == "mul" and len(inverse) == 1 else None

    def _share(self, op: Op, index: int) -> None:
        """Note samples divided by a reduction of them all, and what adds those up."""
        divided = op.kind in ("mul", "div") and any(
            self._reduced.get(t) and not self._batch.get(t) for t in op.operands
        )
        if divided or any(t in self._shares for t in op.operands):
            if any(self._batch.get(t) for t in op.results) and op.kind in _SHARING:
                self._shares.update(op.results)
            elif not divided:
                self._scaled.add(index)

    def finish(self, loss: Iterable[int], state: Iterable[int]) -> None:
        """Judge what never met the samples again by where it ends."""
        for t in state:
            self._blame(self._reduced.get(t, _NONE), "statistic")
            self._blame(self._portion.get(t, _NONE), "statistic")
        for t in loss:
            if t in self._guarded or t in self._inverse:
                self._bend(self._reduced.get(t, _NONE), "auxiliary")
            for index in self._reduced.get(t, _NONE):
                if index in self._bent:
                    self.found.setdefault(index, self._bent[index])
                elif self._picks(index):
                    self.found.setdefault(index, "auxiliary")

    def adds_up(self, loss: int | None) -> bool:
        """Samples are added up in the loss, and what they make no value scales."""
        sources = _NONE if loss is None else self._reduced.get(loss, _NONE)
        added = {index for index in sources if not self._picks(index)}
        return bool(added - self._scaled)

    def _picks(self, index: int) -> bool:
        """Whether an operation adds nothing up; see ``_PICKING``."""
        return self.graph.ops[index].kind in _PICKING

    def _blame(self, sources: Iterable[int], what: str) -> None:
        for index in sources:
            self.found.setdefault(index, what)

    def _bend(self, sources: Iterable[int], what: str) -> None:
        for index in sources:
            self._bent.setdefault(index, what)

    def _carried(self, op: Op) -> Sources:
        """Reductions that the results depend on; notes where that is not linear."""
        parts = [self._reduced.get(t, _NONE) for t in op.operands]
        every = _NONE.union(*parts)
        if op.kind in ("div", "mul") and len(parts) == 2:
            self._scaled.update(every)  # By a value, which may be the samples' number.
        elif op.kind in _COMPARISONS:
            self._scaled.update(every)  # They choose, and are added to nothing.
        used = sum(bool(part) for part in parts)
        if not used or self._divided(op, parts):
            return every
        guarded = [t in self._guarded for t in op.operands]
        if op.kind in _GUARDS and (any(guarded) or op.kind not in _LINEAR):
            chosen = op.kind == "select_n" and not parts[0]
            if any(guarded) or not chosen:
                self._guarded.update(op.results)
                return every
        elif any(guarded):
            self._bend(every, "auxiliary")
            return every
        if op.kind in _LINEAR:
            return every
        if op.kind in _LINEAR_IN_ONE and used == 1:
            return every
        if op.kind == "select_n" and not parts[0]:
            return every
        if op.kind != "div" or self._divisor(op) is not None:
            self._bend(every, "auxiliary")
        return every

    def _divided(self, op: Op, parts: Sequence[Sources]) -> bool:
        """Follow divisions by what was reduced; whether this is one, or harmless."""
        slot = self._divisor(op)
        inverse = [t in self._inverse for t in op.operands]
        if slot is None or not parts[slot]:
            return self._passes(op, parts, inverse)
        others = _NONE.union(*(p for i, p in enumerate(parts) if i != slot))
        guarded = [t in self._guarded for i, t in enumerate(op.operands) if i != slot]
        twice = op.kind != "mul" and inverse[slot]  # divided by one over a number
        if sum(inverse) > 1 or any(guarded) or (twice and others):
            self._bend(parts[slot] | others, "auxiliary")
        elif others:
            again = parts[slot] & others  # What divided it before is no mean's number.
            self._bent.update(dict.fromkeys(again, "auxiliary"))
            self._bend(parts[slot], "weight")
        elif twice:
            pass
        elif any(inverse) or self._is_count(op.operands[slot]):
            self._inverse.update(op.results)
        else:
            self._bend(parts[slot], "auxiliary")
        return True

    def _passes(
        self, op: Op, parts: Sequence[Sources], inverse: Sequence[bool]
    ) -> bool:
        """Whether what divides, or was divided, is handed on and not bent."""
        if op.kind == "select_n" and parts[0] and not inverse[0]:
            divides = all(self._bent.get(i) == "weight" for i in parts[0])
            cases = [t in self._guarded for t in op.operands[1:]]
            if divides and not any(inverse) and not any(cases):
                return True  # A mean, where there is anything to take it of.
        if not any(inverse):
            return False
        if op.kind in _SHARING and op.kind not in ("add", "sub", "mul", "div"):
            self._inverse.update(op.results)
            return True
        self._bend(_NONE.union(*parts), "auxiliary")
        return True

    def _spread(self, op: Op) -> tuple[bool, bool]:
        """Pass the batch dimension on.

        Returns:
            Whether the operation mixes samples, and whether it does so along a batch
            dimension that it needs whole and keeps, as a running sum does.
        """
        slots = op.operands + op.results
        count = len(op.operands)
        mixes = across = False
        for factor in op.factors:
            if not any(
                s < count and d in self._batch.get(slots[s], ())
                for s, d in factor.members
            ):
                continue
            onward = [(slots[s], d) for s, d in factor.members if s >= count]
            for tensor, dim in onward:
                self._batch.setdefault(tensor, set()).add(dim)
            across |= factor.whole
            mixes |= across or not onward
        if op.reshape:
            self._reshape(op)
        return mixes and bool(op.results), across

    def _reshape(self, op: Op) -> None:
        """The batch stays in the dimension that holds its stride in the result."""
        before = self.graph.tensors[op.operands[0]].shape
        after = self.graph.tensors[op.results[0]].shape
        for dim in self._batch.get(op.operands[0], ()):
            front = 1
            for size in before[:dim]:
                front *= size
            reached = 1
            for out, size in enumerate(after):
                reached *= size
                if reached > front and size > 1:
                    self._batch.setdefault(op.results[0], set()).add(out)
                    break


def _equation(jaxpr: Any, op: Op) -> Any:
    """The equation of an operation, or None where it is part of another one."""
    body = _compat.open_jaxpr(jaxpr)[0]
    first, *rest = op.position
    found = body.eqns[first] if first < len(body.eqns) else None
    while rest and found is not None:
        inner = _compat.inner_jaxprs(found)
        if len(rest) < 2 or rest[0] >= len(inner):
            return None
        body = _compat.open_jaxpr(inner[rest[0]])[0]
        found = body.eqns[rest[1]] if rest[1] < len(body.eqns) else None
        rest = rest[2:]
    return found if found is not None and found.primitive.name == op.kind else None


def _trained(graph: Graph) -> set[int]:
    """Every tensor that parameters change, and so has a gradient."""
    found = {t.id for t in graph.params}
    for _ in range(2):  # a loop's carry is known only once its body was seen
        for op in graph.ops:
            if op.kind != "stop_gradient" and any(t in found for t in op.operands):
                found.update(op.results)
    return found


def _reaching(graph: Graph, roots: Iterable[int]) -> set[int]:
    """Every tensor that one of the roots depends on."""
    wanted = set(roots)
    for _ in range(2):  # a loop's carry is wanted only once its body was seen
        for op in reversed(graph.ops):
            if any(t in wanted for t in op.results):
                wanted.update(op.operands)
    return wanted
