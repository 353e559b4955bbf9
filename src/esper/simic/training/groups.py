"""Groups of envs that begin alike: some grow, one is the control."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole


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
