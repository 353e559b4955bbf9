"""`esper/Growth-v0`: the growth of one host as a Gymnasium environment, for algorithms from other libraries.

Importing this module registers it; `gymnasium.make("esper.integrations.gymnasium:esper/Growth-v0")` imports it first.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from esper.integrations.complete_actions import CompleteActions
from esper.integrations.timeline import Timeline
from esper.leyline import (
    BadValueError,
    LifecycleOp,
    MissingPackageError,
    head_preset,
    objective,
)
from esper.leyline.numbers import require_known, require_whole
from esper.simic.rewards import Family, RewardConfig
from esper.simic.training.collect import reward_step
from esper.simic.training.episode import EpisodeRunner, StepResult, choices_of
from esper.simic.training.hosts import PURPOSES, Groups, Purpose, growth_fleet, host_seed
from esper.tamiyo import ObservationLayout, PolicyView
from esper.tamiyo.features import LIMIT
from esper.tolaria import get_task

try:
    import gymnasium
except ImportError as error:
    raise MissingPackageError("esper/Growth-v0", "gymnasium", "esper-morph[gym]") from error

ID = "esper/Growth-v0"
WAIT = 0  # the first of the complete actions
DRAWS = 2**62  # numbers from which an episode draws its host

Observation = NDArray[np.float32]
Info = dict[str, Any]  # Any: as Gymnasium types it
METADATA: Info = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}


class GrowthEnv(gymnasium.Env[Observation, np.int64]):
    """One host and its control, from fresh weights to the end of the episode.

    An action is a complete one, `actions.rows` lists them. An action that is not legal waits and is counted in
    `info["illegal"]`. Rewards sum to the objective: the points that the hardened host has over its control, minus the
    rent of its fossils. An episode also ends if the host diverges, which is worth as much as ending at chance.
    """

    metadata = METADATA

    def __init__(
        self,
        task: str = "digits_blind",
        *,
        preset: str = "core",
        hosts: Purpose = "training",
        reward: Family | RewardConfig = "paired",
        sensing: bool = True,
        device: str = "cpu",
        data_dir: Path | str | None = None,
        render_mode: str | None = None,
    ) -> None:
        """`hosts`: the range from which hosts are drawn. Train on `training`; the others were never trained on, and
        on `final` the end of an episode is scored on test images. `sensing`: whether empty slots are probed.
        """
        require_known("hosts", hosts, PURPOSES)
        if render_mode is not None:
            require_known("render_mode", render_mode, self.metadata["render_modes"])
        chosen, definition = head_preset(preset), get_task(task)
        if not definition.slot_config.blueprint_names:
            raise BadValueError(f"task {task!r} offers no blueprint in any slot, so a policy could only wait")
        self.hosts, self.render_mode = hosts, render_mode
        self.reward_config = reward if isinstance(reward, RewardConfig) else RewardConfig(reward)
        # The control costs nothing: a fleet of one would carry an empty second row.
        groups = Groups(1, 1)
        fleet = growth_fleet(definition, groups.hosts, device, data_dir=data_dir)
        self.runner = EpisodeRunner(fleet, groups, chosen, sensing=sensing)
        self.runner.final = hosts == "final"
        self.actions = CompleteActions(self.runner.table, chosen.ops)
        self.columns = column_names(self.runner.layout, self.runner.slots.slot_ids)
        self.observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (len(self.columns),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(self.actions))
        self._view: PolicyView | None = None  # None: no episode is running
        self._timeline = Timeline(task, self.runner.slots.slot_ids, definition.steps)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode on another host. The seed determines it to the bit, and all later episodes too.

        `options={"host": number}` plays on the host of that number, whatever the seed.
        """
        super().reset(seed=seed)
        number = (options or {}).get("host", int(self.np_random.integers(DRAWS)))
        require_whole('options["host"]', number, 0)
        host = host_seed(self.hosts, number)
        self.runner.begin([host])
        self._view, self._illegal = self.runner.view(), 0
        task = self.runner.fleet.task
        self._timeline = Timeline(task.name, self.runner.slots.slot_ids, task.steps)
        return self._observe(), {"action_mask": self.action_masks(), "illegal": 0, "host": host}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, Info]:
        """Carry out an action, train and measure the host, and pay the change of the objective."""
        view, runner = self._running(), self.runner
        if not self.action_space.contains(np.int64(action)):
            raise BadValueError(
                f"action {action!r} is none of the {len(self.actions)} actions 0 … {len(self.actions) - 1}"
            )
        index = int(action)
        if not self.action_masks()[index]:
            self._illegal, index = self._illegal + 1, WAIT
        chosen = torch.from_numpy(self.actions.rows[[index]])
        result = runner.step(chosen)
        rewarded = reward_step(self.reward_config, runner, view, chosen.to(runner.fleet.device), result)
        runner.potential = rewarded.potential
        ended = runner.done or bool(result.panics[0])
        self._view = runner.view()
        self._timeline.add(runner.fleet.states[0], float(result.gain[0]))
        info = self._info(result)
        observation = self._observe()
        if ended:
            self._view = None
        return observation, float(rewarded.total[0]), ended, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """(actions,): which actions are legal now. Waiting always is; after the end nothing else is."""
        if self._view is None:
            waiting: NDArray[np.bool_] = np.arange(len(self.actions)) == WAIT
            return waiting
        return self.actions.legal(self._view.masks)

    def describe(self, action: int) -> str:
        """An action in words, such as `germinate conv_light in r1c0`."""
        heads, row = self.runner.preset.heads, self.actions.rows[action]
        chosen = {head.name: choices_of(head, self.runner.slots)[index] for head, index in zip(heads, row, strict=True)}
        op = LifecycleOp(chosen.pop("op"))
        used = {head.name: chosen[head.name] for head in heads[1:] if op in head.ops}
        words = [op.name.lower(), used.pop("blueprint", ""), f"in {used.pop('slot')}" if "slot" in used else ""]
        return " ".join([*filter(None, words), *(f"{name}={value}" for name, value in used.items())])

    def render(self) -> str | NDArray[np.uint8] | None:
        """The episode so far, a row per slot: as text with render_mode="ansi", as a picture with "rgb_array"."""
        if self.render_mode is None:
            gymnasium.logger.warn('render() needs a mode; make the environment with render_mode="ansi"')
            return None
        return self._timeline.text() if self.render_mode == "ansi" else self._timeline.picture()

    def close(self) -> None:
        """End the episode."""
        self._view = None

    def _running(self) -> PolicyView:
        if self._view is None:
            raise BadValueError("no episode is running; call reset()")
        return self._view

    def _observe(self) -> Observation:
        features: Observation = self._running().features[0, : len(self.columns)].numpy(force=True).copy()
        return features

    def _info(self, result: StepResult) -> Info:
        info: Info = {
            "action_mask": self.action_masks(),
            "illegal": self._illegal,
            "accuracy": float(result.accuracy[0]),
            "gain": self._timeline.gains[-1],
            "added_parameters": int(result.fossil_parameters[0]),
            "panic": bool(result.panics[0]),
        }
        if result.hardened_accuracy is not None:
            gain, sizes, rho = result.hardened_gain, self.runner.host_sizes, self.reward_config.rho
            info["hardened_gain"] = float(gain[0])
            info["objective"] = float(objective(gain, result.fossil_parameters, sizes, rho)[0])
        return info


