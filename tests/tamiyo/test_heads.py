"""Masked choices, and the tables of heads that actions are composed of."""

import math
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import esper
from esper.leyline import RELEVANCE, BadValueError, LifecycleOp, UnknownNameError, head_preset
from esper.tamiyo import ActionHead, ActionTable, EmptyMaskError, MaskedCategorical, discrete_table, growth_table
from esper.tamiyo.heads import HeadKind
from esper.tamiyo.policy import used_heads
from esper.tolaria import get_task

LAST_DRAW = 1 - 2**-24
"""The largest float32 below 1."""
LOGITS = torch.tensor([0.0, math.log(2), math.log(3)])
"""Odds 1 : 2 : 3."""
ENDS = torch.tensor([True, False, True])
CPU_AND_CUDA = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def random_masks(n: int, size: int) -> Tensor:
    """(n, size), none of them empty."""
    mask = torch.rand(n, size) < 0.4
    return mask | torch.nn.functional.one_hot(torch.randint(size, (n,)), size).bool()


# -- masked choices ---------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """Odds of 1 : 3 remain: probabilities 1/4 and 3/4."""
    choice = MaskedCategorical(LOGITS, ENDS)
    assert choice.probs.tolist() == pytest.approx([0.25, 0.0, 0.75])
    assert choice.log_prob(torch.tensor(0)).item() == pytest.approx(math.log(0.25))
    assert choice.log_prob(torch.tensor(2)).item() == pytest.approx(math.log(0.75))
    assert choice.counts.item() == 2
    assert choice.mode().item() == 2
    # 1/4 · log2(4) + 3/4 · log2(4/3) = 1/2 + 0.3113 of the one bit that two choices can have.
    assert choice.entropy().item() == pytest.approx(0.8113, abs=1e-4)
    # 0 and ln 3 lie ln 3 / 2 = 0.5493 from their mean.
    assert choice.spread().item() == pytest.approx(0.5493**2, abs=1e-4)


def test_by_hand_with_exploration() -> None:
    """ε = 0.2 over two legal choices: 0.8 · 1/4 + 0.2 · 1/2 = 0.3 and 0.8 · 3/4 + 0.1 = 0.7."""
    choice = MaskedCategorical(LOGITS, ENDS, 0.2)
    assert choice.probs.tolist() == pytest.approx([0.3, 0.0, 0.7])
    assert choice.log_prob(torch.tensor(0)).item() == pytest.approx(math.log(0.3))


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.9])
def test_what_is_illegal_has_probability_zero(epsilon: float) -> None:
    """Exactly, however large its logit; the rest sums to 1."""
    mask = random_masks(200, 7)
    probs = MaskedCategorical(torch.randn(200, 7) * 10 + 100.0 * ~mask, mask, epsilon).probs
    assert torch.equal(probs > 0, mask)
    assert torch.allclose(probs.sum(-1), torch.ones(200))


@pytest.mark.requirement(13)
@pytest.mark.parametrize("legal", range(2, 9))
def test_uniform_choices_have_entropy_one(legal: int) -> None:
    """The entropy is 1 for every m ≥ 2, whatever else is illegal."""
    mask = torch.arange(8) < legal
    assert MaskedCategorical(torch.full((8,), 3.0), mask).entropy().item() == pytest.approx(1.0)
    assert MaskedCategorical(torch.full((8,), 3.0), mask, 0.1).entropy().item() == pytest.approx(1.0)
    assert 0 < MaskedCategorical(torch.arange(8.0), mask).entropy().item() < 0.9


