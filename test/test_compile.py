"""Training through compiled gpusync ops: gradients, barriers in either pass, and what must not compile anew.

test_ordering.py holds the forward programs and the negative controls.
"""

from __future__ import annotations

import pytest
from compile_cases import CASES
from compile_check import check_offsets, check_plain_all_reduce, check_training

from torch_gpusync.testing import run_ranks

Findings = list[dict[str, list[str]]]  # of each rank, by case


@pytest.fixture(
    scope="module",
    params=[("aot_eager", False), ("aot_eager", True), ("inductor", False), ("inductor", True)],
    ids=["aot_eager-static", "aot_eager-dynamic", "inductor-static", "inductor-dynamic"],
)
def trained(request: pytest.FixtureRequest) -> Findings:
    """All cases in one set of processes, because compiling is what takes the time."""
    backend, dynamic = request.param
    findings: Findings = run_ranks(check_training, 3, backend, dynamic, timeout=300)
    return findings


@pytest.mark.parametrize("case", CASES)
def test_training(trained: Findings, case: str) -> None:
    wrong = [f"rank {rank}: {text}" for rank, of_rank in enumerate(trained) for text in of_rank[case]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_changing_offset_compiles_at_most_twice(backend: str) -> None:
    findings = run_ranks(check_offsets, 3, backend, timeout=120)
    assert findings == [[], [], []]


def test_the_check_sees_a_wrong_gradient() -> None:
    """A plain all_reduce where reduce_from_ranks is needed: gradients come out three times too large."""
    for of_rank in run_ranks(check_plain_all_reduce, 3, timeout=60):
        assert of_rank[0] == "not even eager mode is right"
        assert any("gradient of input 0 is off by" in text for text in of_rank)
        assert not any("output is off" in text for text in of_rank)
