"""Segmentation: its loss by loops in float64, its heads, label maps of windows, and measures by another library."""

import math

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from command import error_of
from ranks import results
from runs import final
from sklearn.metrics import jaccard_score

from ssvit.data.augment.options import CenterCrop
from ssvit.data.batch import Batch
from ssvit.data.sources.memory import Memory
from ssvit.data.windows import boxes
from ssvit.errors import OptionError, UserError
from ssvit.evaluation.evaluators.options import Segmentation as EvaluatorOptions
from ssvit.evaluation.segmentation import LabelMaps, class_counts, interval_of_miou, mean_iou
from ssvit.models.vit_options import ViT
from ssvit.objectives.segment import Segment, balanced
from ssvit.objectives.segment_options import Segment as Options

K = len(tiny.CLASSES)


def model(**options) -> Segment:
    objective = tiny.segment(**options)
    torch.manual_seed(1)
    return tiny.shaken(objective).eval()


def batch(count: int = 4) -> Batch:
    return Batch.of_view(tiny.pictures(count))._replace(targets={"masks": tiny.masks(count)})


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 2.0]])
def test_the_loss_is_that_of_loops_over_labelled_pixels(weights):
    objective, given = model(class_weights=weights).double(), batch()
    logits, masks = objective.logits(given.images), given.targets["masks"]
    assert logits.shape == (4, K, 16, 16)
    total, right, labelled = 0.0, 0, 0
    for pixels, mask in zip(logits.flatten(2).mT.reshape(-1, K).tolist(), masks.flatten().tolist(), strict=True):
        if mask != 255:
            loss = math.log(sum(map(math.exp, pixels))) - pixels[mask]
            total += loss * (1 if weights is None else weights[mask])
            right, labelled = right + (pixels.index(max(pixels)) == mask), labelled + 1
    found = objective(given)
    assert found["loss"].item() == pytest.approx(total / masks.numel())
    assert found["pixel_accuracy"].item() == pytest.approx(right / labelled)


def test_ignored_pixels_alone_give_no_loss_and_no_gradient():
    objective = model()
    found = objective(batch()._replace(targets={"masks": torch.full((4, 16, 16), 255, dtype=torch.uint8)}))
    assert found["loss"].item() == 0
    assert all(not grad.any() for grad in torch.autograd.grad(found["loss"], [*objective.head.parameters()]))


def test_balanced_weights_give_each_class_the_same_share_of_the_loss():
    source = Memory(tiny.pictures(), masks=tiny.masks(), mask_classes=tiny.CLASSES)
    weights = np.array(balanced(source, K + 1))
    counts = np.bincount(tiny.masks().flatten(), minlength=256)[: K + 1]
    assert (weights * counts)[:K] == pytest.approx([counts.sum() / (K + 1)] * K)
    assert weights[K] == 0


@pytest.mark.parametrize(("options", "layers"), [({}, (2,)), ({"head": "maps"}, (1, 2)), ({"layers": [2, 1]}, (2, 1))])
def test_heads_receive_the_layers_that_they_name(options, layers):
    objective, images = model(**options), tiny.pictures(2)
    assert objective.maps == layers
    outputs = [objective.encoder.norm(tokens) for tokens in objective.encoder.layers(images)]
    maps = [outputs[layer - 1][:, 1:].unflatten(1, (4, 4)).movedim(-1, 1) for layer in layers]
    expected = objective.head(maps)
    torch.testing.assert_close(objective.scores(images), expected)
    assert expected.shape[2:] == ((8, 8) if objective.options.head == "maps" else (4, 4))


@pytest.mark.parametrize("positions_at", ["stem", "every_layer", "every_layer_shared"])
def test_each_weight_that_is_trained_has_a_gradient(positions_at):
    torch.manual_seed(0)
    encoder = ViT(
        image_size=16, patch_size=4, width=16, depth=3, heads=2, positions="learned_2d", positions_at=positions_at
    ).build()
    objective = Segment(Options(classes=tiny.CLASSES, layers=[1]), encoder=encoder)
    objective = tiny.shaken(objective).train()
    objective.scores(tiny.pictures(2)).square().sum().backward()
    assert all(weight.grad is not None for weight in objective.parameters() if weight.requires_grad)


