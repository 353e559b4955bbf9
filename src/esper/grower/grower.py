"""`Grower`: a model grows in its user's own loop, and ends as a plain module.

    grower = esper.Grower(model, optimizer, budget=50_000, steps=30)
    for epoch in range(30):
        train_one_epoch(model, optimizer)    # unchanged
        print(grower.step(val_loader))
    model = grower.finish()                  # the same object

A step measures the model on validation data, and once more for each seed with that seed silenced. Then it moves timers,
asks the policy, and carries out its actions. Seeds act from birth: their scale is zero, so the model's output does not
jump, and they learn from the user's own loss.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.grower import ranks
from esper.grower.container import CHILD, ModelSlots
from esper.grower.decisions import Decider
from esper.grower.finishing import build_in
from esper.grower.growing_model import GrowingModel
from esper.grower.membership import Membership
from esper.grower.places import Places
from esper.grower.policies import OwnPolicy
from esper.grower.records import GrowthRecord, GrowthReport
from esper.grower.scoring import Batch, Forward, InputTap, Loss, Scorer
from esper.kasmina.attach import check_model, check_slots
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.slot import fork_rng
from esper.leyline import ACTIVE_STAGES, BadValueError, SeedStage, StageError
from esper.leyline.numbers import require_whole

UNKNOWN_STEPS = 20


class Grower:
    """Grows one model under a budget of parameters."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        budget: int,
        steps: int | None = None,
        loss: Loss | None = None,
        forward: Forward | None = None,
        slots: Mapping[str, int] | Literal["auto"] = "auto",
        policy: str | Path | OwnPolicy = "heuristic",
        rng_seed: int = 0,
    ) -> None:
        """`budget` limits the parameters of all seeds together; `steps` is how often `step` will be called.

        `loss(output, batch)` returns one value per sample; by default cross-entropy, where outputs and targets say so.
        `forward(model, batch)` returns the output; by default `model(**batch)` for a dict, `model(*batch[:-1])` for a
        tuple. `slots` names submodules with their widths, such as `{"layer2": 128}`; by default they are chosen at the
        first forward pass. `policy` is `heuristic`, `random`, `wait`, the folder of a trained run, or a function that
        takes a `GrowthReport` and returns actions.
        """
        require_whole("budget", budget, 1, remark=": it is the number of parameters that may grow")
        require_whole("rng_seed", rng_seed)
        if steps is not None:
            require_whole("steps", steps, 1, remark=": it is how often step() will be called")
        if loss is not None and not callable(loss):
            raise BadValueError(f"loss is a {type(loss).__name__}; pass a function of (output, batch)")
        host = ranks.unwrap(model)
        check_model(host)
        if slots != "auto":
            check_slots(host, slots)
        self.model, self.optimizer, self.budget, self.rng_seed = model, optimizer, budget, rng_seed
        self.steps = steps if steps is not None else UNKNOWN_STEPS
        self._steps_given = steps is not None
        self._wanted, self._policy = slots, policy
        self._scorer = Scorer(loss, forward)
        self._host = host
        self._membership = Membership(optimizer, host)
        self._slots = ModelSlots(host, "shadow")
        self._slots.on_change = self._loaded
        host.add_module(CHILD, self._slots)
        self._tap = InputTap(on_first=self._begin)
        self._tap_handle = host.register_forward_pre_hook(self._tap, with_kwargs=True)
        self._growing: GrowingModel | None = None
        self._decider: Decider | None = None
        self._finished = False
