import concurrent.futures
import ctypes
import operator
import random
from types import SimpleNamespace

import pytest
import torch
from torch import fx

from specc.errors import EngineError
from specc.runtime.backends.cpu.native_calls import Pool, functions, made
from specc.runtime.backends.cpu.program import run_program
from specc.runtime.backends.cpu.step import NativeStep
from tests.runtime.backends.cpu.instruction_code import Code, begun, poisoned
from tests.runtime.backends.cpu.plain_program import PlainProgram, expected
from tests.runtime.backends.cpu.random_graph import COLUMNS, random_graph

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def library():
    with poisoned() as library:
        yield library


def _inputs(rows: int, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(rows, COLUMNS) for _ in range(2)]


@pytest.mark.default("0", "1", "4", "7", "10", "13", "16", "19", "22", "25", "28", "31", "34", "37")
@pytest.mark.parametrize("seed", range(40))
def test_random_programs_compute_what_torch_does(seed: int) -> None:
    graph = random_graph(seed)
    program = PlainProgram(graph)
    for rows in random.Random(seed).sample(range(1, 40), 4):
        inputs = _inputs(rows, seed + rows)
        before = [x.clone() for x in inputs]
        assert torch.equal(program(*inputs), expected(graph, inputs))
        assert all(map(torch.equal, inputs, before))


def test_nothing_is_allocated_for_sizes_that_were_seen() -> None:
    graph = random_graph(3, num_nodes=120)
    program = PlainProgram(graph)
    largest = _inputs(3000, 0)
    # what did not fit into one range the first time does from the second on
    for _ in range(2):
        program(*largest)
    arenas, size, peak, growths = program.pool.counts()
    assert arenas == 1
    assert peak <= size
    for rows in (3000, 1, 700, 3000):
        program(*_inputs(rows, rows))
    assert program.pool.counts() == (1, size, peak, growths)


def _one_value() -> fx.Graph:
    graph = fx.Graph()
    x, _ = graph.placeholder("a"), graph.placeholder("b")
    graph.output(graph.call_function(aten.mul.Tensor, (x, 1.01)))
    return graph


