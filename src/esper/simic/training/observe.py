"""What a controller sees of a fleet, or of another growable."""

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from esper.kasmina import LifecycleConfig, SeedState
from esper.kasmina.blending import gate_parameters
from esper.kasmina.compare import Comparison, RowScore
from esper.kasmina.gates import GATES
from esper.leyline import LIVE_STAGES, SeedStage, SlotSpec
from esper.simic.training.hosts import Groups
from esper.tamiyo.features import SLOT_COLUMNS
from esper.tamiyo.signals import CriticView, HostView, OfferView, SlotView, TrainingSignals
from esper.tolaria.growable import Growable
from esper.tolaria.measurement import Sensing


class Observer:
    """Turns measurements of a growable into signals. Tracks the last and best accuracy and the best contributions.

    Accuracies are what the growable gives as points.
    """

    def __init__(self, growable: Growable, groups: Groups, *, gated: bool = False) -> None:
        """`gated`: seeds may have a gate, whose parameters then count towards the budget."""
        self.growable, self.groups = growable, groups
        slots, n, device = list(growable.slots.values()), groups.grown, growable.device
        self.names = growable.slot_config.blueprint_names
        self._width = torch.tensor([float(slot.width) for slot in slots], device=device).expand(n, -1)
        self._depth = torch.tensor([slot.position for slot in slots], device=device).expand(n, -1)
        costs = [[_cost(slot, name) for name in self.names] for slot in slots]
        gates = [float(gate_parameters("gate", slot.width)) if gated else 0.0 for slot in slots]
        self._parameters = torch.tensor(costs, device=device)
        self._gates = torch.tensor(gates, device=device).unsqueeze(1)
        self._budget = float(growable.budget)
        self.begin()

    def begin(self) -> None:
        """Forget the last episode, and look at the sizes of the new hosts."""
        n, device = self.groups.grown, self.growable.device
        sizes = [float(self.growable.host_size(env)) for env in self.groups.envs]
        self._host = torch.tensor(sizes, device=device)
        self._accuracy: Tensor | None = None
        self._control: Tensor | None = None
        self._best_accuracy = torch.full((n,), -torch.inf, device=device)
        self._best_at = torch.zeros(n, device=device)
        self._best = np.full((n, len(self.growable.slots)), np.nan)

    def state(self) -> dict[str, Tensor]:
        """What is tracked within an episode. Before the first look there is no last accuracy."""
        last = {"accuracy": self._accuracy, "control": self._control}
        best = {"best_accuracy": self._best_accuracy, "best_at": self._best_at, "best": torch.from_numpy(self._best)}
        return {name: tensor.clone() for name, tensor in (last | best).items() if tensor is not None}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        device = self.growable.device
        here = {name: tensor.to(device, copy=True) for name, tensor in state.items() if name != "best"}
        self._accuracy, self._control = here.get("accuracy"), here.get("control")
        self._best_accuracy, self._best_at = here["best_accuracy"], here["best_at"]
        self._best = state["best"].numpy(force=True).copy()

    def look(
        self,
        comparisons: Sequence[Comparison],
        sensing: Sensing,
        potential: Tensor,
        last_op: Tensor,
        last_succeeded: Tensor,
    ) -> TrainingSignals:
        """Signals of all grown envs after a step; there is one comparison per env of the growable.

        Device sync: one, for accuracies and losses of all rows.
        """
        growable, groups, unit = self.growable, self.groups, self.growable.random_guess_loss
        rows = [comparison.main for comparison in comparisons]
        accuracies, losses = growable.points(rows), loss_of(rows)
        accuracy, control = groups.grown_of(accuracies), groups.control_of(accuracies)
        done = growable.progress
        better = accuracy > self._best_accuracy
        self._best_accuracy = torch.where(better, accuracy, self._best_accuracy)
        self._best_at = torch.where(better, done, self._best_at)
        grown = torch.tensor([float(growable.grown_parameters(env)) for env in groups.envs], device=growable.device)
        train = torch.nan_to_num(groups.grown_of(growable.losses.to(growable.device)), nan=unit)
        hosts = HostView(
            time_left=torch.full_like(accuracy, 1 - done),
            train_loss=train.float() / unit,
            validation_loss=groups.grown_of(losses) / unit,
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
        slots = self.slots(comparisons, sensing)
        free = (slots.stage == int(SeedStage.DORMANT)).unsqueeze(-1)
        affordable = self._parameters + self._gates <= (self._budget - grown)[:, None, None]
        fits = free & affordable & (self._parameters > 0)
        offers = OfferView(groups.grown_of(sensing.offers), fits, self._parameters / self._host[:, None, None])
        return TrainingSignals(hosts, slots, offers, critic)

    def slots(self, comparisons: Sequence[Comparison], sensing: Sensing) -> SlotView:
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
        numbers = np.zeros((len(described), self.groups.grown, len(self.growable.slots)))
        for row, env in enumerate(self.groups.envs):
            for index, (slot_id, state) in enumerate(self.growable.states[env].items()):
                values = self._describe(state, comparisons[env], slot_id, row, index)
                numbers[:, row, index] = [values.get(column.name, 0.0) for column in described]
        tensors = torch.from_numpy(numbers).float().to(self.growable.device)
        rest = {column.name: tensor.to(column.dtype) for column, tensor in zip(described, tensors, strict=True)}
        return SlotView.from_columns(measured | rest)

    def _describe(
        self, state: SeedState, comparison: Comparison, slot_id: str, row: int, column: int
    ) -> dict[str, float]:
        config, live = self.growable.config, state.stage in LIVE_STAGES
        described: dict[str, float] = {
            **{column.name: attrgetter(column.seed)(state) for column in SLOT_COLUMNS if column.seed is not None},
            "present": 1,
            "blueprint": self.names.index(state.blueprint) if state.blueprint is not None else -1,
            "can_advance": state.stage is SeedStage.TRAINING and _passes(state, SeedStage.BLENDING, config),
            "can_fossilize": state.stage is SeedStage.HOLDING and _passes(state, SeedStage.FOSSILIZED, config),
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
        if slot_id in comparison.auditions:
            described["audition_loss"] = comparison.auditions[slot_id].loss.value
        if slot_id in comparison.contributions:
            described["contribution_loss"] = comparison.contributions[slot_id].loss.value
        if live and state.gradient_norm is not None and np.isfinite(state.gradient_norm):
            described |= {"seed_gradient": state.gradient_norm, "seed_gradient_valid": 1}
        if not np.isnan(self._best[row, column]):
            described |= {"best": self._best[row, column], "best_valid": 1}
        return described


def loss_of(rows: Sequence[RowScore]) -> Tensor:
    """Mean loss (rows,), on the device."""
    return torch.stack([row.losses for row in rows]).float().mean(1)


def _passes(state: SeedState, target: SeedStage, config: LifecycleConfig) -> bool:
    return GATES[target](state, config.thresholds).passed


def _cost(slot: SlotSpec, name: str) -> float:
    # 0 if it is not offered
    return float(next((offer.parameters for offer in slot.blueprints if offer.name == name), 0))
