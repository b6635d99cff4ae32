"""The network of the workload `lm`: a small language model over bytes, built as LLaMA is."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

NUM_BYTES = 256

_ROTARY_BASE = 10_000.0


def rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding: turns each pair of channels by an angle that grows with the position.

    Args:
      x: queries or keys, shape (batch, positions, heads, channels), channels even.
    """
    half = x.shape[-1] // 2
    frequencies = _ROTARY_BASE ** (-jnp.arange(half, dtype=x.dtype) / half)
    angles = jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary embedding, without biases."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, positions, size) -> the same shape."""
        size = x.shape[-1]
        head_shape = (self.num_heads, size // self.num_heads)
        query, key, value = (
            nn.DenseGeneral(head_shape, use_bias=False, name=name)(x) for name in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return nn.DenseGeneral(size, axis=(-2, -1), use_bias=False, name="out")(mixed)


class Block(nn.Module):
    """Attention, then SwiGLU, each on a normalised input and added to it."""

    num_heads: int
    hidden_size: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, positions, size) -> the same shape."""
        x = x + Attention(self.num_heads, name="attention")(nn.RMSNorm(name="attention_norm")(x))
        h = nn.RMSNorm(name="mlp_norm")(x)
        gate = nn.silu(nn.Dense(self.hidden_size, use_bias=False, name="gate")(h))
        up = nn.Dense(self.hidden_size, use_bias=False, name="up")(h)
        return x + nn.Dense(x.shape[-1], use_bias=False, name="down")(gate * up)


class ByteLM(nn.Module):
    """A LLaMA of few and narrow layers; with the defaults 1.3 M parameters, a gradient of 5 MiB.

    Layers are stacked and run by one loop, so that compiling does not take longer with more of them.

    Attributes:
      size: channels.
      num_layers, num_heads, hidden_size: of the blocks.
    """

    size: int = 160
    num_layers: int = 4
    num_heads: int = 4
    hidden_size: int = 432

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Bytes (batch, positions) -> logits of the byte that follows each, (batch, positions, 256)."""
        x = nn.Embed(NUM_BYTES, self.size, name="embedding")(tokens)
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = layers(Block(self.num_heads, self.hidden_size, name="layers"), x, None)
        return nn.Dense(NUM_BYTES, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))
