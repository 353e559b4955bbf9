"""Esper grows a neural network while it trains.

The names below are loaded when they are first used, so that `import esper` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from esper.grower import Grower
    from esper.kasmina import (
        CNNHost,
        GPTHost,
        GrowingOptimizer,
        MorphogeneticModel,
        TrainingCheckpoints,
        attach,
        check_blueprint,
        check_host,
    )
    from esper.simic.agent import PPOAgent, PPOConfig, learn
    from esper.tolaria import HostFleet, get_task

__version__ = "0.1.0"

_HOMES = {
    "esper.grower": ("Grower",),
    "esper.kasmina": (
        *("CNNHost", "GPTHost", "GrowingOptimizer", "MorphogeneticModel", "TrainingCheckpoints"),
        *("attach", "check_blueprint", "check_host"),
    ),
    "esper.simic.agent": ("PPOAgent", "PPOConfig", "learn"),
    "esper.tolaria": ("HostFleet", "get_task"),
}
"""Which package each public name lives in."""

__all__ = [
    "CNNHost",
    "GPTHost",
    "Grower",
    "GrowingOptimizer",
    "HostFleet",
    "MorphogeneticModel",
    "PPOAgent",
    "PPOConfig",
    "TrainingCheckpoints",
    "attach",
    "check_blueprint",
    "check_host",
    "get_task",
    "learn",
]


def __getattr__(name: str) -> object:
    """Import a public name from its package."""
    for home, names in _HOMES.items():
        if name in names:
            value: object = getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'esper' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
