"""Figures as PNG files."""

import io

from matplotlib.figure import Figure
from matplotlib.text import Text


def png(figure: Figure) -> bytes:
    """A figure as a PNG file, whose texts show names as they are, without mathematics between dollar signs."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
