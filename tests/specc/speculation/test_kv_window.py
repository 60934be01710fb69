"""`--draft-kv` as it is written, and for which draft it is."""

from __future__ import annotations

import pytest

from specc.config import CompileConfig
from specc.errors import ConfigError
from specc.speculation.kv_window import KVWindow


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("window=512", KVWindow(512, 4)),
        ("window=512,sink=0", KVWindow(512, 0)),
        (" sink=16,window=64 ", KVWindow(64, 16)),
        ("full", None),
    ],
)
def test_parse(text, rows):
    assert KVWindow.parse(text) == rows
    if rows is not None:
        assert KVWindow.parse(rows.option) == rows


@pytest.mark.parametrize(
    "text", ["", "512", "window=", "window=-1", "window=4,window=5", "sink=4", "window=4;sink=4"]
)
def test_malformed(text):
    with pytest.raises(ConfigError) as caught:
        KVWindow.parse(text)
    assert caught.value.found == f"--draft-kv {text}"
    assert caught.value.do == "for example --draft-kv window=512"


@pytest.mark.parametrize("text", ["window=0", "window=99999999999", "window=4,sink=99999999999"])
def test_outside_of_any_model(text):
    with pytest.raises(ConfigError, match="a window of 1 …"):
        CompileConfig(draft_kv=(text,))


def test_which_draft_has_which():
    assert CompileConfig().kv_windows_of(2) == [None, None, None]
    one = CompileConfig(draft_kv=("window=8",))
    assert one.kv_windows_of(2) == [None, KVWindow(8), KVWindow(8)]
    each = CompileConfig(draft_kv=("full", "window=8,sink=0"))
    assert each.kv_windows_of(2) == [None, None, KVWindow(8, 0)]


@pytest.mark.parametrize(("options", "num_drafts"), [(("window=8",), 0), (("full", "full"), 3)])
def test_neither_one_for_all_nor_one_each(options, num_drafts):
    with pytest.raises(ConfigError) as caught:
        CompileConfig(draft_kv=options).kv_windows_of(num_drafts)
    assert f"{len(options)} times --draft-kv, and {num_drafts} draft models" in caught.value.found
