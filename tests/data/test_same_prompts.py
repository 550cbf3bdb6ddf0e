"""Training and inference have the same prompts, over random conversations and chat templates: see
tests/same_prompts.py."""

import json

import pytest
from same_prompts import Conversations, differences, shown, templates, tokenizer_with

TEMPLATES = dict(templates())


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_learned_after_the_prompts_of_inference(name, tmp_path, cases):
    tokenizer = tokenizer_with(TEMPLATES[name], tmp_path)
    conversations = Conversations(seed=len(name))
    for _ in range(cases(10)):
        record = conversations.record()
        for difference in differences(tokenizer, record) or []:
            pytest.fail(f"{shown(difference)}\n{json.dumps(record, ensure_ascii=False)}")
