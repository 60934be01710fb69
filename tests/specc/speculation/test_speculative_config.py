"""vLLM's JSON becomes the drafts and trees of specc's own options; what specc lacks is refused."""

from __future__ import annotations

import json

import pytest

from specc.errors import ConfigError, TreeError
from specc.speculation.speculative_config import SpeculativeConfig
from specc.speculation.tree import TokenTree

read = SpeculativeConfig.read


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"model": "D/"}, SpeculativeConfig("D/")),
        (
            {"method": "draft_model", "model": "org/draft", "num_speculative_tokens": 3},
            SpeculativeConfig("org/draft", num_speculative_tokens=3),
        ),
        (
            {"model": "D/", "draft_tensor_parallel_size": 2, "max_model_len": None},
            SpeculativeConfig("D/", draft_tensor_parallel_size=2),
        ),
        ({"model": "self:window=512"}, SpeculativeConfig("self:window=512")),
        ({"model": "lookup:3"}, SpeculativeConfig("lookup:3")),
        # vLLM's default, its maximum, and its names of the method
        ({"method": "ngram"}, SpeculativeConfig("lookup:5")),
        (
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
            SpeculativeConfig("lookup:4"),
        ),
        ({"method": "ngram", "prompt_lookup_min": 1}, SpeculativeConfig("lookup:1")),
        ({"method": "ngram_gpu", "prompt_lookup_max": 99}, SpeculativeConfig("lookup:99")),
        ({"model": "[ngram]", "prompt_lookup_max": 2}, SpeculativeConfig("lookup:2")),
        (
            {"method": "suffix", "num_speculative_tokens": 12},
            SpeculativeConfig("suffix", num_speculative_tokens=12),
        ),
        # the module in the target's checkpoint, by vLLM's names of it
        (
            {"method": "mtp", "num_speculative_tokens": 2},
            SpeculativeConfig("mtp", num_speculative_tokens=2),
        ),
        ({"method": "deepseek_mtp"}, SpeculativeConfig("mtp")),
        (
            {"method": "dflash", "model": "H/", "num_speculative_tokens": 15},
            SpeculativeConfig("H/", num_speculative_tokens=15),
        ),
        (
            {"method": "medusa", "model": "H/", "num_speculative_tokens": 4},
            SpeculativeConfig("H/", num_speculative_tokens=4),
        ),
        # what vLLM does anyway asks for nothing
        (
            {"model": "D/", "enforce_eager": False, "rejection_sample_method": "standard"},
            SpeculativeConfig("D/"),
        ),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1}, SpeculativeConfig("suffix")),
        # tokens that differ are mapped whether this is said or not
        ({"model": "D/", "use_heterogeneous_vocab": True}, SpeculativeConfig("D/")),
        ({"model": "D/", "use_heterogeneous_vocab": False}, SpeculativeConfig("D/")),
        # files say whether they are of such a draft
        ({"model": "D/", "parallel_drafting": True}, SpeculativeConfig("D/")),
        ({"model": "D/", "parallel_drafting": False}, SpeculativeConfig("D/")),
    ],
)
def test_it_says_what_options_say(given, wanted):
    assert read(given) == wanted
    assert read(json.dumps(given)) == wanted


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ("[(0,), (0, 0), (0, 0, 0)]", TokenTree.chain(3)),
        ("[(0,),(1,),(0,0),(1,0)]", TokenTree.from_widths((2, 1))),
        # in any order, and without branches below the second child
        ("[(1,), (0, 1), (0, 0), (0,)]", TokenTree((-1, 0, 0, 1, 1))),
        ([[0], [1], [1, 0]], TokenTree((-1, 0, 0, 2))),
    ],
)
def test_a_tree_of_child_numbers(tree, wanted):
    found = read({"model": "D/", "speculative_token_tree": tree})
    assert found.trees == [wanted]
    num_nodes = wanted.num_draft_tokens
    both = {"model": "D/", "speculative_token_tree": tree, "num_speculative_tokens": num_nodes}
    assert read(both) == found
    with pytest.raises(ConfigError, match=f"tree of {num_nodes} tokens"):
        read(both | {"num_speculative_tokens": num_nodes + 1})


