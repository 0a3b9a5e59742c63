"""Implement the Vision Transformer (Dosovitskiy et al. 2021, section 3.1) with separate calls for patches and layers.

`embed` turns an image into patch embeddings, and `encode` runs the Transformer over them. A training method changes the
sequence between the two calls: it corrupts patches or drops them. The encoder normalises its images, so it takes float
in [0, 1], or uint8.

Letters: b images, c channels, n patches, s prefix tokens (class token, distillation token, registers), t tokens (prefix
tokens, then patches), m selected tokens, d width.
"""

import math
import re
from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor, nn

from ssvit.engine.randomness import uniform
from ssvit.errors import OptionError, one_of, pair, typed
from ssvit.models import encoder_options, positions, vit_options
from ssvit.models.block import Attention, Block, Ids, Layers, TokenInfo, gather_tokens, lecun_normal_
from ssvit.models.encoder import Encoder
from ssvit.models.hybrid import Convolution, ResNet
from ssvit.models.positions import Grid


def adapted(weight: Tensor, channels: int, count: int, how: str) -> Tensor:
    """Convert the weight of a patch projection to another number of channels.

    Args:
        weight: The weight, (d, channels * p * q).
        channels: Number of channels of the weight.
        count: New number of channels, c.
        how: mean: every channel gets the mean over the channels; repeat: the channels are repeated in order, and a
            single channel gets their sum (timm: adapt_input_conv). Both are scaled by channels / c.

    Returns:
        The converted weight, (d, c * p * q).
    """
    by_channel = weight.unflatten(1, (channels, -1))
    if how == "mean" or count == 1:
        converted = by_channel.sum(1, keepdim=True).expand(-1, count, -1) / count
    else:
        converted = by_channel[:, torch.arange(count, device=weight.device) % channels] * (channels / count)
    return converted.flatten(1)


