"""What commands need to generate: a model, its tokenizer, and settings from flags and
generation_config.json."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from litft import run_dir
from litft.args import ModelArgs, Sampling, SpeculativeArgs
from litft.args.processes import is_first_on_node, started_by
from litft.args.sampling import USUAL
from litft.data.tokenizer import Tokenizer
from litft.distributed.device_map import DeviceMap
from litft.distributed.devices import (
    DTYPES,
    check_devices,
    lacks_bf16,
    limit_threads,
    pick_accelerator,
    pick_generation_precision,
)
from litft.inference.decoder import Decoder
from litft.inference.fused_linears import fuse_linears, pack_weights
from litft.inference.generation import Completion, Request, generate_completions
from litft.inference.speculative import Drafter, DraftModel, PromptLookup
from litft.inference.tp_decoding import TensorParallelDecoder, make_tp_decoder
from litft.methods import disabled
from litft.model.config_file import read_object
from litft.model.placement import UNSHARDED, WeightPlacement
from litft.model.transformer import GPT
from litft.pretrained import PretrainedFolder, load_models, resolve

MAX_NEW_TOKENS = 256
# settings that generation_config.json may also hold, and their types
SETTING_TYPES = dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), (int, float))
SETTING_TYPES |= {"top_k": (int,), "max_new_tokens": (int,)}


class Session(NamedTuple):
    """An open model with its tokenizer and generation settings."""

    model: GPT
    tokenizer: Tokenizer
    sampling: Sampling
    max_new_tokens: int
    stop: list[str]
    compiled: bool
    # the processes that hold the model's shards; None: a single process
    tp_decoder: TensorParallelDecoder | None = None

    def decoder(self, rows: int, capacity: int, compiled: bool | None = None) -> Decoder:
        """Create a decoder for `rows` texts of up to `capacity` tokens. compiled: default the
        session's setting."""
        compiled = self.compiled if compiled is None else compiled
        if self.tp_decoder is None:
            make_decoder = Decoder
        else:
            make_decoder = self.tp_decoder.decoder
        return make_decoder(self.model, rows, capacity, compiled)

    def limit_threads(self, rows: int) -> None:
        """Use only as many CPU threads as speed up decoding `rows` texts with a model of this
        size."""
        limit_threads(self.model, rows)

    def generate(
        self, requests: list[Request], rows: int, desc: str, quiet: bool | None = None
    ) -> list[Completion]:
        """Generate complete answers, `rows` at once. desc: progress bar label. quiet: no bar; None:
        only in a terminal."""
        capacity = max(
            (len(request.ids) + request.max_new_tokens for request in requests), default=1
        )
        decoder = self.decoder(max(1, min(rows, len(requests))), capacity)
        with tqdm(total=len(requests), desc=desc, disable=quiet) as bar:
            return generate_completions(decoder, self.tokenizer, requests, done=bar.update)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Within the context, the model runs without its adapter."""
        with (
            disabled(self.model)
            if self.tp_decoder is None
            else self.tp_decoder.disabled(self.model)
        ):
            yield

    def request(self, ids: list[int], number: int = 0, is_chat: bool = True) -> Request:
        """Create a request for a prompt. number: added to the seed, so that prompts differ.

        is_chat: the answer has no leading white space, and has the marks of reasoning and tool
        calls.
        """
        if self.sampling.seed is None:
            seed = None
        else:
            seed = self.sampling.seed + number
        return Request(
            ids,
            self.max_new_tokens,
            sampling=replace(self.sampling, seed=seed),
            stop_ids=self.tokenizer.stop_ids,
            stop=self.stop,
            strip_leading=is_chat,
            shown_special_ids=self.tokenizer.structure_ids if is_chat else frozenset(),
        )


def missing_template_note(tokenizer: Tokenizer) -> str | None:
    """Return what to say before a chat with a model that has no chat template; None if it has
    one."""
    if tokenizer.own_template:
        return None
    base = run_dir.command("generate/base.py")
    return (
        f"note: the model has no chat template, so messages are written in Alpaca style; {base} "
        "continues a text"
    )


def open_session(args: ModelArgs) -> Session:
    """Open the model that a command names, or that of the newest finished run.

    Flags override generation_config.json.

    With several processes it returns in rank 0 only.
    """
    return _open_one(args, source_of(args))


def _open_one(args: ModelArgs, source: PretrainedFolder) -> Session:
    device, placement, tp_decoder = _devices(args, source)
    session = _open_sessions(args, [source], device, placement, tp_decoder)[0]
    fuse_linears(session.model, pack=not session.compiled)
    if tp_decoder:
        tp_decoder.start(session.model)
    return session


def open_sessions(args: ModelArgs, sources: Sequence[PretrainedFolder]) -> list[Session]:
    """Open models that share their base weights."""
    if len(sources) == 1:
        return [_open_one(args, sources[0])]
    device, placement, _ = _devices(args, sources[0])
    sessions = _open_sessions(args, list(sources), device, placement, None)
    if not sessions[0].compiled:
        pack_weights([session.model for session in sessions])
    return sessions


def source_of(args: ModelArgs) -> PretrainedFolder:
    """Resolve the folder that a command names, or that of the newest finished run."""
    folder = args.checkpoint_dir or run_dir.newest_finished()
    if not args.checkpoint_dir and is_first_on_node():
        print(
            f"using {folder}, the newest finished run; --checkpoint_dir names another model",
            file=sys.stderr,
        )
    source = resolve(folder, args.base_dir)
    source.check_base_dir(args.base_dir)
    return source


def _open_sessions(
    args: ModelArgs,
    sources: list[PretrainedFolder],
    device: torch.device,
    placement: WeightPlacement,
    tp_decoder: TensorParallelDecoder | None,
) -> list[Session]:
    """Open a session for each of several folders with the same base model."""
    all_settings = [_settings(args, source) for source in sources]
    tokenizers = [_tokenizer(source) for source in sources]
    for source in sources:
        warning = source.quantization_warning(source.quantization(args.quantize))
        if warning and not (tp_decoder and tp_decoder.rank):
            print(warning, file=sys.stderr)
    if args.precision == "auto" and (note := lacks_bf16(device)):
        print(note, file=sys.stderr)
    stored = sources[0].dtype(None) if args.for_speed else torch.float32
    precision = pick_generation_precision(args.precision, device, stored)
    models = load_models(sources, precision, device, args.quantize, placement)
    layer_counts = Counter(map(str, models[0].block_devices))
    if args.layers_per_device:
        print(
            "layers: " + ", ".join(f"{count} on {name}" for name, count in layer_counts.items()),
            file=sys.stderr,
        )
    compiled = args.compile == "true" or (
        args.compile == "auto" and device.type == "cuda" and len(layer_counts) == 1
    )
    sessions = []
    for model, tokenizer, settings in zip(models, tokenizers, all_settings, strict=True):
        sampling = Sampling(
            **{
                field.name: settings[field.name]
                for field in fields(Sampling)
                if field.name in settings
            }
        )
        _check_bias(sampling, model.config.vocab_size)
        max_new_tokens = settings.get("max_new_tokens", MAX_NEW_TOKENS)
        sessions.append(
            Session(
                model.requires_grad_(False),
                tokenizer,
                sampling,
                max_new_tokens,
                settings["stop"],
                compiled,
                tp_decoder,
            )
        )
    return sessions


def _devices(
    args: ModelArgs, source: PretrainedFolder
) -> tuple[torch.device, WeightPlacement, TensorParallelDecoder | None]:
    """Return the input device, the weight placement of this process, and the tensor-parallel
    processes, if several."""
    first_device = torch.device(pick_accelerator(args.accelerator))
    if args.layers_per_device is None:
        tp_decoder = make_tp_decoder(args.devices, args.accelerator, source)
        if tp_decoder:
            return (tp_decoder.device, tp_decoder.placement, tp_decoder)
        return (first_device, UNSHARDED, None)
    launcher = started_by()
    if launcher is not None:
        raise ValueError(
            f"--layers_per_device: one process uses all devices, but {launcher[0]} has started "
            "several; start a single one"
        )
    check_devices(first_device.type, args.devices)
    devices = [
        torch.device("cuda", index) if first_device.type == "cuda" else first_device
        for index in range(args.devices)
    ]
    if args.layers_per_device == "auto":
        counts = None
    else:
        counts = [int(count) for count in args.layers_per_device.split(",")]
    return devices[0], DeviceMap(devices, counts), None


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError if logit_bias has tokens outside the vocabulary, or bans every token."""
    if len([value for value in sampling.logit_bias.values() if value == -math.inf]) >= vocab_size:
        raise ValueError(
            "generation_config.json: suppress_tokens leaves no token to sample; fix the file"
        )
    outside = []
    for token in sampling.logit_bias:
        if token >= vocab_size:
            outside.append(token)
    if outside:
        raise ValueError(
            f"--logit_bias {outside[0]}: the model's vocabulary has {vocab_size} tokens; remove "
            "the id"
        )


