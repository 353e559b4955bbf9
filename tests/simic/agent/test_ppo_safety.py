"""What never reaches a weight: gradients that are not finite, steps too far, rounds of another policy."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from rounds import LAYOUT, TABLES, Masks, Narrow, Operations, collect, gap, make_agent, only, weights_of
from torch import Tensor

from esper.leyline import BadValueError, UnknownNameError
from esper.simic.agent import BehaviourGapError, NotFiniteError, PPOAgent, PPOConfig, TamiyoRolloutBuffer, losses
from esper.simic.agent.config import FAILURES_ALLOWED, KL_STOP
from esper.tamiyo import EmptyMaskError, discrete_table

NAN = float("nan")


def trained() -> PPOAgent:
    """An agent behind its first update, so that Adam has moments."""
    agent = make_agent("core")
    agent.update(collect(agent, seed=1))
    return agent


def learnt(agent: PPOAgent) -> dict[str, Tensor]:
    """Weights, Adam's moments and step counts, statistics of returns: all that an update changes."""
    found = weights_of(agent)
    for name, weight in agent.network.named_parameters():
        found |= {f"{key} of {name}": value.clone() for key, value in agent.optimizer.state[weight].items()}
    return found | {f"returns.{name}": value for name, value in agent.returns.statistics.state_dict().items()}


def spoil(agent: PPOAgent, value: float, when: Callable[[int], bool] = lambda call: True) -> None:
    """Put a number into a gradient of the blueprint head, in those backward passes that `when` says."""
    calls = iter(range(10**6))

    def hook(gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.tensor([0]), value) if when(next(calls)) else gradient

    next(agent.network.heads["blueprint"].parameters()).register_hook(hook)


@pytest.mark.requirement(38)
@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_reaches_nothing(value: float) -> None:
    """If one head is broken in every minibatch, no weight, moment or step count changes."""
    agent = trained()
    buffer, before = collect(agent, seed=2), learnt(agent)
    spoil(agent, value)
    metrics = agent.update(buffer)
    after = learnt(agent)
    taken_in = {name for name in before if not torch.equal(before[name], after[name])}
    assert taken_in == {"returns.mean", "returns.var", "returns.count"}
    assert (metrics.minibatches_taken, metrics.minibatches_not_finite) == (0, 16)
    assert metrics.heads["op"].grad_norm > 0  # the sound heads are still told apart


@pytest.mark.requirement(38)
def test_only_the_minibatch_that_is_not_finite_is_left_out() -> None:
    """The other minibatches still train, and no weight is damaged."""
    agent = trained()
    before = learnt(agent)
    spoil(agent, NAN, when=lambda call: call % 4 == 1)
    metrics = agent.update(collect(agent, seed=2))
    after = learnt(agent)
    assert (metrics.minibatches_taken, metrics.minibatches_not_finite) == (12, 4)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert all(float(after[name] - before[name]) == 12 for name in before if name.startswith("step of")), (
        "a step that was not taken is not counted"
    )
    assert agent.updates == 2


@pytest.mark.invariant(14)
def test_three_updates_without_a_finite_gradient_stop_the_run() -> None:
    """Skipped updates advance no schedule, and a good one in between resets the count."""
    agent = trained()
    bad: list[bool] = [True]
    spoil(agent, NAN, when=lambda call: bad[0])
    for _ in range(FAILURES_ALLOWED - 1):
        agent.update(collect(agent, seed=2))
    assert (agent.updates, agent.failures) == (1, 2)
    bad[0] = False
    agent.update(collect(agent, seed=2))
    assert (agent.updates, agent.failures) == (2, 0)
    bad[0] = True
    rate, epsilon = agent.config.rate_at(agent.progress), agent.epsilon
    for _ in range(FAILURES_ALLOWED - 1):
        agent.update(collect(agent, seed=2))
    with pytest.raises(NotFiniteError, match=r"3 updates in a row.*smaller rate than 0\.001"):
        agent.update(collect(agent, seed=2))
    assert (agent.config.rate_at(agent.progress), agent.epsilon) == (rate, epsilon)


@pytest.mark.requirement(38)
def test_rewards_that_are_not_finite_leave_the_statistics_of_returns_alone() -> None:
    """Otherwise every later round would be lost too."""
    agent = trained()
    buffer, before = collect(agent, seed=2), learnt(agent)
    buffer.rewards[3, 1] = NAN
    metrics = agent.update(buffer)
    assert (metrics.minibatches_taken, agent.failures) == (0, 1)
    assert gap(before, learnt(agent)) == 0
    assert agent.update(collect(agent, seed=3)).minibatches_taken == 16


