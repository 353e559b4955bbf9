"""Convolutional host: conv → BatchNorm → ReLU → pool per block, global average, linear."""

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from esper.kasmina.host import Host, HostConfig, Segment
from esper.kasmina.layers import BatchNorm2d, Conv2d, Linear, Statistics, max_pool, named_statistics
from esper.leyline import BadValueError, SlotSpec, slot_id


class ConvSegment(Segment):
    """conv → BatchNorm → ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, masked: bool) -> None:
        super().__init__()
        self.conv = Conv2d(inputs, outputs, kernel_size, masked=masked)
        self.norm = BatchNorm2d(outputs)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        h, statistics = self.norm(self.conv(h), train)
        return F.relu(h), named_statistics("norm", statistics)


class PooledSegment(Segment):
    """A convolutional segment together with the pool behind it, for a pass that has nothing to do between the two."""

    def __init__(self, segment: ConvSegment) -> None:
        super().__init__()
        self.conv, self.norm = segment.conv, segment.norm

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        h, statistics = self.norm.relu_pool(self.conv(h), train)
        return h, named_statistics("norm", statistics)


class PoolSegment(Segment):
    """Max pooling over 2×2."""

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return max_pool(h), {}


class ClassifierSegment(Segment):
    """Global average, then the class scores."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.linear = Linear(width, classes)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        return self.linear(h.mean((-2, -1))), {}


class CNNHost(Host):
    """A block per entry of `channels`; the first `pools` blocks end in a pool.

    Slots: `r0c<k>` before the pool of block k, `r1c<k>` after it. With `masked`, the taps of all kernels can be
    switched off per host (`blind`).
    """

    def __init__(
        self,
        channels: Sequence[int] = (8, 16, 32),
        kernel_size: int = 3,
        pools: int | None = None,
        classes: int = 10,
        *,
        in_channels: int = 3,
        resolution: int = 32,
        masked: bool = False,
    ) -> None:
        pools = len(channels) if pools is None else pools
        if not channels or min(channels) < 1:
            raise BadValueError(f"channels {tuple(channels)} must be one or more positive widths")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise BadValueError(f"kernel_size {kernel_size} must be odd and positive")
        if not 0 <= pools <= len(channels):
            raise BadValueError(f"pools {pools} must be between 0 and the number of blocks, {len(channels)}")
        if resolution >> pools < 1:
            raise BadValueError(f"resolution {resolution} is too small for {pools} poolings by 2")
        segments: list[Segment] = []
        places: list[tuple[str, int, int]] = []
        side, width_in = resolution, in_channels
        for block, width in enumerate(channels):
            segments.append(ConvSegment(width_in, width, kernel_size, masked))
            places.append((slot_id(0, block), width, side))
            if block < pools:
                side //= 2
                segments.append(PoolSegment())
                places.append((slot_id(1, block), width, side))
            width_in = width
        segments.append(ClassifierSegment(width_in, classes))
        slots = [
            SlotSpec(name, width, "image", position=(index + 1) / len(segments), resolution=side)
            for index, (name, width, side) in enumerate(places)
        ]
        super().__init__(segments, slots)
        self._config: HostConfig = {
            "channels": list(channels),
            "kernel_size": kernel_size,
            "pools": pools,
            "classes": classes,
            "in_channels": in_channels,
            "resolution": resolution,
            "masked": masked,
        }

    def config(self) -> HostConfig:
        return dict(self._config)

    def blind(self) -> None:
        """Switch off all taps but the centre one: the host can no longer see shapes. Needs `masked`."""
        for segment in self.segments:
            if isinstance(segment, ConvSegment):
                mask = segment.conv.mask
                if mask is None:
                    raise BadValueError("only a host built with masked=True can be blinded")
                mask.zero_()
                centre = segment.conv.kernel_size // 2
                mask[centre, centre] = 1


Host.KINDS["CNNHost"] = CNNHost
