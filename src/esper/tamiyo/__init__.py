"""Deciding: observations, masks, heads, the policy's network."""

from esper.tamiyo.features import growth_layout, signals_to_features
from esper.tamiyo.heads import ActionHead, ActionTable, EmptyMaskError, MaskedCategorical, discrete_table, growth_table
from esper.tamiyo.masks import growth_masks
from esper.tamiyo.network import Decision, FactoredRecurrentActorCritic, NetworkConfig
from esper.tamiyo.observation import Observation, ObservationLayout, vector_layout
from esper.tamiyo.policy import Policy, View
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
    "TrainingSignals",
    "View",
    "discrete_table",
    "growth_layout",
    "growth_masks",
    "growth_table",
    "signals_to_features",
    "vector_layout",
]
