"""Define the interface of figures: a `Figure` describes its content, and matplotlib is imported when it is drawn."""

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Axes: TypeAlias = "matplotlib.axes.Axes"
Canvas: TypeAlias = "matplotlib.figure.Figure"


class Figure:
    """Describe a figure by frozen data, such as numbers, images and labels."""

    @property
    def is_informative(self) -> bool:
        """Return whether the figure shows more than the numbers that a run prints."""
        return True

    def draw(self) -> Canvas:
        """Draw the figure by matplotlib, which is imported here."""
        raise NotImplementedError

    def png(self) -> bytes:
        """Return the figure as a PNG file. Dollar signs in texts are printed, without mathtext."""
        return png(self.draw())


def png(figure: Canvas, metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a matplotlib figure as a PNG file with texts by name, see `Figure.png`."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    file = io.BytesIO()
    with missing_glyphs_as_boxes():
        figure.savefig(file, format="png", metadata=metadata)
    return file.getvalue()


@contextmanager
def missing_glyphs_as_boxes() -> Iterator[None]:
    """Ignore warnings on letters that the font lacks, which are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        yield
