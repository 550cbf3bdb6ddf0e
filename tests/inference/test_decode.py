"""Greedy tokens against transformers' generate: plain, batched, in chunks, compiled, with
speculative decoding."""

import statistics
import time
from dataclasses import replace

import pytest
import torch
from parity import perturb, relative
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import litft
from litft.args import LoRAArgs, Sampling
from litft.data.tokenizer_backends import common_prefix_length
from litft.inference.decoder import Decoder
from litft.inference.fused_linears import fuse_linears
from litft.inference.generation import Request, generate_batch
from litft.inference.speculative import DraftModel, PromptLookup
from litft.inference.streaming import prompt_ids
from litft.methods import LoRA
from litft.pretrained.folder import resolve

NEW = {"demo": 64, "stories15M": 80, "SmolLM2-135M-Instruct": 48}
FEW = 40  # for tests that compute each token several times
PROMPTS = {
    "demo": [
        [{"role": "user", "content": "What is the capital of France?"}],
        [{"role": "user", "content": "Tell me a story."}],
        [{"role": "user", "content": "Name a color, then the same color again."}],
    ],
    "stories15M": [
        "Once upon a time, a small",
        "The dog",
        "Lily and Tom went to the big park with their mom and",
    ],
    "SmolLM2-135M-Instruct": [
        [
            {
                "role": "user",
                "content": "What is the capital of France, and what is it known for?",
            }
        ],
        [{"role": "user", "content": "Tell me a story."}],
        [
            {
                "role": "user",
                "content": "Write a poem about the sea, then the same poem again.",
            }
        ],
    ],
}


class Case:
    """A model and the tokens that transformers generates for its prompts."""

    def __init__(self, folder, prompts, new):
        self.folder = folder
        self.model, self.tokenizer = litft.load(folder, precision="fp32")
        self.new = new
        self.ids = [prompt_ids(self.tokenizer, prompt) for prompt in prompts]
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self.expected = [self.reference(reference, ids) for ids in self.ids]

    def reference(self, model, ids):
        settings = dict(
            max_new_tokens=self.new,
            min_new_tokens=self.new,
            do_sample=False,
            eos_token_id=None,
        )
        prompt = torch.tensor([ids])
        # without a mask, generate mistakes the end tokens of earlier turns for padding
        return model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[
            0, len(ids) :
        ].tolist()

    def generate(self, decoder, drafter=None, new=None):
        """Return the tokens and the statistics of each answer."""
        requests = [Request(ids, new or self.new, Sampling(0.0)) for ids in self.ids]
        tokens, stats = {}, {}
        for number, piece in generate_batch(decoder, self.tokenizer, requests, drafter):
            tokens.setdefault(number, []).extend(piece.tokens)
            stats[number] = piece.stats
        return [tokens[number] for number in sorted(tokens)], [
            stats[number] for number in sorted(stats)
        ]


@pytest.fixture(
    scope="module",
    params=[
        "demo",
        "stories15M",
        pytest.param("SmolLM2-135M-Instruct", marks=pytest.mark.slow),
    ],
)
def case(request, checkpoints):
    return Case(checkpoints[request.param], PROMPTS[request.param], NEW[request.param])


# tests that do not depend on the tokenizer, template or tied head use only the smaller model
small = pytest.mark.parametrize("case", ["demo"], indirect=True)


def capacity(case):
    return max(map(len, case.ids)) + case.new


def test_greedy_tokens_equal_transformers(case):
    assert case.generate(Decoder(case.model, 1, capacity(case)))[0] == case.expected


def test_three_prompts_in_a_batch_of_two(case):
    decoder = Decoder(case.model, 2, capacity(case))
    assert case.generate(decoder)[0] == case.expected
    assert decoder.processed <= sum(map(len, case.ids)) + 3 * case.new


@small
def test_prefill_in_small_chunks(case, monkeypatch):
    monkeypatch.setattr("litft.inference.decoder.PREFILL_CHUNK", 7)
    assert case.generate(Decoder(case.model, 3, capacity(case)))[0] == case.expected


@small
def test_speculative_decoding_with_prompt_lookup(case):
    actual, stats = case.generate(Decoder(case.model, 1, capacity(case)), PromptLookup())
    assert actual == case.expected
    assert all(0 <= answer.accepted <= answer.drafted for answer in stats) and sum(
        answer.accepted for answer in stats
    )


