"""Settings: unique names, strict validation, and errors that state the remedy."""

import math
import pickle
from typing import Any

import pytest
import yaml
from conftest import tiny
from hypothesis import given
from hypothesis import strategies as st

from pipeline.base.errors import InvalidInputError
from pipeline.cli import parse, settings_of
from pipeline.config.entry_points import entry_points
from pipeline.config.experiment import make_experiment
from pipeline.config.given import dotted, merged, nested, setting_names, validate
from pipeline.config.settings import AllSettings
from pipeline.runtime.shape_check import check_shapes

NAMES = st.text("abc", min_size=1, max_size=3)
TREES = st.recursive(
    st.dictionaries(NAMES, st.integers(), min_size=1, max_size=3),
    lambda inner: st.dictionaries(NAMES, st.one_of(st.integers(), inner), min_size=1, max_size=3),
    max_leaves=8,
)


@given(TREES)
def test_dotted_and_nested_are_each_others_inverse(tree: dict[str, Any]) -> None:
    assert nested(dict(dotted(tree))) == tree


@given(TREES, TREES)
def test_merging_keeps_every_change_and_touches_nothing_else(base: dict[str, Any], changes: dict[str, Any]) -> None:
    before = pickle.dumps(base)
    result = dict(dotted(merged(base, changes)))
    assert pickle.dumps(base) == before
    assert dict(dotted(changes)).items() <= result.items()
    for name, value in dotted(base):
        workspaces = any(name == c or name.startswith(c + ".") or c.startswith(name + ".") for c, _ in dotted(changes))
        assert workspaces or result[name] == value


@pytest.mark.parametrize("name", list(setting_names(AllSettings)))
def test_every_setting_has_a_meaning(name: str) -> None:
    kind: Any = AllSettings
    for part in name.split("."):
        field = kind.model_fields[part]
        kind = field.annotation
    assert field.description and len(field.description) > 10


