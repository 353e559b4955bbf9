"""The governor watches every host for divergence, and snapshots restore the hosts that panic.

Signs are gathered per minibatch, on the device, for all envs at once; the CPU reads the verdicts once per step. What
is normal is learnt per env; limits are relative to the task's random-guess loss.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.kasmina import SeedState
from esper.leyline import BadValueError

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet


class Symptom(IntEnum):
    """What is wrong with a host; the value is its column among the signs."""

    NOT_FINITE = 0  # loss, gradients, weights or statistics
    COLLAPSE = 1  # back at the random-guess loss after having left it
    DIVERGENCE = 2  # loss far above normal: in several consecutive minibatches, or on the validation set
    FLAT_LOGITS = 3  # outputs that no longer depend on the input, but did before
    RUNAWAY_UPDATE = 4  # one update as large as the weights themselves


@dataclass(frozen=True)
class GovernorConfig:
    """Limits of the governor."""

    sigmas: float = 6.0  # divergence: standard deviations above the mean …
    multiple: float = 3.0  # … and multiples of it
    patience: int = 3  # consecutive minibatches before a divergence counts
    left_guessing: float = 0.6  # a mean loss below this share of the random-guess loss: the host has left guessing
    guessing_band: float = 0.065  # within this share of the random-guess loss: it guesses
    flat_share: float = 1e-4  # logit variance below this share of its running mean counts as none
    update_ratio: float = 1.0  # norm of an update relative to that of the weights
    decay: float = 0.95  # of the running means, per minibatch
    warmup: int = 10  # minibatches before anything counts as normal

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0 or min(self.patience, self.warmup) < 1:
            raise BadValueError(f"{self}: decay must lie between 0 and 1, patience and warmup must be at least 1")


@dataclass(frozen=True)
class Panic:
    """A host that was restored from its snapshot, and why."""

    env: int
    symptoms: tuple[Symptom, ...]


class Governor:
    """Vital signs of N hosts, as tensors over envs."""

    def __init__(
        self, n: int, random_guess_loss: float, config: GovernorConfig | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.config = config or GovernorConfig()
        self.guess = random_guess_loss
        self.signs = torch.zeros(n, len(Symptom), dtype=torch.bool, device=device)
        self._mean, self._square, self._variance = torch.zeros(3, n, dtype=torch.float64, device=device)
        self._seen, self._high = torch.zeros(2, n, dtype=torch.int64, device=device)

    @torch.no_grad()
    def observe(self, losses: Tensor, gradients_finite: Tensor, logit_variance: Tensor, update_ratio: Tensor) -> None:
        """One minibatch of all envs, each (N,). No device sync."""
        losses, logit_variance = losses.double(), logit_variance.double()
        finite = losses.isfinite() & gradients_finite
        known = self._seen >= self.config.warmup
        high = known & self._is_high(losses)
        self._high.copy_(torch.where(high, self._high + 1, 0))
        left = known & (self._mean < self.config.left_guessing * self.guess)
        guesses = (losses - self.guess).abs() <= self.config.guessing_band * self.guess
        flat = known & (logit_variance <= self.config.flat_share * self._variance)
        diverges, runaway = self._high >= self.config.patience, ~(update_ratio <= self.config.update_ratio)
        self.signs |= torch.stack([~finite, left & guesses, diverges, flat, runaway], 1)  # in the order of Symptom
        # Running means, corrected for their start: after k values each weighs as in a mean of k.
        healthy = finite & ~high
        weight = torch.maximum(1.0 / (self._seen + 1), torch.full_like(self._mean, 1 - self.config.decay))
        for running, value in ((self._mean, losses), (self._square, losses.square()), (self._variance, logit_variance)):
            running.copy_(torch.where(healthy, running + weight * (value - running), running))
        self._seen += healthy

    @torch.no_grad()
    def examine(self, validation_losses: Tensor, state_finite: Tensor) -> None:
        """The end of a step: losses on the validation set, and whether weights and statistics are finite, each (N,)."""
        losses = validation_losses.to(self._mean)
        known = self._seen >= self.config.warmup
        self.signs[:, Symptom.NOT_FINITE] |= ~(losses.isfinite() & state_finite)
        self.signs[:, Symptom.DIVERGENCE] |= known & self._is_high(losses) & (losses > self.guess)

    def verdicts(self) -> list[Panic]:
        """The envs that panic, and why. Resets the signs. Device sync: once per step."""
        signs = self.signs.tolist()
        self.signs.zero_()
        return [Panic(env, tuple(s for s in Symptom if row[s])) for env, row in enumerate(signs) if any(row)]

    def reset(self) -> None:
        """Start anew with new hosts."""
        self.signs.zero_()
        self.relearn(slice(None))

    def relearn(self, env: int | slice) -> None:
        """Learn anew what is normal for a host, after a controller has changed what it computes."""
        for tensor in (self._mean, self._square, self._variance, self._seen, self._high):
            tensor[env] = 0

    def _is_high(self, losses: Tensor) -> Tensor:
        deviation = (self._square - self._mean.square()).clamp_min(0).sqrt()
        return losses > torch.maximum(self._mean + self.config.sigmas * deviation, self.config.multiple * self._mean)


class SnapshotStore:
    """Weights, statistics, structure, stages, schedules and counters of a whole fleet."""

    def __init__(self, fleet: "HostFleet") -> None:
        self.fleet = fleet
        self._tensors: dict[str, Tensor] = {}
        self.take()

    @torch.no_grad()
    def take(self) -> None:
        """Store every env as it is now. Device sync: once per step, for the copies to arrive."""
        fleet = self.fleet
        pinned = fleet.device.type == "cuda"
        for name, tensor in self._sources().items():
            if name not in self._tensors:  # pinned, so that the copies can overlap
                self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._tensors[name].copy_(tensor, non_blocking=pinned)
        self._states: list[dict[str, SeedState]] = [dict(states) for states in fleet.states]
        if pinned:
            torch.cuda.current_stream(fleet.device).synchronize()

    @torch.no_grad()
    def restore(self, env: int) -> None:
        """Restore one env: weights, statistics, structure, states. Clears its optimiser state."""
        fleet = self.fleet
        fleet.check_env(env)
        before = self._states[env]
        for slot_id in before:
            fleet.uproot(env, slot_id)
        for name, tensor in self._sources().items():
            # A bank that is younger than the snapshot held no seed then.
            tensor[env] = self._tensors[name][env].to(fleet.device, non_blocking=True) if name in self._tensors else 0
        fleet.optimizer.clear(env)
        fleet.adopt(env, before)

    def _sources(self) -> dict[str, Tensor]:
        banks = {f"bank {slot_id} {name}": bank.weights.matrix for (slot_id, name), bank in self.fleet.banks.items()}
        return {"host": self.fleet.host.weights.matrix, **self.fleet.host.buffers, **banks}
