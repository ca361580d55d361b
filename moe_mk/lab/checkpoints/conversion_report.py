"""The report of a conversion of experts: requantisation errors, and what was not converted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ExpertError:
    """The relative L2 errors that requantising added to the weights of one expert."""

    layer: int | None
    expert: int | None
    """None: the shared experts."""
    gate: float = 0.0
    up: float = 0.0
    down: float = 0.0

    @property
    def worst(self) -> float:
        """Of the three matrices."""
        return max(self.gate, self.up, self.down)


@dataclass
class ConversionReport:
    """The result of a conversion."""

    to: str
    bytes_read: int
    bytes_written: int = 0
    errors: list[ExpertError] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """Contents of the source that the new checkpoint does not have: one line per block, with the reason."""

    def as_dict(self) -> dict[str, object]:
        listed = [{**vars(error), "worst": error.worst} for error in self.errors]
        sizes = {"bytes_read": self.bytes_read, "bytes_written": self.bytes_written}
        return {"to": self.to, **sizes, "dropped": self.dropped, "experts": listed}
