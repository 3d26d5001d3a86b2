"""Samples whose space devices share, on eight virtual CPU devices and in files.

A CosmoFlow and a 3-D U-Net train on volumes of which depth, height and width are shared
by two devices each. What a device holds and exchanges is held against what one device
holds and what was predicted; files are read as each of eight processes would. Then
CosmoFlow at 512³ is planned for 2,048 V100: Oyama et al., "The Case for Strong Scaling
in Deep Learning: Training Large 3D CNNs with Hybrid Parallelism" (2020), ran it there
with samples 64 times as large as the 128³ that were trained on before.
The last line is one JSON object:

    memory_ratio      a device's temporaries over (1/p + halo) of one device's
    memory_ratio_tpu  the same of what the TPU compiler takes beyond arguments at most,
                      for a U-Net at 64³ whose depth four devices share and whose
                      height two; kept in ``spatial.json`` beside this script, with
                      versions (--refresh compiles again, for up to half an hour)
    memory_ratio_tpu_now   the same at half of --extent, compiled now; none without
                      libtpu
    halo_bytes_exact  1 where predicted and compiled bytes at borders are the same: of
                      both models, and of convolutions and poolings in loops, in
                      checkpointed regions, in groups, and beside fsdp and tensor
    max_rel_diff      of gradients, by tensor, against one device
    bytes_read        of a file by one of eight processes, as a part of 1/p
    cosmoflow_512_*   the plan's mesh, bytes on a device and seconds of a step

A TPU keeps the last dimensions of an array in tiles of (8, 128): a width that is cut
is filled up again, so that the TPU's memory is compared where width stays whole.

    python scripts/bench_spatial.py [--extent 32] [--no-tpu] [--refresh]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from paired import eight_devices


eight_devices()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import whalejax as wh  # noqa: E402
from whalejax import hlo, jobs, models  # noqa: E402
from whalejax.models import cosmoflow  # noqa: E402
from whalejax.verification.targets import NoCompiler  # noqa: E402


SPACE: Final = {"depth": 2, "height": 2, "width": 2}
FIXED: Final = {"zero": 0, "remat": "none", "offload": (), "num_micro_batches": 1}
SPACE_TPU: Final = {"depth": 4, "height": 2}
KEPT: Final = Path(__file__).with_name("spatial.json")
KEPT_EXTENT: Final = 64
WIDEST: Final = 1
"""Elements that a convolution of three needs of each neighbour."""


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", type=int, default=32, help="of a volume, in voxels")
    parser.add_argument("--no-tpu", action="store_true", help="compile for CPU alone")
    parser.add_argument("--refresh", action="store_true", help="compile what is kept")
    arguments = parser.parse_args()
    if arguments.refresh:
        fresh = on_tpu(KEPT_EXTENT)
        if fresh is None:
            raise SystemExit("nothing was kept: there is no TPU compiler")
        KEPT.write_text(json.dumps(fresh, indent=1) + "\n", encoding="utf-8")
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    now = None if arguments.no_tpu else on_tpu(arguments.extent // 2)
    found = [of_model(name, arguments.extent) for name in ("cosmoflow", "unet3d")]
    report = {
        "memory_ratio": max(one["memory_ratio"] for one in found),
        "memory_ratio_tpu": kept["ratio"],
        "memory_ratio_tpu_now": now and now["ratio"],
        "halo_bytes_exact": min(
            *(one["halo_bytes_exact"] for one in found), *map(case_exact, CASES)
        ),
        "max_rel_diff": max(one["max_rel_diff"] for one in found),
        "bytes_read": bytes_read(arguments.extent),
        **cosmoflow_512(),
    }
    print(json.dumps(report))


def job_of(name: str, extent: int) -> wh.Job:
    """One volume in a batch."""
    channels = (8, 16, 32) if name == "cosmoflow" else (8, 16)
    return models.job(f"{name}-test", batch_size=1, extent=extent, channels=channels)


def kept_gradient() -> Any:
    """Gradient descent whose state is the gradient."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-0.125))


