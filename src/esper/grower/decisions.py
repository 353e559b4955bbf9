"""From validation data to actions: measure a growing model, let a policy look at it, and carry out what it decides."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.grower.growing_model import GrowingModel
from esper.grower.policies import OwnPolicy, make_policy, read_actions
from esper.grower.records import OPS, Action, GrowthReport, Offer
from esper.grower.scoring import Batch, InputTap, RowRunner, Scorer, score_rows
from esper.grower.sensing import ModelProber
from esper.kasmina import lifecycle
from esper.kasmina.compare import Comparison, RowScore, paired_difference
from esper.kasmina.slot import Role
from esper.leyline import ACTIVE_STAGES, BadValueError, LifecycleOp, SeedStage, StageChange, derive_seed, head_preset
from esper.leyline.records import Json
from esper.simic.training.episode import apply_action
from esper.simic.training.hosts import Groups
from esper.simic.training.observe import Observer
from esper.tamiyo import PolicyView, growth_layout, growth_masks, growth_table, signals_to_features
from esper.tolaria.measurement import Sensing

JUDGED = ACTIVE_STAGES - {SeedStage.FOSSILIZED}


class Decider:
    """The policy of one growing model, and everything that it needs to see."""

    def __init__(
        self, growing: GrowingModel, scorer: Scorer, tap: InputTap, policy: str | Path | OwnPolicy, steps: int
    ) -> None:
        self.growing, self.scorer, self.steps = growing, scorer, steps
        self.runner = RowRunner(growing.host, growing.modules, tap)
        self.preset = head_preset("core")
        self.table = growth_table(self.preset, growing.slot_config)
        self.layout = growth_layout(growing.slot_config)
        self.observer = Observer(growing, Groups(1, 1, controls=False))
        self.prober = ModelProber(growing, self.runner, scorer)
        self.own = policy if callable(policy) else None
        self.policy = None if callable(policy) else make_policy(policy, self.table, growing.slot_config, self.layout, steps)
        self.state = None if self.policy is None else self.policy.initial_state([growing.rng_seed])
        self.last_op = torch.full((1,), int(LifecycleOp.WAIT))

    def measure(self, batches: Iterable[Batch]) -> Comparison:
        """Score the model, and the model without each seed that is not committed; records the contributions."""
        growing = self.growing
        judged = [slot_id for slot_id, state in growing.states[0].items() if state.stage in JUDGED]
        rows = {None: {}, **{slot_id: {slot_id: Role.SILENT} for slot_id in judged}}
        scores = score_rows(self.runner, self.scorer, batches, rows, growing.device)
        main = scores[None]
        comparison = Comparison(main, None, {}, {})
        for slot_id in judged:
            contribution = comparison.contributions[slot_id] = paired_difference(main, scores[slot_id])
            state = growing.states[0][slot_id]
            growing.states[0][slot_id] = lifecycle.record_contribution(state, contribution.points)
        return comparison
