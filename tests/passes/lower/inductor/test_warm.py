"""Who gets the process that is kept, and who one of their own."""

from __future__ import annotations

import pytest

from specc.passes.lower.inductor import warm
from specc.passes.lower.inductor.warm import keep_inductor, warm_inductor
from specc.system.warm_process import WarmProcess


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[WarmProcess]:
    """Those that have ended, in a process in which none is kept."""
    monkeypatch.setattr(warm, "_holders", 0)
    monkeypatch.setattr(warm, "_kept", None)
    found: list[WarmProcess] = []
    monkeypatch.setattr(WarmProcess, "close", lambda self: found.append(self))
    return found


def test_one_is_kept_as_long_as_somebody_keeps_it(closed: list[WarmProcess]) -> None:
    with keep_inductor():
        with keep_inductor(), warm_inductor({"CXX": "a"}) as first:
            pass
        with warm_inductor({"CXX": "a"}) as second:
            assert second is first
        assert closed == []
    assert closed == [first]
    with keep_inductor(), warm_inductor({"CXX": "a"}) as third:
        assert third is not first


def test_none_is_kept_for_nobody(closed: list[WarmProcess]) -> None:
    with warm_inductor({"CXX": "a"}) as first:
        assert closed == []
    assert closed == [first]


def test_other_settings_need_another_import(
    closed: list[WarmProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    with keep_inductor():
        with warm_inductor({"CXX": "a"}) as kept:
            pass
        with warm_inductor({"CXX": "b"}) as own:
            assert own is not kept
        assert closed == [own]
        monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
        with warm_inductor({"CXX": "a"}) as own:
            assert own is not kept
        monkeypatch.delenv("TORCHINDUCTOR_FREEZING")
        # what is read at every use is no setting
        monkeypatch.setenv("SPECC_CACHE_DIR", "elsewhere")
        with warm_inductor({"CXX": "a"}) as again:
            assert again is kept
