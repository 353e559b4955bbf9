"""What a policy came to on hosts that it had not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Fossil(NamedTuple):
    """A seed that was committed."""

    slot_id: str
    blueprint: str
    style: str = "add"
    alpha: float = 1.0

    @property
    def name(self) -> str:
        """`slot/blueprint`."""
        return f"{self.slot_id}/{self.blueprint}"

    @classmethod
    def named(cls, name: str) -> "Fossil":
        """The fossil of a name, blended in by addition in full."""
        slot_id, blueprint = name.split("/")
        return cls(slot_id, blueprint)


@dataclass(frozen=True)
class Result:
    """One policy on all hosts, lists over hosts."""

    objective: list[float]
    accuracy: list[float]
    """Of the hardened hosts, percent"""
    control_accuracy: list[float]
    added_params: list[int]
    fossils: list[list[Fossil]]
    work: dict[str, list[float]] = field(default_factory=dict)
    """By kind of pass, in units of the plain host's own training"""
    objective_at: dict[str, list[float]] = field(default_factory=dict)
    """Scored with another ρ, by its value"""

    @property
    def commits(self) -> list[list[str]]:
        """`slot/blueprint` of every fossil."""
        return [[fossil.name for fossil in found] for found in self.fossils]

    @property
    def gain(self) -> list[float]:
        """Points over the control."""
        return [mine - other for mine, other in zip(self.accuracy, self.control_accuracy, strict=True)]

    @property
    def cost(self) -> list[float]:
        """Work of the whole episode; empty where it was not counted."""
        return [sum(parts) for parts in zip(*self.work.values(), strict=True)]

    def part(self, hosts: range) -> "Result":
        """Some of the hosts."""
        cut = slice(hosts.start, hosts.stop)
        return Result(
            self.objective[cut],
            self.accuracy[cut],
            self.control_accuracy[cut],
            self.added_params[cut],
            self.fossils[cut],
            {name: values[cut] for name, values in self.work.items()},
            {rho: values[cut] for rho, values in self.objective_at.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence["Result"]) -> "Result":
        """The hosts of all parts, in their order."""
        first = parts[0]
        return cls(
            [value for part in parts for value in part.objective],
            [value for part in parts for value in part.accuracy],
            [value for part in parts for value in part.control_accuracy],
            [value for part in parts for value in part.added_params],
            [value for part in parts for value in part.fossils],
            {name: [value for part in parts for value in part.work[name]] for name in first.work},
            {rho: [value for part in parts for value in part.objective_at[rho]] for rho in first.objective_at},
        )
