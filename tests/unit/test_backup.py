"""A run in one file, and back, against a real Redis server; what may not be kept or read."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from typer.testing import CliRunner

from rollpacker.backup import BackupError, Places, back_up, restore
from rollpacker.cli.main import app
from rollpacker.store import keys
from rollpacker.store.run_dump import dump_run
from rollpacker.store.run_store import RunStore
from tests.unit.test_run_store import STATE, after_step, committed, record

RUN = "demo"
FENCE = 7


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A run directory, a complete checkpoint and a half-written one."""
    places = Places(tmp_path / "runs", tmp_path / "checkpoints")
    (places.runs / RUN / "samples").mkdir(parents=True)
    (places.runs / RUN / "samples" / "step_000000.jsonl").write_bytes(b"\x00\xff" * 1000)
    for name in ("step_000001", "step_000002"):
        (places.checkpoints / RUN / name).mkdir(parents=True)
        (places.checkpoints / RUN / name / "tensors.bin").write_text(name)
    (places.checkpoints / RUN / "step_000001" / "COMPLETE").write_text("{}")
    return places


async def stopped_run(client: Redis) -> RunStore:
    """One with a key of every type, one of which expires."""
    store, state = await committed(client, steps=2)
    await store.set_status(FENCE, "stopped")
    await client.zadd(keys.timeout_anchors(RUN, "p1"), {b"\xff\x00": 0.1, b"b": 1 / 3})
    await client.expire(keys.timeout_anchors(RUN, "p1"), 1000)
    await client.set(keys.step_result(RUN, 1), b"\x00\xff\n")
    await client.xadd(keys.step_samples(RUN, 2), {b"group": b"\xfe"}, id="5-3")
    await client.xgroup_create(keys.step_samples(RUN, 2), keys.TRAINER_GROUP, id="0")
    await client.xgroup_create(keys.step_samples(RUN, 3), keys.TRAINER_GROUP, id="0", mkstream=True)
    await client.set("rollpacker:{demo-2}:state", b"another run's")
    assert state.step == 2
    return store


async def kept(client: Redis) -> list[dict[str, Any]]:
    """The dump without what may differ: times to live."""
    lines = [json.loads(line) async for line in dump_run(client, RUN)]
    return [{**line, "milliseconds": line["milliseconds"] > 0} for line in lines]


