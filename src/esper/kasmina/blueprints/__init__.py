"""Seed architectures: the registry, the built-in blueprints, and the adapters of pretrained models."""

from esper.kasmina.blueprints import adapters, library
from esper.kasmina.blueprints.registry import BlueprintRegistry, BlueprintSpec, Folding

__all__ = ["BlueprintRegistry", "BlueprintSpec", "Folding", "adapters", "library"]
