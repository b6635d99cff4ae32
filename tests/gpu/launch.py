"""Runs N workers as processes on one GPU (or, in a dry run, on the CPU), and ends them all when one fails."""

import argparse
import ctypes
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOT_RUN = 77  # as check.sh takes it


def nccl_version() -> tuple[int, int]:
    """Of the NCCL that JAX will load, (0, 0) if there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) / "nccl" / "lib" for place in (spec.submodule_search_locations or ())] if spec else []
    for path in [*(str(folder / "libnccl.so.2") for folder in folders), "libnccl.so.2"]:
        try:
            version = ctypes.c_int()
            ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version))
        except OSError:
            continue
        return version.value // 10000, version.value % 10000 // 100
    return 0, 0


def environment(arguments: argparse.Namespace, rank: int) -> dict[str, str]:
    """What a worker's process needs to share the machine, and the GPU, with the others."""
    common = {"SKIPREDUCE_DEBUG": "1", "SKIPREDUCE_ALGORITHM": arguments.algorithm, "NPROC": "16"}
    if arguments.dry_run:
        return os.environ | common | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    gpu = {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.8 / arguments.workers:.2f}",
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
        "SKIPREDUCE_DIRECT_MIB": "288",
        "SKIPREDUCE_TIMEOUT": "5" if arguments.what == "time_limit" else "40",
    }
    if nccl_version() >= (2, 30):
        # Several ranks on one GPU, which all have to run at the same time.
        gpu |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
    else:
        # Ranks that take each other for other machines talk over sockets: the ring over the host API alone.
        gpu |= {"NCCL_HOSTID": f"worker{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    return os.environ | common | gpu


def only_our_kernels(sanitizer: str) -> list[str]:
    """The option that leaves out NCCL's kernels and XLA's, which was called differently over the years."""
    options = subprocess.run([sanitizer, "--help"], capture_output=True, text=True).stdout
    names = (name for name in ("--kernel-regex", "--kernel-name", "--filter") if f"{name} " in options)
    return next(([name, "kns=skr_"] for name in names), [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--algorithm", default="auto", choices=["auto", "host", "ring", "direct"])
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with lax.ppermute")
    parser.add_argument("--sanitizer", action="store_true", help="under compute-sanitizer")
    parser.add_argument("--json", help="where rank 0 writes its figures")
    parser.add_argument("what", choices=["correct", "timing", "time_limit", "small"])
    arguments = parser.parse_args()

    if not arguments.dry_run and arguments.algorithm in ("ring", "direct") and nccl_version() < (2, 30):
        print(f"NCCL {nccl_version()} does not put several ranks on one GPU")
        return NOT_RUN
    prefix: list[str] = []
    if arguments.sanitizer:
        sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if not Path(sanitizer).exists():
            print("no compute-sanitizer")
            return NOT_RUN
        prefix = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", *only_our_kernels(sanitizer)]

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        logs = [(Path(folder) / f"rank{rank}.log").open("w+") for rank in range(arguments.workers)]
        command = [sys.executable, str(Path(__file__).with_name("rank.py")), arguments.what]
        command += ["--backend", "xla" if arguments.dry_run else "native", "--coordinator", f"127.0.0.1:{port}"]
        command += ["--workers", str(arguments.workers), "--flag", f"{folder}/flag"]
        processes = [
            subprocess.Popen(
                [*prefix, *command, "--rank", str(rank)],
                env=environment(arguments, rank),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            statuses: list[int | None] = [None] * arguments.workers
            while None in statuses and not any(statuses):
                time.sleep(0.05)
                statuses = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        bad = next((rank for rank, status in enumerate(statuses) if status), 0)
        logs[bad].seek(0)
        text = logs[bad].read()
        print(text)
        if any(statuses):
            print(f"worker {bad} of {arguments.workers} ended with status {statuses[bad]}")
            return 1
        if arguments.json:
            figures = [line.removeprefix("JSON ") for line in text.splitlines() if line.startswith("JSON ")]
            Path(arguments.json).write_text(json.dumps([json.loads(line) for line in figures], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
