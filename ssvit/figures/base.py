"""The contract of figures: a `Figure` describes what is shown, and matplotlib is imported when it is drawn."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure


class Figure:
    """The description of a figure: frozen data, such as numbers, images and labels."""

    def draw(self) -> "matplotlib.figure.Figure":
        """Return the figure, drawn by matplotlib, which is imported here."""
        raise NotImplementedError

    def png(self) -> bytes:
        """Return the figure as a PNG file. Texts appear as they are, without mathematics between dollar signs."""
        return png(self.draw())


def png(figure: "matplotlib.figure.Figure") -> bytes:
    """Return a figure of matplotlib as a PNG file, see `Figure.png`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
