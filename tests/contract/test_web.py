"""The web page of the coordinator over HTTP; in a browser: tests/web."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest
from redis.asyncio import Redis

from rollpacker.rpc.errors import InvalidArgumentError
from services.coordinator.outputs.run_directory import RunDirectory
from services.coordinator.runs import Runs
from services.coordinator.settings import CoordinatorSettings
from services.coordinator.web import serve_web
from services.coordinator.workers import WorkerRegistry
from tests.unit.outputs_example_run import RUN_ID
from tests.web_support import HOSTILE, TOKEN, Site, served_run


@pytest.fixture
async def site(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Site]:
    async with served_run(redis_client, tmp_path) as served:
        yield served


@pytest.fixture
async def reader(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody who has the token."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=site.url, headers=headers, timeout=60) as client:
        yield client


PATHS = ("runs", "workers", f"runs/{RUN_ID}", f"runs/{RUN_ID}/overview")


@pytest.mark.parametrize("token", ["", "Bearer wrong", f"Bearer {TOKEN[:-1]}"])
async def test_nothing_of_a_run_is_told_without_the_token(site: Site, token: str) -> None:
    await site.commit(1)
    async with httpx.AsyncClient(base_url=site.url, headers={"authorization": token}) as stranger:
        for path in (*PATHS, f"runs/{RUN_ID}/samples/0", "nowhere"):
            answer = await stranger.get(f"/api/{path}")
            assert (answer.status_code, RUN_ID in answer.text) == (401, False)


async def test_the_page_itself_is_open_and_holds_nothing_of_a_run(site: Site) -> None:
    async with httpx.AsyncClient(base_url=site.url) as stranger:
        for path in ("/", "/page.js", "/page.css", "/report.css"):
            answer = await stranger.get(path)
            assert answer.status_code == 200
            assert RUN_ID not in answer.text


async def test_every_answer_forbids_scripts_that_are_not_the_pages_own(
    reader: httpx.AsyncClient,
) -> None:
    for path in ("/", "/page.js", "/api/runs", "/api/nowhere", "/nowhere"):
        answer = await reader.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_nothing_can_be_changed(reader: httpx.AsyncClient, method: str) -> None:
    assert (await reader.request(method, f"/api/runs/{RUN_ID}")).status_code == 405


async def test_a_run_without_a_step_is_shown(reader: httpx.AsyncClient) -> None:
    overview = (await reader.get(f"/api/runs/{RUN_ID}/overview")).json()
    assert overview["last_step"] is None
    assert overview["reward"] == ""
    assert (await reader.get(f"/api/runs/{RUN_ID}/samples/0")).status_code == 404


async def test_a_run_is_shown_as_it_grows(site: Site, reader: httpx.AsyncClient) -> None:
    await site.commit(3)
    before = (await reader.get(f"/api/runs/{RUN_ID}/overview")).json()
    assert before["last_step"] == 2
    await site.commit(2)
    overview = (await reader.get(f"/api/runs/{RUN_ID}/overview")).json()
    assert overview["last_step"] == 4
    assert "Reward of 5 steps" in overview["reward"]
    assert "Lengths of 60 trained responses" in overview["histogram"]
    now = (await reader.get(f"/api/runs/{RUN_ID}")).json()
    queued = len(site.state.deferred)
    assert (now["step"], now["mode"], now["queue_length"]) == (5, "exact", queued)
    assert f"{queued} deferred draws by age" in now["queue"]
    assert [run["run_id"] for run in (await reader.get("/api/runs")).json()] == [RUN_ID]
    assert [w["worker_id"] for w in (await reader.get("/api/workers")).json()] == ["reward-0"]


async def test_the_pictures_follow_a_rewind(site: Site, reader: httpx.AsyncClient) -> None:
    await site.commit(4)
    await reader.get(f"/api/runs/{RUN_ID}/overview")
    site.outputs.supersede_from(2)
    overview = (await reader.get(f"/api/runs/{RUN_ID}/overview")).json()
    assert overview["last_step"] == 1
    assert "Lengths of 24 trained responses" in overview["histogram"]


async def test_a_round_is_shown_slot_by_slot(site: Site, reader: httpx.AsyncClient) -> None:
    await site.commit(2)
    picture = (await reader.get(f"/api/runs/{RUN_ID}/rounds/1")).json()["picture"]
    drawing = ElementTree.fromstring(picture)
    assert drawing.attrib["aria-label"] == "Step 1: 12 responses in 12 slots"
    titles = [element.text for element in drawing.iter("title")]
    assert sum("tokens, reward" in str(title) for title in titles) == 12
    assert (await reader.get(f"/api/runs/{RUN_ID}/rounds/9")).json()["picture"] == ""


async def test_samples_come_page_by_page_with_the_prompt_as_text(
    site: Site, reader: httpx.AsyncClient
) -> None:
    site.example.prompts, site.example.responses = 5, 4
    await site.commit(1)
    first = (await reader.get(f"/api/runs/{RUN_ID}/samples/0")).json()
    rest = (await reader.get(f"/api/runs/{RUN_ID}/samples/0?start={first['next']}")).json()
    assert (len(first["samples"]), len(rest["samples"]), rest["next"]) == (16, 4, None)
    one = first["samples"][0]
    assert one["turns"][0] == {"role": "prompt", "text": "3 8 , 5"}  # its tokens, decoded
    assert [turn["role"] for turn in one["turns"]] == ["prompt", "assistant"]
    assert (first["previous"], rest["previous"]) == (None, 0)
    assert one["verdict"] in ("CORRECT", "INCORRECT", "NO_ANSWER")
    for bad in ("-1", "x", "1e9", "9" * 30, "9" * 5000):
        for path in (f"samples/0?start={bad}", f"samples/{bad}", f"rounds/{bad}"):
            assert (await reader.get(f"/api/runs/{RUN_ID}/{path}")).status_code == 400


async def test_a_response_of_several_roles_is_shown_turn_by_turn(
    site: Site, reader: httpx.AsyncClient
) -> None:
    await site.commit(1)
    path = RunDirectory(site.runs.directory(RUN_ID)).samples_file(0)
    row = json.loads(path.read_text().splitlines()[0])
    row["token_ids"], row["segments"] = [1, 2, 3], [["assistant", 1, True], ["tool", 2, False]]
    path.write_text(json.dumps(row) + "\n")
    found = (await reader.get(f"/api/runs/{RUN_ID}/samples/0")).json()["samples"][0]["turns"]
    assert found[1:] == [{"role": "assistant", "text": "1"}, {"role": "tool", "text": "2 3"}]


async def test_markup_of_a_response_stays_text(site: Site, reader: httpx.AsyncClient) -> None:
    await site.commit(1, HOSTILE)
    answer = await reader.get(f"/api/runs/{RUN_ID}/samples/0")
    assert answer.headers["content-type"] == "application/json"
    shown = answer.json()["samples"][0]["turns"][1]["text"]
    assert shown == HOSTILE.replace("\u202e", "\N{REPLACEMENT CHARACTER}")
    picture = (await reader.get(f"/api/runs/{RUN_ID}/rounds/0")).json()["picture"]
    tags = {element.tag for element in ElementTree.fromstring(picture).iter()}
    assert tags <= {"svg", "g", "title", "rect", "line", "text"}


async def test_what_is_not_there_is_said_in_words(reader: httpx.AsyncClient) -> None:
    for path in ("runs/nobody", "runs/nobody/overview", "runs/nobody/samples/1", "runs/a/b/c"):
        answer = await reader.get(f"/api/{path}")
        assert answer.status_code == 404
        assert answer.json()["error"]


@pytest.mark.parametrize(
    ("address", "token", "field"),
    [
        ("127.0.0.1:0", None, "web_token_file"),
        ("127.0.0.1:0", "short", "web_token_file"),
        ("0.0.0.0:0", TOKEN, "web_address"),
        ("7780", TOKEN, "web_address"),
    ],
)
async def test_settings_that_would_let_strangers_in_are_refused(
    redis_client: Redis, tmp_path: Path, address: str, token: str | None, field: str
) -> None:
    if token:
        (tmp_path / "token").write_text(token)
    workers = WorkerRegistry(600, 600)
    runs = Runs(redis_client, CoordinatorSettings(redis_url="unused"), workers)
    with pytest.raises(InvalidArgumentError, match=field):
        await serve_web(address, tmp_path / "token" if token else None, runs, workers)
