"""The contract of a blueprint, as a function that users can call on their own.

1. residual: Δ(h) has the shape of h;
2. identity at birth: Δ(h) is exactly zero;
3. alive: every parameter tensor gets a gradient that matters;
4. its parameter count is the one that it states;
5. stateless: a forward pass in training mode writes no buffer and draws no random number.
"""

import copy
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints.registry import BlueprintRegistry, BlueprintSpec
from esper.kasmina.random_state import RandomState, random_state_kept
from esper.leyline import BadValueError, BlueprintContractError, Topology
from esper.leyline.numbers import require_whole

ALIVE_RATIO = 1e-6
"""A tensor is dead when its gradient norm never exceeds this share of the blueprint's largest."""
ALIVE_SEEDS = 20
ALIVE_BATCHES = 3
STEP_SIZE = 0.05
TARGET_SEED = 1_000_000_007
BATCH = 8
IMAGE_SIDE = 6
SEQUENCE = 5


class BlueprintReport(NamedTuple):
    """What was measured: parameters, and the smallest gradient ratio of any tensor over all seeds."""

    parameters: int
    weakest: str
    weakest_ratio: float


def check_blueprint(
    topology: Topology, name: str, width: int, *, resolution: int | None = None, seeds: int = ALIVE_SEEDS
) -> BlueprintReport:
    """Check a registered blueprint at a width; raises `BlueprintContractError` naming the clause that is broken."""
    require_whole("seeds", seeds, 1, remark=": each is a fresh set of weights to check")
    spec = BlueprintRegistry.spec(topology, name)
    side = resolution if resolution is not None else _default_resolution(spec)
    if problem := spec.misfit(width, side):
        raise BadValueError(f"blueprint {name!r} for {topology} slots: {problem}")
    label = f"{topology} blueprint {name!r} at width {width}"
    ratios: dict[str, float] = {}
    for rng_seed in range(seeds):
        module = BlueprintRegistry.build(topology, name, width, resolution=side, rng_seed=rng_seed).double()
        # What passes a slot is a signed activation or, behind a ReLU, a non-negative one: a seed must live on both.
        for positive in (False, True):
            batches = _batches(topology, width, side, rng_seed, positive)
            with random_state_kept(module):
                _check_stateless(copy.deepcopy(module), batches[0], label)
                _check_birth(module, batches[0], label)
                norms = _gradient_norms(copy.deepcopy(module), batches, rng_seed)
            largest = max(norms.values())
            for parameter, norm in norms.items():
                ratio = norm / largest if largest > 0 else 0.0
                ratios[parameter] = min(ratio, ratios.get(parameter, float("inf")))
    weakest = min(ratios, key=lambda parameter: ratios[parameter])
    if ratios[weakest] <= ALIVE_RATIO:
        raise BlueprintContractError(
            f"{label} breaks clause 3 (alive): the gradient of {weakest!r} is {ratios[weakest]:.1e} of the largest "
            f"on one of {seeds} seeds; it must exceed {ALIVE_RATIO:.0e}. Look for a zero-initialised layer under a "
            "norm or ReLU, a bias before a norm, or a parameter that forward does not use"
        )
    return BlueprintReport(spec.count(width), weakest, ratios[weakest])


def _default_resolution(spec: BlueprintSpec) -> int:
    return max(IMAGE_SIDE if spec.topology == "image" else SEQUENCE, spec.min_resolution)


def _batches(topology: Topology, width: int, side: int, rng_seed: int, positive: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * rng_seed + positive)
    shape = {"image": (BATCH, width, side, side), "tokens": (BATCH, side, width), "vector": (BATCH, width)}[topology]
    draws = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(ALIVE_BATCHES)]
    return [draw.relu() for draw in draws] if positive else draws


def _check_stateless(module: nn.Module, h: Tensor, label: str) -> None:
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    drawn = RandomState.of(module)
    with torch.no_grad():
        module.train()(h)
    written = [name for name, buffer in module.named_buffers() if not torch.equal(buffer, buffers[name])]
    if written:
        raise BlueprintContractError(
            f"{label} breaks clause 5 (stateless): forward writes {', '.join(written)}, also in rows that must write "
            "nothing. Use GroupNorm or LayerNorm instead of BatchNorm"
        )
    if not drawn.equals(RandomState.of(module)):
        raise BlueprintContractError(
            f"{label} breaks clause 5 (stateless): forward draws random numbers, and so would change those of the "
            "host. Leave out dropout"
        )


def _check_birth(module: nn.Module, h: Tensor, label: str) -> None:
    with torch.no_grad():
        delta = module(h)
    if not isinstance(delta, Tensor) or delta.shape != h.shape:
        given = tuple(delta.shape) if isinstance(delta, Tensor) else type(delta).__name__
        raise BlueprintContractError(f"{label} breaks clause 1 (residual): Δ is {given}, h is {tuple(h.shape)}")
    if not torch.equal(delta, torch.zeros_like(delta)):
        raise BlueprintContractError(
            f"{label} breaks clause 2 (identity at birth): |Δ| reaches {delta.abs().max():.3g}, it must be exactly 0. "
            "End it in a zero-initialised Scale, after the last nonlinearity and norm"
        )


def _gradient_norms(module: nn.Module, batches: list[Tensor], rng_seed: int) -> dict[str, float]:
    """Largest gradient norm of each tensor over the batches, with a step between them; 0 if one was not finite."""
    optimiser = torch.optim.SGD(module.parameters(), lr=STEP_SIZE)
    generator = torch.Generator().manual_seed(rng_seed + TARGET_SEED)
    target = torch.randn(batches[0].shape, generator=generator, dtype=torch.float64)
    norms = dict.fromkeys((name for name, _ in module.named_parameters()), 0.0)
    for h in batches:
        optimiser.zero_grad()
        (h + module(h) - target).square().mean().backward()
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                norm = float(parameter.grad.norm())
                norms[name] = max(norms[name], norm if math.isfinite(norm) else math.inf)
        optimiser.step()
    return {name: norm if math.isfinite(norm) else 0.0 for name, norm in norms.items()}