def _tokenizer(source: PretrainedFolder) -> Tokenizer:
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"{source.folder} has no tokenizer; copy tokenizer.json or tokenizer.model into it"
        )
    return tokenizer


def _settings(args: ModelArgs, source: PretrainedFolder) -> dict[str, Any]:
    """Return the settings of generation_config.json, interpreted as by transformers, overridden by
    the flags."""
    settings = _read_generation_config(source)
    banned = {}
    for token in settings.pop("suppress_tokens"):
        if token < source.config.vocab_size:
            banned[token] = -math.inf
    flags = {
        name: getattr(args, name)
        for name in (*SETTING_TYPES, "presence_penalty", "frequency_penalty", "seed")
    }
    bias = {
        int(token): float(value) for token, value in json.loads(args.logit_bias or "{}").items()
    }
    settings |= {name: value for name, value in flags.items() if value is not None}
    max_new_tokens = settings.get("max_new_tokens", MAX_NEW_TOKENS)
    if max_new_tokens < 1:
        raise ValueError(
            f"generation_config.json: max_new_tokens {max_new_tokens}: must be at least 1; give "
            "--max_new_tokens"
        )
    return settings | {"stop": args.stop or settings["stop_strings"], "logit_bias": banned | bias}


def _read_generation_config(source: PretrainedFolder) -> dict[str, Any]:
    """Read sampling settings, stop texts and suppressed tokens of generation_config.json.

    Raise ValueError if invalid.
    """
    files = (folder / "generation_config.json" for folder in (source.folder, source.base))
    path = next((file for file in files if file.is_file()), None)
    config = read_object(path) if path else {}
    settings = {name: config[name] for name in SETTING_TYPES if config.get(name) is not None}
    invalid = [
        f"{name} {value!r}"
        for name, value in settings.items()
        if type(value) not in SETTING_TYPES[name]
    ]
    for name, expected_type in (("stop_strings", str), ("suppress_tokens", int)):
        value = config.get(name) or []
        settings[name] = [value] if isinstance(value, expected_type) else value
        is_valid = isinstance(settings[name], list) and all(
            type(item) is expected_type and item != "" for item in settings[name]
        )
        if not is_valid or any(isinstance(item, int) and item < 0 for item in settings[name]):
            invalid.append(f"{name} {value!r}")
    if invalid:
        raise ValueError(f"{path}: {', '.join(invalid)[:200]}: not valid; fix or remove it")
    if config.get("do_sample") is False:
        settings["temperature"] = 0.0
    elif config.get("do_sample"):  # then transformers' defaults apply to what it leaves out
        settings = {"top_k": 50} | settings
    elif not settings.keys() & {"temperature", "top_k", "top_p", "min_p"}:
        settings |= USUAL
    settings["top_k"] = settings.get("top_k") or None  # 0: all
    ignored = _ignored_settings(config)
    if ignored:
        print(
            f"{path}: {', '.join(ignored)}: ignored, litft does not support it; answers differ",
            file=sys.stderr,
        )
    sampling_fields = {}
    for field in fields(Sampling):
        if field.name in settings:
            sampling_fields[field.name] = settings[field.name]
    problems = Sampling(**sampling_fields).problems()
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems).replace('--', '')}; fix or remove it")
    return settings


# settings of generation_config.json that change transformers' answers, with the values that change
# nothing
_UNSUPPORTED_SETTINGS: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "length_penalty": (1.0, 0.0),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ({},),
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
        if name == "length_penalty" and config.get("num_beams", 1) == 1:  # of beam search alone
            continue
        ignored.append(f"{name} {str(value)[:40]}")
    return ignored


def make_drafter(args: SpeculativeArgs, session: Session, capacity: int) -> Drafter | None:
    """Create the drafter that the flags ask for, if any.

    Raise ValueError if the draft model has another vocabulary.
    """
    if args.lookup:
        return PromptLookup()
    if args.draft_dir is None:
        return None
    device = session.model.device
    source = resolve(args.draft_dir)
    if _tokenizer(source).vocabulary() != session.tokenizer.vocabulary():
        raise ValueError(
            f"--draft_dir {args.draft_dir}: its vocabulary differs from the model's; name a model "
            "of the same family"
        )
    precision = next(name for name, dtype in DTYPES.items() if dtype == session.model.dtype)
    model = source.model(precision, device, "none").requires_grad_(False)
    fuse_linears(model, pack=not session.compiled)
    return DraftModel(
        Decoder(model, 1, capacity, session.compiled), session.model.config.vocab_size
    )
