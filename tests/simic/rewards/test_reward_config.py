"""Settings: one gamma, each cost once."""

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from simic.rewards.trajectories import pay, play, random_script, stack

from esper.leyline import DEFAULT_GAMMA, BadValueError, EsperError, LifecycleOp, UnknownNameError
from esper.simic.agent import PPOConfig
from esper.simic.rewards import (
    FAMILIES,
    DetectorLimits,
    Family,
    GammaMismatchError,
    RewardConfig,
    RewardInputs,
    check_gamma,
)
from esper.simic.rewards.config import OP_COSTS


@pytest.mark.requirement(1)
def test_one_gamma() -> None:
    """Two different gammas are refused before the first step, and the error names both."""
    with pytest.raises(GammaMismatchError, match=r"0\.995.*0\.99"):
        check_gamma(RewardConfig(gamma=0.995).gamma, PPOConfig(gamma=0.99).gamma)
    check_gamma(RewardConfig(gamma=0.99).gamma, PPOConfig(gamma=0.99).gamma)
    assert issubclass(GammaMismatchError, EsperError) and issubclass(GammaMismatchError, ValueError)
    assert RewardConfig().gamma == DEFAULT_GAMMA


@pytest.mark.requirement(22)
def test_proxy_weight_follows_the_main_weight() -> None:
    """The proxy weight is 0.3 of the main weight."""
    assert RewardConfig().proxy_weight == pytest.approx(0.3)
    assert RewardConfig(attribution_weight=2.0).proxy_weight == pytest.approx(0.6)
    assert RewardConfig(attribution_weight=0.0).proxy_weight == 0


@pytest.mark.requirement(25)
def test_each_cost_once() -> None:
    """The table of op costs is built from the settings."""
    assert set(OP_COSTS) == set(LifecycleOp) - {LifecycleOp.WAIT}
    config = RewardConfig()
    assert {field.name for field in fields(config) if field.name in OP_COSTS.values()} == set(OP_COSTS.values())
    for op, name in OP_COSTS.items():
        changed = replace(config, **{name: 7.25}).op_costs  # type: ignore[arg-type]  # a name from the table
        assert changed[op] == 7.25
        assert [cost for other, cost in enumerate(changed) if other != op] == [
            cost for other, cost in enumerate(config.op_costs) if other != op
        ]
    assert config.op_costs[LifecycleOp.WAIT] == 0


def test_every_family_is_there() -> None:
    """The names of the setting are the names of the table."""
    for family in FAMILIES:
        assert RewardConfig(family=family).family == family  # type: ignore[arg-type]  # a name from the table
    with pytest.raises(UnknownNameError, match=r"'escrow'.*paired"):
        RewardConfig(family="escrow")  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize(
    "setting",
    [
        {"gamma": 0.0},
        {"gamma": 1.1},
        {"rho": -1.0},
        {"shaping": float("nan")},
        {"crash_margin": 0.0},
        {"crash_margin": 1.3},
        {"sparse_scale": 0.0},
        {"patience": 2.5},
        {"prune_slope": float("inf")},
        {"germinate_cost": True},
        {"commit_price": -1.0},
        {"price_after": 1.5},
    ],
    ids=str,
)
def test_bad_settings(setting: dict[str, float]) -> None:
    """The message names the setting and the value."""
    with pytest.raises(BadValueError, match=next(iter(setting))):
        RewardConfig(**setting)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(BadValueError, match="ratio"):
        DetectorLimits(ratio=-1.0)


def test_commits_are_free_until_their_price_begins() -> None:
    """From the given share of the run on; nothing else changes."""
    config = RewardConfig(commit_price=1.5, price_after=0.4, rho=3.0)
    assert config.at(0.39) == RewardConfig(commit_price=0.0, price_after=0.4, rho=3.0)
    assert config.at(0.4) is config
    assert config.at(1.0) is config


def test_a_price_that_nobody_would_pay() -> None:
    """A setting that its family does not know is refused, not ignored."""
    assert RewardConfig(commit_price=2.0).commit_price == 2.0
    with pytest.raises(BadValueError, match=r"commit_price 2\.0: only the family paired has one, not 'shaped'"):
        RewardConfig(family="shaped", commit_price=2.0)


# -- every setting matters --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def episodes() -> list[RewardInputs]:
    """Twelve random episodes side by side."""
    rng = random.Random(5)
    played = [play(random_script(rng), 30) for _ in range(12)]
    return [stack(steps) for steps in zip(*played, strict=True)]


def totals(episodes: list[RewardInputs], family: Family, **changes: Any) -> list[list[float]]:  # Any: by name
    """All rewards, by step and episode."""
    return [paid.total.tolist() for paid in pay(RewardConfig(family=family, **changes), episodes)]


CHANGES: dict[str, tuple[Family, Any]] = {  # Any: values of the settings
    "gamma": ("shaped", 0.9),
    "rho": ("shaped", 3.0),
    "commit_price": ("paired", 0.5),
    "shaping": ("shaped", 0.5),
    "crash_margin": ("shaped", 6.0),
    "attribution_weight": ("shaped", 0.5),
    "germinate_cost": ("shaped", 0.2),
    "set_alpha_cost": ("shaped", 0.2),
    "prune_cost": ("shaped", 0.2),
    "fossilize_cost": ("shaped", 0.2),
    "advance_cost": ("shaped", 0.2),
    "limits": ("shaped", DetectorLimits(contribution=0.5, ratio=2.0)),
    "ratio_cap": ("shaped", 0.1),
    "delay_slope": ("shaped", 0.1),
    "patience": ("shaped", 2),
    "prune_slope": ("shaped", 0.1),
    "young_cost": ("shaped", 0.6),
    "shock_weight": ("shaped", 0.4),
    "sparse_scale": ("sparse", 2.0),
}


@pytest.mark.requirement(57)
def test_every_setting_is_tried() -> None:
    """A new setting arrives with a test of its effect. `price_after` acts through `at`."""
    assert {*CHANGES, "family", "price_after"} == {field.name for field in fields(RewardConfig)}
    config = RewardConfig(commit_price=1.0, price_after=0.4)
    assert (config.at(0.39).commit_price, config.at(0.4).commit_price) == (0.0, 1.0)


@pytest.mark.requirement(57)
@pytest.mark.parametrize("name", CHANGES)
def test_every_setting_has_an_effect(episodes: list[RewardInputs], name: str) -> None:
    """No setting exists unwired."""
    family, value = CHANGES[name]
    before = totals(episodes, family)
    assert before == totals(episodes, family)
    assert totals(episodes, family, **{name: value}) != before
