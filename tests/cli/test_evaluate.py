"""ssvit evaluate: all probes in one report, equal for one process and two; invalid options are reported at once."""

import html
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import prefork
import pytest
import torch
from command import TINY, tiny_options
from composing import composed, untrained
from images import put_grey, put_set
from peers import HEADS, of_timm
from PIL import Image
from plots import Page
from safetensors.torch import save_file
from sklearn.metrics import balanced_accuracy_score

from ssvit.cli import evaluate
from ssvit.config.declaration import Options
from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources.memory import Memory
from ssvit.errors import OptionError, UserError
from ssvit.evaluation.features import Pixels, extract
from ssvit.evaluation.probes.base import Probe, Result
from ssvit.evaluation.probes.options import Knn, Logistic, Ridge
from ssvit.evaluation.report.figures import confusion, neighbours
from ssvit.evaluation.report.scores import Split, score
from ssvit.retrieval.options import encoder_of

ROOT = Path(__file__).resolve().parents[2]
FEW = (
    "features.layer=[1,2]", "probes.ridge.l2=[1,1024]", "probes.few_shot_big_vision.shots=[1,2]",
    "probes.sgd=null", "probes.logistic.l2s=[0.1]", "probes.logistic.iterations=30", "probes.knn.k=[1,5]",
    "probes.retrieval.k=[1,5]", "probes.retrieval.queries=20",
)  # fmt: skip
OWN = ["layer1_patch_mean", "layer2_patch_mean"]
CROP = CenterCrop(size=4, resize=None).build()


def quiet(done, total):
    pass


def pixels(images, labels):
    return extract(Pixels(), Memory(images, labels, ("a", "b")), CROP, batch_size=7)


@pytest.fixture
def split():
    """Pixels of two noisy classes; three of the test images are training images."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 2
    images = torch.randint(0, 156, (60, 3, 4, 4), generator=generator) + 60 * labels[:, None, None, None]
    images[47:50] = images[[0, 5, 5]]
    images[11] = 0  # of no direction
    images = images.to(torch.uint8)
    return Split(("pixels",), pixels(images[:40], labels[:40]), pixels(images[40:], labels[40:]), CROP)


def test_feature_sets_show_their_images(split):
    train, test = split.train, split.test
    assert (test.picture(7), train.picture(5)) == ("image 7", "image 5")
    assert torch.equal(test.images(torch.tensor([9, 0]), CROP), test.source.in_memory[[9, 0]])


def test_predictions_are_what_the_accuracy_is_of(split):
    found = score("logistic", Logistic(l2s=[0.01, 1.0]).build(), split, quiet)
    guesses = found.predictions
    right = (guesses == split.test.labels).double().mean().item()
    assert found.values["pixels"][-1] == right
    figure = confusion(split, guesses, "logistic on pixels")
    assert figure.title.splitlines() == ["logistic on pixels", f"accuracy {100 * right:.1f} % on the test images"]
    expected = [[((guesses == j) & (split.test.labels == i)).sum().item() for j in (0, 1)] for i in (0, 1)]
    assert figure.counts.tolist() == expected
    assert [len(row) for row in neighbours(split, "pixels").rows] == [1 + 10] * 8


def test_the_balanced_accuracy_is_that_of_a_library_and_few_shots_are_compared_with_a_uniform_guess(split):
    rows = torch.cat([torch.arange(0, 20, 2), torch.tensor([1, 5, 9])])
    test = replace(split.test, values={"pixels": split.test.values["pixels"][rows]}, indices=split.test.indices[rows])
    unequal = replace(split, test=test)
    found = score("logistic", Logistic(l2s=[0.01, 1.0]).build(), unequal, quiet)
    labels = test.labels.numpy()
    assert found.balanced == {"": pytest.approx(balanced_accuracy_score(labels, found.predictions.numpy()))}
    assert 0 < found.balanced[""] != found.values["pixels"][-1]
    few = score("few_shot", Ridge(shots=2).build(), unequal, quiet)
    assert few.balanced[""] == pytest.approx(
        np.mean([few.per_image[""].numpy()[labels == label].mean() for label in (0, 1)])
    )
    assert (found.chance, few.chance) == (10 / 13, 0.5)
    one_class = replace(split, test=replace(test, values={"pixels": test.values["pixels"][:10]}, indices=rows[:10]))
    assert (one_class.chance(), one_class.chance(balanced=True)) == (1, 0.5)


def test_standardised_neighbours_are_named(split):
    plain, standardized = (Knn(k=5, standardize=is_scaled).build() for is_scaled in (False, True))
    titles = [score("knn", probe, split, quiet).title for probe in (plain, standardized)]
    assert titles == [plain.title, standardized.title]
    assert score("knn_standardized", standardized, split, quiet).title == standardized.title


class Fixed(Probe):
    """A probe that returns prepared results, one for each feature set in order."""

    name = "fixed"

    def __init__(self, *results):
        super().__init__(Options())
        self.results, self.choose = list(results), []

    def __call__(self, train, test, *, choose=False):
        self.choose.append(choose)
        accuracy, choice = self.results.pop(0)
        return Result(scores={"test": accuracy}, choice=choice)


def test_layers_are_chosen_without_test_labels_or_else_the_last(split):
    values = dict.fromkeys(("layer1", "layer2", "layer3", "pixels"), split.train.values["pixels"])
    layers = replace(split, feature_sets=("layer1", "layer2", "layer3"), train=replace(split.train, values=values),
                     test=replace(split.test, values=dict(values)))  # fmt: skip
    probe = Fixed((0.5, (3, -1.0)), (0.4, (3, -0.5)), (0.9, (2, -0.1)), (0.2, None))
    found = score("mine", probe, layers, quiet)
    assert (found.best, found.values["layer3"]) == ("layer2", (0.9,))
    assert probe.choose == [True, True, True, False]
    found = score("mine", Fixed(*((0.5, None) for _ in range(4))), replace(layers, part="validation"), quiet)
    assert (found.best, found.columns) == ("layer3", ("validation",))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write the folder of a tiny model's run without training it."""
    folder = tmp_path_factory.mktemp("outputs") / "run"
    untrained(folder, *TINY, "name=run")
    return folder


