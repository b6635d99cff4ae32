"""renamed(): old keyword names are refused, with the way out."""

import inspect

import pytest

from jax_skipreduce._workers.renamed import renamed


@renamed(top_fraction="top_ratio", check_every="use sr.check_every(..) in the chain")
def share(values: list[int], top_ratio: float = 0.25) -> float:
    """The docstring."""
    return top_ratio * len(values)


def test_new_names_work():
    assert share([1, 2, 3, 4]) == 1
    assert share([1, 2], top_ratio=0.5) == 1
    assert share([1, 2], 1) == 2


def test_old_names_raise_an_error_with_the_way_out():
    with pytest.raises(TypeError, match=r"^top_fraction= is called top_ratio= since version 0\.2$"):
        share([1], top_fraction=0.5)
    with pytest.raises(TypeError, match=r"^check_every=: use sr\.check_every\(\.\.\) in the chain$"):
        share([1], check_every=5)
    # Even where the old name would be a second error.
    with pytest.raises(TypeError, match="top_fraction= is called"):
        share(top_fraction=0.5, other=1)


def test_others_are_left_to_python():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'other'"):
        share([1], other=1)


def test_the_function_looks_as_before():
    assert share.__name__ == "share"
    assert share.__doc__ == "The docstring."
    assert list(inspect.signature(share).parameters) == ["values", "top_ratio"]
