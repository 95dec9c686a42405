"""The parts of the chaos suite: a schedule that covers, an audit that finds, a link that cuts."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollpacker.types import (
    Draw,
    FinishReason,
    PromptGroup,
    Response,
    RoundKind,
    ScoredResponse,
    Segment,
)
from services.coordinator.outputs.samples import group_to_lines
from tests.chaos.audit import violations
from tests.chaos.faults import LAST_STEPS, FaultKind, schedule
from tests.chaos.link import Cut, Link

TARGETS = ["coordinator", "rollout-0", "redis", "rank-1"]


# --- the schedule -------------------------------------------------------------------------------


def test_a_seed_names_a_schedule() -> None:
    def faults(seed: int) -> list[Any]:
        return schedule(seed, 50, steps=40, groups=8, targets=TARGETS)

    assert faults(1) == faults(1) != faults(2)


def test_every_pair_of_kind_and_target_comes_equally_often() -> None:
    pairs = 4 * 4 - 2  # the connections of a rank are not cut: it serves nobody
    faults = schedule(0, 3 * pairs, steps=40, groups=8, targets=TARGETS)
    assert set(Counter((fault.kind, fault.target) for fault in faults).values()) == {3}
    assert len({(fault.kind, fault.target) for fault in faults}) == pairs


def test_faults_are_in_order_and_leave_the_last_steps_alone() -> None:
    faults = schedule(3, 200, steps=10, groups=2, targets=TARGETS)
    moments = [fault.moment for fault in faults]
    assert moments == sorted(moments)
    assert max(moment.step for moment in moments) == 10 - LAST_STEPS - 1
    assert all((fault.seconds == 0) == (fault.kind is FaultKind.KILL) for fault in faults)


def test_a_run_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="steps is 4"):
        schedule(0, 1, steps=4, groups=2, targets=TARGETS)


# --- the audit ----------------------------------------------------------------------------------


def group(step: int, row: int) -> PromptGroup:
    seeds = (row * 10, row * 10 + 1)
    answers = [
        Response(
            response_id=f"{row}-{index}",
            index=index,
            token_ids=(1, 2),
            logprobs=(-0.5, -0.5),
            finish_reason=FinishReason.STOP,
            weight_version=step,
            seed=seed,
            segments=(Segment("assistant", 2, True),),
        )
        for index, seed in enumerate(seeds)
    ]
    return PromptGroup(
        run_id="r",
        step=step,
        draw=Draw(0, str(row), seeds),
        prompt_token_ids=(3,),
        responses=tuple(ScoredResponse(answer, reward=1.0, text="x") for answer in answers),
        weight_version=step,
        race_key=0,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The files of a run of two steps with two groups of two responses each."""
    samples = tmp_path / "run" / "samples"
    samples.mkdir(parents=True)
    for step in range(2):
        lines = [
            line for row in (2 * step, 2 * step + 1) for line in group_to_lines(group(step, row))
        ]
        (samples / f"step_{step:06d}.jsonl").write_text("\n".join(lines) + "\n")
    records = [json.dumps({"step": step, "kind": RoundKind.SHORT.value}) for step in range(2)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(records) + "\n")
    return tmp_path / "run"


def audit(run: Path, undisturbed: Path) -> list[str]:
    return violations(run, undisturbed, prompts=4, epochs=1, responses=2)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_run_that_is_right_has_no_violation(run: Path) -> None:
    assert audit(run, run) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("metrics.jsonl", '"step": 1', '"step": 2', "not contiguous"),
        ("samples/step_000001.jsonl", '"prompt_id":"2"', '"prompt_id":"0"', "trained 2 times"),
        ("samples/step_000001.jsonl", '"prompt_id":"2"', '"prompt_id":"9"', "other draws"),
        ("samples/step_000001.jsonl", '"weight_version":1,"token', '"weight_version":0,"token',
         "response 0 is of weight version 0"),
        ("samples/step_000001.jsonl", '"group":{"weight_version":1', '"group":{"weight_version":0',
         "and weight version 0"),
        ("samples/step_000000.jsonl", '"seed":11', '"seed":12', "another seed than its draw"),
        ("samples/step_000000.jsonl", '"index":1', '"index":0', "responses [0, 0], not 2"),
        ("samples/step_000000.jsonl", '"reward":1.0', '"reward":null', "has no reward"),
        ("samples/step_000000.jsonl", '"seeds":[0,1]', '"seeds":[0,7]', "another seed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(
    run: Path, tmp_path: Path, file: str, old: str, new: str, found: str
) -> None:
    wrong = shutil.copytree(run, tmp_path / "wrong")
    edit(wrong / file, old, new)
    assert any(found in line for line in audit(wrong, run)), audit(wrong, run)


def test_a_step_that_is_missing_is_found(run: Path, tmp_path: Path) -> None:
    wrong = shutil.copytree(run, tmp_path / "wrong")
    (wrong / "samples" / "step_000001.jsonl").unlink()
    found = audit(wrong, run)
    assert "2 step records but samples of 1 steps" in found
    assert "epoch 0 trained 2 of 4 prompts" in found
    assert "1 steps, the undisturbed run has 2" in found


# --- the link -----------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def link() -> AsyncIterator[Link]:
    """In front of a server that says everything twice."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(line + line)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = "{}:{}".format(*server.sockets[0].getsockname())
    async with server, Link(lambda: address) as link:
        yield link


async def connect(link: Link) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = link.address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_an_open_link_passes_bytes_on_and_the_end_of_them(link: Link) -> None:
    reader, writer = await connect(link)
    writer.write(b"a\n")
    writer.write_eof()
    assert await reader.read() == b"a\na\n"
    writer.close()


async def test_a_refused_link_resets_connections_and_refuses_new_ones_until_it_is_open(
    link: Link,
) -> None:
    reader, writer = await connect(link)
    writer.write(b"a\n")
    assert await reader.readexactly(4) == b"a\na\n"
    await link.cut(Cut.REFUSED)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    with pytest.raises(ConnectionRefusedError):
        await connect(link)
    await link.open()
    reader, writer = await connect(link)
    writer.write(b"b\n")
    assert await reader.readexactly(4) == b"b\nb\n"
    writer.close()


async def test_a_silent_link_holds_bytes_back_until_it_is_open(link: Link) -> None:
    reader, writer = await connect(link)
    writer.write(b"a\n")
    assert await reader.readexactly(4) == b"a\na\n"
    await link.cut(Cut.SILENT)
    writer.write(b"b\n")
    late_reader, late_writer = await connect(link)
    late_writer.write(b"c\n")
    answers = [asyncio.create_task(r.readexactly(4)) for r in (reader, late_reader)]
    done, _ = await asyncio.wait(answers, timeout=0.2)
    assert not done
    await link.open()
    assert await asyncio.gather(*answers) == [b"b\nb\n", b"c\nc\n"]
    writer.close()
    late_writer.close()
