"""The example that trains a further draft on what the drafts before it miss."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests import models
from tests.tiers import every

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = ("boost_tune", "boost_eval", "pair_data", "pair_eval", "pair_parts", "pair_policy")
CONTEXT, LENGTH, TOP = 3, 7, 5


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The example; it and the modules beside it are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        patch.syspath_prepend(str(EXAMPLES))
        for name in SCRIPTS:
            patch.delitem(sys.modules, name, raising=False)
        yield importlib.import_module("boost_tune")
        for name in SCRIPTS:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def policy(script: ModuleType) -> ModuleType:
    return sys.modules["pair_policy"]


def random_pool(script: ModuleType, rows: int) -> Any:
    """A pool of any tokens and any teacher, whose best tokens are all different."""
    tokens = torch.randint(models.VOCAB, (rows, LENGTH))
    odds, ids = torch.rand(rows, LENGTH, models.VOCAB).softmax(-1).topk(TOP)
    return script.Pool(tokens, ids.to(torch.int32), odds.bfloat16(), CONTEXT)


def weights_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize(
    ("num_drafts", "top_k"), every(3, [(1, 1), (2, 3), (3, 1), (3, 3)], first=1)
)
@torch.inference_mode()
def test_missed_positions_are_those_that_no_draft_covers(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, num_drafts: int, top_k: int
) -> None:
    drafts = [models.build_model("qwen3", seed=seed) for seed in range(num_drafts)]
    # more rows than go through a draft at once
    monkeypatch.setattr(script, "BATCH", 5)
    pool = random_pool(script, 12)
    best = []
    for draft in drafts:
        # a draft alone, one text after another, without what follows a position
        rows = [
            [draft(text[None, : end + 1]).logits[0, -1].tolist() for end in range(LENGTH)]
            for text in pool.tokens
        ]
        best.append([[sorted(range(len(x)), key=x.__getitem__)[::-1] for x in row] for row in rows])
    # the target chooses what some draft finds best, second best, … or something else
    for row in range(len(pool.tokens)):
        for place in range(LENGTH):
            ranks = best[(row + place) % num_drafts][row][place]
            pool.ids[row, place, 0] = ranks[(5 * row + place) % 7]

    missed = script.missed_positions(drafts, pool, top_k)

    expected = [
        [
            all(int(pool.ids[row, place, 0]) not in b[row][place][:top_k] for b in best)
            for place in range(LENGTH)
        ]
        for row in range(len(pool.tokens))
    ]
    assert missed.tolist() == expected
    assert 0.1 < missed.float().mean() < 0.95, "both kinds must be there"


def test_boost_weights(script: ModuleType) -> None:
    missed = torch.tensor([[True, False], [False, True]])
    assert script.boost_weights(missed, 0.25).tolist() == [[1.0, 0.25], [0.25, 1.0]]
    assert script.boost_weights(missed, 0.0).tolist() == missed.float().tolist()


def loss_of_positions(logits: Tensor, pool: Any, rows: Tensor, weights: Tensor) -> float:
    """The loss by plain sums over positions."""
    kls, firsts = [], []
    for number, row in enumerate(rows.tolist()):
        for place in range(LENGTH):
            weight = float(weights[number, place])
            log_probs = logits[number, place].double().log_softmax(-1)
            odds = pool.odds[row, place].double()
            odds = odds / odds.sum()
            ids = pool.ids[row, place].tolist()
            kl = sum(
                float(p) * (math.log(p) - float(log_probs[i]))
                for p, i in zip(odds, ids, strict=True)
            )
            kls.append((kl, weight))
            if place >= CONTEXT - 1:
                firsts.append((float(log_probs[ids[0]]), weight))

    def weighted(values: list[tuple[float, float]]) -> float:
        total = sum(weight for _, weight in values)
        return sum(value * weight for value, weight in values) / total

    return weighted(kls) - weighted(firsts)


def test_loss_is_that_of_the_weighted_positions(script: ModuleType, policy: ModuleType) -> None:
    pool, rows = random_pool(script, 6), torch.tensor([4, 1, 5])
    logits = torch.randn(3, LENGTH, models.VOCAB)
    for weights in (torch.rand(3, LENGTH), torch.randint(0, 2, (3, LENGTH)).float()):
        loss, _ = policy.policy_losses(logits, pool, rows, weights)
        assert loss.item() == pytest.approx(loss_of_positions(logits, pool, rows, weights), 1e-5)
    ones = torch.ones(3, LENGTH)
    loss, kl = policy.policy_losses(logits, pool, rows)
    assert loss.item() == pytest.approx(loss_of_positions(logits, pool, rows, ones), 1e-5)
    assert kl.shape == (3, LENGTH)


def test_loss_ignores_positions_without_weight(script: ModuleType, policy: ModuleType) -> None:
    pool, rows = random_pool(script, 4), torch.arange(4)
    missed = torch.rand(4, LENGTH) < 0.4
    logits = torch.randn(4, LENGTH, models.VOCAB, requires_grad=True)
    weights = script.boost_weights(missed, 0.0)
    loss, _ = policy.policy_losses(logits, pool, rows, weights)
    loss.backward()
    assert torch.equal((logits.grad != 0).any(-1), missed)

    other = torch.where(missed[..., None], logits.detach(), torch.randn_like(logits))
    assert policy.policy_losses(other, pool, rows, weights)[0].item() == loss.item()
    # a batch in which nothing is missed teaches nothing, and breaks nothing
    nothing, _ = policy.policy_losses(logits, pool, rows, torch.zeros(4, LENGTH))
    logits.grad = None
    nothing.backward()
    assert nothing.item() == 0
    assert not logits.grad.any()


@torch.inference_mode()
def test_pool_is_what_the_target_writes(policy: ModuleType) -> None:
    target = models.build_model("qwen3")
    prompts = torch.randint(models.VOCAB, (3, 9))
    pool = policy.continue_greedily(target, prompts, length=6)
    assert pool.tokens.shape == (3, 9 + 6 - 1)
    assert pool.context == 9
    assert torch.equal(pool.tokens[:, :9], prompts)
    logits = target(pool.tokens).logits
    assert torch.equal(pool.ids[..., 0].long(), logits.argmax(-1))
    # position context - 1 is the first whose choice was written down
    assert torch.equal(pool.tokens[:, 9:], pool.ids[:, 8:-1, 0].long())
    odds = logits.softmax(-1).gather(-1, pool.ids.long())
    torch.testing.assert_close(pool.odds.float(), odds, rtol=1e-2, atol=1e-4)


def test_training_changes_one_draft_and_lowers_its_loss(
    script: ModuleType, policy: ModuleType
) -> None:
    target, *drafts = [models.build_model("qwen3", seed=seed) for seed in range(3)]
    student = models.build_model("qwen3", seed=1).train()
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (target, *drafts)]
    pool = policy.continue_greedily(target, torch.randint(models.VOCAB, (32, 9)), length=12)
    missed = script.missed_positions(drafts, pool)
    weights, rows = script.boost_weights(missed, 0.0), torch.arange(len(missed))

    @torch.no_grad()
    def loss() -> float:
        logits = student(pool.tokens).logits
        return policy.policy_losses(logits, pool, rows, weights)[0].item()

    start, reports = loss(), []
    schedule = script.Schedule(20, 1.0, warmup=1)
    steps = policy.train_on_policy(
        student, pool, 0, schedule, lambda *values: reports.append(values), weights
    )
    assert steps == 20
    assert reports[0][:2] == (20, 20 * pool.tokens.numel())
    assert loss() < 0.8 * start
    for model, old in zip((target, *drafts), before, strict=True):
        for key, value in model.state_dict().items():
            assert torch.equal(value, old[key]), key


def test_rows_without_weight_teach_nothing(script: ModuleType, policy: ModuleType) -> None:
    # more rows than a step has, so that every step draws some
    pool, other = random_pool(script, 80), random_pool(script, 80)
    is_kept = torch.rand(80) < 0.5
    changed = script.Pool(
        *(
            torch.where(is_kept.view(80, *[1] * (mine.ndim - 1)), mine, theirs)
            for mine, theirs in zip(pool[:3], other[:3], strict=True)
        ),
        CONTEXT,
    )
    weights = is_kept[:, None].float().expand(80, LENGTH)
    states = []
    for text in (pool, changed):
        student = models.build_model("qwen3").train()
        schedule = script.Schedule(4, 1e6, warmup=1)
        policy.train_on_policy(student, text, 0, schedule, print, weights)
        states.append(student.state_dict())
    start = models.build_model("qwen3").state_dict()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
        assert not torch.equal(value, start[key]), key


def test_compared_plans_have_equally_many_nodes(script: ModuleType) -> None:
    drafts = [Path("a"), Path("b")]
    contestants = script.Contestants(Path("target"), drafts, Path("boosted"), Path("control"))
    paths = contestants.models
    assert [path.name for path in paths] == ["a", "b", "a", "boosted", "control"]
    plans = sys.modules["boost_eval"].plans_of(contestants, 3)
    models_of = {
        name: [paths[int(draft.removeprefix("draft_"))].name for draft in plan.drafts]
        for name, plan in plans.items()
    }
    assert models_of == {
        "draft_0 alone": ["a"],
        "draft_1 alone": ["b"],
        "drafts before, merged": ["a", "b"],
        "boosted alone": ["boosted"],
        "control alone": ["control"],
        "wider": ["a"],
        "before": ["a", "b", "a"],
        "after": ["a", "b", "boosted"],
        "control": ["a", "b", "control"],
    }
    sizes = {name: plan.num_nodes for name, plan in plans.items()}
    assert {sizes[name] for name in ("before", "after", "control", "wider")} == {1 + 3 * 3}
    assert sizes["draft_0 alone"] == sizes["boosted alone"] == 4


CODE = "def f(x):\n    return x\n\nclass A:\n    '''Text.'''\n"
PROMPT = "def held_out(y):\n"
# of runs that end before training
SHORT = ("--minutes", "0.01", "--pool-batches", "1")


def save_tokenizer(directory: Path) -> None:
    """One token a byte of ASCII, so that there are line ends; the first is the end token."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters = [level.pre_tokenize_str(chr(byte))[0][0] for byte in range(models.VOCAB)]
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[0])
    fast.save_pretrained(directory)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("boost")
    # drafts that are often right, each in its own way
    sources = {"target": {}, "draft-0": {"noise": 0.05}, "draft-1": {"noise": 0.07}}
    for name, options in sources.items():
        save_tokenizer(models.save_tiny("qwen3", root / name, num_hidden_layers=1, **options))
    lines = [{"prompt": PROMPT}, {"prompt": "class B(A):\n"}, {"prompt": "import os\n"}]
    (root / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


@pytest.fixture
def corpus(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A training corpus of two files, of which one holds a prompt."""
    source = sys.modules["pair_data"].SourceFile
    files = [source("a.py", 40 * CODE), source("b.py", 20 * CODE + PROMPT + CODE)]
    monkeypatch.setattr(sys.modules["pair_data"], "load_corpus", lambda: (files, []))
    return files


def command(root: Path, out: Path, *options: str) -> list[str]:
    drafts = [str(root / "draft-0"), str(root / "draft-1")]
    argv = ["--target", str(root / "target"), "--drafts", *drafts, "--out", str(out)]
    return [*argv, "--prompts", str(root / "prompts.jsonl"), *options]


def test_files_of_prompts_are_left_out(
    script: ModuleType, corpus: list[Any], checkpoints: Path
) -> None:
    kept = script.training_files([checkpoints / "prompts.jsonl"])
    assert [file.name for file in kept] == ["a.py"]


@pytest.mark.slow
def test_whole_run(
    script: ModuleType,
    corpus: list[Any],
    checkpoints: Path,
    tmp_path: Path,
) -> None:
    read = ("target", "draft-0")
    before = {name: weights_of(checkpoints / name) for name in read}
    out, file = tmp_path / "boosted", tmp_path / "figures.json"
    options = ["--steps", "4", "--pool-batches", "1", "--tokens", "12", "--depth", "2"]
    # every model takes a second or two to compile: one draft before, no control
    options += ["--no-control", "--drafts", str(checkpoints / "draft-0")]
    assert script.main(command(checkpoints, out, *options, "--json", str(file))) == 0

    assert {name: weights_of(checkpoints / name) for name in read} == before
    tensors = load_file(out / "model.safetensors")
    first = load_file(checkpoints / "draft-0" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert any(not torch.equal(tensors[key], first[key].bfloat16()) for key in tensors)
    data = json.loads(file.read_text())
    assert data["training"]["steps"] == 4
    assert 0 < data["training"]["missed_share"] < 1
    part = data["files"]["prompts.jsonl"]
    coverage = part["coverage"]
    assert 0 < coverage["drafts before"] < 1
    assert coverage["drafts before or boosted"] >= coverage["drafts before"]
    assert coverage["drafts before or boosted"] >= coverage["boosted alone"]
    rows = {(row["name"], row["temperature"]): row for row in part["plans"]}
    for temperature in (0.0, 1.0):
        of = {name: row for (name, t), row in rows.items() if t == temperature}
        assert all(row["outputs_equal_to_off"] == 3 for row in of.values())
        assert {of[name]["nodes"] for name in ("before", "after", "wider")} == {5}
        # a copy proposes nothing new
        assert of["before"]["accepted_per_depth"] == of["draft_0 alone"]["accepted_per_depth"]
        low, high = of["after"]["more_than_before"]["interval_95"]
        assert low <= of["after"]["more_than_before"]["mean"] <= high

    assert str(tmp_path) not in json.dumps(data["files"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == before["draft-0"][name]


def test_existing_output_is_kept(
    script: ModuleType,
    corpus: list[Any],
    checkpoints: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for options, reason in ([], "pass --force"), (["--force"], "is no checkpoint"):
        assert script.main(command(checkpoints, tmp_path, *SHORT, *options)) == 2
        assert reason in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        pytest.param(["--drafts", "{root}/none"], "{root}/none: no such directory", id="no-draft"),
        pytest.param(["--target", "{root}/none"], "{root}/none: no such directory", id="no-target"),
        pytest.param(["--keep", "1.5"], "--keep 1.5", id="keep"),
        pytest.param(["--minutes", "0"], "--minutes 0.0", id="minutes"),
        pytest.param(["--top-k", "0"], "--top-k 0", id="top-k"),
        pytest.param(["--threads", "0"], "--threads 0", id="threads"),
        pytest.param(["--prompts", "{root}/none"], "{root}/none: ", id="no-prompts"),
        pytest.param(["--prompts", "{root}/broken"], "{root}/broken: ", id="broken-prompts"),
        pytest.param(["--out", "{root}/draft-1", "--force"], "--out {root}/draft-1", id="out"),
    ],
)
def test_refused(
    script: ModuleType,
    corpus: list[Any],
    checkpoints: Path,
    tmp_path: Path,
    options: list[str],
    found: str,
    capsys: pytest.CaptureFixture,
) -> None:
    (checkpoints / "broken").write_text('{"text": 1}\n')
    options = [option.format(root=checkpoints) for option in options]
    assert script.main([*command(checkpoints, tmp_path / "out", *SHORT), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("found:  " + found.format(root=checkpoints)), error
    assert "needed: " in error
    assert "do:     " in error
    assert not (tmp_path / "out").exists()


def test_other_token_map_is_refused(
    script: ModuleType, checkpoints: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    draft = models.save_tiny("qwen3", tmp_path / "draft", vocab_size=models.VOCAB - 1)
    argv = [*command(checkpoints, tmp_path / "out"), "--drafts", str(draft)]
    assert script.main(argv) == 2
    assert "token 0 is" in capsys.readouterr().err
    save_tokenizer(draft)
    argv = [*command(checkpoints, tmp_path / "out"), "--drafts", str(draft)]
    assert script.main(argv) == 2
    assert f"{models.VOCAB - 1} tokens, and {models.VOCAB}" in capsys.readouterr().err


def test_too_little_time_is_refused(
    script: ModuleType,
    corpus: list[Any],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    # whatever the machine's speed
    monkeypatch.setattr(script, "train_on_policy", lambda *args: 0)
    assert script.main(command(checkpoints, tmp_path / "out", *SHORT)) == 2
    assert "ended before the first training step" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
