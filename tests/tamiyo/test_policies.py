"""All policies: what they do is legal, whatever they see, and chance is even."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tamiyo.views import CORE, FULL, GERMINATE, LATER, SLOTS, STEPS, TABLES, WAIT, a_view, quiet
from torch import Tensor

from esper.leyline import BadValueError, SeedStage, SlotConfig, head_preset
from esper.tamiyo import ActionTable, growth_table
from esper.tamiyo.policies import HeuristicTamiyo, Plan, RandomCommitPolicy, RandomPolicy, SchedulePolicy, WaitPolicy
from esper.tamiyo.policy import Policy
from esper.tamiyo.signals import HostView, TrainingSignals

POLICIES: dict[str, Callable[[ActionTable], Policy]] = {
    "wait": WaitPolicy,
    "random": RandomPolicy,
    "random-commit": lambda table: RandomCommitPolicy(table, STEPS),
    "schedule": lambda table: SchedulePolicy(table, SLOTS, LATER),
    "heuristic": lambda table: HeuristicTamiyo(table, SLOTS),
}
EVERY_POLICY = pytest.mark.parametrize("name", POLICIES)


def scrambled(part: Any) -> Any:
    """A view with random values of each tensor's type; Any: a tensor, or a tuple of them."""
    if isinstance(part, HostView):
        return HostView(*(scrambled(p) for p in part))._replace(time_left=part.time_left)
    if not isinstance(part, Tensor):
        return type(part)(*(scrambled(p) for p in part))
    if part.dtype == torch.bool:
        return torch.rand(part.shape) < 0.5
    return torch.randint(-1, 3, part.shape) if part.dtype == torch.long else torch.randn(part.shape) * 5


def random_signals(n: int, step: int) -> TrainingSignals:
    """Any stage, any measurement; costs, errors and counts that can be."""
    signals: TrainingSignals = scrambled(quiet(n, step))
    slots = signals.slots
    measured = {name: getattr(slots, name) for name in ("audition", "contribution")}
    slots = slots._replace(
        stage=torch.randint(len(SeedStage), slots.stage.shape),
        steps_in_stage=torch.randint(9, slots.stage.shape),
        age=torch.randint(9, slots.stage.shape),
        tried=torch.randint(2, slots.stage.shape),
        **{name: each._replace(error=each.error.abs() / 5) for name, each in measured.items()},
    )
    return signals._replace(slots=slots, offers=signals.offers._replace(cost=signals.offers.cost.abs()))


