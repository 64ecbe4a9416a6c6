"""Errors reach other processes as they were raised: Ray pickles what a worker raises."""

from __future__ import annotations

import pickle

import pytest

from rag_blend import UnsupportedModelError


@pytest.mark.parametrize("arguments", [("It has states.",), ("It has states.", False), ("It slides.", True, True)])
def test_an_unsupported_model_is_told_in_another_process(arguments: tuple[str, bool, bool]) -> None:
    error = UnsupportedModelError(*arguments)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is UnsupportedModelError
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_the_way_out_is_told_once_and_only_where_there_is_one() -> None:
    assert str(UnsupportedModelError("It translates.", servable=False)) == "It translates."
    assert str(UnsupportedModelError("It has states.")).count("on_unsupported='full'") == 1
    assert "calibrate" not in str(UnsupportedModelError("It has states."))
    assert "on_unsupported='calibrated'" in str(UnsupportedModelError("It slides.", calibratable=True))
