"""Contracts that users can check themselves: `check_blueprint` for seeds, `check_host` for hosts.

Clauses for a blueprint:
1. Residual: Δ(h) has the shape of h. For an adapter that reads the input x of a submodule: Δ(x) has the shape of its
   output.
2. Identity at birth: Δ(h) is exactly zero.
3. Alive: every parameter gets a gradient that matters.
4. Count: it has as many parameters as it states.
5. Stateless: a forward pass in training mode writes no buffer and draws no random number.

Clauses for a host:
1. Its segments and slots fit together, and no segment writes buffers or depends on its own mode.
2. It draws no random numbers in training.
3. Every trainable parameter gets a finite, non-zero gradient.
4. Three copies with different weights give the same results at once as one by one.
"""

import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F

from esper.kasmina.blueprints.registry import BlueprintRegistry
from esper.kasmina.compare import cross_entropy
from esper.kasmina.hosts import Host, refuse_state
from esper.kasmina.layers import cloned_buffers, count_parameters
from esper.kasmina.slot import TOPOLOGY_OF_AXES, WIDTH_AXIS, RandomState, fork_rng
from esper.leyline import BadValueError, BlueprintContractError, HostMismatchError, SlotSpec, Topology
from esper.leyline.numbers import refuse, require_whole

# A parameter is dead if its gradient norm never exceeds this share of the largest. Hosts in float64 have a lower one:
# with fewer digits, rounding leaves more of a gradient that cancels.
ALIVE_RATIO, HOST_ALIVE_RATIO = 1e-6, 1e-9
BATCHES = 3  # a layer behind a zero-initialised one gets its first gradient in the second


def _gradient_norms(module: nn.Module, step_size: float, losses: Iterable[Callable[[], Tensor]]) -> dict[str, float]:
    """Largest gradient norm of each parameter, with an SGD step per loss; infinite if one was not finite."""
    norms = dict.fromkeys(dict(module.named_parameters()), 0.0)
    optimiser = torch.optim.SGD(module.parameters(), lr=step_size)
    for loss in losses:
        optimiser.zero_grad()
        loss().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                norm = float(parameter.grad.norm())
                norms[name] = max(norms[name], norm if math.isfinite(norm) else math.inf)
        optimiser.step()
    return norms


def _written(module: nn.Module, before: dict[str, Tensor]) -> str:
    return ", ".join(name for name, buffer in module.named_buffers() if not torch.equal(buffer, before[name]))


# -- blueprints -------------------------------------------------------------------------------------------------------

BLUEPRINT_BATCH, BLUEPRINT_STEP_SIZE, TARGET_SEED = 8, 0.05, 1_000_000_007
RESOLUTION: dict[Topology, int] = {"image": 6, "tokens": 5, "vector": 5}


class BlueprintReport(NamedTuple):
    """Parameter count, and the parameter with the smallest gradient relative to the largest."""

    parameters: int
    weakest: str
    weakest_ratio: float


def check_blueprint(
    topology: Topology, name: str, width: int, *, resolution: int | None = None, seeds: int = 20
) -> BlueprintReport:
    """Check a registered blueprint at a width. Raises `BlueprintContractError`, which names the broken clause.

    An adapter that reads the input of a submodule is checked behind its example of such a submodule.
    """
    require_whole("seeds", seeds, 1, remark=": each is a fresh set of weights to check")
    spec = BlueprintRegistry.spec(topology, name)
    base = None if spec.folding is None or spec.folding.example is None else spec.folding.example(width).double()
    side = max(RESOLUTION[topology], spec.min_resolution) if resolution is None else resolution
    label = f"{topology} blueprint {name!r} at width {width}"
    ratios: dict[str, float] = {}
    for rng_seed in range(seeds):
        built = BlueprintRegistry.build(topology, name, width, resolution=side, rng_seed=rng_seed, base=base)
        module = built.double()
        # Activations are signed or, behind a ReLU, non-negative: a seed must live on both.
        for positive in (False, True):
            batches = _batches(topology, width, side, rng_seed, positive)
            with fork_rng(module):
                _check_birth(module, batches[0], label, base)
                norms = _blueprint_norms(copy.deepcopy(module), batches, rng_seed, base)
            finite = {parameter: norm if norm < math.inf else 0.0 for parameter, norm in norms.items()}
            largest = max(finite.values()) or math.inf
            for parameter, norm in finite.items():
                ratios[parameter] = min(norm / largest, ratios.get(parameter, math.inf))
    weakest = min(ratios, key=lambda parameter: ratios[parameter])
    if ratios[weakest] <= ALIVE_RATIO:
        raise BlueprintContractError(
            f"{label} breaks clause 3 (alive): the gradient of {weakest!r} is {ratios[weakest]:.1e} of the largest "
            f"on one of {seeds} seeds; it must exceed {ALIVE_RATIO:.0e}. Look for a zero-initialised layer under a "
            "norm or ReLU, a bias before a norm, or a parameter that forward does not use"
        )
    return BlueprintReport(spec.count(width), weakest, ratios[weakest])


