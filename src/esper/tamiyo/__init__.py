"""Decisions: observations, masks, heads and the policy's network."""

from esper.tamiyo.encoder import NetworkConfig, RecurrentEncoder
from esper.tamiyo.features import ObservationLayout, growth_layout, signals_to_features, vector_layout
from esper.tamiyo.heads import ActionHead, ActionTable, EmptyMaskError, MaskedCategorical, discrete_table, growth_table
from esper.tamiyo.network import Decision, FactoredRecurrentActorCritic
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
    "ObservationLayout",
    "Policy",
    "PolicyView",
    "RecurrentEncoder",
    "TrainingSignals",
    "discrete_table",
    "growth_layout",
    "growth_masks",
    "growth_table",
    "signals_to_features",
    "vector_layout",
]
