"""Settings of PPO."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from esper.leyline import BadValueError, UnknownNameError
from esper.leyline.numbers import require_positive, require_share, require_whole
from esper.tamiyo import NetworkConfig

CompileMode = Literal["off", "default", "max-autotune-no-cudagraphs"]
Clipping = Literal["per_head", "joint"]

ADAM_EPS = 1e-5
"""PPO's usual value: with Adam's 1e-8, the first steps of rarely used heads are as large as the rate allows."""
KL_STOP = 1.5
"""An update stops at this multiple of the target, because single minibatches scatter by half the mean."""
GAP_REFUSED = 1e-2
"""Log-probs that differ this much between collection and update belong to another policy."""
FAILURES_ALLOWED = 3
"""The run stops after this many updates in a row without a finite gradient."""
NORM_EPS = 1e-6
"""Added to the global norm that divides gradients, as in torch's own clipping."""


@dataclass(frozen=True)
class PPOConfig:
    """Settings of the agent. Schedules run over the updates of a run."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    steps: int = 128
    """Steps per env in a round."""
    epochs: int = 10
    """Passes over a round in one update."""
    minibatches: int = 4
    """Minibatches per epoch; each holds whole envs."""
    pieces: int = 1
    """Pieces per minibatch; their gradients are accumulated, to bound memory."""
    gamma: float = 0.99
    """Discount per step."""
    lam: float = 0.95
    """GAE's λ."""
    rate: float = 1e-3
    """Adam's learning rate."""
    rate_end: float = 1.0
    """Share of the rate at the end of the run; it falls linearly."""
    clip: float = 0.2
    """The ratio of each head is clipped to 1 ± this."""
    clipping: Clipping = "per_head"
    """`joint`: one ratio for all heads of a step, with the step's advantage (heads are then not centred)."""
    centred: bool = True
    """Centre the advantages of each head over the steps that used it."""
    clip_end: float = 1.0
    """Share of the clip range at the end of the run."""
    target_kl: float | None = 0.03
    """The update stops when the KL of the joint policy exceeds 1.5 times this; None: never."""
    clip_norm: float = 0.5
    """Global norm at which gradients are clipped."""
    leash: float = 0.0
    """Initial coefficient of the KL from the policy that the run started with; it falls to 0 at `leash_until`."""
    leash_until: float = 0.5
    """Share of the run."""
    critic_first: int = 0
    """Updates at the start of the run in which only the critic learns, for a policy that was made without one."""
    leave_one_out: bool = False
    """Subtract from each advantage the mean of the other members of its group, who meet the same host."""
    value_coefficient: float = 0.5
    value_clip: float | None = None
    """Clip new values to the old ones ± this, in standard deviations of the returns; None: off."""
    huber: float | None = None
    """Error at which the value loss turns linear, in the same units; None: squared error."""
    forced_value_weight: float = 0.2
    """Weight of forced steps in the value loss."""
    critic_decay: float = 1e-4
    """Weight decay, of the critic alone."""
    entropy: float = 0.02
    """Initial coefficient of the normalised entropy, mean over heads."""
    entropy_end: float = 0.1
    """Share of it at the end of the run."""
    logit_penalty: float = 3e-4
    """Coefficient of the variance of the legal logits, mean over heads; it restores collapsed heads, but keeps a policy
    from becoming certain."""
    explore: float = 0.05
    """Initial share of uniform choices in the policy; it falls to 0 at `explore_until`, and is 0 in evaluation."""
    explore_until: float = 0.6
    """Share of the run."""
    advantage_floor: float | tuple[float, ...] = 1e-3
    """Minimum standard deviation that divides advantages; one number, or one per task."""
    normalise_observations: bool = True
    normalise_rewards: bool = True
    """Scale rewards by the deviation of the discounted return (`learn` only)."""
    freeze_after: float = 0.2
    """Share of the run after which the statistics of observations freeze."""
    compile: CompileMode = "off"
    """`torch.compile` of encoder and heads; the LSTM is one fused kernel already."""

    def __post_init__(self) -> None:
        for name in ("steps", "epochs", "minibatches", "pieces"):
            require_whole(name, getattr(self, name), 1)
        for name in ("gamma", "clip_end"):
            require_share(name, getattr(self, name))
        for name in ("rate", "clip", "clip_norm"):
            require_positive(name, getattr(self, name))
        for floor in self.advantage_floor if isinstance(self.advantage_floor, tuple) else (self.advantage_floor,):
            require_positive("advantage_floor", floor)
        for name in ("target_kl", "value_clip", "huber"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name), remark="; None switches it off")
        require_whole("critic_first", self.critic_first, 0)
        weights = ("value_coefficient", "forced_value_weight", "critic_decay", "entropy", "logit_penalty", "leash")
        for name in (*weights, "lam", "rate_end", "entropy_end", "explore_until", "freeze_after", "leash_until"):
            if not (0 <= getattr(self, name) < math.inf and (name in weights or getattr(self, name) <= 1)):
                wanted = "a finite number of 0 or more" if name in weights else "in [0, 1]"
                raise BadValueError(f"{name} {getattr(self, name)!r} is not {wanted}")
        if not 0 <= self.explore < 1:
            raise BadValueError(f"explore {self.explore!r} is not in [0, 1); with 1 there is nothing to learn")
        for kind, name, known in (("compile mode", self.compile, CompileMode), ("clipping", self.clipping, Clipping)):
            if name not in get_args(known):
                raise UnknownNameError(kind, name, get_args(known))

    def floors(self, tasks: int) -> tuple[float, ...]:
        """The floor of the advantages of each task."""
        floor = self.advantage_floor
        floors = floor if isinstance(floor, tuple) else (floor,) * tasks
        if len(floors) != tasks:
            raise BadValueError(f"advantage_floor has {len(floors)} numbers for {tasks} tasks; use one per task")
        return floors

    def entropy_at(self, progress: float) -> float:
        """Entropy coefficient at a share of the run."""
        return self.entropy * _falling(self.entropy_end, progress)

    def rate_at(self, progress: float) -> float:
        """Learning rate at a share of the run."""
        return self.rate * _falling(self.rate_end, progress)

    def clip_at(self, progress: float) -> float:
        """Clip range at a share of the run."""
        return self.clip * _falling(self.clip_end, progress)

    def explore_at(self, progress: float) -> float:
        """ε at a share of the run."""
        return self.explore * _vanishing(self.explore_until, progress)

    def leash_at(self, progress: float) -> float:
        """Coefficient of the KL from the start, at a share of the run."""
        return self.leash * _vanishing(self.leash_until, progress)


def _vanishing(until: float, progress: float) -> float:
    """From 1 to 0 at `until`, linearly."""
    return max(0.0, 1 - progress / until) if until else 0.0


def _falling(end: float, progress: float) -> float:
    """From 1 to `end`, linearly."""
    return 1 + (end - 1) * min(1.0, progress)
