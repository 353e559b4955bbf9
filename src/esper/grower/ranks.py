"""Growth under `DistributedDataParallel`: rank 0 decides, all ranks grow alike, gradients of seeds are averaged.

DDP reduces the gradients of the parameters that it saw when it was built. Seeds come later, so each of them averages
its own gradient as soon as it is complete. Accumulation is no problem: the mean of what is already a mean stays.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from esper.grower.container import CHILD
from esper.leyline import BadValueError

SHARDED = ("FullyShardedDataParallel", "DeepSpeedEngine", "ShardedDataParallel")
IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a model with the names that DDP leaves out when it is built"""


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module; refuses wrappers that shard parameters and modules that are compiled already."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if isinstance(model, nn.DataParallel):
        raise BadValueError(
            "DataParallel copies the model for every batch, seeds included: use DistributedDataParallel, or pass "
            "model.module and train it on one device"
        )
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if sharded := sorted(kinds & {*SHARDED, "FSDPModule"}):
            raise BadValueError(
                f"{sharded[0]} shards the parameters, so a seed cannot join them: use DistributedDataParallel, or grow "
                "on one device and shard the finished model"
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


def share(payload: bytes | None, device: torch.device) -> bytes:
    """The bytes of rank 0 on all ranks."""
    place = _exchange_device(device)
    size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64, device=place)
    dist.broadcast(size, src=0)
    content = torch.zeros(int(size), dtype=torch.uint8, device=place)
    if payload is not None:
        content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    dist.broadcast(content, src=0)
    return content.cpu().numpy().tobytes()


def average_gradients(seed: nn.Module) -> None:
    """Let a seed average its gradients over the ranks as they arrive."""
    if world() > 1:
        for parameter in seed.parameters():
            parameter.register_post_accumulate_grad_hook(_average)


def leave_out(host: nn.Module, seeds: Iterable[str]) -> None:
    """Let a DDP that is built from now on leave out seeds, by parameter: it would wait for those that die."""
    others = [name for name in getattr(host, IGNORED, ()) if not name.startswith(f"{CHILD}.")]
    if names := [*others, *seeds] if world() > 1 else others:
        setattr(host, IGNORED, names)
    elif hasattr(host, IGNORED):
        delattr(host, IGNORED)


def equalise(module: nn.Module) -> None:
    """Give a newborn, or a norm whose statistics were chosen, the tensors of rank 0 on all ranks."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, src=0)


def _average(parameter: Tensor) -> None:
    assert parameter.grad is not None
    dist.all_reduce(parameter.grad)
    parameter.grad.div_(world())


def _exchange_device(device: torch.device) -> torch.device:
    return device if dist.get_backend() == "nccl" else torch.device("cpu")
