"""The catalogue of metrics against those who make them: the update, the rewards, the alarms."""

from dataclasses import fields

import pytest
from simic.rewards.trajectories import Move, play

from esper.nissa import METRICS, find_metric
from esper.simic.agent import HeadMetrics, PPOConfig, PPOUpdateMetrics
from esper.simic.rewards import RewardConfig, compute_reward
from esper.simic.rewards.families import FAMILIES
from esper.simic.telemetry import AlarmLimits
from esper.simic.telemetry.rules import GRADIENT_LOW, HEAD_GRADIENT_LOW

LIMITS = AlarmLimits()
CLIP = PPOConfig().clip_norm
"""Limits of gradients are in its units"""
NAMES = {metric.name for metric in METRICS}


@pytest.mark.requirement(31)
def test_the_update_is_declared_field_by_field() -> None:
    """The catalogue has exactly the fields of an update and of its heads."""
    update = {f"ppo/{field.name}" for field in fields(PPOUpdateMetrics) if field.name != "heads"}
    heads = {f"ppo/<head>/{field.name}" for field in fields(HeadMetrics)}
    assert {name for name in NAMES if name.startswith("ppo/")} == update | heads


@pytest.mark.requirement(31)
def test_rewards_are_declared_part_by_part() -> None:
    """The catalogue has exactly the parts of all reward families."""
    step = play(lambda host: Move(), 1)[0]
    parts = {
        f"reward/{part}"
        for family in FAMILIES
        for part in compute_reward(RewardConfig(family=family), step).parts  # type: ignore[arg-type]  # its keys
    }
    assert {name for name in NAMES if name.startswith("reward/")} == parts


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("ppo/max_kl", None, LIMITS.kl_spike),
        ("ppo/approx_kl", None, LIMITS.kl_spike),
        ("ppo/joint_ratio_max", None, LIMITS.ratio_high),
        ("ppo/joint_ratio_min", LIMITS.ratio_low, None),
        ("ppo/value_loss", None, LIMITS.value_loss),
        ("ppo/explained_variance", LIMITS.explained_variance, None),
        ("ppo/pre_clip_grad_norm", GRADIENT_LOW * CLIP, LIMITS.gradient_high * CLIP),
        ("ppo/behaviour_gap", None, LIMITS.behaviour_gap),
        ("ppo/slot/entropy", LIMITS.entropy, None),
        ("ppo/slot/kl", None, LIMITS.kl_spike),
        ("committed", LIMITS.commits, None),
    ],
)
def test_healthy_ends_where_alarms_begin(name: str, low: float | None, high: float | None) -> None:
    """One number in two places: who changes a limit changes the catalogue."""
    metric = find_metric(name)
    assert metric is not None
    assert (metric.low, metric.high) == (low, high)


def test_remarks_name_the_limits_that_have_no_range() -> None:
    """Of quantities that need a second number to judge."""
    for name, limit in (("panics", LIMITS.panics), ("ppo/op/grad_norm", HEAD_GRADIENT_LOW * CLIP)):
        metric = find_metric(name)
        assert metric is not None
        assert f"{limit:g} " in metric.remark
