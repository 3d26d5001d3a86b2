"""What importing the package costs, and under which name it can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]


def _python(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_no_jax_for_clusters_that_are_described(tmp_path: Path) -> None:
    code = f"""
import sys
import whalejax.meshes as meshes
one = meshes.cluster("v100-32:8+p100-16:2x8")
one.save({str(tmp_path / "c.toml")!r})
assert meshes.Cluster.load({str(tmp_path / "c.toml")!r}) == one
assert one.kinds[0].matmul_seconds("f16", 64, 64, 64) > 0
print([name for name in ("jax", "jaxlib", "flax", "scipy") if name in sys.modules])
"""
    done = _python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_real_folder_is_no_package() -> None:
    done = _python("import meshes")
    assert done.returncode == 1
    assert "ImportError: import whalejax.meshes, not meshes" in done.stderr