@pytest.mark.requirement(13)
def test_entropy_is_normalised_in_one_place() -> None:
    """There is no other definition, no table of normalisers and no torch distribution."""
    marks = re.compile(r"def (?:\w+_)?entropy\(self|max_entrop|(?i:normali[sz]e\w*_entrop)|/ .*\blog2?\(|distributions")
    found = [
        (path.name, line.strip())
        for path in Path(esper.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if marks.search(line)
    ]
    assert [name for name, _ in found] == ["heads.py"] * 2, found


@pytest.mark.requirement(70)
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_one_legal_choice_has_entropy_zero(epsilon: float) -> None:
    """Entropy and gradient are exactly 0, and the gradients of other rows stay finite."""
    logits = torch.tensor([[3.0, -1.0, 2.0], [3.0, -1.0, 2.0]], requires_grad=True)
    choice = MaskedCategorical(logits, torch.tensor([[False, True, False], [True, True, False]]), epsilon)
    entropy = choice.entropy()
    assert entropy[0].item() == 0
    assert choice.log_prob(torch.tensor([1, 0]))[0].item() == pytest.approx(0.0, abs=1e-7)
    entropy.sum().backward()
    assert logits.grad is not None
    assert logits.grad[0].tolist() == [0, 0, 0]
    assert logits.grad[1].isfinite().all()
    assert logits.grad[1, 0] != 0


@pytest.mark.requirement(65)
def test_empty_masks_raise() -> None:
    """With validation on, the error says where the mask is empty."""
    mask = torch.tensor([[[True, False], [False, False]]])
    with pytest.raises(EmptyMaskError, match=re.escape("[0, 1] allows none of 2")):
        MaskedCategorical(torch.zeros(1, 2, 2), mask)


@pytest.mark.requirement(65)
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
def test_empty_masks_show_in_the_counts(epsilon: float) -> None:
    """With validation off, the count is 0 and the drawn action is still an index."""
    choice = MaskedCategorical(torch.zeros(2, 3), torch.tensor([[False] * 3, [True] * 3]), epsilon, validate=False)
    assert choice.counts.tolist() == [0, 3]
    assert choice.entropy()[0].item() == 0
    assert choice.spread().tolist() == [0, 0]
    for drawn in (choice.mode(), choice.sample(torch.tensor([LAST_DRAW] * 2))):
        assert ((drawn >= 0) & (drawn < 3)).all()


@pytest.mark.requirement(65)
def test_without_validation_nothing_is_read_back() -> None:
    """Tensors on the meta device have no values, so any read would raise."""
    logits, mask = torch.zeros(4, 3, device="meta"), torch.ones(4, 3, dtype=torch.bool, device="meta")
    choice = MaskedCategorical(logits, mask, 0.1, validate=False)
    drawn = choice.sample(torch.zeros(4, device="meta"))
    for result in (choice.log_prob(drawn), choice.mode(), choice.entropy(), choice.spread()):
        assert tuple(result.shape) == (4,)
    with pytest.raises(RuntimeError, match="meta"):
        MaskedCategorical(logits, mask, 0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_raise(bad: float) -> None:
    """With validation on, legal or not."""
    with pytest.raises(BadValueError, match=r"logit at \[1\] is not finite"):
        MaskedCategorical(torch.tensor([0.0, bad, 0.0]), ENDS)


def test_arguments_that_make_no_sense_raise() -> None:
    """A mask of another shape would be broadcast; with ε = 1 nothing could be learnt."""
    with pytest.raises(BadValueError, match="mask of shape"):
        MaskedCategorical(torch.zeros(2, 3), ENDS)
    for epsilon in (-0.1, 1.0, math.nan):
        with pytest.raises(BadValueError, match="epsilon"):
            MaskedCategorical(LOGITS, ENDS, epsilon)


def test_draws_have_the_right_frequencies() -> None:
    """1000 evenly spaced draws; probabilities 0.3, 0 and 0.7, in the order of the choices."""
    draws = (torch.arange(1000) + 0.5) / 1000
    drawn = MaskedCategorical(LOGITS.expand(1000, 3), ENDS.expand(1000, 3), 0.2).sample(draws)
    assert drawn.tolist() == [0] * 300 + [2] * 700


@given(
    st.lists(st.tuples(st.floats(-1e4, 1e4, width=32), st.booleans()), min_size=1, max_size=12),
    st.integers(0, 11),
    st.sampled_from([0.0, 0.05]),
    st.floats(0, LAST_DRAW, width=32),
)
def test_draws_are_legal(choices: list[tuple[float, bool]], legal: int, epsilon: float, draw: float) -> None:
    """Whatever the logits, by any draw, the first, the last, and one that was rounded up to 1; none is a wonder."""
    mask = torch.tensor([allowed or place == legal % len(choices) for place, (_, allowed) in enumerate(choices)])
    found = MaskedCategorical(torch.tensor([logit for logit, _ in choices]), mask, epsilon)
    for uniform in (0.0, draw, LAST_DRAW, 1.0):
        drawn = found.sample(torch.tensor(uniform))
        assert mask[drawn]
        assert found.log_prob(drawn) > -104  # the least float32 above 0 is exp(−103.3)
    assert mask[found.mode()]
    assert all(value.isfinite() for value in (found.entropy(), found.spread()))


@pytest.mark.parametrize("device", CPU_AND_CUDA)
def test_draws_at_the_edges_are_legal(device: str) -> None:
    """Draws that equal a cumulated probability, where sums taken in another order would let illegal choices slip in."""
    for size in (5, 16, 40):
        mask = random_masks(50_000, size).to(device)
        found = MaskedCategorical(torch.randn(50_000, size, device=device), mask, validate=False)
        sums = found.probs.cumsum(-1)
        edges = (sums / sums[:, -1:]).gather(1, torch.randint(size, (50_000, 1), device=device)).squeeze(1)
        drawn = found.sample(edges.clamp(max=LAST_DRAW))
        assert mask.gather(1, drawn.unsqueeze(1)).all()


@pytest.mark.invariant(8)
@given(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), st.sampled_from([0.0, 0.05, 0.5]))
def test_every_legal_choice_has_a_gradient(values: list[float], epsilon: float) -> None:
    """Each legal choice has a gradient at its own logit and none at illegal ones."""
    for chosen in range(len(values)):
        logits = torch.tensor([*values, 1.0], requires_grad=True)
        mask = torch.tensor([True] * len(values) + [False])
        MaskedCategorical(logits, mask, epsilon).log_prob(torch.tensor(chosen)).backward()
        assert logits.grad is not None
        assert logits.grad[chosen] > 1e-6
        assert logits.grad[-1] == 0


def test_spread_pulls_a_collapsed_head_back() -> None:
    """Its gradient points to the mean and grows with the distance; that of the entropy is gone. Illegal: none."""
    logits = torch.tensor([60.0, 0.0, 5.0], requires_grad=True)
    choice = MaskedCategorical(logits, torch.tensor([True, True, False]))
    (pull,) = torch.autograd.grad(choice.spread(), logits, retain_graph=True)
    # Mean of (±30)²: the derivative by a gap is 2 · 30 / 2.
    assert pull.tolist() == pytest.approx([30, -30, 0])
    (none,) = torch.autograd.grad(choice.entropy(), logits)
    assert none.abs().max() < 1e-20


# -- tables -----------------------------------------------------------------------------------------------------------


def head(name: str = "b", size: int = 2, kind: HeadKind = "linear", **fields: object) -> ActionHead:
    """A head that follows a first one of three choices, "a"."""
    return ActionHead(name, size, kind, **fields)  # type: ignore[arg-type]  # any field


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (head("a"), "unique"),
        (head(size=0), "'b': size 0"),
        (head(placeholder=2), "placeholder 2 is none of 2"),
        (head(placeholder=-1), "placeholder -1"),
        (head(matters=(True, False)), "has 2 entries in `matters`; give one for each of the 3 choices of 'a'"),
        (head(given="c"), "unknown head before 'b' 'c'; allowed: a"),
        (head(given="b"), "unknown head before 'b' 'b'; allowed: a"),
        (head(kind="offer"), "put a pointer head before it"),
        (head(kind="quadratic"), "allowed: linear, pointer, offer"),  # type: ignore[arg-type]  # the point of the test
    ],
)
def test_tables_that_make_no_sense_are_refused(second: ActionHead, message: str) -> None:
    """Where they are made."""
    with pytest.raises((BadValueError, UnknownNameError), match=re.escape(message)):
        ActionTable((ActionHead("a", 3), second))


