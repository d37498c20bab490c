"""Ratios with their spread, and when a difference is no more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spread:
    """The median of repeats, and the lowest and highest of them."""

    median: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """(high - low) / median."""
        return (self.high - self.low) / self.median

    def to_json(self) -> list[float]:
        """[low, high]: the median stands by itself."""
        return [self.low, self.high]


def spread_of(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median(values), min(values), max(values))


@dataclass(frozen=True)
class Ratio:
    """A variant's tok/s over a reference's, repeat by repeat.

    within_noise: the ratios lie on both sides of 1, or their median differs from 1 by less than the reference itself
    varies from repeat to repeat ((max - min) / median of its tok/s).
    """

    spread: Spread
    within_noise: bool


def ratio_of(values: Sequence[float], references: Sequence[float]) -> Ratio:
    """Both in the order of the repeats, equally many, of one unit."""
    spread = spread_of([value / reference for value, reference in zip(values, references, strict=True)])
    straddles = spread.low <= 1 <= spread.high
    is_small = abs(spread.median - 1) < spread_of(references).relative_width
    return Ratio(spread, straddles or is_small)
