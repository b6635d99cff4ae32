"""The native library, and the only place that knows `jax.ffi`: loads, registers and calls it.

The library is built from ``xla_ffi/`` when the package is installed, where there is a C++ compiler. Without it
everything runs through `lax.ppermute`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CPU_TARGET = "skipreduce_cpu_all_reduce"
_CUDA_TARGET = "skipreduce_all_reduce"

# The first jaxlib whose XLA gives its communicators to custom calls on GPUs.
_FIRST_JAXLIB_FOR_CUDA = (0, 11, 2)

# The same numbers as ElementType and Divide in xla_ffi/cpu_reduce.h.
_TYPE_NUMBERS = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}
_DIVIDE_NUMBERS = {None: 0, "skip": 1, "drop": 2}


def timeout() -> float:
    """Seconds that a collective waits for a worker, from the environment variable SKIPREDUCE_TIMEOUT."""
    text = os.environ.get("SKIPREDUCE_TIMEOUT", "120")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.001 <= seconds <= 1e6:
        raise ValueError(f"SKIPREDUCE_TIMEOUT={text!r}: expected seconds, 0.001 to 1000000")
    return seconds


def reason_against_dtype(dtype: Any, wire_dtype: Any, served: Sequence[str]) -> str | None:
    """The reason why a kernel for the dtypes `served` cannot take `dtype` sent as `wire_dtype`; None if it can."""
    name = jnp.dtype(dtype).name
    if name not in served:
        return f"{name} is not among {', '.join(served)}"
    if name == "float64" and jnp.dtype(wire_dtype) != jnp.dtype(dtype):
        return "float64 is not sent as anything else"
    return None


@functools.cache
def library_path() -> Path | None:
    # An editable install keeps what was built apart from the sources; the package has both directories.
    directories = importlib.import_module("jax_skipreduce").__path__
    paths = [Path(directory) / "skipreduce_ffi.so" for directory in directories]
    return next((path for path in paths if path.exists()), None)


@functools.cache
def library() -> ctypes.CDLL:
    """The native library. Raises OSError if the library was not built, or cannot be loaded."""
    path = library_path()
    if path is None:
        raise OSError("skipreduce_ffi.so was not built")
    return ctypes.CDLL(str(path))


@functools.cache
def reason_not_loaded() -> str | None:
    if library_path() is None:
        return "the native library was not built (pip install -v shows why)"
    try:
        loaded = library()
    except OSError as error:
        return f"the native library cannot be loaded ({error})"
    if not all(hasattr(loaded, name) for name in ("skipreduce_cpu_execute", "skipreduce_cuda_probe")):
        return f"{library_path()} is of another version of this package: install it again"
    return None


@functools.cache
def _reason_not_on_cpu() -> str | None:
    """Registers the CPU handler, once. Returns the reason if that is not possible, else None."""
    if (reason := reason_not_loaded()) is not None:
        return reason
    loaded = library()
    try:
        # Start the backend first: JAX defers earlier registrations, and handlers would then come before their types.
        jax.devices("cpu")
    except RuntimeError:
        return "JAX has no CPU backend here (JAX_PLATFORMS)"
    loaded.skipreduce_cpu_state_type_id.restype = ctypes.c_void_p
    loaded.skipreduce_cpu_state_type_info.restype = ctypes.c_void_p
    jax.ffi.register_ffi_type(
        "skipreduce_cpu_state",
        {
            "type_id": _capsule(loaded.skipreduce_cpu_state_type_id(), b"xla._TYPE_ID"),
            "type_info": _capsule(loaded.skipreduce_cpu_state_type_info(), b"xla._TYPE_INFO"),
        },
        platform="cpu",
    )
    _register(
        _CPU_TARGET,
        "cpu",
        {"instantiate": loaded.skipreduce_cpu_instantiate, "execute": loaded.skipreduce_cpu_execute},
    )
    return None


@functools.cache
def _reason_not_on_cuda() -> str | None:
    """Registers the CUDA handler, once. Without a GPU as well, for programs that are exported."""
    if (reason := reason_not_loaded()) is not None:
        return reason
    loaded = library()
    loaded.skipreduce_cuda_set_library_folders(":".join(_nvidia_folders()).encode())
    _register(
        _CUDA_TARGET, "CUDA", {"prepare": loaded.skipreduce_cuda_prepare, "execute": loaded.skipreduce_cuda_execute}
    )
    return None


def _register(target: str, platform: str, stages: dict[str, Any]) -> None:
    capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
    jax.ffi.register_ffi_target(target, capsules, platform=platform)


def _nvidia_folders() -> list[str]:
    """Where the wheels that JAX installs keep NVIDIA's libraries."""
    spec = importlib.util.find_spec("nvidia")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    return sorted({str(folder) for root in roots for folder in Path(root).glob("*/lib")})


