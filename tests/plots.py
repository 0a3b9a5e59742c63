"""Read the content of descriptions of figures and of pages of reports."""

from html.parser import HTMLParser

from ssvit.figures.plot import Plot

VOID = {"meta", "img"}


def curves(plot: Plot) -> dict[str, list[float]]:
    """The values of each line and level, by its label."""
    lines = {line.label: list(line.y) for panel in plot.panels for line in panel.lines}
    return lines | {level.label: level.y for panel in plot.panels for level in panel.levels}


class Page(HTMLParser):
    """Parse the elements of a page, and fail on a tag that is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.rows, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict]:
        return [attributes for name, attributes in self.tags if name == tag]
