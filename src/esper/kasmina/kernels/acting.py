"""Several banks of one slot act on their rows, through kernels that run whole stages."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.kernels.programs import Entries, Streams, act, take_back
from esper.kasmina.row_layout import BACK, STORED
from esper.kasmina.stages import Chain, Squeeze

Over = Callable[[Sequence[Any]], AbstractContextManager[Iterable[Any]]]
"""Walks over items, one after the other or on parallel streams."""


class Group(NamedTuple):
    """The seeds of a bank that act."""

    program: Chain | Squeeze
    entries: Entries
    matrix: Tensor  # (members, parameters)


def _stored(main: Tensor, shadow: Tensor | None) -> Streams:
    others = None if shadow is None else shadow.permute(STORED["cuda"]).contiguous()
    return Streams(main.permute(STORED["cuda"]).contiguous(), others)


def _back(streams: Streams) -> tuple[Tensor, Tensor | None]:
    shadow = streams.shadow
    return streams.main.permute(BACK["cuda"]), None if shadow is None else shadow.permute(BACK["cuda"])


class _Act(torch.autograd.Function):
    """A row has one seed in a slot, so banks are independent, and change copies of the streams in place."""

    @staticmethod
    def forward(
        ctx: Any, groups: Sequence[Group], over: Over, keeps: bool, main: Tensor, shadow: Tensor | None, *_: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        streams = _stored(main, shadow)
        target = streams.copy()
        with over(groups) as walk:
            kept = [act(program, streams, target, *own, keeps=keeps) for program, *own in walk]
        ctx.save_for_backward(*streams)
        ctx.groups, ctx.over, ctx.kept = groups, over, kept
        return _back(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, main: Tensor, shadow: Tensor | None) -> tuple[Tensor | None, ...]:
        streams, incoming = Streams(*ctx.saved_tensors), _stored(main, shadow)
        all_kept, ctx.kept = ctx.kept, None  # freed with this call
        target = incoming.copy()
        matrices = [group.matrix for group in ctx.groups]
        sizes = [matrix.numel() for matrix in matrices]
        zeros = matrices[0].new_zeros(sum(sizes)).split(sizes)  # of all banks at once
        gradients = [part.view_as(matrix) for part, matrix in zip(zeros, matrices, strict=True)]
        with ctx.over(list(zip(ctx.groups, all_kept, gradients, strict=True))) as walk:
            for (program, entries, matrix), kept, gradient in walk:
                take_back(program, kept, streams, incoming, target, entries, matrix, gradient)
        return None, None, None, *_back(target), *gradients


def act_whole(h: Tensor, shadow_h: Tensor | None, groups: Sequence[Group], over: Over) -> tuple[Tensor, Tensor | None]:
    """The streams of main and shadow rows (R, B, C, H, W) with the effects of these banks."""
    matrices = [group.matrix for group in groups]
    keeps = torch.is_grad_enabled()
    result: tuple[Tensor, Tensor | None] = _Act.apply(groups, over, keeps, h, shadow_h, *matrices)  # type: ignore[no-untyped-call]
    return result
