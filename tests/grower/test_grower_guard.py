"""A model that diverges through growth goes back to its last healthy step, without its youngest seeds."""

import copy
import math
from typing import Any

import pytest
import torch
from loops import digits, equal, loader, make, parameters_of, plan, spoil, through_disk, train_epoch
from torch import Tensor, nn

from esper.grower import Grower, GrowthRecord
from esper.grower.container import CHILD
from esper.grower.guard import Guard
from esper.leyline import BadValueError, SeedStage

DATA = digits(200)
VALIDATION = digits(300)[0][200:], digits(300)[1][200:]
BIRTHS = plan((1, "stage1", "conv_light"), (3, "stage2", "conv_light"))


def grow(grower: Grower, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> GrowthRecord:
    """Train and step; returns the last record."""
    for epoch in range(first, last):
        train_epoch(model, optimizer, DATA, epoch)
        record = grower.step(loader(VALIDATION))
    return record


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {names[p]: state["momentum_buffer"].clone() for p, state in optimizer.state.items()}


@pytest.mark.parametrize(("value", "symptom"), [(math.nan, "NOT_FINITE"), (1e4, "DIVERGENCE")])
def test_growth_is_undone(value: float, symptom: str) -> None:
    """Weights, statistics and momenta are those of the last step, to the bit; only the youngest seed is gone."""
    model, optimizer, grower = make(policy=BIRTHS, budget=5000)
    grow(grower, model, optimizer, 0, 4)
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    state = momenta(model, optimizer)
    train_epoch(model, optimizer, DATA, 4)
    assert not equal(weights.items(), parameters_of(model).items())
    spoil(model, value)
    record = grower.step(loader(VALIDATION))
    assert record.panic == symptom and record.loss is not None
    assert record.remarks == (f"the loss was {record.loss:.4g}: restored step 4 and pruned conv_light behind stage2",)
    assert f"step 5: waited (600 of 5,000); {record.remarks[0]}" == str(record)
    child = f"{CHILD}.stage2"
    for before, after in ((weights, parameters_of(model)), (state, momenta(model, optimizer))):
        assert equal([pair for pair in before.items() if not pair[0].startswith(child)], after.items())
    assert equal(
        [pair for pair in buffers.items() if not pair[0].startswith(child)],
        [pair for pair in model.named_buffers() if not pair[0].startswith(child)],
    )
    assert grower.report().slots["stage2"].stage is SeedStage.PRUNED
    assert grow(grower, model, optimizer, 5, 7).panic is None


def test_norms_that_lag_behind_are_no_divergence() -> None:
    """A young seed changes quickly, and running statistics follow late; with those of the last inputs the loss is fine.

    The seeds and their training stay, and the record has the loss that the model has.
    """
    model, optimizer, grower = make(policy=BIRTHS, budget=5000)
    grow(grower, model, optimizer, 0, 4)
    train_epoch(model, optimizer, DATA, 4)
    weights = parameters_of(model)
    model.get_submodule("stage2.1").get_buffer("running_var").mul_(1e-6)
    record = grower.step(loader(VALIDATION))
    assert record.panic is None and record.loss is not None and record.loss > 20
    assert equal(weights.items(), parameters_of(model).items())


def test_all_seeds_of_one_birth_are_pruned() -> None:
    """Which of them it was is unknown. The one that is left is next."""
    births = plan((1, "stage1", "conv_light"), (1, "stage2", "conv_light"))
    model, optimizer, grower = make(policy=births, budget=5000)
    grow(grower, model, optimizer, 0, 3)
    train_epoch(model, optimizer, DATA, 3)
    spoil(model, math.nan)
    (remark,) = grower.step(loader(VALIDATION)).remarks
    assert remark.endswith("restored step 3 and pruned conv_light behind stage1, conv_light behind stage2")
    assert grower.report().budget_left == 5000


def test_the_older_seed_is_next() -> None:
    """If the model diverges again without the youngest."""
    model, optimizer, grower = make(policy=BIRTHS, budget=5000)
    grow(grower, model, optimizer, 0, 4)
    for slot in ("stage2", "stage1"):
        spoil(model, math.nan, slot)
        assert f"pruned conv_light behind {slot}" in grower.step(loader(VALIDATION)).remarks[0]
    assert not getattr(model, CHILD).live()


def test_a_loss_of_the_users_own_as_a_number() -> None:
    """It is judged as well; an accuracy only if it is not finite."""
    model, optimizer, grower = make(
        policy=BIRTHS, budget=5000, loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1])
    )
    for loss in (2.0, 1.9, 1.8):
        train_epoch(model, optimizer, DATA)
        grower.step(loss)
    assert grower.step(5.6).panic is None  # below three times the mean
    assert grower.step(50.0).panic == "DIVERGENCE"
    model, optimizer, grower = make(policy=BIRTHS, budget=5000)
    for accuracy in (99.9, 99.9, 99.9, 95.0):
        train_epoch(model, optimizer, DATA)
        assert grower.step(accuracy).panic is None
    assert grower.step(math.nan).panic == "NOT_FINITE"


