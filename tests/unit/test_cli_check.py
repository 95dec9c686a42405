"""`check` and `submit --dry-run`: what can be said of a run file before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from rollpacker.cli import doctor
from rollpacker.cli.check import machine_findings
from rollpacker.cli.main import app
from rollpacker.cli.runs import default_run_id, resolved_yaml
from rollpacker.cli.service_findings import function_findings
from rollpacker.local_stack.ports import free_port
from rollpacker.settings import load_run_settings, parse_run_settings
from rollpacker.types import GraderKind, Prompt


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A run file with a model directory of 12 parameters and ten prompts."""
    model = tmp_path / "model"
    model.mkdir()
    names = {"architectures": ["TinyForCausalLM"], "max_position_embeddings": 64, "eos_token_id": 1}
    (model / "config.json").write_text(json.dumps(names))
    save_file({"w": numpy.zeros((3, 4), numpy.float32)}, model / "model.safetensors")
    tokenizer = Tokenizer(models.WordLevel({c: n for n, c in enumerate("?.0123456789")}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(model / "tokenizer.json"))
    rows = [{"prompt": str(number) * 3, "answer": number} for number in range(10)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = {
        "model": "model",
        "data": {"path": "data.jsonl"},
        "tail_batching": {"prompts_per_step": 4, "responses_per_prompt": 2},
        "sampling": {"max_response_tokens": 61},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def invoke(*arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output (words joined by one space), standard error."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.stdout.split()), result.stderr


def check(*arguments: object) -> tuple[int, list[dict[str, str]], dict[str, object]]:
    """Exit status, findings, and the whole JSON of `check --only-run --json`."""
    status, out, err = invoke("check", *arguments, "--only-run", "--json")
    assert err == ""
    told = json.loads(out)
    assert told["bad"] == sum(finding["level"] == "bad" for finding in told["findings"])
    assert status == (2 if told["bad"] else 0)
    return status, told["findings"], told


def write_rows(config: Path, rows: list[object], name: str = "data.jsonl") -> None:
    (config.parent / name).write_text("\n".join(map(json.dumps, rows)))


GOOD = {"prompt": "123", "answer": 1}


def test_check_tells_the_arithmetic_and_shows_the_first_prompt(config: Path) -> None:
    status, out, err = invoke("check", config, "--only-run")
    assert (status, err) == (0, "")
    for fact in (
        "mode exact, seed 0",
        "TinyForCausalLM, 12 parameters",
        "10 prompts of 3 to 3 tokens, 1 epochs",
        "4 prompts x 2 responses = 8 responses, at most 488 tokens",
        "level 0 launches 7, keeps 4, defers 3",
        "level 1 launches 8, keeps 4, defers 4",
        "level 2 launches 4, keeps 4, defers none",
        "run 3 steps of 3 that the data allow; the last one has 2 prompts",
        "stop tokens 1",
        "first prompt (1, 3 tokens): 000",
        "note batch 10 prompts x 1 epochs = 2 steps of 4 + 2 in the last one max_steps: 2, or data",
    ):
        assert fact in out


def test_check_reads_a_run_file_in_json_and_tells_the_same_as_json(config: Path) -> None:
    path = config.with_suffix(".json")
    path.write_text(json.dumps(yaml.safe_load(config.read_text())))
    _, _, told = check(path)
    assert told["first_prompt"] == {"prompt_id": "1", "text": "000", "token_ids": [2, 2, 2]}
    assert told["facts"]["level 1"] == "launches 8, keeps 4, defers 4"


def test_check_refuses_a_cap_beyond_the_models_context(config: Path) -> None:
    status, findings, _ = check(config, "sampling.max_response_tokens=62")
    assert status == 2
    (bad,) = [finding for finding in findings if finding["level"] == "bad"]
    assert bad["what"] == (
        "sampling.max_response_tokens 62 + the longest prompt 3 = 65 tokens, above the model's"
        " context of 64"
    )
    assert bad["fix"] == "at most 61 fit"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: (model / "model.safetensors").unlink(), "holds no *.safetensors file"),
        (lambda model: (model / "config.json").unlink(), "cannot be read"),
        (
            lambda model: (model / "model.safetensors").write_bytes(
                (model / "model.safetensors").read_bytes()[:-1]
            ),
            "its header says",
        ),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json"),
    ],
)
def test_check_refuses_a_model_directory_that_is_not_whole(
    config: Path, damage: object, message: str
) -> None:
    damage(config.parent / "model")  # type: ignore[operator]
    status, findings, _ = check(config)
    assert status == 2
    assert message in findings[0]["what"]


@pytest.mark.parametrize(
    ("row", "finding"),
    [
        ({"prompt": ""}, ("rows 2, 4, prompt: must be text (not empty) or a list", "")),
        (
            {"prompt": "1", "answer": None},
            ("rows 2, 4, answer: is null", "grader math needs the reference answer: text or a"),
        ),
        ({"prompt": "1"}, ("rows 2, 4, answer: is missing (columns: prompt)", "grader math")),
        (
            {"prompt": "1" * 9, "answer": 1},
            (
                "over-long, refused: rows 2, 4; the first has 9 tokens, more than data.max",
                "shorten",
            ),
        ),
        (
            GOOD | {"prompt_id": "1"},
            ("rows 2, 4, prompt_id: '1' is also the id of row 1", "give each row its own"),
        ),
    ],
)
def test_check_tells_all_wrong_rows_with_column_expected_form_and_fix(
    config: Path, row: dict[str, object], finding: tuple[str, str]
) -> None:
    write_rows(config, [GOOD, row, GOOD, row, GOOD, GOOD])
    status, findings, _ = check(config, "data.max_prompt_tokens=8")
    (bad,) = [finding for finding in findings if finding["level"] == "bad"]
    assert bad["what"].startswith(finding[0])
    assert bad["fix"].startswith(finding[1])
    assert status == 2


def test_check_counts_the_rows_that_it_does_not_name(config: Path) -> None:
    write_rows(config, [{"prompt": "1"}] * 9)
    _, findings, _ = check(config)
    assert "rows 1, 2, 3, 4, 5 and 4 more, answer" in findings[0]["what"]


def test_check_notes_prompts_that_are_left_out_repeated_or_leaked(config: Path) -> None:
    write_rows(
        config,
        [GOOD, GOOD, *[{"prompt": c, "answer": 1} for c in "4567"], GOOD | {"prompt": "1" * 9}],
    )
    write_rows(config, [GOOD, {"prompt": "8", "answer": 8}], "held.jsonl")
    held = f"data.validation_path={config.parent / 'held.jsonl'}"
    status, findings, told = check(
        config, held, "data.max_prompt_tokens=8", "data.overlong_prompts=skip"
    )
    assert status == 0
    said = {(f["subject"], f["what"]) for f in findings if f["level"] == "note"}
    assert ("data", "1 prompts are the same text as another one") in said
    assert ("held-out held_out", "1 of 2 prompts are in the training data too") in said
    assert any(what.startswith("over-long, left out: row 7") for _, what in said)
    assert told["facts"]["data"].startswith("6 prompts")


@pytest.mark.parametrize(
    ("override", "subject", "what"),
    [
        (
            "tail_batching.prompts_per_step=11",
            "batch",
            "10 prompts x 1 epochs = 10 draws, fewer than prompts_per_step 11",
        ),
        (
            "tail_batching.responses_per_prompt=1",
            "batch",
            "1 response per prompt: reward - mean of the group = 0, so nothing is learned",
        ),
        ("sampling.stop_token_ids=[12]", "stop tokens", "12 is no token id of the model, which"),
        ("data.apply_chat_template=true", "chat template", "has none, and data.apply_chat_templ"),
    ],
)
def test_check_finds_arithmetic_and_tokens_that_do_not_fit(
    config: Path, override: str, subject: str, what: str
) -> None:
    status, findings, _ = check(config, override)
    assert status == 2
    assert [f["subject"] for f in findings if f["level"] == "bad" and what in f["what"]] == [
        subject
    ]


def test_check_finds_a_tokenizer_that_is_larger_than_the_model(config: Path) -> None:
    path = config.parent / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 8}))
    _, findings, _ = check(config)
    assert "has 12 token ids, the model only 8" in findings[0]["what"]


