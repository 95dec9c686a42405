"""The process: `python -m services.reward.judge_worker SOCKET SETTINGS`.

SOCKET is the number of an inherited socket that listens already, SETTINGS a JSON object of
`JudgeModelSettings`; the token that callers must show is in the environment. Started by
`services.reward.judge_process` only; the kernel kills it when the service dies.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
from http import HTTPStatus
from typing import Any

import torch

from rollpacker.observability import set_up_logging
from services.reward.http_json import Answer, JsonServer, bad_request
from services.reward.judge_process import (
    COMPLETIONS_PATH,
    MOST_BODY_BYTES,
    TOKEN_VARIABLE,
    JudgeModelSettings,
)
from services.reward.judge_worker.batches import Batches, TooLateError
from services.reward.judge_worker.model import JudgeModel, Request
from services.reward.judge_worker.residency import DeviceMemoryError

_log = logging.getLogger(__name__)


class Completions:
    """Answers `POST /v1/chat/completions`."""

    def __init__(self, model: JudgeModel, batches: Batches) -> None:
        self._model, self._batches = model, batches

    def answer(self, body: Any) -> Answer:
        """400: the request itself is wrong. 503: try again."""
        try:
            max_tokens = int(body["max_tokens"])
            request = Request(
                self._model.encode(_messages(body["messages"]), max_tokens),
                max_tokens,
                float(body.get("temperature", 0.0)),
                int(body.get("seed", 0)),
            )
            reply = self._batches.ask(request)
        except (LookupError, OverflowError, TypeError, ValueError) as error:
            return bad_request(f"{type(error).__name__}: {error}")
        except (DeviceMemoryError, TooLateError) as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)}
        message = {"role": "assistant", "content": self._model.decode(reply)}
        reason = "stop" if reply.is_whole else "length"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return HTTPStatus.OK, {"object": "chat.completion", "choices": [choice]}


def _messages(values: Any) -> list[dict[str, str]]:
    """Raises TypeError, LookupError."""
    return [{"role": str(each["role"]), "content": str(each["content"])} for each in values]


def main(listener: int, settings_json: str) -> None:
    """Load the model, then answer; see Batches for how long."""
    set_up_logging("judge", "INFO")
    settings = JudgeModelSettings(**json.loads(settings_json))
    torch.set_num_threads(settings.threads)
    model = JudgeModel(settings)
    batches = Batches(
        model,
        settings.batch,
        settings.timeout_seconds,
        settings.idle_seconds,
        ends_idle=settings.ends_idle,
    )
    server = JsonServer(
        socket.socket(fileno=listener),
        os.environ[TOKEN_VARIABLE],
        {COMPLETIONS_PATH: Completions(model, batches).answer},
        most_body_bytes=MOST_BODY_BYTES,
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    layers = len(model.layers.layer_bytes)
    _log.info("judging with %s, %d layers, on %s", settings.model, layers, settings.device)
    batches.run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
