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

from rollpacker.cli.main import app
from rollpacker.cli.runs import default_run_id, resolved_yaml
from rollpacker.settings import load_run_settings, parse_run_settings


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


def test_check_tells_the_arithmetic_and_shows_the_first_prompt(config: Path) -> None:
    status, out, err = invoke("check", config)
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
    ):
        assert fact in out


def test_check_refuses_a_cap_beyond_the_models_context(config: Path) -> None:
    status, _, err = invoke("check", config, "sampling.max_response_tokens=62")
    assert status == 2
    assert err.startswith("error: sampling.max_response_tokens: 62, and the longest prompt of 3")
    assert "at most 61 fit" in err


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
    status, _, err = invoke("check", config)
    assert status == 2
    assert message in err


def test_check_names_the_row_of_the_data_that_is_wrong(config: Path) -> None:
    with (config.parent / "data.jsonl").open("a") as file:
        file.write('\n{"prompt": ""}')
    status, _, err = invoke("check", config)
    assert status == 2
    assert "row 11" in err


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
