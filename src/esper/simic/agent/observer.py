"""Looking on while an agent learns."""

from typing import Protocol

from torch import Tensor, nn


class UpdateObserver(Protocol):
    """Is shown every minibatch of an update. It reads and changes nothing; what it wants to keep, it copies."""

    def see_minibatch(self, network: nn.Module, cells: Tensor, log_ratios: Tensor, decided: Tensor) -> None:
        """The network, with gradients as they are before clipping; which cells of the round the minibatch's steps are
        (steps,), the log-ratios of their heads and which of these were decided, (steps, heads) each."""
