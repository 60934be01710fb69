"""Options of `specc compile`: what the models become, and how drafts work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specc.option import option

if TYPE_CHECKING:
    from specc.config import CompileConfig
    from specc.speculation.plans import SpecPlan


@dataclass(frozen=True)
class DraftOptions:
    """What proposes tokens, and in which shape."""

    drafts: tuple[str, ...] = option(
        (),
        "What proposes tokens: a draft model, an EAGLE-3 head, a block drafter or Medusa heads, by"
        " directory or hub id; self:window=W,sink=S, the target itself, which sees"
        " the last W and the first S tokens of its context (S is 4 by default), with blocks=B also"
        " the blocks of B tokens that it attended to most; self:layers=0-3 or self:skip=4-5, the"
        " target by some of its layers, also with ,window=W; self:int8, self:int4 or self:fp8, the"
        " target with rounded weights, also with the others; lookup:N, which"
        " repeats what followed the last N tokens earlier in the request; suffix, which searches"
        " earlier outputs, too; or mtp, the MTP module in the target's own checkpoint. Repeat the"
        " option for several. Without it, the engine does not speculate.",
        "--draft",
        metavar="DRAFT",
    )
    combine: str | None = option(
        None,
        "How several drafts work together: merge verifies all proposals as one tree (the default),"
        " vote verifies the chain that most drafts agree on, best asks for each sequence the model"
        " or the lookup, whichever promises more.",
    )
    trees: tuple[str, ...] = option(
        (),
        "Shape of the proposals: how many children each node of a level gets, or"
        " dynamic:NODES,CHILDREN,LEVELS for a tree that the draft chooses anew at every step."
        " Repeat the option for several plans; the first is the default.",
        "--tree",
        metavar="W1,W2,…",
    )
    num_speculative_tokens: int | None = option(
        None,
        "Propose a chain of this many tokens instead of a tree. The default is 4, and 8 for"
        " lookups.",
    )
    speculative_config: str | None = option(
        None,
        "The same in vLLM's form, as JSON: method (draft_model, eagle3, dflash, dspark, medusa,"
        " mtp, ngram or suffix), model, num_speculative_tokens and a few more; instead of --draft,"
        " --tree, --combine and --num-speculative-tokens.",
        "--speculative-config",
        "-sc",
        metavar="JSON",
    )


@dataclass(frozen=True)
class CompileOptions:
    """Options of `CompileConfig`, which validates them."""

    dtype: str = option(
        "float32",
        "Type of weights and arithmetic: float32, bfloat16 (bf16), float16 (fp16, half; not for the"
        " backends cpu and eager), or auto, the type of the checkpoint.",
    )
    draft_dtypes: tuple[str, ...] = option(
        (),
        "The same for the draft models: once for all of them, or once for each. The default is the"
        " type of the target.",
        "--draft-dtype",
    )
    draft_kv: tuple[str, ...] = option(
        (),
        "Rows of their caches that draft models attend to: window=W,sink=S, the last W and the"
        " first S (4 by default), or full. A draft with rotary positions then works past the length"
        " that it was trained for. Once for all of them, or once for each.",
        "--draft-kv",
        metavar="window=W",
    )
    draft_assume: tuple[str, ...] = option(
        (),
        "What to take for what files of EAGLE-3 heads, MTP modules and block drafters leave open,"
        " or say in a way that not all of their readers share: tap_convention=entering|after (what"
        " ids of the target's layers mean), is_last_normed=true|false (of a hidden state after the"
        " last layer, whether it has gone through the final norm), norm_before_residual=true|false"
        " (EAGLE-3), sample_from_anchor=true|false (block drafters: the newest token's row proposes"
        " the next one); several with commas, or files. The default is what the files say, or else"
        " what their own trainer does. Once for all of them, or once for each draft.",
        "--draft-assume",
        metavar="NAME=VALUE",
    )
    quantize: str | None = option(
        None,
        "Store the weights of projections in 8 or 4 bits, which saves memory, and on CPUs time:"
        " int8 or fp8 (e4m3), with a scale for each output, or int4, with one for each group of"
        " columns. Drafts that read hidden states (heads) stay as they are."
        " Outputs are those of the rounded weights. onnx has no fp8.",
        metavar="int8|int4|fp8",
    )
    quantize_group: int | None = option(
        None,
        "How many columns share a scale, with --quantize int4 or int8: 32, 64 or 128. Smaller"
        " groups are more exact and larger. The default is 64 with int4, and with int8 all of an"
        " output.",
    )
    activation_bits: int | None = option(
        None,
        "How many bits the values have that weights in int8 or int4 multiply: 8, as llama.cpp and"
        " OpenVINO have it, faster where a pass has several tokens (trees, prompts) and less exact,"
        " or 16. The default is 24 in float32 and 16 in bfloat16, as good as no rounding."
        " For the backends cpu and eager.",
        metavar="8|16",
    )
    weight_only: bool = option(
        False,
        "Of checkpoints that quantize activations, too, take the weights and leave activations as"
        " they are; without it they are refused.",
        "--weight-only",
    )
    max_batch_size: int = option(8, "How many sequences can decode together.")
    max_seq_len: int | None = option(
        None,
        "How many tokens a prompt and its output can have together. The default is what the models"
        " allow, at most 4096.",
    )
    rope_length: int | None = option(
        None,
        "Rotate every position as transformers does in a pass of this many tokens: for models whose"
        " rotary scaling (dynamic, longrope) depends on length, beyond the length that they were"
        " trained for. Outputs differ from those of transformers where a pass is shorter.",
    )
    block_size: int = option(
        16,
        "How many tokens a block of the KV cache holds; 0 makes one block for each sequence.",
    )
    kv_cache_tokens: int | None = option(
        None,
        "How many tokens the KV cache holds, for all sequences together: where it is full, the"
        " newest gives way. The default is the worst case, --max-batch-size times --max-seq-len.",
    )
    kv_cache_dtype: str = option(
        "auto",
        "How the KV cache holds rows: auto, in the type of the model, or int8 (backends cpu and"
        " eager), a fourth to a half of the bytes, rounded to 8 bits with a scale for each token"
        " and KV head. Outputs differ a little from those of auto; speculation stays lossless.",
    )
    mla_cache: str = option(
        "auto",
        "What the KV cache holds of models with multi-head latent attention (DeepSeek V2 and V3):"
        " latent, what keys and values are expanded from, once for all heads, which takes more"
        " arithmetic a token of context (backends cpu, cuda, eager and onnx); expanded, keys and"
        " values of each head; or auto, latent where that takes fewer bytes or, on cuda and onnx,"
        " keys and values have two widths. On cuda layers of one width stay expanded where a"
        " self-draft chooses blocks and latents are too wide to vote on them.",
    )
    prefill_chunk: int | None = option(
        None,
        "How many tokens of prompts one pass takes at most. The default is 2048 for cuda, where the"
        " memory of such a pass is no more than --max-logits-mb, and 512 for others.",
    )
    max_logits_mb: int = option(
        512,
        "How many MiB of logits a step may hold. Trees that need more are verified in tiles, which"
        " the rules mss and swor do not allow.",
    )
    backend: str | None = option(
        None,
        "What will run the engine: cpu (code compiled for this machine), eager (compiles in seconds"
        " and runs several times slower), cuda (a GPU, with Triton), onnx (onnxruntime) or tensorrt"
        " (experimental). The default is cuda where a GPU of compute capability 9.0 and Triton are,"
        " else cpu where there is a C++ compiler, else eager.",
    )
    compute_capability: str | None = option(
        None,
        "Compute capability of the GPU that a TensorRT engine is for, such as 8.9. The default is"
        " every GPU that TensorRT-RTX builds for, or the one that TensorRT finds.",
        metavar="X.Y",
    )
    decomposable_attention: bool = option(
        False,
        "Let TensorRT compute attention by several kernels where it has no fused one, as for"
        " float32.",
    )
    tensor_parallel_size: int = option(
        1,
        "How many ranks share the target: each holds a part of its heads, inner features and"
        " vocabulary, in a weight file of its own.",
        "--tensor-parallel-size",
        "-tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "How many stages the target has: each holds some of its layers, on as many ranks as"
        " --tensor-parallel-size says, and hands on to the next what it has computed.",
        "--pipeline-parallel-size",
        "-pp",
    )
    draft_tensor_parallel_size: int = option(
        1,
        "How many ranks share each draft model: 1, which is rank 0, or as many as share the"
        " target.",
    )
    draft_ranks: int = option(
        1,
        "How many ranks the draft models are spread over, in turn: several then draft at the same"
        " time, each on its own rank. 1 is rank 0.",
    )
    segments: bool = option(
        False,
        "Compile the target as segments, layer by layer: equal layers are one program, so deep"
        " models compile in a fraction of the time and memory, and run a little slower. Such"
        " engines take --offload-weights.",
        "--segments",
    )
    allow_nonfinite_weights: bool = option(
        False,
        "Compile weights that are NaN or infinite, or too large for --dtype; without it they are"
        " refused.",
    )
    probe: bool = option(
        True,
        "Generate a few dozen tokens at the end and report how many are accepted.",
        "--probe/--no-probe",
    )

    def config(self, plans: tuple[SpecPlan, ...], policy: str) -> CompileConfig:
        """Raises ConfigError: a value outside its range, or options that exclude each other."""
        from specc.config import CompileConfig

        return CompileConfig(plans=plans, policy=policy, **vars(self))
