"""Proximal policy optimisation for policies that are recurrent, masked (some choices are illegal) and factored (an
action is one choice per head)."""

import copy
import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from esper.leyline import BadValueError, EsperError
from esper.leyline.numbers import require_whole
from esper.simic.agent import losses
from esper.simic.agent.adam import FusedAdamW
from esper.simic.agent.config import ADAM_EPS, FAILURES_ALLOWED, GAP_REFUSED, KL_STOP, NORM_EPS, CompileMode, PPOConfig
from esper.simic.agent.metrics import MinibatchRecord, PPOUpdateMetrics, UpdateObserver, summarise
from esper.simic.agent.minibatch import Minibatch, PreparedRound, Reference, gather_inputs, prepare_round
from esper.simic.agent.rollout import Batch, Sequences, TamiyoRolloutBuffer
from esper.simic.control import ObservationNormalizer, ReturnNormalizer
from esper.tamiyo import ActionTable, Decision, FactoredRecurrentActorCritic, ObservationLayout
from esper.tamiyo.encoder import Encoded
from esper.tamiyo.heads import EmptyMaskError, Masks
from esper.tamiyo.memory import HiddenState

T = TypeVar("T")
COMPILERS = ("torch._dynamo", "torch._inductor")
"""Modules whose errors come from the compiler, not from the network."""


class BehaviourGapError(EsperError, RuntimeError):
    """Another policy than the agent's collected the round."""


class NotFiniteError(EsperError, FloatingPointError):
    """An observation, reward or gradient is not finite."""


