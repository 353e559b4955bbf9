"""The networks of offline learning: a policy without an LSTM, and the two value functions of implicit Q-learning.

    PolicyNetwork   π(a|s)   encoder ─ last four observations ─ heads in order
    QNetwork        Q(s, a)  encoder ─ last four observations ─┬─ value
                                       embeddings of the action┘
    VNetwork        V(s)     encoder ─ last four observations ─ value

All three work on hosts with slots and on plain vectors. The value functions also see the critic's columns, because they
only judge recorded actions and never act.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from esper.tamiyo import ActionTable, FactoredRecurrentActorCritic, NetworkConfig, ObservationLayout, RecurrentEncoder
from esper.tamiyo.encoder import Encoded, Stretches
from esper.tamiyo.heads import pick


def windowed(config: NetworkConfig | None = None) -> NetworkConfig:
    """A network without an LSTM: its memory is a window of the last four observations."""
    return replace(config if config is not None else NetworkConfig(), memory="window", memory_layers=1)


class PolicyNetwork(FactoredRecurrentActorCritic):
    """The policy's network with the last four observations in place of an LSTM."""

    def __init__(self, table: ActionTable, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__(table, layout, windowed(config))


class VNetwork(RecurrentEncoder):
    """V(s): the value of a state."""

    def __init__(self, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__(layout, windowed(config))
        inputs = self.config.hidden + len(layout.critic)
        self.value = nn.Sequential(nn.Linear(inputs, self.config.head), nn.ReLU(), nn.Linear(self.config.head, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthogonal weights from torch's global generator."""
        self.draw_weights({self.value[-1]})
        self.memory.reset_memory()

    def forward(self, observations: Tensor, stretches: Stretches, n_sequences: int) -> Tensor:
        """Observations (steps, size) of whole sequences, normalised and in packed order → (steps,)."""
        core, encoded = self.read(observations, stretches, n_sequences)
        value: Tensor = self.value(torch.cat([core, encoded.critic], -1))
        return value.squeeze(-1)


class QNetwork(RecurrentEncoder):
    """Q(s, a): the value of a complete factored action. Heads that the action does not use have no effect."""

    def __init__(self, table: ActionTable, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__(layout, windowed(config))
        self.table, width = table, self.config.head
        self.choices = nn.ModuleDict({h.name: nn.Embedding(h.size, width) for h in table.heads if h.kind != "pointer"})
        if any(head.kind == "pointer" for head in table.heads):
            self.slot_projection = nn.Linear(self.config.encoder, width, bias=False)
        if layout.offer:
            self.offer_projection = nn.Linear(len(layout.offer), width, bias=False)
        self.state = nn.Linear(self.config.hidden + len(layout.critic), width)
        self.value = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        self.relevance: Tensor
        self.register_buffer("relevance", table.relevance, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Orthogonal weights from torch's global generator. Embeddings of actions are as large as those of states."""
        self.draw_weights({self.value[-1]})
        for embedding in self.choices.values():
            nn.init.normal_(embedding.get_parameter("weight"))
        self.memory.reset_memory()

    def forward(self, observations: Tensor, stretches: Stretches, n_sequences: int, actions: Tensor) -> Tensor:
        """Observations (steps, size) of whole sequences, normalised and in packed order, and actions (steps, heads)."""
        core, encoded = self.read(observations, stretches, n_sequences)
        state = self.state(torch.cat([core, encoded.critic], -1)) + self._embed(encoded, actions)
        value: Tensor = self.value(state)
        return value.squeeze(-1)

    def _embed(self, encoded: Encoded, actions: Tensor) -> Tensor:
        """(steps, width): the sum of the embeddings of all used heads."""
        used, total, slot = self.relevance[actions[:, 0]], torch.zeros(()), actions[:, 0]
        for index, head in enumerate(self.table.heads):
            choice = actions[:, index]
            if head.kind == "pointer":
                slot, part = choice, self.slot_projection(pick(encoded.slots, choice))
            else:
                part = self.choices[head.name](choice)
            if head.kind == "offer" and self.layout.offer:
                part = part + self.offer_projection(pick(pick(encoded.offers, slot), choice))
            total = total + part.where(used[:, index, None], 0.0)
        return total
