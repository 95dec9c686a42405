"""OpenRun's settings: checked by name, and a hash that two runs share only if they are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.rpc.errors import InvalidArgumentError
from rollpacker.settings import SettingsError, parse_run_settings
from services.trainer.settings import RunSpec, parse_open_run_settings
from tests.trainer_support import trainer_settings

VALID = {"prompts_per_step": 4, "responses_per_prompt": 2, "max_response_tokens": 10}


@pytest.mark.parametrize(
    ("values", "name", "hint"),
    [
        (VALID | {"learnin_rate": 1}, "trainer_settings.learnin_rate", "did you mean `learning_r"),
        ({}, "trainer_settings.prompts_per_step", "is required"),
        (VALID | {"clip_low": -1}, "trainer_settings.clip_low", "got -1"),
        (VALID | {"micro_batch_tokens": 0.5}, "trainer_settings.micro_batch_tokens", "got 0.5"),
    ],
)
def test_a_wrong_setting_is_refused_by_name_with_the_fix(values, name, hint):
    with pytest.raises(InvalidArgumentError) as caught:
        parse_open_run_settings(values)
    problems = dict(caught.value.violations)
    assert hint in problems[name]


def test_numbers_that_became_floats_on_the_wire_are_read_as_whole_numbers():
    settings = parse_open_run_settings({name: float(value) for name, value in VALID.items()})
    assert (settings.prompts_per_step, settings.max_response_tokens) == (4, 10)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 320.0),
        ({"algorithm": "dr_grpo"}, 320.0),
        ({"algorithm": "grpo"}, 16.0),
        ({"algorithm": "rloo"}, 16.0),
        ({"normaliser": "response_mean"}, 16.0),
        ({"normaliser": "response_cap"}, 320.0),
        ({"normaliser": "constant", "normaliser_tokens": 5}, 80.0),
        ({"normaliser": "step_tokens"}, None),
    ],
)
def test_the_fixed_normaliser_counts_planned_responses(changes, expected):
    assert trainer_settings(**changes).fixed_normaliser() == expected


def test_the_hash_changes_with_settings_model_and_temperature_alone():
    base = RunSpec("a", Path("/m"), trainer_settings(), 1.0)
    same = RunSpec("b", Path("/m"), trainer_settings(), 1.0)
    others = [
        RunSpec("a", Path("/n"), trainer_settings(), 1.0),
        RunSpec("a", Path("/m"), trainer_settings(clip_low=0.1), 1.0),
        RunSpec("a", Path("/m"), trainer_settings(prompts_per_step=5), 1.0),
        RunSpec("a", Path("/m"), trainer_settings(), 0.9),
    ]
    assert base.settings_hash() == same.settings_hash()
    assert len({spec.settings_hash() for spec in [base, *others]}) == 5


def run_with(sampling=None, batching=None, **trainer):
    return parse_run_settings(
        {
            "model": "m",
            "data": {"path": "d"},
            "sampling": sampling or {},
            "tail_batching": batching or {},
            "trainer": trainer,
        }
    )


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        ({"algorithm": "gspo", "normaliser": "response_cap"}, "normaliser: response_cap"),
        ({"algorithm": "reinforce_plus_plus"}, "advantage_deviation: None"),
        ({"algorithm": "grpo", "advantage_deviation": 0.5}, "advantage_deviation: 0.5"),
        ({"old_logprobs": "rollout", "rollout_correction": "masked"}, "corrects the same"),
        ({"normaliser": "step_tokens"}, "step_tokens with mode exact"),
        ({"overlong_buffer_tokens": 2000}, "overlong_buffer_tokens: 2000 is above"),
    ],
)
def test_an_algorithm_that_does_not_fit_together_is_refused_with_the_fix(trainer, named):
    with pytest.raises(SettingsError, match=named):
        run_with(**trainer)


@pytest.mark.parametrize(
    "trainer", [{"rollout_correction": "truncated"}, {"old_logprobs": "rollout"}]
)
@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}])
def test_logprobs_of_a_truncated_law_are_refused_as_importance_weights(trainer, sampling):
    with pytest.raises(SettingsError, match="no importance weights"):
        run_with(sampling, {"mode": "synchronous"}, **trainer)
    run_with(sampling, {"mode": "synchronous"})
    run_with(**trainer)
