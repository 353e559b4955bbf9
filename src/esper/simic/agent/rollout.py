"""The round's experience, in tensors that are allocated once.

Rows are envs, columns steps. A row is cut into sequences wherever a segment ends (`ends`): the first sequence begins
with the memory that the env carried into the round, every other with an empty one. So the update unrolls exactly what
was collected, and one memory per row is all that has to be kept.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole
from esper.tamiyo.heads import ActionTable, Masks
from esper.tamiyo.network import HiddenState, Stretches

Array = NDArray[np.int64]
BLOCK_CELLS = 140
"""Cells of padding that cost as much as one more block: 0.32 ms against 2.3 µs each (LSTM 64, forward and backward, one
CPU thread)."""


class Step(NamedTuple):
    """What happened to the envs in one step."""

    observations: Tensor
    """(n, size), as the policy saw them"""
    masks: Masks
    actions: Tensor
    """(n, heads)"""
    log_probs: Tensor
    """(n, heads)"""
    values: Tensor
    """(n,) of the state that was acted in"""
    rewards: Tensor
    """(n,)"""
    ends: Tensor
    """(n,) bool: the segment ends with this step, and with it the memory"""
    bootstraps: Tensor
    """(n,): value of what follows where a segment was truncated; 0 where it terminated or goes on"""


class Batch(NamedTuple):
    """Steps of some rows in packed order."""

    cells: Tensor
    """(steps,) into the round's tensors, flattened over rows and columns"""
    stretches: Stretches
    hidden_state: HiddenState
    """(sequences, hidden): what each begins with"""


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
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("n_envs", n_envs), ("capacity", capacity), ("hidden", hidden)):
            require_whole(name, value, 1)
        self.n_envs, self.capacity, self.table = n_envs, capacity, table
        self.device = torch.empty(0, device=device).device  # with its index, as tensors tell it
        shape = (n_envs, capacity)
        self.observations = self._zeros(*shape, observation_size)
        self.masks = {
            head.name: torch.ones((*shape, *table.mask_shape(head)), dtype=torch.bool, device=self.device)
            for head in table.heads
        }
        self.actions = self._zeros(*shape, len(table), dtype=torch.long)
        self.log_probs = self._zeros(*shape, len(table))
        self.values, self.rewards, self.bootstraps = (self._zeros(*shape) for _ in range(3))
        self.ends = self._zeros(*shape, dtype=torch.bool)
        self.lengths = self._zeros(n_envs, dtype=torch.long)
        self.hidden_state: HiddenState = (self._zeros(n_envs, hidden), self._zeros(n_envs, hidden))
        self.tasks = self._zeros(n_envs, dtype=torch.long) if tasks is None else tasks.to(self.device)
        """(n_envs,): whose statistics an env's returns belong to."""
        _check("tasks", self.tasks, self.lengths, (n_envs,))
        self.epsilon = 0.0
        """Share of uniform choice that all steps of this round were drawn with."""
        self._lengths = [0] * n_envs

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    @torch.no_grad()
    def begin(self, hidden_state: HiddenState, epsilon: float = 0.0) -> None:
        """Start a round with the memory that each env carries into it; what was here before is out of reach."""
        for own, given in zip(self.hidden_state, hidden_state, strict=True):
            _check("memory", given, own, own.shape)
        for own, given in zip(self.hidden_state, hidden_state, strict=True):
            own.copy_(given)
        self.epsilon = epsilon
        self.lengths.zero_()
        self._lengths = [0] * self.n_envs

    @torch.no_grad()
    def add(self, step: Step, envs: Sequence[int] | None = None) -> None:
        """Append one step of all envs, or of these. What does not fit raises, and nothing is written.

        Rewards that are not finite are refused where a look at them is cheap, on the CPU; elsewhere it would be a sync
        per step, and they are up to the caller.
        """
        chosen = range(self.n_envs) if envs is None else envs
        self._check_room(chosen)
        pairs = self._check_step(step, chosen)
        if envs is None and len(set(self._lengths)) == 1:
            place: tuple[slice | Tensor, int | Tensor] = slice(None), self._lengths[0]  # in lockstep: plain slices
        else:
            rows = self.moved(np.array(chosen, np.int64))
            place = rows, self.lengths[rows]
        for own, given in pairs:
            own[place] = given
        self.lengths[place[0]] += 1
        for env in chosen:
            self._lengths[env] += 1

    def _check_room(self, envs: Sequence[int]) -> None:
        if len(set(envs)) != len(envs) or any(not 0 <= env < self.n_envs for env in envs):
            raise BadValueError(f"envs {list(envs)}; wanted different ones of 0 … {self.n_envs - 1}")
        if full := [env for env in envs if self._lengths[env] >= self.capacity]:
            raise BadValueError(f"env {full[0]} already has {self.capacity} steps, the capacity of this buffer")

    def _check_step(self, step: Step, envs: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """Own tensors and what is to be written into each, after proving that it fits."""
        # The fields of a step have the names that their tensors have here.
        pairs = [(name, getattr(self, name), getattr(step, name)) for name in Step._fields if name != "masks"]
        self.table.check_masks(step.masks, len(envs))
        pairs += [(f"mask of head {name!r}", own, step.masks[name]) for name, own in self.masks.items()]
        for name, own, given in pairs:
            _check(name, given, own, (len(envs), *own.shape[2:]))
        if self.device.type == "cpu" and not bool(step.rewards.isfinite().all()):
            place = int((~step.rewards.isfinite()).nonzero()[0])
            env, reward = envs[place], float(step.rewards[place])
            raise BadValueError(f"env {env} got the reward {reward} in step {self._lengths[env]}; it must be finite")
        return [(own, given) for _, own, given in pairs]

    @torch.no_grad()
    def cut(self, values: Tensor) -> None:
        """The round ends here: the value (n_envs,) of what would have followed, for segments that have not ended."""
        _check("values", values, self.bootstraps, (self.n_envs,))
        rows = torch.arange(self.n_envs, device=self.device)
        last = (self.lengths - 1).clamp(min=0)
        self.bootstraps[rows, last] = torch.where(self.ends[rows, last], self.bootstraps[rows, last], values)

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

    def sequences(self) -> "Sequences":
        """Where rows are cut. Host sync: one, for `ends`."""
        ends = self.ends.cpu().numpy()
        starts, lengths, rows = [], [], []
        for row, length in enumerate(self._lengths):
            inside = np.flatnonzero(ends[row, : max(0, length - 1)]) + 1
            for begin, stop in pairwise([0, *inside.tolist(), length] if length else []):
                starts.append(row * self.capacity + begin)
                lengths.append(stop - begin)
                rows.append(row)
        return Sequences(*(np.array(part, np.int64) for part in (starts, lengths, rows)))

    def batch(self, sequences: "Sequences", rows: Sequence[int]) -> Batch:
        """All sequences of these rows, longest first. Which of them hold steps, `sequences.rows` tells."""
        chosen = np.flatnonzero(np.isin(sequences.rows, rows))
        if not len(chosen):
            raise BadValueError(f"rows {list(rows)} hold no step; take some of {np.unique(sequences.rows).tolist()}")
        chosen = chosen[np.argsort(-sequences.lengths[chosen], kind="stable")]
        starts, lengths = sequences.starts[chosen], sequences.lengths[chosen]
        time = np.arange(lengths[0])[:, None]
        inside = time < lengths
        cells = self.moved((starts + time)[inside])
        carried, whose = self.moved(starts[:, None] % self.capacity == 0), self.moved(sequences.rows[chosen])
        hidden, cell = (part[whose].where(carried, 0.0) for part in self.hidden_state)
        blocks, place = _stretches(lengths, inside)
        full = sum(size * span for size, span in blocks) == len(place)
        return Batch(cells, Stretches(blocks, None if full else self.moved(place)), (hidden, cell))

    def moved(self, values: NDArray[np.generic]) -> Tensor:
        """On the device; the copy runs beside the host where its memory can be pinned."""
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def _check(name: str, given: Tensor, own: Tensor, shape: Sequence[int]) -> None:
    """Raise unless `own` can keep what is given as it is: of this shape, on its device, of a kind that it holds."""
    if given.dtype is own.dtype and given.device == own.device and given.shape == shape:
        return
    if given.shape != torch.Size(shape) or given.device != own.device or not torch.can_cast(given.dtype, own.dtype):
        raise BadValueError(
            f"{name}: {given.dtype} of shape {tuple(given.shape)} on {given.device}; "
            f"this buffer takes {own.dtype} of shape {tuple(shape)} on {own.device}"
        )


def _stretches(lengths: Array, inside: NDArray[np.bool_]) -> tuple[tuple[tuple[int, int], ...], Array]:
    """Blocks for sequences of these lengths, in falling order, and the place of each step in them.

    A block is one call of the LSTM, which costs as much as some cells of padding: sequences that have ended are
    carried along until a block of fewer is cheaper.
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


class Sequences(NamedTuple):
    """Sequences of a round, on the host."""

    starts: Array
    """Where each begins in the flattened tensors."""
    lengths: Array
    rows: Array
