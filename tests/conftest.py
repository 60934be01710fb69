"""Fixtures of all tests: one thread, one seed, poisoned uninitialized memory, a tiny pair."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
# compiling a program takes seconds: tests of compiled engines ask for them
os.environ["SPECC_BACKEND"] = "eager"
# g++ takes a third less for what calls the kernels of a program, which computes no number itself;
# the kernels are optimized as for users
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# a shell that starts tests in the background has them ignore Ctrl-C, and so would all that they
# start: tests of interrupts would wait for one that never comes
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
# before anything imports triton, which reads this once; ahead-of-time compiles get processes
# of their own
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)
# pytest adds handlers, three times a test, to each logger that does not propagate: torch has 50,
# and describes all that it traces to the one of structured traces once that has a handler
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
        logger.propagate = True

SEED = 42

# there is none where tests/gpu/runner.py stands in for pytest
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # the same examples in every run, however long one takes: what fails by chance, or on a busy
    # machine only, tells nobody what broke it
    settings.register_profile("repeatable", deadline=None, derandomize=True)
    settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="the tests of part K of N, by files")
    parser.addoption("--record", action="store_true", help="note the files that pass: changed.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record"):
        from tests.changed import register

        register(config)


def pytest_collectstart() -> None:
    """Collect no garbage while tests are collected: nearly all that is made then stays."""
    gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Any:
    """Cases of a function that its mark `default` does not name are slow."""
    from tests.tiers import keep_default

    made = yield
    if isinstance(made, list):
        try:
            keep_default([item for item in made if isinstance(item, pytest.Function)])
        except ValueError as error:
            raise collector.CollectError(str(error)) from error
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of one part; of workers, which take files in this order (`--no-loadscope-reorder`)."""
    from tests.longest_first import longest_first, read_table

    if part := config.getoption("part"):
        from tests.parts import divide

        try:
            items[:], others = divide(items, part, read_table())
        except ValueError as error:
            raise pytest.UsageError(f"--part {error}") from error
        config.hook.pytest_deselected(items=others)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = longest_first(items, read_table())


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    _freeze_garbage()


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> None:
    _freeze_garbage()


def _freeze_garbage() -> None:
    """Leave what is there out of collections: over torch and thousands of tests each takes 1 s.

    Before every file, when what the one before it used is let go of: this collection goes over
    that alone, and those of the file, which code under test may ask for, over what is the file's.
    """
    gc.collect()
    gc.freeze()
    # full collections wait until a quarter is new, of what there is no longer: they would be many
    gc.set_threshold(10_000, 10, 50)


@pytest.fixture(autouse=True, scope="session")
def _traces_of_few_layers() -> Iterator[None]:
    """Look no operator of a trace up among those before it: models of two layers repeat few.

    Keys of the search take a quarter of the time of such a trace; of twelve layers they save more.
    """
    import torch._dynamo.config

    settings: Any = torch._dynamo.config
    with settings.patch(fake_tensor_cache_enabled=False):
        yield


@pytest.fixture(autouse=True, scope="session")
def _bounds_solved_once() -> Iterator[None]:
    """Solve the bounds of a dimension once: those of tokens, sequences and rows recur in traces.

    torch.export asks sympy for each again, which takes an eighth of the time of a small trace.
    """
    import sympy.solvers.inequalities

    solve = sympy.solvers.inequalities.reduce_inequalities
    known = functools.cache(solve)

    def solve_once(bounds: Any, symbols: Any = ()) -> Any:
        # as torch calls it
        if isinstance(bounds, set) and isinstance(symbols, sympy.Symbol):
            return known(frozenset(bounds), symbols)
        return solve(bounds, symbols)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sympy.solvers.inequalities, "reduce_inequalities", solve_once)
        yield


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch before every test, so that a failure repeats when the test runs alone."""
    # torch.manual_seed keeps a stack trace, formatted, for each kind of device that is not there
    torch.default_generator.manual_seed(SEED)
    if HAS_CUDA:
        torch.cuda.manual_seed_all(SEED)
    return SEED


@pytest.fixture(autouse=True, scope="session")
def _patience_with_children() -> Iterator[None]:
    """Let a job in a child process be ended by the processor's time that it takes, not by its wait.

    On the wall it has 15 times as long, and 10 s until it begins. Such children have the least
    priority: beside as many other processes as machines that run tests have, they need longer.
    """
    from specc.runtime.processes import bounded_child, bounded_pool

    modules: tuple[Any, ...] = (bounded_child, bounded_pool)
    defaults: Any = bounded_pool.BoundedPool.__init__.__kwdefaults__
    before = bounded_pool.WALL_TO_CPU, defaults["max_wait_s"]
    for module in modules:
        module.WALL_TO_CPU = 300.0
    defaults["max_wait_s"] = 120.0
    yield
    for module in modules:
        module.WALL_TO_CPU = before[0]
    defaults["max_wait_s"] = before[1]


@pytest.fixture(autouse=True, scope="session")
def _servers_are_lent() -> Iterator[None]:
    from tests.lent_servers import lent_servers

    with lent_servers():
        yield


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` and its relatives return: NaN for floats, the maximum for integers.

    A result that was allocated and not fully written then differs from any oracle.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = was_filling
    torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)


@dataclass(frozen=True)
class TinyModels:
    """Directories of two random Llama checkpoints with one byte-level tokenizer.

    The tokenizer's last id, 256, is EOS; the models have 260 ids, 128 positions.
    """

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    root = tmp_path_factory.mktemp("models")
    models = TinyModels(root / "target", root / "draft")
    for seed_, num_layers, path in ((1, 2, models.target), (2, 1, models.draft)):
        save_tiny_llama(path, seed_, num_layers)
    return models


@pytest.fixture(scope="session")
def tiny_engine(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of the tiny models, with a tree, a chain and off; read only."""
    from specc.config import CompileConfig
    from specc.speculation.plans import SpecPlan
    from tests import engines

    path = tmp_path_factory.mktemp("engines") / "tiny"
    plans = (SpecPlan.from_widths((2, 1)), SpecPlan.from_widths((1, 1, 1)))
    config = CompileConfig(plans=plans, max_seq_len=96, max_batch_size=4)
    return engines.build(tiny_models.target, tiny_models.draft, path, config, is_probed=True)


def save_tiny_llama(path: Path, seed: int, num_layers: int = 1, **options: Any) -> None:
    """Save a random Llama and a byte-level tokenizer; `options` go to its configuration."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": 260,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "bos_token_id": None,
            "eos_token_id": 256,
            "initializer_range": 0.2,
        }
        | options
    )
    LlamaForCausalLM(config).save_pretrained(path)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.fixture(scope="session")
def save_llama() -> Any:
    return save_tiny_llama
