"""docs/api.md as `python -m rollpacker.api_reference` writes it from the comments of the protos.

A test compares the file with this, and carries out the walk-through at its head. Needs `protos/`
and grpcio-tools, so it runs in a checkout.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

_PROTOS = Path(__file__).parents[1] / "protos"
_FILES = ("coordinator_service", "rollout_service", "reward_service", "trainer_service", "types")
_PACKAGE = ".rollpacker.v1."
_MESSAGE, _ENUM, _SERVICE = 4, 5, 6  # field numbers of FileDescriptorProto, for its source paths
_FIELD, _NESTED, _NESTED_ENUM = 2, 3, 4  # of DescriptorProto

HEAD = """# API

Everything that people and tools do with RollPacker goes through `rollpacker.v1.CoordinatorService`.
It speaks gRPC, with reflection and `grpc.health.v1`; so any gRPC tool drives it. From Python there
is `rollpacker.client` (`connect` for asyncio, `Client` else); from a shell, `rollpacker --help`.
Written from the comments of `protos/` by `python -m rollpacker.api_reference > docs/api.md`.

Errors have a status, a message that says what to do, a `google.rpc.ErrorInfo` with the reason that
the comments below name, and for wrong fields a `google.rpc.BadRequest`. Calls that change something
may be repeated: what a repeat does stands at each call. UNAVAILABLE is the only status after which
trying again is right.

With certificates and tokens ([security](security.md)), give grpcurl `-cacert ca.pem -cert me.pem
-key me.key -authority rollpacker-service -H "authorization: Bearer $TOKEN"` for `-plaintext`.

## A whole run with grpcurl

`$COORDINATOR` is host:port. `$SETTINGS` is a JSON object as in a run file
([run settings](run_settings.md)); paths in it are those of the coordinator's host. (`buf curl
--protocol grpc --http2-prior-knowledge` speaks the same reflection.)

```sh
# What is there, and who works.
grpcurl -plaintext "$COORDINATOR" list
grpcurl -plaintext "$COORDINATOR" rollpacker.v1.CoordinatorService/ListWorkers

# Check settings and data; then start, and pause when the step that runs is committed.
grpcurl -plaintext -d '{"run_id": "demo", "settings": '"$SETTINGS"', "validate_only": true}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/StartRun
grpcurl -plaintext -d '{"run_id": "demo", "settings": '"$SETTINGS"'}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/StartRun
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/PauseRun
until grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/GetRun |
  grep -Eq "STATE_(PAUSED|SUCCEEDED|FAILED)"; do sleep 1; done

# While it is paused: what it did, and what waits.
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/ListSteps
grpcurl -plaintext \\
  -d '{"run_id": "demo", "last_step": 1, "max_reward": 0.5, "without_tokens": true}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/ListSamples
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/ListDeferredDraws

# Change it: a learning rate from the next round on, a prompt more, a checkpoint now.
grpcurl -plaintext -d '{"run_id": "demo", "settings": {"trainer": {"learning_rate": 2e-6}}}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/UpdateRun
grpcurl -plaintext \\
  -d '{"run_id": "demo", "rows": [{"prompt_id": "new-1", "prompt": "2+2=", "answer": "4"}]}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/AddPrompts
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/SaveCheckpoint

# On, to pause after the third step if that is to come; then to the end, watching.
grpcurl -plaintext -d '{"run_id": "demo", "until_step": 3}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/ResumeRun
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/ResumeRun
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/WatchRun
grpcurl -plaintext -d '{"run_id": "demo"}' \\
  "$COORDINATOR" rollpacker.v1.CoordinatorService/GetRun
