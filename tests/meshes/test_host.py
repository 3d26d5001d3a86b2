"""Limits of control groups, in the files of both versions."""

from __future__ import annotations

from pathlib import Path

from whalejax.meshes.host_facts import cpu_cores, cpu_model, host_memory_bytes


def test_without_limits_the_whole_machine(tmp_path: Path) -> None:
    assert cpu_cores(tmp_path) >= 1
    assert host_memory_bytes(tmp_path) > 2**20


def test_version_two(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text("1048576\n")
    assert cpu_cores(tmp_path) == 0.5
    assert host_memory_bytes(tmp_path) == 2**20


def test_version_two_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu_cores(tmp_path) >= 1
    assert host_memory_bytes(tmp_path) > 2**20


def test_version_one(tmp_path: Path) -> None:
    for group in ("cpu", "memory"):
        (tmp_path / group).mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("25000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("2097152\n")
    assert cpu_cores(tmp_path) == 0.25
    assert host_memory_bytes(tmp_path) == 2**21


def test_version_one_without_a_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_cores(tmp_path) >= 1


def test_model_with_family_and_number(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("cpu family\t: 25\nmodel\t: 17\nmodel name\t: Maker Chip\n")
    assert cpu_model(info) == "Maker Chip (family 25, model 17)"
    info.write_text("model name\t: Maker Chip\n")
    assert cpu_model(info) == "Maker Chip"
    assert cpu_model(tmp_path / "none")
