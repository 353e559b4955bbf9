"""The plain loop that trains one host."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina import MorphogeneticModel, row_layout
from esper.kasmina.hosts import ConvSegment
from esper.leyline import SeedStage, derive_seed
from esper.tolaria import HostTrainer, OptimiserConfig, Task, get_task
from esper.tolaria.batches import ImageBatches
from esper.tolaria.engine import make_optimizer, rate_factor

SHORT = replace(get_task("digits_blind"), steps=6, batches_per_step=4)
"""Six steps of four minibatches: rates fall in the last two."""


def trainer_of(task: Task = SHORT, rng_seed: int = 0) -> HostTrainer:
    """A trainer with data of its own."""
    return HostTrainer(task, task.load_batches(), rng_seed)


def state_of(model: MorphogeneticModel) -> dict[str, Tensor]:
    """A copy of all weights and statistics."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


# -- the schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "factor"),
    [(0.0, 1.0), (0.3, 1.0), (2 / 3, 1.0), (0.75, 0.775), (5 / 6, 0.55), (0.95, 0.235), (1.0, 0.1), (1.5, 0.1)],
)
def test_rate_factor(progress: float, factor: float) -> None:
    """Constant, then linear to 10 % over the last third: at 3/4, a quarter of the way, 1 − 0.9/4."""
    assert rate_factor(progress) == pytest.approx(factor, abs=1e-12)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[HostTrainer], list[dict[str, float]]]:
    """Notes the rate of every parameter group at each optimiser step."""

    def watch(trainer: HostTrainer) -> list[dict[str, float]]:
        rates: list[dict[str, float]] = []
        step = trainer.optimizer.step

        def noting() -> dict[str, float]:
            rates.append({group["name"]: group["lr"] for group in trainer.optimizer.wrapped.param_groups})
            return step()

        monkeypatch.setattr(trainer.optimizer, "step", noting)
        return rates

    return watch


def test_rates_of_an_episode(recorded: Callable[[HostTrainer], list[dict[str, float]]]) -> None:
    """By hand: 16 minibatches at 0.05, then eight that fall by 0.9/8 each, the first still at full rate."""
    trainer = trainer_of()
    rates = recorded(trainer)
    for _ in range(SHORT.steps):
        trainer.train_step()
        trainer.tick()
    expected = [0.05] * 16 + [0.05 * (1 - 0.9 * k / 8) for k in range(8)]
    assert [rate["host"] for rate in rates] == pytest.approx(expected, rel=1e-9)


def test_a_newborn_seed_warms_up(recorded: Callable[[HostTrainer], list[dict[str, float]]]) -> None:
    """In its first step of TRAINING a seed's rate rises by quarters to the host's; then it follows the host's."""
    trainer = trainer_of()
    trainer.model.germinate_seed("r1c1", "depthwise")
    rates = recorded(trainer)
    stages = []
    for _ in range(SHORT.steps):
        stages.append(trainer.model.seed_slots["r1c1"].state.stage)
        trainer.train_step()
        trainer.tick()
    assert stages == [SeedStage.GERMINATED] + [SeedStage.TRAINING] * 5
    shares = [rate["r1c1"] / rate["host"] for rate in rates]
    assert shares[4:] == pytest.approx([0.25, 0.5, 0.75, 1.0] + [1.0] * 16)


def test_a_second_seed_warms_up_alone(recorded: Callable[[HostTrainer], list[dict[str, float]]]) -> None:
    """A seed that is born later slows neither the host nor the first seed."""
    trainer = trainer_of()
    trainer.model.germinate_seed("r1c0", "norm")
    trainer.model.advance("r1c0")
    trainer.run_step()
    trainer.model.germinate_seed("r1c1", "norm")
    trainer.model.advance("r1c1")
    rates = recorded(trainer)
    trainer.train_step()
    assert [rate["r1c1"] / 0.05 for rate in rates] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert {rate["r1c0"] for rate in rates} == {rate["host"] for rate in rates} == {0.05}


# -- a run that grows nothing -----------------------------------------------------------------------------------------


class DoubleBatches(ImageBatches):
    """The same data in float64."""

    def _normalised(self, images: Tensor) -> Tensor:
        return super()._normalised(images).double()


