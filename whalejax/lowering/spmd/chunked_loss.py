"""Computes logits, and the loss from them, for a chunk of tokens at a time.

Both passes store the logits of one chunk alone. The forward pass saves the results for
each token, and the backward pass recomputes the logits. Each device accumulates its own
gradient of the kernel. The gradient is summed over devices once, after the last chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from whalejax import _compat
from whalejax.capture.patterns.blockwise import Tags
from whalejax.capture.patterns.logits import Logits
from whalejax.planner.sharding.layout import Spec


Constrained = Callable[[Any, Spec], Any]
"""Function that constrains a value to a spec."""


def chunked(
    one: Logits,
    values: Sequence[Any],
    count: int,
    spec: Spec,
    mesh: Mesh,
    *,
    used: Callable[[Any], Any],
    constrained: Constrained,
) -> list[Any]:
    """Runs a call that computes logits, in chunks.

    Args:
        one: Call that computes logits and reduces them.
        values: Inputs of the call.
        count: Number of chunks of a device's tokens. If it does not divide them, there
            are fewer chunks.
        spec: Spec of the logits.
        mesh: Mesh of the devices.
        used: Function from the stored kernel to the kernel for products.
        constrained: Function that constrains a value to a spec.

    Returns:
        Results of the call.
    """
    return list(_Chunks(one, count, spec, mesh, used, constrained).function()(*values))


class _Chunks:
    def __init__(
        self,
        one: Logits,
        count: int,
        spec: Spec,
        mesh: Mesh,
        used: Callable[[Any], Any],
        constrained: Constrained,
    ) -> None:
        self.one = one
        self.spec = spec
        self.mesh = mesh
        self.used = used
        self.constrained = constrained
        self.shape = one.product.outvars[0].aval.shape
        local = {t: self.shape[t] // self.parts(t) for t in one.token_tags}
        self.cut = max(local, key=lambda t: local[t])
        fewer = range(min(count, local[self.cut]), 0, -1)
        self.count = next(n for n in fewer if local[self.cut] % n == 0)
        self.sizes = dict(enumerate(self.shape))
        self.sizes[self.cut] //= self.count

    def parts(self, tag: int) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.spec[tag])

    # Chunks of values.

    def chunks(self, x: Any, tags: Tags) -> Any:
        """Splits a value into ``[count, ...]``, each with equally many local tokens."""
        place = tags.index(self.cut)
        n, before, after = self.parts(self.cut), x.shape[:place], x.shape[place + 1 :]
        piece = self.sizes[self.cut] // n
        apart = x.reshape(*before, n, self.count, piece, *after)
        first = jnp.moveaxis(apart, place + 1, 0)
        whole = first.reshape(self.count, *before, n * piece, *after)
        return self.constrained(whole, ((), *self.spec_from_tags(tags)))

    def join_chunks(self, x: Any, tags: Tags) -> Any:
        place = tags.index(self.cut)
        n, shape = self.parts(self.cut), x.shape[1:]
        before, after = shape[:place], shape[place + 1 :]
        apart = x.reshape(self.count, *before, n, shape[place] // n, *after)
        back = jnp.moveaxis(apart, 0, place + 1)
        joined = back.reshape(*before, self.count * shape[place], *after)
        return self.constrained(joined, self.spec_from_tags(tags))

    def spec_from_tags(self, tags: Tags) -> Spec:
        return tuple(() if tag is None else self.spec[tag] for tag in tags)

    def hidden_tags(self) -> Tags:
        places = dict(zip(self.one.tokens, self.one.token_tags, strict=True))
        return tuple(places.get(d) for d in range(len(self.one.hidden.aval.shape)))

    # Both passes.

    def function(self) -> Any:
        """Returns the function from inputs to exits, with a custom backward pass."""
        one = self.one
        order = [one.outside.index(v) for v in one.inputs[2:]]
        trained = sum(one.trained)

        @jax.custom_vjp
        def loss(hidden: Any, kernel: Any, *given: Any) -> Any:
            outside = dict(zip(order, given, strict=True))
            kernel = self.used(kernel)

            def body(_: None, chunk: Any) -> tuple[None, list[Any]]:
                part, cut = chunk
                logits = self.logits(part, kernel)
                return None, one.values(logits, {**outside, **cut}, self.sizes)

            _, exits = lax.scan(body, None, self.inputs(hidden, outside))
            pairs = zip(exits, self.exit_tags(), strict=True)
            return [self.join_chunks(x, tags) for x, tags in pairs]

        def forward(*inputs: Any) -> Any:
            return loss(*inputs), inputs

        def backward(inputs: Any, cotangents: Any) -> Any:
            hidden, kernel, *given = inputs
            outside = dict(zip(order, given, strict=True))
            backward = self.gradients(
                hidden, kernel, outside, order[:trained], cotangents
            )
            return (*backward, *(None for _ in given[trained:]))

        loss.defvjp(forward, backward)
        return loss

    def exit_tags(self) -> list[Tags]:
        return [self.one.nodes[end].tags for end in self.one.ends]

    def inputs(self, hidden: Any, outside: Mapping[int, Any]) -> Any:
        """Returns chunks of the hidden values, and of the other inputs with tokens."""
        tags = self.one.outside_tags
        return (
            self.chunks(hidden, self.hidden_tags()),
            {
                n: self.chunks(x, tags[n])
                for n, x in outside.items()
                if self.cut in tags[n]
            },
        )

    def logits(self, hidden: Any, kernel: Any) -> Any:
        pair = (kernel, hidden) if self.one.turned else (hidden, kernel)
        return self.constrained(_compat.bind(self.one.product, pair)[0], self.spec)

    def gradients(
        self,
        hidden: Any,
        kernel: Any,
        outside: Mapping[int, Any],
        trained: Sequence[int],
        cotangents: Sequence[Any],
    ) -> list[Any]:
        """Returns gradients of hidden values, kernel and other trained inputs."""
        one = self.one
        stored, read = kernel, self.used(kernel)
        wide = jnp.promote_types(kernel.dtype, jnp.float32)
        real = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in one.exits]
        cut = {
            n: self.chunks(x, tags)
            for n, (x, tags) in enumerate(
                zip(cotangents, self.exit_tags(), strict=True)
            )
            if real[n]
        }

        def body(carry: Any, chunk: Any) -> tuple[Any, Any]:
            total, sums = carry
            (part, beside), ups = chunk

            def exits(logits: Any, *weights: Any) -> list[Any]:
                known = {
                    **outside,
                    **beside,
                    **dict(zip(trained, weights, strict=True)),
                }
                exits = one.values(logits, known, self.sizes)
                return [x for x, inexact in zip(exits, real, strict=True) if inexact]

            logits, to_hidden = jax.vjp(lambda h: self.logits(h, read), part)
            _, pull = jax.vjp(exits, logits, *(outside[n] for n in trained))
            change, *others = pull([ups[n] for n in sorted(ups)])
            change = self.constrained(change, self.spec)
            sums = [a + b.astype(a.dtype) for a, b in zip(sums, others, strict=True)]
            total = total + self.product(part, change, wide)
            return (self.constrained(total, self.kernel_spec()), sums), to_hidden(
                change
            )[0]

        zeros = [
            jnp.zeros(outside[n].shape, jnp.promote_types(outside[n].dtype, wide))
            for n in trained
        ]
        start = jnp.zeros(self.kernel_shape(), wide)
        start = self.constrained(start, self.kernel_spec())
        chunks = (self.inputs(hidden, outside), cut)
        (total, sums), parts = lax.scan(body, (start, zeros), chunks)
        total = total.astype(stored.dtype).sum(axis=self.token_places())
        return [
            self.join_chunks(parts, self.hidden_tags()),
            self.kernel_order(total),
            *(x.astype(outside[n].dtype) for n, x in zip(trained, sums, strict=True)),
        ]

    # The kernel's gradient: [parts of each token dimension ..., depth ..., vocabulary].

    def token_places(self) -> tuple[int, ...]:
        return tuple(range(len(self.one.tokens)))

    def kernel_shape(self) -> tuple[int, ...]:
        one = self.one
        parts = [self.parts(t) for t in one.token_tags]
        depth = [one.kernel.aval.shape[k] for _, k in one.depth]
        return (*parts, *depth, self.shape[one.vocab_tag])

    def kernel_spec(self) -> Spec:
        one = self.one
        tokens = [self.spec[t] for t in one.token_tags]
        return (*tokens, *(() for _ in one.depth), self.spec[one.vocab_tag])

    def product(self, hidden: Any, change: Any, wide: Any) -> Any:
        """Returns one chunk's kernel gradient; each device sums over its own tokens."""
        one, count = self.one, len(self.one.tokens)
        order = [*one.tokens, *(h for h, _ in one.depth)]
        left = self._split_device_dims(hidden.transpose(order))
        right = self._split_device_dims(
            change.transpose([*one.token_tags, one.vocab_tag])
        )
        devices, tokens = (
            [2 * n for n in range(count)],
            [2 * n + 1 for n in range(count)],
        )
        return lax.dot_general(
            left,
            right,
            ((tokens, tokens), (devices, devices)),
            precision=one.product.params["precision"],
            preferred_element_type=wide,
        )

    def _split_device_dims(self, x: Any) -> Any:
        tokens = self.one.token_tags
        shape = [
            n
            for t, size in zip(tokens, x.shape, strict=False)
            for n in (self.parts(t), size // self.parts(t))
        ]
        return x.reshape(*shape, *x.shape[len(tokens) :])

    def kernel_order(self, x: Any) -> Any:
        places = [*(k for _, k in self.one.depth), self.one.vocab]
        return x.transpose(np.argsort(places))