def test_check_shows_the_share_of_each_domain_of_a_mix(config: Path) -> None:
    run = yaml.safe_load(config.read_text())
    write_rows(config, [GOOD] * 2, "small.jsonl")
    run["data"] = {
        "sources": [
            {"name": "large", "path": "data.jsonl", "weight": 1},
            {"name": "small", "path": "small.jsonl", "weight": 1},
        ]
    }
    config.write_text(yaml.safe_dump(run))
    _, _, told = check(config)
    assert told["facts"]["domain small"] == "2 prompts, 50.0% of the draws, 3 passes"
    assert told["facts"]["domain large"] == "10 prompts, 50.0% of the draws, 0.6 passes"


def test_a_coordinator_that_was_named_and_is_away_is_bad_and_else_a_note(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollpacker.cli.check.machine_findings", lambda runs, served: [])
    address = f"127.0.0.1:{free_port()}"
    status, out, _ = invoke("check", config, "--coordinator", address)
    assert status == 1
    assert f"bad coordinator none answers at {address}" in out
    monkeypatch.setattr("rollpacker.cli.service_findings.DEFAULT_ADDRESS", address)
    status, out, _ = invoke("check", config, "--coordinator", address)
    assert status == 0
    assert f"note coordinator none answers at {address}" in out


@pytest.mark.parametrize(
    ("source", "level", "what"),
    [
        ("def score(**values): return 1", "ok", "reward.py:score can be imported"),
        ("import no_such_package", "bad", "No module named 'no_such_package'"),
        ("def other(): ...", "bad", "score is no function of it"),
        (None, "bad", "there is no file"),
    ],
)
def test_without_a_reward_service_a_function_is_imported_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, level: str, what: str
) -> None:
    monkeypatch.setenv("ROLLPACKER_REWARD_CUSTOM_DIRECTORY", str(tmp_path))
    if source is not None:
        (tmp_path / "reward.py").write_text(source)
    reference = json.dumps({"function": "reward.py:score", "style": "verl"})
    prompt = Prompt("1", (1,), "a", GraderKind.CUSTOM, reference)
    (finding,) = function_findings([prompt])
    assert finding.level == level
    assert what in finding.what


