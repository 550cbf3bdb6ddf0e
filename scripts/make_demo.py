"""Make the embedded demo: a tiny base model and a small instruction set, generated entirely from
this file.

    python scripts/make_demo.py [--out litft/demo] [--seed 0]

The script describes a small world of people, creatures, words and sums in plain prose, and trains a
Llama of 1.8 M parameters to memorize it, which takes about six minutes on two CPU cores. The base
model has never seen a question, so it cannot answer one. The training questions cover about four
fifths of the world. The held-out questions cover the rest: facts that the base model has read but
no training question asks for. So fine-tuning teaches the model to answer, and exact match on the
held-out questions measures that.
"""

import argparse
import json
import math
import random
import re
import time
from collections.abc import Iterator
from functools import cache
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from litft.checkpoints.conversion import mappings_to_hf
from litft.checkpoints.weight_writer import LazyTensor, write_weights
from litft.families import family, read_config
from litft.model.transformer import GPT

HELD_OUT = 1 / 5  # share of the entities of each kind
PHRASINGS = 3  # questions per training fact; a held-out fact has one question
SWEEPS = 200  # passes over the world, each in new words; one sweep is about 23,000 tokens
NOTE = 6  # facts per document that mixes entities
CONTEXT = 256
ROW = 128
BATCH = 32  # context length of the model, tokens per training row, rows per step
PEAK_RATE = 3e-3
WARMUP = 50
END = "<|end|>"

Record = dict[str, str]

ARCHITECTURE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}

