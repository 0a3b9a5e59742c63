"""The contract of every encoder: the equations token by token in float64, and equal results of every shortcut."""

import math
import re
from pathlib import Path

import exported
import onnxruntime
import pytest
import torch
from command import error_of

from ssvit.engine.randomness import uniform
from ssvit.exchange.options import Export
from ssvit.exchange.program import Program, write
from ssvit.kernels.accelerate import accelerate
from ssvit.models import vit_options
from ssvit.models.backbone import FeatureMaps
from ssvit.models.block import gather_tokens
from ssvit.models.vit import ViT
from ssvit.objectives.base import parameter_groups

POSITIONS = ("learned_1d", "learned_2d", "sine_cosine_1d", "sine_cosine_2d", "relative", "none", "rotary")
REGISTERS = {"layer_scale": 0.3, "registers": 3}
ROTARY = {"positions": "rotary", "norm_epsilon": 1e-5, **REGISTERS}
NO_TOKENS = {"class_token": False, "pooling": "patch_mean"}
KINDS = {
    **{positions: {"positions": positions} for positions in POSITIONS},
    **{f"{positions}_{at}": {"positions": positions, "positions_at": at}
       for positions in POSITIONS[:3] for at in ("every_layer", "every_layer_shared")},
    **{f"{positions}_without_tokens": {"positions": positions, **NO_TOKENS} for positions in POSITIONS},
    **{f"{positions}_two_tokens": {"positions": positions, "distillation_token": True} for positions in POSITIONS},
    **{f"{positions}_registers": {"positions": positions, **REGISTERS} for positions in POSITIONS},
    "every_layer_registers": {"positions": "learned_2d", "positions_at": "every_layer", **REGISTERS},
    **{f"{positions}_class_tokens": {"positions": positions, "class_tokens": 3, "registers": 2}
       for positions in POSITIONS},
    "tanh": {"gelu": "tanh"},
    "swiglu": {"mlp": "swiglu"},
    "dinov3": ROTARY,
    "dinov3_swiglu": {**ROTARY, "mlp": "swiglu"},
    "hybrid": {"stem": {"layers": [1], "width": 32}},
}  # fmt: skip
SHAPES = {
    "rectangle": {"image_size": [8, 24], "patch_size": [4, 8]},
    "grey": {"channels": 1, "mean": 0.1307, "std": [0.3081]},
    "four_channels": {"channels": 4, "mean": [0.4, 0.5, 0.6, 0.1], "std": [0.2, 0.3, 0.25, 0.1]},
    "one_layer": {"depth": 1},
    "one_head": {"heads": 1, "mlp_width": 7},
}
EVERY = pytest.mark.parametrize("kind", KINDS)
SOME = pytest.mark.parametrize(
    "kind", ["relative", "every_layer_registers", "learned_1d_registers", "dinov3_swiglu", "hybrid",
             *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("learned_1d", "swiglu", "rotary", "dinov3"))],
)  # fmt: skip


def build(kind: str, **changes) -> ViT:
    """An encoder in which no weight is zero or one, so that each of them shows in the output."""
    vit = exported.encoder(**{"image_size": [16, 24], "width": 24, "heads": 3, **KINDS.get(kind, {}), **changes})
    if vit.rotary is not None:  # in the precision of the reference
        count = len(vit.rotary.periods)
        vit.rotary.periods = 100 ** (torch.arange(count, dtype=torch.float64) / count)
    return vit


def images_of(vit: ViT, count: int = 2, size=None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, vit.channels, *(size or vit.image_size), generator=generator)


def some(count: int, of_these: int, seed: int = 0) -> torch.Tensor:
    """Different places for each of two images, in random order."""
    return torch.rand(2, of_these, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :count]


