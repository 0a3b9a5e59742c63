"""The table of finished runs: each cell against plain means and deviations of the runs that it is made of."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml
from command import TINY, tiny_options

from ssvit.checkpoints.checkpoint import Checkpoint
from ssvit.checkpoints.run_folder import rows
from ssvit.cli import find_command
from ssvit.cli.table import command
from ssvit.errors import UserError
from ssvit.studies import methods
from ssvit.studies.comparison import Spent

ABSENT = methods.mean_std([])


def finished(folder, accuracy, *, data="cifar10", seed=0, path="outputs/run/step_9", steps=2, metrics=None, **options):
    """A run's folder with its last test after step 2, and a line that a killed process left."""
    folder.mkdir(parents=True)
    groups: dict[str, dict] = {"encoder": {"path": path}, "recipe": {"steps": steps, "seed": seed}, "data": {}}
    values = {"name": folder.name, "development": options.pop("development", None), **groups}
    for option, value in options.items():
        group, _, key = option.partition("__")
        values.setdefault(group, {})[key] = value
    (folder / "config.yaml").write_text(yaml.safe_dump({"schema": 1, "choices": {"data": data}, **values}))
    before = {"step": 1, "test/accuracy": 0.0, "test/accuracy_constant": 0.1}
    last = metrics or {"test/accuracy": accuracy, "test/accuracy_constant": 0.1}
    lines = map(json.dumps, [before, {"step": 2, **last}])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "te')


def tabulated(outputs, tmp_path, *options) -> tuple[dict[str, dict[str, str]], str, dict]:
    """The cells of the table by row and column, the text below it, and the accuracies as JSON."""
    text = command.call([f"outputs={outputs}", f"output={tmp_path}/table.json", *options])
    lines = text.split("\n")
    head, *rows = ([cell.strip() for cell in line.strip().split("|")[1:-1]] for line in lines if line.startswith("| "))
    below = "\n".join(line for line in lines if not line.startswith("|"))
    accuracies = json.loads(Path(tmp_path, "table.json").read_text())
    return {name: dict(zip(head[1:], row, strict=True)) for name, *row in rows}, below, accuracies


def spread(values) -> str:
    return f"{100 * np.mean(values):.2f} ± {100 * np.std(values, ddof=1):.2f}"


def test_seeds_of_each_model_on_each_data_set_are_a_cell(tmp_path):
    outputs = tmp_path / "outputs"
    generator = np.random.default_rng(0)
    expected = {}
    for model, data in product(("a", "b"), ("cifar10", "flowers102")):
        expected[model, data] = values = generator.random(3).tolist()
        for seed, value in enumerate(values):
            finished(outputs / f"{model}_{data}_{seed}", value, data=data, seed=seed, path=model)
    finished(outputs / "again", expected["a", "cifar10"][0], path="a")  # of a seed that exists counts once
    finished(outputs / "single", 0.25, data="flowers102", path=None)
    finished(outputs / "nested" / "chosen", 0.5, data="stl10", path="b")
    finished(outputs / "nested" / "lr_1", 0.9, data="stl10", path="b", development=0.1)
    (outputs / "foreign").mkdir()
    (outputs / "foreign" / "config.yaml").write_text("a: 1\n")
    cells, below, accuracies = tabulated(outputs, tmp_path)
    assert [*cells] == ["cifar10", "flowers102", "stl10"]
    assert all({*columns} == {"chance", "a", "b", "random weights"} for columns in cells.values())
    for (model, data), values in expected.items():
        assert cells[data][model] == spread(values)
        assert accuracies[model][data] == values
    assert {columns["chance"] for columns in cells.values()} == {"10.0"}
    assert (cells["flowers102"]["random weights"], cells["stl10"]["b"]) == ("25.00", "50.00")
    assert cells["stl10"]["a"] == cells["cifar10"]["random weights"] == ABSENT
    assert " 3 seeds" in below


def test_runs_that_differ_in_other_options_than_the_seed_have_columns(tmp_path):
    outputs = tmp_path / "outputs"
    rates = {0.1: (0.2, 0.3), 0.2: (0.4, 0.6)}
    for (rate, values), mixup in product(rates.items(), (0.0, 0.5)):
        for seed, value in enumerate(values):
            options = {"recipe__lr": rate, "recipe__warmup": int(10 * rate), "objective__mixup": mixup}
            finished(outputs / f"{rate}_{mixup}_{seed}", value + mixup / 5, seed=seed, path="a", **options)
    finished(outputs / "other", 0.7, data="stl10", path="a", recipe__lr=0.1, recipe__warmup=1, objective__mixup=0.0)
    finished(outputs / "model", 0.1, path="b", recipe__lr=0.3)
    cells, *_ = tabulated(outputs, tmp_path)
    means = {columns: cell for columns, cell in cells["cifar10"].items() if columns.startswith("a")}
    assert sorted(means.values()) == sorted(
        spread(np.add(values, mixup / 5)) for values, mixup in product(rates.values(), (0.0, 0.5))
    )
    for column, cell in means.items():
        rate, mixup = (float(column.partition(f"{option}=")[2].partition(",")[0]) for option in ("lr", "mixup"))
        assert cell == spread(np.add(rates[rate], mixup / 5))
        assert "warmup" not in column
        assert cells["stl10"][column] == ("70.00" if (rate, mixup) == (0.1, 0.0) else ABSENT)
    assert cells["cifar10"]["b"] == "10.00"


