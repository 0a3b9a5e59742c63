"""A scaling study: its grid and rows with made-up commands, power laws against the laws that made the points."""

import math
import re

import numpy as np
import pytest
from scipy.stats import linregress

from ssvit.cli import scaling
from ssvit.data.sources.base_options import DataSet
from ssvit.data.sources.shapes_options import Shapes
from ssvit.errors import UserError
from ssvit.studies import methods
from ssvit.studies.scaling import FINETUNED, fit, plot, points, savings, scaling_table, series


@pytest.fixture
def commands(commands):
    """Commands whose error falls with the images of a run and the width of its model."""

    def scores(name):
        width = re.search(r"_w(\d+)_", name)
        return {"layer1": 1 - 2 * int(name.split("_")[1]) ** -0.2 / int(width[1] if width else 100) ** 0.1}

    commands.cost = lambda given: {"flops": 10**6 * int(given.get("encoder.width", 100)) ** 2}
    commands.scores = scores
    return commands


GRID = ["objectives=[mae,simmim]", "images=[500,1000,2000]", "width=[64,128]", "steps=[20]", "name=s"]


def test_each_point_of_the_grid_is_a_run_and_what_is_there_is_not_made_again(commands, tmp_path):
    scaling.command.call(GRID)
    trained = [given for command, given in commands.asked if command == "pretrain"]
    assert len(trained) == 2 * 3 * 2
    assert len([command for command, _ in commands.asked if command == "cost"]) == 2 * 2  # of an objective and a model
    first = trained[0]
    assert (first["objective"], first["subset.images"], first["recipe.steps"]) == ("mae", "500", "20")
    assert [one["encoder.heads"] for one in trained[:2]] == ["1", "2"]
    assert first["name"] == "mae_500_d6_w64_p4_s20_seed0"
    before = len(commands.asked)
    scaling.command.call(GRID)
    assert len(commands.asked) == before
    scaling.command.call([*GRID, "seeds=2", "images=[500]"])
    assert [given["recipe.seed"] for command, given in commands.asked[before:] if command == "pretrain"] == ["1"] * 4
    folder = tmp_path / "outputs" / "s" / "table"
    text = (folder / "table.md").read_text()
    assert "| mae | 500 | 6 x 64 / 4 | 20 | 0.1 | 2 | " in text
    assert "| images | mae, 6 x 64 / 4, 20 | 20-NN | 0.200 ± 0.000 | 0.0 | 3 |" in text
    assert (folder / "scaling.png").stat().st_size > 10_000
    with pytest.raises(UserError, match=r"^table=.* has finetune="):
        scaling.command.call([*GRID, "finetune=[]"])


def test_images_that_only_the_data_set_itself_can_count_are_counted_first(commands, monkeypatch):
    monkeypatch.setattr(Shapes, "count", DataSet.count)
    with pytest.raises(UserError, match="images=601: must be at most 600"):
        scaling.command.call([*GRID, "data.images=600", "images=[500,601]"])
    assert not commands.asked


def test_encoders_to_compare_with_learn_from_labels_on_as_many_images(commands, tmp_path):
    study = ["objectives=[mae]", "images=[500,1000]", "width=[64]", "steps=[20]", "name=s", "encoder.positions=rotary"]
    scaling.command.call([*study, "encoders=[resnet10t,small_hybrid]"])
    trained = {given["name"]: given for command, given in commands.asked if command == "pretrain"}
    assert len(trained) == 2 * (1 + 2)
    resnet, hybrid = (trained[f"supervised_1000_{name}_s20_seed0"] for name in ("resnet10t", "small_hybrid"))
    assert (resnet["encoder"], resnet["encoder.model"], resnet["subset.images"]) == ("timm", "resnet10t", "1000")
    assert (hybrid["encoder"], hybrid["objective"]) == ("small_hybrid", "supervised")
    assert not any(name.startswith("encoder.") for name in hybrid)
    assert trained["mae_1000_d6_w64_p4_s20_seed0"]["encoder.positions"] == "rotary"
    folder = tmp_path / "outputs" / "s" / "table"
    rows = methods.read_rows(folder)
    assert rows["supervised_500_resnet10t_s20_seed0"]["supervised"] == 0.6
    text = (folder / "table.md").read_text()
    assert "| supervised | 500 | resnet10t | 20 | " in text
    assert "| images | supervised, small_hybrid, 20 | " in text
    lines = series(points(rows), "flops")
    assert lines.keys() == {("mae",), ("supervised", "resnet10t"), ("supervised", "small_hybrid")}
    assert (folder / "scaling.png").stat().st_size > 10_000


