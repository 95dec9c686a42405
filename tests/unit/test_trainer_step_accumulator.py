"""Gradient sums of a step, and the one division, against float64 sums over single responses."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from benchmarks.trainer_reference import reference_gradients, with_shifted_logprobs
from rollpacker.algorithms import ALGORITHMS
from rollpacker.types import ASSISTANT, Segment
from services.trainer.model import PolicyModel
from services.trainer.packing import StreamPacker
from services.trainer.ranks import Ranks
from services.trainer.step_accumulator import StepAccumulator
from services.trainer.update import apply_update, make_optimizer
from tests.trainer_support import make_group, make_model, make_response, trainer_settings, weighed


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


class Step:
    """A model and its sums, filled from groups as the service does it."""

    def __init__(self, directory, temperature=1.0, *, initial=None, **changes):
        self.settings = trainer_settings(**changes)
        self.model = PolicyModel(
            directory,
            self.settings.dtype,
            torch.device("cpu"),
            None,
            activation_checkpointing=self.settings.activation_checkpointing,
        )
        self.optimizer = make_optimizer(self.model, self.settings)
        reference = None
        if self.settings.kl_coefficient:
            reference = PolicyModel(initial or directory, "float32", torch.device("cpu"), None)
        self.accumulator = StepAccumulator(
            self.model, self.settings, temperature, Ranks(), reference
        )

    def fill(self, groups):
        packer = StreamPacker(1, self.settings.micro_batch_tokens)
        windows = [window for group in groups if (window := packer.add(group))]
        for (window,) in [*windows, *packer.flush()]:
            for batch in window.micro_batches:
                self.accumulator.add(batch)
        return self

    def gradient(self):
        return torch.cat([g.flatten() for g in self.accumulator.gradients()]).clone()

    def sums_of(self, groups):
        """(sums by name, gradient) of groups, which leave no trace."""
        self.fill(groups)
        sums, gradient = dataclasses.asdict(self.accumulator.sums()), self.gradient()
        self.accumulator.drop()
        return sums, gradient

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone()

    def update(self):
        return apply_update(self.model, self.optimizer, self.accumulator, self.settings, Ranks())

    def applied_gradient(self, groups):
        """The gradient of a step as the optimizer is given it."""
        seen = []
        hook = self.optimizer.register_step_pre_hook(lambda *_: seen.append(self.gradient()))
        self.fill(groups).update()
        hook.remove()
        return seen[0]


def reference_gradient(directory, groups, temperature=1.0):
    """d/dw of -sum(A log p) over trained tokens, one response at a time, in float64."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    for group in groups:
        for scored in group.responses:
            response, start = scored.response, len(group.prompt_token_ids)
            trained = [s.trainable for s in response.segments for _ in range(s.token_count)]
            if not any(trained):
                continue
            ids = torch.tensor([group.prompt_token_ids + response.token_ids])
            logprobs = torch.log_softmax(model(ids).logits[0] / temperature, dim=-1)
            total = sum(
                logprobs[start + i - 1, token]
                for i, token in enumerate(response.token_ids)
                if trained[i]
            )
            (-scored.advantage * total).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_close(actual, expected, tolerance=1e-5):
    error = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance * expected.abs().max()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("micro_batch_tokens", [1, 96, 100_000])
def test_gradient_sums_are_those_of_single_responses(
    model_directory, micro_batch_tokens, temperature
):
    groups = [make_group(i, lengths=(0, 20)) for i in range(11)]
    step = Step(model_directory, temperature, micro_batch_tokens=micro_batch_tokens).fill(groups)
    assert_close(step.gradient(), reference_gradient(model_directory, groups, temperature))


def test_tokens_of_tools_have_no_gradient(model_directory):
    segments = (Segment(ASSISTANT, 2, True), Segment("tool", 3, False), Segment(ASSISTANT, 2, True))
    response = make_response([3, 4, 5, 6, 7, 8, 9], segments=segments, advantage=0.5)
    groups = [dataclasses.replace(make_group(0), responses=(response,))]
    step = Step(model_directory).fill(groups)
    assert_close(step.gradient(), reference_gradient(model_directory, groups))
    assert step.accumulator.sums().trained_tokens == 4


@pytest.mark.parametrize(
    ("changes", "normaliser"),
    [
        ({"normaliser": "response_cap"}, 4 * 4 * 20),
        ({"normaliser": "constant", "normaliser_tokens": 7}, 4 * 4 * 7),
        ({"normaliser": "step_tokens"}, None),
    ],
)
def test_the_sum_is_divided_once_by_the_normaliser(model_directory, changes, normaliser):
    groups = [make_group(i) for i in range(3)]
    tokens = sum(len(s.response.token_ids) for group in groups for s in group.responses)
    gradient = Step(model_directory, **changes, max_grad_norm=1e9).applied_gradient(groups)
    expected = reference_gradient(model_directory, groups) / (normaliser or tokens)
    assert_close(gradient, expected)


