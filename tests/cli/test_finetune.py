"""ssvit finetune as a user runs it: what it starts from, what it leaves, studies, and mistakes in one line."""

import csv
import json
import re
import shutil
import signal
from pathlib import Path

import prefork
import pytest
import tiny
import torch
import yaml
from command import one_line, tiny_options
from composing import composed
from images import put_set
from PIL import Image
from ranks import start
from runs import final, kill_after, rows, states
from torchvision.io import write_png
from torchvision.transforms.v2 import functional as tvf

import ssvit
from ssvit.api import Run
from ssvit.checkpoints import manifest
from ssvit.checkpoints.checkpoint import FINETUNE, checkpoint_folder
from ssvit.cli import find_command
from ssvit.cli import finetune as cli
from ssvit.training.session import Session

RUN = "masked_patch_shapes"
# Options of TINY's images and model that a fine-tuning may repeat.
SHORT = (
    "recipe.batch_size=8", "recipe.steps=6", "recipe.warmup=2", "recipe.save_every=2", "recipe.evaluate_every=3",
    "recipe.log_every=1", "recipe.precision=32-true", "launch.accelerator=cpu", "figures=none",
    "check_frozen=false",
)  # fmt: skip
ONE_STEP = ("recipe.steps=1", "recipe.warmup=0")


def counted(run: Path) -> int:
    """The number of images in the table of classes."""
    with open(run / "classes.csv", newline="") as file:
        return sum(int(row["images"]) for row in csv.DictReader(file))


