"""What a conversion of experts did: how far each of them moved, and what was left behind."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ExpertError:
    """How far requantising moved the weights of one expert, as relative L2 distances."""

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
    """What was written."""

    to: str
    bytes_read: int
    bytes_written: int = 0
    errors: list[ExpertError] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    """What the source holds and the new checkpoint does not, a line a block, each with its reason."""

    def as_dict(self) -> dict[str, object]:
        """Everything, for JSON."""
        told = [{**vars(error), "worst": error.worst} for error in self.errors]
        sizes = {"bytes_read": self.bytes_read, "bytes_written": self.bytes_written}
        return {"to": self.to, **sizes, "dropped": self.dropped, "experts": told}
