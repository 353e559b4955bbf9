"""Frozen models: what is chosen before anything grows, where seeds are born, and what does not drift."""

from typing import Any

import pytest
import torch
from frozen import VALIDATION, FrozenGPT, adapt, base, frozen_cnn, learning, outputs, text_batches, train_epoch
from loops import equal, loader, parameters_of, plan, through_disk
from torch import nn
from torch.nn import functional as F

from esper.grower import Grower
from esper.grower.adapting import Adaptation, head_steps, stages_of
from esper.grower.container import CHILD
from esper.grower.records import GrowthReport, Offer
from esper.leyline import BadValueError, Measurement, SeedReport, SeedStage


def stage(steps: int, **content: Any) -> Adaptation:
    """An adaptation with two stages."""
    return Adaptation(steps, (("stage1",), ("stage2",)), **content)


def report(offers: dict[str, dict[str, int]], budget: int, step: int = 2, **seeds: Any) -> GrowthReport:
    """What the rule sees, with empty slots."""
    empty = {"blueprint": None, "style": None, "alpha": 0.0, "alpha_target": 1.0, "ramping": False}
    empty |= {"steps_in_stage": 0, "age": 0, "cooldown": 0, "parameters": 0, "gradient_norm": None}
    empty |= {"audition": None, "contribution": None, "germinations": 0}
    slots = {name: SeedReport(slot_id=name, **{"stage": SeedStage.DORMANT, **empty, **seeds}) for name in offers}
    costs = {name: {each: Offer(cost, 0.0) for each, cost in own.items()} for name, own in offers.items()}
    return GrowthReport(step, 12, budget, 50.0, 1.0, slots, costs)


# -- the order --------------------------------------------------------------------------------------------------------


def test_the_order() -> None:
    """Statistics after the first step, the temperature and the seeds when the head is trained, the verdict later."""
    _, grower, records = adapt()
    assert head_steps(8) == 2
    assert "norm statistics (loss" in records[0].remarks[0] and not records[0].actions
    assert records[1].remarks[0].startswith("logits are compared at temperature")
    born = {action.slot: action.blueprint for action in records[1].actions}
    assert born == {"stage1.0": "lora_conv_4", "stage1.1": "affine", "stage2.0": "lora_conv_2", "stage2.1": "affine"}
    assert records[1].grown == 292 <= 400
    assert {action.op for record in records[2:] for action in record.actions} <= {"fossilize", "prune"}
    assert (records[-1].accuracy or 0) > 2 * (records[1].accuracy or 100)
    assert grower.report().budget_left == 400 - records[-1].grown


def test_recalibrated_statistics_are_chosen_where_they_help() -> None:
    """Inverted images have other statistics. For images as they were, those of ten images are worse."""
    inverted = adapt(until=1)[0]
    before, after = (dict(model.named_buffers())["stage1.1.running_mean"] for model in (frozen_cnn(), inverted))
    assert not torch.equal(before, after)
    torch.manual_seed(0)
    same = frozen_cnn()
    grower = Grower(same, learning(same), budget=400, steps=8)
    images, labels = 1 - VALIDATION[0], VALIDATION[1]
    same.train()
    same(images[:10])  # too few to know their statistics
    record = grower.step([(images, labels)])
    assert record.remarks[0].startswith("original norm statistics")
    assert torch.equal(dict(same.named_buffers())["stage1.1.running_mean"], before)


