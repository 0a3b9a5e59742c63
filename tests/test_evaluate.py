"""tools/evaluate.py: all measures in one report, the same by one process or two; mistakes are told at once."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from command import LIMIT, TINY
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file

from ssvit.checkpoints import checkpoint, manifest
from ssvit.checkpoints.configuration import Configuration
from ssvit.cli import evaluate, knn, pretrained
from ssvit.data.augment.crop import CenterCrop
from ssvit.data.memory import Memory
from ssvit.evaluation import pictures
from ssvit.evaluation.banks import Bank, Banks
from ssvit.evaluation.features import Pixels, extract
from ssvit.evaluation.measures import Knn, LinearProbe, Retrieval
from ssvit.options import OptionError, UserError

ROOT = Path(__file__).resolve().parent.parent
FEW = (
    "features.layer=[1,2]", "measures.few_shot_paper.l2=[1,1024]", "measures.few_shot_big_vision.shots=[1,2]",
    "measures.sgd=null", "measures.logistic.l2s=[0.1]", "measures.logistic.iterations=30", "measures.knn.k=[1,5]",
    "measures.retrieval.k=[1,5]", "measures.retrieval.queries=20",
)  # fmt: skip
OWN = ["layer1_patch_mean", "layer2_patch_mean"]
CROP = CenterCrop(size=4, resize=None)


def quiet(what, unit):
    return lambda done, total: None


def bank(images, labels):
    source = Memory(images, labels, ("a", "b"))
    return Bank.of([extract(Pixels(), source, CROP, batch_size=7)], source, CROP)


@pytest.fixture
def banks():
    """Pixels of two noisy classes; three of the test images are training images."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 2
    images = torch.randint(0, 156, (60, 3, 4, 4), generator=generator) + 60 * labels[:, None, None, None]
    images[47:50] = images[[0, 5, 5]]
    images[11] = 0  # of no direction
    images = images.to(torch.uint8)
    return Banks(("pixels",), ("a", "b"), bank(images[:40], labels[:40]), bank(images[40:], labels[40:]))


def test_copies_are_found_by_their_pixels(banks):
    assert banks.copies() == [(7, 0), (8, 5), (9, 5)]
    assert (banks.test.name(7), banks.train.name(5)) == ("image 7", "image 5")
    assert torch.equal(banks.test.images(torch.tensor([9, 0])), banks.test.source.in_memory[[9, 0]])
    with pytest.raises(UserError, match="the images have changed since features of them were kept"):
        Bank.of([banks.train, banks.test], banks.train.source, CROP)


def test_retrieval_is_that_of_a_plain_ranking(banks):
    found = Retrieval(k=[3, 1])(banks, quiet)
    near = torch.nn.functional.normalize(banks.train.values["pixels"].double(), dim=1)
    precisions, recalls = [], []
    for query, label in zip(banks.test.values["pixels"].double(), banks.test.labels, strict=True):
        right = banks.train.labels[(near @ query).argsort(descending=True)] == label
        hits = right.nonzero()[:, 0] + 1
        precisions.append((torch.arange(1, len(hits) + 1) / hits).mean())
        recalls.append(right[:3].any().double())
    values = dict(zip(found.columns, found.values["pixels"], strict=True))
    assert list(values) == ["recall@1", "recall@3", "precision@1", "precision@3", "mAP"]
    assert values["mAP"] == pytest.approx(torch.stack(precisions).mean().item())
    assert values["recall@3"] == pytest.approx(torch.stack(recalls).mean().item())
    assert Retrieval(k=[1], queries=6)(banks, quiet).numbers["pixels"]["queries"] == 6


