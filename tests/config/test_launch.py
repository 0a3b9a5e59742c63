"""Every command reports a wrong option in one line before torch is imported; each job of a sweep has a folder."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
from command import LIMIT, TINY, error_of, one_line
from composing import composed
from images import put, put_set

from ssvit.checkpoints.configuration import Configuration
from ssvit.cli import find_command
from ssvit.config.command import named
from ssvit.config.command_line import CommandLine
from ssvit.config.composed import Config
from ssvit.devices import Launch
from ssvit.errors import Failure, UserError
from ssvit.studies import sweep

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "fixtures" / "outputs" / "masked_patch_shapes"


COMPOSED = """
import sys
from ssvit.cli import find_command
from ssvit.config.declaration import Tree
command = find_command("pretrain")
config = command.compose(command.line(["objective=mae"]))
Tree(config.options).check()
print(*(name for name in sys.modules if name.startswith("ssvit.")))
"""


def test_a_run_from_random_weights_imports_only_what_it_chose(no_torch):
    done = subprocess.run(
        [sys.executable, "-c", COMPOSED], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": no_torch}, timeout=LIMIT,
    )  # fmt: skip
    modules = set(done.stdout.split())
    assert {"ssvit.objectives.mae_options", "ssvit.evaluation.probes.options"} <= modules
    assert not [name for name in modules if name.startswith("ssvit.exchange")]
    others = ("checkpoints.pretrained", "checkpoints.finding", "training.preset", "data.datasets_options",
              "objectives.dino_options", "retrieval.options")  # fmt: skip
    assert modules.isdisjoint(f"ssvit.{name}" for name in others)


def test_the_options_of_hydra_are_no_suggestion():
    line = str(error_of(find_command("pretrain").call, ["zzz=3"]))
    assert "recipe" in line
    assert "hydra" not in line


@pytest.mark.parametrize("group", ["data", "mine"])
def test_a_choice_of_the_users_own_files_is_named(tmp_path, group):
    (tmp_path / group).mkdir()
    (tmp_path / group / "own.yaml").write_text("a: 1\n")
    with pytest.raises(Failure, match=rf"^{group}=1: .*\bown\b"):
        find_command("pretrain").call(["--config-dir", str(tmp_path), f"{group}=1"])


def test_an_error_of_the_program_stays_as_it_is(monkeypatch):
    def broken(arguments):
        raise TypeError("of the program")

    tool = replace(find_command("pretrain"), before=broken)
    with pytest.raises(TypeError, match="of the program"):
        tool.call(["encoder=[ti]", "objective=mae,simmim", "recipe.steps=[1]"])


@pytest.mark.parametrize("devices", ["-3", "0", "1.5", "null", "true", "[]", "[-1]", "[a]", "some"])
@pytest.mark.parametrize("command", ["pretrain", "evaluate"])
def test_devices_that_do_not_exist_are_named_before_torch_loads(command, devices):
    checkpoint = f"checkpoint={RUN}" if command == "evaluate" else "checkpoint=null"
    line = str(error_of(find_command(command).call, [checkpoint, f"launch.devices={devices}"]))
    assert line.startswith("launch.devices=")
    assert "-1" in line
    assert "auto" in line


@pytest.mark.parametrize("devices", ["auto", -1, 1, 12, [0], [0, 3], "0,3"])
def test_every_form_of_devices_is_permitted(devices):
    assert Launch(timeout=30, devices=devices).devices == devices


def test_a_number_of_devices_as_a_text_is_a_number():
    assert Launch(devices="2", num_nodes=3).processes == 6


def test_each_job_of_a_sweep_has_a_folder_of_its_own(tool, tmp_path):
    done = tool(
        "pretrain", *TINY, "-m", "probes=[]", "recipe.lr=1e-3,2e-3", "recipe.steps=3", "recipe.evaluate_every=3"
    )
    assert "HYDRA" not in done.stderr
    left = sorted(path.name for path in (tmp_path / "outputs").iterdir())
    runs = [f"masked_patch_shapes_recipe.lr={lr}" for lr in ("0.001", "0.002")]
    assert left == [*runs, "multirun.yaml"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outputs"]
    head, *rows, best = done.stdout.splitlines()[-4:]
    assert head.split() == ["recipe.lr", "held_out/loss"]
    losses = {lr: float(loss) for lr, loss in map(str.split, rows)}
    lowest = min(losses, key=losses.get)
    assert f" recipe.lr={lowest}, " in best
    assert f" held_out/loss {losses[lowest]:.4g}: " in best
    assert best.endswith(f"outputs/masked_patch_shapes_recipe.lr={lowest}")
    weights = {(tmp_path / "outputs" / run / "step_00000003" / "model.safetensors").read_bytes() for run in runs}
    assert len(weights) == 2


def test_names_of_jobs_differ_even_if_characters_are_replaced():
    def name(option):
        return named(Config({}, {}, CommandLine([]), swept=[option]), "run").values["name"]

    names = [name(f"data={value}") for value in ("a/b", "a b", "a-b")]
    assert len(set(names)) == 3
    assert not any(set("/ ") & set(written) for written in names)
    assert names[2] == "run_data=a-b"


def test_a_sweep_without_a_folder_to_write_is_one_line(tool, tmp_path):
    put(tmp_path / "outputs", b"")
    assert "outputs" in one_line(tool("pretrain", "-m", *TINY, "recipe.lr=1e-3,2e-3", status=1))


def test_a_normalization_may_be_null():
    assert composed("data=shapes", "data.normalization=null").data.image_size == 32


def test_an_optional_group_may_have_no_choice():
    typed, usual = (composed(f"checkpoint={RUN}", *option, tool="finetune") for option in (["experiment=null"], []))
    assert typed.config.choices["experiment"] is None
    assert usual.config.choices["experiment"] is None
    with pytest.raises(Failure):
        composed("encoder=null")


def test_a_sweep_may_have_several_checkpoints(tool, tmp_path):
    paths = [shutil.copytree(RUN, tmp_path / name) for name in ("one", "two")]
    images = [option for option in TINY if option.startswith("data")]
    short = ["recipe.steps=1", "recipe.warmup=0", "recipe.batch_size=8", "check_frozen=false", "figures=none"]
    tool("finetune", "-m", f"checkpoint={','.join(map(str, paths))}", *images, *short, "name=tuned")
    files = (tmp_path / "outputs").glob("tuned*/config.yaml")
    starts = [Path(Configuration.read(file).values["encoder"]["path"]) for file in files]
    assert sorted(start.parent.name for start in starts) == ["one", "two"]


@pytest.mark.parametrize(
    ("fixed", "name", "values"),
    [
        ("data=photos", "recipe.steps", ("100", "4000")),
        ("data=photos", "data.image_size", ("32", "48")),
        ("data=photos", "objective", ("mae", "simclr")),
        (f"checkpoint={RUN}", "recipe.steps", ("10", "40")),
    ],
)
def test_a_job_of_a_sweep_has_the_options_of_the_same_run_alone(fixed, name, values, tmp_path, monkeypatch):
    put_set(tmp_path / "photos", 20, (40, 40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ssvit"])
    configs: list[Config] = []
    command = replace(find_command("pretrain"), run=configs.append, results=None)
    command.main(["-m", fixed, f"{name}={','.join(values)}"])
    alone = [command.compose(command.line([fixed, f"{name}={value}"])) for value in values]
    assert [job.values for job in configs] == [config.values for config in alone]


@pytest.mark.parametrize(
    ("option", "package"),
    [
        ("hydra/launcher=submitit_slurm", "hydra-submitit-launcher"),
        ("hydra/sweeper=optuna", "hydra-optuna-sweeper"),
    ],
)
def test_a_plug_in_that_is_missing_is_named(tool, no_torch, option, package):
    with suppress(PackageNotFoundError):
        version(package)
        pytest.skip("it is installed")
    line = one_line(tool("pretrain", "-m", option, "recipe.lr=1e-3,2e-3", status=2, PYTHONPATH=no_torch))
    assert line.startswith(f"ssvit: {option}: ")
    assert package in line


def swept(folder, *typed, **columns):
    """A sweep of jobs, each with a value of each metric, and the objective values of the jobs."""
    results, objectives = sweep.Sweep(), []
    for place, values in enumerate(zip(*columns.values(), strict=True)):
        row = {"step": 1, **dict(zip(columns, values, strict=True))}
        own = put(folder / str(place) / "metrics.jsonl", json.dumps(row).encode() + b"\n")
        config = Config({}, {}, CommandLine(typed), swept=[f"a={place}", "b.c=x"])
        objectives.append(results.add(config, own.parent))
    return results, objectives


def test_a_comparison_with_random_weights_counts_by_its_first_pretrained_run(tmp_path):
    for place, accuracies in enumerate(((0.5, 0.4), (0.7, 0.3))):
        for side, accuracy in zip(("pretrained", "scratch"), accuracies, strict=True):
            row = json.dumps({"step": 1, "validation/accuracy": accuracy}).encode()
            put(tmp_path / str(place) / f"{side}_seed0" / "metrics.jsonl", row + b"\n")
    results = sweep.Sweep()
    jobs = [Config({}, {}, CommandLine([]), swept=[f"recipe.seed={place}"]) for place in range(2)]
    assert [results.add(job, tmp_path / str(place)) for place, job in enumerate(jobs)] == [0.5, 0.7]
    head, *_, last = results.table().splitlines()
    assert head.split() == ["recipe.seed", "validation/accuracy"]
    assert last.split() == ["2", "seeds", "0.6", "±", "0.14"]


TESTED = {"test/accuracy": (0.5, 0.7, 0.6)}
LOSSES = {"held_out/loss": (3.0, 2.0, 1.0)}
PROBED = {"probe/knn20": (0.2, 0.9, 0.3), "probe/knn20_chosen": (2, 2, 2), "probe/knn20_choice": (0.8, 0.1, 0.3)}
VALIDATED = {"validation/accuracy": (0.3, 0.2, 0.4)}


@pytest.mark.parametrize(
    ("metrics", "head", "best"),
    [
        (VALIDATED | PROBED | TESTED | LOSSES, "validation/accuracy  test/accuracy", 2),
        (PROBED | TESTED | LOSSES, "probe/knn20_choice  test/accuracy  probe/knn20", 0),
        (PROBED | LOSSES, "probe/knn20_choice  probe/knn20", 0),
        (TESTED | LOSSES, "held_out/loss  test/accuracy", 2),
        ({"validation/miou": (0.3, 0.5, 0.4), "train/loss": (3.0, 2.0, 1.0)}, "validation/miou", 1),
        ({"train/loss": (2.0, 1.0, 3.0)} | LOSSES, "held_out/loss", 2),
        ({"train/loss": (2.0, 1.0, 3.0)}, "train/loss", 1),
    ],
)
def test_jobs_are_compared_by_what_is_no_figure_of_test_images(tmp_path, metrics, head, best):
    results, objectives = swept(tmp_path, **metrics)
    names, *rows, last = results.table().splitlines()
    assert names == f"a  b.c  {head}"
    name, value = head.split()[0], metrics[head.split()[0]][best]
    assert f" a={best} b.c=x, " in last
    assert last.endswith(f" {name} {value:.4g}: {tmp_path / str(best)}")
    assert [row.split()[2:] for row in rows] == [
        [f"{metrics[column][place]:.4g}" for column in head.split()] for place in range(3)
    ]
    assert objectives[best] == value


def of_seeds(folder, options, **columns):
    """A sweep of jobs with some options, each with a value of each metric."""
    results = sweep.Sweep()
    for place, values in enumerate(zip(*columns.values(), strict=True)):
        row = {"step": 1, **dict(zip(columns, values, strict=True))}
        own = put(folder / str(place) / "metrics.jsonl", json.dumps(row).encode() + b"\n")
        results.add(Config({}, {}, CommandLine([]), swept=options[place]), own.parent)
    return results


def spread(values) -> str:
    return f"{np.mean(values):.4g} ± {np.std(values, ddof=1):.2g}"


def test_seeds_are_summarised_and_are_nothing_to_choose(tmp_path):
    values = (0.5, 0.7, 0.64)
    results = of_seeds(tmp_path, [[f"recipe.seed={seed}"] for seed in range(3)], **{"test/accuracy": values})
    head, *rows, last = results.table().splitlines()
    assert head.split() == ["recipe.seed", "test/accuracy"]
    assert [row.split() for row in rows] == [[str(seed), f"{value:.4g}"] for seed, value in enumerate(values)]
    assert last.split() == ["3", "seeds", *spread(values).split()]


@pytest.mark.parametrize("losses", [False, True])
def test_combinations_of_other_options_are_compared_by_their_means_over_seeds(tmp_path, losses):
    name = "held_out/loss" if losses else "validation/accuracy"
    values = [0.9, 0.1, 0.2, 0.5, 0.6, 0.7]  # the best job is of the combination with the lower mean
    options = [["recipe.lr=1", f"recipe.seed={seed}"] for seed in range(3)]
    options += [[f"recipe.seed={seed}", "+recipe.lr=2"] for seed in range(3)]
    order = [0, 3, 1, 4, 2, 5]
    results = of_seeds(tmp_path, [options[place] for place in order], **{name: [values[place] for place in order]})
    *_, first, second, last = results.table().splitlines()
    assert first.split() == ["1", "3", "seeds", *spread(values[:3]).split()]
    assert second.split() == ["2", "3", "seeds", *spread(values[3:]).split()]
    best = slice(3) if losses else slice(3, 6)
    folders = ", ".join(str(tmp_path / str(order.index(place))) for place in range(6)[best])
    assert f" recipe.lr={1 if losses else 2}, " in last
    assert last.endswith(f" {name} {spread(values[best])}: {folders}")


@pytest.mark.parametrize("option", ["objective", "target", "objective.norm_pixels", "target@decoder.target"])
def test_nothing_is_chosen_by_losses_of_different_meanings(tmp_path, option):
    options = [[f"{option}=a"], [f"{option}=b"]]
    table = of_seeds(tmp_path, options, **{"held_out/loss": [0.3, 4.9]}).table()
    assert str(tmp_path) not in table
    assert {"0.3", "4.9"} <= {*table.split()}


@pytest.mark.parametrize("measure", ["accuracy", "map", "miou"])
def test_jobs_with_nothing_but_test_images_have_no_best_one(tmp_path, measure):
    metrics = {f"test/{measure}": TESTED["test/accuracy"], "train/loss": (1.0, 2.0, 3.0)}
    results, objectives = swept(tmp_path, **metrics)
    assert objectives == [None] * 3
    assert [line.split() for line in results.table().splitlines()[:-1]] == [
        ["a", "b.c", f"test/{measure}"], ["0", "x", "0.5"], ["1", "x", "0.7"], ["2", "x", "0.6"],
    ]  # fmt: skip
    assert "development=0.1 " in results.table()
    with pytest.raises(UserError, match=r"^hydra/sweeper=optuna: .*/0\b"):
        swept(tmp_path, "hydra/sweeper=optuna", **metrics)


def test_a_command_without_a_file_has_the_options_of_its_class(tmp_path):
    predict = find_command("predict")
    line = predict.line([str(tmp_path), "top=2"])
    one, job = (predict.compose(each).options for each in (line, line.changed({"top": 3})))
    assert (one.top, job.top, one.threshold) == (2, 3, 0.5)
    assert [*one.images] == [*job.images] == [str(tmp_path)]
    with pytest.raises(Failure, match=r"^format: "):
        find_command("export").compose(find_command("export").line([]))
