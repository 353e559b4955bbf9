"""`esper/Growth-v0`: an environment as Gymnasium wants it, and the same episodes as everywhere else in Esper."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import FlattenObservation
from numpy.typing import NDArray
from simic.training.tiny import purpose_of, tiny_task

from esper.integrations.gymnasium import ID, FactoredActions, GrowthEnv
from esper.leyline import (
    BadValueError,
    DataError,
    LifecycleOp,
    SeedStage,
    UnknownNameError,
    head_preset,
    objective,
    rent,
)
from esper.simic.agent import PPOConfig, learn
from esper.simic.rewards import RewardConfig
from esper.simic.training import EpisodeRunner, Groups
from esper.simic.training.collect import reward_step
from esper.simic.training.episode import IllegalActionError, apply_action
from esper.tamiyo import NetworkConfig
from esper.tolaria import HostFleet


def make(**options: Any) -> GrowthEnv:
    """An environment of the tiny task, without the wrappers of `gymnasium.make`."""
    env = gymnasium.make(ID, task=tiny_task().name, **options).unwrapped
    assert isinstance(env, GrowthEnv)
    return env


class Played(NamedTuple):
    """An episode."""

    observations: list[NDArray[np.float32]]
    rewards: list[float]
    actions: list[int]
    infos: list[dict[str, Any]]  # Any: as Gymnasium types it


def play(env: GrowthEnv, seed: int, actions: Sequence[int] | None = None) -> Played:
    """An episode of these actions, else of legal ones at random."""
    dice = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    played = Played([observation], [], [], [info])
    ended = False
    while not ended:
        legal = np.flatnonzero(info["action_mask"])
        action = int(dice.choice(legal)) if actions is None else actions[len(played.actions)]
        observation, reward, ended, truncated, info = env.step(np.int64(action))
        assert not truncated
        played.observations.append(observation)
        played.rewards.append(reward)
        played.actions.append(action)
        played.infos.append(info)
    return played


# -- Gymnasium's contract ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "preset", ["core", *(pytest.param(name, marks=pytest.mark.slow) for name in ("commit", "full"))]
)
def test_gymnasium_accepts_it(preset: str) -> None:
    """Without a warning: warnings are errors here."""
    check_env(make(preset=preset))


@pytest.mark.slow
def test_it_is_found_by_its_name() -> None:
    """With its module in front, nothing needs to be imported; the default task has 1 + 3·7 + 3·3 actions."""
    code = (
        "import gymnasium; env = gymnasium.make('esper.integrations.gymnasium:esper/Growth-v0', task='digits_blind')\n"
        "print(env.action_space, env.spec.id)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("Discrete(31) esper/Growth-v0", "")


@pytest.mark.slow
def test_without_gymnasium() -> None:
    """The error says what to install."""
    code = "import sys; sys.modules['gymnasium'] = None; import esper.integrations.gymnasium"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.strip().endswith("which is not installed: pip install 'esper-morph[gym]'")


def test_columns_have_names() -> None:
    """One per number, and none of them shows the control."""
    env = make()
    observation, _ = env.reset(seed=0)
    assert len(env.columns) == len(set(env.columns)) == len(observation)
    values = dict(zip(env.columns, observation, strict=True))
    assert values["time_left"] == 1.0
    assert values["r1c2.stage.dormant"] == values["r1c0.conv_light.fits"] == 1.0
    assert not [name for name in env.columns if "control" in name or "potential" in name]
    assert not [name for name in make(sensing=False).columns if name.endswith(("worth", "rms"))]


def test_rendering() -> None:
    """Text and a picture tell the same; without a mode there is nothing, and a hint."""
    env = make(render_mode="ansi")
    env.reset(seed=0)
    germinate = [env.describe(action) for action in range(len(env.actions))].index("germinate conv_light in r1c1")
    for action in (0, germinate, 0):
        env.step(action)
    text = env.render()
    assert isinstance(text, str)
    lines = text.splitlines()
    assert lines[0].startswith("digits_tiny: step 3 of 12, gain ")
    assert [line.split() for line in lines[1:4]] == [["r1c0", "..."], ["r1c1", ".tt", "conv_light"], ["r1c2", "..."]]
    env.render_mode = "rgb_array"
    picture = env.render()
    assert isinstance(picture, np.ndarray)
    assert picture.shape == (3 * 16, 12 * 16, 3) and picture.dtype == np.uint8
    empty, trains, to_come = picture[24, 8], picture[24, 24], picture[24, 56]
    assert empty.tolist() != trains.tolist() and to_come.tolist() == [255, 255, 255]
    with pytest.warns(UserWarning, match="render_mode"):
        assert make().render() is None


def test_actions_in_words() -> None:
    """Only with what their op uses."""
    core, full = make(), make(preset="full")
    assert [core.describe(action) for action in (0, 1, 30)] == ["wait", "germinate norm in r1c0", "advance in r1c2"]
    assert full.describe(1) == "germinate norm in r1c0 blend=add tempo=3 alpha_target=0.5"


# -- the same episodes ------------------------------------------------------------------------------------------------


def test_it_plays_esper_s_episodes() -> None:
    """The features, rewards and objective of a runner with the same host and actions, to the bit."""
    env = make()
    played = play(env, 3)
    groups = Groups(1, 1)
    runner = EpisodeRunner(HostFleet(tiny_task(), groups.hosts), groups, head_preset("core"))
    runner.begin([played.infos[0]["host"]])
    for step, action in enumerate(played.actions):
        view, chosen = runner.view(), torch.from_numpy(env.actions.rows[[action]])
        assert view.features[0, : len(env.columns)].tolist() == played.observations[step].tolist()
        result = runner.step(chosen)
        rewarded = reward_step(RewardConfig(), runner, view, chosen, result)
        runner.potential = rewarded.potential
        assert played.rewards[step] == float(rewarded.total[0])
    assert runner.done
    earned = objective(result.hardened_gain, result.fossil_parameters, runner.host_sizes)
    assert played.infos[-1]["objective"] == float(earned[0])


def test_rewards_sum_to_the_objective() -> None:
    """Points over the control minus the rent of the fossils."""
    env = make()
    grown = 0
    for seed in (0, 2):
        played = play(env, seed)
        last = played.infos[-1]
        assert sum(played.rewards) == pytest.approx(last["objective"], abs=1e-4)
        assert "objective" not in played.infos[-2]
        grown += last["added_parameters"]
        paid = rent(last["added_parameters"], float(env.runner.host_sizes[0]))
        assert last["objective"] + paid == pytest.approx(last["hardened_gain"], abs=1e-4)
    assert grown > 0


def test_a_seed_determines_an_episode() -> None:
    """To the bit, in an environment that played other episodes before; and without a seed the next host comes."""
    env, other = make(), make()
    first = play(env, 7)
    play(other, 8), other.reset()
    again = play(other, 7, first.actions)
    for one, two in zip(first.observations, again.observations, strict=True):
        assert np.array_equal(one, two)
    assert first.rewards == again.rewards
    hosts = [env.reset(seed=7)[1]["host"], env.reset()[1]["host"], env.reset()[1]["host"]]
    assert len(set(hosts)) == 3 and hosts[0] == first.infos[0]["host"]
    assert hosts == [other.reset(seed=7)[1]["host"], other.reset()[1]["host"], other.reset()[1]["host"]]


def test_hosts_come_from_the_range_of_their_purpose() -> None:
    """What is trained on is never evaluated on. A number picks a host."""
    for hosts in ("training", "evaluation", "final"):
        env = make(hosts=hosts)
        assert purpose_of(env.reset(seed=0)[1]["host"]) == hosts
        one, two = (env.reset(options={"host": number})[1]["host"] for number in (4, 5))
        assert one != two
        assert env.runner.final == (hosts == "final")


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["core", pytest.param("commit", marks=pytest.mark.slow)])
def test_the_mask_is_exact(preset: str) -> None:
    """In every state of two episodes, the fleet carries out what the mask allows and refuses what it forbids. Only
    ADVANCE it would take from later stages too, which advance by themselves or with FOSSILIZE."""
    env, carried_out = make(preset=preset), set()
    for seed in range(2):
        dice, ended = np.random.default_rng(seed), False
        _, info = env.reset(seed=seed)
        while not ended:
            mask = env.action_masks()
            assert np.array_equal(mask, info["action_mask"]) and mask[0]
            for row in env.actions.rows[~mask].tolist():
                stage = env.runner.fleet.reports(0)[row[1]].stage
                if row[0] == LifecycleOp.ADVANCE and stage in (SeedStage.BLENDING, SeedStage.HOLDING):
                    continue
                with pytest.raises(IllegalActionError):
                    apply_action(env.runner.fleet, 0, row, env.runner.table, env.runner.slots)
            action = dice.choice(np.flatnonzero(mask))
            carried_out.add(LifecycleOp(env.actions.rows[action, 0]))
            _, _, ended, _, info = env.step(action)
            assert info["illegal"] == 0
    assert carried_out == set(head_preset(preset).ops)


def test_an_illegal_action_waits() -> None:
    """It is counted, and nothing else differs."""
    env = make()
    waited = play(env, 1, [0] * 12)
    advance = len(env.actions) - 1
    refused = play(env, 1, [advance] * 12)
    assert waited.rewards == refused.rewards
    assert [info["illegal"] for info in refused.infos] == list(range(13))
    assert waited.infos[-1]["illegal"] == 0


def test_one_choice_per_head() -> None:
    """The same episode through both; a combination that is not legal itself waits and is counted."""
    plain, factored = make(), FactoredActions(gymnasium.make(ID, task=tiny_task().name))
    assert factored.action_space == gymnasium.spaces.MultiDiscrete([5, 3, 7])
    played = play(plain, 2)
    _, info = factored.reset(seed=2)
    for action, reward in zip(played.actions, played.rewards, strict=True):
        op, *others = plain.actions.rows[action]
        choices = np.array([plain.actions.ops.index(op), *others])
        assert all(part[choice] for part, choice in zip(np.split(info["action_mask"], [5, 8]), choices, strict=True))
        _, got, _, _, info = factored.step(choices)
        assert got == reward and info["illegal"] == 0
    _, info = factored.reset(seed=2)
    germinate, advance = plain.actions.ops.index(LifecycleOp.GERMINATE), plain.actions.ops.index(LifecycleOp.ADVANCE)
    assert np.split(info["action_mask"], [5, 8])[0].tolist() == [
        op <= LifecycleOp.GERMINATE for op in plain.actions.ops
    ]
    _, _, _, _, info = factored.step(np.array([germinate, 0, 0]))
    assert info["illegal"] == 0
    _, _, _, _, info = factored.step(np.array([germinate, 0, 0]))  # slot 0 is taken; WAIT and the others have it too
    assert np.split(info["action_mask"], [5, 8])[1].all()
    assert info["illegal"] == 1
    _, _, _, _, info = factored.step(np.array([advance, 2, 0]))
    assert info["illegal"] == 2


# -- ends and errors --------------------------------------------------------------------------------------------------


def test_a_diverging_host_ends_its_episode() -> None:
    """The reward of a panic is what ending at chance is worth, less a margin of 5 points."""
    env = make()
    env.reset(seed=0)
    with torch.no_grad():
        env.runner.fleet.host.weights.matrix[0] = torch.nan
    _, reward, ended, truncated, info = env.step(0)
    assert (ended, truncated, info["panic"]) == (True, False, True)
    control = info["accuracy"] - info["gain"]
    assert reward == pytest.approx(10 - control - 5, abs=1e-3)
    with pytest.raises(BadValueError, match=r"call reset\(\)"):
        env.step(0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"task": "digit"}, UnknownNameError, "unknown task 'digit'; allowed: digits_blind"),
        ({"preset": "all"}, UnknownNameError, "unknown head preset 'all'; allowed: core"),
        ({"hosts": "test"}, UnknownNameError, "unknown hosts 'test'; allowed: training"),
        ({"reward": "gain"}, UnknownNameError, "unknown reward family 'gain'"),
        ({"device": "cuda:9"}, BadValueError, "device 'cuda:9' is not here"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type[Exception], message: str) -> None:
    """The value and what is allowed."""
    with pytest.raises(error, match=message):
        GrowthEnv(**options)


def test_the_data_directory_is_used(tmp_path: Path) -> None:
    """An empty one has no images."""
    with pytest.raises(DataError, match="fashion_mnist"):
        GrowthEnv("fashion_small", data_dir=tmp_path)


def test_actions_and_episodes_are_checked() -> None:
    """An action that does not exist, an episode that does not run, a host that is no number, another environment."""
    env = make()
    with pytest.raises(BadValueError, match=r"no episode is running; call reset\(\)"):
        env.step(0)
    with pytest.raises(BadValueError, match=r"options\[\"host\"\] 'first' is not an integer"):
        env.reset(options={"host": "first"})
    env.reset(seed=0)
    with pytest.raises(BadValueError, match="action 31 is none of the 31 actions 0 … 30"):
        env.step(31)
    with pytest.raises(BadValueError, match=r"action \[9, 0, 0\] is not in MultiDiscrete\(\[5 3 7\]\)"):
        FactoredActions(env).step(np.array([9, 0, 0]))
    with pytest.raises(BadValueError, match="FactoredActions wraps esper/Growth-v0, not "):
        FactoredActions(gymnasium.make("CartPole-v1"))
    env.close()
    env.close()


# -- algorithms -------------------------------------------------------------------------------------------------------

SMALL = PPOConfig(steps=12, epochs=1, minibatches=1, network=NetworkConfig(encoder=8, hidden=8, head=8))


@pytest.mark.slow
@pytest.mark.parametrize("factored", [False, True])
def test_esper_s_own_ppo_learns_on_it(factored: bool) -> None:
    """It reads the mask from `info`, so no action of a Discrete space is illegal."""
    illegal: list[int] = []

    class Counting(FlattenObservation):
        """Remembers what was counted."""

        def step(self, action: Any) -> Any:  # Any: of either space
            result = super().step(action)
            illegal.append(result[-1]["illegal"])
            return result

    def make_env() -> gymnasium.Env[Any, Any]:  # Any: of either space
        env = gymnasium.make(ID, task=tiny_task().name)
        return Counting(FactoredActions(env) if factored else env)

    learned = learn(make_env, total_steps=48, n_envs=2, config=SMALL, progress=False)
    assert len(learned.returns) == 4 and len(illegal) == 48
    assert factored or not any(illegal)
    assert len(learned.evaluate(2, seed=0)) == 2


@pytest.mark.slow
def test_environments_in_processes_of_their_own() -> None:
    """Gymnasium's asynchronous vectors give the episodes of single ones."""
    task = tiny_task()  # the processes are forked, so they know it
    envs = gymnasium.make_vec(ID, 2, "async", vector_kwargs={"context": "fork"}, task=task.name)
    observations, infos = envs.reset(seed=5)
    singles = [make().reset(seed=5 + index) for index in range(2)]
    assert np.array_equal(observations, np.stack([single[0] for single in singles]))
    assert infos["host"].tolist() == [single[1]["host"] for single in singles]
    envs.close()


@pytest.mark.slow
def test_stable_baselines_accepts_it() -> None:
    """By the checks of its own, without a warning."""
    pytest.importorskip("stable_baselines3.common.env_checker").check_env(make())


@pytest.mark.slow
def test_maskable_ppo_learns_on_it() -> None:
    """Made from its name alone, on the default task. Its policy chooses legal actions only."""
    sb3_contrib = pytest.importorskip("sb3_contrib")
    name = f"{GrowthEnv.__module__}:{ID}"
    model = sb3_contrib.MaskablePPO("MlpPolicy", name, n_steps=24, batch_size=24, seed=0, device="cpu")
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(48)
    assert any(not torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())
    env = make()
    for seed in range(3):
        observation, info = env.reset(seed=seed)
        ended = False
        while not ended:
            action, _ = model.predict(observation, action_masks=info["action_mask"])
            observation, _, ended, _, info = env.step(action)
        assert info["illegal"] == 0
