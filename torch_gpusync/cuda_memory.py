"""GPU memory that every rank can reach. The only module that touches torch's SymmetricMemory, which may change."""

import os
from collections import Counter
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch

from torch_gpusync import symmetric_store, tuning
from torch_gpusync.errors import SyncError
from torch_gpusync.ops import ops
from torch_gpusync.rendezvous import Deadline, Rendezvous

# csrc/cuda/pad.h, kMaxBlocks.
_MAX_BLOCKS = 128


class PeerMemory(Protocol):
    """How the ranks of a group map one another's memory."""

    def allocate(
        self,
        meeting: Rendezvous,
        nbytes: int,
        device: torch.device,
        what: str,
        group: str,
        deadline: Deadline,
    ) -> tuple[torch.Tensor, list[int], Any]:
        """Zeroed memory of ``nbytes`` on every rank. Collective.

        Returns:
            My part (uint8), the address of every rank's part in this process, and what keeps the mappings
            alive.
        """


def _zeroed_everywhere(
    meeting: Rendezvous, memory: torch.Tensor | None, problem: str, what: str, group: str, deadline: Deadline
) -> None:
    """No address is given away before every rank's part is zero: a signal must not be wiped out."""
    if memory is not None:
        memory.zero_()
        torch.cuda.synchronize(memory.device)
    meeting.confirm(problem, what, group, deadline)


class SharedBetweenProcesses:
    """One process for each rank: through torch SymmetricMemory."""

    def allocate(
        self,
        meeting: Rendezvous,
        nbytes: int,
        device: torch.device,
        what: str,
        group: str,
        deadline: Deadline,
    ) -> tuple[torch.Tensor, list[int], Any]:
        import torch.distributed._symmetric_memory as symmetric_memory

        memory, problem = None, ""
        try:
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            problem = f"no symmetric memory of {nbytes} bytes on {device}: {error}"
        _zeroed_everywhere(meeting, memory, problem, what, group, deadline)
        assert memory is not None
        handle, problem = None, ""
        try:
            handle = symmetric_store.rendezvous(memory, meeting, deadline)
        except RuntimeError as error:
            problem = f"the ranks' GPUs cannot map one another's memory: {error}"
        meeting.confirm(problem, what, group, deadline)
        assert handle is not None
        return memory, list(handle.buffer_ptrs), handle


class SharedInProcess:
    """All ranks in this process, on one GPU: an address is an address. One object for all of them."""

    def __init__(self) -> None:
        self._parts: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def allocate(
        self,
        meeting: Rendezvous,
        nbytes: int,
        device: torch.device,
        what: str,
        group: str,
        deadline: Deadline,
    ) -> tuple[torch.Tensor, list[int], Any]:
        memory, problem = None, ""
        try:
            with torch.inference_mode(False):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            problem = str(error)
        _zeroed_everywhere(meeting, memory, problem, what, group, deadline)
        assert memory is not None
        self._parts[memory.data_ptr()] = memory
        addresses = meeting.exchange(memory.data_ptr(), what, group, deadline)
        # A peer may write to my part for as long as it has the group, even when I have closed it.
        return memory, addresses, [self._parts[address] for address in addresses]


def has_kernels() -> bool:
    """Was the library built with its CUDA back end?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key("gpusync::barrier", "CUDA")


def complain_of_device(device: torch.device) -> str:
    """What is wrong with asking for this GPU."""
    if not torch.cuda.is_available():
        return f"device '{device}' was asked for, but torch sees no GPU here"
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        return f"device '{device}' was asked for, but torch sees {count} GPU{'s' if count > 1 else ''}, from cuda:0"
    return ""


def complain_of_capture(what: str) -> str:
    """What is wrong with making ``what`` now: memory cannot be mapped while the current stream is captured."""
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return ""
    return f"{what} cannot be made while a CUDA graph is captured: make it before the capture; its ops can be captured"


def has_clusters(properties: Any) -> bool:
    """Can blocks of one launch be a cluster? Since compute capability 9.0."""
    return bool(properties.major >= 9)


def attach(
    meeting: Rendezvous,
    peers: PeerMemory,
    name: str,
    shared_name: str,
    token: torch.Tensor,
    channels: int,
    staging_bytes: int,
    deadline: Deadline,
) -> tuple[Any, int]:
    """Give the group ``name``, open on the host, its device part, on the token's device. Collective.

    Returns:
        What keeps the mappings of peers' memory alive, and how many blocks a launch may have.

    Raises:
        SyncError: a GPU cannot reach another's memory; the message names the pair.
    """
    device = token.device
    properties = torch.cuda.get_device_properties(device)
    place = [str(properties.uuid), properties.multi_processor_count, has_clusters(properties)]
    places = meeting.exchange(place, "SyncGroup", shared_name, deadline)
    ranks_on_gpu = max(Counter(uuid for uuid, *_ in places).values())
    if ranks_on_gpu > 1:
        # Read when SymmetricMemory maps peers; without it, it refuses ranks that share a GPU.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    # Blocks wait for blocks of other ranks: all of them have to be resident at once.
    max_blocks = max(1, min(_MAX_BLOCKS, min(count for _, count, _ in places) // ranks_on_gpu))
    clusters = all(place[2] for place in places)
    nbytes = ops._cuda_pad_bytes(channels, staging_bytes)
    pad, addresses, keep_alive = peers.allocate(meeting, nbytes, device, "SyncGroup", shared_name, deadline)
    choices, problem = list[int](), ""
    try:
        choices = tuning.find(properties.name, ranks_on_gpu, meeting.world_size)
        ops._cuda_open(pad, token, name, addresses, staging_bytes, max_blocks, clusters)
    except (RuntimeError, ValueError) as error:
        problem = str(error)
    meeting.confirm(problem, "SyncGroup", shared_name, deadline)
    _probe(meeting, name, shared_name, deadline)
    # Rank 0's for all, whatever GPUs and tables the others have: block i of a launch meets block i of the peers', so
    # all have to be equally wide.
    ops._cuda_tune(name, meeting.exchange(choices, "SyncGroup", shared_name, deadline)[0])
    return keep_alive, max_blocks


def _probe(meeting: Rendezvous, name: str, shared_name: str, deadline: Deadline) -> None:
    """Writes and reads a pattern through every mapping: peer access that is advertised need not work."""
    problems: list[str] = []
    for phase, verb in enumerate(("write to", "see what was written by", "read from")):
        try:
            bad = ops._cuda_probe(name, phase)
        except RuntimeError as error:  # told like the others, not raised: peers wait for this rank
            problems.append(f"GPU of rank {meeting.rank}: {error}")
            bad = []
        problems += [f"GPU of rank {meeting.rank} cannot {verb} the GPU of rank {r}" for r in bad]
        meeting.exchange(None, "SyncGroup", shared_name, deadline)
    told = meeting.exchange(problems, "SyncGroup", shared_name, deadline)
    everything = [problem for theirs in told for problem in theirs]
    if everything:
        raise SyncError(
            f"gpusync: group '{shared_name}': peer memory does not work ({'; '.join(everything)}): check the GPUs' "
            "topology with nvidia-smi topo -m, and that the ranks may map one another's memory"
        )
