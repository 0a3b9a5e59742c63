"""Figures: coinciding curves stay visible, and pictures are complete."""

import io
from itertools import pairwise

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

from ssvit.analysis import similarity
from ssvit.analysis.attention import plot_maps
from ssvit.figures import label_maps
from ssvit.figures.intervals import Dot, Intervals
from ssvit.figures.matrices import Confusion
from ssvit.figures.pictures import Gallery, Picture, masked
from ssvit.figures.plot import DASHED, Line, Panel, Plot, chance, curve
from ssvit.figures.style import COLORS
from ssvit.studies import methods


def pixels(figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(figure.png())).convert("RGB")).astype(int)


def seen(figure, color) -> bool:
    """Return whether a figure contains a colour, up to antialiasing."""
    return (abs(pixels(figure) - 255 * np.array(to_rgb(color))).max(-1) < 25).sum() > 40


def test_each_objective_has_a_panel_and_the_best_is_first():
    def points(gain):
        return [{"cpu_seconds": 60.0 * i, "knn20": 0.1 + gain * i} for i in range(4)]

    gains = {"masked_patch": 0.05, "mae": 0.07, "dino": 0.0}
    figure = methods.plot({name: [points(gain), points(gain + 0.01)] for name, gain in gains.items()}, "knn20")
    assert [panel.title.partition(":")[0] for panel in figure.panels] == ["mae", "masked_patch", "dino"]
    own = [panel.lines[-1] for panel in figure.panels]
    assert own[0].y == pytest.approx([10, 17.5, 25, 32.5])
    assert own[0].x == [0, 1, 2, 3]
    assert all(len(panel.lines) == 3 for panel in figure.panels)
    assert seen(figure, COLORS["model"])


@pytest.mark.parametrize(("points", "has_marker"), [(1, True), (2, False)])
def test_a_thin_line_has_a_marker_if_it_is_a_single_point(points, has_marker):
    figure = Plot([Panel("loss", [Line([*range(points)], [*range(points)], "", "train")])], (5, 4)).draw()
    assert (figure.axes[0].lines[0].get_marker() == ".") is has_marker


def test_a_dashed_line_on_another_one_shows_both():
    lines = [Line([0, 1, 2], [1, 2, 3]), Line([0, 1, 2], [1, 2, 3], "", "replaced", DASHED)]
    figure = Plot([Panel("", lines)], (6, 4))
    assert seen(figure, "#1b6ca8")
    assert seen(figure, "#e07b00")


@pytest.mark.parametrize(("places", "are_whole"), [((0, 1, 2), True), ((0.0, 1.0, 2.5), False)])
def test_ticks_of_whole_numbers_are_whole(places, are_whole):
    figure = Plot([Panel("accuracy", [Line(places, (0.1, 0.2, 0.3), "own")])], (5, 4)).draw()
    assert all(tick == round(tick) for tick in figure.axes[0].get_xticks()) == are_whole


def test_a_curve_has_the_measured_values_of_its_metric():
    history = [{"step": 0, "a": 0.1}, {"step": 1}, {"step": 2, "a": None}, {"step": 3, "a": 0.4}]
    assert (curve(history, "a", "").x, curve(history, "a", "", scale=100).y) == ([0, 3], [10, 40])
    figure = Plot([Panel("", [curve(history, "b", "x")], [chance(None)]), Panel("", [Line([1], [2], dash="")])], (6, 4))
    assert figure.png()


@pytest.mark.parametrize("size", [(40, 40), (10, 60), (200, 30), (500, 500)])
def test_a_gallery_shows_images_of_any_size_whole(size):
    image = torch.zeros(3, *size)
    image[1] = 1
    image[:, 0], image[:, -1] = torch.tensor([[1.0], [0], [0]]), torch.tensor([[0.0], [0], [1]])
    shown = pixels(Gallery([[Picture(image)]], tile=200))
    green = (abs(shown - np.array((0, 255, 0))).max(-1) < 60).nonzero()
    tall, wide = (np.ptp(axis) + 1 for axis in green)
    assert (tall, wide) == pytest.approx([200 * side / max(size) for side in size], abs=max(3, 500 / max(size)))
    for color in ((255, 0, 0), (0, 0, 255)) if max(size) < 100 else ():
        assert (abs(shown - np.array(color)).max(-1) < 60).any()


def test_a_mosaic_of_masked_patches_hides_them():
    images = torch.rand(2, 3, 8, 8) / 4
    mosaic = masked({"true": images}, masked_ids=torch.tensor([[0], [3]]), grid=(2, 2), note="masked")
    visible = mosaic.columns["visible"]
    assert (visible[0, :, :4, :4] == 0.5).all()
    assert torch.equal(visible[0, :, 4:], images[0, :, 4:])
    assert (visible[1, :, 4:, 4:] == 0.5).all()
    assert mosaic.png()


