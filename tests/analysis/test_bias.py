"""Changes of images, receptive fields and consistency equal plain loops."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from ssvit.analysis import bias
from ssvit.analysis.inside import Pictures
from ssvit.models.vit_options import ViT


@pytest.mark.parametrize(("down", "right"), [(2, 0), (-3, 0), (0, 5), (1, -4)])
def test_a_translation_reflects_at_the_borders(down, right):
    images = torch.randint(256, (2, 3, 7, 6), dtype=torch.uint8)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (5, 5), (5, 5)), mode="reflect")
    moved = bias.translated(images, down, right).numpy()
    for row in range(7):
        for column in range(6):
            assert (moved[:, :, row, column] == padded[:, :, 5 + row - down, 5 + column - right]).all()


def test_patches_are_permuted_in_each_image_and_can_be_put_back():
    numbered = torch.arange(12).view(1, 1, 3, 4).repeat(3, 1, 1, 1)  # the number of each patch
    images = torch.rand(3, 3, 6, 8)
    sizes = [numbered.repeat_interleave(2, 2).repeat_interleave(2, 3), images]
    whose, changed = (bias.shuffled(values, 2, 0) for values in sizes)
    back = torch.zeros_like(images)
    for image in range(3):
        seen = []
        for row in range(0, 6, 2):
            for column in range(0, 8, 2):
                (number,) = whose[image, 0, row : row + 2, column : column + 2].unique().tolist()
                y, x = 2 * (number // 4), 2 * (number % 4)
                back[image, :, y : y + 2, x : x + 2] = changed[image, :, row : row + 2, column : column + 2]
                seen.append(number)
        assert sorted(seen) == list(range(12))
    assert back.equal(images)
    assert not whose[0].equal(whose[1])
    assert bias.shuffled(images, 2, 0).equal(changed)
    assert not bias.shuffled(images, 2, 1).equal(changed)


class Convolutions(nn.Module):
    """Two layers of convolutions without an activation, whose features are those of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, (3, 1), padding=(1, 0))
        self.stack = nn.Sequential(first, second).double()

    def maps(self, images):
        first = self.stack[0](images.double())
        return [first.movedim(1, -1), self.stack[1](first).movedim(1, -1)]

    def represent(self, images):
        return images[:, :, 2, 3].float() / 255


def test_receptive_fields_are_differences_of_the_central_features():
    encoder, images = Convolutions(), torch.rand(3, 3, 7, 9)
    fields = bias.receptive_fields(encoder, images, batch_size=2)
    expected = torch.zeros(2, 7, 9).double()
    with torch.no_grad():
        before = [of_layer[:1, 3, 4].sum() for of_layer in encoder.maps(images)]
        for channel in range(3):
            for row in range(7):
                for column in range(9):
                    moved = images[:1].double()
                    moved[0, channel, row, column] += 1
                    for layer, of_layer in enumerate(encoder.maps(moved)):
                        expected[layer, row, column] += (of_layer[0, 3, 4].sum() - before[layer]).abs()
    torch.testing.assert_close(fields, expected, rtol=1e-5, atol=1e-7)
    inside = [(field > 0).nonzero() for field in fields]
    assert [[(side.min().item(), side.max().item()) for side in places.T] for places in inside] == [
        [(2, 4), (3, 5)], [(1, 5), (3, 5)],
    ]  # fmt: skip


def test_the_extent_is_the_mean_distance_from_the_centroid():
    field = torch.rand(5, 4).double()
    places = [(row, column, field[row, column].item()) for row in range(5) for column in range(4)]
    total = sum(weight for *_, weight in places)
    centre = [sum(place[axis] * place[2] for place in places) / total for axis in (0, 1)]
    expected = sum(math.dist(place[:2], centre) * place[2] for place in places) / total
    assert bias.extent(field) == pytest.approx(expected)
    moved = torch.zeros(9, 9).double()
    moved[3:8, 1:5] = 7 * field
    assert bias.extent(moved) == pytest.approx(expected)


def test_consistency_is_that_of_a_loop_over_images():
    torch.manual_seed(0)
    train, images = (torch.randint(256, (count, 3, 6, 8), dtype=torch.uint8) for count in (20, 9))
    labels = torch.arange(20) % 4 + 1
    shown: list[tuple[int, int]] = []
    result = bias.measure(
        Convolutions(), Pictures(train, ("",) * 20, labels), Pictures(images, ("",) * 9, labels[:9]), patch_size=2,
        batch_size=4, seed=0, progress=lambda *counts: shown.append(counts),
    )  # fmt: skip
    copies = 2 + 4 * 2  # unchanged, shuffled, and two translations in four directions
    assert shown[-1] == (20 + 9 * copies, 20 + 9 * copies)
    assert all(0 < after - before <= 4 for (before, _), (after, _) in itertools.pairwise(shown))
    of_train = train[:, :, 2, 3].double().numpy() / 255
    mean = of_train.mean(0)

    def nearest(vector):
        distances = {
            number: math.dist(vector, of_train[labels.numpy() == number].mean(0)) for number in labels.unique().tolist()
        }
        return min(distances, key=distances.get)

    def compared(changes):
        cosines, changed = [], []
        for changed_images in changes:
            for before, after in zip(images, changed_images, strict=True):
                a, b = (image[:, 2, 3].double().numpy() / 255 for image in (before, after))
                cosines.append((a - mean) @ (b - mean) / np.linalg.norm(a - mean) / np.linalg.norm(b - mean))
                changed.append(nearest(a) != nearest(b))
        return pytest.approx(np.mean(cosines), abs=1e-6), pytest.approx(np.mean(changed))

    assert [*result.cosine] == [*result.changed] == ["1 px", "2 px", "shuffled"]
    for shift in (1, 2):
        moves = [(shift, 0), (-shift, 0), (0, shift), (0, -shift)]
        expected = compared([bias.translated(images, *move) for move in moves])
        assert (result.cosine[f"{shift} px"], result.changed[f"{shift} px"]) == expected
    assert (result.cosine["shuffled"], result.changed["shuffled"]) == compared([bias.shuffled(images, 2, 0)])
    right = [
        nearest(image[:, 2, 3].double().numpy() / 255) == label for image, label in zip(images, labels, strict=False)
    ]
    assert result.accuracy == pytest.approx(np.mean(right))
    assert result.attention_distance == []


@pytest.mark.parametrize(("positions", "is_invariant"), [("none", True), ("sine_cosine_2d", False)])
def test_a_vit_without_positions_does_not_see_the_order_of_its_patches(positions, is_invariant):
    torch.manual_seed(0)
    shape = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2}
    encoder = ViT(**shape, positions=positions).build().eval()
    images = torch.randint(256, (16, 3, 16, 16), dtype=torch.uint8)
    pictures = Pictures(images, ("",) * 16)
    result = bias.measure(encoder, pictures, pictures, patch_size=4, batch_size=8, seed=0)
    assert (result.cosine["shuffled"] == pytest.approx(1, abs=1e-4)) == is_invariant
    assert (result.changed, result.accuracy) == ({}, None)
    assert len(bias.plot({"vit": result}, 1).panels) == 2
    assert len(result.receptive_field) == len(result.attention_distance) == 2