def test_a_power_law_is_found_with_its_error():
    x = [100.0, 400.0, 1600.0, 6400.0]
    law = fit(x, [1 - 3 * one**-0.25 for one in x])
    assert (law.factor, law.power) == (pytest.approx(3), pytest.approx(0.25))
    assert law.deviation == pytest.approx(0, abs=1e-12)
    noisy = [0.2, 0.5, 0.6, 0.8]
    law, reference = fit(x, noisy), linregress(np.log(x), np.log1p(-np.array(noisy)))
    assert (law.power, law.deviation) == (pytest.approx(-reference.slope), pytest.approx(reference.stderr))
    missed = [law.accuracy(one) - accuracy for one, accuracy in zip(x, noisy, strict=True)]
    assert law.residual == pytest.approx(math.sqrt(np.mean(np.square(missed))))
    assert fit([5.0, 5.0], [0.1, 0.2]) is None
    assert math.isnan(fit([5.0, 10.0], [0.1, 0.2]).deviation)


def row(objective="mae", images=100, width=64, seed=0, accuracy=0.5, **more):
    found = {"knn": {"column": "20-NN", "chosen": accuracy, "layer": 1, "last": accuracy}}
    place = {"images": images, "depth": 2, "width": width, "patch": 4, "steps": 10}
    return {
        "objective": objective, "seed": seed, **place, "cost": {"flops": width * 10**6, "images": 5}, "probes": found,
    } | more  # fmt: skip


# Table 6 of the paper: exaFLOPs of pre-training, and the mean of ImageNet, CIFAR-10, CIFAR-100, Pets and Flowers.
TRANSFORMERS = {55: 0.92500, 224: 0.94076, 196: 0.94274, 783: 0.95122, 1567: 0.95440, 4262: 0.95822}
RESNETS = {50: 0.89330, 199: 0.92012, 96: 0.91270, 141: 0.92406, 563: 0.94014, 1126: 0.94272, 3306: 0.95090}


def of_families(**families) -> list[dict]:
    """Return points of a study from accuracies by operations of each family."""
    rows = {
        f"{name} {flops}": row(name, width=flops, accuracy=accuracy, cost={"flops": flops, "images": 1}, steps=1)
        for name, points_of_family in families.items()
        for flops, accuracy in points_of_family.items()
    }
    return points(rows)


def test_compute_for_equal_accuracy_is_the_ratio_of_the_laws():
    family = {x: 1 - 3 * x**-0.25 for x in (400, 1600, 6400, 25600)}
    dearer = {3 * x: accuracy for x, accuracy in family.items()}
    ratios = re.compile(r"\): (\w+) needs ([\d.]+) to ([\d.]+) times less than (\w+)$")
    for families in ({"a": family, "b": dearer}, {"b": dearer, "a": family}):
        (line,) = savings(of_families(**families), "20-NN")
        assert ratios.search(line).groups() == ("a", "3", "3", "b")
    (line,) = savings(of_families(vit=TRANSFORMERS, resnet=RESNETS), "20-NN")
    cheaper, low, high, _ = ratios.search(line).groups()
    assert cheaper == "vit"
    assert 2 < float(low) < 4 < float(high)  # "2 to 4 times less compute" (section 4.4), of the larger models
    crossing = {x: 1 - 10 * x**-0.4 for x in family}
    assert not savings(of_families(a=family, b=crossing), "20-NN")
    assert not savings(of_families(a=family, b={1000: 0.1, 2000: 0.2}), "20-NN")  # no common accuracies


