"""Whether a host is sound, and how several copies of it can run at once: a check that users can call on their own.

1. the segments line up, each slot's declaration is what passes there, and no segment has a state of its own: it writes
   no buffer, and goes by the argument `train` rather than by its mode;
2. nothing in it draws random numbers while it trains (no dropout in a fleet);
3. every trainable parameter gets a gradient that is finite and not zero;
4. rows: three copies with different weights give, run at once, what they give one by one.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from esper.kasmina.compare import cross_entropy
from esper.kasmina.hosts import Host, refuse_state
from esper.kasmina.random_state import RandomState, random_state_kept
from esper.kasmina.slot import TOPOLOGY_OF_AXES, WIDTH_AXIS
from esper.leyline import BadValueError, HostMismatchError, SlotSpec

ROWS = 3
BATCH = 4
BATCHES = 3
STEP_SIZE = 0.01
PERTURBATION = 0.05
"""How far the weights of the three copies are moved apart."""
ALIVE_RATIO = 1e-9
"""A parameter is dead when its gradient norm never exceeds this share of the host's largest, in float64 …"""
ROUGH_ALIVE_RATIO = 1e-6
"""… and in dtypes with fewer digits this share: above what rounding leaves of a gradient that cancels."""

RowKind = Literal["native", "vmap", "fallback", "error"]
_FALLBACK = re.compile(r"batching rule for (\S+?)[.,]?\s")


@dataclass(frozen=True)
class HostReport:
    """What `check_host` found."""

    rows: RowKind
    """How a fleet can run it: by its row-aware layers, by vmap, by vmap with slow ops, or not at all."""
    detail: str
    """`vectorised`, which op falls back, or what went wrong."""
    parameters: int
    slots: tuple[str, ...]
    """Ids of the slots that the host declares."""
    dead: tuple[str, ...]
    """Trainable parameters whose gradient is zero, missing or not finite."""

    @property
    def sound(self) -> bool:
        """It can learn and it can join a fleet."""
        return self.rows != "error" and not self.dead


def check_host(host: nn.Module, example: Tensor | None = None, targets: Tensor | None = None) -> HostReport:
    """Train a copy of `host` for a moment and run three of it at once; the host itself is not touched.

    `example` is a batch of inputs, needed unless the host is a built-in one; `targets` its classes (else it learns
    random outputs). Raises `HostMismatchError` where a segment or slot does not fit, or has a state of its own.
    """
    host = copy.deepcopy(host).train()
    with random_state_kept(host):
        torch.manual_seed(0)
        x = example_of(host) if example is None else example
        if isinstance(host, Host):
            refuse_state(host)
            host = host.double()  # so that what cancels, cancels
            x = x.double() if x.is_floating_point() else x
            _check_segments(host, x)
        problem = _randomness(host, x)
        if problem is not None and isinstance(host, Host):
            raise HostMismatchError(problem)
        dead = _dead_parameters(host, x, targets)
        found = _rows(host, x) if problem is None else Found("error", problem)
    slots = tuple(spec.slot_id for spec in host.slots) if isinstance(host, Host) else ()
    return HostReport(*found, sum(parameter.numel() for parameter in host.parameters()), slots, dead)


def example_of(host: nn.Module) -> Tensor:
    """A batch of inputs for a host whose configuration says what it takes."""
    config = host.config() if isinstance(host, Host) else None
    like = next(host.parameters(), torch.empty(()))
    match config:
        case {"in_channels": int(channels), "resolution": int(side)}:
            return torch.randn(BATCH, channels, side, side, device=like.device, dtype=like.dtype)
        case {"vocab": int(vocab), "block": int(block)}:
            return torch.randint(vocab, (BATCH, block), device=like.device)
    raise BadValueError(f"{type(host).__name__} does not say what it takes: pass example=, a batch of inputs")


# -- one host ---------------------------------------------------------------------------------------------------------


