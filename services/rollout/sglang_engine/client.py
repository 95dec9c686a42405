"""What SGLang is asked over HTTP.

Every call has a deadline; only a stream of tokens may last, and its silence is watched by the
engine. Nothing is retried here. Two errors, for two remedies:

    SglangRefusedError   the server answered, and the answer is no
    SglangGoneError      no answer: the server is down, or hangs
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx

OLDEST_VERSION = (0, 5, 21)
_CALL_SECONDS = 30.0
_LOAD_SECONDS = 600.0
_HEALTH_SECONDS = 25.0  # SGLang itself gives its scheduler 20
_REFUSED = 400  # HTTP status from which on the answer is no
_BROKEN = 500  # and from which on it is none
_ABORTS_AT_ONCE = 32
_DATA = "data: "
_DONE = "[DONE]"

PauseMode = Literal["in_place", "retract"]


class SglangRefusedError(Exception):
    """The server answered with an error; the message is its own."""


class SglangGoneError(Exception):
    """The server gave no answer."""


class UnsupportedVersionError(Exception):
    """This version of SGLang is not one that the engine can drive."""


@dataclass(frozen=True, slots=True)
class SglangLoad:
    """What `/v1/loads` tells, summed over ranks of data parallelism."""

    running: int
    waiting: int
    used_tokens: int
    kv_tokens: int  # size of the KV pool
    slots: int  # requests decoded at once


def check_version(version: str) -> None:
    """Raise UnsupportedVersionError unless `version` is 0.5.21 or later."""
    numbers = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        numbers.append(int(digits) if digits else -1)
    if tuple(numbers) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise UnsupportedVersionError(
            f"SGLang {version} is not supported, as it lacks weight update sessions;"
            f" install {oldest} or later"
        )


class SglangClient:
    """One server, by URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._http = httpx.AsyncClient(
            base_url=url,
            trust_env=False,  # no proxy between a service and its own server
            timeout=_CALL_SECONDS,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=16),
        )

    async def close(self) -> None:
        """End all calls."""
        await self._http.aclose()

    async def is_ready(self) -> bool:
        """Whether the server takes requests; False while it starts."""
        try:
            response = await self._http.get("/model_info", timeout=5.0)
        except httpx.TransportError:
            return False
        return response.is_success

    async def is_healthy(self) -> bool:
        """Whether the scheduler still answers: a request goes through it."""
        try:
            response = await self._http.get("/health_generate", timeout=_HEALTH_SECONDS)
        except httpx.TransportError:
            return False
        return response.is_success

    async def server_info(self) -> dict[str, Any]:
        """Settings and limits of the server, `version` among them."""
        info: dict[str, Any] = await self._json("GET", "/server_info")
        return info

    async def loads(self) -> SglangLoad:
        """What runs and waits now."""
        ranks = (await self._json("GET", "/v1/loads?include=core"))["loads"]
        return SglangLoad(
            running=sum(rank["num_running_reqs"] for rank in ranks),
            waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
            used_tokens=sum(rank["num_used_tokens"] for rank in ranks),
            kv_tokens=sum(rank["max_total_num_tokens"] for rank in ranks),
            slots=sum(rank["max_running_requests"] for rank in ranks),
        )

    async def generate(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The whole outputs of a batch, in order."""
        outputs: list[dict[str, Any]] = await self._json(
            "POST", "/generate", body, seconds=_LOAD_SECONDS
        )
        return outputs

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Chunks of the outputs of a batch, as they come; `index` tells whose."""
        request = self._http.build_request(
            "POST",
            "/generate",
            json={**body, "stream": True},
            timeout=httpx.Timeout(_CALL_SECONDS, read=None),
        )
        try:
            response = await self._http.send(request, stream=True)
            try:
                if response.status_code >= _REFUSED:
                    raise _error(response.status_code, _reason(await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith(_DATA) and not line.endswith(_DONE):
                        yield _chunk(line[len(_DATA) :])
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise SglangGoneError(f"SGLang at {self.url} broke off: {error!r}") from error

    async def abort(self, names: Sequence[str]) -> None:
        """Stop requests; unknown ones are ignored. SGLang stops all whose name begins so."""
        for start in range(0, len(names), _ABORTS_AT_ONCE):
            some = names[start : start + _ABORTS_AT_ONCE]
            await asyncio.gather(*(self._post("/abort_request", {"rid": name}) for name in some))

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two steps; `retract` also empties the KV cache of what runs."""
        await self._post("/pause_generation", {"mode": mode})

    async def go_on(self) -> None:
        """Undo `pause`."""
        await self._post("/continue_generation", {})

    async def flush(self) -> None:
        """Drop every cached prefix; refused while requests run."""
        await self._post("/flush_cache", None)

    async def update_weights_from_disk(self, directory: str) -> None:
        """Load weights of the same architecture in place and drop every cache."""
        body = {"model_path": directory, "flush_cache": True}
        await self._post("/update_weights_from_disk", body, seconds=_LOAD_SECONDS)

    async def checksums(self) -> list[dict[str, str]]:
        """Per rank, the hash of each parameter."""
        answer = await self._json(
            "POST", "/weights_checker", {"action": "checksum"}, seconds=_LOAD_SECONDS
        )
        return [rank["checksums"] for rank in answer["ranks"]]

    async def _post(self, path: str, body: Any, seconds: float = _CALL_SECONDS) -> None:
        await self._send("POST", path, body, seconds)

    async def _json(
        self, method: str, path: str, body: Any = None, seconds: float = _CALL_SECONDS
    ) -> Any:
        return (await self._send(method, path, body, seconds)).json()

    async def _send(self, method: str, path: str, body: Any, seconds: float) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body, timeout=seconds)
        except httpx.TransportError as error:
            raise SglangGoneError(
                f"SGLang at {self.url} does not answer {path}: {error!r}"
            ) from error
        if response.status_code >= _REFUSED:
            raise _error(response.status_code, f"{path}: {_reason(response.content)}")
        return response


def _chunk(text: str) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(text)
    if "error" in chunk:
        raise _error(chunk["error"].get("code", _REFUSED), str(chunk["error"]))
    return chunk


def _error(status: int, message: str) -> SglangRefusedError | SglangGoneError:
    return SglangGoneError(message) if status >= _BROKEN else SglangRefusedError(message)


def _reason(content: bytes) -> str:
    return content.decode(errors="replace")[:500]
