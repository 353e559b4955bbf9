"""Policies of a grower: rules by name, a learned policy from a folder, or a function of the user's own."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from esper.grower.records import OPS, Action, GrowthReport
from esper.grower.rules import heuristic
from esper.leyline import BadValueError, HeadPreset, SlotConfig, UnknownNameError, head_preset
from esper.simic.agent.policy import check_heads, fit_policy
from esper.simic.training.policy_files import PRETRAINED, is_policy, open_policy
from esper.tamiyo import Policy, growth_table
from esper.tamiyo.policies import RandomPolicy

OwnPolicy = Callable[[GrowthReport], Iterable[Sequence[str]] | None]
RULES: dict[str, OwnPolicy] = {"heuristic": heuristic, "wait": lambda report: None}


def check_policy(policy: str | Path | OwnPolicy) -> None:
    """Raise for a policy that does not exist."""
    if not (callable(policy) or policy in (*RULES, "random") or is_policy(Path(policy))):
        raise UnknownNameError(
            "policy", str(policy), [*RULES, "random", PRETRAINED, "the folder of a run", "a policy file", "a function"]
        )


def make_policy(policy: str | Path, slots: SlotConfig) -> tuple[Policy, HeadPreset]:
    """The policy of random legal actions, or a learned one, and its heads and ops."""
    if policy == "random":
        preset = head_preset("core")
        return RandomPolicy(growth_table(preset, slots)), preset
    agent, name = open_policy(Path(policy))
    preset = head_preset(name)
    check_heads(agent, growth_table(preset, slots), Path(policy))
    return fit_policy(agent, slots, greedy=True), preset


def read_actions(given: Iterable[Sequence[str]] | None) -> list[Action]:
    """The actions that a rule or a function of the user's own returned, checked for their form."""
    actions = []
    for each in given or ():
        if isinstance(each, str) or not 2 <= len(each) <= 3 or each[0] not in OPS:
            raise BadValueError(
                f"the policy returned {each!r}; return a list of actions such as ('germinate', 'layer1', 'conv_light') "
                "or ('fossilize', 'layer1')"
            )
        actions.append(Action(*each))
    return actions
