"""A task's data on a device: minibatches in counter-based order, and the fixed sets that rows are compared on."""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline import DataError
from esper.tolaria.counter import counter_below, permutation
from esper.tolaria.data import ImageData, ImagePart, TextData


class Purpose(IntEnum):
    """What a random number is for; part of its key."""

    ORDER = 0
    WINDOW = 1
    SHIFT_ROWS = 2
    SHIFT_COLUMNS = 3
    FLIP = 4
    CALIBRATION = 5


class Samples(NamedTuple):
    """Inputs ready for a host, and what they should give."""

    inputs: Tensor
    targets: Tensor


class ImageBatches:
    """Images stay uint8 on the device; a minibatch is gathered, shifted, flipped and normalised there."""

    def __init__(
        self, data: ImageData, batch: int, *, shift: int = 0, flip: bool = False, device: torch.device
    ) -> None:
        count = len(data.train.labels)
        if count < batch:
            raise DataError(f"{data.name} has {count} training images, fewer than a batch of {batch}")
        self.batch, self.count, self.shift, self.flip = batch, count, shift, flip
        self.images, self.labels = (tensor.to(device) for tensor in data.train)
        self.mean = torch.tensor(data.mean, device=device)[:, None, None]
        # A channel that never changes stays at zero instead of becoming NaN.
        self.std = torch.tensor(data.std, device=device)[:, None, None].clamp_min(1e-6)
        self._data = data
        self._order: tuple[tuple[int, int], Tensor] | None = None

    def minibatch(self, rng_seed: int, index: int) -> Samples:
        """The `index`-th minibatch of an episode: passes over shuffled data, one after the other."""
        places = range(index * self.batch, (index + 1) * self.batch)
        first, last = places[0] // self.count, places[-1] // self.count
        order = torch.cat([self._permutation(rng_seed, epoch) for epoch in range(first, last + 1)])
        chosen = order[places[0] - first * self.count :][: self.batch]
        images = self.images[chosen]
        if self.shift:
            images = self._shifted(images, rng_seed, index)
        if self.flip:
            flipped = counter_below(2, rng_seed, index, Purpose.FLIP, self._samples()).bool()
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
        return Samples(self._normalised(images), self.labels[chosen])

    def validation(self) -> Samples:
        """Images carved from the training set, the same for every host."""
        return self._prepared(self._data.validation)

    def test(self) -> Samples:
        """Read by a final evaluation only."""
        return self._prepared(self._data.test)

    def calibration(self, size: int) -> Tensor:
        """A fixed draw of training inputs, without augmentation."""
        chosen = permutation(self.count, Purpose.CALIBRATION, device=self.images.device)[:size]
        return self._normalised(self.images[chosen])

    def _samples(self) -> Tensor:
        return torch.arange(self.batch, device=self.images.device)

    def _permutation(self, rng_seed: int, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != (rng_seed, epoch):
            device = self.images.device
            self._order = (rng_seed, epoch), permutation(self.count, rng_seed, epoch, Purpose.ORDER, device=device)
        return self._order[1]

    def _shifted(self, images: Tensor, rng_seed: int, index: int) -> Tensor:
        """Each image moved by up to `shift` pixels both ways, zeros coming in."""
        _, _, height, width = images.shape
        padded = F.pad(images, [self.shift] * 4)
        span = 2 * self.shift + 1
        down = counter_below(span, rng_seed, index, Purpose.SHIFT_ROWS, self._samples())
        right = counter_below(span, rng_seed, index, Purpose.SHIFT_COLUMNS, self._samples())
        rows = down[:, None] + torch.arange(height, device=images.device)
        columns = right[:, None] + torch.arange(width, device=images.device)
        # Advanced indices around a slice put their axes first: (B, H, W, C).
        picked = padded[self._samples()[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2)

    def _normalised(self, images: Tensor) -> Tensor:
        return ((images.float() / 255 - self.mean) / self.std).contiguous()

    def _prepared(self, part: ImagePart) -> Samples:
        device = self.images.device
        return Samples(self._normalised(part.images.to(device)), part.labels.to(device))


class TextBatches:
    """Windows of `block` characters; the target of each is the next one."""

    def __init__(self, data: TextData, batch: int, block: int, *, device: torch.device) -> None:
        count = len(data.train) - block
        if count < batch:
            raise DataError(
                f"{data.name} has {len(data.train)} training characters, too few for {batch} windows of {block}"
            )
        self.batch, self.block, self.count = batch, block, count
        self.text = data.train.to(device)
        self._data = data

    def minibatch(self, rng_seed: int, index: int) -> Samples:
        """The `index`-th minibatch of an episode: windows at random places."""
        samples = torch.arange(self.batch, device=self.text.device)
        return self._windows(self.text, counter_below(self.count, rng_seed, index, Purpose.WINDOW, samples))

    def validation(self) -> Samples:
        """The validation stretch, cut into windows."""
        return self._cut(self._data.validation)

    def test(self) -> Samples:
        """Read by a final evaluation only."""
        return self._cut(self._data.test)

    def calibration(self, size: int) -> Tensor:
        """A fixed draw of training windows."""
        samples = torch.arange(size, device=self.text.device)
        return self._windows(self.text, counter_below(self.count, Purpose.CALIBRATION, samples)).inputs

    def _windows(self, text: Tensor, starts: Tensor) -> Samples:
        picked = text[starts[:, None] + torch.arange(self.block + 1, device=text.device)]
        return Samples(picked[:, :-1], picked[:, 1:])

    def _cut(self, text: Tensor) -> Samples:
        text = text.to(self.text.device)
        starts = torch.arange(0, len(text) - self.block, self.block, device=text.device)
        return self._windows(text, starts)


Batches = ImageBatches | TextBatches
