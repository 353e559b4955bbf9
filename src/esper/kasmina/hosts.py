"""Hosts: ordered lists of segments with slots between them. A CNN and a GPT are built in."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from esper.kasmina.layers import (
    Conv2d,
    Embedding,
    Linear,
    SelfAttention,
    Statistics,
    max_pool,
    named_statistics,
    write_statistics,
)
from esper.kasmina.norms import BatchNorm2d, LayerNorm
from esper.leyline import BadValueError, EsperError, HostMismatchError, SlotSpec, slot_id
from esper.leyline.numbers import refuse, require_known

HostConfig = dict[str, int | bool | list[int]]  # constructor arguments of a built-in host, as JSON


class Segment(nn.Module):
    """The part of a host between two slots."""

    __call__: Callable[..., tuple[Tensor, Statistics]]

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """The activation behind the segment, and in training the batch statistics by buffer name."""
        raise NotImplementedError


class Host(nn.Module):
    """Segments with slots between them. `slots[i]` lies after `segments[i]`."""

    KINDS: ClassVar[dict[str, type["Host"]]] = {}
    """Hosts that a checkpoint can rebuild from their configuration."""

    slots: tuple[SlotSpec, ...]
    conductance: Tensor
    _config: HostConfig | None = None

    def __init__(self, segments: Sequence[Segment], slots: Sequence[SlotSpec]) -> None:
        super().__init__()
        wrong = [f"{i}: {type(part).__name__}" for i, part in enumerate(segments) if not isinstance(part, Segment)]
        bad = [slot.slot_id for slot in slots if not slot.slot_id.isidentifier()]
        problems = {
            f"{type(self).__name__} has no segments; a host needs at least one": not segments,
            f"segments {wrong} are no Segment: subclass esper.kasmina.Segment, whose forward(h, train) returns "
            "(activation, statistics), or use attach() for a network of ordinary modules": bool(wrong),
            f"{len(segments)} segments have room for {len(segments) - 1} slots between them, "
            f"but {len(slots)} slots were given": len(slots) != len(segments) - 1,
            f"slot ids {bad} are not names like r1c0": bool(bad),
        }
        refuse(problems, HostMismatchError)
        self.segments = nn.ModuleList(segments)
        self.slots = tuple(slots)
        # Share of a seed's effect that reaches the next segment: 1 in a sound host, 0 in some damaged ones.
        self.register_buffer("conductance", torch.ones(len(slots)))

    def forward(self, x: Tensor) -> Tensor:
        """Run the host alone. In training mode it updates the running statistics."""
        h, statistics = self.run(x, train=self.training)
        write_statistics(self, statistics)
        return h

    def run(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """Output and batch statistics; writes nothing."""
        statistics: Statistics = {}
        for index in range(len(self.segments)):
            h, batch = self.run_segment(index, h, train)
            statistics |= named_statistics(f"segments.{index}", batch)
        return h, statistics

    def run_segment(self, index: int, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        """Run one segment. Raises HostMismatchError, which names the segment, if it cannot take its input."""
        segment = self.segments[index]
        try:
            activation, statistics = segment(h, train)
        except (EsperError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError) as error:
            label, given = f"segment {index} ({type(segment).__name__})", f"{h.dtype} of shape {tuple(h.shape)}"
            raise HostMismatchError(f"{label} cannot run on {given}: {error}") from error
        return activation, statistics

    def config(self) -> HostConfig | None:
        """Constructor arguments of a host that a checkpoint can rebuild; None for others."""
        return None if self._config is None else dict(self._config)

    def live_parameters(self, grown: Collection[str] = ()) -> int:
        """Parameters that take part if there are seeds in the slots of `grown`: all of them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def slot_index(self, slot_id: str) -> int:
        """Index of the segment in front of the slot."""
        ids = [slot.slot_id for slot in self.slots]
        require_known("slot", slot_id, ids)
        return ids.index(slot_id)


def refuse_state(host: Host) -> None:
    """Raise if a segment holds a layer that writes or draws by itself: it would do so in every row."""
    for name, layer in host.segments.named_modules():
        writes = isinstance(layer, _NormBase) and layer.running_mean is not None
        draws = (
            (isinstance(layer, _DropoutNd) and layer.p > 0)
            or (isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0)
            or isinstance(layer, nn.RReLU)
        )
        if writes or draws:
            fault = "writes running statistics" if writes else "draws random numbers"
            raise HostMismatchError(
                f"segments.{name} of {type(host).__name__} is a {type(layer).__name__} that {fault} by itself: "
                "use the norms of esper.kasmina.layers and no dropout, or attach() for foreign networks"
            )


