"""What a policy remembers of earlier steps: an LSTM, or a window of the last few observations.

Both map encoded observations (time, n, width) to (time, n, hidden). Their state is a pair of tensors (n, state_size).
"""

from typing import Literal

import torch
from torch import Tensor, nn

HiddenState = tuple[Tensor, Tensor]  # of an LSTM: hidden and cell; of a window: earlier steps and nothing
MemoryKind = Literal["lstm", "window"]

WINDOW = 4  # observations that a window holds, the current one included
FORGET_BIAS = 1.0
"""The forget gate starts open, so that the state lasts a few dozen steps from the first update on."""


class LstmMemory(nn.LSTM):
    """An LSTM of one layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.state_size = hidden

    @torch.no_grad()
    def reset_memory(self) -> None:
        """Orthogonal weights and open forget gates."""
        for name, weight in self.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(weight)
            else:
                weight.zero_()
        # torch's order of gates: input, forget, cell, output
        self.get_parameter("bias_ih_l0").chunk(4)[1].fill_(FORGET_BIAS)

    def step(self, trunk: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """One step of n envs: (n, width) → (n, hidden) and the next state."""
        state = torch.lstm_cell(trunk, state, *self.all_weights[0])
        return state[0], state

    def unroll(self, block: Tensor, state: HiddenState) -> tuple[Tensor, HiddenState]:
        """Several steps: (time, n, width) → (time, n, hidden) and the state after them."""
        hidden, (last, cell) = self(block, tuple(part.unsqueeze(0).contiguous() for part in state))
        return hidden, (last.squeeze(0), cell.squeeze(0))


class WindowMemory(nn.Module):
    """A layer over the last four encoded observations. Before the first step they are zero."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Linear(WINDOW * width, hidden)
        self.state_size = (WINDOW - 1) * width

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


MEMORIES: dict[MemoryKind, type[LstmMemory] | type[WindowMemory]] = {"lstm": LstmMemory, "window": WindowMemory}
