"""Contracts of every value of every technique: the same training, its predicted memory, and what exports say of it."""

import ast
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import yaml
from conftest import CPU, tiny, with_corpus_of
from levers import BESIDE_ANOTHER, LEVERS, ON_CPU, ON_CUDA, Lever, each, needs_package
from test_export import executed
from trainings import check_peak, check_peak_on_card, losses, nobody

from pipeline.base.technique import Mathematics
from pipeline.config.configurations import why_refused
from pipeline.config.entry_points import yaml_file
from pipeline.config.experiment import Experiment, make_experiment
from pipeline.config.settings import TECHNIQUES
from pipeline.config.variants import read_yaml
from pipeline.export.write import export_files
from pipeline.training.loop import Loop
from pipeline.training.step import backpropagate, build_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
"""What torch's compiler imports and does itself."""
IN_16_BITS = 5e-3
"""Largest relative error of a peak on a CPU in 16 bits, where oneDNN copies what differs between machines."""
EXACT = 1e-5
"""Largest relative difference of float32 losses and gradients that differ in the order of sums alone."""
GRADIENT = 20
"""Largest error of a gradient in another number format, in tolerances of the loss."""
WORSE, WORSE_OF_ONE = 1.25, 1.5
"""Largest error of the gradient under bf16, in errors of plain bf16's; the same for one parameter, of few numbers."""
NOISE = 1e-4
"""Gradients of a parameter below this share of the whole gradient's norm count as zero: some are sums of rounding."""
WHOLE_GRADIENT = "whole"
CUT = {"micro_batch_size": 2, "accumulation_steps": 4}
DROPOUT = {"causal_lm__dropout": 0.1, "encoder_stack__dropout": 0.1}
SCENARIOS: dict[str, dict[str, Any]] = {"packed": {}, "padded": {"sequences": "padded", **CUT}}
"""Dropout with packed sequences in one micro-batch, and with padded ones in four."""
ON_CARD = {
    "model": "gpt2-nano",
    "precision": "bf16",
    "causal_lm.num_layers": 2,
    "causal_lm.width": 256,
    "causal_lm.num_heads": 4,
    "causal_lm.dropout": 0.1,
    "vocabulary_size": 8192,
    "micro_batch_size": 8,
}
each_on_cpu = each(ON_CPU)
each_of_the_same_training = each(lever for lever in ON_CPU if lever.same_training)


def pair(lever: Lever, model: str, **shared: Any) -> tuple[Experiment, Experiment]:
    """Return the plain run and the one with the lever, which share all other settings."""
    without_dropout = {} if lever.same_dropout else dict.fromkeys(DROPOUT, 0.0)
    plain = {**shared, **with_corpus_of(model), **without_dropout, **lever.plain}
    return tiny(**plain), tiny(**{**plain, **lever.settings})


