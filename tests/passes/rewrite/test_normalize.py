"""Normalizing changes the form of a graph and never its numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from specc.errors import SpeccError, UnsupportedGraphError
from specc.passes.facts import is_flat_call_graph, is_off_meta_device
from specc.passes.rewrite.normalize import Normalize
from tests.passes.modules import Tiny, assert_same_numbers, aten, compiled, traced
from tests.tiers import only


def run(kind):
    torch.manual_seed(0)
    model = kind().eval()
    program, (result,) = traced(model, Normalize())
    return model, program, result


class OtherGradMode(Tiny):
    def after(self, x, positions):
        with torch.enable_grad():
            y = x * 2
            z = y + 1
        return x + y * z


class AutocastOff(Tiny):
    def after(self, x, positions):
        with torch.autocast("cpu", enabled=False):
            return (x.float() * 3).sin()


class NestedRegions(Tiny):
    def after(self, x, positions):
        with torch.autocast("cpu", enabled=False):
            with torch.enable_grad():
                y = x * 2
            return x + y


@pytest.mark.parametrize("kind", [OtherGradMode, AutocastOff, NestedRegions])
def test_regions_are_inlined(kind):
    model = kind().eval()
    program, _ = traced(model)
    was_flat = is_flat_call_graph(program)
    result = Normalize().run(program)
    assert not was_flat
    assert result.rewrites
    assert is_flat_call_graph(program)
    assert_same_numbers(program, model)


def test_casting_regions_are_refused():
    class AutocastOn(Tiny):
        def after(self, x, positions):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.o(x).float()

    with pytest.raises(UnsupportedGraphError, match=r"autocast region computes in torch\.bfloat16"):
        run(AutocastOn)


class Conversions(Tiny):
    def after(self, x, positions):
        x = x.to(torch.float64).to(torch.float32)
        return (x.float() + x.to(x.device) + x.detach() + x.contiguous()).type_as(x)


def test_conversions_that_convert_nothing_go():
    model, program, result = run(Conversions)
    dtypes = [node.args[1] for node in program.calls(aten.to.dtype)]
    assert dtypes == [torch.float64, torch.float32]
    assert result.rewrites >= 3
    assert not program.calls(aten.detach.default, aten._to_copy.default, aten.to.device)
    assert_same_numbers(program, model)


def test_checks_and_inactive_dropout_go():
    class Checked(Tiny):
        def after(self, x, positions):
            torch._check(positions.shape[1] >= 1)
            return F.dropout(F.dropout(x, 0.5, self.training), 0.0, True)

    model, program, _ = run(Checked)
    assert not program.calls(aten.dropout.default, aten._assert_tensor_metadata.default)
    assert_same_numbers(program, model)


class TakesAll(Tiny):
    def after(self, x, positions):
        return x[:, -x.shape[1] :] * x[..., :-1].sum(-1, keepdim=True)


def test_slices_of_all_tokens_go():
    model, program, _ = run(TakesAll)
    (part,) = program.calls(aten.slice.Tensor)
    assert part.meta["val"].shape[-1] == 15
    assert_same_numbers(program, model)


def test_meta_device_goes():
    with torch.device("meta"):
        model = _Arange().eval()
    program, _ = traced(model)
    assert not is_off_meta_device(program)
    Normalize().run(program)
    assert is_off_meta_device(program)
    real = _Arange().eval()
    assert_same_numbers(program, real)


class _Arange(Tiny):
    def after(self, x, positions):
        return x * torch.arange(16, device=x.device) + torch.zeros(16, device=x.device)


class Updates(Tiny):
    """Updates of a value that nothing else sees."""

    def after(self, x, positions):
        x = x * 1.0
        x.add_(1)
        x.mul_(2.0)
        x.div_(3)
        x.sub_(0.5)
        x.masked_fill_(x > 1, 0.25)
        return x


def test_updates_become_functional():
    model, program, _ = run(Updates)
    assert not program.calls(aten.add_.Tensor, aten.mul_.Tensor, aten.div_.Tensor)
    assert program.calls(aten.masked_fill.Scalar)
    assert_same_numbers(program, model)


class MaskedFill(Tiny):
    def after(self, x, positions):
        ids = positions.clone()
        ids[(positions == 3) | (positions > 5)] = 1
        return x * ids[..., None]


def test_numbers_behind_a_mask_become_a_choice():
    model, program, _ = run(MaskedFill)
    assert not program.calls(aten.index_put.default)
    assert len(program.calls(aten.where.self)) == 1
    assert_same_numbers(program, model)


def test_masks_of_rows_stay():
    """Each row is written over as a whole: its mask has no columns."""

    class Rows(Tiny):
        def after(self, x, positions):
            x = x.clone()
            x[positions > 3] = 0.5
            return x

    _, program, _ = run(Rows)
    assert program.calls(aten.index_put.default)
    assert not program.calls(aten.where.self)


class ReadAgain(Tiny):
    def after(self, x, positions):
        x = x * 1.0
        y = x.add_(1)
        return y + x


def test_updated_value_is_read_again():
    model, program, _ = run(ReadAgain)
    assert_same_numbers(program, model)


def _assert_same_or_refused(kind):
    """Either the numbers are right, or the model is refused."""
    torch.manual_seed(0)
    model = kind().eval()
    try:
        program, _ = compiled(model)
    except SpeccError:
        return
    assert_same_numbers(program, model)


class ViewOfSource(Tiny):
    """The update goes through a view; its source is read later."""

    def after(self, x, positions):
        x = x * 1.0
        x[..., :4].mul_(2)
        return x


class SourceOfView(Tiny):
    """The update goes to the source; a view of it is read later."""

    def after(self, x, positions):
        x = x * 1.0
        view = x.view(1, -1, 4, 4)
        x.mul_(2)
        return view.flatten(2)


class Detached(Tiny):
    """An alias without an operator of its own in the program."""

    def after(self, x, positions):
        x = x * 1.0
        x.detach().mul_(2)
        return x


class Assigned(Tiny):
    def after(self, x, positions):
        x = x * 1.0
        x[..., 0] = 0.0
        return x


class AssignedProduct(Tiny):
    def after(self, x, positions):
        x = x * 1.0
        x[..., :4] *= 2.0
        return x


class CopyBefore(Tiny):
    """A copy that is made before its source is updated keeps the old values."""

    def after(self, x, positions):
        x = x * 1.0
        old = x.to(x.dtype, copy=True)
        x.mul_(2)
        return x + old


class ReadLater(Tiny):
    """The result of the update is not used, its input is."""

    def after(self, x, positions):
        x = x * 1.0
        x.mul_(2)
        return x + 1


@pytest.mark.parametrize("kind", [CopyBefore, ReadLater])
def test_plain_updates_keep_their_numbers(kind):
    model = kind().eval()
    program, _ = compiled(model)
    assert_same_numbers(program, model)


@pytest.mark.parametrize(
    "kind",
    only(
        (ViewOfSource, AssignedProduct),
        [ViewOfSource, SourceOfView, Detached, Assigned, AssignedProduct],
    ),
)
def test_updates_through_an_alias_are_kept_or_refused(kind):
    _assert_same_or_refused(kind)


class InPlaceActivation(Tiny):
    def after(self, x, positions):
        return F.relu(x * 1.0, inplace=True)


class Counter(Tiny):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def after(self, x, positions):
        self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize(
    ("kind", "operator"), [(InPlaceActivation, "aten.relu_.default"), (Counter, "aten.add_.Tensor")]
)
def test_other_updates_are_refused(kind, operator):
    with pytest.raises(SpeccError, match="updates its input in place") as caught:
        compiled(kind())
    assert operator in caught.value.found


class Filled(Tiny):
    """Two slices of an empty tensor, the last one first."""

    def after(self, x, positions):
        y = x.new_empty(*x.shape[:-1], 20)
        y[..., 16:].copy_(x[..., :4])
        y[..., :16].copy_(x * 2)
        return x + y[..., 4:]


def test_what_is_filled_by_slices_is_joined():
    model, program, _ = run(Filled)
    assert not program.calls(aten.copy_.default, aten.new_empty.default)
    assert_same_numbers(program, model)


class FilledInPart(Filled):
    def after(self, x, positions):
        y = torch.zeros_like(x).new_empty(x.shape)
        y[..., :8].copy_(x[..., 8:])
        return x + y[..., :8].repeat(1, 1, 2)


class FilledTwice(Filled):
    def after(self, x, positions):
        y = x.new_empty(x.shape)
        y[..., :9].copy_(x[..., :9])
        y[..., 8:].copy_(x[..., :8])
        return x + y


class ReadEarly(Filled):
    def after(self, x, positions):
        y = x.new_empty(x.shape)
        y[..., :8].copy_(x[..., 8:])
        z = y * 2
        y[..., 8:].copy_(x[..., :8])
        return x + y + z


class Repeated(Filled):
    def after(self, x, positions):
        y = x.new_empty(x.shape)
        y[..., :8].copy_(x[..., 8:])
        y[..., 8:].copy_(x[..., :1])
        return x + y


@pytest.mark.parametrize(
    "kind",
    only(
        (FilledInPart, ReadEarly),
        [FilledInPart, FilledTwice, ReadEarly, Repeated],
    ),
)
def test_what_is_filled_otherwise_is_refused(kind):
    with pytest.raises(UnsupportedGraphError, match="updates its input in place"):
        compiled(kind())
