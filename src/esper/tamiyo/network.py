"""The policy's network: encoder → LSTM → heads one after the other, and a critic.

    slots ─ shared encoder ─┬─ pooled ─┐
    host ───────────────────┼──────────┴─ trunk ─ LSTM ─┬─ actor ─ op ─ slot (points) ─ blueprint (compares offers) ─ …
                            └───────── embeddings ──────┼──────────────────┴──────────────────┘
    critic's own columns ───────────────────────────────┴─ critic ─ value

The same weights serve any number of slots. Without slots it is a plain recurrent actor-critic with one linear head per
choice. All of it runs in float32.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import BadValueError
from esper.leyline.numbers import require_positive, require_whole
from esper.tamiyo.features import Observation, ObservationLayout
from esper.tamiyo.heads import ActionHead, ActionTable, MaskedCategorical, Masks

HiddenState = tuple[Tensor, Tensor]
"""The LSTM's state: hidden and cell, (n, hidden) each."""

FORGET_BIAS = 1.0
"""The forget gate starts open: memories of a few dozen steps survive from the first update on."""
CHOICE_STD = 0.1
"""Deviation of the initial embeddings of choices: they nudge what comes after them, and do not drown the state."""
MIN_WIDTH = 4
"""A ReLU layer of fewer units may well begin with all of them off."""


@dataclass(frozen=True)
class NetworkConfig:
    """Sizes of the policy's network."""

    encoder: int = 64
    """Width of the trunk and of the slots' embeddings."""
    encoder_layers: int = 1
    """Layers of the trunk."""
    hidden: int = 64
    """Width of the LSTM."""
    head: int = 64
    """Width of the actor's and the critic's layer behind the LSTM."""
    recurrent: bool = True
    """Off: every step begins with an empty memory."""
    informed_critic: bool = True
    """Off: the critic does without its own columns, and so knows no more of the control than the actor: nothing."""
    head_gain: float = 0.01
    """Scale of the heads' initial weights: small, so that the first policy is nearly uniform."""
    first_bias: tuple[float, ...] = ()
    """Initial bias of the first head's logits; empty: none."""

    def __post_init__(self) -> None:
        for name in ("encoder", "hidden", "head"):
            require_whole(name, getattr(self, name), MIN_WIDTH)
        require_whole("encoder_layers", self.encoder_layers, 1)
        require_positive("head_gain", self.head_gain, remark="; with 0 no gradient would pass the heads")
        if not all(math.isfinite(bias) for bias in self.first_bias):
            raise BadValueError(f"first_bias {self.first_bias!r} is not finite")


class Stretches(NamedTuple):
    """How sequences of unequal length lie in blocks (time, sequences), each of them one fused call of the LSTM.

    Steps are in packed order: step t of all sequences that are that long, longest first, then step t + 1. Torch's own
    PackedSequence would go through unequal lengths step by step on the CPU, four times slower.
    """

    blocks: tuple[tuple[int, int], ...]
    """(sequences, time) of each"""
    place: Tensor | None
    """(steps,): where each step lies in the blocks; None: they are full, and in the same order."""


class Encoded(NamedTuple):
    """What the heads and the critic need of an observation."""

    trunk: Tensor
    """(n, encoder): the LSTM's input"""
    slots: Tensor
    """(n, slots, encoder)"""
    offers: Tensor
    """(n, slots, blueprints, offer columns)"""
    critic: Tensor
    """(n, critic columns)"""


class Decision(NamedTuple):
    """Actions with what they were drawn from, (n, heads) each. Heads that were not used have log-prob 0."""

    actions: Tensor
    log_probs: Tensor
    entropies: Tensor
    """Normalised: 1 is uniform over the legal choices."""
    choices: Tensor
    """Legal choices along the path that was taken."""
    spreads: Tensor
    """Mean square of the centred legal logits."""
    causal: Tensor
    """Which heads the action used."""

    @property
    def decided(self) -> Tensor:
        """Heads that were used and had more than one choice."""
        return self.causal & (self.choices > 1)

    @property
    def forced(self) -> Tensor:
        """(n,): steps with a single legal joint action."""
        return ~self.decided.any(-1)