@pytest.mark.parametrize("entry", entry_points())
def test_help_lists_every_setting_with_type_default_and_meaning(
    entry: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        parse(entry, ["--help-all"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in setting_names(settings_of(entry)):
        assert f"--{name} " in shown
    assert "--seed int Seed of the weights, of dropout and of the order of the sequences. (default: 0)" in shown
    assert "--precision {fp32,tf32,fp16,bf16} Number format of the forward and backward pass. (default: fp32)" in shown


def test_of_two_settings_that_say_the_same_the_later_one_counts() -> None:
    file = {"num_steps": 30, "num_epochs": 2, "learning_rate_warmup_steps": 5}
    assert merged(file, {"num_epochs": 3}) == {"num_epochs": 3, "learning_rate_warmup_steps": 5}
    assert merged(file, {"num_steps": 9, "learning_rate_warmup_ratio": 0.1}) == {
        "num_steps": 9,
        "learning_rate_warmup_ratio": 0.1,
    }
    assert nested({"num_steps": 9, "num_epochs": 2}) == {"num_steps": 9, "num_epochs": 2}, (
        "and two that contradict stay"
    )


def test_what_is_not_given_follows_from_what_is() -> None:
    def numbers(**given: Any) -> tuple[int, int]:
        settings: Any = make_experiment({"model": "gpt2-nano", "device": "cpu", **given}, "main").settings
        return settings.micro_batch_size, settings.accumulation_steps

    assert (
        numbers() == (8, 1) and numbers(effective_batch_size=2) == (2, 1) and numbers(effective_batch_size=12) == (6, 2)
    )
    assert numbers(effective_batch_size=12, accumulation_steps=3) == (4, 3)
    short = tiny(num_steps=3).settings
    assert (short.num_steps, short.timing_warmup_steps) == (3, 2)
    whole = tiny(num_epochs=0.01, learning_rate_warmup_ratio=0.25).settings
    num_sequences = len(tiny().prepare().train)
    assert whole.num_steps == math.ceil(0.01 * num_sequences / 8) > 3
    assert whole.learning_rate_warmup_steps == math.ceil(0.25 * whole.num_steps)
    file = yaml.safe_load(tiny(num_epochs=0.01, learning_rate_warmup_ratio=0.25).to_yaml())
    longer = make_experiment(merged(file, {"num_epochs": 0.02}), "main").settings
    assert longer.num_steps > whole.num_steps and longer.learning_rate_warmup_steps > whole.learning_rate_warmup_steps


@pytest.mark.parametrize(
    ("text", "value"), [("False", False), ("false", False), ("0", False), ("True", True), ("true", True), ("1", True)]
)
def test_booleans_are_read_strictly(text: str, value: bool) -> None:
    assert validate(AllSettings, {"gradient_underflow": text}, "main").gradient_underflow is value


def test_text_from_the_command_line_becomes_the_settings_type() -> None:
    given = parse("main", ["--learning_rate", "1e-3", "--max_grad_norm=none", "--causal_lm.num_layers", "3"])
    settings = validate(AllSettings, given, "main")
    assert settings.learning_rate == 0.001
    assert settings.max_grad_norm is None
    assert settings.causal_lm.num_layers == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ({"micro_batch_size": 4}, (4, 1, 4)),
        ({"micro_batch_size": 4, "accumulation_steps": 3}, (4, 3, 12)),
        ({"micro_batch_size": 4, "effective_batch_size": 32}, (4, 8, 32)),
        ({"micro_batch_size": 4, "accumulation_steps": 8, "effective_batch_size": 32}, (4, 8, 32)),
    ],
)
def test_the_third_batch_number_follows_from_the_others(given: dict[str, int], derived: tuple[int, ...]) -> None:
    params = tiny(**given).params()
    assert (params["micro_batch_size"], params["accumulation_steps"], params["effective_batch_size"]) == derived


@given(micro=st.integers(1, 64), effective=st.integers(1, 64))
def test_only_divisors_make_an_effective_batch(micro: int, effective: int) -> None:
    if effective % micro:
        with pytest.raises(InvalidInputError, match=f"{micro} does not divide {effective}; take one of 1"):
            tiny(micro_batch_size=micro, effective_batch_size=effective)
    else:
        params = tiny(micro_batch_size=micro, effective_batch_size=effective).params()
        assert params["micro_batch_size"] * params["accumulation_steps"] == effective


def test_a_config_file_runs_the_same_experiment_again() -> None:
    import yaml

    experiment = tiny(precision="bf16", checkpointing="every_2_layers", sequences="padded", max_grad_norm=None)
    again = make_experiment(yaml.safe_load(experiment.to_yaml()), "main")
    assert again.params() == experiment.params()


def test_params_name_the_chosen_model_and_corpus_alone() -> None:
    names = set(tiny().params())
    assert {"model", "precision", "micro_batch_size", "causal_lm.num_layers", "effective_batch_size"} <= names
    assert not {name for name in names if name.startswith(("encoder_stack", "text_files", "hub"))}


def test_an_experiment_survives_the_way_into_another_process() -> None:
    experiment = tiny(precision="bf16")
    assert pickle.loads(pickle.dumps(experiment)) == experiment


def test_none_is_nothing_where_that_is_allowed_and_a_word_elsewhere() -> None:
    given = parse("main", ["--checkpointing", "none", "--learning_rate_scaling", "none", "--budget", "none"])
    experiment = make_experiment(given, "main")
    assert experiment.params()["checkpointing"] == "none"
    assert experiment.settings.learning_rate_scaling == "none"
    assert experiment.settings.budget is None


def test_what_params_show_can_be_given_on_the_command_line() -> None:
    shown = tiny(precision="bf16", checkpointing="every_2_layers", budget="1GiB").params()
    words = [word for name, value in shown.items() for word in (f"--{name}", "none" if value is None else str(value))]
    assert make_experiment(parse("main", words), "main").params() == shown


@pytest.mark.parametrize("name", ["num_steps", "micro_batch_size", "learning_rate"])
def test_true_is_no_number(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name} must not be true or false, and is True"):
        tiny(**{name: True})


def test_a_shape_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(InvalidInputError, match="gpt2-nano cannot be built in this shape: .*; change its settings"):
        check_shapes([tiny(causal_lm__num_heads=3)])


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_is_what_every_library_takes(seed: int) -> None:
    with pytest.raises(InvalidInputError, match="seed must be"):
        tiny(seed=seed)
