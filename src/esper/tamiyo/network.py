"""The policy's network: encoder → memory → heads in order, and a critic.

    slots ─ shared encoder ─┬─ pooled ─┐
    host ───────────────────┼──────────┴─ trunk ─ memory ─┬─ actor ─ op ─ slot (points) ─ blueprint (compares offers) …
                            └───────── embeddings ────────┼──────────────────┴──────────────────┘
    critic's own columns ─────────────────────────────────┴─ critic ─ value

The memory is an LSTM, or a window of the last four observations. The same weights serve any number of slots. Without
slots it is a plain actor-critic with one linear layer per head. It runs in float32.
"""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import BadValueError
from esper.leyline.numbers import require_known, require_positive, require_whole
from esper.tamiyo.features import ObservationLayout
from esper.tamiyo.heads import ILLEGAL, ActionHead, ActionTable, MaskedCategorical, Masks, pick
from esper.tamiyo.memory import MEMORIES, WINDOW, HiddenState, MemoryKind

CHOICE_STD = 0.1
"""Standard deviation of the initial embeddings of choices: small, so that they do not drown the state."""
MIN_WIDTH = 4  # a narrower ReLU layer may start with all units off


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the policy's network."""

    encoder: int = 64
    """Width of the trunk and of the slots' embeddings."""
    encoder_layers: int = 1
    """Layers of the trunk."""
    hidden: int = 64
    """Width of the memory's output."""
    head: int = 64
    """Width of the actor's and the critic's layer after the memory."""
    memory: MemoryKind = "lstm"
    """What it remembers by: an LSTM, or a window of the last four observations."""
    recurrent: bool = True
    """Off: every step starts from an empty hidden state."""
    informed_critic: bool = True
    """Off: the critic does not get its own columns, and so knows nothing of the control."""
    head_gain: float = 0.01
    """Scale of the heads' initial weights: small, so that the first policy is nearly uniform."""
    first_bias: tuple[float, ...] = ()
    """Initial bias of the first head's logits; empty: none."""

    def __post_init__(self) -> None:
        for name in ("encoder", "hidden", "head"):
            require_whole(name, getattr(self, name), MIN_WIDTH)
        require_whole("encoder_layers", self.encoder_layers, 1)
        require_known("memory", self.memory, MEMORIES)
        require_positive("head_gain", self.head_gain, remark="; with 0, no gradient would pass the heads")
        if not all(math.isfinite(bias) for bias in self.first_bias):
            raise BadValueError(f"first_bias {self.first_bias!r} is not finite")

    @property
    def state_size(self) -> int:
        """Numbers in each of the two parts of a hidden state."""
        return self.hidden if self.memory == "lstm" else (WINDOW - 1) * self.encoder


class Stretches(NamedTuple):
    """Sequences of unequal length as blocks (time, sequences), each of which is one fused call of the memory.

    Steps are in packed order: step t of all sequences that are that long, longest first, then step t + 1. On the CPU,
    torch's PackedSequence runs unequal lengths step by step, which is four times slower.
    """

    blocks: tuple[tuple[int, int], ...]  # (sequences, time) of each
    positions: Tensor | None  # (steps,): position of each step in the blocks; None: the blocks have no padding


class Encoded(NamedTuple):
    """Encoded observations, for the memory, the heads and the critic."""

    trunk: Tensor  # (n, encoder): the memory's input
    slots: Tensor  # (n, slots, encoder)
    offers: Tensor  # (n, slots, blueprints, offer columns)
    critic: Tensor  # (n, critic columns)


class Decision(NamedTuple):
    """Actions and how likely they were, (n, heads) each. Unused heads have log-prob 0."""

    actions: Tensor
    log_probs: Tensor
    entropies: Tensor  # normalised: 1 is uniform over the legal choices
    choices: Tensor  # number of legal choices, given the earlier ones
    spreads: Tensor  # variance of the legal logits
    causal: Tensor  # bool: the action used this head

    @property
    def decided(self) -> Tensor:
        """Heads that were used and had several legal choices."""
        return self.causal & (self.choices > 1)


