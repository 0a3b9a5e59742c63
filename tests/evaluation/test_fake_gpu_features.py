"""Features of every evaluation on fake tensors of a GPU in float32, up to faiss and NumPy, which need real arrays.

Without a GPU, torch disables autocast on "cuda", so that bfloat16 cannot be tested here.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ssvit.evaluation.duplicates import Grey, Thumbnails
from ssvit.evaluation.features import Frozen, PatchPixels, Pixels
from ssvit.evaluation.options import FeatureSpec
from ssvit.models.timm_options import Timm
from ssvit.models.vit_options import Stem, ViT

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch is built without CUDA")
SIZE = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "heads": 2}
ENCODERS = {
    "vit": lambda: ViT(**SIZE, registers=2),
    "rotary": lambda: ViT(**SIZE, positions="rotary"),
    "hybrid": lambda: ViT(**SIZE | {"image_size": 32, "patch_size": 8}, stem=Stem(layers=[1], width=32)),
    "timm": lambda: Timm(model="vit_tiny_patch16_224", image_size=32),
}


def encoder(name):
    if name == "timm":
        pytest.importorskip("timm")
    return ENCODERS[name]().build()


def on_a_fake_gpu(function, shape, model=None):
    """Return the features of images of a shape."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        if model is not None:
            model.to_empty(device="cuda")
        mode.allow_non_fake_inputs = False
        return function(torch.empty(shape, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("name", ENCODERS)
def test_features_of_an_encoder_stay_on_the_gpu(name):
    model = encoder(name)
    specs = [
        FeatureSpec(layer, pooling, norm)
        for layer in (1, model.options.depth)
        for pooling in (*model.options.poolings, "patches")
        for norm in ("after", "before")
    ]
    shape = (3, 3, *model.image_size)
    frozen = Frozen(model, specs, identity="")
    expected = {name: value.shape for name, value in frozen(torch.zeros(shape, dtype=torch.uint8)).items()}
    features = on_a_fake_gpu(frozen, shape, model)
    assert {name: value.shape for name, value in features.items()} == expected
    assert {(value.device.type, value.dtype) for value in features.values()} == {("cuda", torch.float32)}


@pytest.mark.parametrize("function", [Pixels(), PatchPixels((4, 4)), Thumbnails(), Grey()])
def test_features_without_an_encoder_stay_on_the_gpu(function):
    (expected,), (features,) = (
        function(torch.zeros(3, 3, 48, 48)).values(),
        on_a_fake_gpu(function, (3, 3, 48, 48)).values(),
    )
    assert features.shape == expected.shape
    assert features.device.type == "cuda"


def test_a_tensor_on_the_cpu_is_an_error():
    model = encoder("vit")
    pooled = model.pooled
    model.pooled = lambda outputs, *rest: pooled(outputs + torch.ones(32), *rest)
    with pytest.raises(RuntimeError):
        on_a_fake_gpu(Frozen(model, [FeatureSpec(1)], identity=""), (3, 3, 16, 16), model)
