"""Training: one loop for both models, the unsplit run in the calling process, and what each rank runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_gpusync import SyncGroup

from .config import Config
from .latency import measure
from .model import Transformer
from .split import State, shard
from .text import batches

# What a run leaves behind: "losses" and "seconds" (a float per step), "logits" (of the last step),
# "weights" (after it); from a rank also "calls" (gpusync ops executed, per step) and "latency" (seconds by
# name). Plain types only, so that torch.load takes them.
Result = dict[str, Any]
OnStep = Callable[[int, float], None]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def train(
    model: nn.Module,
    forward: Callable[..., Any],
    text: torch.Tensor,
    config: Config,
    device: torch.device,
    on_step: OnStep,
) -> Result:
    """Train ``model`` for ``config.steps`` steps through ``forward``, the model itself or its compiled form.

    ``on_step`` is called after each step with the number of finished steps and the loss.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate, momentum=config.momentum)
    losses: list[float] = []
    seconds: list[float] = []
    logits = torch.empty(0)
    for tokens, targets in batches(text, config):
        tokens, targets = tokens.to(device), targets.to(device)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss, logits = forward(tokens, targets)
        loss.backward()
        optimizer.step()
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
        on_step(len(losses), losses[-1])
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return {"losses": losses, "seconds": seconds, "logits": logits.cpu(), "weights": weights}


def initial_weights(config: Config) -> State:
    """The full model's weights before training; a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return {name: tensor.clone() for name, tensor in Transformer(config).state_dict().items()}


def train_unsplit(weights: State, text: torch.Tensor, config: Config, on_step: OnStep) -> Result:
    """The reference: the whole model in this process, without the compiler, without a group."""
    device = torch.device(config.device)
    model = Transformer(config)
    model.load_state_dict(weights)
    model.to(device)
    return train(model, model, text, config, device, on_step)


def train_rank(rank: int, config: Config, port: int, folder: str) -> None:
    """The body of one rank's process: reads ``start.pt`` from ``folder`` and leaves ``rank<rank>.pt`` there.

    ``port``: of the store that the parent holds on this host; it is told the progress as ``progress/<rank>``.
    """
    # More threads than cores make every rank wait for the others' threads.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.ranks))
    start = torch.load(Path(folder) / "start.pt")
    timeout = timedelta(seconds=config.timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.ranks, timeout=timeout)
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    # Half of the parent's patience: a rank that waits in vain can say for whom before it is ended from
    # outside.
    sync = SyncGroup(device=device, timeout=config.timeout_s / 2)

    model = Transformer(config, sync)
    model.load_state_dict(shard(start["weights"], rank, config.ranks))
    model.to(device)
    counts = [int(sync.token[0])]

    def on_step(step: int, loss: float) -> None:
        sync.check()  # a failed wait on a GPU raises nothing by itself: it fills the results with NaN
        # Every op that is executed adds one to the token.
        counts.append(int(sync.token[0]))
        if step == 1:
            sync.timeout = config.step_timeout_s / 2
        store.set(f"progress/{rank}", f"{step} {loss}")

    try:
        result = train(model, torch.compile(model, fullgraph=True), start["text"], config, device, on_step)
    except RuntimeError:
        sync.check()  # in compiled code a failed wait is a bare RuntimeError; this raises its own class
        raise
    result["calls"] = [after - before for before, after in pairwise(counts)]
    result["latency"] = measure(sync, (config.batch, config.context, config.width), device)
    torch.save(result, Path(folder) / f"rank{rank}.pt")
    sync.close()
    dist.destroy_process_group()
