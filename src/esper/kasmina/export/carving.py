"""A host without what its masks switch off: smaller kernels, fewer channels, the same outputs."""

import copy
from collections.abc import Collection
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional as F

from esper.kasmina.export.source import ExportError
from esper.kasmina.hosts import ClassifierSegment, CNNHost, ConvSegment, Host, Segment
from esper.kasmina.layers import Conv2d, Linear, Statistics, named_statistics
from esper.kasmina.norms import BatchNorm2d
from esper.leyline import slot_id

Module = TypeVar("Module", bound=nn.Module)


class PaddedConvSegment(Segment):
    """conv → BatchNorm → ReLU, then channels of zeros, into which a seed behind it writes."""

    def __init__(self, conv: Conv2d, norm: BatchNorm2d, more: int) -> None:
        super().__init__()
        self.conv, self.norm, self.more = conv, norm, more

    def forward(self, h: Tensor, train: bool) -> tuple[Tensor, Statistics]:
        h, statistics = self.norm(self.conv(h), train)
        return F.pad(F.relu(h), (0, 0, 0, 0, 0, self.more)), named_statistics("norm", statistics)


def is_limited(host: Host) -> bool:
    """Whether masks switch anything off."""
    masks = (buffer for name, buffer in host.named_buffers() if name.endswith("mask"))
    return isinstance(host, CNNHost) and any(not bool(mask.bool().all()) for mask in masks)


def carve(host: Host, statistics: Statistics, grown: Collection[str]) -> Host:
    """A copy with these running statistics (by name in the host; else its own), and with seeds in the slots of `grown`,
    without masks."""
    carved = copy.deepcopy(host)
    for name, value in statistics.items():
        carved.get_buffer(name).copy_(value)
    inputs, block = None, 0  # how many channels the next segment reads; None: all
    for index, segment in enumerate(carved.segments):
        if isinstance(segment, ConvSegment):
            conv, norm = _carve_conv(segment, inputs)
            inputs, more = norm.width, segment.norm.width - norm.width
            smaller: Segment = segment
            smaller.conv, smaller.norm = conv, norm
            if more and any(slot_id(row, block) in grown for row in range(2)):
                smaller, inputs = PaddedConvSegment(conv, norm, more), None
            carved.segments[index] = smaller
            block += 1
        elif isinstance(segment, ClassifierSegment) and inputs is not None:
            linear = segment.linear
            segment.linear = _with(Linear(inputs, linear.outputs), weight=linear.weight[:, :inputs], bias=linear.bias)
    return carved


def _carve_conv(segment: ConvSegment, inputs: int | None) -> tuple[Conv2d, BatchNorm2d]:
    conv, norm = segment.conv, segment.norm
    live, taps = norm.mask, conv.mask
    width = norm.width if live is None else int(live.sum())
    if live is not None and not bool(live[:width].all()):
        raise ExportError("only the last channels of a block may be masked; use CNNHost.limit")
    weight, centre = conv.weight[:width, :inputs], conv.kernel_size // 2
    if taps is not None and int(taps.sum()) == 1 and bool(taps[centre, centre]):
        weight, taps = weight[:, :, centre, centre, None, None], None
    masked = taps is not None and not bool(taps.all())
    smaller = _with(Conv2d(weight.shape[1], width, weight.shape[-1], masked=masked), weight=weight)
    if masked and taps is not None and smaller.mask is not None:
        smaller.mask.copy_(taps)
    kept = {name: value[:width] for name, value in norm.state_dict(keep_vars=True).items() if name != "mask"}
    return smaller, _with(BatchNorm2d(width, eps=norm.eps), **kept)


def _with(module: Module, **tensors: Tensor | None) -> Module:
    """The module with copies of these tensors; a frozen parameter stays frozen."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        own = tensor.detach().contiguous().clone()
        setattr(module, name, nn.Parameter(own, tensor.requires_grad) if name in module._parameters else own)
    return module
