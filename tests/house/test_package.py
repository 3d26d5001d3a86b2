"""The wheel, built from the sdist: what is in it, and that it works far from here."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from stat import S_ISLNK
from typing import Final

import pytest
from packaging.specifiers import SpecifierSet

import whalejax


ROOT: Final = Path(__file__).resolve().parents[2]
LINKED_ROOMS: Final = ("planner", "meshes", "models")
PACKAGE: Final = f"whalejax-{whalejax.__version__}"


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it, offline."""
    folder = tmp_path_factory.mktemp("built")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    run(*build, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return built / f"{PACKAGE}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's contents, as pip lays them out."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    run(*pip, "--no-index", "--target", target, wheel, cwd=target)
    return target


@pytest.fixture(scope="module")
def far(installed: Path, far_environment: dict[str, str]) -> dict[str, str]:
    """An environment in which the installed copy comes before any other."""
    return {**far_environment, "PYTHONPATH": str(installed)}


@pytest.mark.full
def test_sdist_holds_real_files_only(built: Path) -> None:
    with tarfile.open(built / f"{PACKAGE}.tar.gz") as archive:
        members = archive.getmembers()
    assert not [m.name for m in members if not (m.isfile() or m.isdir())]
    names = {member.name for member in members}
    for room in LINKED_ROOMS:
        assert f"{PACKAGE}/whalejax/{room}/__init__.py" in names
    for name in ("LICENSE", "README.md", "pyproject.toml", "tests/conftest.py"):
        assert f"{PACKAGE}/{name}" in names


def test_wheel_holds_real_files_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        links = [
            i.filename for i in archive.infolist() if S_ISLNK(i.external_attr >> 16)
        ]
    assert not links


def test_wheel_holds_every_module(
    wheel_names: set[str], python_files: Callable[..., list[Path]]
) -> None:
    expected = {
        path.relative_to(ROOT).as_posix() for path in python_files("whalejax")
    } | {
        f"whalejax/{path.relative_to(ROOT).as_posix()}"
        for path in python_files(*LINKED_ROOMS)
    }
    assert {name for name in wheel_names if name.endswith(".py")} == expected


def test_wheel_holds_data_and_nothing_else(wheel_names: set[str]) -> None:
    assert {"whalejax/py.typed", "whalejax/meshes/device_kinds.toml"} <= wheel_names
    tops = {name.partition("/")[0] for name in wheel_names}
    assert tops == {"whalejax", f"{PACKAGE}.dist-info"}


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{PACKAGE}.dist-info/METADATA").decode()
        commands = archive.read(f"{PACKAGE}.dist-info/entry_points.txt").decode()
    metadata = Parser().parsestr(text)
    assert metadata["Version"] == whalejax.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "whalejax = whalejax.__main__:main" in commands


IMPORT_PACKAGES = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__
                  for name in sys.argv[1:]}))
"""


@pytest.mark.full
def test_installed_packages_import_far_from_the_checkout(
    installed: Path, far: dict[str, str], wheel_names: set[str], tmp_path: Path
) -> None:
    inits = [name for name in wheel_names if name.endswith("/__init__.py")]
    packages = sorted(name.removesuffix("/__init__.py") for name in inits)
    assert {f"whalejax/{room}" for room in LINKED_ROOMS} < set(packages)
    dotted = [name.replace("/", ".") for name in packages]
    command = [sys.executable, "-c", IMPORT_PACKAGES, *dotted]
    files = json.loads(run(*command, cwd=tmp_path, env=far))
    for package, name in zip(packages, dotted, strict=True):
        assert Path(files[name]) == installed / package / "__init__.py"


def test_installed_catalogue_is_read(far: dict[str, str], tmp_path: Path) -> None:
    code = "import whalejax as wh; print(wh.cluster('h100:8'))"
    assert "h100" in run(sys.executable, "-c", code, cwd=tmp_path, env=far).lower()


def test_installed_command_runs(
    installed: Path, far: dict[str, str], tmp_path: Path
) -> None:
    by_name = run(installed / "bin" / "whalejax", "--help", cwd=tmp_path, env=far)
    module = [sys.executable, "-m", "whalejax", "--help"]
    by_module = run(*module, cwd=tmp_path, env=far)
    assert "train" in by_name
    assert "train" in by_module


def test_a_users_own_packages_do_not_collide(
    far: dict[str, str], tmp_path: Path
) -> None:
    for room in LINKED_ROOMS:
        (tmp_path / f"{room}.py").write_text(f"mine = {room!r}\n")
    code = "; ".join(
        f"import {room}, whalejax.{room}; assert {room}.mine == {room!r}"
        for room in LINKED_ROOMS
    )
    run(sys.executable, "-c", code, cwd=tmp_path, env=far)


@pytest.mark.parametrize("tag", ["py311", "py312"])
def test_known_good_versions_cover_the_dependencies(tag: str) -> None:
    lines = (ROOT / "requirements" / f"ci-{tag}.txt").read_text().splitlines()
    locked = {line.partition("==")[0] for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {
        requirement.partition("[")[0].partition(">")[0]
        for group in groups
        for requirement in group
    }
    assert names <= locked


def test_known_good_versions_admit_every_patch_release() -> None:
    tag = f"py{sys.version_info.major}{sys.version_info.minor}"
    listed = ROOT / "requirements" / f"ci-{tag}.txt"
    if not listed.exists():
        pytest.skip(f"no versions are listed for {tag}")
    lines = listed.read_text().splitlines()
    pins = [line.split("==") for line in lines if "==" in line]
    oldest = f"{sys.version_info.major}.{sys.version_info.minor}.0"
    refused = []
    for name, version in pins:
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        asked = found.metadata.json.get("requires_python")
        fits = asked is None or SpecifierSet(str(asked)).contains(oldest)
        if found.version == version and not fits:
            refused.append(f"{name}=={version} asks for Python {asked}")
    assert not refused
