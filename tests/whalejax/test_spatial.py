"""Samples whose space several devices share: gradients, halos, and what is refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import whalejax as wh
from tests import equality
from whalejax import hlo
from whalejax.models import job as model_job
from whalejax.planner.plan.report.why import whole_dimensions


ALL: Final = {"depth": 2, "height": 2, "width": 2}
NUMBERS: Final = ("NDHWC", "DHWIO", "NDHWC")


def convolved(
    x: jax.Array,
    kernel: jax.Array,
    stride: int = 1,
    padding: str = "SAME",
    groups: int = 1,
    dilation: int = 1,
) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride,) * 3,
        padding,
        rhs_dilation=(dilation,) * 3,
        feature_group_count=groups,
        dimension_numbers=NUMBERS,
    )


def pooled(kind: str, x: jax.Array, window: int, stride: int, padding: str) -> Any:
    pool = {"max": nnx.max_pool, "avg": nnx.avg_pool}[kind]
    return pool(x, (window,) * 3, (stride,) * 3, padding)


def widened(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A transposed convolution whose stride is its kernel."""
    size = kernel.shape[0]
    return lax.conv_transpose(
        x, kernel, (size,) * 3, "VALID", dimension_numbers=NUMBERS
    )


def normed(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    mean = jnp.mean(x, axes, keepdims=True)
    spread = jnp.mean((x - mean) ** 2, axes, keepdims=True)
    return (x - mean) * lax.rsqrt(spread + 1e-5)


def grouped_norm(x: jax.Array) -> jax.Array:
    apart = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    return normed(apart, (1, 2, 3, 5)).reshape(x.shape)


def beside(x: jax.Array) -> jax.Array:
    """Where, or next to where, numbers are large: a maximum of truth values."""
    ones = (1,) * 5
    found = lax.reduce_window(x > 1, False, lax.max, (1, 3, 3, 3, 1), ones, "SAME")
    return 1 + found.astype(x.dtype)


def padded_net(p: Any, x: jax.Array) -> jax.Array:
    """Kernels of 1, 3 and 5, strides of 1 and 2, every pooling, and back up."""
    x = normed(convolved(x, p["k5"]), (0, 1, 2, 3))
    y = grouped_norm(convolved(jnp.tanh(x), p["k3s2"], 2))
    y = convolved(pooled("max", y, 3, 1, "SAME"), p["groups"], groups=2)
    z = pooled("avg", x, 2, 2, "VALID") + pooled("max", x, 3, 2, "SAME")
    y = y + convolved(z, p["k1"]) + pooled("avg", y, 3, 1, "SAME")
    y = convolved(jnp.tanh(y), p["dilated"], dilation=2) * beside(y)
    return jnp.sin(widened(y, p["up"])) * x


def plain_net(p: Any, x: jax.Array) -> jax.Array:
    """Nothing is padded: extents shrink, and parts are no multiples of strides."""
    x = jnp.tanh(convolved(x, p["k3"], padding="VALID"))
    x = jnp.tanh(convolved(x, p["k5"], padding="VALID"))
    x = jnp.tanh(convolved(x, p["k3s2"], 2, "VALID"))
    return convolved(x, p["k1s2"], 2, "VALID")


def flat(
    x: jax.Array, kernel: jax.Array, groups: int = 1, stride: int = 1
) -> jax.Array:
    """A convolution of images."""
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=numbers,
    )


