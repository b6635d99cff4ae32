"""N real processes that talk over Gloo give the bits that N devices of one process give."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import slow
from tests.multiprocess.cases import local_values, run_all

ROOT = Path(__file__).parent.parent.parent


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", [2, slow(3)])
def test_processes_give_the_bits_of_one_process(num_processes, tmp_path):
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    outs = [tmp_path / f"rank{rank}.npz" for rank in range(num_processes)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.worker", str(port), str(num_processes), str(rank), str(out)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(outs)
    ]
    try:
        for worker in workers:
            output, _ = worker.communicate(timeout=240)
            assert worker.returncode == 0, output
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()

    results = [dict(np.load(out)) for out in outs]
    expected = run_all(num_processes)
    assert set(expected) == set(results[0])
    for name, value in expected.items():
        for result in results:
            assert result[name].dtype == value.dtype, name
            if name.startswith("pmean") or name.split("/")[1] == "bias":
                # XLA's own reduction, which adds in another order over Gloo than in one process.
                if value.dtype != np.uint16:
                    np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(result[name], value, err_msg=name)
        for result in results[1:]:
            np.testing.assert_array_equal(result[name], results[0][name], err_msg=name)
    exact = local_values(num_processes)["kernel"].mean(0)
    np.testing.assert_allclose(expected["full/kernel/True"], exact, atol=1e-6)
    assert not np.allclose(expected["half/kernel/True"], exact, atol=1e-3)
