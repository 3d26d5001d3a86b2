"""Measures samples that several devices share, on virtual CPU devices and in files.

A CosmoFlow and a 3-D U-Net train on volumes of which depth, height and width are shared
by two devices each. Memory and exchanges of a device are compared with one device's and
with the prediction; files are read as each of eight processes would. Then CosmoFlow at
512³ is planned for 2,048 V100: Oyama et al., "The Case for Strong Scaling in Deep
Learning: Training Large 3D CNNs with Hybrid Parallelism" (2020), ran it there with
samples 64 times as large as the earlier 128³.

    python scripts/bench_spatial.py [--extent 32] [--no-tpu] [--refresh]

The last line is one JSON object:

    memory_ratio      a device's temporaries over (1/p + halo) of one device's
    memory_ratio_tpu  the same of the TPU compiler's peak without arguments, for a U-Net
                      at 64³ whose depth four devices share and whose height two; from
                      ``spatial.json`` beside this script, with versions (--refresh
                      compiles again, for up to half an hour)
    memory_ratio_tpu_now   the same at half of --extent, compiled now; null without
                      libtpu
    halo_bytes_exact  1 if predicted and compiled bytes of halos are equal: for both
                      models, and for convolutions and poolings in loops, in
                      checkpointed regions, in groups, and with fsdp and tensor
    max_rel_diff      largest difference of gradients, by tensor, from one device
    bytes_read        bytes of a file that one of eight processes reads, over 1/p
    cosmoflow_512_*   the plan's mesh, bytes on a device and seconds of a step
    cosmoflow_before  size of earlier samples

A TPU stores the last dimensions of an array in tiles of (8, 128) and pads a divided
width again, so that the TPU's memory is compared with an undivided width.
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
FILE: Final = Path(__file__).with_name("spatial.json")
STORED_EXTENT: Final = 64
WIDEST: Final = 1
"""Elements that a convolution of width three reads from each neighbour."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", type=int, default=32, help="voxels along a volume")
    parser.add_argument("--no-tpu", action="store_true", help="compile for CPU alone")
    parser.add_argument("--refresh", action="store_true", help="compile anew")
    arguments = parser.parse_args()
    if arguments.refresh:
        fresh = on_tpu(STORED_EXTENT)
        if fresh is None:
            raise SystemExit("nothing was stored: there is no TPU compiler")
        FILE.write_text(json.dumps(fresh, indent=1) + "\n", encoding="utf-8")
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    now = None if arguments.no_tpu else on_tpu(arguments.extent // 2)
    rows = [compare_model(name, arguments.extent) for name in ("cosmoflow", "unet3d")]
    report = {
        "memory_ratio": max(result["memory_ratio"] for result in rows),
        "memory_ratio_tpu": stored["ratio"],
        "memory_ratio_tpu_now": now and now["ratio"],
        "halo_bytes_exact": min(
            *(result["halo_bytes_exact"] for result in rows), *map(case_exact, CASES)
        ),
        "max_rel_diff": max(result["max_rel_diff"] for result in rows),
        "bytes_read": bytes_read(arguments.extent),
        **cosmoflow_512(),
    }
    print(json.dumps(report))


def job_of(name: str, extent: int) -> wh.Job:
    """Returns a job with one volume in a batch."""
    channels = (8, 16, 32) if name == "cosmoflow" else (8, 16)
    return models.job(f"{name}-test", batch_size=1, extent=extent, channels=channels)


def recording_sgd() -> Any:
    """Returns gradient descent whose state is the gradient."""
    return optax.chain(optax.trace(decay=0.0), optax.scale(-0.125))


def plan_on(job: wh.Job, cluster: str, mesh: dict[str, int]) -> wh.Plan:
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.batch_at(0, 1)
    )
    return wh.plan(
        job.loss_fn,
        jobs.abstract_model(job),
        shapes,
        optimizer=recording_sgd(),
        cluster=cluster,
        mesh=mesh,
        **FIXED,
    )


