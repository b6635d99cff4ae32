"""What the programs of the command line share."""

import os

import pytest
import typer
from typer.testing import CliRunner

import jax_skipreduce as sr
from jax_skipreduce.__main__ import make_app
from jax_skipreduce.programs.common import cli as _cli


def test_the_version():
    result = CliRunner().invoke(make_app(), ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, sr.__version__)


def test_a_file_that_can_be_written(tmp_path):
    for path in (None, tmp_path / "new.json"):
        assert _cli.check_writable(path) == path


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(typer.BadParameter, match="there is no folder"):
        _cli.check_writable(tmp_path / "nowhere" / "new.json")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(typer.BadParameter, match="is not writable"):
        _cli.check_writable(tmp_path / "new.json")
    # A file that is there is judged by typer itself.
    (tmp_path / "old.json").touch()
    assert _cli.check_writable(tmp_path / "old.json") == tmp_path / "old.json"


def test_a_picture_is_a_png(tmp_path):
    _cli.check_png(tmp_path / "a.PNG", "--plot")
    _cli.check_png(None, "--plot")
    with pytest.raises(typer.BadParameter, match=r"a\.pdf: the name of a PNG file ends in \.png") as error:
        _cli.check_png(tmp_path / "a.pdf", "--plot")
    assert error.value.param_hint == "--plot"
