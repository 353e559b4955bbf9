"""CUDA graphs of a training minibatch.

A graph belongs to a structure: which banks act, on groups of which sizes, how many shadow rows are born where. Rows,
members, strengths and rates are tensors, so an edit that keeps the structure only writes new values into the graph's
own tensors. All graphs share one memory pool.
"""

import gc
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.tolaria.batches import Samples
from esper.tolaria.rows import PassPlan

if TYPE_CHECKING:
    from esper.tolaria.fleet import HostFleet

MAX_GRAPHS = 48
# Eager minibatches of a structure before it gets a graph. A capture costs as much as two or three of them (H200).
CAPTURE_AFTER = 2
MAX_STRUCTURES = 4096  # whose minibatches are counted: the latest ones, so that a long run does not grow

Structure = tuple[object, ...]


def structure(plan: PassPlan) -> Structure:
    """What must be equal for one graph to serve two plans."""
    births = () if plan.shadow is None else tuple((birth.place, len(birth.parents)) for birth in plan.shadow.births)
    acts = tuple(
        (place, act.bank.slot.slot_id, act.bank.blueprint, len(act.rows), act.bank.styles, act.silent)
        for place, group in sorted(plan.acts.items())
        for act in group
    )
    return births, acts, None if plan.main.tiles is None else plan.main.tiles.shape


def plan_tensors(plan: PassPlan) -> list[Tensor]:
    """All tensors that a minibatch reads of a plan, in an order that depends on its structure alone."""
    tensors = [] if plan.main.tiles is None else [plan.main.tiles]
    if plan.shadow is not None:
        assert plan.shadow.valid is not None
        tensors += [plan.shadow.env, plan.shadow.valid, *(birth.parents for birth in plan.shadow.births)]
    for _, group in sorted(plan.acts.items()):
        for act in group:
            tensors += [act.rows, act.members, act.strength, act.valid, act.learns]
    return tensors


@dataclass
class _Captured:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    plan: PassPlan
    current: PassPlan  # whose values are in `plan`
    losses: Tensor
    norms: dict[tuple[str, str], Tensor]


class MinibatchGraphs:
    """Replays minibatches, and captures a graph for every structure that recurs."""

    def __init__(self, fleet: "HostFleet", capacity: int = MAX_GRAPHS) -> None:
        self.fleet, self.capacity = fleet, capacity
        self.captures = self.replays = self.eager_runs = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: OrderedDict[Structure, _Captured] = OrderedDict()
        self._counts: OrderedDict[Structure, int] = OrderedDict()
        self._samples: Samples | None = None
        self._rate, self._warm = torch.zeros(2, dtype=fleet.dtype, device=fleet.device)

    def run(self, plan: PassPlan, samples: Samples, rate: float, warm: float) -> Tensor:
        """One minibatch; returns the losses (R,)."""
        self._rate.fill_(rate)
        self._warm.fill_(warm)
        # All graphs read one minibatch: its shape is that of the main rows, whatever grows.
        static = self._samples = self._samples or Samples(*(torch.empty_like(part) for part in samples))
        key = (*structure(plan), tuple(self.fleet.busy_banks()))
        captured = self._graphs.get(key)
        if captured is None:
            self._counts[key] = self._counts.pop(key, 0) + 1
            if len(self._counts) > MAX_STRUCTURES:
                self._counts.popitem(last=False)
            if self._counts[key] <= CAPTURE_AFTER:
                self.eager_runs += 1
                return self.fleet.run_minibatch(plan, samples, self._rate, self._warm)
            captured = self._graphs[key] = self._capture(plan, static)
        elif captured.current is not plan:
            torch._foreach_copy_(plan_tensors(captured.plan), plan_tensors(plan))
            captured.current = plan
        self._graphs.move_to_end(key)
        self.replays += 1
        for part, given in zip(static, samples, strict=True):
            part.copy_(given)
        captured.graph.replay()
        # Copies, two kernels: graphs share a pool, so another graph's replay may overwrite what this one left there.
        if captured.norms:
            self.fleet.norms = dict(zip(captured.norms, torch.stack(list(captured.norms.values())), strict=True))
        return captured.losses.clone()

    def _capture(self, plan: PassPlan, samples: Samples) -> _Captured:
        while len(self._graphs) >= self.capacity:
            self._graphs.popitem(last=False)
        self.captures += 1
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.fleet.device)
        collecting = gc.isenabled()
        gc.disable()  # it may free another fleet's graphs, which would invalidate this capture
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                losses = self.fleet.run_minibatch(plan, samples, self._rate, self._warm)
        finally:
            if collecting:
                gc.enable()
        return _Captured(graph, plan, plan, losses, dict(self.fleet.norms))
