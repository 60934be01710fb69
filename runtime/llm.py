"""`LLM(engine_dir).generate(prompts, SamplingParams(...))`, as vLLM's users know it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from specc.errors import RequestError
from specc.runtime.core import EngineCore
from specc.runtime.core_loop import CoreLoop, refuse_closed
from specc.runtime.draft_weights import DraftVersion
from specc.runtime.engine import Engine
from specc.runtime.engine_args import EngineArgs
from specc.runtime.outputs.request_output import OutputTexts, RequestOutput, StreamOutput, joined
from specc.runtime.policies.base import Policy
from specc.runtime.requests.call_options import Call, Seeds, read_call
from specc.runtime.requests.engine_tokenizer import Conversation, EngineTokenizer
from specc.runtime.requests.prompt_forms import Prompt
from specc.runtime.requests.tool_messages import render_chat
from specc.runtime.sleep import check_tags
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats
from specc.vllm.answers import refuses_calls
from specc.vllm.calls import METHODS

if TYPE_CHECKING:
    from specc.runtime.in_flight import InFlight
    from specc.runtime.runner import Runner
    from specc.runtime.scheduling.request import Request
    from specc.runtime.scheduling.scheduler import Scheduler

Params = SamplingParams | Sequence[SamplingParams]
# called with the number of finished prompts, of all prompts, and of output tokens so far
Progress = Callable[[int, int, int], object]


@refuses_calls(METHODS)
class LLM:
    """A loaded engine that serves requests, of any number of threads.

    Threads share iterations: whichever of them waits for output moves the requests of all of them
    on. `with LLM(…) as llm:` closes it at the end.

    Args:
        engine: engine directory, or an `Engine` that was loaded before.
        plan: speculation plan of every step; None is the engine's default, or, where it was
            compiled with combine="best", the better of two for every request; after `specc tune`,
            what was best for the number of requests.
        max_num_seqs: requests that run together; None is what the engine was compiled for. Not
            with a loaded `Engine`, which has its caches already.
        policy: picks the plan of each step instead of `plan`; or its name: `fixed`, `adaptive`
            (learns how long a chain pays), `best`, `profile`.
        verify: compare the files with the hashes of the manifest; None leaves out the weights.
        num_threads: threads of torch, for the whole process; None leaves them alone. Compiled
            programs keep the number that they were loaded with.
        backend: `eager` runs the graphs of any engine; None is what it was compiled for.
        kv_cache_tokens: rows of the cache, for all requests together; None is the worst case.
        shares_prefixes: rows of a prompt are looked for among those of earlier requests.
        model: `engine`, as vLLM calls it.
        seed: of requests that have none of their own: their seeds then follow from this one, in
            the order in which they come.
        max_model_len: tokens of prompt and output together; None is the engine's max_seq_len.
        enable_prefix_caching: `shares_prefixes`, as vLLM calls it.
        generation_config: where defaults of sampling come from, see `EngineArgs`.
        override_generation_config: over those, see `EngineArgs`.
        vllm: further options of vLLM's; what changes no output here is ignored with a warning.
    Raises:
        EngineError: the engine cannot be loaded.
        RequestError: the engine has no such plan.
        ConfigError: an option that specc has not got, or that asks for another engine.
    """

    def __init__(
        self,
        engine: str | Path | Engine | None = None,
        plan: str | None = None,
        max_num_seqs: int | None = None,
        *,
        policy: Policy | str | None = None,
        verify: bool | None = None,
        num_threads: int | None = None,
        backend: str | None = None,
        kv_cache_tokens: int | None = None,
        shares_prefixes: bool = True,
        model: str | Path | Engine | None = None,
        seed: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool | None = None,
        generation_config: str | Path = "auto",
        override_generation_config: Mapping[str, Any] | None = None,
        **vllm: Any,
    ) -> None:
        if model is not None:
            vllm["model"] = model
        if enable_prefix_caching is not None:
            shares_prefixes = enable_prefix_caching
        args = EngineArgs.of_engine(
            engine=engine,
            plan=plan,
            max_num_seqs=max_num_seqs,
            policy=policy,
            verify=verify,
            num_threads=num_threads,
            backend=backend,
            kv_cache_tokens=kv_cache_tokens,
            shares_prefixes=shares_prefixes,
            seed=seed,
            max_model_len=max_model_len,
            generation_config=generation_config,
            override_generation_config=override_generation_config,
            **vllm,
        )
        self._start(args)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """Open the engine that the options name, as they say.

        Raises:
            SpeccError: as `LLM`.
        """
        llm = cls.__new__(cls)
        llm._start(args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        core = args.make_core()
        self._seeds = Seeds(args.seed)
        self._core: EngineCore | None = core
        self._loop = CoreLoop(core)
        self._process = os.getpid()
        self._texts = OutputTexts(core.engine.tokenizer)

    @property
    def engine(self) -> Engine:
        """Raises RequestError: it is closed."""
        return self._open.engine

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where the engine has none."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> EngineTokenizer:
        """The model's tokenizer, with the methods that transformers' have.

        Raises:
            RequestError: the engine has none.
        """
        return EngineTokenizer(self._open)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete all prompts, batched continuously.

        Args:
            prompts: one prompt or a list; each a text, token ids (a list, an array or a tensor),
                or a dict with `prompt` or `prompt_token_ids`. A matrix holds a prompt a row.
            sampling_params: for all prompts, or one for each; None is what
                `get_default_sampling_params` gives.
            progress: called after every iteration with the number of finished prompts, of all
                prompts, and of output tokens so far.
            options: `params`, the same as `sampling_params`; `prompt_token_ids`, instead of
                `prompts`; `priority`, one for all or one for each, lower is served first;
                `lora_request`, the adapter that the target runs with, a `LoRARequest` or a name,
                likewise;
                `prediction`, what the output may be: a text, token ids, or as OpenAI's API has it,
                likewise, see `docs/guide/prediction.md`;
                `use_tqdm`, True or what makes a bar as tqdm does.
        Returns:
            one output a prompt, in order, with n outputs of its own each.
        Raises:
            RequestError: a prompt or its parameters are invalid; no work has started then.
        """
        core = self._open
        call = read_call(prompts, sampling_params, options, core.defaults.params())
        groups = self._make_requests(core, call, is_streamed=False)
        with call.bar(len(groups)) as show:
            requests = [request for group in groups for request in group]
            reports = [report for report in (progress, show) if report is not None]
            for _ in self._loop.serve(core, requests, by_iteration=bool(reports)):
                finished = sum(all(s.is_finished for s in group) for group in groups)
                num_tokens = sum(s.stats.num_output_tokens for group in groups for s in group)
                for report in reports:
                    report(finished, len(groups), num_tokens)
        return [
            self._texts.of(joined([request.to_output() for request in group])) for group in groups
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: Params | None = None,
        **options: Any,
    ) -> Iterator[StreamOutput]:
        """Complete all prompts and yield every token as it comes, `index` naming its prompt.

        Requests enter the engine with the first `next`; closing the iterator drops them. Several
        streams and `generate` may overlap, in one thread or in many: each moves all requests
        forward. One stream is for one thread at a time.

        Raises:
            RequestError: as `generate`, at the call.
        """
        core = self._open
        call = read_call(prompts, sampling_params, options, core.defaults.params())
        return self._stream(core, self._make_requests(core, call, is_streamed=True))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | None = None,
        *,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer conversations, by the chat template of the engine.

        Args:
            messages: one conversation or a list; each a list of dicts with `role` and `content`,
                and `tool_calls` where the assistant has called.
            sampling_params: for all conversations, or one for each.
            chat_template: another template: its Jinja, a file, or the name of one of the engine's.
            chat_template_content_format: whether it gets contents as `string`, or as `openai`, a
                list of parts; `auto` is whichever it reads.
            add_generation_prompt: end prompts where the assistant's answer begins.
            continue_final_message: end prompts where their last message does, so that the answer
                goes on with it; not with `add_generation_prompt`. A name is that of another field
                than content, such as reasoning_content.
            tools: that the model may call, as OpenAI's API has them, for all conversations; calls
                are a part of the text, see `specc.read_message`.
            chat_template_kwargs: further variables of the template.
            options: of `generate`.
        Returns:
            one output a conversation; `prompt` is the rendered text.
        Raises:
            RequestError: as `generate`; there is no template, or it refuses the messages, or does
                not read tools.
            ConfigError: the file holds no template.
        """
        core = self._open
        read_call(None, sampling_params, options, core.defaults.params(), is_chat=True)
        template = core.chat_template()
        is_one = not messages or isinstance(messages[0], Mapping)
        prompts = []
        for conversation in [messages] if is_one else messages:
            text = render_chat(
                template,
                conversation,  # type: ignore[arg-type]
                add_generation_prompt,
                tools,
                chat_template_kwargs,
                chat_template=chat_template,
                continue_final_message=continue_final_message,
                content_format=chat_template_content_format,
            )
            token_ids = core.requests.tokenize(text, has_special_tokens=True)
            prompts.append({"prompt": text, "prompt_token_ids": token_ids})
        return self.generate(prompts, sampling_params, **options)

    @property
    def default_options(self) -> Mapping[str, Any]:
        """Options of `SamplingParams` that the checkpoint has its own defaults of."""
        return self._open.defaults.values

    def get_default_sampling_params(self) -> SamplingParams:
        """Options of calls without any: the checkpoint's, over those of `SamplingParams`."""
        return self._open.defaults.params()

    def get_metrics(self) -> SpecStats:
        """Counters of all requests since the engine was loaded; a copy."""
        core = self._open
        if core.engine.turn.is_mine:
            return core.scheduler.stats.copy()
        with core.engine.turn:
            return core.scheduler.stats.copy()

    def reload_draft(self, path: str | Path, draft: str | None = None) -> DraftVersion:
        """Give a draft other weights, between two steps; requests go on, with the same outputs.

        Args:
            path: of a file that `specc draft-weights` has written for this engine.
            draft: `draft_0`, …; None is the only one.
        Returns:
            the version that the draft has now.
        Raises:
            WeightError: the file is another engine's, or not all of it may be taken. The draft has
                the weights that it had.
            ConfigError: the engine has no such draft, or none that takes weights.
        """
        engine = self.engine
        new = engine.draft_weights.read(path, draft)
        return self._loop.between_steps(engine, lambda: engine.draft_weights.put(new))

    def sleep(self, level: int = 1) -> None:
        """Let weights and caches leave memory, until `wake_up`; prefixes are forgotten.

        Args:
            level: 1, as vLLM calls it.
        Raises:
            RequestError: requests are under way; or another level.
            ConfigError: an engine that cannot sleep.
            OutputError: no room on disk for weights that were loaded since the engine was.
        """
        engine = self.engine
        self._loop.between_steps(engine, lambda: engine.sleep.begin(level))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have weights and caches in memory again; where they are, nothing happens.

        Args:
            tags: as of vLLM: `weights` and `kv_cache`, both; None is all.
        Raises:
            RequestError: one without the other.
            EngineError: a file of the engine has been altered meanwhile.
        """
        check_tags(tags)
        engine = self.engine
        self._loop.between_steps(engine, engine.sleep.end)

    @property
    def is_sleeping(self) -> bool:
        return self.engine.sleep.is_asleep

    def close(self) -> None:
        """Drop all requests and release weights and caches; whoever still waits gets an error.

        An `Engine` that was loaded before stays its owner's. Closing twice does nothing.
        """
        core, self._core = self._core, None
        if core is None or self._process != os.getpid():
            return
        self._loop.close(core)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _open(self) -> EngineCore:
        """Raises RequestError: it is closed, or this is a child of the process that loaded it."""
        if self._core is None:
            refuse_closed()
        if self._process != os.getpid():
            raise RequestError(
                "an LLM in a process that was forked from the one that loaded it",
                "a process that loads its own: threads and locks do not survive a fork",
                'make the LLM in the child, or start processes with the method "spawn"',
            )
        assert self._core is not None
        return self._core

    @property
    def _scheduler(self) -> Scheduler:
        return self._open.scheduler

    @property
    def _runner(self) -> Runner:
        return self._open.runner

    @property
    def _in_flight(self) -> InFlight:
        return self._open.in_flight

    def _stream(self, core: EngineCore, groups: list[list[Request]]) -> Iterator[StreamOutput]:
        requests = [request for group in groups for request in group]
        for _ in self._loop.serve(core, requests, by_event=True):
            for request in requests:
                while request.events:
                    yield self._texts.of_event(request.events.popleft())

    def _make_requests(
        self, core: EngineCore, call: Call, is_streamed: bool
    ) -> list[list[Request]]:
        groups = []
        for index, (prompt, params) in enumerate(zip(call.prompts, call.params, strict=True)):
            groups.append(
                core.requests.make_outputs(
                    prompt,
                    self._seeds.give(params),
                    index=index,
                    is_streamed=is_streamed,
                    priority=call.priorities[index],
                    prediction=call.predictions[index],
                )
            )
        return groups
