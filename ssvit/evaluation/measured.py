"""What one measure of frozen features found, in the one form that tables, files, plots and the report are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ssvit.evaluation.significance import above_chance


@dataclass(frozen=True)
class Measured:
    """A row of numbers for each feature set.

    measure: few_shot, knn, … columns: what stands in a row, as the heading of a table: "5 shot", "20-NN". values: by
    feature set, a share in [0, 1] for each column; deviations: the same, over draws, None where there was one.
    best: the feature set of the encoder that was chosen, without test labels, and chosen_by what. options: of the
    measure. numbers: all that it found, as plain data for a JSON file. chance: what the last column has by ignoring the
    image, and images: how many it is measured on; None where the column is no accuracy.
    """

    measure: str
    columns: tuple[str, ...]
    values: Mapping[str, tuple[float, ...]]
    deviations: Mapping[str, tuple[float | None, ...]]
    best: str
    chosen_by: str
    options: Mapping[str, Any]
    numbers: Mapping[str, Any]
    chance: float | None = None
    images: int | None = None

    @property
    def tells(self) -> bool:
        """Whether the chosen features are above chance by more than two standard errors, as far as it is known."""
        return self.chance is None or above_chance(self.values[self.best][-1], self.chance, self.images)
