"""The ranks of a run, one process each, as `torchrun` starts them; a process alone is a world of one rank.

Ranks exchange *messages*: named tensors and JSON, over gloo, from CPU to CPU. Nothing is ever unpickled. Rank 0 leads:
the others send it what they have (`gather`), and it tells them what comes next (`share`). Both happen in the same order
on all ranks.

A rank that fails sends its error in place of what rank 0 expects; rank 0 raises it. If rank 0 fails, or a process is
killed, its connections break, and the others end without a message. While a rank hangs, rank 0 warns and waits.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from esper.leyline import BadValueError, EsperError
from esper.leyline.records import Json, flatten
from esper.simic.distributed.connection import RankLostError, connect, disconnect
from esper.simic.distributed.waiting import warned_of
from esper.storage.interrupts import stops_noted
from esper.storage.stored import storable

FAILED = 2  # exit code of ranks that end because another one failed; `esper` exits with it after an error
GRACE_S = 0.5  # torchrun ends all ranks as soon as one has ended; rank 0 prints its error first
CONTENT = "content"  # the tensor that holds a message's JSON


class RankError(EsperError, RuntimeError):
    """Another rank failed; the message is its own."""


class Message(NamedTuple):
    """What ranks exchange."""

    tensors: Mapping[str, Tensor]
    content: dict[str, Json]

    def to_bytes(self) -> bytes:
        """In the format of safetensors."""
        text = torch.frombuffer(bytearray(json.dumps(self.content).encode()), dtype=torch.uint8)
        named = {f"tensors.{name}": tensor for name, tensor in self.tensors.items()}
        return safetensors.torch.save(storable(named | {CONTENT: text}))

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Message":
        """Reading executes nothing."""
        tensors = safetensors.torch.load(raw)
        content = json.loads(tensors.pop(CONTENT).numpy().tobytes())
        return cls({name.removeprefix("tensors."): tensor for name, tensor in tensors.items()}, content)


class World:
    """This process among all ranks. With one rank, messages come back as they are."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, local_rank: int = 0, launchers: frozenset[str] = frozenset()
    ) -> None:
        """`local_rank`: number on this machine. `launchers`: names of the torchruns that started the ranks of this
        world, complete on rank 0."""
        self.rank, self.size, self.local_rank, self.launchers = rank, size, local_rank, launchers
        self.exchanged = 0  # bytes sent and received by this rank
        self._stopped: Callable[[], bool] = lambda: False

    def gather(self, message: Message) -> list[Message]:
        """Rank 0 gets the messages of all ranks, in their order; the others get nothing."""
        if self.size == 1:
            return [message]
        with self._lost_ranks():
            if self.rank:
                self._send(message)
                return []
            messages = [message]
            for rank in range(1, self.size):
                with warned_of(f"rank {rank}"):
                    messages.append(self._receive(rank))
            return messages

    def share(self, message: Message | None = None) -> Message:
        """The message of rank 0, on all ranks; the others pass none."""
        if self.size == 1:
            assert message is not None
            return message
        import torch.distributed as dist

        with self._lost_ranks(), nullcontext() if self.rank else warned_of("another rank"):
            raw = message.to_bytes() if message is not None else b""
            length = torch.tensor([len(raw)])
            dist.broadcast(length, 0)
            buffer = _tensor_of(raw) if message is not None else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(buffer, 0)
            self.exchanged += buffer.numel()
            return message if message is not None else Message.from_bytes(buffer.numpy().tobytes())

    def share_all(self, messages: list[Message]) -> list[Message]:
        """The messages that rank 0 gathered, on all ranks; the others pass none."""
        if self.size == 1:
            return messages
        if self.rank == 0:
            tensors = {f"{rank}.{name}": value for rank, each in enumerate(messages) for name, value in each[0].items()}
            self.share(Message(tensors, {"all": [message.content for message in messages]}))
            return messages
        whole = self.share()
        parts = [Message({}, content) for content in whole.content["all"]]
        for name, value in whole.tensors.items():
            rank, _, rest = name.partition(".")
            parts[int(rank)] = Message({**parts[int(rank)].tensors, rest: value}, parts[int(rank)].content)
        return parts

    def agree(self, content: dict[str, Json], failure: EsperError | None = None) -> None:
        """Raise unless all ranks got here without a failure and with the same content. Rank 0 says what is wrong."""
        if self.rank:
            self.gather(Message({}, {"error": str(failure)} if failure else content))
            self.share()
            return
        if failure is not None:
            raise failure
        own = dict(flatten(json.loads(json.dumps(content))))
        for rank, message in enumerate(self.gather(Message({}, content))[1:], 1):
            theirs = dict(flatten(message.content))
            if differing := [name for name in own | theirs if own.get(name) != theirs.get(name)]:
                values = "; ".join(f"{name} {theirs.get(name)!r}, not {own.get(name)!r}" for name in differing)
                raise BadValueError(
                    f"rank {rank} differs from rank 0: {values}; start all ranks with one command and one code"
                )
        self.share(Message({}, {}))

    @property
    def stopped(self) -> bool:
        """Whether this process was asked to stop (Ctrl-C, SIGTERM) inside `stops_deferred`."""
        return self._stopped()

    @contextmanager
    def stops_deferred(self) -> Iterator[None]:
        """Let all ranks stop together, at the end of a round: here a first Ctrl-C or SIGTERM is only noted.

        A process alone stops at once, as ever."""
        if self.size == 1:
            yield
            return
        with stops_noted() as self._stopped:
            yield
        self._stopped = lambda: False

    def device(self, name: str) -> str:
        """The device of this rank: of several GPUs, `cuda` is the one with this rank's number on its machine."""
        if self.size == 1 or name != "cuda" or not torch.cuda.is_available():
            return name
        return f"cuda:{self.local_rank % torch.cuda.device_count()}"

    def _send(self, message: Message) -> None:
        import torch.distributed as dist

        raw = message.to_bytes()
        dist.send(torch.tensor([len(raw)]), 0)
        dist.send(_tensor_of(raw), 0)
        self.exchanged += len(raw)

    def _receive(self, rank: int) -> Message:
        import torch.distributed as dist

        length = torch.zeros(1, dtype=torch.long)
        dist.recv(length, rank)
        buffer = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(buffer, rank)
        self.exchanged += buffer.numel()
        message = Message.from_bytes(buffer.numpy().tobytes())
        if "error" in message.content:
            raise RankError(f"rank {rank}: {message.content['error']}")
        return message

    @contextmanager
    def _lost_ranks(self) -> Iterator[None]:
        """Turn gloo's errors into ours."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise RankLostError(
                "the connection to another rank broke, so that process has ended; if it printed no error, it was "
                f"killed ({str(error).splitlines()[0]})"
            ) from error


def _tensor_of(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def launched(environment: Mapping[str, str] | None = None) -> bool:
    """Whether a launcher such as `torchrun` started this process."""
    given = os.environ if environment is None else environment
    return "RANK" in given and "WORLD_SIZE" in given


@contextmanager
def open_world() -> Iterator[World]:
    """The world that the launcher's variables describe (RANK, WORLD_SIZE, MASTER_ADDR …), or a process alone.

    An error inside ends all ranks: rank 0 raises it, whichever rank it came from, and the others exit with code 2."""
    world = _world_of(os.environ) if launched() else World()
    if world.size == 1:
        yield world
        return
    connect(world.rank, world.size)
    try:
        gathered = world.gather(Message({}, {"launchers": list(world.launchers)}))
        world.launchers |= {name for message in gathered for name in message.content["launchers"]}
        yield world
    except EsperError as error:
        if world.rank == 0:
            raise
        if not isinstance(error, RankLostError):
            _report(world, error)
        time.sleep(GRACE_S)
        _end(FAILED)
    finally:
        disconnect()


def _world_of(environment: Mapping[str, str]) -> World:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    try:
        rank, size, local_rank = (int(environment.get(name, "0")) for name in names)
    except ValueError as error:
        raise BadValueError(f"{', '.join(names)} must be whole numbers ({error}); let torchrun set them") from None
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if size > 1 and name not in environment]
    if missing or not 0 <= rank < size:
        raise BadValueError(
            f"RANK {rank} of WORLD_SIZE {size} without {missing or 'a rank below it'}; start with torchrun, or unset "
            "RANK and WORLD_SIZE"
        )
    return World(rank, size, local_rank=local_rank, launchers=_launchers_of(environment))


def _launchers_of(environment: Mapping[str, str]) -> frozenset[str]:
    """The name of the torchrun that started this rank: the log folder that it drew for itself.

    torchrun's run id does not tell two of its calls apart, this folder does. A rank knows it from the path of its error
    file, `<folder>/attempt_<restarts>/<local rank>/error.json`."""
    folders = Path(environment.get("TORCHELASTIC_ERROR_FILE", "")).parents
    known = len(folders) > 2 and folders[1].name.startswith("attempt_")
    return frozenset([str(folders[2])] if known else [])


def _report(world: World, error: EsperError) -> None:
    """Send an error to rank 0, which raises it. If rank 0 has failed itself, its own message is enough."""
    try:
        world.gather(Message({}, {"error": str(error)}))
        world.share()  # ends when rank 0 does
    except RankLostError:
        pass


def _end(code: int) -> None:
    """Exit without waiting for connections."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@cache
def source_digest() -> str:
    """Digest of the whole package's code."""
    sources = sorted(Path(__file__).parents[2].rglob("*.py"))
    return sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:32]


def this_code() -> dict[str, Json]:
    """What runs here; it must be equal on all ranks."""
    return {"code": source_digest(), "torch": torch.__version__}
