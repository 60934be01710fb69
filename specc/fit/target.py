"""The target that a draft is fitted to: a module of torch, whatever its checkpoint is.

Weights come from the readers that `specc compile` has: GGUF files and quantized checkpoints are
computed with as what they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specc.artifact.weight_spec import WeightSpec
from specc.artifact.weights import read_weight
from specc.errors import ConfigError, NotCausalLMError
from specc.fit.optimizer import autocast
from specc.fit.texts import Texts
from specc.passes.frontend.buffer_values import buffer_values
from specc.passes.frontend.hf_model import eos_token_ids, max_position, quiet_transformers
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.trace import trace
from specc.passes.pipeline import TRACED_PHASES, Pipeline
from specc.passes.residual import layer_regions
from specc.progress import Advance

# the target's likeliest tokens that are kept at each place
TOP = 64
# numbers of logits that one pass makes at most: 512 MiB in float32
_MOST_LOGITS = 1 << 27
_MOST_ROWS = 32
# ids whose largest logit is looked for at once, and rows
_GROUP, _LOGIT_ROWS = 512, 64
# of configurations: numbers that embeddings or logits are multiplied with, or capped at
_SCALES = (
    "final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier",
    "scale_emb", "lm_head_multiplier",
)  # fmt: skip
# beyond, a draft takes days here: parameters on a CPU, and on a GPU
_MOST_PARAMETERS = {"cpu": 3_000_000_000, "cuda": 15_000_000_000}
_UNREADABLE = "choose a draft that reads no hidden states: a smaller model, suffix, or self:…"
_TRAINERS = (
    "train with SpecForge (sgl-project) or speculators (vllm-project), whose files"
    " specc compile --draft reads"
)


@dataclass(frozen=True)
class Sizes:
    """What a draft has to know of its target.

    Args:
        width: H.
        num_layers: n.
        vocab_size: V.
        eps: of norms.
        bos_token_id: that texts begin with, or None.
        eos_token_id: one of those that end them, or None.
        embedding: [V, H] of the target.
        output: [V, H] of its head.
        is_scaled: embeddings or logits are multiplied with a number, or capped, which no row of
            these says.
    """

    width: int
    num_layers: int
    vocab_size: int
    eps: float
    bos_token_id: int | None
    eos_token_id: int | None
    embedding: Tensor
    output: Tensor
    is_scaled: bool = False

    def default_taps(self) -> tuple[int, ...]:
        """Boundaries that readers take where nobody names others, and some of small targets."""
        n = self.num_layers
        if n >= 8:
            return 2, n // 2, n - 3
        # not 1 first, which readers take for lists that count otherwise
        return tuple(sorted({0, min(2, n - 1), n - 1}))


class Target:
    """A language model, on the device where it computes.

    Args:
        module: of transformers, in float32 on a CPU, in bfloat16 elsewhere.
        label: what the user called it.
        directory: of its checkpoint.
        ends: ids of tokens that end a text.
        warnings: what the user should know.
    """

    def __init__(
        self,
        module: Any,
        label: str,
        directory: Path | None,
        ends: Sequence[int],
        warnings: Sequence[str] = (),
    ) -> None:
        # parameters ask for gradients, which nobody computes: autocast keeps what it makes of them
        self.module = module.eval()
        self.label, self.directory = label, directory
        self.ends, self.warnings = tuple(ends), tuple(warnings)
        self.device = next(module.parameters()).device
        self._layers = _layers_of(module, label)
        # of products, where they need not be as exact as an engine's
        self._is_mixed = self.device.type != "cpu" or _has_bfloat16()

    @classmethod
    def load(cls, label: str, device: str, advance: Advance) -> Target:
        """Read a checkpoint as `specc compile` does.

        Args:
            label: directory, GGUF file or hub id.
            device: of torch.
            advance: told how many parameters are read.
        Raises:
            SpeccError: as of a compilation's target.
            ConfigError: it is too large to fit a draft to it here.
        """
        source = ModelSource.load("target", label, torch.float32)
        kind = torch.device(device).type
        count = sum(p.numel() for p in source.module.parameters())
        if count > (most := _MOST_PARAMETERS.get(kind, _MOST_PARAMETERS["cuda"])):
            raise ConfigError(
                f"a target of {count / 1e9:.1f} billion parameters, on {kind}",
                f"{most / 1e9:.0f} billion or less: above, fitting a draft is a task of days",
                _TRAINERS,
            )
        # before any weight is read: a model whose hidden states no engine can keep is refused, and
        # layers are those that a compilation counts
        program = trace(source.module, source.name, source.rope_length)
        Pipeline(TRACED_PHASES).run(program)
        num_layers = len(layer_regions(program, _UNREADABLE))
        found = len(_layers_of(source.module, label))
        if found != num_layers:
            raise NotCausalLMError(
                f"{label}: {found} layers, {num_layers} of which mix tokens",
                "layers each of which has attention or a recurrence",
                _UNREADABLE,
            )
        dtype = torch.float32 if kind == "cpu" else torch.bfloat16
        _materialize(source, dtype, device, advance)
        ends = eos_token_ids(source.directory, source.config)
        return cls(source.module, label, source.directory, ends, source.warnings)

    @property
    def sizes(self) -> Sizes:
        """What a draft has to know."""
        config = self.module.config.get_text_config()
        embedding: Any = self.module.get_input_embeddings()
        output: Any = self.module.get_output_embeddings()
        known = [getattr(config, name, None) for name in _SCALES]
        scale = getattr(embedding, "embed_scale", None)
        is_scaled = any(x not in (None, 1, 1.0) for x in known) or (
            scale is not None and float(scale) != 1.0
        )
        eps = getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None) or 1e-6
        return Sizes(
            width=embedding.weight.shape[1],
            num_layers=len(self._layers),
            vocab_size=embedding.weight.shape[0],
            eps=float(eps),
            bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
            eos_token_id=self.ends[0] if self.ends else None,
            embedding=embedding.weight.detach(),
            output=output.weight.detach(),
            is_scaled=is_scaled,
        )

    @property
    def max_position(self) -> int | None:
        """Tokens of its longest text, where it says that."""
        return max_position(self.module.config.get_text_config())

    @torch.no_grad()
    def read(
        self,
        tokens: Tensor,
        boundaries: Sequence[int],
        begins: Tensor,
        ends: Tensor,
        is_greedy: bool,
        is_exact: bool = False,
    ) -> Texts:
        """What the target computes along texts.

        Args:
            tokens: [rows, length] int64, filled up on the right.
            boundaries: of the hidden states to keep; b is what enters layer b.
            begins: see `Texts`.
            ends: see `Texts`.
            is_greedy: see `Texts`, of all rows.
            is_exact: float32 throughout, where the target is.
        Returns:
            texts on the CPU.
        """
        parts = []
        with self._tapped(boundaries) as taps, self._products(is_exact):
            for part in tokens.split(self.num_rows(tokens.shape[1])):
                logits = self.module(input_ids=part.to(self.device), use_cache=False).logits
                ids, odds = likeliest(logits)
                kept = torch.cat([taps[b] for b in boundaries], -1)
                kept = kept if is_exact else kept.bfloat16()
                parts.append([kept.cpu(), ids.cpu(), odds.cpu()])
        states, ids, shares = (torch.cat(one) for one in zip(*parts, strict=True))
        flags = torch.full((len(tokens),), is_greedy)
        return Texts(tokens.cpu(), states, ids, shares, begins.cpu(), ends.cpu(), flags)

    @torch.no_grad()
    def write(
        self, prompts: Sequence[Sequence[int]], length: int, temperature: float, is_exact: bool
    ) -> list[list[int]]:
        """Let the target go on with prompts, up to its end of a text or so many tokens.

        Args:
            prompts: token ids, of any lengths.
            length: tokens to add, at most.
            temperature: 0 is greedy.
            is_exact: see `read`.
        Returns:
            the prompts with what comes after them.
        """
        longest, fill = max(map(len, prompts)), self.ends[0] if self.ends else 0
        padded = [[fill] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        # top_k: else the library keeps the best 50
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        with self._products(is_exact), quiet_transformers():
            written = self.module.generate(
                torch.tensor(padded, device=self.device),
                attention_mask=torch.tensor(seen, device=self.device),
                max_new_tokens=length,
                eos_token_id=list(self.ends) or None,
                pad_token_id=fill,
                **(how if temperature else {"do_sample": False}),
            )
        rows = []
        for prompt, row in zip(prompts, written[:, longest:].tolist(), strict=True):
            stop = next((i + 1 for i, token in enumerate(row) if token in self.ends), len(row))
            rows.append([*prompt, *row[:stop]])
        return rows

    def num_rows(self, length: int) -> int:
        """Rows of a pass over texts of so many tokens."""
        vocab_size = self.module.get_input_embeddings().weight.shape[0]
        return max(1, min(_MOST_ROWS, _MOST_LOGITS // (vocab_size * length)))

    @contextmanager
    def _products(self, is_exact: bool) -> Iterator[None]:
        with ExitStack() as stack:
            if self._is_mixed and not is_exact and self.device.type == "cpu":
                stack.enter_context(autocast())
            yield

    @contextmanager
    def _tapped(self, boundaries: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """What enters these layers in the passes meanwhile, by boundary."""
        found: dict[int, Tensor] = {}

        def hook(boundary: int) -> Any:
            def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
                found[boundary] = args[0] if args else kwargs["hidden_states"]

            return keep

        with ExitStack() as stack:
            for b in boundaries:
                handle = self._layers[b].register_forward_pre_hook(hook(b), with_kwargs=True)
                stack.callback(handle.remove)
            yield found


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens, best first.

    Args:
        logits: [rows, length, V].
    Returns:
        ids [rows, length, K] int32, K being `TOP` or less; their probabilities in bfloat16.
    """
    vocab_size = logits.shape[-1]
    count = min(TOP, vocab_size)
    size = math.gcd(vocab_size, _GROUP)
    ids, odds = [], []
    for part in logits.flatten(0, 1).split(_LOGIT_ROWS):
        wide = part.float()
        if size * count < vocab_size // 2:
            # they are all in so many groups of ids, those with the largest maxima
            groups = wide.view(len(wide), -1, size).amax(-1).topk(count).indices.sort().values
            among = (groups[..., None] * size + torch.arange(size, device=wide.device)).flatten(1)
            best = wide.gather(1, among).topk(count)
            chosen = among.gather(1, best.indices)
        else:
            best = wide.topk(count)
            chosen = best.indices
        ids.append(chosen.to(torch.int32))
        odds.append((best.values - wide.logsumexp(-1, keepdim=True)).exp().bfloat16())
    shape = (*logits.shape[:2], count)
    return torch.cat(ids).view(shape), torch.cat(odds).view(shape)


