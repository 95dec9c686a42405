"""One table between exceptions and gRPC statuses; elsewhere exceptions simply travel.

Raise a subclass of ServiceError in a service: the server turns it into its status with a
google.rpc.ErrorInfo (reason in UPPER_SNAKE) and, where it has them, BadRequest field violations
or RetryInfo. The client turns the status back into the same exception with `from_rpc_error`.

To add an error: choose the class by what the caller should do, give it a reason, and name that
reason in the comment of the RPC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "rollpacker"
_DETAILS = "grpc-status-details-bin"
# A status travels as metadata, of which gRPC takes 8 KiB: with more of it the caller would see
# RESOURCE_EXHAUSTED in place of the error. Escaped, the message is threefold; all is in base64.
_MOST_MESSAGE_BYTES = 1200
_MOST_VIOLATION_BYTES = 1700  # of all together, names and framing included
_MOST_VIOLATIONS = 20
_MOST_NAME_BYTES = 60
_FRAME_BYTES = 8  # of a violation
_GAP = b" ... "


class ServiceError(Exception):
    """Something could not be done. The message is short and says what to do about it.

    Of a long message, such as one that quotes a response, the middle is left out.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        violations: Sequence[tuple[str, str]] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        self.reason = reason
        self.message = _short(message, _MOST_MESSAGE_BYTES)
        self.violations = _short_violations(violations)  # (field, what is wrong and how to mend it)
        super().__init__(self.message)
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        untold = [(name, what) for name, what in self.violations if what not in self.message]
        fields = "".join(f"; {name}: {what}" for name, what in untold)
        return f"{self.message} [{self.code.name} {self.reason}]{fields}"


class InvalidArgumentError(ServiceError):
    """The request is wrong whatever the state; mend it."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    @classmethod
    def field(cls, name: str, message: str) -> InvalidArgumentError:
        """One wrong field."""
        return cls("INVALID_FIELD", f"{name}: {message}", violations=[(name, message)])


class NotFoundError(ServiceError):
    """It does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(ServiceError):
    """The name is taken by something else."""

    code = grpc.StatusCode.ALREADY_EXISTS


class UnauthenticatedError(ServiceError):
    """The caller did not say who it is, or nobody knows it."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(ServiceError):
    """Not allowed, whoever asks."""

    code = grpc.StatusCode.PERMISSION_DENIED


class FailedPreconditionError(ServiceError):
    """The state does not allow it; do not retry before the state has changed."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class OutOfRangeError(ServiceError):
    """Beyond what is kept."""

    code = grpc.StatusCode.OUT_OF_RANGE


class ResourceExhaustedError(ServiceError):
    """Too busy or too large; with a retry delay, try again after it."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceededError(ServiceError):
    """It took too long."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CancelledError(ServiceError):
    """The caller gave up."""

    code = grpc.StatusCode.CANCELLED


class UnavailableError(ServiceError):
    """The service is away for now; the only error that is retried."""

    code = grpc.StatusCode.UNAVAILABLE


class InternalError(ServiceError):
    """A bug; the service's log has the traceback."""

    code = grpc.StatusCode.INTERNAL


class DataLossError(ServiceError):
    """What arrived or lies on disk is damaged."""

    code = grpc.StatusCode.DATA_LOSS


class UnimplementedError(ServiceError):
    """The peer does not know this call: another version of RollPacker."""

    code = grpc.StatusCode.UNIMPLEMENTED


_TABLE: dict[grpc.StatusCode, type[ServiceError]] = {
    error.code: error
    for error in (
        InvalidArgumentError,
        NotFoundError,
        AlreadyExistsError,
        UnauthenticatedError,
        PermissionDeniedError,
        FailedPreconditionError,
        OutOfRangeError,
        ResourceExhaustedError,
        DeadlineExceededError,
        CancelledError,
        UnavailableError,
        InternalError,
        DataLossError,
        UnimplementedError,
    )
}


def stale_fence(fence: int, newest: int) -> FailedPreconditionError:
    """A request of a coordinator that has been replaced."""
    return FailedPreconditionError(
        "STALE_FENCE",
        f"fence {fence} is older than {newest}: another coordinator has taken over; stop",
    )


def to_trailing_metadata(error: ServiceError) -> tuple[tuple[str, bytes], ...]:
    """The rich status of an error, as gRPC trailing metadata."""
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))]
    if error.violations:
        details.append(
            _pack(
                error_details_pb2.BadRequest(
                    field_violations=[
                        error_details_pb2.BadRequest.FieldViolation(field=name, description=what)
                        for name, what in error.violations
                    ]
                )
            )
        )
    if error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=error.code.value[0], message=error.message, details=details)
    return ((_DETAILS, status.SerializeToString()),)


def from_rpc_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """The exception that the server raised, or the nearest one for gRPC's own failures."""
    kind = _TABLE.get(error.code(), UnavailableError)
    reason, violations, retry_after = "", [], None
    for key, value in error.trailing_metadata() or ():
        if key != _DETAILS or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
                info = error_details_pb2.ErrorInfo()
                detail.Unpack(info)
                reason = info.reason
            elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
                bad = error_details_pb2.BadRequest()
                detail.Unpack(bad)
                violations = [(v.field, v.description) for v in bad.field_violations]
            elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                retry = error_details_pb2.RetryInfo()
                detail.Unpack(retry)
                retry_after = retry.retry_delay.ToNanoseconds() / 1e9
    return kind(
        reason or f"GRPC_{error.code().name}",
        error.details() or error.code().name,
        violations=violations,
        retry_after_seconds=retry_after,
    )


def _short_violations(violations: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """As many and as much as fits; where some are left out, the last one says so."""
    told = [(_short(name, _MOST_NAME_BYTES), what) for name, what in violations]
    if len(told) > _MOST_VIOLATIONS:
        told[_MOST_VIOLATIONS - 1 :] = [("...", f"{len(told) - _MOST_VIOLATIONS + 1} more")]
    room = _MOST_VIOLATION_BYTES - sum(_FRAME_BYTES + _bytes(name) for name, _ in told)
    if sum(_bytes(what) for _, what in told) > room:
        told = [(name, _short(what, room // len(told))) for name, what in told]
    return tuple(told)


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _short(text: str, most_bytes: int) -> str:
    """The text as far as it fits: its beginning and its end, and no half characters."""
    data = text.encode(errors="replace")
    if len(data) > most_bytes:
        end = most_bytes // 3
        data = data[: most_bytes - end - len(_GAP)] + _GAP + data[-end:]
    return data.decode(errors="ignore")


def _pack(
    message: error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.RetryInfo,
) -> Any:
    packed = Any()
    packed.Pack(message)
    return packed
