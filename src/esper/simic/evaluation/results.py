"""Results of one policy on unseen hosts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper.leyline import OTHER_RHOS, gain_over, objective, rent
from esper.tolaria import Task


class Fossil(NamedTuple):
    """A committed seed."""

    slot_id: str
    blueprint: str
    style: str = "add"
    alpha: float = 1.0

    @property
    def name(self) -> str:
        """`slot/blueprint`."""
        return f"{self.slot_id}/{self.blueprint}"


@dataclass(frozen=True)
class Result:
    """One policy on all hosts; lists over hosts."""

    objective: list[float]
    accuracy: list[float]  # of the hardened hosts, percent; of tasks by loss, percent below the loss of guessing
    control_accuracy: list[float]
    added_params: list[int]
    fossils: list[list[Fossil]]
    work: dict[str, list[float]] = field(default_factory=dict)  # by kind of pass, in units of the plain host's training
    objective_at: dict[str, list[float]] = field(default_factory=dict)  # at another ρ, by its value
    host_params: list[int] = field(default_factory=list)  # of the hosts without seeds

    @classmethod
    def scored(
        cls,
        task: Task,
        seeds: Sequence[int],
        accuracy: Tensor | Sequence[float],
        control: Tensor | Sequence[float],
        added: Tensor | Sequence[float],
        fossils: list[list[Fossil]],
        work: dict[str, list[float]] | None = None,
    ) -> "Result":
        """Score the hosts of these seeds by accuracy, their control's and their added parameters, (hosts,) each."""
        percent, baseline, grown = (
            torch.as_tensor(values, dtype=torch.float64, device="cpu") for values in (accuracy, control, added)
        )
        host_params = [task.size_of(seed) for seed in seeds]
        gain, sizes = gain_over(baseline, percent, by_loss=task.by_loss), torch.tensor(host_params).double()
        return cls(
            objective(gain, grown, sizes).tolist(),
            percent.tolist(),
            baseline.tolist(),
            [int(count) for count in grown.tolist()],
            fossils,
            work or {},
            {f"{rho:g}": objective(gain, grown, sizes, rho).tolist() for rho in OTHER_RHOS},
            host_params,
        )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Result":
        """A result from its fields, as JSON stores them."""
        return cls(**{**values, "fossils": [[Fossil(*fossil) for fossil in host] for host in values["fossils"]]})

    @property
    def commits(self) -> list[list[str]]:
        """`slot/blueprint` of every fossil."""
        return [[fossil.name for fossil in fossils] for fossils in self.fossils]

    def sizes(self, task: Task) -> list[int]:
        """Parameters of the hosts without seeds; the task's, if nobody counted them host by host."""
        return self.host_params or [task.host_parameters] * len(self.objective)

    def gains(self, task: Task) -> list[float]:
        """Points over the control: the objective before rent."""
        hosts = zip(self.objective, self.added_params, self.sizes(task), strict=True)
        return [value + rent(float(added), size) for value, added, size in hosts]

    @property
    def cost(self) -> list[float]:
        """Work of the whole episode; empty if it was not counted."""
        return [sum(parts) for parts in zip(*self.work.values(), strict=True)]

    def part(self, hosts: slice) -> "Result":
        """The result on some of the hosts."""
        return Result(*(_cut(values, hosts) for values in vars(self).values()))

    def by_host(self) -> list["Result"]:
        """One result per host."""
        return [self.part(slice(host, host + 1)) for host in range(len(self.objective))]

    @classmethod
    def joined(cls, parts: Sequence["Result"]) -> "Result":
        """The hosts of all parts, in their order."""
        return cls(*(_join(list(values)) for values in zip(*(vars(part).values() for part in parts), strict=True)))


def overall_mean(results: Sequence[Result], name: str) -> float:
    """Mean of a list of `Result` over hosts and training seeds."""
    return fmean(value for result in results for value in getattr(result, name))


def _cut(values: Any, hosts: slice) -> Any:  # Any: a list, or lists by name
    return {name: each[hosts] for name, each in values.items()} if isinstance(values, dict) else values[hosts]


def _join(parts: list[Any]) -> Any:  # Any: as above
    if isinstance(parts[0], dict):
        return {name: _join([part[name] for part in parts]) for name in parts[0]}
    return [value for part in parts for value in part]