def algorithm_changes(algorithm, **changes):
    if algorithm == "reinforce_plus_plus":
        changes["advantage_deviation"] = 0.3
    return {"algorithm": algorithm, **changes}


VARIANTS = [
    *(algorithm_changes(name, old_logprobs="rollout") for name in ALGORITHMS),
    algorithm_changes("grpo", normaliser="constant", normaliser_tokens=9),
    algorithm_changes("dapo", rollout_correction="truncated", rollout_correction_cap=1.2),
    algorithm_changes("gspo", rollout_correction="masked", rollout_correction_cap=1.2),
    *(algorithm_changes("dapo", kl_coefficient=0.3, kl_estimator=k) for k in ("k1", "k2", "k3")),
    algorithm_changes("grpo", kl_coefficient=0.2, entropy_coefficient=0.1),
]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda c: "-".join(map(str, c.values())))
class TestEveryLoss:
    """Clipping on both sides: a quarter of the ratios is e^0.5, a quarter e^-0.5. The groups
    have different selection weights."""

    def groups(self, directory, changes, count):
        groups = weighed([make_group(i, lengths=(0, 20)) for i in range(count)])
        return with_shifted_logprobs(directory, changes["algorithm"], 0.7, groups)

    def test_its_gradient_is_that_of_its_formula_over_single_responses(
        self, model_directory, changes
    ):
        groups = self.groups(model_directory, changes, 11)
        step = Step(model_directory, 0.7, **changes).fill(groups)
        expected = reference_gradients(model_directory, step.settings, 0.7, groups)
        assert_close(step.gradient(), torch.cat([g.flatten() for g in expected.values()]))

    def test_the_gradients_of_an_epoch_sum_to_the_same_whatever_groups_share_a_step(
        self, model_directory, changes
    ):
        groups = self.groups(model_directory, changes, 12)
        by_length = sorted(groups, key=lambda group: group.race_key)
        frozen = {"learning_rate": 0, "weight_decay": 0, "max_grad_norm": 1e9}
        step = Step(model_directory, 0.7, **frozen, **changes)
        before = step.weights()
        in_order = sum(step.applied_gradient(groups[i : i + 4]) for i in (0, 4, 8))
        resorted = sum(
            step.applied_gradient(part)
            for part in (by_length[:4], by_length[4:5], by_length[5:11], by_length[11:])
        )
        assert_close(resorted, in_order)
        assert torch.equal(step.weights(), before)


def with_weight(group, weight):
    return dataclasses.replace(group, selection_weight=weight)


@pytest.fixture(
    scope="module",
    params=[
        {"algorithm": "dapo"},
        {
            "algorithm": "grpo",
            "rollout_correction": "truncated",
            "kl_coefficient": 0.3,
            "entropy_coefficient": 0.1,
        },
    ],
    ids=["one_term", "all_terms"],
)
def step(request, model_directory, tmp_path_factory):
    initial = make_model(tmp_path_factory.mktemp("initial"), seed=9)
    return Step(model_directory, initial=initial, **request.param)