def measured(run, *options, tool="evaluate"):
    options = (f"outputs={run.parent}", f"checkpoint={run}", "launch.accelerator=cpu", *options)
    evaluate.run(composed(*options, tool=tool).config)


def test_one_report_of_all(run, capsys):
    measured(run, *FEW)
    folder = run / "evaluation"
    written = json.loads((folder / "report.json").read_text())
    assert [found["measure"] for found in written["measured"]] == [
        "ridge", "few_shot_big_vision", "logistic", "knn", "retrieval",
    ]  # fmt: skip
    for found in written["measured"]:
        assert list(found["values"]) == [*OWN, *(f"random_{name}" for name in OWN), "pixels"]
        assert found["best"] in OWN
    assert (written["metadata"]["train_images"], written["metadata"]["test_images"]) == (64, 32)
    pictures = Page((folder / "report.html").read_text()).all("img")
    assert [picture["src"].startswith("data:image/png") for picture in pictures] == [True] * 4
    assert written["headline"] in capsys.readouterr().out.replace("\n", " ")
    number, pooling = re.fullmatch(r"layer(\d+)_(\w+)", written["measured"][0]["best"]).groups()
    embed, retrieve, finetune = written["commands"]
    for command in (embed, retrieve):
        assert f"features.layer={number} features.pooling={pooling}" in command
    for command in (embed, retrieve, finetune):
        assert f"checkpoint={written['metadata']['checkpoint']}" in command
        assert command in html.unescape((folder / "report.html").read_text())


def test_development_images_are_training_images(run, tmp_path):
    measured(run, "probe@probes=[knn]", "probes.knn.k=[1]", "development=0.25", f"output={tmp_path}/report")
    metadata = json.loads((tmp_path / "report" / "report.json").read_text())["metadata"]
    assert (metadata["train_images"], metadata["test_images"], metadata["measured_on"]) == (48, 16, "validation")


def test_a_single_test_image_has_no_interval(run, tmp_path, capsys):
    measured(run, "probe@probes=[knn]", "probes.knn.k=[1]", "test_images=1", f"output={tmp_path}/report")
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (written["metadata"]["test_images"], written["standings"]) == (1, [])
    assert re.search(r"^run +[01.]+", capsys.readouterr().out, re.MULTILINE)
    (row,) = (row for row in Page((tmp_path / "report" / "report.html").read_text()).rows if row[0] == "1-NN")
    assert row[2] == "\N{EN DASH}"


