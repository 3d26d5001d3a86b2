"""A plan that takes devices in an order of its own computes what one device does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np

import whalejax as wh
from tests import equality
from tests.meshes.test_paddle import machine
from tests.whalejax.test_uniform_processes import job


@jax.enable_x64(True)
def test_devices_are_placed_by_their_links(tmp_path: Path) -> None:
    """Of four GPUs those that lie opposite are joined twice as fast."""
    path = tmp_path / "one.json"
    path.write_text(json.dumps({"machines": [machine(0, machines=1)]}))
    single = equality.on_one_device(job("plain"), 2)
    outcome = equality.check(single, devices=4, cluster=str(path), mesh={"data": 4})
    plan = outcome.plan
    # In the order of the file every link of the ring is slow.
    assert plan.device_order == (0, 1, 3, 2)
    grid = outcome.step.mesh.devices
    assert [d.id for d in grid.flat] == [0, 1, 3, 2]
    assert outcome.error <= equality.FLOAT64_TOLERANCE
    assert outcome.compilations == 1
    assert "devices are ordered as" in str(plan)
    again = wh.Plan.from_document(plan.document())
    mesh = again.mesh(jax.devices()[:4])
    assert np.array_equal(mesh.devices, grid)
    own = dataclasses.replace(again, device_order=()).mesh(jax.devices()[:4])
    assert not np.array_equal(own.devices, grid)
