"""What commands need to generate: a model, its tokenizer, and settings from flags and
generation_config.json."""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from litft import run_dir
from litft.args import ModelArgs, Sampling, SpeculativeArgs
from litft.args.processes import is_first_on_node, started_by
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
from litft.families import fits_fp16
from litft.inference.decoder import Decoder
from litft.inference.fused_linears import fuse_linears, pack_weights
from litft.inference.generation import Completion, Request, generate_completions
from litft.inference.generation_config import SETTING_TYPES, read_generation_config
from litft.inference.speculative import Drafter, DraftModel, PromptLookup
from litft.inference.tp_decoding import (
    TensorParallelDecoder,
    make_tp_decoder,
    note_on_cut_blocks,
)
from litft.methods import disabled
from litft.model.placement import SINGLE_DEVICE, WeightPlacement
from litft.model.transformer import GPT
from litft.pretrained.folder import PretrainedFolder, resolve
from litft.pretrained.load import load_models, load_network


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
        capacity = 1
        for request in requests:
            capacity = max(capacity, len(request.ids) + request.max_new_tokens)
        decoder = self.decoder(max(1, min(rows, len(requests))), capacity)
        with tqdm(total=len(requests), desc=desc, disable=quiet) as bar:
            return generate_completions(decoder, self.tokenizer, requests, done=bar.update)

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Within the context, the model runs without its adapter."""
        if self.tp_decoder is None:
            without_adapter = disabled(self.model)
        else:
            without_adapter = self.tp_decoder.disabled(self.model)
        with without_adapter:
            yield

    def request(self, ids: list[int], number: int = 0, is_chat: bool = True) -> Request:
        """Create a request for a prompt. number: added to the seed, so that prompts differ.

        is_chat: the answer has no leading white space, and has the marks of reasoning and tool
        calls.
        """
        if self.sampling.seed is None:
            seed = None
        else:
            # samples of one prompt differ, and the same command gives the same answers
            seed = self.sampling.seed + number
        if is_chat:
            shown_special_ids = self.tokenizer.answer_ids
        else:
            shown_special_ids = frozenset()
        return Request(
            ids,
            self.max_new_tokens,
            sampling=replace(self.sampling, seed=seed),
            stop_ids=self.tokenizer.stop_ids,
            stop=self.stop,
            strip_leading=is_chat,
            shown_special_ids=shown_special_ids,
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
    # before `start`, so that the other ranks have the same modules
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
    # not fused: each model would have a copy of the fused weights, and they are shared
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
    # check settings and tokenizers before the weights are read, which takes much longer
    all_settings = []
    tokenizers = []
    for source in sources:
        all_settings.append(_settings(args, source))
    for source in sources:
        tokenizers.append(_tokenizer(source))
    for source in sources:
        warning = source.quantization_warning(source.quantization(args.quantize))
        if warning and not (tp_decoder and tp_decoder.rank):
            print(warning, file=sys.stderr)

    in_range = all(fits_fp16(source.config) for source in sources)
    stored = sources[0].dtype(None) if args.for_speed else torch.float32
    precision = pick_generation_precision(args.precision, device, stored, in_range)
    note = lacks_bf16(device, precision)
    if device.type == "cpu" and precision == "bf16":
        note = (
            "computing in bf16, which is fast on this CPU; --precision fp32 is more exact"
        )
    if args.precision == "auto" and note and is_first_on_node():
        print(note, file=sys.stderr)
    models = load_models(sources, precision, device, args.quantize, placement)

    layer_counts = Counter(map(str, models[0].block_devices))
    if args.layers_per_device:
        print(f"layers: {_places(layer_counts)}", file=sys.stderr)

    # a graph over several devices cannot be recorded as one
    compiled = args.compile == "true" or (
        args.compile == "auto" and device.type == "cuda" and len(layer_counts) == 1
    )

    sessions = []
    for model, tokenizer, settings in zip(models, tokenizers, all_settings, strict=True):
        sessions.append(_session(model, tokenizer, settings, compiled, tp_decoder))
    return sessions


def _places(layer_counts: Counter[str]) -> str:
    """Return how many layers each device has, for a message."""
    return ", ".join(f"{count} on {name}" for name, count in layer_counts.items())


def _session(
    model: GPT,
    tokenizer: Tokenizer,
    settings: dict[str, Any],
    compiled: bool,
    tp_decoder: TensorParallelDecoder | None,
) -> Session:
    max_new_tokens = settings.pop("max_new_tokens")
    stop = settings.pop("stop")
    # what is left are the settings of sampling
    sampling = Sampling(**settings)
    _check_bias(sampling, model.config.vocab_size)
    model.requires_grad_(False)
    return Session(model, tokenizer, sampling, max_new_tokens, stop, compiled, tp_decoder)


def _devices(
    args: ModelArgs, source: PretrainedFolder
) -> tuple[torch.device, WeightPlacement, TensorParallelDecoder | None]:
    """Return the input device, the weight placement of this process, and the tensor-parallel
    processes, if several."""
    # without --layers_per_device, --devices means tensor parallelism
    first_device = torch.device(pick_accelerator(args.accelerator))
    if args.layers_per_device is None:
        tp_decoder = make_tp_decoder(args.devices, args.accelerator, source)
        if tp_decoder:
            kind = source.quantization(args.quantize)
            note = note_on_cut_blocks(source, tp_decoder.placement, kind)
            if note and tp_decoder.rank == 0:
                print(note, file=sys.stderr)
            return (tp_decoder.device, tp_decoder.placement, tp_decoder)
        return (first_device, SINGLE_DEVICE, None)

    # one process, whose layers are on several devices
    launcher = started_by()
    if launcher is not None:
        raise ValueError(
            f"--layers_per_device: one process uses all devices, but {launcher[0]} has started "
            "several; start a single one"
        )
    check_devices(first_device.type, args.devices)
    if first_device.type == "cuda":
        devices = [torch.device("cuda", index) for index in range(args.devices)]
    else:
        devices = [first_device] * args.devices
    if args.layers_per_device == "auto":
        counts = None
    else:
        counts = [int(count) for count in args.layers_per_device.split(",")]
    return devices[0], DeviceMap(devices, counts), None


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    """Raise ValueError if logit_bias bans every token."""
    num_banned = list(sampling.logit_bias.values()).count(-math.inf)
    if num_banned >= vocab_size:
        raise ValueError(
            "generation_config.json: suppress_tokens leaves no token to sample; fix the file"
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
    stored = read_generation_config([source.folder, source.base])
    if stored.ignored:
        print(stored.note(), file=sys.stderr)

    flags = {}
    for name in (*SETTING_TYPES, "presence_penalty", "frequency_penalty", "seed"):
        value = getattr(args, name)
        if value is not None:
            flags[name] = value

    given = json.loads(args.logit_bias or "{}")
    bias = stored.logit_bias(source.config.vocab_size, given)
    settings = {"max_new_tokens": stored.max_new_tokens} | stored.sampling | flags
    if settings["max_new_tokens"] < 1:
        raise ValueError(
            f"generation_config.json: max_new_tokens {settings['max_new_tokens']}: must be at "
            "least 1; give --max_new_tokens"
        )
    return settings | {"stop": args.stop or stored.stop, "logit_bias": bias}


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
    model = load_network(source, precision, device, "none").requires_grad_(False)
    fuse_linears(model, pack=not session.compiled)
    return DraftModel(
        Decoder(model, 1, capacity, session.compiled), session.model.config.vocab_size
    )
