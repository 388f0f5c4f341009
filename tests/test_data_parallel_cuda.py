"""Ranks on simulated cards of their own: their memory is the predicted one, and what the machine lacks is refused.

Copies of a whole model are left to `make test-all`: tests/test_simulated_ranks.py has scripts with them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import IS_SIMULATED, OnCard
from simulated_programs import execute_on
from simulated_training import train_answered

from pipeline.base.results import Outcome
from pipeline.config.experiment import make_experiment
from pipeline.config.given import merged, nested
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_SIMULATED, reason="needs simulated cards: make test-cuda")]

COMMON = {
    "device": "cuda",
    "model": "gpt2-nano",
    "world_size": 2,
    "micro_batch_size": 2,
    "effective_batch_size": 8,
    "num_steps": 4,
    "eval_steps": 0,
}
FOUR_CARDS = replace(find_hardware("h200"), count=4)
WHOLE, SHARDED = ({"precision": "bf16"}, {"sharding": "fsdp", "precision": "bf16", "micro_batch_size": 1})
CONFIGURATIONS = (
    SHARDED,  # four passes, of which a prediction runs two
    {"model": "qwen3-nano", "tensor_parallel": 2, "micro_batch_size": 4, "loss_kernel": "chunked"},
)
OTHERS = (
    WHOLE,
    SHARDED,
    {"adapter": "lora", "weights": "bfloat16"},
    {"sharding": "fsdp", "sharded_accumulation": False, "reshard_after_forward": False, "checkpointing": "every_layer"},
    {"checkpointing": "every_layer", "loss_kernel": "chunked", "sequences": "grouped"},
    {"sharding": "fsdp", "sharding_replicas": 2, "world_size": 4, "micro_batch_size": 1},
    {"sharding": "fsdp", "sharded_offloading": True, "precision": "bf16"},
    {"sharding": "fsdp", "reshard_after_forward": 2, "world_size": 4, "micro_batch_size": 1, "precision": "bf16"},
    {"model": "qwen3-nano", "tensor_parallel": 2, "world_size": 4, "sharding": "fsdp", "precision": "bf16"},
)


@pytest.mark.parametrize(
    "configurations", [CONFIGURATIONS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["two ranks", "others"]
)
def test_the_memory_of_a_rank_on_a_card_is_predicted(
    configurations: tuple[dict[str, Any], ...], tmp_path: Path
) -> None:
    allocated = []
    for settings in configurations:
        experiment = make_experiment(merged(COMMON, nested(settings)), "main")
        predicted = predict(experiment, FOUR_CARDS)  # first: what it has to import need not be imported by each rank
        result = execute_on("h200", experiment, tmp_path / "log.txt", num_cards=4, work=train_answered)
        assert result.outcome is Outcome.OK and result.memory is not None, (settings, result.detail)
        for kind in ("peak_allocated_bytes", "peak_reserved_bytes"):
            measured, guess = getattr(result.memory, kind), getattr(predicted, kind)
            assert guess == pytest.approx(measured, rel=0.001), settings
            if "sharding" in settings or "tensor_parallel" in settings:
                assert guess == measured, settings
        allocated.append(result.memory.peak_allocated_bytes)
    if WHOLE in configurations:
        whole, sharded = (allocated[configurations.index(which)] for which in (WHOLE, SHARDED))
        assert sharded < whole  # in the same precision


@pytest.mark.slow
def test_more_processes_than_cards_are_refused(on_card: OnCard) -> None:
    words = ("-m", "fitproof", "main", "--device", "cuda", "--model", "gpt2-nano", "--world_size", "3")
    done = on_card("t4", *words, "--micro_batch_size", "1", num_devices=2)
    assert done.returncode == 2
    assert "world_size=3 needs as many GPUs, one for each process, and there are 2" in " ".join(done.stderr.split())
