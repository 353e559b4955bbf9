"""The update computes what it says, however the round is cut."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from rounds import (
    LAYOUT,
    TABLES,
    collect,
    gap,
    make_agent,
    mean_of,
    rows_of,
    small,
    weights_of,
    withheld,
)
from torch import Tensor

from esper.simic.agent import BehaviourGapError, PPOAgent, Step, TamiyoRolloutBuffer, losses
from esper.simic.agent.rollout import Batch, Sequences
from esper.tamiyo import ActionTable

WIDE = 1e9
"""A clip norm that clips nothing."""
KINDS = tuple(TABLES)
ATTENTIVE: dict[str, Any] = {"clip_norm": WIDE, "target_kl": None}


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """All ratios (steps, heads) that updates compute, in order."""
    seen: list[Tensor] = []
    compute = losses.ratios

    def watched(log_probs: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        ratio, log_ratio = compute(log_probs, old)
        seen.append(ratio.detach().clone())
        return ratio, log_ratio

    monkeypatch.setattr(losses, "ratios", watched)
    return seen


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Batch]]:
    """Rows and batch of everything that buffers hand out, in order."""
    seen: list[tuple[list[int], Batch]] = []
    cut = TamiyoRolloutBuffer.batch

    def watched(self: TamiyoRolloutBuffer, sequences: Sequences, rows: Sequence[int]) -> Batch:
        seen.append((list(rows), cut(self, sequences, rows)))
        return seen[-1][1]

    monkeypatch.setattr(TamiyoRolloutBuffer, "batch", watched)
    return seen


def round_of(kind: str, **changes: Any) -> tuple[PPOAgent, TamiyoRolloutBuffer]:  # Any: fields of PPOConfig
    """An agent that has learnt a little, and its next round."""
    agent = make_agent(kind, **changes)
    agent.update(collect(agent, seed=1))
    return agent, collect(agent, seed=2)


@pytest.mark.requirement(92)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_those_that_were_collected(kind: str) -> None:
    """Every head agrees, in rows of unequal length with resets inside."""
    agent, buffer = round_of(kind)
    inner = buffer.ends & (torch.arange(buffer.capacity) < buffer.lengths.unsqueeze(1) - 1)
    assert int(inner.sum()) > 5
    assert buffer.epsilon > 0
    assert agent.update(buffer).behaviour_gap <= 1e-5


@pytest.mark.requirement(92)
def test_the_gap_shows_a_reset_that_was_not_there() -> None:
    """Without the cuts at episode ends, the behaviour gap exceeds its limit."""
    agent, buffer = round_of("core")
    buffer.ends[:] = False
    with pytest.raises(BehaviourGapError):
        agent.update(buffer)


@pytest.mark.requirement(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_ratios_are_exactly_one(kind: str, ratios: list[Tensor]) -> None:
    """Old log-probs come from the weights before the update; only its own steps change ratios."""
    agent, buffer = round_of(kind, epochs=3, rate=0.01, target_kl=None)
    ratios.clear()
    agent.update(buffer)
    assert len(ratios) == 3 * 4
    assert bool((ratios[0] == 1).all())
    assert all(float((ratio - 1).abs().max()) > 1e-3 for ratio in ratios[1:])


@pytest.mark.requirement(4)
@pytest.mark.parametrize("kind", KINDS)
def test_ratios_stay_one_while_the_step_is_withheld(kind: str, ratios: list[Tensor]) -> None:
    """Ratios are 1 on every minibatch of every epoch, whatever rows it holds."""
    agent, buffer = round_of(kind, epochs=3)
    ratios.clear()
    with withheld(agent):
        agent.update(buffer)
    assert len(ratios) == 3 * 4
    assert all(bool((ratio == 1).all()) for ratio in ratios[:4])
    assert max(float((ratio - 1).abs().max()) for ratio in ratios) <= 1e-5


@pytest.mark.requirement(3)
def test_every_row_is_seen_once_per_epoch_and_in_order(batches: list[tuple[list[int], Batch]]) -> None:
    """Rows are shuffled over minibatches, but steps inside a sequence are not."""
    agent, buffer = round_of("core", minibatches=3)
    batches.clear()
    agent.update(buffer)
    epochs = [batches[place : place + 3] for place in range(0, len(batches), 3)]
    assert len(epochs) == agent.config.epochs
    for epoch in epochs:
        assert sorted(row for rows, _ in epoch for row in rows) == list(range(buffer.n_envs))
        cells = torch.cat([batch.cells for _, batch in epoch])
        assert sorted(cells.tolist()) == buffer.valid.flatten().nonzero().squeeze(1).tolist()
        for rows, batch in epoch:
            in_row = [batch.cells[batch.cells // buffer.capacity == row] for row in rows]
            for cells in in_row:
                ends = buffer.ends.flatten()[cells.sort().values]
                segment = torch.cat([torch.zeros(1, dtype=torch.long), ends.cumsum(0)[:-1]])[cells.argsort().argsort()]
                assert all(bool((cells[segment == part].diff() == 1).all()) for part in segment.unique())
    assert len({str([rows for rows, _ in epoch]) for epoch in epochs}) == len(epochs)


@cache
def gradients_when_cut(kind: str, minibatches: int, pieces: int) -> dict[str, Tensor]:
    """Mean over the minibatches of an epoch, no step taken."""
    agent = make_agent(kind, epochs=1, minibatches=minibatches, pieces=pieces, **ATTENTIVE)
    with withheld(agent) as seen:
        agent.update(collect(agent, seed=3))
    assert len(seen) == minibatches
    return mean_of(seen)


@pytest.mark.requirement(3, 78)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("minibatches", "pieces"), [(4, 1), (3, 1), (1, 4), (1, 8), (2, 3)])
def test_gradients_do_not_depend_on_how_a_round_is_cut(kind: str, minibatches: int, pieces: int) -> None:
    """The mean over minibatches, or the sum over pieces, is the full gradient."""
    whole = gradients_when_cut(kind, 1, 1)
    assert max(float(gradient.abs().max()) for gradient in whole.values()) > 0.1
    assert gap(whole, gradients_when_cut(kind, minibatches, pieces)) <= 1e-5


@pytest.mark.requirement(78)
def test_an_update_in_pieces_is_the_same_update() -> None:
    """The weights after the update are the same too."""
    agents = [make_agent("full", pieces=pieces) for pieces in (1, 2)]
    for agent in agents:
        agent.update(collect(agent, seed=3))
    assert gap(*(weights_of(agent) for agent in agents)) <= 1e-5


@pytest.mark.requirement(56)
@pytest.mark.parametrize("kind", KINDS)
def test_cells_without_a_step_may_hold_anything(kind: str) -> None:
    """Padding enters no loss, statistic or metric."""
    plain, soiled = (round_of(kind) for _ in range(2))
    buffer = soiled[1]
    unused = ~buffer.valid
    assert int(unused.sum()) > 5
    for part in (buffer.observations, buffer.log_probs, buffer.values, buffer.rewards, buffer.bootstraps):
        part[unused] = float("nan")
    buffer.actions[unused] = 10**6
    buffer.ends[unused] = True
    for mask in buffer.masks.values():
        mask[unused] = False
    metrics = [agent.update(given) for agent, given in (plain, soiled)]
    assert metrics[0] == metrics[1]
    assert gap(weights_of(plain[0]), weights_of(soiled[0])) == 0
    assert torch.equal(plain[0].returns.statistics.mean, soiled[0].returns.statistics.mean)


def with_room(buffer: TamiyoRolloutBuffer, capacity: int) -> TamiyoRolloutBuffer:
    """The same round in a buffer for more steps."""
    size, hidden = buffer.observations.shape[-1], buffer.hidden_state[0].shape[-1]
    larger = TamiyoRolloutBuffer(buffer.n_envs, capacity, size, buffer.table, hidden)
    larger.begin(buffer.hidden_state, buffer.epsilon)
    tensors = (buffer.actions, buffer.log_probs, buffer.values, buffer.rewards, buffer.ends, buffer.bootstraps)
    for step in range(buffer.capacity):
        masks = {name: mask[:, step] for name, mask in buffer.masks.items()}
        whole = Step(buffer.observations[:, step], masks, *(each[:, step] for each in tensors))
        envs = [env for env in range(buffer.n_envs) if step < int(buffer.lengths[env])]
        larger.add(rows_of(whole, envs), envs)
    return larger


@pytest.mark.requirement(56)
def test_room_that_is_not_used_changes_nothing() -> None:
    """Cells without a step enter no divisor either: a buffer twice as long gives the same gradient and losses."""
    gradients, figures = [], []
    for capacity in (12, 24):
        agent = make_agent("core", epochs=1, minibatches=1, **ATTENTIVE)
        with withheld(agent) as seen:
            metrics = agent.update(with_room(collect(agent, seed=3), capacity))
        gradients.append(seen[0])
        figures.append((metrics.policy_loss, metrics.value_loss, metrics.entropy, metrics.logit_spread))
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 0.1
    assert gap(*gradients) <= 1e-5
    assert figures[0] == pytest.approx(figures[1], abs=1e-5)


@pytest.mark.requirement(5)
def test_the_statistics_of_returns_count_each_step_once() -> None:
    """Over two updates with several epochs and minibatches; padding does not count."""
    agent = make_agent("core")
    buffers = []
    for seed in (1, 2):
        buffers.append(collect(agent, seed=seed))
        agent.update(buffers[-1])
    assert agent.returns.statistics.count.tolist() == [sum(buffer.steps for buffer in buffers)]


def test_rows_without_a_step_are_left_out() -> None:
    """More minibatches than rows that hold anything."""
    agent = make_agent("core")
    buffer = collect(agent, n_envs=6)
    for env in (1, 2, 4, 5):
        buffer._lengths[env] = 0
        buffer.lengths[env] = 0
    metrics = agent.update(buffer)
    assert metrics.minibatches_taken == 2 * agent.config.epochs
    assert metrics.steps == buffer._lengths[0] + buffer._lengths[3]


def test_equal_seeds_and_rounds_give_equal_agents() -> None:
    """Bit for bit; and the seed matters."""

    def trained(seed: int) -> dict[str, Tensor]:
        agent = make_agent("core", seed=seed)
        for number in range(2):
            agent.update(collect(agent, seed=number))
        return weights_of(agent)

    assert gap(trained(5), trained(5)) == 0
    assert gap(trained(5), trained(6)) > 1e-3


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(45, 73)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*script_method")  # torch's own, in passing
def test_the_compiled_update_is_the_eager_one() -> None:
    """Log-probs, ratios and weights agree, and new shapes or a new ε cause no recompilation."""
    eager, compiled = make_agent("core"), make_agent("core", compile="default")
    for number in range(3):
        first = eager.update(collect(eager, seed=number))
        before = recompilations()
        second = compiled.update(collect(compiled, seed=number))
        assert compiled.compile_mode == "default"
        assert second.behaviour_gap <= 1e-5
        assert second.approx_kl == pytest.approx(first.approx_kl, abs=1e-5)
    assert recompilations() == before
    assert gap(weights_of(eager), weights_of(compiled)) <= 1e-4


def recompilations() -> int:
    """Frames that dynamo has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.requirement(45)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*script_method")
