"""The example of captioning: its decoder is causal, its loss falls, and its captions name what the images show."""

import importlib.util
from pathlib import Path

import pytest
import tiny
import torch
from tiny import TEACHER

from ssvit.data.sources import shapes_options
from ssvit.data.sources.shapes import shapes

SPEC = importlib.util.spec_from_file_location("captioning", Path(__file__).parents[2] / "examples" / "captioning.py")
captioning = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(captioning)
IMAGES = torch.randint(0, 256, (6, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
CAPTIONS = torch.randint(0, 5, (6, 4), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return captioning.Captioner(tiny.encoder(0.0), words=5, length=4, width=16)


def test_a_word_depends_on_the_image_and_on_the_words_before_it_alone(model):
    words = torch.nn.functional.pad(CAPTIONS + 1, (1, -1))
    with torch.no_grad():
        logits = model(IMAGES, words)
        for place in range(1, 4):
            changed = words.clone()
            changed[:, place] = changed[:, place] % 5 + 1
            difference = (model(IMAGES, changed) - logits).abs().amax((0, 2))
            assert (difference[:place] == 0).all()
            assert (difference[place:] > 1e-4).all()
        assert ((model(IMAGES.roll(1, 0), words) - logits).abs().amax((1, 2)) > 1e-4).all()


def test_captions_consist_of_the_most_probable_words(model):
    words = [[0] for _ in IMAGES]
    for _ in range(4):
        for image, before in zip(IMAGES, words, strict=True):
            with torch.no_grad():
                before.append(int(model(image[None], torch.tensor([before]))[0, -1].argmax()) + 1)
    assert (model.captions(IMAGES) + 1).tolist() == [word[1:] for word in words]


def test_the_loss_is_the_mean_over_all_words_and_falls(model):
    with torch.no_grad():
        total = 0.0
        for image, caption in zip(IMAGES, CAPTIONS, strict=True):
            for place, word in enumerate(caption):
                before = torch.cat((torch.tensor([0]), caption[:place] + 1))
                total -= model(image[None], before[None])[0, place].log_softmax(0)[word].item()
        assert model.loss(IMAGES, CAPTIONS).item() == pytest.approx(total / 24, rel=1e-5)
    losses = captioning.train(model, IMAGES, CAPTIONS, steps=60, batch=12)
    assert losses[-1] < 0.75 * losses[0]


def test_captions_name_colour_shape_and_place():
    image, mask = torch.zeros(3, 8, 10, dtype=torch.uint8), torch.zeros(8, 10, dtype=torch.uint8)
    mask[5:7, 1:4], image[1, 5:7, 1:4], image[0] = 3, 200, 90
    assert captioning.caption(image, mask, "star") == "a green star at the lower left"
    data = shapes(shapes_options.Shapes(images=30, held_out_images=1)).train
    assert [text[2] for text in captioning.captioned(data)] == [data.classes[label] for label in data.labels]


def test_three_encoders_are_compared(capsys):
    correct = captioning.main([str(TEACHER), "--steps=2", "--batch=4", "--images=20", "--held-out=10"])
    assert len(correct) == 3
    assert all(0 <= share <= 1 for share in correct.values())
    assert "loss" in capsys.readouterr().out
