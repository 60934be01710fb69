"""Inputs and outputs of specc's model in the Triton Inference Server.

The names are those of NVIDIA's OpenAI front end and of the backends that its users know; what
specc adds is named as in `SamplingParams`. The model batches by itself, so its `max_batch_size` is
0 and Triton compares whole shapes: [1, 1] for one value, [1, n] for several, as that front end
sends them.
"""

from __future__ import annotations

from dataclasses import dataclass

ONE = (1, 1)
MANY = (1, -1)


@dataclass(frozen=True)
class TritonTensor:
    """A tensor by its name in requests and responses.

    Args:
        kind: Triton's name of its type, without `TYPE_`.
        dims: shape; -1 is any length.
    """

    name: str
    kind: str
    dims: tuple[int, int] = ONE

    @property
    def holds_many(self) -> bool:
        return self.dims == MANY

    @property
    def data_type(self) -> str:
        return f"TYPE_{self.kind}"


# all are optional; either text_input or input_ids has to be there
INPUTS = (
    TritonTensor("text_input", "STRING"),
    TritonTensor("input_ids", "INT32", MANY),
    TritonTensor("stream", "BOOL"),
    TritonTensor("max_tokens", "INT32"),
    TritonTensor("stop_words", "STRING", MANY),
    TritonTensor("stop_token_ids", "INT32", MANY),
    TritonTensor("min_tokens", "INT32"),
    TritonTensor("allowed_token_ids", "INT32", MANY),
    TritonTensor("bad_words", "STRING", MANY),
    TritonTensor("logit_bias_ids", "INT32", MANY),
    TritonTensor("logit_bias_values", "FP32", MANY),
    TritonTensor("temperature", "FP32"),
    TritonTensor("top_p", "FP32"),
    TritonTensor("top_k", "INT32"),
    TritonTensor("min_p", "FP32"),
    TritonTensor("repetition_penalty", "FP32"),
    TritonTensor("presence_penalty", "FP32"),
    TritonTensor("frequency_penalty", "FP32"),
    TritonTensor("seed", "UINT64"),
    TritonTensor("rule", "STRING"),
    TritonTensor("logprobs", "INT32"),
    TritonTensor("prompt_logprobs", "INT32"),
    TritonTensor("lora", "STRING"),
    TritonTensor("ignore_eos", "BOOL"),
    TritonTensor("include_stop_str_in_output", "BOOL"),
    TritonTensor("skip_special_tokens", "BOOL"),
    TritonTensor("speculative", "BOOL"),
    TritonTensor("guided_decoding_guide_type", "STRING"),
    TritonTensor("guided_decoding_guide", "STRING"),
    TritonTensor("prediction", "STRING"),
    TritonTensor("cache_salt", "STRING"),
    TritonTensor("priority", "INT32"),
    TritonTensor("timeout", "FP32"),
    TritonTensor("exclude_input_in_output", "BOOL"),
    TritonTensor("return_num_input_tokens", "BOOL"),
    TritonTensor("return_num_output_tokens", "BOOL"),
    TritonTensor("return_output_ids", "BOOL"),
    TritonTensor("return_perf_metrics", "BOOL"),
)

TEXT = TritonTensor("text_output", "STRING")
FINISH_REASON = TritonTensor("finish_reason", "STRING")
OUTPUT_IDS = TritonTensor("output_ids", "INT32", MANY)
NUM_INPUT_TOKENS = TritonTensor("num_input_tokens", "UINT32")
NUM_OUTPUT_TOKENS = TritonTensor("num_output_tokens", "UINT32")
LOGPROBS = TritonTensor("logprobs", "STRING")
CUMULATIVE_LOGPROB = TritonTensor("cumulative_logprob", "FP32")
PROMPT_LOGPROBS = TritonTensor("prompt_logprobs", "STRING")
# of a whole request
PERF_METRICS = (
    TritonTensor("acceptance_rate", "FP32"),
    TritonTensor("mean_acceptance_length", "FP32"),
    TritonTensor("total_accepted_draft_tokens", "INT32"),
    TritonTensor("total_draft_tokens", "INT32"),
    TritonTensor("accepted_prediction_tokens", "INT32"),
    TritonTensor("rejected_prediction_tokens", "INT32"),
    TritonTensor("arrival_time_ns", "INT64"),
    TritonTensor("first_scheduled_time_ns", "INT64"),
    TritonTensor("first_token_time_ns", "INT64"),
    TritonTensor("last_token_time_ns", "INT64"),
)
OUTPUTS = (
    TEXT,
    FINISH_REASON,
    OUTPUT_IDS,
    NUM_INPUT_TOKENS,
    NUM_OUTPUT_TOKENS,
    LOGPROBS,
    CUMULATIVE_LOGPROB,
    PROMPT_LOGPROBS,
    *PERF_METRICS,
)