def test_the_first_head_depends_on_nothing() -> None:
    """It says what the others mean."""
    for first in (ActionHead("a", 1, matters=(True,)), ActionHead("a", 1, given="a")):
        with pytest.raises(BadValueError, match="'a', always matters"):
            ActionTable((first,))
    with pytest.raises(BadValueError, match="at least one head"):
        ActionTable(())


@pytest.mark.requirement(59)
@pytest.mark.parametrize("preset", ["core", "full"])
def test_relevance_of_a_growth_table(preset: str) -> None:
    """One row per op, equal to Leyline's table wherever the preset has the head."""
    slots = get_task("digits_blind").slot_config
    table = growth_table(head_preset(preset), slots)
    assert tuple(table.relevance.shape) == (len(LifecycleOp), len(table))
    for op in LifecycleOp:
        used = {name for name, matters in zip(table.names, table.relevance[op].tolist(), strict=True) if matters}
        assert used == RELEVANCE[op] & set(table.names)
    assert [table.heads[table.index(name)].size for name in ("op", "slot", "blueprint")] == [6, 3, 7]
    assert table.heads[0].matters is None


@pytest.mark.requirement(60)
@pytest.mark.parametrize("device", CPU_AND_CUDA)
@pytest.mark.parametrize("lead", [(6,), (3, 2)])
def test_used_heads(lead: tuple[int, ...], device: str) -> None:
    """Ops (…) → (…, heads) on their device, for envs and for envs × steps."""
    table = growth_table(head_preset("core"), get_task("digits_blind").slot_config)
    ops = torch.tensor(list(LifecycleOp), device=device).view(lead)
    used = used_heads(table, ops)
    assert used.device == ops.device
    # Slots matter for all but WAIT (0), blueprints for GERMINATE (1) alone.
    wanted = torch.stack([ops >= 0, ops != LifecycleOp.WAIT, ops == LifecycleOp.GERMINATE], -1)
    assert torch.equal(used, wanted)
    assert used_heads(discrete_table((6, 2, 2)), ops).all()


def test_masks_of_a_growth_table() -> None:
    """Slots given the op, blueprints given the slot; open ones pass the check."""
    table = growth_table(head_preset("core"), get_task("digits_blind").slot_config)
    masks = table.open_masks(4)
    assert {name: tuple(mask.shape) for name, mask in masks.items()} == {
        "op": (4, 6),
        "slot": (4, 6, 3),
        "blueprint": (4, 3, 7),
    }
    table.check_masks(masks, 4)
    for bad, message in (
        ({**masks, "op": masks["op"].float()}, "'op' is torch.float32"),
        ({**masks, "slot": masks["slot"][:, 0]}, r"'slot' is .* of shape \(4, 3\)"),
        ({**masks, "blend": masks["op"]}, "blend"),
    ):
        with pytest.raises(BadValueError, match=message):
            table.check_masks(bad, 4)
    with pytest.raises(UnknownNameError, match="unknown head 'depth'; allowed: op, slot, blueprint"):
        table.index("depth")
