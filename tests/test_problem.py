"""The search problem: values that a device does not support, automatic budgets, and the name of its study."""

import json
from typing import Any

import optuna
import pytest
import torch
from conftest import THREE_LEVERS, TINY
from hypothesis import given
from hypothesis import strategies as st

import fitproof
from pipeline.base.contracts import Hardware
from pipeline.base.errors import InvalidInputError
from pipeline.base.units import MIB, parse_budget
from pipeline.config.space import Choice, Space, make_space
from pipeline.memory.device import free_bytes, hardware_of, total_bytes
from pipeline.prediction.cards import find_hardware
from pipeline.searching import experiment_problem
from pipeline.searching.candidates import make_candidates
from pipeline.searching.experiment_problem import automatic_budget, make_experiment_problem
from pipeline.searching.settings import SearchSettings
from pipeline.searching.study import StoredStudy
from pipeline.simulation.cards import CARDS

GIB = 2**30
CPU = hardware_of(torch.device("cpu"))


def on_device(monkeypatch: pytest.MonkeyPatch, hardware: Hardware) -> None:
    """Let this machine's device be `hardware`."""
    for module in ("pipeline.searching.experiment_problem", "pipeline.config.experiment"):
        monkeypatch.setattr(f"{module}.hardware_of", lambda device: hardware)


def precisions(space: Any, hardware: Hardware) -> tuple[Any, ...]:
    settings = SearchSettings(space={"micro_batch_size": "divisors", "precision": space})
    return make_space(settings, 2, {}, hardware).dimensions["precision"]


def test_automatic_precisions_follow_the_device() -> None:
    hardware = {name: find_hardware(name) for name in CARDS}
    older = {name: precisions("auto", hardware[name]) for name, card in CARDS.items() if card.capability < (8, 0)}
    assert {"t4", "v100"} <= older.keys() and set(older.values()) == {("fp32", "fp16")}
    assert {precisions("auto", card) for name, card in hardware.items() if name not in older} == {("fp32", "bf16")}
    assert precisions(["tf32"], find_hardware("t4")) == ("tf32",), "values that are given stand as they are"


@pytest.mark.parametrize(("has_bf16", "formats"), [(True, ("fp32", "bf16")), (False, ("fp32",))])
def test_a_cpu_tries_bf16_where_it_has_instructions_for_it(
    has_bf16: bool, formats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16)
    assert precisions("auto", CPU) == formats


@pytest.mark.parametrize("name", ["sequence_length", "loss_chunk_tokens", "causal_lm.num_layers"])
def test_only_a_fixed_list_of_values_is_automatic(name: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"fixed list of values takes `auto`, and space.{name} is set to it"):
        make_space(SearchSettings(space={name: "auto"}), 2, {}, CPU)


def test_three_levers_on_a_cpu_have_thirty_configurations() -> None:
    made = make_experiment_problem({"device": "cpu", "space": THREE_LEVERS})
    assert len(made.space.choices) == 30 and made.identity["space.precision"] == ["fp32", "bf16"]
    assert made.notes == ("budget: 256MiB, the default on a CPU, which suits gpt2-nano",)


@pytest.mark.matrix(1)
@pytest.mark.parametrize("card", ["t4", "v100"])
def test_a_card_without_bf16_searches_the_default_space(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, find_hardware(card))
    assert make_experiment_problem(TINY).space.dimensions["precision"] == ("fp32", "fp16")


def test_a_plan_for_a_card_without_bf16_recommends_fp16() -> None:
    settings = {**TINY, "device": "cpu", "sequence_length": 256, "causal_lm": {"num_layers": 1, "width": 1024}}
    space = {"micro_batch_size": [16], "checkpointing": ["none"], "precision": "auto"}
    [t4, a100] = fitproof.plan(**settings, gpu="t4,a100", effective_batch_size=16, space=space).cards
    assert t4.recommended is not None and t4.recommended.choice["precision"] == "fp16" and t4.skipped == ()
    assert a100.recommended is not None and a100.recommended.choice["precision"] == "bf16"


def test_unsupported_values_leave_the_space_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(monkeypatch, find_hardware("t4"))
    given: dict[str, Any] = {**TINY, "space": {"micro_batch_size": [1, 2], "precision": ["bf16", "fp16", "tf32"]}}
    given["space"]["checkpointing"] = ["none"]
    made = make_experiment_problem({**given, "effective_batch_size": 2, "budget": "1GiB"})
    assert made.space.dimensions == {"micro_batch_size": (1, 2), "precision": ("fp16",), "checkpointing": ("none",)}
    assert made.base.settings.precision == "fp16"  # type: ignore[attr-defined]
    assert made.notes == tuple(
        f"left out of the space: 2 configurations: {name} needs compute capability 8.0 (Ampere) or newer, and Tesla T4 "
        "is older; set precision=fp16"
        for name in ("bf16", "tf32")
    )
    with pytest.raises(InvalidInputError, match="bf16 needs .*; no configuration is left"):
        make_experiment_problem({**given, "space": {"precision": ["bf16"]}, "effective_batch_size": 8})


def test_combinations_leave_the_space_where_each_value_stays() -> None:
    space = Space({"micro_batch_size": (1, 2), "checkpointing": ("none", "every_layer"), "precision": ("fp32",)})
    refused: Choice = {"micro_batch_size": 2, "checkpointing": "none", "precision": "fp32"}
    left, reasons = space.without(lambda choice: "too wide" if choice == refused else None)
    assert left.dimensions == space.dimensions and reasons == {"too wide": 1}
    assert left.choices == [choice for choice in space.choices if choice != refused]
    defaults: Choice = {"micro_batch_size": 8, "checkpointing": "none", "precision": "fp32"}
    assert left.with_values(left.plain_values(defaults)) == [{**refused, "micro_batch_size": 1}]