class BatchedLinear(nn.Linear):
    """A linear layer by the batched product, which rounds as Esper's does: 24 minibatches make 1e-8 of a last bit."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x[None], self.weight.T[None])[0]


def plain_network(task: Task, rng_seed: int) -> nn.Sequential:
    """The host of `digits_blind`, out of torch's own layers."""
    layers: list[nn.Module] = []
    host = task.make_host(rng_seed)
    for segment in host.segments:
        if isinstance(segment, ConvSegment):
            conv = nn.Conv2d(segment.conv.inputs, segment.conv.outputs, 1, bias=False)
            conv.weight = segment.conv.weight
            layers += [conv, nn.BatchNorm2d(segment.conv.outputs), nn.ReLU(), nn.MaxPool2d(2)]
    head = BatchedLinear(16, 10)
    source = host.segments[-1].get_submodule("linear")
    head.load_state_dict(source.state_dict())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).double()


def running_statistics(network: nn.Module) -> list[Tensor]:
    """Of its norms, in their order."""
    return [value for name, value in network.named_buffers() if "running" in name]


def assert_close(left: Sequence[Tensor], right: Sequence[Tensor], tolerance: float) -> None:
    """Equal in float64."""
    for mine, plain in zip(left, right, strict=True):
        assert mine.dtype == torch.float64
        assert torch.allclose(mine, plain, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("optimiser", "tolerance"),
    [
        (OptimiserConfig(rate=0.3), 1e-12),
        # The one-channel kernels before a norm have no gradient but rounding, which AdamW divides by its eps of 1e-8.
        (OptimiserConfig(kind="adamw", rate=3e-3, weight_decay=0.01), 1e-9),
    ],
    ids=["sgd", "adamw"],
)
def test_equals_a_plain_loop(optimiser: OptimiserConfig, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64: torch's layers and optimiser, clipped to 1, the rate set by hand for each minibatch.

    Products for small images round otherwise than torch's convolutions, and 24 minibatches magnify that; they are
    compared with torch in `test_products`."""
    monkeypatch.setattr(row_layout, "SMALL", 0)
    task = replace(SHORT, optimiser=optimiser)
    batches = task.load_batches()
    assert isinstance(batches, ImageBatches)
    double = DoubleBatches(batches._data, task.batch, device=torch.device("cpu"))
    trainer = HostTrainer(task, double, 3, host=task.make_host(3).double())
    mine = []
    for _ in range(task.steps):
        mine.append(trainer.train_step())
        trainer.tick()

    network = plain_network(task, 3)
    trained: torch.optim.Optimizer
    if optimiser.kind == "sgd":
        trained = torch.optim.SGD(network.parameters(), lr=0.3, momentum=0.9, weight_decay=5e-4)
    else:
        trained = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.01)
    losses, norms = [], []
    for minibatch in range(24):
        for group in trained.param_groups:
            group["lr"] = optimiser.rate * (1 if minibatch < 16 else 1 - 0.9 * (minibatch - 16) / 8)
        inputs, targets = double.minibatch(derive_seed(3, "data"), minibatch)
        trained.zero_grad()
        loss = F.cross_entropy(network(inputs), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), 1.0)))
        trained.step()
        losses.append(float(loss.detach()))
    assert max(norms) > 1.0, "clipping was not put to the test"
    by_step = [math.fsum(losses[4 * step : 4 * step + 4]) / 4 for step in range(6)]
    assert mine == pytest.approx(by_step, rel=1e-6)  # the sum of losses is kept in float32
    assert_close(list(trainer.model.host_parameters()), list(network.parameters()), tolerance)
    assert_close(running_statistics(trainer.model.host), running_statistics(network), tolerance)


# -- reproducibility --------------------------------------------------------------------------------------------------


def episode(rng_seed: int, *, noise: int = 0) -> tuple[dict[str, Tensor], list[float]]:
    """Six steps in which a seed is born, trained and blended in, beside a global generator that anyone may use."""
    torch.manual_seed(noise)
    trainer = trainer_of(rng_seed=rng_seed)
    losses = []
    for step in range(SHORT.steps):
        torch.rand(noise)
        if step == 0:
            trainer.model.germinate_seed("r1c0", "bottleneck")
        if step == 4:
            trainer.model.advance("r1c0")
        losses.append(trainer.run_step().main.loss)
    return state_of(trainer.model), losses


@pytest.mark.invariant(13)
def test_two_runs_with_one_seed_are_bit_equal() -> None:
    """Weights, seeds, statistics and losses are equal, whatever the global generator does."""
    first, losses = episode(4)
    second, again = episode(4, noise=5)
    assert any("slots" in name for name in first)
    assert_same(first, second)
    assert losses == again


def test_seeds_differ() -> None:
    """Another seed is another run."""
    assert episode(4)[1] != episode(5)[1]


@pytest.mark.invariant(2)
def test_a_seed_in_training_does_not_touch_the_host() -> None:
    """With a seed in TRAINING, the host's run is bit-equal to one that grows nothing."""
    alone, beside = trainer_of(), trainer_of()
    beside.model.germinate_seed("r1c0", "conv_light")
    for _ in range(4):
        left, right = alone.run_step(), beside.run_step()
        assert alone.train_loss == beside.train_loss
        assert left.main.loss == right.main.loss
    assert beside.model.seed_slots["r1c0"].state.stage is SeedStage.TRAINING
    assert_same(dict(alone.model.host.state_dict()), dict(beside.model.host.state_dict()))


def test_validation_does_not_touch_the_run() -> None:
    """Measuring more often changes nothing."""
    often, never = trainer_of(), trainer_of()
    for _ in range(3):
        often.validate()
        often.run_step()
        never.train_step()
        never.tick()
    assert_same(state_of(often.model), state_of(never.model))


# -- what is told -----------------------------------------------------------------------------------------------------


def test_train_loss_is_the_mean_of_the_step() -> None:
    """Not measured before the first step, then the mean of the main row over the step's minibatches."""
    task = replace(SHORT, optimiser=OptimiserConfig(rate=0.0))  # the weights stay, so the losses can be had again
    trainer = trainer_of(task)
    assert math.isnan(trainer.train_loss)
    returned = trainer.train_step()
    minibatches = [trainer.batches.minibatch(derive_seed(0, "data"), index) for index in range(4)]
    with torch.no_grad():
        losses = [float(trainer.model.losses(*samples)["main"]) for samples in minibatches]
    assert returned == trainer.train_loss == pytest.approx(math.fsum(losses) / 4, rel=1e-6)


def test_reports() -> None:
    """Two steps leave what a controller needs in the model's reports."""
    trainer = trainer_of()
    trainer.model.germinate_seed("r1c1", "depthwise")
    for _ in range(2):
        trainer.run_step()
    assert trainer.step_index == 2
    assert (trainer.model.host_parameter_count, trainer.model.grown_parameter_count) == (390, 160)
    reports = trainer.model.reports()
    assert [report.slot_id for report in reports] == list(SHORT.slot_ids)
    report = reports[1]
    assert (report.stage, report.blueprint, report.parameters) == (SeedStage.TRAINING, "depthwise", 160)
    assert report.gradient_norm is not None
    assert report.audition is not None
    assert report.contribution is None
    assert reports[0].blueprint is None


def test_validate_measures_on_the_validation_images() -> None:
    """400 images, one verdict each; a TRAINING seed has an audition."""
    trainer = trainer_of()
    trainer.model.germinate_seed("r1c0", "norm")
    trainer.tick()
    found = trainer.validate()
    assert found.main.hits.shape == (400,)
    assert set(found.auditions) == {"r1c0"}
    assert not found.contributions


def test_tick_counts_and_tells() -> None:
    """A tick ends the step and returns what happened by itself."""
    trainer = trainer_of()
    trainer.model.germinate_seed("r1c0", "norm")
    (change,) = trainer.tick()
    assert (change.source, change.target) == (SeedStage.GERMINATED, SeedStage.TRAINING)
    assert trainer.step_index == 1
    assert trainer.tick() == ()


def test_the_task_decides_slots_budget_and_optimiser() -> None:
    """What the trainer builds is what the task says."""
    trainer = trainer_of(replace(SHORT, budget=77, slot_ids=("r1c1",)))
    assert list(trainer.model.seed_slots) == ["r1c1"]
    assert trainer.model.budget == 77
    assert trainer.optimizer.clip_norm == 1.0
    (group,) = trainer.optimizer.wrapped.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.9, 5e-4)


def test_make_optimizer() -> None:
    """The kinds with their settings."""
    weights = [nn.Parameter(torch.zeros(2))]
    sgd = make_optimizer(OptimiserConfig(rate=0.2, momentum=0.5, weight_decay=0.1))(weights)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"], sgd.defaults["weight_decay"]) == (0.2, 0.5, 0.1)
    adamw = make_optimizer(OptimiserConfig(kind="adamw", rate=0.2, weight_decay=0.1))(weights)
    assert isinstance(adamw, torch.optim.AdamW)
    assert (adamw.defaults["lr"], adamw.defaults["weight_decay"]) == (0.2, 0.1)


# -- learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "steps", "above"), [("digits_blind", 8, 30.0), ("digits", 6, 60.0)])
def test_hosts_learn(name: str, steps: int, above: float) -> None:
    """Chance is 10 %: a blind host gets far above it in a few steps, a sound one further."""
    trainer = trainer_of(get_task(name))
    for _ in range(steps):
        trainer.train_step()
        trainer.tick()
    assert trainer.validate().main.accuracy > above
    assert trainer.train_loss < trainer.task.random_guess_loss - 0.3
