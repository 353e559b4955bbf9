"""The floor: waiting, chance, and chance that commits."""

import torch
from torch import Tensor

from esper.leyline import LifecycleOp
from esper.leyline.numbers import require_whole
from esper.tamiyo.heads import ActionTable, MaskedCategorical
from esper.tamiyo.policies.proposals import complete, legal_slots, pick, used_heads
from esper.tamiyo.policies.schedule import Sowing, follow
from esper.tamiyo.policy import PolicyView


class WaitPolicy:
    """Never grows anything."""

    def __init__(self, table: ActionTable) -> None:
        self.table = table

    def initial_state(self, seeds: list[int]) -> None:
        """None."""

    def act(self, view: PolicyView, state: None, uniform: Tensor) -> tuple[Tensor, None]:
        """WAIT."""
        wait = torch.full((len(uniform),), LifecycleOp.WAIT, device=uniform.device)
        return complete(self.table, view.masks, wait, wait, wait), None


class RandomPolicy:
    """Each head uniform over what is legal given the heads before it."""

    def __init__(self, table: ActionTable) -> None:
        self.table = table

    def initial_state(self, seeds: list[int]) -> None:
        """None."""

    def act(self, view: PolicyView, state: None, uniform: Tensor) -> tuple[Tensor, None]:
        """One draw per head."""
        self.table.check_masks(view.masks, len(uniform))
        chosen: dict[str, Tensor] = {}
        used: Tensor | None = None
        for place, head in enumerate(self.table.heads):
            mask = view.masks[head.name]
            if head.given is not None:
                mask = pick(mask, chosen[head.given])
            choice = _draw(mask, uniform[:, place])
            used = used_heads(self.table, choice) if used is None else used
            chosen[head.name] = choice.where(used[:, place], head.placeholder)
        return torch.stack(list(chosen.values()), -1), None


class RandomCommitPolicy:
    """One random seed per env, germinated at a random step of the first half, then blended and kept, come what may."""

    def __init__(self, table: ActionTable, steps: int) -> None:
        """`steps` is the length of an episode: nothing that is seen in the first step tells it."""
        require_whole("steps", steps, 1)
        self.table, self.steps = table, steps

    def initial_state(self, seeds: list[int]) -> None:
        """None: the seed is drawn in the first step, from what is legal there."""

    def act(self, view: PolicyView, state: Sowing | None, uniform: Tensor) -> tuple[Tensor, Sowing]:
        """The first draws decide everything; later ones are not used."""
        sowing = self._sow(view, uniform) if state is None else state
        return follow(self.table, view, sowing), sowing

    def _sow(self, view: PolicyView, uniform: Tensor) -> Sowing:
        when, where, what = (uniform[:, self.table.index(name)] for name in ("op", "slot", "blueprint"))
        latest = self.steps // 2
        slot = _draw(legal_slots(view.masks, LifecycleOp.GERMINATE), where)
        blueprint = _draw(pick(view.masks["blueprint"], slot), what)
        germinate_at = (when * (latest + 1)).long().clamp(max=latest)
        planned = torch.ones_like(slot, dtype=torch.bool)
        parts = (planned, slot, blueprint, view.step + germinate_at, torch.zeros_like(slot))
        return Sowing(*(part[:, None] for part in parts))


def _draw(mask: Tensor, uniform: Tensor) -> Tensor:
    """Uniform over what a mask (N, choices) allows; over everything where that is nothing, which nobody looks at."""
    mask = mask | ~mask.any(-1, keepdim=True)
    return MaskedCategorical(torch.zeros_like(mask, dtype=torch.float), mask, validate=False).sample(uniform)
