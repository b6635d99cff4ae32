"""Lines of the workers, and signals that are held back."""

import io
import itertools
import os
import signal
import threading

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_skipreduce.programs.netlab._output import WorkerOutput, write
from jax_skipreduce.programs.netlab._signals import SignalError, held_back


@hypothesis.given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_lines_are_the_same_however_they_arrive(data, cuts):
    shown = []
    output = WorkerOutput(3, shown.append)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, end in itertools.pairwise(edges):
        output.feed(data[start:end])
    output.close()
    lines = data.removesuffix(b"\n").split(b"\n") if data else []
    assert "".join(shown) == "".join(f"[3] {line.decode(errors='replace').removesuffix(chr(13))}\n" for line in lines)


def test_the_last_lines_are_kept_without_being_shown():
    output = WorkerOutput(1, None)
    output.feed(b"".join(b"line %d\n" % number for number in range(1000)))
    assert not output.is_shown
    lines = output.last_lines().splitlines()
    assert lines[-1] == "[1] line 999"
    assert len(lines) == 40


def test_a_line_without_an_end_does_not_grow_for_ever():
    shown = []
    output = WorkerOutput(0, shown.append)
    for _ in range(100):
        output.feed(b"x" * 10_000)
    assert len(shown) > 10
    output.close()
    assert "".join(shown).replace("[0] ", "").replace("\n", "") == "x" * 1_000_000


def test_what_the_stream_cannot_encode_is_replaced():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write(stream, "grün\n")
    assert raw.getvalue() == b"gr?n\n"


@pytest.fixture
def delivered():
    """The signals that a handler of the program's own has got."""
    signals = []
    previous = signal.signal(signal.SIGTERM, lambda signum, _: signals.append(signum))
    yield signals
    signal.signal(signal.SIGTERM, previous)


def test_a_signal_waits_for_the_end_of_the_block(delivered):
    handler = signal.getsignal(signal.SIGTERM)
    with held_back() as signals:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SignalError), signals.raising():
            pytest.fail("not raised")
        with signals.raising():
            pass  # Once is enough.
        assert not delivered
    assert delivered == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_signal_interrupts_what_waits(delivered):
    def wait(signals):
        with signals.raising():
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("not interrupted")

    with held_back() as signals:
        with pytest.raises(SignalError):
            wait(signals)
        signal.raise_signal(signal.SIGTERM)  # Held back again, until something may be interrupted.
        with pytest.raises(SignalError):
            wait(signals)
        assert not delivered
    assert delivered == [signal.SIGTERM]


def test_what_is_ignored_stays_ignored():
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with held_back() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            with signals.raising():
                pass
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_another_thread_leaves_signals_alone():
    handler, seen = signal.getsignal(signal.SIGTERM), []

    def inside():
        with held_back():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [handler]
