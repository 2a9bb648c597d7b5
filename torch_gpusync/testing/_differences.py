"""Differences in words: between two tensors, and between two logs of ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_gpusync.testing._log import ExecutedOp

_SHOWN = 4  # ops on either side of the first that differs


def distance(expected: Tensor, actual: Tensor | None, tolerance: float) -> str:
    """How `actual` differs, as text; empty if it does not."""
    if actual is None:
        return "it is missing"
    if (expected.shape, expected.dtype) != (actual.shape, actual.dtype):
        return f"{actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if expected.numel() == 0:
        return ""
    a, b = expected, actual
    if a.is_quantized or not (a.is_floating_point() or a.is_complex()):
        wrong = a != b
    else:
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        largest = a[torch.isfinite(a)].abs().max() if torch.isfinite(a).any() else torch.zeros(())
        wrong = ~torch.isclose(b, a, rtol=0.0, atol=tolerance * float(largest), equal_nan=True)
    count = int(wrong.sum())
    if count == 0:
        return ""
    index = tuple(wrong.nonzero()[0].tolist())
    place = f"element {list(index)}" if index else "the value"
    return f"{place} is {actual[index].item()} instead of {expected[index].item()} ({count} of {a.numel()} are wrong)"


def compare_logs(expected: Sequence[ExecutedOp], actual: Sequence[ExecutedOp], one: str, other: str) -> str:
    """The first difference between two logs in words; empty if they hold the same calls in the same order."""
    if [x.call for x in expected] == [x.call for x in actual]:
        return ""
    names = [[str(x) for x in log] for log in (expected, actual)]
    missing, added = Counter(names[0]) - Counter(names[1]), Counter(names[1]) - Counter(names[0])
    if missing or added:
        lines = [f"{one} ran {len(expected)} ops, {other} {len(actual)}"]
    else:
        lines = [f"{other} ran the same {len(actual)} ops as {one} in another order"]
    lines += [f"  missing: {count} x {name}" for name, count in missing.items()]
    lines += [f"  added: {count} x {name}" for name, count in added.items()]
    first = next(
        (k for k, (x, y) in enumerate(zip(expected, actual, strict=False)) if x.call != y.call),
        min(len(expected), len(actual)),
    )
    ran = [log[first] if first < len(log) else "nothing more" for log in names]
    lines.append(f"  op {first + 1}: {one} ran {ran[0]}, {other} ran {ran[1]}")
    for who, log in zip((one, other), names, strict=True):
        lines.append(f"  {who}, around it:")
        begin, end = max(0, first - _SHOWN), min(first + _SHOWN + 1, len(log))
        lines += [f"    {k + 1}. {log[k]}" for k in range(begin, end)] or ["    nothing"]
    return "\n".join(lines)
