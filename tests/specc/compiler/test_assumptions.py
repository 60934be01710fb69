"""`--draft-assume`: what users say of heads, as it is written, and for which draft it is."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from specc.compiler.assumptions import parse_switches, switches_of
from specc.compiler.candidate import Candidate, open_models
from specc.compiler.checked_models import check_assumptions
from specc.config import CompileConfig
from specc.errors import ConfigError, HeadError
from specc.passes.drafters.head_spec import HeadSwitches
from specc.passes.drafters.tap_ids import ENTERING
from tests.block_heads import BLOCK_CASES, write_block
from tests.heads import CASES, LAYERS, VOCAB, WIDTH, write_head
from tests.medusa_heads import MEDUSA_CASES, write_medusa

SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
TARGET = Candidate("target", "T/", Path("T"), LlamaConfig(**SIZES), "float32")


def draft(path: Path, text: str = "files", name: str = "draft_0") -> Candidate:
    return Candidate.open_draft(name, path, TARGET, switches=parse_switches(text))


def config_of(*texts: str) -> CompileConfig:
    return CompileConfig(draft_assume=texts)


def test_what_is_written() -> None:
    assert parse_switches("files") == HeadSwitches()
    text = " tap_convention=entering, is_last_normed = false,norm_before_residual=true"
    assert parse_switches(text) == HeadSwitches(True, ENTERING, False)
    assert parse_switches("sample_from_anchor=false").sample_from_anchor is False
    assert parse_switches("candidates=64").candidates == 64
    one = config_of("is_last_normed=true")
    assert switches_of(one, 2) == [HeadSwitches(is_last_normed=True)] * 2
    each = config_of("files", "is_last_normed=true")
    assert switches_of(each, 2) == [HeadSwitches(), HeadSwitches(is_last_normed=True)]
    assert switches_of(config_of(), 1) == [HeadSwitches()]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "entering",
        "tap_convention=true",
        "is_last_normed=1",
        "is_last_normed=True",
        "is_last_normed=true,is_last_normed=true",
        "files,is_last_normed=true",
        "layers=3",
        "candidates=0",
        "candidates=true",
        "candidates=9999999999",
    ],
)
def test_what_is_no_assumption(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_switches(text)
    assert caught.value.found == f"--draft-assume {text}"
    assert "sample_from_anchor=true|false" in caught.value.needed
    assert caught.value.do == "for example --draft-assume tap_convention=entering"


def test_heads_are_read_so(tmp_path: Path) -> None:
    """And the engine tells that they were, among what its drafts' files left open."""
    block, head = tmp_path / "block", tmp_path / "head"
    write_block(block, BLOCK_CASES["z-lab"])
    write_head(head, CASES["safeailab"])
    found = draft(block, "tap_convention=entering,sample_from_anchor=true").head
    assert found is not None
    assert (found.boundaries, found.block.from_anchor) == ((1, 4), True)
    told = "tap_convention=entering,sample_from_anchor=true is taken, whatever its files say"
    assert told in found.warnings[-1]
    as_written = draft(block).head
    assert as_written is not None
    assert (as_written.boundaries, as_written.block.from_anchor) == ((2, 5), False)
    assert not any("--draft-assume" in text for text in as_written.warnings)
    for value in (True, False):
        flags = draft(head, f"norm_before_residual={str(value).lower()}").head.flags
        assert flags.norm_before_residual is value


def test_each_draft_has_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Candidate, "open", lambda *_: TARGET)
    write_block(tmp_path, BLOCK_CASES["z-lab"])
    switches = switches_of(config_of("files", "tap_convention=entering"), 2)
    _, *drafts = open_models("T/", [tmp_path, tmp_path], switches=switches)
    assert [one.head and one.head.boundaries for one in drafts] == [(2, 5), (1, 4)]
    _, alone = open_models("T/", [tmp_path])
    assert alone.head is not None
    assert alone.head.boundaries == (2, 5)


def test_what_a_kind_of_head_does_not_ask(tmp_path: Path) -> None:
    write_block(tmp_path, BLOCK_CASES["dspark-rnn"])
    with pytest.raises(
        ConfigError, match="draft 0: --draft-assume norm_before_residual=true, and"
    ) as caught:
        draft(tmp_path, "norm_before_residual=true")
    assert "of several drafts pass --draft-assume for each, files for" in caught.value.do
    # and what is said is compared with the rest of the files
    said = "and --draft-assume sample_from_anchor=false: its trainer begins with the state that"
    with pytest.raises(HeadError, match=said) as found:
        draft(tmp_path, "sample_from_anchor=false")
    assert found.value.do == "leave out sample_from_anchor"


def test_medusa_heads_leave_nothing_open(tmp_path: Path) -> None:
    write_medusa(tmp_path, MEDUSA_CASES["vllm"])
    assert draft(tmp_path).head is not None
    with pytest.raises(ConfigError, match="draft 0: --draft-assume is_last_normed=true") as caught:
        draft(tmp_path, "is_last_normed=true")
    assert caught.value.needed == "files: such drafts leave nothing open"


def test_ordinary_models_leave_nothing_open(tmp_path: Path) -> None:
    """What is said once is of the heads among the drafts."""
    write_block(tmp_path, BLOCK_CASES["z-lab"])
    block = draft(tmp_path)
    model = Candidate("draft_1", "D/", Path("D"), LlamaConfig(**SIZES), "float32")
    text = "tap_convention=entering"
    check_assumptions([TARGET, model], config_of())
    check_assumptions([TARGET, block, model], config_of(text))
    check_assumptions([TARGET, block, model], config_of(text, "files"))
    for drafts, texts in (
        ([model], (text,)),
        ([block, model], ("files", text)),
        ([block, model], (text, text)),
    ):
        with pytest.raises(ConfigError, match=r"and draft 1 \(D/\), which is an ordinary model"):
            check_assumptions([TARGET, *drafts], config_of(*texts))
    with pytest.raises(ConfigError, match="2 times --draft-assume, and 1 draft models"):
        check_assumptions([TARGET, block], config_of(text, text))
