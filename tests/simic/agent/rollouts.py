"""Buffers with random steps in them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.simic.agent.rollout import Step, TamiyoRolloutBuffer
from esper.tamiyo import ActionHead, ActionTable
from esper.tamiyo.memory import HiddenState

TABLE = ActionTable((ActionHead("op", 3), ActionHead("slot", 2, matters=(False, True, True), given="op")))
SIZE, HIDDEN = 5, 4
FLOATS = ("observations", "log_probs", "values", "rewards", "bootstraps")


def make_buffer(n_envs: int = 3, capacity: int = 6, hidden: int = HIDDEN, device: str = "cpu") -> TamiyoRolloutBuffer:
    """Begun with a memory of 1, 2 … in the rows."""
    buffer = TamiyoRolloutBuffer(n_envs, capacity, SIZE, TABLE, hidden, device=device)
    buffer.begin(memory_of(n_envs, hidden, device))
    return buffer


def memory_of(n_envs: int, hidden: int = HIDDEN, device: str = "cpu") -> HiddenState:
    """Hidden k + 1 and cell −(k + 1) in row k."""
    rows = torch.arange(1.0, n_envs + 1, device=device).unsqueeze(1).repeat(1, hidden)
    return rows, -rows


def make_step(n: int, ends: Sequence[bool] | None = None, device: str = "cpu") -> Step:
    """Random numbers."""
    return Step(
        torch.randn((n, SIZE), device=device),
        {
            name: mask.bernoulli().bool()
            for name, mask in ((k, m.float()) for k, m in TABLE.open_masks(n, device).items())
        },
        torch.randint(0, 2, (n, 2), device=device),
        torch.randn((n, 2), device=device),
        torch.randn(n, device=device),
        torch.randn(n, device=device),
        torch.tensor([False] * n if ends is None else ends, dtype=torch.bool, device=device),
        torch.randn(n, device=device),
    )


def fill(buffer: TamiyoRolloutBuffer, lengths: Sequence[int], ends: Sequence[tuple[int, int]] = ()) -> list[Step]:
    """Rows of these lengths; `ends` are (row, column)."""
    steps = []
    for column in range(max(lengths)):
        envs = [row for row, length in enumerate(lengths) if length > column]
        steps.append(make_step(len(envs), [(row, column) in ends for row in envs]))
        buffer.add(steps[-1], envs)
    return steps


def contents(buffer: TamiyoRolloutBuffer) -> dict[str, Tensor]:
    """All tensors of a buffer, by name."""
    tensors = {name: value for name, value in vars(buffer).items() if isinstance(value, Tensor)}
    named = {"hidden": buffer.hidden_state[0], "cell": buffer.hidden_state[1]}
    return tensors | named | {f"masks.{name}": mask for name, mask in buffer.masks.items()}


class Calls(TorchDispatchMode):
    """What is asked of torch, with the shapes of the results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        result = func(*args, **(kwargs or {}))
        self.seen.append((str(func), tuple(getattr(result, "shape", ()))))
        return result
