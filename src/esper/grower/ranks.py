"""Growth under `DistributedDataParallel`: rank 0 decides, all ranks grow alike, gradients of seeds are averaged.

DDP reduces the gradients of the parameters that it saw when it was built. Seeds come later, so each of them averages its
own gradient as soon as it is complete. That holds under accumulation too: the mean of what is already a mean stays.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.leyline import BadValueError

SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine", "ShardedDataParallel")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module; refuses wrappers that shard parameters and modules that are compiled already."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if sharded := sorted(kinds & {*SHARDED, "FSDPModule"}):
            raise BadValueError(
                f"{sharded[0]} shards the parameters, so a seed cannot join them: use DistributedDataParallel, or grow on "
                "one device and shard the finished model"
            )
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            where = f"submodule {name!r}" if name else "the model"
            raise BadValueError(
                f"{where} is compiled already and would bypass the slots: build the Grower, then compile"
            )
    return model


def world() -> int:
    """Number of ranks that train together; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process among them."""
    return dist.get_rank() if world() > 1 else 0


def share(numbers: list[float] | None, count: int, device: torch.device) -> list[float]:
    """Numbers of rank 0 on all ranks; `count` of them."""
    if world() == 1:
        assert numbers is not None
        return numbers
    tensor = torch.zeros(count, dtype=torch.float64, device=_exchange_device(device))
    if numbers is not None:
        tensor.copy_(torch.tensor(numbers, dtype=torch.float64))
    dist.broadcast(tensor, src=0)
    return tensor.tolist()


def reduce_gradients(seed: nn.Module) -> None:
    """Start the common life of a seed: equal weights on all ranks, and gradients averaged as they arrive."""
    if world() == 1:
        return
    for parameter in seed.parameters():
        dist.broadcast(parameter.data, src=0)
        parameter.register_post_accumulate_grad_hook(_average)


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad.div_(world())


def _exchange_device(device: torch.device) -> torch.device:
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