def test_points_are_means_over_seeds():
    rows = {str(seed): row(seed=seed, accuracy=accuracy) for seed, accuracy in enumerate((0.4, 0.5, 0.6))}
    (point,) = points(rows)
    assert (point["seeds"], point["scores"], point["flops"]) == (3, {"20-NN": pytest.approx(0.5)}, 640 * 10**6)
    assert "50.0 ± 10.0" in scaling_table(rows)
    assert FINETUNED in points({"one": row(finetuned=0.7)})[0]["scores"]


def test_a_line_over_images_has_one_model_and_leaves_out_what_has_all():
    rows = {f"{images} {width}": row(images=images, width=width) for images in (100, 200, None) for width in (64, 128)}
    lines = series(points(rows), "images")
    assert {key: [point["images"] for point in line] for key, line in lines.items()} == {
        ("mae", "2 x 64 / 4", "10"): [100, 200], ("mae", "2 x 128 / 4", "10"): [100, 200],
    }  # fmt: skip
    assert len(series(points(rows), "flops")[("mae",)]) == 6


def panels(rows):
    """Return the plot: for each panel, the labels of both axes, and the values of its points by label."""
    figure = plot(points(rows))
    assert figure.png()
    return [
        (panel.xlabel, panel.ylabel, {line.label: list(line.y) for line in panel.lines if line.label and line.x})
        for panel in figure.panels
    ]


def test_the_figure_has_a_panel_for_each_score_and_axis():
    compute = "operations of pre-training (10¹²)"
    assert panels({"one": row(finetuned=0.6)}) == [
        (compute, "fine-tuned (%)", {"mae": [60.0]}), (compute, "20-NN (%)", {"mae": [50.0]}),
    ]  # fmt: skip
    images = {str(count): row(images=count) for count in (100, 200)}
    assert [xlabel for xlabel, *_ in panels(images)] == ["images of pre-training", compute]
    assert len(panels(images | {"tuned": row("dino", finetuned=0.7)})) == 4
    compared = {"vit": row("supervised"), "other": row("supervised", depth=None, patch=None, encoder="resnet10t")}
    ((*_, lines),) = panels(compared)
    assert set(lines) == {"supervised", "supervised, resnet10t"}


def test_one_axis_is_varied_at_a_time_and_then_the_model_as_a_whole(commands, tmp_path):
    axes = ["depth=[6,12]", "width=[64,128]", "mlp=[128,256]", "patch=[4,2]", "steps=[20]", "images=[500]"]
    scaling.command.call([*axes, "objectives=[mae]", "vary=one", "name=s", "finetune=[]"])
    rows = list(methods.read_rows(tmp_path / "outputs" / "s" / "table").values())
    sizes = {row["varied"]: (row["depth"], row["width"], row["mlp"], row["patch"]) for row in rows}
    assert sizes == {
        "base": (6, 64, 128, 4), "depth": (12, 64, 128, 4), "width": (6, 128, 128, 4), "mlp": (6, 64, 256, 4),
        "patch": (6, 64, 128, 2), "all": (12, 128, 256, 2),
    }  # fmt: skip
    grid = points({row["varied"]: row for row in rows})
    lines = series(grid, "flops")
    assert {key[1] for key in lines} == {"depth", "width", "mlp", "patch", "all"}
    for (_, varied), line in lines.items():
        assert sorted(point["varied"] for point in line) == sorted(["base", varied])
    with pytest.raises(UserError, match=r"^table=.* has base="):
        scaling.command.call(
            [*axes, "width=[128]", "mlp=[256,128]", "objectives=[mae]", "vary=one", "name=s", "finetune=[]"]
        )
    with pytest.raises(UserError, match=r"^width="):
        scaling.command.call(["depth=[6,12]", "width=[64,128,192]", "objectives=[mae]", "vary=one", "name=t"])