def share(extent: int, mesh: dict[str, int]) -> float:
    """Returns a device's part of a volume with its halo: (1/p + halo)."""
    return math.prod((extent // n + WIDEST) / extent for n in mesh.values())


def compare_model(name: str, extent: int) -> dict[str, Any]:
    """Compares one model on eight devices with one device."""
    job = job_of(name, extent)
    batch, gradients, temporaries = job.batch_at(0, 1), [], []
    is_exact = 0
    for mesh in ({}, SPACE):
        devices = math.prod(mesh.values())
        plan = plan_on(job, f"cpu:{devices}", mesh)
        step = wh.compile(
            plan,
            job.loss_fn,
            jobs.abstract_model(job),
            optimizer=recording_sgd(),
            devices=jax.devices()[:devices],
        )
        program = step.lower().compile()
        temporaries.append(program.memory_analysis().temp_size_in_bytes)
        state = step.init(job.make_model, rng=jax.random.key(0))
        state, _ = step(state, batch)
        gradient = state.opt_state[0].trace
        gradients.append([np.asarray(x) for x in jax.tree.leaves(gradient)])
        if mesh:
            is_exact = int(halo_bytes(plan) == permuted_bytes(program.as_text()))
    ratio = temporaries[1] / temporaries[0] / share(extent, SPACE)
    print(
        f"{name}: temporaries {temporaries[0] / 2**20:.1f} MiB on one device, "
        f"{temporaries[1] / 2**20:.1f} MiB on each of eight"
    )
    return {
        "memory_ratio": round(ratio, 3),
        "halo_bytes_exact": is_exact,
        "max_rel_diff": float(f"{difference(*gradients):.2g}"),
    }


def on_tpu(extent: int) -> dict[str, Any] | None:
    """Returns temporaries on each of eight v5e over (1/p + halo) of one's."""
    job, nbytes, versions = job_of("unet3d", extent), [], {}
    for cluster, mesh in (("v5e:1x1", {}), ("v5e:2x4", SPACE_TPU)):
        try:
            compiled = plan_on(job, cluster, mesh).verify()
        except NoCompiler as error:
            print(error)
            return None
        by_name = {q.name: q.compiled or 0 for q in compiled.memory}
        nbytes.append(by_name["peak"] - by_name["arguments"])
        versions = dict(compiled.versions)
    print(
        f"unet3d on TPU v5e, {extent}³: {nbytes[0] / 2**20:.1f} MiB beyond arguments "
        f"on one device, {nbytes[1] / 2**20:.1f} MiB on each of eight"
    )
    return {
        "extent": extent,
        "mesh": SPACE_TPU,
        "one_device_mib": round(nbytes[0] / 2**20, 1),
        "each_of_eight_mib": round(nbytes[1] / 2**20, 1),
        "ratio": round(nbytes[1] / nbytes[0] / share(extent, SPACE_TPU), 3),
        "versions": versions,
    }


def convolve(x: jax.Array, kernel: jax.Array, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1, 1),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def layer(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Applies a convolution in groups, a plain one and a pooling."""
    x = jnp.tanh(convolve(x, kernel[:, :, :1], x.shape[-1]))
    return nnx.max_pool(jnp.tanh(convolve(x, kernel)), (3, 3), (1, 1), "SAME")


def in_loop(x: jax.Array, kernels: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, k: (layer(c, k), None), x, kernels)[0]


def in_regions(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """Applies layers with remat."""
    for kernel in kernels:
        x = jax.checkpoint(layer)(x, kernel)
    return x


def in_turn(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """Applies plain convolutions."""
    return convolve(jnp.tanh(convolve(x, kernels[0])), kernels[1])


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
    """Returns whether the halos of one case are the predicted ones."""
    net, mesh = case
    devices = math.prod(mesh.values())
    kernels = jnp.ones((2, 3, 3, 4, 4))
    plan = wh.plan(
        loss := lambda p, batch: jnp.mean(net(batch["x"], p) ** 2),
        kernels,
        {"x": jax.ShapeDtypeStruct((4, 16, 16, 4), "float32")},
        optimizer=recording_sgd(),
        cluster=f"cpu:{devices}",
        mesh=mesh,
        **FIXED,
    )
    step = wh.compile(
        plan,
        loss,
        kernels,
        optimizer=recording_sgd(),
        devices=jax.devices()[:devices],
    )
    predicted = halo_bytes(plan)
    compiled = permuted_bytes(step.lower().compile().as_text())
    print(f"{getattr(net, '__name__', net)} on {mesh}: {predicted} B, {compiled} B")
    return int(predicted == compiled)


def halo_bytes(plan: wh.Plan) -> int:
    """Returns the predicted bytes that a device sends at its borders."""
    halos = (c for c in plan.collectives if c.what == "halo")
    return sum(c.payload_bytes * c.times(1) for c in halos)


def permuted_bytes(text: str) -> int:
    """Returns the bytes of a program's collective permutes."""
    return int(hlo.collectives(text).nbytes.get("collective-permute", 0))


def difference(single: list[Any], eight: list[Any]) -> float:
    """Returns the largest relative difference of a tensor, as tests measure it."""
    norms = [float(np.linalg.norm(x)) for x in single]
    floor = 1e-3 * float(np.sqrt(np.mean(np.square(norms))))
    return max(
        float(np.linalg.norm(a - b)) / max(norm, floor)
        for a, b, norm in zip(single, eight, norms, strict=True)
    )


def bytes_read(extent: int) -> float:
    """Returns the bytes of the busiest of eight processes over an eighth."""
    job = job_of("unet3d", extent)
    plan = plan_on(job, "cpu:8", SPACE)
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
            source = wh.Volumes(files, step_on_device(plan, shardings, device))
            source[0]
            most = max(most, source.bytes_read / (total / 8))
    return round(most, 3)


def step_on_device(plan: wh.Plan, shardings: Any, device: Any) -> Any:
    """Returns a stand-in for the step of a process with one device."""
    regions = {}
    for leaf, sharding in zip(plan.batch, shardings, strict=True):
        index = sharding.devices_indices_map(leaf.shape)[device]
        regions[leaf.path] = tuple(
            (slice(*cut.indices(size)[:2]),)
            for cut, size in zip(index[1:], leaf.shape[1:], strict=True)
        )
    return SimpleNamespace(plan=plan, batch_regions=lambda: regions)


def cosmoflow_512() -> dict[str, Any]:
    """Plans 64 volumes of 512³ on 2,048 V100 of 16 GB."""
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