def repeated_net(p: Any, x: jax.Array) -> jax.Array:
    """Loops, checkpointed regions, and one within the other, over images."""

    def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
        y = jnp.tanh(flat(x, kernel[..., :1, :], 2))
        return nnx.max_pool(flat(y, kernel), (3, 3), (1, 1), "SAME"), None

    @jax.checkpoint
    def groups(x: jax.Array) -> jax.Array:
        return jnp.tanh(flat(jnp.tanh(flat(x, p["groups"], 2)), p["groups"], 2))

    @jax.checkpoint
    def mixed(x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(jnp.tanh(flat(x, p["k3"])), (3, 3), (1, 1), "SAME")
        return jnp.tanh(flat(x, p["groups"], 2))

    x = lax.scan(layer, mixed(groups(x)), p["layers"])[0]
    x = lax.scan(jax.checkpoint(layer), x, p["layers"])[0]
    return jax.checkpoint(lambda x: lax.scan(layer, x, p["layers"])[0])(x)


def wide_net(p: Any, x: jax.Array) -> jax.Array:
    """Convolutions whose channels tensor may shard, in and out, with all between."""
    y = normed(flat(x, p["out"]), (0, 1, 2))
    y = nnx.max_pool(flat(jnp.tanh(y), p["depthwise"], 8), (3, 3), (1, 1), "SAME")
    return flat(jnp.tanh(flat(y, p["in"], stride=2)), p["narrow"])


def two_layers(p: Any, x: jax.Array) -> jax.Array:
    """Two convolutions of images or volumes, whose parts may be as small as a halo."""
    convolve = convolved if x.ndim == 5 else flat
    return convolve(jnp.tanh(convolve(x, p["first"])), p["second"])


def shifted_net(p: Any, x: jax.Array) -> jax.Array:
    """Windows of which every part reads others: of poolings and groups, too.

    26 → 12 → 8, and 26 → 26 → 8.
    """
    y = jnp.tanh(pooled("max", x, 3, 2, "VALID"))
    y = pooled("avg", y, 5, 1, "VALID")
    z = lax.conv_general_dilated(
        x,
        p["groups"],
        (1, 1, 1),
        ((-1, 3), (3, -1), (0, 2)),
        dimension_numbers=NUMBERS,
        feature_group_count=2,
    )
    z = convolved(jnp.tanh(z), p["k3"], 3, "VALID")
    return convolved(z + y, p["k3"])


def shapes(net: Any, rank: int) -> dict[str, tuple[int, ...]]:
    if net is two_layers:
        space = (3,) * rank
        return {"first": (*space, 2, 4), "second": (*space, 4, 4)}
    if net is shifted_net:
        return {"groups": (3, 3, 3, 1, 2), "k3": (3, 3, 3, 2, 2)}
    if net is wide_net:
        return {
            "out": (3, 3, 2, 8),
            "depthwise": (3, 3, 1, 8),
            "in": (3, 3, 8, 4),
            "narrow": (1, 1, 4, 2),
        }
    if net is repeated_net:
        return {
            "k3": (3, 3, 2, 2),
            "groups": (3, 3, 1, 2),
            "layers": (2, 3, 3, 2, 2),
        }
    if net is plain_net:
        return {
            "k3": (3, 3, 3, 2, 4),
            "k5": (5, 5, 5, 4, 4),
            "k3s2": (3, 3, 3, 4, 4),
            "k1s2": (1, 1, 1, 4, 4),
        }
    return {
        "k5": (5, 5, 5, 2, 4),
        "k3s2": (3, 3, 3, 4, 4),
        "groups": (3, 3, 3, 2, 4),
        "k1": (1, 1, 1, 4, 4),
        "dilated": (3, 3, 3, 4, 4),
        "up": (2, 2, 2, 4, 4),
    }


def job_of(net: Any, extents: tuple[int, ...], samples: int = 2) -> wh.Job:
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1]))
        for name, shape in shapes(net, len(extents)).items()
    }
    x = rng.normal(size=(samples, *extents, 2))

    def loss(p: Any, batch: Any) -> jax.Array:
        return jnp.mean(net(p, batch["x"]) ** 2)

    return wh.Job(
        loss_fn=loss,
        make_model=lambda key: jax.tree.map(jnp.asarray, params),
        batch=lambda step, count: {"x": jnp.asarray(x)},
        optimizer=optax.sgd(1.0),
        batch_size=samples,
    )


def halos(plan: wh.Plan) -> Counter[str]:
    """Bytes that a plan exchanges at borders, by axis."""
    found: Counter[str] = Counter()
    for c in plan.collectives:
        if c.what == "halo":
            found[c.axes[0]] += c.payload_bytes * c.times(plan.num_micro_batches)
    return found