@pytest.mark.parametrize(
    ("given", "found", "do"),
    [
        # JSON
        ('{"model": "D/"', "Expecting ',' delimiter", "for example"),
        ("{'model': 'D/'}", "column 2", "for example"),
        ("[" * 100_000, "64 levels deep", "for example"),
        ("[1]", "[1], a list", "for example"),
        ('{"model": "D/", "model": "E/"}', "model", "for example"),
        ('{"model": "D/", "max_model_len": NaN}', "NaN", "for example"),
        # keys
        ('{"modle": "D/"}', "modle", "write model"),
        ({"model": "D/", "num_speculative_token": 3}, "num_speculative_token", "_tokens"),
        ({"model": "D/", "zzz": 3}, "zzz", "leave it out"),
        ({"model": "D/", "max_model_len": 512}, "max_model_len 512", "--draft-kv"),
        ({"model": "D/", "tensor_parallel_size": 2}, "tensor_parallel_size 2", "draft_tensor"),
        ({"model": "D/", "parallel_drafting": 0}, "parallel_drafting 0", "write true or false"),
        (
            {"model": "D/", "use_heterogeneous_vocab": "yes"},
            "use_heterogeneous_vocab yes",
            "write true or false",
        ),
        ({"model": "D/", "use_heterogeneous_vocab": 1}, "use_heterogeneous_vocab 1", "write true"),
        # methods
        ({}, "neither method nor model", "ngram"),
        ({"method": "eagle", "model": "H/"}, "eagle", "self:window"),
        ({"method": "eagle3"}, "eagle3 without model", "add"),
        ({"method": "dflash"}, "dflash without model", "add"),
        ({"method": "dspark"}, "dspark without model", "add"),
        ({"method": "medusa"}, "medusa without model", "add"),
        ({"method": "mlp_speculator", "model": "H/"}, "mlp_speculator", "self:window"),
        ({"method": "eagle3", "model": "suffix"}, "eagle3 and model suffix", "name a head"),
        ({"method": "eagle3", "model": "self:window=64"}, "model self:window=64", "name a head"),
        ({"method": "mimo_mtp"}, "mimo_mtp", "self:window"),
        ({"method": "mtp", "model": "T/"}, "model T/", "leave out"),
        ({"method": "draft-model", "model": "D/"}, "draft-model", "write draft_model"),
        ({"method": 3}, "method 3", "self:window"),
        ({"method": "draft_model"}, "without model", "add"),
        ({"method": "draft_model", "model": "suffix"}, "model suffix", "write method suffix"),
        ({"model": ""}, "empty", "name it"),
        ({"model": 7}, "model 7", "correct"),
        ({"model": "lookup:x"}, "lookup:x", "lookup:3"),
        # values
        ({"model": "D/", "num_speculative_tokens": 0}, "num_speculative_tokens 0", "correct"),
        ({"model": "D/", "num_speculative_tokens": True}, "num_speculative_tokens true", "correct"),
        ({"model": "D/", "num_speculative_tokens": "4"}, "num_speculative_tokens 4", "correct"),
        ({"method": "ngram", "prompt_lookup_max": 100}, "prompt_lookup_max 100", "correct"),
        # contradictions
        ({"method": "ngram", "prompt_lookup_min": 2}, "prompt_lookup_min 2", "leave out"),
        ({"method": "ngram", "model": "D/"}, "ngram and model D/", "leave out"),
        ({"method": "ngram", "draft_tensor_parallel_size": 2}, "parallel_size 2", "leave out"),
        ({"model": "lookup:3", "draft_tensor_parallel_size": 2}, "lookup:3 and", "leave out"),
        (
            {"method": "eagle3", "model": "H/", "draft_tensor_parallel_size": 2},
            "method eagle3 and draft_tensor_parallel_size 2",
            "leave out",
        ),
        ({"model": "D/", "prompt_lookup_max": 4}, "prompt_lookup_max 4", "leave out"),
        ({"method": "suffix", "model": "D/"}, "suffix and model D/", "leave out"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max 4", "leave out"),
        (
            {"method": "ngram", "speculative_token_tree": "[(0,), (1,)]"},
            "with branches",
            "num_speculative_tokens",
        ),
    ],
)
def test_what_specc_lacks_is_refused(given, found, do):
    with pytest.raises(ConfigError) as caught:
        read(given)
    assert found in caught.value.found
    assert do in caught.value.do
    assert len(caught.value.found) < 200


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ("[(0)]", "[(0)]"),
        ("[]", "[]"),
        ("[(0,), ()]", "()"),
        ("[(-1,)]", "-1"),
        ("__import__('os')", "__import__"),
        ("[(0,), (0,)]", "(0,) twice"),
        ("[(0,), (1, 0)]", "(1, 0) without (1,)"),
        # Medusa's form: a second choice without the first
        ("[(0,), (2,)]", "(2,) without (1,)"),
    ],
)
def test_what_is_no_tree(tree, found):
    with pytest.raises(ConfigError) as caught:
        read({"model": "D/", "speculative_token_tree": tree})
    assert found in caught.value.found


def test_a_tree_has_a_size():
    with pytest.raises(TreeError, match="1024"):
        read({"model": "D/", "speculative_token_tree": [[i] for i in range(1024)]})


@pytest.mark.parametrize(
    "options",
    [
        {"draft": ("E/",)},
        {"tree": ("2,1",)},
        {"num_speculative_tokens": 0},
        {"combine": "merge"},
    ],
)
def test_one_way_to_say_it(options):
    config = read({"model": "D/"})
    (name,) = options
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        config.check_alone(**options)
    config.check_alone(draft=(), tree=[], num_speculative_tokens=None, combine=None)


def test_ranks_of_the_draft():
    said = read({"model": "D/", "draft_tensor_parallel_size": 2})
    assert [said.num_draft_ranks(given) for given in (1, 2)] == [2, 2]
    assert read({"model": "D/"}).num_draft_ranks(4) == 4
    with pytest.raises(ConfigError, match="parallel-size 4"):
        said.num_draft_ranks(4)
