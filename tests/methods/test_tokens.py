"""New tokens and control tokens: ids, initial rows, decoding, and the warning about untrained
rows."""

import shutil

import pytest
import torch
import transformers
from conftest import STORIES, copy_tokenizer, copy_unpacked, script
from own_tokenizers import WRITERS
from parity import ROWS, draw

import litft
from litft.args import DataArgs, LoRAArgs, LoRAFinetuneArgs
from litft.data.chat_template import STYLES
from litft.data.encoder import Encoder
from litft.data.sample import ID_MASK, SUPERVISED, to_sample
from litft.data.tokenizer import Tokenizer
from litft.methods.lora import LoRA
from litft.methods.new_tokens import (
    TOKEN_ROW_PARAMETERS,
    extend_table,
    initial_rows,
    untrained_ids,
)
from litft.model.transformer import add_neftune_noise
from litft.pretrained.build import base_model
from litft.pretrained.folder import resolve
from litft.training.memory.activations import Shape
from litft.training.memory.plan import predict
from litft.training.run_setup import resolve_setup


@pytest.mark.parametrize(
    "name",
    [*WRITERS, "gpt2", "llama-2-7b", pytest.param("gemma-2", marks=pytest.mark.slow)],
)
def test_added_tokens_are_saved_and_reloaded(tokenizer_folder, tmp_path, name):
    """Each is one id after the vocabulary and decodes to its text, in litft and in transformers."""
    from transformers import AutoTokenizer

    source = copy_unpacked(tokenizer_folder(name), tmp_path / "source")
    tokenizer = Tokenizer(source)
    texts = ["<tool>", "naïve token", "日本語!"]
    old_ids = [tokenizer.encode(text, bos=False) for text in texts]
    vocab_size = tokenizer.vocab_size
    added = tokenizer.add_tokens([*texts, "<tool>"])
    assert list(added.values()) == old_ids and len(added) == 3
    new = [i for i, pieces in added.items() if pieces != [i]]
    assert new == list(range(vocab_size, vocab_size + 3))
    out = tmp_path / "out"
    shutil.copytree(source, out)
    tokenizer.save_added(out)
    reread, reference = Tokenizer(out), AutoTokenizer.from_pretrained(out)
    text = "call<tool>for a naïve token and日本語!"
    assert tokenizer.encode(text) == reread.encode(text) and set(new) <= set(
        reread.encode(text)
    )
    assert reference.convert_tokens_to_ids(texts) == new
    for token in texts:
        assert token in reread.decode(reread.encode(text))
    assert reread.vocab_size == vocab_size + 3 and reread.encode("plain") == Tokenizer(
        source
    ).encode("plain")


def test_initial_rows_are_the_mean_of_their_pieces():
    table = torch.randn(9, 4)
    rows = initial_rows(table, [[1, 2], [5], []])
    expected = torch.stack([(table[1] + table[2]) / 2, table[5], table.mean(0)])
    torch.testing.assert_close(rows, expected)
    out = extend_table(table, [10, 3], rows[:2])
    assert (
        out.shape == (11, 4)
        and torch.equal(out[10], rows[0])
        and torch.equal(out[3], rows[1])
    )
    assert torch.equal(out[:3], table[:3]) and not out[9].any()


def test_untrained_rows_are_found():
    table = torch.randn(20, 8)
    table[3], table[4], table[6] = 0.0, 1e-4 * table[4], table[7]
    assert untrained_ids(table, range(20)) == [3, 4, 6, 7]
    assert untrained_ids(table, [1, 5]) == []


