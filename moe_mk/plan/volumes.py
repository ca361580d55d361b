"""What tensor and expert parallelism send, and how many tokens they hold: the formulas that decide between the two.

    tensor parallel    2 (N - 1) / N x S x D    a ring all-reduce of every rank; 2 S D is the bound for many ranks
    expert parallel    2 x K x S / M x D        dispatch and combine of one rank's share of the tokens

S tokens of the instance, D values a token, K experts a token, N or M ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from moe_mk.errors import ConfigError


@dataclass(frozen=True)
class Volumes:
    """One instance's batch on so many ranks; all numbers are of one rank."""

    tokens: int
    hidden_size: int
    top_k: int
    ranks: int

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden_size, self.top_k, self.ranks) < 1:
            raise ConfigError(f"sizes must be at least 1: {self}")

    @property
    def tp_elements(self) -> int:
        """The bound of an all-reduce, 2 S D."""
        return 2 * self.tokens * self.hidden_size

    @property
    def tp_ring_elements(self) -> Fraction:
        """What a ring really sends, 2 (N - 1) / N S D."""
        return Fraction(self.tp_elements * (self.ranks - 1), self.ranks)

    @property
    def ep_elements(self) -> Fraction:
        """Dispatch and combine without merging copies, 2 K S / M D."""
        return Fraction(self.top_k * self.tp_elements, self.ranks)

    @property
    def ep_over_tp(self) -> Fraction:
        """K / M: expert parallelism sends less from K ranks on."""
        return self.ep_elements / self.tp_elements

    @property
    def tp_resident_tokens(self) -> int:
        """Tokens a rank holds under tensor parallelism: all of them."""
        return self.tokens

    @property
    def ep_resident_tokens(self) -> int:
        """Tokens the fullest rank holds under expert parallelism."""
        return -(-self.tokens // self.ranks)


def break_even_ranks(top_k: int) -> int:
    """The ranks from which on expert parallelism sends no more than tensor parallelism: K."""
    return top_k
