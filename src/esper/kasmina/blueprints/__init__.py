"""Seed architectures: the registry, the built-in blueprints, and the contract that each of them keeps."""

from esper.kasmina.blueprints import library
from esper.kasmina.blueprints.contract import BlueprintReport, check_blueprint
from esper.kasmina.blueprints.registry import BlueprintRegistry, BlueprintSpec

__all__ = ["BlueprintRegistry", "BlueprintReport", "BlueprintSpec", "check_blueprint", "library"]
