"""The deployment, for real: `make test-compose` builds the images and trains through the stack.

One small run goes through it from the host, by the CLI. While it runs, rollout and reward are
scaled up and down, one container of each service is killed with SIGKILL, and the whole stack is
restarted. The trained set must be exact all the same: each prompt once, each step full. Prometheus
watches from the beginning, and in the end answers what the dashboards ask. Not collected by
`make test`: it needs a Docker engine (engine.py starts one), compose and some minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.deploy.engine import (
    ROOT,
    SERVICES,
    build_images,
    docker_engine,
    image_sizes,
    make_base_images,
    prometheus_image,
    run,
)

pytestmark = pytest.mark.timeout(3600)
PROMPTS_PER_STEP, STEPS = 4, 80
PORT = "17777"
BUILT = "test"
DASHBOARDS = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
TAG = os.environ.get("ROLLPACKER_TAG", "")  # of images that are there; default: build them
DIRECTORY = Path(os.environ.get("ROLLPACKER_DOCKER_DIRECTORY", "/var/tmp/rollpacker-docker"))
COMPOSE = os.environ.get("COMPOSE", "docker compose").split()
OBSERVED = ("--profile", "observability")
LIMITS = {"coordinator": 600e6, "reward": 800e6, "rollout": 2.5e9, "trainer": 2.5e9}  # bytes


class Stack:
    """The stack of deploy/compose.yaml under a project name of its own."""

    def __init__(self, directory: Path, prometheus: str) -> None:
        self.data = directory / "data"
        self.secrets = directory / "secrets"
        self.backups = directory / "backups"
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": "rollpacker-test",
            "ROLLPACKER_DATA": str(self.data),
            "ROLLPACKER_SECRETS": str(self.secrets),
            "ROLLPACKER_BACKUPS": str(self.backups),
            "ROLLPACKER_TAG": TAG or BUILT,
            "ROLLPACKER_PORT": PORT,
            "ROLLPACKER_PROMETHEUS_IMAGE": prometheus,
        }

    def compose(self, *words: str) -> str:
        files = ("-f", str(ROOT / "deploy" / "compose.yaml"))
        return run(*COMPOSE, *files, *words, timeout=600, env=self.environment)

    def up(self, **replicas: int) -> None:
        scale = [w for service, n in replicas.items() for w in ("--scale", f"{service}={n}")]
        self.compose("up", "--detach", "--no-build", "--no-recreate", "--wait",
                     "--wait-timeout", "500", *scale)  # fmt: skip

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--quiet", service).split()

    def inspect(self, container: str, what: str) -> str:
        return run("docker", "inspect", "-f", "{{" + what + "}}", container).strip()

    def inside(self, container: str, code: str) -> subprocess.CompletedProcess[str]:
        words = ["docker", "exec", container, "python3", "-c", code]
        return subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)

    def crash(self, service: str) -> None:
        """SIGKILL to the process of one container, as a crash; it must come back."""
        container = self.containers(service)[0]
        before = self.inspect(container, ".State.StartedAt")
        os.kill(int(self.inspect(container, ".State.Pid")), signal.SIGKILL)
        until(lambda: self.inspect(container, ".State.StartedAt") != before, f"{service} is back")

    def prometheus(self, path: str, **query: str) -> dict[str, Any]:
        """The `data` of an answer of Prometheus, asked from beside it."""
        url = f"http://prometheus:9090/api/v1/{path}?{urlencode(query)}"
        code = f"import urllib.request as u; print(u.urlopen({url!r}, timeout=30).read().decode())"
        said = self.inside(self.containers("coordinator")[0], code)
        assert said.returncode == 0, said.stderr
        data: dict[str, Any] = json.loads(said.stdout)["data"]
        return data

    def cli(self, role: str, *words: str) -> subprocess.CompletedProcess[str]:
        """`rollpacker` on the host, with the certificate and token of a role."""
        folder = self.secrets / role
        identity = {
            "ROLLPACKER_COORDINATOR": f"127.0.0.1:{PORT}",
            "ROLLPACKER_SECURITY_CERTIFICATE_FILE": str(folder / "tls.crt"),
            "ROLLPACKER_SECURITY_KEY_FILE": str(folder / "tls.key"),
            "ROLLPACKER_SECURITY_CA_FILE": str(folder / "ca.crt"),
            "ROLLPACKER_SECURITY_TOKEN_FILE": str(folder / "token"),
        }
        command = [str(Path(sys.executable).with_name("rollpacker")), *words]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=120,
            env={**os.environ, **identity},
        )  # fmt: skip

    def asked(self, *words: str) -> list[dict[str, object]]:
        answer = self.cli("viewer", *words, "--json")
        return [json.loads(line) for line in answer.stdout.splitlines()]

    def steps(self) -> int:
        return len(self.asked("steps", "job", "--limit", "0"))

    def workers(self, kind: str) -> int:
        return sum(kind in str(w["kind"]).lower() for w in self.asked("workers"))


def until(condition: object, what: str, seconds: float = 400) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, f"waited {seconds:.0f} s until {what}"
        time.sleep(1)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with docker_engine(DIRECTORY):
        make_base_images(DIRECTORY)
        if not TAG:
            build_images(DIRECTORY, BUILT)
        sizes = image_sizes(TAG or BUILT)
        print(json.dumps({"image_megabytes": {k: round(v / 1e6) for k, v in sizes.items()}}))
        assert all(sizes[service] < LIMITS[service] for service in SERVICES), sizes
        stack = Stack(DIRECTORY / "stack", prometheus_image(DIRECTORY))
        shutil.rmtree(DIRECTORY / "stack", ignore_errors=True)
        run(ROOT / "deploy" / "make_secrets.sh", stack.secrets)
        write_job(stack.data)
        try:
            stack.up()
            stack.compose(*OBSERVED, "up", "--detach", "--no-build", "--no-deps", "prometheus")
            yield stack
        finally:
            print(stack.compose(*OBSERVED, "logs", "--tail", "15", "--no-color")[-12000:])
            stack.compose(*OBSERVED, "down", "--volumes", "--timeout", "20")


def write_job(data: Path) -> None:
    """The demo's model on as many prompts as fill the steps."""
    shutil.copytree(ROOT / "demo" / "gcd" / "model", data / "model")
    rows = (ROOT / "demo" / "gcd" / "train.jsonl").read_text().splitlines()
    (data / "train.jsonl").write_text("\n".join(rows[: PROMPTS_PER_STEP * STEPS]) + "\n")
    shutil.copy(ROOT / "demo" / "gcd" / "validation.jsonl", data)
    shutil.copy(ROOT / "demo" / "gcd" / "run.yaml", data / "job.yaml")


