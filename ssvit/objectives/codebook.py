"""Implement a codebook of patches: the label of a patch is its cluster, computed by k-means before the first step.

First stage: clusters of the whitened window of pixels around each patch. Second stage: clusters of the features that
the encoder of an earlier run has after one of its layers, as in HuBERT for speech (Hsu et al. 2021, section II-A). The
fitted values are buffers, so checkpoints contain them.

Letters: b images, c channels, n patches of p x q pixels, d width of the vector of a patch, k clusters; ... any leading
shape.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from ssvit.data.batch import Batch
from ssvit.engine.randomness import key, uniform
from ssvit.kernels.fast_faiss import faiss
from ssvit.models.block import gather_tokens
from ssvit.models.vit import ViT
from ssvit.objectives import codebook_options
from ssvit.objectives.base import at_least_float32
from ssvit.objectives.targets import Classes
from ssvit.objectives.teacher import Teacher

_BATCH_SIZE = 64  # images per batch while fitting
_MAX_WINDOWS = 20_000  # number of windows for the computation of the whitening
_CHUNK = 1 << 14  # patches that are compared with all clusters in one product
_SEED = key(0, "codebook") & 0x7FFFFFFF
_MIN_DEVIATION = 1e-3  # minimum standard deviation of a component relative to the first, which limits the whitening
_EQUAL = 1e-6  # standard deviation below which windows of pixels in [0, 1] are equal


class Windows(nn.Module):
    """Project the window of pixels around each patch onto its leading principal components, each of variance 1.

    The image is reflected at its borders. Before `fit`, all buffers are zero.
    """

    projection: Tensor
    offset: Tensor

    def __init__(self, options: codebook_options.Codebook, *, encoder: ViT) -> None:
        super().__init__()
        self.patch_size, self.window = encoder.patch_size, options.window_size(encoder.patch_size)
        self.width = min(options.components, encoder.channels * math.prod(self.window))
        self.register_buffer("projection", torch.zeros(self.width, encoder.channels, *self.window))
        self.register_buffer("offset", torch.zeros(self.width))

    def forward(self, images: Tensor) -> Tensor:
        """Return the vector of each patch: (b, c, h, w) in [0, 1] or uint8 -> (b, n, d)."""
        with torch.autocast(images.device.type, enabled=False):
            x = F.conv2d(self._padded(images), self.projection, self.offset, stride=self.patch_size)
        return rearrange(x, "b d y x -> b (y x) d")

    def windows(self, images: Tensor) -> Tensor:
        """Return the window of each patch: (b, c, h, w) in [0, 1] or uint8 -> (b, n, c * window)."""
        return F.unfold(self._padded(images), self.window, stride=self.patch_size).mT

    def fit(self, images: Tensor) -> None:
        """Compute the principal components from a sample of the windows of images (b, c, h, w)."""
        patches = math.prod(side // patch for side, patch in zip(images.shape[2:], self.patch_size, strict=True))
        count = min(patches, math.ceil(_MAX_WINDOWS / len(images)))
        order = uniform(0, "windows", torch.arange(len(images), device=images.device), patches).argsort(1)
        parts = zip(images.split(_BATCH_SIZE), order[:, :count].split(_BATCH_SIZE), strict=True)
        x = torch.cat([gather_tokens(self.windows(part), ids).flatten(0, 1).cpu() for part, ids in parts])
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            torch.manual_seed(_SEED)  # four power iterations make the result almost independent of this seed
            _, singular_values, axes = torch.pca_lowrank(x, min(*x.shape, self.width + 32), niter=4)
        deviation = singular_values[: self.width] / math.sqrt(len(x) - 1)
        least = max(_MIN_DEVIATION * deviation[0].item(), _EQUAL)
        projection = (axes[:, : self.width] / deviation.clamp(min=least)).T
        # If there are fewer windows than components, the remaining components stay zero.
        self.offset[: len(projection)] = -(projection @ x.mean(0))
        self.projection[: len(projection)] = projection.unflatten(1, self.projection.shape[1:])

    def _padded(self, images: Tensor) -> Tensor:
        """Scale images to [0, 1] and pad them by reflection."""
        maximum = 255.0 if images.dtype == torch.uint8 else 1.0
        (top, bottom), (left, right) = (
            ((window - patch) // 2, (window - patch + 1) // 2)
            for window, patch in zip(self.window, self.patch_size, strict=True)
        )
        return F.pad(images.to(self.projection.dtype) / maximum, (left, right, top, bottom), mode="reflect")


class Features(nn.Module):
    """Compute the features of patches in a frozen encoder, after its last norm.

    The encoder's weights are part of the state dict.
    """

    def __init__(self, encoder: ViT) -> None:
        super().__init__()
        self.teacher, self.width = Teacher(encoder), encoder.width

    def forward(self, images: Tensor) -> Tensor:
        """Return the features of each patch: (b, c, h, w) in [0, 1] or uint8 -> (b, n, d)."""
        encoder = self.teacher.module
        return at_least_float32(encoder(images)[:, encoder.num_prefix_tokens :])


class Codebook(nn.Module, Classes):
    """Use clusters of patches as classes, with the options of `codebook_options.Codebook`.

    Args:
        options: Options of the codebook.
        encoder: The encoder whose patches are predicted.
        layers: Layers of the earlier run's encoder; None: as in the options, if any.
    """

    centroids: Tensor
    colors: Tensor

    def __init__(self, options: codebook_options.Codebook, *, encoder: ViT, layers: ViT | None = None) -> None:
        super().__init__()
        self.options = options
        self.patch_size = encoder.patch_size
        self.classes = self.width = options.clusters
        if layers is None and options.layers is not None:
            layers = options.layers.build()
        self.vectors = Windows(options, encoder=encoder) if layers is None else Features(layers)
        self.register_buffer("centroids", torch.zeros(options.clusters, self.vectors.width))
        self.register_buffer("colors", torch.zeros(options.clusters, encoder.channels, *self.patch_size))

    @torch.no_grad()
    def labels(self, images: Tensor) -> Tensor:
        """Return the nearest cluster of each patch: (b, c, h, w) in [0, 1] or uint8 -> (b, n, 1) int64."""
        vectors = self.vectors(images)
        with torch.autocast(images.device.type, enabled=False):
            lengths = self.centroids.square().sum(1) / 2
            nearest = [
                (part @ self.centroids.T - lengths).argmax(1)
                for part in vectors.to(self.centroids.dtype).flatten(0, 1).split(_CHUNK)
            ]
        return torch.cat(nearest).view(*vectors.shape[:2], 1)

    def paint(self, labels: Tensor) -> Tensor:
        """Return the mean pixels of the patches in a cluster: (..., 1) -> (..., c, p, q)."""
        return self.colors[labels[..., 0]]

    @torch.no_grad()
    def prepare(self, batches: Iterator[Batch]) -> str:
        """Fit vectors, clusters and colours to images of the run; see `Objective.prepare`."""
        parts, count = [], 0
        while count < self.options.images:
            parts.append(next(batches).images)
            count += len(parts[-1])
        images = torch.cat(parts)[: self.options.images]
        if isinstance(self.vectors, Windows):
            self.vectors.fit(images)
        vectors = torch.cat([self.vectors(part).flatten(0, 1).float().cpu() for part in images.split(_BATCH_SIZE)])
        self.centroids.copy_(k_means(vectors, self.classes))
        shares = self._paint_with(images)
        perplexity = (-torch.xlogy(shares, shares).sum()).exp().item()
        clusters = f"{self.classes} clusters of {len(vectors):,} patches"
        return f"codebook: {clusters}; perplexity {perplexity:.0f}, {(shares == 0).sum().item()} empty"

    def _paint_with(self, images: Tensor) -> Tensor:
        """Compute the mean pixels of the clusters from images and return the share of patches per cluster, (k,)."""
        sums, counts = torch.zeros_like(self.colors).flatten(1), torch.zeros_like(self.colors[:, 0, 0, 0])
        p, q = self.patch_size
        for part in images.split(_BATCH_SIZE):
            pixels = rearrange(part.to(sums.dtype), "b c (y p) (x q) -> (b y x) (c p q)", p=p, q=q)
            labels = self.labels(part).flatten()
            sums.index_add_(0, labels, pixels / (255.0 if part.dtype == torch.uint8 else 1.0))
            counts.index_add_(0, labels, torch.ones_like(labels, dtype=counts.dtype))
        self.colors.copy_((sums / counts.clamp(min=1)[:, None]).view_as(self.colors))
        return counts.double() / counts.sum()


def k_means(vectors: Tensor, clusters: int) -> Tensor:
    """Return the centroids of clusters by faiss, from at most 256 vectors per cluster: (..., d) float32 -> (k, d)."""
    kmeans = faiss.Kmeans(vectors.shape[1], clusters, niter=25, seed=_SEED, min_points_per_centroid=1)
    kmeans.train(vectors.numpy())
    return torch.from_numpy(kmeans.centroids)
