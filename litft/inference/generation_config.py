"""The settings of generation_config.json, interpreted as by transformers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litft.args import Sampling
from litft.args.sampling import DEFAULT_SAMPLING
from litft.model.config_file import read_object

MAX_NEW_TOKENS = 256
# settings that the file may hold, and their types
SETTING_TYPES = dict.fromkeys(
    ("temperature", "top_p", "min_p", "repetition_penalty"), (int, float)
)
SETTING_TYPES |= {"top_k": (int,), "max_new_tokens": (int,)}


@dataclass(frozen=True)
class GenerationConfig:
    """What a folder says about how its model's answers are generated."""

    path: Path | None  # None: there is no file
    sampling: dict[str, Any]  # fields of `Sampling`
    max_new_tokens: int
    stop: list[str]
    suppressed: list[int]  # tokens that no answer contains
    # settings that transformers obeys and litft does not, with their values
    ignored: list[str]

    def logit_bias(
        self, vocab_size: int, given: Mapping[int | str, float] | None
    ) -> dict[int, float]:
        """Return the logit bias of the suppressed tokens, and what is given for others.

        given: by token id, which is a text in JSON. Raises ValueError if it is no number, or no
        token of the vocabulary.
        """
        bias = {}
        for token in self.suppressed:
            if token < vocab_size:
                bias[token] = -math.inf
        for token, value in (given or {}).items():
            if not 0 <= int(token) < vocab_size:
                raise ValueError(
                    f"--logit_bias {token}: the model's vocabulary has {vocab_size} tokens; remove "
                    "the id"
                )
            bias[int(token)] = float(value)
        return bias

    def note(self) -> str:
        """Return what to say about settings that are ignored."""
        names = ", ".join(self.ignored)
        return f"{self.path}: {names}: ignored, litft does not support it; answers differ"


def read_generation_config(folders: Sequence[Path]) -> GenerationConfig:
    """Read generation_config.json of the first folder that has one.

    Raises ValueError if a setting is not valid.
    """
    path = None
    for folder in folders:
        file = folder / "generation_config.json"
        if path is None and file.is_file():
            path = file

    config = read_object(path) if path else {}
    settings: dict[str, Any] = {}
    invalid = []
    for name, types in SETTING_TYPES.items():
        value = config.get(name)
        if value is None:
            continue
        settings[name] = value
        if type(value) not in types:
            invalid.append(f"{name} {value!r}")

    stop = _list_setting(config, "stop_strings", str, invalid)
    suppressed = _list_setting(config, "suppress_tokens", int, invalid)
    if invalid:
        raise ValueError(f"{path}: {', '.join(invalid)[:200]}: not valid; fix or remove it")

    # as in transformers, do_sample decides whether the other settings count
    if config.get("do_sample") is False:
        settings["temperature"] = 0.0
    elif config.get("do_sample"):
        # then transformers' defaults apply to what it leaves out
        settings = {"top_k": 50} | settings
    elif not settings.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        # the file says nothing about sampling
        settings |= DEFAULT_SAMPLING

    settings["top_k"] = settings.get("top_k") or None  # 0: all
    max_new_tokens = settings.pop("max_new_tokens", MAX_NEW_TOKENS)

    problems = Sampling(**settings).problems()
    if problems:
        raise ValueError(
            f"{path}: {'; '.join(problems).replace('--', '')}; fix or remove it"
        )
    return GenerationConfig(
        path=path,
        sampling=settings,
        max_new_tokens=max_new_tokens,
        stop=stop,
        suppressed=suppressed,
        ignored=_ignored_settings(config),
    )


def _list_setting(
    config: dict[str, Any], name: str, item_type: type, invalid: list[str]
) -> list[Any]:
    """Return a setting that is one item or a list of them; add it to `invalid` if it is neither."""
    value = config.get(name) or []
    items = [value] if isinstance(value, item_type) else value
    is_valid = isinstance(items, list)
    if is_valid:
        for item in items:
            # type(), since True is an int for isinstance
            is_negative = isinstance(item, int) and item < 0
            if type(item) is not item_type or item == "" or is_negative:
                is_valid = False
    if not is_valid:
        invalid.append(f"{name} {value!r}")
    return items


# settings of generation_config.json that change
# transformers' answers, with the values that change nothing
_UNSUPPORTED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0, 0.0),
    # 20: transformers' own default, which old files have
    "max_length": (20,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ({},),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1.0,),
    "watermarking_config": ({},),
}


def _ignored_settings(config: dict[str, Any]) -> list[str]:
    """Return the settings of generation_config.json that transformers obeys and litft does not,
    with their values."""
    ignored = []
    for name, neutral in _UNSUPPORTED_SETTINGS.items():
        value = config.get(name)
        if value is None or value in neutral:
            continue
        # of beam search alone
        if name == "length_penalty" and config.get("num_beams", 1) == 1:
            continue
        # it counts the prompt, too, and the other limit has priority
        if name == "max_length" and config.get("max_new_tokens") is not None:
            continue
        ignored.append(f"{name} {str(value)[:40]}")
    return ignored
