"""Images of several classes or none: tables of them, batches, the loss, what is measured, probes, and the commands."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, f1_score
from ssvit.evaluation.panels.multi_label import MultiLabelPredictions
from torch import Tensor

from ssvit.data.augment.crop import CenterCrop
from ssvit.data.batch import Batch
from ssvit.data.loader import Loader
from ssvit.data.sources import datasets, datasets_options
from ssvit.data.sources.base import class_text, subset
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.packing import pack
from ssvit.data.sources.packing_options import Pack
from ssvit.evaluation.features import Features
from ssvit.evaluation.neighbours import search
from ssvit.evaluation.panels import classification_options
from ssvit.evaluation.panels.classification import Classification
from ssvit.evaluation.precision import average_precisions, mean_average_precision, share_of_class
from ssvit.evaluation.probes import knn as knn_module
from ssvit.evaluation.probes import logistic, ridge, sgd
from ssvit.evaluation.probes import retrieval as retrieval_module
from ssvit.evaluation.probes.knn import Knn
from ssvit.evaluation.probes.logistic import Logistic
from ssvit.evaluation.probes.retrieval import Retrieval
from ssvit.evaluation.probes.ridge import FewShot
from ssvit.evaluation.probes.sgd import Sgd
from ssvit.exchange import huggingface
from ssvit.inference import Prediction
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify, balanced
from ssvit.options import OptionError, UserError

CLASSES = ("cat", "dog", "owl", "yak")
TAGS = ("cat|dog", "", "owl", "dog | cat|owl", "dog", "cat", "yak|dog", "owl|dog", "cat", "yak")


def marks(count: int, seed: int = 0, share: float = 0.35) -> Tensor:
    """(count, 4) bool."""
    return torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) < share


def table(folder: Path) -> Path:
    """A CSV file of ten images of their own greys, with tags in one column."""
    with open(folder / "t.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "tags", "split"])
        for i, tags in enumerate(TAGS):
            Image.new("RGB", (20, 16 + i), (i, 0, 0)).save(folder / f"{i}.png")
            rows.writerow([f"{i}.png", tags, "test" if i in (4, 7) else "train"])
    return folder / "t.csv"


def expected(*places: int) -> Tensor:
    return torch.tensor([[name in TAGS[i] for name in CLASSES] for i in places])


def test_tables_have_several_classes_in_a_cell(tmp_path: Path) -> None:
    path = str(table(tmp_path))
    data = datasets.csv(datasets_options.Csv(table=path, label="tags", separator="|"))
    assert data.classes == CLASSES
    assert data.train.labels.equal(expected(0, 1, 2, 3, 5, 6, 8, 9))
    assert data.test.labels.equal(expected(4, 7))
    assert class_text(data.train.labels[3], CLASSES) == "cat|dog|owl"


def test_wrong_tables_are_refused_in_one_line(tmp_path: Path) -> None:
    path = str(table(tmp_path))
    for options, words in (
        ({"label": "tags", "separator": ";"}, "separator=;: "),
        ({"label": None, "separator": "|"}, "separator=|: "),
    ):
        with pytest.raises(UserError, match=words.replace("|", r"\|")):
            datasets.csv(datasets_options.Csv(table=path, **options))
    Path(path).write_text("path,label,split\n0.png,a|b,train\n1.png,a,train\n2.png,c,test\n")
    with pytest.raises(UserError, match="the class c is not among the 2"):
        datasets.csv(datasets_options.Csv(table=path, separator="|"))


def test_parts_sets_and_batches_keep_the_rows(tmp_path: Path) -> None:
    source = datasets.csv(
        datasets_options.Csv(table=str(table(tmp_path)), label="tags", separator="|", split=None, held_out=0.1)
    ).train
    order = torch.tensor([3, 0, 2])
    assert source.take(order).labels.equal(source.labels[order])
    memory = Memory(torch.stack([CenterCrop(size=8)([source.read(i)])[0] for i in range(9)]), source.labels, CLASSES)
    for one in (source, memory):
        loader = Loader(source=one, transform=CenterCrop(size=8), seed=0, batch_size=4)
        for batch in loader.batches(0, 3):
            number = batch.images[:, 0, 0, 0].long()  # the red of an image is its number in the table
            assert batch.labels.dtype == torch.bool
            assert batch.labels.equal(expected(*number.tolist()))
    with pytest.raises(UserError, match="for 9 images and 4 classes"):
        Memory(memory.in_memory, source.labels[:, :3], CLASSES)


def test_a_balanced_subset_takes_the_classes_by_turns() -> None:
    labels = torch.zeros(400, 4, dtype=torch.bool)
    labels[:, 0] = True
    labels[::20, 1], labels[5::40, 2], labels[7, 3] = True, True, True
    labels[9::50] = False
    source = Memory(torch.zeros(400, 1, 2, 2, dtype=torch.uint8), labels, CLASSES)
    few = subset(source, images=31).labels
    assert (few.sum(0)[1:] >= torch.tensor([7, 7, 1])).all()
    assert (~few.any(1)).sum() >= 7


def test_shards_keep_several_classes(tmp_path: Path) -> None:
    data = datasets.csv(datasets_options.Csv(table=str(table(tmp_path)), label="tags", separator="|"))
    output = str(tmp_path / "shards")
    own = Pack(output=output, size=None, quality=90, shard_size=1, workers=1, overwrite=False)
    pack(data, tmp_path / "shards", own, lambda done, total: None)
    read = datasets.shards(datasets_options.Shards(root=str(tmp_path / "shards")))
    assert read.classes == CLASSES
    assert read.train.labels.equal(data.train.labels)
    assert read.test.labels.equal(data.test.labels)


def test_average_precision_is_that_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, scores = marks(60), torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    truth[:, 2] = False
    for values in (scores, scores.round(), torch.zeros(60, 4)):
        found = average_precisions(values, truth)
        assert found[2].isnan()
        for k in (0, 1, 3):
            assert found[k].item() == pytest.approx(average_precision_score(truth[:, k], values[:, k]))
        assert mean_average_precision(values, truth) == pytest.approx(found[[0, 1, 3]].mean().item())
    assert mean_average_precision(torch.zeros(60, 4), truth) == pytest.approx(share_of_class(truth))
    whole = average_precisions(scores, truth)
    monkeypatch.setattr("ssvit.evaluation.precision._HELD", 100)  # in parts
    assert average_precisions(scores, truth).nan_to_num().equal(whole.nan_to_num())


def test_figures_of_a_classifier_are_those_of_scikit_learn() -> None:
    truth, logits = marks(80), torch.randn(80, 4, generator=torch.Generator().manual_seed(2)).double()
    truth[:, 3] = False
    logits[0] = 20 * (~truth[0]).double() - 10  # all wrong
    predictions = MultiLabelPredictions(torch.arange(80), truth, logits)
    found = predictions.metrics(predictions.by_class(CLASSES))
    guess = (logits >= 0).numpy()
    assert found["micro_f1"] == pytest.approx(f1_score(truth, guess, average="micro"))
    assert found["macro_f1"] == pytest.approx(f1_score(truth, guess, average="macro"))
    assert found["map"] == pytest.approx(average_precision_score(truth[:, :3], logits[:, :3], average="macro"))
    assert found["loss"] == pytest.approx(F.binary_cross_entropy_with_logits(logits, truth.double()).item() * 4)
    fixed = [np.tile(np.arange(4) < 4 - k, (80, 1))[:, np.argsort(np.argsort(-truth.sum(0).numpy()))] for k in range(4)]
    best = max(f1_score(truth, guess, average="micro") for guess in fixed)
    assert found["micro_f1_constant"] == pytest.approx(best)
    every = f1_score(truth[:, :3], np.ones((80, 3), bool), average="macro")
    assert found["macro_f1_constant"] == pytest.approx(every)
    assert found["map_constant"] == pytest.approx(truth[:, :3].double().mean().item())
    assert predictions.worst(3)[0][0] == 0
    assert all(guess[row, k] != truth[row, k] for row, k, _ in predictions.worst(50))


def vit(pooling: str = "patch_mean") -> ViT:
    torch.manual_seed(0)
    return ViT(vit_options.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp_width=32, pooling=pooling))


def classifier(**options: object) -> Classify:
    torch.manual_seed(0)
    objective = Classify(classify_options.Classify(classes=CLASSES, loss="multi_label", **options), encoder=vit())
    torch.nn.init.normal_(objective.head.weight)
    return objective


def batch(count: int = 6) -> Batch:
    images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Batch.of(images, marks(count))


def test_the_loss_is_binary_cross_entropy_over_the_classes() -> None:
    given = batch()
    weights = [2.0, 0.5, 1.0, 3.0]
    for options, factors in (({}, [1.0] * 4), ({"class_weights": weights}, weights)):
        objective = classifier(**options).eval()
        logits = objective.logits(given.images).tolist()
        total = 0.0
        for row, own in zip(logits, given.labels.tolist(), strict=True):
            for logit, present, factor in zip(row, own, factors, strict=True):
                p = 1 / (1 + np.exp(-logit))
                total -= factor * np.log(p) if present else np.log(1 - p)
        found = objective(given)
        assert found["loss"].item() == pytest.approx(total / 6, rel=1e-5)
        exact = ((torch.tensor(logits) > 0) == given.labels).all(1).float().mean()
        assert found["exact_match"].item() == pytest.approx(exact.item())
    assert objective.probabilities(torch.tensor([[0.0, 2.0]])).tolist()[0] == pytest.approx([0.5, 0.880797])
    counts = given.labels.sum(0)
    assert balanced(given.labels, 4) == [(6 - n) / n if n else 0.0 for n in counts.tolist()]


def test_mixing_mixes_the_rows() -> None:
    objective, given = classifier(mixup=0.4).train(), batch()
    torch.manual_seed(3)
    images, shares = objective._mix(given.images, given.labels)
    share = (
        (shares - given.labels.roll(1, 0).float()) / (given.labels.float() - given.labels.roll(1, 0).float())
    ).nanmean()
    assert shares.allclose(share * given.labels + (1 - share) * given.labels.roll(1, 0), atol=1e-6)
    assert images.allclose(share * given.images / 255 + (1 - share) * given.images.roll(1, 0) / 255, atol=1e-5)
    assert objective(given)["loss"].isfinite()


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(OptionError, match=r"label_smoothing=0\.1: must be 0 where an image may have several classes"):
        classifier(label_smoothing=0.1)
    with pytest.raises(OptionError, match="distillation"):
        classifier(distillation={})
    source = Memory(batch().images, marks(6), CLASSES)
    softmax = Classify(classify_options.Classify(classes=CLASSES), encoder=vit())
    with pytest.raises(UserError, match="the test images may have several classes, the images that the model was"):
        Classification(classification_options.Classification(), source=source, transform=CenterCrop(size=8))(softmax)
    single = Memory(batch().images, [0] * 6, CLASSES)
    with pytest.raises(UserError, match="was trained on may have several classes, the test images have one each"):
        Classification(classification_options.Classification(), source=single, transform=CenterCrop(size=8))(
            classifier()
        )


def test_an_evaluation_has_words_figures_and_a_table() -> None:
    source = Memory(batch(40).images, marks(40), CLASSES)
    objective = classifier().eval()
    with torch.no_grad():
        found = Classification(classification_options.Classification(), source=source, transform=CenterCrop(size=8))(
            objective, [{"step": 1}]
        )
        logits = objective.logits(source.in_memory)
    assert found.metrics["map"] == pytest.approx(mean_average_precision(logits, source.labels))
    assert set(found.figures) == {"precisions", "mistakes", "learning"}
    assert found.lines[0].startswith(f"mAP {100 * found.metrics['map']:.1f} % of 40 images, each with any of 4 classes")
    rows = list(csv.DictReader(found.tables["classes.csv"].splitlines()))
    assert [row["class"] for row in rows] == list(CLASSES)
    assert [int(row["images"]) for row in rows] == source.labels.sum(0).tolist()


def split(count: int, seed: int) -> Features:
    """Features (count, 6) from which three of the classes can be told."""
    labels = marks(count, seed)
    mixing = torch.randn(4, 6, generator=torch.Generator().manual_seed(9))
    noise = torch.randn(count, 6, generator=torch.Generator().manual_seed(100 + seed))
    return Features(labels.float() @ mixing + 0.7 * noise, labels, CLASSES)


def test_the_vote_is_the_mean_of_the_neighbours_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = split(60, 0), split(30, 1)
    for protocol, temperature in (("uniform", None), ("dino", 0.07)):
        shares = torch.zeros(30, 4, dtype=torch.float64)
        cosines = F.normalize(test.values).double() @ F.normalize(train.values).double().T
        for row in range(30):
            best = cosines[row].topk(5)
            weights = [1.0 if temperature is None else np.exp(cosine / temperature) for cosine in best.values.tolist()]
            for weight, place in zip(weights, best.indices.tolist(), strict=True):
                shares[row] += weight * train.labels[place]
            shares[row] /= sum(weights)
        for size in (1 << 22, 100):
            monkeypatch.setattr(knn_module, "_VOTES", size)  # in parts
            nearest = search(test.values, train.values, 5)
            found = knn_module.class_shares(nearest, train.labels, temperature=temperature, k=(2, 5))[1]
            assert found.allclose(shares.float(), atol=1e-5)
        result = Knn(protocol=protocol, k=[2, 5])(train, test, choose=True)
        assert result.scores["5-NN"] == pytest.approx(mean_average_precision(shares.float(), test.labels))
        assert len(result.choice) == 1


def test_least_squares_on_several_classes() -> None:
    train, test = split(80, 0), split(50, 1)
    probe = FewShot(shots="all", l2=[1e-3, 10.0])
    result = probe(train, test)
    x, y = ridge.whiten(train.values, train.values), 2 * train.labels.double() - 1
    precisions = {}
    for l2 in (1e-3, 10.0):
        left_out = []
        for row in range(80):
            rest = torch.arange(80) != row
            gram = x[rest].T @ x[rest] + l2 * torch.eye(7)
            left_out.append(x[row] @ torch.linalg.solve(gram, x[rest].T @ y[rest]))
        precisions[l2] = mean_average_precision(torch.stack(left_out), train.labels)
    (score,) = result.numbers
    (fit,) = score["fits"]
    chosen = max(precisions, key=lambda l2: precisions[l2])
    assert (fit["l2"], fit["left_out"]) == (chosen, pytest.approx(precisions[chosen]))
    weights = torch.linalg.solve(x.T @ x + chosen * torch.eye(7), x.T @ y)
    guesses = ridge.whiten(train.values, test.values) @ weights
    assert result.scores["all labels"] == pytest.approx(mean_average_precision(guesses, test.labels))
    few = FewShot(shots=3, seeds=2).fit(train, test)[0]
    assert all(4 <= one.images <= 12 for one in few.fits)
    samples = ridge.sample(train.labels, 4, 0)
    assert [train.labels[places, k].all().item() for k, places in enumerate(samples)] == [True] * 4
    with pytest.raises(OptionError, match="shots=99: class 3"):
        FewShot(shots=99).check_classes(train.labels * torch.tensor([True, True, True, False]), test.labels, CLASSES)


def test_linear_layers_by_sigmoids() -> None:
    train, test = split(200, 0), split(60, 1)
    rows = torch.cat([train.values, torch.ones(200, 1)], 1)
    found = logistic.fit(rows, train.labels, moment=logistic.moment(rows), classes=4, l2=0.01)
    assert found.converged
    for k in range(4):
        model = LogisticRegression(C=1 / (200 * 0.01), tol=1e-8, max_iter=1000).fit(train.values, train.labels[:, k])
        assert np.allclose(found.layer[k, :-1], model.coef_[0], atol=2e-3)
        assert found.layer[k, -1].item() == pytest.approx(model.intercept_[0], abs=2e-3)
    order = list(sgd.batches(200, batch_size=50, epochs=2, seed=0))
    layers = sgd.descend(rows, train.labels, order, classes=4, learning_rates=(0.1, 0.5), steps=8)
    plain = torch.zeros(4, 7, requires_grad=True)
    optimizer = torch.optim.SGD([plain], lr=0.5, momentum=0.9)
    for step, places in enumerate(order):
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.5 * (1 + np.cos(np.pi * step / 8)) / 2
        logits = rows[places] @ plain.T
        target = train.labels[places].float()
        (F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / len(places)).backward()
        optimizer.step()
    assert layers[1].allclose(plain.detach(), atol=1e-4)
    for probe in (Logistic(l2s=[0.1, 0.01]), Sgd(learning_rates=[0.1, 0.5], epochs=4, batch_size=50)):
        result = probe(train, test)
        assert list(result.scores) == ["train", "validation", "test"]
        assert result.scores["test"] > share_of_class(test.labels) + 0.2
        assert result.predictions is None


def test_an_image_that_shares_a_class_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = split(40, 0), split(20, 1)
    for size in (1 << 25, 100):
        monkeypatch.setattr(retrieval_module, "_BLOCK", size)  # in parts
        result = Retrieval(k=[1, 5])(train, test, choose=True)
        precisions, recalled = [], []
        cosines = F.normalize(test.values) @ F.normalize(train.values).T
        for row in range(20):
            right = [(train.labels[place] & test.labels[row]).any().item() for place in cosines[row].argsort().flip(0)]
            if any(right):
                found = [sum(right[: i + 1]) / (i + 1) for i in range(40) if right[i]]
                precisions.append(sum(found) / len(found))
                recalled.append(any(right[:5]))
        assert result.numbers["queries"] == len(precisions) < 20
        assert result.scores["mAP"] == pytest.approx(sum(precisions) / len(precisions))
        assert result.scores["recall@5"] == pytest.approx(sum(recalled) / len(recalled))
    own = torch.arange(40)
    _, total = retrieval_module._answerable(train.labels, train.labels, own)
    shared = (train.labels[:, None] & train.labels[None]).any(2)
    assert total.equal(shared.sum(1) - shared.diagonal().long())


def test_transformers_knows_the_problem() -> None:
    assert huggingface.config(vit("class_token"), CLASSES, multi_label=True)["problem_type"] == (
        "multi_label_classification"
    )
    assert "problem_type" not in huggingface.config(vit("class_token"), CLASSES)


def test_a_prediction_says_which_classes_are_present() -> None:
    one = Prediction("dog", 0.9, {"cat": 0.5, "dog": 0.9, "owl": 0.1})
    assert (one.present(), one.present(0.95)) == (["dog", "cat"], [])


def test_the_commands_train_measure_and_predict(tmp_path: Path, tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    with open(tmp_path / "t.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", "label"])
        for i in range(80):
            own = [name for name, present in zip("rgb", marks(1, i, 0.5)[0].tolist(), strict=False) if present]
            pixels = torch.randint(40, (16, 16, 3), generator=generator)
            for name in own:
                pixels["rgb".index(name) * 5 :][:5, :, "rgb".index(name)] += 200
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(tmp_path / f"{i}.png")
            rows.writerow([f"{i}.png", ";".join(own)])
    data = ("data=csv", f"data.table={tmp_path / 't.csv'}", "data.separator=';'", "data.image_size=16")
    short = (
        "recipe.batch_size=16", "recipe.warmup=2", "recipe.log_every=5", "recipe.precision=32-true",
        "fabric.accelerator=cpu",
    )  # fmt: skip
    small = ("encoder.width=32", "encoder.depth=2", "encoder.heads=2")
    tool(
        "pretrain", *data, *small, *short, "name=p", "recipe.steps=4", "recipe.evaluate_every=4",
        "probe=[knn,few_shot,logistic]", "probe.knn.k=5", "probe.few_shot.shots=2",
    )  # fmt: skip
    (folder,) = tmp_path.rglob("p/metrics.jsonl")
    last = [json.loads(line) for line in folder.read_text().splitlines()][-1]
    assert last["probe/multi_label"] == 1
    assert 0 < min(last["probe/knn5"], last["probe/logistic"]) <= 1
    run = ("finetune", "checkpoint=" + str(folder.parent), *short, "name=f", "recipe.steps=40", "recipe.lr=0.05")
    done = tool(*run, "objective.class_weights=balanced", "objective.mixup=0.1", "recipe.evaluate_every=40")
    assert "mAP" in done.stdout
    rows = [json.loads(line) for line in (folder.parent.parent / "f/metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "test/map" in row]
    assert measured[-1]["test/map"] > measured[-1]["test/map_constant"] + 0.2
    answer = tool("predict", f"checkpoint={folder.parent.parent / 'f'}", "0.png", "threshold=0", "output=a.json")
    assert all(name in answer.stdout.splitlines()[-1] for name in "rgb")
    (found,) = json.loads((tmp_path / "a.json").read_text())
    assert {one["class"] for one in found["classes"]} == {"r", "g", "b"}
    assert all(one["present"] for one in found["classes"])
    refused = tool(*run, "objective.label_smoothing=0.1", "overwrite=true", status=2)
    assert refused.stderr.strip() == (
        "ssvit: objective.label_smoothing=0.1: must be 0 where an image may have several classes"
    )
