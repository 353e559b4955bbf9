"""Randomness by counter: a number is a hash of what it is for, not of how many were drawn before it.

So data order and augmentation are a pure function of (seed, place, purpose), the same on every device and whatever else
is drawn, and many hosts draw side by side without a generator each.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
Key = int | Tensor


def counter_hash(*keys: Key) -> Tensor:
    """A number in [0, 2³²) per element of the broadcast keys (int64). Mixes in each key with the murmur3 finaliser."""
    value = torch.zeros((), dtype=torch.int64)
    for key in keys:
        part = torch.as_tensor(key, dtype=torch.int64)
        # Seeds have 63 bits; both halves count.
        for half in (part & MASK, (part >> 32) & MASK):
            value = _mix(value.to(half.device) if half.dim() else value, half)
    return value


def _mix(value: Tensor, key: Tensor) -> Tensor:
    # Products overflow 64 bits; their lower 32 are right all the same.
    value = ((value ^ key) * 0x9E3779B1 + 0x7F4A7C15) & MASK
    value = ((value ^ (value >> 16)) * 0x85EBCA6B) & MASK
    value = ((value ^ (value >> 13)) * 0xC2B2AE35) & MASK
    return value ^ (value >> 16)


def counter_below(limit: int, *keys: Key) -> Tensor:
    """An integer in [0, limit) per element; the bias of the remainder is below limit / 2³²."""
    return counter_hash(*keys) % limit


def permutation(count: int, *keys: int, device: torch.device | None = None) -> Tensor:
    """A permutation of `count` numbers."""
    return counter_hash(*keys, torch.arange(count, device=device)).argsort(stable=True)
