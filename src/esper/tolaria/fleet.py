"""Many hosts as one batched program.

Host weights are stacked over envs; each (slot, blueprint) has a bank of stacked seeds. In a minibatch the main rows
and, where seeds are in TRAINING, their shadow rows walk through the host side by side, and every bank acts once; kernel
launches depend on slots × blueprints, not on the number of hosts. Lifecycles are the same pure functions that a single
model uses.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.kasmina import LifecycleConfig, MorphogeneticModel, SeedState, lifecycle
from esper.kasmina.compare import RowScore
from esper.kasmina.layers import BATCH_NORM_MOMENTUM
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import (
    ACTIVE_STAGES,
    BadValueError,
    SeedStage,
    StageChange,
    UnknownNameError,
    derive_seed,
)
from esper.tolaria.banks import Bank, bucket
from esper.tolaria.batches import Batches, Samples
from esper.tolaria.engine import rate_factor
from esper.tolaria.governor import Governor, GovernorConfig, Panic, SnapshotStore
from esper.tolaria.graphs import MinibatchGraphs
from esper.tolaria.lifecycles import Lifecycles
from esper.tolaria.measurement import FleetComparison, measure, measure_committed
from esper.tolaria.memory import PassMemory, default_budget, memory_guard
from esper.tolaria.passes import PassResult, StackedHost
from esper.tolaria.rows import LEAST_ROWS, PassPlan, Rows, eval_rows, make_plan
from esper.tolaria.stacked import StackedOptimizer, per_member
from esper.tolaria.tasks import Task


def row_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per row: (R, B, …, classes) against (R, B, …) → (R,)."""
    flat = logits.flatten(0, -2)
    losses = F.cross_entropy(flat.float() if flat.dtype.itemsize < 4 else flat, targets.flatten(), reduction="none")
    return losses.view(len(logits), -1).mean(1)


