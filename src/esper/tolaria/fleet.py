"""Many hosts as one batched program.

Host weights are stacked over envs; each (slot, blueprint) has a bank of stacked seeds. A minibatch is one pass over the
main rows and, where seeds are in TRAINING, one over their shadow rows; kernel launches depend on slots × blueprints,
not on the number of hosts. Lifecycles are the same pure functions that a single model uses.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina import LifecycleConfig, MorphogeneticModel, SeedState, lifecycle
from esper.kasmina.layers import BATCH_NORM_MOMENTUM
from esper.leyline import (
    ACTIVE_STAGES,
    LIVE_STAGES,
    BadValueError,
    SeedReport,
    SeedStage,
    StageChange,
    UnknownNameError,
    derive_seed,
)
from esper.tolaria.banks import Bank, bucket
from esper.tolaria.batches import Batches, Samples
from esper.tolaria.engine import rate_factor
from esper.tolaria.governor import Governor, GovernorConfig, Panic
from esper.tolaria.graphs import MinibatchGraphs
from esper.tolaria.measure import FleetComparison, measure
from esper.tolaria.passes import PassResult, StackedHost
from esper.tolaria.planning import eval_rows, main_rows, shadow_rows
from esper.tolaria.rows import Plan, Rows
from esper.tolaria.snapshots import SnapshotStore
from esper.tolaria.stacked import StackedOptimizer, per_member
from esper.tolaria.tasks import Task

LEAST_ROWS = 2
"""A fleet of one carries a dead second row: kernels for a single row round differently."""


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per row: (R, B, …, classes) against (R, B, …) → (R,)."""
    flat = logits.flatten(0, -2)
    losses = F.cross_entropy(flat.float() if flat.dtype.itemsize < 4 else flat, targets.flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


class HostFleet:
    """N hosts with their episodes in lockstep. Envs with equal seeds are a group: same weights, data, augmentation."""

    def __init__(
        self,
        task: Task,
        n: int,
        device: torch.device | str = "cpu",
        seeds: Sequence[int] | None = None,
        *,
        batches: Batches | None = None,
        data_dir: Path | str | None = None,
        dtype: torch.dtype = torch.float32,
        compute: torch.dtype | None = None,
        config: LifecycleConfig | None = None,
        governor: GovernorConfig | None = None,
        graphs: bool = True,
    ) -> None:
        """`seeds` has one number per env (default 0 … n−1): everything random in an env follows from its own.

        Weights and statistics are kept in `dtype`; `compute` (default the same) is that of streams and products.
        On CUDA minibatches are replayed as `graphs`.
        """
        if n < 1:
            raise BadValueError(f"a fleet of {n} hosts: it needs at least 1")
        self.seeds = list(range(n)) if seeds is None else list(seeds)
        if len(self.seeds) != n:
            raise BadValueError(f"{len(self.seeds)} seeds for {n} hosts: each host needs one")
        self.task, self.n, self.device, self.dtype = task, n, _device(device), dtype
        self.config = config if config is not None else LifecycleConfig()
        self.batches = task.load_batches(data_dir, self.device) if batches is None else batches
        padded = self._padded(self.seeds)
        made = {seed: task.make_host(seed) for seed in dict.fromkeys(padded)}
        self.slots = {slot.slot_id: slot for slot in task.slot_config.slots}
        self.places = {slot_id: made[padded[0]].slot_index(slot_id) for slot_id in self.slots}
        self.host = StackedHost(
            [made[seed] for seed in padded],
            self.places.values(),
            device=self.device,
            dtype=dtype,
            compute=compute or dtype,
        )
        self.optimizer = StackedOptimizer(task.optimiser, self.host.weights)
        self._group, self._order_seeds = self._grouping(padded)
        self.states = [{slot_id: SeedState(slot_id) for slot_id in self.slots} for _ in range(n)]
        self.banks: dict[tuple[str, str], Bank] = {}
        self._sizes: dict[tuple[object, ...], int] = {}
        self.rate_scale = torch.ones(len(padded), dtype=dtype, device=self.device)
        """Factor on the learning rate of each row."""
        self._norms: dict[tuple[str, str], Tensor] = {}
        self.step_index = 0
        self.losses = torch.full((n,), float("nan"))
        self._plan: Plan | None = None
        self._fixed: tuple[Samples, Tensor] | None = None
        self.governor = Governor(n, task.random_guess_loss, governor, self.device)
        self.snapshots = SnapshotStore(self)
        self.graphs = MinibatchGraphs(self) if graphs and self.device.type == "cuda" else None

    def _padded(self, seeds: list[int]) -> list[int]:
        return seeds + seeds[:1] * (LEAST_ROWS - self.n)

    def _grouping(self, padded: list[int]) -> tuple[Tensor, Tensor]:
        """The group of each row, and the seed of each group's data order."""
        groups = list(dict.fromkeys(padded))
        group = torch.tensor([groups.index(seed) for seed in padded], device=self.device)
        return group, torch.tensor([derive_seed(seed, "data") for seed in groups], device=self.device)

    def reset(self, seeds: Sequence[int]) -> None:
        """A new episode: fresh hosts of these seeds, empty slots. Memory and graphs stay."""
        if len(seeds) != self.n:
            raise BadValueError(f"{len(seeds)} seeds for {self.n} hosts: each host needs one")
        self.seeds = list(seeds)
        padded = self._padded(self.seeds)
        made = {seed: self.task.make_host(seed) for seed in dict.fromkeys(padded)}
        self.host.fill([made[seed] for seed in padded])
        self._group, self._order_seeds = self._grouping(padded)
        for bank in self.banks.values():
            bank.clear()
        self.optimizer.clear(slice(None))
        self.states = [{slot_id: SeedState(slot_id) for slot_id in self.slots} for _ in range(self.n)]
        self.step_index, self._plan = 0, None
        self.governor.reset()
        self.snapshots.take()

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self) -> Tensor:
        """`batches_per_step` minibatches at constant alpha; returns the mean loss of each env's main row (N,)."""
        total = torch.zeros(len(self._group), device=self.device, dtype=self.dtype)
        per_step = self.task.batches_per_step
        for place in range(per_step):
            samples = self.draw(self.step_index * per_step + place)
            progress = (self.step_index + place / per_step) / self.task.steps
            total += self.train_minibatch(
                samples, self.task.optimiser.rate * rate_factor(progress), (place + 1) / per_step
            )
        self._note_gradients()
        # Host sync: once per step.
        self.losses = (total / per_step)[: self.n].cpu()
        return self.losses

    def draw(self, index: int) -> Samples:
        """The minibatch of that number for every row: inputs (R, B, …), targets (R, B, …)."""
        return self.batches.rows(self._order_seeds, self._group, index, self.host.compute)

    def train_minibatch(self, samples: Samples, rate: float, warm: float = 1.0) -> Tensor:
        """One step of every host and seed; returns the losses of the main rows (R,). `warm` scales newborns' rate."""
        if self.graphs is not None:
            return self.graphs.run(samples, rate, warm)
        rates = (torch.tensor(value, dtype=self.dtype, device=self.device) for value in (rate, warm))
        return self.run_minibatch(self.plan, samples, *rates)

    def run_minibatch(self, plan: Plan, samples: Samples, rate: Tensor, warm: Tensor) -> Tensor:
        """The work of a minibatch: no host sync, and nothing that depends on values, so that it can be a CUDA graph."""
        main, shadow = plan
        for weights in (self.host.weights, *(bank.weights for bank in self.banks.values())):
            weights.zero_grad()
        inputs, targets = samples
        tapped = () if shadow is None else {birth.place for birth in shadow.births}
        done = self.host.run(main, inputs, train=True, tapped=tapped)
        losses = row_losses(done.output, targets)
        total = losses.sum()
        if shadow is not None:
            assert shadow.valid is not None
            seen = self.host.run(shadow, None, train=True, streams=done.taps)
            shadow_losses = row_losses(seen.output, targets.index_select(0, shadow.env))
            total = total + shadow_losses.where(shadow.valid, 0.0).sum()
        total.backward()
        finite, update_ratio = self._step(rate, warm)
        self._write_statistics(done)
        variance = done.output.detach().to(self.dtype).flatten(1, -2).var(1).sum(1)
        self.governor.observe(*(signs[: self.n] for signs in (losses.detach(), finite, variance, update_ratio)))
        return losses.detach()

    def _step(self, rate: Tensor, warm: Tensor) -> tuple[Tensor, Tensor]:
        """Step hosts and seeds. Returns, per row, whether all gradients were finite, and the host's update ratio."""
        rates = rate * self.rate_scale
        norms = self.optimizer.step(rates, torch.ones_like(rates, dtype=torch.bool))
        finite = norms.gradient.isfinite()
        for key in self.busy_banks():
            self._norms[key] = self.banks[key].step(rates, warm)
            finite = finite & self._norms[key].isfinite()
        return finite, norms.update_ratio

    def norms(self) -> dict[tuple[str, str], Tensor]:
        """Gradient norms of the last minibatch by bank (envs,)."""
        return dict(self._norms)

    def keep_norms(self, norms: Mapping[tuple[str, str], Tensor]) -> None:
        """These are the norms of the last minibatch."""
        self._norms = dict(norms)

    @torch.no_grad()
    def _write_statistics(self, done: PassResult) -> None:
        """Running statistics move towards those of the batch, where these are finite."""
        for index, found in enumerate(done.statistics):
            for name, value in found.items():
                buffer = self.host.buffers[f"segments.{index}.{name}"]
                finite = per_member(value.flatten(1).isfinite().all(1), value)
                buffer.copy_(buffer.lerp(value, BATCH_NORM_MOMENTUM).where(finite, buffer))

    def _note_gradients(self) -> None:
        # Host sync: once per step.
        norms = {key: tensor.tolist() for key, tensor in self._norms.items()}
        for env, states in enumerate(self.states):
            for slot_id, state in states.items():
                if state.stage is SeedStage.TRAINING or state.stage in ACTIVE_STAGES:
                    norm = norms[slot_id, str(state.blueprint)][env]
                    states[slot_id] = lifecycle.record_gradient(state, norm)

    def validate(self) -> FleetComparison:
        """Main rows, auditions and contributions on the validation set; noted in the seeds' states."""
        if self._fixed is None:
            self._fixed = self.batches.validation(), self.batches.calibration(self.task.calibration_size)
        return measure(self, *self._fixed)

    def govern(self, found: FleetComparison) -> list[Panic]:
        """After validation: send envs in trouble back to their snapshots, then remember all as they are."""
        losses = torch.tensor([row.loss for row in found.main])
        self.governor.examine(losses, self._state_finite())
        panics = self.governor.verdicts()
        for panic in panics:
            self.snapshots.restore(panic.env)
        self.snapshots.take()
        return panics

    def _state_finite(self) -> Tensor:
        """Whether all weights and statistics of each env are finite (N,)."""
        stacked = [self.host.weights.matrix, *self.host.buffers.values()]
        stacked += [bank.weights.matrix for bank in self.banks.values()]
        finite = torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in stacked])
        return finite.all(0)[: self.n]

    # -- structure ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Main rows and shadow rows as the structure is now."""
        if self._plan is None:
            for (slot_id, blueprint), bank in self.banks.items():
                seeds = {
                    env: states[slot_id]
                    for env, states in enumerate(self.states)
                    if states[slot_id].blueprint == blueprint
                }
                bank.settle(seeds, self.host.buffers["conductance"][:, self.places[slot_id]])
            self._plan = main_rows(self), shadow_rows(self)
        return self._plan

    def group_size(self, group: tuple[object, ...], count: int) -> int:
        """How large a group of rows or members is made for so many.

        Where graphs are replayed a group never shrinks: after some episodes all structures have been met, and padding
        costs less than a new graph.
        """
        size = bucket(count)
        if self.graphs is not None:
            size = self._sizes[group] = max(size, self._sizes.get(group, 0))
        return size

    def busy_banks(self) -> list[tuple[str, str]]:
        """Banks with a seed that trains or acts; where graphs are replayed all banks, so that structures recur."""
        if self.graphs is not None:
            return list(self.banks)
        busy = {
            (slot_id, str(state.blueprint))
            for states in self.states
            for slot_id, state in states.items()
            if state.stage is SeedStage.TRAINING or state.stage in ACTIVE_STAGES
        }
        return [key for key in self.banks if key in busy]

    def evaluation_rows(self) -> tuple[Rows, list[tuple[int, str]]]:
        """Main rows with a shadow row per TRAINING seed and an ablation row per acting one, and whose these are."""
        _ = self.plan
        return eval_rows(self)

    def germinate(
        self, env: int, slot_id: str, blueprint: str, *, style: str = "add", tempo: int = 3, alpha_target: float = 1.0
    ) -> StageChange:
        """Plant a seed in a dormant slot of one env."""
        state, slot = self._state(env, slot_id), self.slots[slot_id]
        left = self.task.parameter_budget - self.grown_parameters(env)
        sown = lifecycle.sow(
            state, slot, blueprint, style=style, tempo=tempo, alpha_target=alpha_target, budget_left=left
        )
        rng_seed = derive_seed(derive_seed(self.seeds[env], "seeds"), slot_id, sown.germinations)
        self._bank(slot_id, blueprint).plant(env, rng_seed)
        return self._settle(env, slot_id, sown, "germinate")

    def advance(self, env: int, slot_id: str) -> StageChange:
        """One transition forward."""
        return self._change(env, slot_id, "advance", lambda state: lifecycle.advance(state, self.config))

    def fossilize(self, env: int, slot_id: str) -> StageChange:
        """Commit a HOLDING seed for good."""
        return self._change(env, slot_id, "fossilize", lambda state: lifecycle.fossilize(state, self.config))

    def set_alpha_target(
        self, env: int, slot_id: str, target: float, *, steps: int = 3, curve: str = "linear"
    ) -> StageChange:
        """Send a HOLDING seed to another alpha in so many steps."""
        return self._change(
            env, slot_id, "set_alpha_target", lambda state: lifecycle.set_alpha_target(state, target, steps, curve)
        )

    def prune(self, env: int, slot_id: str, *, steps: int = 0, curve: str = "linear") -> StageChange:
        """Cut a seed, at once or by a ramp of so many steps."""
        return self._change(
            env, slot_id, "prune", lambda state: lifecycle.prune(state, self.config, steps=steps, curve=curve)
        )

    def tick(self) -> list[tuple[int, StageChange]]:
        """The end of a step for every env: counters, schedules, cooldowns, and what happens by itself."""
        self.step_index += 1
        changes: list[tuple[int, StageChange]] = []
        for env, states in enumerate(self.states):
            for slot_id, state in list(states.items()):
                after, found = lifecycle.tick(state, self.config)
                if after is not state:
                    self._replace(env, slot_id, after)
                changes += [(env, change) for change in found]
        return changes

    def _check_env(self, env: int) -> None:
        if not 0 <= env < self.n:
            raise UnknownNameError("env", env, [f"0 to {self.n - 1}"])

    def _state(self, env: int, slot_id: str) -> SeedState:
        self._check_env(env)
        if slot_id not in self.slots:
            raise UnknownNameError("slot", slot_id, self.slots)
        return self.states[env][slot_id]

    def _change(self, env: int, slot_id: str, cause: str, verb: Callable[[SeedState], SeedState]) -> StageChange:
        return self._settle(env, slot_id, verb(self._state(env, slot_id)), cause)

    def _settle(self, env: int, slot_id: str, after: SeedState, cause: str) -> StageChange:
        before = self.states[env][slot_id].stage
        self._replace(env, slot_id, after)
        return StageChange(slot_id, before, after.stage, cause)

    def _replace(self, env: int, slot_id: str, after: SeedState) -> None:
        before = self.states[env][slot_id]
        if after.stage not in LIVE_STAGES:
            self.uproot(env, slot_id)
        if after.alpha < before.alpha:
            # A decision, not a fault: cutting a seed that carries its host throws the loss far up at once.
            self.governor.relearn(env)
        self.states[env][slot_id] = after
        self._plan = None

    def uproot(self, env: int, slot_id: str) -> None:
        """Free the seed of a slot, if it has one; the state is the caller's business."""
        blueprint = self.states[env][slot_id].blueprint
        if blueprint is not None:
            self._bank(slot_id, blueprint).free(env)
        self._plan = None

    def adopt(self, env: int, states: Mapping[str, SeedState]) -> None:
        """These are the states of an env from now on; its weights and its seeds' are the caller's business."""
        self.states[env] = dict(states)
        self._plan = None

    def _bank(self, slot_id: str, blueprint: str) -> Bank:
        key = slot_id, blueprint
        if key not in self.banks:
            config, members = self.task.optimiser, len(self.host.weights)
            self.banks[key] = Bank(
                self.slots[slot_id], blueprint, members, config, device=self.device, dtype=self.dtype
            )
        return self.banks[key]

    # -- what is in it ------------------------------------------------------------------------------------------------

    def grown_parameters(self, env: int) -> int:
        """Parameters of all seeds of one env."""
        self._check_env(env)
        total = 0
        for slot_id, state in self.states[env].items():
            if state.blueprint is not None:
                total += lifecycle.seed_parameters(self.slots[slot_id], state)
        return total

    def reports(self, env: int) -> tuple[SeedReport, ...]:
        """The slots of one env as a controller sees them."""
        self._check_env(env)
        return tuple(
            lifecycle.report(state, lifecycle.seed_parameters(self.slots[slot_id], state))
            for slot_id, state in self.states[env].items()
        )

    @torch.no_grad()
    def extract(self, env: int) -> MorphogeneticModel:
        """One env as a model of its own: weights, buffers, seeds, states."""
        self._check_env(env)
        host = self.task.build_host().to(device=self.device, dtype=self.dtype)
        for name, tensor in [*host.named_parameters(), *host.named_buffers()]:
            tensor.copy_((self.host.weights.leaves | self.host.buffers)[name][env])
        model = MorphogeneticModel(
            host,
            list(self.slots),
            config=self.config,
            budget=self.task.parameter_budget,
            rng_seed=derive_seed(self.seeds[env], "seeds"),
        )
        for slot_id, slot in model.seed_slots.items():
            state = self.states[env][slot_id]
            if state.blueprint is None:
                slot.settle(state)
                continue
            slot.plant(state, 0, like=next(host.parameters()))
            leaves = self._bank(slot_id, state.blueprint).weights.leaves
            for name, parameter in slot.named_parameters():
                parameter.copy_(leaves[name][env])
        return model


def _device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadValueError(f"device {str(given)!r} cannot be used here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise BadValueError(f"device {str(given)!r} cannot carry a fleet; allowed: cpu, cuda")
    return device
