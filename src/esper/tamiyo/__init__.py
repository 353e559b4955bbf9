"""Deciding: observations, masks, heads, the policy's network."""

from esper.tamiyo.heads import ActionHead, ActionTable, EmptyMaskError, MaskedCategorical, discrete_table, growth_table
from esper.tamiyo.network import Decision, FactoredRecurrentActorCritic, NetworkConfig
from esper.tamiyo.observation import Observation, ObservationLayout, vector_layout

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
    "discrete_table",
    "growth_table",
    "vector_layout",
]
