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

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper.grower import adapting, ranks
from esper.grower.adapter_files import LoadedAdapter, load_adapter, save_adapter
from esper.grower.adapter_places import frozen_streams
from esper.grower.adapting import Adaptation, is_frozen, stages_of
from esper.grower.announcements import UNKNOWN_STEPS, conclusion, introduction
from esper.grower.container import CHILD
from esper.grower.decisions import Decider
from esper.grower.finishing import build_in, choose_seeds, write_finished
from esper.grower.folding import can_fold, refuse_unfoldable
from esper.grower.growing_model import GrowingModel
from esper.grower.membership import Membership
from esper.grower.places import Places, named_widths
from esper.grower.policies import OwnPolicy, check_policy
from esper.grower.records import GrowthRecord, GrowthReport
from esper.grower.run_log import RunLog, describe_run
from esper.grower.scoring import Batch, Forward, InputTap, Loss, Scorer, check_loss
from esper.grower.statistics import ORIGINAL, frozen_norms
from esper.grower.steps import measure_again, on_all_ranks, take_step
from esper.grower.suggestion_table import Suggestions
from esper.grower.suggestions import SuggestionPlan, make_suggestions, read_batches, run_once, untouched
from esper.grower.waiting import check_waiting, waiting_slots
from esper.kasmina.lifecycle import LifecycleConfig
from esper.kasmina.slot import fork_rng
from esper.leyline import BadValueError, EsperError, StageError
from esper.leyline.numbers import require_whole
from esper.leyline.records import Json


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
        slots: Mapping[str, int] | Sequence[str] | Literal["auto"] = "auto",
        policy: str | Path | OwnPolicy = "heuristic",
        rng_seed: int = 0,
        folder: str | Path | None = None,
        seed_options: Mapping[str, Any] | None = None,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    ) -> None:
        """`budget` limits the parameters of all seeds together; `steps` is how often `step` will be called.

        `loss(output, batch)` returns one value per sample; by default cross-entropy, where outputs and targets say so.
        `forward(model, batch)` returns the output; by default `model(**batch)` for a dict, `model(*batch[:-1])` for a
        tuple. `slots` names submodules, such as `["layer2"]`, or checks their widths too, such as `{"layer2": 128}`;
        by default they are chosen at the first forward pass. `policy` is `heuristic`, `random`, `wait`, the folder of a
        trained run, or a function that takes a `GrowthReport` and returns actions. `folder` logs the run there, for
        `esper report` and `esper query`. `seed_options`, such as `{"lr": 0.01}`, gives all seeds a parameter group with
        these options. A scheduler that exists already must then be passed as `scheduler`.
        """
        require_whole("budget", budget, 1, remark=": it is the number of parameters that may grow")
        require_whole("rng_seed", rng_seed)
        if steps is not None:
            require_whole("steps", steps, 1, remark=": it is how often step() will be called")
        check_loss(loss)
        check_policy(policy)
        host = ranks.unwrap(model)
        check_waiting(host)
        is_frozen(host)  # refuses a model in which nothing learns
        self.model, self.optimizer, self.budget, self.rng_seed = model, optimizer, budget, rng_seed
        self.steps = steps if steps is not None else UNKNOWN_STEPS
        self._given_steps = steps
        self._wanted, self._policy = None if slots == "auto" else named_widths(host, slots), policy
        self._scorer = Scorer(loss, forward)
        self._host = host
        self._log = None if folder is None else RunLog(Path(folder))
        self._membership = Membership(optimizer, host, seed_options, scheduler)
        self._seed_options = None if seed_options is None else dict(seed_options)
        self._slots = waiting_slots(host)
        self._slots.on_change, self._slots.waiting = self._loaded, False
        self._tap = InputTap(on_first=self._begin)
        self._tap_handle = host.register_forward_pre_hook(self._tap, with_kwargs=True)
        self._decider: Decider | None = None
        self._finished = False
        self._loaded()  # if the slots have waited, with seeds from a state dict

    # -- the first forward pass ---------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose and install the slots, before the model runs for the first time. An error leaves the model bare."""
        if self._decider is not None:  # a state dict was loaded before
            return
        try:
            with torch.inference_mode(False):  # a trainer may validate first; seeds are to be trained
                self._choose_slots(args, kwargs)
        except EsperError:
            self._clear()
            raise

    def _choose_slots(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            raise BadValueError("the slots are chosen in the first forward pass: run one batch before torch.compile")
        log = self._log if ranks.rank() == 0 else None
        if log is not None:
            log.check_free()
        places = Places(self._host, args, kwargs)
        frozen = is_frozen(self._host)
        streams = frozen_streams(places, self._wanted, self._policy) if frozen else places.choose(self._wanted)
        cheapest = min(offer.parameters for spec, _ in streams for offer in spec.blueprints)
        if self.budget < cheapest:
            raise BadValueError(
                f"budget {self.budget:,} is too small: the smallest seed that fits has {cheapest:,} parameters"
            )
        self._slots.install(streams)
        decider = self._start(stages_of(places.blocks()) if frozen else ())
        if frozen:
            self._slots.notes = decider.notes()  # which stages there are is known only now
        if log is not None:
            log.create(self._settings())
        if ranks.rank() == 0:
            growing = decider.growing
            about = (
                adapting.introduction(growing, self.steps)
                if frozen
                else introduction(growing, self._given_steps, self._policy)
            )
            print(about, flush=True)

    def _start(self, stages: Sequence[Sequence[str]] = ()) -> Decider:
        config = LifecycleConfig(act_from_birth=True)
        growing = GrowingModel(self._slots, self._membership, budget=self.budget, config=config, rng_seed=self.rng_seed)
        adaptation = None
        if is_frozen(self._host):
            self._slots.fixed = tuple(frozen_norms(self._host))
            adaptation = Adaptation(self.steps, tuple(map(tuple, stages)))
        self._decider = Decider(growing, self._scorer, self._tap, self._policy, self.steps, adaptation)
        return self._decider

    def _loaded(self) -> None:
        """A state dict has replaced the seeds: adopt them, and continue where it was saved."""
        decider = self._decider
        if decider is None:
            if not list(self._slots.items()):
                return  # it was saved before the first forward pass
            decider = self._start()
        decider.growing.adopt_states()
        decider.guard.snapshot = None
        if self._slots.notes:
            decider.restore(self._slots.notes)
        self._tap.on_training = self._resumed

    def _resumed(self) -> None:
        """Before the first training pass after a state dict was loaded: by now weights and optimizer are loaded too."""
        decider = self._ready()
        decider.guard.take(decider.step)
        if self._log is not None and ranks.rank() == 0:
            self._log.resume(self._settings(), decider.step)

    def _settings(self) -> dict[str, Json]:
        growing, own_loss = self._ready().growing, self._scorer.loss is not None
        return describe_run(growing, self.steps, self._policy, self._seed_options, own_loss=own_loss)

    def ignore_calls(self, redirected: Callable[[], bool]) -> None:
        """Overlook forward passes while `redirected()` holds, because their arguments are another method's."""
        self._tap.redirected = redirected

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, validation: Iterable[Batch] | float) -> GrowthRecord:
        """Measure the model on validation batches, then let the policy act. Call it once per epoch, say.

        Given a number instead, the validation accuracy in percent (with `loss=`, the validation loss), it works with
        that, but contributions cannot be measured.
        """
        decider = self._ready()
        self._tap.collect()
        if isinstance(validation, Real) or (isinstance(validation, Tensor) and validation.dim() == 0):
            validation = float(validation)
        log = self._log if ranks.rank() == 0 else None
        if log is not None and not log.is_open:  # resumed, and not trained since
            log.resume(self._settings(), decider.step)
        begun, before = time.perf_counter(), self._blueprints()
        with torch.inference_mode(False), fork_rng(self._host):
            decider.growing.check_learning(self._tap.passes)
            self._tap.passes = 0
            record = on_all_ranks(decider, lambda: take_step(decider, validation))
        self._tap.on_training = None
        if record.panic is not None or (record.loss is not None and math.isfinite(record.loss)):
            decider.guard.take(decider.step)
        if log is not None:
            blueprints = {slot_id: before[slot_id] or name for slot_id, name in self._blueprints().items()}
            log.write(record, blueprints, decider.growing.states[0], self.steps, time.perf_counter() - begun)
        return record

    def _blueprints(self) -> dict[str, str | None]:
        return {slot_id: slot.state.blueprint for slot_id, slot in self._slots.items()}

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

    def suggest(
        self,
        loader: Iterable[Batch],
        trial: int = 20,
        *,
        minibatches: int = 8,
        top: int | None = None,
        rate: float | None = None,
        ranks: bool = True,
    ) -> Suggestions:
        """What each blueprint would be worth in each empty slot, and how much rank each linear layer deserves.

        First-order worths come from `minibatches` of the loader. Then each newborn is trained alone for `trial` more,
        behind a host that stands still; with `top`, only those with the largest first-order worth. `rate` replaces the
        learning rate that seeds have now, which a warm-up may keep tiny. `ranks=False` omits `rank_pattern`, which
        needs memory for two gradients of all linear layers. The model, its optimizer and random streams do not change.
        """
        if self._finished:
            raise StageError("growth is finished: build a new Grower to ask for suggestions")
        plan = SuggestionPlan(trial, minibatches, top, rate, ranks)
        with torch.inference_mode(False), untouched(self._host, loader):
            batches = read_batches(loader, plan)
            if self._decider is None:
                run_once(self._host, self._scorer, batches[0])
            return make_suggestions(self._ready(), batches, plan)

    @property
    def finished(self) -> bool:
        """Whether growth has ended."""
        return self._finished

    def state_dict(self) -> dict[str, Tensor]:
        """What the model's own state dict also holds: the structure and the policy's state."""
        return {"structure": self._slots.get_extra_state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the structure alone. The model's `load_state_dict` restores it together with the weights."""
        self._slots.set_extra_state(state["structure"])

    def finish(
        self,
        validation: Iterable[Batch] | None = None,
        *,
        keep: Sequence[str] = (),
        drop: Sequence[str] = (),
        folder: str | Path | None = None,
    ) -> nn.Module:
        """End growth: the same model object, plain PyTorch, without hooks.

        Committed seeds stay, and others whose contribution exceeds its error; the rest is dropped. `keep` and `drop`
        decide otherwise, by slot. `validation` measures contributions once more. Training may continue: the user's
        keys, Parameter objects and optimizer state are as they were. `folder` gets the weights and `grown_blocks.py`,
        whose `grow(model, folder)` turns a freshly built model into this one, without Esper.

        Adapters of a frozen model fold into the weights in front of them.
        """
        return self._finish(validation, keep, drop, folder, merge=False)

    def merge(
        self, validation: Iterable[Batch] | None = None, *, keep: Sequence[str] = (), drop: Sequence[str] = ()
    ) -> nn.Module:
        """End growth as `finish` does, with all seeds folded into the weights: a plain model with its own names.

        Raises if a seed that stays is not linear.
        """
        return self._finish(validation, keep, drop, None, merge=True)

    def save(self, folder: str | Path) -> None:
        """Write an adapter: the seeds and whatever else differs from the pretrained model, without the model."""
        if self._finished:
            raise StageError(
                "growth is finished, and the seeds are part of the model: save() before finish() or merge()"
            )
        decider = self._ready()
        adaptation = decider.adaptation
        if adaptation is None:
            raise StageError(
                "an adapter is what a frozen model has learned, and this model is not frozen: use finish()"
            )
        if ranks.rank() == 0:
            save_adapter(self._slots, adaptation.statistics or ORIGINAL, Path(folder))

    @staticmethod
    def load_adapter(model: nn.Module, folder: str | Path) -> LoadedAdapter:
        """Let a saved adapter act in the pretrained model that it was made for. See `LoadedAdapter`."""
        return load_adapter(model, Path(folder))

    def _finish(
        self,
        validation: Iterable[Batch] | None,
        keep: Sequence[str],
        drop: Sequence[str],
        folder: str | Path | None,
        *,
        merge: bool,
    ) -> nn.Module:
        decider = self._decider
        if self._finished:
            raise StageError("growth is finished already")
        if decider is None:
            self._clear()
            return self.model
        self._tap.collect()
        with torch.inference_mode(False), fork_rng(self._host):
            if validation is not None:
                on_all_ranks(decider, lambda: measure_again(decider, validation))
            kept, dropped = choose_seeds(decider.growing.live(), tuple(keep), tuple(drop))
            if merge:
                remedy = "finish() keeps them as ordinary submodules; drop= omits them"
                refuse_unfoldable(self._slots, kept, remedy)
            folded = [slot_id for slot_id in kept if can_fold(self._slots[slot_id])]
            source = build_in(self._slots, self._tap, kept, dropped)
        if ranks.rank() == 0:
            print(conclusion(decider.growing, kept, dropped), flush=True)
        stay = {
            slot_id: list(decider.growing.modules[slot_id].parameters()) for slot_id in kept if slot_id not in folded
        }
        self._membership.sync(self._host, stay)
        if self._log is not None and self._log.is_open:
            self._log.finish(decider.step, kept, dropped)
        self._clear()
        if folder is not None and ranks.rank() == 0:
            write_finished(self._host, source, Path(folder))
        return self.model

    def _clear(self) -> None:
        if hasattr(self._host, CHILD):
            self._slots.remove()
        self._tap_handle.remove()
        self._tap.active = False
        if self._log is not None:
            self._log.close()
        self._membership.adopt()
        if self._decider is not None:
            self._decider.release()
        self._finished = True
