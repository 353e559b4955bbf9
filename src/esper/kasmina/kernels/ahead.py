"""Compiles the kernels of seeds before the first of them grows."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from esper.kasmina.kernels.launching import compiling_ahead
from esper.kasmina.kernels.programs import Entries, Streams, act, take_back, worth
from esper.kasmina.stages import Chain, Squeeze

SAMPLES, ROWS = 2, 4  # of streams that nothing runs on


class Kind(NamedTuple):
    """Seeds of one blueprint in one slot."""

    program: Chain | Squeeze
    matrix: Tensor  # (members, parameters)
    width: int
    side: int  # of the slot's images


def compile_seeds(kinds: Iterable[Kind], dtype: torch.dtype) -> None:
    """Compile what these seeds need on streams of `dtype`: forward and backward, evaluation, probe."""
    with compiling_ahead():
        for kind in kinds:
            _all_passes(kind, dtype)


def _all_passes(kind: Kind, dtype: torch.dtype) -> None:
    program, matrix, device = kind.program, kind.matrix, kind.matrix.device
    stream = torch.zeros(SAMPLES, kind.side, kind.side, ROWS, kind.width, device=device, dtype=dtype)
    numbers, flags = (torch.zeros(ROWS, device=device, dtype=own) for own in (torch.int64, torch.bool))
    entries = Entries(numbers, numbers, flags.to(matrix.dtype), numbers, flags, flags, multiplies=False)
    streams = Streams(stream, stream)
    kept = act(program, streams, streams, entries, matrix, keeps=True)
    take_back(program, kept, streams, streams, streams, entries, matrix, matrix)
    act(program, streams, streams, entries, matrix, keeps=False)
    worth(program, stream, stream, matrix)
