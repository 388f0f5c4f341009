"""Speech recognition with an encoder and a decoder of transformers: Whisper."""

from typing import Any, ClassVar

from pipeline.base.contracts import Description, RandomInput
from pipeline.models._support.task_models import TaskModel, with_decoder_start


class SpeechRecognition(TaskModel):
    """AutoModelForSpeechSeq2Seq, on 30 seconds of made-up sound and sequence_length tokens: corpus=random_vectors."""

    made_of: ClassVar[str] = "made-up sound and text"
    types: ClassVar[tuple[str, ...]] = ("whisper",)
    """Mel bins over the time of 30 seconds."""

    def _described(self, name: str, config: Any) -> Description:
        return Description(
            inputs=(
                RandomInput("input_features", (config.num_mel_bins, 2 * config.max_source_positions)),
                RandomInput("labels", (None,), num_values=config.vocab_size),
            ),
            max_sequence_length=config.max_target_positions,
        )

    def _completed(self, config: Any) -> Any:
        return with_decoder_start(config)
