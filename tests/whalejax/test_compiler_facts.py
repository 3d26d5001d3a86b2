"""What the planner knows of the TPU compiler's collectives, against that compiler."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap

import pytest

from whalejax.meshes import cluster
from whalejax.meshes.topology import KEEPS_SCATTERS
from whalejax.planner.cost.collectives import axis_parts, runs_as


pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the extra tpu-compile (libtpu) is not installed",
)

TOPOLOGIES = ("v5e:2x2", "v5e:4x4", "v5e:4x8", "v5p:2x2x2", "v5p:4x4x4", "v6e:4x4")

COMPILE = textwrap.dedent(
    """
    import json, re, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from whalejax.meshes.jax_mesh import cluster_order

    def kind_of(compiled):
        text = compiled.as_text()
        scatters = "all-reduce-scatter" in text or "reduce-scatter(" in text
        if scatters:
            return "reduce-scatter"
        return "all-reduce" if re.search(r"all-reduce(-start)?\\(", text) else "other"

    def gathered(compiled):
        found = kind_of(compiled)
        return "all-gather" if found == "other" else found

    def compiled(topology, size, option, dim, tiles):
        name, _, slices = topology.partition(" ")
        more = {"num_slices": int(slices)} if slices else {}
        devices = topologies.get_topology_desc(name, "tpu", **more).devices
        grid = np.array(cluster_order(devices)).reshape(-1, size)
        mesh = Mesh(grid, ("data", "fsdp"))
        options = {option: True} if option else None
        if dim is None:
            shape = (tiles or 4096, 2048)
            x = jax.ShapeDtypeStruct(
                shape, jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp"))
            )
            whole = NamedSharding(mesh, P())
            step = jax.jit(lambda x: x + 1, out_shardings=whole)
            return gathered(step.lower(x).compile(compiler_options=options))
        shape = [len(grid) * 2048, 2048]
        shape[dim] = tiles * 128 * size * (len(grid) if dim == 0 else 1)
        x = jax.ShapeDtypeStruct(
            tuple(shape), jnp.bfloat16, sharding=NamedSharding(mesh, P("data"))
        )

        def scatter(x):
            return jax.lax.psum_scatter(
                x + x, "fsdp", scatter_dimension=dim, tiled=True
            )

        out = P(("data", "fsdp")) if dim == 0 else P("data", "fsdp")
        step = jax.jit(
            jax.shard_map(
                scatter, mesh=mesh, in_specs=P("data"), out_specs=out, check_vma=False
            )
        )
        return kind_of(step.lower(x).compile(compiler_options=options))

    print(json.dumps([compiled(*case) for case in json.loads(sys.argv[1])]))
    """
)


Case = tuple[str, int, str, int | None, int]
"""Topology, members, option, dimension (None to gather), tiles (or rows) left."""


def compile_all(cases: list[Case]) -> list[str]:
    """What the compiler makes of one collective each: topology, members, option."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(cases)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.full
def test_collectives_become_what_the_planner_prices() -> None:
    cases: list[Case] = []
    wanted: list[str] = []
    for topology in TOPOLOGIES:
        machine = cluster(topology)
        for size in {machine.num_devices, machine.num_devices // 2}:
            mesh = {"data": machine.num_devices // size, "fsdp": size}
            parts = axis_parts(("fsdp",), mesh, machine)
            cases.append((topology, size, "", None, 0))
            wanted.append(runs_as("all-gather", parts, machine))
            cases.append((topology, size, "", 0, 2))
            wanted.append(runs_as("reduce-scatter", parts, machine))
    assert compile_all(cases) == wanted
    assert {*wanted} == {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.full
def test_an_option_keeps_scatters_over_a_whole_torus_and_nothing_else() -> None:
    cases: list[Case] = []
    wanted: list[str] = []
    for topology in ("v5p:2x2x2", "v5p:4x4x4", "v6e:4x4"):
        machine = cluster(topology).under({KEEPS_SCATTERS: "1"})
        parts = axis_parts(("fsdp",), {"fsdp": machine.num_devices}, machine)
        cases.append((topology, machine.num_devices, KEEPS_SCATTERS, 0, 2))
        wanted.append(runs_as("reduce-scatter", parts, machine))
        cases.append((topology, machine.num_devices, KEEPS_SCATTERS, None, 0))
        wanted.append(runs_as("all-gather", parts, machine))
    assert compile_all(cases) == wanted
    assert wanted[::2] == ["reduce-scatter"] * 3
    assert wanted[3] == "all-reduce"


@pytest.mark.full
def test_what_spans_a_torus_and_others_is_reduced_whole() -> None:
    machine = cluster("v5e:2x4x4")
    mesh = {"data": 2, "fsdp": 16}
    everywhere = axis_parts(("data", "fsdp"), mesh, machine)
    between = axis_parts(("data",), mesh, machine)
    assert runs_as("reduce-scatter", everywhere, machine) == "all-reduce"
    assert runs_as("reduce-scatter", between, machine) == "reduce-scatter"
    assert compile_all([("v5e:4x4 2", 32, "", 0, 2)]) == ["all-reduce"]


def test_small_gathers_over_a_large_flat_torus_are_all_reduces() -> None:
    machine = cluster("v5e:8x8")
    parts = axis_parts(("fsdp",), {"fsdp": 64}, machine)
    wanted = [
        runs_as("all-gather", parts, machine, payload) for payload in (2**24, 2**25)
    ]
    cases: list[Case]
    cases = [("v5e:8x8", 64, "", None, rows) for rows in (0, 8192)]
    assert compile_all(cases) == wanted == ["all-reduce", "all-gather"]


@pytest.mark.full
def test_an_odd_number_of_tiles_is_reduced_whole() -> None:
    cases: list[Case] = [("v5e:4x8", 8, "", 1, tiles) for tiles in (1, 2, 3, 4)]
    assert compile_all(cases) == [
        "all-reduce",
        "reduce-scatter",
        "all-reduce",
        "reduce-scatter",
    ]