def test_one_round_compiles_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three: the encoder, and the heads with and without entropies. More rounds of other shapes compile nothing new.
    With fixed shapes, every minibatch would need its own graphs."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    agent, before, graphs = make_agent("core", compile="default"), recompilations(), []
    for number in range(2):
        agent.update(collect(agent, seed=number))
        graphs.append(recompilations() - before)
    torch._dynamo.reset()
    assert agent.compile_mode == "default"
    assert 0 < graphs[0] <= 3
    assert graphs[1] == graphs[0]


@pytest.mark.requirement(45, 75)
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:.*script_method")
@pytest.mark.parametrize("part", ["encode", "decide"])
def test_graph_breaks(part: str) -> None:
    """The compiled part is one graph without a device read."""
    table, layout = TABLES["full"]
    agent = PPOAgent(ActionTable(table.heads), layout, small(compile="default"))
    network, masks = agent.network, agent.table.open_masks(3)
    observations, core = torch.randn(3, LAYOUT.size), torch.randn(3, small().network.hidden)
    encoded, actions = network.encode(observations), torch.zeros((3, len(agent.table)), dtype=torch.long)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: network.encode(observations),
        "decide": lambda: network.decide(core, encoded, masks, 0.05, actions=actions),
    }
    found = torch._dynamo.explain(calls[part])()
    print(f"{part}: {found.graph_count} graphs, {found.graph_break_count} breaks")
    assert (found.graph_count, found.graph_break_count) == (1, 0)


@pytest.mark.parametrize("kind", ["vector", "core"])
def test_looking_back_at_what_was_seen_finds_the_same_values(kind: str) -> None:
    """Over ends in mid-row and rows of unequal length; and other ones where the critic's column has changed since, for
    the same actions."""
    agent = make_agent(kind, tasks=2)
    agent.returns.update(torch.randn(100) * 5 + 3, torch.arange(100) % 2, torch.ones(100, dtype=torch.bool))
    buffer = collect(agent, tasks=torch.arange(8) % 2)
    before, log_probs = buffer.values.clone(), buffer.log_probs.clone()
    agent.recompute_values(buffer)
    torch.testing.assert_close(buffer.values, before, rtol=1e-4, atol=1e-4)
    if kind == "core":
        buffer.observations[..., -1] += 1.0
        agent.recompute_values(buffer)
        moved = (buffer.values - before).abs() > 1e-3
        assert bool((moved == buffer.valid).all()), "every step, and nothing behind the last"
        assert torch.equal(buffer.log_probs, log_probs)
        assert agent.update(buffer).behaviour_gap < 1e-4
