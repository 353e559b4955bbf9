"""The experience of a round, in preallocated tensors.

Rows are envs, columns steps; a cell is one step of one env. A row is divided into sequences after every step that
`ends` marks. The first sequence starts from the env's hidden state at the start of the round, every other from zeros.
So the update unrolls exactly what was collected, and one hidden state per row suffices.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole
from esper.tamiyo.encoder import Stretches
from esper.tamiyo.heads import ActionTable, Masks
from esper.tamiyo.memory import HiddenState

Array = NDArray[np.int64]
BLOCK_CELLS = 140
"""Cells of padding that cost as much as another block: 2.3 µs each against 0.32 ms (LSTM 64, forward and backward, one
CPU thread)."""


class Step(NamedTuple):
    """One step of n envs."""

    observations: Tensor  # (n, size), normalised
    masks: Masks
    actions: Tensor  # (n, heads)
    log_probs: Tensor  # (n, heads)
    values: Tensor  # (n,) of the state before the action
    rewards: Tensor  # (n,)
    ends: Tensor  # (n,) bool: the sequence ends with this step, and the hidden state is reset
    bootstraps: Tensor  # (n,): value of the next state where a sequence was truncated, else 0


STORED = tuple(name for name in Step._fields if name != "masks")  # tensors of a buffer that are named like a step's


class Batch(NamedTuple):
    """Steps of some rows in packed order."""

    cells: Tensor  # (steps,): index into the round's tensors, flattened over rows and columns
    stretches: Stretches
    hidden_state: HiddenState  # (sequences, hidden), at the start of each


class Sequences(NamedTuple):
    """The sequences of a round, on the CPU."""

    starts: Array  # index of the first cell of each
    lengths: Array
    rows: Array


class TamiyoRolloutBuffer:
    """Experience of `n_envs` envs for at most `capacity` steps each."""

    def __init__(
        self,
        n_envs: int,
        capacity: int,
        observation_size: int,
        table: ActionTable,
        hidden: int,
        *,
        tasks: Tensor | None = None,
        groups: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value, least in (("n_envs", n_envs, 1), ("capacity", capacity, 1), ("hidden", hidden, 0)):
            require_whole(name, value, least)
        self.n_envs, self.capacity, self.table = n_envs, capacity, table
        self.device = torch.empty(0, device=device).device  # with its index
        shape = (n_envs, capacity)
        self.observations = self._zeros(*shape, observation_size)
        masks = table.open_masks(n_envs * capacity, self.device)
        self.masks = {name: mask.unflatten(0, shape) for name, mask in masks.items()}
        self.actions = self._zeros(*shape, len(table), dtype=torch.long)
        self.log_probs = self._zeros(*shape, len(table))
        self.values, self.rewards, self.bootstraps = (self._zeros(*shape) for _ in range(3))
        self.ends = self._zeros(*shape, dtype=torch.bool)
        self.lengths = self._zeros(n_envs, dtype=torch.long)
        self.hidden_state: HiddenState = (self._zeros(n_envs, hidden), self._zeros(n_envs, hidden))
        self.tasks = self._zeros(n_envs, dtype=torch.long) if tasks is None else tasks.to(self.device)
        alone = torch.arange(n_envs, device=self.device)
        self.groups = alone if groups is None else groups.to(self.device)  # envs of one group meet the same host
        for name, numbers in (("tasks", self.tasks), ("groups", self.groups)):
            _check(name, numbers, self.lengths, (n_envs,))
        self.epsilon = 0.0  # share of uniform choices in this round
        self._lengths = [0] * n_envs

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.no_grad()
    def begin(self, hidden_state: HiddenState, epsilon: float = 0.0) -> None:
        """Start a round from these hidden states, and discard the previous round."""
        for own, given in zip(self.hidden_state, hidden_state, strict=True):
            _check("hidden_state", given, own, own.shape)
        for own, given in zip(self.hidden_state, hidden_state, strict=True):
            own.copy_(given)
        self.epsilon = epsilon
        self.lengths.zero_()
        self._lengths = [0] * self.n_envs

    @torch.no_grad()
    def add(self, step: Step, envs: Sequence[int] | None = None) -> None:
        """Append one step of all envs, or of these. A step that does not fit raises and changes nothing."""
        chosen = range(self.n_envs) if envs is None else envs
        if len(set(chosen)) != len(chosen) or any(env not in range(self.n_envs) for env in chosen):
            raise BadValueError(f"envs {list(chosen)} must be different ones of 0 … {self.n_envs - 1}")
        if full := [env for env in chosen if self._lengths[env] >= self.capacity]:
            raise BadValueError(f"env {full[0]} already has {self.capacity} steps, the capacity of this buffer")
        self.table.check_masks(step.masks, len(chosen))
        pairs = [(name, getattr(self, name), getattr(step, name)) for name in STORED]
        pairs += [(f"mask of head {name!r}", own, step.masks[name]) for name, own in self.masks.items()]
        for name, own, given in pairs:
            _check(name, given, own, (len(chosen), *own.shape[2:]))
        # Not on a GPU, where it would cost a sync per step.
        if self.device.type == "cpu" and len(bad := (~step.rewards.isfinite()).nonzero()):
            env, reward = chosen[int(bad[0])], float(step.rewards[bad[0]])
            raise BadValueError(f"env {env} got the reward {reward} in step {self._lengths[env]}; it must be finite")
        if envs is None and len(set(self._lengths)) == 1:  # lockstep: plain slices
            index: tuple[slice | Tensor, int | Tensor] = slice(None), self._lengths[0]
        else:
            rows = self.moved(np.array(chosen, np.int64))
            index = rows, self.lengths[rows]
        for _, own, given in pairs:
            own[index] = given
        self.lengths[index[0]] += 1
        for env in chosen:
            self._lengths[env] += 1

    @torch.no_grad()
    def cut(self, values: Tensor) -> None:
        """End the round. Sequences that have not ended bootstrap from the values (n_envs,) of their next states."""
        _check("values", values, self.bootstraps, (self.n_envs,))
        rows = torch.arange(self.n_envs, device=self.device)
        last = (self.lengths - 1).clamp(min=0)
        self.bootstraps[rows, last] = torch.where(self.ends[rows, last], self.bootstraps[rows, last], values)

    def rows(self, rows: range) -> dict[str, Tensor]:
        """The steps of these rows, by name, for `fill`; views of the buffer."""
        stored = {name: getattr(self, name) for name in (*STORED, "lengths")}
        stored |= {f"masks.{name}": mask for name, mask in self.masks.items()}
        return {name: tensor[rows.start : rows.stop] for name, tensor in stored.items()}

    @torch.no_grad()
    def fill(self, rows: range, steps: Mapping[str, Tensor]) -> None:
        """Put the steps of another buffer's rows into these rows, after `begin`."""
        for name, own in self.rows(rows).items():
            own.copy_(steps[name])
        self._lengths[rows.start : rows.stop] = steps["lengths"].tolist()

    @property
    def steps(self) -> int:
        """Steps in all rows together."""
        return sum(self._lengths)

    @property
    def valid(self) -> Tensor:
        """(n_envs, capacity) bool: cells that hold a step."""
        return torch.arange(self.capacity, device=self.device) < self.lengths.unsqueeze(1)

    @property
    def cell_tasks(self) -> Tensor:
        """(n_envs × capacity,): the task of each cell."""
        return self.tasks.repeat_interleave(self.capacity)

    def sequences(self) -> Sequences:
        """The sequences of all rows. Device sync: one, for `ends`."""
        return find_sequences(self.ends.cpu().numpy(), self._lengths)

    def batch(self, sequences: Sequences, rows: Sequence[int]) -> Batch:
        """All sequences of these rows, longest first."""
        packed = pack(sequences, rows)
        carried, whose = self.moved(packed.starts[:, None] % self.capacity == 0), self.moved(packed.rows)
        hidden, cell = (part[whose].where(carried, 0.0) for part in self.hidden_state)
        positions = None if packed.positions is None else self.moved(packed.positions)
        return Batch(self.moved(packed.cells), Stretches(packed.blocks, positions), (hidden, cell))

    def moved(self, values: NDArray[np.generic]) -> Tensor:
        """Copy to the device, asynchronously for CUDA."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _check(name: str, given: Tensor, own: Tensor, shape: Sequence[int]) -> None:
    """Raise unless `given` has this shape, and the device and kind of dtype of `own`."""
    if given.shape != torch.Size(shape) or given.device != own.device or not torch.can_cast(given.dtype, own.dtype):
        raise BadValueError(
            f"{name}: {given.dtype} of shape {tuple(given.shape)} on {given.device}; "
            f"this buffer needs {own.dtype} of shape {tuple(shape)} on {own.device}"
        )


def find_sequences(ends: NDArray[np.bool_], lengths: Sequence[int]) -> Sequences:
    """The sequences of rows (rows, capacity) that hold `lengths` steps; each ends where `ends` says or with its row."""
    sequences = []
    for row, length in enumerate(lengths):
        inside = np.flatnonzero(ends[row, : max(0, length - 1)]) + 1
        for begin, stop in pairwise([0, *inside.tolist(), length] if length else []):
            sequences.append((row * ends.shape[1] + begin, stop - begin, row))
    return Sequences(*np.array(sequences, np.int64).reshape(-1, 3).T)


class Packed(NamedTuple):
    """The sequences of some rows, longest first, and their steps in packed order (see `Stretches`); on the CPU."""

    starts: Array  # (sequences,): index of the first cell of each
    rows: Array  # (sequences,)
    cells: Array  # (steps,)
    blocks: tuple[tuple[int, int], ...]
    positions: Array | None


def pack(sequences: Sequences, rows: Sequence[int]) -> Packed:
    """All sequences of these rows."""
    chosen = np.flatnonzero(np.isin(sequences.rows, rows))
    if not len(chosen):
        raise BadValueError(f"rows {list(rows)} hold no step; use some of {np.unique(sequences.rows).tolist()}")
    chosen = chosen[np.argsort(-sequences.lengths[chosen], kind="stable")]
    starts, lengths = sequences.starts[chosen], sequences.lengths[chosen]
    time = np.arange(lengths[0])[:, None]
    inside = time < lengths
    blocks, index = _stretches(lengths, inside)
    full = sum(size * span for size, span in blocks) == len(index)
    return Packed(starts, sequences.rows[chosen], (starts + time)[inside], blocks, None if full else index)


def _stretches(lengths: Array, inside: NDArray[np.bool_]) -> tuple[tuple[tuple[int, int], ...], Array]:
    """Blocks (sequences, time) for sequences of these lengths, longest first, and the index of each step in them.

    A block is one call of the LSTM, which costs as much as some cells of padding. So a block includes sequences that
    have ended until starting a smaller one is cheaper.
    """
    longest = int(lengths[0])
    running = inside.sum(1)  # sequences at each time
    blocks: list[tuple[int, int]] = []
    begin = padding = 0
    for time in range(1, longest):
        padding += int(running[begin] - running[time])
        if padding > BLOCK_CELLS:
            blocks.append((int(running[begin]), time - begin))
            begin, padding = time, 0
    blocks.append((int(running[begin]), longest - begin))
    sizes, times = np.array(blocks).T
    begins, offsets = (np.concatenate([[0], np.cumsum(part)[:-1]]) for part in (times, sizes * times))
    time_of, sequence = np.nonzero(inside)
    block = np.searchsorted(begins, time_of, side="right") - 1
    return tuple(blocks), offsets[block] + (time_of - begins[block]) * sizes[block] + sequence
