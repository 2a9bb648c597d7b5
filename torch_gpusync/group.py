"""SyncGroup: the ranks that synchronise with one another, as a Python object."""

import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_gpusync import _token, cuda_memory, errors, memory, rendezvous, reset
from torch_gpusync.arguments import as_device, as_seconds, checked_shape, default_device, is_whole
from torch_gpusync.buffer import SymmetricBuffer
from torch_gpusync.cuda_memory import PeerMemory, SharedBetweenProcesses
from torch_gpusync.errors import SyncError
from torch_gpusync.methods import SyncMethods
from torch_gpusync.ops import buffer_meta, norm_limits, ops, world_sizes
from torch_gpusync.rendezvous import Deadline, Rendezvous

MAX_RANKS = 64
DEFAULT_BUFFER_BYTES = {"cpu": 4 << 20, "cuda": 16 << 20}
DEFAULT_TIMEOUT = 600.0
_ALIGNMENT = 128

MAX_CHANNELS = 1024
MAX_BUFFER_BYTES = 1 << 40
_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)

_open_names: set[str] = set()


def _forget_parent() -> None:
    """A forked child may make groups of its own under the names that its parent's groups have."""
    _open_names.clear()
    buffer_meta.clear()
    world_sizes.clear()
    norm_limits.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _host() -> dict[str, str]:
    """What tells whether two ranks can share memory: the host's name and boot."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return {"name": socket.gethostname(), "boot": boot}


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _check_one_host(name: str, hosts: list[dict[str, str]]) -> None:
    if all(host == hosts[0] for host in hosts):
        return
    listed = ", ".join(f"rank {r} on {host['name']}" for r, host in enumerate(hosts))
    raise SyncError(
        f"gpusync: the ranks of group '{name}' run on different hosts ({listed}): a SyncGroup works within "
        "one host. Make one for the ranks of each host, and let torch.distributed do the step between hosts"
    )


class SyncGroup(SyncMethods):
    """The ranks of a process group, ready to synchronise inside models, compiled or not.

    Collective: every rank of ``group`` makes it, with the same arguments. It is a plain object: keep it as a
    module's attribute, in a list, as a global or in a closure; ``state_dict``, ``.to()``, DDP and FSDP do not
    see it, and ``copy.deepcopy`` gives the same object. Ranks are always ranks in the group.

    No wait is unbounded. When one is given up (timeout, a rank that is gone, ranks that call different
    things, Ctrl-C) the group is broken: all ranks that wait raise the error, and every later op does so at
    once. :meth:`reset`, on all ranks, makes it usable again. Ctrl-C ends a wait on the CPU within a second,
    whatever handler the process has for SIGINT (which is called, too), unless the process ignores it. A
    process forked from this one cannot use the group; it may make groups of its own.

    Args:
        group: a c10d ProcessGroup, a 1-D DeviceMesh or a process group's name. Default: WORLD.
        device: default: the group's own (its bound device; cpu for Gloo; the current GPU for NCCL).
        name: what compiled graphs know the group by. Default: ``world`` or the process group's name, then
            ``/1``, ... for further groups on it, by order of creation.
        channels: how many independent channels barriers, signals and push buffers have, from 0.
        buffer_bytes: staging memory of each rank for collectives (default: 4 MiB, on GPUs 16 MiB); payloads
            of more than half of it are worked off in parts. On GPUs as much again holds what is pushed.
        timeout: seconds, or a timedelta, that any wait may take, this construction included. May be set
            later.

    Raises:
        SyncError: the ranks disagree on an argument, run on different hosts, or there is too little memory.
        SyncTimeoutError: some ranks did not make the group in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | str | None = None,
        *,
        device: torch.device | str | None = None,
        name: str | None = None,
        channels: int = 8,
        buffer_bytes: int | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        process_group = rendezvous.resolve_group(group)
        state = rendezvous.of_group(process_group)
        shared_name = name if name is not None else rendezvous.default_name(process_group)
        try:
            where = as_device(device) if device is not None else default_device(process_group)
            seconds = as_seconds(timeout)
        except SyncError as error:
            deadline = Deadline(DEFAULT_TIMEOUT)
            with state.rendezvous.turn("SyncGroup", shared_name, deadline):
                state.rendezvous.refuse(str(error), "SyncGroup", shared_name, deadline)
            raise
        self._set_up(
            state.rendezvous,
            # Weak: a group must not keep the store of a destroyed process group, nor its port.
            partial(rendezvous.find, weakref.ref(process_group)),
            SharedBetweenProcesses(),
            device=where,
            shared_name=shared_name,
            channels=channels,
            buffer_bytes=buffer_bytes,
            timeout=seconds,
        )
        if name is None:
            state.default_names += 1

    def _set_up(
        self, meeting: Rendezvous, *arguments: Any, shared_name: str, timeout: float, **named: Any
    ) -> None:
        with meeting.turn("SyncGroup", shared_name, Deadline(timeout)):
            self._meet(meeting, *arguments, shared_name=shared_name, timeout=timeout, **named)

    def _meet(
        self,
        meeting: Rendezvous,
        find_meeting: Callable[[], Rendezvous | None],
        peer_memory: PeerMemory,
        *,
        device: torch.device,
        shared_name: str,
        channels: int,
        buffer_bytes: int | None,
        timeout: float,
        own_name: str | None = None,
        token: torch.Tensor | None = None,
    ) -> None:
        """Meets the other ranks and maps the shared memory.

        ``find_meeting`` finds ``meeting`` again, as long as it is of use. ``own_name``: of a virtual rank,
        unlike its peers'.
        """
        self.name = own_name or shared_name
        self._shared_name = shared_name
        if device.type == "cuda" and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.device = device
        self.channels = channels
        self._peer_memory = peer_memory
        self._keep_alive: list[Any] = []  # mappings of peers' GPU memory
        self.stream: torch.cuda.Stream | None = None  # of a virtual rank on a GPU
        self.rank: int = meeting.rank
        self.world_size: int = meeting.world_size
        self._find_meeting = find_meeting
        self._timeout = timeout
        if buffer_bytes is None:
            buffer_bytes = DEFAULT_BUFFER_BYTES.get(device.type, 1)
        if complaint := self._complaint(buffer_bytes):
            meeting.refuse(complaint, "SyncGroup", shared_name, Deadline(timeout))
            raise SyncError(f"gpusync: SyncGroup '{shared_name}': {complaint}")
        # Before the clock starts: the first token takes an import that may take seconds.
        self.token = token if token is not None else _token.process_token(device)
        deadline = Deadline(timeout)
        host = _host()
        arguments = {
            "device": device.type,
            "name": shared_name,
            "channels": channels,
            "buffer_bytes": buffer_bytes,
            "call": "SyncGroup",
        }
        meeting.agree(arguments, "SyncGroup", shared_name, deadline)
        places = meeting.exchange([host, _pid_namespace()], "SyncGroup", shared_name, deadline)
        _check_one_host(shared_name, [place[0] for place in places])
        # Ranks on GPUs share host memory too, for who is who and what went wrong, but not for data.
        host_staging = buffer_bytes if device.type == "cpu" else 0
        shared = memory.share(
            meeting,
            ops._cpu_bytes(meeting.world_size, channels, host_staging),
            "SyncGroup",
            shared_name,
            deadline,
        )
        ops._cpu_open(
            shared,
            self.name,
            meeting.rank,
            meeting.world_size,
            channels,
            host_staging,
            timeout,
            meeting.global_ranks[meeting.rank],
            host["name"],
            len({namespace for _, namespace in places}) == 1,
        )
        _open_names.add(self.name)
        world_sizes[self.name] = meeting.world_size
        self._norm_limits = norm_limits[self.name] = {}
        # Closes on garbage collection and at exit too, but not in a forked child: the group is the parent's.
        self._finalizer = weakref.finalize(self, _close, self.name, os.getpid())
        try:
            if device.type == "cuda":
                keep_alive, max_blocks = cuda_memory.attach(
                    meeting,
                    peer_memory,
                    self.name,
                    shared_name,
                    self.token,
                    channels,
                    buffer_bytes,
                    deadline,
                )
                self._keep_alive.append(keep_alive)
                for dtype in (torch.float32, torch.float16, torch.bfloat16):
                    self._norm_limits[dtype] = ops._cuda_pushed_bytes(self.name, dtype), max_blocks
            meeting.exchange(None, "SyncGroup", shared_name, deadline)
        except BaseException:
            self.close()
            raise

    def _complaint(self, buffer_bytes: int) -> str:
        """What is wrong with this rank's own arguments; peers are told, so that they need not wait for it."""
        if not isinstance(self.name, str) or not self.name:
            return f"name must be a string that is not empty, not {self.name!r}"
        if self.world_size > MAX_RANKS:
            return (
                f"a group has at most {MAX_RANKS} ranks, not {self.world_size}: make one for each part of "
                "them, with torch.distributed.new_group"
            )
        if not is_whole(self.channels) or not 1 <= self.channels <= MAX_CHANNELS:
            return f"channels must be a whole number from 1 to {MAX_CHANNELS}, not {self.channels!r}"
        if not is_whole(buffer_bytes) or not 1 <= buffer_bytes <= MAX_BUFFER_BYTES:
            return f"buffer_bytes must be a whole number from 1 to {MAX_BUFFER_BYTES}, not {buffer_bytes!r}"
        if self.device.type == "cuda":
            if capturing := cuda_memory.complain_of_capture("a group"):
                return capturing
            if problem := cuda_memory.complain_of_device(self.device):
                return problem
            if not cuda_memory.has_kernels():
                return (
                    f"device '{self.device}' was asked for, but the library was built without nvcc: build it "
                    "again where nvcc is on PATH"
                )
        elif self.device.type != "cpu":
            return f"device '{self.device}' has no back end: use 'cpu' or 'cuda'"
        if self.name in _open_names:
            return (
                f"this process already has an open group '{self.name}': close it first or choose another name"
            )
        return ""

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take; setting it holds at once, also for waits under way."""
        return self._timeout

    @timeout.setter
    def timeout(self, value: float | timedelta) -> None:
        seconds = as_seconds(value)
        self._ask(ops._set_timeout, seconds)
        self._timeout = seconds

    def buffer(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> SymmetricBuffer:
        """Make a symmetric buffer, zeroed. Collective, bounded by the timeout.

        It lives as long as the group is open.

        Args:
            name: not yet used for a buffer of this group.
            shape: the same on all ranks; may hold zeros.
            dtype: any but the quantized ones.

        Raises:
            SyncError: the ranks disagree, the name is taken, there is too little memory, the group is closed,
                or its process group was destroyed.
            SyncTimeoutError, SyncMismatchError: some ranks did not make the call, or the group is broken.
        """
        self.check()
        meeting = self._meeting("buffer")
        deadline = Deadline(self._timeout, watch=self.check, gone=partial(ops._gone, self.name))
        with meeting.turn("buffer", self.name, deadline):
            return self._make_buffer(meeting, name, shape, dtype, deadline)

    def _make_buffer(
        self, meeting: Rendezvous, name: str, shape: Sequence[int], dtype: torch.dtype, deadline: Deadline
    ) -> SymmetricBuffer:
        try:
            if not isinstance(name, str) or not name:
                raise SyncError(f"name must be a string that is not empty, not {name!r}")
            size = checked_shape(shape)
            if not isinstance(dtype, torch.dtype) or dtype in _QUANTIZED:
                raise SyncError(f"dtype must be a torch.dtype and not a quantized one, not {dtype!r}")
            if self.device.type == "cuda" and (capturing := cuda_memory.complain_of_capture("a buffer")):
                raise SyncError(capturing)
            if (self.name, name) in buffer_meta:
                raise SyncError(f"group '{self.name}' already has a buffer '{name}': choose another name")
        except SyncError as error:
            meeting.refuse(str(error), "buffer", self.name, deadline)
            raise SyncError(f"gpusync: buffer '{name}': {error}") from None
        stride = -(-max(size.numel() * dtype.itemsize, 1) // _ALIGNMENT) * _ALIGNMENT
        arguments = {"call": "buffer", "buffer": name, "shape": list(size), "dtype": str(dtype)}
        meeting.agree(arguments, "buffer", self.name, deadline)
        # Behind its last round all ranks have mapped it: a peer may put before I have told the library.
        if self.device.type == "cuda":
            part, addresses, keep_alive = self._peer_memory.allocate(
                meeting, stride, self.device, "buffer", self.name, deadline
            )
            self._keep_alive.append(keep_alive)
            ops._cuda_buffer(part, self.name, name, list(size), dtype, addresses)
        else:
            shared = memory.share(meeting, stride * self.world_size, "buffer", self.name, deadline)
            ops._cpu_buffer(shared, self.name, name, list(size), dtype, stride)
        buffer_meta[self.name, name] = (size, dtype)
        return SymmetricBuffer(self, name, size, dtype)

    def _meeting(self, call: str) -> Rendezvous:
        """Where the ranks meet for a set-up call."""
        meeting = self._find_meeting()
        if meeting is None:
            raise SyncError(
                f"gpusync: the process group of group '{self.name}' was destroyed, and the ranks meet through it in "
                f"{call}(): call it before torch.distributed.destroy_process_group()"
            )
        return meeting

    @property
    def is_broken(self) -> bool:
        """Has any rank given up on a wait? Then every op of the group fails at once. Never blocks."""
        return bool(self._ask(ops._failure)[0])

    def check(self) -> None:
        """Raise the error, with all its fields, that broke the group; return if none has. Never blocks."""
        error = self._ask(errors.failure)
        if error is not None:
            raise error

    def reset(self) -> None:
        """Make the group usable again, in place. Collective.

        Name, memory and addresses stay: compiled functions and captured CUDA graphs go on working, without compiling
        or capturing anew. Counters start from zero: signals that were not waited for are gone, ``push_epoch`` is 0,
        the flight record is empty. Buffers keep what they hold. A group that is whole can be reset, too. Every rank
        calls it once, with none of its own calls under way in another thread; on a GPU it waits for all that the
        rank has launched there. Graphs must not be replayed meanwhile.

        A rank that is still in a call, or makes one late, gets its error there first, and then comes here.

        Raises:
            SyncTimeoutError: some ranks did not come within the timeout, or within 60 s if that is longer; at once if
                they have ended or closed the group. The group stays as it was, or is broken if the ranks had met.
            SyncError: it was called inside compiled code or while a CUDA graph is captured, the ranks make different
                set-up calls, the group is closed, or its process group was destroyed.
        """
        reset.reset(self)

    def device_handle(self, channel: int = 0) -> bytes:
        """One channel of the group as a plain struct for CUDA kernels of your own: ``gpusync::DeviceHandle``.

        Not collective. It is a copy: ``DeviceHandle::from_bytes`` of ``gpusync/device_handle.h`` (in
        :func:`torch_gpusync.include_path`) takes it, and the kernel gets it by value. Memory and counters behind it
        are the group's: it is the same at every call, holds in captured graphs, outlives :meth:`reset`, and is valid
        as long as the group is open. Wait for your kernels before :meth:`close`, which knows of the ops alone.

        A kernel's waits are bounded by the timeout and break the group as an op's do; :meth:`check` then raises the
        error, whose ``op`` is ``"user_kernel"``. What a kernel's calls order, and how kernels and ops of one channel
        have to be ordered, is said in the header.

        Args:
            channel: which channel; give kernels one of their own unless they are to meet its ops.

        Raises:
            SyncError: the group is on the CPU or closed, or has no such channel.
        """
        words = self._ask_device("device_handle", ops._cuda_handle, channel)
        return struct.pack(f"={len(words)}q", *words)

    def dump(self) -> str:
        """The flight record: who the ranks are and what each called last, as text."""
        return str(self._ask(ops._dump))

    def close(self) -> None:
        """Give up the group in this process; its ops fail from now on. Idempotent, and not collective.

        It waits for what this rank has launched, but for graphs: a peer that still waits for this rank is told before
        replays under way have ended, and may give them up, so let those of all ranks end first. With a process for
        each rank, do not close a group while anything is being captured in one: giving mapped memory back ends that
        capture. A CUDA graph that is replayed later does what it does in a broken group: its ops return at once and
        their outputs are NaN. It keeps the memory that this takes (the staging memory is part of it) until it is
        destroyed, too.

        To make the group again under the same name, pass ``name=``: default names count up. Compiled functions know a
        group by its name and reach the new one; captured CUDA graphs do not, nor does this object, whose rank and world
        size were the old one's.
        """
        self._finalizer()
        # In the methods' place, which costs them nothing and which a compiled function that holds this object notices:
        # rank and world size are the old group's, and must not be taken to a new one that has the name.
        self._call = self._ask = partial(_refuse, self.name)  # type: ignore[method-assign]
        self._keep_alive.clear()  # only now: the library has waited for the kernels that use it, and no later one does

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncGroup":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a SyncGroup ('{self.name}') cannot be pickled: it is this process's view of shared memory. "
            "Save the model's state_dict instead, and make the group anew where it is loaded."
        )

    def __repr__(self) -> str:
        return (
            f"SyncGroup({self.name!r}, rank={self.rank}, world_size={self.world_size}, device={self.device})"
        )


def _refuse(name: str, *arguments: object) -> NoReturn:
    """What a call of a closed SyncGroup does."""
    if name in _open_names:
        raise SyncError(
            f"gpusync: this SyncGroup was closed, and a new one has its name '{name}': use that one"
        )
    raise SyncError(
        f"gpusync: this process has no group '{name}': it was never made here, or it was closed (keep its SyncGroup "
        "alive)"
    )


def _close(name: str, pid: int) -> None:
    if os.getpid() != pid:
        return
    ops._close(name)
    _open_names.discard(name)
    world_sizes.pop(name, None)
    norm_limits.pop(name, None)
    for key in [key for key in buffer_meta if key[0] == name]:
        del buffer_meta[key]