@small
def test_speculative_decoding_with_a_draft_model(case):
    """Drafts of the model itself are always accepted; without its last layer, some are."""
    draft, _ = litft.load(case.folder, precision="fp32")
    vocab_size, length = draft.config.vocab_size, capacity(case) + 4
    _, stats = case.generate(
        Decoder(case.model, 1, capacity(case)),
        DraftModel(Decoder(draft, 1, length), vocab_size),
        FEW,
    )
    assert all(answer.accepted == answer.drafted for answer in stats)
    draft.blocks, draft.rotary_indices = draft.blocks[:-1], draft.rotary_indices[:-1]
    draft.config = replace(draft.config, layers=draft.config.layers[:-1])
    actual, stats = case.generate(
        Decoder(case.model, 1, capacity(case)),
        DraftModel(Decoder(draft, 1, length), vocab_size),
        FEW,
    )
    assert (
        actual == [tokens[:FEW] for tokens in case.expected]
        and 0 < stats[0].accepted < stats[0].drafted
    )


@small
def test_fused_linears_compute_the_same(case):
    tokens = torch.tensor(case.ids[:1])
    model, _ = litft.load(case.folder, precision="fp32")
    size = sum(parameter.nbytes for parameter in model.parameters())
    fuse_linears(model.requires_grad_(False))
    assert torch.equal(model(tokens), case.model(tokens))
    assert sum(parameter.nbytes for parameter in model.parameters()) == size, (
        "no second copy"
    )
    assert case.generate(Decoder(model, 1, capacity(case)), new=FEW)[0] == [
        tokens[:FEW] for tokens in case.expected
    ]


@pytest.mark.halved
def test_packed_weights_compute_the_same(case):
    """Weights in oneDNN's layout give the same logits, tokens and loss; an embedding tied to the
    head stays unpacked."""
    tokens = torch.tensor(case.ids[:1])
    model, _ = litft.load(case.folder, precision="fp32")
    fuse_linears(model.requires_grad_(False), pack=True)
    assert (
        model.blocks[0].attention.o_proj.weight.is_mkldnn
        and not model.embed.weight.is_mkldnn
    )
    assert model.lm_head.weight.is_mkldnn is not model.config.tied
    assert relative(model(tokens), case.model(tokens)) <= 1e-5
    assert case.generate(Decoder(model, 1, capacity(case)), new=FEW)[0] == [
        tokens[:FEW] for tokens in case.expected
    ]
    targets = tokens.roll(-1, 1)
    (total, count), (expected, _) = (
        model(tokens, targets=targets),
        case.model(tokens, targets=targets),
    )
    assert count == tokens.numel() and abs(total - expected) <= 1e-4 * expected


@small
@pytest.mark.parametrize("dora", [False, True])
def test_weights_under_an_adapter_are_packed(case, dora):
    """Except those that the adapter reads: DoRA computes the norms of their rows."""
    logits = []
    for pack in (False, True):
        model, _ = litft.load(case.folder, precision="fp32")
        method = LoRA(LoRAArgs(r=4, targets=["v_proj", "o_proj"], dora=dora))
        method.select_targets(model, resolve(case.folder).adapter_rules)
        torch.manual_seed(0)
        method.attach(model)
        perturb(method.parameters(model).values())
        fuse_linears(model.requires_grad_(False), pack)
        logits.append(model(torch.tensor(case.ids[:1])))
    assert model.blocks[0].attention.o_proj.weight.is_mkldnn is not dora
    assert model.blocks[0].attention.q_proj.weight.is_mkldnn
    # thirty perturbed blocks amplify rounding: packed or not, fp32 differs from double precision by
    # up to 1.2e-4
    assert relative(*logits) <= 1e-3


@small
@pytest.mark.slow
@pytest.mark.halved
def test_compiled(case):
    assert (
        case.generate(Decoder(case.model, 2, capacity(case), compiled=True))[0]
        == case.expected
    )


@pytest.fixture
def windowed(request, make_model):
    """A model whose sliding window is 8 tokens, with three layers or as many as a test asks for."""
    sizes = dict(vocab_size=64, sliding_window=8, max_position_embeddings=200)
    layers = getattr(request, "param", 3)
    return litft.load(make_model(MistralConfig, num_hidden_layers=layers, **sizes)[1])[0]


def test_the_cache_is_on_the_compute_device(windowed):
    """The weights may be offloaded to host memory."""
    windowed.compute_device = torch.device("meta")
    cache = Decoder(windowed, 1, 20).cache
    assert all(layer.keys.is_meta for layer in cache.layers)