def exchanged(step: Any) -> Counter[str]:
    """Bytes that a compiled step moves, by kind of collective.

    It must exchange nothing beside halos, and gather nothing but what ``fsdp`` stores.
    """
    found = hlo.collectives(step.lower().compile().as_text())
    kinds = {"all-reduce", "collective-permute"}
    kinds |= {"all-gather"} if "fsdp" in step.plan.axis_sizes else set()
    assert set(found.nbytes) <= kinds, found.nbytes
    return Counter({kind: int(n) for kind, n in found.nbytes.items()})


def predicted(plan: wh.Plan) -> Counter[str]:
    """The same of a plan."""
    found: Counter[str] = Counter()
    for c in plan.collectives:
        found[c.kind] += c.payload_bytes * c.times(plan.num_micro_batches)
    return found


def held(job: wh.Job, mesh: dict[str, int], *, space: bool = True) -> None:
    """The gradient is that of one device, and traffic is what was predicted.

    Args:
        job: the net.
        mesh: the devices.
        space: every spatial axis exchanges halos.
    """
    devices = int(np.prod([*mesh.values()]))
    with jax.enable_x64(True):
        one = equality.on_one_device(job)
        # ZeRO would gather parameters beside.
        found = equality.check(
            one,
            steps=2,
            devices=devices,
            cluster=f"cpu:{devices}",
            mesh=mesh,
            zero=0,
        )
        assert found.error <= equality.FLOAT64_TOLERANCE, (
            found.worst_path,
            found.worst,
            found.loss_error,
        )
        assert found.compilations == 1
        axes = {a for a, n in mesh.items() if n > 1} - {"data", "fsdp", "tensor"}
        assert not space or axes == set(halos(found.plan))
        assert predicted(found.plan) == exchanged(found.step)


@pytest.mark.relaxed_promotion
def test_every_window_on_eight_parts_of_a_sample() -> None:
    held(job_of(padded_net, (16, 16, 16), 1), ALL)


@pytest.mark.full
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("beside", ["data", "tensor"])
def test_windows_without_padding(beside: str) -> None:
    # 24 → 22 → 18 → 8 → 4: no part of an operand is a multiple of its windows.
    held(job_of(plain_net, (24, 24, 9)), {beside: 2, "depth": 2, "height": 2})


@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_loops_and_regions_that_run_again() -> None:
    held(job_of(repeated_net, (8, 8)), {"data": 2, "height": 2})


IMAGE: Final = {"height": 2, "width": 2}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("extents", "mesh"),
    [
        ((4, 2), IMAGE),
        ((4, 2), {"data": 2, **IMAGE}),
        ((4, 2), {"fsdp": 2, **IMAGE}),
        ((2, 3), {"data": 2, "height": 2}),
        ((4, 1), {"fsdp": 2, "data": 2, "height": 2}),
        ((2, 2), {"height": 2, "width": 2, "tensor": 2}),
        ((4, 2, 1), {"depth": 2, "height": 2}),
        ((4, 2, 2), {"depth": 2, "height": 2}),
        ((4, 2, 3), {"depth": 2, "height": 2}),
        ((2, 4, 3), {"data": 2, "depth": 2, "height": 2}),
        ((4, 3, 2), {"depth": 2, "width": 2}),
        ((3, 4, 2), {"height": 2, "width": 2}),
        ((2, 2, 4), ALL),
    ],
    ids=str,
)
def test_parts_no_larger_than_a_halo(
    extents: tuple[int, ...], mesh: dict[str, int]
) -> None:
    """XLA's gradient of what such parts are convolved from is a multiple of itself."""
    held(job_of(two_layers, extents, 4), mesh)


