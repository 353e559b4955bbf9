"""What is built in: a seed with its style and strength, as a block of the generated file."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from esper.kasmina.export.modules import Exporter
from esper.kasmina.export.source import LINE_WIDTH, Call, call

ADDED = '''
class Added(nn.Module):
    """h + alpha · seed(h)."""

    def __init__(self, seed: nn.Module, alpha: float) -> None:
        super().__init__()
        self.seed = seed
        self.alpha = alpha

    def forward(self, h: Tensor) -> Tensor:
        return h + self.alpha * self.seed(h)
'''
MULTIPLIED = '''
class Multiplied(nn.Module):
    """h · (1 + alpha · tanh(seed(h)))."""

    def __init__(self, seed: nn.Module, alpha: float) -> None:
        super().__init__()
        self.seed = seed
        self.alpha = alpha

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + self.alpha * torch.tanh(self.seed(h)))
'''
GATED = '''
class Gated(nn.Module):
    """h + alpha · gate(h) · seed(h)."""

    def __init__(self, seed: nn.Module, gate: nn.Module, alpha: float) -> None:
        super().__init__()
        self.seed = seed
        self.gate = gate
        self.alpha = alpha

    def forward(self, h: Tensor) -> Tensor:
        return h + self.alpha * self.gate(h) * self.seed(h)
'''
STYLES = {"add": ("Added", ADDED), "multiply": ("Multiplied", MULTIPLIED), "gate": ("Gated", GATED)}


class Growth(NamedTuple):
    """A seed that stays."""

    slot_id: str
    blueprint: str
    style: str
    strength: float
    """Alpha times the conductance of its place."""
    seed: nn.Module
    gate: nn.Module | None

    @property
    def parts(self) -> dict[str, nn.Module]:
        """Modules by their name in the block."""
        return {"seed": self.seed} | ({} if self.gate is None else {"gate": self.gate})

    @property
    def parameters(self) -> int:
        """Of seed and gate."""
        return sum(parameter.numel() for part in self.parts.values() for parameter in part.parameters())

    @property
    def label(self) -> str:
        """The blueprint's name on one line."""
        return " ".join(self.blueprint.split())

    def construct(self, exporter: Exporter) -> Call:
        """The expression that builds the block."""
        parts = tuple(
            (f"{name}=", exporter.construct(part, f"the {name} in slot {self.slot_id!r}"))
            for name, part in self.parts.items()
        )
        name = exporter.twin(*STYLES[self.style])
        return Call(f"{name}(", (*parts, *call("", alpha=self.strength).arguments))

    def describe(self) -> str:
        """One line for a reader."""
        return f"{self.slot_id}: {self.label}, {self.style}, alpha {self.strength:g}, {self.parameters:,} parameters"


def summary(host: str, host_parameters: int, growths: Sequence[Growth]) -> str:
    """What a network consists of, as lines of a docstring."""
    total = host_parameters + sum(growth.parameters for growth in growths)
    lines = textwrap.wrap(f"Host: {host}, {host_parameters:,} parameters.", LINE_WIDTH, subsequent_indent="    ")
    lines += ["Grown:", *(f"    {growth.describe()}" for growth in growths)] if growths else ["Grown: nothing."]
    return "\n".join([*lines, f"Together: {total:,} parameters."])