@pytest.mark.parametrize("classes", [2, 40, 500])
def test_a_confusion_matrix_shows_every_cell(classes):
    counts = torch.eye(classes)
    colors = pixels(Confusion(counts, [f"class {number}" for number in range(classes)], "title"))
    dark = (abs(colors - np.array((8, 38, 61))).max(-1) < 60).nonzero()
    assert len(np.unique(dark[0])) >= classes


def test_the_colours_of_a_confusion_matrix_are_proportional_to_the_share():
    figure = Confusion(torch.tensor([[1, 3], [0, 4]]), ["a", "b"], "title").draw()
    picture = figure.axes[0].images[0]
    assert picture.get_clim() == (0, 1)
    assert [float(picture.norm(share)) for share in (0, 0.25, 0.5, 1)] == [0, 0.25, 0.5, 1]
    assert picture.get_array().tolist() == [[0.25, 0.75], [0, 1]]


@pytest.mark.parametrize("values", [(-1, -2, -3), (1, -0.2, 0.3), (1, 2, 3)])
def test_all_points_are_within_the_axes(values):
    low, high = Plot([Panel("", [Line([1, 2, 3], values)])], (5, 4)).draw().axes[0].get_ylim()
    assert low < high
    assert low <= min(*values, 0)
    assert max(values) <= high


def test_all_panels_of_scores_have_one_scale_and_show_everything():
    dots = {"one": [Dot("a", (0.1, 0.2), 0.15)], "two": [Dot("a", (0.7, 0.9), 0.8)]}
    ((low, high),) = {axis.get_xlim() for axis in Intervals(dots, {"one": 0.05}).draw().axes}
    assert low < 5
    assert high > 90
    panels = [Panel("%", [Line([1, 2], [1, top])]) for top in (20, 80)]
    ((low, high),) = {axis.get_ylim() for axis in Plot(panels, (6, 3), shared=True).draw().axes}
    assert low == 0
    assert high >= 80


def test_titles_of_panels_do_not_overlap():
    panels = [Panel("%", [Line([1, 2], [1, 2])], title="the long title of a probe " * 3) for _ in range(2)]
    figure = Plot(panels, (7.2, 3.4)).draw()
    figure.draw_without_rendering()
    left, right = (axis._left_title.get_window_extent() for axis in figure.axes)
    assert left.x1 < right.x0


@pytest.mark.parametrize("title", ["", "a" * 20, "W" * 90])
def test_a_gallery_is_as_wide_as_its_images_or_its_title(title):
    width = pixels(Gallery([[Picture(torch.ones(3, 8, 8))] * 2], title)).shape[1]
    assert width >= 2 * 170
    assert (width < 2 * 170 + 100) == (len(title) < 90)


@pytest.mark.parametrize("names", [["", ""], ["a.jpg", "b" * 100]])
def test_maps_of_attention_have_their_range(names):
    images, attention = torch.ones(2, 3, 8, 8), torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]])
    for maps in ({"attention": attention}, {f"head {head}": attention for head in range(3)}):
        figure = plot_maps(images, names, maps, (2, 2))
        assert {row[-1].captions[0] for row in figure.rows} == {"1.0 to 1.0", "0.4 to 1.6"}
        assert figure.rows[1][-1].image[0, ::4, ::4].flatten().tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1])
        assert len(figure.titles) == len(figure.rows[0]) == (3 if len(maps) == 1 else 4)
        assert figure.png()


@pytest.mark.parametrize("names", [["background", "leaf"], [f"class {number} {'w' * number}" for number in range(21)]])
@pytest.mark.parametrize("images", [1, 6])
def test_the_legend_of_masks_names_all_classes_within_the_figure_and_below_the_images(names, images):
    masks = (torch.arange(32 * 32) % len(names)).to(torch.uint8).view(1, 32, 32).expand(images, -1, -1)
    figure = label_maps.mosaic({"image": torch.rand(images, 3, 32, 32)}, {"true": masks}, names).draw()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    shown = [text.get_text().removesuffix("…") for text in legend.get_texts()]
    assert [name.startswith(text) for name, text in zip(names, shown, strict=True)] == [True] * len(names)
    box, (width, height) = legend.get_window_extent(), figure.get_size_inches() * figure.dpi
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height - 24 - (32 * 6 + 14) * (3 if images == 6 else 1)


def test_letters_that_the_font_lacks_give_no_warning(recwarn):
    assert Gallery([[Picture(torch.ones(3, 8, 8), ("飞机",))]], titles=["鹿"]).png()
    assert not recwarn.list


def test_long_names_of_encoders_do_not_overlap():
    layers = {"vit_small_patch14_reg4_dinov2": 12, "small": 3, "resnet10t": 2, "a_run_of_a_long_name": 2}
    figure = similarity.plot(torch.rand(19, 19).double(), layers).draw()
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    assert boxes[0].y0 >= 0
