"""An accelerator that every machine has: tensors whose numbers cannot be read without being seen.

A `RemoteTensor` says that it is on another device and keeps its numbers to itself. All work on it passes through
`watched_device`, which computes, hands out remote tensors again, and writes down whatever lets numbers or sizes out:
copies to the CPU, `item`, `bool`, `nonzero`. What would bypass it (`tolist`, `numpy`) fails.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("lazy")
"""A device type that torch knows, with no hardware or backend behind it."""
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "unique", "_unique2")


class RemoteTensor(Tensor):
    """Numbers on the watched device."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> "RemoteTensor":
        made: RemoteTensor = Tensor._make_wrapper_subclass(
            cls, inside.shape, strides=inside.stride(), dtype=inside.dtype, device=DEVICE
        )
        made.inside = inside
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it without cls
        raise AssertionError(f"{function} on the device while nobody watches")


class watched_device(TorchDispatchMode):  # noqa: N801  # used as a context, like torch.no_grad
    """While this is on, remote tensors work; `reads` lists what let numbers out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.reads: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        inputs: list[bool] = []

        def open_up(value: Any) -> Any:
            inputs.append(isinstance(value, RemoteTensor))
            return value.inside if isinstance(value, RemoteTensor) else value

        plain_args, plain_kwargs = tree_map(open_up, args), tree_map(open_up, kwargs)
        remote, target = any(inputs), kwargs.get("device")
        if target is not None:
            remote_target = torch.device(target) == DEVICE
            if remote and not remote_target:
                self.reads.append(f"{name} to {target}")
            remote, plain_kwargs["device"] = remote_target, "cpu"
        elif remote and (name in READS or (name == "index" and _by_mask(plain_args))):
            self.reads.append(name)
        result = function(*plain_args, **plain_kwargs)
        return tree_map(lambda value: _wrap(value) if remote else value, result)


def _by_mask(args: Any) -> bool:
    return any(index is not None and index.dtype is torch.bool for index in args[1])


def _wrap(value: Any) -> Any:
    return RemoteTensor(value) if isinstance(value, Tensor) else value


def remote(tensor: Tensor) -> Tensor:
    """A tensor of the CPU, moved to the watched device."""
    return RemoteTensor(tensor)
