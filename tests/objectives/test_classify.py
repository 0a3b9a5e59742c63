"""Classification against its formulas in plain float64: labels smoothed, mixed and taught, one head and two."""

import json
import math

import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from torchvision.transforms import v2

from ssvit.data.batch import Batch
from ssvit.models import vit_options
from ssvit.models.vit import ViT
from ssvit.objectives import classify_options
from ssvit.objectives.base import parameter_groups
from ssvit.objectives.classify import Classify, Distillation, balanced
from ssvit.options import OptionError, UserError

CLASSES = ("ant", "bee", "cat", "dog", "elk")
LABELS = torch.tensor([0, 3, 3, 1, 4, 2])
IMAGES = torch.randint(0, 256, (6, 3, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def encoder(**options) -> ViT:
    return ViT(vit_options.ViT(**{"image_size": 8, "patch_size": 4, "width": 16, "depth": 2, "heads": 2} | options))


def build(*, random: bool = True, token: bool = False, seed: int = 0, vit=(), **options) -> Classify:
    """A small objective in float64; `random` makes every weight so, so that no head is zero."""
    torch.manual_seed(seed)
    made = encoder(distillation_token=token, **dict(vit))
    objects = {name: options.pop(name) for name in ("labels", "teacher") if name in options}
    chosen = classify_options.Classify(**{"classes": CLASSES} | options)
    model = Classify(chosen, encoder=made, **objects).double()
    if random:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def teacher(**options) -> Classify:
    return build(seed=5, **options)


def softmax(logits, temperature: float = 1.0) -> list[float]:
    exponentials = [math.exp(value / temperature) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def plain_loss(logits, shares, smoothing: float = 0.0) -> float:
    """The mean cross-entropy with shares of labels, as a loop over images and classes."""
    total = 0.0
    for row, wanted in zip(logits.tolist(), shares, strict=True):
        guess = softmax(row)
        for k, share in enumerate(wanted):
            total -= ((1 - smoothing) * share + smoothing / len(wanted)) * math.log(guess[k])
    return total / len(logits)


def plain_divergence(student, teacher, temperature: float) -> float:
    """The mean KL divergence of a student's probabilities from a teacher's."""
    total = 0.0
    for own, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        pairs = zip(softmax(theirs, temperature), softmax(own, temperature), strict=True)
        total += sum(p * math.log(p / q) for p, q in pairs)
    return total / len(student)


def one_hot(labels=LABELS) -> list[list[float]]:
    return [[float(k == label) for k in range(len(CLASSES))] for label in labels.tolist()]


def plain_mix(images, way: str, params) -> tuple[torch.Tensor, list[list[float]]]:
    """Mixed images and shares of the classes: each image with the one before it, the first with the last."""
    mixed, shares, labels = images.clone(), [], one_hot()
    for b in range(len(images)):
        if way == "mixup":
            share = params["lam"]
            mixed[b] = share * images[b] + (1 - share) * images[b - 1]
        else:
            share = params["lam_adjusted"]
            left, top, right, bottom = params["box"]
            mixed[b, :, top:bottom, left:right] = images[b - 1, :, top:bottom, left:right]
        shares.append([share * own + (1 - share) * other for own, other in zip(labels[b], labels[b - 1], strict=True)])
    return mixed, shares


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("hidden", [None, 7])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_of_each_head(token, hidden, smoothing):
    model = build(token=token, hidden=hidden, label_smoothing=smoothing)
    head_logits = model.head_logits(IMAGES)
    assert len(head_logits) == 1 + token
    expected = sum(plain_loss(logits, one_hot(), smoothing) for logits in head_logits) / len(head_logits)
    result = model(Batch.of(IMAGES, LABELS))
    assert result["loss"].item() == pytest.approx(expected, rel=1e-12)
    assert result["loss"].ndim == 0


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("way", [None, "mixup", "cutmix"])
def test_sigmoid_is_summed_over_classes_and_the_mean_over_images(way, token):
    model = build(token=token, loss="sigmoid", **({way: 0.8} if way else {}))
    torch.manual_seed(2)
    result = model(Batch.of(IMAGES, LABELS))
    images, shares = IMAGES, one_hot()
    if way:
        torch.manual_seed(2)
        params = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[way](alpha=0.8, num_classes=5).make_params([IMAGES])
        images, shares = plain_mix(IMAGES / 255, way, params)
    head_logits = model.head_logits(images)
    shares = torch.tensor(shares, dtype=torch.float64)
    losses = [nn.BCEWithLogitsLoss(reduction="none")(logits, shares).sum(1).mean() for logits in head_logits]
    tolerance = 1e-6 if way else 1e-12  # of images mixed in float32
    assert result["loss"].item() == pytest.approx(sum(losses).item() / len(losses), rel=tolerance)
    whole = torch.stack(head_logits).mean(0)
    torch.testing.assert_close(model.probabilities(whole), 1 / (1 + (-whole).exp()), rtol=1e-12, atol=0)
    torch.testing.assert_close(build().probabilities(whole).sum(1), torch.ones(6).double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("hidden", [None, 7])
def test_the_bias_of_the_head_is_where_the_first_guess_starts(hidden):
    model = build(random=False, token=True, hidden=hidden, loss="sigmoid", head_bias=-6.9)
    assert model.logits(IMAGES).unique().tolist() == pytest.approx([-6.9])
    expected = math.log1p(math.exp(6.9)) + 4 * math.log1p(math.exp(-6.9))
    assert model(Batch.of(IMAGES, LABELS))["loss"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("pooling", ["class_token", "patch_mean"])
def test_each_head_has_its_own_output_and_the_answer_is_their_mean(pooling):
    model = build(token=True, hidden=7, vit={"pooling": pooling}).eval()
    outputs = model.encoder(IMAGES)
    pooled = outputs[:, 0] if pooling == "class_token" else outputs[:, 2:].mean(1)
    first, second = model.head_logits(IMAGES)
    torch.testing.assert_close(first, model.head(pooled), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(second, model.distilled_head(outputs[:, 1]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.logits(IMAGES), (first + second) / 2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pooling", ["class_token", "patch_mean"])
def test_without_a_distillation_token_the_head_reads_the_encoders_representation(pooling):
    model = build(vit={"pooling": pooling}).eval()
    expected = model.head(model.encoder.pool(model.encoder(IMAGES)))
    torch.testing.assert_close(model.logits(IMAGES), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("options", [{}, {"hidden": 7, "label_smoothing": 0.1, "mixup": 1.0, "cutmix": 1.0}])
def test_the_first_loss_is_that_of_a_uniform_guess(options, token, taught, precision):
    options = options | {
        "distillation": classify_options.Distillation() if taught else None,
        "teacher": teacher().float() if taught else None,
    }
    model = build(random=False, token=token, **options).float()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        result = model(Batch.of(IMAGES, LABELS))
    assert result["loss"].dtype == torch.float32
    assert result["loss"].item() == pytest.approx(math.log(len(CLASSES)), abs=1e-6)


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_images_have_the_shares_of_both_labels(way, seed):
    model = build(label_smoothing=0.1, **{way: 0.8})
    torch.manual_seed(seed)
    result = model(Batch.of(IMAGES, LABELS))
    torch.manual_seed(seed)
    params = {"mixup": v2.MixUp, "cutmix": v2.CutMix}[way](alpha=0.8, num_classes=5).make_params([IMAGES])
    mixed, shares = plain_mix(IMAGES / 255, way, params)
    logits = model.logits(mixed)
    assert result["loss"].item() == pytest.approx(plain_loss(logits, shares, 0.1), rel=1e-6)
    largest = [row.index(max(row)) for row in shares]
    right = sum(guess == label for guess, label in zip(logits.argmax(1).tolist(), largest, strict=True))
    assert result["accuracy"].item() == pytest.approx(right / 6)


def test_with_both_ways_either_happens_for_a_whole_micro_batch():
    model, seen = build(mixup=0.8, cutmix=1.0), set()
    for seed in range(8):
        torch.manual_seed(seed)
        loss = model(Batch.of(IMAGES, LABELS))["loss"].item()
        torch.manual_seed(seed)
        chosen = int(torch.multinomial(torch.tensor([0.5, 0.5]), 1))
        params = (v2.MixUp(alpha=0.8), v2.CutMix(alpha=1.0))[chosen].make_params([IMAGES])
        way = ("mixup", "cutmix")[chosen]
        mixed, shares = plain_mix(IMAGES / 255, way, params)
        assert loss == pytest.approx(plain_loss(model.logits(mixed), shares), rel=1e-6)
        seen.add(way)
    assert seen == {"mixup", "cutmix"}


def test_nothing_is_mixed_in_evaluation():
    model, plain = build(mixup=0.8, cutmix=1.0), build()
    mixed = model(Batch.of(IMAGES, LABELS))["loss"]
    state = torch.get_rng_state()
    assert torch.equal(model.eval()(Batch.of(IMAGES, LABELS))["loss"], plain(Batch.of(IMAGES, LABELS))["loss"])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(mixed, plain(Batch.of(IMAGES, LABELS))["loss"])


@pytest.mark.parametrize("options", [{}, {"mixup": 1.0}, {"cutmix": 1.0}])
def test_bytes_and_fractions_give_the_same_loss(options):
    model, losses = build(**options), []
    for images in (IMAGES, IMAGES / 255):
        before = images.clone()
        torch.manual_seed(3)
        losses.append(model(Batch.of(images, LABELS))["loss"].item())
        assert torch.equal(images, before)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_the_score_counts_right_answers():
    model = build(token=True)
    right = (model.logits(IMAGES).argmax(1) == LABELS).double().mean().item()
    accuracy = model(Batch.of(IMAGES, LABELS))["accuracy"]
    assert 0 < right < 1
    assert accuracy.item() == pytest.approx(right)
    assert not accuracy.requires_grad


def test_the_hidden_layer_is_all_that_pretraining_and_finetuning_differ_in():
    fine, pre = (build(random=False, hidden=hidden, token=True) for hidden in (None, 7))
    shapes = [{name: tuple(value.shape) for name, value in model.state_dict().items()} for model in (fine, pre)]
    bodies = [{name for name in own if name.startswith("encoder.")} for own in shapes]
    assert bodies[0] == bodies[1] == {f"encoder.{name}" for name in fine.encoder.state_dict()}
    heads = [{name: shape for name, shape in own.items() if not name.startswith("encoder.")} for own in shapes]
    assert heads[0] == {
        f"{head}.{name}": shape
        for head in ("head", "distilled_head")
        for name, shape in (("weight", (5, 16)), ("bias", (5,)))
    }
    assert heads[1] == {
        f"{head}.{name}": shape
        for head in ("head", "distilled_head")
        for name, shape in (
            ("hidden.weight", (7, 16)), ("hidden.bias", (7,)), ("output.weight", (5, 7)), ("output.bias", (5,))
        )
    }  # fmt: skip
    for name, value in (*fine.state_dict().items(), *pre.state_dict().items()):
        if "head" in name:
            assert bool(value.any()) == ("hidden.weight" in name)


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
@pytest.mark.parametrize("hidden", [None, 7])
def test_at_the_first_step_the_last_layers_alone_learn_and_at_the_second_all_do(hidden, token):
    model = build(random=False, hidden=hidden, token=token)
    optimizer = torch.optim.SGD(parameter_groups(model.named_parameters(), 0.0), lr=1.0)
    last = {head + (".output." if hidden else ".") for head in ("head", "distilled_head")}
    for step in range(2):
        optimizer.zero_grad()
        model(Batch.of(IMAGES, LABELS))["loss"].backward()
        for name, parameter in model.named_parameters():
            learns = step == 1 or any(name.startswith(layer) for layer in last)
            assert bool(parameter.grad is not None and parameter.grad.any()) == learns, name
        optimizer.step()


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
    assert model(Batch.of(IMAGES, LABELS))["loss"].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_soft_distillation_is_the_divergence_from_the_teachers_probabilities(token, temperature):
    master = teacher(token=True)
    distillation = classify_options.Distillation(kind="soft", temperature=temperature, weight=0.4)
    model = build(token=token, distillation=distillation, teacher=master)
    head_logits = model.head_logits(IMAGES)
    divergence = plain_divergence(head_logits[-1], master.logits(IMAGES), temperature)
    expected = 0.6 * plain_loss(head_logits[0], one_hot()) + 0.4 * temperature**2 * divergence
    assert model(Batch.of(IMAGES, LABELS))["loss"].item() == pytest.approx(expected, rel=1e-12)


def test_divided_by_elements_soft_distillation_is_as_many_times_less_as_there_are_classes():
    master = teacher()
    model = build(
        distillation=classify_options.Distillation(kind="soft", weight=1.0, reduction="elements"), teacher=master
    )
    logits, opinion = model.logits(IMAGES), master.logits(IMAGES)
    # deit: losses.py with tau=3, by its formula
    ratio = (opinion / 3).log_softmax(1) - (logits / 3).log_softmax(1)
    expected = ((opinion / 3).softmax(1) * ratio).sum() * 9 / (6 * 5)
    found = model(Batch.of(IMAGES, LABELS))["loss"].item()
    assert found == pytest.approx(expected.item(), rel=1e-12)
    assert found == pytest.approx(9 * plain_divergence(logits, opinion, 3.0) / 5, rel=1e-12)


def test_a_student_like_its_teacher_has_nothing_to_learn_from_it():
    model = build(distillation=classify_options.Distillation(kind="soft", weight=1.0), teacher=teacher())
    model.load_state_dict(model.distillation.teacher.state_dict())
    loss = model(Batch.of(IMAGES, LABELS))["loss"]
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert all(gradient.abs().max() < 1e-12 for gradient in torch.autograd.grad(loss, list(model.parameters())))


def test_the_teacher_sees_the_mixed_images():
    master = teacher()
    model = build(
        mixup=1.0,
        distillation=classify_options.Distillation(kind="soft", temperature=1.0, weight=1.0),
        teacher=master,
    )
    torch.manual_seed(0)
    loss = model(Batch.of(IMAGES, LABELS))["loss"].item()
    torch.manual_seed(0)
    mixed, _ = plain_mix(IMAGES / 255, "mixup", v2.MixUp(alpha=1.0).make_params([IMAGES]))
    logits = model.logits(mixed)
    assert loss == pytest.approx(plain_divergence(logits, master.logits(mixed), 1.0), rel=1e-6)
    assert loss != pytest.approx(plain_divergence(logits, master.logits(IMAGES), 1.0), rel=1e-2)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_the_teacher_is_neither_trained_nor_saved(kind):
    master = teacher(vit={"dropout": 0.5})
    before = {name: value.clone() for name, value in master.state_dict().items()}
    model, alone = (
        build(token=True, distillation=classify_options.Distillation(kind=kind), teacher=master),
        build(token=True),
    )
    assert not set(master.modules()) & set(model.modules())
    assert not {id(p) for p in master.parameters()} & {id(p) for p in model.parameters()}
    assert model.state_dict().keys() == alone.state_dict().keys()
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters(), 0.05), lr=0.1)
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        model(Batch.of(IMAGES, LABELS))["loss"].backward()
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in master.state_dict().items())
    assert all(parameter.grad is None for parameter in master.parameters())
    assert not any(module.training for module in master.modules())


def test_the_teacher_follows_the_images_to_their_device(monkeypatch):
    master = teacher()
    # The encoder asks for a device that has autocast, which this stand-in for a GPU has not.
    monkeypatch.setattr(master, "logits", lambda images: torch.zeros(6, 5, device=images.device))
    distillation = Distillation(classify_options.Distillation(), master)
    for device in ("cpu", "meta"):
        assert distillation.loss(torch.zeros(6, 5, device=device), IMAGES.to(device)).device.type == device
        assert {value.device.type for value in master.state_dict().values()} == {device}


@pytest.mark.parametrize("loss", ["sigmoid", "multi_label"])
def test_a_teacher_of_independent_classes_teaches_its_first_choice_alone(loss):
    with pytest.raises(OptionError, match=rf"^objective\.distillation\.kind=soft: must be hard .* its loss is {loss}$"):
        build(distillation=classify_options.Distillation(kind="soft"), teacher=teacher(loss=loss))
    assert (
        build(distillation=classify_options.Distillation(kind="hard"), teacher=teacher(loss=loss)).options.distillation
        is not None
    )


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_a_coarser_teacher_does_not_coarsen_the_loss(kind):
    model = build(token=True, distillation=classify_options.Distillation(kind=kind), teacher=teacher().float())
    assert model(Batch.of(IMAGES, LABELS))["loss"].dtype == torch.float64


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("hidden", [None, 7])
def test_facts_are_enough_to_build_it_again(hidden, token, loss):
    options = {
        "label_smoothing": 0.1,
        "mixup": 1.0,
        "distillation": classify_options.Distillation(),
        "teacher": teacher(),
    }
    if loss == "sigmoid":
        options = {"loss": loss, "head_bias": -10, "cutmix": 1.0}
    model = build(hidden=hidden, token=token, **options).eval()
    facts = json.loads(json.dumps(model.facts))
    again = (
        Classify(classify_options.Classify(**facts["classifier"]), encoder=ViT(vit_options.ViT(**facts["encoder"])))
        .double()
        .eval()
    )
    again.load_state_dict(model.state_dict())
    assert again.classes == CLASSES
    assert torch.equal(*(one.probabilities(one.logits(IMAGES)) for one in (again, model)))
    assert torch.equal(again.logits(IMAGES), model.logits(IMAGES))


WEIGHTS = [0.2, 3.0, 0.0, 1.5, 0.7]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("way", ["mixup", None])
def test_class_weights_are_factors_of_the_losses_of_the_images(way, smoothing):
    model = build(class_weights=WEIGHTS, label_smoothing=smoothing)
    assert not any("class_weights" in name for name in model.state_dict())
    labels: torch.Tensor = LABELS
    shares = one_hot()
    if way == "mixup":
        shares = [
            [0.3 * a + 0.7 * b for a, b in zip(*both, strict=True)] for both in zip(shares, shares[::-1], strict=True)
        ]
        labels = torch.tensor(shares, dtype=torch.float64)
    logits = model.logits(IMAGES)
    found = model._loss(logits, labels)
    expected = 0.0
    for row, wanted in zip(logits.tolist(), shares, strict=True):
        guesses = [math.log(guess) for guess in softmax(row)]
        for weight, share, guess in zip(WEIGHTS, wanted, guesses, strict=True):
            expected -= weight * share * ((1 - smoothing) * guess + smoothing * sum(guesses) / len(guesses))
    assert found.item() == pytest.approx(expected / len(LABELS), rel=1e-9)
    if not smoothing:
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        theirs = nn.functional.cross_entropy(logits, labels, weights)
        total = weights[LABELS].sum() if way is None else len(LABELS)  # what torch divides by
        assert found.item() == pytest.approx((theirs * total / len(LABELS)).item(), rel=1e-9)


def test_an_image_of_a_class_of_weight_0_has_no_loss_also_if_labels_are_smoothed():
    model = build(class_weights=WEIGHTS, label_smoothing=0.1)
    assert model(Batch.of(IMAGES[:2], torch.tensor([2, 2])))["loss"].item() == 0
    plain = build(label_smoothing=0.1)(Batch.of(IMAGES[:2], torch.tensor([1, 1])))["loss"].item()
    assert model(Batch.of(IMAGES[:2], torch.tensor([1, 1])))["loss"].item() == pytest.approx(3.0 * plain, rel=1e-9)


def test_weighted_micro_batches_add_up_to_the_batch_and_equal_weights_are_none():
    model = build(class_weights=WEIGHTS)
    whole = model(Batch.of(IMAGES, LABELS))["loss"]
    halves = [model(Batch.of(IMAGES[part], LABELS[part]))["loss"] for part in (slice(3), slice(3, 6))]
    assert whole.item() == pytest.approx(sum(halves).item() / 2, rel=1e-12)
    plain, equal = (build(class_weights=weights)(Batch.of(IMAGES, LABELS))["loss"] for weights in (None, [1.0] * 5))
    assert plain.item() == pytest.approx(equal.item(), rel=1e-12)


def test_balanced_weights_are_those_of_scikit_learn():
    labels = torch.tensor([0, 0, 0, 1, 3, 3, 3, 3, 3, 4])
    present = labels.unique()
    theirs = compute_class_weight("balanced", classes=present.numpy(), y=labels.numpy()) * len(present) / 5
    assert balanced(labels, 5) == pytest.approx([*theirs[:2], 0.0, *theirs[2:]])


@pytest.mark.parametrize("options", [{}, {"kind": "hard"}, {"kind": "soft", "token": True}])
def test_one_graph_serves_every_step(options):
    options = dict(options)
    if kind := options.pop("kind", None):
        options |= {"distillation": classify_options.Distillation(kind=kind), "teacher": teacher()}
    model, graphs = build(**options), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for step in range(3):
        loss = compiled(Batch.of(IMAGES.roll(step, 0), LABELS))["loss"]
        assert loss.item() == pytest.approx(model(Batch.of(IMAGES.roll(step, 0), LABELS))["loss"].item(), rel=1e-12)
    assert len(graphs) == 1


def test_a_new_share_makes_no_new_graph():
    model, graphs = build(mixup=0.8, cutmix=1.0), []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled, counts = torch.compile(model, backend=count), []
    for step in range(6):
        torch.manual_seed(step)
        loss = compiled(Batch.of(IMAGES, LABELS))["loss"]
        counts.append(len(graphs))
        torch.manual_seed(step)
        assert loss.item() == pytest.approx(model(Batch.of(IMAGES, LABELS))["loss"].item(), rel=1e-12)
    assert counts[0] == counts[-1] > 0


def test_it_learns_to_tell_colours_apart():
    model = build(random=False, hidden=16, mixup=0.2, cutmix=0.2, label_smoothing=0.1)
    labels = torch.arange(5).repeat(4)
    levels = (labels * 50)[:, None, None, None].expand(-1, 3, 8, 8)
    images = (levels + torch.randint(0, 20, levels.shape)).to(torch.uint8)
    optimizer = torch.optim.AdamW(parameter_groups(model.named_parameters(), 0.0), lr=1e-2)
    for _ in range(600):
        optimizer.zero_grad()
        model(Batch.of(images, labels))["loss"].backward()
        optimizer.step()
    result = model.eval()(Batch.of(images, labels))
    assert result["accuracy"] == 1
    assert result["loss"] < 1.0 < math.log(5)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"classes": ("ant", "bee", "dog", "cat", "elk")}, r"its class 2 \(of 5\) is dog, not cat \(of 5\)$"),
        ({"classes": CLASSES[:4]}, r"its class 4 \(of 4\) is None, not elk \(of 5\)$"),
        ({"classes": (*CLASSES, "fox")}, r"its class 5 \(of 6\) is fox, not None \(of 5\)$"),
        ({"vit": {"image_size": [8, 12]}}, "takes images of 3x8x12, this encoder takes 3x8x8$"),
        ({"vit": {"channels": 1}}, "takes images of 1x8x8, this encoder takes 3x8x8$"),
    ],
)
def test_refuses_a_teacher_of_other_classes_or_images(other, message):
    with pytest.raises(UserError, match=f"^distillation.teacher: .*{message}"):
        build(distillation=classify_options.Distillation(), teacher=teacher(**other))


@pytest.mark.parametrize("compiled", [False, True])
def test_refuses_images_without_labels(compiled):
    model: nn.Module = torch.compile(build(), backend="eager") if compiled else build()
    with pytest.raises(UserError, match="needs labels"):
        model(Batch.of(IMAGES, None))


def test_balanced_weights_need_the_labels():
    with pytest.raises(OptionError) as refused:
        build(class_weights="balanced")
    assert refused.value.name == "class_weights"
