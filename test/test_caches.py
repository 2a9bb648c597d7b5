"""torch's compile caches, shared between ranks, runs and versions of the library: hit where they may, and never stale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_tools import check_health
from torch import Tensor
from torch._dynamo.utils import counters

import torch_gpusync
from torch_gpusync import SyncGroup
from torch_gpusync.testing import run_ranks

RANKS = 3
NAME = "cached"


def _step(sync: SyncGroup, x: Tensor) -> Tensor:
    """The same graph on every rank."""
    board = torch_gpusync.SymmetricBuffer(sync, "board", torch.Size((2, 4)), torch.float32)
    board.put(torch.sin(x).detach())
    sync.barrier()
    mine = board.get()
    sync.barrier()
    return sync.all_reduce(x * mine)


def _train(rank: int, sync: SyncGroup, wrong: list[str]) -> dict[str, int]:
    """Compiles it anew, trains it with data that change, and returns what the caches counted."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(lambda x: _step(sync, x), fullgraph=True)
    total = sync.world_size * (sync.world_size + 1) / 2
    for step in range(3):
        xs = [(torch.arange(8.0).view(2, 4) / 8 + r + step) for r in range(sync.world_size)]
        before = sync.token.clone()
        x = xs[rank].requires_grad_()
        y = compiled(x)
        (y * (rank + 1)).sum().backward()
        wanted = sum(x.detach() * torch.sin(x.detach()) for x in xs)
        if not torch.allclose(y, torch.as_tensor(wanted), atol=1e-5):
            wrong.append(f"step {step}: {y} instead of {wanted}")
        if x.grad is None or not torch.allclose(x.grad, total * torch.sin(x.detach()), atol=1e-5):
            wrong.append(f"step {step}: gradient {x.grad} instead of {total * torch.sin(x.detach())}")
        if torch.equal(sync.token, before):
            wrong.append("the code works on another token")
    return {
        "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"]
        + counters["aot_autograd"]["autograd_cache_miss"],
    }


def _run(rank: int) -> tuple[list[str], list[dict[str, int]]]:
    """Twice in one process: the second time for another group of the same name."""
    wrong: list[str] = []
    counted = []
    for _ in range(2):
        sync = SyncGroup(name=NAME, timeout=90.0)
        sync.buffer("board", (2, 4), torch.float32)
        counted.append(_train(rank, sync, wrong))
        check_health(sync)
        sync.close()
        dist.barrier()
    return wrong, counted


def test_caches_hit_on_other_ranks_in_later_runs_and_for_another_group_of_the_name(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    [(wrong, alone)] = run_ranks(_run, 1, timeout=200, env=env)
    assert wrong == [] and alone[0]["hits"] == 0 and alone[0]["misses"] > 0
    together = run_ranks(_run, RANKS, timeout=200, env=env)
    assert [wrong for wrong, _ in together] == [[], [], []]
    for later in [alone[1], *(each for _, counted in together for each in counted)]:
        assert later["hits"] > 0 and later["misses"] == 0, (alone, together)


_PROGRAM = """
import sys

# An editable install would go before the copy of the package that lies here.
sys.meta_path[:] = [finder for finder in sys.meta_path if "ScikitBuild" not in type(finder).__name__]
import torch, torch_gpusync
from torch._dynamo.utils import counters

assert torch_gpusync.__file__.startswith(sys.argv[1])
[sync] = torch_gpusync.virtual_ranks(1, name="solo")
for tag in (torch.compiler.config.cache_key_tag, "no tag of ours"):
    torch.compiler.config.cache_key_tag = tag
    torch._dynamo.reset()
    counters.clear()
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: sync.all_reduce(x * 3).sum(), fullgraph=True)(x).backward()
    print(*x.grad.tolist(), counters["aot_autograd"]["autograd_cache_hit"])
"""


def _program(package: Path, cache: Path) -> list[str]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(package)}
    command = [sys.executable, "-c", _PROGRAM, str(package)]
    done = subprocess.run(command, cwd=package, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_case_34_a_changed_registration_is_not_served_from_the_cache(tmp_path: Path) -> None:
    """Two processes with one cache; in the second the same op has another gradient."""
    origin = Path(torch_gpusync.__file__).parent
    versions = [tmp_path / "old", tmp_path / "new"]
    for version in versions:
        shutil.copytree(origin, version / "torch_gpusync", ignore=shutil.ignore_patterns("__pycache__"))
        library = version / "torch_gpusync" / "_C.so"
        if not library.exists():
            library.symlink_to(torch_gpusync._library.path())
    gradients = versions[1] / "torch_gpusync" / "gradients.py"
    text = gradients.read_text()
    old = "        result: Tensor = _all_reduce(ctx.token, ctx.group_name, change, reduce_op, algo)\n"
    assert text.count(old) == 1
    gradients.write_text(text.replace(old, old.replace("change,", "10 * change,")))
    assert _program(versions[0], tmp_path / "cache") == ["3.0 3.0 3.0 3.0 0"] * 2
    # Without the tag the second process would be served the first one's gradient: the cache's own keys do not see it.
    assert _program(versions[1], tmp_path / "cache") == ["30.0 30.0 30.0 30.0 0", "3.0 3.0 3.0 3.0 1"]


def test_a_tag_of_the_users_own_is_kept() -> None:
    from torch.compiler import config

    ours, before = torch_gpusync._caches.tag(), config.cache_key_tag
    assert ours in before
    try:
        config.cache_key_tag = "theirs"
        torch_gpusync._caches.separate()
        assert config.cache_key_tag == f"theirs+{ours}"
    finally:
        config.cache_key_tag = (
            before  # by hand: pytest's monkeypatch may delete it, and nothing compiles any more
        )
