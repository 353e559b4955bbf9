"""Complete actions as one list: what an algorithm with a single discrete choice picks from."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from esper.leyline import LifecycleOp
from esper.tamiyo import ActionTable
from esper.tamiyo.heads import Masks


class CompleteActions:
    """WAIT, then op by op every combination of the heads that the op uses; other heads take their placeholder.

    With S slots and B blueprints, preset `core` has 1 + S·B + 3·S of them, `commit` 1 + S·B, `full` 1 + S·(27·B + 82).
    """

    def __init__(self, table: ActionTable, ops: Sequence[LifecycleOp]) -> None:
        """`ops` are those of the table's preset."""
        self.table, self.ops = table, tuple(sorted(ops))
        used = table.relevance.numpy()
        rows: list[tuple[int, ...]] = []
        for op in self.ops:
            choices = [
                range(head.size) if used[op, index] else (head.placeholder,) for index, head in enumerate(table.heads)
            ]
            rows += product((int(op),), *choices[1:])
        self.rows: NDArray[np.int64] = np.array(rows)  # (actions, heads): the choice of every head
        self._used = used[self.rows[:, 0]]
        self._index = {row: index for index, row in enumerate(rows)}

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, choices: Sequence[int]) -> int:
        """The number of the action with these choices, one per head; heads that its op does not use are ignored."""
        used = self.table.relevance[choices[0]].tolist()
        heads = zip(self.table.heads, choices, used, strict=True)
        return self._index[tuple(int(choice) if matters else head.placeholder for head, choice, matters in heads)]

    def legal(self, masks: Masks) -> NDArray[np.bool_]:
        """(actions,): which actions the masks of one env allow, exactly."""
        allowed = np.ones(len(self.rows), np.bool_)
        for index, head in enumerate(self.table.heads):
            mask, choice = masks[head.name][0].numpy(force=True), self.rows[:, index]
            given = () if head.given is None else (self.rows[:, self.table.index(head.given)],)
            allowed &= mask[(*given, choice)] | ~self._used[:, index]
        return allowed

    def legal_choices(self, legal: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        """For every head the choices that occur in a legal action. The op's are those of the preset alone."""
        rows = self.rows[legal]
        parts = [np.isin(np.arange(head.size), rows[:, index]) for index, head in enumerate(self.table.heads)]
        return [parts[0][list(self.ops)], *parts[1:]]
