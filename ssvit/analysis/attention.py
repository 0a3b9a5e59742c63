"""Compute the attention weights of an encoder in addition to its forward pass, which is not modified.

The figures follow the ViT paper (Dosovitskiy et al. 2021), "the paper" below.

Shapes use b images, h heads, q queries, t tokens, n patches, s prefix tokens, d width, k width of a head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ssvit.figures.pictures import Gallery, Picture
from ssvit.figures.plot import Level, Line, Panel, Plot
from ssvit.models.block import Attention, Ids, TokenInfo
from ssvit.models.vit import ViT


@contextmanager
def attention_hooks(encoder: ViT, callback: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call a function with the attention weights of each layer in the forward passes of the encoder within the block.

    The weights of a layer are released before the next layer is computed. Hooks are removed on exit, including
    after exceptions.

    Args:
        encoder: The encoder.
        callback: Function of the layer, counted from 0, and its weights, (b, h, q, t) float32, whose rows sum to 1.
    """

    @torch.no_grad()
    def hook(layer: int, attention: Attention, inputs: tuple[Tensor, Ids, TokenInfo]) -> None:
        x, output_ids, info = inputs
        with torch.autocast(x.device.type, enabled=False):
            query, key, _, bias = attention.split(*attention.project(x.float(), output_ids), output_ids, info)
            logits = (query * query.shape[-1] ** -0.5) @ key.mT
            weights = (logits if bias is None else logits + bias).softmax(-1)
        callback(layer, weights)

    with ExitStack() as hooks:
        for layer, block in enumerate(encoder.blocks):
            hooks.enter_context(block.attention.register_forward_pre_hook(partial(hook, layer)))
        yield


def patch_distances(encoder: ViT) -> Tensor:
    """Return the distances between the centres of patches in pixels of the input: (n, n) float32."""
    rows, columns = (torch.arange(side) * pixels for side, pixels in zip(encoder.grid, encoder.patch_size, strict=True))
    centres = torch.cartesian_prod(rows, columns).float().view(-1, 2)
    return (centres[:, None] - centres).square().sum(-1).sqrt()


def mean_distance(weights: Tensor, between: Tensor) -> Tensor:
    """Return the mean attention distance of each head in pixels (paper, section 4.5 and Figure 7).

    It is the mean over query patches of the distance to the key patches, weighted by attention. Prefix tokens have no
    position and are excluded; the remaining weights are renormalised.

    Args:
        weights: Attention weights, (b, h, s + n, s + n).
        between: Distances between patches, (n, n).

    Returns:
        Distances, (b, h).
    """
    prefix = weights.shape[-1] - len(between)
    patches = weights[:, :, prefix:, prefix:]
    apart = (patches * between.to(patches)).sum(-1) / patches.sum(-1).clamp(min=torch.finfo(patches.dtype).tiny)
    return apart.mean(-1)


@torch.no_grad()
def mean_distances(encoder: ViT, images: Tensor, batch_size: int) -> Tensor:
    """Return the mean attention distance of each head over images (b, c, h, w): (layers, heads) float64 in pixels."""
    between = patch_distances(encoder)
    sums = torch.zeros(len(encoder.blocks), encoder.blocks[0].attention.heads).double()

    def add(layer: int, weights: Tensor) -> None:
        sums[layer] += mean_distance(weights, between).sum(0).cpu()

    with attention_hooks(encoder, add):
        for part in images.split(batch_size):
            encoder(part.to(encoder.mean.device))
    return sums / len(images)


def extend_rollout(rollout: Tensor | None, weights: Tensor) -> Tensor:
    """Extend the attention rollout by one layer (Abnar and Zuidema 2020; paper, Appendix D.8).

    Weights are averaged over heads and, for the residual branch, with the identity; the matrices of the layers are then
    multiplied. Row i contains the contribution of each input token to token i, and sums to 1.

    Args:
        rollout: Rollout up to the previous layer, (b, t, t); None for the first layer.
        weights: Attention weights of the layer, (b, h, t, t).

    Returns:
        Rollout up to this layer, (b, t, t).
    """
    mixing = (weights.mean(1) + torch.eye(weights.shape[-1], device=weights.device)) / 2
    return mixing if rollout is None else mixing @ rollout


def attention_to_patches(attention: Tensor, num_prefix_tokens: int, pooling: str, class_tokens: int = 1) -> Tensor:
    """Return the attention of the class token or, for patch_mean, the mean attention of the patches, to patches.

    Args:
        attention: Attention weights, (…, s + n, s + n).
        num_prefix_tokens: Number of prefix tokens, s.
        pooling: "class_token" or "patch_mean".
        class_tokens: Number of class tokens, whose attention is averaged.

    Returns:
        Attention to each patch, (…, n).
    """
    tokens = slice(class_tokens) if pooling == "class_token" else slice(num_prefix_tokens, None)
    return attention[..., tokens, num_prefix_tokens:].mean(-2)


def plot_distances(distances: Tensor, uniform: float) -> Plot:
    """Plot the mean attention distance of each head over the layers.

    Args:
        distances: Distances, (layers, heads) in pixels.
        uniform: Distance for uniform attention to all patches.
    """
    ticks = range(1, len(distances) + 1)
    x = [layer for layer in ticks for _ in distances[0]]
    heads = Line(x, distances.flatten().tolist(), "a head", "model", "", "o", size=5)
    levels = [Level(uniform, "uniform attention", "--", "{:.1f}")]
    return Plot([Panel("mean attention distance (pixels)", [heads], levels, "layer", xticks=ticks)], (6.4, 4))


def plot_maps(
    images: Tensor, names: Sequence[str], maps: Mapping[str, Tensor], grid: tuple[int, int], title: str = ""
) -> Gallery:
    """Return a gallery of images and their attention maps.

    A single map is preceded by a column with the image, multiplied by the smoothed map.

    Args:
        images: Images, (b, 3, h, w) in [0, 1].
        names: Caption of each image.
        maps: Attention maps by title, (b, n).
        grid: Rows and columns of patches.
        title: Title of the gallery.
    """
    size = (images.shape[2], images.shape[3])
    columns: list[Sequence[Picture]] = [[Picture(image, (name,)) for image, name in zip(images, names, strict=True)]]
    titles = ["image", *maps]
    if len(maps) == 1:
        (attention,) = maps.values()
        smooth = F.interpolate(attention.float().unflatten(1, grid)[:, None], size, mode="bilinear")
        columns.append([Picture(image) for image in images * (smooth / smooth.amax((2, 3), keepdim=True))])
        titles.insert(1, "attended to")
    for attention in maps.values():
        shares = attention.float().unflatten(1, grid)[:, None]
        low, high = shares.amin((2, 3), keepdim=True), shares.amax((2, 3), keepdim=True)
        shares = F.interpolate((shares - low) / (high - low).clamp(min=1e-12), size, mode="nearest")
        scaled = attention.float() * attention.shape[1]
        ranges = zip(scaled.amin(1).tolist(), scaled.amax(1).tolist(), strict=True)
        columns.append([
            Picture(image, (f"{minimum:.1f} to {maximum:.1f}",))
            for image, (minimum, maximum) in zip(shares.expand(-1, 3, -1, -1), ranges, strict=True)
        ])  # fmt: skip
    note = "range of each map below it; uniform attention: 1"
    return Gallery(list(zip(*columns, strict=True)), title, titles, note)
