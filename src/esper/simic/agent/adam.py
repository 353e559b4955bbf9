"""Adam's step in one kernel, and with little before it."""

import torch
from torch import Tensor


class FusedAdamW(torch.optim.AdamW):
    """torch's AdamW with a shorter way to its fused kernel: 0.05 ms a step for a small policy, where torch's own takes
    0.25, most of it in Python, and `foreach` 0.36. State, groups and results are the same.

    `skip` (a number, on the device): where it is 1 the kernel leaves weights, moments and step counts alone. No sync.
    """

    skip: Tensor

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody needs a closure here
        """One step of all weights that have a gradient."""
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            states = [self.state[weight] or self._begin(weight) for weight in weights]
            steps = [state["step"] for state in states]
            if not weights:
                continue
            torch._foreach_add_(steps, [1 - self.skip] * len(steps))
            first, second = group["betas"]
            torch._fused_adamw_(
                weights,
                [weight.grad for weight in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=first,
                beta2=second,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                found_inf=self.skip,
            )

    def _begin(self, weight: Tensor) -> dict[str, Tensor]:
        state = {
            "step": torch.zeros((), device=weight.device),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
        self.state[weight] = state
        return state