# -- steps too far ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement(84)
def test_the_step_behind_a_large_kl_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes from the offending minibatch on; earlier steps stay."""
    agent = make_agent("core", rate=0.05, minibatches=2, epochs=6)
    weights: list[dict[str, Tensor]] = []
    step = agent.optimizer.step

    def watched() -> None:
        step()
        weights.append(weights_of(agent))

    monkeypatch.setattr(agent.optimizer, "step", watched)
    metrics = agent.update(collect(agent))
    assert metrics.stopped_by_kl
    assert metrics.max_kl > KL_STOP * 0.03
    taken = metrics.minibatches_taken
    assert 1 <= taken < len(weights) < 12
    assert len(weights) == 2 * metrics.epochs_run
    assert all(gap(weights[index], weights[taken - 1]) == 0 for index in range(taken, len(weights)))
    assert all(gap(weights[index], weights[index + 1]) > 0 for index in range(taken - 1))
    assert agent.updates == 1


@pytest.mark.requirement(84)
def test_without_a_target_no_kl_stops() -> None:
    """Without a target KL the same update runs to its end."""
    agent = make_agent("core", rate=0.05, minibatches=2, epochs=6, target_kl=None)
    metrics = agent.update(collect(agent))
    assert (metrics.stopped_by_kl, metrics.minibatches_taken) == (False, 12)


MOVED = 0.1
"""The log-ratio by which a policy has moved."""
HEAD_KL = math.exp(MOVED) - 1 - MOVED
"""KL of one head that has moved so far in every step."""


def allow_all(masks: Masks, step: int) -> None:
    """Give every head a choice in every step."""
    for mask in masks.values():
        mask[:] = True


def stop_after_moving(monkeypatch: pytest.MonkeyPatch, narrow: Narrow, target_kl: float) -> bool:
    """Whether an update stops whose policy has moved by `MOVED` in both heads of every step."""

    def moved(log_probs: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        log_ratio = log_probs - log_probs.detach() + MOVED
        return log_ratio.exp(), log_ratio

    monkeypatch.setattr(losses, "ratios", moved)
    agent = make_agent("vector", epochs=1, minibatches=1, target_kl=target_kl)
    before = weights_of(agent)
    metrics = agent.update(collect(agent, narrow=narrow))
    stopped = gap(before, weights_of(agent)) == 0
    assert (metrics.stopped_by_kl, metrics.minibatches_taken) == (stopped, 0 if stopped else 1)
    return stopped


@pytest.mark.requirement(9)
@pytest.mark.parametrize(("heads", "stops"), [(1.9, True), (2.1, False)])
def test_the_joint_kl_stops_an_update(heads: float, stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two heads that moved alike, the joint KL is twice that of a head: neither a head's own KL, nor a mean over
    heads, nor the KL of the product of both ratios (four times)."""
    assert stop_after_moving(monkeypatch, allow_all, heads * HEAD_KL / KL_STOP) == stops


