"""How a round's rows are cut into sequences, and what an update unrolls."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import HIDDEN, SIZE, TABLE, fill, make_buffer, make_step
from syncs import no_sync
from torch import Tensor

from esper.leyline import BadValueError
from esper.simic.agent import rollout
from esper.tamiyo import FactoredRecurrentActorCritic, NetworkConfig, vector_layout
from esper.tamiyo.encoder import Stretches
from esper.tamiyo.memory import HiddenState

# -- cutting into sequences -------------------------------------------------------------------------------------------


@pytest.mark.requirement(58)
def test_rows_are_cut_where_segments_end() -> None:
    """Rows are cut after each end only; an end at the last step opens no empty sequence."""
    buffer = make_buffer(3, 10)
    fill(buffer, [10, 4, 6], ends=[(0, 1), (0, 2), (0, 9), (2, 3)])
    buffer.ends[1, 6] = True  # behind the row's length
    found = buffer.sequences()
    assert found.starts.tolist() == [0, 2, 3, 10, 20, 24]
    assert found.lengths.tolist() == [2, 1, 7, 4, 4, 2]
    assert found.rows.tolist() == [0, 0, 0, 1, 2, 2]


@pytest.mark.requirement(92)
def test_memory_at_the_beginning_of_a_sequence() -> None:
    """A row's first sequence starts with the carried hidden state, later ones with zeros."""
    buffer = make_buffer(3, 10)
    fill(buffer, [10, 4, 6], ends=[(0, 1), (0, 2), (2, 3)])
    batch = buffer.batch(buffer.sequences(), [0, 1, 2])
    # longest first, in order among equals: 7 (row 0), 4 (row 1), 4 (row 2), 2 (row 0), 2 (row 2), 1 (row 0)
    assert batch.hidden_state[0][:, 0].tolist() == [0.0, 2.0, 3.0, 1.0, 0.0, 0.0]
    assert batch.hidden_state[1][:, -1].tolist() == [0.0, -2.0, -3.0, -1.0, 0.0, 0.0]


LENGTHS = st.lists(st.integers(0, 21), min_size=1, max_size=6).filter(any)
ENDS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=6)


@pytest.mark.requirement(3, 56)
@given(LENGTHS, ENDS, st.data())
def test_every_step_once_and_in_order(lengths: list[int], ends: list[tuple[int, int]], data: st.DataObject) -> None:
    """Each step of a row appears once, and the order inside a sequence is kept."""
    buffer = make_buffer(len(lengths), 21)
    fill(buffer, lengths, ends)
    filled = [row for row, length in enumerate(lengths) if length]
    rows = data.draw(st.lists(st.sampled_from(filled), min_size=1, unique=True))
    cells = buffer.batch(buffer.sequences(), rows).cells.tolist()
    assert sorted(cells) == [row * 21 + column for row in sorted(rows) for column in range(lengths[row])]
    for row in rows:
        own = [cell % 21 for cell in cells if cell // 21 == row]
        cuts = [
            0,
            *sorted({column + 1 for end, column in ends if end == row and column + 1 < lengths[row]}),
            lengths[row],
        ]
        for begin, stop in pairwise(cuts):
            assert [column for column in own if begin <= column < stop] == list(range(begin, stop))


def test_rows_without_steps() -> None:
    """They may come along; alone they are no batch."""
    buffer = make_buffer()
    fill(buffer, [0, 2, 0])
    sequences = buffer.sequences()
    assert buffer.batch(sequences, [0, 1]).cells.tolist() == [6, 7]
    with pytest.raises(BadValueError, match=r"rows \[0, 2\] hold no step; use some of \[1\]"):
        buffer.batch(sequences, [0, 2])


# -- unrolling --------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.sampled_from([0, 5, 40, 1000]))
def test_places_in_blocks(lengths: list[int], allowed: int) -> None:
    """Different ones, inside the blocks, in packed order where nothing is padded; no block is padded by more cells than
    another one would cost."""
    sorted_lengths = np.array(sorted(lengths, reverse=True))
    inside = np.arange(sorted_lengths[0])[:, None] < sorted_lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "BLOCK_CELLS", allowed)
        blocks, place = rollout._stretches(sorted_lengths, inside)
    total = sum(size * span for size, span in blocks)
    assert len(set(place.tolist())) == len(place) == sum(lengths)
    assert place.min() == 0 and place.max() < total
    assert total > len(place) or place.tolist() == list(range(total))
    assert blocks[0][0] == len(lengths) and all(one[0] > other[0] for one, other in pairwise(blocks))
    assert sum(span for _, span in blocks) == max(lengths)
    begin = 0
    for size, span in blocks:
        assert size * span - inside[begin : begin + span].sum() <= allowed
        begin += span


NETWORK = FactoredRecurrentActorCritic(TABLE, vector_layout(SIZE), NetworkConfig(encoder=4, hidden=HIDDEN, head=4))


@pytest.mark.requirement(92)
@settings(max_examples=25)
@given(LENGTHS, ENDS)
def test_blocks_unroll_what_was_collected(lengths: list[int], ends: list[tuple[int, int]]) -> None:
    """Unrolling in blocks gives the same core output as stepping with resets."""
    buffer = make_buffer(len(lengths), 21)
    fill(buffer, lengths, ends)
    wanted = torch.zeros((len(lengths), 21, HIDDEN))
    with torch.no_grad():
        trunk = NETWORK.encode(buffer.observations.flatten(0, 1)).trunk
        for row, length in enumerate(lengths):
            hidden_state: HiddenState = (buffer.hidden_state[0][row : row + 1], buffer.hidden_state[1][row : row + 1])
            for column in range(length):
                wanted[row, column], hidden_state = NETWORK.step(trunk[row * 21 + column].unsqueeze(0), hidden_state)
                if buffer.ends[row, column]:
                    hidden_state = NETWORK.initial_state(1)
        batch = buffer.batch(buffer.sequences(), range(len(lengths)))
        found = NETWORK.unroll(trunk[batch.cells], batch.stretches, batch.hidden_state)
    assert torch.allclose(found, wanted.flatten(0, 1)[batch.cells], atol=1e-6)


def test_equal_lengths_need_no_places() -> None:
    """Lockstep rounds are one full block."""
    buffer = make_buffer(3, 20)
    fill(buffer, [20, 20, 20])
    assert buffer.batch(buffer.sequences(), [2, 0]).stretches == Stretches(((2, 20),), None)


# -- CUDA -------------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(93)
@pytest.mark.gpu
def test_copies_that_do_not_wait_are_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies without pinned memory would not be asynchronous. Adding and cutting never wait."""
    buffer, copies, move = make_buffer(3, 6, device="cuda"), [], torch.Tensor.to

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("non_blocking"):
            copies.append(self.is_pinned())
        return move(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", watched)
    steps = [make_step(3, device="cuda"), make_step(2, device="cuda")]
    ends = torch.zeros(3, device="cuda")
    with no_sync():
        buffer.add(steps[0])
        buffer.add(steps[1], [0, 2])
        buffer.cut(ends)
    batch = buffer.batch(buffer.sequences(), [0, 1, 2])
    assert batch.cells.tolist() == [0, 12, 6, 1, 13]
    assert len(copies) >= 5
    assert all(copies)
