"""The ops as methods: what :class:`SyncGroup` and :class:`torch_gpusync.nn.SyncModule` have in common."""

from typing import Any

import torch
from torch.compiler import is_compiling, is_exporting

from torch_gpusync import errors
from torch_gpusync.errors import SyncError
from torch_gpusync.gradients import wants_gradient
from torch_gpusync.ops import ops

# Looked up once: through torch.ops it would be a tenth of a call.
_barrier = ops.barrier.default
_signal = ops.signal.default
_wait_signal = ops.wait_signal.default
_pull_start = ops.pull_start.default
_pull_end = ops.pull_end.default
_push_epoch = ops.push_epoch.default
_push_exit = ops.push_exit.default
_all_reduce = ops.all_reduce.default
_all_reduce_without_grad = ops._all_reduce.default

_EXPORT = (
    "gpusync: torch.export lets a model mutate its own buffers only, and a SyncGroup's token is none: give the model a "
    "torch_gpusync.nn.SyncModule(sync) and call the methods of that"
)


class SyncMethods:
    """The ops of a group, for a class that says on which token and group they work."""

    name: str
    rank: int
    world_size: int
    token: torch.Tensor
    _exportable = False

    def _call(self, op: Any, *arguments: Any) -> Any:
        """Run an op. In eager code its errors get their class; compiled code raises them as RuntimeError."""
        if is_compiling():
            if is_exporting() and not self._exportable:
                raise SyncError(_EXPORT)
            return op(self.token, self.name, *arguments)
        try:
            return op(self.token, self.name, *arguments)
        except RuntimeError as error:
            raise errors.translate(error, self.name) from None

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

    def all_reduce(self, x: torch.Tensor, reduce_op: str = "sum", algo: str = "auto") -> torch.Tensor:
        """Reduce ``x`` over the ranks, out of place; every rank gets the same bits.

        Args:
            x: float32, float64, float16, bfloat16, int32 or int64, any shape and strides, the same on all
                ranks.
            reduce_op: ``sum``, ``max``, ``min`` or, for floating point, ``avg`` (the sum times 1/world_size),
                in rank order; the 16-bit types are reduced in float32 and rounded once.
            algo: ``pull_one_shot`` (stage, meet, read all), ``pull_two_shot`` (each rank reduces its share),
                ``push_one_shot`` (write to all), or ``auto`` by size. All give the same bits.

        Returns:
            A contiguous tensor of x's shape and dtype. Gradient (sum and avg): all_reduce of the gradients
            with the same reduce_op.

        Raises:
            SyncError: unknown dtype, reduce_op or algo. SyncTimeoutError, SyncMismatchError: see the classes.
        """
        needs_grad = is_compiling() or wants_gradient(x)
        return self._call(  # type: ignore[no-any-return]
            _all_reduce if needs_grad else _all_reduce_without_grad, x, reduce_op, algo
        )
