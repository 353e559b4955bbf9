"""Proximal policy optimisation for recurrent, masked, factored policies."""

import warnings
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from esper.leyline import BadValueError, EsperError, UnknownNameError
from esper.leyline.numbers import require_whole
from esper.simic.agent import losses
from esper.simic.agent.adam import FusedAdamW
from esper.simic.agent.config import (
    ADAM_EPS,
    COMPILE_MODES,
    FAILURES_ALLOWED,
    GAP_REFUSED,
    KL_STOP,
    NORM_EPS,
    CompileMode,
    PPOConfig,
)
from esper.simic.agent.metrics import PPOUpdateMetrics, UpdateObserver, UpdateRecord, summarise
from esper.simic.agent.minibatch import Minibatch, PreparedRound, Reference, gather_inputs, prepare_round
from esper.simic.agent.rollout import Batch, Sequences, TamiyoRolloutBuffer
from esper.simic.control import ObservationNormalizer, ReturnNormalizer
from esper.tamiyo import ActionTable, Decision, FactoredRecurrentActorCritic, ObservationLayout
from esper.tamiyo.heads import EmptyMaskError, Masks
from esper.tamiyo.network import Encoded, HiddenState

T = TypeVar("T")
COMPILERS = ("torch._dynamo", "torch._inductor")
"""Modules whose errors are the compiler's, not the network's."""


class BehaviourGapError(EsperError, RuntimeError):
    """The round was collected by another policy than the one that is to learn from it."""


class NotFiniteError(EsperError, FloatingPointError):
    """Observations, rewards or gradients that are not finite."""


