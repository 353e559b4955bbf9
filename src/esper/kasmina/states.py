"""The state of anything that has a `state_dict`, as JSON and tensors, and back.

JSON knows neither tuples nor keys that are numbers, and tensors lie in a file of their own; each of these becomes an
object of one key:

    {"tensor": "optimizer/state/0/exp_avg"}   {"tuple": [0.9, 0.999]}   {"dict": [[0, ...], [1, ...]]}
    {"counter": [[30, 1]]}                    {"float": "inf"}
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from esper.leyline import CheckpointError
from esper.leyline.records import Json

State = Any  # nested dicts, lists and tuples of tensors, numbers, words and None


def split_state(state: State, name: str, tensors: dict[str, Tensor]) -> Json:
    """The JSON of a state; its tensors are added to `tensors`, under names that begin with `name`."""
    if isinstance(state, Tensor):
        if name in tensors:  # keys may hold a slash
            name = f"{name}#{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, dict):
        kind = "counter" if isinstance(state, Counter) else "dict"
        return {kind: [[_key(key, name), split_state(value, f"{name}/{key}", tensors)] for key, value in state.items()]}
    if isinstance(state, list | tuple):
        items = [split_state(value, f"{name}/{index}", tensors) for index, value in enumerate(state)]
        return items if isinstance(state, list) else {"tuple": items}
    if isinstance(state, float) and not math.isfinite(state):
        return {"float": str(state)}
    if state is None or type(state) in (bool, int, float, str):
        return state
    raise CheckpointError(
        f"{name} is a {type(state).__name__}; a checkpoint holds tensors, numbers, words, None, and lists, tuples and "
        "dicts of them"
    )


def _key(key: object, name: str) -> int | str:
    if type(key) in (int, str):
        return key  # type: ignore[return-value]  # it is
    raise CheckpointError(f"{name} has the key {key!r}; those of a state are numbers or words")


def join_state(plain: Json, tensors: dict[str, Tensor]) -> State:
    """The state of this JSON."""
    if isinstance(plain, list):
        return [join_state(value, tensors) for value in plain]
    if not isinstance(plain, dict):
        return plain
    [(kind, value)] = plain.items()
    made: dict[str, Callable[[], State]] = {
        "tensor": lambda: tensors[value],
        "tuple": lambda: tuple(join_state(each, tensors) for each in value),
        "dict": lambda: {key: join_state(each, tensors) for key, each in value},
        "counter": lambda: Counter({key: join_state(each, tensors) for key, each in value}),
        "float": lambda: float(value),
    }
    return made[kind]()