def test_the_decay_of_the_rate_counts_the_layers_that_are_computed():
    objective = tiny.segment(layers=[1])
    groups = objective.parameter_groups(weight_decay=0.1, layer_decay=0.5)
    share = {id(weight): group["share"] for group in groups for weight in group["params"]}
    weights = (objective.encoder.blocks[0].norm1.weight, objective.encoder.patch.weight, *objective.head.parameters())
    assert [share[id(weight)] for weight in weights] == [0.5, 0.25, 1.0, 1.0]


def test_a_run_with_layers_that_are_not_computed_continues_to_the_same_bits(tmp_path):
    def objective():
        return tiny.segment(layers=[1])

    assert not any(weight.requires_grad for weight in objective().encoder.blocks[1].parameters())
    tiny.train(tmp_path / "whole", objective=objective())
    with pytest.raises(tiny.Interrupted):
        tiny.train(tmp_path / "broken", objective=tiny.interrupted(objective(), 8), evaluators={})
    tiny.train(tmp_path / "broken", objective=objective())
    assert final(tmp_path / "broken") == final(tmp_path / "whole")
    with pytest.raises(OptionError, match="layers"):
        tiny.segment(layers=[1], trained=1)


def test_a_model_without_masks_is_one_line():
    objective = tiny.segment()
    with pytest.raises(UserError):
        objective(Batch.of_view(tiny.pictures(2)))
    assert Options(classes=tiny.CLASSES).maps(12) == (12,)
    assert Options(classes=tiny.CLASSES, head="maps").maps(12) == (3, 6, 9, 12)


def label_maps(objective: Segment, batch_size: int = 5, **view) -> LabelMaps:
    return LabelMaps(objective, CenterCrop(size=16, **view).build(), objective.scores, batch_size)


@torch.no_grad()
@pytest.mark.parametrize("head", ["linear", "maps"])
def test_the_label_map_of_one_window_is_that_of_its_logits(head):
    objective = model(head=head)
    images = tiny.pictures(3)
    assert torch.stack(label_maps(objective)(list(images))).equal(objective.logits(images).argmax(1).to(torch.uint8))
    wide = F.interpolate(images, size=(32, 32), mode="nearest")  # its windows have a size of 16 after resizing
    (answer,) = label_maps(objective)([wide[0]])
    resized = CenterCrop(size=16).build()(wide[:1])
    expected = F.interpolate(objective.scores(resized), size=(32, 32), mode="bilinear").argmax(1)[0]
    assert answer.equal(expected.to(torch.uint8))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.25, 0.3, 0.5, 0.9])
