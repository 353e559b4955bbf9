"""The policy's network: encoder → memory → heads in order, and a critic.

    slots ─ shared encoder ─┬─ pooled ─┐
    host ───────────────────┼──────────┴─ trunk ─ memory ─┬─ actor ─ op ─ slot (points) ─ blueprint (compares offers) …
                            └───────── embeddings ────────┼──────────────────┴──────────────────┘
    critic's own columns ─────────────────────────────────┴─ critic ─ value

The memory is an LSTM, a window of the last four observations, or a layer that remembers nothing. The same weights serve
any number of slots. Without slots it is a plain actor-critic with one linear layer per head. It runs in float32.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import BadValueError
from esper.tamiyo.encoder import Encoded, NetworkConfig, RecurrentEncoder
from esper.tamiyo.features import ObservationLayout
from esper.tamiyo.heads import ActionHead, ActionTable, MaskedCategorical, Masks, pick


class Decision(NamedTuple):
    """Actions and how likely they were, (n, heads) each. Unused heads have log-prob 0."""

    actions: Tensor
    log_probs: Tensor
    entropies: Tensor  # normalised: 1 is uniform over the legal choices
    choices: Tensor  # number of legal choices, given the earlier ones
    spreads: Tensor  # variance of the legal logits
    causal: Tensor  # bool: the action used this head
    probs: tuple[Tensor, ...] = ()  # by head, (followed, choices), of the first envs; empty unless asked for

    @property
    def decided(self) -> Tensor:
        """Heads that were used and had several legal choices."""
        return self.causal & (self.choices > 1)


class FactoredRecurrentActorCritic(RecurrentEncoder):
    """Policy and value over a table of heads, with a memory."""

    def __init__(self, table: ActionTable, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__(layout, config)
        self.table, config, width = table, self.config, self.config.encoder
        self._check_fit()
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
        self.draw_weights({head.score if isinstance(head, _OfferHead) else head for head in self.heads.values()})
        nn.init.orthogonal_(self.critic_out.weight)
        self.memory.reset_memory()
        if self.config.first_bias:
            first = self.table.heads[0].name
            self.get_parameter(f"heads.{first}.bias").copy_(torch.tensor(self.config.first_bias))

    @torch.no_grad()
    def sharpen(self, factor: float) -> None:
        """Multiply the logits of all heads: above 1, likelier choices become likelier still."""
        for head in self.heads.values():
            for weight in (head.score if isinstance(head, _OfferHead) else head).parameters():
                weight.mul_(factor)

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
        followed: int = 0,
    ) -> Decision:
        """Choose by `uniform` draws (n, heads), or evaluate given `actions` (n, heads); neither: the likeliest choices.

        No device sync. An empty mask of a used head shows as `choices` 0. Without `measured`, entropies and spreads
        are 0. Probabilities of all choices are returned for the first `followed` envs.
        """
        self.table.check_masks(masks, len(core))
        state = self.actor(core)
        chosen: dict[str, Tensor] = {}
        columns: list[tuple[Tensor, ...]] = []
        probs: list[Tensor] = []
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
            if followed:
                probs.append(distribution.log_probs[:followed].exp())
            slot = choice if head.kind == "pointer" else slot
            if index + 1 < len(self.table):
                # Added before the ReLU, so that later heads can read the state in the light of the choice.
                state = state + self._embed_choice(head, choice, encoded)
        assert used is not None, "a table has at least one head"
        drawn, log_probs, entropies, counts, spreads = (torch.stack(parts, -1) for parts in zip(*columns, strict=True))
        return Decision(drawn, log_probs, entropies, counts, spreads, used, tuple(probs))

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
