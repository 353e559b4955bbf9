"""Many hosts as one batched program.

Host weights are stacked over envs; each (slot, blueprint) has a bank of stacked seeds. In a minibatch the main rows
and, where seeds are in TRAINING, their shadow rows pass through the host side by side, and every bank acts once. Kernel
launches depend on slots × blueprints, not on the number of hosts. Lifecycles are the pure functions of a single model.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from esper.kasmina import Host, LifecycleConfig, MorphogeneticModel, SeedState, lifecycle
from esper.kasmina.compare import Comparison, RowScore
from esper.kasmina.layers import BATCH_NORM_MOMENTUM, Statistics
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import BadValueError, SlotConfig, StageChange, derive_seed, relative_gain
from esper.leyline.numbers import require_known
from esper.tolaria.banks import Bank, StackedOptimizer, bucket, per_member, with_spare
from esper.tolaria.batches import Batches, Samples
from esper.tolaria.engine import rate_factor
from esper.tolaria.governor import Governor, GovernorConfig, Panic, SnapshotStore
from esper.tolaria.graphs import MinibatchGraphs
from esper.tolaria.lifecycles import Lifecycles
from esper.tolaria.measurement import Prober, measure, measure_committed
from esper.tolaria.memory import ValidationMemory, default_budget, memory_guard
from esper.tolaria.passes import StackedHost, row_losses
from esper.tolaria.rows import LEAST_ROWS, PassPlan, input_tiles, make_plan
from esper.tolaria.tasks import Task


@final
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
        isolation: Isolation = "shadow",
        graphs: bool = True,
        validation_bytes: int | None = None,
    ) -> None:
        """`seeds` has one number per env (default 0 … n−1): everything random in an env follows from it.

        `isolation`: TRAINING seeds learn from shadow rows, or straight through the main row, without feedback.
        Weights and statistics are stored in `dtype`; `compute` (default the same) is that of streams and products.
        On CUDA minibatches are replayed as `graphs`. `validation_bytes` limits the memory of the activations of a
        validation (default: a quarter of a CUDA device, 1 GiB on the CPU).
        """
        if n < 1:
            raise BadValueError(f"n must be at least 1, not {n}")
        require_known("isolation", isolation, ISOLATIONS)
        self.n, self.isolation, self.task = n, isolation, task
        self.device, self.dtype, self.compute = _usable_device(device), dtype, compute or dtype
        self.validation_bytes = default_budget(self.device) if validation_bytes is None else validation_bytes
        if self.validation_bytes < 1:
            raise BadValueError(f"validation_bytes {self.validation_bytes} must be positive")
        self.slots = {slot.slot_id: slot for slot in self.slot_config.slots}
        self.config, self.budget = config or LifecycleConfig(), task.parameter_budget
        self._start_episode(range(n) if seeds is None else seeds)
        # The verbs and states of the lifecycles are the fleet's too.
        lives = self.lifecycles = Lifecycles(self)
        self.states = lives.states
        self.germinate, self.advance, self.prune = lives.germinate, lives.advance, lives.prune
        self.fossilize, self.set_alpha_target, self.adopt = lives.fossilize, lives.set_alpha_target, lives.adopt
        self.check_env, self.reports, self.grown_parameters = lives.check_env, lives.reports, lives.grown_parameters
        with memory_guard(self, "loading the data"):
            self.batches = task.load_batches(data_dir, self.device) if batches is None else batches
        with memory_guard(self, "building the fleet"):
            self._build(governor, graphs=graphs)

    def _build(self, governor: GovernorConfig | None, *, graphs: bool) -> None:
        hosts = self._make_hosts()
        self.places = {slot_id: hosts[0].slot_index(slot_id) for slot_id in self.slots}
        self.host = StackedHost(hosts, self.places.values(), self.device, self.dtype, self.compute)
        self.optimizer = StackedOptimizer(self.task.optimiser, self.host.weights)
        self.banks: dict[tuple[str, str], Bank] = {}
        self._sizes: dict[tuple[object, ...], int] = {}
        self._most: dict[tuple[object, ...], int] = {}
        self.rate_scale = torch.ones(len(hosts), dtype=self.dtype, device=self.device)  # of each row's learning rate
        self.norms: dict[tuple[str, str], Tensor] = {}  # gradient norms of the last minibatch by bank (envs,)
        self.governor = Governor(self.n, self.task.random_guess_loss, governor, self.device)
        self.snapshots = SnapshotStore(self)
        self.graphs = MinibatchGraphs(self) if graphs and self.device.type == "cuda" else None

    def _start_episode(self, seeds: Sequence[int]) -> None:
        if len(seeds) != self.n:
            raise BadValueError(f"got {len(seeds)} seeds for {self.n} hosts; pass one per host")
        self.seeds = list(seeds)
        self._row_seeds = self.seeds + self.seeds[:1] * (LEAST_ROWS - self.n)
        groups = list(dict.fromkeys(self._row_seeds))
        of_rows = [groups.index(seed) for seed in self._row_seeds]
        self._group, self.tiles = torch.tensor(of_rows, device=self.device), input_tiles(of_rows, self.device)
        self._order_seeds = torch.tensor([derive_seed(seed, "data") for seed in groups], device=self.device)
        self.step_index = 0
        self.losses = torch.full((self.n,), float("nan"))
        self._plan: PassPlan | None = None

    def _make_hosts(self) -> list[Host]:
        """A fresh host per row; those of a group are one object."""
        by_seed = {seed: self.task.make_host(seed) for seed in dict.fromkeys(self._row_seeds)}
        return [by_seed[seed] for seed in self._row_seeds]

    def reset(self, seeds: Sequence[int]) -> None:
        """Start a new episode: fresh hosts of these seeds, empty slots. Keeps memory and graphs."""
        self._start_episode(seeds)
        self.host.fill(self._make_hosts())
        for bank in self.banks.values():
            bank.free(slice(None))
        self.optimizer.clear(slice(None))
        self.lifecycles.reset()
        self._leave_headroom()
        self.rate_scale.fill_(1)
        self.governor.reset()
        self.snapshots.take()

    # -- what it grows ------------------------------------------------------------------------------------------------

    @property
    def slot_config(self) -> SlotConfig:
        """The slots of every host, with the blueprints that they offer."""
        return self.task.slot_config

    def host_size(self, env: int) -> int:
        """Parameters of an env's host without seeds, as the task counts them."""
        return self.task.size_of(self.seeds[env])

    @property
    def random_guess_loss(self) -> float:
        """The unit of losses."""
        return self.task.random_guess_loss

    @property
    def progress(self) -> float:
        """Share of the episode that is done."""
        return self.step_index / self.task.steps

    # -- training -----------------------------------------------------------------------------------------------------

    def train_step(self) -> Tensor:
        """`batches_per_step` minibatches at constant alpha; returns the mean loss of each env's main row (N,)."""
        total = torch.zeros(len(self._group), device=self.device, dtype=self.dtype)
        per_step = self.task.batches_per_step
        for index in range(per_step):
            samples = self.draw(self.step_index * per_step + index)
            progress = (self.step_index + index / per_step) / self.task.steps
            rate = self.task.optimiser.rate * rate_factor(progress)
            total += self.train_minibatch(samples, rate, (index + 1) / per_step)
        self._record_gradients()
        # Device sync: once per step.
        self.losses = (total / per_step)[: self.n].cpu()
        return self.losses

    def draw(self, index: int) -> Samples:
        """The minibatch of that number for every row: inputs (R, B, …), targets (R, B, …)."""
        with memory_guard(self, "drawing a minibatch"):
            return self.batches.rows(self._order_seeds, self._group, index, self.compute)

    def train_minibatch(self, samples: Samples, rate: float, warm: float = 1.0) -> Tensor:
        """One step of every host and seed; returns the losses of the main rows (R,). `warm` scales newborns' rate."""
        with memory_guard(self, "training a minibatch"):
            plan = self.update_plan()
            if self.graphs is not None:
                return self.graphs.run(plan, samples, rate, warm)
            rates = (torch.tensor(value, dtype=self.dtype, device=self.device) for value in (rate, warm))
            return self.run_minibatch(plan, samples, *rates)

    def run_minibatch(self, plan: PassPlan, samples: Samples, rate: Tensor, warm: Tensor) -> Tensor:
        """The work of a minibatch: no device sync, and nothing that depends on values, so it can be a CUDA graph."""
        for weights in (self.host.weights, *(bank.weights for bank in self.banks.values())):
            weights.zero_grad()
        inputs, targets = samples
        result = self.host.run(replace(plan.main, acts=plan.acts), inputs, train=True, shadow=plan.shadow)
        losses = row_losses(result.output, targets)
        total = losses.sum()
        shadow = plan.shadow
        if shadow is not None and shadow.valid is not None and result.shadow_output is not None:
            shadow_losses = row_losses(result.shadow_output, targets.index_select(0, shadow.env))
            total = total + shadow_losses.where(shadow.valid, 0.0).sum()
        total.backward()
        finite, update_ratio = self._step(rate, warm)
        self._write_statistics(result.statistics)
        variance = result.output.detach().to(self.dtype).flatten(1, -2).var(1).sum(1)
        self.governor.observe(*(signs[: self.n] for signs in (losses.detach(), finite, variance, update_ratio)))
        return losses.detach()

    def _step(self, rate: Tensor, warm: Tensor) -> tuple[Tensor, Tensor]:
        """Step hosts and seeds. Returns, per row, whether all gradients were finite, and the host's update ratio."""
        rates = rate * self.rate_scale
        host_norms, update_ratio = self.optimizer.step(rates, torch.ones_like(rates, dtype=torch.bool))
        finite = host_norms.isfinite()
        with self.host.streams.over(self.busy_banks()) as busy:
            norms = {key: self.banks[key].step(rates, warm) for key in busy}
        self.norms.update(norms)
        if norms:
            finite = finite & torch.stack(list(norms.values())).isfinite().all(0)
        return finite, update_ratio

    @torch.no_grad()
    def _write_statistics(self, statistics: list[Statistics]) -> None:
        """Running statistics move towards those of the batch, where these are finite."""
        for index, by_name in enumerate(statistics):
            for name, value in by_name.items():
                buffer = self.host.buffers[f"segments.{index}.{name}"]
                finite = per_member(value.flatten(1).isfinite().all(1), value)
                buffer.copy_(buffer.lerp(value, BATCH_NORM_MOMENTUM).where(finite, buffer))

    def _record_gradients(self) -> None:
        # Device sync: once per step.
        norms = {key: tensor.tolist() for key, tensor in self.norms.items()}
        for env, slot_id, state in self.lifecycles.working():
            self.states[env][slot_id] = lifecycle.record_gradient(state, norms[slot_id, str(state.blueprint)][env])

    # -- measuring ----------------------------------------------------------------------------------------------------

    def validate(self, *, deployed: bool = True) -> list[Comparison]:
        """Score main rows, auditions and contributions on the validation set, and record them in the seeds' states."""
        with memory_guard(self, "validating"):
            self.update_plan()
            return measure(self, self._memory, deployed=deployed)

    def validate_committed(self, *, final: bool = False) -> list[RowScore]:
        """Score every host with its fossils alone, as it will be hardened, on all validation images of the task.

        `final` uses the test images instead."""
        with memory_guard(self, "validating"):
            self.update_plan()
            return measure_committed(self, self._memory, self.batches.test() if final else self._end)

    def prober(self) -> Prober:
        """What probes the slots of all envs."""
        return Prober(self)

    @cached_property
    def _memory(self) -> ValidationMemory:
        calibration = self.batches.calibration(self.task.calibration_size)
        return ValidationMemory(self, self.batches.validation(), calibration)

    @cached_property
    def _end(self) -> Samples:
        return self.batches.end()

    def points(self, rows: Sequence[RowScore]) -> Tensor:
        """Accuracy (rows,) in percent, or percent below the loss of guessing, on the device."""
        if self.task.by_loss:
            return relative_gain(self.random_guess_loss, torch.stack([row.losses for row in rows]).float().mean(1))
        return 100 * torch.stack([row.hits for row in rows]).float().mean(1)

    def govern(self, comparisons: Sequence[Comparison]) -> list[Panic]:
        """After validation: restore the snapshots of envs that panic, then take new snapshots of all."""
        losses = torch.stack([comparison.main.losses for comparison in comparisons]).double().mean(1)
        banks = [bank.weights.matrix for bank in self.banks.values()]
        stacked = [self.host.weights.matrix, *self.host.buffers.values(), *banks]
        finite = torch.stack([tensor.flatten(1).isfinite().all(1) for tensor in stacked]).all(0)
        self.governor.examine(losses, finite[: self.n])
        panics = self.governor.verdicts()
        for panic in panics:
            self.snapshots.restore(panic.env)
        with memory_guard(self, "taking snapshots"):
            self.snapshots.take()
        return panics

    # -- structure ----------------------------------------------------------------------------------------------------

    def update_plan(self) -> PassPlan:
        """Bring the banks and the pass plan up to date with the seeds' states; returns the plan."""
        if self._plan is None:
            for (slot_id, _), bank in self.banks.items():
                conductance = self.host.buffers["conductance"][:, self.places[slot_id]]
                bank.settle([states[slot_id] for states in self.states], conductance)
            self._plan = make_plan(self)
        return self._plan

    def padded(self, count: int) -> int:
        """The least size of a group of `count` rows or members in a minibatch."""
        return with_spare(count, self.task.batch) if self.device.type == "cpu" else bucket(count)

    def group_size(self, group: tuple[object, ...], count: int) -> int:
        """The padded size of a group of `count` rows or members. Where graphs are replayed a group never shrinks: after
        some episodes all structures have been met, and padding costs less than a new graph."""
        size = self.padded(count)
        if self.graphs is not None:
            size = self._sizes[group] = max(size, self._sizes.get(group, 0))
            self._most[group] = max(count, self._most.get(group, 0))
        return size

    def _leave_headroom(self) -> None:
        # Room for two deviations more than the most that a group has had, so that the next episode seldom meets a new
        # structure. Counts of rare events vary by about their square root.
        for group, most in self._most.items():
            self._sizes[group] = max(self._sizes[group], bucket(math.ceil(most + 2 * math.sqrt(most + 1))))

    def busy_banks(self) -> list[tuple[str, str]]:
        """Banks with a seed that trains or acts; where graphs are replayed all banks, so that structures recur."""
        if self.graphs is not None:
            return list(self.banks)
        busy = {(slot_id, str(state.blueprint)) for _, slot_id, state in self.lifecycles.working()}
        return [key for key in self.banks if key in busy]

    def tick(self) -> list[tuple[int, StageChange]]:
        """End a step for every env: counters, schedules, cooldowns, automatic changes of stage."""
        self.step_index += 1
        return self.lifecycles.tick()

    def plant(self, env: int, slot_id: str, state: SeedState) -> None:
        """Build the seed that `state` describes."""
        rng_seed = derive_seed(derive_seed(self.seeds[env], "seeds"), slot_id, state.germinations)
        self._bank(slot_id, str(state.blueprint)).plant(env, rng_seed)

    def uproot(self, env: int, slot_id: str) -> None:
        """Remove the weights of a slot's seed, if it has one. The caller changes the state."""
        blueprint = self.states[env][slot_id].blueprint
        if blueprint is not None:
            self._bank(slot_id, blueprint).free(env)

    def restructured(self, env: int, *, eased: bool) -> None:
        """Note that states of an env have changed; `eased`: a seed acts less than before, or no longer."""
        self._plan = None
        if eased:
            # A decision, not a fault: cutting a seed that carries its host throws the loss far up at once.
            self.governor.relearn(env)

    def _bank(self, slot_id: str, blueprint: str) -> Bank:
        key = slot_id, blueprint
        if key not in self.banks:
            slot, members = self.slots[slot_id], len(self.host.weights)
            with memory_guard(self, f"making room for {blueprint} seeds in {slot_id}"):
                bank = Bank(slot, blueprint, members, self.task.optimiser, self.device, self.dtype)
            # In one order, whenever they were born: sums over banks must not depend on what earlier episodes grew.
            order = list(self.slots)
            banks = {**self.banks, key: bank}
            self.banks = dict(sorted(banks.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))
        return self.banks[key]

    @torch.no_grad()
    def extract(self, env: int) -> MorphogeneticModel:
        """A copy of one env as a single model: weights, buffers, seeds, states."""
        self.check_env(env)
        host = self.task.build_host().to(device=self.device, dtype=self.dtype)
        for name, tensor in [*host.named_parameters(), *host.named_buffers()]:
            tensor.copy_((self.host.weights.leaves | self.host.buffers)[name][env])
        model = self.task.make_model(host, self.seeds[env], self.isolation, self.config)
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


def _usable_device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise BadValueError(f"device {str(given)!r} cannot be used here: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise BadValueError(f"device {str(given)!r} cannot carry a fleet; allowed: cpu, cuda")
    return device
