"""The figure shows the numbers of the rows, and theory as it is derived by hand."""

import numpy as np
import pytest

from jax_skipreduce.programs.bench import _figure, _rows
from jax_skipreduce.programs.bench._candidates import Candidate
from jax_skipreduce.programs.bench._measure import Measurement
from jax_skipreduce.programs.bench._settings import DType, Mode

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def rows_of_one_size(size_bytes):
    seconds = np.linspace(1.0, 1.1, 11)
    measurements = [
        Measurement(Candidate("psum", F32), F32, seconds, 0),
        Measurement(Candidate("psum-bf16", BF16), F32, seconds / 0.9, 0),
    ]
    measurements += [
        Measurement(Candidate("ring", wire, k, mode), wire, seconds * (6 - k) * wire.itemsize / 20, 0)
        for wire in (F32, BF16)
        for k in (0, 2)
        for mode in Mode
    ]
    return _rows.make_rows(size_bytes, F32, 4, measurements)


def test_shows_theory_and_what_was_measured():
    rows = [row for size in (2**20, 2**22, 4004, 2**24) for row in rows_of_one_size(size)]
    figure = _figure.draw(rows, 4, "a title")
    panels = figure.axes
    assert [panel.get_title() for panel in panels] == ["1 MiB", "4 MiB", "4004 B", "16 MiB"]
    for panel in panels:
        lines = {line.get_label(): line for line in panel.get_lines()}
        # 2(N-1) / (2(N-1) - k) with N=4.
        np.testing.assert_allclose(lines["theory, float32 wire"].get_ydata(), [1, 6 / 5, 6 / 4, 6 / 3])
        np.testing.assert_allclose(lines["theory, bfloat16 wire"].get_ydata(), [2, 12 / 5, 12 / 4, 12 / 3])
        np.testing.assert_allclose(lines["theory, float32 wire"].get_xdata(), [0, 0.25, 0.5, 0.75])
        assert lines["psum in bfloat16"].get_ydata()[0] == pytest.approx(0.9)
        points = {container.get_label(): container.lines[0] for container in panel.containers}
        assert set(points) == {f"ring, {mode}, {wire} wire" for mode in Mode for wire in (F32, BF16)}
        for wire in (F32, BF16):
            for mode in Mode:
                expected = [20 / wire.itemsize / 6, 20 / wire.itemsize / 4]
                found = points[f"ring, {mode}, {wire} wire"]
                np.testing.assert_allclose(found.get_ydata(), expected)
                np.testing.assert_allclose(found.get_xdata(), [0, 0.5], atol=0.06)


def test_bars_go_from_the_10th_to_the_90th_percentile():
    psum = Measurement(Candidate("psum", F32), F32, np.arange(1.0, 12.0), 0)
    ring = Measurement(Candidate("ring", F32, 1, Mode.RANDOM), F32, np.ones(11), 0)
    (panel,) = _figure.draw(_rows.make_rows(4096, F32, 4, [psum, ring]), 4, "a title").axes
    (container,) = panel.containers
    ((low, high),) = [path[:, 1] for path in container.lines[2][0].get_segments()]
    # Speed-ups are 1, 2, .., 11.
    assert (low, container.lines[0].get_ydata()[0], high) == pytest.approx((2, 6, 10))
