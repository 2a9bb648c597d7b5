"""Inputs of the collectives, the results that they must give, and the comparison bit for bit."""

from __future__ import annotations

import torch

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-40,
    -1e-40,
    5.9e-8,
    -6e-8,
    65504.0,
    3.0e38,
    1.0,
]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that -0.0 and NaN are compared too."""
    return x.contiguous().view(_BITS[x.dtype.itemsize])


def input_of(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A rank's `numel` elements, the same wherever they are made. Every pair of special values meets in some element."""
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        x = torch.randint(info.min, info.max, (numel,), dtype=dtype, generator=generator)
        x[::7] = [info.max, info.min, 0, -1][rank % 4]
        return x
    x = (torch.randn(numel, generator=generator, dtype=torch.float64) * 10).to(dtype)
    special = torch.tensor(_SPECIAL, dtype=torch.float64).to(dtype)
    index = torch.arange(numel)
    chosen = special[(index // len(_SPECIAL) ** (rank % 3)) % len(_SPECIAL)]
    return torch.where(index % 2 == 0, x, chosen)


def random_bytes(rank: int, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bit pattern, the same for a given rank wherever it is made."""
    numel = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    data = torch.randint(
        0, 256 if dtype != torch.bool else 2, (numel,), dtype=torch.uint8, generator=generator
    )
    return data.view(dtype).reshape(shape)


def reduce_in_rank_order(inputs: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    """The sum, max or min of one input per rank, taken in rank order; 16-bit types in float32, rounded once."""
    dtype = inputs[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = inputs[0].to(wide)
    for x in inputs[1:]:
        x = x.to(wide)
        if reduce_op == "sum":
            result = result + x
        else:
            better = x > result if reduce_op == "max" else x < result
            result = torch.where(better | (x != x), x, result)
    return result.to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, except that NaN may have any payload, for its sum has no standard one."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(actual), nan)
    wrong = (bits(actual) != bits(expected)) & ~nan.reshape(bits(expected).shape)
    assert not wrong.any(), f"{wrong.sum()} elements, first {wrong.reshape(-1).nonzero()[0].item()}"
