"""Principal components of patches as colours, and their place in the pictures of a report."""

import numpy as np
import torch
from sklearn.decomposition import PCA

from ssvit.data.augment.crop import CenterCrop
from ssvit.data.sources.memory import Memory
from ssvit.evaluation.features import FeatureSets
from ssvit.evaluation.report.figures import components, figures
from ssvit.evaluation.report.scores import Scores, Split
from ssvit.evaluation.report.side_by_side import SideBySide


def test_colours_are_the_components_of_a_library():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 4, 5, 9, generator=generator) * torch.tensor([9.0, 6, 4, 1, 1, 1, 1, 1, 1])
    found = components(values)
    assert found.shape == (7, 4, 5, 3)
    assert (found.min().item(), found.max().item()) == (0, 1)
    centred = values.double() - values.double().mean(0)
    theirs = PCA(3).fit_transform(centred.flatten(0, 2).numpy())
    inside = ((found > 0) & (found < 1)).flatten(0, 2).numpy()
    for color, expected, kept in zip(found.flatten(0, 2).T.numpy(), theirs.T, inside.T, strict=True):
        assert abs(np.corrcoef(color[kept], expected[kept])[0, 1]) > 0.9999
        assert kept.mean() > 0.97
    # What all images have in common at a place changes nothing.
    shared = 50 * torch.randn(4, 5, 9, generator=generator)
    torch.testing.assert_close(components(values + shared), found, rtol=0, atol=1e-4)


def test_what_does_not_vary_has_no_colour():
    assert torch.equal(components(torch.ones(2, 3, 3, 5)), torch.full((2, 3, 3, 3), 0.5))
    two = components(torch.rand(4, 3, 3, 2))
    assert torch.equal(two[..., 2], torch.full((4, 3, 3), 0.5))


def test_a_report_shows_patches_with_masks_or_without():
    images = torch.randint(0, 256, (8, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    source = Memory(images, torch.arange(8) % 2, ("a", "b"))
    masks = torch.zeros(8, 8, 8, dtype=torch.uint8)
    nothing = torch.zeros(8, 2, dtype=torch.int64)
    for kept in (None, masks):
        sets = FeatureSets({"layer1_patches": torch.rand(8, 2, 2, 6).half()}, source, torch.arange(8), nothing, kept)
        split = Split(("layer1_patches",), sets, sets, CenterCrop(size=8, resize=None))
        scores = Scores(
            probe="mine", columns=("test",), values={"layer1_patches": (0.5,)}, deviations={"layer1_patches": (None,)},
            best="layer1_patches", chosen_by="", options={}, numbers={}, predictions=kept,
        )  # fmt: skip
        made = figures({"mine": split}, [scores], SideBySide([scores], {"x": [""]}))
        name = "patches" if kept is None else "segmentation"
        titles = set(made[name].columns)
        assert {"image", "components"} <= titles
        assert made[name].png()
        assert ("predicted" in titles) == (kept is not None)
