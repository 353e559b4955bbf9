"""The parts of PPO's loss: pure functions of tensors, each with a hand-computed test.

Sums are over the steps of a minibatch and are divided by what the caller gives: counts over the whole round, so that
the gradient of a round does not depend on how it is cut into minibatches and pieces.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline import BadValueError

LOG_RATIO_LIMIT = 20.0
"""log r is clamped to ± 20 before exp: far beyond any clip range, and e²⁰ squared is still finite in float32."""


def ratios(log_probs: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """r = π/π_old and log r, finite for all finite log-probs."""
    log_ratio = (log_probs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp(), log_ratio


def surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic objective, negated: −min(r·A, clip(r, 1 ± ε)·A), element by element."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def joint_surrogate(log_ratio: Tensor, decided: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """The surrogate of the joint action: log-ratios (n, heads) of what was decided, advantages (n,) → the sum over
    steps. One head that has moved far takes the gradient of all heads of its step away."""
    joint = log_ratio.where(decided, 0.0).sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return masked_sum(surrogate(joint, advantages, clip), decided.any(-1))


def kl_terms(ratio: Tensor, log_ratio: Tensor) -> Tensor:
    """r − 1 − log r: an estimate of KL(π_old ‖ π) from samples of π_old, never negative but for rounding."""
    return ratio - 1 - log_ratio


def value_errors(
    values: Tensor, targets: Tensor, *, old: Tensor | None = None, clip: float | None = None, huber: float | None = None
) -> Tensor:
    """Half the squared error (or Huber's loss) per step.

    With `clip` the pessimistic variant: the larger of the error and that of a value held within ± clip of `old`.
    """
    if clip is not None and old is None:
        raise BadValueError("clipping values needs the old ones, from a pass at the weights before the update")
    errors = _errors(values, targets, huber)
    if clip is None or old is None:
        return errors
    held = old + (values - old).clamp(-clip, clip)
    return torch.maximum(errors, _errors(held, targets, huber))


def _errors(values: Tensor, targets: Tensor, huber: float | None) -> Tensor:
    if huber is None:
        return 0.5 * (values - targets).square()
    return F.huber_loss(values, targets, reduction="none", delta=huber)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over steps where the mask is set, (n, …) → (…).

    What it hides may be anything, even not finite. A gradient reaches it as 0, so only what it was computed from has to
    be differentiable there; clamped ratios are.
    """
    return values.where(mask, 0.0).sum(0)
