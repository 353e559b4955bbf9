"""What a growth run notes at a checkpoint: tensors as JSON, and policy states taken apart and put together."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from esper.leyline.records import Json


def pack(tensor: Tensor) -> Json:
    """A tensor as JSON, to the bit."""
    content = tensor.detach().cpu().contiguous()
    return {
        "dtype": str(content.dtype).removeprefix("torch."),
        "shape": list(content.shape),
        "bytes": content.flatten().view(torch.uint8).numpy().tobytes().hex(),
    }


def unpack(packed: Json) -> Tensor:
    """The tensor that `pack` wrote."""
    dtype = getattr(torch, packed["dtype"])
    content = bytearray.fromhex(packed["bytes"])
    if not content:  # torch refuses an empty buffer
        return torch.empty(packed["shape"], dtype=dtype)
    return torch.frombuffer(content, dtype=dtype).reshape(packed["shape"]).clone()


def leaves_of(state: Any) -> Iterator[Tensor]:  # Any: the state of a policy
    """Its tensors, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, tuple | list):
        for part in state:
            yield from leaves_of(part)


def rebuilt(state: Any, tensors: Iterator[Tensor]) -> Any:
    """A state of the same form, with these tensors."""
    if isinstance(state, Tensor):
        return next(tensors)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(rebuilt(part, tensors) for part in state))
    return type(state)(rebuilt(part, tensors) for part in state) if isinstance(state, tuple | list) else state
