"""A task's data on a device: minibatches in counter-based order, and the fixed sets that rows are compared on.

A random number is a hash of what it is for, not of how many were drawn before it. So data order and augmentation are a
pure function of (seed, minibatch, purpose), the same on every device, and hosts draw in parallel.
"""

from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper.leyline import DataError
from esper.tolaria.data import ImageData, ImagePart, TextData

MASK = 0xFFFFFFFF
AHEAD = 32  # minibatches whose augmentation is drawn at once on CUDA

Version = tuple[Tensor, int]
"""A tensor, and how often it had been changed in place."""


def _same(before: Version, seeds: Tensor) -> bool:
    """Whether these seeds are that tensor, unchanged. Comparing values would be a device sync per minibatch on CUDA."""
    return before[0] is seeds and before[1] == seeds._version


def counter_hash(*keys: int | Tensor) -> Tensor:
    """A number in [0, 2³²) per element of the broadcast keys (int64). Mixes in each key with the murmur3 finaliser."""
    value = torch.zeros((), dtype=torch.int64)
    for key in keys:
        part = torch.as_tensor(key, dtype=torch.int64)
        # Seeds have 63 bits; both halves count.
        for half in (part & MASK, (part >> 32) & MASK):
            value = value.to(half.device) if half.dim() else value
            # Products overflow 64 bits; their lower 32 are right all the same.
            value = ((value ^ half) * 0x9E3779B1 + 0x7F4A7C15) & MASK
            value = ((value ^ (value >> 16)) * 0x85EBCA6B) & MASK
            value = ((value ^ (value >> 13)) * 0xC2B2AE35) & MASK
            value = value ^ (value >> 16)
    return value


def permutation(count: int, *keys: int | Tensor, device: torch.device | None = None) -> Tensor:
    """A permutation of `count` numbers per element of the broadcast keys, on the last axis."""
    return counter_hash(*keys, torch.arange(count, device=device)).argsort(dim=-1, stable=True)


class Purpose(IntEnum):
    """What a random number is for; part of its key."""

    ORDER = 0
    WINDOW = 1
    SHIFT_ROWS = 2
    SHIFT_COLUMNS = 3
    FLIP = 4
    CALIBRATION = 5


class Samples(NamedTuple):
    """Inputs ready for a host, and their targets."""

    inputs: Tensor
    targets: Tensor


