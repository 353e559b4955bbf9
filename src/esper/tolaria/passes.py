"""One pass: the rows of a fleet from the input to the output. The same function trains, validates and ablates."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from esper.kasmina.host import Host
from esper.kasmina.layers import Statistics, add_rows, cat_rows, take_rows
from esper.tolaria.rows import START, Rows


class PassResult(NamedTuple):
    """Outputs (R, B, …), batch statistics per segment, and the streams behind the tapped places."""

    output: Tensor
    statistics: list[Statistics]
    taps: dict[int, Tensor]


class StackedHost:
    """Hosts of one shape with weights stacked over envs, each tensor a leaf (envs, …)."""

    def __init__(self, hosts: list[Host], device: torch.device, dtype: torch.dtype) -> None:
        self.skeleton = hosts[0].to(device=device, dtype=dtype)
        parameters, buffers = dict(self.skeleton.named_parameters()), dict(self.skeleton.named_buffers())
        sources = [dict(host.named_parameters()) | dict(host.named_buffers()) for host in hosts]

        def stacked(name: str) -> Tensor:
            return torch.stack([source[name].detach().to(device=device, dtype=dtype) for source in sources])

        self.weights = {name: stacked(name).requires_grad_() for name in parameters}
        self.buffers = {name: stacked(name) for name in buffers}

    def segment_state(self, index: int, rows: Rows, present: int) -> dict[str, Tensor]:
        """Weights and buffers of one segment for the rows that are there."""
        prefix = f"segments.{index}."
        named = {**self.weights, **self.buffers}
        state = {name.removeprefix(prefix): tensor for name, tensor in named.items() if name.startswith(prefix)}
        if rows.whole_fleet:
            return state
        env = rows.env[:present]
        return {name: tensor.detach().index_select(0, env) for name, tensor in state.items()}

    def run(
        self,
        rows: Rows,
        x: Tensor | None,
        *,
        train: bool,
        statistics: list[Statistics] | None = None,
        tapped: Collection[int] = (),
        streams: Mapping[int, Tensor] | None = None,
    ) -> PassResult:
        """From the input `x` (rows born at the start, B, …) to the output.

        `statistics` replace the running ones; `streams` are where rows are born from instead of this pass's own.
        """
        births = {birth.place: birth.parents for birth in rows.births}
        h = None if START not in births else x
        taps: dict[int, Tensor] = {}
        found: list[Statistics] = []
        for index, segment in enumerate(self.skeleton.segments):
            found.append({})
            if h is not None:
                state = self.segment_state(index, rows, len(h))
                h, found[index] = functional_call(
                    segment, state | (statistics[index] if statistics else {}), (h, train)
                )
                if index in tapped:
                    taps[index] = h.detach()
            if index in births:
                source = h if streams is None else streams[index]
                assert source is not None, "rows that are born without a stream"
                born = take_rows(source, births[index])
                h = born if h is None else cat_rows([h, born])
            for act in rows.acts.get(index, ()):
                assert h is not None, "a bank acts where there are no rows"
                taken = take_rows(h, act.rows)
                effect = act.bank.effect(taken, act.members, act.strength, act.valid, detached=act.detached)
                h = add_rows(h, act.rows, effect)
        assert h is not None, "a pass without rows"
        return PassResult(h, found, taps)