class PPOAgent:
    """A policy with its optimiser, normalisers and schedules.

    One round: `act` for every step into a `TamiyoRolloutBuffer`, then `update`. If the end of an episode completes what
    the critic observes, call `recompute_values` in between. All randomness comes from the agent's own generator, on the
    CPU, so that draws do not depend on the device.
    """

    def __init__(
        self,
        table: ActionTable,
        layout: ObservationLayout,
        config: PPOConfig | None = None,
        *,
        total_updates: int = 100,
        tasks: int = 1,
        rng_seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """`total_updates` is the length of the run, over which rates and exploration are annealed."""
        require_whole("total_updates", total_updates, 1)
        require_whole("tasks", tasks, 1)
        self.table, self.layout = table, layout
        self.config = config if config is not None else PPOConfig()
        self.device = torch.device(device)
        self.total_updates, self.updates, self.failures = total_updates, 0, 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng_seed)
            network = FactoredRecurrentActorCritic(table, layout, self.config.network)
        self.network = network.to(self.device)
        self.generator = torch.Generator().manual_seed(rng_seed)
        # Normalisers: running statistics, not data.
        self.observations = ObservationNormalizer(layout.columns(), layout.as_they_are(), device=self.device)
        self.returns = ReturnNormalizer(tasks, device=self.device)
        named = list(self.network.named_parameters())
        others = {name: weight for name, weight in named if not name.startswith("critic")}
        critic = {name: weight for name, weight in named if name.startswith("critic")}
        self._weights: list[Parameter] = [*others.values(), *critic.values()]
        decayed = {"params": [*critic.values()], "weight_decay": self.config.critic_decay}
        groups = [{"params": [*others.values()], "weight_decay": 0.0}, decayed]
        self.optimizer = FusedAdamW(groups, lr=self.config.rate, eps=ADAM_EPS, fused=True)
        owners = [[name.startswith(f"heads.{head}.") for head in table.names] for name in [*others, *critic]]
        self._owners = torch.tensor(owners, device=self.device)  # (weights, heads): which weights belong to which head
        self.start: FactoredRecurrentActorCritic | None = None  # the policy that the leash holds to
        self.compile_error = ""  # why the compiler failed, until someone has logged it
        self.compile(self.config.compile)

    @property
    def progress(self) -> float:
        """Completed share of the run."""
        return min(1.0, self.updates / self.total_updates)

    @property
    def epsilon(self) -> float:
        """Share of uniform choices in the next round."""
        return self.config.explore_at(self.progress)

    def compile(self, mode: CompileMode) -> None:
        """Compile encoder and heads for the update, or return to eager mode. `act` is always eager. Shapes are dynamic
        because rounds differ in their sequences, so there are no CUDA graphs. Checkpoints do not depend on this."""
        self.compile_mode: CompileMode = mode
        self._encode: Callable[[Tensor], Encoded] = self.network.encode
        self._decide: Callable[..., Decision] = self.network.decide
        if mode != "off":
            self._encode = torch.compile(self.network.encode, mode=mode, dynamic=True)
            self._decide = torch.compile(self.network.decide, mode=mode, dynamic=True)

    def _or_eager(self, work: Callable[..., T], *arguments: object, **settings: object) -> T:
        """Do the work. If the compiler fails, warn, return to eager mode and do it again."""
        try:
            return work(*arguments, **settings)
        except Exception as error:
            if self.compile_mode == "off" or not type(error).__module__.startswith(COMPILERS):
                raise
            warnings.warn(f"torch.compile failed, continuing without it: {error}", RuntimeWarning, stacklevel=3)
            self.compile("off")
            self.compile_error = str(error)
            return work(*arguments, **settings)

    def hold_to_start(self) -> None:
        """Remember the present policy as the one that the leash holds to."""
        self.start = copy.deepcopy(self.network).requires_grad_(False)

    @property
    def leash(self) -> float:
        """Coefficient of the KL from the start in the next update; 0 if there is no start to hold to."""
        return 0.0 if self.start is None else self.config.leash_at(self.progress)

    @property
    def critic_alone(self) -> bool:
        """Whether the next update trains the critic alone."""
        return self.updates < self.config.critic_first

    def normalise(self, raw: Tensor) -> Tensor:
        """Normalise raw observations (n, size) on the agent's device."""
        return self.observations(raw) if self.config.normalise_observations else raw

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        masks: Masks,
        hidden_state: HiddenState,
        *,
        epsilon: float = 0.0,
        uniform: Tensor | None = None,
        greedy: bool = False,
        followed: int = 0,
    ) -> tuple[Decision, Tensor, HiddenState]:
        """Actions, the critic's outputs (n,) (see `values_of`), and the next hidden state.

        Observations (n, size) are normalised. Actions are sampled from `uniform` (n, heads), random numbers in [0, 1);
        by default the agent's generator draws them. For the first `followed` envs, the decision has the probabilities
        of all choices.
        Device sync: one, which checks all heads for empty masks and numbers that are not finite.
        """
        if not greedy and uniform is None:
            uniform = torch.rand((len(observations), len(self.table)), generator=self.generator)
        encoded = self.network.encode(observations)
        core, hidden_state = self.network.step(encoded.trunk, hidden_state)
        draws = None if greedy or uniform is None else uniform.to(self.device)
        decision = self.network.decide(core, encoded, masks, epsilon, uniform=draws, measured=False, followed=followed)
        values = self.network.value(core, encoded)
        numbers = torch.cat([observations.flatten(), values, decision.log_probs.flatten()])
        if not bool((decision.choices.amin() > 0) & numbers.isfinite().all()):
            self._raise_cause(observations, decision)
        return decision, values, hidden_state

    def _raise_cause(self, observations: Tensor, decision: Decision) -> None:
        if len(bad := (~observations.isfinite()).nonzero()):
            env, column = bad[0].tolist()
            name = self.layout.column_names[int(self.layout.columns()[column])]
            raise NotFiniteError(
                f"column {column} ({name}) of the observation of env {env} is {float(observations[env, column])}; "
                "fix the environment"
            )
        if len(empty := (decision.choices == 0).nonzero()):
            env, head = empty[0].tolist()
            raise EmptyMaskError(
                f"the mask of head {self.table.names[head]!r} allows env {env} nothing; allow at least one choice"
            )
        raise NotFiniteError("the policy's output is not finite: its weights are damaged; return to a checkpoint")

    def values_of(self, values: Tensor, tasks: Tensor) -> Tensor:
        """The critic's outputs (n,) as returns of these tasks (n,)."""
        return self.returns.restore(values, tasks)

    @torch.no_grad()
    def recompute_values(self, buffer: TamiyoRolloutBuffer) -> None:
        """Recompute the values of a round after its observations have changed. Device sync: one, for `ends`."""
        sequences = buffer.sequences()
        batch = buffer.batch(sequences, np.unique(sequences.rows).tolist())
        encoded = self.network.encode(buffer.observations.flatten(0, 1)[batch.cells])
        core = self.network.unroll(encoded.trunk, batch.stretches, batch.hidden_state)
        values = self.values_of(self.network.value(core, encoded), buffer.cell_tasks[batch.cells])
        buffer.values.view(-1)[batch.cells] = values

    def update(self, buffer: TamiyoRolloutBuffer, observer: UpdateObserver | None = None) -> PPOUpdateMetrics:
        """Learn from a round. Device syncs: at most epochs + 2 (`ends`, one per epoch, the metrics).

        Rows of the buffer are divided into minibatches, those into pieces (to save memory). The policy's outputs before
        the update are the reference for ratios; with them, advantages and targets are fixed for all epochs. The first
        minibatch whose KL is too large ends the update.
        """
        config, progress = self.config, self.progress
        self._check(buffer)
        sequences = buffer.sequences()
        partition = self._partition(buffer, sequences)
        reference = self._or_eager(self._reference, buffer, partition)
        prepared = prepare_round(buffer, reference, self.returns, config, len(partition))
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate_at(progress)
        # Entropies and logit spreads cost time. If the loss does not contain them, only the first epoch measures them.
        regularised = config.entropy_at(progress) > 0 or config.logit_penalty > 0
        halted = ~reference.accepted  # on the device; once set, no step is taken (`_count_or_refuse` raises)
        records: list[MinibatchRecord] = []
        pieces: list[Minibatch] = []
        for epoch in range(config.epochs):
            if epoch and len(partition) > 1:
                partition = self._partition(buffer, sequences)
            for batches in partition:
                if not epoch or len(partition) > 1:  # a round in a single minibatch is gathered once
                    pieces = [prepared.minibatch(batch) for batch in batches]
                measured = regularised or not epoch
                record, kl = self._or_eager(self._differentiate, prepared, pieces, measured=measured)
                if config.target_kl is not None:
                    halted = halted | ~(kl <= KL_STOP * config.target_kl)
                if observer is not None:
                    cells = torch.cat([piece.batch.cells for piece in pieces])
                    observer.on_minibatch(self.network, cells, record.log_ratios, record.decided)
                norm, factor, head_norms = self._clip()
                self.optimizer.skip = (halted | ~norm.isfinite()).float()
                self.optimizer.step()
                record.figures.update(halted=halted, norm=norm, factor=factor, head_norms=head_norms)
                records.append(record)
            if bool(halted):  # device sync: one per epoch
                break
        metrics = summarise(prepared, records, epoch + 1, self)
        self._count_or_refuse(metrics)
        return metrics

    def _check(self, buffer: TamiyoRolloutBuffer) -> None:
        if buffer.table != self.table:
            sizes, expected = ({head.name: head.size for head in table.heads} for table in (buffer.table, self.table))
            remark = "; their masks or uses differ" if sizes == expected else ""
            raise BadValueError(f"the buffer has heads {sizes}, the policy has {expected}{remark}")
        if buffer.device.type != self.device.type:
            raise BadValueError(f"the buffer is on {buffer.device}, the policy on {self.device}")
        own = (buffer.observations.shape[-1], buffer.hidden_state[0].shape[-1])
        if own != (needed := (self.layout.size, self.config.network.state_size)):
            raise BadValueError(f"the buffer has (observation, hidden) sizes {own}, the policy has {needed}")
        if not buffer.steps:
            raise BadValueError("the buffer is empty: collect a round first")

    def _partition(self, buffer: TamiyoRolloutBuffer, sequences: Sequences) -> list[list[Batch]]:
        """Minibatches of whole rows, shuffled over envs, each in pieces. Every row with a step occurs once."""
        filled = np.unique(sequences.rows)
        order = filled[torch.randperm(len(filled), generator=self.generator).numpy()].tolist()
        count, pieces = min(self.config.minibatches, len(filled)), self.config.pieces
        minibatches = [order[start::count] for start in range(count)]
        divided = [[rows[start::pieces] for start in range(pieces)] for rows in minibatches]
        return [[buffer.batch(sequences, rows) for rows in parts if rows] for parts in divided]

    def _evaluate(
        self, observations: Tensor, masks: Masks, actions: Tensor, batch: Batch, epsilon: float, *, measured: bool
    ) -> tuple[Decision, Tensor]:
        """Decision and normalised values of a batch's steps, in packed order (see `Stretches`)."""
        encoded = self._encode(observations)
        core = self.network.unroll(encoded.trunk, batch.stretches, batch.hidden_state)
        decision = self._decide(core, encoded, masks, epsilon, actions=actions, measured=measured)
        return decision, self.network.value(core.detach() if self.critic_alone else core, encoded)

    def _reference(self, buffer: TamiyoRolloutBuffer, partition: list[list[Batch]]) -> Reference:
        """The policy before the update, on the first epoch's minibatches: the same kernels on the same shapes make the
        first ratios exactly 1. (Without autograd the LSTM uses another kernel.)"""
        log_probs = torch.zeros_like(buffer.log_probs).flatten(0, 1)
        decided = torch.zeros_like(log_probs, dtype=torch.bool)
        values = torch.zeros_like(log_probs[:, 0])
        for batch in (batch for batches in partition for batch in batches):
            decision, value = self._evaluate(*gather_inputs(buffer, batch), batch, buffer.epsilon, measured=False)
            log_probs[batch.cells] = decision.log_probs.detach()
            decided[batch.cells] = decision.decided
            values[batch.cells] = value.detach()
        gaps = (log_probs - buffer.log_probs.flatten(0, 1)).abs().where(buffer.valid.flatten().unsqueeze(1), 0.0)
        return Reference(log_probs, decided, values, gaps.amax(), self._start_log_probs(buffer, partition))

    @torch.no_grad()
    def _start_log_probs(self, buffer: TamiyoRolloutBuffer, partition: list[list[Batch]]) -> Tensor | None:
        """Log-probs (cells, heads) of the round's actions under the policy that the leash holds to."""
        if self.start is None or self.leash == 0:
            return None
        log_probs = torch.zeros_like(buffer.log_probs).flatten(0, 1)
        for batch in (batch for batches in partition for batch in batches):
            observations, masks, actions = gather_inputs(buffer, batch)
            encoded = self.start.encode(observations)
            core = self.start.unroll(encoded.trunk, batch.stretches, batch.hidden_state)
            decision = self.start.decide(core, encoded, masks, buffer.epsilon, actions=actions, measured=False)
            log_probs[batch.cells] = decision.log_probs
        return log_probs

    def _differentiate(
        self, prepared: PreparedRound, pieces: list[Minibatch], *, measured: bool
    ) -> tuple[MinibatchRecord, Tensor]:
        """Gradients of a minibatch, accumulated over its pieces; its record, and the joint action's KL."""
        for weight in self._weights:
            weight.grad = None
        log_ratios: list[Tensor] = []
        figures: dict[str, Tensor] = {}
        for piece in pieces:
            loss, log_ratio, terms = self._loss(prepared, piece, measured=measured)
            loss.backward()
            log_ratios.append(log_ratio.detach())
            for name, term in terms.items():
                figures[name] = figures[name] + term.detach() if name in figures else term.detach()
        kl = figures.pop("kl")
        return MinibatchRecord(torch.cat(log_ratios), torch.cat([piece.decided for piece in pieces]), figures), kl

    def _loss(
        self, prepared: PreparedRound, piece: Minibatch, *, measured: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The loss of a piece, its log-ratios, and its share of the minibatch's loss terms and KL."""
        config, decided = self.config, piece.decided
        entropy_coefficient, clip = config.entropy_at(self.progress), config.clip_at(self.progress)
        inputs = (piece.observations, piece.masks, piece.actions, piece.batch)
        decision, values = self._evaluate(*inputs, prepared.buffer.epsilon, measured=measured)
        ratio, log_ratio = losses.ratios(decision.log_probs, piece.log_probs)
        if config.clipping == "joint":
            sums = losses.joint_surrogate(log_ratio, decided, piece.advantages[:, 0], clip)
            policy_loss = sums * prepared.per_decision
        else:
            sums = losses.masked_sum(losses.surrogate(ratio, piece.advantages, clip), decided)
            policy_loss = sums @ prepared.per_head
        errors = losses.value_errors(values, piece.targets, piece.values, clip=config.value_clip, huber=config.huber)
        value_loss = (errors @ piece.weights) * prepared.per_weight
        loss = config.value_coefficient * value_loss
        if not self.critic_alone:
            loss = loss + policy_loss
            if piece.start is not None:
                # With actions of π, the gradient of r − 1 − log r for r = π_start/π is that of KL(π_start ‖ π).
                away = losses.kl_terms(*losses.ratios(piece.start, decision.log_probs))
                loss = loss + self.leash * losses.masked_sum(away, decided).sum() * prepared.per_decision
        with torch.no_grad():
            kl = losses.masked_sum(losses.kl_terms(ratio, log_ratio), decided).sum() * prepared.per_decision
        terms = {"policy_loss": policy_loss, "value_loss": value_loss, "kl": kl}
        if measured:
            entropies = losses.masked_sum(decision.entropies, decided) * prepared.per_head
            spread = (losses.masked_sum(decision.spreads, decided) * prepared.per_head).mean()
            terms |= {"entropies": entropies, "spread": spread}
            if not self.critic_alone:
                loss = loss - entropy_coefficient * entropies.mean() if entropy_coefficient > 0 else loss
                loss = loss + config.logit_penalty * spread if config.logit_penalty > 0 else loss
        return loss, log_ratio, terms

    def _clip(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scale all gradients to the clip norm. Returns their global norm before, the factor, and each head's norm."""
        gradients = [weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in self._weights]
        norms = torch.stack(torch._foreach_norm(gradients))
        total: Tensor = norms.norm()
        factor = (self.config.clip_norm / (total + NORM_EPS)).clamp(max=1)
        torch._foreach_mul_(gradients, factor)
        return total, factor, norms.square().unsqueeze(1).where(self._owners, 0.0).sum(0).sqrt()

    def _count_or_refuse(self, metrics: PPOUpdateMetrics) -> None:
        """Count the update, unless nothing was learnt. Raises if another policy collected the round, or no gradient
        has been finite for too long."""
        if not metrics.behaviour_gap <= GAP_REFUSED:
            raise BehaviourGapError(
                f"log-probs differ by {metrics.behaviour_gap:.2g} between collection and update (limit {GAP_REFUSED}); "
                "the round was collected with other weights, observations, masks or hidden states"
            )
        if metrics.minibatches_taken or not metrics.minibatches_not_finite:
            self.failures = 0
            self.updates += 1
            return
        self.failures += 1
        if self.failures >= FAILURES_ALLOWED:
            raise NotFiniteError(
                f"no finite gradient in {self.failures} updates in a row; check rewards and observations, or return to "
                f"a checkpoint with a smaller rate than {self.config.rate}"
            )
