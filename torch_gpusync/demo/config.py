"""What is trained, and how: the one object that the parent and every rank share."""

from __future__ import annotations

from dataclasses import dataclass

VOCABULARY = 256  # one entry per byte value
TOLERANCE = 1e-4  # greatest absolute difference from the unsplit model that passes, in fp32


class DemoError(Exception):
    """The demo cannot run, or has failed; the text says why, in one line."""


@dataclass(frozen=True)
class Config:
    """Sizes and settings of a run. Two runs with equal settings and text compute the same thing."""

    ranks: int = 2
    steps: int = 40
    device: str = "cpu"
    layers: int = 2
    heads: int = 12  # the model can be split over any number of ranks that divides it
    head_size: int = 16
    context: int = 64  # bytes a sequence
    batch: int = 8  # sequences a step
    # Moderate, for the comparison's sake: two runs that differ by rounding drift apart as they train, the
    # faster the more they learn from each step.
    learning_rate: float = 0.02
    momentum: float = 0.9
    seed: int = 2024
    timeout_s: float = 600.0  # a run that makes no progress for so long has failed; the first step compiles

    @property
    def step_timeout_s(self) -> float:
        """The same once every rank has compiled: nothing takes long any more."""
        return min(self.timeout_s, 120.0)

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.heads % self.ranks:
            fitting = [str(n) for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise DemoError(
                f"the model's {self.heads} heads cannot be divided over {self.ranks} ranks; "
                f"possible are {', '.join(fitting)}"
            )
        if self.steps < 1:
            raise DemoError(f"at least one step is needed, not {self.steps}")
        if not self.timeout_s > 0:
            raise DemoError(f"the timeout is a positive number of seconds, not {self.timeout_s:g}")
