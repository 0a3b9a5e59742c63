"""Inference in float32 and bfloat16: prepared copies, and features, stores and caches of one precision."""

import copy
from pathlib import Path

import pytest
import torch

import ssvit
from ssvit.engine import private
from ssvit.evaluation.features import Frozen
from ssvit.evaluation.options import FeatureSpec
from ssvit.kernels import accelerate, inference, operators
from ssvit.models.vit_options import ViT

CPU = torch.device("cpu")
IMAGES = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def model():
    torch.manual_seed(3)
    return ViT(image_size=16, patch_size=4, width=32, depth=2, heads=2).build().eval()


@pytest.fixture(params=["built", "not built"])
def built(request, monkeypatch):
    """Whether the operators are built, and without them."""
    if request.param == "not built":
        monkeypatch.setattr(operators, "library", lambda: None)
    elif operators.library() is None:
        pytest.skip("the kernels are not built")
    return request.param == "built"


@torch.no_grad()
def features(model, precision):
    with inference.autocast(precision, CPU):
        return inference.prepared(model, precision)(IMAGES).float()


@pytest.mark.parametrize(
    ("device", "native", "expected"),
    [("cpu", True, "bf16"), ("cpu", False, 32), ("cuda", True, "bf16"), ("mps", 0, 32)],
)
def test_auto_is_bfloat16_where_it_is_native(device, native, expected, monkeypatch):
    monkeypatch.setattr(private, "_IS_INTEL", False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    device = torch.device(device)
    assert inference.resolved("auto", device) == expected
    assert [inference.resolved(precision, device) for precision in (32, "bf16")] == [32, "bf16"]
    assert private.multiplies_bfloat16(device) == (expected == "bf16")


@pytest.mark.parametrize(
    ("intel", "half", "matrix_units", "expected"),
    [(True, True, False, 32), (True, True, True, "bf16"), (True, False, False, "bf16"), (False, True, False, "bf16")],
)
def test_intel_needs_matrix_units_to_be_faster_in_bfloat16(intel, half, matrix_units, expected, monkeypatch):
    monkeypatch.setattr(private, "_IS_INTEL", intel)
    monkeypatch.setattr(private, "_CAPABILITIES", {"avx512_fp16": half})
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: matrix_units)
    assert inference.resolved("auto", CPU) == expected
    assert private.multiplies_bfloat16()  # the operators can be built on all of them


def test_a_prepared_copy_computes_as_the_model_and_leaves_it_alone(model, built):
    before = copy.deepcopy(model.state_dict())
    right = model(IMAGES).detach()
    found = features(model, "bf16")
    assert torch.nn.functional.cosine_similarity(found, right).min() > 0.9995
    assert not torch.equal(found, right)
    assert features(model, 32).equal(right)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert type(model.patch) is torch.nn.Linear


def test_packed_weights_change_no_bit_and_are_not_used_after_a_change(model, built):
    if not built:
        pytest.skip("weights are packed for the kernels alone")
    plain, packed = copy.deepcopy(model), copy.deepcopy(model)
    for each in (plain, packed):
        accelerate.accelerate(each)
    accelerate.pack(packed)
    packs = [part.packed for part in packed.modules() if isinstance(part, accelerate.Linear)]
    assert None not in packs

    def both():
        with torch.autocast("cpu", torch.bfloat16):
            return plain(IMAGES), packed(IMAGES)

    with torch.no_grad():
        assert torch.equal(*both())
        for each in (plain, packed):
            for weight in each.parameters():
                weight.mul_(1.25)
        assert torch.equal(*both())
    losses = [out.float().square().sum() for out in both()]
    for loss in losses:
        loss.backward()
    assert all(one.grad.equal(two.grad) for one, two in zip(plain.parameters(), packed.parameters(), strict=True))


def test_features_are_named_by_their_precision(model):
    frozen = Frozen(model, [FeatureSpec(1)], identity="seal")
    float32 = frozen(IMAGES)
    names = [(frozen.identity, *frozen.identities.values())]
    for precision in (32, "bf16"):
        frozen.prepare(CPU, precision)
        names.append((frozen.identity, *frozen.identities.values()))
        (one,), (other,) = frozen(IMAGES).values(), float32.values()
        assert one.dtype == torch.float32
        assert one.equal(other) == (precision == 32)
    assert names[0] == names[1]
    assert not set(names[1]) & set(names[2])
    with torch.autocast("cpu", torch.bfloat16):
        frozen.prepare(CPU, 32)
        assert frozen(IMAGES)[frozen.specs[0].name].equal(float32[frozen.specs[0].name])


def test_a_loaded_encoder_computes_with_the_present_weights(built):
    path = Path(__file__).parents[1] / "fixtures" / "outputs" / "masked_patch_shapes"
    encoder, other = (ssvit.load(path, precision="bf16") for _ in range(2))
    images = torch.rand(2, 3, *encoder.module.image_size, generator=torch.Generator().manual_seed(0))
    before = encoder.features(images)
    with torch.no_grad():
        encoder.module.mean.mul_(0.5)
        for weight in encoder.module.parameters():
            weight.mul_(1.25)
    other.module.load_state_dict(encoder.module.state_dict())
    features = encoder.features(images)
    assert features.equal(other.features(images))
    assert not features.equal(before)
