"""Seeds in foreign networks: what they do in each stage, and what they leave alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from foreign import CASES, Case, gradients, images, prune_life, same, stages, wake
from foreign import case as case
from hosts import AT_ONCE
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import GrowingOptimizer, MorphogeneticModel, attach, cross_entropy
from esper.kasmina.slot import ISOLATIONS, Isolation
from esper.leyline import ACTIVE_STAGES, BLEND_STYLES, SeedStage


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_seed_acts_in_the_stages_that_say_so_and_in_no_other(case: Case, isolation: Isolation) -> None:
    model, plain = case.model(isolation).eval(), case.host().eval()
    x = case.data()[0]
    expected = plain(x)
    lives = [stages(model, case.first, case.blueprint, case.data())]
    for stage in lives[0]:
        assert model.seed_slots[case.first].state.stage is stage
        assert torch.equal(model(x), expected) == (stage not in ACTIVE_STAGES)
    fossil = model(x)
    for stage in prune_life(model, case.second, case.blueprint):
        assert torch.equal(model(x), fossil) == (stage not in ACTIVE_STAGES)


def train_host_alone(case: Case, steps: int, prepare: Callable[[MorphogeneticModel], None]) -> dict[str, Tensor]:
    """The state of a host after some steps of SGD, and where its random stream then stands."""
    model = case.model().train()
    prepare(model)
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    torch.manual_seed(5)
    for step in range(steps):
        optimiser.zero_grad()
        sum(model.losses(*case.data(seed=step)).values(), torch.zeros(())).backward()
        optimiser.step()
    return {name: tensor.clone() for name, tensor in model.host.state_dict().items()} | {"rng": torch.get_rng_state()}


def test_a_training_seed_leaves_the_hosts_trajectory_bit_identical(case: Case) -> None:
    def nothing(model: MorphogeneticModel) -> None:
        pass

    def two_training_seeds(model: MorphogeneticModel) -> None:
        for slot_id in case.slots:
            model.germinate_seed(slot_id, case.blueprint)
            model.advance(slot_id)

    def one_with_a_gate(model: MorphogeneticModel) -> None:
        model.germinate_seed(case.second, case.blueprint, style="gate")
        model.advance(case.second)

    alone = train_host_alone(case, 4, nothing)
    assert same(alone, train_host_alone(case, 4, two_training_seeds))
    assert same(alone, train_host_alone(case, 4, one_with_a_gate))


def test_germination_draws_nothing_from_the_hosts_random_stream(case: Case) -> None:
    model = case.model()
    before = torch.get_rng_state()
    model.germinate_seed(case.first, case.blueprint, style="gate")
    assert torch.equal(before, torch.get_rng_state())


def test_a_shadow_sees_the_masks_and_statistics_of_the_main_row(case: Case) -> None:
    """A newborn seed is the identity, so its shadow's loss is the main loss to the last bit, dropout included."""
    model = case.model().train()
    model.germinate_seed(case.second, case.blueprint)
    model.advance(case.second)
    losses = model.losses(*case.data())
    assert torch.equal(losses["main"], losses[case.second])
    wake(model, case.second)
    losses = model.losses(*case.data())
    assert not torch.equal(losses["main"], losses[case.second])


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_gradients_in_every_stage(case: Case, isolation: Isolation) -> None:
    model, plain = case.model(isolation).train(), case.host().train()
    data = case.data()
    torch.manual_seed(1)
    cross_entropy(plain(data[0]), data[1]).backward()
    expected = gradients(plain)
    for stage in stages(model, case.first, case.blueprint, data):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        sum(model.losses(*data).values(), torch.zeros(())).backward()
        result = gradients(model.host)
        assert result.keys() == expected.keys()
        assert all(float(gradient.norm()) > 0 for gradient in result.values()), stage
        assert same(result, expected) == (stage not in ACTIVE_STAGES), stage
        seeds = gradients(model.seed_slots[case.first])
        if stage in (SeedStage.DORMANT, SeedStage.GERMINATED):
            assert not seeds
        else:
            assert len(seeds) == len(list(model.seed_parameters(case.first)))
            assert all(float(gradient.norm()) > 0 for gradient in seeds.values()), stage


