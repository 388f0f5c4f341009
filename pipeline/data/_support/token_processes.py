"""Documents as tokens, batch by batch: in this process if they are few, in several if they are many.

A process that encodes runs this file. It takes pickled batches from its input, and neither imports torch nor the main
module of the process that has started it.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.base.errors import InvalidInputError
from pipeline.base.processes import num_cores
from pipeline.data._support.tokenizer import Encoded

Encode = Callable[[Sequence[Any]], Encoded]
"""Makes tokens of a batch; it can be pickled."""
ROWS_AT_ONCE = 256
CHARACTERS_AT_ONCE = 2**20
"""Of a batch, unless a single row has more."""
NUM_BATCHES_ALONE = 20
"""Up to so many this process encodes: others need a second or more to start."""
BATCHES_AHEAD = 2
"""For each process, so that none waits for rows to be read."""


def in_batches(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield rows in lists; the text of a row, or of the last element of a tuple, counts as its length."""
    batch: list[Any] = []
    length = 0
    for row in rows:
        text = row[-1] if isinstance(row, tuple) else row
        num_characters = len(text) if isinstance(text, str) else 0
        if batch and (len(batch) == ROWS_AT_ONCE or length + num_characters > CHARACTERS_AT_ONCE):
            yield batch
            batch, length = [], 0
        batch.append(row)
        length += num_characters
    if batch:
        yield batch


def encoded(batches: Iterable[list[Any]], encode: Encode) -> Iterator[Encoded]:
    """Yield what `encode` makes of each batch, in their order."""
    remaining = iter(batches)
    first = list(islice(remaining, NUM_BATCHES_ALONE + 1))
    num_processes = num_cores()
    if len(first) <= NUM_BATCHES_ALONE or num_processes == 1:
        yield from map(encode, chain(first, remaining))
        return
    idle: SimpleQueue[_Process] = SimpleQueue()
    processes = [_Process(encode) for _ in range(num_processes)]
    for process in processes:
        idle.put(process)

    def encode_elsewhere(batch: list[Any]) -> Encoded:
        process = idle.get()
        try:
            return process.encode(batch)
        finally:
            idle.put(process)

    threads = ThreadPoolExecutor(num_processes)
    try:
        waiting: deque[Future[Encoded]] = deque()
        for batch in chain(first, remaining):
            waiting.append(threads.submit(encode_elsewhere, batch))
            if len(waiting) > num_processes * BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for process in processes:
            process.end()
        threads.shutdown(cancel_futures=True)


class _Process:
    """A process that encodes batches, one after the other."""

    def __init__(self, encode: Encode) -> None:
        paths = [str(Path(__file__).parents[3]), *filter(None, sys.path)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.data._support.token_processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C is for the process that has started it, which ends it
        )
        self._encode = pickle.dumps(encode)
        self._is_started = False

    def encode(self, batch: list[Any]) -> Encoded:
        """Return the batch as tokens; raise what encoding it has raised, or InvalidInputError if the process ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            if not self._is_started:
                self._process.stdin.write(self._encode)
                self._is_started = True
            pickle.dump(batch, self._process.stdin)
            self._process.stdin.flush()
            result = pickle.load(self._process.stdout)  # noqa: S301  of our own process
        except (BrokenPipeError, EOFError) as error:
            raise InvalidInputError(
                f"the processes that tokenize must not be ended, and one was (exit code {self._process.wait()}; a "
                "system without free memory does so); free memory, or read less data"
            ) from error
        if isinstance(result, BaseException):
            raise result
        assert isinstance(result, Encoded)
        return result

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def _serve() -> None:
    """Encode the batches of the input until there are no more."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is none of the answers
    encode: Encode = pickle.load(sys.stdin.buffer)  # noqa: S301  of the process that has started this one
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)  # noqa: S301
        except EOFError:
            return
        try:
            result: Encoded | BaseException = encode(batch)
        except Exception as error:  # raised again where the batch came from
            result = error
        pickle.dump(result, output)
        output.flush()


if __name__ == "__main__":
    _serve()
