"""The one door from the device to Python."""

import torch
from torch import Tensor


def fetch(*tensors: Tensor) -> list[Tensor]:
    """These tensors on the CPU, in float64 and in their own shapes. Host sync: one, however many they are.

    Counts stay exact up to 2^53. Tensors of several devices meet on the first accelerator among them.
    """
    home = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    flat = torch.cat([tensor.detach().to(home, torch.float64).flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
