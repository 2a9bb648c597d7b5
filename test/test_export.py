"""`torch.export` and AOTInductor through `torch_gpusync.nn.SyncModule`, on three ranks."""

from __future__ import annotations

from pathlib import Path

from export_models import check_export, check_module, check_stale, package, serve

from torch_gpusync.testing import run_ranks

RANKS = 3


def test_a_module_around_a_group_takes_what_pytorch_does_to_modules() -> None:
    assert run_ranks(check_module, RANKS, timeout=100) == [[], [], []]


def test_exported_programs_run_as_the_models_do() -> None:
    assert run_ranks(check_export, RANKS, timeout=200) == [[], [], []]


def test_packages_of_aotinductor_run_here_and_in_other_processes(tmp_path: Path) -> None:
    """A package for each rank, and one that all ranks load."""
    assert run_ranks(package, RANKS, str(tmp_path), timeout=300) == [[], [], []]
    assert run_ranks(serve, RANKS, str(tmp_path), timeout=100) == [[], [], []]


def test_the_comparison_sees_data_that_does_not_change() -> None:
    for found in run_ranks(check_stale, RANKS):
        assert [text.split(":")[0] for text in found] == [f"frozen, step {step}" for step in (1, 2, 3)]
