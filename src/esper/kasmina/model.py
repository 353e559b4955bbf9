"""A host that can grow: the verbs of the lifecycle, the losses to train on, and what to save."""

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper.kasmina import checkpoint, lifecycle
from esper.kasmina.body import Body, SegmentedBody
from esper.kasmina.compare import Comparison, compare, cross_entropy
from esper.kasmina.harden import harden
from esper.kasmina.hosts import Host
from esper.kasmina.lifecycle import LifecycleConfig, SeedState
from esper.kasmina.slot import ISOLATIONS, Isolation, SeedSlot
from esper.leyline import (
    LIVE_STAGES,
    BadValueError,
    HostMismatchError,
    SeedReport,
    SeedStage,
    StageChange,
    UnknownNameError,
    derive_seed,
)
from esper.leyline.numbers import require_whole

RECOMPILE_LIMIT = 128
"""Graphs of one compiled model: a few for each seed in its life, where torch by default gives up after eight."""

Criterion = Callable[[Tensor, Tensor], Tensor]


class Follower(Protocol):
    """Something that has to know which seeds live, such as an optimiser."""

    def sync(self) -> None:
        """Look again."""
        ...


def check_settings(config: LifecycleConfig | None, budget: int | None, rng_seed: int) -> None:
    """Raise where a model could be built from these, but not saved and loaded again."""
    if config is not None and not isinstance(config, LifecycleConfig):
        raise BadValueError(f"config is a {type(config).__name__}; pass a LifecycleConfig, or None for the usual one")
    if budget is not None:
        require_whole("budget", budget, 0, remark=": it is the number of parameters that may grow, None for any")
    require_whole("rng_seed", rng_seed)


def _segmented(host: Host, slots: Sequence[str] | str | None, isolation: Isolation) -> SegmentedBody:
    """A host of segments with these of its slots (None: all)."""
    if not isinstance(host, Host):
        raise HostMismatchError(
            f"{type(host).__name__} is no Host (segments with slots between them): "
            'use attach(model, {"layer2": 128}) to put slots behind its submodules'
        )
    if slots is None:
        slots = [spec.slot_id for spec in host.slots]
    wanted = [slots] if isinstance(slots, str) else list(slots)
    if any(not isinstance(slot_id, str) for slot_id in wanted):
        raise BadValueError(f"slots {wanted} must be ids such as 'r1c0'")
    if len(set(wanted)) != len(wanted):
        raise BadValueError(f"slots {wanted} must each be named once")
    specs = [host.slots[index] for index in sorted({host.slot_index(slot_id) for slot_id in wanted})]
    like = next(host.parameters(), None)
    if like is None:
        raise HostMismatchError(f"{type(host).__name__} has no parameters: there is nothing for a seed to grow beside")
    return SegmentedBody(host, {spec.slot_id: SeedSlot(spec, isolation).to(like) for spec in specs})


