"""native_info(): what was built of the native kernels, what of it runs here, and why not."""

from __future__ import annotations

import dataclasses

from jax_skipreduce._backends import ffi
from jax_skipreduce._backends.choice import chosen_backend
from jax_skipreduce._backends.reduction import Backend


@dataclasses.dataclass(frozen=True)
class NativeInfo:
    """What `native_info` found.

    Attributes:
      library: path of the native library, None if the package was installed without it.
      cpu: why the devices of this process's CPU are not served by it; None if they are.
      cuda: why NVIDIA GPUs are not served by it; None if they may be, by ``backend="native"``.
      cuda_libraries: what was found of NVIDIA's libraries: version and path, or why not, by name.
      backend: what ``backend="auto"`` means here: ``"auto"``, or what SKIPREDUCE_BACKEND says.
      timeout: seconds that a collective waits for a worker that does not come.
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
    """What was built of the native kernels, what of it runs here, and why not.

    It loads the library, and starts JAX's backends if nothing has yet. `print` it, and put what it says into
    reports of errors.

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
