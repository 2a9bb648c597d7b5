"""What the report is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section, name: where it stands.
        status: ``ok``; ``note``: worth knowing; ``bad``: gpusync cannot work; ``unknown``: the probe failed.
        value: what was found.
        advice: one line that says what to do; empty when there is nothing to do.
    """

    section: str
    name: str
    status: str
    value: str
    advice: str = ""


Probe = Callable[[], Iterator[Finding]]


def one_line(error: BaseException) -> str:
    """An exception as a value of the report."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def human(n: int) -> str:
    """Bytes in GiB or MiB."""
    return f"{n / 2**30:.1f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB"