class FactoredRecurrentActorCritic(nn.Module):
    """Policy and value over a table of heads."""

    def __init__(self, table: ActionTable, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.table, self.layout = table, layout
        self.config = config = config if config is not None else NetworkConfig()
        self._check_fit()
        width = config.encoder
        pooled = 0
        if layout.slots:
            columns = len(layout.slot) + 2 * len(layout.offer)
            self.slot_encoder = nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            self.slot_attention = nn.Linear(width, 1, bias=False)
            pooled = 3 * width
        inputs, layers = len(layout.host) + pooled, list[nn.Module]()
        for _ in range(config.encoder_layers):
            layers += [nn.Linear(inputs, width), nn.ReLU()]
            inputs = width
        # No norm: one behind a ReLU layer keeps directions and loses magnitudes, so an angle of 0.01 looks like one of
        # 0.1. (CartPole without velocities, 20 to 40 k steps: returns around 190 with it, 350 without.)
        self.trunk = nn.Sequential(*layers)
        self.lstm = nn.LSTM(width, config.hidden)
        self.actor = nn.Linear(config.hidden, config.head)
        self._informed = config.informed_critic and bool(layout.critic)
        critic_inputs = config.hidden + (len(layout.critic) if self._informed else 0)
        self.critic = nn.Sequential(nn.Linear(critic_inputs, config.head), nn.ReLU())
        self.critic_out = nn.Linear(config.head, 1)
        self.heads = nn.ModuleDict({head.name: self._make_head(head) for head in table.heads})
        # What each head tells the later ones about its choice; the last has nobody to tell.
        self.told = nn.ModuleDict(
            {head.name: nn.Embedding(head.size, config.head) for head in table.heads[:-1] if head.kind == "linear"}
        )
        if any(head.kind == "pointer" for head in table.heads[:-1]):
            self.slot_told = nn.Linear(width, config.head, bias=False)
        # On the device from the start: a copy in each decision would wait for it.
        self.relevance: Tensor
        self.register_buffer("relevance", table.relevance, persistent=False)
        self.reset_parameters()

    def _check_fit(self) -> None:
        for head in self.table.heads:
            if head.kind == "pointer" and head.size != self.layout.slots:
                raise BadValueError(
                    f"head {head.name!r} points at {head.size} slots; the layout has {self.layout.slots}"
                )
            if head.kind == "offer" and head.size != self.layout.blueprints:
                raise BadValueError(
                    f"head {head.name!r} compares {head.size} blueprints; the layout has {self.layout.blueprints}"
                )
        bias, first = self.config.first_bias, self.table.heads[0]
        if bias and (len(bias) != first.size or first.kind != "linear"):
            raise BadValueError(
                f"first_bias has {len(bias)} entries for the {first.size} choices of head {first.name!r}, "
                f"which is {first.kind}; give one each, and to a linear head"
            )

    def _make_head(self, head: ActionHead) -> nn.Module:
        width = self.config.head
        if head.kind == "pointer":
            return nn.Linear(width, self.config.encoder)
        if head.kind == "offer":
            return _OfferHead(width, head.size, len(self.layout.offer))
        return nn.Linear(width, head.size)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Orthogonal weights from torch's global generator; small where logits are made, forget gates open."""
        last = {head.score if isinstance(head, _OfferHead) else head for head in self.heads.values()}
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.orthogonal_(part.weight, self.config.head_gain if part in last else math.sqrt(2))
                if part.bias is not None:
                    part.bias.zero_()
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=CHOICE_STD)
        nn.init.orthogonal_(self.critic_out.weight)
        for name, weight in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(weight)
            else:
                weight.zero_()
        hidden = self.config.hidden
        _, _, bias, _ = self._lstm_weights()
        bias[hidden : 2 * hidden] = FORGET_BIAS  # gates in torch's order: input, forget, cell, output
        first = self.heads[self.table.heads[0].name]
        if self.config.first_bias:
            assert isinstance(first, nn.Linear)
            first.bias.copy_(torch.tensor(self.config.first_bias))

    def initial_state(self, n: int) -> HiddenState:
        """An empty memory for n envs."""
        zero = self.critic_out.weight.new_zeros((n, self.config.hidden))
        return zero, zero.clone()

    # -- from observation to core -------------------------------------------------------------------------------------

    def encode(self, flat: Tensor) -> Encoded:
        """Observations (n, size), one by one."""
        seen = self.layout.split(flat)
        if not self.layout.slots:
            return Encoded(self.trunk(seen.host), seen.slots, seen.offers, seen.critic)
        slots = self._embed_slots(seen)
        weights = torch.softmax(self.slot_attention(slots), -2)
        pooled = (slots.mean(-2), slots.amax(-2), (weights * slots).sum(-2))
        return Encoded(self.trunk(torch.cat([seen.host, *pooled], -1)), slots, seen.offers, seen.critic)

    def _embed_slots(self, seen: Observation) -> Tensor:
        parts = [seen.slots]
        if self.layout.offer:
            parts += [seen.offers.mean(-2), seen.offers.amax(-2)]
        embedded: Tensor = self.slot_encoder(torch.cat(parts, -1))
        return embedded

    def step(self, trunk: Tensor, hidden_state: HiddenState) -> tuple[Tensor, HiddenState]:
        """One step of n envs: (n, encoder) → (n, hidden) and the memory after it."""
        if not self.config.recurrent:
            hidden_state = self.initial_state(len(trunk))
        input_weight, memory_weight, input_bias, memory_bias = self._lstm_weights()
        hidden_state = torch.lstm_cell(trunk, hidden_state, input_weight, memory_weight, input_bias, memory_bias)
        return hidden_state[0], hidden_state

    def _lstm_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of inputs and of the memory, biases likewise."""
        input_weight, memory_weight, input_bias, memory_bias = self.lstm.all_weights[0]
        return input_weight, memory_weight, input_bias, memory_bias

    def unroll(self, trunk: Tensor, stretches: Stretches, hidden_state: HiddenState) -> Tensor:
        """Whole sequences, longest first, with the memory that each begins with: (steps, encoder) → (steps, hidden)."""
        if not self.config.recurrent:
            hidden, _ = self.lstm(trunk.unsqueeze(0))
            core: Tensor = hidden.squeeze(0)
            return core
        sizes = [size * time for size, time in stretches.blocks]
        if stretches.place is not None:
            trunk = trunk.new_zeros((sum(sizes), trunk.shape[1])).index_copy(0, stretches.place, trunk)
        state, parts = (hidden_state[0].unsqueeze(0), hidden_state[1].unsqueeze(0)), []
        for (size, time), block in zip(stretches.blocks, trunk.split(sizes), strict=True):
            state = state[0][:, :size].contiguous(), state[1][:, :size].contiguous()
            hidden, state = self.lstm(block.view(time, size, -1), state)
            parts.append(hidden.flatten(0, 1))
        core = torch.cat(parts) if len(parts) > 1 else parts[0]
        # Not core[place]: its gradient is scattered one number at a time.
        return core if stretches.place is None else core.index_select(0, stretches.place)

    # -- from core to action and value --------------------------------------------------------------------------------

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

        Reads nothing back from the device. An empty mask on the path shows as `choices` 0. Unless `measured`, entropies
        and spreads are left at 0: who only acts does not need them.
        """
        self.table.check_masks(masks, len(core))
        # Choices are added before the ReLU: what a later head makes of the state may depend on them.
        state = self.actor(core)
        chosen: dict[str, Tensor] = {}
        columns: list[tuple[Tensor, ...]] = []
        used: Tensor | None = None
        slot: Tensor | None = None
        nothing = core.new_zeros(len(core))
        for place, head in enumerate(self.table.heads):
            mask = masks[head.name]
            if head.given is not None:
                mask = _pick(mask, chosen[head.given])
            matters = None if head.matters is None or used is None else used[:, place]
            if matters is not None:
                # Where the head is not used its mask may be empty; it is not looked at.
                mask = mask | ~matters.unsqueeze(-1)
            found = MaskedCategorical(self._score(head, state, encoded, slot), mask, epsilon, validate=False)
            if actions is not None:
                choice = actions[:, place]
            else:
                choice = found.mode() if uniform is None else found.sample(uniform[:, place])
                if matters is not None:
                    choice = choice.where(matters, head.placeholder)
            chosen[head.name] = choice
            if place == 0:
                used = None if self.table.everything_matters else self.relevance[choice]
            log_prob = found.log_prob(choice)
            if matters is not None:
                log_prob = log_prob.where(matters, 0.0)
            entropy, spread = (found.entropy(), found.spread()) if measured else (nothing, nothing)
            columns.append((choice, log_prob, entropy, found.counts, spread))
            if head.kind == "pointer":
                slot = choice
            if place + 1 < len(self.table):
                state = state + self._tell(head, choice, encoded)
        taken, log_probs, entropies, counts, spreads = (_side_by_side(c) for c in zip(*columns, strict=True))
        causal = torch.ones_like(taken, dtype=torch.bool) if used is None else used
        return Decision(taken, log_probs, entropies, counts, spreads, causal)

    def _score(self, head: ActionHead, state: Tensor, encoded: Encoded, slot: Tensor | None) -> Tensor:
        """Logits (n, size) of a head."""
        layer = self.heads[head.name]
        if head.kind == "pointer":
            query: Tensor = layer(torch.relu(state)).unsqueeze(-1)
            return (encoded.slots @ query).squeeze(-1) / math.sqrt(self.config.encoder)
        if head.kind == "offer":
            assert slot is not None, "the table lets a pointer head choose it first"
            logits: Tensor = layer(state, _pick(encoded.offers, slot))
            return logits
        logits = layer(torch.relu(state))
        return logits

    def _tell(self, head: ActionHead, choice: Tensor, encoded: Encoded) -> Tensor:
        """What later heads learn of a choice (n, head width)."""
        if head.kind == "pointer":
            told: Tensor = self.slot_told(_pick(encoded.slots, choice))
            return told
        if head.kind == "offer":
            layer = self.heads[head.name]
            assert isinstance(layer, _OfferHead)
            return layer.names.weight[choice]
        told = self.told[head.name](choice)
        return told


def _side_by_side(columns: tuple[Tensor, ...]) -> Tensor:
    """(n,) per head → (n, heads); of a single head a view."""
    return torch.stack(columns, -1) if len(columns) > 1 else columns[0].unsqueeze(-1)


def _pick(values: Tensor, choice: Tensor) -> Tensor:
    """(n, choices, …) at one choice each (n,) → (n, …)."""
    return values[torch.arange(len(choice), device=choice.device), choice]


class _OfferHead(nn.Module):
    """Scores blueprints by what they are and by what is known of each in the chosen slot."""

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
