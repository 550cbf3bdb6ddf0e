"""Parts of model cards: the licence of the base, what vLLM does not load, and its parser of tool
calls."""

import pytest

from litft.args import DataArgs, LoRAFinetuneArgs
from litft.checkpoints.adapter_reader import vllm_obstacles
from litft.checkpoints.hub import HubId
from litft.export.model_card import CardInfo, _licence_text, licence_of, model_card
from litft.pretrained.folder import resolve

BASE = HubId("me/base")
OTHER = "license: other\nlicense_name: gemma-terms\nlicense_link: LICENSE"


@pytest.mark.parametrize(
    ("header", "expected", "text"),
    [
        ("license: mit", {"license": "mit"}, "mit"),
        (
            OTHER,
            {
                "license": "other",
                "license_name": "gemma-terms",
                "license_link": "https://huggingface.co/me/base/blob/main/LICENSE",
            },
            "[gemma-terms](https://huggingface.co/me/base/blob/main/LICENSE)",
        ),
        (
            OTHER.replace("LICENSE", "https://x.example/terms"),
            {
                "license": "other",
                "license_name": "gemma-terms",
                "license_link": "https://x.example/terms",
            },
            "[gemma-terms](https://x.example/terms)",
        ),
        ("tags: [a]", {}, "see the base model"),
        ("license: [mit]", {}, "see the base model"),
    ],
)
def test_a_licence_keeps_its_name_and_link(tmp_path, header, expected, text):
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n# Card\n")
    assert licence_of(tmp_path, BASE) == expected
    assert _licence_text(expected) == text


def test_data_with_weight_0_is_not_named(checkpoints):
    """The run did not learn from it."""
    data = DataArgs(path=["learned.jsonl", "me/unread"], weights=[1, 0])
    info = CardInfo(
        repo_id="me/mine",
        source=resolve(checkpoints["stories"]),
        run=None,
        args=LoRAFinetuneArgs(checkpoint_dir=str(checkpoints["stories"]), data=data),
        base=BASE,
        adapter_config={},
        licence={},
    )
    card = model_card(info)
    assert "Data: `learned.jsonl` (a file)." in card
    assert "unread" not in card


def test_what_vllm_does_not_load_is_named():
    assert vllm_obstacles({"r": 8, "bias": "none", "modules_to_save": None}) == []
    config = {
        "use_dora": True,
        "modules_to_save": ["lm_head"],
        "trainable_token_indices": {"embed": [5]},
        "bias": "all",
    }
    assert vllm_obstacles(config) == [
        "DoRA",
        "modules trained in full",
        "new tokens",
        "trained biases",
    ]
    # vLLM has one scale, alpha / r
    scales = {"r": 8, "lora_alpha": 16, "rank_pattern": {"q_proj": 2}}
    assert vllm_obstacles(scales | {"alpha_pattern": {"q_proj": 4}}) == []
    assert vllm_obstacles(scales) == ["updates of several scales (alpha / rank)"]
    of_root = scales | {"use_rslora": True, "alpha_pattern": {"q_proj": 8}}
    assert vllm_obstacles(of_root) == []
    assert (
        len(vllm_obstacles({"r": 8, "lora_alpha": 16, "alpha_pattern": {"q_proj": 8}})) == 1
    )