def test_predictions_are_what_the_accuracy_is_of(banks):
    found = LinearProbe(method="logistic", l2s=[0.01, 1.0])(banks, quiet)
    guesses = torch.tensor(found.numbers["pixels"]["predictions"])
    right = (guesses == banks.test.labels).double().mean().item()
    assert found.values["pixels"][-1] == right
    figure = pictures.confusion(banks, found)
    shares = figure.axes[0].images[0].get_array()
    expected = [((guesses == j) & (banks.test.labels == i)).sum() / 10 for i in (0, 1) for j in (0, 1)]
    assert shares.flatten().tolist() == pytest.approx([share.item() for share in expected])
    sheet = pictures.neighbours(banks, "pixels")
    assert len(sheet.axes[0].images) == 8 * (1 + 10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Knn(protocol="dino", k=[40]), "k=40: must be below 40, the training images"),
        (lambda: Retrieval(k=[40]), "k=40: must be below 40, the training images"),
        (lambda: Retrieval(k=5), "k=5: must be a list of one or more"),
        (lambda: Retrieval(k=[1], queries=0), "queries=0: must be a whole number, 1 or more"),
        (lambda: LinearProbe(method="svm"), "method=svm: must be one of sgd, logistic"),
        (lambda: LinearProbe(method="sgd", epochs=0), "epochs=0: must be a whole number, 1 or more"),
    ],
)
def test_says_in_a_line_what_cannot_be(banks, make, message):
    with pytest.raises(OptionError, match=message):
        make().check(banks.train.labels, banks.test.labels, banks.classes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run of a tiny model leaves, without its training."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose("pretrain", [*TINY, "name=run"])
    folder = tmp_path_factory.mktemp("outputs") / "run"
    folder.mkdir()
    encoder = instantiate(config.encoder, _convert_="all")
    weights = {f"encoder.{name}": value for name, value in encoder.state_dict().items()}
    checkpoint.save(folder, 6, {"model": weights}, {"encoder": encoder.arguments, "stage": manifest.PRETRAIN})
    choices = {"data": "synthetic", "augment@data.augment": "inception_crop"}
    written = Configuration.of(OmegaConf.to_container(config, resolve=False), choices)
    (folder / "config.yaml").write_bytes(written.write())
    return folder


def measured(run, *options, tool=evaluate):
    options = (f"outputs={run.parent}", f"checkpoint={run}", "fabric.accelerator=cpu", *options)
    pretrained.offer(dict(option.split("=", 1) for option in options))
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        config = compose(tool.__name__.rpartition(".")[2], list(options))
    tool.run(config, OmegaConf.to_container(config, resolve=True))


class Page(HTMLParser):
    """The pictures of a page."""

    def __init__(self, text):
        super().__init__()
        self.pictures = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.pictures += tag == "img" and dict(attrs)["src"].startswith("data:image/png")


def test_one_report_of_all(run, capsys):
    measured(run, *FEW)
    folder = run / "evaluation"
    report = json.loads((folder / "report.json").read_text())
    assert [found["measure"] for found in report["measured"]] == [
        "few_shot_paper", "few_shot_big_vision", "logistic", "knn", "retrieval",
    ]  # fmt: skip
    for found in report["measured"]:
        assert list(found["values"]) == [*OWN, *(f"random_{name}" for name in OWN), "pixels"]
        assert found["best"] in OWN
    assert (report["facts"]["train_images"], report["facts"]["test_images"]) == (64, 32)
    assert Page((folder / "report.html").read_text()).pictures == 5
    printed = capsys.readouterr().out
    assert f"report: {folder / 'report.html'}" in printed
    assert report["headline"] in printed


def test_two_processes_measure_what_one_does(run, tmp_path, capsys):
    options = ["features.layer=all", "k=[1,3]", "batch_size=24"]

    def own(name):
        return [*options, f"cache={tmp_path}/{name}", f"output={tmp_path}/{name}.json"]

    measured(run, *own("one"), tool=knn)
    command = [sys.executable, str(ROOT / "tools" / "knn.py"), f"outputs={run.parent}", f"checkpoint={run}",
               *own("two"), "fabric.accelerator=cpu", "fabric.devices=2"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == capsys.readouterr().out
    assert (tmp_path / "two.json").read_text() == (tmp_path / "one.json").read_text()
    one, two = ({path.name: load_file(path) for path in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert len(one) == 10
    torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_mistakes_name_the_option_of_the_measure(run):
    with pytest.raises(OptionError, match=r"measures\.knn\.k=64: must be below 64, the training images"):
        measured(run, "measures.knn.k=[64]", "measures.few_shot_big_vision=null")
    with pytest.raises(OptionError, match=r"measures\.few_shot_big_vision\.shots=10: class 0 \(disc\) has 6 training"):
        measured(run)
    names = ("few_shot_paper", "few_shot_big_vision", "sgd", "logistic", "knn", "retrieval")
    with pytest.raises(OptionError, match="measures=: leave at least one"):
        measured(run, *(f"measures.{name}=null" for name in names))
