"""The hosts of a run: their seeds, their groups and their fleets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from esper.kasmina.slot import Isolation
from esper.leyline import BadValueError, derive_seed
from esper.leyline.numbers import require_whole
from esper.tolaria import HostFleet, Task
from esper.tolaria.batches import Batches
from esper.tolaria.compiling import compile_kernels

Purpose = Literal["training", "tuning", "evaluation", "final", "recording"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_RANGE = 2**60  # number of host seeds per purpose; eight ranges fit into an int64


def host_seed(purpose: Purpose, rng_seed: int, *position: int) -> int:
    """The seed of the host at a position (round, group …), from the range of its purpose."""
    return PURPOSES.index(purpose) * _RANGE + derive_seed(purpose, rng_seed, *position) % _RANGE


@dataclass(frozen=True)
class Groups:
    """`count` groups of adjacent envs: `members` that a policy controls, then a control that never grows.

    Without `controls` there is none, and each env is its own control.
    """

    count: int
    members: int
    controls: bool = True

    @classmethod
    def of(cls, hosts: int, members: int) -> "Groups":
        """Groups of `hosts` hosts in all, controls included."""
        require_whole("hosts", hosts, members + 1, remark=f"; a group is {members} hosts and their control")
        if hosts % (members + 1):
            raise BadValueError(
                f"{hosts} hosts cannot be divided into groups of {members} plus a control; use a multiple of "
                f"{members + 1}"
            )
        return cls(hosts // (members + 1), members)

    @property
    def hosts(self) -> int:
        """Number of envs in the fleet."""
        return self.count * self._size

    @property
    def grown(self) -> int:
        """Number of envs that a policy controls."""
        return self.count * self.members

    def spread(self, seeds: Sequence[int]) -> list[int]:
        """One seed per env of the fleet from one seed per group."""
        if len(seeds) != self.count:
            raise BadValueError(f"got {len(seeds)} seeds for {self.count} groups; pass one per group")
        return [seed for seed in seeds for _ in range(self._size)]

    @property
    def envs(self) -> list[int]:
        """Numbers in the fleet of the envs that a policy controls."""
        return [env for env in range(self.hosts) if env % self._size < self.members]

    def grown_of(self, values: Tensor) -> Tensor:
        """(hosts, …) → (grown, …)."""
        return self._grouped(values)[:, : self.members].flatten(0, 1)

    def control_of(self, values: Tensor) -> Tensor:
        """(hosts, …) → (grown, …): for every grown env the value of its control, or its own where there is none."""
        if not self.controls:
            return values
        return self._grouped(values)[:, self.members].repeat_interleave(self.members, 0)

    def _grouped(self, values: Tensor) -> Tensor:
        return values.view(self.count, self._size, *values.shape[1:])

    @property
    def _size(self) -> int:
        return self.members + int(self.controls)


def check_device(device: torch.device | str) -> None:
    """Raise for a device that this machine does not have; torch would fail later and not name it."""
    available = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
    try:
        wanted = torch.device(device)
        name = wanted.type if wanted.type == "cpu" else f"{wanted.type}:{wanted.index or 0}"
    except RuntimeError:
        name = ""
    if name not in available:
        raise BadValueError(f"device {str(device)!r} is not here; this machine has {', '.join(available)}")


class MakeFleet(Protocol):
    """Makes the hosts of a task: `growth_fleet`, or what shares a fleet with other learners."""

    def __call__(
        self,
        task: Task,
        hosts: int,
        device: torch.device | str = ...,
        seeds: Sequence[int] | None = ...,
        *,
        batches: Batches | None = ...,
        data_dir: Path | str | None = ...,
        isolation: Isolation = ...,
    ) -> HostFleet: ...


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
    """Hosts of a task. On CUDA activations and products are bfloat16, weights and statistics float32."""
    check_device(device)
    compute = torch.bfloat16 if torch.device(device).type == "cuda" else None
    fleet = HostFleet(
        task, hosts, device, seeds, batches=batches, data_dir=data_dir, compute=compute, isolation=isolation
    )
    compile_kernels(fleet)
    return fleet