def test_without_seeds_it_is_an_error() -> None:
    """Growth is not to blame, and there is nothing to undo."""
    model, optimizer, grower = make(policy="wait")
    grow(grower, model, optimizer, 0, 2)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    with pytest.raises(BadValueError, match="not finite for 100 of 100"):
        grower.step(loader(VALIDATION))


def test_nothing_is_copied_while_nothing_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the first seed nor after the last was committed."""

    def policy(report: Any) -> list[tuple[str, ...]]:
        ready = report.slots["stage1"].stage is SeedStage.HOLDING and report.step >= 5
        return [*BIRTHS(report)[:1], *([("fossilize", "stage1")] if ready else [])] if report.step != 3 else []

    model, optimizer, grower = make(policy=policy, budget=5000)
    taken = []
    tensors = Guard._tensors

    def counted(self: Guard) -> dict[str, Tensor]:
        taken.append(1)
        return tensors(self)

    monkeypatch.setattr(Guard, "_tensors", counted)
    counts = []
    for epoch in range(7):
        grow(grower, model, optimizer, epoch, epoch + 1)
        counts.append(len(taken))
        assert (grower._decider is not None) and (grower._decider.guard.snapshot is None) == (
            all(state.stage is SeedStage.FOSSILIZED for state in grower._decider.growing.live().values())
        )
    assert grower.report().slots["stage1"].stage is SeedStage.FOSSILIZED
    assert counts[-1] == counts[-2] < 6
    idle, own, waiting = make(policy="wait")
    before = len(taken)
    grow(waiting, idle, own, 0, 3)
    assert len(taken) == before


@pytest.mark.parametrize("cut", [4, 5])
def test_a_resumed_run_undoes_the_same(cut: int) -> None:
    """The snapshot of a resumed run is the state that it was resumed from."""

    def run(first: int, last: int, saved: Any = None) -> tuple[Any, list[str], dict[str, Tensor]]:
        model, optimizer, grower = make(policy=BIRTHS, budget=5000)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        lines = []
        for epoch in range(first, last):
            train_epoch(model, optimizer, DATA, epoch)
            if epoch == 4:
                spoil(model, 1e4, "stage2")
            elif epoch == 6:
                spoil(model, math.nan, "stage1")
            lines.append(str(grower.step(loader(VALIDATION))))
        state = through_disk({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return state, lines, dict(model.state_dict())

    _, whole, wanted = run(0, 8)
    assert sum("restored step" in line for line in whole) == 2
    saved, begun, _ = run(0, cut)
    _, rest, found = run(cut, 8, saved)
    assert begun + rest == whole
    assert equal(wanted.items(), found.items())


def test_learning_rates_follow_their_schedule() -> None:
    """A restored step does not turn them back."""
    model, optimizer, grower = make(policy=BIRTHS, budget=5000)
    grow(grower, model, optimizer, 0, 2)
    optimizer.param_groups[0]["lr"] = 0.01
    spoil(model, math.nan, "stage1")
    assert grower.step(loader(VALIDATION)).panic == "NOT_FINITE"
    assert optimizer.param_groups[0]["lr"] == 0.01


def test_optimizers_with_nested_state() -> None:
    """Adam's counters stay where they are, and what is not a tensor is copied."""
    model, optimizer, grower = make(policy=BIRTHS, budget=5000)
    grow(grower, model, optimizer, 0, 2)
    parameter = next(model.parameters())
    optimizer.state[parameter] |= {"nested": {"list": [torch.ones(2), 3], "word": "a"}, "none": None}
    assert grower._decider is not None
    grower._decider.guard.take(2)
    before = copy.deepcopy(optimizer.state[parameter])
    optimizer.state[parameter]["nested"]["list"][0].zero_()
    grower._decider.guard.restore()
    restored = optimizer.state[parameter]
    assert torch.equal(restored["nested"]["list"][0], before["nested"]["list"][0])
    assert (restored["nested"]["list"][1], restored["nested"]["word"], restored["none"]) == (3, "a", None)