@pytest.mark.relaxed_promotion
def test_a_unet_with_two_axes_of_space() -> None:
    """Of 8 × 4 × 4 voxels, and 4 × 2 × 2 where it is narrowest."""
    job = model_job("unet3d-test", batch_size=2, extent=8, batch_norm=True)
    batch = {name: x[:, :, :4, :4] for name, x in job.batch_at(0).items()}
    job = dataclasses.replace(job, batch=lambda step, count: batch)
    one = equality.on_one_device(job)
    mesh = {"depth": 2, "height": 2}
    found = equality.check(one, devices=4, cluster="cpu:4", mesh=mesh, zero=0, steps=2)
    assert found.error <= 10 * equality.FLOAT32_TOLERANCE, found.worst_path


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    "mesh",
    [
        {"depth": 2, "height": 2},
        pytest.param({"data": 2, "height": 2, "width": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_every_part_reads_from_a_place_of_its_own(mesh: dict[str, int]) -> None:
    held(job_of(shifted_net, (26, 26, 26)), mesh)


@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "height": 2, "tensor": 2},
        pytest.param({"height": 2, "tensor": 2}, marks=pytest.mark.full),
        pytest.param({"height": 2, "tensor": 4}, marks=pytest.mark.full),
        pytest.param({"height": 2, "width": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_space_beside_tensor(mesh: dict[str, int]) -> None:
    """XLA returns too much where tensor shards the channels of what it convolves."""
    held(job_of(wide_net, (8, 8)), mesh)


@pytest.mark.full
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize(
    "mesh",
    [
        {"depth": 4},
        {"height": 4, "width": 2},
        {"data": 2, "depth": 4},
        {"fsdp": 2, "depth": 2, "width": 2},
    ],
    ids=str,
)
def test_every_window_on_other_meshes(mesh: dict[str, int]) -> None:
    held(job_of(padded_net, (16, 16, 16)), mesh)


@pytest.mark.full
@pytest.mark.relaxed_promotion
@pytest.mark.parametrize("name", ["cosmoflow-test", "unet3d-test"])
@pytest.mark.parametrize("norm", [False, True])
def test_reference_models(name: str, norm: bool) -> None:
    job = model_job(name, batch_size=2, batch_norm=norm)
    one = equality.on_one_device(job)
    found = equality.check(one, cluster="cpu:8", mesh=ALL, zero=0)
    assert found.error <= 10 * equality.FLOAT32_TOLERANCE, found.worst_path
    assert predicted(found.plan) == exchanged(found.step)


@pytest.mark.full
@pytest.mark.relaxed_promotion
def test_images_share_height_and_width() -> None:
    sizes = {"batch_size": 4, "image_size": 32, "param_dtype": "float64"}
    job = model_job("resnet-test", annotated=False, **sizes)
    with jax.enable_x64(True):
        one = equality.on_one_device(job)
        mesh = {"data": 2, "height": 2, "width": 2}
        found = equality.check(one, cluster="cpu:8", mesh=mesh, zero=0)
        assert found.error <= equality.FLOAT64_TOLERANCE, found.worst_path
        assert predicted(found.plan) == exchanged(found.step)


# What is refused.


def refused(job: wh.Job, mesh: dict[str, int], **options: Any) -> str:
    devices = int(np.prod([*mesh.values()]))
    with pytest.raises(wh.WhaleError) as caught:
        wh.plan(
            job.loss_fn,
            job.make_model(None),
            job.batch_at(0),
            cluster=options.pop("cluster", wh.cluster(f"h100:{devices}")),
            mesh=mesh,
            **options,
        )
    return str(caught.value)


def one_net(net: Any, extent: int = 12) -> wh.Job:
    """A net of kernels that are given to it by name."""
    x = jnp.ones((2, extent, extent, extent, 2))
    kernels = {f"k{n}": jnp.ones((n, n, n, 2, 2)) for n in (1, 2, 3, 7)}
    return wh.Job(
        loss_fn=lambda p, b: jnp.mean(net(p, b["x"]) ** 2),
        make_model=lambda key: kernels,
        batch=lambda step, count: {"x": x},
        optimizer=optax.sgd(1.0),
        batch_size=2,
    )


def test_extents_that_an_axis_does_not_divide() -> None:
    job = one_net(lambda p, x: pooled("max", convolved(x, p["k3"]), 2, 2, "VALID"))
    assert (
        "depth 4: the extent is 12, and the largest number that divides it at "
        "every resolution of the model is 6: take depth of 1, 2, or pad the extent to "
        "16"
    ) in refused(job, {"depth": 4})
    job = one_net(lambda p, x: convolved(x, p["k3"], padding="VALID"))
    assert (
        "depth 4: the extent is 12, and the largest number that divides it at "
        "every resolution of the model is 2: take depth of 1, 2, or an extent whose "
        "every resolution is divisible by 4"
    ) in refused(job, {"depth": 4})


class Tokens(nnx.Module):
    """Patches, attention between them, and perhaps a token beside them."""

    def __init__(self, image: int, *, kernel: int = 8, token: bool = False) -> None:
        rngs = nnx.Rngs(0)
        stride = min(kernel, 4) if kernel % 4 else kernel
        self.cut = nnx.Conv(
            3, 16, (kernel, kernel), strides=stride, padding="VALID", rngs=rngs
        )
        self.attention = nnx.MultiHeadAttention(
            num_heads=2, in_features=16, decode=False, rngs=rngs
        )
        count = ((image - kernel) // stride + 1) ** 2
        self.positions = nnx.Param(jnp.zeros((1, count, 16)))
        self.token = nnx.Param(jnp.zeros((1, 1, 16))) if token else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.cut(x)
        x = x.reshape(x.shape[0], -1, 16) + self.positions[...]
        if self.token is not None:
            x = jnp.concatenate([jnp.tile(self.token[...], (len(x), 1, 1)), x], 1)
        return x + self.attention(x)


def tokens_job(image: int, **options: Any) -> wh.Job:
    return wh.Job(
        loss_fn=lambda model, b: jnp.mean(model(b["x"]) ** 2),
        make_model=lambda key: nnx.eval_shape(lambda: Tokens(image, **options)),
        batch=lambda step, count: {"x": jnp.ones((8, image, image, 3))},
        optimizer=optax.sgd(1.0),
        batch_size=8,
    )


@pytest.mark.parametrize(("image", "kernel"), [(32, 7), (30, 8)])
def test_no_extent_is_named_where_windows_leave_something_over(
    image: int, kernel: int
) -> None:
    """Beside attention, before which the convolution sees the whole image."""
    job = tokens_job(image, kernel=kernel)
    text = refused(job, {"height": 2}, cluster="v5e:2x2")
    assert text.startswith("no layout of 4 devices serves this model: 1 problem")
    assert (
        "take height of 1, or an extent whose every resolution is divisible by 2"
        in text
    )


def test_only_what_was_asked_for_is_said_not_to_divide() -> None:
    text = refused(tokens_job(32, token=True), {"height": 2}, cluster="v5e:2x2")
    assert "concatenate needs all of it" in text and "context" not in text
    text = refused(tokens_job(32, token=True), {"height": 2, "context": 2})
    assert "context" in text


@pytest.mark.parametrize(
    ("mesh", "whole"), [({"depth": 2}, [2, 3]), ({"data": 2}, [1, 2, 3])]
)
def test_a_dimension_that_an_axis_shares_is_not_listed_as_whole(
    mesh: dict[str, int], whole: list[int]
) -> None:
    job = one_net(lambda p, x: convolved(x, p["k3"]))
    model, batch = job.make_model(None), job.batch_at(0)
    plan = wh.plan(job.loss_fn, model, batch, cluster="h100:2", mesh=mesh)
    listed = [text for text in whole_dimensions(plan) if text.startswith("batch.x")]
    assert [text.partition(" ")[0] for text in listed] == [
        f"batch.x[{dim}]" for dim in whole
    ]


def test_a_halo_wider_than_a_part() -> None:
    job = one_net(lambda p, x: convolved(x, p["k7"]))
    text = refused(job, {"width": 6})
    assert (
        "conv_general_dilated reads 3 elements of a neighbour, but with width 6 each "
        "device has 2 of 12: take width 3, or a larger extent"
    ) in text


def test_an_axis_for_a_dimension_that_is_no_space() -> None:
    job = one_net(lambda p, x: jnp.tanh(x @ p["k1"][0, 0, 0]))
    text = refused(job, {"height": 2})
    assert "no dimension for a spatial axis; mesh= fixes height 2" in text
    assert "height: the model has no convolution over two or three dimensions" in text
    assert "use data or fsdp instead" in text


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (
            lambda p, x: jnp.cumsum(convolved(x, p["k3"]), axis=1),
            "depth: cumsum needs all of it",
        ),
        (
            lambda p, x: convolved(
                jnp.pad(x, ((0, 0), *((1, 1),) * 3, (0, 0))), p["k3"], padding="VALID"
            ),
            "depth: pad needs all of it (leave the padding to the convolution: "
            'padding="SAME", or pairs of numbers)',
        ),
        (
            lambda p, x: convolved(jnp.flip(x, 1), p["k3"]),
            "depth: rev needs all of it (cut, join or turn samples before they are "
            "given to the step)",
        ),
        (
            lambda p, x: convolved(
                jnp.repeat(convolved(x, p["k2"], 2), 2, axis=1), p["k3"]
            ),
            "depth: conv_general_dilated slides along a dimension that a reshape "
            "splits or joins (poolings, strided convolutions, jax.image.resize",
        ),
        (
            lambda p, x: pooled("max", convolved(x, p["k3"]), 12, 12, "VALID"),
            "depth: reduce_window_max makes a single element of it, or slides along "
            "one, of which devices can have no parts (jnp.mean, jnp.max or jnp.sum "
            "over all of it they can share)",
        ),
        (
            lambda p, x: convolved(
                jnp.swapaxes(convolved(x, p["k3"]), 1, 2) + x, p["k3"]
            ),
            "depth and height: convolutions slide along one dimension under both names",
        ),
        (
            lambda p, x: lax.conv_transpose(
                x, p["k3"], (2, 2, 2), "SAME", dimension_numbers=NUMBERS
            ),
            "depth: conv_general_dilated: it is a transposed convolution of stride 2 "
            "with a kernel of 3 and padding (2, 1); space can be divided only if the "
            "kernel is as large as the stride and the padding is (1, 1)",
        ),
        (
            lambda p, x: convolved(
                x + jax.image.resize(convolved(x, p["k2"], 2), x.shape, "linear"),
                p["k3"],
            ),
            "depth: a tensor has this dimension twice, as the matrix of "
            'jax.image.resize(…, "linear") has',
        ),
    ],
    ids=[
        "running sum",
        "pad",
        "flip",
        "repeat",
        "whole",
        "turned",
        "transposed",
        "linear",
    ],
)
def test_operations_that_cannot_share_space(net: Any, text: str) -> None:
    assert text in refused(one_net(net), {"depth": 2})


def test_windows_reduced_by_a_function_of_its_own() -> None:
    """Such a pooling has no gradient, so a metric holds it."""

    def loss(p: Any, batch: Any) -> Any:
        y = convolved(batch["x"], p["k3"])
        window = (1, 2, 2, 2, 1)
        found = lax.reduce_window(
            lax.stop_gradient(y), 1.0, lambda a, b: a * b, window, window, "VALID"
        )
        return jnp.mean(y**2), {"product": jnp.mean(found)}

    job = dataclasses.replace(one_net(None), loss_fn=loss)
    assert "depth: reduce_window: it reduces windows by a function without" in (
        refused(job, {"depth": 2})
    )


def test_what_no_executor_runs_beside_it() -> None:
    job = one_net(lambda p, x: convolved(x, p["k3"]))
    text = refused(job, {"stage": 2, "depth": 2})
    assert "mesh= fixes depth 2, and stages of a pipeline do not share" in text
    text = refused(job, {"data": 2, "depth": 2}, shares=[1, 1])
    assert "neither shares= nor devices of several kinds go with it" in text
