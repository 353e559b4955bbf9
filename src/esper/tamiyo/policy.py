"""What every controller is: it looks at a fleet and decides for all envs at once."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from esper.tamiyo.heads import ActionTable, Masks
from esper.tamiyo.signals import TrainingSignals

PolicyMemory = Any  # each policy's own: what it carries from step to step


class View(NamedTuple):
    """What a policy sees before it acts."""

    signals: TrainingSignals
    features: Tensor
    """(N, size): the signals as a learned policy sees them, not yet normalised"""
    masks: Masks
    step: int
    """0 … T−1"""


@runtime_checkable
class Policy(Protocol):
    """A controller of growth."""

    @property
    def table(self) -> ActionTable:
        """The heads of its actions."""
        ...

    def initial_memory(self, seeds: list[int]) -> PolicyMemory:
        """At the start of an episode; one host seed per env."""
        ...

    def act(self, view: View, memory: PolicyMemory, uniform: Tensor) -> tuple[Tensor, PolicyMemory]:
        """Legal actions (N, heads) for all envs. `uniform` (N, heads) is all the chance that there is."""
        ...
