"""Minibatches, augmentation, and the fixed sets."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline import DataError
from esper.tolaria import get_task
from esper.tolaria.batches import ImageBatches, TextBatches
from esper.tolaria.data import ImageData, ImagePart, TextData

CPU = torch.device("cpu")
COUNT, BATCH = 23, 5
CHANNELS, SIDE = 2, 6


def image_data(count: int = COUNT, *, std: tuple[float, ...] = (0.25, 0.5)) -> ImageData:
    """Random images whose label is their own number, from 0 in training, 100 in validation, 200 in the test."""
    generator = torch.Generator().manual_seed(3)

    def part(size: int, first: int) -> ImagePart:
        # No zeros, so that padding can be told from an image.
        images = torch.randint(1, 256, (size, CHANNELS, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        return ImagePart(images, torch.arange(first, first + size))

    return ImageData("toy", part(count, 0), part(7, 100), part(6, 200), ("a", "b"), (0.5, 0.25), std)


def make(shift: int = 0, flip: bool = False, batch: int = BATCH) -> ImageBatches:
    """Batches of the toy images."""
    return ImageBatches(image_data(), batch, shift=shift, flip=flip, device=CPU)


def normalised(images: Tensor) -> Tensor:
    """What a host should see of these images."""
    mean, std = torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.5])
    return (images.float() / 255 - mean[:, None, None]) / std[:, None, None]


def pixels(inputs: Tensor) -> Tensor:
    """The uint8 images behind normalised ones."""
    mean, std = torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.5])
    return ((inputs * std[:, None, None] + mean[:, None, None]) * 255).round().to(torch.uint8)


# -- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 5, 16, COUNT])
def test_each_pass_has_every_image_once(batch: int) -> None:
    """Three passes, cut out of minibatches that run across the boundaries between them."""
    batches = make(batch=batch)
    drawn = torch.cat([batches.minibatch(7, index).targets for index in range(-(-3 * COUNT // batch))])
    passes = [drawn[epoch * COUNT : (epoch + 1) * COUNT].tolist() for epoch in range(3)]
    assert [sorted(labels) for labels in passes] == [list(range(COUNT))] * 3
    assert passes[0] != passes[1] != passes[2] != passes[0]


@pytest.mark.invariant(13)
def test_pure_function_of_seed_and_index() -> None:
    """Neither earlier draws, nor another object, nor the global generator changes a minibatch."""
    forward, backward = make(shift=1, flip=True), make(shift=1, flip=True)
    first = [forward.minibatch(2, index) for index in range(12)]
    for index in reversed(range(12)):
        torch.manual_seed(index)
        backward.minibatch(3, index)
        inputs, targets = backward.minibatch(2, index)
        assert torch.equal(inputs, first[index].inputs)
        assert torch.equal(targets, first[index].targets)


@pytest.mark.invariant(13)
def test_known_minibatch() -> None:
    """Order, shifts and flips of a minibatch must never change, or old runs could not be repeated."""
    inputs, targets = make(shift=2, flip=True).minibatch(2**40 + 1, 6)
    assert targets.tolist() == [22, 19, 16, 4, 10]
    assert (pixels(inputs) == 0).sum((1, 2, 3)).tolist() == [12, 40, 12, 32, 22]  # padding
    assert pixels(inputs)[:, 0, 3, 3].tolist() == [91, 243, 161, 34, 142]


def test_seeds_differ_in_order_and_augmentation() -> None:
    """Another seed is another order, and moves the same image otherwise."""
    batches = make(shift=2, batch=COUNT)
    left, right = batches.minibatch(0, 0), batches.minibatch(1, 0)
    assert not torch.equal(left.targets, right.targets)
    assert not torch.equal(left.inputs[left.targets.argsort()], right.inputs[right.targets.argsort()])


def test_augmentation_does_not_change_the_order() -> None:
    """Each purpose has numbers of its own."""
    for index in range(5):
        assert torch.equal(make().minibatch(4, index).targets, make(2, True).minibatch(4, index).targets)


# -- augmentation -----------------------------------------------------------------------------------------------------


def test_without_augmentation_the_image_itself() -> None:
    """Shift 0 and no flip: normalised, and nothing else."""
    data = image_data()
    inputs, targets = make().minibatch(0, 0)
    assert torch.equal(inputs, normalised(data.train.images[targets]))
    assert inputs.dtype == torch.float32
    assert inputs.is_contiguous()


def translated(image: Tensor, down: int, right: int) -> Tensor:
    """Pixel by pixel: what was `down` rows below and `right` columns to the right, zero where there was nothing."""
    moved = torch.zeros_like(image)
    for row in range(SIDE):
        for column in range(SIDE):
            if 0 <= row + down < SIDE and 0 <= column + right < SIDE:
                moved[:, row, column] = image[:, row + down, column + right]
    return moved


@pytest.mark.parametrize("shift", [1, 2])
def test_shifted_images_are_zero_padded_translations(shift: int) -> None:
    """Every image equals one slow translation of itself; over many all translations occur, rows apart from columns."""
    data, batches = image_data(), make(shift=shift)
    span = range(-shift, shift + 1)
    seen = []
    for index in range(12 * (2 * shift + 1)):
        inputs, targets = batches.minibatch(1, index)
        for image, label in zip(pixels(inputs), targets, strict=True):
            fits = [
                (down, right)
                for down in span
                for right in span
                if torch.equal(image, translated(data.train.images[label], down, right))
            ]
            assert len(fits) == 1
            seen += fits
    assert set(seen) == {(down, right) for down in span for right in span}


def test_flipped_images_are_mirrored_or_not() -> None:
    """Left and right change places for about half of the images: 200 draws deviate by 7 from 100."""
    data, batches = image_data(), make(flip=True)
    flips = 0
    for index in range(40):
        inputs, targets = batches.minibatch(1, index)
        for image, original in zip(pixels(inputs), data.train.images[targets], strict=True):
            flipped = torch.equal(image, original.flip(-1))
            assert flipped or torch.equal(image, original)
            flips += flipped
    assert abs(flips - 100) < 4 * 7.1


def test_images_of_one_batch_move_apart() -> None:
    """Augmentation is drawn per image, and anew for every minibatch."""
    batches = ImageBatches(image_data(BATCH), BATCH, shift=2, device=CPU)  # every minibatch has all five images
    moves = []
    for index in range(2):
        inputs, targets = batches.minibatch(0, index)
        moves.append((pixels(inputs)[targets.argsort()] == 0).flatten(1))
    assert len({tuple(row.tolist()) for row in moves[0]}) > 1
    assert not torch.equal(moves[0], moves[1])


# -- fixed sets -------------------------------------------------------------------------------------------------------


def test_fixed_sets_are_not_augmented() -> None:
    """Validation, test and calibration are the images as they are, the same on every call."""
    data, batches = image_data(), make(shift=2, flip=True)
    for found, part in ((batches.validation(), data.validation), (batches.test(), data.test)):
        assert torch.equal(found.inputs, normalised(part.images))
        assert torch.equal(found.targets, part.labels)
    known = {tuple(image.flatten().tolist()) for image in data.train.images}
    drawn = [tuple(image.flatten().tolist()) for image in pixels(batches.calibration(9))]
    assert len(set(drawn)) == 9
    assert set(drawn) <= known
    assert torch.equal(batches.calibration(9), make().calibration(9))
    assert torch.equal(batches.calibration(9)[:4], batches.calibration(4))


def test_the_end_is_scored_on_all_validation_images() -> None:
    data, extra = image_data(), image_data(9).train
    assert make().end().targets.tolist() == data.validation.labels.tolist()
    end = ImageBatches(replace(data, extra=extra), BATCH, device=CPU).end()
    assert end.targets.tolist() == [*data.validation.labels.tolist(), *range(9)]
    torch.testing.assert_close(end.inputs, normalised(torch.cat([data.validation.images, extra.images])))


def test_calibration_takes_what_there_is() -> None:
    """A data set smaller than the calibration batch gives all its training images."""
    assert len(make().calibration(512)) == COUNT


def test_digits_parts_are_disjoint() -> None:
    """The images that a host of digits trains on are none of those that it is judged by."""
    task = get_task("digits_blind")
    batches = task.load_batches()
    assert isinstance(batches, ImageBatches)
    # 1,000 images in 16 minibatches of 64 (the last few are from the second pass).
    train = torch.cat([batches.minibatch(0, index).inputs for index in range(16)])
    parts = [train, batches.validation().inputs, batches.test().inputs]
    assert [len(part) for part in parts[1:]] == [400, 397]
    keys = [{tuple(image.flatten().tolist()) for image in part} for part in parts]
    assert len(keys[0]) == 1000
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]


def test_digits_are_normalised_by_the_training_part() -> None:
    """Mean 0 and standard deviation 1 over one pass."""
    batches = replace(get_task("digits_blind"), batch=1000).load_batches()
    inputs = batches.minibatch(0, 0).inputs.double()
    assert float(inputs.mean()) == pytest.approx(0, abs=1e-5)
    assert float(inputs.std()) == pytest.approx(1, abs=1e-3)


def test_a_channel_that_never_changes_stays_finite() -> None:
    """A standard deviation of 0 does not become NaN."""
    batches = ImageBatches(image_data(std=(0.0, 0.5)), BATCH, device=CPU)
    assert bool(batches.validation().inputs.isfinite().all())


def test_too_few_images() -> None:
    """The message names both numbers and the set."""
    with pytest.raises(DataError, match=r"toy has 4 training images, fewer than a batch of 5"):
        ImageBatches(image_data(4), 5, device=CPU)
    ImageBatches(image_data(5), 5, device=CPU)


# -- batch size -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement(36)
@pytest.mark.parametrize("batch", [None, 1, 17, 200])
def test_batch_size_is_configurable(batch: int | None) -> None:
    """The configured size reaches the minibatches; the default is the task's, whatever its name."""
    task = get_task("digits_blind")
    if batch is not None:
        task = replace(task, batch=batch)
    expected = 64 if batch is None else batch
    for name in ("digits_blind", "cifar_scale"):
        inputs, targets = replace(task, name=name).load_batches().minibatch(0, 3)
        assert len(inputs) == len(targets) == expected


