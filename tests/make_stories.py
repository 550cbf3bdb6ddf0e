"""Make tests/stories: a Llama of 260,000 parameters that was trained on short stories, and its
SentencePiece tokenizer.

    python tests/make_stories.py

The tests use it where they need a model whose answers are text, or a tokenizer of Llama 2's kind:
BPE with byte fallback, without a chat template. The stories are written by this file. It takes two
minutes on one core.
"""

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "stories"
VOCABULARY = 512
CONTEXT = 512
ROWS = 16  # of a training step
ROW_TOKENS = 256
STEPS = 200
PEAK_RATE = 4e-3

CHILDREN = {
    "Lily": "girl",
    "Mia": "girl",
    "Sue": "girl",
    "Anna": "girl",
    "Tom": "boy",
    "Ben": "boy",
    "Max": "boy",
    "Sam": "boy",
}
PRONOUNS = {"girl": ("She", "her"), "boy": ("He", "his")}
PETS = ("dog", "cat", "bird", "rabbit", "frog", "mouse", "pony", "duck")
PLACES = (
    "the park",
    "the garden",
    "the forest",
    "the beach",
    "the big house",
    "the river",
    "the farm",
    "the school",
)
THINGS = (
    "ball",
    "box",
    "book",
    "hat",
    "kite",
    "cake",
    "flower",
    "boat",
    "stone",
    "toy car",
)
COLORS = ("red", "blue", "green", "yellow", "white", "big", "small", "old")
FEELINGS = ("happy", "sad", "proud", "scared", "excited", "surprised", "tired", "hungry")
OPENINGS = (
    "Once upon a time, there was a little {kind} named {name}.",
    "One day, a {kind} named {name} went to {place}.",
    "There was a {kind} who lived near {place}. {pronoun} was called {name}.",
)
MIDDLES = (
    "{name} loved to play with {own} {pet} in {place}.",
    "{pronoun} saw a {color} {thing} on the ground.",
    '"Look at this {thing}!" said {name}. "It is so {color}!"',
    '"Can I have the {thing}, please?" {name} asked {own} mom.',
    "The {pet} was very {feeling} and ran to {place}.",
    "{pronoun} gave the {color} {thing} to the {pet}.",
    '{own_first} mom smiled and said, "Yes, but be careful, {name}."',
    "They looked for the {thing} in {place}, but it was not there.",
    "{pronoun} was {feeling}, because the {thing} was lost.",
    "Then {name} had an idea. {pronoun} asked {friend} for help.",
    "{friend} and {name} played together all day.",
    "In {place}, the {pet} found {count} {color} stones.",
)
ENDINGS = (
    "{name} was very {feeling}. The end.",
    "They were all {feeling} and went home.",
    "From that day on, {name} and the {pet} were best friends.",
    "{name} learned that it is good to share. The end.",
)


def story(generator: random.Random) -> str:
    """Return a story of five to nine sentences."""
    name, friend = generator.sample(list(CHILDREN), 2)
    kind = CHILDREN[name]
    pronoun, own = PRONOUNS[kind]
    place, pet, thing = (generator.choice(words) for words in (PLACES, PETS, THINGS))

    def sentence(form: str) -> str:
        return form.format(
            name=name,
            friend=friend,
            kind=kind,
            pronoun=pronoun,
            own=own,
            own_first=own.capitalize(),
            place=place,
            pet=pet,
            thing=thing,
            color=generator.choice(COLORS),
            feeling=generator.choice(FEELINGS),
            count=generator.randint(2, 9),
        )

    middles = generator.sample(MIDDLES, generator.randint(3, 7))
    forms = [generator.choice(OPENINGS), *middles, generator.choice(ENDINGS)]
    return " ".join(map(sentence, forms))


def train_sentencepiece(texts: list[str], **settings: Any) -> bytes:
    """Return the content of a tokenizer.model with the settings of Llama 2's, but for those that
    are given."""
    written = io.BytesIO()
    usual = dict(
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        num_threads=1,
        minloglevel=2,
        **usual | settings,
    )
    return written.getvalue()


def rows(
    tokenizer: sentencepiece.SentencePieceProcessor, texts: list[str]
) -> Iterator[list[int]]:
    """Yield rows of tokens: stories one after another, each with the tokens of its begin and its
    end."""
    ids: list[int] = []
    for text in texts:
        ids += [tokenizer.bos_id(), *tokenizer.encode(text), tokenizer.eos_id()]
        while len(ids) >= ROW_TOKENS:
            yield ids[:ROW_TOKENS]
            ids = ids[ROW_TOKENS:]


def main() -> None:
    """Write the folder."""
    FOLDER.mkdir(exist_ok=True)
    generator = random.Random(0)
    texts = [story(generator) for _ in range(STEPS * ROWS * 3)]  # of about 110 tokens each
    content = train_sentencepiece(
        texts[:5000],
        vocab_size=VOCABULARY,
        character_coverage=1.0,
        unk_surface=" \u2047 ",
    )
    (FOLDER / "tokenizer.model").write_bytes(content)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=content)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, total_steps=STEPS, pct_start=0.05
    )
    all_rows = rows(tokenizer, texts)
    for step in range(STEPS):
        batch = torch.tensor([next(all_rows) for _ in range(ROWS)])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {float(loss.detach()):.3f}", flush=True)

    model.save_pretrained(FOLDER)
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": None,
        "model_max_length": CONTEXT,
        "legacy": True,
    }
    (FOLDER / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
