"""Who may talk to whom: TLS both ways between all processes, and tokens with three roles.

One process has one identity, read from its environment (`ROLLPACKER_SECURITY_*`) for its server
and for every channel that it opens. Nothing set: plaintext, on loopback only. With the three TLS
files a server demands a certificate of the same authority from every caller, and a channel that of
the server. Servers are known by SERVER_NAME and not by address, because replicas come and go; a
certificate for people lacks that name and cannot act as a server.

A token says what its bearer may do: `viewer` reads runs, `operator` changes them too, `service` is
what processes give each other. Servers know SHA-256 hashes only. Certificates of servers, tokens
and hashes are read again when their files change. A server that listens beyond loopback without TLS
or without accepted tokens does not start. No secret is ever logged or put into a message.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import grpc
import grpc.aio

from rollpacker.rpc.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ServiceError,
    UnauthenticatedError,
    to_trailing_metadata,
)

SERVER_NAME = "rollpacker-service"
PREFIX = "ROLLPACKER_SECURITY_"
MAY_CALL = {  # what a token of a role may call, by the role that a call needs
    "viewer": ("viewer",),
    "operator": ("viewer", "operator"),
    "service": ("service",),  # so a reward service that was taken over cannot start or stop runs
}
_LOOPBACK = ("127.0.0.1:", "localhost:", "[::1]:", "unix:")
_TLS_FIELDS = ("certificate_file", "key_file", "ca_file")
_OPEN_METHODS = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")
_COORDINATOR = "/rollpacker.v1.CoordinatorService/"
_VIEWER_CALLS = ("Get", "List", "Watch")
_WORKER_CALLS = ("Heartbeat", "ClaimDevices", "RenewDevices", "ReleaseDevices")


@dataclass(frozen=True, slots=True)
class Security:
    """The identity of this process; see the head of this file."""

    certificate_file: Path | None = None  # PEM, of this process
    key_file: Path | None = None  # PEM, of its certificate
    ca_file: Path | None = None  # PEM, the authority that signs every certificate
    token_file: Path | None = None  # the token that this process sends
    accepted_tokens_file: Path | None = None  # lines of `role sha256-of-the-token`

    def __post_init__(self) -> None:
        missing = [name for name in _TLS_FIELDS if getattr(self, name) is None]
        if 0 < len(missing) < len(_TLS_FIELDS):
            raise InvalidArgumentError.field(
                missing[0], f"is not set; TLS needs all of {', '.join(_TLS_FIELDS)}"
            )
        if missing and (self.token_file or self.accepted_tokens_file):
            raise InvalidArgumentError.field(
                "token_file" if self.token_file else "accepted_tokens_file",
                "is set without TLS, so tokens would travel readable; set certificate_file too",
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Security:
        """Of this process. Raises InvalidArgumentError for an unknown name or a missing file."""
        known = {f"{PREFIX}{field.name.upper()}": field.name for field in fields(cls)}
        values: dict[str, Path] = {}
        for name, text in environment.items():
            if not name.startswith(PREFIX) or not text:
                continue
            if name not in known:
                raise InvalidArgumentError.field(name, f"is unknown; valid: {', '.join(known)}")
            values[known[name]] = Path(text)
            if not os.access(text, os.R_OK):
                raise InvalidArgumentError.field(known[name], f"{text} cannot be read")
        return cls(**values)

    @property
    def uses_tls(self) -> bool:
        return self.certificate_file is not None

    def check_address(self, address: str) -> None:
        """Raises InvalidArgumentError where listening at `address` would let strangers in."""
        if is_loopback(address) or (self.uses_tls and self.accepted_tokens_file):
            return
        missing = "accepted_tokens_file" if self.uses_tls else "certificate_file"
        raise InvalidArgumentError.field(
            "address",
            f"{address} is not loopback and {PREFIX}{missing.upper()} is not set; listen on"
            " loopback or a unix socket, or give certificates and tokens (docs/security.md)",
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a server with TLS; callers need a certificate. New files serve new connections."""
        certificates = _ServerCertificates(self)
        return grpc.dynamic_ssl_server_credentials(
            certificates.current(), certificates.fetch, require_client_authentication=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel with TLS; sends the token, where there is one, with every call."""
        certificate, key, ca = self.pem()
        channel = grpc.ssl_channel_credentials(ca, key, certificate)
        if self.token_file is None:
            return channel
        token = grpc.metadata_call_credentials(_TokenPlugin(self.token_file), name="token")
        return grpc.composite_channel_credentials(channel, token)

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, authority)."""
        paths = (self.certificate_file, self.key_file, self.ca_file)
        certificate, key, ca = (path.read_bytes() for path in paths if path is not None)
        return certificate, key, ca


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach "host:port" or "unix:path"."""
    return address.startswith(_LOOPBACK)


class _ServerCertificates:
    """The certificate of a server as its files have it, asked for at each handshake."""

    def __init__(self, security: Security) -> None:
        self._security = security
        self._pem = security.pem()

    def current(self) -> grpc.ServerCertificateConfiguration:
        certificate, key, ca = self._pem
        return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

    def fetch(self) -> grpc.ServerCertificateConfiguration:
        """The newest; as before while files are being replaced."""
        with contextlib.suppress(OSError):
            self._pem = self._security.pem()
        return self.current()


class _TokenPlugin(grpc.AuthMetadataPlugin):
    """Sends the token as the file has it now; runs in a thread of gRPC."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(
        self, _context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback
    ) -> None:
        try:
            token = self._path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            callback((), error)
            return
        callback((("authorization", f"Bearer {token}"),), None)


