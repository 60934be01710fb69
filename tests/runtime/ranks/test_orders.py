"""Messages between ranks: what is sent arrives, and nothing else is taken for a message."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from torch import Tensor

from specc.errors import FaultError
from specc.runtime.ranks.order_checks import commit_of, drawn_inputs, pass_inputs
from specc.runtime.ranks.orders import (
    HEADER_BYTES,
    MOST_BYTES,
    Kind,
    Message,
    decode,
    decode_header,
    encode,
    json_message,
    json_of,
)

# of two sequences of 3 and 1 tokens; every input is told apart by its numbers
INPUTS = (
    torch.tensor([11, 12, 13, 14]),
    torch.tensor([21, 22, 23, 24]),
    torch.tensor([0, 3, 4], dtype=torch.int32),
    torch.tensor([31, 32, 33, 34], dtype=torch.int32),
    torch.tensor([41, 42], dtype=torch.int32),
    torch.tensor([[51], [52], [53], [54]]),
    torch.tensor([[61, 62, 63], [64, 65, 66]], dtype=torch.int32),
    torch.tensor([2, 3]),
)
COMMIT = (
    torch.tensor([[0, 2, -1], [0, -1, -1]], dtype=torch.int32),
    torch.tensor([1, 0], dtype=torch.int32),
    torch.tensor([7, 8], dtype=torch.int32),
    torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
    torch.arange(5, dtype=torch.int32),
)


def received(data: bytes) -> Message:
    header = decode_header(data[:HEADER_BYTES])
    payload = data[HEADER_BYTES:]
    # who reads a socket waits for the rest of them, and leaves what comes after
    if len(payload) != header.num_bytes:
        raise FaultError("cut", "", "")
    tensor = torch.tensor(list(payload), dtype=torch.uint8)
    return decode(header, tensor)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


MASS = torch.tensor([[3.0, 2.0], [-1.0, -1.0]])


def test_votes_begin_at_nothing() -> None:
    """Of rank 0's mass a rank takes who votes, and nothing that is counted already."""
    own = torch.tensor([[0.0, 0.0], [-1.0, -1.0]])
    inputs = pass_inputs(received(encode(Message(Kind.PASS, (*INPUTS, MASS), 0, 9))))
    assert all(map(same, inputs, (*INPUTS, own)))
    draws, inputs = drawn_inputs(received(encode(Message(Kind.DRAW, (*INPUTS, *DRAWS, MASS)))))
    assert all(map(same, inputs, (*INPUTS, own)))
    assert all(map(same, draws, DRAWS))
    for mass in (MASS[:1], MASS[0], MASS.long()):
        with pytest.raises(FaultError):
            pass_inputs(received(encode(Message(Kind.PASS, (*INPUTS, mass)))))


DRAWS = (torch.tensor([0.0, 0.5]), torch.tensor([-3, 1 << 40]), torch.tensor([7, 9]))


def test_draws_arrive_as_they_were_sent() -> None:
    message = received(encode(Message(Kind.DRAW, (*INPUTS, *DRAWS), 0, 9)))
    draws, inputs = drawn_inputs(message)
    assert all(map(same, inputs, INPUTS))
    assert all(map(same, draws, DRAWS))


@pytest.mark.parametrize(
    "draws",
    [
        pytest.param(DRAWS[:2], id="one is missing"),
        pytest.param(DRAWS[::-1], id="other dtypes"),
        pytest.param(tuple(x[:1] for x in DRAWS), id="fewer rows than logits"),
    ],
)
def test_draws_that_do_not_go_with_a_pass_are_refused(draws: tuple[Tensor, ...]) -> None:
    with pytest.raises(FaultError, match="DRAW"):
        drawn_inputs(Message(Kind.DRAW, (*INPUTS, *draws)))


@pytest.mark.parametrize("has_ancestors", [True, False])
def test_a_pass_arrives_as_it_was_sent(has_ancestors: bool) -> None:
    inputs = tuple(None if i == 5 and not has_ancestors else x for i, x in enumerate(INPUTS))
    message = received(encode(Message(Kind.PASS, inputs, 2, 9)))
    assert (message.kind, message.model, message.sequence) == (Kind.PASS, 2, 9)
    found = pass_inputs(message)
    assert all(map(same, found, inputs)), found


def test_tensors_of_any_strides_and_sizes_arrive() -> None:
    sent = (
        torch.arange(12).view(3, 4).T,
        torch.arange(12, dtype=torch.int32)[1::3],
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor(5),
        torch.randn(2, 3),
    )
    message = received(encode(Message(Kind.PASS, sent)))
    assert all(map(same, message.tensors, sent))
    # programs may read them with instructions that want this
    assert all(x.data_ptr() % x.dtype.itemsize == 0 for x in message.tensors if x is not None)


def test_a_commit_arrives_as_it_was_sent() -> None:
    found = commit_of(received(encode(Message(Kind.COMMIT, COMMIT))))
    assert all(map(same, found, COMMIT))


