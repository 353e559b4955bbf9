"""Actions composed of several masked choices.

A table of heads says what an action consists of. The first head is always used; whether another one is may depend on
the first choice (an op that needs no slot). Heads are drawn in order, and the mask of a head may depend on an earlier
choice, so the joint log-prob is exact. Both the growth controller and Gymnasium spaces have such a table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from esper.leyline import BadValueError, HeadPreset, LifecycleOp, SlotConfig
from esper.leyline.numbers import require_known, require_whole

ILLEGAL = -1e30
"""Logit and log-prob of illegal choices: their probability is exactly 0, and 0 times this is 0. (Its square is not.)"""

Masks = Mapping[str, Tensor]
"""Head name → legal choices: (n, size), or (n, size of the head it depends on, size)."""

HeadKind = Literal["linear", "pointer", "offer"]
"""How a head is scored: by a linear layer, by pointing at slots, or by comparing the offers in the chosen slot."""


class EmptyMaskError(BadValueError):
    """A mask without a legal choice."""


class MaskedCategorical:
    """A categorical distribution over the legal choices: `(1−ε)·softmax(logits) + ε·uniform`."""

    def __init__(self, logits: Tensor, mask: Tensor, epsilon: float = 0.0, *, validate: bool = True) -> None:
        """Logits and mask (…, choices), ε in [0, 1). `validate` checks both, which costs a device sync; without it, the
        caller finds empty masks in `counts`."""
        if not 0 <= epsilon < 1:
            raise BadValueError(f"epsilon {epsilon!r} is not in [0, 1); with 1, the logits would have no effect")
        if logits.shape != mask.shape:
            raise BadValueError(f"logits of shape {tuple(logits.shape)} and a mask of shape {tuple(mask.shape)}")
        self.mask = mask
        self.counts = mask.sum(-1)  # number of legal choices (…)
        if validate and len(empty := (self.counts == 0).nonzero()):
            where = empty[0].tolist()
            raise EmptyMaskError(f"the mask at {where} allows none of {logits.shape[-1]} choices; allow at least one")
        if validate and len(bad := (~logits.isfinite()).nonzero()):
            raise BadValueError(f"the logit at {bad[0].tolist()} is not finite; check the observation and the weights")
        self.logits = logits.float().masked_fill(~mask, ILLEGAL)
        log_probs = torch.log_softmax(self.logits, -1)
        if epsilon:
            # Plain arithmetic in ε, so that a new value does not recompile the policy.
            share = epsilon / self.counts.clamp(min=1).unsqueeze(-1)
            log_probs = (log_probs.exp() * (1 - epsilon) + share).log().masked_fill(~mask, ILLEGAL)
        self.log_probs = log_probs

    @property
    def probs(self) -> Tensor:
        """Probabilities, exactly 0 for illegal choices."""
        return self.log_probs.exp()

    def log_prob(self, choice: Tensor) -> Tensor:
        """Log-probs of choices (…)."""
        return self.log_probs.gather(-1, choice.unsqueeze(-1)).squeeze(-1)

    def sample(self, uniform: Tensor) -> Tensor:
        """Choices for uniform draws (…) in [0, 1): the first whose cumulative probability exceeds the draw."""
        probs = self.probs
        # A GPU's parallel sums may grow at a choice of probability 0, which must never be drawn. The last one must
        # always be within reach, even of a draw that was rounded up to 1.
        reached = probs.cumsum(-1).where(probs > 0, 0.0)
        top = reached.amax(-1, keepdim=True)
        passed = (reached > uniform.unsqueeze(-1) * top) | (reached == top)
        return passed.to(torch.uint8).argmax(-1)

    def mode(self) -> Tensor:
        """The likeliest choice."""
        return self.log_probs.argmax(-1)

    def entropy(self) -> Tensor:
        """Entropy divided by that of a uniform choice, in [0, 1]; 0 with zero gradient if there is only one choice."""
        raw = -(self.probs * self.log_probs).sum(-1)
        return torch.where(self.counts > 1, raw / self.counts.clamp(min=2).float().log(), 0.0)

    def spread(self) -> Tensor:
        """Variance of the legal logits. Penalising it pulls a collapsed head back: the pull grows with the collapse,
        where that of the entropy vanishes."""
        count = self.counts.clamp(min=1).float()
        centre = self.logits.where(self.mask, 0.0).sum(-1) / count
        gaps = (self.logits - centre.unsqueeze(-1)).where(self.mask, 0.0)
        return gaps.square().sum(-1) / count


@dataclass(frozen=True)
class ActionHead:
    """One factor of an action."""

    name: str
    size: int
    kind: HeadKind = "linear"
    matters: tuple[bool, ...] | None = None  # whether each choice of the first head uses this one; None: all do
    placeholder: int = 0  # its value if it is not used
    given: str | None = None  # the earlier head on whose choice its mask depends


@dataclass(frozen=True)
class ActionTable:
    """The heads of an action in the order in which they are drawn."""

    heads: tuple[ActionHead, ...]

    def __post_init__(self) -> None:
        if not self.heads:
            raise BadValueError("an action table needs at least one head")
        if len(set(self.names)) != len(self.heads):
            raise BadValueError(f"head names must be unique, got {list(self.names)}")
        if self.heads[0].matters is not None or self.heads[0].given is not None:
            raise BadValueError(f"the first head, {self.heads[0].name!r}, always matters and depends on none")
        for index, head in enumerate(self.heads):
            self._check_head(head, self.heads[:index])

    def _check_head(self, head: ActionHead, earlier: tuple[ActionHead, ...]) -> None:
        require_whole(f"head {head.name!r}: size", head.size, 1)
        if head.placeholder not in range(head.size):
            raise BadValueError(f"head {head.name!r}: placeholder {head.placeholder} is none of {head.size} choices")
        require_known(f"kind of head {head.name!r}", head.kind, get_args(HeadKind))
        if head.kind == "offer" and all(other.kind != "pointer" for other in earlier):
            raise BadValueError(f"head {head.name!r} compares offers in a slot; put a pointer head before it")
        if head.matters is not None and len(head.matters) != self.heads[0].size:
            needed = f"give one for each of the {self.heads[0].size} choices of {self.heads[0].name!r}"
            raise BadValueError(f"head {head.name!r} has {len(head.matters)} entries in `matters`; {needed}")
        if head.given is not None:
            require_known(f"head before {head.name!r}", head.given, [other.name for other in earlier])

    @property
    def names(self) -> tuple[str, ...]:
        """Head names in order."""
        return tuple(head.name for head in self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def index(self, name: str) -> int:
        """The index of a head."""
        require_known("head", name, self.names)
        return self.names.index(name)

    def mask_shape(self, head: ActionHead) -> tuple[int, ...]:
        """Shape of one env's mask for a head."""
        return (head.size,) if head.given is None else (self.heads[self.index(head.given)].size, head.size)

    @cached_property
    def relevance(self) -> Tensor:
        """(choices of the first head, heads) bool: which heads each choice uses."""
        columns = [(True,) * self.heads[0].size if head.matters is None else head.matters for head in self.heads]
        return torch.tensor(columns).T.contiguous()

    def open_masks(self, n: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Masks for n envs that allow everything."""
        return {
            head.name: torch.ones((n, *self.mask_shape(head)), dtype=torch.bool, device=device) for head in self.heads
        }

    def check_masks(self, masks: Masks, n: int) -> None:
        """Raise unless there is a bool mask of the right shape per head."""
        if set(masks) != set(self.names):
            raise BadValueError(f"masks for heads {sorted(masks)}; the table has {list(self.names)}")
        for head in self.heads:
            mask, shape = masks[head.name], (n, *self.mask_shape(head))
            if mask.dtype != torch.bool or tuple(mask.shape) != shape:
                actual = f"{mask.dtype} of shape {tuple(mask.shape)}"
                raise BadValueError(f"mask of head {head.name!r} is {actual}; it must be torch.bool of shape {shape}")


def growth_table(preset: HeadPreset, slots: SlotConfig, vocabulary: Sequence[str] | None = None) -> ActionTable:
    """The head table of a preset for a task's slots, with their blueprints or another `vocabulary`.

    The slot's mask depends on the op, the blueprint's on the slot."""
    blueprints = len(slots.blueprint_names if vocabulary is None else vocabulary)
    kinds: dict[str, HeadKind] = {"slot": "pointer", "blueprint": "offer"}
    given = {"slot": "op", "blueprint": "slot"}
    heads = []
    for head in preset.heads:
        size = head.size(len(slots), blueprints)
        matters = None if head.name == "op" else tuple(op in head.ops for op in LifecycleOp)
        kind = kinds.get(head.name, "linear")
        heads.append(ActionHead(head.name, size, kind, matters, head.placeholder, given.get(head.name)))
    return ActionTable(tuple(heads))


def discrete_table(sizes: Sequence[int]) -> ActionTable:
    """Independent choices of these sizes."""
    return ActionTable(tuple(ActionHead(f"action{index}", size) for index, size in enumerate(sizes)))


def pick(values: Tensor, choice: Tensor) -> Tensor:
    """(n, choices, …) at one choice each (n,) → (n, …)."""
    return values[torch.arange(len(choice), device=choice.device), choice]
