"""The demo as a user runs it, and what it does when a rank is wrong, dies, stops or raises."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_gpusync.demo.model
import torch_gpusync.demo.train
from torch_gpusync import SyncGroup
from torch_gpusync.demo import Config, main, run
from torch_gpusync.demo.launch import RankFailure, run_ranks
from torch_gpusync.demo.split import gather, replica_error, shard
from torch_gpusync.demo.train import initial_weights, train_rank

_PASSED = re.compile(r"demo passed: max abs error (\S+) over (\d+) ranks")
_TOLERANCE = 1e-4


def _demo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # Not from the source tree: the package must be found where it is installed.
    return subprocess.run(
        [sys.executable, "-m", "torch_gpusync", "demo", *arguments],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=400,
    )


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


# ---- ranks for the failures; eager unless the compiler matters, because what is tested is how the run ends


def _eagerly() -> None:
    torch.compile = lambda model, **_: model  # type: ignore[assignment]


def _eager_rank(rank: int, config: Config, port: int, folder: str) -> None:
    _eagerly()
    train_rank(rank, config, port, folder)


def _wrong_rank(rank: int, config: Config, port: int, folder: str) -> None:
    """Rank 1 takes 1.001 times the sum for the sum."""
    _eagerly()
    right = torch_gpusync.demo.model.reduce_from_ranks
    if rank == 1:
        torch_gpusync.demo.model.reduce_from_ranks = lambda x, sync: right(x, sync) * 1.001
    train_rank(rank, config, port, folder)


def _in_step_2(action: Callable[[], object]) -> None:
    """Do something in this process when its second optimizer step is done."""
    steps = count(1)
    register_optimizer_step_post_hook(lambda *_: action() if next(steps) == 2 else None)


def _killed_rank(rank: int, config: Config, port: int, folder: str) -> None:
    _eagerly()
    if rank == 1:
        _in_step_2(lambda: os.kill(os.getpid(), signal.SIGKILL))
    train_rank(rank, config, port, folder)


def _stopped_rank(rank: int, config: Config, port: int, folder: str) -> None:
    """Rank 1 stops for ever; rank 0, then in the middle of training, gets 3 s for its next waits."""
    # Compiled, because there a failed wait is a bare RuntimeError at first, but without code generation: no need to
    # wait for that.
    torch.compile = partial(torch.compile, backend="aot_eager")
    groups: list[SyncGroup] = []

    def make(**arguments: Any) -> SyncGroup:
        groups.append(SyncGroup(**arguments))
        return groups[-1]

    torch_gpusync.demo.train.SyncGroup = make  # type: ignore[assignment, misc]
    if rank == 1:
        _in_step_2(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    else:
        _in_step_2(lambda: setattr(groups[0], "timeout", 3.0))
    train_rank(rank, config, port, folder)


def _silent_rank(rank: int, config: Config, port: int, folder: str) -> None:
    signal.pause()


def _quitting_rank(rank: int, config: Config, port: int, folder: str) -> None:
    """Ends well without having done anything."""


# ---- the demo


@pytest.mark.limit(420)  # it compiles from nothing, which takes about a minute on two cores
def test_two_ranks_compiled_agree_with_the_unsplit_model(tmp_path: Path) -> None:
    result = _demo("--ranks", "2", "--steps", "6", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    found = _PASSED.fullmatch(_last_line(result.stdout))
    assert found, result.stdout
    assert 0 < float(found[1]) <= _TOLERANCE  # two sums in different order are never all equal
    assert found[2] == "2"
    # A barrier, the embedding, the greatest logit, the loss, the gradient into the head; for each layer
    # attention and MLP, forward and backward.
    calls = re.search(r"sync calls per step +(\d+)$", result.stdout, re.MULTILINE)
    assert calls and int(calls[1]) == 5 + 4 * Config.layers, result.stdout
    for row in ("time per step", "barrier latency", "all-reduce latency"):
        assert re.search(rf"^{row}.* [\d.]+ (µs|ms|s) +[\d.]+ (µs|ms|s) ", result.stdout, re.MULTILINE), (
            result.stdout
        )
    losses = re.search(r"^loss of the first and last step +(\S+), (\S+) ", result.stdout, re.MULTILINE)
    assert losses and float(losses[2]) < float(losses[1]), f"it did not learn: {result.stdout}"


def test_three_ranks_with_uneven_shares_of_the_vocabulary_and_a_text_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "bytes"
    text.write_bytes(bytes(range(256)))  # every byte, so that every rank's share is used
    code = run(Config(ranks=3, steps=2, timeout_s=200), text, worker=_eager_rank)
    out = capsys.readouterr().out
    found = _PASSED.fullmatch(_last_line(out))
    assert code == 0 and found and float(found[1]) <= _TOLERANCE and found[2] == "3", out
    assert f"text: {text}, 256 bytes" in out


# ---- failures


def test_a_wrong_reduction_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(Config(steps=3, timeout_s=200), worker=_wrong_rank)
    out = capsys.readouterr().out
    assert code == 1 and "demo passed" not in out
    found = re.fullmatch(
        r"demo failed: \w+ differ from the unsplit model's by (\S+) over 2 ranks; .*", _last_line(out)
    )
    assert found and float(found[1]) > 10 * _TOLERANCE, out


def test_a_killed_rank_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(Config(steps=4, timeout_s=200), worker=_killed_rank)
    out = capsys.readouterr().out
    assert code == 1 and _last_line(out) == "demo failed: rank 1 was ended by SIGKILL", out


def test_a_stopped_rank_is_named_by_the_one_that_waits_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(Config(steps=4, timeout_s=200), worker=_stopped_rank)
    captured = capsys.readouterr()
    assert code == 1, captured.out
    last = _last_line(captured.out)
    assert re.match(r"demo failed: rank 0 raised .*SyncTimeoutError: .* for rank 1 ", last), captured.out
    assert "Traceback" in captured.err


def test_ranks_that_make_no_progress_are_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(
        RankFailure, match=r"no rank made progress for 1 s \(finished steps: rank 0: 0, rank 1: 0\)"
    ):
        run_ranks(_silent_rank, Config(timeout_s=1), tmp_path, lambda step, loss: None)
    assert time.monotonic() - begin < 30


def test_a_rank_without_a_result_fails(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 ended without a result"):
        run_ranks(_quitting_rank, Config(ranks=1, timeout_s=60), tmp_path, lambda step, loss: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "heads cannot be divided over 5 ranks; possible are 1, 2, 3, 4, 6, 12"),
        (["--ranks", "0"], "heads cannot be divided over 0 ranks"),
        (["--steps", "0"], "at least one step is needed"),
        (["--timeout", "nan"], "the timeout is a positive number"),
        (["--text", "/nonexistent/file"], "cannot read the text /nonexistent/file: No such file"),
        (["--text", "/dev/null"], "has 0 bytes; more than 64 are needed"),
        pytest.param(
            ["--device", "cuda"],
            "--device cuda needs",
            marks=pytest.mark.skipif(
                torch.cuda.is_available(), reason="says what is missing where there is no GPU"
            ),
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    last = _last_line(capsys.readouterr().out)
    assert last.startswith("demo failed: ") and message in last


# ---- the split


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_shards_put_together_are_the_full_model(ranks: int) -> None:
    full = initial_weights(Config())
    shards = [shard(full, rank, ranks) for rank in range(ranks)]
    again = gather(shards)
    assert list(again) == list(full)
    assert all(torch.equal(again[name], tensor) for name, tensor in full.items())
    assert replica_error(shards) == 0
    shards[-1]["norm.weight"][0] += 0.5
    assert replica_error(shards) == (0.5 if ranks > 1 else 0)
    # Each weight of a divided matrix is on one rank only.
    assert sum(state["blocks.0.attention.qkv.weight"].numel() for state in shards) == 3 * Config().width ** 2


def test_a_ranks_heads_are_whole_heads_of_query_key_and_value() -> None:
    config = Config()
    full = {"blocks.0.attention.qkv.weight": torch.arange(3 * config.width).view(-1, 1)}
    rows = shard(full, 1, 4)["blocks.0.attention.qkv.weight"].flatten().tolist()
    heads = range(3 * config.head_size, 6 * config.head_size)
    assert rows == [matrix * config.width + row for matrix in range(3) for row in heads]