def cuda_libraries() -> dict[str, str]:
    """NVIDIA's libraries as the native library finds them: version and path, or why a library was not found."""
    _reason_not_on_cuda()  # tells the native library where to look
    probe = library().skipreduce_cuda_probe
    probe.restype, probe.argtypes = ctypes.c_longlong, [ctypes.c_char_p, ctypes.c_longlong]
    size = probe(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    probe(buffer, size + 1)
    found = json.loads(buffer.value)
    return {
        name: entry["error"] if "error" in entry else f"{entry['version']}, {entry['path']}"
        for name, entry in found.items()
    }


def _capsule(pointer: int, name: bytes) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(pointer, name, None)


def reason_against_cpu() -> str | None:
    """The reason why the kernels do not serve the CPU devices of this process; None if they do."""
    reason = _reason_not_on_cpu()
    if reason is None and jax.process_count() > 1:
        return f"{jax.process_count()} processes: on CPUs, the native call is for the devices of one process"
    return reason


def reason_against_cuda() -> str | None:
    """The reason why the kernels do not serve NVIDIA GPUs; None if they may (without a GPU: in exported programs)."""
    reason = _reason_not_on_cuda()
    if reason is None and jax.default_backend() == "gpu":
        version = importlib.metadata.version("jaxlib")
        if tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < _FIRST_JAXLIB_FOR_CUDA:
            first = ".".join(map(str, _FIRST_JAXLIB_FOR_CUDA))
            return f"jaxlib {version}: its XLA gives custom calls no communicator, which that of {first} does"
    return reason


def all_reduce_cpu(
    arrays: Sequence[jax.Array],
    rank: jax.Array,
    group: jax.Array,
    num_skipped: jax.Array,
    shift: jax.Array,
    *,
    num_workers: int,
    normalize: str | None,
    wire_dtype: np.dtype | None,
    in_place: bool,
) -> list[jax.Array]:
    """The custom call of platform "cpu": each array, cut in N slices of its own, reduced with skipping.

    Args:
      arrays: of one dtype, none of them empty.
      rank: int32 scalar, which worker of its group this is.
      group: int32 scalar, a number that the workers of a group share and no other group has.
      num_skipped: int32 scalar, k.
      shift: int32 scalar, any.
      num_workers: N.
      normalize: as in `all_reduce`.
      wire_dtype: dtype that values are rounded to on the way; None: they are not rounded.
      in_place: whether results take the place of the arrays. XLA copies an array first if it is needed later.

    Returns:
      Arrays of the same shapes and dtype.
    """
    call = jax.ffi.ffi_call(
        _CPU_TARGET,
        [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        vmap_method="sequential",
        input_output_aliases={4 + i: i for i in range(len(arrays))} if in_place else None,
    )
    attributes = {
        "num_workers": num_workers,
        "divide": _DIVIDE_NUMBERS[normalize],
        "wire_type": -1 if wire_dtype is None else _TYPE_NUMBERS[wire_dtype.name],
    }
    numbers = {name: np.int64(value) for name, value in attributes.items()}
    return list(call(rank, group, num_skipped, shift, *arrays, **numbers, time_limit_ms=_time_limit_ms()))


def _time_limit_ms() -> np.int64:
    return np.int64(max(1, round(1e3 * timeout())))


def all_reduce_cuda(
    block: jax.Array,
    shift: jax.Array,
    *,
    num_workers: int,
    num_skipped: int,
    normalize: str | None,
    wire_dtype: np.dtype | None,
    replica_groups: np.ndarray,
) -> jax.Array:
    """The custom call of platform "cuda": a bucket, reduced with skipping.

    Args:
      block: (N, S), float32, bfloat16 or float16. Rows of a multiple of 8 elements are moved faster.
      shift: int32 scalar, any.
      num_workers: N.
      num_skipped: k.
      normalize: as in `all_reduce`.
      wire_dtype: dtype that values are rounded to on the way; None: they are not rounded.
      replica_groups: (groups, N), devices by their place in the mesh; each row in the order of ranks.

    Returns:
      The reduced block.
    """
    wire = jnp.dtype(block.dtype if wire_dtype is None else wire_dtype)
    call = jax.ffi.ffi_call(
        _CUDA_TARGET,
        [
            jax.ShapeDtypeStruct(block.shape, block.dtype),
            jax.ShapeDtypeStruct((max(256, block.size * wire.itemsize),), jnp.uint8),
        ],
        vmap_method="sequential",
    )
    divisor = {None: 0, "skip": num_workers, "drop": num_workers - num_skipped}[normalize]
    reduced, _ = call(
        block,
        shift,
        num_workers=np.int64(num_workers),
        num_skipped=np.int64(num_skipped),
        divisor=np.int64(divisor),
        wire_type=np.int64(-1 if wire_dtype is None else _TYPE_NUMBERS[wire_dtype.name]),
        time_limit_ms=_time_limit_ms(),
        replica_groups=np.asarray(replica_groups, np.int64).reshape(-1),
    )
    return reduced