def test_a_taken_port_is_no_trouble_where_the_coordinator_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = doctor.Facts(
        port_taken=True, shared_memory=1 << 20, open_files=65536, free_disk=1 << 40
    )
    monkeypatch.setattr(doctor, "gather", lambda directory: facts)
    taken = {finding.subject for finding in machine_findings(tmp_path, served=False)}
    assert taken == {"port", "/dev/shm"}
    assert {f.subject for f in machine_findings(tmp_path, served=True)} == {"/dev/shm"}


def test_an_unknown_key_names_the_nearest_valid_one(config: Path) -> None:
    status, _, err = invoke("check", config, "trainer.learning_rat=1")
    assert status == 2
    expected = "error: trainer.learning_rat: unknown setting; did you mean `learning_rate`?"
    assert err.splitlines()[0] == expected


def test_a_dry_run_prints_settings_that_resolve_to_themselves(config: Path) -> None:
    result = CliRunner().invoke(app, ["submit", str(config), "seed=7", "--dry-run"])
    assert result.exit_code == 0
    printed = yaml.safe_load(result.stdout)
    assert printed["seed"] == 7
    assert printed["tail_batching"]["speculation_factors"] == [1.75, 2.0]
    assert printed["data"]["path"] == str(config.parent / "data.jsonl")
    assert yaml.safe_load(resolved_yaml(parse_run_settings(printed))) == printed


@pytest.mark.parametrize("mode", ["synchronous", "overlap", "paper", "exact"])
def test_resolved_settings_of_every_mode_are_valid(config: Path, mode: str) -> None:
    settings = load_run_settings(config, [f"tail_batching.mode={mode}"])
    again = parse_run_settings(yaml.safe_load(resolved_yaml(settings)))
    assert resolved_yaml(again) == resolved_yaml(settings)


@pytest.mark.parametrize(
    ("path", "run_id"),
    [("demo/gcd/run.yaml", "gcd"), ("My Run.yaml", "my-run"), ("a" * 80 + ".yaml", "a" * 64)],
)
def test_a_run_is_named_after_its_file(path: str, run_id: str) -> None:
    assert default_run_id(Path(path)) == run_id
