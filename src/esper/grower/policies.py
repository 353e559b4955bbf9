"""Policies of a grower: rules by name, a learned policy from a folder, or a function of the user's own."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from esper.grower.records import OPS, Action, GrowthReport
from esper.leyline import BadValueError, SlotConfig, UnknownNameError
from esper.tamiyo import ActionTable, ObservationLayout, Policy
from esper.tamiyo.policies import HeuristicConfig, HeuristicTamiyo, RandomPolicy, WaitPolicy

OwnPolicy = Callable[[GrowthReport], Iterable[Sequence[str]]]
RULES = ("heuristic", "random", "wait")


def scaled_rules(steps: int, slots: int) -> HeuristicConfig:
    """The rules for seeds that act from birth, in a training of `steps` steps.

    In a training of fixed length the early seed wins, so nothing waits for a plateau, and all slots may grow at once.
    A seed is judged after a sixth of the training, and none is born in the last two fifths.
    """
    trial = max(2, math.ceil(steps / 6))
    return HeuristicConfig(
        patience=0,
        plateau=0.0,
        at_once=slots,
        germinate_left=max(trial + 2, math.ceil(0.4 * steps)),
        holding_steps=trial,
        ending=min(2, steps),
    )


def make_policy(
    policy: str | Path, table: ActionTable, slots: SlotConfig, layout: ObservationLayout, steps: int
) -> Policy:
    """The policy of that name, or in that folder."""
    if policy == "heuristic":
        return HeuristicTamiyo(table, slots, scaled_rules(steps, len(slots)))
    if policy in ("random", "wait"):
        return RandomPolicy(table) if policy == "random" else WaitPolicy(table)
    if policy == "pretrained":
        raise BadValueError(
            'policy="pretrained" needs a controller that is shipped with Esper, and none is yet: use "heuristic", or '
            "the folder of a run that you trained with `esper train`"
        )
    if not Path(policy).is_dir():
        raise UnknownNameError("policy", str(policy), [*RULES, "the folder of a run", "a function"])
    from esper.simic.agent.policy import load_policy
    from esper.simic.training.run_folder import last_checkpoint

    return load_policy(last_checkpoint(Path(policy)), table, layout, greedy=True)


def read_actions(given: Iterable[Sequence[str]] | None) -> list[Action]:
    """The actions that a policy of the user's own returned, checked for their form."""
    actions = []
    for each in given or ():
        if isinstance(each, str) or not 2 <= len(each) <= 3 or each[0] not in OPS:
            raise BadValueError(
                f"the policy returned {each!r}; return a list of actions such as ('germinate', 'layer1', 'conv_light') "
                "or ('fossilize', 'layer1')"
            )
        actions.append(Action(*each))
    return actions