class ViT(Encoder):
    """Implement a Vision Transformer without a head, with the options of `vit_options.ViT`.

    It takes images of any size that is a multiple of the patch size. Positions are resampled to the grid of the images.

    Attributes:
        resize: How positions are resampled, one of `vit_options.RESIZE`.
    """

    resize = "paper"

    def __init__(self, options: vit_options.ViT) -> None:
        super().__init__()
        self.options = options
        self.image_size = pair("image_size", options.image_size)
        self.patch_size = pair("patch_size", options.patch_size)
        self.grid, self.patches = options.grid, math.prod(options.grid)
        self.width, self.channels, self.pooling = options.width, options.channels, options.pooling
        # Number of prefix tokens with positions.
        placed = options.class_tokens * int(options.class_token) + int(options.distillation_token)
        self.num_prefix_tokens = placed + options.registers

        self.stem = None if options.stem is None else ResNet(options.stem, channels=options.channels)
        stride, mapped = (1, options.channels) if self.stem is None else (self.stem.stride, self.stem.outputs)
        self.cut = self.patch_size[0] // stride, self.patch_size[1] // stride
        self.patch = nn.Linear(mapped * math.prod(self.cut), options.width)
        self.class_token = (
            nn.Parameter(torch.zeros(1, options.class_tokens, options.width)) if options.class_token else None
        )
        self.distillation_token = nn.Parameter(torch.zeros(1, 1, options.width)) if options.distillation_token else None
        self.register_tokens = (
            nn.Parameter(torch.zeros(1, options.registers, options.width)) if options.registers else None
        )
        self.positions = nn.ModuleList()
        self.layers_with_positions = 0  # number of layers, from the first, whose input gets positions
        if additive := positions.ADDITIVE.get(options.positions):
            self.layers_with_positions = 1 if options.positions_at == "stem" else options.depth
            count = options.depth if options.positions_at == "every_layer" else 1
            self.positions.extend(additive(options.grid, placed, options.width) for _ in range(count))
        self.rotary = positions.Rotary(options.width // options.heads) if options.positions == "rotary" else None
        mlp_width = 4 * options.width
        if options.mlp == "swiglu":  # a gated MLP has a third matrix, so 2/3 of the width keeps the parameter count
            mlp_width = 8 * math.ceil(mlp_width * 2 // 3 / 8)
        self.dropout = nn.Dropout(options.dropout)
        blocks = (
            Block(
                self._attention(layer),
                width=options.width,
                mlp_width=options.mlp_width or mlp_width,
                dropout=options.dropout,
                drop=options.stochastic_depth * layer / max(options.depth - 1, 1),
                mlp=options.mlp,
                gelu=options.gelu,
                layer_scale=options.layer_scale,
                norm_epsilon=options.norm_epsilon,
            )
            for layer in range(options.depth)
        )
        self.blocks = Layers(blocks, activation_checkpointing=options.activation_checkpointing)
        self.norm = nn.LayerNorm(options.width, eps=options.norm_epsilon)
        self.register_normalisation(options.mean, options.std)
        self._initialise()

    def _attention(self, layer: int) -> Attention:
        """Return the self-attention of a layer, counted from 0."""
        options = self.options
        shared = {"width": options.width, "heads": options.heads, "dropout": options.attention_dropout}
        if options.attention == "full":
            relative = (options.grid, self.num_prefix_tokens) if options.positions == "relative" else None
            return Attention(**shared, relative=relative)
        from ssvit.models.local_attention import LocalAttention

        return LocalAttention(**shared, kind=options.attention, layer=layer, grid=options.grid, window=options.window)

    def _initialise(self) -> None:
        """Initialise the weights as the authors' JAX code does.

        Stem and patch projection: LeCun normal; attention and MLP matrices: Xavier uniform; MLP biases: N(0, 1e-6).
        """
        for module in self.modules():
            if isinstance(module, Convolution):
                lecun_normal_(module.weight.flatten(1))
        lecun_normal_(self.patch.weight)
        nn.init.zeros_(self.patch.bias)
        if self.class_token is not None and self.options.class_tokens > 1:
            nn.init.normal_(self.class_token, std=0.02)  # as in facebookresearch/pixio; equal tokens would stay equal
        if self.register_tokens is not None:
            nn.init.normal_(self.register_tokens, std=1e-6)  # as in facebookresearch/dinov2: vision_transformer.py
        for block in self.blocks:
            for matrix in (*block.attention.qkv.weight.chunk(3), block.attention.out.weight):
                nn.init.xavier_uniform_(matrix)
            nn.init.zeros_(block.attention.qkv.bias)
            nn.init.zeros_(block.attention.out.bias)
            for layer, parts in ((block.expand, 1 + block.gated), (block.contract, 1)):
                for matrix in layer.weight.chunk(parts):
                    nn.init.xavier_uniform_(matrix)
                nn.init.normal_(layer.bias, std=1e-6)

    def check(self, images: Tensor) -> None:
        """Check the shape and the values of images (b, c, h, w).

        Raises:
            OptionError: The channels differ from the encoder's, the patch size does not divide the image size, or the
                values have another type or range (see `check_values`).
        """
        c, *sides = images.shape[1:]
        if len(sides) != 2 or c != self.channels or sides[0] % self.patch_size[0] or sides[1] % self.patch_size[1]:
            shape, patch = ("x".join(map(str, sizes)) for sizes in (images.shape[1:], self.patch_size))
            expected = f"must have {self.channels} channels, and a height and width that patches of {patch} divide"
            raise OptionError("images", shape, expected)
        self.check_values(images)

    def grid_of(self, images: Tensor) -> Grid:
        """Return the rows and columns of the patch grid of images (b, c, h, w)."""
        return images.shape[2] // self.patch_size[0], images.shape[3] // self.patch_size[1]

    def check_size(self, images: Tensor) -> None:
        """Check that images (b, c, h, w) have the patch grid of the encoder, for which masks are sampled.

        Raises:
            OptionError: The grid differs.
        """
        if self.grid_of(images) != self.grid:
            size, expected = ("x".join(map(str, sides)) for sides in (images.shape[2:], self.image_size))
            raise OptionError("images", size, f"must be {expected} pixels, the size for which masks are sampled")

    def patchify(self, x: Tensor, ids: Ids = None) -> Tensor:
        """Cut images, or a stem's feature map, into patches in raster order.

        Args:
            x: Images or feature maps, (b, c, h, w).
            ids: Indices of the patches to return, (b, m), in this order; None: all patches.

        Returns:
            Flattened patches, (b, n, c * p * q), or (b, m, c * p * q) with ids.
        """
        p, q = self.cut
        patches = rearrange(x, "b c (y p) (x q) -> b (y x) (c p q)", p=p, q=q)
        return patches if ids is None else gather_tokens(patches, ids)

    def embed(self, images: Tensor, visible_ids: Ids = None) -> Tensor:
        """Normalise the images and project each patch to an embedding, without positions.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            visible_ids: Indices of the patches to embed, (b, m); None: all patches.

        Returns:
            Patch embeddings, (b, n, d), or (b, m, d) with visible_ids.

        Raises:
            OptionError: See `check`.
        """
        self.check(images)
        x = self.normalise(images)
        return self.patch(self.patchify(x if self.stem is None else self.stem(x), visible_ids))

    def encode(
        self,
        tokens: Tensor,
        *,
        grid: Grid | None = None,
        patch_ids: Ids = None,
        output_ids: Ids = None,
        depth_noise: Tensor | None = None,
    ) -> Tensor:
        """Run the Transformer over patch embeddings.

        Args:
            tokens: Patch embeddings, (b, n, d).
            grid: Rows and columns of the patch grid (`grid_of`); None: the grid of the encoder's image size.
            patch_ids: Indices in the grid of the patches in `tokens`, (b, n); None: all patches in raster order.
            output_ids: Indices in `tokens` of the output patches, (b, m): the last layer is computed for these alone.
                None: all tokens.
            depth_noise: Result of `depth_noise`, (b, 2 * depth); None: torch's generator samples the numbers.

        Returns:
            Normalised outputs, (b, s + n, d), or (b, m, d) with output_ids.
        """
        x, info = self._sequence(tokens, grid, patch_ids)
        ids = None if output_ids is None else output_ids + self.num_prefix_tokens
        return self.norm(self.blocks(x, ids, info._replace(depth_noise=depth_noise)))

    def layers(self, images: Tensor, *, depth_noise: Tensor | None = None) -> Iterator[Tensor]:
        """Yield the tokens after each layer, before the last norm: (b, c, h, w) -> (b, s + n, d), depth times.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            depth_noise: Result of `depth_noise`, (b, 2 * depth); None: torch's generator samples the numbers.
        """
        x, info = self._sequence(self.embed(images), self.grid_of(images), None)
        info = info._replace(depth_noise=depth_noise)
        for layer in range(len(self.blocks)):
            x = self.blocks.step(layer, x, None, info)
            yield x

    def last_layer(self, images: Tensor) -> Tensor:
        """Return the tokens after the last layer, before the last norm: (b, c, h, w) -> (b, s + n, d)."""
        x, info = self._sequence(self.embed(images), self.grid_of(images), None)
        return self.blocks(x, None, info)  # all layers in one call, which the kernels compute faster

    def _sequence(self, tokens: Tensor, grid: Grid | None, patch_ids: Ids) -> tuple[Tensor, TokenInfo]:
        """Return the input of the first layer, (b, t, d), and the further inputs of all layers."""
        position_ids, relative = None, self.blocks[0].attention.relative
        if patch_ids is not None:
            if relative is not None and grid is not None and not relative.covers(grid):
                expected = "requires all patches, or images of the encoder's size: keys depend on relative offsets"
                raise OptionError("positions", "relative", expected)
            prefix_ids = torch.arange(self.num_prefix_tokens, device=patch_ids.device).expand(len(patch_ids), -1)
            position_ids = torch.cat([prefix_ids, patch_ids + self.num_prefix_tokens], dim=1)
        learned = self.class_token, self.distillation_token, self.register_tokens
        prefix = [token.expand(tokens.shape[0], -1, -1).to(tokens.dtype) for token in learned if token is not None]
        if prefix:
            tokens = torch.cat([*prefix, tokens], 1)
        count = self.layers_with_positions
        tables = (self.positions[layer % len(self.positions)](grid, self.resize) for layer in range(count))
        with_registers = [self.around_registers(table) for table in tables]
        added = with_registers if position_ids is None else [table[position_ids] for table in with_registers]
        if added:
            tokens = tokens + added[0].to(tokens.dtype)
        rotation = None
        if self.rotary is not None:
            rotation = self.rotary(grid or self.grid, self.num_prefix_tokens, position_ids)
        return self.dropout(tokens), TokenInfo(position_ids, rotation, added[1:], grid=grid)

    def around_registers(self, table: Tensor) -> Tensor:
        """Insert zeros for the registers, which have no positions, into position embeddings: -> (t, d)."""
        if self.register_tokens is None:
            return table
        zeros = table.new_zeros(self.register_tokens.shape[1:])
        prefix, patches = table.tensor_split([self.num_prefix_tokens - len(zeros)])
        return torch.cat([prefix, zeros, patches])

    def depth_noise(self, slots: Tensor, *, seed: int, views: int = 1) -> Tensor | None:
        """Return the random numbers of stochastic depth, a hash of (seed, slot, view, layer, branch).

        Args:
            slots: Slots of the images, (b,).
            seed: Seed of the run.
            views: Number of times that each image is encoded in a step.

        Returns:
            Numbers in [0, 1), (views * b, 2 * depth); None in eval mode or if all rates are 0.
        """
        if not self.training or all(block.drop.rate == 0 for block in self.blocks):
            return None
        count = 2 * len(self.blocks)
        return torch.cat([uniform(seed, "stochastic depth", slots, count, view) for view in range(views)])

    def forward(
        self, images: Tensor, visible_ids: Ids = None, output_ids: Ids = None, depth_noise: Tensor | None = None
    ) -> Tensor:
        """Encode images.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            visible_ids: Indices of the patches to encode, (b, m); no other patch is embedded. None: all patches.
            output_ids: Indices of the output patches, see `encode`; None: all tokens.
            depth_noise: Result of `depth_noise`, (b, 2 * depth); None: torch's generator samples the numbers.

        Returns:
            Normalised outputs, with the shapes of `encode`.
        """
        tokens, grid = self.embed(images, visible_ids), self.grid_of(images)
        return self.encode(tokens, grid=grid, patch_ids=visible_ids, output_ids=output_ids, depth_noise=depth_noise)

    def class_output(self, outputs: Tensor) -> Tensor:
        """Return the output of the class token, or the mean of several: (b, s + n, d) -> (b, d)."""
        count = self.options.class_tokens
        return outputs[:, 0] if count == 1 else outputs[:, :count].mean(1)

    def pool(self, outputs: Tensor) -> Tensor:
        """Pool outputs (b, s + n, d) into a vector per image, (b, d): the class token (the paper) or the patch mean."""
        is_class = self.pooling == "class_token"
        return self.class_output(outputs) if is_class else outputs[:, self.num_prefix_tokens :].mean(1)

    def represent(self, images: Tensor, visible_ids: Ids = None, *, depth_noise: Tensor | None = None) -> Tensor:
        """Return pool(forward(images)); the last layer is computed only for the tokens that are pooled.

        Args:
            images: Images, (b, c, h, w), uint8 or float in [0, 1].
            visible_ids: Indices of the patches to encode, (b, m); None: all patches.
            depth_noise: Result of `depth_noise`, (b, 2 * depth); None: torch's generator samples the numbers.

        Returns:
            Feature vectors, (b, d).
        """
        if self.pooling == "patch_mean":
            return self.pool(self(images, visible_ids, depth_noise=depth_noise))
        # output_ids count from the first patch, so the indices of the class tokens are negative.
        ids = torch.arange(self.options.class_tokens, device=images.device) - self.num_prefix_tokens
        return self.class_output(self(images, visible_ids, ids.expand(images.shape[0], -1), depth_noise))

    @property
    def depth(self) -> int:
        """Return the number of layers, counted from the blocks because some methods remove the last ones."""
        return len(self.blocks)

    def train_last(self, layers: int) -> None:
        """Freeze all weights except those of the last layers, and of the last norm if there are any."""
        self.requires_grad_(False)
        for part in (*self.blocks[self.depth - layers :], self.norm) if layers else ():
            part.requires_grad_(True)

    def pooled(self, outputs: Tensor, pooling: str, images: Tensor) -> Tensor:
        """Pool the tokens of a layer, (b, s + n, d).

        Args:
            outputs: Tokens of a layer, (b, s + n, d).
            pooling: class_token, patch_mean, both (concatenated), or patches.
            images: The images that were encoded, (b, c, h, w).

        Returns:
            Features, (b, d); (b, 2 * d) for both; (b, y, x, d) for patches.
        """
        patches = outputs[:, self.num_prefix_tokens :]
        if pooling == encoder_options.PATCHES:
            return patches.unflatten(1, self.grid_of(images))
        parts = {"class_token": self.class_output(outputs), "patch_mean": patches.mean(1)}
        return torch.cat(list(parts.values()), dim=1) if pooling == "both" else parts[pooling]

    def layers_above(self, name: str) -> int:
        """Return the number of layers above a parameter, counting the head.

        For a block: the later blocks and the head. For parameters before the blocks: one more than for the first block.
        For the last norm: 0.
        """
        if block := re.match(r"blocks\.(\d+)\.", name):
            return self.depth - int(block[1])
        return 0 if name.startswith("norm.") else self.depth + 1

    @property
    def architecture(self) -> dict[str, object]:
        """Return the arguments that two encoders must share for weights to be transferred between them."""
        free = (*vit_options.CHANGEABLE, "channels", "mean", "std")
        fixed = {name: value for name, value in self.arguments.items() if name not in free}
        if self.stem is not None:
            layers = list(self.stem.layers)
            stem = {"layers": layers, "epsilons": self.stem.epsilons, "channels": self.channels}
            fixed["stem"] = self.arguments["stem"] | stem
        return fixed | {"patch_size": self.patch_size, "mlp_width": self.blocks[0].contract.in_features}

    @torch.no_grad()
    def load_weights_from(self, other: "ViT", *, how: str = "paper", adapt: str = "mean") -> None:
        """Load the weights, mean and std of another ViT; positions are resampled if the patch grids differ.

        If the numbers of channels differ, the patch projection is converted, and mean and std are not loaded.

        Args:
            other: Encoder with the same architecture; its image size and channels may differ.
            how: How positions are resampled, one of `vit_options.RESIZE`.
            adapt: How the patch projection is converted, one of `vit_options.ADAPT_CHANNELS`.

        Raises:
            OptionError: An argument of the architecture differs.
        """
        one_of("resize", how, vit_options.RESIZE)
        one_of("adapt_channels", adapt, vit_options.ADAPT_CHANNELS)
        for name, expected in other.architecture.items():
            if self.architecture[name] != expected:
                reason = f"must be {typed(expected)}, as in the encoder of the weights"
                raise OptionError(name, self.architecture[name], reason)
        state = other.state_dict()
        if self.grid != other.grid:
            for name, module in other.named_modules():
                if isinstance(module, positions.Positions):
                    resized = module.resampled(self.grid, how)
                    state |= {f"{name}.{key}": value for key, value in resized.items()}
        if self.channels == other.channels:
            self.options = self.options.changed(mean=other.options.mean, std=other.options.std)
        else:
            weight = adapted(other.patch.weight, other.channels, self.channels, adapt)
            state |= {"patch.weight": weight, "mean": self.mean, "std": self.std}
        self.load_state_dict(state)
