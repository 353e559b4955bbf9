"""Errors, which name the given value and what is allowed instead.

Each also derives from a built-in error (ValueError, RuntimeError, …), so callers can catch it without importing Esper.
"""

from collections.abc import Iterable


class EsperError(Exception):
    """Base class of Esper's errors."""


class UnknownNameError(EsperError, ValueError):
    """A name (blueprint, slot, style, task …) that is not registered."""

    def __init__(self, kind: str, given: object, allowed: Iterable[object]) -> None:
        names = ", ".join(str(name) for name in allowed) or "none"
        super().__init__(f"unknown {kind} {given!r}; allowed: {names}")


class BadValueError(EsperError, ValueError):
    """A value outside the range that the message states."""


class StageError(EsperError, RuntimeError):
    """A transition that does not exist in the lifecycle."""


class GateRefusedError(EsperError, RuntimeError):
    """A transition that its gate refuses; the message lists the reasons."""


class SlotOccupiedError(EsperError, RuntimeError):
    """Germination in a slot that is not dormant."""


class HostMismatchError(EsperError, ValueError):
    """A host whose segments, slots or activations do not fit together."""


class BlueprintContractError(EsperError, AssertionError):
    """A blueprint that violates its contract."""


class CheckpointError(EsperError, ValueError):
    """A checkpoint that is damaged, or that has another format or version."""


class StorageError(EsperError, OSError):
    """A file or folder that cannot be written: a full disk, no permission. The old content is intact."""


class DataError(EsperError, ValueError):
    """A data set that is missing, damaged or too small for its task."""


class FleetMemoryError(EsperError, MemoryError):
    """A fleet that does not fit in memory; the message gives the number of hosts that would."""


class MissingPackageError(EsperError, ImportError):
    """An optional package that is needed and not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package}, which is not installed: pip install '{extra}'")
