"""The CUDA kernels without a GPU: run on the CPU against an oracle, and compiled by NVRTC for every architecture."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import slow

REPOSITORY = Path(__file__).parents[2]
CUDA = REPOSITORY / "xla_ffi" / "cuda"

# (T, W): the dtype of the array, and what travels.
CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
DTYPES = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
)
FEW_DTYPES = (("float32", "bfloat16"), ("float16", "float16"))  # all code paths but that of a W as wide as float32
KERNELS = ("skr_first", "skr_add", "skr_finish_own", "skr_place", "skr_ring", "skr_direct")

# As the host code names them for NVRTC.
HEADERS = {
    "kernel_params.h": CUDA / "kernel_params.h",
    "elementwise.h": CUDA / "elementwise.h",
    "messages.h": CUDA / "messages.h",
    "../element_types.h": REPOSITORY / "xla_ffi" / "element_types.h",
    "../ring_schedule.h": REPOSITORY / "xla_ffi" / "ring_schedule.h",
    "ring_schedule.h": REPOSITORY / "xla_ffi" / "ring_schedule.h",
}
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
NVRTC = {
    "12": ("cuda_nvrtc/lib/libnvrtc.so.12", "nvidia-cuda-nvrtc-cu12>=12.8"),
    "13": ("cu13/lib/libnvrtc.so.13", "nvidia-cuda-nvrtc>=13.0"),
}


def defines(array, wire):
    return [f"-DSKIPREDUCE_T={CODES[array]}", f"-DSKIPREDUCE_W={CODES[wire]}"]


def run_on_cpu(folder, array, wire, *flags):
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("needs a C++ compiler: g++, or the one that CXX names")
    program = folder / "kernels_on_cpu"
    source = REPOSITORY / "tests" / "native" / "kernels_on_cpu.cc"
    # The window's bytes are read as several types, as on a GPU; no fused multiply-add, as there.
    options = ["-std=c++17", "-O1", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing"]
    command = [compiler, *options, *flags, *defines(array, wire), str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    commands = [[str(program)]]
    if "-fsanitize=thread" in flags and shutil.which("setarch"):
        commands.append(["setarch", "-R", str(program)])  # where addresses are too random for ThreadSanitizer
    for command in commands:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
        if "unexpected memory mapping" not in ran.stderr:
            break
    assert ran.returncode == 0, ran.stdout + ran.stderr[:4000]
    assert re.fullmatch(r"ok: \d+ launches\n", ran.stdout)


@pytest.mark.parametrize(("array", "wire"), [dtypes if dtypes in FEW_DTYPES else slow(*dtypes) for dtypes in DTYPES])
def test_every_kernel_is_bitwise_the_ring_on_the_cpu(tmp_path, array, wire):
    run_on_cpu(tmp_path, array, wire)


@pytest.mark.slow
def test_flags_order_all_accesses_of_different_workers(tmp_path):
    run_on_cpu(tmp_path, "float32", "bfloat16", "-g", "-fsanitize=thread")


@pytest.mark.parametrize(("array", "wire"), [FEW_DTYPES[0], slow(*FEW_DTYPES[1])])
def test_every_access_is_inside_its_array_and_aligned(tmp_path, array, wire):
    run_on_cpu(tmp_path, array, wire, "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class Nvrtc:
    """The library from PyPI, by its own functions."""

    def __init__(self, version):
        name, requirement = NVRTC[version]
        spec = importlib.util.find_spec("nvidia")
        places = [Path(place) / name for place in (spec.submodule_search_locations or [])] if spec else []
        found = [place for place in places if place.exists()]
        if not found:
            pytest.skip(f"needs NVRTC of CUDA {version}: pip install '{requirement}'")
        self.library = ctypes.CDLL(str(found[0]))

    def compile(self, architecture, array, wire):
        """What NVRTC makes of the kernels (a cubin for sm_, PTX for compute_), and its log."""
        program = ctypes.c_void_p()
        sources = [path.read_bytes() for path in HEADERS.values()]
        headers = (ctypes.c_char_p * len(HEADERS))(*sources)
        names = (ctypes.c_char_p * len(HEADERS))(*[name.encode() for name in HEADERS])
        kernels = (CUDA / "kernels.cu").read_bytes()
        create = self.library.nvrtcCreateProgram
        assert create(ctypes.byref(program), kernels, b"kernels.cu", len(HEADERS), headers, names) == 0
        try:
            options = [f"--gpu-architecture={architecture}", *OPTIONS, *defines(array, wire), "--ptxas-options=-v"]
            arguments = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            result = self.library.nvrtcCompileProgram(program, len(options), arguments)
            log = self._text(program, "ProgramLog").decode()
            assert result == 0, log
            return self._text(program, "CUBIN" if architecture.startswith("sm_") else "PTX"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program, what):
        size = ctypes.c_size_t()
        assert getattr(self.library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(self.library, f"nvrtcGet{what}")(program, text) == 0
        return text.raw.rstrip(b"\0") if what != "CUBIN" else text.raw


@pytest.mark.parametrize(
    ("version", "architecture"),
    [
        ("13", "sm_80"),
        *(slow("12", architecture) for architecture in ("sm_80", "sm_90", "sm_100")),
        *(slow("13", architecture) for architecture in ("sm_90", "sm_100")),
    ],
)
def test_every_kernel_compiles_and_keeps_to_registers(version, architecture):
    nvrtc = Nvrtc(version)
    for array, wire in DTYPES if architecture == "sm_90" else FEW_DTYPES:
        cubin, log = nvrtc.compile(architecture, array, wire)
        for name in KERNELS:
            assert f".text.{name}\0".encode() in cubin, (name, array, wire)
        spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", log)]
        assert len(spilled) == len(KERNELS), log
        assert max(spilled) <= 64, log  # sm_80: 24 in one kernel
        assert "warning" not in log, log


@pytest.mark.parametrize(
    ("version", "array", "wire"),
    [
        ("13", *FEW_DTYPES[0]),
        slow("13", *FEW_DTYPES[1]),
        *(slow("12", *dtypes) for dtypes in FEW_DTYPES),
    ],
)
def test_what_peers_write_is_read_coherently(version, array, wire):
    ptx = Nvrtc(version).compile("compute_80", array, wire)[0].decode()
    operations = set(re.findall(r"\b(?:ld|st)\.[\w.:]*", ptx))
    assert {"ld.acquire.sys.global.u64", "st.release.sys.global.u64"} <= operations
    assert {"ld.global.v4.u32", "st.global.v4.u32"} <= operations
    # The first two would go around the acquire, the third is memory for arrays that did not become registers.
    assert not [operation for operation in operations if re.search(r"\.nc\b|\.const\b|\.local\b", operation)]