class PPOAgent:
    """A policy with its optimiser, normalisers and schedules.

    One round: `act` for every step into a `TamiyoRolloutBuffer`, `recompute_values` where the end of an episode tells
    the critic more, then `update`. All randomness comes from the agent's own generator, on the CPU, so that results do
    not depend on the device.
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
        """`total_updates`: the length of the run, over which rates and exploration are annealed."""
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
        self.observations = ObservationNormalizer(layout.columns(), device=self.device)
        self.returns = ReturnNormalizer(tasks, device=self.device)
        named = list(self.network.named_parameters())
        critic = [weight for name, weight in named if name.startswith("critic")]
        others = [weight for name, weight in named if not name.startswith("critic")]
        self._weights: list[Parameter] = [*others, *critic]
        self.optimizer = FusedAdamW(
            [{"params": others, "weight_decay": 0.0}, {"params": critic, "weight_decay": self.config.critic_decay}],
            lr=self.config.rate,
            eps=ADAM_EPS,
            fused=True,
        )
        owned = [[name.startswith(f"heads.{head}.") for head in table.names] for name, _ in named]
        own = dict(zip((weight for _, weight in named), owned, strict=True))
        self._owners = torch.tensor([own[weight] for weight in self._weights], device=self.device)
        """(weights, heads) bool: which weights are a head's own."""
        self._encode: Callable[[Tensor], Encoded]
        self._decide: Callable[..., Decision]
        self.compile(self.config.compile)

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        return min(1.0, self.updates / self.total_updates)

    @property
    def epsilon(self) -> float:
        """Share of uniform choice to collect the next round with."""
        return self.config.explore_at(self.progress)

    def compile(self, mode: CompileMode) -> None:
        """Compile encoder and heads for the update, or go back to eager. `act` is always eager.

        Shapes are dynamic: rounds differ in how they are cut. No CUDA graphs, which want fixed shapes. The network
        itself stays as it is, so that checkpoints do not depend on this.
        """
        if mode not in COMPILE_MODES:
            raise UnknownNameError("compile mode", mode, COMPILE_MODES)
        self.compile_mode: CompileMode = mode
        self._encode, self._decide = self.network.encode, self.network.decide
        if mode != "off":
            _ = self.table.everything_matters  # remembered from here on: in there, finding out breaks the graph
            self._encode = torch.compile(self.network.encode, mode=mode, dynamic=True)
            self._decide = torch.compile(self.network.decide, mode=mode, dynamic=True)

    def _or_eager(self, work: Callable[[], T]) -> T:
        """Do this; where the compiler fails, say so, give it up, and do it once more."""
        try:
            return work()
        except Exception as error:
            if self.compile_mode == "off" or not type(error).__module__.startswith(COMPILERS):
                raise
            warnings.warn(f"torch.compile failed, going on without: {error}", RuntimeWarning, stacklevel=3)
            self.compile("off")
            return work()

    def normalise(self, raw: Tensor) -> Tensor:
        """Raw observations (n, size), on the agent's device, as the policy sees them."""
        return self.observations(raw) if self.config.normalise_observations else raw

    # -- acting -------------------------------------------------------------------------------------------------------

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
    ) -> tuple[Decision, Tensor, HiddenState]:
        """Actions, the critic's outputs (n,) (see `values_of`), and the memory after this step.

        Observations (n, size) are normalised ones. `uniform` (n, heads) are the draws; without them the agent's
        generator is used. Host sync: one, which finds empty masks and numbers that are not finite in all heads at once.
        """
        if not greedy and uniform is None:
            uniform = torch.rand((len(observations), len(self.table)), generator=self.generator)
        encoded = self.network.encode(observations)
        core, hidden_state = self.network.step(encoded.trunk, hidden_state)
        draws = None if greedy or uniform is None else uniform.to(self.device)
        decision = self.network.decide(core, encoded, masks, epsilon, uniform=draws, measured=False)
        values = self.network.value(core, encoded)
        numbers = torch.cat([observations.flatten(), values, decision.log_probs.flatten()])
        if not bool((decision.choices.amin() > 0) & numbers.isfinite().all()):
            self._explain(observations, decision)
        return decision, values, hidden_state

    def _explain(self, observations: Tensor, decision: Decision) -> None:
        if not bool(observations.isfinite().all()):
            env, column = (~observations.isfinite()).nonzero()[0].tolist()
            name = self.layout.column_names[int(self.layout.columns()[column])]
            raise NotFiniteError(
                f"column {column} ({name}) of the observation of env {env} is {float(observations[env, column])}; "
                "mend the environment"
            )
        if bool((decision.choices == 0).any()):
            env, head = (decision.choices == 0).nonzero()[0].tolist()
            name = self.table.names[head]
            raise EmptyMaskError(f"the mask of head {name!r} allows env {env} nothing; allow at least one choice")
        raise NotFiniteError("the policy's output is not finite: its weights are damaged; go back to a checkpoint")

    def values_of(self, values: Tensor, tasks: Tensor) -> Tensor:
        """The critic's outputs (n,) as returns of these tasks (n,)."""
        return self.returns.restore(values, tasks)

    @torch.no_grad()
    def recompute_values(self, buffer: TamiyoRolloutBuffer) -> None:
        """Values of a whole round anew, where observations have since learnt what only the end tells. Host sync: one,
        where rows are cut."""
        sequences = buffer.sequences()
        batch = buffer.batch(sequences, np.unique(sequences.rows).tolist())
        encoded = self.network.encode(buffer.observations.flatten(0, 1)[batch.cells])
        core = self.network.unroll(encoded.trunk, batch.stretches, batch.hidden_state)
        tasks = buffer.tasks.repeat_interleave(buffer.capacity)[batch.cells]
        buffer.values.view(-1)[batch.cells] = self.values_of(self.network.value(core, encoded), tasks)

    # -- learning -----------------------------------------------------------------------------------------------------

    def update(self, buffer: TamiyoRolloutBuffer, observer: UpdateObserver | None = None) -> PPOUpdateMetrics:
        """Learn from a round. Host syncs: epochs + 2 at most (where rows are cut, one per epoch, the metrics).

        An observer is shown every minibatch; nothing depends on it.
        """
        self._check(buffer)
        sequences = buffer.sequences()
        batches = self._partition(buffer, sequences)
        reference = self._or_eager(lambda: self._reference(buffer, batches))
        lesson = prepare_round(buffer, reference, self.returns, self.config, len(batches))
        self._set_rate()
        record = UpdateRecord(self.table.names, observer)
        halted = ~reference.accepted
        parts: list[Minibatch] = []
        for epoch in range(self.config.epochs):
            if epoch and len(batches) > 1:
                batches = self._partition(buffer, sequences)
            for minibatch in batches:
                if not epoch or len(batches) > 1:  # a round in one minibatch is gathered once
                    parts = [lesson.part(batch) for batch in minibatch]
                halted = self._learn(lesson, parts, halted, record)
            record.epochs += 1
            if bool(halted):  # host sync: once per epoch
                break
        metrics = summarise(lesson, record, self)
        self._settle(metrics)
        return metrics

    def _check(self, buffer: TamiyoRolloutBuffer) -> None:
        if buffer.table != self.table:
            theirs, own = ({head.name: head.size for head in table.heads} for table in (buffer.table, self.table))
            remark = "; they depend on each other in other ways" if theirs == own else ""
            raise BadValueError(f"a buffer of heads {theirs} for a policy of heads {own}{remark}")
        if buffer.device.type != self.device.type:
            raise BadValueError(f"a buffer on {buffer.device} for a policy on {self.device}")
        sizes = (buffer.observations.shape[-1], buffer.hidden_state[0].shape[-1])
        if sizes != (self.layout.size, self.config.network.hidden):
            raise BadValueError(
                f"a buffer of (observation, memory) sizes {sizes} for a policy of "
                f"{(self.layout.size, self.config.network.hidden)}"
            )
        if not buffer.steps:
            raise BadValueError("the buffer is empty: collect a round first")

    def _partition(self, buffer: TamiyoRolloutBuffer, sequences: Sequences) -> list[list[Batch]]:
        """Minibatches of whole rows, shuffled over envs, each in pieces. Every row with a step occurs once."""
        filled = np.unique(sequences.rows)
        order = filled[torch.randperm(len(filled), generator=self.generator).numpy()].tolist()
        count = min(self.config.minibatches, len(filled))
        minibatches = [order[place::count] for place in range(count)]
        cut = [[rows[p :: self.config.pieces] for p in range(self.config.pieces)] for rows in minibatches]
        return [[buffer.batch(sequences, rows) for rows in pieces if rows] for pieces in cut]

    def _evaluate(
        self, observations: Tensor, masks: Masks, actions: Tensor, batch: Batch, epsilon: float, *, measured: bool
    ) -> tuple[Decision, Tensor]:
        """Decision and normalised values of a batch's steps, in packed order."""
        encoded = self._encode(observations)
        core = self.network.unroll(encoded.trunk, batch.stretches, batch.hidden_state)
        decision = self._decide(core, encoded, masks, epsilon, actions=actions, measured=measured)
        return decision, self.network.value(core, encoded)

    def _reference(self, buffer: TamiyoRolloutBuffer, batches: list[list[Batch]]) -> Reference:
        """The policy before the first step, on the first epoch's minibatches: with the same kernels on the same shapes,
        the first ratios are exactly 1. (Without autograd the LSTM takes another kernel.)"""
        cells = buffer.n_envs * buffer.capacity
        log_probs = torch.zeros((cells, len(self.table)), device=self.device)
        decided = torch.zeros((cells, len(self.table)), dtype=torch.bool, device=self.device)
        values = torch.zeros(cells, device=self.device)
        for batch in (piece for minibatch in batches for piece in minibatch):
            decision, value = self._evaluate(*gather_inputs(buffer, batch), batch, buffer.epsilon, measured=False)
            log_probs[batch.cells] = decision.log_probs.detach()
            decided[batch.cells] = decision.decided
            values[batch.cells] = value.detach()
        gaps = (log_probs - buffer.log_probs.flatten(0, 1)).abs().where(buffer.valid.flatten().unsqueeze(1), 0.0)
        return Reference(log_probs, decided, values, gaps.amax())

    def _learn(self, lesson: PreparedRound, parts: list[Minibatch], halted: Tensor, record: UpdateRecord) -> Tensor:
        """One minibatch. Returns whether this step, and with it every later one, is not to be taken."""
        kl = self._or_eager(lambda: self._differentiate(lesson, parts, record))
        if kl is not None and self.config.target_kl is not None:
            halted = halted | ~(kl <= KL_STOP * self.config.target_kl)
        record.show(self.network, parts)
        norm, factor, head_norms = self._clip()
        self._step(halted, norm.isfinite())
        record.close(halted=halted, norm=norm, factor=factor, head_norms=head_norms)
        return halted

    def _differentiate(self, lesson: PreparedRound, parts: list[Minibatch], record: UpdateRecord) -> Tensor | None:
        """Gradients of a minibatch, piece by piece. Returns the joint action's KL where an update may stop by it."""
        for weight in self._weights:
            weight.grad = None
        record.begin()
        kl: Tensor | None = None
        for part in parts:
            loss, part_kl = self._loss(lesson, part, record)
            loss.backward()
            kl = part_kl if kl is None or part_kl is None else kl + part_kl
        return kl

    def _loss(self, lesson: PreparedRound, part: Minibatch, record: UpdateRecord) -> tuple[Tensor, Tensor | None]:
        """The loss of a piece, and its share of the minibatch's KL where that is needed.

        Each mean divides by the count over the whole round × 1/minibatches, however large the minibatch is.
        """
        config = self.config
        entropy, penalty = config.entropy_at(self.progress), config.logit_penalty
        # What has no weight is not differentiated, and measured in the first epoch only.
        measured = entropy > 0 or penalty > 0 or not record.epochs
        decision, values = self._evaluate(
            part.observations, part.masks, part.actions, part.batch, lesson.buffer.epsilon, measured=measured
        )
        ratio, log_ratio = losses.ratios(decision.log_probs, part.log_probs)
        clip = config.clip_at(self.progress)
        if config.clipping == "joint":
            gain = losses.joint_surrogate(log_ratio, part.decided, part.advantages[:, 0], clip) * lesson.per_decision
        else:
            gain = losses.masked_sum(losses.surrogate(ratio, part.advantages, clip), part.decided) @ lesson.per_head
        errors = losses.value_errors(values, part.targets, old=part.values, clip=config.value_clip, huber=config.huber)
        value_loss = (errors @ part.weights) * lesson.per_weight
        loss = gain + config.value_coefficient * value_loss
        sums = {"policy_loss": gain, "value_loss": value_loss}
        if measured:
            entropies = losses.masked_sum(decision.entropies, part.decided) * lesson.per_head
            spread = (losses.masked_sum(decision.spreads, part.decided) * lesson.per_head).mean()
            sums |= {"entropies": entropies, "spread": spread}
            loss = loss - entropy * entropies.mean() if entropy > 0 else loss
            loss = loss + penalty * spread if penalty > 0 else loss
        record.note_part(log_ratio, part.decided, **sums)
        if config.target_kl is None:
            return loss, None
        with torch.no_grad():
            kl = losses.masked_sum(losses.kl_terms(ratio, log_ratio), part.decided)
            return loss, kl.sum() * lesson.per_decision

    def _clip(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scale all gradients to the clip norm. Returns their global norm before, the factor, and each head's norm."""
        gradients = [weight.grad if weight.grad is not None else torch.zeros_like(weight) for weight in self._weights]
        norms = torch.stack(torch._foreach_norm(gradients))
        total: Tensor = norms.norm()
        factor = (self.config.clip_norm / (total + NORM_EPS)).clamp(max=1)
        torch._foreach_mul_(gradients, factor)
        return total, factor, norms.square().unsqueeze(1).where(self._owners, 0.0).sum(0).sqrt()

    def _step(self, halted: Tensor, finite: Tensor) -> None:
        """Adam's step, unless it is halted or a gradient is not finite: neither reaches a weight."""
        self.optimizer.skip = (halted | ~finite).float()
        self.optimizer.step()

    def _set_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.rate_at(self.progress)

    def _settle(self, metrics: PPOUpdateMetrics) -> None:
        """Advance the schedules, unless nothing was learnt; raise where something is wrong with the round."""
        if not metrics.behaviour_gap <= GAP_REFUSED:
            raise BehaviourGapError(
                f"log-probs differ by {metrics.behaviour_gap:.2g} between collection and update (limit {GAP_REFUSED}); "
                "the round was collected with other weights, observations, masks or memory"
            )
        if metrics.minibatches_not_finite and not metrics.minibatches_taken:
            self.failures += 1
            if self.failures >= FAILURES_ALLOWED:
                raise NotFiniteError(
                    f"no finite gradient in {self.failures} updates in a row; look at rewards and observations, or "
                    f"go back to a checkpoint with a smaller rate than {self.config.rate}"
                )
            return
        self.failures = 0
        self.updates += 1