@pytest.fixture(scope="module")
def finetuned(pretrained, tmp_path_factory):
    """The outputs of a run of pre-training and one that fine-tuned it, not to be changed, and what the latter printed.

    The working directory of the command is the folder that has them.
    """
    folder = tmp_path_factory.mktemp("finetuned")
    shutil.copytree(pretrained, folder / "outputs")
    options = ("outputs=outputs", *SHORT, "evaluators.test.batch_size=7", "figures=end")
    done = prefork.run("finetune", *options, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "outputs", done.stdout


def test_without_arguments_it_takes_the_newest_run_and_its_images(finetuned):
    outputs, printed = finetuned
    run = outputs / f"finetune_{RUN}"
    lines = printed.splitlines()
    assert lines[0].startswith(f"checkpoint=newest: outputs/{RUN}/step_00000006")
    assert sum(line.startswith("step ") for line in lines) == 6
    for figure in ("confusion.png", "mistakes.png", "learning.png", "reliability.png"):
        with Image.open(run / figure) as image:
            assert min(image.size) > 300
    with open(run / "classes.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert counted(run) == 32
    tested = rows(run, "test/accuracy")
    assert [*tested] == [0, 3, 6]
    assert sum(int(row["correct"]) for row in table) == round(32 * tested[6])
    found = manifest.read_manifest(run / "step_00000006")
    assert found["stage"] == "finetune"
    assert found["classifier"]["classes"] == [row["class"] for row in table]
    again = ("outputs=outputs", *SHORT, "evaluators.test.batch_size=7")
    assert "is finished (6 steps)" in prefork.run("finetune", *again, folder=outputs.parent).stdout


def test_the_first_step_starts_from_the_pretrained_weights(outputs, tool):
    """At a learning rate of almost 0, a step keeps the weights of the checkpoint, and the head is new."""
    options = (*SHORT, *ONE_STEP, "recipe.lr=1e-30")
    tool("finetune", *options)
    tool("finetune", *options, "checkpoint=scratch")
    before = states(outputs / RUN)["model"]
    after = states(outputs / f"finetune_{RUN}")["model"]
    scratch = states(outputs / f"scratch_{RUN}")["model"]
    assert after.keys() == scratch.keys()
    assert {name for name in after if not name.startswith("encoder.")} == {"head.weight", "head.bias"}
    for name in before.keys() & after.keys():
        if name.startswith("encoder."):
            assert torch.equal(before[name], after[name])
    assert not torch.equal(before["encoder.patch.weight"], scratch["encoder.patch.weight"])
    assert torch.equal(before["encoder.mean"], scratch["encoder.mean"])


def test_a_higher_resolution_resizes_the_positions_and_says_so(outputs, tool):
    done = tool("finetune", *SHORT, *ONE_STEP, "data.image_size=[24,32]")
    assert "positions resized from 4x4 to 6x8 patches (paper)" in done.stdout
    final = outputs / f"finetune_{RUN}" / "step_00000001"
    assert states(final)["model"]["encoder.positions.0.embedding"].shape == (1 + 6 * 8, 16)
    assert tiny.classifier(final).encoder.image_size == (24, 32)


@pytest.mark.parametrize(
    ("signum", "step"),
    [
        (signal.SIGKILL, 3),
        pytest.param(signal.SIGKILL, 5, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_step_it_ends_with_the_same_bits(outputs, tool, tmp_path, signum, step):
    options = (*SHORT, "objective.mixup=0.8", "objective.cutmix=1.0", "encoder.dropout=0.1", "recipe.ema=0.9",
               "recipe.optimizer=adamw", "recipe.layer_decay=0.7")  # fmt: skip
    tool("finetune", *options, "name=whole")
    typed = (*options, "name=killed", "overwrite=false")
    kill_after(tmp_path, f"step {step}/6", *typed, tool="finetune", signum=signum)
    assert "continues after step" in tool("finetune", *options, "name=killed").stdout
    assert final(outputs / "killed") == final(outputs / "whole")


def test_comparison_runs_both_sides_alike_and_tells_them_apart(outputs, tool):
    tool("finetune", *SHORT, "compare=scratch", "scratch=equal_steps", "seeds=2")
    folder = outputs / f"compare_{RUN}"
    report = json.loads((folder / "comparison.json").read_text())
    for side in ("pretrained", "scratch"):
        finals = []
        for seed in (0, 1):
            run = folder / f"{side}_seed{seed}"
            finals.append(rows(run, "test/accuracy")[6])
            config = yaml.safe_load((run / "config.yaml").read_text())
            assert config["recipe"]["seed"] == seed
            assert config["recipe"]["steps"] == 6
        assert report["accuracy"][side]["values"] == finals
        assert report["curves"][side]["step"] == [0, 3, 6]
    starts = [
        manifest.read_manifest(folder / f"{side}_seed0" / "step_00000006")["start"]
        for side in ("pretrained", "scratch")
    ]
    assert starts == [manifest.read_manifest(outputs / RUN / "step_00000006")["seal"], "scratch"]
    seeds = [states(folder / f"scratch_seed{seed}")["model"]["encoder.patch.weight"] for seed in (0, 1)]
    assert not torch.equal(*seeds)


def test_with_few_labels_it_is_compared_with_frozen_features_without_test_images(outputs, tool):
    done = tool("finetune", *SHORT, "check_frozen=true")
    half = outputs / f"finetune_{RUN}" / "half"
    assert yaml.safe_load((half / "config.yaml").read_text())["development"] == 0.5
    assert not rows(half, "test/accuracy")
    tuned, images = (rows(half, f"validation/{name}")[6] for name in ("accuracy", "images"))
    line = next(line for line in done.stdout.splitlines() if line.startswith("few labels"))
    frozen, printed = (float(number) for number in re.findall(r"\(([\d.]+) %\)", line))
    assert printed == pytest.approx(100 * tuned, abs=0.05)
    correct = frozen / 100 * images
    assert correct == pytest.approx(round(correct), abs=0.001 * images)
    tool("finetune", *SHORT, "check_frozen=true", "name=many", "data.images=640")
    assert not (outputs / "many" / "half").exists()
    tool("finetune", *SHORT, *ONE_STEP, "check_frozen=true", "name=one", "subset.images=8")
    assert not (outputs / "one" / "half").exists()  # a class without an image in one half has no ridge regression


def test_with_few_labels_and_validation_images_there_is_no_second_run(outputs, tool, tmp_path):
    put_set(tmp_path / "images", 48, (32, 32), ("train", "val", "test"))
    done = tool("finetune", *SHORT, f"data={tmp_path}/images", "data.image_size=16", "check_frozen=true", "name=three")
    assert not (outputs / "three" / "half").exists()
    line = next(line for line in done.stdout.splitlines() if line.startswith("few labels"))
    tuned = 100 * rows(outputs / "three", "validation/accuracy")[6]
    assert float(re.findall(r"\(([\d.]+) %\)", line)[1]) == pytest.approx(tuned, abs=0.05)
    assert "16 validation images" in line
    for validation, runs_again in (("auto", False), ("null", True)):  # what the estimate of the time includes
        images = (f"data={tmp_path}/images", "data.image_size=16", f"data.validation={validation}")
        options = (f"outputs={outputs}", f"checkpoint={outputs / RUN}", *SHORT, "check_frozen=true", "name=a", *images)
        config = cli.complete(composed(*options, tool="finetune").config)
        session = Session(config.options, tmp_path / "session", stage=FINETUNE)
        cli.recipes(config, session, 1.0)
        assert (session.compared_steps > 0) == runs_again


def test_random_weights_are_trained_for_the_time_of_both_stages(outputs, tool):
    def seconds(run: Path) -> float:
        return sum(rows(run, "seconds").values())

    tool("finetune", *SHORT, "compare=scratch", "seeds=1")
    folder = outputs / f"compare_{RUN}"
    before, after = seconds(outputs / RUN), seconds(folder / "pretrained_seed0")
    config = yaml.safe_load((folder / "scratch_seed0" / "config.yaml").read_text())
    assert config["recipe"]["steps"] == round(6 * (before + after) / after)
    assert config["recipe"]["warmup"] == 2  # as typed
    assert rows(folder / "scratch_seed0", "test/accuracy").keys() >= {config["recipe"]["steps"]}


def test_on_the_rendered_shapes_it_compares_with_random_weights(tool, tmp_path):
    tool("pretrain", *tiny_options("data.images="), "probes=[]")
    short = [
        *SHORT,
        "subset.images=20",
        "scratch_recipe={steps: 4, batch_size: 8, warmup: 2, evaluate_every: 2, save_every: 2}",
    ]
    tool("finetune", *short)
    folder = tmp_path / "outputs" / "compare_masked_patch_shapes"
    report = json.loads((folder / "comparison.json").read_text())
    assert report["seeds"] == [0]
    assert report["steps"] == {"pretrained": 6, "scratch": 4}
    labels = [yaml.safe_load((folder / f"{side}_seed0" / "config.yaml").read_text())["subset"]["images"]
              for side in report["steps"]]  # fmt: skip
    assert labels == [20] * 2
    tool("finetune", *SHORT, *ONE_STEP, "compare=null")
    assert (tmp_path / "outputs" / "finetune_masked_patch_shapes" / "step_00000001").is_dir()


@pytest.mark.slow
def test_a_study_can_be_extended_by_seeds_but_not_turned_into_another(outputs, tool):
    options = (*SHORT, "recipe.steps=3", "compare=scratch")
    tool("finetune", *options, "seeds=1")
    done = tool("finetune", *options, "seeds=2")
    assert done.stdout.count(" is finished (") == 2
    assert len(json.loads((outputs / f"compare_{RUN}" / "comparison.json").read_text())["seeds"]) == 2
    done = tool("finetune", *SHORT, f"name=compare_{RUN}", "recipe.steps=3", status=1)
    assert "compare=null: the run in" in done.stderr


def finetune(*options: str) -> None:
    """Run the command as a process of several."""
    find_command("finetune").call(options)


def test_two_processes_have_the_losses_and_the_accuracy_of_one(finetuned, outputs):
    assert start(finetune, 2, f"outputs={outputs}", *SHORT) == [0, 0]
    for key in ("train/loss", "test/loss", "test/accuracy", "test/accuracy_top5"):
        one, two = (rows(folder / f"finetune_{RUN}", key) for folder in (finetuned[0], outputs))
        assert one == pytest.approx(two, rel=1e-4)


def test_the_sweep_chooses_on_the_development_split_alone(outputs, tool):
    tool("finetune", *SHORT, "sweep=table4", "table4.learning_rates=[0.1,1e-9]", "table4.development=0.25")
    folder = outputs / f"table4_{RUN}"
    report = json.loads((folder / "sweep.json").read_text())
    assert set(report["development"]) == {"0.1", "1e-09"}
    counts = [counted(folder / run) for run in ("lr_0.1", "lr_1e-09", "chosen")]
    assert counts == [16, 16, 32]  # of 64 training and 32 test images
    assert Run(folder).metrics["test/accuracy"] == report["test"]
    assert checkpoint_folder(folder).parent == folder / "chosen"


@pytest.mark.parametrize(
    ("command", "given", "size"),
    [("finetune", (), 16), ("evaluate", (), 16), ("finetune", ("data.image_size=24",), 24)],
)
def test_other_images_have_the_size_that_the_run_was_trained_at(outputs, tmp_path, command, given, size):
    data = composed(f"outputs={outputs}", f"data={tmp_path}", *given, tool=command)["data"]
    assert data["image_size"] == data["view"]["size"] == size


def test_choices_are_on_the_validation_folder_and_the_figure_is_on_the_test_folder(outputs, tool, tmp_path):
    parts = {"train": 12, "validation": 4, "test": 7}
    for part, count in parts.items():
        for shade, name in enumerate(("dark", "pale")):
            (tmp_path / "set" / part / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (16, 16), (90 * shade + number, 0, len(part)))
                image.save(tmp_path / "set" / part / name / f"{number}.png")
    own = (*SHORT, "data=folder", "data.root=set", "data.image_size=16", "recipe.steps=3", "recipe.evaluate_every=2")
    tool("finetune", *own, "sweep=table4", "table4.learning_rates=[0.1,1e-9]", "name=swept")
    for run, measured in (("lr_0.1", "validation"), ("lr_1e-09", "validation"), ("chosen", "test")):
        folder = outputs / "swept" / run
        steps = [list(rows(folder, f"{part}/accuracy")) for part in ("validation", "test")]
        assert steps == [[0, 2, 3], [3] if measured == "test" else []]
        assert counted(folder) == 2 * parts[measured]
    assert json.loads((outputs / "swept" / "sweep.json").read_text())["measured_on"] == "test"

    # With a validation folder alone it is reported on, and called so in every line.
    shutil.rmtree(tmp_path / "set" / "test")
    told = tool("finetune", *own, "recipe.evaluate_every=3", "name=alone").stdout
    assert "test" not in told.replace(str(tmp_path), "")
    assert '"test/' not in (outputs / "alone" / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_supervised_pretraining_is_fine_tuned_like_any_other(tool, tmp_path):
    tool(
        "pretrain",
        *tiny_options("target"),
        "objective=supervised",
        "subset.part=[0,0.5]",
    )
    done = tool("finetune", *SHORT, "subset.part=[0.5,1]")
    assert "supervised_shapes" in done.stdout.splitlines()[0]
    assert "not loaded: head" in done.stdout
    teacher = tmp_path / "outputs" / "supervised_shapes"
    done = tool("pretrain", *tiny_options("target"), "objective=supervised",
                "distillation=deit", f"teacher={teacher / 'step_00000006'}", "name=student")  # fmt: skip
    student = manifest.read_manifest(tmp_path / "outputs" / "student" / "step_00000006")
    assert student["encoder"]["distillation_token"] is True
    assert not any("teacher" in name for name in states(tmp_path / "outputs" / "student")["model"])
    done = tool("finetune", *SHORT, f"checkpoint={tmp_path}/outputs/student", "name=of_student")
    assert "not loaded: distilled_head, head" in done.stdout
    short = (option for option in SHORT if option != "check_frozen=false")
    tool("pretrain", *short, f"checkpoint={tmp_path}/outputs/student", "objective=supervised", "distillation=deit",
         f"teacher={teacher}", "name=longer")  # fmt: skip
    longer = tmp_path / "outputs" / "longer" / "step_00000006"
    assert manifest.read_manifest(longer)["encoder"]["distillation_token"] is True
    assert any(name.startswith("distilled_head.") for name in states(longer)["model"])


@pytest.mark.parametrize("has_token", [False, True])
def test_a_second_head_learns_the_teachers_predictions_if_the_weights_have_its_token(tmp_path, capsys, has_token):
    outputs = Path(__file__).parents[1] / "fixtures" / "outputs"
    taught = {"distillation": "deit", "teacher": outputs / "finetune_masked_patch_shapes"}
    recipe = {"batch_size": 8, "steps": 1, "warmup": 0, "precision": "32-true", "launch.accelerator": "cpu"}
    images = {"data": "shapes", "data.images": 16, "data.held_out_images": 8, "data.image_size": 16}
    options = {**taught, **recipe, **images, "figures": "none", "outputs": tmp_path}
    start = outputs / RUN
    if has_token:
        vit = {"encoder.patch_size": 4, "encoder.width": 16, "encoder.depth": 1, "encoder.heads": 2}
        start = ssvit.pretrain(**vit, **options, objective="supervised", probes=[], evaluator=[], verbose=False)
    run = ssvit.finetune(start, **options)
    assert any(name.startswith("distilled_head.") for name in states(run.folder)["model"]) is has_token
    assert any(line.startswith("distillation=deit: ") for line in capsys.readouterr().out.splitlines()) is not has_token


def test_predict_names_the_classes_of_pictures(finetuned, tool, tmp_path):
    shutil.copytree(finetuned[0], tmp_path / "outputs")
    (tmp_path / "album" / "deep").mkdir(parents=True)
    Image.new("RGB", (40, 20), (200, 30, 30)).save(tmp_path / "album" / "deep" / "red.png")
    Image.new("L", (16, 16)).save(tmp_path / "one = 1.png")
    done = tool("predict", "album", "one = 1.png", "output=answers.json", "top=2", "precision=32")
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert [Path(answer["image"]).name for answer in answers] == ["red.png", "one = 1.png"]
    classifier = tiny.classifier(tmp_path / "outputs" / f"finetune_{RUN}" / "step_00000006")
    for answer in answers:
        assert len(answer["classes"]) == 2
        assert answer["classes"][0]["class"] in classifier.classes
    probabilities = classifier.logits(torch.zeros(1, 3, 16, 16, dtype=torch.uint8)).softmax(-1)[0]
    assert answers[1]["classes"][0]["probability"] == pytest.approx(probabilities.max().item(), abs=1e-5)
    (tmp_path / "bad.jpg").write_text("no image")
    done = tool("predict", "one = 1.png", "bad.jpg", status=1)
    assert "one = 1.png: " in done.stdout
    assert "bad.jpg: " in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("ssvit: 1 of 2 ")


def test_how_evaluation_fits_images_travels_with_the_checkpoint(outputs, tool, tmp_path):
    tool("finetune", *SHORT, *ONE_STEP, "data.view.fit=squash")
    path = outputs / f"finetune_{RUN}" / "step_00000001"
    assert manifest.read_manifest(path)["view"] == {"size": 16, "resize": None, "fit": "squash"}
    wide = torch.zeros(3, 20, 60, dtype=torch.uint8)
    wide[0, :, :20], wide[2, :, 40:] = 255, 255  # what a crop of the middle would not show
    write_png(wide, str(tmp_path / "wide.png"))
    tool("predict", "wide.png", "output=answers.json", "top=10", "precision=32")
    (answer,) = json.loads((tmp_path / "answers.json").read_text())
    classifier = tiny.classifier(path)
    with torch.no_grad():
        whole = classifier.logits(tvf.resize(wide, [16, 16], antialias=True)[None]).softmax(-1)[0]
        middle = classifier.logits(tvf.center_crop(wide, [16, 16])[None]).softmax(-1)[0]
    found = torch.tensor([one["probability"] for one in answer["classes"]])
    expected = whole.topk(len(found)).values
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (found - middle.topk(len(found)).values).abs().max() > 1e-4


@pytest.mark.parametrize(("options", "resize"), [((), 24), (("data.image_size=32",), 48), (("data.fit=pad",), None)])
def test_the_size_before_the_crop_is_that_of_the_checkpoint(outputs, tool, tmp_path, options, resize):
    tool("finetune", *SHORT, *ONE_STEP, "data.view.resize=24", "name=resized")
    for command in ("finetune", "evaluate"):
        given = f"outputs={outputs}", f"checkpoint={outputs}/resized", f"data={tmp_path}", *options
        assert composed(*given, tool=command)["data"]["view"]["resize"] == resize


def test_parts_are_trained_and_every_tool_reads_what_they_left(outputs, tool, tmp_path):
    """LoRA with balanced weights: the checkpoint has the small matrices, and all that loads it has them merged."""
    options = ("objective.trained=head", "objective.lora={rank: 2, alpha: 4}", "objective.class_weights=balanced",
               "recipe.lr=0.01", "name=adapted")  # fmt: skip
    tool("finetune", *SHORT, *options)
    run = outputs / "adapted"
    before, after = states(outputs / RUN)["model"], states(run)["model"]
    part = ".parametrizations.weight."
    assert sum(part in name for name in after) == 2 * 2 * 3
    small = 4 * 2 * (16 + 48 + 16 + 16) // 2  # two layers, A and B of qkv and out, of rank 2 and width 16
    assert sum(v.numel() for name, v in after.items() if part in name and not name.endswith("original")) == small
    for name, value in before.items():
        if name.startswith("encoder."):
            frozen = name if name in after else f"{name.removesuffix('.weight')}{part}original"
            assert torch.equal(after[frozen], value)
    f1, accuracy = (rows(run, f"test/{name}")[6] for name in ("macro_f1", "accuracy_per_class"))
    assert 0 <= f1 <= 2 * accuracy
    assert "is finished (6 steps)" in tool("finetune", *SHORT, *options).stdout
    line = one_line(tool("finetune", *SHORT, *options[3:], status=1))
    assert "objective." in line
    assert "the run in" in line

    merged, plain = (tiny.loaded(path) for path in (run, outputs / RUN))
    weights = [encoder.blocks[0].attention.qkv.weight for encoder in (merged, plain)]
    assert not torch.equal(*weights)
    assert torch.linalg.matrix_rank((weights[0] - weights[1]).double(), rtol=1e-3) == 2
    tool("export", f"checkpoint={run}", "format=timm", "output=exported")
    exported = tiny.loaded(tmp_path / "exported" / "model.safetensors", heads=2)
    torch.testing.assert_close(exported.blocks[0].attention.qkv.weight, weights[0])
    classifier = tiny.classifier(run)
    torch.testing.assert_close(classifier.encoder.blocks[0].attention.qkv.weight, weights[0])
    tool("evaluate", f"checkpoint={run}", "probes=[knn]", "probes.knn.k=3", "features.layer=last", "baselines=false",
         "figures=none")  # fmt: skip
