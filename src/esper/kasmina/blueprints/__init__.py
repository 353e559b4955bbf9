"""Seed architectures: the registry and the built-in blueprints."""

from esper.kasmina.blueprints import library
from esper.kasmina.blueprints.registry import BlueprintRegistry, BlueprintSpec

__all__ = ["BlueprintRegistry", "BlueprintSpec", "library"]
