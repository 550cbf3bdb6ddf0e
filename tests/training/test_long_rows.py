"""The plan of long rows of recurrent networks, from traces of shorter ones."""

import pytest
import transformers

from litft.args import PlanArgs
from litft.commands.plan import model_and_method, planner
from litft.training.memory import long_rows

SIZES = dict(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
NETWORKS = {
    "gated delta net": ("Qwen3_5TextConfig", {}),
    "mamba-2": (
        "Mamba2Config",
        dict(num_heads=8, head_dim=32, state_size=16, n_groups=1, expand=2),
    ),
    "short convolution": ("Lfm2Config", dict(full_attn_idxs=[2])),
}


@pytest.mark.parametrize(
    "network, recomputed",
    [
        pytest.param("gated delta net", "full", marks=pytest.mark.slow),
        ("mamba-2", "none"),
        ("short convolution", "full"),
    ],
)
def test_a_long_row_is_on_the_line_of_shorter_ones(
    network, recomputed, tmp_path, monkeypatch
):
    name, special = NETWORKS[network]
    getattr(transformers, name)(**SIZES | special).save_pretrained(tmp_path)
    args = PlanArgs(checkpoint_dir=str(tmp_path))
    source, method = model_and_method(args)
    lengths = (1500,)

    def peaks():
        found = []
        for tokens in lengths:
            plan = planner(args, source, method, tokens)(2, recomputed, "none", "none")
            found.append(plan.memory.peak)
        return found

    expected = peaks()
    traced = []
    monkeypatch.setattr(long_rows, "LONGEST", 512)
    of_long_row = long_rows.of_long_row

    def noting(trace_of, tokens):
        return of_long_row(lambda length: traced.append(length) or trace_of(length), tokens)

    monkeypatch.setattr("litft.training.memory.activations.of_long_row", noting)
    assert peaks() == pytest.approx(expected, rel=1e-3)
    assert max(traced) < 512 + 256


def test_a_row_that_is_short_is_traced_itself(monkeypatch):
    lengths = []
    long_rows.of_long_row(lengths.append, long_rows.LONGEST)
    assert lengths == [long_rows.LONGEST]
