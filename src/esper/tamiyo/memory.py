"""What a policy remembers of earlier steps: an LSTM, a window of the last few observations, or nothing.

All map encoded observations (time, n, width) to (time, n, hidden). Their state is a pair of tensors (n, state_size).
"""

from typing import Literal

import torch
from torch import Tensor, nn

# Of an LSTM: hidden and cell, layer by layer; of a window: earlier steps and nothing; without memory: no numbers.
HiddenState = tuple[Tensor, Tensor]
MemoryKind = Literal["lstm", "window", "off"]

WINDOW = 4  # observations that a window holds, the current one included
FORGET_BIAS = 1.0
"""The forget gate starts open, so that the state lasts a few dozen steps from the first update on."""


class LstmMemory(nn.LSTM):
    """An LSTM; each layer reads the one below it."""

    def __init__(self, width: int, hidden: int, layers: int = 1) -> None:
        super().__init__(width, hidden, layers)

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Orthogonal weights and open forget gates."""
        for name, weight in self.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(weight)
            else:
                weight.zero_()
        for layer in range(self.num_layers):  # torch's order of gates: input, forget, cell, output
            self.get_parameter(f"bias_ih_l{layer}").chunk(4)[1].fill_(FORGET_BIAS)

    def step(self, trunk: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """One step of n envs: (n, width) → (n, hidden) and the next state."""
        hidden, cells = [trunk], []
        before = zip(*(part.chunk(self.num_layers, 1) for part in state), strict=True)
        for layer, weights in zip(before, self.all_weights, strict=True):
            output, cell = torch.lstm_cell(hidden[-1], layer, *weights)
            hidden.append(output)
            cells.append(cell)
        return hidden[-1], (torch.cat(hidden[1:], 1), torch.cat(cells, 1))

    def unroll(self, block: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """Several steps: (time, n, width) → (time, n, hidden) and the state after them."""
        layers = tuple(torch.stack(part.chunk(self.num_layers, 1)) for part in state)
        hidden, following = self(block, layers)
        last, cell = (part.transpose(0, 1).flatten(1) for part in following)
        return hidden, (last, cell)


class WindowMemory(nn.Module):
    """A layer over the last four encoded observations. Before the first step they are zero."""

    def __init__(self, width: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.mix = nn.Linear(WINDOW * width, hidden)

    def reset_memory(self) -> None:
        """Nothing beyond what all linear layers get."""

    def step(self, trunk: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """One step of n envs: (n, width) → (n, hidden) and the next state."""
        core, state = self.unroll(trunk.unsqueeze(0), state)
        return core.squeeze(0), state

    def unroll(self, block: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """Several steps: (time, n, width) → (time, n, hidden) and the state after them."""
        time, n, width = block.shape
        steps = torch.cat([state[0].view(n, WINDOW - 1, width).transpose(0, 1), block])  # oldest first
        core = torch.relu(self.mix(torch.cat([steps[start : start + time] for start in range(WINDOW)], -1)))
        return core, (steps[time:].transpose(0, 1).flatten(1), state[1])


class NoMemory(nn.Module):
    """A layer over the present observation, for a feed-forward policy."""

    def __init__(self, width: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.mix = nn.Linear(width, hidden)

    def reset_memory(self) -> None:
        """Nothing beyond what all linear layers get."""

    def step(self, trunk: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """One step of n envs: (n, width) → (n, hidden) and the state, which is empty."""
        return torch.relu(self.mix(trunk)), state

    unroll = step  # whatever the time


MEMORIES: dict[MemoryKind, type[LstmMemory] | type[WindowMemory] | type[NoMemory]] = {
    "lstm": LstmMemory,
    "window": WindowMemory,
    "off": NoMemory,
}
