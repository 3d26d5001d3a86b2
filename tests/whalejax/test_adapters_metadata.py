"""What Flax metadata says: names, fixed axes, boxes, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import whalejax as wh
from whalejax.adapters.base import Adapter, adapt


pytestmark = pytest.mark.relaxed_promotion


def two(model: Any, batch: Any) -> Any: ...


def partitioned(names: Any, **more: Any) -> Any:
    """Variables of one kernel of shape (4, 6) with metadata."""
    kernel = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    return {"params": {"kernel": nn.Partitioned(kernel, names=names, **more)}}


def metadata(adapter: Adapter) -> tuple[Any, Any]:
    return adapter.names[0], adapter.pinned[0]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("embed", "mlp"), (("embed", "mlp"), (None, None))),
        (("embed", "tensor"), (("embed", None), (None, "tensor"))),
        ((None, ("data", "fsdp")), ((None, None), (None, "data+fsdp"))),
        (("embed",), (("embed", None), (None, None))),
    ],
)
def test_names_and_pins_of_linen(names: Any, expected: Any) -> None:
    assert metadata(adapt(partitioned(names), two)) == expected
    kernel = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    logical = {"params": {"kernel": nn.LogicallyPartitioned(kernel, names=names)}}
    assert metadata(adapt(logical, two)) == expected


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        (("embed", "tensor"), (("embed", None), (None, "tensor"))),
        (jax.P("embed", "tensor"), (("embed", None), (None, "tensor"))),
        (None, ((None, None), (None, None))),
    ],
)
def test_names_and_pins_of_nnx(sharding: Any, expected: Any) -> None:
    class Holder(nnx.Module):
        def __init__(self) -> None:
            options: dict[str, Any] = {"eager_sharding": False}
            if sharding is not None:
                options["out_sharding"] = sharding
            self.kernel = nnx.Param(jnp.ones((4, 6)), **options)

    adapter = adapt(Holder(), lambda m, b: jnp.mean(m.kernel[...]))
    assert metadata(adapter) == expected
    assert float(adapter.loss(adapter.params, adapter.rest, None).total) == 1.0


def test_the_users_own_mesh_axes() -> None:
    mesh = jax.make_mesh((1, 1), ("rows", "model"), devices=jax.devices()[:1])
    variables = partitioned(("rows", "model"), mesh=mesh)
    with pytest.raises(wh.WhaleError) as caught:
        adapt(variables, two)
    text = str(caught.value)
    assert text.startswith(
        "model: 2 problems\n  1. kernel: its metadata names the mesh "
    )
    assert (
        "axis 'model', which is none of ours (stage, data, fsdp, expert, context, "
        "depth, height, width, tensor). Map it, as in axis_names={'model': 'tensor'}."
    ) in text
    mapped = adapt(variables, two, axis_names={"rows": "data", "model": "tensor"})
    assert metadata(mapped) == ((None, None), ("data", "tensor"))
    unmeshed = adapt(partitioned((None, "model")), two, axis_names={"model": "tensor"})
    assert metadata(unmeshed) == ((None, None), (None, "tensor"))


def test_metadata_of_a_pytree_with_boxes() -> None:
    boxed = partitioned(("embed", "tensor"))["params"]
    real = jax.tree.map(lambda x: jnp.ones(x.shape), boxed)
    adapter = adapt(real, lambda net, b: jnp.mean(net["kernel"]))
    assert adapter.kind == "pytree" and adapter.param_paths == ("kernel",)
    assert metadata(adapter) == (("embed", None), (None, "tensor"))
    assert float(adapter.loss(adapter.params, adapter.rest, None).total) == 1.0
    chex.assert_trees_all_equal(adapter.rebuild(adapter.params, adapter.rest), real)


def test_a_name_that_no_metadata_holds_is_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        adapt(partitioned((None, "model")), two, axis_names={"modle": "tensor"})
    assert (
        "axis_names maps 'modle' to 'tensor', but no parameter's metadata names "
        "'modle'. Nearest: model. Correct the name, or leave it out."
    ) in str(caught.value)
    with pytest.raises(wh.WhaleError, match="It names none at all"):
        adapt({"kernel": jnp.ones(2)}, two, axis_names={"model": "tensor"})


def test_metadata_with_too_many_names_is_refused() -> None:
    with pytest.raises(wh.WhaleError) as caught:
        adapt(partitioned(("a", "b", "c")), two)
    assert (
        "kernel: its metadata names 3 dimensions ('a', 'b', 'c'), but its shape is "
        "(4, 6). Name each dimension once."
    ) in str(caught.value)


def test_metadata_of_weights_that_are_not_trained_is_read() -> None:
    net = {
        "up": nn.Partitioned(jnp.ones((4, 8)), names=("rows", None)),
        "down": jnp.ones((8, 4)),
    }
    adapter = adapt(net, two, trainable="down", axis_names={"rows": "fsdp"})
    assert adapter.rest_paths == ("up",)
    assert adapter.rest_pinned == (("fsdp", None),)


def test_a_box_may_be_empty() -> None:
    net = {"w": jnp.ones(3), "bias": nn.Partitioned(None, names=())}
    assert adapt(net, two).param_paths == ("w",)


@pytest.mark.parametrize("dim", [0, 1])
def test_notes_say_of_layers_which_dimension_is_sharded(dim: int) -> None:
    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            kernel = jax.random.normal(rngs.params(), (16, 16))
            names = ("tensor", None) if dim == 0 else (None, "tensor")
            self.up = nnx.Param(kernel, out_sharding=names, eager_sharding=False)

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.up[...])

    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            @nnx.split_rngs(splits=4)
            @nnx.vmap
            def make(rngs: nnx.Rngs) -> Layer:
                return Layer(rngs)

            self.layers = make(rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def run(layer: Layer, h: Any) -> Any:
                return layer(h)

            return run(self.layers, x)

    plan = wh.plan(
        lambda model, x: jnp.square(model(x)).mean(),
        nnx.eval_shape(lambda: Stack(nnx.Rngs(0))),
        jax.ShapeDtypeStruct((32, 16), jnp.float32),
        cluster="cpu:8",
        mesh={"tensor": 2},
    )
    spec = plan.leaf("layers.up").param_spec
    (taken,) = (place for place, axes in enumerate(spec) if "tensor" in axes)
    notes = " ".join(plan.notes)
    assert ("not dim" in notes) == (taken != dim + 1)
    if taken != dim + 1:
        assert f"the metadata says layers.up dim {dim + 1}, not dim {taken}" in notes
    assert "stored over tensor as the metadata says" not in notes
