"""`specc chat`: what the model sees of a conversation, and how one goes on after a mistake."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specc.cli.chat import Conversation
from specc.errors import RequestError
from specc.runtime.llm import LLM
from specc.runtime.requests.chat_template import load_template
from specc.sampling.params import SamplingParams
from tests.command_line import assert_refused, invoke

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad words') }}"
    "{% endif %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)
GREEDY = {"temperature": 0.0}
GREEDY_OPTION = ("--temperature", 0)


@pytest.fixture
def engine(tiny_engine: Path, tmp_path: Path) -> Path:
    """The tiny engine, 96 positions, with a template."""
    path = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def conversation(engine: Path, **options) -> Conversation:
    template = load_template(engine)
    assert template is not None
    return Conversation(LLM(engine), template, GREEDY, **{"max_tokens": 6} | options)


def plain(engine: Path, prompt: str, count: int = 6) -> str:
    (output,) = LLM(engine, plan="off").generate(
        prompt, SamplingParams(temperature=0, max_tokens=count)
    )
    return output.outputs[0].text


def test_every_turn_sees_the_whole_conversation(engine):
    talk = conversation(engine, system="be kind")
    first = "".join(talk.answer("hello"))
    assert first == plain(engine, "[s]be kind[u]hello[a]")
    second = "".join(talk.answer("more"))
    assert second == plain(engine, f"[s]be kind[u]hello[a]{first}[u]more[a]")
    talk.reset()
    assert "".join(talk.answer("hello")) == first


@pytest.mark.slow
def test_the_oldest_turns_go_where_there_is_no_room(engine):
    talk = conversation(engine, system="be kind")
    first = "".join(talk.answer("x" * 30))
    assert talk.num_dropped == 0
    long = "y" * 50
    second = "".join(talk.answer(long))
    assert talk.num_dropped == 1
    assert first not in str(talk.turns)
    assert second == plain(engine, f"[s]be kind[u]{long}[a]")


def test_a_message_that_never_fits_is_refused_and_forgotten(engine):
    talk = conversation(engine)
    first = "".join(talk.answer("hello"))
    before = list(talk.turns)
    with pytest.raises(RequestError, match="prompt of"):
        list(talk.answer("z" * 200))
    with pytest.raises(RequestError, match="no bad words"):
        list(talk.answer("bad"))
    # what was dropped to make room is back; what was refused is nowhere
    assert talk.turns == before
    talk.reset()
    assert "".join(talk.answer("hello")) == first


@pytest.mark.slow
def test_without_a_limit_an_answer_takes_the_room_that_is_left(engine):
    talk = conversation(engine, max_tokens=None)
    said = "".join(talk.answer("hello"))
    assert talk.finish_reason == "length"
    assert talk.cut == "where prompt and output fill the engine's 96 tokens"
    assert said == plain(engine, "[u]hello[a]", 1000)


@pytest.mark.slow
def test_an_answer_that_was_stopped_stays_as_far_as_it_came(engine):
    talk = conversation(engine)
    pieces = talk.answer("hello")
    first = next(piece for piece in pieces if piece)
    pieces.close()
    assert talk.turns[-1]["role"] == "assistant"
    assert talk.turns[-1]["content"].startswith(first)
    assert len(list(talk.answer("more"))) > 0


def test_lines_of_a_pipe_are_messages(engine):
    lines = "hello\n\nbad\n/reset\n/nonsense\nhello\n/exit\nnever\n"
    result = invoke("chat", engine, *GREEDY_OPTION, "--max-tokens", 6, "--stats", stdin=lines)
    assert result.exit_code == 0, result.stderr
    answer = plain(engine, "[u]hello[a]")
    assert result.stdout == 2 * f"{answer}\n"
    assert "found:  messages that the chat template refuses: no bad words" in result.stderr
    assert "the conversation is forgotten" in result.stderr
    assert "no command /nonsense" in result.stderr
    assert "the answer ends" not in result.stderr, "six tokens were asked for"
    assert "mean acceptance length" in result.stderr


def test_refusals(engine, tiny_engine, tmp_path):
    assert_refused(invoke("chat", tiny_engine, stdin="a\n"), "no chat template", "specc run")
    file = tmp_path / "t.jinja"
    file.write_text("{{")
    assert_refused(invoke("chat", engine, "--chat-template", file, stdin="a\n"), "Jinja")
    assert_refused(invoke("chat", engine, "--top-p", 0, stdin="a\n"), "--top-p")
    assert_refused(invoke("chat", engine, "--max-tokens", 0, stdin="a\n"), "--max-tokens")
    assert_refused(invoke("chat", engine, stdin=b"\xff\n"), "0xff", "not UTF-8")


def test_weights_that_have_changed(engine):
    file = engine / "target" / "weights.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert_refused(invoke("chat", engine, stdin="a\n"), "crc32", "weights.safetensors")
    unchecked = invoke("chat", engine, "--max-tokens", 1, "--no-check-weights", stdin="a\n")
    assert unchecked.exit_code == 0, unchecked.stderr


# an answer takes seconds, so that it is not over when Ctrl-C comes
SLOWLY = """
import time
from specc.cli.main import main
from specc.runtime.core import EngineCore

advance = EngineCore.advance
EngineCore.advance = lambda core: (time.sleep(0.1), advance(core))[1]
main()
"""


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(engine):
    """A real terminal: the first answer is stopped, the chat goes on, and ends with code 0."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SLOWLY, "chat", str(engine), "--max-tokens", "80"],
        stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
    )  # fmt: skip
    os.close(follower)
    seen = ""

    def until(text: str, timeout_s: float = 60.0) -> None:
        nonlocal seen
        end = time.monotonic() + timeout_s
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([leader], [], [], 0.2)[0]:
                try:
                    seen += os.read(leader, 4096).decode("utf-8", "replace")
                except OSError:  # the other side has closed
                    assert text in seen, seen
                    return

    try:
        until("> ")
        os.write(leader, b"hello\n")
        # the terminal's echo, and then something of the answer: at a prompt, Ctrl-C ends the chat
        until("hello\r\n")
        seen = seen.partition("hello\r\n")[2]
        while not seen:
            seen = os.read(leader, 4096).decode("utf-8", "replace")
        os.kill(process.pid, signal.SIGINT)
        seen = ""
        until("> ")
        os.write(leader, b"/reset\n")
        until("the conversation is forgotten\r\n> ")
        os.write(leader, b"\x04")
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)
    assert "Traceback" not in seen
