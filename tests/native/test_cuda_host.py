"""The host side of the CUDA handler, without a GPU: over fake libraries whose streams are threads, and kernels run.

`cuda_host/fake.cc` says what the fakes do, `cuda_host/driver.cc` what is checked. What NVIDIA's own libraries say is
checked where they are installed.
"""

import ctypes
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import pytest

from tests.helpers import slow

REPOSITORY = Path(__file__).parents[2]
CUDA = REPOSITORY / "xla_ffi" / "cuda"
SOURCES = Path(__file__).with_name("cuda_host")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off"]

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def _run(*command, timeout=300):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout)
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


def _headers(file: str) -> list[str]:
    """What a file of the kernels includes, relative to `CUDA`, and what that includes."""
    found = []
    for name in re.findall(r'^#include "(.*?)"', (CUDA / file).read_text(), re.MULTILINE):
        header = str(Path(file).parent / name)
        found += [header, *_headers(header)]
    return list(dict.fromkeys(found))


def _kernel_sources() -> str:
    """As EmbedSources.cmake: enough for a compiler, for where there is no CMake."""
    texts = [(CUDA / name).read_text() for name in ("kernels.cu", *_headers("kernels.cu"))]
    kernels, *headers = (f'R"SKIPREDUCE({text})SKIPREDUCE"' for text in texts)
    names = _headers("kernels.cu")
    pairs = [(n, text) for name, text in zip(names, headers, strict=True) for n in {name, Path(name).name}]
    return f"""
        namespace skipreduce::cuda::sources {{
        constexpr const char* kKernels = {kernels};
        constexpr const char* kHeaderNames[] = {{{",".join(f'"{name}"' for name, _ in pairs)}}};
        constexpr const char* kHeaders[] = {{{",".join(text for _, text in pairs)}}};
        constexpr int kNumHeaders = {len(pairs)};
        }}
    """


def _build(folder: Path, flags: list[str], types: list[tuple[int, int]]) -> None:
    (folder / "kernel_sources.h").write_text(_kernel_sources())
    include = ["-isystem", jax.ffi.include_dir(), "-I", folder]
    shared = [*flags, "-shared", "-fvisibility=hidden"]
    _run("g++", *shared, SOURCES / "fake.cc", "-o", folder / "libcuda.so.1", "-pthread")
    for name in ("libnvrtc.so.13", "libnccl.so.2"):
        (folder / name).symlink_to("libcuda.so.1")
    for t, w in types:
        defines = [f"-DSKIPREDUCE_T={t}", f"-DSKIPREDUCE_W={w}"]
        _run("g++", *shared, *defines, SOURCES / "fake_kernels.cc", "-o", folder / f"kernels_{t}_{w}.so")
    objects = []
    for source in sorted(CUDA.glob("*.cc")):
        objects.append(folder / f"{source.stem}.o")
        _run("g++", *flags, *include, "-c", source, "-o", objects[-1])
    _run("g++", *flags, *include, SOURCES / "driver.cc", *objects, "-o", folder / "driver", "-ldl", "-pthread")
    _run("g++", *flags, "-shared", *objects, "-o", folder / "skipreduce_cuda.so", "-ldl", "-pthread")


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A folder with the fakes, a driver of the handlers, and the handlers as a library. Made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_host"
    with (folder.parent / "cuda_host.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _build(folder, FLAGS, [(0, 0), (0, 1), (1, 1), (2, 2)])
            (folder / "done").touch()
    return folder


def _drive(folder, *arguments, timeout=300):
    output = _run(folder / "driver", folder, *arguments, timeout=timeout)
    assert output.splitlines()[-1] == "ok", output


@pytest.mark.parametrize("algorithm", ["host", "ring", "direct", "auto"])
@pytest.mark.parametrize(("type_code", "wire_code"), [(0, 0), (0, 1), (1, 1), (2, 2)])
def test_all_reduce(built, algorithm, type_code, wire_code):
    _drive(built, "all", algorithm, type_code, wire_code, 4 if (type_code, wire_code) == (0, 0) else 3)


@pytest.mark.parametrize("what", ["failures", "alone", "messages", "old"])
def test_errors(built, what):
    _drive(built, what)


def test_no_library(built, tmp_path):
    message = _run(built / "driver", tmp_path, "none")
    assert message.startswith(f"skipreduce: cannot load libcuda.so.1 ({tmp_path}/libcuda.so.1: cannot open")


@pytest.mark.slow
def test_streams_are_ordered(tmp_path):
    """What one stream writes and another reads is ordered by events, in the eyes of ThreadSanitizer."""
    flags = [*FLAGS, "-O0", "-g", "-fsanitize=thread"]
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() {}")
    command = ["g++", "-fsanitize=thread", probe, "-o", tmp_path / "probe"]
    if subprocess.run(command, capture_output=True).returncode or subprocess.run([tmp_path / "probe"]).returncode:
        pytest.skip("no ThreadSanitizer")
    folder = tmp_path / "thread"
    folder.mkdir()
    _build(folder, flags, [(0, 0)])
    _drive(folder, "all", "host", 0, 0, 3)


def test_sizes_and_offsets_of_the_extension(tmp_path):
    """Where jaxlib brings the headers of the extension: our declarations are theirs."""
    if not (Path(jax.ffi.include_dir()) / "xla/ffi/api/collectives_c_api.h").exists():
        pytest.skip("this jaxlib has no collectives_c_api.h (jaxlib >= 0.11.2 has)")
    source = tmp_path / "check.cc"
    source.write_text(
        f"""
        #include "{CUDA}/collectives_extension.h"
        #include "xla/ffi/api/collectives_c_api.h"
        using namespace skipreduce::cuda::extension;
        static_assert(kFindOffset == offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension));
        static_assert(sizeof(Header) == sizeof(XLA_FFI_Extension));
        static_assert(sizeof(FindArgs) == sizeof(XLA_FFI_InvokeContext_FindExtension_Args));
        static_assert(sizeof(RequestArgs) == sizeof(XLA_FFI_Communicator_Request_Args));
        static_assert(sizeof(GetArgs) == sizeof(XLA_FFI_Communicator_Get_Args));
        static_assert(offsetof(GetArgs, communicator) == offsetof(XLA_FFI_Communicator_Get_Args, communicator));
        static_assert(offsetof(Collectives, get_communicator) ==
                      offsetof(XLA_FFI_Collectives_Extension, get_communicator));
        static_assert(kCollectivesType == XLA_FFI_Extension_Collectives);
        static_assert(kMajorVersion == XLA_FFI_Extension_Collectives_MajorVersion);
        static_assert(kFlattenedId == XLA_FFI_GROUP_FLATTENED_ID);
        """
    )
    _run("g++", "-std=c++17", "-fsyntax-only", "-isystem", jax.ffi.include_dir(), source)


def test_embedded_sources(tmp_path):
    """EmbedSources.cmake takes every header that the kernels include, as it is."""
    cmake = shutil.which("cmake") or shutil.which(str(Path(sysconfig.get_path("scripts")) / "cmake"))
    if cmake is None:
        pytest.skip("no cmake (pip install cmake)")
    header = tmp_path / "kernel_sources.h"
    _run(cmake, "-D", f"OUTPUT={header}", "-D", f"SOURCE_DIR={CUDA}", "-P", CUDA / "EmbedSources.cmake")
    text = header.read_text()
    for name in ("kernels.cu", *_headers("kernels.cu")):
        assert f'R"SKIPREDUCE({(CUDA / name).read_text()})SKIPREDUCE"' in text, name
        assert name == "kernels.cu" or f'"{name}", ' in text


# ---- NVIDIA's own libraries, from their wheels ----

_PROBE = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1])
library.skipreduce_cuda_set_library_folders(sys.argv[2].encode())
library.skipreduce_cuda_probe.restype = ctypes.c_longlong
buffer = ctypes.create_string_buffer(1 << 16)
needed = library.skipreduce_cuda_probe(buffer, ctypes.c_longlong(len(buffer)))
assert needed == len(buffer.value) + 1
print(buffer.value.decode())
library.skipreduce_cuda_compile.restype = ctypes.c_longlong
for architecture in map(int, sys.argv[3:]):
    error = ctypes.create_string_buffer(1 << 16)
    if library.skipreduce_cuda_compile(architecture, 0, 1, error, ctypes.c_longlong(len(error))):
        sys.exit(error.value.decode())
