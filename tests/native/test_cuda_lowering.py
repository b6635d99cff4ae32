"""What the CUDA call looks like in a program. Lowered here without a GPU, as jax.export does it; not run."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._backends import ffi as _ffi
from tests.helpers import data_mesh, normal

pytestmark = pytest.mark.native

TARGET = _ffi._CUDA_TARGET


def lowered(function, mesh, in_specs, *args, platform="cuda", out_specs=None):
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs or P()))
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in (TARGET, _ffi._CPU_TARGET)]
    return export.export(mapped, platforms=(platform,), disabled_checks=allowed)(*args).mlir_module()


def attribute(text, name):
    (found,) = re.findall(rf"{name} = (?:array<i64: ?([^>]*)>|dense<\[?([^\]>]*)\]?>|(-?\d+))", text)
    return next(value for value in found if value)


def reduce(**options):
    return lambda x, c: sr.all_reduce(x[0], "data", shift=c, backend="native", **options)


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "wire_type", "itemsize"),
    [
        *((jnp.float32, None, -1, 4), (jnp.float32, "bfloat16", 1, 2), (jnp.float32, "float16", 2, 2)),
        *((jnp.bfloat16, None, -1, 2), (jnp.float16, "bfloat16", -1, 2)),
    ],
)
def test_call(dtype, wire_dtype, wire_type, itemsize):
    options = {"num_skipped": 3, "normalize": "drop", "wire_dtype": wire_dtype}
    # 8 slices of 13 elements, padded to 16.
    text = lowered(reduce(**options), data_mesh(8), (P("data"), P()), normal((8, 100), dtype), jnp.int32(5))
    name = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
    (call,) = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    types = f"(tensor<8x16x{name}>, tensor<i32>) -> (tensor<8x16x{name}>, tensor<{max(256, 8 * 16 * itemsize)}xui8>)"
    assert types in call
    expected = {"num_workers": 8, "num_skipped": 3, "divisor": 5, "wire_type": wire_type, "time_limit_ms": 120000}
    assert {key: int(attribute(call, key)) for key in expected} == expected
    assert attribute(call, "replica_groups").replace(" ", "") == "0,1,2,3,4,5,6,7"
    assert "collective_permute" not in text


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("a", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("c", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (("c", "a"), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (("b", "c"), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_groups_are_those_of_the_mesh_in_the_order_of_ranks(axis, groups):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    everywhere = P(("a", "b", "c"))
    text = lowered(
        lambda x: sr.all_reduce(x, axis, backend="native"), mesh, everywhere, normal((8, 64)), out_specs=everywhere
    )
    ids = [int(word) for word in attribute(text, "replica_groups").replace(" ", "").split(",")]
    size = len(groups[0])
    assert [ids[i : i + size] for i in range(0, len(ids), size)] == groups
    # What devices of a group see of each other, in the order in which lax.axis_index counts them.
    names = tuple(name for name in mesh.axis_names if name in axis)
    seen = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.all_gather(x[0], names)[None], mesh=mesh, in_specs=everywhere, out_specs=everywhere
        )
    )(jnp.arange(8))
    for place, row in enumerate(seen.tolist()):
        assert row in groups
        assert place in row


def test_a_bucket_is_one_call():
    tx = sr.skipreduce("data", 0.5, min_size=1, backend="native")

    def step(grads, count):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], grads), sr.SkipReduceState(count))[0]

    grads = {"a": normal((8, 80)), "b": normal((8, 7, 9)), "c": normal((8, 5), jnp.bfloat16)}
    text = lowered(step, data_mesh(8), (P("data"), P()), grads, jnp.int32(0))
    calls = [line for line in text.splitlines() if f"@{TARGET}(" in line]
    assert len(calls) == 2
    # The last leaf comes first. Then 80/8 and 63/8 elements a slice, joined and padded.
    assert "tensor<8x8xbf16>" in calls[0]
    assert "tensor<8x24xf32>" in calls[1]


def test_auto_goes_around_the_ring_there(monkeypatch):
    # The kernels have not been run on a GPU.
    monkeypatch.setenv("SKIPREDUCE_BACKEND", "auto")
    function = lambda x: sr.all_reduce(x[0], "data", num_skipped=1)  # noqa: E731
    text = lowered(function, data_mesh(4), P("data"), normal((4, 100)))
    assert TARGET not in text
    assert "collective_permute" in text


def test_what_this_call_cannot_do():
    x, k = normal((4, 100)), jnp.int32(1)
    with pytest.raises(NotImplementedError, match="platform cuda"):
        lowered(
            lambda x, k: sr.all_reduce(x[0], "data", num_skipped=k, backend="native"),
            data_mesh(4),
            (P("data"), P()),
            x,
            k,
        )


def test_on_a_gpu_what_is_missing_is_said_when_traced(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.11.1")
    message = (
        r"backend='native': jaxlib 0\.11\.1: its XLA gives custom calls no communicator, which that of 0\.11\.2 does"
    )
    with pytest.raises(ValueError, match=message):
        lowered(reduce(), data_mesh(4), (P("data"), P()), normal((4, 8)), jnp.int32(0))
    assert "0.11.1" in sr.native_info().cuda
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.11.2.dev20260901+cuda")
    assert sr.native_info().cuda is None
    with pytest.raises(ValueError, match="k is traced"):
        lowered(
            lambda x, k: sr.all_reduce(x[0], "data", num_skipped=k, backend="native"),
            data_mesh(4),
            (P("data"), P()),
            normal((4, 8)),
            jnp.int32(1),
        )


def test_native_info_says_what_was_found():
    info = sr.native_info()
    assert set(info.cuda_libraries) == {"cuda", "nvrtc", "nccl"}
    assert all(info.cuda_libraries.values())
    assert "it has not yet been run on a GPU" in str(info)


def test_a_library_of_another_version(monkeypatch):
    _ffi.reason_not_loaded.cache_clear()
    monkeypatch.setattr(_ffi, "library", object)
    try:
        assert "is of another version of this package: install it again" in str(_ffi.reason_not_loaded())
    finally:
        _ffi.reason_not_loaded.cache_clear()


@pytest.mark.parametrize("platform", ["tpu"])
def test_where_there_are_no_kernels_native_is_an_error(monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    message = f"backend='native': there are no kernels for JAX's default backend here, {platform}"
    with pytest.raises(ValueError, match=message):
        lowered(reduce(), data_mesh(4), (P("data"), P()), normal((4, 8)), jnp.int32(0))
