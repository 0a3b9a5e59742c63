"""Read the content of descriptions of figures."""

from ssvit.figures.plot import Plot


def curves(plot: Plot) -> dict[str, list[float]]:
    """The values of each line and level, by its label."""
    lines = {line.label: list(line.y) for panel in plot.panels for line in panel.lines}
    return lines | {level.label: level.y for panel in plot.panels for level in panel.levels}
