"""Finds losses over a large vocabulary in a traced program.

Logits are a product of hidden values with a kernel. One dimension of the kernel, the
vocabulary, is in no final result, as reductions and lookups over it leave a few numbers
for each token. The operations from the product to these numbers can be computed for
some tokens at a time, so that the full logits never exist. Functions are not matched by
name, so cross-entropy may be written in any way that treats each token separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whalejax import _compat
from whalejax.capture.patterns.attention_pattern import trained_in
from whalejax.capture.patterns.blockwise import (
    ScoreNode,
    Tags,
    compute_block,
    looked_up_dims,
    operand_tags,
    reduced_tags,
)
from whalejax.capture.rules.rule_table import SAME_SHAPE


class NotTokensError(Exception):
    """The values after a product cannot be computed for some tokens at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """A product and the values computed from it, token by token.

    Tags are indices of dimensions of the product's result.

    Attributes:
        hidden: Operand of the product that has the tokens.
        kernel: Operand of the product that has the vocabulary.
        outside: Other variables that the nodes read.
        trained: For each variable in ``outside``, whether it has a gradient.
        product: Equation of the product.
        exits: Variables without the vocabulary that other equations read, or that are
            final results.
        nodes: Nodes that compute the exits, in an order in which they can run.
        source: Index of the product's node.
        ends: Indices of the exits' nodes.
        tokens: Indices of the hidden values' uncontracted dimensions.
        depth: Contracted dimensions of hidden values and kernel.
        vocab: Index of the vocabulary in the kernel.
        turned: Whether the kernel is the left operand.
        outside_tags: Tags of each variable in ``outside``.
    """

    hidden: Any
    kernel: Any
    outside: tuple[Any, ...]
    trained: tuple[bool, ...]
    product: Any
    exits: tuple[Any, ...]
    nodes: tuple[ScoreNode, ...]
    source: int
    ends: tuple[int, ...]
    tokens: tuple[int, ...]
    depth: tuple[tuple[int, int], ...]
    vocab: int
    turned: bool
    outside_tags: tuple[Tags, ...]

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Hidden values, kernel, then the others, first those with gradients."""
        pairs = [*zip(self.outside, self.trained, strict=True)]
        first = (v for v, trained in pairs if trained)
        rest = (v for v, trained in pairs if not trained)
        return (self.hidden, self.kernel, *first, *rest)

    @property
    def tags(self) -> Tags:
        """Tags of the product's result: dimensions of tokens, and the vocabulary."""
        shape = self.product.outvars[0].aval.shape
        return tuple(None if size == 1 else dim for dim, size in enumerate(shape))

    @property
    def vocab_tag(self) -> int:
        """Index of the vocabulary in the product's result."""
        return 0 if self.turned else len(self.tokens)

    @property
    def token_tags(self) -> tuple[int, ...]:
        """Indices of the tokens in the product's result, in the order of ``tokens``."""
        first = 1 if self.turned else 0
        return tuple(range(first, first + len(self.tokens)))

    def values(
        self, logits: Any, outside: Mapping[int, Any], sizes: Mapping[int, int]
    ) -> list[Any]:
        """Returns the exits for some tokens.

        Args:
            logits: Logits of these tokens.
            outside: Values of the variables in ``outside`` for these tokens, by index.
            sizes: Sizes of the dimensions, by tag.
        """
        values: list[Any] = []
        for number, node in enumerate(self.nodes):
            if number == self.source:
                values.append(logits)
            elif node.outside is not None:
                values.append(outside[node.outside])
            else:
                shape = tuple(1 if t is None else sizes[t] for t in node.tags)
                values.append(compute_block(node, shape, values, {}))
        return [values[end] for end in self.ends]


def logits_in(body: Any, trained: set[Any]) -> list[Logits]:
    """Returns the logits of one jaxpr that can be computed for some tokens at a time.

    Args:
        body: Open jaxpr, without calls that could be inlined.
        trained: Variables of the jaxpr through which a gradient flows.
    """
    logits = []
    for place, equation in enumerate(body.eqns):
        if equation.primitive.name == "dot_general":
            try:
                one = _Search(body, trained, place).find_logits()
            except NotTokensError:
                continue
            if one is not None:
                logits.append(one)
    return logits


def logits_of(jaxpr: Any, trained: int) -> Logits:
    """Returns the logits that the body of a call computes.

    Args:
        jaxpr: The call's one inner jaxpr, whose results are the exits.
        trained: Number of leading inputs that have gradients.
    """
    body = _compat.open_jaxpr(jaxpr)[0]
    flags = [place < trained for place in range(len(body.invars))]
    (one,) = logits_in(body, trained_in(body, flags))
    return one


