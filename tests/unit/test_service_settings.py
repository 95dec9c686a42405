"""A service that is started with wrong variables says which, and no more."""

from __future__ import annotations

import pytest

from rollpacker.settings import read_service_settings
from services.coordinator.settings import CoordinatorSettings
from services.rollout.settings import RolloutServiceSettings


def test_each_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLPACKER_ROLLOUT_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("ROLLPACKER_ROLLOUT_SLOTS", "many")
    with pytest.raises(SystemExit) as caught:
        read_service_settings(RolloutServiceSettings)
    lines = str(caught.value).splitlines()
    assert "ROLLPACKER_ROLLOUT_WORKER_ID: is required" in lines
    (slots,) = (line for line in lines if line.startswith("ROLLPACKER_ROLLOUT_SLOTS: "))
    assert slots.endswith("got 'many'")


def test_a_list_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLPACKER_ROLLOUT_SGLANG_ARGUMENTS", "--flag")
    with pytest.raises(SystemExit, match='"sglang_arguments".*; write it as JSON'):
        read_service_settings(RolloutServiceSettings)


def test_right_variables_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLPACKER_COORDINATOR_REDIS_URL", "unix:///x")
    assert read_service_settings(CoordinatorSettings).redis_url == "unix:///x"