class FactoredRecurrentActorCritic(nn.Module):
    """Policy and value over a table of heads, with a memory."""

    def __init__(self, table: ActionTable, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.table, self.layout = table, layout
        self.config = config = config if config is not None else NetworkConfig()
        self._check_fit()
        width = config.encoder
        if layout.slots:
            columns = len(layout.slot) + 2 * len(layout.offer)
            self.slot_encoder = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            self.slot_attention = nn.Linear(width, 1, bias=False)
        inputs = len(layout.host) + (3 * width if layout.slots else 0)
        # No normalisation layer: behind a ReLU it keeps directions and loses magnitudes, so an angle of 0.01 looks like
        # one of 0.1. (CartPole without velocities, 20 to 40 k steps: returns around 190 with it, 350 without.)
        widths = [inputs, *[width] * config.encoder_layers]
        self.trunk = nn.Sequential(*(part for sizes in pairwise(widths) for part in (nn.Linear(*sizes), nn.ReLU())))
        self.memory = MEMORIES[config.memory](width, config.hidden)
        self.actor = nn.Linear(config.hidden, config.head)
        self._informed = config.informed_critic and bool(layout.critic)
        critic_inputs = config.hidden + (len(layout.critic) if self._informed else 0)
        self.critic = nn.Sequential(nn.Linear(critic_inputs, config.head), nn.ReLU())
        self.critic_out = nn.Linear(config.head, 1)
        self.heads = nn.ModuleDict({head.name: self._make_head(head) for head in table.heads})
        # Later heads see the choices of earlier ones through these.
        self.choice_embeddings = nn.ModuleDict(
            {head.name: nn.Embedding(head.size, config.head) for head in table.heads[:-1] if head.kind == "linear"}
        )
        if any(head.kind == "pointer" for head in table.heads[:-1]):
            self.slot_projection = nn.Linear(width, config.head, bias=False)
        # On the device from the start: copying it in each decision would be a sync.
        self.relevance: Tensor
        self.register_buffer("relevance", table.relevance, persistent=False)
        self.reset_parameters()

    def _check_fit(self) -> None:
        sizes = {"pointer": (self.layout.slots, "slots"), "offer": (self.layout.blueprints, "blueprints")}
        for head in self.table.heads:
            size, noun = sizes.get(head.kind, (head.size, ""))
            if head.size != size:
                raise BadValueError(f"head {head.name!r} chooses among {head.size} {noun}; the layout has {size}")
        bias, first = self.config.first_bias, self.table.heads[0]
        if bias and (len(bias) != first.size or first.kind != "linear"):
            given = f"the {first.size} choices of head {first.name!r} ({first.kind})"
            raise BadValueError(f"first_bias has {len(bias)} entries for {given}; give one per choice of a linear head")

    def _make_head(self, head: ActionHead) -> nn.Module:
        if head.kind == "offer":
            return _OfferHead(self.config.head, head.size, len(self.layout.offer))
        return nn.Linear(self.config.head, self.config.encoder if head.kind == "pointer" else head.size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Orthogonal weights from torch's global generator, small at the logits."""
        last = {head.score if isinstance(head, _OfferHead) else head for head in self.heads.values()}
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.orthogonal_(part.weight, self.config.head_gain if part in last else math.sqrt(2))
                if part.bias is not None:
                    part.bias.zero_()
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=CHOICE_STD)
        nn.init.orthogonal_(self.critic_out.weight)
        self.memory.reset_memory()
        if self.config.first_bias:
            first = self.table.heads[0].name
            self.get_parameter(f"heads.{first}.bias").copy_(torch.tensor(self.config.first_bias))

    def initial_state(self, n: int) -> HiddenState:
        """The hidden state of n envs at the start of a sequence: zeros."""
        zero = self.critic_out.weight.new_zeros((n, self.config.state_size))
        return zero, zero.clone()

    def encode(self, flat: Tensor) -> Encoded:
        """Encode observations (n, size), each on its own."""
        host, slots, offers, critic = self.layout.split(flat)
        if not self.layout.slots:
            return Encoded(self.trunk(host), slots, offers, critic)
        pooled_offers = [offers.mean(-2), offers.amax(-2)] if self.layout.offer else []
        present = self.layout.presence(slots).unsqueeze(-1)
        slots = self.slot_encoder(torch.cat([slots, *pooled_offers], -1))
        weights = torch.softmax(self.slot_attention(slots).masked_fill(~present, ILLEGAL), -2)
        mean = slots.where(present, 0.0).sum(-2) / present.sum(-2)
        pooled = (mean, slots.masked_fill(~present, ILLEGAL).amax(-2), (weights * slots).sum(-2))
        return Encoded(self.trunk(torch.cat([host, *pooled], -1)), slots, offers, critic)

    def step(self, trunk: Tensor, hidden_state: HiddenState) -> tuple[Tensor, HiddenState]:
        """One step of n envs: (n, encoder) → (n, hidden) and the next hidden state."""
        return self.memory.step(trunk, hidden_state if self.config.recurrent else self.initial_state(len(trunk)))

    def unroll(self, trunk: Tensor, stretches: Stretches, hidden_state: HiddenState) -> Tensor:
        """Whole sequences, longest first, from their first hidden states: (steps, encoder) → (steps, hidden)."""
        if not self.config.recurrent:
            return self.memory.unroll(trunk.unsqueeze(0), self.initial_state(len(trunk)))[0].squeeze(0)
        sizes = [size * time for size, time in stretches.blocks]
        if stretches.positions is not None:
            trunk = trunk.new_zeros((sum(sizes), trunk.shape[1])).index_copy(0, stretches.positions, trunk)
        first, second = hidden_state
        parts = []
        for (size, time), block in zip(stretches.blocks, trunk.split(sizes), strict=True):
            hidden, (first, second) = self.memory.unroll(block.view(time, size, -1), (first[:size], second[:size]))
            parts.append(hidden.flatten(0, 1))
        core = torch.cat(parts) if len(parts) > 1 else parts[0]
        # Not core[positions]: its gradient is scattered one number at a time.
        return core if stretches.positions is None else core.index_select(0, stretches.positions)

    def value(self, core: Tensor, encoded: Encoded) -> Tensor:
        """(n,): the normalised value."""
        state = self.critic(torch.cat([core, encoded.critic], -1) if self._informed else core)
        value: Tensor = self.critic_out(state)
        return value.squeeze(-1)

    def decide(
        self,
        core: Tensor,
        encoded: Encoded,
        masks: Masks,
        epsilon: float,
        *,
        uniform: Tensor | None = None,
        actions: Tensor | None = None,
        measured: bool = True,
    ) -> Decision:
        """Choose by `uniform` draws (n, heads), or evaluate given `actions` (n, heads); neither: the likeliest choices.

        No device sync. An empty mask of a used head shows as `choices` 0. Without `measured`, entropies and spreads
        are 0.
        """
        self.table.check_masks(masks, len(core))
        state = self.actor(core)
        chosen: dict[str, Tensor] = {}
        columns: list[tuple[Tensor, ...]] = []
        used: Tensor | None = None
        slot: Tensor | None = None
        zeros = core.new_zeros(len(core))
        for index, head in enumerate(self.table.heads):
            mask = masks[head.name] if head.given is None else pick(masks[head.name], chosen[head.given])
            matters = None if head.matters is None or used is None else used[:, index]
            if matters is not None:  # the mask of an unused head may be empty
                mask = mask | ~matters.unsqueeze(-1)
            distribution = MaskedCategorical(self._score(head, state, encoded, slot), mask, epsilon, validate=False)
            if actions is not None:
                choice = actions[:, index]
            else:
                choice = distribution.mode() if uniform is None else distribution.sample(uniform[:, index])
                choice = choice if matters is None else choice.where(matters, head.placeholder)
            chosen[head.name] = choice
            used = self.relevance[choice] if used is None else used
            log_prob = distribution.log_prob(choice)
            log_prob = log_prob if matters is None else log_prob.where(matters, 0.0)
            entropy, spread = (distribution.entropy(), distribution.spread()) if measured else (zeros, zeros)
            columns.append((choice, log_prob, entropy, distribution.counts, spread))
            slot = choice if head.kind == "pointer" else slot
            if index + 1 < len(self.table):
                # Added before the ReLU, so that later heads can read the state in the light of the choice.
                state = state + self._embed_choice(head, choice, encoded)
        assert used is not None, "a table has at least one head"
        drawn, log_probs, entropies, counts, spreads = (torch.stack(parts, -1) for parts in zip(*columns, strict=True))
        return Decision(drawn, log_probs, entropies, counts, spreads, used)

    def _score(self, head: ActionHead, state: Tensor, encoded: Encoded, slot: Tensor | None) -> Tensor:
        """Logits (n, size) of a head."""
        layer = self.heads[head.name]
        if head.kind == "offer":
            assert slot is not None, "the table puts a pointer head first"
            logits: Tensor = layer(state, pick(encoded.offers, slot))
            return logits
        logits = layer(torch.relu(state))
        if head.kind == "pointer":
            logits = (encoded.slots @ logits.unsqueeze(-1)).squeeze(-1) / math.sqrt(self.config.encoder)
        return logits

    def _embed_choice(self, head: ActionHead, choice: Tensor, encoded: Encoded) -> Tensor:
        """The embedding of a choice (n, head width) that later heads see."""
        layer = self.heads[head.name]
        if isinstance(layer, _OfferHead):
            return layer.names.weight[choice]
        pointer = head.kind == "pointer"
        embedding: Tensor = (
            self.slot_projection(pick(encoded.slots, choice)) if pointer else self.choice_embeddings[head.name](choice)
        )
        return embedding


class _OfferHead(nn.Module):
    """Scores blueprints by their embeddings and their offers in the chosen slot."""

    def __init__(self, width: int, blueprints: int, columns: int) -> None:
        super().__init__()
        self.names = nn.Embedding(blueprints, width)
        self.columns = nn.Linear(columns, width, bias=False) if columns else None
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor, offers: Tensor) -> Tensor:
        """State (n, width) and offers (n, blueprints, columns) → logits (n, blueprints)."""
        mixed = state.unsqueeze(-2) + self.names.weight
        if self.columns is not None:
            mixed = mixed + self.columns(offers)
        logits: Tensor = self.score(torch.relu(mixed))
        return logits.squeeze(-1)