def test_each_service_runs_confined(stack: Stack) -> None:
    for service in SERVICES:
        container = stack.containers(service)[0]
        assert stack.inspect(container, ".State.Health.Status") == "healthy"
        assert stack.inside(container, "import os; print(os.getuid())").stdout == "10001\n"
        assert "Read-only file system" in stack.inside(container, "open('/opt/x', 'w')").stderr
        confined = (
            "print([w for w in open('/proc/self/status') if w.startswith(('CapEff','NoNew'))])"
        )
        said = stack.inside(container, confined).stdout
        assert "0000000000000000" in said
        assert "NoNewPrivs:\\t1" in said


def test_coordinator_and_reward_hold_no_torch(stack: Stack) -> None:
    for service, there in (("coordinator", False), ("reward", False), ("trainer", True)):
        code = "import importlib.util as u; print(u.find_spec('torch') is not None)"
        assert stack.inside(stack.containers(service)[0], code).stdout == f"{there}\n"


READ_METRICS = """
import http.client, ssl
folder = "/run/rollpacker/"
context = ssl.create_default_context(cafile=folder + "ca.crt")
context.load_cert_chain(folder + "tls.crt", folder + "tls.key")
connection = http.client.HTTPSConnection("localhost", 9464, context=context)
connection.request("GET", "/metrics")
print(connection.getresponse().read().decode())
"""


