"""`Grower`: a model grows in its user's own loop, and ends as a plain module.

    grower = esper.Grower(model, optimizer, budget=50_000, steps=30)
    for epoch in range(30):
        train_one_epoch(model, optimizer)    # unchanged
        print(grower.step(val_loader))
    model = grower.finish()                  # the same object

A step measures the model on validation data, and once more for each seed with that seed silenced. Then it moves timers,
asks the policy, and carries out its actions. Seeds act from birth: their output is zero then, so the model's does not
jump, and they learn from the user's own loss.
"""

import json
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
from esper.grower.policies import OwnPolicy, check_policy
from esper.grower.records import GrowthRecord, GrowthReport
from esper.grower.rules import LEAST_STEPS
from esper.grower.scoring import Batch, Forward, InputTap, Loss, Scorer
from esper.kasmina.attach import check_model, check_slots
from esper.kasmina.gates import GateThresholds
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.slot import fork_rng
from esper.leyline import BadValueError, EsperError, SeedStage, StageError
from esper.leyline.numbers import require_whole

UNKNOWN_STEPS = 20
"""Calls of `step` that growth is timed for if the user does not say"""


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
        check_policy(policy)
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
        self._decider: Decider | None = None
        self._finished = False
        self._remarks: list[str] = []

    # -- the first forward pass ---------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose and install the slots, before the model runs for the first time."""
        if self._decider is not None:  # a state dict was loaded before
            return
        if torch.compiler.is_compiling():
            raise BadValueError("the slots are chosen in the first forward pass: run one batch before torch.compile")
        places = Places(self._host, args, kwargs)
        streams = places.choose() if self._wanted == "auto" else places.named(self._wanted)
        cheapest = min(offer.parameters for spec, _ in streams for offer in spec.blueprints)
        if self.budget < cheapest:
            raise BadValueError(
                f"budget {self.budget:,} is too small: the smallest seed that fits has {cheapest:,} parameters"
            )
        self._slots.install(streams)
        self._start()
        if ranks.rank() == 0:
            print(self._introduction(), flush=True)

    def _start(self) -> Decider:
        config = LifecycleConfig(thresholds=GateThresholds(min_holding_steps=1), act_from_birth=True)
        growing = GrowingModel(self._slots, self._membership, budget=self.budget, config=config, rng_seed=self.rng_seed)
        self._decider = Decider(growing, self._scorer, self._tap, self._policy, self.steps)
        return self._decider

    def _introduction(self) -> str:
        assert self._decider is not None
        growing = self._decider.growing
        named = ", ".join(f"{spec.slot_id} ({spec.topology}, width {spec.width})" for spec in growing.slots.values())
        share = 100 * self.budget / growing.host_parameters
        lines = [
            f"Esper: slots behind {named}",
            f"Esper: budget {self.budget:,}, {share:.1f} % of the model's {growing.host_parameters:,} parameters",
        ]
        if not self._steps_given:
            lines.append(f"Esper: steps= is not given, so growth is timed for {self.steps} calls of step()")
        if self._policy == "heuristic" and self.steps < LEAST_STEPS:
            lines.append(
                f"Esper: steps={self.steps} is too few to judge a seed, {LEAST_STEPS} are needed: nothing will grow"
            )
        return "\n".join(lines)

    def _loaded(self) -> None:
        """A state dict has replaced the seeds: adopt them, and continue where it was saved."""
        decider = self._decider
        if decider is None:
            if not list(self._slots.items()):
                return  # it was saved before the first forward pass
            decider = self._start()
        decider.growing.adopt_states()
        if self._slots.notes:
            decider.restore(self._slots.notes)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, validation: Iterable[Batch] | float) -> GrowthRecord:
        """Measure the model on validation batches, then let the policy act. Call it once per epoch, say.

        Given a number instead, the validation accuracy in percent (with `loss=`, the validation loss), it works with
        that, but contributions cannot be measured.
        """
        decider = self._ready()
        with fork_rng(self._host):
            decider.growing.check_learning(self._tap.passes)
            self._tap.passes = 0
            record = self._decide(decider, validation) if ranks.world() == 1 else self._together(decider, validation)
        return record

    def _decide(self, decider: Decider, validation: Iterable[Batch] | float) -> GrowthRecord:
        growing = decider.growing
        look = decider.measure(validation)
        decider.step += 1
        changes = [change for _, change in growing.tick()]
        actions = decider.decide()
        self._slots.notes = decider.notes()
        main = look.comparison.main
        blind = isinstance(validation, int | float) and growing.live()
        return GrowthRecord(
            decider.step,
            None if main.correct is None else main.accuracy,
            main.loss,
            tuple(actions),
            tuple(changes),
            {slot_id: each.points for slot_id, each in look.comparison.contributions.items()},
            growing.grown_parameters(0),
            self.budget,
            ("contributions need validation data, not a number",) if blind else (),
        )

    def _together(self, decider: Decider, validation: Iterable[Batch] | float) -> GrowthRecord:
        """Rank 0 measures and decides; the others repeat its decision."""
        before = {slot_id: slot.seed for slot_id, slot in self._slots.items()}
        record, error, payload = None, None, None
        if ranks.rank() == 0:
            try:
                record = self._decide(decider, validation)
                content = {
                    "record": record.to_json(),
                    "structure": self._slots.get_extra_state().numpy().tobytes().hex(),
                }
            except EsperError as raised:
                error, content = raised, {"error": str(raised)}
            payload = json.dumps(content).encode()
        received = json.loads(ranks.share(payload, decider.growing.device))
        if "error" in received:
            raise error or BadValueError(f"rank 0: {received['error']}")
        if record is None:
            self._slots.set_extra_state(torch.frombuffer(bytearray.fromhex(received["structure"]), dtype=torch.uint8))
            record = GrowthRecord.from_json(received["record"])
        for slot_id, slot in self._slots.items():
            if slot.seed is not None and slot.seed is not before[slot_id]:
                ranks.equalise(slot)
        return record

    def _ready(self) -> Decider:
        if self._finished:
            raise StageError("growth is finished: build a new Grower to grow the model further")
        if self._decider is None:
            raise StageError("the model has not run yet: train it before the first step()")
        return self._decider

    # -- looking and ending -------------------------------------------------------------------------------------------

    def report(self) -> GrowthReport:
        """The slots with their seeds, and what could be germinated."""
        return self._ready().report()

    def state_dict(self) -> dict[str, Tensor]:
        """What the model's own state dict also holds: the structure and the policy's state."""
        return {"structure": self._slots.get_extra_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the structure alone. The model's `load_state_dict` restores it together with the weights."""
        self._slots.set_extra_state(state["structure"])

    def finish(
        self, validation: Iterable[Batch] | None = None, *, keep: Sequence[str] = (), drop: Sequence[str] = ()
    ) -> nn.Module:
        """End growth: the same model object, plain PyTorch, without hooks.

        Committed seeds stay, and others whose contribution exceeds its error; the rest is dropped. `keep` and `drop`
        decide otherwise, by slot. `validation` measures contributions once more. Training may continue: the user's
        keys, Parameter objects and optimizer state are as they were.
        """
        decider = self._decider
        if self._finished:
            raise StageError("growth is finished already")
        if decider is None:
            self._clear()
            return self.model
        with fork_rng(self._host):
            if validation is not None:
                decider.measure(validation)
            kept, dropped = self._chosen(decider.growing, tuple(keep), tuple(drop))
            self.source = build_in(self._slots, self._tap, kept, dropped)
        stay = {slot_id: list(decider.growing.modules[slot_id].parameters()) for slot_id in kept}
        self._membership.sync(self._host, stay)
        self._clear()
        return self.model

    def _chosen(self, growing: GrowingModel, keep: Sequence[str], drop: Sequence[str]) -> tuple[list[str], list[str]]:
        live = growing.live()
        for slot_id in (*keep, *drop):
            if slot_id not in live:
                raise BadValueError(f"there is no seed behind {slot_id!r}; seeds are behind {list(live) or 'none'}")
        if both := sorted(set(keep) & set(drop)):
            raise BadValueError(f"{', '.join(both)} are in both keep and drop; name each in one of them")
        fossils = [slot_id for slot_id, state in live.items() if state.stage is SeedStage.FOSSILIZED]
        open_ones = {
            slot_id: state.contribution for slot_id, state in live.items() if slot_id not in (*fossils, *keep, *drop)
        }
        unknown = [slot_id for slot_id, contribution in open_ones.items() if contribution is None]
        if unknown:
            raise StageError(
                f"contributions of the seeds behind {', '.join(unknown)} were never measured: call "
                "finish(val_loader), or name them in keep= or drop="
            )
        paying = [slot_id for slot_id, measured in open_ones.items() if measured is not None and measured.beyond_error]
        kept = [slot_id for slot_id in live if slot_id in (*fossils, *keep, *paying) and slot_id not in drop]
        return kept, [slot_id for slot_id in live if slot_id not in kept]

    def _clear(self) -> None:
        if hasattr(self._host, CHILD):
            self._slots.remove()
        self._tap_handle.remove()
        self._tap.active = False
        self._membership.adopt()
        self._finished = True
