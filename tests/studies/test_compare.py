"""A comparison gives each objective the same CPU time, and its table contains the results of the commands."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from command import LIMIT
from images import put, put_grey

from ssvit.cli import compare, table
from ssvit.data.loader import Loader
from ssvit.devices import Launch
from ssvit.errors import Failure, UserError
from ssvit.figures import style
from ssvit.studies import methods
from ssvit.training import benchmark, launch
from ssvit.training.recipe import Recipe

COST = {"masked_patch": 0.2, "mae": 0.1, "dino": 0.4, "two": 0.05}


@pytest.fixture
def commands(commands):
    def cost(given):
        second_stage = any("extra" in option for option in given)
        seconds = COST["two" if second_stage else given["objective"]]
        return {"cpu_seconds": seconds, "seconds": seconds, "preparation": 3 if second_stage else 0}

    commands.cost = cost
    return commands


def test_each_objective_has_as_many_steps_as_the_budget_is_worth(commands, tmp_path):
    compare.command.call(["objectives=[masked_patch,mae]", "budget=2min", "seeds=2", "name=c", "encoder.depth=2"])
    trained = [given for command, given in commands.asked if command == "pretrain"]
    assert [(given["name"], int(given["recipe.steps"])) for given in trained] == [
        ("masked_patch_seed0", 600), ("mae_seed0", 1200), ("masked_patch_seed1", 600), ("mae_seed1", 1200),
    ]  # fmt: skip
    assert [given["recipe.seed"] for given in trained] == ["0", "0", "1", "1"]
    assert all(given["encoder.depth"] == "2" for given in trained)
    # Defaults of compare differ from those of pre-training.
    assert {(given["encoder"], given["data"]) for given in trained} == {("small", "shapes")}
    # A step is measured once for each objective.
    assert [given["objective"] for command, given in commands.asked if command == "cost"] == ["masked_patch", "mae"]
    # Once, with the first run: random weights, pixels, and fine-tuning from random weights.
    evaluated = [given["baselines"] for command, given in commands.asked if command == "evaluate"]
    assert evaluated == ["true", "false", "false", "false"]
    tuned = [given["checkpoint"] for command, given in commands.asked if command == "finetune"]
    assert [checkpoint.rsplit("/", 1)[-1] for checkpoint in tuned] == [
        "masked_patch_seed0", "scratch", "mae_seed0", "masked_patch_seed1", "mae_seed1",
    ]  # fmt: skip
    table = (tmp_path / "outputs" / "c" / "table" / "table.md").read_text()
    assert "| mae | 2 | 50.0 ± 0.0 (layer 1/1; last 40.0 ± 0.0) | 60.0 ± 0.0 |" in table
    assert "| random weights | 1 | 30.0 (layer 2) |" in table
    assert "| pixels | 1 | 25.0 |" in table
    assert "| mae | 1200 x 64 | 2.0 | 76,800 | 640 | 1.2 | 10 | eager, 32-true |" in table
    row = json.loads((tmp_path / "outputs" / "c" / "table" / "mae_seed0.json").read_text())
    root, processors = Path(__file__).parents[2], Path("/proc/cpuinfo").read_text()
    head = subprocess.run(
        ["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False, timeout=LIMIT
    ).stdout
    assert row["versions"].get("commit") == (head.strip() if (root / ".git").exists() else None)
    assert f": {row['processor']}\n" in processors or "model name" not in processors


def test_a_step_costs_a_multiple_of_the_reference_step(commands, tmp_path):
    options = ["objectives=[masked_patch]", "budget=1min", "name=c", "finetune=[]"]
    compare.command.call([*options, "reference=[objective=mae,recipe.optimizer=adamw]", "reference_seconds=0.3"])
    measured = [given for command, given in commands.asked if command == "cost"]
    assert [given["objective"] for given in measured] == ["mae", "masked_patch"] * 3
    assert [given.get("recipe.optimizer") for given in measured] == ["adamw", None] * 3
    (trained,) = (given for command, given in commands.asked if command == "pretrain")
    assert int(trained["recipe.steps"]) == round(60 / (0.3 * COST["masked_patch"] / COST["mae"]))
    stored = json.loads((tmp_path / "outputs/c/table/costs/masked_patch_1.json").read_text())
    assert stored["multiple"] == COST["masked_patch"] / COST["mae"]


def test_a_step_is_timed_in_one_process(commands):
    compare.command.call(["objectives=[mae]", "budget=1min", "launch.devices=2", "launch.accelerator=cpu"])
    given = dict(commands.asked)
    assert "launch.devices" not in given["cost"]
    assert given["pretrain"]["launch.devices"] == "2"
    assert given["cost"]["launch.accelerator"] == "cpu"


def test_options_are_chosen_without_test_images(commands):
    compare.command.call(["objectives=[mae]", "budget=1min", "name=c", "development=0.2"])
    measured = [given for command, given in commands.asked if command != "cost"]
    assert len(measured) == 4  # pre-training, evaluation, fine-tuning, and fine-tuning from random weights
    assert {given["development"] for given in measured} == {"0.2"}


def test_a_teacher_is_passed_to_the_objectives_that_have_one(commands, monkeypatch, tmp_path):
    monkeypatch.setitem(COST, "distill", 0.5)
    options = ["objectives=[mae,distill]", "budget=60", "name=c", "finetune=[]"]
    compare.command.call([*options, "teacher=here"])
    trained = [given for command, given in commands.asked if command == "pretrain"]
    assert [given.get("teacher") for given in trained] == [None, "here"]
    (row,) = [
        row for row in methods.read_rows(tmp_path / "outputs/c/table").values() if row.get("objective") == "distill"
    ]
    assert row["stages"][0]["options"] == ["objective=distill", "teacher={teacher}"]
    assert row["teacher"] == "here"
    before = len(commands.asked)
    with pytest.raises(UserError, match=r"^table="):  # its rows would be seeds of the same objective
        compare.command.call([*options, "teacher=there", "seeds=2"])
    assert len(commands.asked) == before
    compare.command.call([*options, "teacher=elsewhere/here", "seeds=2"])  # a step is not measured again
    assert [command for command, _ in commands.asked[before:]] == ["pretrain", "evaluate"] * 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["data=A"], ["data=B"]),
        (["reference=[objective=mae]"], []),
        (["reference=[objective=mae]"], ["reference=[objective=mae]", "reference_seconds=2"]),
        (["encoder.depth=2", "encoder.heads=2"], ["encoder.depth=2", "encoder.heads=4"]),
    ],
)
def test_a_table_is_not_continued_with_other_settings(first, second, commands, tmp_path):
    for name in ("A/train/a/0.png", "A/train/b/0.png", "B/train/a/0.png", "B/train/b/0.png"):
        put_grey(tmp_path / name, 50)
    options = ["objectives=[mae]", "budget=60", "name=c", "finetune=[]"]
    compare.command.call([*options, *first])
    before = len(commands.asked)
    with pytest.raises(UserError, match=r"^table="):
        compare.command.call([*options, *second, "seeds=2"])
    compare.command.call([*options, *reversed(first)])
    assert len(commands.asked) == before


def test_an_objective_whose_file_has_changed_is_not_a_further_seed(commands, tmp_path):
    file = tmp_path / "own" / "comparison" / "one.yaml"
    options = ["--config-dir", "own", "objectives=[one]", "budget=60", "name=c", "finetune=[]"]
    for number, rate in enumerate(("1e-3", "2e-3")):
        put(file, f"stages:\n- options: [objective=mae, recipe.lr={rate}]\n".encode())
        if not number:
            compare.command.call(options)
    with pytest.raises(UserError, match=r"^table=.*1e-3"):
        compare.command.call([*options, "seeds=2"])


@pytest.mark.parametrize("option", ["recipe.steps=7", "recipe.seed=5"])
def test_steps_and_seeds_are_those_of_the_budget(option, commands):
    with pytest.raises(UserError, match=f"^{option}: "):
        compare.command.call(["objectives=[mae]", "budget=60", "name=c", "finetune=[]", f"pretrain=['{option}']"])
    assert not commands.asked


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"protocol": 1}'])
def test_a_file_that_is_not_a_row_is_named(content, commands, tmp_path):
    file = tmp_path / "table" / "mae_seed0.json"
    put(file, content.encode())
    with pytest.raises(UserError, match=f"{file}: "):
        methods.read_rows(file.parent)
    with pytest.raises(UserError, match=f"{file}: "):
        table.command.call([str(file.parent)])


def test_what_is_there_is_not_made_again(commands, tmp_path):
    options = ["objectives=[mae]", "budget=60", "name=c"]
    compare.command.call(options)
    before = len(commands.asked)
    compare.command.call(options)
    assert len(commands.asked) == before
    compare.command.call(["objectives=[mae,masked_patch]", "budget=1min", "name=c"])
    assert [command for command, _ in commands.asked[before:]] == ["cost", "pretrain", "evaluate", "finetune"]
    results = methods.read_rows(tmp_path / "outputs/c/table").values()
    assert {row["objective"] for row in results if "objective" in row} == {"mae", "masked_patch"}
    with pytest.raises(UserError, match=r"^table=.*baselines\.json.*budget=60"):
        compare.command.call(["objectives=[dino]", "budget=61", "name=c"])
    assert len(commands.asked) == before + 4


@pytest.mark.parametrize("changed", ["encoder.depth=3", "threads=2", "pretrain=['recipe.batch_size=32']"])
def test_a_step_is_measured_again_where_its_options_have_changed_before_there_is_a_row(commands, monkeypatch, changed):
    options = ["objectives=[mae]", "budget=60", "name=c", "finetune=[]"]
    with monkeypatch.context() as stopped:
        stopped.setattr(compare.Comparison, "row", lambda *args: pytest.fail("stopped"))  # after the measurement
        for unchanged in ((), ("workers=3",)):  # which affects no result
            with pytest.raises(pytest.fail.Exception, match="stopped"):
                compare.command.call([*options, *unchanged])
    assert [command for command, _ in commands.asked] == ["cost"]
    monkeypatch.setitem(COST, "mae", 0.3)
    compare.command.call([*options, changed])
    assert [command for command, _ in commands.asked] == ["cost", "cost", "pretrain", "evaluate"]
    assert commands.asked[2][1]["recipe.steps"] == "200"
    (row,) = (row for name, row in methods.read_rows(Path("outputs/c/table")).items() if name != "baselines")
    assert (row["stages"][0]["cpu_seconds"], row["stages"][0]["options"]) == (0.3, ["objective=mae"])


def test_the_first_row_has_the_order_and_a_probe_that_a_row_lacks_is_left_out_there(commands, tmp_path):
    compare.command.call(["objectives=[mae,dino]", "finetune=[]", "budget=60", "name=c"])
    rows = methods.read_rows(tmp_path / "outputs/c/table")
    rows["dino_seed0"]["probes"]["few_shot"] = {"column": "5 labels per class", "chosen": 0.7, "layer": 2, "last": 0.7}
    rows["dino_seed0"]["probes"]["knn"]["chosen"] = 0.9
    head, _, dino, mae, *_ = methods.methods_table(rows).splitlines()
    assert head == "| objective | seeds | 20-NN | ridge regression (5 labels per class) | fine-tuned |"
    none = "\N{EN DASH}"
    assert dino == f"| dino | 1 | 90.0 (layer 1; last 40.0) | 70.0 (layer 2) | {none} |"
    assert mae == f"| mae | 1 | 50.0 (layer 1; last 40.0) | {none} | {none} |"


@pytest.mark.parametrize(
    ("scores", "conclusion"),
    [
        ({"a": [0.6], "b": [0.5]}, ["10.0 percentage points", "one seed each"]),
        ({"a": [0.6], "b": [0.6]}, ["0.0 percentage points", "one seed each"]),
        ({"a": [0.60, 0.61, 0.62], "b": [0.5, 0.51, 0.52]}, ["significantly better", "+7.7 to +12.3"]),
        ({"a": [0.5, 0.7], "b": [0.45, 0.65]}, ["not significantly"]),
        ({"a": [0.62, 0.62], "b": [0.5, 0.5]}, ["a is better than b"]),  # without an estimate of the error
    ],
)
def test_a_comparison_ends_with_the_best_its_baseline_and_the_interval_of_the_difference(scores, conclusion):
    rows = {
        f"{name}_seed{seed}": {"objective": name, "probes": {"knn": {"column": "20-NN", "chosen": value}}}
        for name, values in scores.items()
        for seed, value in enumerate(values)
    }
    rows["baselines"] = {"baselines": {"random weights": {"knn": {"chosen": 0.3}}}}
    best, difference = methods.conclusion(rows)
    assert best.startswith("a: 20-NN 6")
    assert "30.0 %" in best
    assert difference.startswith("a ")
    assert all(words in difference for words in conclusion)
    assert ("significantly" in difference) == (len({*scores["a"]}) > 1)
    assert "better" not in difference or len(scores["a"]) > 1  # one seed does not show it


def test_a_method_of_two_stages_shares_the_budget(commands, tmp_path):
    (tmp_path / "own" / "comparison").mkdir(parents=True)
    (tmp_path / "own" / "comparison" / "two.yaml").write_text(
        "stages:\n- share: 0.25\n  options: [objective=mae]\n"
        "- share: 0.75\n  options: [objective=mae, 'extra.path={before}']\n"
    )
    compare.command.call(["--config-dir", "own", "objectives=[two]", "budget=40s", "name=c", "finetune=[]"])
    first, second = (given for command, given in commands.asked if command == "pretrain")
    assert (first["recipe.steps"], second["recipe.steps"]) == ("100", "540")
    assert second["extra.path"] == "outputs/c/two_seed0_stage1"
    assert [command for command, _ in commands.asked] == ["cost", "pretrain", "cost", "pretrain", "evaluate"]
    compare.command.call(["--config-dir", "own", "objectives=[two]", "budget=40s", "name=c", "finetune=[]", "seeds=2"])
    assert [command for command, _ in commands.asked[5:]] == ["pretrain", "pretrain", "evaluate"]
    row = methods.read_rows(tmp_path / "outputs" / "c" / "table")["two_seed0"]
    # The second stage starts from the result of the first.
    assert [point["cpu_seconds"] for point in row["curve"]] == pytest.approx([0, 5, 10, 13, 26.5, 40])
    assert [point["images"] for point in row["curve"]] == [0, 3200, 6400, 6400, 23680, 40960]


def measured(name, *values, best):
    """A probe in a report, of these feature sets, of the same ones of random weights, and of pixels.

    Random weights have the highest test accuracy at the first feature set, and their last one is chosen.
    """
    scores = {features: [0.0, value] for features, value in values}
    scores |= {f"random_{features}": [0.0, value / 2] for features, value in values} | {"pixels": [0.0, 0.25]}
    chosen = {"random weights": f"random_{values[-1][0]}", "pixels": "pixels"}
    return {"measure": name, "columns": ["train", "test"], "best": best, "chosen": chosen, "values": scores}


@pytest.mark.parametrize(("layers", "chosen", "layer", "last"), [([4, 6], 0.8, 4, 0.6), ([6], 0.6, 6, 0.6)])
def test_a_row_has_the_layers_of_each_probe_by_their_own_numbers(layers, chosen, layer, last):
    of_images = [(f"layer{number}_patch_mean", {4: 0.8, 6: 0.6}[number]) for number in layers]
    knn = measured("knn", *of_images, best=f"layer{layer}_patch_mean")
    attentive = measured("attentive", ("layer6_patches", 0.9), best="layer6_patches")
    # The format of `ssvit evaluate`: feature sets of whole images and of patches in one list.
    report = {"own": [*(name for name, _ in of_images), "layer6_patches"], "measured": [knn, attentive]}
    assert methods.probes(report) == {
        "knn": {"column": "test", "chosen": chosen, "layer": layer, "last": last},
        "attentive": {"column": "test", "chosen": 0.9, "layer": 6, "last": 0.9},
    }
    assert methods.probes(report, "random weights") == {
        "knn": {"column": "test", "chosen": last / 2, "layer": layers[-1], "last": last / 2},
        "attentive": {"column": "test", "chosen": 0.45, "layer": 6, "last": 0.45},
    }
    assert methods.probes(report, "pixels")["attentive"] == {"column": "test", "chosen": 0.25, "last": 0.25}


def test_a_curve_has_the_chance_of_its_probes():
    cost = {"cpu_seconds": 1.0, "flops": 1.0, "images": 4, "preparation": 0.0}
    history = [{"step": 0, "probe/knn": 0.2, "probe/knn_chosen": 1, "probe/chance": 0.1}, {"step": 1, "loss": 2.0}]
    points = methods.curve(history, cost, [])
    assert points == [{"step": 0, "cpu_seconds": 0, "flops": 0, "images": 0, "chance": 0.1, "knn": 0.2}]
    assert list(methods.probes_in({"mae": [points]})) == ["knn"]


def test_curves_of_seeds_are_averaged_at_equal_cost():
    def curve(minutes, accuracies):
        return [{"cpu_seconds": 60 * x, "knn": y} for x, y in zip(minutes, accuracies, strict=True)]

    seeds = [curve((0, 1, 4), (0.1, 0.3, 0.9)), curve((0, 2), (0.2, 0.6))]
    (panel,) = methods.plot({"mae": seeds}, "knn").panels
    np.testing.assert_allclose(panel.lines[-1].y, [15.0, 100 * (0.3 + 0.4) / 2, 100 * (0.9 + 0.6) / 2])


def test_a_table_has_rows_of_test_images_and_those_of_held_out_images_only_if_there_are_no_others(tmp_path):
    def write(name, development, probe):
        cost = {"steps": 10, "cpu_seconds": 6.0, "seconds": 6.0, "flops": 2.0, "images": 4, "preparation": 0.0}
        curve = [{"step": step, "cpu_seconds": 6.0 * step, "flops": 2, "images": 4, probe: 0.2} for step in (0, 10)]
        probes = {"ridge": {"column": "all labels", "chosen": 0.5, "layer": 1, "last": 0.5}}
        stage = cost | {"backend": "torch", "options": ["objective=hog"]}
        row = {"objective": name, "seed": 0, "stages": [stage], "curve": curve, "probes": probes,
               "protocol": {"options": ["encoder=small", *development]}}  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_seed0.json").write_text(json.dumps(row))

    write("lever", ["development=0.1"], "knn")
    assert {row["objective"] for row in methods.read_tables([tmp_path]).values()} == {"lever/lever"}
    write("entry", ["development=null"], "knn")
    write("other", [], "ridge")
    rows = methods.read_tables([tmp_path])
    assert {row["objective"] for row in rows.values()} == {"entry/entry", "other/other"}
    folders = [tmp_path / "entry", tmp_path / "other"]
    assert {row["objective"] for row in methods.read_tables(folders).values()} == {"entry/entry", "other/other"}
    assert {row["objective"] for row in methods.read_tables(folders[:1]).values()} == {"entry"}
    assert "entry" in methods.methods_table(rows)
    panels = methods.plot_costs(rows).panels
    assert len(panels) == 1
    assert all(panel.xticks == [1.0] for panel in panels)
    assert {line.color for panel in panels for line in panel.lines} == {style.OBJECTIVES["hog"]}
    assert sorted({x for panel in panels for line in panel.lines for x in line.x}) == pytest.approx([1 / 1.1, 1.1])


def test_the_cost_of_a_step_counts_its_operations(monkeypatch):
    monkeypatch.setattr(benchmark, "_STEPS", 2)
    recipe = Recipe(**{**tiny.RECIPE, "accumulate": 2, "clip": 0.0})
    processes = launch.start(recipe, Launch(accelerator="cpu", devices=1))
    objective = tiny.model()
    loader = Loader(
        source=tiny.source(), transform=tiny.transform(objective), seed=0, batch_size=recipe.batch_size,
        accumulate=recipe.accumulate,
    )  # fmt: skip
    found = benchmark.measure(processes, objective, loader, recipe)
    # Multiplications and additions of the products, image by image, as in a plain reading of the model.
    d, n, t, patch = 16, 16, 17, 48
    corrupted = objective.options.masking.count(n)
    forward = 2 * n * patch * d
    for layer in range(2):
        rows = corrupted if layer == 1 else t  # the last layer is computed for the corrupted patches alone
        forward += 2 * d * d * (rows + 2 * t) + 2 * 2 * rows * t * d + 2 * rows * d * d + 2 * 2 * rows * d * 4 * d
    forward += 2 * corrupted * d * objective.target.width
    # Backward, each product has two, but for the first, whose input has no gradient.
    assert found["flops"] == recipe.batch_size * (3 * forward - 2 * n * patch * d)
    assert found["images"] == recipe.batch_size
    assert found["cpu_seconds"] > 0
    assert all(torch.isfinite(parameter).all() for parameter in objective.parameters())


def test_stopped_before_the_baselines_are_there_it_makes_them_when_it_goes_on(commands, tmp_path, monkeypatch):
    options = ["objectives=[mae]", "budget=60", "name=c"]
    finetuned = compare.Comparison.finetuned

    def stopped(self, checkpoint, name, seed):
        if checkpoint == "scratch":
            raise KeyboardInterrupt
        return finetuned(self, checkpoint, name, seed)

    monkeypatch.setattr(compare.Comparison, "finetuned", stopped)
    with pytest.raises(KeyboardInterrupt):
        compare.command.call(options)
    monkeypatch.setattr(compare.Comparison, "finetuned", finetuned)
    compare.command.call(options)
    assert set(methods.read_rows(tmp_path / "outputs" / "c" / "table")) == {"baselines", "mae_seed0"}


def test_rows_of_several_tables_are_one_table(commands, tmp_path, capsys):
    for folder, budget in (("rows/short", 60), ("rows/long", 120), ("../other/long", 180)):
        compare.command.call(["objectives=[mae]", f"budget={budget}", "seeds=2", f"table={folder}"])
    names = {"compare_shapes_rows_short", "compare_shapes_rows_long", "compare_shapes_other_long"}
    assert {path.name for path in (tmp_path / "outputs").iterdir()} == names
    capsys.readouterr()
    table.command.call(["rows", "output=rows/table.md"])
    text = (tmp_path / "rows" / "table.md").read_text()
    assert [line.split("|")[1:3] for line in text.split("\n")[2:4]] == [[" long/mae ", " 2 "], [" short/mae ", " 2 "]]
    assert (tmp_path / "rows" / "costs.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(Failure, match="runs=nowhere"):
        table.command.call(["nowhere"])
    put(tmp_path / "run" / "config.yaml", b"schema: 1")
    with pytest.raises(Failure, match=r"^runs=\[rows,run\]: "):
        table.command.call(["rows", "run"])