@pytest.mark.parametrize("style", BLEND_STYLES)
def test_every_style_blends(case: Case, style: str) -> None:
    model = case.model().eval()
    x, targets = case.data()
    before = model(x)
    model.germinate_seed(case.first, case.blueprint, style=style, tempo=0)
    wake(model, case.first)
    model.advance(case.first)
    model.observe_gradients({case.first: 1.0})
    assert torch.equal(model(x), before)
    model.advance(case.first)
    assert not torch.equal(model(x), before)
    model.losses(x, targets)["main"].backward()
    assert all(p.grad is not None and float(p.grad.norm()) > 0 for p in model.seed_parameters(case.first))


def test_measuring_calibrates_each_row_and_writes_nothing(case: Case) -> None:
    model = case.model().train()
    x, targets = case.data(24)
    model.germinate_seed(case.first, case.blueprint)
    model.advance(case.first)
    wake(model, case.first)
    state, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    result = model.measure(x, targets, x)
    assert same(state, model.state_dict()) and torch.equal(stream, torch.get_rng_state())
    assert all(part.training for part in model.modules())
    norms = [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]
    assert all(norm.momentum == 0.1 for norm in norms)
    assert model.reports()[0].audition == result.auditions[case.first].points
    # Calibrated on the very inputs that it is scored on, a row without dropout is the train-mode forward.
    reference = copy.deepcopy(model.host).eval()
    for part in reference.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.train()
            part.momentum = 1.0
    reference(x)
    expected = reference.eval()(x).flatten(0, -2)
    losses = F.cross_entropy(expected, targets.flatten(), reduction="none")
    torch.testing.assert_close(result.main.losses, losses, rtol=1e-5, atol=1e-6)


def test_statistics_of_a_row_are_those_of_its_batch() -> None:
    model = CASES["resnet"].model().train()
    x = images(16)[0]
    statistics = model.body.calibrate(x, {})
    h = model.host.get_submodule("layer1.0.conv1")(x)
    name = "host.layer1.0.norm1.running_"
    torch.testing.assert_close(statistics[name + "mean"], h.mean((0, 2, 3)))
    torch.testing.assert_close(statistics[name + "var"], h.transpose(0, 1).flatten(1).var(1))


@pytest.mark.parametrize("trains", [True, False])
def test_a_norm_that_the_user_keeps_in_eval_mode_is_not_recalibrated(trains: bool) -> None:
    """Its statistics are fixed in training too: they belong to the host. So it is after a switch to eval mode."""
    model = attach(CASES["resnet"].host(), {"layer1": 8}, example=images()[0], config=AT_ONCE).train()
    frozen = model.host.get_submodule("layer2.0.norm1")
    frozen.eval()
    model(images()[0])
    if not trains:
        model.eval()
    result = model.body.calibrate(images()[0], {})
    assert {name.rsplit(".", 1)[0] for name in result} == {
        f"host.{name}"
        for name, layer in model.host.named_modules()
        if isinstance(layer, nn.BatchNorm2d) and layer is not frozen
    }


def test_a_model_is_born_in_the_mode_of_its_host() -> None:
    """A host in eval mode stays there until the model trains, and is recalibrated as a whole."""
    host = CASES["resnet"].host().eval()
    model = attach(host, {"layer1": 8}, example=images()[0])
    assert not model.training and not model.body.training
    before = {name: buffer.clone() for name, buffer in host.named_buffers()}
    model(images()[0])
    assert same(before, dict(host.named_buffers()))
    assert len(model.body.calibrate(images()[0], {})) == 2 * sum(isinstance(m, nn.BatchNorm2d) for m in host.modules())


def test_the_main_row_takes_its_mode_from_the_call() -> None:
    model = CASES["resnet"].model().train()
    x = images()[0]
    before = copy.deepcopy(model.state_dict())
    output, _ = model.body.main(x, train=False)
    assert same(before, model.state_dict()) and all(part.training for part in model.modules())
    assert torch.equal(output, model.eval()(x))


def test_a_network_grows_end_to_end(case: Case) -> None:
    torch.manual_seed(0)
    model = case.model(config=None).train()
    optimiser = GrowingOptimizer(model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), clip_norm=5.0)
    data = case.data(32)

    def step() -> float:
        for _ in range(4):
            optimiser.zero_grad()
            losses = model.losses(*data)
            sum(losses.values(), torch.zeros(())).backward()
            optimiser.step()
        model.tick()
        return losses["main"].item()

    first = step()
    model.germinate_seed(case.first, case.blueprint)
    for _ in range(3):
        step()
    model.measure(*data, data[0])
    model.advance(case.first)
    for _ in range(4):
        step()
    model.measure(*data, data[0])
    model.fossilize(case.first)
    assert step() < 0.7 * first
    assert model.grown_parameter_count > 0