def _batches(topology: Topology, width: int, side: int, rng_seed: int, positive: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * rng_seed + positive)
    shape = {"image": (width, side, side), "tokens": (side, width), "vector": (width,)}[topology]
    draws = [torch.randn(BLUEPRINT_BATCH, *shape, generator=generator, dtype=torch.float64) for _ in range(BATCHES)]
    return [draw.relu() for draw in draws] if positive else draws


@torch.no_grad()
def _check_birth(module: nn.Module, h: Tensor, label: str, base: nn.Module | None) -> None:
    """Clauses 5, 1 and 2."""
    copied = copy.deepcopy(module).train()
    before, stream = cloned_buffers(copied), RandomState.of(copied)
    copied(h)
    written = _written(copied, before)
    problems = {
        f"{label} breaks clause 5 (stateless): forward writes {written}, even in rows that must not write. "
        "Use GroupNorm or LayerNorm instead of BatchNorm": written != "",
        f"{label} breaks clause 5 (stateless): forward draws random numbers, and so would change those of the host. "
        "Omit dropout": not stream.equals(RandomState.of(copied)),
    }
    refuse(problems, BlueprintContractError)
    delta = module(h)
    h = h if base is None else base(h)
    if not isinstance(delta, Tensor) or delta.shape != h.shape:
        given = tuple(delta.shape) if isinstance(delta, Tensor) else type(delta).__name__
        raise BlueprintContractError(f"{label} breaks clause 1 (residual): Δ is {given}, h is {tuple(h.shape)}")
    if not torch.equal(delta, torch.zeros_like(delta)):
        raise BlueprintContractError(
            f"{label} breaks clause 2 (identity at birth): |Δ| reaches {delta.abs().max():.3g}, it must be exactly 0. "
            "End it in a zero-initialised Scale, after the last nonlinearity and norm"
        )


def _blueprint_norms(
    module: nn.Module, batches: list[Tensor], rng_seed: int, base: nn.Module | None
) -> dict[str, float]:
    generator = torch.Generator().manual_seed(rng_seed + TARGET_SEED)
    with torch.no_grad():
        streams = batches if base is None else [base(h) for h in batches]
    target = torch.randn(streams[0].shape, generator=generator, dtype=torch.float64)
    pairs = zip(streams, batches, strict=True)
    losses = (lambda stream=stream, h=h: (stream + module(h) - target).square().mean() for stream, h in pairs)
    return _gradient_norms(module, BLUEPRINT_STEP_SIZE, losses)


# -- hosts ------------------------------------------------------------------------------------------------------------

ROWS, HOST_BATCH, HOST_STEP_SIZE = 3, 4, 0.01
PERTURBATION = 0.05  # size of the differences between the weights of the copies

RowKind = Literal["native", "vmap", "fallback", "error"]
_FALLBACK = re.compile(r"batching rule for (\S+?)[.,]?\s")


@dataclass(frozen=True)
class HostReport:
    """Result of `check_host`."""

    rows: RowKind
    """How a fleet can run it: by row-aware layers, by vmap, by vmap with slow ops, or not at all."""
    detail: str
    """`vectorised`, the op that falls back, or the error."""
    parameters: int
    slots: tuple[str, ...]
    dead: tuple[str, ...]
    """Trainable parameters whose gradient is zero, missing or not finite."""

    @property
    def sound(self) -> bool:
        """Whether it can learn and join a fleet."""
        return self.rows != "error" and not self.dead


def check_host(host: nn.Module, example: Tensor | None = None, targets: Tensor | None = None) -> HostReport:
    """Train a copy of `host` briefly, and run three copies at once. The host itself does not change.

    `example` is a batch of inputs; built-in hosts need none. `targets` are its classes (default: random outputs).
    Raises `HostMismatchError` if a segment or slot does not fit, writes or draws.
    """
    host = copy.deepcopy(host).train()
    with fork_rng(host):
        torch.manual_seed(0)
        x = _example_of(host) if example is None else example
        if isinstance(host, Host):
            refuse_state(host)
            host = host.double()  # so that gradients that should cancel do
            x = x.double() if x.is_floating_point() else x
            _check_segments(host, x)
        problem = _randomness(host, x)
        if problem is not None and isinstance(host, Host):
            raise HostMismatchError(problem)
        dead = _dead_parameters(copy.deepcopy(host), x, targets)
        rows, detail = _rows(host, x) if problem is None else ("error", problem)
    slots = tuple(spec.slot_id for spec in host.slots) if isinstance(host, Host) else ()
    return HostReport(rows, detail, count_parameters(host), slots, dead)


def _example_of(host: nn.Module) -> Tensor:
    like = next(host.parameters(), torch.empty(()))
    match host.config() if isinstance(host, Host) else None:
        case {"in_channels": int(channels), "resolution": int(side)}:
            return torch.randn(HOST_BATCH, channels, side, side, device=like.device, dtype=like.dtype)
        case {"vocab": int(vocab), "block": int(block)}:
            return torch.randint(vocab, (HOST_BATCH, block), device=like.device)
    raise BadValueError(f"{type(host).__name__} does not say what it takes: pass example=, a batch of inputs")


