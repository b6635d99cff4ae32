"""The network of the workload `vgg`: like VGG, most of its parameters are in dense layers, at little compute."""

from __future__ import annotations

import flax.linen as nn
import jax

from jax_skipreduce.programs.common.data import NUM_CLASSES


class VGG(nn.Module):
    """Blocks of 3x3 convolutions, each with a pooling at its end, then three dense layers.

    With the defaults 2.2 M parameters, a gradient of 8.3 MiB, of which convolutions are 3 %: VGG-19 has 4 % there
    (section 4.4). Channels are few and the first block is pooled at once, because all workers may share two cores.

    Attributes:
      blocks: channels of the convolutions of each block.
      dense_size: units of both hidden dense layers.
    """

    blocks: tuple[tuple[int, ...], ...] = ((16,), (32,), (64, 64))
    dense_size: int = 1024

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Images (batch, height, width, 1) -> logits (batch, classes)."""
        x = images
        for number, block in enumerate(self.blocks, start=1):
            for position, channels in enumerate(block, start=1):
                x = nn.relu(nn.Conv(channels, (3, 3), name=f"conv{number}_{position}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2), padding="SAME")
        x = x.reshape(x.shape[0], -1)
        for number in (1, 2):
            x = nn.relu(nn.Dense(self.dense_size, name=f"dense{number}")(x))
        return nn.Dense(NUM_CLASSES, name="classifier")(x)
