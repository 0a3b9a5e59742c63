"""Frozen features: equal to a plain walk through the blocks, whatever mode or batch; the cache gives no others."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from images import picture, put
from ranks import results

from ssvit.data.augment.options import CenterCrop
from ssvit.data.sources import decode_options
from ssvit.data.sources.files import Files
from ssvit.data.sources.memory import Memory
from ssvit.errors import OptionError, UserError
from ssvit.evaluation import features
from ssvit.evaluation.features import Frozen, Pixels, cached, extract
from ssvit.evaluation.options import Features, FeatureSpec, spec_of
from ssvit.models.vit_options import ViT

VIEW = {"size": 8, "resize": None}
CROP = CenterCrop(**VIEW).build()


def vit(seed=0, **changes):
    torch.manual_seed(seed)
    options = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 3, "heads": 2, "dropout": 0.5,
               "stochastic_depth": 0.5, "mean": [0.1, 0.2, 0.3], "std": 0.25, **changes}  # fmt: skip
    encoder = ViT(**options).build()
    torch.nn.init.normal_(encoder.norm.weight)
    return encoder


def specs(encoder, **options):
    return Features(**options).specs(encoder.arguments)


def images(count=10, seed=0, labels=True):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Memory(pixels, torch.arange(count) % 2 if labels else None, ("a", "b"))


def walked(encoder, source, layer):
    """Return the tokens after a block, with and without the last norm, by hooks on a forward pass in eval mode."""
    kept = []
    hook = encoder.blocks[layer - 1].register_forward_hook(lambda *call: kept.append(call[2]))
    encoder.eval()
    with torch.no_grad():
        encoder(source.in_memory.float() / 255)
    hook.remove()
    (tokens,) = kept
    norm = encoder.norm
    return tokens, F.layer_norm(tokens, (encoder.width,), norm.weight, norm.bias, 1e-6).detach()


@pytest.mark.parametrize("pooling", ["class_token", "patch_mean", "both", "patches"])
@pytest.mark.parametrize("count", [1, 3])
def test_features_occupy_their_own_memory_alone(pooling, count):
    """Views of the tokens would keep all tokens of all images in memory until the end of an extraction."""
    frozen = Frozen(vit(), [FeatureSpec(layer, pooling=pooling) for layer in (1, 2, 3)], identity="x")
    for found in frozen(images(count).in_memory).values():
        assert found.untyped_storage().nbytes() == found.numel() * found.element_size()


@pytest.mark.parametrize("special", [{}, {"class_token": True, "distillation_token": True}, {"class_token": False}])
@pytest.mark.parametrize("norm", ["after", "before"])
def test_features_are_those_of_the_blocks(special, norm):
    encoder, source = vit(**{"pooling": "patch_mean", **special}), images()
    poolings = ("patch_mean", "class_token", "both") if encoder.num_prefix_tokens else ("patch_mean",)
    asked = [FeatureSpec(layer, pooling, norm) for layer in (1, 3) for pooling in poolings]
    found = extract(Frozen(encoder, asked, identity="x"), source, CROP, batch_size=4).values
    assert list(found) == [spec.name for spec in asked]
    for spec in asked:
        tokens = walked(encoder, source, spec.layer)[norm == "after"]
        patches, first = tokens[:, encoder.num_prefix_tokens :].mean(1), tokens[:, 0]
        right = {"patch_mean": patches, "class_token": first, "both": torch.cat([first, patches], 1)}[spec.pooling]
        torch.testing.assert_close(found[spec.name], right, rtol=1e-5, atol=1e-5)
        assert found[spec.name].dtype == torch.float32


def test_layers_beyond_the_last_that_is_read_are_not_computed():
    encoder = vit()
    encoder.blocks[2].register_forward_hook(lambda *call: pytest.fail("computed"))
    extract(Frozen(encoder, [FeatureSpec(2)], identity="x"), images(), CROP)


@pytest.mark.parametrize("mode", [True, False])
def test_features_are_read_in_eval_mode_and_the_mode_is_put_back(mode):
    encoder = vit()
    function = Frozen(encoder, [FeatureSpec(3)], identity="x")
    right = function(images().in_memory)
    encoder.train(mode)
    found = function(images().in_memory)
    torch.testing.assert_close(found, right, rtol=0, atol=0)
    assert all(module.training == mode for module in encoder.modules())
    with pytest.raises(OptionError, match=r"^images="):
        function(torch.zeros(1, 3, 5, 4))
    assert all(module.training == mode for module in encoder.modules())


def test_images_come_once_in_order_with_labels_and_places():
    source = images()
    told = []
    found = extract(Pixels(), source, CROP, batch_size=4, progress=lambda *call: told.append(call))
    torch.testing.assert_close(found.values["pixels"], source.in_memory.flatten(1) / 255)
    assert (found.labels.tolist(), found.indices.tolist()) == (source.labels.tolist(), list(range(10)))
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert extract(Pixels(), images(labels=False), CROP).labels is None


def test_large_images_are_averaged_as_pixels():
    source = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    right = source.unflatten(2, (32, 2)).unflatten(4, (32, 3)).mean((3, 5))
    torch.testing.assert_close(Pixels()(source)["pixels"], right.flatten(1))


def test_features_that_are_not_finite_are_refused():
    encoder = vit()
    encoder.blocks[1].contract.bias.data[0] = math.nan
    extract(Frozen(encoder, [FeatureSpec(1)], identity="x"), images(), CROP)
    with pytest.raises(UserError, match=r"^layer2_patch_mean: "):
        extract(Frozen(encoder, [FeatureSpec(1), FeatureSpec(2)], identity="x"), images(), CROP)


def test_what_options_mean():
    encoder = vit()
    assert specs(encoder) == [FeatureSpec(3, "class_token", "after")]
    assert specs(vit(pooling="patch_mean")) == [FeatureSpec(3, "patch_mean", "after")]
    assert specs(encoder, pooling="patch_mean") == [FeatureSpec(3, "patch_mean", "after")]
    assert specs(encoder, layer="all", pooling="both") == [FeatureSpec(layer, "both") for layer in (1, 2, 3)]
    assert specs(encoder, layer=[3, 1], norm="before") == [FeatureSpec(n, "class_token", "before") for n in (3, 1)]
    named = [FeatureSpec(layer, pooling, norm) for layer in (1, 12) for norm in ("after", "before")
             for pooling in ("patch_mean", "class_token", "both")]  # fmt: skip
    assert len({one.name for one in named}) == 12
    assert [spec_of(f"seal {one.name}") for one in named] == named
    assert spec_of("pixels") is spec_of("layer0_both") is None
    for options, name in (
        ({"layer": 4}, "layer=4"), ({"layer": 0}, "layer=0"), ({"layer": "first"}, "layer=first"),
        ({"layer": []}, "layer="), ({"layer": [1, 1]}, "layer="), ({"layer": True}, "layer=true"),
        ({"pooling": "max"}, "pooling=max"), ({"norm": "no"}, "norm=no"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=name):
            specs(encoder, **options)
    with pytest.raises(OptionError, match=r"pooling=both: .*patch_mean"):
        specs(vit(class_token=False, pooling="patch_mean"), pooling="both")
    with pytest.raises(OptionError, match=r"^layer=4: .*\b3\b"):
        Frozen(encoder, [FeatureSpec(4)], identity="x")


@pytest.fixture
def counted(monkeypatch):
    """Return how often features were computed."""
    calls = []
    compute = features.extract
    monkeypatch.setattr(features, "extract", lambda *a, **k: calls.append(1) or compute(*a, **k))
    return calls


def test_kept_features_are_the_same_and_others_are_computed(tmp_path, counted):
    encoder, source, folder = vit(), images(), tmp_path / "deep" / "cache"
    function = Frozen(encoder, [FeatureSpec(1), FeatureSpec(3)], identity="seal")
    first = cached(folder, function, source, CROP, transform_options=VIEW)
    again = cached(folder, function, source, CROP, transform_options=VIEW, batch_size=3)
    assert len(counted) == 1
    torch.testing.assert_close(again.values, first.values, rtol=0, atol=0)
    assert again.labels.equal(first.labels)
    assert again.indices.equal(first.indices)

    def missed(*, function=function, source=source, crop=CROP, transform_options=VIEW, **options):
        before = len(counted)
        found = cached(folder, function, source, crop, transform_options=transform_options, **options)
        return len(counted) > before, found

    assert missed(function=Frozen(vit(1), [FeatureSpec(1), FeatureSpec(3)], identity="other"))[0]
    assert missed(function=Frozen(encoder, [FeatureSpec(1), FeatureSpec(3, "both")], identity="seal"))[0]
    for asked in ([FeatureSpec(3)], [FeatureSpec(3, "both"), FeatureSpec(3), FeatureSpec(1)]):
        is_missed, found = missed(function=Frozen(encoder, asked, identity="seal"))
        assert not is_missed
        assert list(found.values) == [spec.name for spec in asked]
        assert found.values[asked[-1].name].equal(first.values[asked[-1].name])
    assert missed(function=Pixels())[0]
    assert missed(source=images(seed=1))[0]
    assert missed(transform_options={"size": 8, "resize": 9}, crop=CenterCrop(size=8, resize=9).build())[0]
    halved = Frozen(encoder, [FeatureSpec(1), FeatureSpec(3)], identity="seal")
    halved.prepare(torch.device("cpu"), "bf16")
    assert missed(function=halved)[0]
    assert not missed()[0]
    renamed = Memory(source.in_memory, 1 - source.labels, ("b", "a"))
    is_missed, found = missed(source=renamed)
    assert not is_missed
    assert found.labels.equal(renamed.labels)


def extraction(paths: list[str]) -> str:
    """Return the error of the features of some files, in one of several processes."""
    with pytest.raises(UserError) as error:
        extract(Pixels(), Files(paths), CROP, batch_size=4)
    return str(error.value)


def test_too_many_unreadable_files_of_all_processes_stop_each(tmp_path):
    paths = [str(put(tmp_path / f"{number}.bmp", picture(number, "BMP", (8, 8)))) for number in range(40)]
    for path in paths[-2:]:  # too few of those that the second process reads
        put(Path(path), b"damaged")
    assert all(message.startswith("2 of 40 ") for message in results(extraction, 2, tmp_path, paths))


def test_the_cost_of_an_image_is_measured_in_spite_of_unreadable_files(tmp_path):
    paths = [str(put(tmp_path / f"{number}.bmp", picture(number, "BMP", (8, 8)))) for number in range(20)]
    put(tmp_path / "3.bmp", b"damaged")
    seconds, few = features.timed(Pixels(), Files(paths), CROP)
    assert seconds > 0
    assert 3 not in few.indices.tolist()


def test_features_of_replaced_files_or_of_another_decoding_are_computed(tmp_path, counted, monkeypatch):
    paths = [str(put(tmp_path / "images" / f"{number}.bmp", picture(number, "BMP", (8, 8)))) for number in range(3)]

    def found():
        function = Frozen(vit(), [FeatureSpec(3)], identity="seal")
        (values,) = cached(tmp_path / "cache", function, Files(paths), CROP, transform_options=VIEW).values.values()
        return values

    before = found()
    put(tmp_path / "images" / "1.bmp", picture(7, "BMP", (8, 8)))
    assert (found() != before).any(1).tolist() == [False, True, False]
    assert len(counted) == 2
    monkeypatch.setattr(decode_options, "VERSION", 0)
    found()
    assert len(counted) == 3


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign", "empty"])
def test_a_damaged_file_is_made_anew(tmp_path, counted, damage):
    function, source = Frozen(vit(), [FeatureSpec(3)], identity="seal"), images()
    right = cached(tmp_path, function, source, CROP, transform_options=VIEW)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    cached(tmp_path, Pixels(), source, CROP, transform_options=VIEW)
    (other,) = set(tmp_path.iterdir()) - {path}
    path.write_bytes({"truncated": whole[:-9], "flipped": flipped, "foreign": other.read_bytes(), "empty": b""}[damage])
    found = cached(tmp_path, function, source, CROP, transform_options=VIEW)
    torch.testing.assert_close(found.values, right.values, rtol=0, atol=0)
    assert len(counted) == 3
    cached(tmp_path, function, source, CROP, transform_options=VIEW)
    assert len(counted) == 3


def test_cached_features_of_other_readable_images_are_reported():
    few, all_of_them = (extract(Pixels(), images(count), CROP) for count in (4, 10))
    assert all_of_them.joined(replace(all_of_them, values={"more": torch.zeros(10, 1)})).values.keys() == {
        "pixels", "more",
    }  # fmt: skip
    with pytest.raises(UserError, match="cache=null"):
        all_of_them.joined(few)
