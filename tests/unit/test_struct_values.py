"""What a google.protobuf.Struct is read as."""

from __future__ import annotations

import json

import pytest
from google.protobuf.struct_pb2 import Struct

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.rpc.struct_values import read_struct


def struct(**values: object) -> Struct:
    message = Struct()
    message.update(values)
    return message


def test_whole_numbers_are_integers_and_the_rest_stays() -> None:
    values = {"answer": 4, "deep": [{"id": -7, "p": 0.5}], "yes": True, "no": None, "text": "4.0"}
    read = read_struct("rows[0]", struct(**values))
    assert json.dumps(read, sort_keys=True) == json.dumps(values, sort_keys=True)
    assert type(read_struct("rows[0]", struct(large=2**53))["large"]) is float


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_refused_with_the_field(number: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"rows\[3\]: holds NaN or an infinity"):
        read_struct("rows[3]", struct(deep=[number]))