async def test_a_restored_run_is_the_run_that_was_backed_up(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    store = await stopped_run(redis_client)
    before, state = await kept(redis_client), await store.load()
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    await redis_client.flushall()
    there = Places(tmp_path / "other" / "runs", tmp_path / "other" / "checkpoints")
    manifest = await restore(redis_client, there, tmp_path / "a.tar")
    assert (manifest.step, manifest.status) == (2, "stopped")
    assert [line["key"] for line in before].count("step:3:samples") == 0  # an empty stream
    after = await kept(redis_client)
    assert after[1:] == before[1:]
    assert await store.load() == state
    assert await redis_client.zscore(keys.RUNS, RUN) == STATE.create_time
    assert await redis_client.exists("rollpacker:{demo-2}:state") == 0
    sample = Path(RUN, "samples", "step_000000.jsonl")
    assert (there.runs / sample).read_bytes() == (places.runs / sample).read_bytes()
    names = sorted(path.name for path in (there.checkpoints / RUN).iterdir())
    assert names == ["step_000001"]  # the newest complete one
    assert sorted(p.name for p in tmp_path.glob("other/*/*")) == [RUN, RUN]


async def test_whoever_coordinates_may_claim_a_restored_run(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    """Its old fence is of another Redis, which may have counted further."""
    store = await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    await restore(redis_client, places, tmp_path / "a.tar", replace=True)
    await store.claim(1)
    state = await store.load()
    assert state is not None
    await store.commit(1, after_step(state), record(2))


async def test_events_that_are_gone_stay_gone(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    store = await stopped_run(redis_client)
    await redis_client.xtrim(keys.events(RUN), maxlen=1, approximate=False)
    oldest, last = await store.oldest_kept_revision(), await store.last_revision()
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    await restore(redis_client, places, tmp_path / "a.tar", replace=True)
    assert oldest != "0-0"
    assert (await store.oldest_kept_revision(), await store.last_revision()) == (oldest, last)


@pytest.mark.parametrize("status", ["running", "pausing", "stopping"])
async def test_an_active_run_is_neither_backed_up_nor_overwritten(
    redis_client: Redis, places: Places, tmp_path: Path, status: str
) -> None:
    store = await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    await redis_client.hset(keys.state(RUN), "status", status)
    before = await kept(redis_client)
    with pytest.raises(BackupError, match=f"{status}; first: rollpacker stop {RUN}"):
        await back_up(redis_client, places, RUN, tmp_path / "b.tar")
    with pytest.raises(BackupError, match=f"{status} here; first: rollpacker stop {RUN}"):
        await restore(redis_client, places, tmp_path / "a.tar", replace=True)
    assert await kept(redis_client) == before
    assert await store.load() is not None
    assert sorted(path.name for path in tmp_path.glob("*.tar*")) == ["a.tar"]


@pytest.mark.parametrize("status", ["paused", "queued"])
async def test_an_active_run_is_not_overwritten_though_nobody_drives_it(
    redis_client: Redis, places: Places, tmp_path: Path, status: str
) -> None:
    await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    await redis_client.hset(keys.state(RUN), "status", status)
    (places.runs / RUN / "later").write_text("x")
    before = await kept(redis_client)
    with pytest.raises(BackupError, match=f"{status} here; first: rollpacker stop {RUN}"):
        await restore(redis_client, places, tmp_path / "a.tar", replace=True)
    assert await kept(redis_client) == before
    assert (places.runs / RUN / "later").exists()


async def test_a_run_that_is_there_is_overwritten_only_when_asked_to(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    (places.runs / RUN / "later").write_text("x")
    with pytest.raises(BackupError, match=r"here already \(.*runs/demo.*Redis\); --replace"):
        await restore(redis_client, places, tmp_path / "a.tar")
    assert (places.runs / RUN / "later").exists()
    await restore(redis_client, places, tmp_path / "a.tar", replace=True)
    assert not (places.runs / RUN / "later").exists()


async def test_a_run_that_moves_on_meanwhile_leaves_no_backup(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    """A step is committed between the dump and the end of the file."""
    store = await stopped_run(redis_client)
    state = await store.load()
    assert state is not None
    last = places.runs / RUN / "samples" / "step_000001.jsonl"
    last.write_bytes(b"x")
    real = Path.open

    def open_late(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == last:
            client = redis.Redis(unix_socket_path=redis_client.get_connection_kwargs()["path"])
            client.hset(keys.state(RUN), "step", "3")
            client.close()
        return real(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", open_late)
        with pytest.raises(BackupError, match="moved on meanwhile"):
            await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    assert list(tmp_path.glob("a.tar*")) == []


def rewritten(source: Path, target: Path, change: Any) -> Path:
    """A copy whose members `change(name, data)` has replaced; None leaves one out."""
    with tarfile.open(source) as tar, tarfile.open(target, "w") as out:
        for member in tar.getmembers():
            file = tar.extractfile(member)
            assert file is not None
            for name, data in change(member.name, file.read()):
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                out.addfile(entry, io.BytesIO(data))
    return target


def in_manifest(**changes: Any) -> Any:
    def change(name: str, data: bytes) -> Any:
        if name == "manifest.json":
            data = json.dumps({**json.loads(data), **changes}).encode()
        yield name, data

    return change


def damaged(name: str, data: bytes) -> Any:
    yield name, data.replace(b"\x00\xff", b"\x00\xfe", 1)


def without_dump(name: str, data: bytes) -> Any:
    if name != "redis.jsonl":
        yield name, data


def with_another(name: str, data: bytes) -> Any:
    yield name, data
    if name == "manifest.json":
        yield "run/../../evil", b"x"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (damaged, "step_000000.jsonl is damaged"),
        (without_dump, "members are not those"),
        (with_another, "members are not those"),
        (
            in_manifest(layout_version=0),
            "this version reads format 1 and layouts 1, 2, 3, 4, 5, 6",
        ),
        (in_manifest(format=2), "format 2"),
        (in_manifest(run_id="../x"), "no run id"),
        (lambda name, data: [(name, data)] if name != "manifest.json" else [], "no backup"),
    ],
)
async def test_a_file_that_is_no_whole_backup_of_this_version_changes_nothing(
    redis_client: Redis, places: Places, tmp_path: Path, change: Any, said: str
) -> None:
    await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    before = await kept(redis_client)
    bad = rewritten(tmp_path / "a.tar", tmp_path / "bad.tar", change)
    with pytest.raises(BackupError, match=said):
        await restore(redis_client, places, bad, replace=True)
    assert await kept(redis_client) == before
    assert sorted(path.name for path in tmp_path.glob("*/*")) == sorted(
        [RUN, RUN, *(p.name for p in (tmp_path / "redis").iterdir())]
    )


@pytest.mark.parametrize("name", ["run//tmp/evil", "run/../evil", "/tmp/evil", "run", "other/x"])
async def test_a_member_outside_its_place_is_refused_though_the_manifest_names_it(
    redis_client: Redis, places: Places, tmp_path: Path, name: str
) -> None:
    def smuggled(member: str, data: bytes) -> Any:
        if member == "manifest.json":
            values = json.loads(data)
            digest = hashlib.sha256(b"x").hexdigest()
            data = json.dumps({**values, "files": {**values["files"], name: (1, digest)}}).encode()
            yield name, b"x"
        yield member, data

    await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    bad = rewritten(tmp_path / "a.tar", tmp_path / "bad.tar", smuggled)
    with pytest.raises(BackupError, match="no plain file of a backup"):
        await restore(redis_client, places, bad, replace=True)


async def test_links_in_a_backup_are_refused(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    await stopped_run(redis_client)
    await back_up(redis_client, places, RUN, tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar", "a") as tar:
        link = tarfile.TarInfo("run/samples/step_000000.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with pytest.raises(BackupError, match="no plain file"):
        await restore(redis_client, places, tmp_path / "a.tar", replace=True)


async def test_a_run_of_an_older_layout_is_refused_with_the_reason(
    redis_client: Redis, places: Places, tmp_path: Path
) -> None:
    store, _ = await committed(redis_client)
    text = json.loads(await redis_client.hget(keys.state(RUN), "state"))
    await redis_client.hset(keys.state(RUN), "state", json.dumps({**text, "layout_version": 0}))
    await store.set_status(FENCE, "stopped")
    with pytest.raises(BackupError, match="layout 0, this version reads 1, 2, 3, 4, 5, 6; finish"):
        await back_up(redis_client, places, RUN, tmp_path / "a.tar")


def test_the_commands_keep_a_run_and_bring_it_back(
    redis_url: str, places: Places, tmp_path: Path
) -> None:
    async def prepare() -> None:
        client = Redis.from_url(redis_url)
        await stopped_run(client)
        await client.aclose()

    asyncio.run(prepare())
    options = ["--redis", redis_url, "--runs", str(places.runs)]
    options += ["--checkpoints", str(places.checkpoints)]
    file = str(tmp_path / "a.tar")
    made = CliRunner().invoke(app, ["backup", RUN, file, *options])
    assert made.exit_code == 0, made.stderr
    assert "run demo, stopped at step 2" in made.stdout
    nowhere = CliRunner().invoke(app, ["backup", RUN, str(tmp_path / "no" / "a.tar"), *options])
    said = f"error: {tmp_path / 'no'} is no directory; make it, or name another file\n"
    assert (nowhere.exit_code, nowhere.stderr) == (4, said)
    gone = CliRunner().invoke(app, ["restore", str(tmp_path / "b.tar"), *options])
    said = f"error: {tmp_path / 'b.tar'}: No such file or directory\n"
    assert (gone.exit_code, gone.stderr) == (2, said)
    refused = CliRunner().invoke(app, ["restore", file, *options])
    assert (refused.exit_code, "--replace" in refused.stderr) == (4, True)
    back = CliRunner().invoke(app, ["restore", file, "--replace", *options])
    assert back.exit_code == 0, back.stderr


def test_the_commands_say_what_is_missing_and_no_password(tmp_path: Path) -> None:
    url = "redis://user:verysecret@127.0.0.1:1/0"
    away = CliRunner().invoke(app, ["backup", RUN, str(tmp_path / "a.tar"), "--redis", url])
    assert away.exit_code == 3
    assert "verysecret" not in away.output
    wrong = CliRunner().invoke(app, ["restore", "a.tar", "--redis", "verysecret@nowhere"])
    said = "error: --redis is no URL of Redis; give redis://, rediss:// or unix://\n"
    assert (wrong.exit_code, wrong.stderr) == (2, said)
    none = CliRunner().invoke(app, ["restore", "a.tar", "--stack", str(tmp_path)])
    assert none.exit_code == 2
    assert "is no local stack" in none.stderr
