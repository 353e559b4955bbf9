"""Keeping numbers in range: statistics of observations, rewards and returns."""

from esper.simic.control.normalisers import ObservationNormalizer, ReturnNormalizer, RewardNormalizer
from esper.simic.control.statistics import RunningMeanStd

__all__ = ["ObservationNormalizer", "ReturnNormalizer", "RewardNormalizer", "RunningMeanStd"]