@dataclass(slots=True)
class _Search:
    body: Any
    trained: set[Any]
    place: int
    maker: dict[Any, Any] = field(default_factory=dict)
    nodes: list[ScoreNode] = field(default_factory=list)
    outside: list[Any] = field(default_factory=list)
    outside_tags: list[Tags] = field(default_factory=list)
    source: int = -1
    depends: set[Any] = field(default_factory=set)
    _known: dict[tuple[Any, Tags], int] = field(default_factory=dict)

    def find_logits(self) -> Logits | None:
        product = self.body.eqns[self.place]
        (left_in, right_in), (left_batch, _) = product.params["dimension_numbers"]
        if left_batch or any(map(_compat.is_literal, product.invars)):
            return None
        free = [
            [d for d in range(len(atom.aval.shape)) if d not in inside]
            for atom, inside in zip(product.invars, (left_in, right_in), strict=True)
        ]
        for turned in (False, True):
            kernel = 0 if turned else 1
            shape = product.invars[1 - kernel].aval.shape
            if len(free[kernel]) != 1 or all(shape[d] == 1 for d in free[1 - kernel]):
                continue
            vocab = 0 if turned else len(free[0])
            inside = self._vocabulary_region(product.outvars[0], vocab)
            if inside is None:
                continue
            region, tags = inside
            exits = self._exits(region, tags)
            if not exits:
                continue
            self.maker = {v: e for e in self.body.eqns for v in e.outvars}
            ends = tuple(self._pull(v, tags[v], region, vocab) for v in exits)
            hidden = 1 - kernel
            sides = (right_in, left_in) if turned else (left_in, right_in)
            return Logits(
                hidden=product.invars[hidden],
                kernel=product.invars[kernel],
                outside=tuple(self.outside),
                trained=tuple(v in self.trained for v in self.outside),
                product=product,
                exits=tuple(exits),
                nodes=tuple(self.nodes),
                source=self.source,
                ends=ends,
                tokens=tuple(free[hidden]),
                depth=tuple(zip(*sides, strict=True)),
                vocab=free[kernel][0],
                turned=turned,
                outside_tags=tuple(self.outside_tags),
            )
        return None

    def _vocabulary_region(
        self, result: Any, vocab: int
    ) -> tuple[set[int], dict[Any, Tags]] | None:
        """Returns the ids of equations that compute with the vocabulary, and tags.

        Equations without it count too if one with it reads their results. There are
        tags of all variables that could be followed.

        Returns None if the vocabulary is in a final result or cannot be followed.
        """
        shape = result.aval.shape
        tags: dict[Any, Tags] = {
            result: tuple(None if n == 1 else d for d, n in enumerate(shape))
        }
        region: set[int] = set()
        later = self.body.eqns[self.place + 1 :]
        for equation in later:
            read = [a for a in equation.invars if not _compat.is_literal(a)]
            holds = any(vocab in tags.get(a, ()) for a in read)
            if any(a in self.depends for a in read) or result in read:
                self.depends.update(equation.outvars)
            if not any(a in tags for a in read):
                continue
            given = _result_tags(equation, tags, vocab)
            if given is None and holds:
                return None
            if given is not None:
                tags[equation.outvars[0]] = given
            if holds:
                region.add(id(equation))
        if any(
            not _compat.is_literal(v) and vocab in tags.get(v, ())
            for v in self.body.outvars
        ):
            return None
        needed: set[Any] = set()
        for equation in reversed(later):
            if id(equation) in region or any(v in needed for v in equation.outvars):
                if equation.outvars[0] in tags:
                    region.add(id(equation))
                    needed.update(
                        a for a in equation.invars if not _compat.is_literal(a)
                    )
        return region, tags

    def _exits(self, region: set[int], tags: Mapping[Any, Tags]) -> list[Any]:
        read = {v for v in self.body.outvars if not _compat.is_literal(v)}
        for equation in self.body.eqns:
            if id(equation) not in region:
                read.update(a for a in equation.invars if not _compat.is_literal(a))
        made = [v for e in self.body.eqns if id(e) in region for v in e.outvars]
        return [v for v in made if v in read and v in tags]

    def _pull(self, variable: Any, tags: Tags, region: set[int], vocab: int) -> int:
        known = self._known.get((variable, tags))
        if known is not None:
            return known
        equation = self.maker.get(variable)
        product = self.body.eqns[self.place]
        if equation is product:
            if self.source != -1:
                raise NotTokensError  # The product is read with two sets of tags.
            node = ScoreNode(equation=None, inputs=(), tags=tags)
        else:
            wanted = self._operands(equation, variable, tags, region, vocab)
            if equation is None or wanted is None:
                node = self._from_outside(variable, tags, vocab)
            else:
                inputs = tuple(
                    None if t is None else self._pull(atom, t, region, vocab)
                    for atom, t in zip(equation.invars, wanted, strict=True)
                )
                node = ScoreNode(equation=equation, inputs=inputs, tags=tags)
        self.nodes.append(node)
        number = len(self.nodes) - 1
        if equation is product:
            self.source = number
        self._known[variable, tags] = number
        return number

    def _operands(
        self,
        equation: Any | None,
        variable: Any,
        tags: Tags,
        region: set[int],
        vocab: int,
    ) -> list[Tags | None] | None:
        """Returns the operands' tags if an equation is computed with the logits."""
        if equation is None:
            return None
        inside = id(equation) in region
        if not inside and variable in self.depends:
            raise NotTokensError  # The value depends on the logits outside the region.
        if not inside and (vocab not in tags or variable in self.trained):
            return None
        if equation.primitive.name == "iota":
            # Positions of tokens would begin at another index in each chunk.
            counted = tags[equation.params["dimension"]]
            return [] if counted in (None, vocab) else None
        operands = operand_tags(equation, tags)
        if operands is None and inside:
            operands = reduced_tags(equation, tags, vocab)
            if operands is None:
                raise NotTokensError
        return operands

    def _from_outside(self, variable: Any, tags: Tags, vocab: int) -> ScoreNode:
        tokens = [t for t in tags if t not in (None, vocab)]
        if variable in self.trained and tokens:
            raise NotTokensError  # Its gradient would come in chunks.
        if variable in self.outside:
            number = self.outside.index(variable)
            if self.outside_tags[number] != tags:
                raise NotTokensError
        else:
            self.outside.append(variable)
            self.outside_tags.append(tags)
            number = len(self.outside) - 1
        return ScoreNode(equation=None, inputs=(), tags=tags, outside=number)