@torch.no_grad()
def greedy_tokens(model, ids, count):
    """Return greedy tokens, computed without a KV cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize(
    "windowed, compiled, async_steps",
    [
        pytest.param(3, False, False, id="False-False"),
        pytest.param(3, False, True, id="False-True"),
        # compiling takes most of the time, and grows with the layers
        pytest.param(1, True, True, id="True-True", marks=pytest.mark.slow),
    ],
    indirect=["windowed"],
)
@pytest.mark.halved
def test_rows_are_reused_by_waiting_requests(windowed, compiled, async_steps):
    """Five answers of different lengths share two rows; each equals the answer without a cache."""
    prompts, counts = (
        [[1, 2, 3], [9] * 30, [5, 6], [7, 8, 9, 10, 11, 12], [1, 2, 3, 4]],
        [9, 20, 3, 14, 1],
    )
    decoder = Decoder(windowed, 2, 60, compiled)
    decoder.async_steps = async_steps
    requests = [
        Request(ids, count, Sampling(0.0))
        for ids, count in zip(prompts, counts, strict=True)
    ]
    tokens = {number: [] for number in range(5)}
    for number, piece in generate_batch(decoder, LetterTokenizer(), requests):
        tokens[number] += piece.tokens
    assert list(tokens.values()) == [
        greedy_tokens(windowed, *arguments)
        for arguments in zip(prompts, counts, strict=True)
    ]


def test_a_model_that_does_not_compile_runs_uncompiled(windowed):
    decoder = Decoder(windowed, 1, 60, compiled=True)

    def broken(*args, **kwargs):
        raise RuntimeError("no compiler\nand more")

    decoder._forward_chunk = decoder._forward_token = broken
    with pytest.warns(
        UserWarning,
        match="decoding runs uncompiled, since torch.compile fails: RuntimeError: no compiler$",
    ):
        (_, piece), *_ = generate_batch(
            decoder, LetterTokenizer(), [Request([1, 2, 3], 5, Sampling(0.0))]
        )
    assert (
        decoder._forward_token is windowed
        and piece.tokens[0] == greedy_tokens(windowed, [1, 2, 3], 1)[0]
    )


class LetterTokenizer:
    """A tokenizer whose tokens are single letters."""

    stop_ids = ()
    generation_folders = ()
    special_ids = structure_ids = frozenset()

    def __init__(self, ids=()):
        self.ids = ids

    def encode(self, text, bos=None):
        return self.ids

    def decode(self, ids, skip_special=True):
        return "".join(chr(65 + i) for i in ids)


def test_a_shared_prefix_is_prefilled_once(windowed):
    decoder = Decoder(windowed, 2, 60)
    prompt = list(range(1, 31))
    first = decoder.prefill(0, prompt)
    assert decoder.processed == 30
    assert torch.equal(decoder.prefill(1, prompt), first)
    assert decoder.processed == 30, "of a prompt that another row has, nothing is computed"
    step = decoder.step(torch.tensor([7, 7]), [True, True])
    torch.testing.assert_close(step[0], step[1])
    assert decoder.processed == 32
    decoder.truncate(0, 30), decoder.truncate(1, 30)
    longer = decoder.prefill(1, [*prompt[:20], 40, 41])
    assert decoder.processed == 34 and decoder.texts[1] == [*prompt[:20], 40, 41]
    torch.testing.assert_close(
        longer, windowed(torch.tensor([decoder.texts[1]]))[0, -1], rtol=1e-4, atol=1e-5
    )


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [3.0] * 8,
    "factor": 2.0,
}


@pytest.mark.parametrize(
    "scaling",
    [None, LONGROPE | {"original_max_position_embeddings": 16}],
    ids=["plain", "longrope"],
)
def test_the_cache_grows_in_place(make_model, scaling):
    """The text is only recomputed where the rotary embedding depends on the length."""
    parameters = {"rope_parameters": {**scaling, "rope_theta": 10000.0}} if scaling else {}
    sizes = dict(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=40,
    )
    model, _ = litft.load(make_model(LlamaConfig, vocab_size=64, **sizes, **parameters)[1])
    decoder, ids = Decoder(model, 1, 12), [3, 1, 4, 1, 5, 9, 2, 6]
    decoder.prefill(0, ids)
    decoder.reserve(30)
    assert decoder.capacity == 30
    actual = decoder.prefill(0, [*ids, 5, 3, 5])
    assert decoder.processed == 8 + (11 if scaling else 3)
    fresh = Decoder(model, 1, 30).prefill(0, [*ids, 5, 3, 5])
    torch.testing.assert_close(actual, fresh, rtol=1e-4, atol=1e-5)
    decoder.reserve(1000)
    assert decoder.capacity == model.config.max_positions


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_length_dependent_rope_ignores_the_other_rows(make_model, kind):
    """Some rotary embeddings depend on the final length of a text: on its own, not on the longest
    in the batch."""
    factors = (
        {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
        if kind == "longrope"
        else {"factor": 2.0}
    )
    scaling = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 24,
    } | factors
    sizes = dict(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24 if kind == "dynamic" else 90,
    )
    model, _ = litft.load(
        make_model(LlamaConfig, vocab_size=64, rope_parameters=scaling, **sizes)[1]
    )
    model.config = replace(model.config, max_positions=90)
    requests = [
        Request([5, 6, 7], 12, Sampling(0.0)),
        Request([5, 6, 7, *range(8, 40)], 12, Sampling(0.0)),
    ]
    requests.append(Request([5, 6, 7, *range(8, 30)], 12, Sampling(0.0)))

    def tokens(rows, requests):
        answers = {}
        for number, piece in generate_batch(
            Decoder(model, rows, 80), LetterTokenizer(), requests
        ):
            answers[number] = answers.get(number, []) + piece.tokens
        return [answers[number] for number in sorted(answers)]

    single = [tokens(1, [request])[0] for request in requests]
    assert tokens(2, requests) == single == tokens(3, requests) == tokens(1, requests)
    fresh = [
        list(
            litft.stream(
                model, LetterTokenizer(request.ids), "", max_new_tokens=12, temperature=0
            )
        )
        for request in requests
    ]
    assert [
        [token for piece in pieces for token in piece.tokens] for pieces in fresh
    ] == single


def test_a_step_of_some_rows_leaves_the_others_unchanged(windowed):
    """Active rows get the same logits as in a full step; the texts of the other rows stay
    unchanged."""
    texts = [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14]]
    tokens = torch.tensor([20, 21, 22, 23])
    full, partial = (Decoder(windowed, 4, 40) for _ in range(2))
    for decoder in (full, partial):
        for row, text in enumerate(texts):
            decoder.prefill(row, text)
    expected = full.step(tokens, [True] * 4)
    actual = partial.step(tokens, [False, True, True, False])
    torch.testing.assert_close(actual[1:3], expected[1:3], rtol=1e-5, atol=1e-5)
    assert not actual[[0, 3]].any() and partial.lengths == [3, 6, 3, 4]
    actual = partial.step(tokens, [True, False, False, True])
    torch.testing.assert_close(actual[[0, 3]], expected[[0, 3]], rtol=1e-5, atol=1e-5)
    assert partial.span([False] * 4) == slice(0, 4) and partial.span(
        [False, True, False, False]
    ) == slice(1, 2)


def test_a_full_row_ends_and_an_empty_prompt_is_refused(windowed):
    request = Request([1, 2, 3], 50, Sampling(0.0))
    *_, (_, last) = generate_batch(Decoder(windowed, 1, 10), LetterTokenizer(), [request])
    assert last.finish_reason == "context" and last.stats.new_tokens == 7
    decoder = Decoder(windowed, 1, 10)
    with pytest.raises(
        ValueError, match="the text has 11 tokens and the cache has room for 10"
    ):
        decoder.prefill(0, [1] * 11)
    with pytest.raises(ValueError, match="the prompt is empty"):
        decoder.prefill(0, [])
    with pytest.raises(
        ValueError, match="token id 64 is outside the model's vocabulary of 64"
    ):
        decoder.prefill(0, [64])
    windowed.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        Decoder(windowed, 1, 10).prefill(0, [1])


def test_nan_in_a_query_projection_is_found_with_a_short_prompt(tiny):
    """For fewer than 16 queries, torch's attention on a CPU computes finite numbers from NaN."""
    model, _ = litft.load(tiny, "fp32")
    model.requires_grad_(False)
    model.blocks[1].attention.q_proj.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match="logits are NaN"):
        Decoder(model, 1, 64).prefill(0, [1, 2, 3])


def test_common_prefix_length():
    assert [
        common_prefix_length([1, 2, 3], other)
        for other in ([1, 2, 3, 4], [1, 2], [1, 3], [], [2])
    ] == [3, 2, 1, 0, 0]


@pytest.mark.slow
@pytest.mark.weekly
def test_a_compiled_step_does_not_copy_the_cache(make_model):
    """Its time does not depend on the capacity: 64 times as many positions, of which few are
    used."""
    # so large that a copy takes far longer than the step
    heads = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=64)
    sizes = dict(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32768)
    model, _ = litft.load(make_model(LlamaConfig, **heads, **sizes)[1])

    def median_seconds(capacity: int) -> float:
        decoder = Decoder(model, 1, capacity, compiled=True)
        decoder.prefill(0, [1, 2, 3])
        seconds = []
        for _ in range(30):
            start = time.perf_counter()
            decoder.step(torch.tensor([3]), [True])
            seconds.append(time.perf_counter() - start)
            decoder.append(0, 3)
        return statistics.median(seconds[10:])

    small = median_seconds(512)
    assert median_seconds(512 * 64) < 3 * small
