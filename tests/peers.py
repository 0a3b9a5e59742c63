"""Other frameworks' encoders with random weights, as the files that they write and as functions of images."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import timm
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from timm.layers import GroupNormAct, LayerNorm, SwiGLUPacked, pad_same
from timm.models.eva import Eva
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed, StdConv2dSame
from torch import Tensor, nn
from torchvision.models import vision_transformer

SIZE, PATCH = (32, 56), 8
WIDTH, DEPTH, HEADS, MLP = 48, 2, 4, 80
SHAPE = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS,
         "mlp_ratio": MLP / WIDTH}  # fmt: skip
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
TOLD = {"heads": HEADS, "trained_size": list(SIZE)}


@dataclass
class Peer:
    """A file, the options that it requires, and the tokens (b, t, d) of normalised images (b, c, h, w)."""

    path: Path
    tokens: Callable[[Tensor], Tensor]
    told: dict[str, Any] = field(default_factory=lambda: dict(TOLD))
    mean: Any = 0.5
    std: Any = 0.5
    size: tuple[int, int] = SIZE


def random(module: nn.Module, seed: int = 0) -> nn.Module:
    """A module in eval mode whose weights are all random, none of them small: what is left out shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            weight.copy_(0.05 * torch.randn(weight.shape, generator=generator))
            if weight.ndim == 1 and name.endswith("weight"):
                weight += 1
    return module.eval()


def of_timm(**changes: Any) -> nn.Module:
    return random(VisionTransformer(**{**SHAPE, "num_classes": 5, **changes}))


class AuthorsConvolution(StdConv2dSame):
    """timm's, but for where the epsilon stands and how large it is: StdConv of the authors' models_resnet.py."""

    def forward(self, x: Tensor) -> Tensor:
        filters = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        filters = filters / (self.weight.std((1, 2, 3), correction=0, keepdim=True) + 1e-5)
        return F.conv2d(pad_same(x, self.kernel_size, self.stride), filters, stride=self.stride)


def hybrid_of_timm(act_layer: str = "gelu", **backbone: Any) -> nn.Module:
    options = {"layers": (2, 1), "channels": (128, 256), "stem_chs": 32, "num_classes": 0, "global_pool": "",
               "preact": False, "stem_type": "same", "conv_layer": partial(StdConv2dSame, eps=1e-8)}  # fmt: skip
    embed = partial(HybridEmbed, backbone=ResNetV2(**{**options, **backbone}))
    return of_timm(patch_size=1, embed_layer=embed, act_layer=act_layer)


def saved(
    folder: Path, model: nn.Module, *normalisation: Any, name: str = "timm.safetensors", tensors: Any = None
) -> Peer:
    """Write the weights of a model of timm, or other tensors in their place, into a file."""
    save = save_file if name.endswith(".safetensors") else torch.save
    save(model.state_dict() if tensors is None else tensors, folder / name)
    return Peer(folder / name, model.forward_features, dict(TOLD), *normalisation)


def timm_plain(folder: Path) -> Peer:
    return saved(folder, of_timm())


def deit(folder: Path) -> Peer:
    """DeiT's distilled encoder, as Facebook's .pth files hold it."""
    size = {"img_size": SIZE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": DEPTH, "num_heads": HEADS}
    model = random(timm.create_model("deit_tiny_distilled_patch16_224", **size))
    return saved(folder, model, *IMAGENET, name="deit.pth", tensors={"model": model.state_dict()})


def mae(folder: Path) -> Peer:
    """MAE's encoder and decoder in the format of Facebook's .pth files."""
    model = of_timm(num_classes=0)
    decoder = {"mask_token": torch.ones(1, 1, 8), "decoder_embed.weight": torch.ones(8, WIDTH)}
    tensors = {"model": {**model.state_dict(), **decoder}, "epoch": 800}
    return saved(folder, model, *IMAGENET, name="mae.pth", tensors=tensors)


def _with_registers(**changes: Any) -> nn.Module:
    return of_timm(init_values=1e-5, reg_tokens=3, **changes)


def timm_dinov2(folder: Path) -> Peer:
    """Its registers and its class token have no positions."""
    return saved(folder, _with_registers(no_embed_class=True), *IMAGENET)


def dinov2(folder: Path) -> Peer:
    """Facebook's files have the class token's position, the [mask] token, and their own name of the registers."""
    model = _with_registers(no_embed_class=True)
    tensors = model.state_dict()
    position = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(1))
    tensors["cls_token"] = tensors["cls_token"] - position
    tensors["pos_embed"] = torch.cat([position, tensors["pos_embed"]], 1)
    tensors["register_tokens"] = tensors.pop("reg_token")
    tensors = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    tensors["mask_token"] = torch.zeros(1, WIDTH)
    return saved(folder, model, *IMAGENET, name="dinov2.pth", tensors=tensors)


