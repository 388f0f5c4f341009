"""The space of all levers: which configurations are in it and why others are not, and reports of thousands of them."""

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import TINY

import fitproof
from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.technique import Mathematics
from pipeline.config.configurations import Configurations, why_refused
from pipeline.config.entry_points import yaml_file
from pipeline.config.experiment import make_experiment
from pipeline.config.given import merged, nested
from pipeline.config.settings import default_values
from pipeline.config.space import NUM_REASONS, Choice, Refusals, Space, SpaceSettings, make_space, sentences
from pipeline.config.variants import read_yaml
from pipeline.memory.device import hardware_of
from pipeline.planning.plan import CardPlan, PlanFindings, PlannedRow
from pipeline.prediction.cards import find_hardware
from pipeline.report.page import to_html
from pipeline.report.plan import plan_report
from pipeline.searching.experiment_problem import make_experiment_problem
from pipeline.searching.trials import columns, label

CPU = hardware_of(torch.device("cpu"))
LARGEST_PAGE_BYTES = 2_000_000


def space_of(entry: str, hardware: Hardware, **settings: Any) -> tuple[Space, Refusals]:
    """Return the space of an entry point's YAML on a device, and why others of its combinations are not in it."""
    values = {**read_yaml(yaml_file(entry)), **settings}
    values.pop("space_of_lengths", None)
    own = SpaceSettings(**{name: values.pop(name) for name in SpaceSettings.model_fields if name in values})
    values = {name: values[name] for name in values if name != "verify_steps"} | {"device": "cpu", "model": "gpt2"}
    configurations = Configurations(values, entry)
    return make_space(own, values["effective_batch_size"], {}, hardware).without(
        lambda choice: why_refused(configurations.experiment(choice), choice, hardware, own.mathematics)
    )


@pytest.mark.parametrize("entry", ["plan", "search"])
def test_the_default_space_has_thousands_of_configurations_on_a_card_and_hundreds_on_a_cpu(entry: str) -> None:
    on_card, refusals = space_of(entry, find_hardware("h100"), effective_batch_size=32)
    on_cpu, _ = space_of(entry, CPU)
    assert len(on_card.choices) > 1_500 and len(on_cpu.choices) > 200
    assert len(on_card.choices) + sum(refusals.values()) == len(Space(on_card.dimensions).choices) * 2
    assert on_cpu.dimensions["expandable_segments"] == on_cpu.dimensions["activation_offloading"] == (False,)
    assert not any("offload" in str(value) for value in on_cpu.dimensions["checkpointing"])
    assert on_cpu.dimensions["loss_kernel"] == ("full", "chunked", "fused")
    assert on_cpu.dimensions["attention"] == ("sdpa", "eager")
    assert not {"flash", "liger"} & {value for values in on_card.dimensions.values() for value in values}
    assert on_card.dimensions["optimizer_in_backward"] == (False,), "gradients are clipped by default"
    assert any("max_grad_norm=none" in reason for reason in refusals)


def test_a_file_is_shared_by_all_configurations_and_dimensions_still_vary(tmp_path: Path) -> None:
    file, split = tmp_path / "config.yaml", {"micro_batch_size": 4, "accumulation_steps": 2, "effective_batch_size": 8}
    run = merged({**TINY, **split}, {"budget": None, "num_epochs": 0.01, "learning_rate_schedule": "cosine"})
    file.write_text(yaml.safe_dump(nested(run)))
    given = {"config": str(file), "budget": "64MiB", "seed": "3"}
    problem = make_experiment_problem(given)
    settings: Any = problem.base.settings
    assert problem.space.dimensions["micro_batch_size"] == (1, 2, 4, 8)
    assert (settings.model, settings.seed, settings.learning_rate_schedule) == (TINY["model"], 3, "cosine")
    assert problem.given_words == given, "the same command resumes it"
    with pytest.raises(InvalidInputError, match="num_steps must agree with what it follows from"):
        make_experiment_problem({**given, "num_steps": "5", "num_epochs": "0.01"})


def test_exact_leaves_out_what_rounds_differently() -> None:
    space, refusals = space_of("search", find_hardware("h100"), mathematics="exact")
    assert space.dimensions["precision"] == ("fp32",) and space.dimensions["gelu"] == ("model",)
    assert any("mathematics is exact at most in this space, and that of precision=bf16" in one for one in refusals)


@dataclass(frozen=True)
class Drawn:
    """An experiment with one technique."""

    techniques: tuple[Any, ...]

    def unsupported(self, hardware: Hardware) -> None:
        del hardware


class Different:
    """A technique that changes the training."""

    model_fields = {"adapter": None}  # noqa: RUF012  as pydantic has it
    adapter = 8
    mathematics = Mathematics.DIFFERENT


def test_another_training_is_searched_only_where_it_is_asked_for() -> None:
    one: Any = Drawn((Different(),))
    refused = why_refused(one, {"adapter": 8}, CPU, Mathematics.ROUNDING)
    assert refused is not None and refused.endswith("adapter=8 is different; set mathematics=different to allow it")
    assert why_refused(one, {"adapter": 8}, CPU, Mathematics.DIFFERENT) is None
    assert why_refused(one, {"precision": "fp32"}, CPU, Mathematics.EXACT) is None, "all configurations have it"