class ImageBatches:
    """Images stay uint8 on the device; a minibatch is gathered, shifted, flipped and normalised there."""

    def __init__(self, data: ImageData, batch: int, device: torch.device, shift: int = 0, flip: bool = False) -> None:
        count = len(data.train.labels)
        if count < batch:
            raise DataError(f"{data.name} has {count} training images, fewer than a batch of {batch}")
        self.batch, self.count, self.shift, self.flip = batch, count, shift, flip
        self.images, self.labels = (tensor.to(device) for tensor in data.train)
        self.mean = torch.tensor(data.mean, device=device)[:, None, None]
        # A channel that never changes stays at zero instead of becoming NaN.
        self.std = torch.tensor(data.std, device=device)[:, None, None].clamp_min(1e-6)
        self._data = data
        # What was drawn last: for which pass or minibatch, for which seeds, and the draw itself.
        self._order: tuple[int, Version, Tensor] | None = None
        self._ahead: tuple[int, Version, Tensor] | None = None
        self._seed: tuple[int, Tensor] | None = None

    def minibatch(self, rng_seed: int, index: int) -> Samples:
        """The `index`-th minibatch of an episode: passes over shuffled data, one after the other."""
        if self._seed is None or self._seed[0] != rng_seed:
            self._seed = rng_seed, torch.tensor([rng_seed], device=self.images.device)
        return Samples(*(part[0] for part in self.minibatches(self._seed[1], index)))

    def minibatches(self, seeds: Tensor, index: int) -> Samples:
        """The same for several seeds (G,), on the device of the data: inputs (G, B, C, H, W), targets (G, B)."""
        chosen = self._chosen(seeds, index)
        images = self.images[chosen]
        if self.shift:
            images = self._shifted(images, seeds, index)
        if self.flip:
            flipped = self._draw(2, seeds, index, Purpose.FLIP).bool()
            images = torch.where(flipped[..., None, None, None], images.flip(-1), images)
        return Samples(self._normalised(images), self.labels[chosen])

    def rows(self, seeds: Tensor, group: Tensor, index: int, dtype: torch.dtype) -> Samples:
        """The minibatch of every row of a fleet: row r uses the draw of `group[r]`. Inputs (R, B, C, H, W)."""
        if self.images.device.type != "cuda":
            inputs, targets = self.minibatches(seeds, index)
            return Samples(inputs.to(dtype)[group], targets[group])
        from esper.kasmina.kernels.rows import draw_rows  # needs triton, which only CUDA builds bring along

        chosen, moves = self._chosen(seeds, index), self._moves(seeds, index)
        inputs = draw_rows(self._channels_last, chosen, moves, group, *self._affine, shift=self.shift, dtype=dtype)
        return Samples(inputs, self.labels[chosen][group])

    def _moves(self, seeds: Tensor, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """By how much the images of a minibatch move down and right, and whether they are flipped: (G, B) each.

        Drawn for many minibatches at once, because a hash is a hundred kernels.
        """
        first = index // AHEAD * AHEAD
        if self._ahead is None or self._ahead[0] != first or not _same(self._ahead[1], seeds):
            device, span, batch = self.images.device, 2 * self.shift + 1, self.batch
            purposes = torch.tensor([Purpose.SHIFT_ROWS, Purpose.SHIFT_COLUMNS, Purpose.FLIP], device=device)
            limits = torch.tensor([span, span, 1 + self.flip], device=device)
            indices, samples = torch.arange(first, first + AHEAD, device=device), torch.arange(batch, device=device)
            hashes = counter_hash(seeds[:, None], indices[:, None, None], purposes[:, None, None, None], samples)
            self._ahead = first, (seeds, seeds._version), hashes % limits[:, None, None, None]
        down, right, flip = self._ahead[2][:, index - first]
        return down, right, flip

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        """Factor and offset per channel that normalise a pixel."""
        return 1 / (255 * self.std.flatten()), -(self.mean / self.std).flatten()

    @cached_property
    def _channels_last(self) -> Tensor:
        return self.images.permute(0, 2, 3, 1).contiguous()

    def _chosen(self, seeds: Tensor, index: int) -> Tensor:
        """Numbers of the training images of a minibatch (G, B)."""
        start = index * self.batch
        first, last = start // self.count, (start + self.batch - 1) // self.count
        order = torch.cat([self._permutations(seeds, epoch) for epoch in range(first, last + 1)], dim=1)
        return order[:, start - first * self.count :][:, : self.batch].contiguous()

    def validation(self) -> Samples:
        """Images carved from the training set, the same for every host."""
        return self._prepare(self._data.validation)

    def end(self) -> Samples:
        """All validation images, those for the end of an episode included."""
        extra = () if self._data.extra is None else (self._prepare(self._data.extra),)
        return Samples(*map(torch.cat, zip(self.validation(), *extra, strict=True)))

    def test(self) -> Samples:
        """Test images, for a final evaluation only."""
        return self._prepare(self._data.test)

    def calibration(self, size: int) -> Tensor:
        """A fixed draw of training inputs, without augmentation."""
        chosen = permutation(self.count, Purpose.CALIBRATION, device=self.images.device)[:size]
        return self._normalised(self.images[chosen])

    def _draw(self, limit: int, seeds: Tensor, index: int, purpose: Purpose) -> Tensor:
        samples = torch.arange(self.batch, device=self.images.device)
        return counter_hash(seeds[:, None], index, purpose, samples) % limit  # biased by less than limit / 2³²

    def _permutations(self, seeds: Tensor, epoch: int) -> Tensor:
        """(G, training images), cached until the seeds or the epoch change."""
        cached = self._order
        if cached is None or cached[0] != epoch or not _same(cached[1], seeds):
            order = permutation(self.count, seeds[:, None], epoch, Purpose.ORDER, device=self.images.device)
            cached = self._order = epoch, (seeds, seeds._version), order
        return cached[2]

    def _shifted(self, images: Tensor, seeds: Tensor, index: int) -> Tensor:
        """Each image moved by up to `shift` pixels in both directions and filled up with zeros."""
        *_, height, width = images.shape
        padded = F.pad(images.flatten(0, 1), [self.shift] * 4)
        span = 2 * self.shift + 1
        down, right = (self._draw(span, seeds, index, p).flatten() for p in (Purpose.SHIFT_ROWS, Purpose.SHIFT_COLUMNS))
        rows = down[:, None] + torch.arange(height, device=images.device)
        columns = right[:, None] + torch.arange(width, device=images.device)
        which = torch.arange(len(padded), device=images.device)[:, None, None]
        # Advanced indices around a slice put their axes first: (G·B, H, W, C).
        picked = padded[which, :, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).reshape(images.shape)

    def _normalised(self, images: Tensor) -> Tensor:
        return ((images.float() / 255 - self.mean) / self.std).contiguous()

    def _prepare(self, part: ImagePart) -> Samples:
        images, labels = (tensor.to(self.images.device) for tensor in part)
        return Samples(self._normalised(images), labels)


class TextBatches:
    """Windows of `block` characters; the target of each is the next one."""

    def __init__(self, data: TextData, batch: int, block: int, *, device: torch.device) -> None:
        count = len(data.train) - block
        if count < batch:
            raise DataError(f"{data.name}: {len(data.train)} characters are too few for {batch} windows of {block}")
        self.batch, self.block, self.count = batch, block, count
        self.text = data.train.to(device)
        self._data = data

    def minibatch(self, rng_seed: int, index: int) -> Samples:
        """The `index`-th minibatch of an episode: windows at random positions."""
        return Samples(*(part[0] for part in self.minibatches(torch.tensor([rng_seed]), index)))

    def minibatches(self, seeds: Tensor, index: int) -> Samples:
        """The same for several seeds (G,) at once: (G, B, block) both."""
        samples = torch.arange(self.batch, device=self.text.device)
        draws = counter_hash(seeds.to(self.text.device)[:, None], index, Purpose.WINDOW, samples)
        return self._windows(self.text, draws % self.count)

    def rows(self, seeds: Tensor, group: Tensor, index: int, dtype: torch.dtype) -> Samples:
        """The minibatch of every row of a fleet: row r uses the draw of `group[r]`. (R, B, block) both."""
        return Samples(*(part[group] for part in self.minibatches(seeds, index)))

    def validation(self) -> Samples:
        """The validation text, cut into windows."""
        return self._cut(self._data.validation)

    end = validation

    def test(self) -> Samples:
        """The test text, for a final evaluation only."""
        return self._cut(self._data.test)

    def calibration(self, size: int) -> Tensor:
        """A fixed draw of training windows."""
        samples = torch.arange(size, device=self.text.device)
        return self._windows(self.text, counter_hash(Purpose.CALIBRATION, samples) % self.count).inputs

    def _windows(self, text: Tensor, starts: Tensor) -> Samples:
        picked = text[starts[..., None] + torch.arange(self.block + 1, device=text.device)]
        return Samples(picked[..., :-1], picked[..., 1:])

    def _cut(self, text: Tensor) -> Samples:
        text = text.to(self.text.device)
        return self._windows(text, torch.arange(0, len(text) - self.block, self.block, device=text.device))


Batches = ImageBatches | TextBatches
