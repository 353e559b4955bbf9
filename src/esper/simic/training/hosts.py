"""The hosts of a run: their seeds, their groups and their fleets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, UnknownNameError, derive_seed
from esper.leyline.numbers import require_whole
from esper.tolaria import HostFleet, Task
from esper.tolaria.batches import Batches

Purpose = Literal["training", "tuning", "evaluation", "final"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_RANGE = 2**60
"""Each purpose has this many seeds of its own; four of them fit below 2**62."""


def host_seed(purpose: Purpose, rng_seed: int, *place: int) -> int:
    """The seed of the host at a place (round, group …), from the range of its purpose."""
    if purpose not in PURPOSES:
        raise UnknownNameError("purpose", purpose, PURPOSES)
    return PURPOSES.index(purpose) * _RANGE + derive_seed(purpose, rng_seed, *place) % _RANGE


def purpose_of(seed: int) -> Purpose:
    """The purpose whose range a host seed lies in."""
    return PURPOSES[seed // _RANGE]


@dataclass(frozen=True)
class Groups:
    """`count` groups of `members` envs that a policy controls, and one control each that never grows.

    In the fleet a group's envs lie side by side, the control last.
    """

    count: int
    members: int

    def __post_init__(self) -> None:
        require_whole("groups", self.count, 1)
        require_whole("members", self.members, 1)

    @classmethod
    def of(cls, hosts: int, members: int) -> "Groups":
        """So many hosts in all, controls included."""
        require_whole("hosts", hosts, members + 1, remark=f"; a group is {members} hosts and their control")
        if hosts % (members + 1):
            raise BadValueError(f"{hosts} hosts are no whole number of groups of {members} and a control")
        return cls(hosts // (members + 1), members)

    @property
    def hosts(self) -> int:
        """Envs in the fleet."""
        return self.count * (self.members + 1)

    @property
    def grown(self) -> int:
        """Envs that a policy controls."""
        return self.count * self.members

    def spread(self, seeds: Sequence[int]) -> list[int]:
        """One seed per group → one per env of the fleet."""
        if len(seeds) != self.count:
            raise BadValueError(f"{len(seeds)} seeds for {self.count} groups: each needs one")
        return [seed for seed in seeds for _ in range(self.members + 1)]

    @property
    def envs(self) -> list[int]:
        """The fleet's numbers of the envs that a policy controls."""
        width = self.members + 1
        return [group * width + member for group in range(self.count) for member in range(self.members)]

    def grown_of(self, values: Tensor) -> Tensor:
        """(hosts, …) → (grown, …)."""
        return self._grouped(values)[:, : self.members].flatten(0, 1)

    def control_of(self, values: Tensor) -> Tensor:
        """(hosts, …) → (grown, …): for every grown env the value of its control."""
        return self._grouped(values)[:, self.members].repeat_interleave(self.members, 0)

    def _grouped(self, values: Tensor) -> Tensor:
        return values.view(self.count, self.members + 1, *values.shape[1:])


def check_device(device: torch.device | str) -> None:
    """Raise for a device that this machine does not have: torch says so late, and not by name."""
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    try:
        wanted = torch.device(device)
    except RuntimeError:  # no name of a device at all
        wanted = None
    if wanted is None or (wanted.type != "cpu" and (wanted.type != "cuda" or (wanted.index or 0) >= len(gpus))):
        raise BadValueError(f"device {str(device)!r} is not here; this machine has {', '.join(['cpu', *gpus])}")


def growth_fleet(
    task: Task,
    hosts: int,
    device: torch.device | str = "cpu",
    seeds: Sequence[int] | None = None,
    *,
    batches: Batches | None = None,
    data_dir: Path | str | None = None,
    isolation: Isolation = "shadow",
) -> HostFleet:
    """Hosts of a task; on CUDA their streams and products are in bfloat16, weights and statistics never."""
    check_device(device)
    compute = torch.bfloat16 if torch.device(device).type == "cuda" else None
    return HostFleet(
        task, hosts, device, seeds, batches=batches, data_dir=data_dir, compute=compute, isolation=isolation
    )