```

A watcher that was cut off goes on with the last `revision` that it saw as `after_revision`: nothing
is missed and nothing comes twice. `StopRun` ends a run early, `PauseRun` lets it wait; a second run
given to `StartRun` with `"queue": true` starts when the first one has ended.
"""


def api_reference(protos: Path = _PROTOS) -> str:
    """The whole document."""
    files = {Path(file.name).stem: file for file in _compiled(protos).file}
    parts = [HEAD]
    for name in _FILES:
        parts += _file(files[name])
    return "\n".join(parts)


def _compiled(protos: Path) -> FileDescriptorSet:
    sources = [str(protos / "rollpacker/v1" / f"{name}.proto") for name in _FILES]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "set.binpb"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(protos)]
        command += ["--include_source_info", f"--descriptor_set_out={out}", *sources]
        subprocess.run(command, check=True)
        return FileDescriptorSet.FromString(out.read_bytes())


def _file(file: FileDescriptorProto) -> Iterator[str]:
    comments = {
        tuple(place.path): place.leading_comments for place in file.source_code_info.location
    }
    for number, service in enumerate(file.service):
        yield f"## {service.name}\n"
        yield _text(comments[_SERVICE, number])
        for index, method in enumerate(service.method):
            stream = "stream of " if method.server_streaming else ""
            yield f"### {service.name}.{method.name}\n"
            yield f"{_linked(method.input_type)} → {stream}{_linked(method.output_type)}\n"
            yield _text(comments[_SERVICE, number, 2, index])
    if not file.service:
        yield "## Shared messages\n"
    for number, message in enumerate(file.message_type):
        yield from _message(message, message.name, (_MESSAGE, number), comments)
    for number, enum in enumerate(file.enum_type):
        yield from _enum(enum, enum.name, (_ENUM, number), comments)


def _message(
    message: DescriptorProto,
    name: str,
    path: tuple[int, ...],
    comments: dict[tuple[int, ...], str],
) -> Iterator[str]:
    if message.options.map_entry:
        return
    yield f"#### {name}\n"
    yield _text(comments[path])
    if message.field:
        yield "| field | type | |\n|---|---|---|"
        maps = {f"{_PACKAGE}{name}.{n.name}": n for n in message.nested_type}
        for index, field in enumerate(message.field):
            what = " ".join(comments[*path, _FIELD, index].split())
            yield f"| `{field.name}` | {_type(field, maps)} | {_escaped(what)} |"
        yield ""
    for index, nested in enumerate(message.nested_type):
        yield from _message(nested, f"{name}.{nested.name}", (*path, _NESTED, index), comments)
    for index, enum in enumerate(message.enum_type):
        yield from _enum(enum, f"{name}.{enum.name}", (*path, _NESTED_ENUM, index), comments)


def _enum(
    enum: EnumDescriptorProto,
    name: str,
    path: tuple[int, ...],
    comments: dict[tuple[int, ...], str],
) -> Iterator[str]:
    yield f"#### {name}\n"
    yield _text(comments[path])
    yield "| value | |\n|---|---|"
    for index, value in enumerate(enum.value):
        what = " ".join(comments[*path, 2, index].split())
        yield f"| `{value.name}` | {_escaped(what)} |"
    yield ""


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    if field.type_name in maps and maps[field.type_name].options.map_entry:
        key, value = maps[field.type_name].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = _linked(field.type_name) if field.type_name else kind
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"{name}, repeated"
    return f"{name}, optional" if field.proto3_optional else name


def _linked(type_name: str) -> str:
    if not type_name.startswith(_PACKAGE):
        return type_name.removeprefix(".")
    name = type_name.removeprefix(_PACKAGE)
    return f"[{name}](#{name.lower().replace('.', '')})"


def _text(comment: str) -> str:
    """A comment as a paragraph; lines that begin with a status or "Repeat" stand alone."""
    lines: list[str] = []
    for line in comment.strip().splitlines():
        word = line.strip().split(" ", 1)[0].rstrip(":.")
        starts = word == "Repeat" or (word.isupper() and len(word) > 4)
        lines.append(f"\n{_escaped(line.strip())}" if starts and lines else _escaped(line.strip()))
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(api_reference(), end="")
