"""What a model's empty slots would gain from a seed, estimated by one backward pass over a validation batch."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from esper.grower.growing_model import GrowingModel
from esper.grower.scoring import Batch, RowRunner, Scorer, eval_mode
from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.leyline import SlotSpec
from esper.tolaria.measurement import Sensing, make_newborns, sense


class ModelProber:
    """Probes all slots of one model. No weight and no statistic changes."""

    def __init__(self, growing: GrowingModel, runner: RowRunner, scorer: Scorer) -> None:
        self.growing, self.runner, self.scorer = growing, runner, scorer
        self._newborns: dict[tuple[str, str], nn.Module] = {}
        self._made_for: tuple[torch.device, torch.dtype] | None = None

    def __call__(self, batch: Batch) -> Sensing:
        """Statistics, gradients and the worth of every blueprint, for one env."""
        streams, gradients = self._streams(batch)
        like = streams[0].device, streams[0].dtype
        if self._made_for != like:
            self._newborns, self._made_for = make_newborns(sensed_slots(self.growing.slots), *like), like
        names, slot_ids = self.growing.slot_config.blueprint_names, list(self.growing.slots)
        open_slots = torch.ones(1, len(slot_ids), device=like[0])
        with torch.no_grad():
            return sense(names, slot_ids, self._newborns, streams, gradients, open_slots)

    def without_data(self) -> Sensing:
        """For want of data: every slot is alike, and a larger seed counts as worth more."""
        specs = self.growing.slot_config.slots
        names = self.growing.slot_config.blueprint_names
        sizes = [{offer.name: float(offer.parameters) for offer in spec.blueprints} for spec in specs]
        offers = torch.tensor([[[own.get(name, 0.0) for name in names] for own in sizes]], device=self.growing.device)
        flat = torch.zeros(1, len(specs), device=self.growing.device)
        return Sensing(flat, flat, flat, offers / offers.amax().clamp(min=1))

    def _streams(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """What passes in front of each slot, and the gradient of the loss there, (1, B, …) each."""
        host, caught = self.growing.host, dict[str, Tensor]()

        def catch(slot_id: str, output: Tensor) -> Tensor:
            caught[slot_id] = output if output.requires_grad else output.detach().requires_grad_()
            return caught[slot_id]

        handles = [
            host.get_submodule(slot_id).register_forward_hook(
                lambda module, args, output, slot_id=slot_id: catch(slot_id, output),
                prepend=True,
            )
            for slot_id in self.growing.slots
        ]
        try:
            with eval_mode(host), self.runner.row({}, {}), torch.enable_grad():
                losses = self.scorer(host, batch).losses
                gradients = torch.autograd.grad(losses.mean(), list(caught.values()), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        found = dict(zip(caught, gradients, strict=True))
        pairs = [(caught[slot_id].detach(), found[slot_id]) for slot_id in self.growing.slots]
        return [h[None] for h, _ in pairs], [torch.zeros_like(h)[None] if g is None else g[None] for h, g in pairs]


def sensed_slots(slots: Mapping[str, SlotSpec]) -> dict[str, SlotSpec]:
    """The slots without the seeds that read the input of a submodule, since a probe only sees its output."""
    return {
        slot_id: replace(
            spec,
            blueprints=tuple(
                offer for offer in spec.blueprints if not BlueprintRegistry.spec(spec.topology, offer.name).reads_input
            ),
        )
        for slot_id, spec in slots.items()
    }
