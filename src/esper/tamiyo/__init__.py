"""Decisions: observations, masks, heads and the policy's network."""

from esper.tamiyo.features import Observation, ObservationLayout, growth_layout, signals_to_features, vector_layout
from esper.tamiyo.heads import ActionHead, ActionTable, EmptyMaskError, MaskedCategorical, discrete_table, growth_table
from esper.tamiyo.network import Decision, FactoredRecurrentActorCritic, NetworkConfig
from esper.tamiyo.policy import Policy, PolicyView, growth_masks
from esper.tamiyo.signals import TrainingSignals

__all__ = [
    "ActionHead",
    "ActionTable",
    "Decision",
    "EmptyMaskError",
    "FactoredRecurrentActorCritic",
    "MaskedCategorical",
    "NetworkConfig",
    "Observation",
    "ObservationLayout",
    "Policy",
    "PolicyView",
    "TrainingSignals",
    "discrete_table",
    "growth_layout",
    "growth_masks",
    "growth_table",
    "signals_to_features",
    "vector_layout",
]