def test_configurations_are_those_that_are_made_one_by_one() -> None:
    space = {
        "micro_batch_size": [1, 4],
        "precision": ["fp32", "bf16"],
        "causal_lm.num_layers": [1, 2],
        "causal_lm.dropout": [None, 0.5],
        "learning_rate": [1e-3, 1],
    }
    values, configurations = (
        {**TINY, "effective_batch_size": 4},
        Configurations({**TINY, "effective_batch_size": 4}, ""),
    )
    choices: list[Choice] = [dict(zip(space, one, strict=True)) for one in product(*space.values())]  # type: ignore[call-overload]
    for choice in random.Random(0).sample(choices, 10):
        assert configurations.experiment(choice) == make_experiment(merged(values, nested(choice)), "")
    for wrong in ({"micro_batch_size": 3}, {"precision": "fp17"}, {"learning_rate": -1.0}, {"sequence_length": 9999}):
        with pytest.raises(InvalidInputError) as of_space:
            configurations.experiment({**wrong})
        with pytest.raises(InvalidInputError) as alone:
            make_experiment(merged(values, wrong), "")
        assert str(of_space.value) == str(alone.value)


def test_a_space_in_which_everything_is_refused_says_why() -> None:
    given = {**TINY, "effective_batch_size": 8, "mathematics": "exact", "space": {"precision": ["bf16"]}}
    message = "precision=bf16 is rounding; set mathematics=rounding to allow it; no configuration is left; give"
    with pytest.raises(InvalidInputError, match=message):
        make_experiment_problem(given)
    with pytest.raises(InvalidInputError, match=message):
        fitproof.plan(**given, gpu="h100")
    with pytest.raises(InvalidInputError, match="mathematics must be 'exact', 'rounding' or 'different'"):
        make_experiment_problem({**given, "mathematics": "none"})


def test_reasons_are_counted_and_the_rarest_share_a_line() -> None:
    space, refusals = Space({"seed": tuple(range(100))}).without(
        lambda choice: "even" if hash(choice["seed"]) % 2 else None
    )
    assert refusals == {"even": 50} and len(space.choices) == 50
    assert sentences(refusals) == ("left out of the space: 50 configurations: even",)
    many = sentences({str(number): 1 for number in range(NUM_REASONS + 3)})
    assert len(many) == NUM_REASONS and many[-1] == "left out of the space: 4 configurations for 4 further reasons"


def test_where_nothing_is_left_the_most_frequent_reasons_are_said() -> None:
    reasons = ["odd"] * 5 + ["even"] * 4 + ["prime"] * 3 + ["square"] * 2 + ["cube"]
    with pytest.raises(InvalidInputError, match="^odd; even; prime; 2 further reasons; no configuration is left; give"):
        Space({"seed": tuple(range(15))}).without(lambda choice: reasons[hash(choice["seed"])])


def test_of_many_dimensions_those_are_shown_that_differ_from_the_defaults() -> None:
    few: Choice = {"micro_batch_size": 4, "checkpointing": "none", "precision": "bf16"}
    assert label(few) == "micro-batch 4, checkpointing none, precision bf16"
    many = {**few, "loss_kernel": "chunked", "attention": "sdpa", "gelu": "model", "weight_decay": 0.01}
    assert label(many) == "micro-batch 4, precision bf16, loss_kernel chunked"
    plain = {name: default_values()[name] for name in many if name != "micro_batch_size"}
    assert label(plain) == "all settings at their defaults"
    assert list(columns([many, {**many, "gelu": "fused"}])) == ["micro_batch_size", "precision", "loss_kernel", "gelu"]


def test_the_page_of_a_plan_of_thousands_is_small() -> None:
    choices = space_of("plan", find_hardware("h100"))[0].choices
    rows = tuple(
        PlannedRow(
            choice=choice,
            micro_batch_size=int(str(choice["micro_batch_size"])),
            accumulation_steps=32 // int(str(choice["micro_batch_size"])),
            peak_allocated_bytes=2**30 + number * 2**20,
            peak_reserved_bytes=2**30 + number * 2**21,
            peak_device_bytes=2**31 + number * 2**21,
            fits=number < 1000,
            seconds=1 + number / 7,
            deviation=0.2,
            tokens=2**15,
        )
        for number, choice in enumerate(choices)
    )
    reason = "left out of the space: 2 configurations: a reason"
    card = CardPlan(card="NVIDIA H100", budget_bytes=2**33, rows=rows, skipped=(reason,), breakdown=None)
    findings = PlanFindings(
        entry="plan",
        model="gpt2",
        effective_batch_size=32,
        dataset_size=1000,
        cards=(card,),
        settings={},
        environment={},
    )
    report = plan_report(findings)
    page = to_html(report)
    assert len(page.encode()) < LARGEST_PAGE_BYTES
    assert len(report.tables[0].frame) == len(rows), "the CSV file has all"
    assert f"{len(rows) - report.tables[0].num_on_page} more in plan_nvidia_h100.csv." in page and reason in page