def test_what_is_no_accuracy_on_test_images_after_all_training_images_has_a_row(tmp_path):
    outputs = tmp_path / "outputs"
    finished(outputs / "subset", 0.1, subset__images=1000)
    finished(outputs / "all", 0.2)
    real = {"validation/accuracy": 0.3, "validation/accuracy_real": 0.4, "validation/accuracy_constant": 0.1}
    finished(outputs / "imagenet", 0, data="imagenet", metrics=real)
    finished(outputs / "several", 0, data="csv", data__table="x/y.csv", metrics={"test/map": 0.5})
    finished(outputs / "folder", 0.6, data="folder", data__root="x/y")
    cells, *_ = tabulated(outputs, tmp_path)
    assert {row: (columns["chance"], columns["outputs/run/step_9"]) for row, columns in cells.items()} == {
        "cifar10, 1,000 training images": ("10.0", "10.00"), "cifar10": ("10.0", "20.00"),
        "imagenet, validation": ("10.0", "30.00"), "imagenet, validation, ReaL": ("", "40.00"),
        "x/y.csv, mAP": ("", "50.00"), "x/y": ("10.0", "60.00"),
    }  # fmt: skip


def test_tasks_of_vtab_have_means_over_tasks_of_each_seed(tmp_path):
    outputs = tmp_path / "outputs"
    tasks = {"cifar": [0.5, 0.6], "svhn": [0.7, 0.1], "eurosat": [0.9, 0.8], "clevr_count": [0.35, 0.45]}

    def run(name, task, value, **options):
        finished(outputs / name, value, data="vtab", data__task=task, **{"data__all_images": True, **options})

    for task, values in tasks.items():
        for seed, value in enumerate(values):
            run(f"{task}_{seed}", task, value, seed=seed, path="a")
    run("scratch", "svhn", 0.2, path=None, data__all_images=False)
    run("uneven_0", "svhn", 0.2, path="b")
    run("uneven_1", "dtd", 0.3, path="b")
    run("uneven_2", "dtd", 0.5, path="b", seed=1)
    for task, seeds in {"svhn": (0, 1), "dtd": (1, 2)}.items():  # as many seeds, but others
        for seed in seeds:
            run(f"other_{task}_{seed}", task, 0.2 + 0.1 * seed, seed=seed, path="c")
    finished(outputs / "full", 0.8, path="a")
    cells, below, accuracies = tabulated(outputs, tmp_path)
    assert len(cells) == 1 + 19 + 3 + 1
    assert cells["cifar10"]["a"] == "80.00"
    for task, values in tasks.items():
        assert cells[task]["a"] == spread(values)
    natural = [(0.5 + 0.7) / 2, (0.6 + 0.1) / 2]
    assert cells["**natural**, mean"]["a"] == spread(natural)
    assert accuracies["a"]["vtab/natural"] == pytest.approx(natural)
    assert cells["**all 19**, mean"]["a"] == spread([np.mean(of_seed) for of_seed in zip(*tasks.values(), strict=True)])
    assert cells["**all 19**, mean"]["b"] == f"{100 * (0.2 + 0.4) / 2:.2f}"
    assert cells["**all 19**, mean"]["c"] == f"{100 * (0.25 + 0.35) / 2:.2f}"
    assert cells["svhn"]["random weights (800 images)"] == "20.00"
    assert cells["kitti"] == dict.fromkeys(["a", "b", "c", "random weights (800 images)"], ABSENT) | {"chance": ""}
    assert "a: 15 of 19 tasks are absent: caltech101, dtd," in below


# Table 6 of the paper: ResNet50x1 and ResNet152x2 after 7 epochs; their averages are those of its Table 7 (Adam).
PAPER = {"imagenet": (77.54, 84.97), "cifar10": (97.67, 99.06), "cifar100": (86.07, 92.05),
         "oxford_pets": (91.11, 95.37), "flowers102": (94.26, 98.62)}  # fmt: skip