def _giant() -> nn.Module:
    """DINOv2's giant, but small: with SwiGLU, whose two first matrices timm and Facebook pack into one."""
    return _with_registers(mlp_layer=SwiGLUPacked, act_layer=nn.SiLU, mlp_ratio=2 * MLP / WIDTH, no_embed_class=True)


def dinov2_giant(folder: Path) -> Peer:
    model = _giant()
    names = {"reg_token": "register_tokens", ".mlp.fc1.": ".mlp.w12.", ".mlp.fc2.": ".mlp.w3."}
    tensors = renamed(model.state_dict(), names) | {"mask_token": torch.zeros(1, WIDTH)}
    return saved(folder, model, *IMAGENET, name="dinov2.pth", tensors=tensors)


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    for old, new in names.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    return tensors


def of_dinov3(**changes: Any) -> Any:
    """timm's model of DINOv3, a small one."""
    options = {
        **SHAPE, "num_classes": 5, "qkv_bias": False, "dynamic_img_size": True, "init_values": 1e-5,
        "rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True,
        "use_abs_pos_emb": False, "num_reg_tokens": 3, "use_fc_norm": False, "norm_layer": partial(LayerNorm, eps=1e-5),
    }  # fmt: skip
    return random(Eva(**{**options, **changes}))


def timm_dinov3(folder: Path, **changes: Any) -> Peer:
    return saved(folder, of_dinov3(**changes), *IMAGENET)


def dinov3(folder: Path, **changes: Any) -> Peer:
    """Facebook's files have a bias of keys, which a mask takes away, and periods rounded to bfloat16."""
    model = of_dinov3(qkv_bias=True, **changes)
    model.rope.periods.copy_(model.rope.periods.bfloat16())
    names = {
        "reg_token": "storage_tokens", "gamma_": "ls", ".mlp.fc1_g.": ".mlp.w1.", ".mlp.fc1_x.": ".mlp.w2.",
    } | ({".mlp.fc2.": ".mlp.w3."} if changes else {})  # fmt: skip
    tensors = renamed(model.state_dict(), names)
    tensors = {
        f"{name}.gamma" if ".ls" in name else name: value for name, value in tensors.items() if "head" not in name
    }
    for layer in range(DEPTH):
        query, value = (tensors.pop(f"blocks.{layer}.attn.{part}_bias") for part in "qv")
        tensors[f"blocks.{layer}.attn.qkv.bias"] = torch.cat([query, torch.ones(WIDTH), value])
        mask = torch.cat([torch.ones(WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH)])
        tensors[f"blocks.{layer}.attn.qkv.bias_mask"] = mask
    tensors |= {"mask_token": torch.zeros(1, WIDTH), "rope_embed.periods": model.rope.periods}
    torch.save(tensors, folder / "dinov3.pth")
    return Peer(folder / "dinov3.pth", model.forward_features, {}, *IMAGENET)


def torchvision_plain(folder: Path, names: dict[str, str] | None = None) -> Peer:
    model = random(vision_transformer.VisionTransformer(32, PATCH, DEPTH, HEADS, WIDTH, MLP, num_classes=5))

    def tokens(images: Tensor) -> Tensor:
        x = model._process_input(images)
        return model.encoder(torch.cat([model.class_token.expand(len(x), -1, -1), x], 1))

    torch.save(renamed(model.state_dict(), names or {}), folder / "torchvision.pth")
    return Peer(folder / "torchvision.pth", tokens, {"heads": HEADS}, *IMAGENET, size=(32, 32))


def hugging(kind: str, **changes: Any) -> nn.Module:
    config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('Model')}Config")
    shape = {"image_size": list(SIZE), "patch_size": PATCH, "hidden_size": WIDTH, "num_hidden_layers": DEPTH,
                 "num_attention_heads": HEADS, "intermediate_size": MLP, "layer_norm_eps": 1e-6}  # fmt: skip
    return random(getattr(transformers, kind)(config(**{**shape, **changes})))