@pytest.mark.requirement(93)
@EVERY_POLICY
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_that_do_not_wait_are_pinned(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy copies from pageable memory without waiting. After the first step nothing is left to copy."""
    table, move = growth_table(head_preset("full"), SLOTS), Tensor.to
    masks = {key: mask.to(device) for key, mask in random_masks(table, 6).items()}
    view = a_view(moved(random_signals(6, 10), device), masks)
    policy, uniform = POLICIES[name](table), torch.rand(6, len(table)).to(device)
    copies: list[tuple[bool, bool]] = []

    def watched(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.device != uniform.device:
            copies.append((bool(kwargs.get("non_blocking")), self.is_pinned()))
        return move(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "to", watched)
    actions, state = policy.act(view, policy.initial_state([0] * 6), uniform)
    assert actions.device == uniform.device
    assert all(pinned for asynchronous, pinned in copies if asynchronous)
    before = len(copies)
    policy.act(view, state, uniform)
    assert len(copies) == before


def moved(part: Any, device: str) -> Any:
    """A view on another device; Any: a tensor, or a tuple of them."""
    return part.to(device) if isinstance(part, Tensor) else type(part)(*(moved(each, device) for each in part))


def random_masks(table: ActionTable, n: int, share: float = 0.5) -> dict[str, Tensor]:
    """Allow about this share, WAIT always, and only what can be completed to a legal action."""
    masks = {head.name: torch.rand(n, *table.mask_shape(head)) < share for head in table.heads}
    for head in table.heads[3:]:
        masks[head.name][torch.arange(n), torch.randint(head.size, (n,))] = True
    masks["slot"][:, GERMINATE] &= masks["blueprint"].any(-1)
    masks["op"] &= masks["slot"].any(-1)
    masks["op"][:, WAIT] = True
    return masks


def assert_legal(table: ActionTable, actions: Tensor, masks: dict[str, Tensor]) -> None:
    """Along the conditional masks; heads that do not matter keep their placeholder."""
    causal = table.relevance[actions[:, 0]]
    for env, action in enumerate(actions.tolist()):
        chosen = dict(zip(table.names, action, strict=True))
        for place, head in enumerate(table.heads):
            if not causal[env, place]:
                assert chosen[head.name] == head.placeholder, head.name
                continue
            mask = masks[head.name][env] if head.given is None else masks[head.name][env, chosen[head.given]]
            assert mask[chosen[head.name]], (head.name, chosen)


# -- all policies -----------------------------------------------------------------------------------------------------


@EVERY_POLICY
@pytest.mark.parametrize("preset", TABLES)
def test_each_is_a_policy(name: str, preset: str) -> None:
    policy = POLICIES[name](TABLES[preset])
    assert isinstance(policy, Policy)
    assert policy.table is TABLES[preset]


@EVERY_POLICY
@pytest.mark.parametrize("preset", TABLES)
@settings(max_examples=15, deadline=None)
@given(rng_seed=st.integers(0, 2**32), n=st.integers(1, 9), share=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_actions_are_legal(name: str, preset: str, rng_seed: int, n: int, share: float) -> None:
    """Whatever is seen, even what no fleet would show."""
    torch.manual_seed(rng_seed)
    table = TABLES[preset]
    policy = POLICIES[name](table)
    state = policy.initial_state(list(range(n)))
    for step in range(0, STEPS, 3):
        masks = random_masks(table, n, share)
        actions, state = policy.act(a_view(random_signals(n, step), masks, step), state, torch.rand(n, len(table)))
        assert actions.shape == (n, len(table)) and actions.dtype == torch.long
        assert_legal(table, actions, masks)


@EVERY_POLICY
def test_the_same_draws_give_the_same_actions(name: str) -> None:
    """Pairing: nothing but `uniform` is random, and an env does not see its neighbours."""
    n = 40
    policy = POLICIES[name](FULL)
    signals, masks, uniform = random_signals(n, 8), random_masks(FULL, n), torch.rand(n, len(FULL))
    view, state = a_view(signals, masks, 8), policy.initial_state(list(range(n)))
    together, _ = policy.act(view, state, uniform)
    torch.manual_seed(1)
    again, _ = policy.act(view, policy.initial_state(list(range(n))), uniform)
    assert torch.equal(together, again)

    def one(part: Any, env: int) -> Any:  # Any: a tensor, or a tuple of them
        return part[env : env + 1] if isinstance(part, Tensor) else type(part)(*(one(p, env) for p in part))

    for env in range(n):
        alone = a_view(one(signals, env), {name: mask[env : env + 1] for name, mask in masks.items()}, 8)
        actions, _ = policy.act(alone, policy.initial_state([env]), uniform[env : env + 1])
        assert torch.equal(actions[0], together[env])


def test_waiting() -> None:
    """WAIT, and placeholders everywhere else."""
    policy = WaitPolicy(FULL)
    actions, _ = policy.act(a_view(quiet(3), FULL.open_masks(3)), None, torch.rand(3, len(FULL)))
    assert actions.tolist() == [[WAIT, 0, 0, 0, 0, 2, 0, 0]] * 3


def test_a_table_for_other_slots_is_refused() -> None:
    fewer = SlotConfig(SLOTS.slots[:2])
    with pytest.raises(BadValueError, match="head 'slot' has 3 choices for 2 slots"):
        SchedulePolicy(CORE, fewer, Plan())
    with pytest.raises(BadValueError, match="head 'slot' has 3 choices for 2 slots"):
        HeuristicTamiyo(CORE, fewer)


# -- chance -----------------------------------------------------------------------------------------------------------


def test_random_is_uniform_head_by_head() -> None:
    """WAIT or GERMINATE, 1/2 each; then slot 0 with one blueprint or slot 2 with two of them: 1/4, 1/8, 1/8."""
    n = 8000
    masks = {name: torch.zeros_like(mask) for name, mask in CORE.open_masks(n).items()}
    masks["op"][:, [WAIT, GERMINATE]] = True
    masks["slot"][:, GERMINATE, [0, 2]] = True
    masks["blueprint"][:, 0, 1] = True
    masks["blueprint"][:, 2, :2] = True
    actions, _ = RandomPolicy(CORE).act(a_view(quiet(n), masks), None, torch.rand(n, len(CORE)))
    kinds, counts = actions.unique(dim=0, return_counts=True)
    shares = {tuple(kind): count / n for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)}
    expected = {(WAIT, 0, 0): 1 / 2, (GERMINATE, 0, 1): 1 / 4, (GERMINATE, 2, 0): 1 / 8, (GERMINATE, 2, 1): 1 / 8}
    assert shares == pytest.approx(expected, abs=0.03)  # five standard errors of 1/2
