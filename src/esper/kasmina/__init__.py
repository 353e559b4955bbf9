"""Hosts, and the seeds that grow in them."""

from esper.kasmina.attach import attach
from esper.kasmina.blending import AlphaController
from esper.kasmina.blueprints import BlueprintRegistry, BlueprintSpec
from esper.kasmina.check import BlueprintReport, HostReport, check_blueprint, check_host
from esper.kasmina.compare import Comparison, cross_entropy
from esper.kasmina.gates import GateThresholds
from esper.kasmina.hosts import CNNHost, GPTHost, Host, Segment
from esper.kasmina.lifecycle import LifecycleConfig, SeedState
from esper.kasmina.model import MorphogeneticModel
from esper.kasmina.optimiser import GrowingOptimizer
from esper.kasmina.slot import SeedSlot
from esper.kasmina.training_checkpoints import TrainingCheckpoints

__all__ = [
    "AlphaController",
    "BlueprintRegistry",
    "BlueprintReport",
    "BlueprintSpec",
    "CNNHost",
    "Comparison",
    "GPTHost",
    "GateThresholds",
    "GrowingOptimizer",
    "Host",
    "HostReport",
    "LifecycleConfig",
    "MorphogeneticModel",
    "SeedSlot",
    "SeedState",
    "Segment",
    "TrainingCheckpoints",
    "attach",
    "check_blueprint",
    "check_host",
    "cross_entropy",
]