# -- text -------------------------------------------------------------------------------------------------------------

BLOCK = 8


def text_data(length: int = 60) -> TextData:
    """The character at each place is its own number."""
    places = torch.arange(length + 40)
    return TextData("toy", places[:length], places[length : length + 21], places[length + 21 :], ("x",))


def test_text_target_is_the_next_character() -> None:
    """Windows run on, inside the training stretch."""
    batches = TextBatches(text_data(), 6, BLOCK, device=CPU)
    for index in range(20):
        inputs, targets = batches.minibatch(1, index)
        assert inputs.shape == targets.shape == (6, BLOCK)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(BLOCK))
        assert int(targets.max()) < 60


def test_text_windows_start_anywhere() -> None:
    """Every place that has a whole window and a target behind it: 52 of 60 characters with a block of 8."""
    batches = TextBatches(text_data(), 6, BLOCK, device=CPU)
    starts = torch.cat([batches.minibatch(0, index).inputs[:, 0] for index in range(200)])
    assert starts.unique().tolist() == list(range(60 - BLOCK))


@pytest.mark.invariant(13)
def test_text_is_a_pure_function_of_seed_and_index() -> None:
    """Equal seeds give equal text, and different seeds different text."""
    batches = TextBatches(text_data(), 6, BLOCK, device=CPU)
    first = batches.minibatch(5, 9).inputs
    batches.minibatch(6, 0)
    assert torch.equal(batches.minibatch(5, 9).inputs, first)
    assert not torch.equal(batches.minibatch(6, 9).inputs, first)
    assert not torch.equal(batches.minibatch(5, 8).inputs, first)


def test_text_fixed_sets() -> None:
    """Held-out stretches are cut into windows side by side; calibration comes from the training stretch."""
    batches = TextBatches(text_data(), 6, BLOCK, device=CPU)
    inputs, targets = batches.validation()  # characters 60 to 80: two windows of 8 with their targets
    assert inputs.tolist() == [list(range(60, 68)), list(range(68, 76))]
    assert torch.equal(targets, inputs + 1)
    inputs, targets = batches.test()  # 19 characters from 81
    assert inputs.tolist() == [list(range(81, 89)), list(range(89, 97))]
    calibration = batches.calibration(10)
    assert calibration.shape == (10, BLOCK)
    assert int(calibration.max()) < 60
    assert torch.equal(calibration[:3], batches.calibration(3))


def test_too_little_text() -> None:
    """The message names what there is and what was asked for."""
    pattern = re.escape("toy: 13 characters are too few for 6 windows of 8")
    with pytest.raises(DataError, match=pattern):
        TextBatches(text_data(13), 6, BLOCK, device=CPU)
    TextBatches(text_data(14), 6, BLOCK, device=CPU)