def _result_tags(equation: Any, tags: Mapping[Any, Tags], vocab: int) -> Tags | None:
    if len(equation.outvars) != 1:
        return None
    shape = equation.outvars[0].aval.shape
    name = equation.primitive.name
    result_tags: list[int | None] = [None] * len(shape)
    candidates = [a for a in equation.invars if not _compat.is_literal(a) and a in tags]
    if name in SAME_SHAPE:
        for atom in candidates:
            for dim, tag in enumerate(tags[atom]):
                if None not in (tag, result_tags[dim]) and tag != result_tags[dim]:
                    return None
                result_tags[dim] = tag if result_tags[dim] is None else result_tags[dim]
        return tuple(result_tags)
    # Going back from the result's tags must give the operand's tags.
    known = tags[candidates[0]]
    options = _moved_tags(equation, known, shape, vocab)
    if options is None:
        return None
    wanted = operand_tags(equation, options) or reduced_tags(equation, options, vocab)
    if wanted is None or wanted[0] != known:
        return None
    return options


def _moved_tags(
    equation: Any, known: Tags, shape: tuple[int, ...], vocab: int
) -> Tags | None:
    """Returns a result's tags from its first operand's tags, or None."""
    name, params = equation.primitive.name, equation.params
    if name == "transpose":
        return tuple(known[dim] for dim in params["permutation"])
    if name == "broadcast_in_dim":
        moved: list[int | None] = [None] * len(shape)
        for tag, place in zip(known, params["broadcast_dimensions"], strict=True):
            moved[place] = tag
        return tuple(moved)
    if name in ("reshape", "squeeze", "expand_dims"):
        kept = [t for t in known if t is not None]
        if len(kept) != sum(n > 1 for n in shape):
            return None
        rest = iter(kept)
        return tuple(None if n == 1 else next(rest) for n in shape)
    if "axes" in params:
        axes = {axis % len(known) for axis in params["axes"]}
        if [known[a] for a in sorted(axes)] != [vocab]:
            return None
        return tuple(t for dim, t in enumerate(known) if dim not in axes)
    if name == "gather":
        numbers = params["dimension_numbers"]
        batch = zip(
            numbers.operand_batching_dims,
            numbers.start_indices_batching_dims,
            strict=True,
        )
        looked: list[int | None] = [None] * len(shape)
        dims = looked_up_dims(equation)
        for dim, place in batch:
            if place < len(dims):
                looked[dims[place]] = known[dim]
        return tuple(looked)
    return None
