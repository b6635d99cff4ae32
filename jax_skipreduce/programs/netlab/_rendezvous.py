"""All workers meet before they join `jax.distributed`, so that one that never comes is named.

JAX aborts the process when somebody is missing in time, without a word on who.
"""

from __future__ import annotations

import contextlib
import socket
import time


def meet(address: tuple[str, int], num_workers: int, rank: int, timeout_s: float) -> None:
    """Returns once all workers have called it.

    Worker 0 listens at `address`; the others tell it their rank, and it answers when all have.

    Raises:
      TimeoutError: not all came in time; at worker 0, the message says who is missing.
      ConnectionError: worker 0 went away meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        _gather(address, num_workers, deadline, timeout_s)
    else:
        _report(address, rank, deadline, timeout_s)


def _gather(address: tuple[str, int], num_workers: int, deadline: float, timeout_s: float) -> None:
    missing = set(range(1, num_workers))
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(address, backlog=num_workers))
        connections = []
        while missing:
            try:
                listener.settimeout(_left(deadline))
                connection = stack.enter_context(listener.accept()[0])
                connection.settimeout(_left(deadline))
                line = connection.makefile("r").readline()
            except TimeoutError:
                names = ", ".join(map(str, sorted(missing)))
                raise TimeoutError(f"of {num_workers} workers, {names} did not come within {timeout_s:g} s") from None
            except ConnectionError:
                continue  # Gone again; it will be missing.
            if line.strip().isdecimal():
                missing.discard(int(line))
                connections.append(connection)
        for connection in connections:
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"go\n")


def _report(address: tuple[str, int], rank: int, deadline: float, timeout_s: float) -> None:
    with _connect(address, deadline, timeout_s) as connection:
        connection.sendall(f"{rank}\n".encode())
        try:
            # Worker 0 may notice a little later than we that somebody is missing, and it knows who.
            connection.settimeout(_left(deadline) + 1)
            answer = connection.makefile("r").readline()
        except TimeoutError:
            raise TimeoutError(f"not all workers came within {timeout_s:g} s; worker 0 says who is missing") from None
        if answer != "go\n":
            raise ConnectionError("worker 0 went away before all had come; its own message says why")


def _connect(address: tuple[str, int], deadline: float, timeout_s: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=_left(deadline))
        except TimeoutError:
            raise TimeoutError(f"worker 0 did not come to {address[0]}:{address[1]} within {timeout_s:g} s") from None
        except OSError:
            time.sleep(0.1)  # It does not listen yet.


def _left(deadline: float) -> float:
    """Raises TimeoutError if nothing is."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
