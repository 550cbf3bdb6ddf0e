"""lm-evaluation-harness on litft's network: a model class that answers like the harness's Hugging
Face backend."""

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
    import evaluate  # noqa: F401 - imported by the tasks' code: without it they would fail one by one
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ValueError(
        f"--tasks needs the package {error.name}; pip install 'litft[eval]'"
    ) from None

from litft.args import Sampling
from litft.inference.generation import Completion, Request
from litft.inference.session import Session

# per forward pass, 1 GiB in fp32: long texts get smaller batches
MAX_LOGITS = 2**28
DEFAULT_MAX_TOKENS = 256  # for tasks that set no limit
# settings of generation_config.json that change greedy answers, too
OF_FOLDER = ("repetition_penalty", "logit_bias")

# B rows, N maximum continuation length, V vocabulary size

# token ids of a context and of its continuation
Pair = tuple[list[int], list[int]]


class HarnessModel(TemplateLM):
    """A model for the harness. batch_size: texts per forward pass."""

    def __init__(self, session: Session, batch_size: int) -> None:
        super().__init__()
        self.session = session
        self.batch_size = batch_size
        self._tokenizer = session.tokenizer
        self.max_length = session.model.config.max_positions
        self._device = session.model.device

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return self._tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        if self._tokenizer.bos_id is not None:
            return self._tokenizer.bos_id
        return self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in the harness's request cache."""
        return self._tokenizer.digest()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template, if one is requested."""
        if chat_template:
            return self._tokenizer.chat_template
        return None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a task's turns in the chat template.

        Without a generation prompt, the last turn stays open.
        """
        if add_generation_prompt:
            return self._tokenizer.apply_chat_template(
                chat_history, add_generation_prompt=True
            )
        # the last turn is the beginning of the answer
        beginning = self._tokenizer.apply_chat_template(
            chat_history[:-1], add_generation_prompt=True
        )
        return beginning + chat_history[-1]["content"]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Encode a text, with the BOS that the model's tokenizer adds unless the text already has
        one."""
        return self._tokenizer.encode(
            string, bos=False if add_special_tokens is False else None
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Return for each continuation its log-probability, and whether it is the greedy one."""
        return self._scores(
            [(context, continuation) for _, context, continuation in requests], disable_tqdm
        )

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text.

        Windows of the context length predict each token exactly once.
        """
        windows: list[Pair] = []
        counts = []
        for request in requests:
            ids = self.tok_encode(request.args[0])
            text_windows = get_rolling_token_windows(
                ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            # make the windows of all texts one list, which is batched as a whole
            count_before = len(windows)
            windows += map(make_disjoint_window, text_windows)
            counts.append(len(windows) - count_before)
        scores = [score for score, _ in self._scores(windows, disable_tqdm)]
        sums = []
        start = 0
        for count in counts:
            sums.append(sum(scores[start : start + count]))
            start += count
        return sums

    @torch.inference_mode()
    def _scores(self, pairs: list[Pair], quiet: bool) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        # one-token choices share their input, which is computed once
        pairs_by_input: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(continuation)} tokens: the context length is "
                    f"{self.max_length}"
                )
            # the last token is only predicted, and too long a context loses its beginning
            pairs_by_input.setdefault(
                tuple([*context, *continuation][-self.max_length - 1 : -1]), []
            ).append(number)
        with tqdm(total=len(pairs), desc="texts", disable=quiet or None) as bar:
            for inputs in self._batches(pairs_by_input, pairs):
                longest = 0
                for input_ids in inputs:
                    for number in pairs_by_input[input_ids]:
                        longest = max(longest, len(pairs[number][1]))
                for input_ids, logprobs in zip(
                    inputs, self._logprobs(inputs, longest), strict=True
                ):
                    for number in pairs_by_input[input_ids]:
                        # a shorter continuation is at the end of the kept positions
                        ids = torch.tensor(pairs[number][1], device=logprobs.device)
                        predicted = logprobs[longest - len(ids) :]
                        total = float(predicted.gather(1, ids[:, None]).sum())
                        scores[number] = total, bool((predicted.argmax(-1) == ids).all())
                    bar.update(len(pairs_by_input[input_ids]))
        return scores

    def _batches(
        self, pairs_by_input: dict[tuple[int, ...], list[int]], pairs: list[Pair]
    ) -> Iterator[list[tuple[int, ...]]]:
        """Yield batches of inputs of similar length. MAX_LOGITS limits their size."""
        batch: list[tuple[int, ...]] = []
        longest = 0
        for input_ids in sorted(pairs_by_input, key=len, reverse=True):
            length = max(len(pairs[number][1]) for number in pairs_by_input[input_ids])
            # elements of the logits, which take most of the memory
            size = (
                (len(batch) + 1)
                * max(longest, length)
                * self.session.model.config.vocab_size
            )
            if batch and (len(batch) == self.batch_size or size > MAX_LOGITS):
                yield batch
                batch = []
                longest = 0
            batch.append(input_ids)
            longest = max(longest, length)
        if batch:
            yield batch

    def _logprobs(self, inputs: list[tuple[int, ...]], count: int) -> Tensor:
        """Return log-probabilities (B, N, V) at the last `count` positions of each input,
        right-aligned if it is shorter."""
        tokens = torch.zeros(len(inputs), max(map(len, inputs)), dtype=torch.long)
        positions = torch.zeros_like(tokens)
        logits_to_keep = torch.zeros(len(inputs), count, dtype=torch.long)
        for row, input_ids in enumerate(inputs):
            length = len(input_ids)
            # right padding: causal attention does not see it
            tokens[row, :length] = torch.tensor(input_ids)
            positions[row, :length] = torch.arange(length)
            kept = torch.arange(length - count, length)
            # a shorter input repeats its first position, which is not read
            logits_to_keep[row] = kept.clamp(min=0)
        logits = self.session.model(
            tokens.to(self._device),
            positions=positions.to(self._device),
            logits_to_keep=logits_to_keep.to(self._device),
        )
        return logits.float().log_softmax(-1)

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        """Return answers that end at one of the task's stop strings.

        Contexts that are too long lose their beginning.
        """
        prompts = [self._request(*request.args) for request in requests]
        answers = self.session.generate(
            prompts, self.batch_size, "answers", quiet=disable_tqdm or None
        )
        return [self._as_decoded_alone(answer) for answer in answers]

    def _as_decoded_alone(self, answer: Completion) -> str:
        """Return the text of an answer as the harness's own backend has it.

        It decodes an answer's tokens without the prompt. Decoders of SentencePiece's kind then
        leave out the space before the first word.
        """
        first_alone = self._tokenizer.decode(answer.tokens[:1])
        if answer.text.startswith(" ") and not first_alone.startswith(" "):
            return answer.text[1:]
        return answer.text

    def _request(self, context: str, settings: dict[str, Any]) -> Request:
        # values of a task's YAML file, of any type
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(settings, DEFAULT_MAX_TOKENS))
        # sampling only if the task asks for it
        if kwargs["do_sample"]:
            kwargs["temperature"] = kwargs.get("temperature", 1.0)
        else:
            kwargs["temperature"] = 0.0
        max_prompt_length = self.max_length - kwargs["max_gen_toks"]
        if max_prompt_length < 1:
            raise ValueError(
                f"a task asks for {kwargs['max_gen_toks']} tokens: the model's context length is "
                f"{self.max_length}"
            )
        until = kwargs.get("until") or []
        if isinstance(until, str):
            until = [until]
        stop = []
        for text in until:
            if text:
                stop.append(text)

        # as in transformers' `generate`, which the harness calls with settings of the task; those
        # without a field in Sampling are left out
        chosen: dict[str, Any] = {}
        for name in OF_FOLDER:
            chosen[name] = getattr(self.session.sampling, name)
        for item in fields(Sampling):
            if kwargs.get(item.name) is not None:
                chosen[item.name] = kwargs[item.name]
        sampling = Sampling(**chosen)
        try:
            # a value of another type raises a TypeError
            problems = sampling.problems()
        except TypeError as error:
            problems = [str(error)]
        if problems:
            raise ValueError(
                f"a task's generation_kwargs: {'; '.join(problems).replace('--', '')}"
            )
        return Request(
            self.tok_encode(context)[-max_prompt_length:],
            kwargs["max_gen_toks"],
            sampling,
            self._tokenizer.stop_ids,
            stop,
        )


def find_tasks(tasks: list[str], folder: str | None) -> TaskManager:
    """Return the harness's task manager, which takes seconds to build.

    Raise ValueError for unknown tasks. Reads no data.
    """
    for task in tasks:
        if task.endswith((".yaml", ".yml")) and not Path(task).is_file():
            raise ValueError(f"--tasks {task}: no such file")
    # custom tasks come from the folder
    manager = TaskManager(include_path=folder)
    for task in tasks:
        if not Path(task).is_file() and not manager.match_tasks([task]):
            matches = difflib.get_close_matches(task, manager.all_tasks, n=1)
            if matches:
                hint = f"did you mean {matches[0]}?"
            else:
                hint = "name a task of the harness, or the path of a YAML file"
            raise ValueError(f"--tasks {task} does not exist; {hint}")
    return manager


def run_tasks(
    session: Session,
    tasks: list[str],
    manager: TaskManager,
    batch_size: int,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Run tasks, given by name or as YAML files, and return the harness's results. settings: of
    `simple_evaluate`."""
    model = HarnessModel(session, batch_size)
    try:
        results = simple_evaluate(model, tasks=[*tasks], task_manager=manager, **settings)
    except Exception as error:
        # from a YAML file, a template, a task's code, the hub: any kind
        frames = traceback.extract_tb(error.__traceback__)
        if any(
            frame.filename == __file__ and frame.name != run_tasks.__name__
            for frame in frames
        ):
            raise  # an error of this module
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
        reason = (
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]} (at {where})"
        )
        raise ValueError(
            f"--tasks: the harness failed with {reason}; look at the task's YAML file and its data"
        ) from None
    assert results is not None  # as of every first process
    return dict(results)
