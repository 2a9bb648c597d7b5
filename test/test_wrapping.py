"""Models that hold a group, wrapped in what PyTorch has for models: every rank sees what the bare model would."""

from __future__ import annotations

import re

import pytest
from rank_tools import slack
from wrapping_cases import CASES, check_wrappings, check_wrong_wrappings, repetitions, unequal

from torch_gpusync.testing import run_ranks

RANKS = 3


@pytest.fixture(scope="module")
def findings() -> list[dict[str, list[str]]]:
    return run_ranks(check_wrappings, RANKS, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_a_wrapped_model_trains_like_the_model_itself(
    findings: list[dict[str, list[str]]], case: str
) -> None:
    wrong = [f"rank {rank}: {text}" for rank, of_rank in enumerate(findings) for text in of_rank[case]]
    assert not wrong, "\n".join(wrong)


def test_a_wrong_wrapping_is_caught() -> None:
    for of_rank in run_ranks(check_wrong_wrappings, RANKS):
        assert any("output is off" in text for text in of_rank["remembers"])
        assert any("gradient of first.weight is off" in text for text in of_rank["no gradient"])
        assert not any("step 4: output is off" in text for text in of_rank["no gradient"])
        assert any("gradient of first.weight is off" in text for text in of_rank["no averaging"])


def test_checkpointing_repeats_other_ops_in_each_of_its_ways() -> None:
    """The facts behind the case below; on all ranks alike they are harmless, as the cases above show."""
    for logs in run_ranks(repetitions, RANKS, timeout=100):
        assert logs == {
            # Repeated up to what the backward pass needs,
            "eager": ["barrier", "all_reduce", "barrier"],
            # wholly,
            "reentrant": ["barrier", "all_reduce", "barrier", "all_reduce"],
            # or only where results are needed anew.
            "compiled": ["barrier", "all_reduce"],
        }


@pytest.mark.parametrize("other", ["compiled", "reentrant"])
def test_case_38_ranks_that_checkpoint_in_different_ways_are_told(other: str) -> None:
    for text in run_ranks(unequal, RANKS, other, 2.0 * slack(), timeout=100):
        assert re.match(r"Sync(Timeout|Mismatch)Error: gpusync: group 'world' is broken", text), text
        # What each called: rank 0 the barrier of its recomputation, its peers the next op or the other way round.
        assert "barrier" in text and "all_reduce" in text, text
