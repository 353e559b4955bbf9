"""Settings: each is proven, each has an effect, and numbers have names."""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rounds import TABLES, collect, make_agent, small, weights_of

from esper.leyline import BadValueError, SlotConfig, UnknownNameError
from esper.simic.agent import PPOAgent, PPOConfig, config, learn, losses, ppo
from esper.tamiyo import NetworkConfig

NAN, INF = math.nan, math.inf
BAD: tuple[tuple[str, object], ...] = (
    *((name, value) for name in ("steps", "epochs", "minibatches", "pieces") for value in (0, -1, 1.5, True)),
    *((name, value) for name in ("gamma", "clip_end") for value in (0.0, 1.01, NAN)),
    *((name, value) for name in ("rate", "clip", "clip_norm", "advantage_floor") for value in (0.0, -1.0, INF, NAN)),
    *((name, value) for name in ("target_kl", "value_clip", "huber") for value in (0.0, -1.0, NAN)),
    *(
        (name, value)
        for name in ("value_coefficient", "forced_value_weight", "critic_decay", "entropy", "logit_penalty")
        for value in (-1.0, INF, NAN)
    ),
    *(
        (name, value)
        for name in ("lam", "rate_end", "entropy_end", "explore", "explore_until", "freeze_after")
        for value in (-0.1, 1.1, NAN)
    ),
    ("explore", 1.0),
    ("compile", "reduce-overhead"),
    ("clipping", "op"),
)