class TokenTable:
    """Which token has which role, by hash; follows its file."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidArgumentError for a line that is not `role sha256`."""
        self._path = path
        self._seen: tuple[int, int] = (0, 0)
        self._roles: dict[str, str] = {}
        self._follow()

    def check(self, method: str, metadata: Mapping[str, str]) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError for a call that is not allowed."""
        needed = needed_role(method)
        if needed is None:
            return
        self._follow()
        scheme, _, token = metadata.get("authorization", "").partition(" ")
        role = self._roles.get(hashlib.sha256(token.encode()).hexdigest())
        if scheme != "Bearer" or role is None:
            raise UnauthenticatedError(
                "NO_VALID_TOKEN",
                f"{method} needs a token; send `authorization: Bearer ...`, or set"
                f" {PREFIX}TOKEN_FILE",
            )
        if needed not in MAY_CALL[role]:
            raise PermissionDeniedError(
                "WRONG_ROLE", f"{method} needs a token of role {needed}; this one is {role}"
            )

    def _follow(self) -> None:
        status = self._path.stat()
        if (status.st_mtime_ns, status.st_ino) != self._seen:
            self._roles = parse_accepted_tokens(self._path.read_text(encoding="utf-8"))
            self._seen = (status.st_mtime_ns, status.st_ino)


def parse_accepted_tokens(text: str) -> dict[str, str]:
    """Hash to role, of lines `role sha256`; several tokens of a role allow a change of tokens."""
    roles: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        if len(words) != 2 or words[0] not in MAY_CALL or len(words[1]) != 64:
            raise InvalidArgumentError.field(
                "accepted_tokens_file",
                f"line {number} is not `ROLE SHA256`, with a ROLE of {', '.join(MAY_CALL)}",
            )
        roles[words[1]] = words[0]
    return roles


def needed_role(method: str) -> str | None:
    """The role that is needed to call `/package.Service/Method`; None: anyone with a certificate.

    What is not listed as harmless needs more: a new call of the coordinator an operator, a new
    service a process of the installation.
    """
    if method.startswith(_OPEN_METHODS):
        return None
    if not method.startswith(_COORDINATOR):
        return "service"
    name = method.removeprefix(_COORDINATOR)
    if name in _WORKER_CALLS:
        return "service"
    return "viewer" if name.startswith(_VIEWER_CALLS) else "operator"


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose token does not allow them, before the request is read."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        metadata = dict(details.invocation_metadata or ())
        try:
            self._tokens.check(details.method, metadata)
        except ServiceError as error:
            return _refusal(error)
        return await continuation(details)


def _refusal(error: ServiceError) -> grpc.RpcMethodHandler[bytes, bytes]:
    """A handler that ends every call with `error`, whatever its kind."""

    async def refuse(_requests: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.abort(error.code, error.message, to_trailing_metadata(error))
        raise AssertionError("abort raises")

    return grpc.stream_unary_rpc_method_handler(refuse)