@pytest.mark.slow
def test_a_run_warns_about_untrained_rows(shared, make_model, examples, tmp_path):
    """TinyLlama's <s> has a row of zeros; the warning disappears when it is trained as a new
    token."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig

    _, folder = make_model(LlamaConfig, vocab_size=32000, max_position_embeddings=256)
    for path in (shared / "tokenizers" / "tinyllama-1.1b-chat").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][1] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    flags = [
        "finetune/adapter.py",
        "--checkpoint_dir",
        folder,
        "--data.path",
        examples,
        "--train.max_steps",
        1,
        "--out_dir",
    ]
    result = script(*flags, "one", cwd=tmp_path)
    bos = (
        "warning: the embeddings of the template's <s> look untrained; --data.new_tokens '<s>' "
        "trains them"
    )
    assert bos in result.stdout
    assert (
        "look untrained"
        not in script(*flags, "two", "--data.new_tokens", "<s>", cwd=tmp_path).stdout
    )
    assert (
        "look untrained"
        not in script("finetune/full.py", *flags[1:], "three", cwd=tmp_path).stdout
    )


def test_neftune_noise_depends_on_the_length_of_the_sample():
    """NEFTune's bound is alpha / sqrt(L C) for each row of a padded batch and each document of a
    packed one."""
    torch.manual_seed(0)
    x, targets = torch.zeros(2, 50, 16), torch.full((2, 50), -100)
    targets[0, 10:50], targets[1, 3:8] = 1, 1
    noise = add_neftune_noise(x, 5.0, targets, None)
    for row, length in ((0, 50), (1, 8)):
        bound = 5.0 / (length * 16) ** 0.5
        assert 0.97 * bound <= noise[row].abs().max() <= bound
    documents = torch.tensor([[0] * 30 + [1] * 20, [2] * 50])
    packed = add_neftune_noise(x, 5.0, targets, documents)
    for part, length in ((packed[0, :30], 30), (packed[0, 30:], 20), (packed[1], 50)):
        bound = 5.0 / (length * 16) ** 0.5
        assert 0.95 * bound <= part.abs().max() <= bound


def test_noise_and_smoothing_apply_only_in_training(tiny):
    from litft.pretrained.folder import resolve

    model, tokens = base_model(resolve(tiny)), draw(2, 20, seed=1)
    plain = model(tokens[:, :-1], targets=tokens[:, 1:])[0]
    model.neftune_alpha, model.label_smoothing = 5.0, 0.1
    assert torch.equal(model.eval()(tokens[:, :-1], targets=tokens[:, 1:])[0], plain)
    torch.manual_seed(0)
    first = model.train()(tokens[:, :-1], targets=tokens[:, 1:])[0]
    assert not torch.equal(first, plain)
    assert not torch.equal(model(tokens[:, :-1], targets=tokens[:, 1:])[0], first)


@pytest.mark.parametrize("backend", ["json", "sentencepiece"])
def test_a_templates_new_end_token_ends_an_answer(
    tiny, tokenizer_folder, tmp_path, backend
):
    """--data.new_tokens adds it, as the message about missing control tokens recommends."""
    if backend == "json":
        folder = shutil.copytree(tokenizer_folder("header"), tmp_path / "model")
    else:
        folder = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = Tokenizer(folder)
    tokenizer.use_template(STYLES["chatml"])
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<other>"])
    end = tokenizer.token_id("<|im_end|>")
    assert (
        end in tokenizer.special_ids
        and tokenizer.token_id("<other>") not in tokenizer.special_ids
    )
    encoded = Encoder(tokenizer, 500)("here", {"prompt": "a", "completion": "b"})
    (sample,) = encoded.samples
    assert (sample & ID_MASK)[(sample & SUPERVISED) > 0][-1] == end and encoded.ends == {
        end
    }
    assert tokenizer.decode(to_sample(sample).answer[1].tolist()).strip() == "b"
    tokenizer.save_added(folder)
    reread = Tokenizer(folder)
    assert end in reread.special_ids and reread.encode("<|im_end|>", bos=False) == [end]


def test_the_plan_counts_the_rows_of_new_tokens_that_are_trained(tiny):
    """Also if --train.freeze names them: the network of the plan has no such rows."""
    source = resolve(tiny)
    counts = []
    for tokens, frozen in (
        ({}, set()),
        ({512: [1], 513: [2]}, set()),
        ({512: [1]}, set(TOKEN_ROW_PARAMETERS)),
    ):
        method = LoRA(LoRAArgs(r=4))
        method.select_targets(source.outline, source.adapter_rules)
        method.tokens = tokens
        method.frozen = frozen
        counts.append(predict(source, method, "fp32", "none", Shape(1, 8, False)).trained)
    tables = 1 if source.config.tied else 2
    assert [count - counts[0] for count in counts] == [0, 2 * tables * source.config.dim, 0]


def test_a_table_with_lora_is_gathered_for_the_rows_of_new_tokens(tiny):
    """Their initial values are those of rows of the table, of which a process has a part."""
    source = resolve(tiny)
    method = LoRA(LoRAArgs(r=4, targets=["embed", "lm_head"]))
    method.select_targets(source.outline, source.adapter_rules)
    method.tokens = {512: [1], 513: [2]}
    model = source.meta_model()
    method.attach(model)
    assert model.embed.reads_weight and model.lm_head.reads_weight


def test_new_tokens_beyond_a_second_table_are_refused(make_model, tmp_path):
    """transformers adds rows to Gemma's table of per-layer embeddings, which litft reads as row
    0."""
    config_class, variations = ROWS["gemma3n_text"]
    kind = getattr(transformers, config_class)
    _, made = make_model(kind, **next(iter(variations.values())))
    folder = copy_unpacked(made, tmp_path / "model")
    size = resolve(folder).config.vocab_size
    copy_tokenizer(STORIES, folder)
    assert Tokenizer(folder).vocab_size >= size
    args = LoRAFinetuneArgs(
        checkpoint_dir=str(folder), data=DataArgs(path=["a.jsonl"], new_tokens=["<tool>"])
    )
    with pytest.raises(
        ValueError, match=r"has a second table of .* tokens, to which other"
    ):
        resolve_setup(args, resolve(folder))


@pytest.mark.slow
def test_a_label_that_is_a_special_token_is_shown_in_answers(tiny, tmp_path):
    """As exact match compares it: it would be an empty answer otherwise."""
    records = [
        {"prompt": f"Is it {number}?", "completion": "<|yes|>"} for number in range(30)
    ]
    run = litft.finetune(
        model=tiny,
        data=records,
        new_tokens=["<|yes|>"],
        val_fraction=0.2,
        max_steps=40,
        learning_rate=0.02,
        exact_match=True,
        eval_max_new_tokens=4,
        out_dir=tmp_path / "run",
    )
    assert run.metrics["exact_match"] == 1
    model, tokenizer = litft.load(run.folder / "final")
    question = [{"role": "user", "content": "Is it 7?"}]
    answer = litft.stream(model, tokenizer, question, max_new_tokens=4, temperature=0)
    assert "".join(answer) == "<|yes|>"