def test_json_arrives() -> None:
    data = {"path": "/ä b", "limit": None, "n": [1, 2.5]}
    assert json_of(received(encode(json_message(Kind.SETUP, data)))) == data


def changed(offset: int, form: str, value: int) -> bytes:
    data = bytearray(encode(Message(Kind.PASS, INPUTS, 0, 1)))
    struct.pack_into(form, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", id="http"),
        pytest.param(b"\x80\x05cos\nsystem\n(S'true'\ntR." + bytes(32), id="pickle"),
        pytest.param(changed(4, "<B", 9), id="version"),
        pytest.param(changed(5, "<B", 99), id="kind"),
        pytest.param(changed(6, "<H", 60_000), id="tensors"),
        pytest.param(changed(12, "<I", 1), id="reserved"),
        pytest.param(changed(24, "<Q", MOST_BYTES + 1), id="bytes"),
        pytest.param(changed(24, "<Q", 1 << 63), id="more bytes than memory"),
        pytest.param(changed(HEADER_BYTES, "<B", 77), id="dtype"),
        pytest.param(changed(HEADER_BYTES + 1, "<B", 9), id="dimensions"),
        pytest.param(changed(HEADER_BYTES + 8, "<Q", 1 << 40), id="size"),
        pytest.param(changed(HEADER_BYTES + 8, "<Q", 1 << 63), id="size of a sign"),
        pytest.param(changed(HEADER_BYTES + 16, "<Q", 1), id="size of no dimension"),
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(FaultError, match="found: "):
        received(data)


def test_bytes_that_belong_to_no_tensor_are_refused() -> None:
    data = bytearray(encode(Message(Kind.PASS, INPUTS, 0, 1))) + bytes(64)
    struct.pack_into("<Q", data, 24, len(data) - HEADER_BYTES)
    with pytest.raises(FaultError, match="of which tensors take"):
        received(bytes(data))


def test_whatever_is_changed_is_refused_or_harmless() -> None:
    """Nothing but a refusal, or tensors within the message, comes of any altered bytes."""
    dice, refused = random.Random(3), 0
    whole = encode(Message(Kind.PASS, INPUTS, 0, 1))
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(dice.choice((1, 1, 2, 8))):
            # the header and the table: what comes after is numbers
            data[dice.randrange(HEADER_BYTES + 40 * len(INPUTS))] = dice.randrange(256)
        try:
            message = received(bytes(data))
            pass_inputs(message) if message.kind is Kind.PASS else commit_of(message)
        except FaultError:
            refused += 1
    assert refused > 2000


def swapped(values: tuple[Tensor, ...], i: int, j: int) -> tuple[Tensor, ...]:
    result = list(values)
    result[i], result[j] = result[j], result[i]
    return tuple(result)


def replaced(values: tuple[Tensor, ...], i: int, value: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(value if i == k else x for k, x in enumerate(values))


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(INPUTS[:7], id="one is missing"),
        pytest.param((*INPUTS, INPUTS[0]), id="one too many"),
        pytest.param(replaced(INPUTS, 6, None), id="no block table"),
        pytest.param(swapped(INPUTS, 3, 4), id="two swapped"),
        pytest.param(replaced(INPUTS, 0, INPUTS[0].int()), id="dtype"),
        pytest.param(replaced(INPUTS, 1, INPUTS[1][:3]), id="positions of fewer tokens"),
        pytest.param(replaced(INPUTS, 2, INPUTS[2][:2]), id="starts of fewer sequences"),
        pytest.param(replaced(INPUTS, 5, INPUTS[5][:, 0]), id="flat ancestors"),
        pytest.param(replaced(INPUTS, 6, INPUTS[6][:1]), id="blocks of one sequence"),
    ],
)
def test_inputs_that_do_not_go_together_are_refused(tensors: tuple[Tensor | None, ...]) -> None:
    with pytest.raises(FaultError, match=r"PASS|pass"):
        pass_inputs(Message(Kind.PASS, tensors))


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param(COMMIT[:4], id="one is missing"),
        pytest.param(replaced(COMMIT, 4, None), id="no slots"),
        pytest.param(swapped(COMMIT, 1, 2), id="two swapped"),
        pytest.param(replaced(COMMIT, 0, COMMIT[0][:1]), id="path of one sequence"),
        pytest.param(replaced(COMMIT, 4, COMMIT[4].view(1, 1, 5)), id="slots"),
        pytest.param(replaced(COMMIT, 4, COMMIT[4].expand(3, 5)), id="slots of three sequences"),
    ],
)
def test_commits_that_do_not_go_together_are_refused(tensors: tuple[Tensor | None, ...]) -> None:
    with pytest.raises(FaultError, match=r"COMMIT|commit"):
        commit_of(Message(Kind.COMMIT, tensors))


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff\xfe"])
def test_no_json(content: bytes) -> None:
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.raises(FaultError, match="without JSON"):
        json_of(Message(Kind.HELLO, (tensor,)))
    with pytest.raises(FaultError, match="without JSON"):
        json_of(Message(Kind.HELLO, (tensor.long(),)))
