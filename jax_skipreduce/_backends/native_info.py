"""native_info(): which native kernels were built, which of them run here, and why the others do not."""

from __future__ import annotations

import dataclasses

from jax_skipreduce._backends import ffi
from jax_skipreduce._backends.choice import chosen_backend
from jax_skipreduce._backends.reduction import Backend


@dataclasses.dataclass(frozen=True)
class NativeInfo:
    """What `native_info` found.

    Attributes:
      library: path of the native library; None if the package was installed without the library.
      cpu: why the library does not serve the CPU devices of this process; None if it does.
      cuda: why the library does not serve NVIDIA GPUs; None if it may, by ``backend="native"``.
      cuda_libraries: NVIDIA's libraries by name: version and path, or why a library was not found.
      backend: what ``backend="auto"`` means here: ``"auto"``, or the value of SKIPREDUCE_BACKEND.
      timeout: seconds that a collective waits for a worker that never reaches it.
    """

    library: str | None
    cpu: str | None
    cuda: str | None
    cuda_libraries: dict[str, str]
    backend: Backend
    timeout: float

    def __str__(self) -> str:
        def served(reason: str | None, how: str) -> str:
            return how if reason is None else f"xla: {reason}"

        return "\n".join(
            (
                f"native library  {self.library or 'not built: installed without a C++ compiler, or its build failed'}",
                f"cpu             {served(self.cpu, 'native: one call, in shared memory')}",
                f"cuda            {served(self.cuda, 'by backend=native alone: it has not yet been run on a GPU')}",
                *(f"  {name:<14}{found}" for name, found in self.cuda_libraries.items()),
                f"backend=auto    {self.backend}",
                f"timeout         {self.timeout:g} s",
            )
        )


def native_info() -> NativeInfo:
    """Which native kernels were built, which of them run here, and why the others do not.

    The function loads the library, and starts JAX's backends if they have not been started. `print` the result, and
    put it into reports of errors.

    Returns:
      A `NativeInfo`.

    Raises:
      ValueError: SKIPREDUCE_BACKEND or SKIPREDUCE_TIMEOUT has a value that means nothing.

    Example:
      >>> import jax_skipreduce as sr
      >>> info = sr.native_info()
      >>> print(info)  # doctest: +ELLIPSIS
      native library  ...
      cpu             ...
      cuda            ...
      backend=auto    ...
      timeout         ... s
    """
    return NativeInfo(
        library=None if (path := ffi.library_path()) is None else str(path),
        cpu=ffi.reason_against_cpu(),
        cuda=ffi.reason_against_cuda(),
        cuda_libraries={} if ffi.reason_not_loaded() else ffi.cuda_libraries(),
        backend=chosen_backend("auto"),
        timeout=ffi.timeout(),
    )
