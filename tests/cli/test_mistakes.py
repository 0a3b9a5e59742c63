"""A mistake in a command is one line that names the option and its value, printed before torch is loaded."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command import LIMIT
from PIL import Image

from ssvit.cli import find_command
from ssvit.errors import Failure

LONG = "a" * 5000
CLASSIFIER = Path(__file__).parents[1] / "fixtures" / "outputs" / "finetune_masked_patch_shapes"
BANDS = (
    "pretrain data=folder data.root=few recipe.batch_size=4 data.image_size=16 encoder.patch_size=4 data.channels=4 "
    "data.range=[0,9] data.std=0.5"
)
RUN = "outputs/masked_patch_shapes"
START = f"pretrain recipe.batch_size=8 checkpoint={RUN}"
CACHED = "pretrain objective=distill teacher={classifier} objective.cached=true objective.features=pooled"
# A command and its options. The line starts with the last of them, or with what stands after " -> "; it contains
# each part after " … " later. The commands run in a folder with the newest finished run `outputs/masked_patch_shapes`.
MISTAKES = (
    "pretrain recipe.lrr=1 -> recipe.lrr: … recipe.lr",
    "pretrain recipe.lr=-0.1",
    "pretrain --dry-run recipe.steps=0",
    "pretrain --help objective=no -> objective=no: … classify",
    "predict --dry-run -> --dry-run: ",
    "benchmark data=shapes rounds=0",
    "benchmark data=shapes image_sizes=[16,32]",
    "benchmark data=shapes batch_sizes=[0]",
    "benchmark data=shapes batch_sizes=[1000000] -> recipe.batch_size=1000000",
    "benchmark data=shapes precisions=[fp8]",
    "benchmark data=shapes output=no/folder",
    "pretrain evaluators.held_out.images=-1",
    "pretrain 'evaluators={held_out: 3}' -> evaluators={held_out: 3",
    "pretrain 'evaluators={foo: {images: 1}}' -> evaluators.foo: ",
    "pretrain objective.masking=null",
    "pretrain hydra=1 -> hydra: ",
    "pretrain --config-dir files experiment=syntax -> {files}/experiment/syntax.yaml, line 4: ",
    "pretrain --config-dir files experiment=encoding -> {files}: ",
    "pretrain --config-dir files experiment=defaults -> {files}: … experiment/defaults",
    "pretrain --config-dir files experiment=group -> name={gruop}: ",
    "pretrain --config-dir files experiment=number -> recipe.2=3: ",
    "pretrain --config-dir files experiment=header -> experiment=header: … @package",
    "pretrain probes=5",
    "pretrain probing.every=0",
    "pretrain probing.train_images=0",
    "pretrain probes.knn.k=0",
    "pretrain probes.ridge.shots=some",
    "pretrain -m encoder=[1],small",
    "pretrain -m encoder=range(1,3)",
    "pretrain -m data=/a,/b",
    "pretrain -m data=cifar10,few",
    "pretrain -m objective=maee,simclr",
    "pretrain -m probes=[knn],[kn]",
    "pretrain encoder=null",
    "pretrain data=null",
    "pretrain recipe=sgd",
    "pretrain launch=null",
    "pretrain data.view=5",
    "pretrain name=null",
    "pretrain name=a/b",
    f"pretrain name={LONG} -> name={LONG[:200]}…",
    "pretrain outputs=null",
    "pretrain objective=telepathy",
    "pretrain experiment=telepathy",
    "pretrain experiment=finetune_shapes -> objective.hidden=null: … experiment=finetune_shapes",
    "pretrain objective=mae target=hog",
    "pretrain encoder.patch_size=64",
    "pretrain encoder.stem.width=8",
    "pretrain data.image_size=[32,30] -> encoder.patch_size=4",
    "pretrain 'objective.masking={_target_: builtins.print}'",
    "pretrain data=folder -> data.root",
    "pretrain data=folder data.root=/no/such/place",
    "pretrain data=cifar10 data.root=/no/such/place",
    "pretrain data=folder data.root=empty",
    "pretrain data=folder data.root=few encoder.patch_size=16 -> recipe.batch_size=32",
    "pretrain 'data=~/no such' -> data={home}/no such",
    "pretrain data=shapes data.seed=-1",
    "pretrain objective=supervised distillation=deit teacher=/no/where",
    f"evaluate checkpoint={RUN} probes=[ridge,knn] report=false",
    "cost data=shapes launch.devices=2 launch.accelerator=cpu -> launch.devices=2: ",
    "cost data=shapes launch.num_nodes=2",
    "pretrain objective=simclr recipe.batch_size=1",
    "pretrain objective=simclr recipe.accumulate=4 recipe.batch_size=4",
    "pretrian -> pretrian: … pretrain",
    "pretrain empty -> empty: … data=empty",
    "pretrain no/such -> no/such: … data=no/such",
    "pretrain --data empty -> --data: … data=empty",
    "pretrain --recipe.batch-size 8 -> --recipe.batch-size: … recipe.batch_size=8",
    "predict --checkpoint empty a.png -> --checkpoint: … checkpoint=empty",
    "retrieve action=index store=x patch=3,4 -> patch=[3,4]: ",
    "pack -> output: ",
    "pack output=x -> data=null",
    "pack data=shapes output=x/y",
    "pack output=x data=shapes size=0",
    "pack output=x data=shapes quality=101",
    "pack output=x data=few data.channels=5 size=8 -> size=8",
    "pack output=x data=shapes workers=0",
    "predict a.png confidence=2",
    "predict a.png per_class=0",
    "pretrain data=folder data.root=few data.normalization=none.yaml",
    f"{BANDS} data.mean=[0.1,0.2]",
    f"{BANDS} data.mean=0.5 encoder.channels=5",
    f"{BANDS} data.mean=0.5 data.shown=[1,2,4]",
    f"{BANDS} data.mean=0.5 data.augment.jitter=0.5",
    f"{BANDS} data.mean=0.5 target=mean_color target.bits=5",
    "embed checkpoint=outputs/masked_patch_shapes index=hnsw",
    "pretrain data=shapes index=hnsw",
    "pretrain steps",
    "pretrain steps=3 -> steps: … recipe.steps",
    "pretrain recipe.image_size=16 -> recipe.image_size: … data.image_size",
    "pretrain subset=[0,1]",
    "pretrain ++subset=[0,1] -> subset=[0,1]",
    "pretrain -m recipe.lr=1e-3,2e-3 subset=[0,1]",
    "pretrain evaluators=[1]",
    "pretrain objective.masking=[0.5]",
    "pretrain encoder=[1]",
    "pretrain encoder=1e3",
    "pretrain 'data=[{a: 1}]'",
    "pretrain logger=[[a]]",
    "pretrain logger=[tensorboard,abc] -> logger=abc: ",
    "pretrain data.source._target_=os.mkdir",
    "pretrain 'probes=[a=b]' -> probes=a=b: ",
    "pretrain probes=[[knn] -> probes=[[knn]: ",
    "pretrain \"recipe.steps='3'\"",
    "pretrain ~recipe",
    # Options that contradict each other.
    "pretrain recipe.batch_size=9000",
    "pretrain subset.images=9000",
    "pretrain subset.images=16 -> recipe.batch_size=32",
    "pretrain development=validation",
    "pretrain ++objective.masking.depth=3 -> objective.masking.depth=3",
    "pretrain encoder=r50_vit_b16 data.image_size=224 encoder.patch_size=8",
    "pretrain encoder.channels=1",
    "pretrain target=color_grid target.grid=3",
    "pretrain target=codebook target.window=98",
    "pretrain target=codebook target.clusters=8192 -> target.images=2048",
    "pretrain target=codebook target.checkpoint={classifier} target.layer=9",
    "pretrain target=codebook target.checkpoint={classifier} target.layer=1 encoder.patch_size=8 -> target.checkpoint",
    "pretrain target=codebook target.checkpoint={classifier} target.layer=1 data=folder data.root=few "
    "data.image_size=32 encoder.patch_size=4 recipe.batch_size=4 data.range=[0,9] data.std=0.5 -> target.checkpoint … "
    "data.range",
    "pretrain data.augment.size=30 -> data.augment.size=[30,30]",
    "pretrain data.augment.size=48 -> data.augment.size=[48,48]",
    "pretrain objective=simclr objective.keep=0.5 data.augment.size=48 -> data.augment.size=[48,48]",
    "pretrain objective=dino recipe.ema=0.99",
    "pretrain objective=simclr data.augment.flip=2",
    "pretrain objective=simclr augment@data.augment=multi_crop_small -> data.augment.local_views=4",
    "pretrain objective=dino augment@data.augment=multi_crop_small data.augment.local_size=18 -> data.augment.local",
    "pretrain data.fit=border -> data.view.fit=border",
    "pretrain objective=supervised objective.trained=9",
    "pretrain objective=supervised distillation=deit teacher={classifier} objective.distillation.teacher.image_size=17",
    "pretrain objective=distill -> teacher",
    "pretrain objective=mae encoder.attention=axial -> objective.masked=0.75",
    "pretrain objective=distill teacher={classifier} objective.teacher.image_size=17",
    "pretrain objective=dino data.augment.local_size=10 -> data.augment.local_size=[10,10]",
    "pretrain objective=simclr augment@data.augment=inception_crop -> data.augment=",
    "pretrain objective=simclr recipe.batch_size=8 recipe.repeats=2",
    "pretrain objective=diet augment@data.augment=two_crops -> data.augment=",
    "pretrain objective=diet_cp recipe.seed=1 -> checkpoint=",
    "pretrain objective=distill teacher=/no/where",
    "pretrain objective=distill teacher={classifier} objective.cached=true -> objective.features=",
    f"{CACHED} objective.mixup=true",
    "pretrain objective=mae continuation=safe -> checkpoint=",
    "pretrain objective=simclr evaluators.held_out.seed=-1",
    # From existing weights.
    "pretrain checkpoint=/no/where",
    "pretrain checkpoint=newest",
    "pretrain checkpoint= -> checkpoint=: ",
    "pretrain objective=contrastive_tuning -> checkpoint=null: ",
    "pretrain preset=auto",
    "pretrain preset=best",
    f"{START} encoder=ti",
    f"{START} encoder.width=64",
    f"{START} data.image_size=18",
    f"{START} objective=mae data.image_size=4 -> objective.masked=0.75: ",
    f"{START} continuation=safe continuation.trained=3",
    f"{START} continuation=full 'continuation.lora={{rank: 2, alpha: 2}}' -> continuation.trained=all: ",
    f"{START} continuation=safe objective=supervised -> continuation=…: ",
    f"{START} continuation=safe objective=contrastive_tuning objective.queue=32 -> continuation=…: ",
    f"{START} objective=contrastive_tuning objective.queue=64 -> objective.queue=64: ",
    f"{START} objective=contrastive_tuning objective.trained=3",
    f"{START} objective=contrastive_tuning objective.queue=7 recipe.accumulate=2 -> objective.queue=7",
    f"{START} objective=contrastive_tuning data.augment.local_views=1",
    f"{START} forgetting=nowhere",
    "pretrain forgetting=outputs",
    f"{START} objective=supervised distillation=deit teacher={RUN} -> checkpoint={RUN}: ",
    "finetune outputs=empty -> checkpoint=newest: … empty",
    "finetune checkpoint=/no/where",
    "finetune encoder=ti",
    "finetune encoder.path=a",
    "finetune encoder.width=64",
    "finetune encoder.resize=zoom",
    "finetune data.image_size=18",
    "finetune experiment=table4_vtab -> You must specify 'data'",
    "finetune compare=scratch sweep=table4",
    "finetune compare=nothing",
    "finetune compare=scratch evaluators.test=null",
    "finetune sweep=table4 evaluators.test=null",
    "finetune sweep=table5",
    "finetune compare=scratch seeds=0",
    "finetune encoder=small data=shapes compare=scratch checkpoint=scratch",
    "finetune sweep=table4 development=0.1",
    "finetune sweep=table4 table4.learning_rates=[]",
    "finetune sweep=table4 table4.development=0",
    "finetune compare=scratch scratch_recipe=[steps=3]",
    "finetune compare=scratch 'scratch_recipe={step: 3}' -> scratch_recipe.step=3",
    "finetune compare=scratch 'scratch_recipe={steps: 2}' -> scratch_recipe.warmup=",
    "finetune subset.part=[0.5,0.2]",
    "finetune recipe.batch_size=8 objective.trained=3",
    "finetune recipe=lion",
    "finetune lora={rank:4} -> lora: … objective.lora",
    "predict nothing.png -> images=nothing.png",
    "predict -> images=",
    "predict images=null",
    "predict few output=/no/where/a.json",
    "predict few 'checkpoint=\x1b[31mred\x07' -> checkpoint=\\x1b[31mred\\x07",
    "evaluate features=null",
    "evaluate probes=null",
    "evaluate probes.knn.k=[0]",
    "knn checkpoint=/no/where",
    "knn checkpoint=scratch",
    "knn encoder=null",
    "knn features.layer=3",
    "few-shot features.pooling=max",
    "few-shot output=/no/where/a.json",
    "few-shot data.image_size=18",
    "linear-probe sgd.epochs=0",
    "linear-probe method=svm",
    "evaluate probes=[[knn]]",
    "knn features=[last]",
    "retrieve -> action: ",
    "retrieve store=empty few action=find",
    "retrieve action=query store=empty -> images=: ",
    "retrieve action=query store=empty nothing.png -> images=nothing.png: ",
    "retrieve action=query store=empty trap -> images=trap: ",
    "retrieve action=query few store=none",
    "retrieve action=query few -> store: ",
    "retrieve action=index store=empty data=cifar10 -> data.root: ",
    "retrieve action=index store=empty data=shapes split=all",
    "retrieve action=query store=empty few k=0",
    "retrieve action=query store=empty few index=tree",
    "retrieve action=query store=empty few index=ivf index.links=3 -> index.links: ",
    "retrieve action=query store=empty few sheet=no/where.png",
    "retrieve action=index store=new few sheet=found.png",
    "retrieve action=remove store=empty few output=found.json",
    "retrieve action=query store=empty few output=same sheet=same",
    "retrieve action=remove store=empty '' -> images=",
    "retrieve action=index store=new few index=hnsw -> index=",
    "retrieve action=query store=empty few features.layer=3",
    "retrieve action=query store=empty few features.layer=all",
    "retrieve action=query store=empty few checkpoint=none",
    "embed few output=file.csv",
    "embed output=file.npz -> images=: ",
    "embed few output=file.npz split=test",
    "embed few output=file.npz anomaly=empty sheet=file.npz",
    "compare budget=soon",
    "compare budget=0min",
    "compare objectives=[]",
    "compare objectives=[mae,mae]",
    "compare objectives=[mae,distill] -> teacher=null",
    "compare objectives=[nothing] -> objectives=nothing",
    "compare seeds=0",
    "compare evaluate=knn",
    "compare encoder.heads=5",
    "compare finetune=[recipe.stepz=5] -> recipe.stepz: … recipe.steps",
    "compare finetune=[recipe.steps=abc] -> recipe.steps=abc",
    "compare evaluate=[test_images=-1] -> test_images=-1",
    "compare data.images=4000 -> finetune=subset.images=5000",
    "compare data.images=4000 finetune=[subset.images=4_001] -> finetune=subset.images=4_001",
    "scaling width=[65] -> width=65",
    "scaling images=[0]",
    "scaling images=[500,8193,null] -> images=8193",
    "scaling depth=6",
    "scaling evaluate=[train_imagez=4] -> train_imagez: … train_images",
    "scaling patch=[5] -> patch=5",
    "scaling objectives=[codebook] -> objectives=codebook",
    "scaling encoders=[resnet10tt] -> encoders=resnet10tt",
    "scaling encoders=resnet10t",
    "scaling encoder.mlp_width=64",
    "scaling encoder.depth=2",
    "scaling encoder.patch_size=8",
    "scaling \"pretrain=['recipe.steps=9']\" -> recipe.steps=9",
    "visualize images=null",
    "visualize /no/picture.png -> images=/no/picture.png",
    "visualize encoder=small data=shapes checkpoint=scratch",
    "visualize layer=3",
    "visualize layer=first",
    "visualize output=file.txt",
    "visualize device=tpu",
    "visualize count=0",
    "visualize batch_size=0",
    "visualize pooling=max",
    "visualize data.image_size=18",
    "inspect against=resnet10tt",
    "inspect against=[small,small]",
    "inspect against=[few,./few]",
    "inspect against=[few] -> against.few.",
    "inspect against=[small] against.small.patch_size=5",
    "inspect patch_size=3",
    "inspect patch_size=16",
    "inspect batch_size=4",
    "inspect count=3",
    "inspect output=file.txt",
)
# Files of --config-dir.
FILES = {
    "syntax": b"# @package _global_\nrecipe: [\n  lr: 3\n",
    "encoding": b"\xff\xfe",
    "defaults": b"# @package _global_\ndefaults: 3\n",
    "group": b'# @package _global_\nname: "{gruop}"\n',
    "number": b"# @package _global_\nrecipe: {2: 3}\n",
    "header": b"recipe: {lr: 1}\n",
}
# Run each command in one process, in which torch cannot be imported; print its exit status, stdout and stderr.
RUN = """
import contextlib, forked, io, json, sys
from ssvit.__main__ import main
forked.collect_rarely()
for line in sys.stdin:
    printed = io.StringIO(), io.StringIO()
    sys.argv, status = ["ssvit", *json.loads(line)], 0
    with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[1]):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, *(text.getvalue() for text in printed)]))
