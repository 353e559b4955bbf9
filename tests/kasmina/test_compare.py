"""Comparing rows: paired errors by hand, calibration, and what `measure` leaves behind."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hosts import HOST_KINDS, HostKind, bring_to, make_batch, make_model, shake
from torch import Tensor

from esper.kasmina import BlueprintRegistry, MorphogeneticModel, cross_entropy
from esper.kasmina.compare import RowScore, compare, paired_difference, score_row
from esper.kasmina.layers import Scale
from esper.kasmina.slot import Role
from esper.leyline import BLEND_STYLES, BadValueError, Measurement, SeedStage


def score(correct: str, losses: list[float] | None = None) -> RowScore:
    """From a string such as "1101"."""
    right = torch.tensor([letter == "1" for letter in correct])
    return RowScore(right, torch.tensor(losses if losses is not None else [0.0] * len(correct)))


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_paired_accuracy() -> None:
    # Of 8 predictions the row alone gets 3 right, the other alone 1: p01 = 3/8, p10 = 1/8.
    # Value 100·(3/8 − 1/8) = 25 points.
    # Variance 3/8 + 1/8 − (2/8)² = 0.4375, error 100·sqrt(0.4375)/sqrt(8) = 100·0.661438/2.828427 = 23.3854.
    result = paired_difference(score("11110001"), score("10001001")).points
    assert result.value == pytest.approx(25.0)
    assert result.error == pytest.approx(23.3854, abs=1e-4)


def test_paired_accuracy_is_antisymmetric() -> None:
    row, other = score("11110001"), score("10001001")
    forth, back = paired_difference(row, other).points, paired_difference(other, row).points
    assert (back.value, back.error) == pytest.approx((-forth.value, forth.error))


def test_rows_that_agree_have_no_error() -> None:
    """Equal accuracy is not agreement: one discordant pair each way is 0 points, but not without error."""
    assert paired_difference(score("1100"), score("1100")).points == Measurement(0.0, 0.0)
    # p01 = p10 = 1/2: variance 1, error 100·1/sqrt(2)
    assert paired_difference(score("10"), score("01")).points == pytest.approx((0.0, 70.710678))
    # Always better: p01 = 1, p10 = 0: variance 1 − 1 = 0
    assert paired_difference(score("11"), score("00")).points == Measurement(100.0, 0.0)


def test_paired_loss() -> None:
    # Differences 1, 2, 3 (the other is worse): mean 2, standard deviation 1, error 1/sqrt(3) = 0.577350.
    result = paired_difference(score("111", [1.0, 1.0, 1.0]), score("111", [2.0, 3.0, 4.0])).loss
    assert result == pytest.approx((2.0, 0.577350), abs=1e-6)
    assert paired_difference(score("1", [1.0]), score("1", [2.0])).loss == Measurement(1.0, math.inf)


def test_points_of_rows_with_losses_alone() -> None:
    # Losses 1, 1, 1 against 2, 3, 4: means 1 and 3, so 100·(3 − 1)/3 = 66.6667 points.
    # The loss differs by 2 ± 0.577350; relative to the other's 3 the error is 100·0.577350/3 = 19.2450 points.
    row, other = (RowScore(None, torch.tensor(losses)) for losses in ([1.0, 1.0, 1.0], [2.0, 3.0, 4.0]))
    result = paired_difference(row, other)
    assert result.points == pytest.approx((66.666667, 19.245009), abs=1e-5)
    assert result.loss == pytest.approx((2.0, 0.577350), abs=1e-6)
    # The other way round it loses 200 points: three times the loss of 1.
    assert paired_difference(other, row).points == pytest.approx((-200.0, 57.735027), abs=1e-5)
    assert paired_difference(row, other._replace(correct=torch.ones(3, dtype=torch.bool))) == result
    with pytest.raises(BadValueError, match="scored by loss alone; it has no accuracy"):
        _ = row.accuracy


def test_row_score() -> None:
    assert score("1101").accuracy == 75.0
    assert score("11", [1.0, 4.0]).loss == 2.5


# -- statistics of their own ------------------------------------------------------------------------------------------


@pytest.fixture
def amplifier() -> Iterator[str]:
    """A blueprint that multiplies every channel: Δ = s·h."""
    BlueprintRegistry.register("image", "amplifier", lambda width: width)(Scale)
    yield "amplifier"
    BlueprintRegistry.unregister("image", "amplifier")


def trained_cnn(steps: int = 20) -> MorphogeneticModel:
    """A host that has learnt something, with the running statistics of its training."""
    model = make_model("cnn", dtype=torch.float64)
    optimiser = torch.optim.SGD(model.host.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, targets = make_batch("cnn", 64, dtype=torch.float64, rng_seed=step % 4)
        optimiser.zero_grad()
        model.losses(x, targets)["main"].backward()
        optimiser.step()
    return model


@pytest.mark.parametrize("stage", [SeedStage.TRAINING, SeedStage.HOLDING])
def test_rows_use_statistics_of_their_own(amplifier: str, stage: SeedStage) -> None:
    """Five times the activation before a BatchNorm is no change at all, once it is measured by its own statistics.

    With the running statistics of the host the same seed seems to change a lot.
    """
    model = trained_cnn()
    x, targets = make_batch("cnn", 64, dtype=torch.float64)
    bring_to(model, "r1c0", stage, (x, targets), amplifier)
    for weight in model.seed_parameters("r1c0"):
        torch.nn.init.constant_(weight, 4.0)

    result = model.measure(x, targets, calibration=x)
    effect = (result.auditions if stage is SeedStage.TRAINING else result.contributions)["r1c0"]
    assert effect.points == Measurement(0.0, 0.0)
    assert abs(effect.loss.value) < 1e-3

    roles = {"r1c0": Role.SHADOW if stage is SeedStage.TRAINING else Role.SILENT}
    plain, changed = (score_row(model.body, x, targets, row, None) for row in ({}, roles))
    assert (changed.losses - plain.losses).abs().mean() > 0.1
    assert not torch.equal(changed.hits, plain.hits)


def test_main_row_is_calibrated_too() -> None:
    """Running statistics serve `deployed` only."""
    model = trained_cnn()
    for name, buffer in model.host.named_buffers():
        if name.endswith("running_mean"):
            buffer.add_(3.0)
    x, targets = make_batch("cnn", 64, dtype=torch.float64)
    result = compare(model.body, x, targets, x)
    logits = model.body(x, True)[0]  # calibrated on x itself: what training sees, but for the unbiased variance
    assert result.deployed is not None
    assert torch.equal(result.main.hits, logits.argmax(-1) == targets)
    assert result.deployed.accuracy < result.main.accuracy
    assert torch.equal(result.deployed.hits, model.eval()(x).argmax(-1) == targets)


# -- what is measured -------------------------------------------------------------------------------------------------


def grown(kind: HostKind, style: str) -> tuple[MorphogeneticModel, list[str]]:
    """Three slots: a seed in TRAINING, one in HOLDING, one GERMINATED; the first two with weights of their own."""
    model = make_model(kind, 3, dtype=torch.float64)
    places = list(model.seed_slots)
    batch = make_batch(kind, dtype=torch.float64)
    stages = (SeedStage.TRAINING, SeedStage.HOLDING, SeedStage.GERMINATED)
    for slot_id, stage in zip(places, stages, strict=True):
        bring_to(model, slot_id, stage, batch, style=style)
        shake(model.seed_slots[slot_id], 1, size=1.0)
    return model, places


def snapshot(model: MorphogeneticModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("style", BLEND_STYLES)
@pytest.mark.parametrize("kind", HOST_KINDS)
def test_measure_writes_nothing_but_the_measurements(kind: HostKind, style: str) -> None:
    model, _ = grown(kind, style)
    before, stream = snapshot(model), torch.get_rng_state()
    x, targets = make_batch(kind, 16, dtype=torch.float64)
    for training in (True, False):
        model.train(training)
        model.measure(x, targets, calibration=make_batch(kind, 16, dtype=torch.float64, rng_seed=9)[0])
        assert model.training is training
        assert all(slot.role is Role.MAIN for slot in model.seed_slots.values())
    assert torch.equal(stream, torch.get_rng_state())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_measure_finds_what_a_rerun_without_the_seed_finds(kind: HostKind) -> None:
    """Auditions are shadow minus main, contributions main minus silenced; a GERMINATED seed has neither."""
    model, (trains, holds, idle) = grown(kind, "add")
    x, targets = make_batch(kind, 16, dtype=torch.float64)
    result = model.measure(x, targets, calibration=x)
    assert set(result.auditions) == {trains}
    assert set(result.contributions) == {holds}
    assert model.seed_slots[idle].state.audition is None
    assert model.seed_slots[idle].state.contribution is None

    model.seed_slots[holds].alpha.zero_()
    silenced = score_row(model.body, x, targets, {}, x)
    assert result.contributions[holds].points == paired_difference(result.main, silenced).points
    assert result.contributions[holds].loss.value == pytest.approx(silenced.loss - result.main.loss, abs=1e-12)
    assert result.contributions[holds].loss.value != 0.0


def test_the_last_two_measurements_count() -> None:
    model, batch = trained_cnn(), make_batch("cnn", dtype=torch.float64)
    trains, holds = "r0c0", "r0c1"
    for slot_id, stage in ((trains, SeedStage.TRAINING), (holds, SeedStage.HOLDING)):
        bring_to(model, slot_id, stage, batch, "conv_light")
        shake(model.seed_slots[slot_id], 1, size=1.0)
    auditions, contributions = [], []
    for rng_seed in range(3):
        x, targets = make_batch("cnn", 48, dtype=torch.float64, rng_seed=rng_seed)
        result = model.measure(x, targets, calibration=x)
        auditions.append(result.auditions[trains].points)
        contributions.append(result.contributions[holds].points)
    assert len(set(auditions)) == len(set(contributions)) == 3

    state = model.seed_slots[trains].state
    assert state.auditions == (auditions[1], auditions[2])
    # Mean of the two; errors of independent measurements add in squares, then halve.
    value = (auditions[1].value + auditions[2].value) / 2
    error = math.sqrt(auditions[1].error ** 2 + auditions[2].error ** 2) / 2
    assert state.audition == pytest.approx((value, error))
    assert model.seed_slots[holds].state.contributions == (contributions[1], contributions[2])
    report = next(report for report in model.reports() if report.slot_id == trains)
    assert report.audition == state.audition


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_chunks_change_no_result(kind: HostKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """13 inputs at once, or by fives: the last chunk is shorter."""
    model, _ = grown(kind, "gate")
    x, targets = make_batch(kind, 13, dtype=torch.float64)
    whole = compare(model.body, x, targets, x)
    monkeypatch.setattr("esper.kasmina.compare.CHUNK", 5)
    parts = compare(model.body, x, targets, x)
    for left, right in ((whole.main, parts.main), (whole.deployed, parts.deployed)):
        assert left is not None and right is not None
        assert left.hits.numel() == targets.numel()
        assert torch.equal(left.hits, right.hits)
        torch.testing.assert_close(left.losses, right.losses, rtol=1e-12, atol=1e-12)
    for seeds in ("auditions", "contributions"):
        for slot_id, effect in getattr(whole, seeds).items():
            assert getattr(parts, seeds)[slot_id].points == effect.points
            assert getattr(parts, seeds)[slot_id].loss == pytest.approx(effect.loss, abs=1e-12)


def test_tokens_are_predictions() -> None:
    """A sequence of six tokens counts as six: the error is that of all tokens."""
    model = make_model("gpt", dtype=torch.float64)
    x, targets = make_batch("gpt", 4, dtype=torch.float64)
    result = compare(model.body, x, targets, x)
    assert result.main.hits.shape == (24,)


# -- targets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HOST_KINDS)
def test_ignored_targets_are_left_out(kind: HostKind) -> None:
    """Targets of −100, as torch has it: the scores are those of the predictions that remain."""
    model, (x, targets) = make_model(kind, 1), make_batch(kind, 16)
    bring_to(model, "r0c0", SeedStage.HOLDING, (x, targets))
    shake(model.seed_slots["r0c0"], 1)
    padded = targets.clone()
    padded.view(-1)[::3] = -100
    kept = padded.flatten() != -100
    whole, part = compare(model.body, x, targets, x), compare(model.body, x, padded, x)
    assert torch.equal(part.main.hits, whole.main.hits[kept])
    assert torch.equal(part.main.losses, whole.main.losses[kept])
    silent = score_row(model.body, x, targets, {"r0c0": Role.SILENT}, x)
    expected = paired_difference(
        RowScore(whole.main.hits[kept], whole.main.losses[kept]), RowScore(silent.hits[kept], silent.losses[kept])
    )
    assert part.contributions["r0c0"] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, y: (x, y.float(), x), "targets of torch.float32 are no class indices"),
        (lambda x, y: (x, y == 0, x), "targets of torch.bool are no class indices"),
        (lambda x, y: (x, y[:-1], x), "8 inputs but 7 targets"),
        (lambda x, y: (x, y[:, None], x), r"targets of shape \(8, 1\) do not fit scores of shape \(8, 5\)"),
        (lambda x, y: (x[:0], y[:0], x), r"inputs of shape \(0, 7\) are empty"),
        (lambda x, y: (x, y, x[:0]), r"calibration of shape \(0, 7\) are empty"),
        (lambda x, y: (x, y, None), "calibration are a NoneType; one tensor is needed"),
        (lambda x, y: (x, y + 3, x), "to 7 are no classes of a host with 5 scores"),
        (lambda x, y: (x, torch.full_like(y, -100), x), "all 8 targets are -100"),
    ],
)
def test_what_cannot_be_measured_is_said(
    change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], message: str
) -> None:
    """And nothing is noted."""
    model, batch = make_model("mlp", 1), make_batch("mlp")
    bring_to(model, "r0c0", SeedStage.HOLDING, batch)
    before = model.seed_slots["r0c0"].state
    with pytest.raises(BadValueError, match=message):
        model.measure(*change(*batch))
    assert model.seed_slots["r0c0"].state == before


def test_regression_needs_a_criterion_of_its_own() -> None:
    """The usual one is for classes, and says so; another one trains as ever."""
    model, (x, _) = make_model("mlp", 1), make_batch("mlp")
    wanted = torch.randn(8, 5)
    with pytest.raises(BadValueError, match=r"no class indices .*losses\(…, criterion=…\)"):
        model.losses(x, wanted)
    model.losses(x, wanted, torch.nn.functional.mse_loss)["main"].backward()
    padded = torch.tensor([0, -100, 1, -100])
    logits = torch.randn(4, 5)
    assert torch.equal(cross_entropy(logits, padded), cross_entropy(logits[::2], padded[::2]))
