"""Classification equals its formulas in float64: label smoothing, MixUp, distillation, one head and two."""

import json
import math

import pytest
import timm.loss
import tiny
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.transforms import v2

from ssvit.data.batch import Batch
from ssvit.errors import OptionError, UserError
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.classify import Classify

CLASSES = ("ant", "bee", "cat", "dog", "elk")
LABELS = torch.tensor([0, 3, 3, 1, 4, 2])
IMAGES = torch.randint(0, 256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def encoder(**options) -> ViT:
    return vit_options.ViT(**{"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "heads": 2} | options).build()


def build(*, random: bool = True, token: bool = False, seed: int = 0, vit=(), **options) -> Classify:
    """A small objective in float64; `random` makes every weight so, so that no head is zero."""
    torch.manual_seed(seed)
    made = encoder(distillation_token=token, **dict(vit))
    objects = {name: options.pop(name) for name in ("labels", "teacher") if name in options}
    chosen = classify_options.Classify(**{"classes": CLASSES} | options)
    model = Classify(chosen, encoder=made, **objects).double()
    return tiny.shaken(model, 0.3) if random else model


def teacher(**options) -> Classify:
    return build(seed=5, **options)


def softmax(logits, temperature: float = 1.0) -> list[float]:
    exponentials = [math.exp(value / temperature) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def plain_loss(logits, shares, smoothing: float = 0.0) -> float:
    """The mean cross-entropy with shares of labels, as a loop over images and classes."""
    total = 0.0
    for row, targets in zip(logits.tolist(), shares, strict=True):
        guess = softmax(row)
        for k, share in enumerate(targets):
            total -= ((1 - smoothing) * share + smoothing / len(targets)) * math.log(guess[k])
    return total / len(logits)


def plain_divergence(student, teacher, temperature: float) -> float:
    """The mean KL divergence of a student's probabilities from a teacher's."""
    total = 0.0
    for guess, truth in zip(student.tolist(), teacher.tolist(), strict=True):
        pairs = zip(softmax(truth, temperature), softmax(guess, temperature), strict=True)
        total += sum(p * math.log(p / q) for p, q in pairs)
    return total / len(student)


def one_hot(labels=LABELS) -> list[list[float]]:
    return [[float(k == label) for k in range(len(CLASSES))] for label in labels.tolist()]


def mixed_by_loops(way: str, alpha: float) -> tuple[torch.Tensor, list[list[float]]]:
    """Images and shares of the classes mixed with torchvision's next random parameters, each with the one before it."""
    parameters = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[way](alpha=alpha, num_classes=5).make_params([IMAGES])
    images, shares, labels = IMAGES / 255, [], one_hot()
    mixed = images.clone()
    for b in range(len(images)):
        if way == "mixup":
            share = parameters["lam"]
            mixed[b] = share * images[b] + (1 - share) * images[b - 1]
        else:
            share = parameters["lam_adjusted"]
            left, top, right, bottom = parameters["box"]
            mixed[b, :, top:bottom, left:right] = images[b - 1, :, top:bottom, left:right]
        shares.append([share * a + (1 - share) * other for a, other in zip(labels[b], labels[b - 1], strict=True)])
    return mixed, shares


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("hidden", [None, 7])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_of_each_head(token, hidden, smoothing):
    model = build(token=token, hidden=hidden, label_smoothing=smoothing)
    head_logits = model.head_logits(IMAGES)
    assert len(head_logits) == 1 + token
    expected = sum(plain_loss(logits, one_hot(), smoothing) for logits in head_logits) / len(head_logits)
    result = model(Batch.of_view(IMAGES, LABELS))
    assert result["loss"].item() == pytest.approx(expected, rel=1e-12)
    correct = (model.logits(IMAGES).argmax(1) == LABELS).double().mean().item()
    assert result["accuracy"].item() == pytest.approx(correct)
    assert not result["accuracy"].requires_grad


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("pooling", ["class_token", "patch_mean"])
def test_each_head_has_its_own_output_and_the_logits_are_their_mean(pooling, token):
    model = build(token=token, hidden=7, vit={"pooling": pooling}).eval()
    outputs = model.encoder(IMAGES)
    heads = [model.head(outputs[:, 0] if pooling == "class_token" else outputs[:, 1 + token :].mean(1))]
    heads += [model.distilled_head(outputs[:, 1])] if token else []
    torch.testing.assert_close(list(model.head_logits(IMAGES)), heads, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.logits(IMAGES), sum(heads) / len(heads), rtol=1e-12, atol=1e-12)
    expected = torch.tensor([softmax(row) for row in model.logits(IMAGES).tolist()], dtype=torch.float64)
    torch.testing.assert_close(model.probabilities(model.logits(IMAGES)), expected)


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_images_have_the_shares_of_both_labels(way, seed):
    model = build(label_smoothing=0.1, **{way: 0.8})
    torch.manual_seed(seed)
    result = model(Batch.of_view(IMAGES, LABELS))
    torch.manual_seed(seed)
    mixed, shares = mixed_by_loops(way, 0.8)
    logits = model.logits(mixed)
    assert result["loss"].item() == pytest.approx(plain_loss(logits, shares, 0.1), rel=1e-6)
    largest = [row.index(max(row)) for row in shares]
    correct = sum(guess == label for guess, label in zip(logits.argmax(1).tolist(), largest, strict=True))
    assert result["accuracy"].item() == pytest.approx(correct / 6)


def test_mixup_or_cutmix_is_chosen_for_a_micro_batch_and_neither_in_evaluation():
    model, plain, chosen = build(mixup=0.8, cutmix=1.0), build(), set()
    for seed in range(8):
        torch.manual_seed(seed)
        loss = model(Batch.of_view(IMAGES, LABELS))["loss"].item()
        torch.manual_seed(seed)
        way = ("mixup", "cutmix")[int(torch.multinomial(torch.tensor([0.5, 0.5]), 1))]
        mixed, shares = mixed_by_loops(way, 0.8 if way == "mixup" else 1.0)
        assert loss == pytest.approx(plain_loss(model.logits(mixed), shares), rel=1e-6)
        chosen.add(way)
    assert chosen == {"mixup", "cutmix"}
    state = torch.get_rng_state()
    assert torch.equal(
        model.eval()(Batch.of_view(IMAGES, LABELS))["loss"], plain(Batch.of_view(IMAGES, LABELS))["loss"]
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("hidden", [None, 7])
def test_the_heads_of_pretraining_and_finetuning_end_in_zeros(hidden):
    state = build(random=False, hidden=hidden, token=True).state_dict()
    layers = {"": (5, 16)} if hidden is None else {"hidden.": (7, 16), "output.": (5, 7)}
    heads = {name: tuple(value.shape) for name, value in state.items() if not name.startswith("encoder.")}
    assert heads == {
        f"{head}.{layer}{name}": shape[: 2 - (name == "bias")]
        for head in ("head", "distilled_head")
        for layer, shape in layers.items()
        for name in ("weight", "bias")
    }
    assert all(bool(state[name].any()) == name.endswith("hidden.weight") for name in heads)


def test_the_hidden_layer_is_a_tanh_and_starts_lecun_normal():
    model = build(random=False, vit={"width": 128}, hidden=1024)
    weight = model.head.hidden.weight.detach()
    assert weight.std().item() == pytest.approx(128**-0.5, rel=0.01)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)
    assert 0.98 < weight.abs().max().item() / (2 * 128**-0.5 / 0.8796) <= 1.0001
    trained = build(hidden=7).head
    x = torch.randn(3, 16).double()
    hidden = torch.tanh(x @ trained.hidden.weight.T + trained.hidden.bias)
    torch.testing.assert_close(trained(x), hidden @ trained.output.weight.T + trained.output.bias)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_hard_distillation_takes_the_teachers_first_choice_as_label(token, weight):
    master = teacher(hidden=9)
    model = build(
        token=token,
        label_smoothing=0.1,
        distillation=classify_options.Distillation(kind="hard", weight=weight),
        teacher=master,
    )
    head_logits = model.head_logits(IMAGES)
    choice = torch.tensor([row.index(max(row)) for row in master.logits(IMAGES).tolist()])
    taught = plain_loss(head_logits[-1], one_hot(choice))
    expected = (1 - weight) * plain_loss(head_logits[0], one_hot(), 0.1) + weight * taught
    assert not torch.equal(choice, LABELS)
    assert model(Batch.of_view(IMAGES, LABELS))["loss"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_soft_distillation_is_the_divergence_from_the_teachers_probabilities_of_the_mixed_images(
    token, temperature, mixup
):
    master = teacher(token=True)
    distillation = classify_options.Distillation(kind="soft", temperature=temperature, weight=0.4)
    model = build(token=token, mixup=mixup, distillation=distillation, teacher=master)
    torch.manual_seed(0)
    loss = model(Batch.of_view(IMAGES, LABELS))["loss"]
    torch.manual_seed(0)
    images, shares = mixed_by_loops("mixup", 1.0) if mixup else (IMAGES, one_hot())
    head_logits = model.head_logits(images)
    divergence = plain_divergence(head_logits[-1], master.logits(images), temperature)
    expected = 0.6 * plain_loss(head_logits[0], shares) + 0.4 * temperature**2 * divergence
    assert loss.item() == pytest.approx(expected, rel=1e-6 if mixup else 1e-12)
    model.distillation.teacher.float()
    assert model(Batch.of_view(IMAGES, LABELS))["loss"].dtype == torch.float64


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_teacher_of_another_image_size_sees_resized_images(kind):
    master = teacher(vit={"image_size": [12, 16]})
    model = build(distillation=classify_options.Distillation(kind=kind, weight=1.0), teacher=master.float()).float()
    resized = F.interpolate(IMAGES.float() / 255, (12, 16), mode="bicubic", antialias=True).clamp(0, 1)
    shown = []
    handle = master.encoder.register_forward_pre_hook(lambda module, inputs: shown.append(inputs[0]))
    model(Batch.of_view(IMAGES, LABELS))
    handle.remove()
    assert list(model.references()) == [master]
    torch.testing.assert_close(shown[0].float(), resized)


@pytest.mark.parametrize("loss", ["softmax", "binary", "multi_label"])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("hidden", [None, 7])
def test_its_metadata_are_enough_to_build_it_again(hidden, token, loss):
    model = build(hidden=hidden, token=token, loss=loss).eval()
    facts = json.loads(json.dumps(model.metadata))
    vit = vit_options.ViT(**facts["encoder"]).build()
    again = Classify(classify_options.Classify(**facts["classifier"]), encoder=vit).double().eval()
    again.load_state_dict(model.state_dict())
    assert again.classes == CLASSES
    assert torch.equal(again.logits(IMAGES), model.logits(IMAGES))
    assert torch.equal(*(one.probabilities(one.logits(IMAGES)) for one in (again, model)))


MULTI_HOT = torch.rand(6, 5, generator=torch.Generator().manual_seed(0)) < 0.35


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_class_weights_are_factors_of_the_losses_of_the_images(mixed, smoothing):
    model = build(class_weights="balanced", labels=torch.tensor([0, 0, 0, 1, 3, 3, 4]), label_smoothing=smoothing)
    weights = model.class_weights.tolist()
    assert weights == [7 / 15, 7 / 5, 0.0, 7 / 10, 7 / 5]
    shares = torch.tensor(one_hot(), dtype=torch.float64)
    shares = 0.3 * shares + 0.7 * shares.flip(0) if mixed else shares
    logits = model.logits(IMAGES)
    expected = 0.0
    for row, targets in zip(logits.tolist(), shares.tolist(), strict=True):
        guesses = [math.log(guess) for guess in softmax(row)]
        for weight, share, guess in zip(weights, targets, guesses, strict=True):
            expected -= weight * share * ((1 - smoothing) * guess + smoothing * sum(guesses) / len(guesses))
    assert model._loss(logits, shares if mixed else LABELS).item() == pytest.approx(expected / 6, rel=1e-9)
    with pytest.raises(OptionError, match=r"^class_weights="):
        build(class_weights="balanced")


@pytest.mark.parametrize("threshold", [None, 0.2, 0.4])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("class_weights", [None, "balanced"])
def test_the_binary_loss_is_the_mean_over_classes_with_smoothed_shares(threshold, smoothing, class_weights):
    options = {"labels": torch.tensor([0, 0, 0, 1, 2, 3, 4])} if class_weights else {}
    model = build(
        loss="binary", label_smoothing=smoothing, target_threshold=threshold, class_weights=class_weights, **options
    )
    weights = model.class_weights.tolist() if class_weights else [1.0] * 5
    one = torch.tensor(one_hot(), dtype=torch.float64)
    logits = model.logits(IMAGES)
    for labels, shares in ((LABELS, one), (mixed := 0.3 * one + 0.7 * one.flip(0), mixed)):
        expected = 0.0
        for row, targets in zip(logits.tolist(), shares.tolist(), strict=True):
            factor = sum(weight * share for weight, share in zip(weights, targets, strict=True))
            for value, share in zip(row, targets, strict=True):
                target = (1 - smoothing) * share + smoothing / 5
                target = target if threshold is None else float(target > threshold)
                p = 1 / (1 + math.exp(-value))
                expected -= factor * (target * math.log(p) + (1 - target) * math.log(1 - p)) / 5
        assert model._loss(logits, labels).item() == pytest.approx(expected / 6, rel=1e-9)
    if not class_weights:
        theirs = timm.loss.BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)(logits, LABELS)
        assert model._loss(logits, LABELS).item() == pytest.approx(theirs.item(), rel=1e-9)


def test_a_teacher_is_part_of_the_identity_of_a_run():
    given = teacher()
    given.encoder.origin = "checksum"
    model = build(distillation=classify_options.Distillation(), teacher=given)
    assert model.metadata["teacher"] == "checksum"
    assert "teacher" not in build().metadata


@pytest.mark.parametrize("class_weights", [None, "balanced"])
def test_the_multi_label_loss_is_binary_cross_entropy_summed_over_the_classes(class_weights):
    model = build(class_weights=class_weights, labels=MULTI_HOT).eval()
    factors = [(6 - n) / n if n else 0.0 for n in MULTI_HOT.sum(0).tolist()] if class_weights else [1.0] * 5
    logits, total, exact = model.logits(IMAGES), 0.0, 0
    probabilities = model.probabilities(logits)
    torch.testing.assert_close(probabilities, 1 / (1 + (-logits).exp()), rtol=1e-12, atol=0)
    for row, labels in zip(probabilities.tolist(), MULTI_HOT.tolist(), strict=True):
        for p, present, factor in zip(row, labels, factors, strict=True):
            total -= factor * math.log(p) if present else math.log(1 - p)
        exact += [p > 0.5 for p in row] == labels
    result = model(Batch.of_view(IMAGES, MULTI_HOT))
    assert result["loss"].item() == pytest.approx(total / 6, rel=1e-9)
    assert result["exact_match"].item() == pytest.approx(exact / 6)


def test_mixup_mixes_multi_hot_labels():
    model = build(mixup=0.4, labels=MULTI_HOT)
    torch.manual_seed(3)
    _, shares = model._mix(IMAGES, MULTI_HOT)
    torch.manual_seed(3)
    share = v2.MixUp(alpha=0.4, num_classes=5).make_params([IMAGES])["lam"]
    torch.testing.assert_close(shares, share * MULTI_HOT + (1 - share) * MULTI_HOT.roll(1, 0).float())


def test_a_new_share_makes_no_new_graph():
    model, graphs = build(mixup=0.8, cutmix=1.0), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled, counts = torch.compile(model, backend=count), []
    for step in range(6):
        torch.manual_seed(step)
        loss = compiled(Batch.of_view(IMAGES, LABELS))["loss"]
        counts.append(len(graphs))
        torch.manual_seed(step)
        assert loss.item() == pytest.approx(model(Batch.of_view(IMAGES, LABELS))["loss"].item(), rel=1e-12)
    assert counts[0] == counts[-1] > 0


@pytest.mark.parametrize(
    "other",
    [
        {"classes": ("ant", "bee", "dog", "cat", "elk")}, {"classes": CLASSES[:4]}, {"classes": (*CLASSES, "fox")},
        {"vit": {"channels": 1}}, {"loss": "multi_label"},
    ],
)  # fmt: skip
def test_a_teacher_of_other_classes_or_images_is_reported(other):
    with pytest.raises(UserError, match=r"^distillation\.teacher: "):
        build(distillation=classify_options.Distillation(), teacher=teacher(**other))


@pytest.mark.parametrize("compiled", [False, True])
def test_refuses_images_without_labels(compiled):
    model: nn.Module = torch.compile(build(), backend="eager") if compiled else build()
    with pytest.raises(UserError, match="labels"):
        model(Batch.of_view(IMAGES, None))