def gradients(experiment: Experiment) -> dict[str, torch.Tensor]:
    """Return the gradient of the first window by the parameter's name, wherever the step uses or frees it."""
    prepared = experiment.prepare()
    torch.manual_seed(experiment.settings.seed)
    step = build_step(experiment, prepared)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in step.trainable.module.named_parameters():

        def keep(parameter: torch.Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            found[name] = parameter.grad.double() / step.scaler.get_scale()

        parameter.register_post_accumulate_grad_hook(keep)
    with step.run_context():
        window = Loop(experiment, prepared.train, step, step.make_optimizer(step.trainable.module), nobody).window(0)
        backpropagate(step, window.batches, window.num_targets)
    assert set(found) == {name for name, _ in step.trainable.module.named_parameters()}
    return found


def errors(found: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative error of each parameter's gradient, and of the whole gradient under its own name."""
    whole = float(torch.stack([gradient.norm() for gradient in truth.values()]).norm())
    away = {name: float((found[name] - gradient).norm()) for name, gradient in truth.items()}
    of_each = {name: error / (float(truth[name].norm()) + NOISE * whole) for name, error in away.items()}
    return {WHOLE_GRADIENT: math.hypot(*away.values()) / whole, **of_each}


@cache
def cached_losses(text: str) -> list[float]:
    """Return the losses of the experiment with these settings, which several rows are compared with."""
    return losses(make_experiment(yaml.safe_load(text), "main"))


def test_every_value_of_every_technique_has_a_row() -> None:
    covered = BESIDE_ANOTHER | {(name, value) for lever in LEVERS for name, value in lever.settings.items()}
    assert {lever.technique for lever in LEVERS} == set(TECHNIQUES)
    for kind in TECHNIQUES.values():
        for name, field in kind.model_fields.items():
            annotation = field.annotation
            values = get_args(annotation) if get_origin(annotation) is Literal else ()
            values = (False, True) if annotation is bool else values
            assert {(name, value) for value in values if value != field.default} <= covered


@each(LEVERS)
def test_a_row_changes_its_technique_alone_and_has_its_tolerance(lever: Lever) -> None:
    plain, changed = pair(lever, lever.models[0])
    [active] = [each for each, before in zip(changed.techniques, plain.techniques, strict=True) if each != before]
    assert type(active) is TECHNIQUES[lever.technique]
    assert (active.mathematics is not Mathematics.DIFFERENT) == lever.same_training
    assert lever.tolerance is None or active.mathematics is Mathematics.ROUNDING


@each(lever for lever in ON_CPU if not lever.same_training)
def test_another_training_is_searched_only_if_it_is_asked_for(lever: Lever) -> None:
    needs_package(lever)
    plain, changed = pair(lever, lever.models[0])
    names = lever.settings.keys()
    assert not names & read_yaml(yaml_file("search"))["space"].keys()
    reason = why_refused(changed, dict(lever.settings), CPU, Mathematics.ROUNDING)
    assert reason is not None and "set mathematics=different to allow it" in reason
    assert all(f"{name}={value}" in reason for name, value in lever.settings.items())
    assert why_refused(changed, dict(lever.settings), CPU, Mathematics.DIFFERENT) is None
    assert why_refused(plain, dict.fromkeys(names), CPU, Mathematics.EXACT) is None


@pytest.mark.parametrize("model", ["gpt2-nano", "encoder_stack"])
def test_dropout_changes_the_losses(model: str) -> None:
    """Or the comparisons with dropout below show nothing."""
    assert losses(tiny(**with_corpus_of(model), **DROPOUT), 2) != losses(tiny(**with_corpus_of(model)), 2)


@each(lever for lever in LEVERS if not lever.accumulates)
def test_a_lever_that_takes_one_micro_batch_refuses_several(lever: Lever) -> None:
    reason = tiny(**{**lever.plain, **CUT, **lever.settings}).unsupported()
    assert reason is not None and "accumulation_steps" in reason and "4" in reason


@pytest.mark.quick
@pytest.mark.parametrize("scenario", [pytest.param("packed", marks=pytest.mark.slow), "padded"])
@each_of_the_same_training
def test_ten_steps_have_the_losses_of_the_plain_step(lever: Lever, scenario: str, short_documents: Path) -> None:
    needs_package(lever)
    text = {"corpus": "text_files", "text_files__path": str(short_documents)}
    for model in lever.models:
        plain, changed = pair(lever, model, **text, **DROPOUT, **SCENARIOS[scenario])
        assert changed.unsupported(CPU) is None
        expected = cached_losses(plain.to_yaml())
        assert expected[-1] < expected[0]
        assert losses(changed) == pytest.approx(expected, rel=lever.tolerance or EXACT), model


@each_of_the_same_training
def test_gradients_are_those_of_the_plain_step(lever: Lever) -> None:
    needs_package(lever)
    for model in lever.models:
        plain, changed = pair(lever, model)
        largest = GRADIENT * lever.tolerance if lever.tolerance else EXACT
        assert max(errors(gradients(changed), gradients(plain)).values()) <= largest, model


@each(lever for lever in ON_CPU if lever.takes_bf16 and lever.same_training)
def test_gradients_under_bf16_are_as_exact_as_plain_ones(lever: Lever) -> None:
    needs_package(lever)
    for model in lever.models:
        truth = gradients(pair(lever, model)[0])
        plain, changed = (errors(gradients(one), truth) for one in pair(lever, model, precision="bf16"))
        assert changed[WHOLE_GRADIENT] <= WORSE * plain[WHOLE_GRADIENT], model
        limits = {name: WORSE_OF_ONE * error + EXACT for name, error in plain.items()}
        worse = {name: (changed[name], limit) for name, limit in limits.items() if changed[name] > limit}
        assert not worse, model


@pytest.mark.matrix(4)
@each(lever for lever in ON_CPU if lever.predicted)
def test_the_peak_on_a_cpu_is_predicted(lever: Lever) -> None:
    needs_package(lever)
    for model in lever.models:
        experiment = pair(lever, model, sequence_length=64, eval_steps=0, **DROPOUT)[1]
        in_float32 = (experiment.settings.precision, experiment.settings.weights) == ("fp32", "float32")
        check_peak(experiment, 1e-4 if in_float32 else IN_16_BITS)


@pytest.mark.matrix(4)
@pytest.mark.gpu
@each(lever for lever in ON_CUDA if lever.predicted)
def test_the_peak_on_a_card_is_predicted(lever: Lever, card: Any) -> None:
    needs_package(lever)
    check_peak_on_card(card, {**ON_CARD, **lever.plain, **lever.settings})


@pytest.mark.matrix(4)
@each_on_cpu
def test_the_exported_script_trains_the_same(lever: Lever, capsys: pytest.CaptureFixture[str]) -> None:
    needs_package(lever)
    experiment = pair(lever, lever.models[0])[1]
    script = executed(export_files(experiment)["train.py"])
    script["main"](Path(script["TOKENS"]))
    printed = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert printed == pytest.approx(losses(experiment, len(printed)), abs=1e-4)


@each(lever for lever in LEVERS if "task" not in lever.companions)  # of pairs there are no files
def test_every_exported_file_has_the_lever_or_says_that_it_has_not(lever: Lever) -> None:
    plain, changed = (export_files(one) for one in pair(lever, lever.models[0]))
    readers = {".py": ast.parse, ".json": json.loads, ".yaml": yaml.safe_load, ".md": str}
    for name, text in changed.items():
        readers[Path(name).suffix](text)
        if name != "training_arguments.json":  # it takes no other keys: README.md says what it lacks
            assert text != plain[name], f"{name} is the same with and without {lever.name}"
