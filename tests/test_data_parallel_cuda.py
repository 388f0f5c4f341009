"""Ranks on simulated cards of their own: their memory is the predicted one, and what the machine lacks is refused.

Copies of a whole model are left to `make test-all`: tests/test_simulated_ranks.py has scripts with them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import OnCard

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parent / "cuda_without_gpu" / "ranks"
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
    configurations: tuple[dict[str, Any], ...], on_card: OnCard, tmp_path: Path
) -> None:
    words = (str(FOLDER / "measure.py"), str(tmp_path), *map(json.dumps, configurations))
    done = on_card("h200", *words, num_devices=4, values=True, PYTHONPATH=".")
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for settings, one in zip(configurations, found, strict=True):
        assert one["outcome"] == "ok", (settings, one["detail"])
        for measured, predicted in (one["allocated"], one["reserved"]):
            assert predicted == pytest.approx(measured, rel=0.001), settings
        if "sharding" in settings or "tensor_parallel" in settings:
            assert one["allocated"][0] == one["allocated"][1] and one["reserved"][0] == one["reserved"][1], settings
    if WHOLE in configurations:
        whole, sharded = (found[configurations.index(which)]["allocated"][0] for which in (WHOLE, SHARDED))
        assert sharded < whole  # in the same precision


@pytest.mark.slow
def test_more_processes_than_cards_are_refused(on_card: OnCard) -> None:
    words = ("-m", "fitproof", "main", "--device", "cuda", "--model", "gpt2-nano", "--world_size", "3")
    done = on_card("t4", *words, "--micro_batch_size", "1", num_devices=2)
    assert done.returncode == 2
    assert "world_size=3 needs as many GPUs, one for each process, and there are 2" in " ".join(done.stderr.split())
