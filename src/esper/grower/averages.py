"""Averaged copies of a model that grows.

`torch.optim.swa_utils.AveragedModel` copies the model once and then pairs parameters and buffers by position. A seed
that is born later would be missing from the copy. So the grower repeats every birth and death in such copies, and the
end of growth.
"""

import copy
import gc
import warnings
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn
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
        averaged = averaged_twins(self._slots)
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


def averaged_models() -> list[AveragedModel]:
    """All averaged models of this process."""
    # `type`, because isinstance() asks some lazy objects for attributes, which may warn.
    return [each for each in gc.get_objects() if issubclass(type(each), AveragedModel)]


def adopt_earlier(slots: ModelSlots) -> None:
    """Give slots to the averaged copies that were made before the model had any; their weights are still the same."""
    host = slots.host
    own = host.state_dict()
    for each in averaged_models():  # of the model, or of a larger one that contains it
        alike = (part for part in each.module.modules() if type(part) is type(host) and not hasattr(part, CHILD))
        twin = next((part for part in alike if _equal(own, part.state_dict())), None)
        if twin is not None:
            twin.add_module(CHILD, copy.deepcopy(slots, {id(host): twin}))


def averaged_twins(slots: ModelSlots) -> list[ModelSlots]:
    """The slots of the averaged copies of this model."""
    averaged = averaged_models() if slots.copies else []
    present = {part for each in averaged for part in each.module.modules() if isinstance(part, ModelSlots)}
    return [twin for twin in slots.copies if twin in present]


def _equal(own: Mapping[str, object], theirs: Mapping[str, object]) -> bool:
    return own.keys() == theirs.keys() and all(
        isinstance(one, Tensor) and isinstance(other, Tensor) and one.device == other.device and torch.equal(one, other)
        for one, other in zip(own.values(), theirs.values(), strict=True)
    )


def _imitate(twin: ModelSlots, original: ModelSlots) -> None:
    """Repeat births, deaths and stages in a copy; a newborn starts with the weights of the original."""
    if not list(twin.items()):  # it was copied before the first forward pass
        twin.install([(slot.spec, original.like[slot_id]) for slot_id, slot in original.items()])
    for slot_id, slot in original.items():
        other = twin[slot_id]
        same = (slot.state.blueprint, slot.state.germinations) == (other.state.blueprint, other.state.germinations)
        if slot.state.stage in LIVE_STAGES and not same:
            other.seed, other.gate = copy.deepcopy(slot.seed), copy.deepcopy(slot.gate)
            for parameter in other.parameters():
                parameter.grad = None
        other.settle(slot.state)
