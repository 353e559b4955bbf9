"""One step of growth: measure, decide, record. Under `DistributedDataParallel` rank 0 acts, and the others follow."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch

from esper.grower import ranks
from esper.grower.decisions import Decider
from esper.grower.records import GrowthRecord
from esper.grower.scoring import Batch
from esper.kasmina.compare import RowScore
from esper.leyline import BadValueError
from esper.tolaria.governor import Symptom


def take_step(decider: Decider, validation: Iterable[Batch] | float) -> GrowthRecord:
    """Measure the model, move timers, and let the policy act; or undo what has made the model diverge."""
    scored = decider.score(validation)
    is_loss = scored.rows is not None or decider.scorer.loss is not None
    symptom = decider.guard.symptom(scored.main, scored.calibrated.loss, is_loss=is_loss)
    if symptom is not None:
        return _undo(decider, scored.main, symptom)
    growing = decider.growing
    look = decider.measure(scored)
    decider.guard.observe(scored.calibrated.loss)
    decider.step += 1
    remarks = decider.adapt(scored)
    ticks = [change for _, change in growing.tick()]
    actions, changes = decider.decide()
    growing.modules.notes = decider.notes()
    blind = isinstance(validation, float) and growing.live()
    return _record(
        decider,
        scored.main,
        actions=tuple(actions),
        changes=(*ticks, *changes),
        contributions={slot_id: each.points for slot_id, each in look.comparison.contributions.items()},
        remarks=(*remarks, *(("contributions need validation data, not a number",) if blind else ())),
        choices=decider.choices,
    )


def measure_again(decider: Decider, validation: Iterable[Batch]) -> GrowthRecord:
    """Measure contributions without a step."""
    scored = decider.score(validation)
    decider.measure(scored)
    return _record(decider, scored.main)


def _undo(decider: Decider, main: RowScore, symptom: Symptom) -> GrowthRecord:
    """Undo what growth has done to the model since the last step. The policy is not asked, for want of numbers."""
    changes, done = decider.guard.undo()
    decider.step += 1
    decider.growing.modules.notes = decider.notes()
    remark = f"the loss was {main.loss:.4g}: {done}"
    return _record(decider, main, changes=tuple(changes), remarks=(remark,), panic=symptom.name)


def _record(decider: Decider, main: RowScore, **content: Any) -> GrowthRecord:  # Any: fields of the record
    accuracy = None if main.correct is None else main.accuracy
    growing = decider.growing
    grown = growing.grown_parameters(0)
    return GrowthRecord(decider.step, accuracy, main.loss, grown=grown, budget=growing.budget, **content)


def on_all_ranks(decider: Decider, act: Callable[[], GrowthRecord]) -> GrowthRecord:
    """Let rank 0 act, and the others take over the seeds that result. An error of rank 0 is raised on all."""
    if ranks.world() == 1:
        return act()
    slots = decider.growing.modules
    before = {slot_id: slot.seed for slot_id, slot in slots.items()}
    record, error, payload = None, None, None
    if ranks.rank() == 0:
        try:
            record = act()
            structure = slots.get_extra_state().numpy().tobytes().hex()
            content = {"record": record.to_json(), "structure": structure}
        except Exception as raised:  # also one of the user's loss: the other ranks wait
            error, content = raised, {"error": f"{type(raised).__name__}: {raised}"}
        payload = json.dumps(content).encode()
    received = json.loads(ranks.share(payload, decider.growing.device))
    if "error" in received:
        raise error or BadValueError(f"rank 0 failed: {received['error']}")
    if record is None:
        record = GrowthRecord.from_json(received["record"])
        if record.panic is not None:
            decider.guard.restore()
        slots.set_extra_state(torch.frombuffer(bytearray.fromhex(received["structure"]), dtype=torch.uint8))
    for slot_id, slot in slots.items():
        if slot.seed is not None and slot.seed is not before[slot_id]:
            ranks.equalise(slot)
    for name in slots.fixed:
        ranks.equalise(slots.host.get_submodule(name))
    return record