@pytest.mark.requirement(84)
@pytest.mark.parametrize(("multiple", "stops"), [(1.45, False), (1.55, True)])
def test_an_update_stops_at_one_and_a_half_times_its_target(
    multiple: float, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first head has a choice, so its KL is that of the policy."""

    def first_head(masks: Masks, step: int) -> None:
        allow_all(masks, step)
        only("action1", 0)(masks, step)

    assert stop_after_moving(monkeypatch, first_head, HEAD_KL / multiple) == stops


# -- rounds that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.requirement(92)
@pytest.mark.parametrize("damage", [0.02, NAN])
def test_a_round_of_another_policy_is_refused(damage: float) -> None:
    """A gap above 1e-2, or NaN, is refused; weights and statistics stay unchanged."""
    agent = trained()
    buffer, before = collect(agent, seed=2), learnt(agent)
    buffer.log_probs[2, 1, 0] += damage
    with pytest.raises(BehaviourGapError, match="other weights, observations, masks or hidden states"):
        agent.update(buffer)
    assert gap(before, learnt(agent)) == 0
    assert agent.updates == 1


@pytest.mark.requirement(92)
def test_a_small_gap_is_reported_and_no_more() -> None:
    """Below the limit, the gap is only a metric."""
    agent = trained()
    buffer = collect(agent, seed=2)
    buffer.log_probs[2, 1, 0] += 0.005
    metrics = agent.update(buffer)
    assert metrics.behaviour_gap == pytest.approx(0.005, abs=1e-5)
    assert metrics.minibatches_taken == 16


def buffers() -> Iterator[tuple[str, TamiyoRolloutBuffer, str]]:
    """Buffers that are not for an agent of the core table, and what is said of them."""
    table, size = TABLES["core"][0], LAYOUT.size
    yield "other heads", TamiyoRolloutBuffer(2, 4, size, TABLES["full"][0], 16), "'tempo': 3.* the policy has .*'op'"
    fewer = discrete_table([head.size for head in table.heads])
    yield "other names", TamiyoRolloutBuffer(2, 4, size, fewer, 16), "'action0': 6.*'slot': 3"
    slots = type(table)((table.heads[0], *(type(h)(h.name, h.size + 1) for h in table.heads[1:])))
    yield "other slots", TamiyoRolloutBuffer(2, 4, size, slots, 16), "'slot': 4.*'slot': 3"
    loose = type(table)((table.heads[0], *(type(h)(h.name, h.size) for h in table.heads[1:])))
    yield "other masks", TamiyoRolloutBuffer(2, 4, size, loose, 16), "their masks or uses differ"
    yield "other columns", TamiyoRolloutBuffer(2, 4, size + 1, table, 16), rf"\({size + 1}, 16\).*\({size}, 16\)"
    yield "other hidden state", TamiyoRolloutBuffer(2, 4, size, table, 8), rf"\({size}, 8\).*\({size}, 16\)"
    yield "nothing in it", TamiyoRolloutBuffer(2, 4, size, table, 16), "empty: collect a round first"


@pytest.mark.requirement(71)
@pytest.mark.parametrize(("name", "buffer", "message"), list(buffers()))
def test_a_buffer_that_does_not_fit_is_refused(name: str, buffer: TamiyoRolloutBuffer, message: str) -> None:
    """The error names both shapes."""
    with pytest.raises(BadValueError, match=message):
        make_agent("core").update(buffer)


# -- acting -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(65)
def test_acting_reads_the_device_once() -> None:
    """One guard covers all heads and envs."""
    agent = make_agent("full")
    hidden_state, masks = agent.network.initial_state(4), agent.table.open_masks(4)
    agent.act(torch.randn(4, LAYOUT.size), masks, hidden_state)  # the table remembers what it looks at once
    with Operations() as operations:
        agent.act(torch.randn(4, LAYOUT.size), masks, hidden_state, epsilon=0.1)
    assert operations.reads == 1


@pytest.mark.requirement(65)
def test_an_empty_mask_is_named() -> None:
    """The guard names the mask although no head is validated by itself."""
    agent = make_agent("core")
    masks = agent.table.open_masks(4)
    only("op", 1)(masks, 0)
    masks["blueprint"][2] = False
    with pytest.raises(EmptyMaskError, match="head 'blueprint' allows env 2 nothing"):
        agent.act(torch.randn(4, LAYOUT.size), masks, agent.network.initial_state(4))


@pytest.mark.requirement(65)
def test_the_mask_of_a_head_that_is_not_used_may_be_empty() -> None:
    """WAIT needs neither slot nor blueprint."""
    agent = make_agent("core")
    masks = {name: torch.zeros_like(mask) for name, mask in agent.table.open_masks(4).items()}
    masks["op"][:, 0] = True
    decision, _, _ = agent.act(torch.randn(4, LAYOUT.size), masks, agent.network.initial_state(4))
    assert bool(decision.forced.all())


@pytest.mark.requirement(65)
@pytest.mark.parametrize(("column", "name"), [(1, "accuracy"), (4, "slot.alpha"), (LAYOUT.size - 1, "critic.control")])
@pytest.mark.parametrize("value", [NAN, -float("inf")])
def test_an_observation_that_is_not_finite_is_named(column: int, name: str, value: float) -> None:
    """The error names env and column, whatever the network computes from it."""
    agent = make_agent("core")
    for weight in agent.network.parameters():
        weight.data.abs_()  # a ReLU would make 0 of −∞
    observations = torch.randn(4, LAYOUT.size)
    observations[3, column] = value
    with pytest.raises(NotFiniteError, match=rf"column {column} \({name}\) of the observation of env 3 is {value}"):
        agent.act(observations, agent.table.open_masks(4), agent.network.initial_state(4))


@pytest.mark.requirement(65)
def test_damaged_weights_are_named() -> None:
    """The error blames the weights, not the observation or the mask."""
    agent = make_agent("core")
    agent.network.critic_out.bias.data.fill_(NAN)
    with pytest.raises(NotFiniteError, match="weights are damaged"):
        agent.act(torch.randn(2, LAYOUT.size), agent.table.open_masks(2), agent.network.initial_state(2))


# -- compiling --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(39)
def test_a_compiler_that_fails_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is issued, and the result equals that of eager mode."""

    def broken(*args: object) -> Callable[..., object]:
        raise OSError("no compiler here")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    eager, compiled = make_agent("vector"), make_agent("vector", compile="default")
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("it was given up"))
    with pytest.warns(RuntimeWarning, match="(?s)torch.compile failed, continuing without it: .*no compiler here"):
        compiled.update(collect(compiled))
    eager.update(collect(eager))
    assert compiled.compile_mode == "off"
    assert gap(weights_of(eager), weights_of(compiled)) == 0


@pytest.mark.requirement(39)
def test_errors_of_the_network_are_not_taken_for_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that also occur in eager mode are raised."""
    agent = make_agent("vector")
    buffer = collect(agent)
    agent.compile_mode = "default"
    monkeypatch.setattr(agent, "_encode", lambda observations: observations.view(-1, 10**6))
    with pytest.raises(RuntimeError, match="invalid for input"):
        agent.update(buffer)
    with pytest.raises(UnknownNameError, match="reduce-overhead"):
        agent.compile("reduce-overhead")  # type: ignore[arg-type]  # wrong on purpose
    assert PPOConfig().compile == "off"
