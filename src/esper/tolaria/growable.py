"""What can be grown: a fleet of hosts, or the single model of a user. Observers, masks and policies work on both."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from esper.kasmina import LifecycleConfig, SeedState
from esper.kasmina.compare import RowScore
from esper.leyline import SlotConfig, SlotSpec, StageChange


class SeedOwner(Protocol):
    """What `Lifecycles` needs of the owner of the weights. Envs are numbered from 0."""

    @property
    def n(self) -> int:
        """Number of envs."""

    @property
    def slots(self) -> Mapping[str, SlotSpec]:
        """The slots of every env by their ids."""

    @property
    def budget(self) -> int:
        """Parameters that the seeds of one env may have."""

    @property
    def config(self) -> LifecycleConfig:
        """Times and thresholds of the lifecycle."""

    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        """Build the seed that `state` describes."""

    def uproot(self, env: int, slot_id: str) -> None:
        """Remove the weights of a slot's seed, if it has one. The caller changes the state."""

    def restructured(self, env: int, *, eased: bool) -> None:
        """Note that states of an env have changed; `eased`: a seed acts less than before, or no longer."""


class Growable(Protocol):
    """`n` envs with the same slots, and the verbs that grow them."""

    @property
    def n(self) -> int:
        """Number of envs."""

    @property
    def device(self) -> torch.device:
        """Where measurements lie."""

    @property
    def slots(self) -> Mapping[str, SlotSpec]:
        """The slots of every env by their ids."""

    @property
    def slot_config(self) -> SlotConfig:
        """The same slots, with the blueprints that they offer."""

    @property
    def states(self) -> list[dict[str, SeedState]]:
        """States of the seeds by env and slot."""

    @property
    def config(self) -> LifecycleConfig:
        """Times and thresholds of the lifecycle."""

    @property
    def budget(self) -> int:
        """Parameters that the seeds of one env may have."""

    def host_size(self, env: int) -> int:
        """Parameters of an env's host without seeds."""

    @property
    def random_guess_loss(self) -> float:
        """The unit of losses."""

    @property
    def progress(self) -> float:
        """Share of the episode that is done, 0 to 1."""

    @property
    def losses(self) -> Tensor:
        """Training losses of the last step (n,); NaN where they are unknown."""

    def points(self, rows: Sequence[RowScore]) -> Tensor:
        """Scores of rows (rows,) in points, on the device."""

    def grown_parameters(self, env: int) -> int:
        """Parameters of all seeds of one env."""

    def germinate(
        self, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot of one env."""

    def advance(self, env: int, slot_id: str) -> StageChange:
        """One transition forward."""

    def fossilize(self, env: int, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""

    def set_alpha_target(
        self, env: int, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear"
    ) -> StageChange:
        """Ramp the alpha of a HOLDING seed to `target` in `steps`."""

    def prune(self, env: int, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Remove a seed, at once or after a ramp of `steps`."""

    def tick(self) -> list[tuple[int, StageChange]]:
        """End a step for every env; returns the automatic changes of stage with their envs."""