@final
class HostFleet(Lifecycles):
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
        isolation: Isolation = "shadow",
        graphs: bool = True,
        validation_bytes: int | None = None,
    ) -> None:
        """`seeds` has one number per env (default 0 … n−1): everything random in an env follows from its own.

        `isolation` is how TRAINING seeds learn: from shadow rows of their own, or straight through the main row, which
        needs no rows of its own and gives a seed no feedback of its own effect.
        Weights and statistics are kept in `dtype`; `compute` (default the same) is that of streams and products.
        On CUDA minibatches are replayed as `graphs`. `validation_bytes` is how much memory the activations of a
        validation may take (default: a quarter of a CUDA device, 1 GiB on the CPU).
        """
        if n < 1:
            raise BadValueError(f"a fleet of {n} hosts: it needs at least 1")
        self.seeds = list(range(n)) if seeds is None else list(seeds)
        if len(self.seeds) != n:
            raise BadValueError(f"{len(self.seeds)} seeds for {n} hosts: each host needs one")
        if isolation not in ISOLATIONS:
            raise UnknownNameError("isolation", isolation, ISOLATIONS)
        self.isolation: Isolation = isolation
        slots = {slot.slot_id: slot for slot in task.slot_config.slots}
        super().__init__(n, slots, config if config is not None else LifecycleConfig(), task.parameter_budget)
        self.task, self.device, self.dtype, self.compute = task, _device(device), dtype, compute or dtype
        self.validation_bytes = default_budget(self.device) if validation_bytes is None else validation_bytes
        if self.validation_bytes < 1:
            raise BadValueError(f"validation_bytes {self.validation_bytes} must be positive")
        self._plan: PassPlan | None = None
        with memory_guard(self, "loading the data"):
            self.batches = task.load_batches(data_dir, self.device) if batches is None else batches
        with memory_guard(self, "building the fleet"):
            self._build(governor, graphs=graphs)

    def _build(self, governor: GovernorConfig | None, *, graphs: bool) -> None:
        task, n, dtype = self.task, self.n, self.dtype
        padded = self._padded(self.seeds)
        made = {seed: task.make_host(seed) for seed in dict.fromkeys(padded)}
        self.places = {slot_id: made[padded[0]].slot_index(slot_id) for slot_id in self.slots}
        self.host = StackedHost(
            [made[seed] for seed in padded],
            self.places.values(),
            device=self.device,
            dtype=dtype,
            compute=self.compute,
        )
        self.optimizer = StackedOptimizer(task.optimiser, self.host.weights)
        self._group, self._order_seeds = self._grouping(padded)
        self.banks: dict[tuple[str, str], Bank] = {}
        self._sizes: dict[tuple[object, ...], int] = {}
        self._most: dict[tuple[object, ...], int] = {}
        self.rate_scale = torch.ones(len(padded), dtype=dtype, device=self.device)
        """Factor on the learning rate of each row."""
        self._norms: dict[tuple[str, str], Tensor] = {}
        self.step_index = 0
        self.losses = torch.full((n,), float("nan"))
        self._needs: PassMemory | None = None
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
        self.begin()
        self._leave_headroom()
        self.step_index, self._plan = 0, None
        self.losses = torch.full((self.n,), float("nan"))
        self.rate_scale.fill_(1)
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
        with memory_guard(self, "drawing a minibatch"):
            return self.batches.rows(self._order_seeds, self._group, index, self.compute)

    def train_minibatch(self, samples: Samples, rate: float, warm: float = 1.0) -> Tensor:
        """One step of every host and seed; returns the losses of the main rows (R,). `warm` scales newborns' rate."""
        with memory_guard(self, "training a minibatch"):
            if self.graphs is not None:
                return self.graphs.run(samples, rate, warm)
            rates = (torch.tensor(value, dtype=self.dtype, device=self.device) for value in (rate, warm))
            return self.run_minibatch(self.plan, samples, *rates)

    def run_minibatch(self, plan: PassPlan, samples: Samples, rate: Tensor, warm: Tensor) -> Tensor:
        """The work of a minibatch: no host sync, and nothing that depends on values, so that it can be a CUDA graph."""
        for weights in (self.host.weights, *(bank.weights for bank in self.banks.values())):
            weights.zero_grad()
        inputs, targets = samples
        done, beside = self.host.train(plan, inputs)
        losses = row_losses(done.output, targets)
        total = losses.sum()
        if beside is not None:
            assert plan.shadow is not None
            assert plan.shadow.valid is not None
            shadow_losses = row_losses(beside, targets.index_select(0, plan.shadow.env))
            total = total + shadow_losses.where(plan.shadow.valid, 0.0).sum()
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
        with self.host.lanes.over(self.busy_banks()) as busy:
            found = {key: self.banks[key].step(rates, warm) for key in busy}
        self._norms.update(found)
        if found:
            finite = finite & torch.stack(list(found.values())).isfinite().all(0)
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

    def validate(self, *, deployed: bool = True) -> FleetComparison:
        """Main rows, auditions and contributions on the validation set; noted in the seeds' states."""
        with memory_guard(self, "validating"):
            return measure(self, self._pass_needs(), deployed=deployed)

    def validate_committed(self, *, final: bool = False) -> list[RowScore]:
        """Every host with its fossils alone, as it will be hardened. `final` reads the test images instead."""
        with memory_guard(self, "validating"):
            needs = self._pass_needs()
            return measure_committed(self, needs, self.batches.test() if final else needs.samples)

    def _pass_needs(self) -> PassMemory:
        if self._needs is None:
            inputs = self.batches.calibration(self.task.calibration_size)
            self._needs = PassMemory(self, self.batches.validation(), inputs)
        return self._needs

    def govern(self, found: FleetComparison) -> list[Panic]:
        """After validation: send envs in trouble back to their snapshots, then remember all as they are."""
        losses = torch.tensor([row.loss for row in found.main])
        self.governor.examine(losses, self._state_finite())
        panics = self.governor.verdicts()
        for panic in panics:
            self.snapshots.restore(panic.env)
        with memory_guard(self, "taking snapshots"):
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
    def plan(self) -> PassPlan:
        """Main rows, shadow rows and what acts on them, as the structure is now."""
        if self._plan is None:
            for (slot_id, blueprint), bank in self.banks.items():
                seeds = {
                    env: states[slot_id]
                    for env, states in enumerate(self.states)
                    if states[slot_id].blueprint == blueprint
                }
                bank.settle(seeds, self.host.buffers["conductance"][:, self.places[slot_id]])
            self._plan = make_plan(self)
        return self._plan

    def group_size(self, group: tuple[object, ...], count: int) -> int:
        """How large a group of rows or members is made for so many.

        Where graphs are replayed a group never shrinks: after some episodes all structures have been met, and padding
        costs less than a new graph.
        """
        size = bucket(count)
        if self.graphs is not None:
            size = self._sizes[group] = max(size, self._sizes.get(group, 0))
            self._most[group] = max(count, self._most.get(group, 0))
        return size

    def _leave_headroom(self) -> None:
        """Between episodes: room for two deviations more than the most that a group has had, so that the next episode
        seldom meets a new structure. Counts of rare events vary by about their square root."""
        for group, most in self._most.items():
            self._sizes[group] = max(self._sizes[group], bucket(math.ceil(most + 2 * math.sqrt(most + 1))))

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

    def evaluation_rows(self) -> tuple[Rows, dict[int, tuple[int, str]]]:
        """Main rows with a shadow row per TRAINING seed and an ablation row per acting one, and whose these are by
        their number. On CUDA there is padding between them."""
        _ = self.plan
        return eval_rows(self, range(len(self.host.weights)))

    def shadows_per_host(self) -> float:
        """Shadow rows with their padding, as last planned."""
        shadow = None if self._plan is None else self._plan.shadow
        return 0.0 if shadow is None else len(shadow) / self.n

    def tick(self) -> list[tuple[int, StageChange]]:
        self.step_index += 1
        return super().tick()

    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        rng_seed = derive_seed(derive_seed(self.seeds[env], "seeds"), slot_id, state.germinations)
        self._bank(slot_id, str(state.blueprint)).plant(env, rng_seed)

    def uproot(self, env: int, slot_id: str) -> None:
        blueprint = self.states[env][slot_id].blueprint
        if blueprint is not None:
            self._bank(slot_id, blueprint).free(env)

    def restructured(self, env: int, *, eased: bool) -> None:
        self._plan = None
        if eased:
            # A decision, not a fault: cutting a seed that carries its host throws the loss far up at once.
            self.governor.relearn(env)

    def _bank(self, slot_id: str, blueprint: str) -> Bank:
        key = slot_id, blueprint
        if key not in self.banks:
            config, members = self.task.optimiser, len(self.host.weights)
            with memory_guard(self, f"making room for {blueprint} seeds in {slot_id}"):
                self.banks[key] = Bank(
                    self.slots[slot_id], blueprint, members, config, device=self.device, dtype=self.dtype
                )
            # In one order, whenever they were born: sums over banks must not depend on what earlier episodes grew.
            order = list(self.slots)
            self.banks = dict(sorted(self.banks.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))
        return self.banks[key]

    @torch.no_grad()
    def extract(self, env: int) -> MorphogeneticModel:
        """One env as a model of its own: weights, buffers, seeds, states."""
        self.check_env(env)
        host = self.task.build_host().to(device=self.device, dtype=self.dtype)
        for name, tensor in [*host.named_parameters(), *host.named_buffers()]:
            tensor.copy_((self.host.weights.leaves | self.host.buffers)[name][env])
        model = MorphogeneticModel(
            host,
            list(self.slots),
            isolation=self.isolation,
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