def _check_segments(host: Host, h: Tensor) -> None:
    """Clause 1, segment by segment."""
    for index, segment in enumerate(host.segments):
        label = f"segment {index} ({type(segment).__name__})"
        given = tuple(h.shape)
        _check_stateless(segment, h, label)
        try:
            result = segment(h, True)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise HostMismatchError(f"{label} cannot take what reaches it, shape {given}: {error}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
            raise HostMismatchError(f"{label} must return (activation, statistics), got {type(result).__name__}")
        h, statistics = result
        buffers = {name for name, _ in segment.named_buffers()}
        if unknown := sorted(set(statistics) - buffers):
            raise HostMismatchError(f"{label} returns statistics {unknown}; its buffers are {sorted(buffers)}")
        if index < len(host.slots) and (misfit := _slot_misfit(host.slots[index], h)):
            raise HostMismatchError(f"slot {host.slots[index].slot_id!r} after {label}: {misfit}")


@torch.no_grad()
def _check_stateless(segment: nn.Module, h: Tensor, label: str) -> None:
    """Rows other than the main one run the same segments, and must leave no trace."""
    segment = copy.deepcopy(segment)
    before = {name: buffer.clone() for name, buffer in segment.named_buffers()}
    try:
        for train in (True, False):
            trained, evaluated = (segment.train(mode)(h, train)[0] for mode in (True, False))
            written = [name for name, buffer in segment.named_buffers() if not torch.equal(buffer, before[name])]
            if written:
                raise HostMismatchError(
                    f"{label} writes {', '.join(written)}: return such values as statistics instead"
                )
            # A segment that draws differs too, and is named for that by the next clause.
            if not torch.equal(trained, evaluated) and _randomness(segment, h, train) is None:
                raise HostMismatchError(f"{label} goes by its own mode: go by the argument train instead")
    except HostMismatchError:
        raise
    except Exception:  # what a segment cannot take is the business of the caller, which runs it again
        return


def _slot_misfit(spec: SlotSpec, h: Tensor) -> str | None:
    """How the declaration of a slot differs from what passes there. A sequence may be shorter than declared."""
    topology, shape = TOPOLOGY_OF_AXES.get(h.dim()), tuple(h.shape)
    if topology != spec.topology:
        return f"declared as {spec.topology}, but {topology or 'something else'} of shape {shape} passes there"
    if shape[WIDTH_AXIS[topology]] != spec.width:
        return f"declared with width {spec.width}, but it is {shape[WIDTH_AXIS[topology]]} in {shape}"
    if spec.resolution is None or topology == "vector":
        return None
    fits = set(shape[-2:]) == {spec.resolution} if topology == "image" else shape[-2] <= spec.resolution
    return None if fits else f"declared with resolution {spec.resolution}, but a tensor of shape {shape} passes there"


def _randomness(host: nn.Module, *inputs: object) -> str | None:
    """Clause 2: a random stream that has moved during a forward pass."""
    before = RandomState.of(host)
    with torch.no_grad():
        copy.deepcopy(host).train()(*inputs)
    if before.equals(RandomState.of(host)):
        return None
    layers = [name for name, part in host.named_modules() if "Dropout" in type(part).__name__]
    where = f": set {', '.join(layers)} to p=0" if layers else ""
    return f"no dropout in a fleet: {type(host).__name__} draws random numbers while it trains{where}"


def _dead_parameters(host: nn.Module, x: Tensor, targets: Tensor | None) -> tuple[str, ...]:
    """Clause 3, over a few steps of SGD: a layer behind a zero-initialised one wakes at the second."""
    host = copy.deepcopy(host)
    trainable = {name: p for name, p in host.named_parameters() if p.requires_grad}
    largest = dict.fromkeys(trainable, 0.0)
    optimiser = torch.optim.SGD(trainable.values(), lr=STEP_SIZE)
    for _ in range(BATCHES):
        optimiser.zero_grad()
        output = _output(host(x))
        wanted = torch.randn_like(output) if targets is None else targets
        loss = F.mse_loss(output, wanted) if targets is None else cross_entropy(output, wanted)
        loss.backward()
        for name, parameter in trainable.items():
            if parameter.grad is not None:
                norm = float(parameter.grad.norm())
                largest[name] = max(largest[name], norm) if math.isfinite(norm) else math.inf
        optimiser.step()
    scale = max((norm for norm in largest.values() if norm < math.inf), default=0.0)
    ratio = ALIVE_RATIO if x.dtype == torch.float64 or isinstance(host, Host) else ROUGH_ALIVE_RATIO
    return tuple(name for name, norm in largest.items() if not scale * ratio < norm < math.inf)


def _output(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise HostMismatchError(f"the host returns {type(output).__name__}; one tensor is needed")
    return output


# -- several at once --------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """How rows run, and the detail."""

    rows: RowKind
    detail: str


def _rows(host: nn.Module, x: Tensor) -> Found:
    """Clause 4: by row-aware layers where they serve, else by vmap."""
    hosts = [copy.deepcopy(host) for _ in range(ROWS)]
    with torch.no_grad():
        for parameter in (p for single in hosts for p in single.parameters()):
            parameter.add_(PERTURBATION * torch.randn_like(parameter))
    # Every row gets other inputs: rows that see each other must not go unnoticed.
    scaled = x.is_floating_point()
    inputs = torch.stack([x.roll(row, 0) * (1 + row) if scaled else x.roll(row, 0) for row in range(ROWS)])
    if isinstance(host, Host):
        problem = _disagreement(host, hosts, inputs, lambda state, rows: functional_call(host, state, (rows,)))
        if problem is None:
            return Found("native", "vectorised")

    def run_mapped(state: dict[str, Tensor], rows: Tensor) -> Tensor:
        def run_one(own: dict[str, Tensor], h: Tensor) -> Tensor:
            return _output(functional_call(host, own, (h,)))

        mapped: Tensor = vmap(run_one)(state, rows)
        return mapped

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        problem = _disagreement(host, hosts, inputs, run_mapped)
    if problem is not None:
        return Found("error", problem)
    slow = sorted({match[1] for warning in caught if (match := _FALLBACK.search(str(warning.message)))})
    return Found("fallback", f"fallback for {', '.join(slow)}") if slow else Found("vmap", "vectorised")


Rows = Callable[[dict[str, Tensor], Tensor], Tensor]


def _disagreement(host: nn.Module, hosts: list[nn.Module], inputs: Tensor, run: Rows) -> str | None:
    """Why three hosts at once are not what they are one by one, in train and in eval mode; None where they are."""
    for train in (True, False):
        host.train(train)
        singles = [copy.deepcopy(single).train(train) for single in hosts]
        parameters, buffers = stack_module_state(singles)
        try:
            together = _output(run({**parameters, **buffers}, inputs))
            together.square().mean().backward()
        except Exception as error:  # whatever a foreign layer raises is the finding
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        apart = torch.stack([single(x) for single, x in zip(singles, inputs, strict=True)])
        if together.shape != apart.shape:
            return f"rows give shape {tuple(together.shape)}, single hosts {tuple(apart.shape)}"
        if not _close(together, apart):
            return f"rows differ from single hosts by {float((together - apart).abs().max().detach()):.2g}"
        for name, buffer in buffers.items():
            if not _close(buffer, torch.stack([single.get_buffer(name) for single in singles])):
                return f"buffer {name!r} of the rows differs from that of the single hosts"
    return None


def _close(left: Tensor, right: Tensor) -> bool:
    tolerance = 1e-8 if left.dtype == torch.float64 else 1e-4
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance)
