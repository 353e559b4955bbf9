"""What a controller sees of a fleet."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from esper.kasmina import SeedState
from esper.kasmina.blending import gate_parameters
from esper.kasmina.compare import RowScore
from esper.kasmina.gates import GATES
from esper.leyline import LIVE_STAGES, SeedStage, SlotSpec
from esper.simic.training.hosts import Groups
from esper.tamiyo.features import SLOT_COLUMNS
from esper.tamiyo.signals import CriticView, HostView, OfferView, SlotView, TrainingSignals
from esper.tolaria import HostFleet
from esper.tolaria.measurement import FleetComparison, Sensing


class Observer:
    """Turns measurements of a fleet into signals. Tracks the last and best accuracy and the best contributions."""

    def __init__(self, fleet: HostFleet, groups: Groups, *, gated: bool = False) -> None:
        """`gated`: seeds may have a gate, whose parameters then count towards the budget."""
        self.fleet, self.groups = fleet, groups
        slots, n, device = list(fleet.slots.values()), groups.grown, fleet.device
        self.names = fleet.task.slot_config.blueprint_names
        self._width = torch.tensor([float(slot.width) for slot in slots], device=device).expand(n, -1)
        self._depth = torch.tensor([slot.position for slot in slots], device=device).expand(n, -1)
        host, budget = fleet.task.host_parameters, fleet.budget
        costs = [[_cost(slot, name) for name in self.names] for slot in slots]
        self._cost = torch.tensor(costs, device=device).expand(n, -1, -1) / host
        gates = [float(gate_parameters("gate", slot.width)) if gated else 0.0 for slot in slots]
        self._parameters = torch.tensor(costs, device=device)
        self._gates = torch.tensor(gates, device=device).unsqueeze(1)
        self._host, self._budget = float(host), float(budget)
        self.begin()

    def begin(self) -> None:
        """Forget the last episode."""
        n, device = self.groups.grown, self.fleet.device
        self._accuracy: Tensor | None = None
        self._control: Tensor | None = None
        self._best_accuracy = torch.full((n,), -1.0, device=device)
        self._best_at = torch.zeros(n, device=device)
        self._best = np.full((n, len(self.fleet.slots)), np.nan)

    def look(
        self, comparison: FleetComparison, sensing: Sensing, potential: Tensor, last_op: Tensor, last_succeeded: Tensor
    ) -> TrainingSignals:
        """Signals of all grown envs after a step. Device sync: one, for accuracies and losses of all rows."""
        fleet, groups, task = self.fleet, self.groups, self.fleet.task
        accuracies, losses = accuracy_of(comparison.main), loss_of(comparison.main)
        accuracy, control = groups.grown_of(accuracies), groups.control_of(accuracies)
        done = fleet.step_index / task.steps
        better = accuracy > self._best_accuracy
        self._best_accuracy = torch.where(better, accuracy, self._best_accuracy)
        self._best_at = torch.where(better, done, self._best_at)
        grown = torch.tensor([float(fleet.grown_parameters(env)) for env in groups.envs], device=fleet.device)
        train = torch.nan_to_num(groups.grown_of(fleet.losses.to(fleet.device)), nan=task.random_guess_loss)
        hosts = HostView(
            time_left=torch.full_like(accuracy, 1 - done),
            train_loss=train.float() / task.random_guess_loss,
            validation_loss=groups.grown_of(losses) / task.random_guess_loss,
            accuracy=accuracy,
            accuracy_change=torch.zeros_like(accuracy) if self._accuracy is None else accuracy - self._accuracy,
            best_accuracy=self._best_accuracy,
            stale=done - self._best_at,
            grown=grown / self._host,
            budget_left=(self._budget - grown) / self._budget,
            last_op=last_op,
            last_succeeded=last_succeeded,
        )
        critic = CriticView(
            potential, control, torch.zeros_like(control) if self._control is None else control - self._control, control
        )
        self._accuracy, self._control = accuracy, control
        slots = self.slots(comparison, sensing)
        free = (slots.stage == int(SeedStage.DORMANT)).unsqueeze(-1)
        affordable = self._parameters + self._gates <= (self._budget - grown)[:, None, None]
        fits = free & affordable & (self._parameters > 0)
        offers = OfferView(groups.grown_of(sensing.offers), fits, self._cost)
        return TrainingSignals(hosts, slots, offers, critic)

    def slots(self, found: FleetComparison, sensing: Sensing) -> SlotView:
        """The slots of all grown envs as they are now."""
        grown_of = self.groups.grown_of
        measured = {
            "width": self._width,
            "depth": self._depth,
            "rms": grown_of(sensing.rms),
            "rank": grown_of(sensing.rank),
            "gradient": grown_of(sensing.gradient),
        }
        described = [column for column in SLOT_COLUMNS if column.name not in measured]
        numbers = np.zeros((len(described), self.groups.grown, len(self.fleet.slots)))
        for row, env in enumerate(self.groups.envs):
            for index, (slot_id, state) in enumerate(self.fleet.states[env].items()):
                values = self._describe(state, found, env, slot_id, row, index)
                numbers[:, row, index] = [values.get(column.name, 0.0) for column in described]
        tensors = torch.from_numpy(numbers).float().to(self.fleet.device)
        rest = {column.name: tensor.to(column.dtype) for column, tensor in zip(described, tensors, strict=True)}
        return SlotView.from_columns(measured | rest)

    def _describe(
        self, state: SeedState, found: FleetComparison, env: int, slot_id: str, row: int, column: int
    ) -> dict[str, float]:
        config, live = self.fleet.config, state.stage in LIVE_STAGES
        described: dict[str, float] = {
            **{column.name: attrgetter(column.seed)(state) for column in SLOT_COLUMNS if column.seed is not None},
            "blueprint": self.names.index(state.blueprint) if state.blueprint is not None else -1,
            "can_advance": state.stage is SeedStage.TRAINING and _passes(state, SeedStage.BLENDING, self.fleet),
            "can_fossilize": state.stage is SeedStage.HOLDING and _passes(state, SeedStage.FOSSILIZED, self.fleet),
            "can_prune": live
            and state.stage not in (SeedStage.FOSSILIZED, SeedStage.GERMINATED)
            and not state.ramping
            and not (state.stage is SeedStage.TRAINING and state.steps_in_stage < config.min_prune_age),
            "can_retarget": state.stage is SeedStage.HOLDING,
        }
        if (audition := state.audition) is not None:
            described |= {"audition": audition.value, "audition_error": audition.error, "audition_valid": 1}
        if (contribution := state.contribution) is not None:
            described |= {"contribution": contribution.value, "contribution_error": contribution.error}
            described["contribution_valid"] = 1
            self._best[row, column] = np.fmax(self._best[row, column], contribution.value)
        if (env, slot_id) in found.auditions:
            described["audition_loss"] = found.auditions[env, slot_id].loss.value
        if (env, slot_id) in found.contributions:
            described["contribution_loss"] = found.contributions[env, slot_id].loss.value
        if live and state.gradient_norm is not None and np.isfinite(state.gradient_norm):
            described |= {"seed_gradient": state.gradient_norm, "seed_gradient_valid": 1}
        if not np.isnan(self._best[row, column]):
            described |= {"best": self._best[row, column], "best_valid": 1}
        return described


def accuracy_of(rows: Sequence[RowScore]) -> Tensor:
    """Accuracy (rows,) in percent, on the device."""
    return 100 * torch.stack([row.correct for row in rows]).float().mean(1)


def loss_of(rows: Sequence[RowScore]) -> Tensor:
    """Mean cross-entropy (rows,), on the device."""
    return torch.stack([row.losses for row in rows]).float().mean(1)


def _passes(state: SeedState, target: SeedStage, fleet: HostFleet) -> bool:
    return GATES[target](state, fleet.config.thresholds).passed


def _cost(slot: SlotSpec, name: str) -> float:
    # 0 if it is not offered
    return float(next((offer.parameters for offer in slot.blueprints if offer.name == name), 0))
