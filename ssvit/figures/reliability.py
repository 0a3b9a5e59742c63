"""Show the calibration of predicted probabilities as a reliability diagram."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssvit.figures import style
from ssvit.figures.base import Canvas, Figure
from ssvit.figures.style import COLORS, INK, PALE


@dataclass(frozen=True)
class Reliability(Figure):
    """Show the frequency of true predictions over their probability, above the number of predictions of each bin.

    Attributes:
        counts: Number of predictions of each bin; bins have equal widths and cover [0, 1].
        probabilities: Mean predicted probability of each bin, NaN for empty bins.
        frequencies: Share of the predictions that came true, NaN for empty bins.
        labels: Labels of the x axis and of both y axes.
        title: The title.
    """

    counts: Sequence[int]
    probabilities: Sequence[float]
    frequencies: Sequence[float]
    labels: tuple[str, str, str]
    title: str

    def draw(self) -> Canvas:
        """Draw both panels."""
        figure, _ = style.panels(0, 4.8, 6)
        upper, lower = figure.subplots(2, sharex=True, height_ratios=(3.6, 1))
        bins = len(self.counts)
        centers = [(number + 0.5) / bins for number in range(bins)]
        upper.bar(centers, self.frequencies, 1 / bins, color=COLORS["train"], edgecolor="white", linewidth=0.8)
        upper.plot((0, 1), (0, 1), color=INK, linewidth=1, linestyle="--", label="perfect calibration")
        points = {"color": COLORS["model"], "linestyle": "none", "marker": "o", "markersize": 5}
        upper.plot(self.probabilities, self.frequencies, label="mean of a bin", **points)
        upper.set(ylim=(0, 1.02), ylabel=self.labels[1])
        upper.legend(loc="upper left", frameon=False, fontsize=8)
        upper.set_title(style.fitted(self.title, 10, 4.2 * style.DPI), loc="left", fontsize=10, color=INK)
        lower.bar(centers, self.counts, 1 / bins, color=COLORS["train"], edgecolor="white", linewidth=0.8)
        for center, count in zip(centers, self.counts, strict=True):
            lower.text(center, count, f"{count:,}" if count else "", ha="center", va="bottom", fontsize=6, color=INK)
        lower.set(xlim=(0, 1), xlabel=self.labels[0], ylabel=self.labels[2], yticks=[])
        lower.margins(y=0.2)
        for axis in (upper, lower):
            axis.set_axisbelow(True)
            axis.grid(color=PALE, linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
        return figure
