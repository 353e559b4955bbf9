"""The policy on rows of a task, in blocks whose shape does not depend on how rows are divided among ranks.

A product of matrices rounds by their shapes. So a rank computes whole blocks of the task's rows, as if it had all of
them, and fills the places of rows that other ranks have with copies of its own first row.
"""

import torch
from torch import Tensor

from esper.simic.agent import PPOAgent
from esper.tamiyo import Decision
from esper.tamiyo.heads import Masks
from esper.tamiyo.memory import HiddenState

BLOCK = 128
"""Most rows of a block. One CPU thread takes 3.3 ms for 24 rows and 5.3 ms for 128 (LSTM 64)."""


class BlockActing:
    """Acts for the rows `own` of a task's `total` rows."""

    def __init__(self, agent: PPOAgent, own: range, total: int) -> None:
        self.agent = agent
        self.blocks: list[tuple[Tensor, slice]] = []  # which of the own rows a block holds where, and where they are
        for begin in range(0, total, BLOCK):
            block = range(begin, min(begin + BLOCK, total))
            mine = range(max(own.start, block.start), min(own.stop, block.stop))
            if mine:
                index = torch.arange(block.start - own.start, block.stop - own.start, device=agent.device)
                inside = (index >= mine.start - own.start) & (index < mine.stop - own.start)
                self.blocks.append(
                    (index.where(inside, mine.start - own.start), slice(mine.start - begin, mine.stop - begin))
                )
        self.whole = len(self.blocks) == 1 and len(own) == total

    def act(
        self,
        observations: Tensor,
        masks: Masks,
        hidden_state: HiddenState,
        *,
        epsilon: float,
        uniform: Tensor,
        followed: int = 0,
    ) -> tuple[Decision, Tensor, HiddenState]:
        """As `PPOAgent.act`, for the own rows."""
        if self.whole:
            return self.agent.act(
                observations, masks, hidden_state, epsilon=epsilon, uniform=uniform, followed=followed
            )
        columns, probs, values, states = [], [], [], []
        uniform = uniform.to(self.agent.device)
        for index, mine in self.blocks:
            decision, value, state = self.agent.act(
                observations[index],
                {name: mask[index] for name, mask in masks.items()},
                (hidden_state[0][index], hidden_state[1][index]),
                epsilon=epsilon,
                uniform=uniform[index],
                followed=mine.stop if followed else 0,
            )
            columns.append([part[mine] for part in decision[:-1]])
            probs.append([part[mine] for part in decision.probs])
            values.append(value[mine])
            states.append([part[mine] for part in state])
        actions, log_probs, entropies, choices, spreads, causal = map(torch.cat, zip(*columns, strict=True))
        shown = tuple(torch.cat(parts)[:followed] for parts in zip(*probs, strict=True))
        joined = Decision(actions, log_probs, entropies, choices, spreads, causal, shown)
        hidden, cell = map(torch.cat, zip(*states, strict=True))
        return joined, torch.cat(values), (hidden, cell)