"""


def _folder_of(*parts: str) -> Path | None:
    """The folder of a wheel of NVIDIA's, if it is installed, or lies unpacked in SKIPREDUCE_TEST_WHEELS."""
    spec = importlib.util.find_spec("nvidia")
    places = list(spec.submodule_search_locations or ()) if spec else []
    places += [f"{place}/nvidia" for place in os.environ.get("SKIPREDUCE_TEST_WHEELS", "").split(":") if place]
    return next((folder for place in places if (folder := Path(place).joinpath(*parts)).exists()), None)


def _probe(built, folder, *architectures):
    command = [sys.executable, "-c", _PROBE, built / "skipreduce_cuda.so", folder, *architectures]
    return json.loads(_run(*command).splitlines()[0])


def test_symbols_of_nccl(built):
    folder = _folder_of("nccl", "lib")
    if folder is None:
        pytest.skip("no NCCL: pip install nvidia-nccl-cu13 (or -cu12)")
    found = _probe(built, folder)["nccl"]
    assert found["path"] == str(folder / "libnccl.so.2")
    major, minor, patch = map(int, found["version"].split("."))
    assert (found["no_windows"] is None) == ((major, minor, patch) >= (2, 29, 2)), found


@pytest.mark.parametrize(
    ("parts", "name", "wheel"),
    [
        (("cu13", "lib"), "libnvrtc.so.13", "nvidia-cuda-nvrtc"),
        slow(("cuda_nvrtc", "lib"), "libnvrtc.so.12", "nvidia-cuda-nvrtc-cu12"),
    ],
)
def test_kernels_compile_from_the_library(built, parts, name, wheel):
    folder = _folder_of(*parts)
    if folder is None or not (folder / name).exists():
        pytest.skip(f"no {name}: pip install {wheel}")
    # 999: no such device yet, for which the newest target that there is has to do.
    assert _probe(built, folder, 80, 90, 100, 999)["nvrtc"]["path"] == str(folder / name)


def test_nothing_of_nvidia_is_linked(built):
    """The library loads on machines without a GPU, and exports what Python asks for."""
    library = ctypes.CDLL(str(built / "skipreduce_cuda.so"))
    library.skipreduce_cuda_scratch_bytes.restype = ctypes.c_longlong
    arguments = ctypes.c_longlong(4), ctypes.c_longlong(1 << 40)
    assert library.skipreduce_cuda_scratch_bytes(*arguments, 0) == 1 << 44
    assert library.skipreduce_cuda_scratch_bytes(*arguments, 1) == 1 << 43
    assert library.skipreduce_cuda_scratch_bytes(ctypes.c_longlong(2), ctypes.c_longlong(1), 0) == 256
    stages = {"prepare": library.skipreduce_cuda_prepare, "execute": library.skipreduce_cuda_execute}
    capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
    jax.ffi.register_ffi_target("skipreduce_all_reduce_test", capsules, platform="CUDA")