def turned(vector, row, column, grid):
    """Return a head's channels of one patch by pairs: pair i consists of channels i and k / 2 + i."""
    k, found = len(vector), vector.clone()
    for i in range(k // 2):
        place, side = ((row, grid[0]), (column, grid[1]))[i // (k // 4)]
        angle = 2 * math.pi * ((place + 0.5) / side * 2 - 1) / 100 ** (4 * (i % (k // 4)) / k)
        a, b = vector[i], vector[k // 2 + i]
        found[i] = a * math.cos(angle) - b * math.sin(angle)
        found[k // 2 + i] = b * math.cos(angle) + a * math.sin(angle)
    return found


def activated(hidden: torch.Tensor, options) -> torch.Tensor:
    if options["mlp"] == "swiglu":
        gate, hidden = hidden.chunk(2)
        return gate / (1 + (-gate).exp()) * hidden
    x = hidden.tolist()
    if options["gelu"] == "exact":
        return torch.tensor([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x], dtype=hidden.dtype)
    return torch.tensor(
        [0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x], dtype=hidden.dtype
    )


def plain(vit: ViT, image: torch.Tensor, keep: list[int] | None = None, scale=lambda layer, branch: 1.0) -> list:
    """Equations 1 to 4 of the paper for one image, token by token in float64, from the weights in the state dict.

    With LayerScale, registers, rotary positions and SwiGLU as their papers have them. Rows of additive positions, and
    the patches of a hybrid, are tested by themselves and read from the modules. scale: the factor of each residual
    branch. Returns the tokens after each layer, and those after the last norm.
    """
    w = {name: value.double() for name, value in vit.state_dict().items()}
    options, epsilon, (rows, columns) = vit.arguments, vit.arguments["norm_epsilon"], vit.grid
    (p, q), heads = vit.patch_size, vit.arguments["heads"]

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        mean = x.sum() / len(x)
        return (x - mean) / ((x - mean).square().sum() / len(x) + epsilon).sqrt() * weight + bias

    kept = range(rows * columns) if keep is None else keep
    if vit.stem is None:
        pixels = (image.double() - w["mean"][:, None, None]) / w["std"][:, None, None]
        corners = [(place // columns * p, place % columns * q) for place in kept]
        cut = [pixels[:, y : y + p, x : x + q].flatten() for y, x in corners]
        z = [w["patch.weight"] @ patch + w["patch.bias"] for patch in cut]
    else:
        z = list(vit.embed(image[None])[0].detach()[list(kept)])
    special = [token for name in ("class_token", "distillation_token") if name in w for token in w[name][0]]
    registers = list(w["register_tokens"][0]) if "register_tokens" in w else []
    prefix = len(special) + len(registers)
    z = [*special, *registers, *z]
    table = [*range(len(special)), *[None] * len(registers), *(len(special) + place for place in kept)]
    places = [*range(prefix), *(prefix + place for place in kept)]
    after = []
    for layer in range(len(vit.blocks)):
        if len(vit.positions) and (layer == 0 or options["positions_at"] != "stem"):
            added = vit.positions[layer if options["positions_at"] == "every_layer" else 0]().detach().double()
            z = [token if row is None else token + added[row] for token, row in zip(z, table, strict=True)]

        def weights(name: str, layer: int = layer) -> tuple[torch.Tensor, torch.Tensor]:
            return w[f"blocks.{layer}.{name}.weight"], w[f"blocks.{layer}.{name}.bias"]

        matrix, bias = weights("attention.qkv")
        query, key, value = zip(
            *((matrix @ norm(token, *weights("norm1")) + bias).chunk(3) for token in z), strict=True
        )
        k, mixed = len(query[0]) // heads, [[] for _ in z]
        offsets = w.get(f"blocks.{layer}.attention.relative.keys")
        for head in range(heads):
            own = slice(head * k, (head + 1) * k)
            queries, keys = [one[own] for one in query], [one[own] for one in key]
            if vit.rotary is not None:
                for parts in (queries, keys):
                    for i in range(prefix, len(z)):
                        parts[i] = turned(parts[i], *divmod(places[i] - prefix, columns), vit.grid)
            for i in range(len(z)):
                logits = [float(queries[i] @ other) / math.sqrt(k) for other in keys]
                if offsets is not None:
                    at = [places[i] - place + len(offsets) // 2 for place in places]
                    logits = [one + float(queries[i] @ offsets[j]) for one, j in zip(logits, at, strict=True)]
                total = sum(math.exp(one) for one in logits)
                mixed[i].append(sum(math.exp(a) / total * v[own] for a, v in zip(logits, value, strict=True)))
        first, second = (w.get(f"blocks.{layer}.scale{number}.gamma", 1.0) * scale(layer, number - 1)
                         for number in (1, 2))  # fmt: skip
        matrix, bias = weights("attention.out")
        z = [token + first * (matrix @ torch.cat(one) + bias) for token, one in zip(z, mixed, strict=True)]
        (up, up_bias), (down, down_bias) = weights("expand"), weights("contract")
        hidden = [activated(up @ norm(token, *weights("norm2")) + up_bias, options) for token in z]
        z = [token + second * (down @ one + down_bias) for token, one in zip(z, hidden, strict=True)]
        after.append(torch.stack(z))
    return [*after, torch.stack([norm(token, w["norm.weight"], w["norm.bias"]) for token in z])]


@pytest.mark.parametrize("kind", [*KINDS, *SHAPES])
@torch.no_grad()
def test_it_computes_the_equations(kind):
    """Each layer, each pooling, the feature maps of a backbone, and subsets of patches agree."""
    vit = build(kind, **SHAPES.get(kind, {})).double()
    images = images_of(vit).double()
    *layers, expected = (torch.stack(tokens) for tokens in zip(*(plain(vit, image) for image in images), strict=True))
    torch.testing.assert_close(vit(images), expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(list(vit.layers(images)), layers, atol=1e-10, rtol=1e-10)
    patches = expected[:, vit.num_prefix_tokens :]
    class_token = sum(expected[:, token] for token in range(vit.options.class_tokens)) / vit.options.class_tokens
    for pooling, vector in (("class_token", class_token), ("patch_mean", patches.mean(1))):
        if pooling == "patch_mean" or vit.class_token is not None:
            vit.pooling = pooling
            torch.testing.assert_close(vit.represent(images), vector, atol=1e-10, rtol=1e-10)
            torch.testing.assert_close(vit.pooled(expected, pooling, images), vector)
    (map_,) = FeatureMaps(vit, [len(layers)])(images)
    torch.testing.assert_close(map_.flatten(2).mT, patches, atol=1e-10, rtol=1e-10)
    if vit.stem is None:
        keep = some(4, vit.patches)
        kept = torch.stack([plain(vit, *pair)[-1] for pair in zip(images, keep.tolist(), strict=True)])
        torch.testing.assert_close(vit(images, keep), kept, atol=1e-10, rtol=1e-10)


@EVERY
@pytest.mark.parametrize("kept", [None, 4])
def test_outputs_of_some_patches_are_those_of_the_whole(kind, kept):
    """And their gradients; all patches in another order are the same patches."""
    vit = build(kind).double()
    keep = None if kept is None else some(kept, vit.patches)
    asked = some(3, kept or vit.patches, seed=2)
    weight, results = torch.randn(2, 3, 24).double(), []
    for whole in (True, False):
        tokens = vit.embed(images_of(vit).double(), keep).detach().requires_grad_()
        outputs = vit.encode(tokens, patch_ids=keep, output_ids=None if whole else asked)
        if whole:
            outputs = torch.stack([outputs[image, vit.num_prefix_tokens + asked[image]] for image in range(2)])
        vit.zero_grad()
        (outputs * weight).sum().backward()
        gradients = {name: p.grad.clone() for name, p in vit.named_parameters() if p.grad is not None}
        results.append((outputs.detach(), tokens.grad, gradients))
    torch.testing.assert_close(*results, atol=1e-9, rtol=1e-9)
    (*_, gradients), learns = results[0], {name for name, p in vit.named_parameters() if p.numel()}
    silent = {name for name in learns if name not in gradients or not gradients[name].abs().max() > 1e-12}
    assert all(name.startswith(("patch.", "stem.")) for name in silent)
    tokens, order = vit.embed(images_of(vit).double()), some(vit.patches, vit.patches)
    shuffled, usual = vit.encode(gather_tokens(tokens, order), patch_ids=order), vit.encode(tokens)
    s = vit.num_prefix_tokens
    torch.testing.assert_close(shuffled[:, :s], usual[:, :s], atol=1e-10, rtol=1e-10)
    moved = usual[:, s:].gather(1, order[..., None].expand_as(shuffled[:, s:]))
    torch.testing.assert_close(shuffled[:, s:], moved, atol=1e-10, rtol=1e-10)


@EVERY
@torch.no_grad()
def test_bfloat16_and_bytes_are_near_float32(kind):
    vit = build(kind, mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    images = (images_of(vit) * 255).to(torch.uint8)
    exact = vit(images / 255)
    torch.testing.assert_close(vit(images), exact, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        for inputs in (images, images / 255):
            assert ((vit(inputs) - exact).norm() / exact.norm()).item() < 0.03


@SOME
def test_it_is_one_graph_for_each_size(kind):
    depth = {} if KINDS[kind].get("positions_at") else {"depth": 1}  # tracing takes most of the time
    vit, graphs = build(kind, **depth), []
    torch._dynamo.reset()
    compiled = torch.compile(vit, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True, dynamic=False)
    for size in ((16, 24), (8, 16), (16, 24), (8, 16)):
        images = images_of(vit, size=size)
        torch.testing.assert_close(compiled(images), vit(images), atol=1e-5, rtol=1e-4)
    assert len(graphs) == 2


@pytest.mark.parametrize("kind", [pytest.param("learned_1d_registers", marks=pytest.mark.slow), "dinov3_swiglu"])
@torch.no_grad()
def test_programs_take_images_of_any_size(kind, tmp_path):
    vit = exported.encoder(**KINDS[kind], depth=1)
    write(Program(vit, Export(format="onnx", any_size=True)).eval(), {}, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for size in ((32, 48), (40, 24)):
        images = exported.images(size)
        found = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
        assert (torch.from_numpy(found) - vit(images)).abs().max() < 1e-4


def test_parts_that_are_not_chosen_are_not_there():
    names = " ".join(exported.encoder().state_dict())
    assert not [part for part in ("scale", "register", "rotary", "stem", "relative", "distillation") if part in names]


@EVERY
def test_matrices_alone_decay(kind):
    vit = build(kind)
    names = {id(parameter): name for name, parameter in vit.named_parameters()}
    for group in parameter_groups(vit.named_parameters(), 0.1):
        for name in (names[id(parameter)] for parameter in group["params"]):
            matrix = name.endswith("weight") and "norm" not in name and "shortcut.1" not in name
            assert group["decays"] == matrix, name


@EVERY
@pytest.mark.parametrize("half", [False, True])
@torch.no_grad()
def test_the_last_layer_alone_has_the_same_bits(kind, half):
    vit = build(kind, width=32, heads=2) if half else build(kind)
    if half:
        accelerate(vit)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        *_, expected = vit.layers(images_of(vit))
        assert vit.last_layer(images_of(vit)).equal(expected)


@pytest.mark.parametrize("kind", ["learned_1d", "dinov3_swiglu"])
def test_stochastic_depth_is_a_loop_over_the_numbers_of_slot_view_layer_and_branch(kind):
    """A branch that is kept is divided by the probability of that, so that its mean is the branch's."""
    vit = build(kind, depth=3, stochastic_depth=0.6).double().train()
    slots, images = torch.tensor([7, 1 << 40]), images_of(vit).double()
    noise = vit.depth_noise(slots, seed=3, views=2)
    assert noise.shape == (4, 6)
    for view in range(2):
        expected = []
        for image, slot in zip(images, slots, strict=True):
            (numbers,) = uniform(3, "stochastic depth", slot[None], 6, view).tolist()

            def scale(layer, branch, numbers=numbers):
                rate = 0.3 * layer
                return 0.0 if numbers[2 * layer + branch] < rate else 1 / (1 - rate)

            expected.append(plain(vit, image, scale=scale)[-1])
        found = vit(images, depth_noise=noise[2 * view : 2 * view + 2])
        torch.testing.assert_close(found, torch.stack(expected), atol=1e-10, rtol=1e-10)
    many = vit.depth_noise(torch.arange(20_000), seed=0)
    for layer, rate in enumerate((0.0, 0.3, 0.6)):
        kept = vit.blocks[layer].drop(torch.ones(20_000, 1, 1).double(), many[:, 2 * layer])
        assert abs(kept.mean().item() - 1) < 4 * (rate / (1 - rate) / 20_000) ** 0.5 + 1e-12
    assert vit.eval().depth_noise(slots, seed=3) is None
    assert build(kind).train().depth_noise(slots, seed=3) is None


def test_an_encoder_by_itself_samples_stochastic_depth_from_torchs_generator():
    vit = build("learned_1d", stochastic_depth=0.9).train()
    torch.manual_seed(1)
    first, second = vit(images_of(vit, 8)), vit(images_of(vit, 8))
    torch.manual_seed(1)
    assert torch.equal(vit(images_of(vit, 8)), first)
    assert not torch.equal(second, first)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("layer_scale", {"layer_scale": 0}), ("registers", {"registers": -1}), ("mlp", {"mlp": "relu"}),
        ("gelu", {"gelu": "relu"}), ("gelu", {"mlp": "swiglu", "gelu": "tanh"}),
        ("heads", {"positions": "rotary", "width": 12, "heads": 2}),
        ("positions_at", {"positions": "rotary", "positions_at": "every_layer"}), ("norm_epsilon", {"norm_epsilon": 0}),
        ("patch_size", {"patch_size": 5}), ("patch_size", {"patch_size": 32}), ("patch_size", {"patch_size": [4, 3]}),
        ("image_size", {"image_size": -16}), ("width", {"width": 0}),
        ("width", {"width": 6, "positions": "sine_cosine_2d"}), ("heads", {"heads": 5}), ("heads", {"heads": 0}),
        ("depth", {"depth": 0}), ("mlp_width", {"mlp_width": 0}), ("channels", {"channels": 0}),
        ("class_token", {"class_token": "yes"}), ("distillation_token", {"distillation_token": 1}),
        ("class_tokens", {"class_tokens": 0}), ("class_tokens", {"class_tokens": 2, "distillation_token": True}),
        ("class_tokens", {"class_tokens": 2, "class_token": False, "pooling": "patch_mean"}),
        ("distillation_token", {"distillation_token": True, "class_token": False, "pooling": "patch_mean"}),
        ("pooling", {"pooling": "max"}), ("pooling", {"pooling": "class_token", "class_token": False}),
        ("positions", {"positions": "axial"}), ("positions_at", {"positions_at": "end"}),
        ("positions_at", {"positions": "relative", "positions_at": "every_layer"}),
        ("positions_at", {"positions": "none", "positions_at": "every_layer_shared"}), ("dropout", {"dropout": 1.0}),
        ("dropout", {"dropout": -0.1}), ("attention_dropout", {"attention_dropout": 1.0}),
        ("stochastic_depth", {"stochastic_depth": 1}), ("activation_checkpointing", {"activation_checkpointing": 2}),
        ("mean", {"mean": [0.5, 0.5]}), ("mean", {"mean": 123.7}), ("std", {"std": 0}), ("std", {"std": math.inf}),
        ("std", {"std": [0.2, 0.2, -0.2]}), ("stem", {"stem": "r50"}), ("stem.layers", {"stem": {}}),
        ("stem.width", {"stem": {"layers": [1]}}), ("stem.layers", {"stem": {"layers": [3, 0], "width": 32}}),
        ("stem.width", {"stem": {"layers": [1], "width": 48}}),
        ("stem.epsilons", {"stem": {"layers": [1], "width": 32, "epsilons": "google"}}),
        ("patch_size", {"stem": {"layers": [1, 1, 1], "width": 32}}),
        ("patch_size", {"stem": {"layers": [], "width": 32}, "patch_size": 2}),
        ("patch_size", {"stem": {"layers": [1, 1], "width": 32}, "patch_size": [8, 4]}),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_named(name, options):
    shape = {"image_size": 16, "patch_size": 4, "width": 24, "depth": 3, "heads": 3}
    assert error_of(vit_options.ViT, **shape | options).name == name


@torch.no_grad()
def test_the_documented_calls_compute_the_outputs_of_the_encoder():
    """Every call of a module in docs/python.md, for images of the size of the encoder and of another size."""
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    calls = set(re.findall(r"`(module[.(][^`]*\))`", page))
    module, ids = build("learned_1d"), some(3, 6)
    for size in (module.image_size, (32, 16)):
        images = images_of(module, size=size)
        for call in calls:
            if size == module.image_size or "encode" not in call or "grid" in call:
                tokens = module.embed(images, ids if "patch_ids" in call else None)
                outputs = eval(call, {"module": module, "images": images, "tokens": tokens, "ids": ids})
                expected = module(images, ids if "patch_ids" in call or ", ids" in call else None)
                if "output_ids" in call:
                    expected = gather_tokens(expected, ids + module.num_prefix_tokens)
                torch.testing.assert_close(outputs, expected)
    assert len(calls) == 5