def test_a_class_of_one_image_has_a_report(tmp_path, capsys):
    for number in range(25):
        put_grey(tmp_path / "set" / ("once" if number == 7 else "ab"[number % 2]) / f"{number:02}.png", 10 * number)
    held_out = {"few_shot.shots": 5, "knn.k": [3], "logistic.l2s": [0.1]}
    probes = ["probes=[few_shot,knn,logistic]", *(f"probes.{name}={value}" for name, value in held_out.items())]
    small = tiny_options("data", "launch", "target")
    run = untrained(tmp_path / "outputs" / "run", *small, f"data={tmp_path}/set", "data.image_size=16")
    evaluate.command.call([f"checkpoint={run}", f"data={tmp_path}/set", "data.held_out=0.9", *probes,
                           "figures=none",
                           f"outputs={tmp_path}", f"output={tmp_path}/report", "launch.accelerator=cpu"])  # fmt: skip
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["metadata"]["train_images"] == 4  # of 3, and the only image of a class
    assert "shots=5" in capsys.readouterr().out


def test_the_commands_of_a_report_are_complete(tmp_path, tool, monkeypatch):
    """They write, store and fine-tune the chosen features of the images measured on, of the run or as typed."""
    for name, side in (("it's {a}, b", 20), ("other", 16)):
        for place in range(24):
            path = tmp_path / name / "ab"[place % 2] / f"{place}.ppm"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (side, side), 10 * place).save(path)
    small = tiny_options("data=", "data.images", "data.held", "target")
    images = f"data={tmp_path}/it's {{a}}, b"
    untrained(tmp_path / "outputs" / "run", images, *small)
    monkeypatch.chdir(tmp_path)
    probes = ["probes=[knn]", "probes.knn.k=[1]", "duplicates=false", "features.layer=1", "figures=none"]
    for number, own in enumerate(((), ("data=other",))):
        tool("evaluate", "checkpoint=outputs/run", *own, *probes)
        folder = tmp_path / "outputs" / "run" / "evaluation" / ("other" if own else "")
        written = json.loads((folder / "report.json").read_text())
        embed, retrieve, finetune = (
            [option for option in shlex.split(command) if "=" in option] for command in written["commands"]
        )
        assert "layer 1 of 2" in tool("embed", *embed, f"output={number}.npz").stdout
        assert "layer 1 of 2" in tool("retrieve", *retrieve, *["store=again"] * number).stdout
        names = np.load(tmp_path / f"{number}.npz")["names"]
        assert len(names) == 24
        assert all(f"/{('it' + chr(39) + 's {a}, b', 'other')[number]}/" in name for name in names.tolist())
        assert Path(composed(*finetune, tool="finetune").data.root).name in names[0]


def test_a_run_may_have_the_name_of_a_baseline(tmp_path):
    run = untrained(tmp_path / "pixels", *TINY)
    folder = evaluate.command.call([f"checkpoint={run}", f"outputs={tmp_path}", "probes=[ridge]", "figures=none"])
    (result,) = json.loads((folder / "report.json").read_text())["measured"]
    (file,) = (tmp_path / "measured").iterdir()
    found = {row["encoder"]: row["accuracy"] for row in json.loads(file.read_text())["results"]}
    baselines = {name: result["values"][result["chosen"][name]][-1] for name in ("random weights", "pixels")}
    assert found == {str(run): result["values"][result["best"]][-1], **baselines}


def test_probes_of_the_same_images_are_kept_together(split):
    other = replace(split, test=replace(split.test, values={}))  # such as the patches of the images
    assert other.has_images_of(split)
    fewer = replace(split.test, indices=split.test.indices[1:])
    assert not replace(split, test=fewer).has_images_of(split)


def test_each_data_set_has_a_report_of_its_own(tmp_path):
    for place in ("raw/set", "corrected/set"):
        put_set(tmp_path / place, 8, (20, 20))
    small = tiny_options("data", "launch", "target")
    run = untrained(tmp_path / "run", *small, f"data={tmp_path}/raw/set", "data.image_size=16")

    def written(*options):
        probe = ["probes=[knn]", "probes.knn.k=[1]", "duplicates=false", "baselines=false", "features.layer=last",
                 "figures=none"]  # fmt: skip
        return evaluate.command.call([f"checkpoint={run}", f"outputs={tmp_path}", *probe, *options])

    def reported(folder):
        return json.loads((folder / "report.json").read_text())["metadata"]["path"]

    home, corrected = run.parent / "evaluation", f"data={tmp_path}/corrected/set"
    assert written() == written(f"data={tmp_path}/raw/set") == home
    shapes = ["data=shapes", "data.images=8", "data.held_out_images=8"]
    assert [written(corrected), written(*shapes), written(corrected)] == [
        home / name for name in ("set", "shapes", "set")
    ]
    (tmp_path / "raw").rename(tmp_path / "new")
    other = written(f"data={tmp_path}/new/set")
    assert other.parent == home
    assert other not in (home / "set", home / "shapes")
    assert other == written(f"data={tmp_path}/new/set")
    roots = [reported(folder) for folder in (home, home / "set", home / "shapes", other)]
    assert roots == [f"{tmp_path}/raw/set", f"{tmp_path}/corrected/set", None, f"{tmp_path}/new/set"]