"""


@pytest.fixture(scope="module")
def results(pretrained, tmp_path_factory):
    """The exit status, stdout and stderr of each command, by the command."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "outputs").symlink_to(pretrained)
    (folder / "empty").mkdir()
    (folder / "few").mkdir()
    for number in range(5):
        Image.new("RGB", (24, 20), (number, 0, 0)).save(folder / "few" / f"{number}.png")
    (folder / "file.txt").touch()
    (folder / "files" / "experiment").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / "files" / "experiment" / f"{name}.yaml").write_bytes(text)
    (folder / "trap" / "torch").mkdir(parents=True)
    (folder / "trap" / "torch" / "__init__.py").write_text("raise SystemExit('torch was imported')")
    typed = (mistake.partition(" -> ")[0].replace("{classifier}", str(CLASSIFIER)) for mistake in MISTAKES)
    commands = [shlex.split(command) for command in typed]
    done = subprocess.run(
        [sys.executable, "-c", RUN], input="\n".join(map(json.dumps, commands)), capture_output=True, text=True,
        cwd=folder, timeout=LIMIT, env={**os.environ, "PYTHONPATH": f"{folder / 'trap'}:{os.environ['PYTHONPATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {"folder": folder, **dict(zip(MISTAKES, map(json.loads, done.stdout.splitlines()), strict=True))}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[:60])
def test_a_mistake_is_one_line_before_torch_is_loaded(results, mistake):
    status, stdout, stderr = results[mistake]
    command, _, start = mistake.partition(" -> ")
    assert (status, stdout) == (2, ""), stderr
    assert stderr.count("\n") == 1
    expected = (start or shlex.split(command)[-1]).replace("{home}", str(Path.home()))
    expected = expected.replace("{files}", str(results["folder"] / "files"))
    first, *others = f"ssvit: {expected}".split(" … ")
    assert stderr.startswith(first)
    assert all(part in stderr.removeprefix(first) for part in others)


def test_a_mistake_ends_the_process_of_a_command(tool, no_torch):
    done = tool("pretrain", "recipe.lr=-0.1", status=2, PYTHONPATH=no_torch)
    assert (done.stdout, done.stderr.startswith("ssvit: recipe.lr=-0.1: ")) == ("", True)


@pytest.mark.parametrize(("command", "option"), [("pretrain", "objective=supervised"), ("compare", "finetune=[]")])
def test_images_without_labels_are_reported_before_a_run_starts(tmp_path, command, option):
    for number in range(64):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    with pytest.raises(Failure, match=r"\blabels\b"):
        find_command(command).call(["data=folder", f"data.root={tmp_path}", f"outputs={tmp_path}/outputs", option])
    assert not (tmp_path / "outputs").exists()
