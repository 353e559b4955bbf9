"""Averaged copies of a model that grows.

`torch.optim.swa_utils.AveragedModel` copies the model once and then pairs parameters by position. A seed that is born
later would be missing from the copy. So the grower repeats every birth and death in such copies.
"""

import copy
import gc
import warnings
import weakref

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from esper.grower.container import CHILD, ModelSlots
from esper.leyline import LIVE_STAGES


class Averages:
    """The averaged copies of one model."""

    def __init__(self, slots: ModelSlots) -> None:
        self._slots = slots
        self._warned = weakref.WeakSet[nn.Module]()

    @torch.no_grad()
    def sync(self) -> None:
        """Give every averaged copy the seeds of the model, and warn about copies that will not follow."""
        copies = [twin for twin in self._slots.copies if twin is not self._slots]
        if not copies:
            return
        # Only at births and deaths, and only if the model was copied: a search takes tens of milliseconds.
        averaged = {getattr(each.module, CHILD, None) for each in gc.get_objects() if isinstance(each, AveragedModel)}
        for twin in copies:
            if twin in averaged:
                _imitate(twin, self._slots)
            elif twin not in self._warned:
                self._warned.add(twin)
                warnings.warn(
                    "a copy of the model was made before this change of seeds and does not follow it: average with "
                    "torch.optim.swa_utils.AveragedModel, which the grower keeps in step, or copy the model again",
                    stacklevel=4,
                )


def _imitate(twin: ModelSlots, original: ModelSlots) -> None:
    """Repeat births, deaths and stages in a copy; a newborn starts with the weights of the original."""
    for slot_id, slot in original.items():
        other = twin[slot_id]
        same = (slot.state.blueprint, slot.state.germinations) == (other.state.blueprint, other.state.germinations)
        if slot.state.stage in LIVE_STAGES and not same:
            other.seed, other.gate = copy.deepcopy(slot.seed), copy.deepcopy(slot.gate)
            for parameter in other.parameters():
                parameter.grad = None
        other.settle(slot.state)