def huggingface(folder: Path) -> Peer:
    """A folder written by save_pretrained, whose config.json contains the options that other formats require."""
    model = hugging("ViTForImageClassification", num_labels=5)
    model.save_pretrained(folder)
    return Peer(folder / "model.safetensors", lambda images: model.vit(images).last_hidden_state, {})


def hugged(folder: Path, model: nn.Module, *normalisation: Any, **properties: Any) -> Peer:
    model.save_pretrained(folder)
    tokens = lambda images: model(images).last_hidden_state  # noqa: E731
    return Peer(folder / "model.safetensors", tokens, {}, *normalisation, **properties)


def huggingface_dinov2(folder: Path, kind: str = "Dinov2", **changes: Any) -> Peer:
    """Square images: it resizes positions where none are needed, if they are not."""
    shape = {"image_size": 32, "mlp_ratio": 2, "layerscale_value": 0.5, **changes}
    return hugged(folder, hugging(f"{kind}Model", **shape), *IMAGENET, size=(32, 32))


def huggingface_dinov3(folder: Path, **changes: Any) -> Peer:
    return hugged(folder, hugging("DINOv3ViTModel", num_register_tokens=3, layer_norm_eps=1e-5, **changes), *IMAGENET)


def huggingface_pixio(folder: Path) -> Peer:
    return hugged(folder, hugging("PixioModel", image_size=32, n_cls_tokens=3), *IMAGENET, size=(32, 32))