def test_chunks_become_one() -> None:
    """A pass that takes more than ever before takes it in pieces, the next one in one piece."""
    pool = Pool()
    program = PlainProgram(random_graph(4, num_nodes=120), pool)
    for rows in (100, 3000, 30_000):
        program(*_inputs(rows, rows))
    _, size, _, growths = pool.counts()
    assert growths >= 4
    # one value as large as nearly all of them
    PlainProgram(_one_value(), pool)(*_inputs(size * 9 // 10 // (4 * COLUMNS), 1))
    assert pool.counts()[1] == size


def test_places_that_lie_beside_each_other_become_one() -> None:
    graph = fx.Graph()
    x, _ = graph.placeholder("a"), graph.placeholder("b")
    small = [graph.call_function(aten.mul.Tensor, (x, 1.0 + number)) for number in range(8)]
    total = small[0]
    for value in small[1:]:
        total = graph.call_function(aten.add.Tensor, (total, value))
    graph.output(graph.call_function(aten.cat.default, ([total] * 7,)))
    pool, rows = Pool(), 10_000 * 100 // COLUMNS
    # of thirteen such values
    PlainProgram(_one_value(), pool)(*_inputs(13 * rows, 0))
    before = pool.counts()
    PlainProgram(graph, pool)(*_inputs(rows, 1))
    assert pool.counts()[1] == before[1]


def test_values_share_memory() -> None:
    graph = fx.Graph()
    x = graph.placeholder("a")
    for _ in range(100):
        x = graph.call_function(aten.mul.Tensor, (x, 1.01))
    graph.output(x)
    program = PlainProgram(graph)
    program(torch.ones(1000, 100))
    _, _, peak, _ = program.pool.counts()
    assert 800_000 <= peak < 810_000  # two of a hundred


@pytest.mark.slow
def test_programs_run_beside_each_other() -> None:
    pool = Pool()
    graphs = [random_graph(seed) for seed in (5, 6)]
    programs = [PlainProgram(graph, pool) for graph in graphs]

    def run(turn: int) -> bool:
        inputs = _inputs(turn % 7 + 1, turn)
        which = turn % 2
        return torch.equal(programs[which](*inputs), expected(graphs[which], inputs))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(threads.map(run, range(200)))
    assert 1 <= pool.counts()[0] <= 4


def test_a_program_that_failed_runs_again() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    kept = graph.call_function(aten.mul.Tensor, (a, 2))
    graph.output(graph.call_function(aten.add.Tensor, (kept, b)))
    program = PlainProgram(graph)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            program(torch.ones(3, 4), torch.ones(5, 7))
        assert torch.equal(program(torch.ones(2), torch.ones(2)), torch.full((2,), 3.0))
    assert program.pool.counts()[0] == 1


def test_an_input_and_a_view_of_one_are_results() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    graph.output(graph.call_function(aten.transpose.int, (a, 0, 1)))
    x = torch.randn(3, 4)
    assert torch.equal(PlainProgram(graph)(x), x.T)
    graph = fx.Graph()
    graph.output(graph.placeholder("a"))
    assert torch.equal(PlainProgram(graph)(x[1:, ::2]), x[1:, ::2])


def test_more_memory_than_any_program_takes_is_refused() -> None:
    graph = fx.Graph()
    a = graph.placeholder("a")
    wide = graph.call_function(aten.expand.default, (a, [1 << 20, 1 << 20]))
    graph.output(graph.call_function(aten.mul.Tensor, (wide, 2)))
    with pytest.raises(RuntimeError):
        PlainProgram(graph)(torch.ones(1, 1))


def test_values_are_made_before_they_are_read() -> None:
    code = begun()
    code.arithmetic(b"add", 1)
    code.slot(2)
    code.slot(1)
    with pytest.raises(EngineError, match="value 2 is read before it is made"):
        code.finish()


def test_a_value_is_made_once() -> None:
    code = begun()
    for _ in range(2):
        code.size(0, 0, 1)
    with pytest.raises(EngineError, match="value 1 is made twice"):
        code.finish()


def test_a_value_that_is_kept_is_made() -> None:
    code = begun()
    code.keep(3)
    with pytest.raises(EngineError, match="value 3 is kept, but never made"):
        code.finish()


@pytest.mark.parametrize("slot", [-1, 8, 1 << 40])
def test_slots_that_there_are_not(slot: int) -> None:
    code = begun()
    code.size(0, 0, 1)
    for call in (code.input, code.keep, code.slot):
        with pytest.raises(EngineError, match="of 8"):
            call(slot)
    with pytest.raises(EngineError, match="of 8"):
        code.size(0, 0, slot)


def test_operators_that_there_are_not() -> None:
    code = begun()
    with pytest.raises(EngineError, match="no operator 'specc::nothing'"):
        code.operator(b"specc::nothing", 1, 1, 0)
    with pytest.raises(EngineError, match="no arithmetic 'pow'"):
        code.arithmetic(b"pow", 1)


def test_an_operator_takes_its_arguments() -> None:
    code = begun()
    code.operator(b"specc::linear", 1, 1, 0)
    code.slot(0)
    with pytest.raises(EngineError, match="specc::linear takes 4 arguments, not 1"):
        code.finish()


@pytest.mark.parametrize("count", [-1, 1 << 17])
def test_lists_are_of_some_items(count: int) -> None:
    code = begun()
    code.size(0, 0, 1)
    with pytest.raises(EngineError, match="a list of 0 items or more"):
        code.list(count)


def test_a_list_has_all_of_its_items() -> None:
    code = begun()
    code.size(0, 0, 1)
    code.list(2)
    code.int(1)
    with pytest.raises(EngineError, match="fewer items than it says"):
        code.finish()
    with pytest.raises(EngineError, match="a list of lists"):
        code.list(1)


def test_arguments_follow_instructions() -> None:
    code = begun()
    with pytest.raises(EngineError, match="an instruction first"):
        code.int(1)
    other = Code(2)
    with pytest.raises(EngineError, match="a stage is begun first"):
        other.size(0, 0, 1)


def test_a_program_of_too_many_values() -> None:
    for count in (-1, 1 << 40):
        assert functions().specc_code_new(count) is None


def _run_sizes(code: Code, *inputs: torch.Tensor) -> None:
    library = functions()
    slots = (ctypes.c_int64 * 1)(0)
    pointer = made(library.specc_program_new(code.pointer, slots, 1, 0))
    try:
        run_program(pointer, Pool(), inputs)
    finally:
        library.specc_program_free(pointer)


@pytest.mark.parametrize(
    ("sign", "b", "text"),
    [
        (b"mul", 1 << 62, "a size is no int64"),
        (b"add", (1 << 63) - 1, "a size is no int64"),
        (b"floordiv", 0, "divided by 0"),
        (b"mod", 0, "divided by 0"),
    ],
)
def test_sizes_that_are_no_sizes(sign: bytes, b: int, text: str) -> None:
    code = begun()
    code.size(0, 0, 1)
    code.arithmetic(sign, 2)
    code.slot(1)
    code.int(b)
    code.finish()
    with pytest.raises(RuntimeError, match=text):
        _run_sizes(code, torch.ones(5, 2))


def test_a_size_of_a_dimension_that_there_is_not() -> None:
    code = begun()
    code.size(0, 2, 1)
    code.finish()
    with pytest.raises(RuntimeError, match="a dimension of a tensor"):
        _run_sizes(code, torch.ones(5, 2))


def test_arithmetic_with_tensors_is_refused() -> None:
    code = begun()
    code.arithmetic(b"add", 1)
    code.slot(0)
    code.int(1)
    code.finish()
    with pytest.raises(RuntimeError, match="a size is an integer"):
        _run_sizes(code, torch.ones(5, 2))


@pytest.mark.parametrize("a", [-7, -1, 0, 5])
@pytest.mark.parametrize("b", [-3, -1, 2, 9])
def test_sizes_are_computed_as_python_does(a: int, b: int) -> None:
    # what is computed shows as the size of what is made
    graph = fx.Graph()
    x = graph.placeholder("a")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    zero = graph.call_function(operator.sub, (size, size))
    found = []
    for function in (operator.floordiv, operator.mod, operator.mul):
        value = graph.call_function(operator.add, (zero, a))
        divisor = graph.call_function(operator.add, (zero, b))
        value = graph.call_function(function, (value, divisor))
        found.append(graph.call_function(operator.add, (value, 100)))
    graph.output(graph.call_function(aten.new_ones.default, (x, found)))
    sizes = [a // b + 100, a % b + 100, a * b + 100]
    assert list(PlainProgram(graph)(torch.ones(3)).shape) == sizes


def test_steps_survive() -> None:
    """Whatever stages are asked for, values that there are not, and rows of any number."""
    code = Code(6)
    for slot in range(3):
        code.input(slot)
    for result in (3, 4):
        code.stage()
        code.size(0, 0, result)
    code.keep(3)
    code.finish()
    step = NativeStep(SimpleNamespace(code=code.pointer, host_slots=[3, 9, -1]), Pool())  # type: ignore[arg-type]
    table = torch.zeros(1, 2, dtype=torch.int32)
    for first, last in ((1, 2), (0, 3), (-1, 1), (2, 1), (1 << 40, 1 << 41)):
        with pytest.raises(EngineError):
            step.step([1, 0], table, first, last, reads=False)
        if first:
            with pytest.raises(EngineError):
                step.run([], first, last)
    for rows in ([], [1], [1, 2, 3] * 5):
        wrong = table.expand(len(rows) + 2, 2)
        with pytest.raises(EngineError):
            step.step(rows, wrong, 0, 1, reads=False)
    for results in (True, False):
        for slot in (3, 5, 6, -1):
            with pytest.raises(RuntimeError):
                step.get(slot)
        if results:
            with pytest.raises(EngineError, match="a tensor that a stage has made"):
                step.step([1, 0], table, 0, 2, reads=True)
        else:
            step.step([1, 0], table, 0, 2, reads=False, stays=True)
    with pytest.raises(EngineError, match="1 step or more"):
        step.steps([1, 0], table, 0, [])
    step.step([1, 0], table, 0, 1, reads=False)
    step.step([1, 0], table, 1, 2, reads=False)
    assert len(step.seconds()) == 2
    step.end()
    step.end()