def test_the_average_of_five_data_sets_is_the_papers(tmp_path):
    for (data, values), part in product(PAPER.items(), ("test", "validation")):
        for model, value in zip(("R50", "R152"), values, strict=True):
            if (part == "validation") == (data == "imagenet"):  # which has no test images
                metrics = {f"{part}/accuracy": value / 100, f"{part}/accuracy_real": 0.0}
                finished(tmp_path / f"{model}_{data}", 0, data=data, path=model, metrics=metrics)
    finished(tmp_path / "part", 0.5, path="incomplete")
    cells, _, accuracies = tabulated(tmp_path, tmp_path)
    (average,) = (row for title, row in cells.items() if title.startswith("**average of five**"))
    assert (average["R50"], average["R152"], average["incomplete"]) == ("89.33", "94.01", ABSENT)
    assert accuracies["R50"]["average of five"] == pytest.approx([0.8933])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of MAE of 4 steps, whose checkpoint after step 2 another run of 3 steps continues."""
    folder, pretrain = tmp_path_factory.mktemp("runs"), find_command("pretrain")
    encoder = [option for option in TINY if option.startswith("encoder.")]
    options = tiny_options("encoder.", "target.")
    options += ["objective=mae", "objective.decoder.width=8", "probes=[]", f"outputs={folder}"]
    pretrain.call([*options, *encoder, "encoder.patch_size=4", "recipe.steps=4", "name=first"])
    start = (f"checkpoint={folder}/first/step_00000002", "continuation=null")
    pretrain.call([*options, *start, "recipe.steps=3", "name=second"])
    return folder


def test_operations_are_those_of_all_runs_of_the_pretraining(runs, tmp_path):
    """Against the products of MAE, image by image: a quarter of the patches is encoded."""

    def layer(rows, tokens, width):
        """Operations of a layer that computes `rows` of the tokens: projections, attention, MLP."""
        return 2 * width**2 * (2 * rows + 2 * tokens + 8 * rows) + 2 * 2 * rows * tokens * width

    patches, visible, pixels, width, decoded = 16, 4, 48, 16, 8
    projection = 2 * visible * pixels * width
    encoder = projection + 2 * layer(visible + 1, visible + 1, width)
    decoder = 2 * (visible + 1) * width * decoded + layer(patches + 1, patches + 1, decoded)
    decoder += layer(patches - visible, patches + 1, decoded) + 2 * (patches - visible) * decoded * pixels
    # In the backward pass, each product has two, except for the projection of pixels, which have no gradient.
    step = 8 * (3 * (encoder + decoder) - projection)
    paths = {"first/step_00000004": 4 * step, "second/step_00000003": (2 + 3) * step}
    for path in [*paths, "absent/step_00000001"]:
        finished(tmp_path / "tuned" / path, 0.5, path=str(runs / path))
    cells, _, numbers = tabulated(tmp_path / "tuned", tmp_path)
    for path, expected in paths.items():
        assert numbers[str(runs / path)]["operations of pre-training"] == [expected]
        assert cells["operations of pre-training"][str(runs / path)] == f"{expected / 1e6:.1f} MFLOP"
    assert cells["operations of pre-training"][str(runs / "absent/step_00000001")] == ""


def test_the_time_of_a_pretraining_is_that_of_all_its_runs(runs):
    first, second = (
        {row["step"]: row["seconds"] for row in rows(runs / name) if "seconds" in row} for name in ("first", "second")
    )
    expected = sum(seconds for step, seconds in first.items() if step <= 2) + sum(second.values())
    spent = Spent.of_checkpoint(Checkpoint.open(runs / "second"))
    assert spent == Spent((2 + 3) * 8, pytest.approx(expected))
    assert Spent.of_checkpoint(Checkpoint.open(runs / "first/step_00000004")).seconds == pytest.approx(
        sum(first.values())
    )


def test_the_time_until_a_step_between_two_logged_ones_is_a_share():
    logged = [{"step": 4, "seconds": 2.0}, {"step": 4, "test/accuracy": 0.5}, {"step": 8, "seconds": 4.0}]
    assert [Spent.on(logged, 3, last=last) for last in (4, 5, 8)] == [(12, 2.0), (15, 3.0), (24, 6.0)]


def test_runs_that_are_not_finished_are_named_and_left_out(tmp_path):
    outputs = tmp_path / "outputs"
    finished(outputs / "a", 0.5)
    finished(outputs / "b", 0.7, steps=3, seed=1)
    cells, below, _ = tabulated(outputs, tmp_path, str(outputs / "a"), str(outputs / "b"))
    assert cells["cifar10"]["outputs/run/step_9"] == "50.00"
    assert f"not finished, so excluded: {outputs}/b (step 2 of 3)" in below
    for name in ("a", "."):  # a run, and a folder of runs
        command.call([str(outputs / name), f"output={tmp_path}/table.md"])
        assert "| cifar10 | 10.0 | 50.00 |" in (tmp_path / "table.md").read_text()
    (tmp_path / "table.md").write_text("# Notes\n")
    with pytest.raises(UserError, match=r"^output="):
        command.call([str(outputs / "a"), f"output={tmp_path}/table.md"])
    with pytest.raises(UserError, match=r"not finished, so excluded: .*/b \("):
        command.call([str(outputs / "b")])


def test_without_runs_there_is_no_table(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: no finished run"):
        command.call([f"outputs={tmp_path}"])
    with pytest.raises(UserError, match=r"^runs="):
        command.call([str(tmp_path)])