def pixio(folder: Path) -> Peer:
    """Facebook's files have the names of MAE's, but for the decoder that pre-training files hold next to them."""
    peer = huggingface_pixio(folder)
    names = {
        "embeddings.cls_token": "cls_token", "embeddings.position_embeddings": "pos_embed", "layernorm.": "norm.",
        "embeddings.patch_embeddings.projection": "patch_embed.proj", "encoder.layer": "blocks",
        "attention.output.dense": "attn.proj", "intermediate.dense": "mlp.fc1", "output.dense": "mlp.fc2",
    }  # fmt: skip
    tensors = renamed(load_file(peer.path), names)
    for layer in range(DEPTH):
        for kind in ("weight", "bias"):
            parts = [f"blocks.{layer}.attention.attention.{part}.{kind}" for part in ("query", "key", "value")]
            tensors[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat([tensors.pop(name) for name in parts])
    torch.save(tensors, folder / "pixio.pth")
    for file in ("config.json", "model.safetensors"):
        (folder / file).unlink()
    return replace(peer, path=folder / "pixio.pth", told={"heads": HEADS})


def huggingface_mae(folder: Path) -> Peer:
    """transformers sorts patches by a noise; increasing noise without masking keeps their order."""
    decoder = {f"decoder_{name}": 16 for name in ("hidden_size", "intermediate_size")}
    decoder |= {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    model = hugging("ViTMAEForPreTraining", image_size=32, mask_ratio=0.0, **decoder)
    model.save_pretrained(folder)

    def tokens(images: Tensor) -> Tensor:
        patches = images[0, 0].numel() // PATCH**2
        return model.vit(images, noise=torch.arange(patches).expand(len(images), -1).float()).last_hidden_state

    return Peer(folder / "model.safetensors", tokens, {}, size=(32, 32))


def arrays(*, layers: tuple[int, ...] | None = None, prefix: str = "") -> dict[str, numpy.ndarray]:
    """Random arrays under the names and in the shapes of the authors' .npz files, of a 4x7 grid, with their head.

    layers: the units of the stages of a hybrid. Its scales have four axes, as in the files of the first release.
    """
    random = numpy.random.default_rng(0)
    k = WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {"cls": (1, 1, WIDTH)}
    shapes["Transformer/posembed_input/pos_embedding"] = (1, 29, WIDTH)
    for i in range(DEPTH):
        block = f"Transformer/encoderblock_{i}"
        attention = f"{block}/MultiHeadDotProductAttention_1"
        for part in ("query", "key", "value"):
            shapes |= {f"{attention}/{part}/kernel": (WIDTH, HEADS, k), f"{attention}/{part}/bias": (HEADS, k)}
        shapes |= {f"{attention}/out/kernel": (HEADS, k, WIDTH), f"{attention}/out/bias": (WIDTH,)}
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {f"{block}/{norm}/scale": (WIDTH,), f"{block}/{norm}/bias": (WIDTH,)}
        shapes |= {f"{block}/MlpBlock_3/Dense_0/kernel": (WIDTH, MLP), f"{block}/MlpBlock_3/Dense_0/bias": (MLP,)}
        shapes |= {f"{block}/MlpBlock_3/Dense_1/kernel": (MLP, WIDTH), f"{block}/MlpBlock_3/Dense_1/bias": (WIDTH,)}
    shapes |= {"Transformer/encoder_norm/scale": (WIDTH,), "Transformer/encoder_norm/bias": (WIDTH,)}
    mapped = 3
    if layers is not None:
        shapes |= {"conv_root/kernel": (7, 7, 3, 32), "gn_root/scale": (1, 1, 1, 32), "gn_root/bias": (1, 1, 1, 32)}
        mapped = 32
        for stage, units in enumerate(layers):
            inner = 32 * 2**stage
            for unit in range(units):
                name = f"block{stage + 1}/unit{unit + 1}"
                kernels = {"conv1": (1, 1, mapped, inner), "conv2": (3, 3, inner, inner)}
                kernels["conv3"] = (1, 1, inner, 4 * inner)
                if unit == 0:
                    kernels["conv_proj"] = (1, 1, mapped, 4 * inner)
                for conv, shape in kernels.items():
                    norm = f"{name}/{conv.replace('conv_', 'gn_').replace('conv', 'gn')}"
                    one = (1, 1, 1, shape[-1])
                    shapes |= {f"{name}/{conv}/kernel": shape, f"{norm}/scale": one, f"{norm}/bias": one}
                mapped = 4 * inner
    side = PATCH if layers is None else 1
    shapes |= {"embedding/kernel": (side, side, mapped, WIDTH), "embedding/bias": (WIDTH,)}
    shapes |= {"pre_logits/kernel": (WIDTH, WIDTH), "pre_logits/bias": (WIDTH,)}
    shapes |= {"head/kernel": (WIDTH, 5), "head/bias": (5,)}
    found = {}
    for name, shape in shapes.items():
        value = 0.05 * random.standard_normal(shape)
        if name.endswith("/scale"):
            value += 1
        found[prefix + name] = value.astype(numpy.float32)
    return found


def _google(folder: Path, model: nn.Module, **options: Any) -> Peer:
    """timm also reads the authors' files, by separate code."""
    path = folder / "google.npz"
    numpy.savez(path, **arrays(**options))
    model.load_pretrained(str(path))
    return Peer(path, model.forward_features, {"trained_size": list(SIZE)})


def google(folder: Path) -> Peer:
    return _google(folder, of_timm(act_layer="gelu_tanh"))


def google_hybrid(folder: Path) -> Peer:
    norm = partial(GroupNormAct, eps=1e-6)
    model = hybrid_of_timm(act_layer="gelu_tanh", conv_layer=AuthorsConvolution, norm_layer=norm)
    return _google(folder, model, layers=(2, 1))


OLD_NAMES = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}
NO_CLASS = {"class_token": False, "global_pool": "avg", "fc_norm": False}
PEERS: dict[str, Callable[..., Peer]] = {
    function.__name__: function
    for function in (
        google, google_hybrid, timm_plain, timm_dinov2, dinov2, deit, mae, torchvision_plain, huggingface,
        huggingface_mae, huggingface_dinov2, dinov2_giant, timm_dinov3, dinov3, huggingface_dinov3, huggingface_pixio,
        pixio,
    )
} | {
    "timm_without_positions_of_the_class": lambda folder: saved(folder, of_timm(no_embed_class=True)),
    "timm_without_class_token": lambda folder: saved(folder, of_timm(**NO_CLASS)),
    "timm_dinov2_giant": lambda folder: saved(folder, _giant(), *IMAGENET),
    "timm_dinov3_with_biases": partial(timm_dinov3, qkv_bias=True),
    "timm_dinov3_swiglu": partial(timm_dinov3, swiglu_mlp=True, swiglu_align_to=8),
    "dinov3_swiglu": partial(dinov3, swiglu_mlp=True, swiglu_align_to=8),
    "torchvision_of_its_first_releases": partial(torchvision_plain, names=OLD_NAMES),
    "huggingface_deit": lambda folder: hugged(folder, hugging("DeiTModel")),
    "huggingface_dinov2_with_registers": partial(huggingface_dinov2, kind="Dinov2WithRegisters", num_register_tokens=3),
    "huggingface_dinov2_giant": partial(huggingface_dinov2, mlp_ratio=3, use_swiglu_ffn=True),
    "huggingface_dinov3_swiglu": partial(huggingface_dinov3, use_gated_mlp=True, hidden_act="silu"),
}  # fmt: skip
