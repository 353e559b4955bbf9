"""From a step of the fleet to its reward."""

import torch
from torch import Tensor

from esper.simic.rewards import RewardConfig, Rewarded, RewardInputs, compute_reward
from esper.simic.training.episode import EpisodeRunner, StepResult
from esper.tamiyo.policy import View


def reward_step(
    config: RewardConfig, runner: EpisodeRunner, view: View, actions: Tensor, result: StepResult
) -> Rewarded:
    """Rewards of all grown envs for the step that led from `view` to `result`."""
    task, like = runner.fleet.task, result.accuracy
    names = runner.table.names
    terminal = torch.full_like(like, runner.done, dtype=torch.bool)
    nothing = torch.zeros_like(like)
    hardened = result.hardened_accuracy is not None
    gain = nothing
    if result.hardened_accuracy is not None and result.hardened_control is not None:
        gain = result.hardened_accuracy - result.hardened_control
    inputs = RewardInputs(
        potential=runner.potential,
        op=actions[:, names.index("op")],
        slot=actions[:, names.index("slot")],
        before=view.signals.slots,
        after=result.slots,
        seed_parameters=result.seed_parameters,
        gain=result.gain,
        control_accuracy=result.control_accuracy,
        chance_accuracy=torch.full_like(like, 100 / task.classes),
        loss=result.loss,
        acting_parameters=result.acting_parameters,
        fossil_parameters=result.fossil_parameters,
        host_parameters=torch.full_like(like, task.host_parameters),
        terminal=terminal,
        objective_gain=gain,
        objective_loss=result.hardened_loss if hardened and result.hardened_loss is not None else nothing,
        panic=result.panics,
    )
    return compute_reward(config, inputs)