def test_each_service_shows_its_figures_over_tls(stack: Stack) -> None:
    for service in SERVICES:
        said = stack.inside(stack.containers(service)[0], READ_METRICS)
        assert "rollpacker_rpc_calls_total" in said.stdout, said.stderr
        if service != "coordinator":
            assert f"rollpacker_{service}_" in said.stdout.replace("_engine_", "_rollout_")


def test_only_reward_may_make_the_namespaces_of_a_sandbox(stack: Stack) -> None:
    code = "import subprocess; subprocess.run(['unshare', '--user', '--mount', 'true'], check=True)"
    made = {s: stack.inside(stack.containers(s)[0], code).returncode == 0 for s in SERVICES}
    assert [service for service, allowed in made.items() if allowed] == ["reward"]


def test_reward_is_alone_with_the_coordinator_on_an_internal_network(stack: Stack) -> None:
    """That an internal network has no way out is the engine's part, by its firewall."""
    reward = stack.containers("reward")[0]
    (network,) = json.loads(stack.inspect(reward, "json .NetworkSettings.Networks"))
    assert network.endswith("_grading")
    assert run("docker", "network", "inspect", "-f", "{{.Internal}}", network) == "true\n"
    reach = "import socket; socket.create_connection(('{}', {}), 30)"
    assert stack.inside(reward, reach.format("coordinator", 7777)).returncode == 0
    for name, port in (("redis", 6379), ("trainer", 7303), ("rollout", 7301)):
        assert "gaierror" in stack.inside(reward, reach.format(name, port)).stderr


SCORE_PROGRAMS = """
import asyncio, json
from rollpacker.rpc.client import open_channel
from rollpacker.v1 import reward_service_pb2 as pb, reward_service_pb2_grpc as pb_grpc, types_pb2

PROGRAMS = [
    "print(2 * int(input()))",
    "print(5)",
    "print(open('/run/rollpacker/token') and 4)",
    "import socket; print(socket.create_connection(('coordinator', 7777), 5) and 4)",
]

async def main():
    async with open_channel("127.0.0.1:7302") as channel:
        stub = pb_grpc.RewardServiceStub(channel)
        for program in PROGRAMS:
            answer = await stub.ScoreResponse(pb.ScoreResponseRequest(
                run_id="job", response_id="job:0:1:0", response_text=f"```python\\n{program}\\n```",
                grader_kind=types_pb2.GRADER_KIND_CODE,
                reference_json=json.dumps({"tests": [["2\\n", "4\\n"]]}),
            ), timeout=100)
            print(types_pb2.Verdict.Name(answer.verdict))

asyncio.run(main())
"""


def test_reward_runs_programs_of_a_model_in_its_sandbox(stack: Stack) -> None:
    """In the container as it is shipped: no capabilities, no new privileges, its seccomp profile.

    Right, wrong, one that wants the service's token and one that wants the network.
    """
    said = stack.inside(stack.containers("reward")[0], SCORE_PROGRAMS)
    assert said.stdout.split() == [
        "VERDICT_CORRECT", "VERDICT_INCORRECT", "VERDICT_CRASHED", "VERDICT_CRASHED"
    ], said.stderr  # fmt: skip


def test_a_viewer_from_the_host_cannot_start_a_run(stack: Stack) -> None:
    refused = stack.cli("viewer", "submit", str(stack.data / "job.yaml"), "--run-id", "job")
    assert refused.returncode != 0
    assert "role operator" in refused.stderr + refused.stdout


