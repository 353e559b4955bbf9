"""A host that can grow: the verbs of the lifecycle, the losses to train on, checkpoints and export."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.kasmina import checkpoint, lifecycle
from esper.kasmina.compare import Comparison, compare, cross_entropy
from esper.kasmina.harden import harden as harden_model
from esper.kasmina.hosts import Host
from esper.kasmina.layers import count_parameters
from esper.kasmina.lifecycle import LifecycleConfig, SeedState
from esper.kasmina.slot import ISOLATIONS, Body, Isolation, SeedSlot, SegmentedBody
from esper.leyline import (
    LIVE_STAGES,
    BadValueError,
    HostMismatchError,
    SeedReport,
    SeedStage,
    StageChange,
    derive_seed,
)
from esper.leyline.numbers import refuse, require_known, require_whole

RECOMPILE_LIMIT = 128  # graphs per model: a seed needs a few during its life, and the default of torch is eight in all

Criterion = Callable[[Tensor, Tensor], Tensor]


class Follower(Protocol):
    """Something that must know which seeds are alive, such as an optimiser."""

    def sync(self) -> None:
        """Adapt to the seeds that are alive now."""


def check_settings(isolation: Isolation, config: LifecycleConfig | None, budget: int | None, rng_seed: int) -> None:
    """Raise if a model with these settings could not be saved and loaded."""
    require_known("isolation", isolation, ISOLATIONS)
    if config is not None and not isinstance(config, LifecycleConfig):
        raise BadValueError(f"config is a {type(config).__name__}; pass a LifecycleConfig, or None for the default")
    if budget is not None:
        require_whole("budget", budget, 0, remark=": it limits the grown parameters, None for no limit")
    require_whole("rng_seed", rng_seed)


def _segmented(host: Host, slots: Sequence[str] | str | None, isolation: Isolation) -> SegmentedBody:
    if not isinstance(host, Host):
        raise HostMismatchError(
            f"{type(host).__name__} is no Host (segments with slots between them): "
            'use attach(model, {"layer2": 128}) to put slots behind its submodules'
        )
    if slots is None:
        slots = [spec.slot_id for spec in host.slots]
    wanted = [slots] if isinstance(slots, str) else list(slots)
    problems = {
        f"slots {wanted} must be ids such as 'r1c0'": not all(isinstance(slot_id, str) for slot_id in wanted),
        f"slots {wanted} must each be named once": len(set(map(str, wanted))) != len(wanted),
    }
    refuse(problems)
    specs = [host.slots[index] for index in sorted({host.slot_index(slot_id) for slot_id in wanted})]
    like = next(host.parameters(), None)
    if like is None:
        raise HostMismatchError(f"{type(host).__name__} has no parameters: there is nothing for a seed to grow beside")
    return SegmentedBody(host, {spec.slot_id: SeedSlot(spec, isolation).to(like) for spec in specs})


class MorphogeneticModel(nn.Module):
    """A host with slots in which seeds grow, by hand or by a controller.

    Train it on the sum of `losses`, which gives every parameter the gradient of its stage. Call `tick` after each step.
    """

    def __init__(
        self,
        host: Host | Body,
        slots: Sequence[str] | str | None = None,
        *,
        isolation: Isolation = "shadow",
        config: LifecycleConfig | None = None,
        budget: int | None = None,
        rng_seed: int = 0,
    ) -> None:
        """`slots` are slot ids of the host (default: all); `budget` limits the grown parameters."""
        super().__init__()
        check_settings(isolation, config, budget, rng_seed)
        if isinstance(host, Body) and slots is not None:
            raise BadValueError(f"slots {list(slots)} were given with a body, which has its own; omit them")
        self.body = host if isinstance(host, Body) else _segmented(host, slots, isolation)
        self.isolation, self.config = isolation, config if config is not None else LifecycleConfig()
        self.budget, self.rng_seed = budget, rng_seed
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()

    # -- forward ------------------------------------------------------------------------------------------------------

    @property
    def host(self) -> nn.Module:
        """The network that the seeds grow in."""
        return self.body.host

    @property
    def seed_slots(self) -> Mapping[str, SeedSlot]:
        """Slots by id, in the host's order."""
        return dict(self.body.slot_items())

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: arguments of the host
        """Run the network itself, the main row. In training mode it updates the running statistics."""
        return self.body.call(self.training, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:  # Any: the arguments of torch.compile
        """Compile the rows in place, for both `forward` and `losses`.

        The graph changes when a seed starts or stops acting, never with alpha alone.
        """
        if "recompile_limit" in inspect.signature(torch.compile).parameters:  # not in every supported torch
            kwargs.setdefault("recompile_limit", RECOMPILE_LIMIT)
        self.body.compile(*args, **kwargs)

    def losses(self, x: Tensor, targets: Tensor, criterion: Criterion = cross_entropy) -> dict[str, Tensor]:
        """The main row's loss under `main`, and the shadow row's loss of every TRAINING seed under its slot id.

        No parameter is in two of them: call `sum(losses.values()).backward()`.
        """
        slots = self.body.slot_items() if self.isolation == "shadow" else ()
        training = [slot_id for slot_id, slot in slots if slot.state.stage is SeedStage.TRAINING]
        output, taps = self.body.main(x, self.training, training)
        losses = {"main": criterion(output, targets)}
        for slot_id in training:
            losses[slot_id] = criterion(self.body.shadow(slot_id, taps[slot_id], self.training), targets)
        return losses

    @torch.no_grad()
    def measure(self, x: Tensor, targets: Tensor, calibration: Tensor, *, by_loss: bool = False) -> Comparison:
        """Measure auditions of TRAINING seeds and contributions of acting ones, and record them in their states.

        `calibration` holds training inputs (512 are enough) that set each row's normalisation statistics. Effects are
        points of accuracy or, `by_loss`, percent of the loss.
        """
        with torch.compiler.set_stance("force_eager"):  # a row that runs once is not worth a graph
            comparison = compare(self.body, x, targets, calibration, by_loss=by_loss)
        for slot_id, slot in self.body.slot_items():
            if slot_id in comparison.auditions:
                slot.settle(lifecycle.record_audition(slot.state, comparison.auditions[slot_id].points))
            elif slot_id in comparison.contributions:
                slot.settle(lifecycle.record_contribution(slot.state, comparison.contributions[slot_id].points))
        return comparison

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def germinate_seed(
        self, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot. Its first ramp takes `tempo` steps to `alpha_target`."""
        slot = self.body.slot(slot_id)
        left = None if self.budget is None else self.budget - self.grown_parameter_count
        state = lifecycle.germinate(
            slot.state, slot.spec, blueprint, style=style, tempo=tempo, alpha_target=alpha_target, budget_left=left
        )
        state = lifecycle.act_at_once(state) if self.config.act_from_birth else state
        before = slot.state.stage
        slot.plant(state, derive_seed(self.rng_seed, slot_id, state.germinations), like=self.body.like(slot_id))
        slot.train(self.training)
        self._notify()
        return StageChange(slot_id, before, state.stage, "germinate")

    def advance(self, slot_id: str) -> StageChange:
        """Move a seed to its next stage: TRAINING, BLENDING, HOLDING or FOSSILIZED."""
        return self._change(slot_id, "advance", lambda state: lifecycle.advance(state, self.config))

    def fossilize(self, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""
        return self._change(slot_id, "fossilize", lambda state: lifecycle.fossilize(state, self.config))

    def set_alpha_target(self, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear") -> StageChange:
        """Send a HOLDING seed to another alpha by a ramp of `steps`."""
        return self._change(
            slot_id, "set_alpha_target", lambda state: lifecycle.set_alpha_target(state, target, steps, curve)
        )

    def prune_seed(self, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Remove a seed with its parameters and optimiser state, at once or after a ramp of `steps`."""
        return self._change(
            slot_id, "prune", lambda state: lifecycle.prune(state, self.config, steps=steps, curve=curve)
        )

    def tick(self) -> tuple[StageChange, ...]:
        """End a step: move counters, alpha ramps and cooldowns, and make automatic transitions."""
        # All or nothing: every new state is computed before the first slot adopts its own.
        ticked = [(slot, *lifecycle.tick(slot.state, self.config)) for _, slot in self.body.slot_items()]
        for slot, state, _ in ticked:
            slot.settle(state)
        changes = tuple(change for *_, own in ticked for change in own)
        if changes:
            self._notify()
        return changes

    def _change(self, slot_id: str, cause: str, verb: Callable[[SeedState], SeedState]) -> StageChange:
        slot = self.body.slot(slot_id)
        before, after = slot.state, verb(slot.state)
        slot.settle(after)
        self._notify()
        return StageChange(slot_id, before.stage, after.stage, cause)

    def _notify(self) -> None:
        for follower in list(self._followers):
            follower.sync()

    def follow(self, follower: Follower) -> None:
        """Call `follower.sync` now and at every change; holds only a weak reference."""
        self._followers.add(follower)
        follower.sync()

    def __getstate__(self) -> dict[str, Any]:  # Any: the attributes of a module
        """All attributes except the followers: they follow this model, not a copy."""
        return {name: value for name, value in nn.Module.__getstate__(self).items() if name != "_followers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._followers = weakref.WeakSet()

    # -- what is in it ------------------------------------------------------------------------------------------------

    def live_slots(self) -> list[str]:
        """Slots that hold a seed."""
        return [slot_id for slot_id, slot in self.body.slot_items() if slot.state.stage in LIVE_STAGES]

    def reports(self) -> tuple[SeedReport, ...]:
        """All slots as a controller sees them."""
        return tuple(slot.report() for _, slot in self.body.slot_items())

    def host_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the host."""
        return self.body.host.parameters()

    def seed_parameters(self, slot_id: str | None = None) -> Iterator[nn.Parameter]:
        """Parameters of the seed and gate in one slot, or in all."""
        return (self.body.slots if slot_id is None else self.body.slot(slot_id)).parameters()

    @property
    def host_parameter_count(self) -> int:
        """Number of parameters of the host."""
        return count_parameters(self.body.host)

    @property
    def grown_parameter_count(self) -> int:
        """Number of parameters of all seeds and gates."""
        return count_parameters(self.body.slots)

    def observe_gradients(self, norms: Mapping[str, float] | None = None) -> None:
        """Record the gradient norm of each live seed: as given, or from the last backward pass."""
        if norms is None:
            gradients = {
                slot_id: [p.grad for p in self.seed_parameters(slot_id) if p.grad is not None]
                for slot_id in self.live_slots()
            }
            norms = {name: float(torch.nn.utils.get_total_norm(own)) for name, own in gradients.items() if own}
        for slot_id, slot in self.body.slot_items():
            if slot_id in norms and slot.state.stage in LIVE_STAGES:
                slot.settle(lifecycle.record_gradient(slot.state, norms[slot_id]))

    # -- to disk and out ----------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint, weights as safetensors and the rest as JSON. Replaces the one in `folder`."""
        checkpoint.save(Path(folder), self)

    @classmethod
    def load(cls, folder: str | Path, model: "MorphogeneticModel | None" = None) -> "MorphogeneticModel":
        """Load what `save` wrote. For a host that is not built in, pass a freshly built `model`.

        That model becomes the saved one. A `CheckpointError` leaves it unchanged.
        """
        if model is not None and not isinstance(model, MorphogeneticModel):
            raise BadValueError(
                f"load(folder, model) takes a MorphogeneticModel, not {type(model).__name__}: "
                "wrap the host as when it was saved, by MorphogeneticModel(host, slots) or attach(host, slots)"
            )
        stored = checkpoint.read(Path(folder))
        if model is None:
            model = cls(stored.build_host(), stored.model.slot_ids, isolation=stored.model.isolation)
        model.restore(stored)
        return model

    def restore(self, stored: checkpoint.Checkpoint) -> None:
        """Become the saved model. A `CheckpointError` leaves this one unchanged."""
        checkpoint.restore(stored, self.body)
        saved = stored.model
        self.isolation, self.config = saved.isolation, saved.config
        self.budget, self.rng_seed = saved.budget, saved.rng_seed
        self._notify()

    harden = harden_model
