"""user_kernel.cu as functions of tensors: the other half of the example in docs/kernels.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_gpusync import SymmetricBuffer, SyncGroup


def bind(path: str) -> ctypes.CDLL:
    """The compiled kernels' entries. They return nothing or what is wrong."""
    kernels = ctypes.CDLL(path)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    handle, tensors, stream = [pointer, size], [pointer] * 3, [pointer]
    kernels.launch_sum_rows.argtypes = [*handle, pointer, *tensors, number, number, number, *stream]
    kernels.launch_hand_on.argtypes = [*handle, pointer, number, number, *stream]
    for entry in (kernels.load, kernels.launch_sum_rows, kernels.launch_hand_on):
        entry.restype = ctypes.c_char_p
    return kernels


def check(error: bytes | None) -> None:
    if error is not None:
        raise RuntimeError(error.decode())


class SumRows:
    """The sum over all ranks of x + bias, for contiguous float32 tensors on the group's device.

    `rows`: a buffer of (2, world_size, capacity) float32.
    """

    def __init__(
        self, kernels: ctypes.CDLL, sync: SyncGroup, rows: SymmetricBuffer, channel: int = 0
    ) -> None:
        self.kernels = kernels
        self.capacity = rows.shape[2]
        self.handle = sync.device_handle(channel)
        self.parts = (ctypes.c_void_p * sync.world_size)(*rows.device_pointers())

    def __call__(self, x: Tensor, bias: Tensor, blocks: int = 0) -> Tensor:
        assert x.numel() <= self.capacity and x.is_contiguous() and bias.is_contiguous()
        out = torch.empty_like(x)
        tensors = (x.data_ptr(), bias.data_ptr(), out.data_ptr())
        stream = torch.cuda.current_stream().cuda_stream
        check(
            self.kernels.launch_sum_rows(
                self.handle, len(self.handle), self.parts, *tensors, x.numel(), self.capacity, blocks, stream
            )
        )
        return out


def as_op(launch: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """`launch(x, bias)` as an op for torch.compile: op(sync.token, x, bias)."""

    @torch.library.custom_op("mine::sum_rows", mutates_args=("token",))
    def sum_rows(token: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return launch(x, bias)

    @sum_rows.register_fake
    def _(token: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return torch.empty_like(x)

    return sum_rows


class HandOn:
    """Waits for rank `src`'s signal, adds one to the number in my part of `message`, and hands it on to rank `dst`."""

    def __init__(
        self, kernels: ctypes.CDLL, sync: SyncGroup, message: SymmetricBuffer, channel: int = 0
    ) -> None:
        self.kernels = kernels
        self.handle = sync.device_handle(channel)
        self.parts = (ctypes.c_void_p * sync.world_size)(*message.device_pointers())

    def __call__(self, src: int, dst: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        check(self.kernels.launch_hand_on(self.handle, len(self.handle), self.parts, src, dst, stream))
