"""Errors as statuses: what they say fits into what gRPC carries."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from rollpacker.rpc.errors import InternalError, InvalidArgumentError, to_trailing_metadata

_MOST_METADATA_BYTES = 8192  # gRPC's soft limit


@given(
    st.text(max_size=20),
    st.sampled_from("xé漢😀\n"),
    st.integers(0, 9999),
    st.integers(0, 999),
    st.integers(1, 99),
)
@example("", "x", 1200, 5, 40)
@example("", "\n", 9999, 999, 20)
def test_the_status_of_any_error_fits_into_metadata(
    begin: str, character: str, length: int, name: int, fields: int
) -> None:
    text = begin + character * length
    violations = [(character * name, text)] * fields
    error = InvalidArgumentError("INVALID_FIELD", text, violations=violations)
    ((_, status),) = to_trailing_metadata(error)
    escaped = 3 * len(error.message.encode())
    assert escaped + 4 * len(status) / 3 < _MOST_METADATA_BYTES


def test_of_very_many_wrong_fields_the_last_says_how_many_are_left_out() -> None:
    many = [(f"f{i}", "is wrong") for i in range(30)]
    error = InvalidArgumentError("REASON", "wrong", violations=many)
    assert error.violations == (*many[:19], ("...", "11 more"))
    assert InvalidArgumentError("R", "wrong", violations=many[:20]).violations == tuple(many[:20])


def test_a_short_message_stays_and_a_long_one_keeps_its_beginning_and_its_end() -> None:
    assert InternalError("REASON", "do x").message == "do x"
    message = InternalError("REASON", f"field: {'漢' * 5000}; do x").message
    assert message.startswith("field: 漢")
    assert message.endswith("漢; do x")


def test_a_field_that_the_message_names_is_told_once() -> None:
    assert (
        str(InvalidArgumentError.field("a", "is 1")) == "a: is 1 [INVALID_ARGUMENT INVALID_FIELD]"
    )
    two = InvalidArgumentError("REASON", "wrong", violations=[("a", "is 1"), ("b", "is 2")])
    assert str(two) == "wrong [INVALID_ARGUMENT REASON]; a: is 1; b: is 2"