def planned(job: wh.Job, cluster: str, mesh: dict[str, int]) -> wh.Plan:
    """The plan on a mesh."""
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.batch_at(0, 1)
    )
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        shapes,
        optimizer=kept_gradient(),
        cluster=cluster,
        mesh=mesh,
        **FIXED,
    )


def share(extent: int, mesh: dict[str, int]) -> float:
    """What a device has of a volume with its halo: (1/p + halo)."""
    return math.prod((extent // n + WIDEST) / extent for n in mesh.values())


def of_model(name: str, extent: int) -> dict[str, Any]:
    """One model on eight devices against one."""
    job = job_of(name, extent)
    batch, after, temporaries = job.batch_at(0, 1), [], []
    exact = 0
    for mesh in ({}, SPACE):
        devices = math.prod(mesh.values())
        plan = planned(job, f"cpu:{devices}", mesh)
        step = wh.compile(
            plan,
            job.loss_fn,
            jobs.abstract_model(job),
            optimizer=kept_gradient(),
            devices=jax.devices()[:devices],
        )
        program = step.lower().compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
        state = step.init(job.make_model, rng=jax.random.key(0))
        state, _ = step(state, batch)
        gradient = state.opt_state[0].trace
        after.append([np.asarray(x) for x in jax.tree.leaves(gradient)])
        if mesh:
            exact = int(halo_bytes(plan) == permuted_bytes(program.as_text()))
    ratio = temporaries[1] / temporaries[0] / share(extent, SPACE)
    print(
        f"{name}: temporaries {temporaries[0] / 2**20:.1f} MiB on one device, "
        f"{temporaries[1] / 2**20:.1f} MiB on each of eight"
    )
    return {
        "memory_ratio": round(ratio, 3),
        "halo_bytes_exact": exact,
        "max_rel_diff": float(f"{difference(*after):.2g}"),
    }


def on_tpu(extent: int) -> dict[str, Any] | None:
    """Memory beyond arguments on each of eight v5e over (1/p + halo) of one's."""
    job, found, said = job_of("unet3d", extent), [], {}
    for cluster, mesh in (("v5e:1x1", {}), ("v5e:2x4", SPACE_TPU)):
        try:
            compiled = planned(job, cluster, mesh).verify()
        except NoCompiler as error:
            print(error)
            return None
        by_name = {one.name: one.compiled or 0 for one in compiled.memory}
        found.append(by_name["peak"] - by_name["arguments"])
        said = dict(compiled.versions)
    print(
        f"unet3d on TPU v5e, {extent}³: {found[0] / 2**20:.1f} MiB beyond arguments "
        f"on one device, {found[1] / 2**20:.1f} MiB on each of eight"
    )
    return {
        "extent": extent,
        "mesh": SPACE_TPU,
        "one_device_mib": round(found[0] / 2**20, 1),
        "each_of_eight_mib": round(found[1] / 2**20, 1),
        "ratio": round(found[1] / found[0] / share(extent, SPACE_TPU), 3),
        "versions": said,
    }


def convolved(x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    """A convolution of images."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A convolution in groups, a plain one and a pooling."""
    x = jnp.tanh(convolved(x, kernel[:, :, :1], x.shape[-1]))
    return nnx.max_pool(jnp.tanh(convolved(x, kernel)), (3, 3), (1, 1), "SAME")


def in_loop(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """One layer after the other, in a scan."""
    return jax.lax.scan(lambda c, k: (layer(c, k), None), x, kernels)[0]


def in_regions(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """One after the other, each computed again in the backward pass."""
    for kernel in kernels:
        x = jax.checkpoint(layer)(x, kernel)
    return x


def in_turn(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """Plain convolutions one after the other."""
    return convolved(jnp.tanh(convolved(x, kernels[0])), kernels[1])


CASES: Final = (
    (in_loop, {"height": 2}),
    (in_regions, {"height": 2}),
    (jax.checkpoint(in_loop), {"height": 2, "width": 2}),
    (in_loop, {"data": 2, "height": 2}),
    (in_loop, {"fsdp": 2, "height": 2}),
    (in_turn, {"data": 2, "height": 2, "tensor": 2}),
)
"""Layers and the meshes that they are compiled on."""


def case_exact(case: tuple[Any, dict[str, int]]) -> int:
    """Whether the halos of one case are the predicted ones."""
    net, mesh = case
    devices = math.prod(mesh.values())
    kernels = jnp.ones((2, 3, 3, 4, 4))
    plan = wh.plan(
        loss := lambda p, batch: jnp.mean(net(batch["x"], p) ** 2),
        kernels,
        {"x": jax.ShapeDtypeStruct((4, 16, 16, 4), "float32")},
        optimizer=kept_gradient(),
        cluster=f"cpu:{devices}",
        mesh=mesh,
        **FIXED,
    )
    step = wh.compile(
        plan,
        loss,
        kernels,
        optimizer=kept_gradient(),
        devices=jax.devices()[:devices],
    )
    predicted = halo_bytes(plan)
    compiled = permuted_bytes(step.lower().compile().as_text())
    print(f"{getattr(net, '__name__', net)} on {mesh}: {predicted} B, {compiled} B")
    return int(predicted == compiled)


def halo_bytes(plan: wh.Plan) -> int:
    """What a plan predicts that a device sends at its borders."""
    halos = (c for c in plan.collectives if c.what == "halo")
    return sum(c.payload_bytes * c.times(1) for c in halos)


def permuted_bytes(text: str) -> int:
    """What a compiled program permutes."""
    return int(hlo.collectives(text).nbytes.get("collective-permute", 0))


def difference(one: list[Any], eight: list[Any]) -> float:
    """The largest of a tensor, by the measure of the tests."""
    norms = [float(np.linalg.norm(x)) for x in one]
    floor = 1e-3 * float(np.sqrt(np.mean(np.square(norms))))
    return max(
        float(np.linalg.norm(a - b)) / max(norm, floor)
        for a, b, norm in zip(one, eight, norms, strict=True)
    )


def bytes_read(extent: int) -> float:
    """What the busiest of eight processes reads of volumes, over an eighth of them."""
    job = job_of("unet3d", extent)
    plan = planned(job, "cpu:8", SPACE)
    batch = job.batch_at(0, 1)
    most = 0.0
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, values in batch.items():
            files[name] = [str(Path(folder) / f"{name}.npy")]
            np.save(files[name][0], values[0])
        total = sum(values.nbytes for values in batch.values())
        mesh = plan.mesh(jax.devices()[:8])
        shardings = [
            NamedSharding(mesh, PartitionSpec(*leaf.spec)) for leaf in plan.batch
        ]
        for device in jax.devices()[:8]:
            source = wh.Volumes(files, seen_by(plan, shardings, device))
            source[0]
            most = max(most, source.bytes_read / (total / 8))
    return round(most, 3)


def seen_by(plan: wh.Plan, shardings: Any, device: Any) -> Any:
    """What a process with one device would see of the step."""
    regions = {}
    for leaf, sharding in zip(plan.batch, shardings, strict=True):
        index = sharding.devices_indices_map(leaf.shape)[device]
        regions[leaf.path] = tuple(
            (slice(*cut.indices(size)[:2]),)
            for cut, size in zip(index[1:], leaf.shape[1:], strict=True)
        )
    return SimpleNamespace(plan=plan, batch_regions=lambda: regions)


def cosmoflow_512() -> dict[str, Any]:
    """The plan of 64 volumes of 512³ on 2,048 V100 of 16 GB."""
    job = cosmoflow.job("512")
    shapes = {
        "volumes": jax.ShapeDtypeStruct((64, 512, 512, 512, 4), "float32"),
        "targets": jax.ShapeDtypeStruct((64, 4), "float32"),
    }
    plan = wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        shapes,
        optimizer=job.optimizer,
        cluster="v100-16:512x4",
    )
    print(plan.describe())
    memory = plan.memory.total_bytes
    return {
        "cosmoflow_512_mesh": dict(plan.axes),
        "cosmoflow_512_bytes": memory,
        "cosmoflow_512_seconds": round(plan.time.step_seconds, 4),
        "cosmoflow_before": "128³",
    }


if __name__ == "__main__":
    main()
