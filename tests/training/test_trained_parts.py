"""Fine-tuning of parts of a model: which weights have gradients, and LoRA against its formula and when loaded."""

import copy

import pytest
import tiny
import torch
import torch.nn.functional as F
from runs import states

from ssvit.data.batch import Batch
from ssvit.loading import encoder as loading
from ssvit.loading import options as loading_options

LORA = {"trained": "head", "lora": {"rank": 2, "alpha": 3.0}}
LABELS = torch.arange(6) % 3
HEAD = {"head.weight", "head.bias"}
KINDS = {"head": {"trained": "head"}, "layer": {"trained": 1}, "lora": LORA}


def images(count: int = 6) -> torch.Tensor:
    return tiny.pictures(count)


def test_the_parts_that_are_trained():
    everything = {name for name, _ in tiny.classify().named_parameters()}
    blocks = {name for name in everything if name.startswith("encoder.blocks.")}
    norm = {"encoder.norm.weight", "encoder.norm.bias"}
    expected = {
        None: everything,
        "head": HEAD,
        1: HEAD | norm | {name for name in blocks if name.startswith("encoder.blocks.1.")},
        2: HEAD | norm | blocks,
    }
    for option, names in expected.items():
        assert tiny.trained(tiny.classify() if option is None else tiny.classify(trained=option)) == names


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_are_those_of_a_model_without_anything_frozen(kind):
    model = tiny.shaken(tiny.classify(**KINDS[kind])).double()
    free = copy.deepcopy(model).requires_grad_(True)
    for objective in (model, free):
        objective(Batch.of_view(images(), LABELS))["loss"].backward()
    expected = dict(free.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-9, atol=1e-12)
        else:
            assert parameter.grad is None


def test_lora_is_its_formula():
    """Outputs equal a model whose matrices are computed element by element in float64; B is 0 at first."""
    assert not tiny.classify(**LORA).encoder.blocks[0].attention.qkv.parametrizations.weight[0].b.any()
    adapted = tiny.shaken(tiny.classify(**LORA)).double()
    state, layers = adapted.state_dict(), []
    for number in range(2):
        for layer in ("qkv", "out"):
            prefix = f"encoder.blocks.{number}.attention.{layer}"
            original, a, b = (
                state.pop(f"{prefix}.parametrizations.weight.{part}") for part in ("original", "0.a", "0.b")
            )
            rows = original.tolist()
            for o, row in enumerate(rows):
                for i in range(len(row)):
                    row[i] += 3.0 / 2 * sum(b[o, r].item() * a[r, i].item() for r in range(2))
            state[f"{prefix}.weight"] = torch.tensor(rows, dtype=torch.float64)
            layers.append((adapted.get_submodule(prefix), state[f"{prefix}.weight"]))
    for layer, weight in layers:
        torch.testing.assert_close(layer.weight, weight, rtol=1e-12, atol=1e-12)
    plain = tiny.classify().double()
    plain.load_state_dict(state)
    ids = torch.tensor([[3, 0], [1, 2], [15, 7]])
    for compute in (
        lambda model: model.logits(images()),
        lambda model: model.encoder(images()),
        lambda model: model.encoder.encode(model.encoder.embed(images(3)), output_ids=ids),
    ):
        torch.testing.assert_close(compute(adapted), compute(plain), rtol=1e-9, atol=1e-12)
    x = torch.randn(4, 16, dtype=torch.float64)
    layer, weight = layers[0]
    torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias))


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_a_checkpoint_is_loaded_with_lora_merged(tmp_path, ema):
    model = tiny.classify(**LORA)
    tiny.train(tmp_path, objective=model, facts=model.metadata, ema=ema)
    weights = states(tmp_path)["ema" if ema else "model"]
    assert "encoder.blocks.0.attention.qkv.parametrizations.weight.0.b" in weights
    again = tiny.classify(seed=5, **LORA).eval()
    again.load_state_dict(weights)
    options = loading_options.LoadEncoder(path=tmp_path)
    classifier, encoder = loading.load_classifier(options), loading.load_encoder(options)
    for loaded in (classifier.encoder, encoder):
        names = {name for name, _ in loaded.named_parameters()}
        assert names == {name for name, _ in tiny.encoder(0.0).named_parameters()}
        assert torch.equal(loaded.represent(images()), again.encoder.represent(images()))
    assert torch.equal(classifier.logits(images()), again.logits(images()))
    assert torch.equal(encoder.blocks[1].attention.out.weight, again.encoder.blocks[1].attention.out.weight)
    larger = tiny.loaded(tmp_path, image_size=32)
    assert larger(images().repeat(1, 1, 2, 2)).shape == (6, 1 + 64, 16)