def test_statistics_do_not_drift() -> None:
    """In train mode, with every second pass normalised by its minibatch: not one buffer of a frozen norm changes."""
    model, optimizer = frozen_cnn(), None
    optimizer = learning(model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    grower = Grower(model, optimizer, budget=400, steps=8)
    train_epoch(model, optimizer)
    assert model.training and not model.stage1[1].training
    own = [(name, buffer) for name, buffer in model.named_buffers() if name in before]
    assert equal(own, before.items())
    chosen = grower.step(loader(VALIDATION)).remarks[0].split()[0]
    fixed = {name: buffer.clone() for name, buffer in model.named_buffers() if name in before}
    train_epoch(model, optimizer, 1)
    assert chosen == "recalibrated"
    assert equal(fixed.items(), [(name, buffer) for name, buffer in model.named_buffers() if name in before])


def test_every_second_pass_has_its_own_statistics() -> None:
    """Until the choice; minibatches that are too small, and evaluation, never have."""
    model = frozen_cnn()
    grower = Grower(model, learning(model), budget=400, steps=8)
    model.train()
    x = VALIDATION[0][:16]
    first, second, third, small = (model(each).detach() for each in (x, x, x, x[:4]))
    assert torch.equal(first, third) and not torch.allclose(first, second)
    assert torch.allclose(small, first[:4], atol=1e-5)
    assert torch.equal(outputs(model, x), outputs(model, x))
    grower.step(loader(VALIDATION))
    assert torch.equal(model(x), model(x))


def test_frozen_weights_stay() -> None:
    """Only the head and the seeds learn; seeds of frozen layers are in the head's group."""
    model, grower, _ = adapt(until=4)
    frozen = {name: value for name, value in parameters_of(model).items() if name.startswith("stage")}
    assert equal(frozen.items(), [(name, p) for name, p in base().named_parameters() if name.startswith("stage")])
    held = {id(p) for group in grower.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(bool(p.any()) for p in getattr(model, CHILD).parameters())


def test_a_language_model() -> None:
    """Norms without bias, linear layers, tied embeddings, which are no place: it learns to count, and is merged."""
    torch.manual_seed(0)
    model = FrozenGPT()
    optimizer = learning(model)
    grower = Grower(model, optimizer, budget=1500, steps=8)
    records = []
    for _ in range(8):
        model.train()
        for x, y in text_batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
        records.append(grower.step(text_batches()))
    kinds = {action.blueprint for action in records[1].actions}
    assert kinds == {"scale", "lora_linear_1", "lora_linear_2"}
    assert not any(action.slot in ("norm", "head", "embedding") for action in records[1].actions)
    assert (records[-1].loss or 9) < (records[1].loss or 0)
    tokens = text_batches()[0][0]
    before, names = outputs(model, tokens), [name for name in model.state_dict() if CHILD not in name]
    grower.merge()
    assert list(model.state_dict()) == names
    assert torch.allclose(outputs(model, tokens), before, atol=1e-5)


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stopped", [1, 4])
def test_resumed(stopped: int) -> None:
    """From both state dicts, before the seeds are born and after: equal to the bit to a run without a break."""
    whole, _, expected = adapt(until=6)
    model, grower, _ = adapt(until=stopped)
    saved = through_disk({"model": model.state_dict(), "optimizer": grower.optimizer.state_dict()})
    again = frozen_cnn()
    optimizer = learning(again)
    resumed = Grower(again, optimizer, budget=400, steps=8)
    again.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    records = []
    for epoch in range(stopped, 6):
        train_epoch(again, optimizer, epoch)
        records.append(resumed.step(loader(VALIDATION)))
    assert list(map(str, records)) == list(map(str, expected[stopped:]))
    assert equal(parameters_of(whole).items(), parameters_of(again).items())
    assert equal(whole.named_buffers(), again.named_buffers())


# -- the rule ---------------------------------------------------------------------------------------------------------

OFFERS = {
    "stem": {"lora_conv_1": 43, "lora_conv_2": 86},
    "stage1.norm": {"affine": 32},
    "stage1.a": {"lora_conv_1": 160, "lora_conv_2": 320, "lora_conv_4": 640},
    "stage1.b": {"lora_conv_1": 160, "lora_conv_2": 320},
    "stage2.norm": {"affine": 64},
    "stage2.a": {"lora_conv_1": 320, "lora_conv_2": 640},
}


def test_births_by_hand() -> None:
    """Norms cost 96. Rank 1 costs 43, 320 and 320 for the stem and the stages, rank 2 as much again."""
    births = stage(12).births
    assert births(report(OFFERS, 40)) == {"stage1.norm": "affine"}
    assert births(report(OFFERS, 96 + 85)) == {
        **{"stage1.norm": "affine", "stage2.norm": "affine"},
        "stem": "lora_conv_1",
    }
    first = {name: "lora_conv_1" for name in ("stem", "stage1.a", "stage1.b")}
    norms = {"stage1.norm": "affine", "stage2.norm": "affine"}
    assert births(report(OFFERS, 96 + 43 + 320)) == norms | first
    assert births(report(OFFERS, 96 + 43 + 320 + 320)) == norms | first | {"stage2.a": "lora_conv_1"}
    second = births(report(OFFERS, 96 + 43 + 320 + 320 + 43 + 320))
    assert second == norms | {name: "lora_conv_2" for name in first} | {"stage2.a": "lora_conv_1"}
    everything = births(report(OFFERS, 10_000))
    assert (everything["stage1.a"], everything["stage1.b"]) == ("lora_conv_4", "lora_conv_2")
    assert births(report({"stage1": {"norm": 48, "conv_small": 304}}, 100)) == {"stage1": "norm"}


def test_births_wait_for_the_head_and_happen_once() -> None:
    """After a sixth of the steps, and not so late that no seed could be judged."""
    rule = stage(12).rule
    assert rule(report(OFFERS, 200, step=1)) == []
    assert rule(report(OFFERS, 200, step=2))[0][:2] == ("germinate", "stage1.norm")
    assert rule(report(OFFERS, 200, step=10)) == []
    assert rule(report(OFFERS, 200, step=3, germinations=1)) == []


def test_the_temperature_is_fitted_ever_since_the_head_is_trained() -> None:
    """An old one would judge how sure a model is, not how good it is."""
    assert [stage(12).fits_at(step) for step in (1, 2, 3, 12)] == [False, True, True, True]
    temperatures = []
    for steps in (head_steps(8), 6):
        decider = adapt(until=steps)[1]._decider
        assert decider is not None and decider.adaptation is not None
        temperatures.append(decider.adaptation.temperature)
    assert temperatures[0] != temperatures[1]


@pytest.mark.parametrize(
    ("value", "error", "step", "age", "expected"),
    [
        (0.2, 0.1, 5, 2, ["fossilize"]),
        (0.05, 0.1, 5, 2, []),
        (-0.05, 0.1, 5, 2, []),
        (-0.2, 0.1, 5, 2, []),
        (-0.2, 0.1, 10, 2, ["prune"]),
        (-0.2, 0.1, 10, 1, []),
        (0.05, 0.1, 10, 1, ["fossilize"]),
    ],
)
def test_verdicts_by_hand(value: float, error: float, step: int, age: int, expected: list[str]) -> None:
    """Beyond its error after the trial of two steps. At the end, what lowers the loss stays and what raises it goes."""
    adaptation = stage(12, worths={"stage1.norm": Measurement(value, error)})
    held = {"stage": SeedStage.HOLDING, "blueprint": "affine", "steps_in_stage": age, "germinations": 1}
    actions = adaptation.rule(report({"stage1.norm": {}}, 0, step, **held))
    assert [action.op for action in actions] == expected


def test_groups() -> None:
    """All norms together, the updates of a stage together, anything else alone. Many blocks make four stages."""
    group = stage(12).group
    assert group("stage1.norm", "affine") == group("stage2.norm", "scale") == "norms"
    assert group("stage1.a", "lora_conv_4") == group("stage1.b", "lora_conv_1") != group("stage2.a", "lora_linear_4")
    assert group("stage1", "conv_light") == "stage1"
    blocks = [f"layers.{index}" for index in range(10)]
    assert [len(each) for each in stages_of(blocks)] == [3, 3, 3, 1]
    assert Adaptation(12, stages_of(blocks)).stage("layers.3.query") == 1
    assert stage(12).stage("stage10.a") == -1


# -- other policies, other input --------------------------------------------------------------------------------------


def test_a_policy_of_ones_own() -> None:
    """It is offered blueprints behind stages too, but not behind the last, with a 1×1 convolution among them."""
    seen: list[GrowthReport] = []

    def policy(given: GrowthReport) -> list[tuple[str, ...]]:
        seen.append(given)
        return [("germinate", "stage1", "linear1x1")] if given.step == 1 else []

    model, grower, records = adapt(until=3, policy=policy)
    assert list(seen[0].offers) == ["stage1.0", "stage1.1", "stage1", "stage2.0", "stage2.1"]
    assert {"linear1x1", "conv_small"} <= set(seen[0].offers["stage1"])
    assert seen[0].offers["stage1.1"].keys() == {"affine"}
    assert seen[0].offers["stage1.1"]["affine"].worth > 0
    assert records[1].grown == 64 and "stage1" in records[1].contributions
    with pytest.raises(BadValueError, match=r"linear1x1 behind stage1 cannot be merged.*finish"):
        grower.merge(keep=["stage1"])
    before = outputs(model)
    grower.finish(keep=["stage1"])
    assert torch.allclose(outputs(model), before, atol=1e-5)


def test_learned_policies_see_ordinary_slots() -> None:
    """The lists of blueprints that they were trained with do not change."""
    torch.manual_seed(0)
    model = frozen_cnn()
    grower = Grower(model, learning(model), budget=4000, steps=8, policy="random")
    train_epoch(model, grower.optimizer)
    assert grower.step(loader(VALIDATION)).actions == ()  # the head is not trained yet
    assert list(grower.report().slots) == ["stage1", "stage2"]
    assert not {"affine", "linear1x1", "lora_conv_1"} & set(grower.report().offers["stage1"])


def test_named_slots() -> None:
    """A layer that the user names is offered its adapters."""
    model, _, records = adapt(until=3, slots=["stage1.0"], budget=100)
    assert [action.blueprint for action in records[1].actions] == ["lora_conv_4"]
    assert list(getattr(model, CHILD).live()) == ["stage1.0"]


def test_an_accuracy_instead_of_data() -> None:
    """Nothing can be chosen by it: the original statistics stay, and seeds are born all the same."""
    torch.manual_seed(0)
    model = frozen_cnn()
    grower = Grower(model, learning(model), budget=400, steps=8)
    for epoch in range(2):
        train_epoch(model, grower.optimizer, epoch)
        record = grower.step(50.0)
    assert record.remarks == ("contributions need validation data, not a number",)
    assert len(record.actions) == 4


def test_nothing_learns() -> None:
    """The error names a layer that could."""
    model = base().requires_grad_(False)
    with pytest.raises(BadValueError, match=r"all 9 parameters .* frozen.*get_submodule\('head'\)"):
        Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), budget=400)


def test_mostly_trainable_models_grow_as_before() -> None:
    """A frozen stem is no frozen model."""
    model = base()
    model.stage1.requires_grad_(False)
    grower = Grower(model, learning(model), budget=4000, steps=8, policy=plan((1, "stage1", "conv_light")))
    train_epoch(model, grower.optimizer)
    assert [action.blueprint for action in grower.step(loader(VALIDATION)).actions] == ["conv_light"]


def test_too_few_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Said at once; the head is trained, and nothing grows."""
    records = adapt(steps=3)[2]
    assert "steps=3 is too few" in capsys.readouterr().out
    assert not any(record.actions for record in records)


def test_models_in_eval_mode() -> None:
    """A user who scores in eval mode between epochs sees the fixed statistics come back to eval mode in training."""
    model, _, _ = adapt(until=1)
    model.eval()
    model.train()
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    assert [norm.training for norm in norms] == [False, False]