class ConvSegment(Segment):
    """conv → BatchNorm → ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel_size: int, masked: bool) -> None:
        super().__init__()
        self.conv = Conv2d(inputs, outputs, kernel_size, masked=masked)
        self.norm = BatchNorm2d(outputs, masked=masked)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        h, statistics = self.norm(self.conv(h), train)
        return F.relu(h), named_statistics("norm", statistics)


class PooledSegment(Segment):
    """A convolutional segment fused with the pool behind it, for a pass that has nothing to do between them."""

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

    Slots: `r0c<k>` before the pool of block k, `r1c<k>` after it. With `masked`, kernel taps and channels can be masked
    per host (see `limit`).
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
        blocks = len(channels)
        refuse(
            {
                f"channels {tuple(channels)} must be one or more positive widths": min(channels, default=0) < 1,
                f"kernel_size {kernel_size} must be odd and positive": kernel_size < 1 or kernel_size % 2 == 0,
                f"pools {pools} must be between 0 and the number of blocks, {blocks}": not 0 <= pools <= blocks,
                f"resolution {resolution} is too small for {pools} poolings by 2": resolution < 2**pools,
            }
        )
        segments, slots = list[Segment](), list[SlotSpec]()
        side, width_in, total = resolution, in_channels, blocks + pools + 1
        for block, width in enumerate(channels):
            segments.append(ConvSegment(width_in, width, kernel_size, masked))
            slots.append(SlotSpec(slot_id(0, block), width, "image", len(segments) / total, side))
            if block < pools:
                side //= 2
                segments.append(PoolSegment())
                slots.append(SlotSpec(slot_id(1, block), width, "image", len(segments) / total, side))
            width_in = width
        segments.append(ClassifierSegment(width_in, classes))
        super().__init__(segments, slots)
        sizes = {"kernel_size": kernel_size, "pools": pools, "classes": classes, "in_channels": in_channels}
        self._config = {"channels": list(channels), **sizes, "resolution": resolution, "masked": masked}

    def limit(self, block: int, *, centre_only: bool = False, channels: int | None = None) -> None:
        """Let a block compute what one with a 1×1 kernel, or with its first channels alone, would. Needs `masked`."""
        segment = self._blocks()[block]
        taps, live = segment.conv.mask, segment.norm.mask
        if taps is None or live is None:
            raise BadValueError("only blocks of a host built with masked=True can be limited")
        if channels is not None and not 1 <= channels <= len(live):
            raise BadValueError(f"channels {channels} must be between 1 and the block's width, {len(live)}")
        if centre_only:
            centre = segment.conv.kernel_size // 2
            taps.zero_()[centre, centre] = 1
        if channels is not None:
            live[channels:] = 0

    def blind(self) -> None:
        """Leave all blocks the centre of their kernels alone, so that the host cannot see shapes. Needs `masked`."""
        for block in range(len(self._blocks())):
            self.limit(block, centre_only=True)

    @property
    def widths(self) -> list[int]:
        """Channels of each block."""
        return [segment.norm.width for segment in self._blocks()]

    def live_parameters(self, grown: Collection[str] = ()) -> int:
        """Parameters without those of masked taps and channels.

        A seed writes into masked channels, too: with one in a slot of `grown`, what reads them behind it counts.
        """
        total, inputs = 0, self._blocks()[0].conv.inputs
        for block, segment in enumerate(self._blocks()):
            taps, live = segment.conv.mask, segment.norm.mask
            width = segment.norm.width if live is None else int(live.sum())
            total += width * (inputs * (segment.conv.kernel_size**2 if taps is None else int(taps.sum())) + 2)
            revived = any(slot_id(row, block) in grown for row in range(2))
            inputs = segment.norm.width if revived else width
        classifier = self.segments[-1]
        assert isinstance(classifier, ClassifierSegment)
        return total + classifier.linear.outputs * (inputs + 1)

    def _blocks(self) -> list[ConvSegment]:
        return [segment for segment in self.segments if isinstance(segment, ConvSegment)]


class TransformerLayer(nn.Module):
    """h + attention(norm(h)), then h + MLP(norm(h))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.mlp_norm = LayerNorm(width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(4 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(self.attention_norm(h))
        return h + self.down(F.gelu(self.up(self.mlp_norm(h))))


class TokenEmbedding(nn.Module):
    """ids (…, T) → token plus position embedding (…, T, width)."""

    def __init__(self, vocab: int, block: int, width: int) -> None:
        super().__init__()
        self.block = block
        self.token = Embedding(vocab, width)
        self.position = Embedding(block, width)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[-1]
        if length > self.block:
            raise BadValueError(f"a sequence of {length} tokens is longer than the host's block of {self.block}")
        positions = torch.arange(length, device=ids.device).expand(ids.shape)
        return self.token(ids) + self.position(positions)


class TokenSegment(Segment):
    """A chain of layers without statistics."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        for layer in self.layers:
            h = layer(h)
        return h, {}


class GPTHost(Host):
    """Transformer layers in equal `groups` (default: one layer each), with slots `r0c<k>` between them."""

    def __init__(
        self,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        block: int = 64,
        vocab: int = 65,
        *,
        groups: int | None = None,
    ) -> None:
        groups = layers if groups is None else groups
        sizes = {"layers": layers, "width": width, "heads": heads, "block": block, "vocab": vocab, "groups": groups}
        refuse({f"GPTHost of {sizes}: all must be positive": min(sizes.values()) < 1})
        size, rest = divmod(layers, groups)
        refuse(
            {
                f"width {width} is not a multiple of heads {heads}": width % heads > 0,
                f"layers {layers} cannot be cut into {groups} equal groups": rest > 0,
            }
        )
        chains: list[list[nn.Module]] = [[TransformerLayer(width, heads) for _ in range(size)] for _ in range(groups)]
        chains[0].insert(0, TokenEmbedding(vocab, block, width))
        head: OrderedDict[str, nn.Module] = OrderedDict(norm=LayerNorm(width), linear=Linear(width, vocab, bias=False))
        chains[-1].append(nn.Sequential(head))
        slots = [
            SlotSpec(slot_id(0, index), width, "tokens", position=(index + 1) / groups, resolution=block)
            for index in range(groups - 1)
        ]
        super().__init__([TokenSegment(*chain) for chain in chains], slots)
        self._config = dict(sizes)


Host.KINDS.update(CNNHost=CNNHost, GPTHost=GPTHost)
