"""The report in a real browser: no error, nothing wider than a phone, and a hint at tables that can be scrolled.

The tests require Chromium or Chrome and are skipped without it.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from command import LIMIT
from test_report import METADATA, OWN, scored

from ssvit.evaluation.report import page as report
from ssvit.evaluation.report.figures import by_layer
from ssvit.figures.matrices import Confusion

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
WIDTHS = (390, 1200)
# Whether a hint is visible shows in a frame after the layout, which a page that is only loaded may not have: what makes
# it visible is its animation, along the part that scrolls.
LOOK = """
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(({contentDocument: page}) => ({
    content: page.documentElement.scrollWidth,
    room: page.documentElement.clientWidth,
    images: [...page.images].map(image => image.naturalWidth),
    hints: [...page.querySelectorAll(".scroller")].map(part => [
      part.querySelector(".wide").scrollWidth > part.querySelector(".wide").clientWidth,
      part.querySelector(".hint").getAnimations().map(({timeline, effect}) => [
        timeline.source === part.querySelector(".wide"), timeline.axis, effect.getKeyframes()[0].visibility,
      ]),
    ]),
  }));
  document.body.innerHTML = `<pre>${JSON.stringify(found)}</pre>`;
};
"""
pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"needs a browser, one of {', '.join(NAMES)}")


def browse(folder: Path, page: str) -> tuple[str, str]:
    """A loaded page of the browser and the messages of its console."""
    (folder / "page.html").write_text(page, encoding="utf-8")
    assert BROWSER is not None
    options = [
        "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--user-data-dir={folder}/own",
    ]  # fmt: skip
    address = (folder / "page.html").as_uri()
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)


def test_the_report_fits_a_phone_and_says_where_it_goes_on(tmp_path):
    known = {"chance": 0.1, "images": 420}
    scores = [
        scored("few_shot", ["1 label per class", "all labels"], [0.5, 0.7, 0.65, 0.1, 0.2, 0.3, 0.25], 0.0156, **known),
        scored("knn", [f"{k}-NN" for k in range(1, 30)], [0.5, 0.7, 0.65, 0.1, 0.2, 0.3, 0.25], **known),
    ]
    figures = {"by_layer": by_layer(scores, OWN), "confusion": Confusion(torch.eye(3), ["a", "b", "c"], "knn")}
    metadata = METADATA | {"checkpoint": "a/" * 100, "data": "folder in /" + "b" * 100}
    summary = [["probe", *(f"from encoder {number}" for number in range(9))], ["ridge", *["+1.0 (+0.5 to +1.5)*"] * 9]]
    (page, *_) = report.write(
        tmp_path, metadata=metadata, scores=scores, feature_sets=OWN, figures=figures, tables=[summary], standings=[],
        conclusion=[],
    )  # fmt: skip
    text = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(f'<iframe srcdoc="{text}" width="{width}" height="900"></iframe>' for width in WIDTHS)
    seen, errors = browse(tmp_path, f"<!DOCTYPE html><body>{frames}<script>{LOOK}</script>")
    assert errors == ""
    written = re.search(r"<pre>(.*)</pre>", seen)
    assert written is not None
    phone, desk = json.loads(written[1])
    for width, found in zip(WIDTHS, (phone, desk), strict=True):
        assert width - 20 <= found["room"] <= width
        assert found["content"] <= found["room"]
        assert len(found["images"]) == 2
        assert all(found["images"])
        assert all(shown == [[True, "inline", "visible"]] for _, shown in found["hints"])
    assert sum(goes_on for goes_on, _ in phone["hints"]) >= 3
    # The figures and the table of a probe fit a desk; ten encoders and 29 columns do not.
    assert [goes_on for goes_on, _ in desk["hints"]] == [True, False, False, False, True]


def test_what_a_page_must_not_do_is_seen(tmp_path):
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
    _, errors = browse(tmp_path, f"<!DOCTYPE html>{policy}<script>alert(1)</script>")
    assert "Content Security Policy" in errors