class TestSelectionWeight:
    """How much a group counts in the loss: all of its terms, and nothing beside the loss."""

    @given(weight=st.floats(0, 10))
    @settings(max_examples=15)
    def test_a_gradient_is_the_groups_own_times_its_weight(self, step, weight):
        chosen, *others = [make_group(i) for i in range(5)]
        own, rest = (step.sums_of(part)[1] for part in ([chosen], others))
        _, gradient = step.sums_of([with_weight(chosen, weight), *others])
        assert_close(gradient, weight * own + rest)

    def test_it_multiplies_the_loss_and_leaves_what_describes_the_tokens(self, step):
        groups = [make_group(i) for i in range(5)]
        plain, gradient = step.sums_of(groups)
        four, four_times = step.sums_of([with_weight(group, 4.0) for group in groups])
        assert torch.equal(four_times, 4 * gradient)
        weighed_sums = {"loss", "weighed_tokens"}
        assert {name for name in plain if four[name] != plain[name]} == weighed_sums
        assert all(four[name] == pytest.approx(4 * plain[name]) for name in weighed_sums)

    @pytest.mark.parametrize("term", ["kl_coefficient", "entropy_coefficient"])
    def test_terms_without_an_advantage_are_weighed_too(self, model_directory, tmp_path, term):
        moved = make_model(tmp_path / "moved", seed=9)
        responses = (make_response([3, 4, 5], advantage=0.0),)
        silent = dataclasses.replace(make_group(0), responses=responses)
        gradients = [
            Step(moved, initial=model_directory, **{term: 0.5})
            .fill([with_weight(silent, weight)])
            .gradient()
            for weight in (1.0, 4.0)
        ]
        assert gradients[0].abs().max() > 0
        assert torch.equal(gradients[1], 4 * gradients[0])

    @pytest.mark.parametrize("normaliser", ["response_mean", "response_cap", "step_tokens"])
    def test_a_weight_of_0_leaves_the_group_out(self, model_directory, normaliser):
        groups = [make_group(i) for i in range(5)]
        one, other = (Step(model_directory, normaliser=normaliser) for _ in range(2))
        outcome = one.fill([*groups[:2], with_weight(groups[2], 0.0), *groups[3:]]).update()
        assert outcome == other.fill([*groups[:2], *groups[3:]]).update()
        assert torch.equal(one.weights(), other.weights())

    def test_a_step_of_weights_of_0_moves_nothing(self, model_directory):
        step = Step(model_directory, learning_rate=0.1, weight_decay=0.5, normaliser="step_tokens")
        step.fill([make_group(0)]).update()
        before = step.weights()
        outcome = step.fill([with_weight(make_group(1), 0.0)]).update()
        assert torch.equal(step.weights(), before)
        assert (outcome.grad_norm, outcome.skipped, outcome.sums.trained_tokens) == (0.0, False, 0)

    def test_step_tokens_divides_by_tokens_that_are_weighed_as_the_loss_is(self, model_directory):
        """A weight of 2 is the same group twice."""
        step = Step(model_directory, normaliser="step_tokens", max_grad_norm=1e9, learning_rate=0)
        first, second = make_group(0), make_group(1)
        twice = step.applied_gradient([first, first, second])
        assert_close(step.applied_gradient([with_weight(first, 2.0), second]), twice)
        assert (step.applied_gradient([first, second]) - twice).abs().max() > 1e-3


def test_the_divergence_pulls_a_policy_that_has_moved_back_to_the_initial_model(
    model_directory, tmp_path
):
    moved = make_model(tmp_path / "moved", seed=9)
    silent = [
        dataclasses.replace(
            make_group(0, lengths=(20, 20)),
            responses=tuple(make_response(range(1, 16), advantage=0.0) for _ in range(2)),
        )
    ]
    step = Step(
        moved, initial=model_directory, kl_coefficient=1.0, learning_rate=0.01, max_grad_norm=1e9
    )
    divergences = [step.fill(silent).update().sums.reference_kl for _ in range(4)]
    assert divergences == sorted(divergences, reverse=True)
    assert 0 < divergences[-1] < 0.9 * divergences[0]


def test_step_tokens_depends_on_which_groups_share_a_step(model_directory):
    groups = sorted((make_group(i) for i in range(12)), key=lambda group: group.race_key)
    step = Step(model_directory, learning_rate=0, max_grad_norm=1e9, normaliser="step_tokens")
    mixed = sum(step.applied_gradient(groups[i::3]) for i in range(3))
    sorted_by_length = sum(step.applied_gradient(groups[i : i + 4]) for i in (0, 4, 8))
    assert (mixed - sorted_by_length).abs().max() > 1e-3 * mixed.abs().max()


def test_the_same_groups_in_the_same_order_give_the_same_bits(model_directory):
    groups = [make_group(i) for i in range(19)]
    first, again = Step(model_directory).fill(groups), Step(model_directory).fill(groups)
    assert torch.equal(first.gradient(), again.gradient())
    assert first.update() == again.update()
    assert torch.equal(first.weights(), again.weights())


def test_dropped_sums_leave_no_trace(model_directory):
    groups = [make_group(i) for i in range(5)]
    step = Step(model_directory).fill([make_group(99)])
    step.accumulator.drop()
    step.fill(groups)
    fresh = Step(model_directory).fill(groups)
    assert torch.equal(step.gradient(), fresh.gradient())
    assert step.accumulator.sums() == fresh.accumulator.sums()


def test_a_group_without_advantages_counts_as_trained_and_adds_nothing(model_directory):
    equal = dataclasses.replace(
        make_group(1), responses=tuple(make_response([2, 3], advantage=0.0) for _ in range(4))
    )
    unrewarded = dataclasses.replace(
        make_group(2), responses=(make_response([4, 5, 6], reward=None, advantage=2.0),)
    )
    step = Step(model_directory).fill([equal, unrewarded])
    assert step.gradient().abs().max() == 0.0
    assert step.accumulator.sums().trained_tokens == 11