class MorphogeneticModel(nn.Module):
    """A host with slots in which seeds can be grown by hand or by a controller.

    Train it with `losses`: the sum of what it returns gives every parameter the gradient that its stage asks for.
    Call `tick` at the end of each step.
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
        """`slots` are ids of the host (default: all); `budget` bounds the parameters that may be grown in all."""
        super().__init__()
        if isolation not in ISOLATIONS:
            raise UnknownNameError("isolation", isolation, ISOLATIONS)
        check_settings(config, budget, rng_seed)
        if not isinstance(host, Body):
            self.body: Body = _segmented(host, slots, isolation)
        elif slots is None:
            self.body = host
        else:
            raise BadValueError(f"slots {list(slots)} were given with a body that has its own")
        self.isolation = isolation
        self.config = config if config is not None else LifecycleConfig()
        self.budget = budget
        self.rng_seed = rng_seed
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

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: whatever the host takes
        """The network itself (the main row). In training mode it moves the running statistics."""
        return self.body.call(self.training, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:  # Any: the arguments of torch.compile
        """Compile the rows in place, for `forward` and `losses` alike. Stages and alphas may change at any time.

        The graph changes when a seed begins or ceases to act, never by alpha alone.
        """
        if "recompile_limit" in inspect.signature(torch.compile).parameters:  # newer than our oldest torch
            kwargs.setdefault("recompile_limit", RECOMPILE_LIMIT)
        self.body.compile(*args, **kwargs)

    def losses(self, x: Tensor, targets: Tensor, criterion: Criterion = cross_entropy) -> dict[str, Tensor]:
        """The main row's loss under `main`, and under its slot id the shadow's loss of every TRAINING seed.

        No parameter is in two of them, so `sum(losses.values()).backward()` serves all.
        """
        training = [] if self.isolation == "straight_through" else self._in_stage(SeedStage.TRAINING)
        output, taps = self.body.main(x, self.training, training)
        losses = {"main": criterion(output, targets)}
        for slot_id in training:
            losses[slot_id] = criterion(self.body.shadow(slot_id, taps[slot_id], self.training), targets)
        return losses

    @torch.no_grad()
    def measure(self, x: Tensor, targets: Tensor, calibration: Tensor) -> Comparison:
        """Audition seeds in TRAINING, silence those that act, and note what was found in their states.

        `calibration` are training inputs (512 serve well) that set each row's normalisation statistics.
        """
        with torch.compiler.set_stance("force_eager"):  # rows that run once are not worth a graph each
            found = compare(self.body, x, targets, calibration)
        for slot_id, audition in found.auditions.items():
            slot = self.body.slot(slot_id)
            slot.settle(lifecycle.record_audition(slot.state, audition.accuracy))
        for slot_id, contribution in found.contributions.items():
            slot = self.body.slot(slot_id)
            slot.settle(lifecycle.record_contribution(slot.state, contribution.accuracy))
        return found

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    def germinate_seed(
        self, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot. `tempo` is the number of steps of its first ramp, to `alpha_target`."""
        slot = self.body.slot(slot_id)
        left = None if self.budget is None else self.budget - self.grown_parameter_count
        state = lifecycle.sow(
            slot.state, slot.spec, blueprint, style=style, tempo=tempo, alpha_target=alpha_target, budget_left=left
        )
        before = slot.state.stage
        rng_seed = derive_seed(self.rng_seed, slot_id, state.germinations)
        slot.plant(state, rng_seed, like=self.body.like(slot_id))
        slot.train(self.training)
        return self._announce(StageChange(slot_id, before, state.stage, "germinate"))

    def advance(self, slot_id: str) -> StageChange:
        """One transition forward: to TRAINING, BLENDING, HOLDING or FOSSILIZED."""
        return self._change(slot_id, "advance", lambda state: lifecycle.advance(state, self.config))

    def fossilize(self, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""
        return self._change(slot_id, "fossilize", lambda state: lifecycle.fossilize(state, self.config))

    def set_alpha_target(self, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear") -> StageChange:
        """Send a HOLDING seed to another alpha in so many steps."""
        return self._change(
            slot_id, "set_alpha_target", lambda state: lifecycle.set_alpha_target(state, target, steps, curve)
        )

    def prune_seed(self, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Cut a seed, at once or by a ramp of so many steps; its parameters and optimiser state go with it."""
        return self._change(
            slot_id, "prune", lambda state: lifecycle.prune(state, self.config, steps=steps, curve=curve)
        )

    def tick(self) -> tuple[StageChange, ...]:
        """The end of a step: counters, alpha schedules, cooldowns, and what happens by itself."""
        # All or nothing: every state is known before the first slot adopts its own.
        ticked = [(slot, *lifecycle.tick(slot.state, self.config)) for _, slot in self.body.slot_items()]
        for slot, state, _ in ticked:
            slot.settle(state)
        changes = tuple(change for _, _, found in ticked for change in found)
        if changes:
            self._notify()
        return changes

    def _change(self, slot_id: str, cause: str, verb: Callable[[SeedState], SeedState]) -> StageChange:
        slot = self.body.slot(slot_id)
        before, after = slot.state, verb(slot.state)
        slot.settle(after)
        return self._announce(StageChange(slot_id, before.stage, after.stage, cause))

    def _announce(self, change: StageChange) -> StageChange:
        self._notify()
        return change

    def _notify(self) -> None:
        for follower in list(self._followers):
            follower.sync()

    def follow(self, follower: Follower) -> None:
        """Tell `follower` of every birth and death from now on (it is held weakly)."""
        self._followers.add(follower)
        follower.sync()

    def __getstate__(self) -> dict[str, Any]:  # Any: the attributes of a module
        """All but the followers: they follow this very model, not a copy of it."""
        return {name: value for name, value in nn.Module.__getstate__(self).items() if name != "_followers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._followers = weakref.WeakSet()

    # -- what is in it ------------------------------------------------------------------------------------------------

    def _in_stage(self, *stages: SeedStage) -> list[str]:
        return [slot_id for slot_id, slot in self.body.slot_items() if slot.state.stage in stages]

    def live_slots(self) -> list[str]:
        """Slots that hold a seed."""
        return self._in_stage(*LIVE_STAGES)

    def reports(self) -> tuple[SeedReport, ...]:
        """All slots as a controller sees them."""
        return tuple(slot.report() for _, slot in self.body.slot_items())

    def host_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the host alone."""
        return self.body.host.parameters()

    def seed_parameters(self, slot_id: str | None = None) -> Iterator[nn.Parameter]:
        """Parameters of the seed (and gate) in one slot, or in all."""
        if slot_id is None:
            return self.body.slots.parameters()
        return self.body.slot(slot_id).parameters()

    @property
    def host_parameter_count(self) -> int:
        """Parameters of the host."""
        return sum(parameter.numel() for parameter in self.host_parameters())

    @property
    def grown_parameter_count(self) -> int:
        """Parameters of all seeds."""
        return sum(parameter.numel() for parameter in self.seed_parameters())

    def observe_gradients(self, norms: Mapping[str, float] | None = None) -> None:
        """Note the gradient norm of each live seed: as given, or as the last backward pass left it."""
        for slot_id in self.live_slots():
            slot = self.body.slot(slot_id)
            gradients = [p.grad for p in slot.parameters() if p.grad is not None]
            if norms is not None and slot_id in norms:
                slot.settle(lifecycle.record_gradient(slot.state, norms[slot_id]))
            elif norms is None and gradients:
                norm = float(torch.nn.utils.get_total_norm(gradients))
                slot.settle(lifecycle.record_gradient(slot.state, norm))

    # -- to disk and out ----------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: weights as safetensors, everything else as JSON. It replaces the one in `folder`."""
        checkpoint.save(
            Path(folder),
            self.body,
            isolation=self.isolation,
            config=self.config,
            budget=self.budget,
            rng_seed=self.rng_seed,
        )

    @classmethod
    def load(cls, folder: str | Path, model: "MorphogeneticModel | None" = None) -> "MorphogeneticModel":
        """Rebuild what `save` wrote. A host that is not built in must be handed in, in a freshly built `model`.

        A model that was handed in becomes the saved one, or is left as it was by a `CheckpointError`.
        """
        if model is not None and not isinstance(model, MorphogeneticModel):
            raise BadValueError(
                f"load(folder, model) takes a MorphogeneticModel, not {type(model).__name__}: "
                "wrap the host as it was when it was saved, by MorphogeneticModel(host, slots) or attach(host, slots)"
            )
        found = checkpoint.read(Path(folder))
        if model is None:
            model = cls(found.build_host(), found.model.slot_ids, isolation=found.model.isolation)
        model.restore(found)
        return model

    def restore(self, found: checkpoint.Checkpoint) -> None:
        """Become what was saved, or stay as it is by a `CheckpointError`."""
        checkpoint.restore(found, self.body)
        saved = found.model
        self.isolation, self.config = saved.isolation, saved.config
        self.budget, self.rng_seed = saved.budget, saved.rng_seed
        self._notify()

    def harden(
        self,
        folder: str | Path | None = None,
        *,
        keep: Sequence[str] = (),
        drop: Sequence[str] = (),
        calibration: Tensor | None = None,
        example: Tensor | None = None,
    ) -> nn.Module:
        """A plain torch module with the fossils built in; with a folder, also written so that it loads without Esper.

        Live seeds that are no fossils must be named in `keep` or `drop`. Dropping a seed that acts moves the
        activations behind it, so the running statistics are set anew from `calibration` (training inputs). An attached
        host is also written as `model.pt2`, traced with the `example` input. The model itself stays as it is.
        """
        place = None if folder is None else Path(folder)
        return harden(self.body, place, keep=keep, drop=drop, calibration=calibration, example=example)
