"""time_limit(): a process that hangs ends, and says where."""

import math
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from jax_skipreduce._checks.deadline import time_limit


def run(body: str, **settings) -> subprocess.CompletedProcess[str]:
    """Runs `body` in a process of its own, with the module alone: without JAX it starts at once."""
    prelude = """
    import importlib.util, math, os, sys, threading, time
    spec = importlib.util.spec_from_file_location("deadline", PATH)
    deadline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deadline)
    deadline._OTHERS_S = 0
    time_limit = deadline.time_limit
    """
    code = textwrap.dedent(prelude).replace("PATH", repr(sys.modules["jax_skipreduce._checks.deadline"].__file__))
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60, **settings}
    return subprocess.run([sys.executable, "-c", code + textwrap.dedent(body)], **settings)


def test_ends_a_block_that_hangs():
    result = run("""
    def wait_in_the_loader():
        time.sleep(1000)
    with time_limit(0.3, "worker 2, step 30"):
        wait_in_the_loader()
    """)
    assert result.returncode == 124
    assert "worker 2, step 30 was not done after 0.3 s" in result.stderr
    # Where it hangs, and the main thread is told apart from the one that watches.
    assert "in wait_in_the_loader" in result.stderr
    assert "docs/failures.md" in result.stderr


def test_without_finally_and_exit_handlers():
    """An exit handler would be the shutdown barrier of jax.distributed, which waits for the others again."""
    result = run("""
    import atexit
    atexit.register(print, "handler")
    print("before")
    try:
        with time_limit(0.2, "step", exit_code=7):
            threading.Lock().acquire() or time.sleep(1000)
            threading.Event().wait()
    finally:
        print("finally")
    """)
    assert (result.returncode, result.stdout) == (7, "before\n")


def test_ends_while_signal_handlers_do_not_run():
    """As inside of XLA: the main thread is in native code that comes back for no signal."""
    result = run("""
    import ctypes, signal
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(1))
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    with time_limit(0.5, "step"):
        libc.pthread_mutex_lock(mutex)  # for ever; it does not return for a signal
    """)
    assert result.returncode == 124


def test_ends_though_nobody_reads_the_report():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"x" * 4096)
    except BlockingIOError:
        pass
    os.set_blocking(writing, True)
    begin = time.monotonic()
    try:
        result = run("deadline._REPORT_S = 0.5\nwith time_limit(0.2, 'step'):\n    time.sleep(1000)", stderr=writing)
    finally:
        os.close(reading)
        os.close(writing)
    assert result.returncode == 124
    assert time.monotonic() - begin < 30


def test_the_first_limit_that_is_over_counts():
    result = run("""
    with time_limit(1000, "outer"):
        with time_limit(math.inf, "none"), time_limit(0.2, "inner"):
            time.sleep(1000)
    """)
    assert "inner was not done after 0.2 s" in result.stderr
    result = run("""
    with time_limit(0.2, "outer"), time_limit(1000, "inner"):
        time.sleep(1000)
    """)
    assert "outer was not done after 0.2 s" in result.stderr


def test_other_threads_are_watched_too():
    result = run("""
    def save():
        with time_limit(0.2, "the checkpoint"):
            time.sleep(1000)
    threading.Thread(target=save).start()
    with time_limit(1000, "step"):
        time.sleep(1000)
    """)
    assert result.returncode == 124
    assert "the checkpoint was not done" in result.stderr


def test_a_later_limit_is_kept_after_one_that_was_met():
    """The thread sleeps past a limit that was removed, and has to see the next one in time all the same."""
    result = run("""
    for _ in range(1000):
        with time_limit(0.5, "step"):
            pass
    time.sleep(0.7)  # over the old deadlines, of which none is left
    with time_limit(1000, "long"):
        pass
    with time_limit(0.2, "last"):
        time.sleep(1000)
    """)
    assert result.returncode == 124
    assert "last was not done after 0.2 s" in result.stderr


def test_a_child_of_fork_has_a_watch_of_its_own():
    result = run("""
    with time_limit(1000, "parent"):
        pid = os.fork()
        if pid == 0:
            with time_limit(0.2, "child"):
                time.sleep(1000)
        _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status))
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "124\n"
    assert "child was not done" in result.stderr


def test_does_nothing_in_time():
    with time_limit(1000, "outer"):
        for _ in range(100):
            with time_limit(500, "inner"):
                pass
    with pytest.raises(KeyError, match="as it is"), time_limit(1000, "raises"):
        raise KeyError("as it is")
    watchers = [thread for thread in threading.enumerate() if thread.name == "skipreduce time_limit"]
    assert len(watchers) == 1
    assert watchers[0].daemon


@pytest.mark.parametrize("seconds", [0, -1, math.nan])
def test_seconds_that_make_no_sense(seconds):
    with pytest.raises(ValueError, match=f"seconds={seconds}: expected a positive"), time_limit(seconds, "step"):
        pass


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"seconds='5' \(str\)"), time_limit("5", "step"):
        pass
    with pytest.raises(TypeError, match=r"what=5 \(int\)"), time_limit(5, 5):
        pass
    with pytest.raises(ValueError, match="exit_code=0: expected 1 to 255"), time_limit(5, "step", exit_code=0):
        pass
    with pytest.raises(TypeError, match="exit_code=True"), time_limit(5, "step", exit_code=True):
        pass
