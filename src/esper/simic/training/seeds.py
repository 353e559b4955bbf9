"""Which hosts a purpose may use: host seeds of training, tuning, evaluation and final never meet."""

from typing import Literal, get_args

from esper.leyline import UnknownNameError, derive_seed

Purpose = Literal["training", "tuning", "evaluation", "final"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
_RANGE = 2**60
"""Each purpose has this many seeds of its own; four of them fit below 2**62."""


def host_seed(purpose: Purpose, rng_seed: int, *place: int) -> int:
    """The seed of the host at a place (round, group …), from the range of its purpose."""
    if purpose not in PURPOSES:
        raise UnknownNameError("purpose", purpose, PURPOSES)
    return PURPOSES.index(purpose) * _RANGE + derive_seed(purpose, rng_seed, *place) % _RANGE


def purpose_of(seed: int) -> Purpose:
    """The purpose whose range a host seed lies in."""
    return PURPOSES[seed // _RANGE]
