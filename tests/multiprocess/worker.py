"""One process of test_gloo.py: ``worker.py PORT NUM_PROCESSES PROCESS_ID OUT``."""

import os
import sys

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np


def main() -> None:
    port, num_processes, process_id, out = sys.argv[1:5]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", int(num_processes), int(process_id))
    from tests.multiprocess.cases import run_all

    results = run_all(int(num_processes))
    np.savez(out, **results)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
