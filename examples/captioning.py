"""Train image captioning on a pre-trained encoder: python examples/captioning.py outputs/masked_patch_shapes

A Transformer decoder predicts each word of a caption from the words before it and, by cross-attention, from all tokens
of the encoder. The images are the rendered shapes. Their captions, such as "a blue star at the upper left",
are computed from class, pixels and mask of the shape. Decoders of one seed are trained on three encoders (pre-trained
and frozen, pre-trained and trained, random and trained), and compared by the fraction of held-out images whose caption
is correct in every word.

Letters: b images, t words.
"""

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssvit.data.sources import shapes_options
from ssvit.data.sources.memory import Memory
from ssvit.data.sources.shapes import shapes
from ssvit.loading import options as loading_options
from ssvit.loading.encoder import load_encoder
from ssvit.models import vit_options
from ssvit.models.vit import ViT

COLORS = ("red", "green", "blue")


def caption(image: Tensor, mask: Tensor, name: str) -> str:
    """Return the caption of a shape: its colour by the strongest channel, its name, and the quarter of its centre.

    Args:
        image: (3, h, w) uint8.
        mask: (h, w), positive inside the shape.
        name: Name of the shape.
    """
    rows, columns = mask.nonzero().double().unbind(1)
    color = COLORS[int(image[:, mask > 0].double().mean(1).argmax())]
    vertical = "upper" if rows.mean() < (mask.shape[0] - 1) / 2 else "lower"
    horizontal = "left" if columns.mean() < (mask.shape[1] - 1) / 2 else "right"
    return f"a {color} {name} at the {vertical} {horizontal}"


class Captioner(nn.Module):
    """Predict captions of one length from images.

    Args:
        encoder: The encoder.
        words: Number of words in the vocabulary.
        length: Words of a caption.
        width: Width of the decoder, which has two layers.
    """

    def __init__(self, encoder: ViT, words: int, length: int, width: int = 128) -> None:
        super().__init__()
        self.encoder, self.length = encoder, length
        self.memory = nn.Sequential(nn.LayerNorm(encoder.width), nn.Linear(encoder.width, width))
        self.embedding = nn.Embedding(1 + words, width)  # word 0 is the start of a caption
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerDecoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, 2, norm=nn.LayerNorm(width))
        self.head = nn.Linear(width, words)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        """Return the logits of each next word.

        Args:
            images: Images, (b, 3, h, w) uint8.
            words: The start and the preceding words, (b, t): 0, and indices of words plus 1.

        Returns:
            (b, t, number of words).
        """
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        queries, memory = self.embedding(words) + self.positions[: len(mask)], self.memory(self.encoder(images))
        return self.head(self.decoder(queries, memory, mask, tgt_is_causal=True))

    def loss(self, images: Tensor, captions: Tensor) -> Tensor:
        """Return the mean cross-entropy of captions (b, t), indices of words."""
        return F.cross_entropy(self(images, F.pad(captions + 1, (1, -1))).flatten(0, 1), captions.flatten())

    @torch.no_grad()
    def captions(self, images: Tensor) -> Tensor:
        """Return the captions whose words are the most probable ones given those before, (b, t)."""
        words = torch.zeros(len(images), 1, dtype=torch.int64)
        for _ in range(self.length):
            words = torch.cat((words, self(images, words)[:, -1:].argmax(-1) + 1), dim=1)
        return words[:, 1:] - 1


def captioned(images: Memory) -> list[list[str]]:
    """Return the words of the caption of each image."""
    names = (images.classes[label] for label in images.labels.tolist())
    return [caption(*parts).split() for parts in zip(images.in_memory, images.masks, names, strict=True)]


def train(model: Captioner, images: Tensor, captions: Tensor, *, steps: int, batch: int) -> list[float]:
    """Train the weights that require gradients; return the loss of each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    losses = []
    for rows in torch.randint(len(images), (steps, batch), generator=torch.Generator().manual_seed(0)):
        loss = model.loss(images[rows], captions[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train and evaluate the three models; return the fraction of correct captions of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a run, or a file of another project's weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--held-out", type=int, default=1000)
    options = parser.parse_args(arguments)

    checkpoint = loading_options.LoadEncoder(path=options.checkpoint)
    settings = {"image_size": load_encoder(checkpoint).image_size, "images": options.images, "seed": 1}
    data = shapes(shapes_options.Shapes(**settings, held_out_images=options.held_out))
    texts, truth = captioned(data.train), captioned(data.test)
    words = sorted({word for text in [*texts, *truth] for word in text})
    numbers, expected = (torch.tensor([list(map(words.index, text)) for text in part]) for part in (texts, truth))
    correct = {}
    for name in ("pre-trained, frozen", "pre-trained, trained", "random, trained"):
        encoder = load_encoder(checkpoint)
        torch.manual_seed(0)
        if name.startswith("random"):
            encoder = ViT(vit_options.ViT(**encoder.arguments))
        encoder.requires_grad_(name.endswith(", trained"))
        torch.manual_seed(1)
        model = Captioner(encoder, len(words), len(texts[0]))
        losses = train(model, data.train.in_memory, numbers, steps=options.steps, batch=options.batch)
        found = torch.cat([model.captions(part) for part in data.test.in_memory.split(250)])
        correct[name] = (found == expected).all(1).double().mean().item()
        print(
            f"{name}: loss {losses[-1]:.3f}, {100 * correct[name]:.1f} % of {len(found)} captions correct", flush=True
        )
        print(f"  {' '.join(words[word] for word in found[0])}; correct: {' '.join(truth[0])}", flush=True)
    return correct


if __name__ == "__main__":
    main()
