"""Curves that coincide stay visible, classes are measured beside chance, and maps have a scale."""

import io

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from ssvit.figures import comparison, maps, methods
from ssvit.figures.png import png
from ssvit.figures.probes import probes

CHANCE = "chance (most frequent class)"


def labelled(axis) -> dict:
    return {line.get_label().split(":")[0]: line for line in axis.lines}


def seen(figure, line) -> bool:
    """Whether the colour of a line is in a figure, as far as its edges leave it."""
    drawn = np.asarray(Image.open(io.BytesIO(png(figure))).convert("RGB")).astype(int)
    color = 255 * np.array(to_rgb(line.get_color()))
    return (abs(drawn - color).max(-1) < 25).sum() > 40


def test_objectives_that_are_alike_all_show_beside_chance():
    points = [{"cpu_seconds": 60.0 * i, "chance": 0.12, "knn": 0.1 + 0.05 * i} for i in range(4)]
    names = ("masked_patch", "mae", "dino", "ibot", "simclr")
    figure = methods.accuracy({name: [points] for name in names}, {"knn": "20-NN"})
    (axis,) = figure.axes
    assert labelled(axis)[CHANCE].get_ydata()[0] == pytest.approx(12)
    axis.get_legend().remove()
    assert all(seen(figure, labelled(axis)[name]) for name in names)
    del points[0]["chance"]
    assert CHANCE not in labelled(methods.accuracy({"mae": [points]}, {"knn": "20-NN"}).axes[0])


def test_both_sides_of_a_comparison_show_where_they_coincide():
    sides = ("pre-trained", "from scratch")
    curve = {"step": [0, 1, 2], "mean": [0.1, 0.5, 0.6], "deviation": [0.0, 0.0, 0.0]}
    final = {"mean": 0.6, "deviation": 0.0}
    figure = comparison.comparison(
        dict.fromkeys(sides, curve), {side: side for side in sides}, finals=dict.fromkeys(sides, final),
        parts=("test", "test"), chance=0.1,
    )  # fmt: skip
    (axis,) = figure.axes
    lines = labelled(axis)
    assert lines[CHANCE].get_ydata()[0] == pytest.approx(10)
    axis.get_legend().remove()
    assert all(seen(figure, lines[name]) for name in sides)


def test_a_last_layer_that_is_the_chosen_one_shows_it():
    history = [{"step": step, "knn": 0.1 + step / 10, "knn_last": 0.1 + step / 10} for step in range(4)]
    figure = probes(history, {"knn": "k-NN"}, start={}, chance=0.1)
    (axis,) = figure.axes
    lines = labelled(axis)
    axis.get_legend().remove()
    assert all(seen(figure, lines[name]) for name in ("layer chosen without test images", "last layer"))


@pytest.mark.parametrize("names", [["", ""], ["a.jpg", "b" * 100]])
def test_maps_of_attention_say_what_their_colours_mean(names):
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    attention = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    for figure in (
        maps.plot_rollout(images, attention, (2, 2), names),
        maps.plot_heads(images, attention[:, None], (2, 2), names, 3),
    ):
        texts = [text.get_text() for text in figure.axes[0].texts]
        assert {"1.0 to 1.0", "0.4 to 1.6", "least attention in a map", "most"} <= set(texts)
        assert "under a map: both ends, where attention to all patches alike is 1" in texts
