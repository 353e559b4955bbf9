"""The registry of blueprints: seed architectures, registered by decorator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from esper.kasmina.layers import count_parameters, reset_parameters
from esper.leyline import (
    TOPOLOGIES,
    BadValueError,
    BlueprintContractError,
    BlueprintOffer,
    SlotSpec,
    Topology,
)
from esper.leyline.numbers import refuse, require_known


@dataclass(frozen=True)
class Folding:
    """How a seed belongs to the submodule in front of it, and how it folds into the weights of that submodule."""

    fits: Callable[[nn.Module], bool]
    """Whether it is offered behind a submodule"""
    fold: Callable[[nn.Module, nn.Module, float], dict[str, Tensor] | None]
    """(submodule, seed, alpha) → new values of the submodule's parameters; None where it cannot be folded"""
    build: Callable[[nn.Module], nn.Module] | None = None
    """submodule → a seed that reads the submodule's input instead of its output"""
    count: Callable[[nn.Module], int] | None = None
    """submodule → number of parameters of that seed"""
    example: Callable[[int], nn.Module] | None = None
    """width → a submodule that such a seed fits, for `check_blueprint`"""


@dataclass(frozen=True)
class BlueprintSpec:
    """A seed architecture, and the slots that it fits."""

    name: str
    topology: Topology
    build: Callable[[int], nn.Module]
    """width → module whose forward(h) returns the residual Δ(h), exactly zero at birth."""
    count: Callable[[int], int]
    """width → number of parameters."""
    min_width: int = 1
    min_resolution: int = 1
    min_values: int = 1
    """Minimum of width × pixels. A norm over fewer values returns constants."""
    multiple_of: int = 1
    """Required divisor of the width (attention heads)."""
    folding: Folding | None = None
    """Set for adapters: blueprints for pretrained models, offered only behind submodules that they fit."""

    @property
    def reads_input(self) -> bool:
        """Whether a seed reads the input of the submodule in front of it, and so depends on that submodule."""
        return self.folding is not None and self.folding.build is not None

    def parameters_in(self, slot: SlotSpec) -> int:
        """Parameters of a seed in a slot. For an adapter, the slot's offer states them."""
        offers = {offer.name: offer.parameters for offer in slot.blueprints} if self.folding else {}
        return offers.get(self.name, self.count(slot.width))

    def misfit_in(self, slot: SlotSpec) -> str | None:
        """Why it cannot grow in a slot; None if it can."""
        if self.folding is not None and self.name not in [offer.name for offer in slot.blueprints]:
            return f"{self.name!r} adapts certain submodules of pretrained models, and that in front is none of them"
        return self.misfit(slot.width, slot.resolution)

    def misfit(self, width: int, resolution: int | None = None) -> str | None:
        """Why it cannot be built there; None if it can."""
        side = self.min_resolution if resolution is None else resolution
        values = width * side ** (2 if self.topology == "image" else 0)
        few = f"width {width} at resolution {resolution} gives its norm {values} values of {self.min_values} needed"
        problems = {
            f"width {width} is below its minimum of {self.min_width}": width < self.min_width,
            f"width {width} is not a multiple of {self.multiple_of}": width % self.multiple_of > 0,
            f"resolution {resolution} is below its minimum of {self.min_resolution}": side < self.min_resolution,
            few: resolution is not None and values < self.min_values,
        }
        return next((problem for problem, applies in problems.items() if applies), None)

    def build_behind(self, base: nn.Module | None, width: int) -> nn.Module:
        """Build a seed for a slot of that width, behind the submodule `base` if it reads the input of that."""
        if self.folding is None or self.folding.build is None or self.folding.count is None or base is None:
            return self.check_built(self.build(width), width)
        return self.check_built(self.folding.build(base), width, self.folding.count(base))

    def check_built(self, module: nn.Module, width: int, stated: int | None = None) -> nn.Module:
        """Return the built module, if it has as many parameters as stated, by default by `count`."""
        label = f"{self.topology} blueprint {self.name!r} at width {width}"
        if not isinstance(module, nn.Module):
            raise BlueprintContractError(f"{label}: its factory returned {type(module).__name__}, not an nn.Module")
        actual, stated = count_parameters(module), self.count(width) if stated is None else stated
        wrong = f"{label} breaks clause 4 (count): it states {stated!r} parameters but has {actual}"
        empty = f"{label} has no parameters, so it could never learn"
        refuse({empty: actual == 0, wrong: type(stated) is not int or actual != stated}, BlueprintContractError)
        return module


