"""The part of a network that reads observations: encoder and memory, shared by policies and value functions.

    slots ─ shared encoder ─┬─ pooled ─┐
    host ───────────────────┼──────────┴─ trunk ─ memory ─ core
                            └─ embeddings of the slots

The memory is an LSTM, a window of the last four observations, or a layer that remembers nothing. The same weights serve
any number of slots. A plain vector has a trunk and a memory alone.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.leyline import BadValueError
from esper.leyline.numbers import require_known, require_positive, require_whole
from esper.tamiyo.features import ObservationLayout
from esper.tamiyo.heads import ILLEGAL
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
    """What it remembers by: an LSTM, a window of the last four observations, or nothing (`off`: feed-forward)."""
    memory_layers: int = 1
    """Layers of the LSTM."""
    recurrent: bool = True
    """Off: every step starts from an empty hidden state, to measure what memory is worth with the same weights."""
    informed_critic: bool = True
    """Off: the critic does not get its own columns, and so knows nothing of the control."""
    head_gain: float = 0.01
    """Scale of the heads' initial weights: small, so that the first policy is nearly uniform."""
    first_bias: tuple[float, ...] = ()
    """Initial bias of the first head's logits; empty: none."""

    def __post_init__(self) -> None:
        for name in ("encoder", "hidden", "head"):
            require_whole(name, getattr(self, name), MIN_WIDTH)
        for name in ("encoder_layers", "memory_layers"):
            require_whole(name, getattr(self, name), 1)
        require_known("memory", self.memory, MEMORIES)
        if self.memory_layers > 1 and self.memory != "lstm":
            raise BadValueError(
                f"memory_layers {self.memory_layers} with memory {self.memory!r}; only an LSTM has layers"
            )
        require_positive("head_gain", self.head_gain, remark="; with 0, no gradient would pass the heads")
        if not all(math.isfinite(bias) for bias in self.first_bias):
            raise BadValueError(f"first_bias {self.first_bias!r} is not finite")

    @property
    def state_size(self) -> int:
        """Numbers in each of the two parts of a hidden state."""
        sizes = {"lstm": self.memory_layers * self.hidden, "window": (WINDOW - 1) * self.encoder, "off": 0}
        return sizes[self.memory]


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


class RecurrentEncoder(nn.Module):
    """Encodes observations and remembers earlier ones."""

    def __init__(self, layout: ObservationLayout, config: NetworkConfig | None = None) -> None:
        super().__init__()
        self.layout = layout
        self.config = config = config if config is not None else NetworkConfig()
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
        self.memory = MEMORIES[config.memory](width, config.hidden, config.memory_layers)

    @torch.no_grad()
    def draw_weights(self, last: Container[nn.Module] = ()) -> None:
        """Orthogonal weights from torch's global generator, small in the `last` layers. The memory resets itself."""
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.orthogonal_(part.weight, self.config.head_gain if part in last else math.sqrt(2))
                if part.bias is not None:
                    part.bias.zero_()
            elif isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=CHOICE_STD)

    def initial_state(self, n: int) -> HiddenState:
        """The hidden state of n envs at the start of a sequence: zeros."""
        zero = self.get_parameter("trunk.0.weight").new_zeros((n, self.config.state_size))
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

    def read(self, observations: Tensor, stretches: Stretches, n_sequences: int) -> tuple[Tensor, Encoded]:
        """Whole sequences from empty hidden states: normalised observations (steps, size), in packed order →
        (steps, hidden), and the encoded observations."""
        encoded = self.encode(observations)
        return self.unroll(encoded.trunk, stretches, self.initial_state(n_sequences)), encoded

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