def test_two_processes_measure_what_one_does(run, tmp_path, capsys):
    options = ["features.layer=all", "k=[1,3]", "batch_size=24"]

    def own(name):
        return [*options, f"cache={tmp_path}/{name}", f"output={tmp_path}/{name}.json"]

    measured(run, *own("one"), tool="knn")
    two = (f"outputs={run.parent}", f"checkpoint={run}", *own("two"), "launch.accelerator=cpu", "launch.devices=2")
    done = prefork.run("knn", *two, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    # Torch 2.10 prints a line for each process, in pieces. Only a single process estimates its time, and bars show the
    # progress of evaluations that take longer than usual.
    others = re.compile(r"\[Gloo\]|estimated: |.*connected peer ranks|encoder, |$")
    one, two = (
        [line for line in text.splitlines() if not others.match(line)]
        for text in (capsys.readouterr().out, done.stdout)
    )
    assert one == two
    assert (tmp_path / "two.json").read_text() == (tmp_path / "one.json").read_text()
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert len(one) == 10
    assert one == two


def test_cached_features_are_those_of_the_pixel_format(tmp_path):
    for number in range(24):
        put_grey(tmp_path / "set" / "ab"[number % 2] / f"{number}.png", 10 * number)
    small = tiny_options("data", "launch", "target")
    images = ["data=folder", f"data.root={tmp_path}/set", "data.image_size=16", "data.mean=0.5", "data.std=0.5"]

    def reported(channels, *options):
        run = untrained(tmp_path / f"{channels}_{len(options)}", *small, *images, f"data.channels={channels}")
        probe = ["probes=[knn]", "probes.knn.k=[1]", "duplicates=false", "figures=none", f"output={tmp_path}/report"]
        evaluate.command.call([f"checkpoint={run}", f"data={tmp_path}/set", f"outputs={tmp_path}", *probe, *options])
        return json.loads((tmp_path / "report" / "report.json").read_text())["measured"]

    reported(3)
    assert reported(1) == reported(1, "cache=null")


def test_mistakes_name_the_option_of_the_probe(run):
    with pytest.raises(OptionError, match=r"^probes\.knn\.k=64: .*\b63\b"):
        measured(run, "probes.knn.k=[64]", "probes.few_shot_big_vision=null")
    with pytest.raises(OptionError, match=r"^probes=\[ridge,few_shot\]: "):  # of equal titles
        measured(run, "probes=[ridge,few_shot]", "probes.few_shot.shots=all", "probes.ridge.shots=all")
    names = ("ridge", "few_shot_big_vision", "sgd", "logistic", "knn", "retrieval")
    with pytest.raises(UserError, match=r"^probes="):
        measured(run, *(f"probes.{name}=null" for name in names))


def test_the_commands_of_a_report_have_its_image_size(tmp_path, tool):
    (tmp_path / "weights").mkdir()
    save_file(of_timm(img_size=96).state_dict(), tmp_path / "weights" / "model.safetensors")
    put_set(tmp_path / "set", 24, (20, 20))
    probes = ["probes=[knn]", "probes.knn.k=[1]", "duplicates=false", "baselines=false", "figures=none"]
    images = ["data=set", "data.image_size=48"]
    tool("evaluate", "checkpoint=weights", f"encoder.heads={HEADS}", *images, *probes, "output=report")
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["metadata"]["image_size"] == [48, 48]
    embed, retrieve, _ = (shlex.split(command)[2:] for command in written["commands"])
    tool("embed", *embed)
    tool("retrieve", *retrieve)
    for identity in (str(np.load(tmp_path / "features.npz")["encoder"]), encoder_of(tmp_path / "store")):
        assert " 48x48 " in identity


def test_a_refused_evaluation_leaves_nothing_behind(run, tmp_path):
    (tmp_path / "text.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    for output, options, named in (
        ("text.txt", [], f"^output={tmp_path}/text.txt: "),
        ("folder", ["report=false"], f"^output={tmp_path}/folder: "),
        ("report", ["probes.knn.k=[100000]"], "k=100000: "),
    ):
        with pytest.raises(UserError, match=named):
            measured(run, "probe@probes=[knn]", f"output={tmp_path}/{output}", *options)
    assert {path.name: path.is_dir() for path in tmp_path.iterdir()} == {"text.txt": False, "folder": True}