def test_windows_overlap_by_at_least_the_share_of_a_side(share):
    """The model has windows of 4 x 4 patches: 0.3 of a side are two of them, and 0.9 at most three."""
    objective, seen = model(resize=False, overlap=share), []

    def scores(windows):
        seen.append(len(windows))
        return torch.zeros(len(windows), K, 4, 4)

    LabelMaps(objective, CenterCrop(size=16).build(), scores, 1000)([torch.zeros(3, 16, 400, dtype=torch.uint8)])
    patches = next(count for count in range(4) if count >= min(share * 4, 3))
    assert seen == [len([*boxes((4, 100), (4, 4), patches)])]


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 40), (37, 29), (9, 50), (10, 11)])
def test_windows_are_averaged_and_small_images_padded(size):
    """By loops over windows and pixels, in the resolution of the images."""
    objective = model(resize=False, overlap=0.5)
    image = tiny.pictures(1, 64)[0, :, : size[0], : size[1]]
    cells = [max(-(-side // 4), 4) for side in size]
    canvas = torch.zeros(3, cells[0] * 4, cells[1] * 4, dtype=torch.uint8)
    canvas[:, : size[0], : size[1]] = image
    centred = objective.scores(canvas[None, :, :16, :16]).mean((0, 2, 3))  # so that no class leads everywhere
    objective.head.output.bias -= centred
    (answer,) = label_maps(objective)([image])
    total, count = torch.zeros(K, *cells), torch.zeros(cells)
    for top, left, height, width in boxes((cells[0], cells[1]), (4, 4), 2):
        window = canvas[None, :, 4 * top : 4 * (top + height), 4 * left : 4 * (left + width)]
        total[:, top : top + height, left : left + width] += objective.scores(window)[0]
        count[top : top + height, left : left + width] += 1
    pixels = F.interpolate((total / count)[None], scale_factor=4, mode="bilinear")[0, :, : size[0], : size[1]]
    assert answer.shape == size
    assert (answer == pixels.argmax(0)).double().mean() > 0.999  # up to ties within rounding errors
    assert len(answer.unique()) > 1


def test_measures_are_those_of_scikit_learn_and_of_a_bootstrap_by_loops():
    generator = np.random.default_rng(0)
    truth = torch.from_numpy(generator.integers(0, K, (30, 6, 6))).to(torch.uint8)
    answers = torch.where(torch.from_numpy(generator.random((30, 6, 6)) < 0.6), truth, (truth + 1) % K)
    truth[torch.from_numpy(generator.random((30, 6, 6)) < 0.1)] = 255
    counts = torch.stack([class_counts(*pair, K + 1) for pair in zip(answers, truth, strict=True)])
    known = truth != 255
    assert mean_iou(counts.sum(0)).item() == pytest.approx(jaccard_score(truth[known], answers[known], average="macro"))
    drawn = [mean_iou(counts[generator.integers(0, 30, 30)].sum(0)).item() for _ in range(2000)]
    assert interval_of_miou(counts) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.01)
    nothing_known = torch.zeros(30, *counts.shape[1:], dtype=counts.dtype)
    assert interval_of_miou(torch.cat([nothing_known, counts])) == interval_of_miou(counts)
    assert all(map(math.isnan, interval_of_miou(nothing_known)))


def test_the_interval_of_the_mean_iou_is_around_it_with_rare_classes():
    truth = torch.zeros(24, 6, 6, dtype=torch.uint8)
    for number in range(1, 9):  # each class is in one image, and none is predicted
        truth[number, : number // 2 + 1] = number
    counts = torch.stack([class_counts(torch.zeros_like(one), one, 9) for one in truth])
    low, high = interval_of_miou(counts)
    value = mean_iou(counts.sum(0)).item()
    assert low < value < high < 1.2 * value


def evaluated() -> dict[str, float]:
    source = Memory(tiny.pictures(40), masks=tiny.masks(40), mask_classes=tiny.CLASSES)
    return dict(EvaluatorOptions().build(source=source, transform=CenterCrop(size=16).build())(model()).metrics)


def test_the_evaluation_of_two_processes_is_that_of_one(tmp_path):
    with torch.no_grad():
        alone = evaluated()
    assert alone["images"] == 40
    assert results(evaluated, 2, tmp_path) == [alone, alone]


@torch.no_grad()
def test_the_evaluation_measures_masks_in_their_own_resolution():
    """Its counts are those of the label maps; constant is the model that ignores the image."""
    objective = model()
    images, masks = tiny.pictures(20, 24), tiny.masks(20, 24)
    source = Memory(images, masks=masks, mask_classes=tiny.CLASSES)
    evaluator = EvaluatorOptions(batch_size=7).build(source=source, transform=CenterCrop(size=16).build())
    metrics = evaluator(objective).metrics
    answers = torch.stack(label_maps(objective)(list(images)))
    known = masks != 255
    expected = jaccard_score(masks[known], answers[known], average="macro", labels=[0, 1, 2])
    assert metrics["miou"] == pytest.approx(expected)
    assert metrics["pixel_accuracy"] == pytest.approx((answers == masks)[known].double().mean().item())
    constant = np.full(int(known.sum()), int(masks[known].bincount().argmax()))
    assert metrics["miou_constant"] == pytest.approx(jaccard_score(masks[known], constant, average="macro"))
    other = Memory(images, masks=masks, mask_classes=("ant", "bee", "dog"))
    for source in (Memory(images), other):
        evaluator = EvaluatorOptions().build(source=source, transform=CenterCrop(size=16).build())
        error_of(evaluator, objective)