@pytest.mark.requirement(4)
@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_values_are_refused(name: str, value: object) -> None:
    """Fewer than one epoch and every other senseless value are refused, naming field and value."""
    with pytest.raises((BadValueError, UnknownNameError)) as caught:
        PPOConfig(**{name: value})  # type: ignore[arg-type]  # wrong on purpose
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.requirement(4)
def test_bad_lengths_of_runs_are_refused() -> None:
    """An agent needs the number of updates and of tasks, at least 1 each."""
    for wrong in ({"total_updates": 0}, {"tasks": 0}):
        with pytest.raises(BadValueError, match=f"{next(iter(wrong))} 0"):
            PPOAgent(*TABLES["vector"], **wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_schedules() -> None:
    """At the start, half way, at the end, and behind it."""
    chosen = PPOConfig(rate=0.1, rate_end=0.0, clip=0.2, clip_end=0.5, entropy=0.02, entropy_end=0.1, explore=0.1)
    at = (0.0, 0.5, 1.0, 2.0)
    assert [chosen.rate_at(p) for p in at] == pytest.approx([0.1, 0.05, 0.0, 0.0])
    assert [chosen.clip_at(p) for p in at] == pytest.approx([0.2, 0.15, 0.1, 0.1])
    assert [chosen.entropy_at(p) for p in at] == pytest.approx([0.02, 0.011, 0.002, 0.002])
    assert [chosen.explore_at(p) for p in (0.0, 0.3, 0.6, 1.0)] == pytest.approx([0.1, 0.05, 0.0, 0.0])
    assert replace(chosen, explore_until=0.0).explore_at(0.0) == 0


# -- effects ----------------------------------------------------------------------------------------------------------


class Walk(gym.Env[Any, Any]):
    """Steps to the left or right are paid by position, and by a bet on its sign; at times neither has a choice."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.MultiDiscrete([3, 2])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.time = int(self.np_random.integers(-2, 3)), 0
        return self._see()

    def _see(self) -> tuple[Any, dict[str, Any]]:
        free, open_bet = self.time % 3 != 1, self.time % 2 == 0
        seen = np.array([3 * self.place + 1, self.time], np.float32)
        return seen, {"action_mask": (np.array([True, free, free]), np.array([True, open_bet]))}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.place += (0, 1, -1)[action[0]]
        self.time += 1
        seen, info = self._see()
        won = float(action[1]) * self.place
        return seen, 3.0 * self.place + won, abs(self.place) > 3, self.time >= 5, info


BASE = PPOConfig(NetworkConfig(8, 1, 8, 8), steps=8, epochs=2, minibatches=2, rate=0.02, target_kl=None)
"""With a rate at which ratios leave the clip range."""
CHANGES: dict[str, Any] = {
    "network": NetworkConfig(8, 2, 8, 8),
    "steps": 9,
    "epochs": 3,
    "minibatches": 1,
    "pieces": 2,
    "gamma": 0.5,
    "lam": 0.5,
    "rate": 0.01,
    "rate_end": 0.5,
    "clip": 0.01,
    "clip_end": 0.01,
    "clipping": "joint",
    "centred": False,
    "target_kl": 1e-4,
    "clip_norm": 0.1,
    "critic_first": 1,
    "value_coefficient": 0.1,
    "value_clip": 0.01,
    "huber": 0.1,
    "forced_value_weight": 1.0,
    "critic_decay": 0.5,
    "entropy": 0.5,
    "entropy_end": 1.0,
    "logit_penalty": 0.1,
    "explore": 0.5,
    "explore_until": 0.1,
    "advantage_floor": 100.0,
    "normalise_observations": False,
    "normalise_rewards": False,
    "freeze_after": 0.0,
    "compile": "default",
}


GROWTH_ONLY = {"leash", "leash_until", "leave_one_out"}
"""They need a start or groups of envs; see test_leash.py."""


@cache
def outcome(name: str | None) -> str:
    """Everything that three updates lead to, with one field changed or none; metrics that echo settings left out."""
    chosen = BASE if name is None else replace(BASE, **{name: CHANGES[name]})
    learned = learn(Walk, total_steps=4 * chosen.steps * 3, n_envs=4, config=chosen, progress=False)
    weights = {key: value.double().sum().item() for key, value in weights_of(learned.agent).items()}
    history = [replace(metrics, rate=0.0, entropy_coefficient=0.0, epsilon=0.0) for metrics in learned.history]
    return repr((weights, history, learned.returns, learned.agent.compile_mode))


@pytest.mark.requirement(52, 57)
def test_every_field_is_tried() -> None:
    """Every field has an entry below, so a new field needs a test of its effect."""
    assert set(CHANGES) | GROWTH_ONLY == {field.name for field in fields(PPOConfig)}
    assert outcome(None) == outcome.__wrapped__(None)  # the same run gives the same numbers


@pytest.mark.requirement(52, 57)
@pytest.mark.parametrize("name", CHANGES)
def test_every_field_has_an_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting changes the result of an update."""
    monkeypatch.setattr(torch, "compile", lambda call, **settings: call)  # what it does is another test's
    assert outcome(name) != outcome(None)


@pytest.mark.requirement(57)
def test_tasks_and_total_updates_have_effects() -> None:
    """The constructor's parameters change the result too."""
    short, long = (make_agent("core", total_updates=updates) for updates in (2, 200))
    for agent in (short, long):
        agent.update(collect(agent))
    assert short.epsilon < long.epsilon
    assert short.progress == 0.5
    assert len(make_agent("core", tasks=3).returns.statistics.mean) == 3


# -- devices, slots, numbers ------------------------------------------------------------------------------------------


@pytest.mark.requirement(76)
@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_devices_by_name_or_as_such(device: str | torch.device) -> None:
    """The agent stores a torch.device; Adam is fused on every device, also on the CPU."""
    agent = PPOAgent(*TABLES["core"], small(), device=device)
    assert agent.device == torch.device("cpu")
    assert isinstance(agent.device, torch.device)
    assert agent.optimizer.defaults["fused"]
    assert agent.optimizer.defaults["eps"] == config.ADAM_EPS
    assert agent.update(collect(agent)).minibatches_taken == 16


@pytest.mark.requirement(30)
def test_no_slot_configuration_is_built_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent takes its table, and with it the slots, from the caller."""
    built: list[int] = []
    monkeypatch.setattr(SlotConfig, "__post_init__", lambda self: built.append(1))
    agent = make_agent("core")
    agent.update(collect(agent))
    assert built == []


PLAIN = (0, 1, 2, 0.5)
"""Numbers that stand for themselves."""


def bare_numbers(source: str) -> Iterator[str]:
    """Numbers without a name: neither assigned to one, nor the default or value of a parameter that has one."""
    tree = ast.parse(source)
    named: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node in tree.body:
            named |= set(ast.walk(node))
        elif isinstance(node, ast.arguments):
            named |= {*node.defaults, *node.kw_defaults} - {None}  # type: ignore[arg-type]  # without the None
        elif isinstance(node, ast.keyword) and node.arg == "stacklevel":
            named.add(node.value)
    for node in ast.walk(tree):
        number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
        if isinstance(node, ast.Constant) and number and node.value not in PLAIN and node not in named:
            yield f"line {node.lineno}: {node.value!r}"


SOURCES = sorted(Path(ppo.__file__).parent / f"{name}.py" for name in ("ppo", "losses", "minibatch", "metrics"))


@pytest.mark.requirement(29)
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_numbers_in_the_update_have_names(path: Path) -> None:
    """The update code contains no bare literals."""
    assert list(bare_numbers(path.read_text())) == []
    assert list(bare_numbers("def f(x=3):\n    return x * 1e-6")) == ["line 2: 1e-06"]


@pytest.mark.requirement(20, 29)
@pytest.mark.parametrize("module", [config, losses])
def test_constants_come_with_their_reason(module: Any) -> None:  # Any: a module
    """All thresholds stand in one module, each with a line that gives the reason."""
    body = ast.parse(Path(module.__file__).read_text()).body
    constants = [
        (node, behind)
        for node, behind in pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    ]
    assert constants
    for node, behind in constants:
        assert isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant), ast.unparse(node)


@pytest.mark.requirement(20)
def test_the_agent_defines_no_threshold_of_its_own() -> None:
    """The agent reads the thresholds of `config`, as the detectors do."""
    found: dict[str, Callable[..., object]] = vars(ppo)
    own = {name for name, value in found.items() if name.isupper() and isinstance(value, int | float)}
    assert own == {"ADAM_EPS", "FAILURES_ALLOWED", "GAP_REFUSED", "KL_STOP", "NORM_EPS"}
    assert all(getattr(ppo, name) is getattr(config, name) for name in own)
