"""What a kernel gets: it is chosen by its platform, and asked whether it can."""

import functools

import jax.numpy as jnp
import pytest

import jax_skipreduce as sr
from jax_skipreduce._backends import choice
from tests.helpers import bits, each_worker, normal
from tests.seams.toys import CountingKernel

N = 4


def test_a_kernel_is_one_file(monkeypatch):
    kernel = CountingKernel()
    monkeypatch.setattr(choice, "KERNELS", [kernel])
    x = normal((N, 100))

    def reduce(x, backend="auto"):
        return sr.all_reduce(x, "data", num_skipped=2, shift=1, backend=backend)

    monkeypatch.setenv("SKIPREDUCE_BACKEND", "auto")
    native = each_worker("shard_map_unchecked", reduce, N)(x)
    assert kernel.num_runs > 0
    assert bits(native) == bits(each_worker("shard_map", functools.partial(reduce, backend="xla"), N)(x))
    with pytest.raises(ValueError, match="backend='native': it takes float32 alone"):
        each_worker("shard_map", functools.partial(reduce, backend="native"), N)(x.astype(jnp.bfloat16))