class BlueprintRegistry:
    """All blueprints, by topology and name."""

    _specs: ClassVar[dict[tuple[Topology, str], BlueprintSpec]] = {}

    @classmethod
    def register(
        cls,
        topology: Topology,
        name: str,
        count: Callable[[int], int],
        *,
        min_width: int = 1,
        min_resolution: int = 1,
        min_values: int = 1,
        multiple_of: int = 1,
        folding: Folding | None = None,
    ) -> Callable[[Callable[[int], nn.Module]], Callable[[int], nn.Module]]:
        """Decorate a module class or factory that takes a width. Raises if the name exists.

        With a `folding` it is an adapter: not among `names`, and offered only behind submodules that it fits.
        """
        no_count = f"count of blueprint {name!r} is {count!r}; pass a function of the width, such as lambda c: 3 * c"
        twice = f"a blueprint {name!r} for {topology} slots is registered already"
        refuse({twice: name in (*cls.names(topology), *cls.adapters(topology)), no_count: not callable(count)})

        def enter(build: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
            if not callable(build):
                raise BadValueError(f"blueprint {name!r} is {build!r}; decorate a module class or a function of width")
            cls._specs[topology, name] = BlueprintSpec(
                name, topology, build, count, min_width, min_resolution, min_values, multiple_of, folding
            )
            return build

        return enter

    @classmethod
    def unregister(cls, topology: Topology, name: str) -> None:
        """Remove a blueprint. Existing seeds stay."""
        cls.spec(topology, name)
        del cls._specs[topology, name]

    @classmethod
    def names(cls, topology: Topology) -> list[str]:
        """Names for slots of that topology without adapters, in order of registration."""
        require_known("topology", topology, TOPOLOGIES)
        return [name for (kind, name), spec in cls._specs.items() if kind == topology and spec.folding is None]

    @classmethod
    def adapters(cls, topology: Topology) -> list[str]:
        """Names of the adapters for slots of that topology."""
        require_known("topology", topology, TOPOLOGIES)
        return [name for (kind, name), spec in cls._specs.items() if kind == topology and spec.folding is not None]

    @classmethod
    def spec(cls, topology: Topology, name: str) -> BlueprintSpec:
        """The spec of a blueprint or adapter."""
        if name not in cls.adapters(topology):
            require_known(f"{topology} blueprint", name, cls.names(topology))
        return cls._specs[topology, name]

    @classmethod
    def build(
        cls,
        topology: Topology,
        name: str,
        width: int,
        *,
        resolution: int | None = None,
        rng_seed: int | None = None,
        base: nn.Module | None = None,
    ) -> nn.Module:
        """Build a seed module for a slot of that width; `rng_seed` fixes its initial weights.

        `base` is the submodule in front, on which some adapters depend.

        Raises `BlueprintContractError` if its parameter count is not the stated one, because budgets rely on it.
        """
        spec = cls.spec(topology, name)
        if problem := spec.misfit(width, resolution):
            raise BadValueError(f"blueprint {name!r} for {topology} slots: {problem}")
        if rng_seed is None:
            return spec.build_behind(base, width)
        # Layers of torch draw from the global stream when they are built: seed it for them, then restore it.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(rng_seed)
            module = spec.build_behind(base, width)
        reset_parameters(module, rng_seed)
        return module

    @classmethod
    def offers(cls, slot: SlotSpec) -> tuple[BlueprintOffer, ...]:
        """The blueprints that fit a slot, with their parameter counts there."""
        specs = [cls.spec(slot.topology, name) for name in cls.names(slot.topology)]
        return tuple(
            BlueprintOffer(spec.name, spec.min_width, spec.min_resolution, spec.count(slot.width))
            for spec in specs
            if spec.misfit(slot.width, slot.resolution) is None
        )

    @classmethod
    def adapter_offers(cls, slot: SlotSpec, base: nn.Module) -> tuple[BlueprintOffer, ...]:
        """The adapters that fit a slot behind the submodule `base`, with their parameter counts there."""
        offers = []
        for name in cls.adapters(slot.topology):
            spec = cls.spec(slot.topology, name)
            assert spec.folding is not None
            if spec.misfit(slot.width, slot.resolution) is None and spec.folding.fits(base):
                count = spec.count(slot.width) if spec.folding.count is None else spec.folding.count(base)
                offers.append(BlueprintOffer(name, spec.min_width, spec.min_resolution, count))
        return tuple(offers)