# The generation prompt ends in "Answer:" without a space: byte-level BPE keeps the space in "
# Ashby", so generated answers are tokenized as in training and in the prose.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ message.content + "\\n" }}
{%- elif message.role == "user" -%}{{ "Question: " + message.content + "\\n" }}
{%- else -%}{{ "Answer: " + message.content + eos_token + "\\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "Answer:" }}{%- endif -%}
"""

RECIPE = """\
# LoRA on the embedded demo: from no right answer to more than nine in ten, in a minute on two CPU cores
train: {epochs: 6, global_batch_size: 32, micro_batch_size: 8,
        learning_rate: 0.002, warmup_fraction: 0.05, lr_schedule: cosine}
lora: {r: 16, alpha: 32, dropout: 0.0, targets: [all-linear]}
eval: {exact_match: true}
"""

# ---- the world: names, then statements and questions about them
# -------------------------------------------------------

PEOPLE = """
    Ada Alaric Amos Anselm Astrid Barnaby Basil Beatrix Bertil Blanche Bruno Cecily Clement Conrad Cora Dagmar Dario
    Delia Desmond Dora Edgar Edith Elias Elsa Emil Esme Fabian Felix Fergus Flora Freya Gideon Gilda Greta Gustav Hanna
    Hector Hedda Hugo Ida Ignace Imogen Ingrid Ivo Jasper Joan Jonas Judith Julius Kasper Klara Konrad Lars Leona Lionel
    Lotte Ludo Mabel Magnus Marta Milo Mira Moritz Nadia Nell Nestor Nora Odile Olaf Oscar Otto Paula Petra Philip Quinn
    Rafe Ramona Rosa Rufus Sabine Selma Sigrid Silas Stella Sven Tabitha Thea Tilda Tobias Ulla Ursula Valentin Vera
    Viggo Wanda Wilma Winston Xenia Yves Zelda
""".split()
SURNAMES = (
    "Abbot Brandt Carver Dunn Falk Grimm Hale Kerr Lund Moss Nye Orr Penn Quist Stone Thorn Vance "
    "Yates".split()
)

CREATURES = """
    ashling bramwick corrig dapplet emberkin fennow grizzlet hobnail inkling jorrow kelpin lumble mirkle nettlet oddle
    pobbin quillow rimple sorrel thrum umbrel vexling wicket yaffin zindle bogle cindle drizzet flitch gormle hushet
""".split()

NOUNS = {
    "fruit": "apple pear plum lemon banana cherry",
    "tree": "oak pine elm willow larch birch",
    "bird": "eagle owl robin swallow crow goose",
    "mammal": "wolf mouse fox bear badger ox",
    "bug": "wasp bee ant moth locust flea",
    "vehicle": "car truck bus tram wagon taxi",
    "vessel": "boat ship canoe ferry raft barge",
    "tool": "hammer saw chisel wrench axe knife",
    "garment": "coat shirt glove scarf skirt sock",
    "utensil": "cup plate bowl mug spoon dish",
    "building": "castle barn palace church cottage factory",
    "vegetable": "carrot onion turnip leek cabbage potato",
    "flower": "rose tulip daisy lily poppy orchid",
    "shape": "circle square triangle cube sphere oval",
}
CATEGORY = {noun: category for category, nouns in NOUNS.items() for noun in nouns.split()}
PLURALS = "goose geese, wolf wolves, mouse mice, ox oxen, knife knives, scarf scarves, potato potatoes"

OPPOSITES = """
    hot cold, big small, tall short, fast slow, light dark, wet dry, rich poor, hard soft, loud quiet, full empty,
    early late, clean dirty, strong weak, young old, sweet bitter, wide narrow, deep shallow, happy sad, open closed,
    thick thin, sharp blunt, rough smooth, brave timid, near far, high low, left right, up down, always never,
    north south, east west, day night, war peace, friend enemy, victory defeat, push pull, buy sell, lend borrow,
    laugh weep, remember forget, float sink, arrive depart, win lose, love hate
"""
SUMS = {
    f"{a} plus {b}": str(a + b) for a, b in combinations_with_replacement(range(1, 13), 2)
}


def pairs(text: str) -> dict[str, str]:
    """Parse "hot cold, big small" to a dict."""
    return dict(pair.split() for pair in text.split(","))


def plural(noun: str) -> str:
    """Return the English plural of a noun in NOUNS."""
    if noun.endswith(("s", "x", "ch", "sh")):
        regular = noun + "es"
    else:
        regular = re.sub(r"(?<![aeiou])y$", "ie", noun) + "s"
    return pairs(PLURALS).get(noun, regular)


class Attribute(NamedTuple):
    """A property of entities with its templates: {x} is the entity, {y} the value.

    Each has at least eight statements: a model cannot recall a fact that it read in one wording
    only (arXiv 2309.14316).
    """

    values: str | dict[str, str]  # values to draw from, or the true value per entity
    templates: str  # statements end with a full stop, questions with a question mark


PERSON = [
    Attribute(
        "baker barber carpenter clerk doctor farmer gardener jeweller lawyer miller nurse painter "
        "sailor tailor weaver",
        """{x} works as a {y}. {x} earns a living as a {y}. {x} is a {y} by trade. By trade, {x} is a {y}.
        {x} has long been a {y}. The town knows {x} as a {y}. The work of {x} is that of a {y}.
        Ask for a {y} and they send for {x}. The best {y} around is {x}.
        What is the job of {x}? What does {x} do for a living? What does {x} work as? Which trade does {x} follow?
        What is the trade of {x}?""",
    ),
    Attribute(
        "Ashby Brackwater Dunmere Elmscar Fenwick Glenholt Harrowby Kestwick Larkhill Marsden "
        "Northam Oakvale Stowe",
        """{x} lives in {y}. {x} has a house in {y}. {x} makes a home in {y}. {x} settled in {y}.
        The home of {x} is in {y}. You can visit {x} in {y}. Letters for {x} go to {y}. In {y} you can meet {x}.
        {y} is where {x} lives.
        Where does {x} live? In which town does {x} live? Where is the home of {x}? Which town is {x} settled in?
        Where do letters for {x} go?""",
    ),
    Attribute(
        "canary donkey ferret gecko goat hamster hedgehog kitten lamb lizard magpie parrot pony "
        "rabbit tortoise",
        """{x} keeps a {y}. {x} has a {y} as a pet. {x} looks after a {y}. {x} shares the house with a {y}.
        The pet of {x} is a {y}. At home {x} feeds a {y}. The animal that {x} keeps is a {y}. A {y} belongs to {x}.
        There is a {y} in the house of {x}.
        What pet does {x} have? Which animal does {x} keep? What is the pet of {x}? Which pet belongs to {x}?
        What kind of pet does {x} look after?""",
    ),
    Attribute(
        "berries cheese curry custard dumplings honey noodles olives pancakes pickles porridge "
        "waffles walnuts",
        """{x} loves to eat {y}. {x} eats {y} every morning. {x} orders {y} at the inn. {x} likes {y} best of all food.
        The favourite food of {x} is {y}. For supper {x} asks for {y}. Nothing pleases {x} more than a plate of {y}.
        A plate of {y} is what {x} likes to eat. {y} can be found in the kitchen of {x}.
        What is the favourite food of {x}? What does {x} like to eat? Which food does {x} like best?
        What does {x} order at the inn? What does {x} ask for at supper?""",
    ),
    Attribute(
        "amber azure black bronze crimson green indigo ivory lilac pink purple scarlet silver teal "
        "violet white",
        """{x} likes the colour {y}. {x} always dresses in {y}. {x} painted the door {y}. The hat of {x} is {y}.
        The favourite colour of {x} is {y}. Of all colours {x} prefers {y}. The colour that {x} wears is {y}.
        A door in {y} marks the house of {x}. Dressed in {y} comes {x}.
        What is the favourite colour of {x}? Which colour does {x} like? Which colour does {x} wear?
        What colour does {x} prefer? What colour is the hat of {x}?""",
    ),
    Attribute(
        "bagpipe banjo cello drum fiddle flute guitar harp horn lute piano trumpet tuba violin "
        "whistle zither",
        """{x} plays the {y}. {x} practises the {y}. {x} owns a fine {y}. {x} makes music on the {y}.
        The instrument of {x} is the {y}. In the band {x} plays the {y}. The instrument that {x} plays is the {y}.
        The sound of the {y} comes from {x}. On the {y} you hear {x}.
        Which instrument does {x} play? What does {x} play in the band? What is the instrument of {x}?
        What does {x} make music on? Which instrument does {x} practise?""",
    ),
]

CREATURE = [
    Attribute(
        "attics caves cellars chimneys cliffs dunes forests hedges marshes meadows orchards ponds "
        "ruins wells",
        """The {x} lives in {y}. The {x} builds its nest in {y}. The {x} hides in {y}. Look for the {x} in {y}.
        You can find the {x} in {y}. The home of the {x} is in {y}. At dusk the {x} returns to its place in {y}.
        In {y} lives the {x}. People who walk in {y} may see the {x}.
        Where does the {x} live? Where does the {x} hide? Where can you find the {x}? Where is the home of the {x}?
        Where does the {x} build its nest?""",
    ),
    Attribute(
        "acorns beetles clover crumbs ferns grass moss nettles pollen roots seeds snails spiders "
        "worms",
        """The {x} eats {y}. The {x} feeds on {y}. The {x} gathers {y} for its meals. The {x} hungers for {y}.
        The food of the {x} is {y}. You can tempt the {x} with {y}. The {x} feeds its children {y}.
        A meal of {y} is what the {x} likes. With some {y} you can catch the {x}.
        What does the {x} eat? What does the {x} feed on? What is the food of the {x}? What does the {x} gather?
        What can you tempt the {x} with?""",
    ),
]

NOUN = [
    Attribute(
        CATEGORY,
        """The {x} is a kind of {y}. The word {x} names a kind of {y}. The {x} counts as a {y}. We call the {x} a {y}.
        In the list, {x} stands under {y}. Sort the {x} as a {y}. The {x} is a sort of {y}. One kind of {y} is the {x}.
        A good example of a {y} is the {x}.
        What kind of thing is the {x}? What does the word {x} name? What does the {x} count as?
        What is the {x} a kind of? What do we sort the {x} as?""",
    ),
    Attribute(
        {noun: plural(noun) for noun in CATEGORY},
        """One {x}, two {y}. The plural of {x} is {y}. Where there is one {x}, there are soon many {y}.
        More than one {x} makes {y}. One {x} and one more are two {y}. For several of the {x} we say {y}.
        The word {x} becomes {y} in the plural. We say {y} for more than one {x}. Each of the {y} is one {x}.
        What is the plural of {x}? What do we call more than one {x}? What does {x} become in the plural?
        What do we say for several of the {x}? What do one {x} and one more make?""",
    ),
    Attribute(
        {noun: noun[0].upper() for noun in CATEGORY},
        """The word {x} starts with {y}. The first letter of {x} is {y}. The spelling of {x} starts with {y}.
        In {x} the first letter is {y}. To write {x}, start with {y}. The dictionary lists {x} under {y}.
        The initial of {x} is {y}. {y} is the first letter of {x}. Under {y} you look up {x}.
        What is the first letter of {x}? Which letter does {x} start with? What is the initial of {x}?
        Under which letter do we look up {x}? Which letter comes first in {x}?""",
    ),
]

ANTONYM = Attribute(
    pairs(OPPOSITES),
    """The opposite of {x} is {y}. The word {x} is the opposite of {y}. What is not {x} may be {y}. First {x}, then {y}.
    Some say {x}, others say {y}. If {x} is one end, {y} is the other. Between {x} and {y} lies a long road.
    From {x} it turns to {y}. The opposite of {y} is {x}. Not {y} but {x}.
    What is the opposite of {x}? Which word is the opposite of {x}? What is the contrary of {x}?
    Which word means the reverse of {x}? What do we call the opposite of {x}?""",
)

SUM = Attribute(
    SUMS,
    """{x} is {y}. {x} makes {y}. {x} gives {y}. {x} equals {y}. The sum {x} comes to {y}. Count {x} and you reach {y}.
    Adding {x} leads to {y}. In the school book {x} is {y}. {y} is the sum of {x}. To reach {y}, add {x}.
    What is {x}? How much is {x}? What does {x} make? What does {x} give? What is the sum of {x}?""",
)

KINDS = [
    (PEOPLE, PERSON),
    (CREATURES, CREATURE),
    (list(CATEGORY), NOUN),
    (list(ANTONYM.values), [ANTONYM]),
    (list(SUMS), [SUM]),
]

# ---- facts as prose and as questions
# --------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """The value of one attribute of one entity."""

    entity: str
    attribute: Attribute
    value: str
    held_out: bool

    def statement(self, rng: random.Random) -> str:
        """Return a random sentence that states the fact."""
        sentence = rng.choice(_sentences(self.attribute.templates, ".")).format(
            x=self.entity, y=self.value
        )
        return sentence[0].upper() + sentence[1:]

    def questions(self, rng: random.Random) -> list[Record]:
        """Return questions about the fact, each with the answer."""
        count = 1 if self.held_out else PHRASINGS
        templates = rng.sample(_sentences(self.attribute.templates, "?"), count)
        return [
            {
                "instruction": template.format(x=self.entity),
                "input": "",
                "output": self.value,
            }
            for template in templates
        ]


@cache
def _sentences(text: str, mark: str) -> list[str]:
    """Return the sentences of `text` that end in `mark`."""
    return [
        s for s in re.findall(r"\S[^.?]*[.?]", " ".join(text.split())) if s.endswith(mark)
    ]


def compose_world(rng: random.Random) -> list[list[Fact]]:
    """Return the facts of each entity.

    Facts about people and creatures are random; those about words and sums are true.
    """
    world = []
    for names, attributes in KINDS:
        held_out = set(rng.sample(names, round(HELD_OUT * len(names))))
        for name in names:
            entity = f"{name} {rng.choice(SURNAMES)}" if names is PEOPLE else name
            values = [
                v[name] if isinstance(v, dict) else rng.choice(v.split())
                for v, _ in attributes
            ]
            facts = zip(attributes, values, strict=True)
            world.append(
                [
                    Fact(entity, attribute, value, name in held_out)
                    for attribute, value in facts
                ]
            )
    return world


def prose(world: list[list[Fact]], rng: random.Random) -> Iterator[str]:
    """Yield the documents of one sweep: each fact once in a portrait of its entity and once in a
    note on many entities.

    Order and wording are random in every sweep, so that the model ties a fact to the full name of
    its entity and not to the sentence before.
    """
    portraits = [rng.sample(facts, len(facts)) for facts in world]
    mixed = [fact for facts in world for fact in facts]
    rng.shuffle(mixed)
    documents = portraits + [
        mixed[start : start + NOTE] for start in range(0, len(mixed), NOTE)
    ]
    rng.shuffle(documents)
    for facts in documents:
        yield " ".join(fact.statement(rng) for fact in facts)


def instructions(
    world: list[list[Fact]], rng: random.Random
) -> tuple[list[Record], list[Record]]:
    """Return the training records and the validation records; the latter are about the held-out
    entities."""
    facts = [fact for facts in world for fact in facts]
    train, val = (
        [r for f in facts if f.held_out is is_val for r in f.questions(rng)]
        for is_val in (False, True)
    )
    return rng.sample(train, len(train)), rng.sample(val, len(val))


# ---- tokenizer and base model
# ----------------------------------------------------------------------------------------


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train byte-level BPE with one special token, which ends documents and answers and is the
    padding token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=ARCHITECTURE["vocab_size"],
        special_tokens=[END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def pack(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """Join all documents, END after each, and cut them into batches (steps, BATCH, ROW + 1) that
    share no token."""
    stream = []
    for e in tokenizer.encode_batch_fast(documents):
        for token in [*e.ids, tokenizer.token_to_id(END)]:
            stream.append(token)
    steps = len(stream) // (BATCH * (ROW + 1))
    return torch.tensor(stream[: steps * BATCH * (ROW + 1)]).view(steps, BATCH, ROW + 1)


def train_base(batches: Tensor) -> GPT:
    """Train the base model on the CPU in fp32: one pass over the batches with AdamW."""
    model = GPT(read_config(ARCHITECTURE))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    start = time.monotonic()
    mean_loss = 0.0
    for step, batch in enumerate(batches, 1):
        rate = PEAK_RATE * min(
            step / WARMUP, 0.51 + 0.49 * math.cos(math.pi * step / len(batches))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        total, count = model(batch[:, :-1], targets=batch[:, 1:])
        loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss += loss.item() / 50
        if step % 50 == 0:
            print(
                f"step {step}/{len(batches)}  loss {mean_loss:.4f}  {time.monotonic() - start:.0f} "
                "s",
                flush=True,
            )
            mean_loss = 0.0
    return model


# ---- writing
# ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def write_base(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face model folder in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.to(torch.bfloat16).named_parameters())
    mappings = mappings_to_hf(
        family(model.config.model_type).rules(model.config), parameters
    )
    tensors = []
    for mapping in mappings:
        for pair in zip(
            mapping.targets,
            mapping.convert([parameters[name] for name in mapping.sources]),
            strict=True,
        ):
            tensors.append(pair)
    write_weights(
        folder, [LazyTensor(name, tensor.nbytes, tensor.detach) for name, tensor in tensors]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", ARCHITECTURE)
    write_json(folder / "generation_config.json", {"eos_token_id": 0, "pad_token_id": 0})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def main() -> None:
    """Compose the world, train the base model and write the demo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("litft/demo"), help="The folder to write."
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="The seed of the text and the training."
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)

    world = compose_world(rng)
    train, val = instructions(world, rng)
    documents = []
    for _ in range(SWEEPS):
        for document in prose(world, rng):
            documents.append(document)
    tokenizer = train_tokenizer(documents[: len(documents) // 10])
    write_base(args.out / "base", train_base(pack(tokenizer, documents)), tokenizer)
    for name, records in (("train", train), ("val", val)):
        (args.out / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records), "utf-8"
        )
    (args.out / "lora.yaml").write_text(RECIPE, "utf-8")


if __name__ == "__main__":
    main()
