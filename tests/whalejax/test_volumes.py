"""Volumes in files: each process reads its part, and wrong files are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

import whalejax as wh


EXTENT: Final = 8
SHAPE: Final = (EXTENT, EXTENT, EXTENT, 2)
Write = Callable[[Path, np.ndarray], None]


def write_npy(path: Path, values: np.ndarray) -> None:
    np.save(path.with_suffix(".npy"), values)
    path.with_suffix(".npy").rename(path)


def write_zarr(path: Path, values: np.ndarray) -> None:
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {"chunks": [2, 4, 8, 2]},
    }
    store = tensorstore.open(
        spec, create=True, dtype=values.dtype.name, shape=values.shape
    ).result()
    store.write(values).result()


@pytest.fixture(params=[write_npy, write_zarr], ids=["npy", "zarr"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    """Four volumes, each with its number in front of those of its voxels."""
    paths = [tmp_path / f"{n}" for n in range(4)]
    for n, path in enumerate(paths):
        request.param(path, volume(n))
    return paths


def volume(number: int) -> np.ndarray:
    size = int(np.prod(SHAPE))
    return np.arange(number * size, (number + 1) * size, dtype=np.float32).reshape(
        SHAPE
    )


def step_of(*pieces: tuple[slice, ...], shape: tuple[int, ...] = SHAPE) -> Any:
    """What a reader sees of a compiled step, whose process holds some pieces."""
    leaf = SimpleNamespace(path="['volumes']", shape=(4, *shape), dtype="float32")
    return SimpleNamespace(
        plan=SimpleNamespace(batch=(leaf,)),
        batch_regions=lambda: {leaf.path: pieces},
    )


def test_a_process_reads_its_slab_alone(files: list[Path]) -> None:
    whole = slice(0, EXTENT)
    step = step_of((slice(2, 4),), (slice(4, 8),), (whole,), (slice(0, 2),))
    source = wh.Volumes({"volumes": files}, step)
    for number in (3, 0):
        found = source[number]["volumes"]
        np.testing.assert_array_equal(found, volume(number)[2:4, 4:])
    assert source.bytes_read == 2 * volume(0).nbytes // 8


def test_parts_that_are_no_neighbours(files: list[Path]) -> None:
    apart = (slice(0, 2), slice(6, 8))
    step = step_of(apart, apart, (slice(0, EXTENT),), (slice(0, 2),))
    found = wh.Volumes({"volumes": files}, step)[1]["volumes"]
    rows = [0, 1, 6, 7]
    np.testing.assert_array_equal(found, volume(1)[np.ix_(rows, rows)])


def test_a_feed_stacks_what_was_read(files: list[Path]) -> None:
    source = wh.Volumes({"volumes": files, "targets": np.arange(4.0)})
    batch = next(iter(wh.Feed(source, 2, seed=None)))
    np.testing.assert_array_equal(batch["volumes"], [volume(0), volume(1)])
    assert batch["targets"].tolist() == [0.0, 1.0]
    assert source.bytes_read == 2 * volume(0).nbytes


def refused(leaves: Any, step: Any = None, number: int = 1) -> str:
    with pytest.raises(wh.WhaleError) as caught:
        wh.Volumes(leaves, step)[number]
    return str(caught.value)


def test_a_file_of_another_shape(files: list[Path]) -> None:
    slabs = ((slice(0, 4),),) * 4
    text = refused({"volumes": files}, step_of(*slabs, shape=(16, 16, 16, 2)))
    assert text == (
        f"volumes[1] ({files[1]}) has shape (8, 8, 8, 2); the plan is for samples of "
        "(16, 16, 16, 2). Give files of that shape, or plan again for this one"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    pickled, empty = tmp_path / "pickled.npy", tmp_path / "empty"
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    empty.mkdir()
    names = [str(pickled), str(tmp_path / "none.npy"), str(empty)]
    texts = [refused({"volumes": names}, number=n) for n in range(3)]
    assert "Give .npy files of numbers, or folders with Zarr arrays" in texts[0]
    assert "volumes[1]: there is no file" in texts[1]
    assert "holds no Zarr array (neither .zarray nor zarr.json)" in texts[2]


def test_leaves_that_cannot_be() -> None:
    step = step_of(*((slice(0, 8),),) * 4)
    text = refused({"volume": ["a.npy"], "targets": [1, 2]}, step)
    assert "leaves have unlike numbers of samples: volume 1, targets 2" in text
    assert (
        "leaves are ['volume'], ['targets']; the plan's batch has ['volumes']. Name "
        "them alike: a batch that is no dict of arrays must become one"
    ) in text
    assert "leaves is []; expected a file for each sample" in refused([])


@pytest.mark.parametrize("given", [3, None, np.float32(1)], ids=str)
def test_leaves_without_a_length(given: Any) -> None:
    assert (
        f"leaves['v'] is {given!r}; expected a list of files or an array, with one for "
        "each sample"
    ) in refused({"v": given})


@pytest.mark.parametrize("given", ["a.npy", Path("a.npy"), b"a.npy"], ids=repr)
def test_one_path_in_place_of_a_list(given: Any) -> None:
    assert (
        f"leaves['v'] is the one path {given!r}; expected a list with a file for each "
        f"sample: for a single sample, give [{given!r}]"
    ) in refused({"v": given})


def test_paths_in_bytes(files: list[Path]) -> None:
    source = wh.Volumes({"volumes": [bytes(path) for path in files]})
    np.testing.assert_array_equal(source[2]["volumes"], volume(2))
    assert source.bytes_read == volume(2).nbytes


@pytest.mark.parametrize("number", [-1, 4, 1.0, True, "0"], ids=repr)
def test_a_sample_that_is_not_there(number: Any) -> None:
    assert refused({"targets": np.zeros(4)}, number=number) == (
        f"there is no sample {number!r}; expected a whole number from 0 to 3, of 4 "
        "samples"
    )


@pytest.mark.parametrize("write", [write_npy, write_zarr], ids=["npy", "zarr"])
def test_a_file_of_another_type(tmp_path: Path, write: Write) -> None:
    write(tmp_path / "0", volume(0).astype(np.int64))
    step = step_of(*((slice(0, EXTENT),),) * 3, (slice(0, 2),))
    assert refused({"volumes": [tmp_path / "0"]}, step, 0) == (
        f"volumes[0] ({tmp_path / '0'}) is of int64; the plan is for samples of "
        "float32. Write the files as float32, or plan again with a batch of int64"
    )


def test_files_that_are_no_array(tmp_path: Path) -> None:
    several, empty, torn = (tmp_path / n for n in ("several.npz", "empty", "torn"))
    np.savez(several, a=volume(0))
    empty.touch()
    np.save(tmp_path / "whole.npy", volume(0))
    torn.write_bytes((tmp_path / "whole.npy").read_bytes()[:500])
    for path in (several, empty, torn):
        text = refused({"v": [path]}, number=0)
        assert text.startswith(f"v[0]: {path} cannot be read (")
        assert "Give .npy files of numbers, or folders with Zarr arrays" in text


def test_values_in_an_array_on_a_device() -> None:
    source = wh.Volumes({"targets": jnp.arange(3.0)})
    assert [source[n]["targets"].item() for n in range(3)] == [0.0, 1.0, 2.0]


def test_leaves_without_samples() -> None:
    text = refused({"a": [], "b": np.zeros((0, 2))})
    for name in "ab":
        assert f"leaves['{name}'] has no samples; expected at least one" in text


def test_a_chunk_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "0"
    write_zarr(path, volume(0))
    (path / "1.0.0.0").write_bytes(b"torn")
    text = refused({"v": [path]}, number=0)
    assert text.startswith(f"v[0] ({path}): a part of it cannot be read (")
    assert text.endswith("Write the file again")