def _check_segments(host: Host, h: Tensor) -> None:
    """Clause 1, segment by segment."""
    for index, segment in enumerate(host.segments):
        label, fresh = f"segment {index} ({type(segment).__name__})", copy.deepcopy(segment)
        try:
            result = segment(h, True)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise HostMismatchError(f"{label} cannot take its input of shape {tuple(h.shape)}: {error}") from error
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor)):
            raise HostMismatchError(f"{label} must return (activation, statistics), got {type(result).__name__}")
        _check_stateless(fresh, h, label)
        h, statistics = result
        buffers = {name for name, _ in segment.named_buffers()}
        if unknown := sorted(set(statistics) - buffers):
            raise HostMismatchError(f"{label} returns statistics {unknown}; its buffers are {sorted(buffers)}")
        if index < len(host.slots) and (misfit := _slot_misfit(host.slots[index], h)):
            raise HostMismatchError(f"slot {host.slots[index].slot_id!r} after {label}: {misfit}")


@torch.no_grad()
def _check_stateless(segment: nn.Module, h: Tensor, label: str) -> None:
    """All rows run the same segments, so these must leave no trace."""
    before = cloned_buffers(segment)
    for train in (True, False):
        try:
            trained, evaluated = (segment.train(mode)(h, train)[0] for mode in (True, False))
        except Exception:  # a segment may raise anything; clause 4 reports it
            return
        if written := _written(segment, before):
            raise HostMismatchError(f"{label} writes {written}: return such values as statistics instead")
        # A segment that draws differs too; the next clause reports that.
        if not torch.equal(trained, evaluated) and _randomness(segment, h, train) is None:
            raise HostMismatchError(f"{label} depends on its own mode: use the argument train instead")


def _slot_misfit(spec: SlotSpec, h: Tensor) -> str | None:
    """How the spec of a slot differs from what passes there. A sequence may be shorter than declared."""
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
    """Clause 2: whether a forward pass moves a random stream."""
    before = RandomState.of(host)
    with torch.no_grad():
        copy.deepcopy(host).train()(*inputs)
    if before.equals(RandomState.of(host)):
        return None
    layers = [name for name, part in host.named_modules() if "Dropout" in type(part).__name__]
    remedy = f": set {', '.join(layers)} to p=0" if layers else ""
    return f"no dropout in a fleet: {type(host).__name__} draws random numbers while it trains{remedy}"


def _dead_parameters(host: nn.Module, x: Tensor, targets: Tensor | None) -> tuple[str, ...]:
    """Clause 3."""

    def loss() -> Tensor:
        output = _output(host(x))
        return F.mse_loss(output, torch.randn_like(output)) if targets is None else cross_entropy(output, targets)

    norms = _gradient_norms(host, HOST_STEP_SIZE, [loss] * BATCHES)
    largest = max((norm for norm in norms.values() if norm < math.inf), default=0.0)
    exact = x.dtype == torch.float64 or isinstance(host, Host)
    least = largest * (HOST_ALIVE_RATIO if exact else ALIVE_RATIO)
    return tuple(name for name, p in host.named_parameters() if p.requires_grad and not least < norms[name] < math.inf)


def _output(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise HostMismatchError(f"the host returns {type(output).__name__}; it must return one tensor")
    return output


def _rows(host: nn.Module, x: Tensor) -> tuple[RowKind, str]:
    """Clause 4: by row-aware layers if they agree, else by vmap."""
    hosts = [copy.deepcopy(host) for _ in range(ROWS)]
    with torch.no_grad():
        for parameter in (p for single in hosts for p in single.parameters()):
            parameter.add_(PERTURBATION * torch.randn_like(parameter))
    # Every row gets other inputs, so that rows that see each other are noticed.
    scaled = x.is_floating_point()
    inputs = torch.stack([x.roll(row, 0) * (1 + row) if scaled else x.roll(row, 0) for row in range(ROWS)])

    def run(state: dict[str, Tensor], rows: Tensor) -> Tensor:
        return _output(functional_call(host, state, (rows,)))

    if isinstance(host, Host) and _disagreement(host, hosts, inputs, run) is None:
        return "native", "vectorised"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        problem = _disagreement(host, hosts, inputs, vmap(run))
    if problem is not None:
        return "error", problem
    slow = sorted({match[1] for warning in caught if (match := _FALLBACK.search(str(warning.message)))})
    return ("fallback", f"fallback for {', '.join(slow)}") if slow else ("vmap", "vectorised")


def _disagreement(
    host: nn.Module, hosts: list[nn.Module], inputs: Tensor, run: Callable[[dict[str, Tensor], Tensor], Tensor]
) -> str | None:
    """How rows differ from single hosts in train or eval mode; None if they agree."""
    for train in (True, False):
        host.train(train)
        singles = [copy.deepcopy(single).train(train) for single in hosts]
        parameters, buffers = stack_module_state(singles)
        try:
            together = run({**parameters, **buffers}, inputs)
            together.square().mean().backward()
        except Exception as error:  # a foreign layer may raise anything
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
