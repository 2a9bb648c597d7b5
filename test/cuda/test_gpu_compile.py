"""torch.compile with CUDA graphs: one execution of each op a call in warm-up, record and replay, no graph left out,
and right data."""

from __future__ import annotations

import functools

import pytest
from compiled_bodies import Step, in_order, under_compile
from gpu_ranks import PATIENCE

from torch_gpusync.testing import run_ranks

Findings = list[dict[str, list[str]]]  # of each rank, by check

CHECKS = {
    "reduce-overhead": ["inference", "training", "norm", "ordering rounds", "ordering two_groups"],
    "max-autotune": ["inference", "training"],
}


@functools.cache
def _run(mode: str) -> Findings | BaseException:
    # ATen's matrix products only: tuning Triton's takes minutes and is not what is tested here.
    env = {"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN"}
    try:
        results: Findings = run_ranks(under_compile, 3, mode, timeout=min(110, PATIENCE), env=env)
    except BaseException as error:  # once: the mode's other checks fail with it, not anew
        return error
    return results


def findings(mode: str) -> Findings:
    """What each rank found in each check."""
    results = _run(mode)
    if isinstance(results, BaseException):
        raise results
    return results


@pytest.mark.limit(140)
@pytest.mark.parametrize(
    ("mode", "check"), [(mode, check) for mode, checks in CHECKS.items() for check in checks]
)
def test_case_18_compiled(mode: str, check: str) -> None:
    wrong = [f"rank {rank}: {text}" for rank, of_rank in enumerate(findings(mode)) for text in of_rank[check]]
    assert not wrong, "\n".join(wrong)


def test_check_order() -> None:
    assert run_ranks(in_order, 3, timeout=90) == [Step.ops] * 3