def test_what_is_refused_is_no_baseline_where_the_micro_batch_is_no_dimension_either() -> None:
    space = Space({"checkpointing": ("none", "every_layer"), "precision": ("fp32", "bf16")})
    plain = space.plain_values({"checkpointing": "none", "precision": "fp32"})
    left, _ = space.without(lambda choice: "too wide" if choice == plain else None)
    assert left.with_values(plain) == []


@given(free=st.integers(700, 200_000))
def test_an_automatic_budget_is_at_most_its_share_of_what_is_free(free: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment_problem, "free_bytes", lambda device: free * MIB)
        patch.setattr(experiment_problem, "device_name", lambda device: "NVIDIA X")
        budget, _ = automatic_budget(torch.device("cuda", 0))
    in_bytes = parse_budget(budget, 200_000 * MIB)
    assert in_bytes <= 0.8 * free * MIB < in_bytes + 512 * MIB


def test_an_automatic_budget_is_told_and_the_same_where_free_memory_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {}
    monkeypatch.setattr(experiment_problem, "device_name", lambda device: "NVIDIA X")
    for off in (-40 * MIB, -MIB, 0, MIB, 40 * MIB):
        monkeypatch.setattr(experiment_problem, "free_bytes", lambda device, off=off: int(18.3 * GIB) + off)
        budgets[off], notes = automatic_budget(torch.device("cuda", 0))
    assert set(budgets.values()) == {"14.5GiB"}
    assert notes == ("budget: 14.5GiB, 80 % of the 18.3 GiB that are free on NVIDIA X, rounded down",)
    monkeypatch.setattr(experiment_problem, "free_bytes", lambda device: 100 * MIB)
    with pytest.raises(InvalidInputError, match="nothing of the 0.1 GiB that are free on NVIDIA X; end what uses"):
        automatic_budget(torch.device("cuda", 0))


def test_an_automatic_budget_is_the_same_for_all_gpus_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_problem, "device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(experiment_problem, "free_bytes", lambda device: (40, 20, 30)[device.index] * GIB)
    budget, notes = automatic_budget(*(torch.device("cuda", number) for number in range(3)))
    assert budget == "16GiB"
    assert notes == ("budget: 16GiB, 80 % of the 20.0 GiB that are free on each of 3 NVIDIA X, rounded down",)


def test_free_memory_is_part_of_the_total() -> None:
    cpu = torch.device("cpu")
    assert 0 < free_bytes(cpu) <= total_bytes(cpu)


def test_free_memory_of_a_gpu_is_what_no_process_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts other processes without a CUDA context of this one."""
    monkeypatch.setattr("pipeline.memory.device.total_bytes", lambda device: 24 * GIB)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda device: 6 * GIB)
    assert free_bytes(torch.device("cuda", 0)) == 18 * GIB


def study(storage: str, identity: dict[str, Any], name: str = "auto") -> str:
    """Open a study and return its name."""
    return StoredStudy(storage, name, ("maximize",), identity).name


def test_the_cores_of_a_cpu_are_a_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**TINY, "effective_batch_size": 4, "budget": "1GiB", "space": {"micro_batch_size": [1]}}
    problem = make_experiment_problem(settings)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert problem.identity["cores_per_worker"] == 3


def test_a_path_is_a_setting_for_workers(tmp_path: Any) -> None:
    (tmp_path / "text.txt").write_text("word " * 2000)
    settings = {**TINY, "effective_batch_size": 4, "budget": "1GiB", "space": {"micro_batch_size": [1]}}
    problem = make_experiment_problem({**settings, "corpus": "text_files", "text_files": {"path": tmp_path}})
    assert json.loads(json.dumps(problem.settings_for_workers))["text_files"] == {"path": str(tmp_path)}


def test_a_change_that_contradicts_what_is_given_is_not_advised() -> None:
    settings = {**TINY, "effective_batch_size": 4, "accumulation_steps": 2, "budget": "1MiB"}
    problem = make_experiment_problem({**settings, "space": {"micro_batch_size": [2]}})
    candidates = make_candidates(problem.space.choices, [problem.base])
    assert "would help most, with" in problem.how_to_fit(candidates)


def test_the_same_conditions_resume_a_study_and_others_begin_their_own(tmp_path: Any) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    first = study(storage, {"budget": "100MiB", "seed": 0})
    assert first.startswith("fitproof-") and study(storage, {"seed": 0, "budget": "100MiB"}) == first
    other = study(storage, {"budget": "50MiB", "seed": 0})
    assert other != first and len(optuna.get_all_study_names(storage)) == 2
    with pytest.raises(InvalidInputError, match="budget is 50MiB, and was 100MiB; measure under .* set study=NAME"):
        study(storage, {"budget": "50MiB", "seed": 0}, name=first)


def test_a_study_of_the_plain_name_is_continued_where_its_conditions_are_the_same(tmp_path: Any) -> None:
    storage = f"sqlite:///{tmp_path}/optuna.db"
    assert study(storage, {"budget": "100MiB"}, name="fitproof") == "fitproof"
    assert study(storage, {"budget": "100MiB"}) == "fitproof"
    assert study(storage, {"budget": "50MiB"}).startswith("fitproof-")
    assert study(storage, {"budget": "100MiB"}) == "fitproof"
