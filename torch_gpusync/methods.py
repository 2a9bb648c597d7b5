"""The ops as methods: what :class:`SyncGroup` and :class:`torch_gpusync.nn.SyncModule` have in common."""

from typing import Any

import torch
from torch.compiler import is_compiling

from torch_gpusync import errors
from torch_gpusync.collectives import Collectives
from torch_gpusync.errors import SyncError
from torch_gpusync.ops import ops

# Looked up once: through torch.ops it would be a tenth of a call.
_barrier = ops.barrier.default
_signal = ops.signal.default
_wait_signal = ops.wait_signal.default
_pull_start = ops.pull_start.default
_pull_end = ops.pull_end.default
_push_epoch = ops.push_epoch.default
_push_exit = ops.push_exit.default

_EXPORT = (
    "gpusync: torch.export lets a model mutate its own buffers only, and a SyncGroup's token is none: give the model a "
    "torch_gpusync.nn.SyncModule(sync) and call the methods of that"
)


class SyncMethods(Collectives):
    """The ops of a group, for a class that says on which token and group they work."""

    name: str
    rank: int
    world_size: int
    token: torch.Tensor
    _exportable = False

    def _call(self, op: Any, *arguments: Any) -> Any:
        """Run an op. In eager code its errors get their class; compiled code raises them as RuntimeError."""
        if is_compiling():
            # Not is_exporting(), which in torch 2.11 is true of whatever Dynamo traces.
            if torch.compiler._is_exporting_flag and not self._exportable:
                raise SyncError(_EXPORT)
            return op(self.token, self.name, *arguments)
        try:
            return op(self.token, self.name, *arguments)
        except RuntimeError as error:
            raise errors.translate(error, self.name) from None

    def _ask(self, op: Any, *arguments: Any) -> Any:
        """Run an op that takes no token."""
        try:
            return op(self.name, *arguments)
        except RuntimeError as error:
            raise errors.translate(error, self.name) from None

    def _ask_device(self, call: str, op: Any, *arguments: Any) -> Any:
        """Run an op that only groups on GPUs have, for the method ``call``."""
        if self.token.device.type != "cuda":
            raise SyncError(
                f"gpusync: {call}() is for CUDA kernels, and group '{self.name}' is on the CPU: make a "
                "SyncGroup(device='cuda')"
            )
        return self._ask(op, *arguments)

    def barrier(self, channel: int = 0, fence: bool = True) -> None:
        """Wait until every rank has called it as often as I have.

        With ``fence`` all ranks' earlier writes are visible to all ranks after it. Without, nobody passes
        before all have arrived, but data is ordered only as far as a kernel boundary orders it (on the CPU:
        fully).

        Raises:
            SyncTimeoutError, SyncMismatchError: see the classes.
        """
        if channel == 0 and fence:
            self._call(_barrier)  # the op's own defaults: its numbers are a fifth of a call
        else:
            self._call(_barrier, channel, fence)

    def signal(self, dst: int, channel: int = 0) -> None:
        """Add one to the counter that rank ``dst`` waits on; my earlier writes go with it (release).

        Never blocks.
        """
        self._call(_signal, dst, channel)

    def wait_signal(self, src: int, channel: int = 0) -> None:
        """Consume one signal of rank ``src``, waiting for it; what it wrote before is then visible (acquire).

        Raises:
            SyncTimeoutError: it did not come; nothing was consumed.
        """
        self._call(_wait_signal, src, channel)

    def pull_start(self, channel: int = 0) -> None:
        """First half of a pull: wait until every rank's input is ready to be read. A barrier of its own.

        The arrival is relaxed: it speaks for writes of earlier kernels (on the CPU: of all earlier calls).
        """
        self._call(_pull_start, channel)

    def pull_end(self, channel: int = 0, fence: bool = False) -> None:
        """Second half of a pull: wait until every rank has finished reading. A barrier of its own.

        It protects reuse of the inputs; with ``fence`` it also makes what ranks wrote to one another visible.
        """
        self._call(_pull_end, channel, fence)

    def push_epoch(self, channel: int = 0) -> torch.Tensor:
        """The half, 0 or 1, of the double buffer that the push under way uses: a 0-d int32 tensor."""
        return self._call(_push_epoch, channel)  # type: ignore[no-any-return]

    def push_exit(self, channel: int = 0) -> None:
        """End the push under way: the next one uses the other half. Two halves suffice when in every push
        every rank receives something from every rank."""
        self._call(_push_exit, channel)