@pytest.mark.parametrize("normaliser", ["response_cap", "step_tokens"])
def test_a_step_of_empty_responses_gives_zero_never_nan(model_directory, normaliser):
    empty = dataclasses.replace(make_group(0), responses=(make_response([]), make_response([])))
    step = Step(model_directory, normaliser=normaliser)
    before = step.weights()
    outcome = step.fill([empty]).update()
    assert (outcome.grad_norm, outcome.skipped, outcome.sums.loss) == (0.0, False, 0.0)
    assert torch.equal(step.weights(), before)


def test_a_step_without_groups_is_a_step_of_zeros(model_directory):
    step = Step(model_directory)
    before = step.weights()
    assert step.fill([]).update().grad_norm == 0.0
    assert torch.equal(step.weights(), before)


def test_a_step_without_groups_moves_no_weight_though_the_optimizer_has_momentum(model_directory):
    step = Step(model_directory, learning_rate=0.1, weight_decay=0.5)
    step.fill([make_group(0)]).update()
    before = step.weights()
    outcome = step.update()
    assert torch.equal(step.weights(), before)
    assert (outcome.grad_norm, outcome.skipped) == (0.0, False)


def test_the_update_is_clipped_to_the_norm_that_it_reports(model_directory):
    groups = [make_group(i) for i in range(4)]
    free = Step(model_directory, max_grad_norm=1e9).applied_gradient(groups)
    tight = Step(model_directory, max_grad_norm=0.01).applied_gradient(groups)
    outcome = Step(model_directory, max_grad_norm=0.01).fill(groups).update()
    assert outcome.grad_norm == pytest.approx(free.norm().item(), rel=1e-5)
    assert tight.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert_close(tight / tight.norm(), free / free.norm())


def test_a_gradient_that_is_not_finite_moves_no_weight_and_no_moment(model_directory):
    broken = dataclasses.replace(
        make_group(0), responses=(make_response([2, 3], advantage=math.inf),)
    )
    step = Step(model_directory)
    step.fill([make_group(1)]).update()
    weights = step.weights()
    moments = [state["exp_avg"].clone() for state in step.optimizer.state.values()]
    outcome = step.fill([broken, make_group(2)]).update()
    assert outcome.skipped
    assert not math.isfinite(outcome.grad_norm)
    assert torch.equal(step.weights(), weights)
    for before, now in zip(moments, step.optimizer.state.values(), strict=True):
        assert torch.equal(before, now["exp_avg"])
    assert not step.fill([make_group(2)]).update().skipped


def test_an_engine_with_the_trainers_own_logprobs_has_no_mismatch(model_directory):
    prompt, token_ids = make_group(0).prompt_token_ids, [3, 4, 5]
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0] / 0.7
    places = [len(prompt) - 1 + i for i in range(3)]
    exact = torch.log_softmax(logits, -1)[places, token_ids].tolist()
    shifted = [exact[0] - 0.5, exact[1], exact[2]]
    sums = {}
    for name, logprobs in {"exact": exact, "shifted": shifted}.items():
        response = make_response(token_ids, logprobs=logprobs)
        group = dataclasses.replace(make_group(0), responses=(response,))
        sums[name] = Step(model_directory, 0.7).fill([group]).accumulator.sums()
    assert sums["exact"].mismatch_kl == pytest.approx(0, abs=1e-9)
    assert sums["exact"].mismatch_ratio_max == pytest.approx(1, abs=1e-5)
    assert sums["shifted"].mismatch_kl == pytest.approx(math.exp(0.5) - 1.5, rel=1e-4)
    assert sums["shifted"].mismatch_ratio_max == pytest.approx(math.exp(0.5), rel=1e-4)


def test_float64_gradients_agree_with_the_reference_to_rounding(model_directory):
    groups = [make_group(i) for i in range(4)]
    step = Step(model_directory, dtype="float64").fill(groups)
    assert_close(step.gradient(), reference_gradient(model_directory, groups), 1e-6)


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(model_directory):
    groups = [make_group(i) for i in range(8)]
    step = Step(model_directory, dtype="bfloat16").fill(groups)
    gradient, expected = step.gradient(), reference_gradient(model_directory, groups)
    assert gradient.dtype == torch.float32
    assert torch.cosine_similarity(gradient.double(), expected, dim=0) > 0.99
    assert (gradient.double() - expected).abs().max() > 1e-4 * expected.abs().max()


def test_activation_checkpointing_saves_activations_and_changes_no_gradient(model_directory):
    groups = [make_group(i) for i in range(4)]
    kept, gradients = [], []
    for again in (False, True):
        step = Step(model_directory, activation_checkpointing=again)
        saved = []

        def note(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            gradients.append(step.fill(groups).gradient())
        kept.append(sum(saved))
    assert_close(gradients[1], gradients[0], 1e-6)
    assert kept[1] < 0.5 * kept[0]
