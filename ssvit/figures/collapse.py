"""Pictures of self-distillation: whether it collapses, and which images share a prototype.

Letters: n images, c channels, h, w pixels.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from ssvit.figures.display import Display
from ssvit.figures.pictures import rows
from ssvit.figures.style import COLORS, INK, History, Line, baseline, latest, over_steps, panels, tidy

ROWS, ACROSS = 8, 10  # prototypes, and images of each


def learning(history: History, what: str = "image") -> Figure:
    """Entropies, the spread of features and the agreement over the steps. what: is assigned to prototypes."""
    figure, (entropies, features, agreement) = panels(3, 13.5, 3.8)
    model, other, third = (
        Line(color=COLORS[name], linewidth=2, marker=".") for name in ("model", "replaced", "unchanged")
    )
    over_steps(entropies, history, "entropy_of_mean", "of the mean assignment", **model)
    over_steps(entropies, history, "entropy", "of a single one, mean", **other)
    over_steps(entropies, history, "told", f"difference: told of the {what}", **third)
    baseline(entropies, latest(history, "entropy_uniform"), "uniform", "--")
    baseline(entropies, latest(history, "told_at_most"), "most that can be told", ":")
    plot_spread(features, history, what)
    over_steps(agreement, history, "agreement", "same first choice", 100, **model)
    over_steps(agreement, history, "agreement_by_chance", "by chance", 100, color=INK, linewidth=1, linestyle="-.")
    over_steps(
        agreement, history, "agreement_by_place", "by the place alone", 100, color=INK, linewidth=1, linestyle=":"
    )
    tidy(entropies, "step", "entropy (nats)")
    tidy(agreement, "step", f"student and teacher (% of {plural(what)})")
    return figure


def plot_spread(axis: Axes, history: History, what: str = "image") -> None:
    """Plot the spread of the features over the steps; the reference line is for the standard deviation alone."""
    model, other = (Line(color=COLORS[name], linewidth=2, marker=".") for name in ("model", "replaced"))
    over_steps(axis, history, "feature_std", "standard deviation", **model)
    over_steps(axis, history, "feature_cosine", f"mean cosine of two {plural(what)}", **other)
    label = "standard deviation, in all directions alike: 1"
    axis.axhline(1, color=COLORS["model"], linewidth=1, linestyle="--", label=label)
    tidy(axis, "step", "features of length 1")


def prototypes(images: Tensor, choices: Tensor, confidence: Tensor, display: Display, what: str = "image") -> Figure:
    """A row for each of the prototypes that are chosen most, the most confident images first.

    images (n, c, h, w) uint8, their first choices (n,) and the confidence in these (n,). what: `images` show.
    """
    numbers, counts = choices.unique(return_counts=True)
    labelled = []
    for place in counts.argsort(descending=True, stable=True)[:ROWS]:
        members = (choices == numbers[place]).nonzero()[:, 0]
        best = members[confidence[members].argsort(descending=True, stable=True)][:ACROSS]
        labelled.append(
            (f"prototype {numbers[place]}\n{counts[place]} {plural(what.split()[-1])}", display(images[best]))
        )
    title = f"{len(numbers)} prototypes are a first choice of {len(images)} held-out {plural(what)}"
    title = f"{title}; the most confident first"
    return rows(labelled, title, across=ACROSS)


def plural(what: str) -> str:
    """Images, patches."""
    return f"{what}es" if what.endswith("ch") else f"{what}s"
