"""torchtitan's file: the values in its configuration, and what it says that it cannot express."""

import ast
from pathlib import Path
from typing import Any, ClassVar

import pytest
from conftest import TINY, tiny

from fitproof import InvalidInputError, export
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique
from pipeline.config.experiment import make_experiment
from pipeline.export.write import export_files

FILE = "torchtitan_config.py"
QWEN = {name: value for name, value in TINY.items() if not name.startswith("causal_lm")} | {"model": "qwen3-0.6b"}


def written(text: str) -> tuple[dict[str, Any], str]:
    """Return the arguments of Trainer.Config, those of calls within it likewise, and the docstring as one line."""
    tree = ast.parse(text)
    [function] = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    made = function.body[-1]
    assert isinstance(made, ast.Return) and isinstance(made.value, ast.Call)
    return arguments_of(made.value), " ".join((ast.get_docstring(tree) or "").split())


def arguments_of(call: ast.Call) -> dict[str, Any]:
    """Return the keyword arguments of a call, of which one that is no literal is its source."""
    found: dict[str, Any] = {}
    for keyword in call.keywords:
        assert keyword.arg is not None
        value = keyword.value
        if isinstance(value, ast.Call) and value.keywords:
            found[keyword.arg] = arguments_of(value)
        else:
            found[keyword.arg] = (
                ast.unparse(value) if isinstance(value, ast.Call | ast.Name) else ast.literal_eval(value)
            )
    return found


def exported(**changes: Any) -> tuple[dict[str, Any], str]:
    """Return what the file of a configuration has, and what it says."""
    text = export_files(make_experiment({**QWEN, **changes}, "main"))[FILE]
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    found, said = written(text)
    return found, f"{comments} {said}"


def test_the_settings_have_torchtitans_names() -> None:
    found, said = exported(
        micro_batch_size=2,
        effective_batch_size=8,
        world_size=2,
        learning_rate=5e-5,
        weight_decay=0.1,
        precision="bf16",
        checkpointing="every_layer",
        max_grad_norm="none",
        num_steps=20,
        learning_rate_schedule="cosine",
        seed=3,
    )
    assert found["training"] == {
        "local_batch_size": 2,
        "global_batch_size": 8,
        "seq_len": QWEN["sequence_length"],
        "steps": 20,
        "max_norm": 1e9,
        "dtype": "float32",
        "mixed_precision_param": "bfloat16",
        "disable_cuda_graphs": True,
    }
    assert found["parallelism"] == {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}
    assert found["optimizer"] == {"lr": 5e-5, "betas": (0.9, 0.999), "weight_decay": 0.1}
    assert found["lr_scheduler"]["decay_type"] == "cosine" and "decay_ratio" not in found["lr_scheduler"]
    assert (found["activation_checkpoint"], found["debug"], found["loss"]) == ("FullAC.Config()", {"seed": 3}, "loss")
    assert "torchrun --nproc_per_node 2 -m torchtitan.train --module torchtitan_config" in said
    assert "it is without" not in said and "checkpoints all layers" not in said


def test_chunks_of_the_loss_compiled_layers_and_bfloat16_weights() -> None:
    found, _ = exported(loss_kernel="chunked", weights="bfloat16", compile="layers")
    assert (found["activation_checkpoint"], found["loss"]) == (None, {"loss_fn": "loss", "num_chunks": 8})
    assert (found["training"]["dtype"], found["training"]["mixed_precision_param"]) == ("bfloat16", "bfloat16")
    assert found["compile"] == {"enable": True, "components": ["model"]}
    assert "checkpoint" not in found, "nothing is loaded"


@pytest.mark.parametrize(("schedule", "last"), [("constant", {"decay_ratio": 0}), ("linear", {"decay_type": "linear"})])
def test_the_learning_rate_falls_as_measured(schedule: str, last: dict[str, Any]) -> None:
    found, _ = exported(learning_rate_schedule=schedule, learning_rate_warmup_steps=2)
    assert found["lr_scheduler"] == {"warmup_steps": 2, **last}


def test_a_master_copy_is_torchtitans_float32_parameters() -> None:
    found, said = exported(weights="bfloat16_master")
    assert (found["training"]["dtype"], found["training"]["mixed_precision_param"]) == ("float32", "bfloat16")
    assert "it is without" not in said and "keeps the parameters themselves in float32" in said


def test_chunks_divide_the_sequence() -> None:
    found, _ = exported(loss_kernel="chunked", sequence_length=36)
    assert found["loss"]["num_chunks"] == 4


class Elsewhere(Technique):
    """A technique that names its arguments as another framework does."""

    stage: ClassVar[Stage] = Stage.OPTIMIZER
    mathematics: ClassVar[Mathematics] = Mathematics.EXACT  # type: ignore[assignment]

    elsewhere: bool = False

    def export(self, target: str) -> Exported | None:
        return Exported(arguments={"optim": "sgd"})

    def apply(self, step: Step) -> Step:
        return step


def test_arguments_of_no_section_are_refused() -> None:
    experiment = make_experiment(QWEN, "main")
    experiment.__dict__["techniques"] = (*experiment.techniques, Elsewhere(elsewhere=True))
    with pytest.raises(InvalidInputError, match=r"named section\.key.*'optim'; correct its export"):
        export_files(experiment)


def test_what_it_cannot_express_is_said() -> None:
    others = {"adapter": "lora", "optimizer": "sgd", "loss_kernel": "fused"}
    found, said = exported(checkpointing="every_2_layers", precision="tf32", **others)
    assert found["training"]["mixed_precision_param"] == "float32"
    assert all(f"it is without {name}={value}" in said for name, value in others.items())
    assert found["loss"] == "loss"
    assert "has no precision=tf32" in said and "where checkpointing=every_2_layers was measured" in said


@pytest.mark.parametrize("changes", [{}, {"model": "qwen3-0.6b"}], ids=["another", "with fewer layers"])
def test_a_model_that_torchtitan_does_not_have_gets_no_file(changes: dict[str, Any]) -> None:
    assert FILE not in export_files(tiny(**changes))


SHARDED = """
model: qwen3-0.6b
budget: 100000GiB
corpus: quick_fox
dataset_size: 16
eval_steps: 0
device: cuda
world_size: 8
tensor_parallel: 2
sharding: fsdp
sharding_replicas: 2
reshard_after_forward: false
sequence_length: 64
micro_batch_size: 1
effective_batch_size: 8
"""


def test_files_for_cards_that_this_machine_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "sharded.yaml").write_text(SHARDED)
    with pytest.raises(InvalidInputError, match="needs a CUDA GPU|needs as many"):
        export(config=tmp_path / "sharded.yaml", output=tmp_path / "files")
    files = export(config=tmp_path / "sharded.yaml", output=tmp_path / "files", gpu="h100").files
    found, said = written(files[FILE])
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": -1,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 2,
        "enable_sequence_parallel": False,
    }
    assert "torchrun --nproc_per_node 8 " in said
    assert 'accelerator="cuda"' in files["lightning_trainer.py"]
    (tmp_path / "auto.yaml").write_text("corpus: quick_fox")
    assert (
        "gpt2, micro-batches" in export(config=tmp_path / "auto.yaml", output=tmp_path, gpu="h100").files["README.md"]
    )
    with pytest.raises(InvalidInputError, match="needs as many GPUs"):
        export(config=tmp_path / "sharded.yaml", output=tmp_path / "files", gpu="4xh100")