def _layers_of(module: Any, label: str) -> Sequence[nn.Module]:
    """The layers, as many as the configuration says.

    Raises:
        NotCausalLMError: the module does not say which they are.
    """
    count = module.config.get_text_config().num_hidden_layers
    decoder = module.get_decoder()
    lists = [x for x in decoder.modules() if isinstance(x, nn.ModuleList) and len(x) == count]
    if not lists:
        raise NotCausalLMError(
            f"{label}: {type(module).__name__}, whose {count} layers are no list of modules",
            "a model whose layers follow one another",
            _UNREADABLE,
        )
    return list(lists[0])


def _materialize(source: ModelSource, dtype: torch.dtype, device: str, advance: Advance) -> None:
    """Give a module on the meta device its values."""
    module, sources_of = source.module, source.parameter_sources()

    def read(name: str, like: Tensor, kind: torch.dtype) -> Tensor:
        spec = WeightSpec(name, kind, tuple(like.shape), sources_of(name))
        return read_weight(spec, source.reader).to(device)

    buffers = dict(module.named_buffers(remove_duplicate=False))
    saved = buffers.keys() & module.state_dict().keys()
    values = buffer_values(module, set(buffers) - saved)
    values |= {name: read(name, buffers[name], buffers[name].dtype) for name in saved}
    for name, value in values.items():
        owner, leaf = _place(module, name)
        owner._buffers[leaf] = value.to(device)
    # tied ones are read once
    made: dict[int, nn.Parameter] = {}
    named = dict(module.named_parameters(remove_duplicate=False))
    for number, (name, parameter) in enumerate(named.items()):
        advance(number, len(named))
        if id(parameter) not in made:
            value = read(name, parameter, dtype)
            made[id(parameter)] = nn.Parameter(value, value.is_floating_point())
        owner, leaf = _place(module, name)
        owner._parameters[leaf] = made[id(parameter)]
    advance(len(named), len(named))


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _has_bfloat16() -> bool:
    """Whether this processor multiplies in bfloat16 in less time than in float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
