"""Gymnasium's vectors as batches, and environments in processes of their own."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from esper.leyline import BadValueError
from esper.leyline.numbers import require_whole
from esper.simic.agent.environments import EnvBatch, LocalBatch, MakeEnv, Outcome, check_spaces
from esper.simic.agent.spaces import SpaceCodec, SpaceError, read_spaces

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

DEFAULT_ENVS = 8


class VectorBatch(EnvBatch):
    """A vector, in any of Gymnasium's three ways to begin the next episode.

    `SAME_STEP`: the step that ends an episode returns the first observation of the next, and the last one in its infos.
    `NEXT_STEP`: the step after it ignores the action and returns the first observation. Such a step is no experience:
    the environment is `idle`. `DISABLED`: we reset.
    """

    one_by_one = False

    def __init__(self, vector: "VectorEnv[Any, Any, Any]", codec: SpaceCodec | None = None) -> None:
        from gymnasium.vector import AutoresetMode

        own = read_spaces(vector.single_observation_space, vector.single_action_space)
        check_spaces(own, codec or own)
        super().__init__(vector.num_envs, own)
        self.vector = vector
        # Vectors that do not say it are of Gymnasium 1.0, where there was one way.
        self.mode: AutoresetMode = AutoresetMode(vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._next: tuple[Any, dict[str, Any]] = (None, {})  # observations and infos of the last step

    def begin(self, indices: Sequence[int], seeds: Sequence[int | None]) -> None:
        each: Any = list(seeds)  # typed as one seed for all, which is documented otherwise
        observations, infos = self.vector.reset(seed=each)
        self.idle.zero_()
        self._start_all(indices, observations, infos)

    def _start_all(self, indices: Sequence[int], observations: Any, infos: dict[str, Any]) -> None:
        for index in indices:
            self._start(index, observations[index], mask_of(infos, index))

    def step(self, actions: Tensor) -> Outcome:
        chosen = np.array([self.codec.read_action(choices) for choices in actions.numpy()])
        observations, given, ended, cut, infos = self.vector.step(chosen.astype(self.vector.action_space.dtype))
        self._next = observations, infos
        rewards = np.zeros(self.n, np.float32)
        acted = ~self.idle.numpy()
        terminated, truncated = acted & ended, acted & cut & ~ended
        for index in range(self.n):
            if not acted[index]:
                self._start(index, observations[index], mask_of(infos, index))
                continue
            self._record(index, given[index], rewards)
            if truncated[index]:
                self.codec.write_observation(self._last(index), self._observations[index])
            elif not terminated[index]:
                self._show(index, observations[index], mask_of(infos, index))
        self.idle.zero_()
        return Outcome(*(torch.from_numpy(values) for values in (rewards, terminated, truncated)))

    def _last(self, index: int) -> Any:
        """The last observation of an episode."""
        observations, infos = self._next
        if self.mode.name != "SAME_STEP":
            return observations[index]
        if "final_obs" not in infos:
            raise SpaceError(
                f"{type(self.vector).__name__} resets in the step that ends an episode, but its infos lack the last "
                "observation, 'final_obs'; add it, or use another autoreset_mode"
            )
        return infos["final_obs"][index]

    def restart(self, ended: Tensor) -> None:
        indices = ended.nonzero().flatten().tolist()
        if self.mode.name == "NEXT_STEP":
            self.idle |= ended
            for index in indices:  # its action is ignored
                for mask in self._masks:
                    mask[index] = True
            return
        if indices and self.mode.name == "DISABLED":
            self._next = self.vector.reset(options={"reset_mask": ended.numpy()})
        self._start_all(indices, *self._next)

    def close(self) -> None:
        self.vector.close()


def mask_of(infos: dict[str, Any], index: int) -> Any:
    """The action mask of one environment of a vector; None if it gave none."""
    given = infos.get("_action_mask")
    if "action_mask" not in infos or (given is not None and not given[index]):
        return None
    return infos["action_mask"][index]


def open_batch(
    make_env: MakeEnv,
    n: int | None,
    codec: SpaceCodec | None = None,
    *,
    default: int = DEFAULT_ENVS,
    processes: bool = False,
) -> EnvBatch:
    """The environments that `make_env()` returns: `n` of them, each in a process of its own if wanted, or a vector."""
    from gymnasium import Env
    from gymnasium.vector import VectorEnv

    if n is not None:
        require_whole("n_envs", n, 1)
    if not callable(make_env):
        raise BadValueError(f"make_env is {make_env}; pass a function that returns an environment: lambda: env")
    first = make_env()
    if isinstance(first, VectorEnv):
        if processes or n not in (None, first.num_envs):
            first.close()
            remark = "processes=True needs one that returns a single environment" if processes else f"n_envs is {n}"
            raise BadValueError(
                f"make_env() returns a vector of {first.num_envs} environments, and {remark}; omit the option"
            )
        return VectorBatch(first, codec)
    if not isinstance(first, Env):
        raise BadValueError(
            f"make_env() returns {first!r}; it must return a gymnasium.Env or a gymnasium.vector.VectorEnv"
        )
    make_one = cast("Callable[[], gymnasium.Env[Any, Any]]", make_env)
    if processes:
        read_spaces(first.observation_space, first.action_space)
        has_method = first.has_wrapper_attr("action_masks")
        first.close()
        return VectorBatch(in_processes(make_one, n or default, has_method), codec)
    return LocalBatch([first, *(make_one() for _ in range((n or default) - 1))], codec)


def in_processes(
    make_env: "Callable[[], gymnasium.Env[Any, Any]]", n: int, has_method: bool
) -> "VectorEnv[Any, Any, Any]":
    """Environments in processes of their own, which give the same episodes as in this one.

    `has_method`: masks come from a method. Infos pass them on, because asking for it would be another message per step.
    """
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode

    def make() -> "gymnasium.Env[Any, Any]":
        # Defined inside a function, so that it is sent as code: importing this module would load torch in each process.
        import gymnasium

        class MaskInInfo(gymnasium.Wrapper[Any, Any, Any, Any]):
            """Adds what `action_masks()` returns to infos."""

            def reset(self, **options: Any) -> Any:
                observation, info = super().reset(**options)
                return observation, {"action_mask": self.get_wrapper_attr("action_masks")(), **info}

            def step(self, action: Any) -> Any:
                observation, reward, ended, cut, info = super().step(action)
                if not (ended or cut):
                    info = {"action_mask": self.get_wrapper_attr("action_masks")(), **info}
                return observation, reward, ended, cut, info

        return MaskInInfo(make_env()) if has_method else make_env()

    # Not forked: torch has threads, which a forked process may wait for in vain.
    return AsyncVectorEnv([make] * n, context="spawn", autoreset_mode=AutoresetMode.SAME_STEP)