class FactoredActions(
    gymnasium.ActionWrapper[Observation, NDArray[np.int64], np.int64], gymnasium.utils.RecordConstructorArgs
):
    """`esper/Growth-v0` with one choice per head: op, slot, blueprint, and what else the preset has.

    Masks say which choices occur in a legal action. A combination of them that is not legal itself waits, and is
    counted in `info["illegal"]`.
    """

    def __init__(self, env: gymnasium.Env[Observation, np.int64]) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self)
        super().__init__(env)
        if not isinstance(env.unwrapped, GrowthEnv):
            raise BadValueError(f"FactoredActions wraps {ID}, not {env}")
        self._actions = env.unwrapped.actions
        heads = self._actions.table.heads
        self.action_space = gymnasium.spaces.MultiDiscrete([len(self._actions.ops), *(head.size for head in heads[1:])])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode, as the environment does."""
        observation, info = super().reset(seed=seed, options=options)
        return observation, info | {"action_mask": self.action_masks()}

    def step(self, action: NDArray[np.int64]) -> tuple[Observation, float, bool, bool, Info]:
        """Carry out one choice per head."""
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, float(reward), terminated, truncated, info | {"action_mask": self.action_masks()}

    def action(self, action: NDArray[np.int64]) -> np.int64:
        """The complete action of these choices."""
        if not self.action_space.contains(np.asarray(action)):
            raise BadValueError(f"action {np.asarray(action).tolist()} is not in {self.action_space}")
        op, *others = (int(choice) for choice in action)
        return np.int64(self._actions.index([self._actions.ops[op], *others]))

    def action_masks(self) -> NDArray[np.bool_]:
        """The choices that occur in a legal action, head after head in one array."""
        legal = self.env.get_wrapper_attr("action_masks")()
        return np.concatenate(self._actions.legal_choices(legal))


def column_names(layout: ObservationLayout, slot_ids: tuple[str, ...]) -> tuple[str, ...]:
    """A name per number of an observation. The critic's columns, which show the control, are left out."""
    slots = (f"{slot_id}.{name}" for slot_id in slot_ids for name in layout.slot)
    offers = (
        f"{slot_id}.{blueprint}.{name}"
        for slot_id in slot_ids
        for blueprint in layout.vocabulary
        for name in layout.offer
    )
    return (*layout.host, *slots, *offers)


if ID not in gymnasium.registry:
    gymnasium.register(id=ID, entry_point=f"{__name__}:{GrowthEnv.__name__}")
