"""Banks that act through kernels which run whole stages of all their seeds at once."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.kernels.programs import Entries, Streams, act, take_back
from esper.kasmina.row_layout import BACK, STORED
from esper.tolaria.rows import Act

Over = Callable[[Sequence[Any]], AbstractContextManager[Iterable[Any]]]
"""Walks over items, one after the other or on parallel streams."""


def _stored(main: Tensor, shadow: Tensor | None) -> Streams:
    parts = (None if part is None else part.permute(STORED["cuda"]).contiguous() for part in (main, shadow))
    return Streams(*parts)  # type: ignore[arg-type]  # the first is never None


def _back(streams: Streams) -> tuple[Tensor, Tensor | None]:
    shadow = streams.shadow
    return streams.main.permute(BACK["cuda"]), None if shadow is None else shadow.permute(BACK["cuda"])


def _entries(one: Act) -> Entries:
    bank = one.bank
    return Entries(
        one.rows, one.members, one.strength, bank.style, one.valid, one.learns, multiplies="multiply" in bank.styles
    )


class _ActWhole(torch.autograd.Function):
    """Several banks of one slot. A row has one seed there, so they are independent, and change copies in place."""

    @staticmethod
    def forward(
        ctx: Any, acts: Sequence[Act], over: Over, keeps: bool, main: Tensor, shadow: Tensor | None, *matrices: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        streams = _stored(main, shadow)
        target = streams.copy()
        with over(list(zip(acts, matrices, strict=True))) as walk:
            kept = [act(one.bank.program, streams, target, _entries(one), matrix, keeps=keeps) for one, matrix in walk]
        ctx.save_for_backward(*streams, *matrices)
        ctx.acts, ctx.over, ctx.kept = acts, over, kept
        return _back(target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, main: Tensor, shadow: Tensor | None) -> tuple[Tensor | None, ...]:
        own_main, own_shadow, *matrices = ctx.saved_tensors
        streams, incoming = Streams(own_main, own_shadow), _stored(main, shadow)
        target = incoming.copy()
        sizes = [matrix.numel() for matrix in matrices]
        zeros = torch.zeros(sum(sizes), device=main.device, dtype=matrices[0].dtype).split(sizes)
        gradients = [part.view_as(matrix) for part, matrix in zip(zeros, matrices, strict=True)]
        with ctx.over(list(zip(ctx.acts, ctx.kept, matrices, gradients, strict=True))) as walk:
            for one, kept, matrix, gradient in walk:
                take_back(one.bank.program, kept, streams, incoming, target, _entries(one), matrix, gradient)
        return None, None, None, *_back(target), *gradients


def act_whole(h: Tensor, shadow_h: Tensor | None, acts: Sequence[Act], over: Over) -> tuple[Tensor, Tensor | None]:
    """The streams of main and shadow rows with the effects of these banks."""
    matrices = [one.bank.weights.whole for one in acts]
    keeps = torch.is_grad_enabled()
    result: tuple[Tensor, Tensor | None] = _ActWhole.apply(acts, over, keeps, h, shadow_h, *matrices)  # type: ignore[no-untyped-call]
    return result