def test_a_run_survives_scaling_crashes_and_a_restart_with_an_exact_trained_set(
    stack: Stack,
) -> None:
    overrides = (
        f"tail_batching.prompts_per_step={PROMPTS_PER_STEP}",
        "tail_batching.responses_per_prompt=4",
        "sampling.max_response_tokens=256",
        "validation.prompts=1",
    )
    job = str(stack.data / "job.yaml")
    started = stack.cli("operator", "submit", job, "--run-id", "job", *overrides)
    assert started.returncode == 0, started.stderr
    until(lambda: stack.steps() >= 1, "the first step is committed")
    stack.up(rollout=3, reward=2)
    until(lambda: stack.workers("rollout") == 3 and stack.workers("reward") == 2, "all joined")
    for service in ("rollout", "reward", "trainer", "coordinator", "redis"):
        done = stack.steps()
        assert done < STEPS, "the run ended before everything had been killed"
        stack.crash(service)
        until(lambda done=done: stack.steps() > done, f"a step after the crash of {service}")
    stack.compose("restart", "--timeout", "20")
    stack.up(rollout=1, reward=1)
    until(lambda: ended(stack), "the run has ended")
    (job_run,) = stack.asked("status")
    assert job_run["state"] == "STATE_SUCCEEDED", job_run
    steps = stack.asked("steps", "job", "--limit", "0")
    trained = [draw["prompt_id"] for step in steps for draw in step["draws"]]  # type: ignore[attr-defined]
    assert len(steps) == STEPS
    assert len(trained) == len(set(trained)) == PROMPTS_PER_STEP * STEPS


def test_a_run_is_started_from_the_host_with_grpcurl_as_the_guide_says(stack: Stack) -> None:
    secrets = stack.secrets / "operator"
    identity = ["-cacert", secrets / "ca.crt", "-cert", secrets / "tls.crt"]
    identity += ["-key", secrets / "tls.key", "-H"]
    identity += [f"authorization: Bearer {(secrets / 'token').read_text().strip()}"]
    settings = {
        "model": str(stack.data / "model"),
        "data": {"path": str(stack.data / "train.jsonl")},
        "max_steps": 1,
        "reward": {"grader": "math"},
        "tail_batching": {"prompts_per_step": 2, "responses_per_prompt": 2},
        "sampling": {"max_response_tokens": 64},
    }

    def asked(method: str, **request: object) -> dict[str, Any]:
        grpcurl = Path(sys.executable).with_name("grpcurl")
        name = f"rollpacker.v1.CoordinatorService/{method}"
        said = run(grpcurl, *identity, "-d", json.dumps(request), f"localhost:{PORT}", name)
        answer: dict[str, Any] = json.loads(said)
        return answer

    asked("StartRun", run_id="curled", settings=settings)
    until(
        lambda: asked("GetRun", run_id="curled")["run"]["state"] == "STATE_SUCCEEDED",
        "the run of grpcurl has succeeded",
    )
    assert asked("ListRuns")["runs"]


def test_prometheus_sees_every_service_and_can_ask_every_rule(stack: Stack) -> None:
    def up() -> set[str]:
        found = stack.prometheus("query", query="up == 1")["result"]
        return {series["metric"]["service"] for series in found}

    until(lambda: up() == set(SERVICES), "all services are up for Prometheus")
    groups = stack.prometheus("rules")["groups"]
    health = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
    assert len(health) == 6
    assert set(health.values()) <= {"ok", "unknown"}, health  # unknown: not asked yet


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_of_a_dashboard_has_shown_something(stack: Stack, path: Path) -> None:
    """Over the hours of the test: a series that is there now may be gone with its container."""
    empty = []
    for panel in json.loads(path.read_text())["panels"]:
        shown = 0
        for target in panel["targets"]:
            query = target["expr"].replace("$run", "job")
            now = int(time.time())
            found = stack.prometheus(
                "query_range", query=query, start=str(now - 7200), end=str(now), step="5"
            )
            shown += len(found["result"])
        if not shown:
            empty.append(panel["title"])
    assert not empty


def test_the_run_is_backed_up_and_restored_by_one_command(stack: Stack) -> None:
    stack.backups.mkdir()
    stack.backups.chmod(0o777)
    tools = ("run", "--rm", "--no-deps", "tools")
    said = stack.compose(*tools, "backup", "job", "/backups/job.tar")
    assert f"succeeded at step {STEPS}" in said
    before = stack.asked("steps", "job", "--limit", "0")
    stack.compose(*tools, "restore", "/backups/job.tar", "--replace")
    assert stack.asked("steps", "job", "--limit", "0") == before


def ended(stack: Stack) -> bool:
    runs = stack.asked("status")
    return bool(runs) and runs[0]["state"] not in ("STATE_RUNNING", "STATE_STOPPING")
