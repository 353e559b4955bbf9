"""Lanes: kernels that need not wait for each other, side by side.

Groups of seeds are small, so their kernels leave most of a GPU idle, and hundreds of them in a row are mostly gaps.
While a CUDA graph is captured, parts of the work are therefore recorded on side streams; backward passes follow the
streams of the forward pass by themselves. Elsewhere lanes are nothing at all, and results are the same.

A tensor must be freed on the lane that it was made on: what a part reads for its backward pass is to be made inside.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

LANES = 6

T = TypeVar("T")


class Lanes:
    """Side streams of a device."""

    def __init__(self, device: torch.device, count: int = LANES) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(count)] if device.type == "cuda" else []

    @contextmanager
    def over(self, items: Sequence[T]) -> Iterator[Iterator[T]]:
        """Items in turn, each with its lane as the current stream; at the end all lanes are waited for.

        The item at an index has the same lane in every call.
        """
        if not self._streams or not torch.cuda.is_current_stream_capturing():
            yield iter(items)
            return
        main = torch.cuda.current_stream()
        used = self._streams[: len(items)]

        def walk() -> Generator[T]:
            for stream in used:
                stream.wait_stream(main)
            for index, item in enumerate(items):
                with torch.cuda.stream(used[index % len(used)]):
                    yield item

        walking = walk()
        try:
            yield walking
        finally:
            walking.close()  # after an error a lane would stay the current stream, and the capture could not end
            for stream in used:
                main.wait_stream(stream)
