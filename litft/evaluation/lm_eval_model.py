"""lm-evaluation-harness on litft's own network: its tasks ask, and this answers as its Hugging Face back-end would."""

import difflib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

try:
    import evaluate  # noqa: F401 - what tasks' code imports: missing, they would fail one by one
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ValueError(f"--tasks needs the package {error.name}; pip install 'litft[eval]'") from None

from litft.args import Sampling
from litft.inference.generation import Request
from litft.inference.session import Session

LOGITS = 2**28  # of a pass at most, 1 GiB in fp32: long texts go through in smaller batches
ANSWER = 256  # tokens, of tasks that do not say how many

# B rows, N tokens of a continuation at most, V vocabulary

Pair = tuple[list[int], list[int]]  # the tokens of a context and of its continuation


class HarnessModel(TemplateLM):
    """A model as the harness asks it; `batch_size` texts go through the network at once."""

    def __init__(self, session: Session, batch_size: int) -> None:
        super().__init__()
        self.session, self.batch_size, self.words = session, batch_size, session.tokenizer
        self.max_length = session.model.config.max_positions
        self._device = session.model.device

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self.words.eos_id if self.words.eos_id is not None else self.words.stop_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        return self.words.bos_id if self.words.bos_id is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Names the cache of requests."""
        return self.words.digest()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's own, where one is asked for."""
        return self.words.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A task's turns as the model reads them; without a prompt, the last turn stays open to be continued."""
        if add_generation_prompt:
            return self.words.apply_chat_template(chat_history, add_generation_prompt=True)
        begun = self.words.apply_chat_template(chat_history[:-1], add_generation_prompt=True)
        return begun + chat_history[-1]["content"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With the BOS that the model's tokenizer adds, unless the text has one."""
        return self.words.encode(string, bos=False if add_special_tokens is False else None)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Of each continuation the log-probability, and whether it is the greedy one."""
        return self._scores([(context, continuation) for _, context, continuation in requests], disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, each of whose tokens is predicted once, in windows of the context."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            found = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
            before = len(windows)
            windows += map(make_disjoint_window, found)
            counts.append(len(windows) - before)
        scores = iter(self._scores(windows, disable_tqdm))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    @torch.inference_mode()
    def _scores(self, pairs: list[Pair], quiet: bool) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        # choices of one token have one text before them, which is read once
        alike: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if len(continuation) > self.max_length:
                raise ValueError(f"a continuation of {len(continuation)} tokens: the context is {self.max_length}")
            alike.setdefault(tuple([*context, *continuation][-self.max_length - 1 : -1]), []).append(number)
        with tqdm(total=len(pairs), desc="texts", disable=quiet or None) as bar:
            for texts in self._batches(alike, pairs):
                longest = max(len(pairs[number][1]) for text in texts for number in alike[text])
                for text, logprobs in zip(texts, self._logprobs(texts, longest), strict=True):
                    for number in alike[text]:
                        ids = torch.tensor(pairs[number][1], device=logprobs.device)
                        own = logprobs[longest - len(ids) :]
                        total = float(own.gather(1, ids[:, None]).sum())
                        found[number] = total, bool((own.argmax(-1) == ids).all())
                    bar.update(len(alike[text]))
        return found

    def _batches(self, alike: dict[tuple[int, ...], list[int]], pairs: list[Pair]) -> Iterator[list[tuple[int, ...]]]:
        """Texts of like length together, and no more than their logits leave room for."""
        batch: list[tuple[int, ...]] = []
        longest = 0
        for text in sorted(alike, key=len, reverse=True):
            wanted = max(len(pairs[number][1]) for number in alike[text])
            size = (len(batch) + 1) * max(longest, wanted) * self.session.model.config.vocab_size
            if batch and (len(batch) == self.batch_size or size > LOGITS):
                yield batch
                batch, longest = [], 0
            batch.append(text)
            longest = max(longest, wanted)
        if batch:
            yield batch

    def _logprobs(self, texts: list[tuple[int, ...]], count: int) -> Tensor:
        """Log-probabilities (B, N, V) of what follows the last `count` tokens of each text, as far as it has so many."""
        tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        logits_to_keep = torch.zeros(len(texts), count, dtype=torch.long)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)  # what is behind a text is not seen by it
            logits_to_keep[row] = (torch.arange(count) + len(text) - count).clamp(min=0)
        logits = self.session.model(tokens.to(self._device), logits_to_keep=logits_to_keep.to(self._device))
        return logits.float().log_softmax(-1)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a text that ends them; the end of a context counts where it is too long."""
        asked = [self._request(*request.args) for request in requests]
        said = self.session.generate(asked, self.batch_size, "answers", quiet=disable_tqdm or None)
        return [each.text for each in said]

    def _request(self, context: str, settings: dict[str, Any]) -> Request:
        given = normalize_gen_kwargs(settings, ANSWER)
        given["temperature"] = given.get("temperature", 1.0) if given["do_sample"] else 0.0  # the harness's own defaults
        room = self.max_length - given["max_gen_toks"]
        if room < 1:
            raise ValueError(f"a task asks for {given['max_gen_toks']} tokens: the model's context is {self.max_length}")
        until = given.get("until") or []
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        names = {item.name for item in fields(Sampling)}
        sampling = Sampling(**{name: value for name, value in given.items() if name in names and value is not None})
        try:
            problems = sampling.problems()
        except TypeError as error:
            problems = [str(error)]
        if problems:
            raise ValueError(f"a task's generation_kwargs: {'; '.join(problems).replace('--', '')}")
        return Request(self.tok_encode(context)[-room:], given["max_gen_toks"], sampling, self.words.stop_ids, stop)


def known_tasks(tasks: list[str], folder: str | None) -> TaskManager:
    """What knows the tasks, which takes seconds to find; ValueError for one that there is not. No data is read."""
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            raise ValueError(f"--tasks {task}: no such file")
    manager = TaskManager(include_path=folder)
    for task in tasks:
        if not Path(task).is_file() and not manager.match_tasks([task]):
            near = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "name one of the harness's, or the path of a YAML file"
            raise ValueError(f"--tasks {task}: there is none; {hint}")
    return manager


def run_tasks(
    session: Session, tasks: list[str], manager: TaskManager, batch_size: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """The harness's results for tasks, given by name or as YAML files. settings: simple_evaluate's, by its names."""
    model = HarnessModel(session, batch_size)
    try:
        return simple_evaluate(model, tasks=tasks, task_manager=manager, **settings)
    except Exception as error:  # of a YAML file, a template, a task's own code, the hub: anything
        frames = traceback.extract_tb(error.__traceback__)
        if any(frame.filename == __file__ and frame.name != run_tasks.__name__ for frame in frames):
            raise  # of ours
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (at {where})"
        raise ValueError(
            f"--tasks: the harness ends with {reason}; look at the task's YAML, and where its data is"
        ) from None
